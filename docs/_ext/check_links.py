"""Check that each relative link names an existing file and, if the link contains a `#`, a heading of that file.

Links are `[text](path#heading)`, `[name]: path` and, in pages of the site, `{doc}`. Links to the web are not checked.

    python docs/_ext/check_links.py [FOLDER]

Sphinx also checks the pages of the site, but only when it builds them, which takes minutes. This script takes a second,
and also checks README.md and CONTRIBUTING.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^(`{3,}|~{3,}).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_ROLE = re.compile(r"\{doc\}`(?:[^`<]*<)?([^`<>]+)>?`")
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.+?)#*$|^\((\S+)\)=$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages_of(root: Path) -> list[Path]:
    """Return the Markdown pages of a repository, except those in build folders."""
    return sorted([*root.glob("*.md"), *(page for page in root.glob("docs/**/*.md") if "_build" not in page.parts)])


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page: those that GitHub and MyST make from headings, and explicit targets."""
    return {target or re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
            for title, target in _HEADING.findall(_FENCED.sub("", text))}


def links_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, link) for each link, except links to the web; add the suffix `.md` to `{doc}` links."""
    prose = _FENCED.sub(_blank, text)
    found = [(match.start(), f"{match.group(1)}.md") for match in _ROLE.finditer(prose)]
    found += [(match.start(), match.group(1) or match.group(2)) for match in _LINK.finditer(_CODE.sub(_blank, prose))]
    for position, link in sorted(found):
        if not _ELSEWHERE.match(link):
            yield text.count("\n", 0, position) + 1, link


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def broken_links(root: Path) -> Iterator[str]:
    """Yield "page:line: link" for each link whose file or heading does not exist."""
    for page in pages_of(root):
        for line, link in links_of(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            folder = root / "docs" if path.startswith("/") else page.parent
            target = page if not path else (folder / path.lstrip("/")).resolve()
            is_page = target.suffix == ".md" and target.is_file()
            if not target.exists() or (anchor and is_page
                                       and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
                yield f"{page.relative_to(root)}:{line}: {link} is broken"


def main() -> int:
    """Print the broken links; return the exit code."""
    found = list(broken_links(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT))
    print("\n".join(found) or "all links are valid")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
