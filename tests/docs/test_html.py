"""Tests of the HTML of the built site: links, anchors, titles, images, and docstrings that were misread as types."""

from __future__ import annotations

import dataclasses
import posixpath
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("myst_nb")
pytest.importorskip("furo")
pytestmark = [pytest.mark.site, pytest.mark.timeout(600), pytest.mark.xdist_group("site")]

# Elements without an end tag.
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_TYPES = {"Type", "Return type"}
_KNOWN = {"Any", "ClassVar", "Final", "Literal", "None", "bool", "bytes", "dict", "float", "frozenset", "int", "list",
              "object", "set", "slice", "str", "tuple", "type", "ndarray", "dtype", "float64"}


@dataclasses.dataclass
class Page:
    """The parts of a page that the tests read."""

    title: str = ""
    anchors: set[str] = dataclasses.field(default_factory=set)
    links: set[str] = dataclasses.field(default_factory=set)
    images: list[dict[str, str]] = dataclasses.field(default_factory=list)
    unresolved: set[str] = dataclasses.field(default_factory=set)
    types: set[str] = dataclasses.field(default_factory=set)


class Reader(HTMLParser):
    """Parser that fills a `Page`."""

    def __init__(self):
        super().__init__()
        self.page, self._open = Page(), []
        self._field = self._type = ""

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.page.anchors.add(given["id"])
        self.page.links |= {given[name] for name in ("href", "src") if name in given}
        if tag == "img":
            self.page.images.append(given)
        if tag == "dt":
            self._field = ""
        elif tag == "dd":
            self._type = ""
        if tag not in _VOID:
            self._open.append((tag, given.get("class", "").split()))

    def handle_endtag(self, tag):
        if tag == "dd" and self._field in _TYPES:
            self.page.types.add(" ".join(self._type.split()))
            self._field = ""
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tags = {tag for tag, _ in self._open}
        classes = {name for _, names in self._open for name in names}
        if self._open and self._open[-1][0] == "title" and "svg" not in tags:
            self.page.title += data
        if "xref" in classes and "a" not in tags:
            self.page.unresolved.add(data)
        if self._open and self._open[-1][0] == "dt" and "field-list" in classes:
            self._field += data
        if self._field in _TYPES:
            self._type += data


def read(text):
    reader = Reader()
    reader.feed(text)
    return reader.page


def is_broken(site, pages, source, link):
    """Return whether a link from the page `source` to a place of the site leads nowhere."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    folder = posixpath.dirname(source)
    target = posixpath.normpath(posixpath.join(folder, unquote(parts.path))) if parts.path else source
    if target not in pages:
        return not (site / target).is_file()
    return bool(parts.fragment) and unquote(parts.fragment) not in pages[target].anchors


def is_type(text):
    """Return whether a text is a type: names of builtins, and names with dots, but no other words."""
    words = re.findall(r"[^\s\[\],|()…]+", re.sub(r"['\u2018][^'\u2019]*['\u2019]", "", text))
    return bool(words) and not re.search(r"[\w.] +\w", text) and all(
        word in _KNOWN or re.fullmatch(r"\w+(\.\w+)+|[A-Z]\w*", word) for word in words)


@pytest.fixture(scope="module")
def pages(site):
    found = {path.relative_to(site).as_posix(): read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert {"index.html", "search.html", "api/agent.html", "_modules/pytorchrl/learner/learner.html"} <= found.keys()
    return found


def test_links_lead_to_pages_and_anchors(site, pages):
    links = [(source, link) for source, page in pages.items() for link in page.links]
    assert len(links) > 10_000
    assert not [(source, link) for source, link in links if is_broken(site, pages, source, link)]


def test_no_text_was_taken_for_a_mail_address(pages):
    assert not [(name, link) for name, page in pages.items() for link in page.links if link.startswith("mailto:")]


def test_every_page_has_a_title(pages):
    assert not [name for name, page in pages.items() if not page.title.strip()]
    titles = [page.title for name, page in pages.items() if not name.startswith("_modules/")]
    assert len(set(titles)) == len(titles)


def test_every_image_has_a_text(pages):
    images = [(name, image) for name, page in pages.items() for image in page.images]
    assert len(images) > 5
    # Sphinx gives an image without a text its path as text.
    assert not [(name, image) for name, image in images if image.get("alt", "") in ("", image["src"])]


def test_references_to_names_of_this_library_are_links(pages, names):
    own = names | {name.split(".")[-1] for name in names}
    api = [name for name in pages if name.startswith("api/")]
    assert any(pages[name].unresolved for name in api)  # names of Python have no entry here
    assert not [(name, text) for name in api for text in pages[name].unresolved if text in own - {"pytorchrl"}]


def test_no_docstring_was_torn_at_a_colon(pages):
    """Napoleon takes the text before the first colon of `Returns: a text: more` for a type."""
    types = [(name, text) for name, page in pages.items() for text in page.types]
    assert len(types) > 50
    assert not [(name, text) for name, text in types if not is_type(text)]


def test_reader_finds_what_the_tests_look_for(tmp_path):
    page = read('<title>A</title><h1 id="b">B</h1><a href="c.html#d">x</a><img src="e.svg" alt="E">'
                '<code class="xref">Name</code><a><code class="xref">Linked</code></a>'
                '<dl class="field-list"><dt>Type<span>:</span></dt><dd><p>The name</p></dd></dl>')
    assert page == Page("A", {"b"}, {"c.html#d", "e.svg"}, [{"src": "e.svg", "alt": "E"}], {"Name"}, {"The name"})
    pages = {"a.html": page, "f/g.html": Page()}
    (tmp_path / "e.svg").touch()
    broken = {link: is_broken(tmp_path, pages, "a.html", link)
              for link in ("e.svg", "c.html", "#b", "#z", "f/g.html", "f/g.html#b", "https://example.org/z")}
    assert broken == {"e.svg": False, "c.html": True, "#b": False, "#z": True, "f/g.html": False, "f/g.html#b": True,
                      "https://example.org/z": False}


@pytest.mark.parametrize("text", ["bool", "float | None", "dict[str, tuple[Tensor, ...]]", "torch.Tensor", "list[Part]",
                                  "Callable[[str], None] | None", "type[pytorchrl.agent.Algorithm] | None"])
def test_types_are_recognized(text):
    assert is_type(text.replace("...", "…"))


@pytest.mark.parametrize("text", ["The name for display", "Two dictionaries", "message", "valid transitions", "",
                                  "Actions (E, …) as they are stored"])
def test_other_texts_are_no_types(text):
    assert not is_type(text)
