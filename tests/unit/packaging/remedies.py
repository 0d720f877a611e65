"""Find the remedies in the texts of errors and warnings of the package: clauses such as `; leave prefetch out`."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from tests.unit.packaging.source import MODULES, ROOT

# Verbs with which a remedy begins. A text with another one is not found, so new verbs belong into this list.
VERBS = (
    "add", "allow", "build", "call", "change", "choose", "collect", "correct", "create", "declare", "define", "delete",
    "derive", "drop", "evaluate", "export", "film", "give", "import", "increase", "install", "keep", "leave", "load",
    "look", "lower", "make", "move", "name", "omit", "pass", "put", "raise", "remove", "rename", "request", "restore",
    "return", "rewrite", "run", "save", "set", "shorten", "split", "start", "take", "train", "try", "use", "wait",
    "wrap", "write")
REMEDY = re.compile(rf"(?:; |\. |, (?:or|and) )(?:or |and |then |either )?(?:{'|'.join(VERBS)})\b")
# Calls whose texts are no errors: help of the command line, what commands show, and advice of the profiler.
NO_ERRORS = {"Tip", "option", "show", "show_stderr", "add_argument", "add_parser", "announce", "field", "TypeVar",
             "re.compile", "compile", "Work"}
GAP = "\0"


@dataclass(frozen=True)
class Remedy:
    """A text with a remedy; `text` has a gap for each part that is computed."""

    place: str
    text: str

    @property
    def shown(self):
        return self.text.replace(GAP, "...")

    def is_in(self, message):
        """Return whether a message contains the parts of the text between gaps and `%s` of logs, in their order."""
        place = 0
        for part in re.split(rf"{GAP}|%[sd]", self.text):
            place = message.find(part, place)
            if place < 0:
                return False
            place += len(part)
        return True


def text_of(node):
    """Return the text of an expression, with gaps for values, or None if it contains no literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is right is None else (GAP if left is None else left) + (GAP if right is None else right)
    return None


def texts_in(node):
    """Yield (line, text) of each text of an error, outermost expressions only; a `Problem` is one text."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in NO_ERRORS:
            return
        if name in ("Problem", "Rule"):
            parts = [part.value if isinstance(part, ast.Starred) else part for part in node.args[name == "Rule":][:2]]
            parts = [part.body if isinstance(part, ast.Lambda) else part for part in parts]
            yield node.lineno, "; ".join(text_of(part) or GAP for part in parts)
            return
    if isinstance(node, ast.keyword) and node.arg in ("description", "help"):
        return
    if isinstance(node, ast.expr) and (text := text_of(node)) is not None:
        yield node.lineno, text
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):  # a docstring
            yield from texts_in(child)


def remedies():
    """Return all remedies of the package, in the order of its files."""
    found = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, text in texts_in(tree):
            if REMEDY.search(text) and re.search(r"[; ]\w+ ", text):
                found.append(Remedy(f"{path.relative_to(ROOT)}:{line}", text))
    return found
