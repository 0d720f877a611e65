"""Draw a sample of docstrings, comments and paragraphs for readers who check that each is understood at once.

    python benchmarks/reading_sample.py --seed 314159265 > sample.txt

A reader who does not know the code reads each text with its context only: the signature of a docstring, the lines
around a comment, or the page and section of a paragraph and, for an item of a list, the end of the sentence before the
list. The reader counts the texts that had to be read twice, or that are not clear afterwards. Two readers of the same
sample usually differ by one or two texts, so compare means over several samples.

Sources are the package, the pages in `docs/`, `README.md` and `CONTRIBUTING.md`. Tables and code blocks are left out.
The script prints the sample and asserts nothing.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"docstring": 60, "comment": 40, "paragraph": 30}
ITEM = re.compile(r"\s*([-*]|\d+\.)\s")
DIRECTIVE = re.compile(r"#\s*(noqa|type:|ruff:|pragma)")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Text(NamedTuple):
    """A text, its place, and the context that a reader sees."""

    kind: str
    place: str
    context: str
    text: str


def docstrings(name: str, source: str) -> Iterator[Text]:
    """Yield the docstrings of a module, each with its signature and the classes and functions that contain it."""
    tree, lines = ast.parse(source), source.splitlines()
    if text := ast.get_docstring(tree):
        yield Text("docstring", f"{name}:1", f"module {name}", text)

    def inside(node: ast.AST, path: str) -> Iterator[Text]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Definition):
                yield from inside(child, path)
                continue
            signature = "\n".join(lines[child.lineno - 1:max(child.lineno, child.body[0].lineno - 1)])
            if text := ast.get_docstring(child):
                yield Text("docstring", f"{name}:{child.lineno}", f"{path}\n{signature}".strip(), text)
            yield from inside(child, f"{path} > {child.name}" if path else child.name)

    yield from inside(tree, "")


def comments(name: str, source: str) -> Iterator[Text]:
    """Yield the comments of a module of at least four words, each with five lines before and after it."""
    lines = source.splitlines()
    blocks: list[list[tokenize.TokenInfo]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        continues = (blocks and token.start[0] == blocks[-1][-1].start[0] + 1
                     and all(part.line.lstrip().startswith("#") for part in (token, blocks[-1][-1])))
        if continues:
            blocks[-1].append(token)
        else:
            blocks.append([token])
    for block in blocks:
        text, first, last = "\n".join(token.string for token in block), block[0].start[0], block[-1].start[0]
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 4 and not DIRECTIVE.match(text):
            yield Text("comment", f"{name}:{first}", "\n".join(lines[max(0, first - 6):last + 5]), text)


def paragraphs(name: str, source: str) -> Iterator[Text]:
    """Yield the paragraphs and list items of a page of at least eight words, each with its section."""
    section, before, is_code = "", "", False
    found: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        is_fence, is_heading = line.lstrip().startswith("```"), line.startswith("#") and not is_code
        ends = not line.strip() or is_fence or is_heading or line.lstrip().startswith(":::") or ITEM.match(line)
        if ends and found:
            text, is_item = "\n".join(found).strip(), ITEM.match(found[0])
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= 8 and not all(row.lstrip().startswith("|") for row in found):
                lead = f", in the list after: … {before[-220:]}" if is_item and before else ""
                yield Text("paragraph", f"{name}:{number - len(found)}", f"page {name}, section: {section}{lead}", text)
            before = before if is_item else " ".join(text.split())
            found = []
        if is_fence:
            is_code = not is_code
        elif is_heading:
            section, before = line.lstrip("# "), ""
        elif line.strip() and not is_code and not line.lstrip().startswith(":::"):
            found.append(line)


def texts() -> list[Text]:
    """Return all texts of the package and of its pages."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    result: list[Text] = []
    for name in sorted(names):
        is_page = name.startswith("docs/") or name in ("README.md", "CONTRIBUTING.md")
        if name.startswith("pytorchrl/") and name.endswith(".py"):
            source = (ROOT / name).read_text()
            result += [*docstrings(name, source), *comments(name, source)]
        elif name.endswith(".md") and is_page:
            result += paragraphs(name, (ROOT / name).read_text())
    return result


def main() -> None:
    """Parse the command line, and print the sample in random order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="seed of the draw")
    parser.add_argument("--places", action="store_true", help="print the file and line of each text, too")
    options = parser.parse_args()
    found, draw = texts(), random.Random(options.seed)
    sample = [text for kind, size in SIZES.items() for text in draw.sample([t for t in found if t.kind == kind], size)]
    draw.shuffle(sample)
    for number, text in enumerate(sample, 1):
        place = f" · {text.place}" if options.places else ""
        print(f"=== {number} · {text.kind}{place}\n--- context\n{text.context}\n--- text\n{text.text}\n")


if __name__ == "__main__":
    main()
