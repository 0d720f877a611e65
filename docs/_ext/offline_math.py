"""Sphinx extension that typesets formulas as MathML, which browsers show without a script and without a network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _visit(translator: Any, node: nodes.Element, display: str) -> None:
    formula = convert(node.astext(), display=display)
    translator.body.append(f'<div class="math">{formula}</div>' if display == "block" else formula)
    raise nodes.SkipNode


def _inline(translator: Any, node: nodes.Element) -> None:
    _visit(translator, node, "inline")


def _block(translator: Any, node: nodes.Element) -> None:
    _visit(translator, node, "block")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderers under the name that `html_math_renderer` selects."""
    app.add_html_math_renderer("offline_math", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
