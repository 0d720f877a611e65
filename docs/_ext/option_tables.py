"""Sphinx directives that generate the tables of options and flags from the code, so that the tables stay up to date.

`{option-table} PPO` lists the fields of `pytorchrl.PPO.Options`, and `{option-table} Scheme` the keyword arguments of
`Scheme`. `{flag-table} ppo` lists the flags of `pytorchrl train ppo`, in groups. `{names-table}` lists the names of
options in other libraries, and the corresponding options here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import pytorchrl
from pytorchrl.agent.names_elsewhere import HOMES, Here, elsewhere, of_other_libraries
from pytorchrl.agent.option_values.text import form_of, to_python
from pytorchrl.cli.parsing import flag_of, titles, values_of
from pytorchrl.scheme.options.settings import LEVELS, declaration_of, default_of_keyword, names_of_level
from pytorchrl.training.composition import OptionSpec, option_specs


class OptionTable(Directive):
    """Directive that lists the options of one class: name, default, allowed values, and meaning."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table, or of one table per level for `Scheme`."""
        name = self.arguments[0]
        if name == "Scheme":
            return [node for level in LEVELS for node in _level_table(level)]
        rows = [_option_row(field) for field in dataclasses.fields(getattr(pytorchrl, name).Options)]
        return [_table(("Option", "Default", "Allowed", "Meaning"), (20, 15, 20, 45), rows)]


def _level_table(level: str) -> list[nodes.Node]:
    """Return the title and the table of a level's options."""
    rows = []
    for name in names_of_level(level):
        declaration = declaration_of(name)
        allowed = declaration.choices
        rows.append((
            (name,), (to_python(default_of_keyword(name)),),
            _range(declaration.field.metadata) if allowed is None else tuple(map(to_python, allowed)),
            _sentence(declaration.help)))
    heads, widths = ("Option", "Default", "Allowed", "Meaning"), (20, 15, 20, 45)
    return [nodes.rubric(text=level[0].upper() + level[1:]), _table(heads, widths, rows)]


class FlagTable(Directive):
    """Directive that lists the flags of `pytorchrl train ALGORITHM`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of one title and one table per group of flags."""
        specs = [spec for spec in option_specs(self.arguments[0]).values() if form_of(spec.hint)]
        found: list[nodes.Node] = []
        for group, title in titles().items():
            rows = [_flag_row(spec) for spec in specs if spec.group == group]
            table = _table(("Flag", "Value", "Meaning"), (25, 25, 50), rows)
            found += [nodes.rubric(text=title[0].upper() + title[1:]), table]
        return found


class NamesTable(Directive):
    """Directive that lists the names of options in other libraries, and the corresponding options here."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table."""
        rows = [((name,), _meaning(here), _marked(_sentence(here.note)) if here.note else "")
                for name in of_other_libraries() for here in elsewhere()[name]]
        return [_table(("Elsewhere", "Here", "Remark"), (25, 40, 35), rows)]


def _meaning(here: Here) -> nodes.paragraph:
    """Return a paragraph that names the options that replace an option of another library, each with its owner."""
    paragraph = nodes.paragraph()
    for number, (home, name) in enumerate(here.options):
        if number:
            paragraph += nodes.Text(" and " if here.needs_all else " or ")
        paragraph += [nodes.literal(text=name), nodes.Text(f" of the {HOMES[home]}")]
    return paragraph


def _marked(text: str) -> nodes.paragraph:
    """Return a paragraph in which text between backticks is shown as code."""
    paragraph = nodes.paragraph()
    for number, piece in enumerate(text.split("`")):
        if piece:
            paragraph += nodes.literal(text=piece) if number % 2 else nodes.Text(piece)
    return paragraph


def _option_row(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    metadata = field.metadata
    if field.default is not dataclasses.MISSING:
        default: Any = (to_python(field.default),)
    elif field.default_factory is not dataclasses.MISSING:
        default = (to_python(field.default_factory()),)
    else:
        default = "required"
    if metadata["choices"] is not None:
        allowed: Any = tuple(map(to_python, metadata["choices"]))
    else:
        allowed = _range(metadata)
    text = _sentence(metadata["help"]) + (" May change while training." if metadata["updatable"] else "")
    return (field.name,), default, allowed, text


def _flag_row(spec: OptionSpec) -> tuple[Any, ...]:
    return (flag_of(spec.name),), (values_of(spec),), _sentence(spec.help)


def _range(metadata: Mapping[str, Any]) -> str:
    low, high = metadata["low"], metadata["high"]
    if low is None and high is None:
        return ""
    bounds = [] if low is None else [f"{'>' if metadata['exclusive'] else '≥'} {low:g}"]
    return ", ".join(bounds + ([] if high is None else [f"≤ {high:g}"]))


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _table(heads: tuple[str, ...], widths: tuple[int, ...], rows: Iterable[tuple[Any, ...]]) -> nodes.table:
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in widths]
    head, body = nodes.thead(), nodes.tbody()
    head += _row([nodes.paragraph(text=text) for text in heads])
    for row in rows:
        body += _row([_paragraph(cell) for cell in row])
    group += [head, body]
    table = nodes.table(classes=["options"])
    table += group
    return table


def _row(cells: Iterable[nodes.Node]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += cell
        row += entry
    return row


def _paragraph(cell: Any) -> nodes.paragraph:
    if isinstance(cell, nodes.paragraph):
        return cell
    if isinstance(cell, str):
        return nodes.paragraph(text=cell)
    paragraph = nodes.paragraph()
    for number, piece in enumerate(cell):
        if number:
            paragraph += nodes.Text(", ")
        paragraph += nodes.literal(text=piece)
    return paragraph


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("option-table", OptionTable)
    app.add_directive("flag-table", FlagTable)
    app.add_directive("names-table", NamesTable)
    return {"version": pytorchrl.__version__, "parallel_read_safe": True}
