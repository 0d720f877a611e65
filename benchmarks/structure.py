"""Print figures of the structure of the package: rooms, floors, circles, protocols, small files, doubled names, lines.

    python benchmarks/structure.py > now.json
    python benchmarks/structure.py --tree ../before --list

The script reads the source of `pytorchrl` in a tree and imports nothing from it. It assumes no folder names inside the
package, so trees before and after a move of files can be compared. It prints one JSON object and asserts nothing. With
`--list`, the object also contains the names behind the figures. Numbers in parentheses are those of commit ef3ddf60,
and those after "earlier" are from a review of that commit that counted with other tools.

Imports are all imports of modules of the package, also inside functions and for type checkers only.
`from pytorchrl.a import b` imports the module `pytorchrl.a.b` if it exists, otherwise `pytorchrl.a`. Imports from the
top `__init__` (public names, `__version__`) and modules that are named in strings do not count.

- listing: entries directly in `pytorchrl/` (9 folders, 41 files).
- rooms: entries with code, except the top `__init__`, and `benchmarks/` as one more room (49). floors: rooms in the
  longest chain of rooms in which each imports the next (18, earlier 18). arrows: pairs of rooms of which the first
  imports the second (233). rooms_with_face and arrows_with_face also count the top `__init__` and imports from it (50
  and 242, earlier 50 and 242); floors do not, because with such imports it is in a circle with 17 other rooms.
- longest_chain: modules in the longest chain of imports that can happen while the program runs (45, earlier 45).
  longest_chain_all also follows imports for type checkers (46). Both pass through the `__init__` files of folders,
  which longest_chain_without_faces leaves out (35). A circle is one element of a chain.
- circles: groups that import each other, of modules, of the folders in one folder (0), and of the folders and files in
  one folder (1).
- protocols: classes with the base `Protocol`, also nested ones (40, earlier 40).
- splinters: modules of fewer than 60 lines that exactly one module imports, without `__init__` and `__main__` (13).
  The earlier figure is 26. No limit, kind of line or kind of import that was tried explains it.
- constructors_over_10, largest_constructor: written `__init__` methods by number of parameters without `self`, `*args`
  and `**kwargs` (16, 15 and 11; the earlier 17, 16 and 12 include `self`).
- type_ignores: comments `# type: ignore`, by code (90, earlier 90). A comment with two codes counts under both.
- doubled_class_names: public classes that two or more modules define at module level (14). doubled_type_names also
  counts type aliases and type variables, by their spelling (27, earlier 27). doubled_functions: functions.
- methods_that_do_nothing: methods without statements other than `pass` and `...` that are not abstract, overloads or in
  a protocol (59). do_nothing_because: those whose docstring begins with "Do nothing" (32; the earlier 33 include a
  method that does something). constant_methods: methods that only return a literal.
- lines_of_code: lines without blank ones, comments, and strings that stand alone, such as docstrings.
- semicolons_per_10000_words: in docstrings and comments (160, earlier 156), in `README.md` and the pages in `docs/`,
  and in all of these; without code.
- any_annotations: uses of `Any`, and of names that a module `untyped` defines, in annotations outside of that module,
  counted as in `tests/unit/packaging/test_structure.py` (304).
"""

from __future__ import annotations

import argparse
import ast
import collections
import functools
import io
import itertools
import re
import statistics
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from results import print_result

HERE = Path(__file__).resolve().parents[1]
TOP = "pytorchrl"
BENCHMARKS = "benchmarks"
SMALL_FILE, LARGE_FILE, LARGE_CONSTRUCTOR = 60, 400, 10
# Tokens that are not code.
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
IGNORE = re.compile(r"#\s*type:\s*ignore(?:\[([\w, -]+)\])?")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|ruff:|pragma|!)")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


class Module(NamedTuple):
    """A module with its dotted name, text, syntax tree and tokens."""

    name: str
    is_face: bool
    text: str
    tree: ast.Module
    tokens: list[tokenize.TokenInfo]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def modules_in(tree: Path, folder: str) -> dict[str, Module]:
    """Return the modules in a folder of a tree by their dotted names."""
    found = {}
    for path in sorted((tree / folder).rglob("*.py")):
        parts, text = path.relative_to(tree).with_suffix("").parts, path.read_text(encoding="utf-8")
        is_face = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_face else parts)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        found[name] = Module(name, is_face, text, ast.parse(text), tokens)
    return found


def import_nodes(node: ast.AST, with_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports in a syntax tree, with or without those for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not with_types:
            yield from import_nodes(ast.Module(child.orelse, []), with_types)
        else:
            yield from import_nodes(child, with_types)


def imported(module: Module, known: Iterable[str], with_types: bool = True) -> set[str]:
    """Return the known modules that a module imports; the top package stands for names that are no module."""
    found = set()
    for node in import_nodes(module.tree, with_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        parts = module.name.split(".")
        above = parts[:len(parts) - node.level + module.is_face] if node.level else []
        base = ".".join(filter(None, [*above, node.module]))
        full = {f"{base}.{alias.name}" for alias in node.names}
        found |= {name if name in known else base for name in full}
    return (found & set(known)) - {module.name}


def reachable(graph: Graph, start: str) -> set[str]:
    """Return the nodes that can be reached from a node by at least one arrow."""
    found: set[str] = set()
    new = graph.get(start, set())
    while new:
        found |= new
        new = {other for node in new for other in graph.get(node, ())} - found
    return found


def groups_of(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return a map from each node to the sorted group of nodes that reach each other and contain it."""
    reach = {node: reachable(graph, node) for node in graph}
    return {node: tuple(sorted({node} | {other for other in reach[node] if node in reach.get(other, ())}))
            for node in graph}


def circles_of(graph: Graph) -> list[list[str]]:
    """Return the groups of several nodes that reach each other."""
    return sorted(list(group) for group in set(groups_of(graph).values()) if len(group) > 1)


def chain_of(graph: Graph) -> list[str]:
    """Return the longest path from the top down; the members of a circle are one element, joined by " + "."""
    group_of = groups_of(graph)

    @functools.cache
    def below(group: tuple[str, ...]) -> list[str]:
        others = {group_of[other] for node in group for other in graph[node] if other in graph} - {group}
        return [" + ".join(group), *max(map(below, sorted(others)), key=len, default=[])]

    return max(map(below, group_of.values()), key=len, default=[])


def mapped(graph: Graph, to: Callable[[str], str | None]) -> Graph:
    """Return the graph of the images of nodes, without nodes that have none and arrows from a node to itself."""
    found: Graph = {}
    for node, others in graph.items():
        if (image := to(node)) is not None:
            found.setdefault(image, set()).update({name for other in others if (name := to(other))} - {image})
    return found


def room_of(name: str) -> str:
    """Return the room of a module: the entry of the package that contains it, or the first folder elsewhere."""
    return name.split(".")[1] if name.startswith(f"{TOP}.") else name.split(".", maxsplit=1)[0]


def circles_in_folders(graph: Graph, only_folders: bool) -> list[list[str]]:
    """Return the circles between the folders, or between the folders and files, that are directly in one folder."""
    folders = {name[:match.start()] for name in graph for match in re.finditer(r"\.", name)}

    def entry(name: str, parent: str) -> str | None:
        child = ".".join(name.split(".")[:parent.count(".") + 2])
        return child if name.startswith(f"{parent}.") and (child in folders or not only_folders) else None

    return [circle for parent in sorted(folders)
            for circle in circles_of(mapped(graph, functools.partial(entry, parent=parent)))]


def imports(tree: Path, modules: dict[str, Module]) -> Iterator[tuple[str, Any]]:
    """Yield the figures about imports, each with its name."""
    faced = {name: imported(module, modules) for name, module in modules.items()}
    graph = {name: others - {TOP} for name, others in faced.items() if name != TOP}
    running = {name: imported(modules[name], modules, with_types=False) - {TOP} for name in graph}
    faces = {name for name, module in modules.items() if module.is_face}
    outside = {name: imported(module, modules) for name, module in modules_in(tree, BENCHMARKS).items()}
    rooms = mapped({**graph, **{name: others - {TOP} for name, others in outside.items()}}, room_of)
    with_face = mapped({**faced, **outside}, room_of)
    entries = [path for path in sorted((tree / TOP).iterdir())
               if path.is_file() or any(below.is_file() and "__pycache__" not in below.parts
                                        for below in path.rglob("*"))]
    yield "listing", [path.name + "/" * path.is_dir() for path in entries]
    yield "listed_folders", sum(path.is_dir() for path in entries)
    yield "rooms", sorted(rooms)
    yield "floors", chain_of(rooms)
    yield "arrows", sorted(f"{room} -> {other}" for room, others in rooms.items() for other in others)
    yield "rooms_with_face", len(with_face)
    yield "arrows_with_face", sum(map(len, with_face.values()))
    yield "longest_chain", chain_of(running)
    yield "longest_chain_all", chain_of(graph)
    yield "longest_chain_without_faces", chain_of({name: others - faces for name, others in graph.items()
                                                   if name not in faces})
    yield "circles_of_modules", circles_of(graph)
    yield "circles_of_folders", circles_in_folders(graph, only_folders=True)
    yield "circles_of_entries", circles_in_folders(graph, only_folders=False)
    importers = collections.Counter(itertools.chain.from_iterable(graph.values()))
    yield "splinters", [name for name, module in modules.items() if module.lines < SMALL_FILE
                        and importers[name] == 1 and not module.is_face and not name.endswith(".__main__")]


def base_names(node: ast.ClassDef) -> set[str]:
    """Return the last names of the bases of a class, without their parameters."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def classes(modules: dict[str, Module]) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield all classes, also nested ones, each with its name after that of its module."""
    for module in modules.values():
        yield from ((f"{module.name}.{node.name}", node) for node in ast.walk(module.tree)
                    if isinstance(node, ast.ClassDef))


def statements(function: Function) -> list[ast.stmt]:
    """Return the body of a function without docstring, other strings, `...` and `pass`."""
    return [node for node in function.body if not isinstance(node, ast.Pass)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def is_literal(node: ast.stmt) -> bool:
    """Return whether a statement returns a literal value."""
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    try:
        ast.literal_eval(node.value)
    except (ValueError, TypeError):
        return False
    return True


def names_of(node: ast.stmt, kinds: tuple[type, ...]) -> list[str]:
    """Return the names that a statement defines, if it is of one of the kinds; of variables, those spelled as types."""
    if not isinstance(node, kinds):
        return []
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name[0].isupper() and not name.isupper()]


def doubled(modules: dict[str, Module], *kinds: type) -> dict[str, list[str]]:
    """Return the public names that two or more modules define by statements of these kinds, with the modules."""
    homes: dict[str, set[str]] = {}
    for module in modules.values():
        for name in (name for node in module.tree.body for name in names_of(node, kinds)):
            homes.setdefault(name, set()).add(module.name)
    return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > 1 and name[0] != "_"}


def definitions(modules: dict[str, Module]) -> Iterator[tuple[str, Any]]:
    """Yield the figures about classes and functions, each with its name."""
    sizes, nothing, because, constant = {}, [], [], []
    for name, node in classes(modules):
        for method in (child for child in node.body if isinstance(child, Function)):
            of, full = method.args, f"{name}.{method.name}"
            if method.name == "__init__":
                sizes[name] = len([*of.posonlyargs, *of.args, *of.kwonlyargs]) - 1
            decorators = " ".join(map(ast.unparse, method.decorator_list))
            if "Protocol" in base_names(node) or "abstract" in decorators or "overload" in decorators:
                continue
            rest = statements(method)
            if not rest:
                nothing.append(full)
                because += [full] if (ast.get_docstring(method) or "").startswith("Do nothing") else []
            elif len(rest) == 1 and is_literal(rest[0]):
                constant.append(full)
    yield "protocols", [name for name, node in classes(modules) if "Protocol" in base_names(node)]
    yield "constructors_over_10", {name: size for name, size in sizes.items() if size > LARGE_CONSTRUCTOR}
    yield "largest_constructor", max(sizes.values(), default=0)
    yield "doubled_class_names", doubled(modules, ast.ClassDef)
    yield "doubled_type_names", doubled(modules, ast.ClassDef, ast.Assign, ast.AnnAssign)
    yield "doubled_functions", doubled(modules, ast.FunctionDef, ast.AsyncFunctionDef)
    yield "methods_that_do_nothing", nothing
    yield "do_nothing_because", because
    yield "constant_methods", constant
    yield "any_annotations", any_annotations(modules)


def annotations_in(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the annotations of parameters, results and variables."""
    for node in ast.walk(tree):
        found = getattr(node, "annotation", None), getattr(node, "returns", None)
        yield from (each for each in found if each is not None)


def any_annotations(modules: dict[str, Module]) -> int:
    """Return how often annotations use `Any` or a name of a module `untyped`, outside of that module."""
    is_untyped = {name: name.rpartition(".")[2] == "untyped" for name in modules}
    names = {"Any"} | {node.target.id for name, module in modules.items() if is_untyped[name]
                       for node in module.tree.body
                       if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return sum(isinstance(node, ast.Name) and node.id in names
               for name, module in modules.items() if not is_untyped[name]
               for annotation in annotations_in(module.tree) for node in ast.walk(annotation))


def lone_strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone, such as docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def code_lines(module: Module) -> int:
    """Return the number of lines that contain code."""
    found = {line for token in module.tokens if token.type not in LAYOUT
             for line in range(token.start[0], token.end[0] + 1)}
    for text in lone_strings(module.tree):
        found -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(found)


def type_ignores(modules: dict[str, Module]) -> list[str]:
    """Return the codes of each comment `# type: ignore`, separated by commas."""
    return [match[1] or "no code" for module in modules.values() for token in module.tokens
            if token.type == tokenize.COMMENT and (match := IGNORE.search(token.string))]


def without_code(text: str) -> str:
    """Return the text without blocks of code, and with a word for each piece of code in a line."""
    text = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"::\n\s*\n(?:(?: {4,}.*)?\n)+", ".\n", text + "\n")
    return re.sub(r"(`+)[^`]+\1", "code", re.sub(r"^ *>>>.*$", "", text, flags=re.MULTILINE))


def prose(tree: Path, modules: dict[str, Module]) -> dict[str, list[str]]:
    """Return the docstrings and comments, and the pages, all without code."""
    inside = [str(text.value) for module in modules.values() for text in lone_strings(module.tree)]
    inside += [token.string for module in modules.values() for token in module.tokens
               if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)]
    paths = [path for path in sorted((tree / "docs").rglob("*.md")) if "_build" not in path.parts]
    pages = [path.read_text(encoding="utf-8") for path in [*paths, tree / "README.md"] if path.exists()]
    texts = {"docstrings_and_comments": inside, "pages": pages, "all": [*inside, *pages]}
    return {name: [without_code(text) for text in found] for name, found in texts.items()}


def semicolons(texts: list[str]) -> float:
    """Return the number of semicolons per 10,000 words."""
    words = sum(len(re.findall(r"[A-Za-z]+", text)) for text in texts)
    return round(10_000 * sum(text.count(";") for text in texts) / max(1, words), 1)


def sizes(tree: Path, modules: dict[str, Module]) -> Iterator[tuple[str, Any]]:
    """Yield the figures about comments, lines and prose, each with its name."""
    lines, ignores = {name: module.lines for name, module in modules.items()}, type_ignores(modules)
    yield "type_ignores", len(ignores)
    for code, count in collections.Counter(code for codes in ignores for code in re.split(", *", codes)).most_common():
        yield f"type_ignores.{code}", count
    yield "files", len(modules)
    yield "lines", sum(lines.values())
    yield "lines_of_code", sum(map(code_lines, modules.values()))
    yield "longest_file", max(lines.values())
    yield "median_file", statistics.median(lines.values())
    yield "files_over_400", {name: count for name, count in lines.items() if count > LARGE_FILE}
    for name, texts in prose(tree, modules).items():
        yield f"semicolons_per_10000_words.{name}", semicolons(texts)


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=lambda path: Path(path).resolve(), default=HERE,
                        help="folder of the source tree; default: the one that contains this script")
    parser.add_argument("--list", action="store_true", help="also print the names behind the figures")
    options = parser.parse_args()
    modules = modules_in(options.tree, TOP)
    if not modules:
        parser.error(f"{options.tree} contains no package {TOP}")
    found = dict([*imports(options.tree, modules), *definitions(modules), *sizes(options.tree, modules)])
    names = {name: value for name, value in found.items() if isinstance(value, list | dict)}
    figures = {name: len(value) if name in names else value for name, value in found.items()}
    print_result({**figures, "names": names} if options.list else figures)


if __name__ == "__main__":
    main()
