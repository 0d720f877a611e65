"""Sphinx extension that completes the links of `sphinx.ext.viewcode` between the API reference and the source code.

Viewcode assumes that a page describes all names of a module under the same package. Here, some names of a module are
described as names of `pytorchrl`, and others as names of the module. This extension corrects the links from the source
code, and leaves out modules of other packages.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_BACK = re.compile(r'(id="(?P<name>[\w.]+)">\s*<a class="viewcode-back" href=")[^"]*"')


def _home(module: str, name: str) -> str | None:
    """Return the module that defines a name of `module`; None if there is no such module."""
    try:
        value: object = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for part in name.split("."):
        value = getattr(value, part, None)
    return getattr(value, "__module__", None) or module


def _follow(app: Sphinx, module: str | None, name: str) -> str | None:
    """Return the module whose page shows the source code of a name: a module of the same package."""
    home = _home(module, name) if module else None
    return home if home and module and home.split(".")[0] == module.split(".")[0] else module


def _correct(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Let each link of a page with source code lead to the entry that the API reference has for the object."""
    if not page.startswith("_modules/pytorchrl"):
        return
    module = page.removeprefix("_modules/").replace("/", ".")
    described = app.env.domains.python_domain.objects

    def corrected(link: re.Match[str]) -> str:
        name = link["name"]
        full = next(full for full in described if full.endswith(f".{name}") and (
            full == f"{module}.{name}" or _home(full.removesuffix(f".{name}"), name) == module))
        return f'{link[1]}{app.builder.get_relative_uri(page, described[full].docname)}#{full}"'

    context["body"] = _BACK.sub(corrected, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above."""
    app.connect("viewcode-follow-imported", _follow)
    app.connect("html-page-context", _correct)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
