"""Sphinx directives that generate the tables of options and flags from the code, so that the tables stay up to date.

`{option-table} PPO` lists the fields of `PPO.Options`, `{option-table} Scheme` the keyword arguments of
`Scheme`, and `{option-table} train` the options of `train` that belong to no class. `{option-index}` lists all options
of these tables from A to Z, with links. `{flag-table} ppo` lists the flags of `pytorchrl train ppo`, in groups.
`{names-table} a-l` lists the names of options in other libraries that begin with these letters, and the corresponding
options here. `{variants-table}` lists the named variants of algorithms.

Each row has an anchor, such as `#PPO-clip_param`, and an entry in the index of the site. The search of the site ranks
exact main entries first, so the entries of options that `train` accepts are main entries. An `{index}` directive below
the title of a page leads to the page itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

import pytorchrl
from pytorchrl.agent import actors, algorithms, storages
from pytorchrl.agent.algorithms.registry import registered
from pytorchrl.agent.algorithms.variants import VARIANTS
from pytorchrl.agent.names_elsewhere import HOMES, Here, elsewhere, of_other_libraries
from pytorchrl.agent.option_values.text import form_of, to_python
from pytorchrl.cli.parsing import flag_of, titles, values_of
from pytorchrl.scheme.options.settings import LEVELS, declaration_of, default_of_keyword, known_keywords, names_of_level
from pytorchrl.training.composition import OptionSpec, option_specs

_HEADS, _WIDTHS = ("Option", "Default", "Allowed", "Meaning"), (20, 15, 20, 45)


def _class(name: str) -> Any:
    """Return the class of a part, also of one that has no name at the top level."""
    places = [place for place in (pytorchrl, actors, algorithms, storages) if hasattr(place, name)]
    return getattr(places[0], name)


class OptionTable(SphinxDirective):
    """Directive that lists the options of one class: name, default, allowed values, and meaning."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table, or of one table per level for `Scheme`."""
        name = self.arguments[0]
        if name == "Scheme":
            return [node for level in LEVELS for node in self._level_table(level)]
        if name == "train":
            specs = _declared()[1].values()
            anchors = self._anchors(name, [(spec.name,) for spec in specs])
            return [_table(_HEADS, _WIDTHS, map(_train_row, specs), anchors)]
        cls = _class(name)
        fields = dataclasses.fields(cls.Options)
        names = [tuple(dict.fromkeys((field.name, _declared()[0].get((cls, field.name), field.name))))
                 for field in fields]
        return [_table(_HEADS, _WIDTHS, map(_option_row, fields, names), self._anchors(name, names))]

    def _level_table(self, level: str) -> list[nodes.Node]:
        """Return the title and the table of a level's options."""
        rows, names = [], [(name,) for name in names_of_level(level)]
        for (name,) in names:
            declaration = declaration_of(name)
            allowed = declaration.choices
            rows.append((
                (name,), (to_python(default_of_keyword(name)),),
                _range(declaration.field.metadata) if allowed is None else tuple(map(to_python, allowed)),
                _sentence(declaration.help)))
        title = nodes.rubric(text=level[0].upper() + level[1:])
        return [title, _table(_HEADS, _WIDTHS, rows, self._anchors("Scheme", names))]

    def _anchors(self, owner: str, rows: list[tuple[str, ...]]) -> list[Anchor]:
        """Return the anchors of the rows, and remember them for the list of all options."""
        # Search reads anchors as selectors, in which a dot begins a class.
        is_main = [owner == "train" or (_class(owner), names[0]) in _declared()[0] for names in rows]
        anchors = [Anchor(f"{owner}-{names[0]}", names, main) for names, main in zip(rows, is_main, strict=True)]
        found = _options_of(self.env)[self.env.docname]
        found += [(name, owner, anchor.id) for anchor in anchors for name in anchor.entries]
        return anchors


@dataclasses.dataclass(frozen=True)
class Anchor:
    """The anchor of a row, and the entries in the index of the site that lead to it."""

    id: str
    entries: tuple[str, ...]
    is_main: bool = True


class OptionIndex(SphinxDirective):
    """Directive that lists all options from A to Z, with links to the rows of their tables."""

    def run(self) -> list[nodes.Node]:
        """Return a node that is replaced when all pages have been read."""
        return [_AllOptions()]


class _AllOptions(nodes.General, nodes.Element):
    """The place of the list of all options."""


def _options_of(env: BuildEnvironment) -> defaultdict[str, list[tuple[str, str, str]]]:
    """Return page -> (option, owner, anchor) of each row on the page."""
    if not hasattr(env, "pytorchrl_options"):
        env.pytorchrl_options = defaultdict(list)
    return env.pytorchrl_options  # type: ignore[no-any-return]


def _forget(app: Sphinx, env: BuildEnvironment, page: str) -> None:
    _options_of(env).pop(page, None)


def _merge(app: Sphinx, env: BuildEnvironment, pages: Iterable[str], other: BuildEnvironment) -> None:
    _options_of(env).update(_options_of(other))


def _list_all(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Replace the place of the list of all options by the list."""
    for place in list(doctree.findall(_AllOptions)):
        homes = defaultdict(list)
        for target, options in _options_of(app.env).items():
            for name, owner, anchor in options:
                uri = f"{app.builder.get_relative_uri(page, target)}#{anchor}"
                homes[name].append((owner, nodes.reference(internal=True, refuri=uri, text=owner)))
        rows = []
        for name in sorted(homes):
            paragraph = nodes.paragraph()
            for number, (_, link) in enumerate(sorted(homes[name], key=lambda home: home[0])):
                paragraph += [nodes.Text(", "), link] if number else [link]
            rows.append(((name,), paragraph))
        place.replace_self(_table(("Option", "Described with the options of"), (40, 60), rows))


@functools.cache
def _declared() -> tuple[dict[tuple[type, str], str], dict[str, OptionSpec]]:
    """Return (class, option) -> its name in `train`, and the options of `train` that no class declares, by name."""
    found: dict[tuple[type, str], str] = {}
    of_train_alone: dict[str, OptionSpec] = {}
    for algorithm, its in registered().items():
        classes: dict[str, tuple[type | None, ...]] = {
            "algorithm": (its.algorithm,), "actor": (its.actor,), "learner": (pytorchrl.Learner,),
            "storage": (its.storage, its.prioritized_storage, its.rollout_storage), "scheme": (pytorchrl.Scheme,),
            "environments": (pytorchrl.VecEnv, pytorchrl.MultiAgentVecEnv)}
        for name, spec in option_specs(algorithm).items():
            owners = [cls for cls in classes.get(spec.part, ()) if cls and spec.own_name in _names_of(cls)]
            found.update({(cls, spec.own_name): name for owner in owners for cls in owner.__mro__})
            if not owners:
                of_train_alone[name] = spec
    return found, of_train_alone


def _names_of(cls: type) -> Iterable[str]:
    """Return the names of the options of a class."""
    if cls is pytorchrl.Scheme:
        return known_keywords()
    return [field.name for field in dataclasses.fields(cls.Options)]  # type: ignore[attr-defined]


class FlagTable(SphinxDirective):
    """Directive that lists the flags of `pytorchrl train ALGORITHM`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of one title and one table per group of flags."""
        specs = [spec for spec in option_specs(self.arguments[0]).values() if form_of(spec.hint)]
        found: list[nodes.Node] = []
        for group, title in titles().items():
            flags = [spec for spec in specs if spec.group == group]
            anchors = [Anchor(flag_of(spec.name).lstrip("-"), (flag_of(spec.name),)) for spec in flags]
            table = _table(("Flag", "Value", "Meaning"), (25, 25, 50), map(_flag_row, flags), anchors)
            found += [nodes.rubric(text=title[0].upper() + title[1:]), table]
        return found


class NamesTable(SphinxDirective):
    """Directive that lists names of options in other libraries, and the corresponding options here.

    Its argument is a range of first letters, such as `a-l`.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table."""
        first, last = self.arguments[0].split("-")
        names = [(name, here) for name in of_other_libraries() if first <= name.lstrip("_")[0].lower() <= last
                 for here in elsewhere()[name]]
        rows = [((name,), _meaning(here), _marked(_sentence(here.note)) if here.note else "") for name, here in names]
        anchors = [Anchor(f"elsewhere-{name}-{number}", (name,)) for number, (name, _) in enumerate(names)]
        return [_table(("Elsewhere", "Here", "Remark"), (25, 40, 35), rows, anchors)]


class VariantsTable(SphinxDirective):
    """Directive that lists the named variants of algorithms, with the options for which they stand."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table."""
        rows = [((name,), (variant.algorithm,), variant.paper, tuple(
            f"{option}={to_python(value)}" for option, value in variant.options.items()))
            for name, variant in sorted(VARIANTS.items())]
        anchors = [Anchor(f"variant-{name}", (name,)) for name in sorted(VARIANTS)]
        return [_table(("Name", "Algorithm", "Paper", "Options"), (12, 12, 21, 55), rows, anchors)]


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


def _option_row(field: dataclasses.Field[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
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
    return names, default, allowed, text


def _train_row(spec: OptionSpec) -> tuple[Any, ...]:
    choices = () if spec.choices is None else tuple(map(to_python, spec.choices))
    return (spec.name,), (to_python(spec.default),), choices or "", _sentence(spec.help)


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


def _table(heads: tuple[str, ...], widths: tuple[int, ...], rows: Iterable[tuple[Any, ...]],
           anchors: Sequence[Anchor] = ()) -> nodes.table:
    group = nodes.tgroup(cols=len(heads))
    group += [nodes.colspec(colwidth=width) for width in widths]
    head, body = nodes.thead(), nodes.tbody()
    head += _row([nodes.paragraph(text=text) for text in heads])
    for row in rows:
        body += _row([_paragraph(cell) for cell in row])
    for anchor, row in zip(anchors, body.children, strict=bool(anchors)):
        _set_anchor(row, anchor)
    group += [head, body]
    table = nodes.table(classes=["options"])
    table += group
    return table


def _set_anchor(row: nodes.row, anchor: Anchor) -> None:
    """Let a row have an anchor and entries in the index, and its first cell a link to itself."""
    row["ids"] = [anchor.id]
    name = row[0][0]
    link = nodes.reference(internal=True, refid=anchor.id)
    link += name.children
    name.children = []
    kind = "main" if anchor.is_main else ""
    name += [addnodes.index(entries=[("single", entry, anchor.id, kind, None) for entry in anchor.entries]), link]


def _lead_to_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Let the entries of `{index}` directives below titles of pages lead to the pages, instead of an empty place."""
    for index in list(doctree.findall(addnodes.index)):
        if isinstance(index.parent, nodes.section) and isinstance(index.parent.parent, nodes.document):
            index["entries"] = [(kind, text, "", main, key) for kind, text, _, main, key in index["entries"]]
            place = index.next_node(siblings=True, descend=False)
            if isinstance(place, nodes.target):
                index.parent.remove(place)


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
    app.add_directive("option-index", OptionIndex)
    app.add_node(_AllOptions)
    app.add_directive("flag-table", FlagTable)
    app.add_directive("names-table", NamesTable)
    app.add_directive("variants-table", VariantsTable)
    app.connect("doctree-read", _lead_to_pages)
    app.connect("env-purge-doc", _forget)
    app.connect("env-merge-info", _merge)
    app.connect("doctree-resolved", _list_all)
    return {"version": pytorchrl.__version__, "parallel_read_safe": True}
