"""Tests of the recording on the first page, and of what the first page shows without scrolling."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.conftest import ROOT

RECORDING = ROOT / "docs" / "_static" / "recording.svg"
MOST_BYTES = 300_000
SVG = "{http://www.w3.org/2000/svg}"


def test_the_recording_is_small_and_needs_nothing_else():
    text = RECORDING.read_text(encoding="utf-8")
    assert RECORDING.stat().st_size <= MOST_BYTES
    names = {element.tag.removeprefix(SVG) for element in ET.fromstring(text).iter()}
    assert names <= {"svg", "title", "style", "defs", "g", "use", "rect", "text", "tspan", "path", "circle"}
    assert not re.search(r'(href|src)="(?!#)|url\(|@import|@font-face', text)


def test_the_recording_is_animated_and_still_for_those_who_want_less_motion():
    style = ET.fromstring(RECORDING.read_text(encoding="utf-8")).find(f"{SVG}style").text
    assert style.endswith("@media (prefers-reduced-motion:reduce){*{animation:none!important}}")
    for name in ("film", "curve", "dot"):
        keyframes, still = re.search(rf"@keyframes {name}{{(.*?}})}}\.{name}{{([^;]*);animation:", style).groups()
        frames = re.findall(r"([\d.%,]+){([^}]*)}", keyframes)
        assert len(frames) >= 20
        # The animation begins and ends with the picture that is shown without animation.
        assert frames[0][1] == frames[-1][1] == still


@pytest.fixture(scope="module")
def recording():
    """Return the module docs/_ext/recording.py."""
    pytest.importorskip("rich")
    path = ROOT / "docs" / "_ext" / "recording.py"
    spec = importlib.util.spec_from_file_location("recording", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def drawn(steps, returns, worker="CWorker 1"):
    return (f"\x1b[H\x1b[1mrun\x1b[0m  running\r\n\x1b[32m━━━━\x1b[0m {steps}/9,000 steps 10%  2k steps/s  "
            f"return {returns}\r\n\x1b[33m{worker}\x1b[0m  5")


def test_screens_are_read_from_the_output_of_a_terminal(recording):
    output = "before\x1b[?1049h\x1b[H" + drawn("0", "-") + drawn("1,000", "20.5") * 2 + "\x1b[?1049l" + drawn("9", "9")
    found = recording.screens(output)
    assert [(screen.env_steps, screen.return_mean) for screen in found] == [(0, None), (1000, 20.5)]
    assert [line.plain for line in found[1].lines] == [
        "run  running", "━━━━ 1,000/9,000 steps 10%  2k steps/s  return 20.5", "CWorker 1  5"]


def test_a_line_keeps_its_columns_colors_and_weights(recording):
    screen, = recording.screens("\x1b[?1049h" + drawn("1,000", "20.5", "a<b"))
    title, progress, worker = map(recording.drawn_line, screen.lines)
    assert re.findall(r'x="([\d.]+)".*?>(.*?)</text>', title) == [("0", "run"), ("36", "running")]
    assert title.count('font-weight="600"') == 1
    assert re.match(r'<rect x="0" y="[\d.]+" width="28.8" height="3" fill="#56d364"/>', progress)
    assert re.match(r'<text x="0" y="12" textLength="21.6" fill="#e3b341">a&lt;b</text>', worker)


def test_a_picture_shows_each_screen_and_the_points_of_the_curve(recording):
    output = "\x1b[?1049h" + "".join(drawn(f"{number * 3},000", f"{number * 100}.0") for number in range(4))
    picture = recording.picture(recording.screens(output), 9000, [(3000, "1 of 2 workers missing")])
    root = ET.fromstring(picture)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert [text for text in texts if text and "steps 10%" in text] == [
        "0,000/9,000 steps 10%", "3,000/9,000 steps 10%", "6,000/9,000 steps 10%", "9,000/9,000 steps 10%"]
    assert "1 of 2 workers missing" in texts
    curve, = (element.get("d") for element in root.iter(f"{SVG}path") if element.get("class") == "curve")
    points = [tuple(map(float, point.split())) for point in curve[1:].split("L")]
    assert points == sorted(points)
    assert points[0] == (recording.LEFT, recording.BOTTOM)
    assert points[-1][0] == recording.RIGHT
    assert [point[1] for point in points] == sorted((point[1] for point in points), reverse=True)


# Reports where the elements of the page are, to the page that contains it as a frame.
BOXES = """<script>addEventListener("load", () => {
  const box = (selector) => { const found = document.querySelector(selector).getBoundingClientRect();
    return [found.left, found.top, found.right, found.bottom].map(Math.round); };
  parent.postMessage({width: innerWidth, boxes: {
    sentence: box(".lead"), picture: box("figure.recording img"), install: box(".install pre"),
    lines: box(".lines .highlight-python pre"), output: box(".lines .highlight-text pre")}}, "*"); });</script>"""
FRAMES = """<body data-found="[]"><script>addEventListener("message", (event) => {
  const found = JSON.parse(document.body.dataset.found); found.push(event.data);
  document.body.dataset.found = JSON.stringify(found); });</script>
<iframe src="page.html" style="width: 1600px; height: 900px; border: 0"></iframe>
<iframe src="page.html" style="width: 900px; height: 900px; border: 0"></iframe>
<iframe src="page.html" style="width: 400px; height: 900px; border: 0"></iframe>"""


@pytest.mark.site
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("site")
def test_the_first_screen_shows_sentence_picture_installation_and_three_lines(request, tmp_path):
    """Check the boxes on a screen of 1,600 x 900 pixels, and that none is wider than narrower screens."""
    pytest.importorskip("furo")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed")
    site = request.getfixturevalue("site")
    for folder in ("_static", "_images"):
        shutil.copytree(site / folder, tmp_path / folder)
    text = (site / "index.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</head>", f"{BOXES}</head>"), encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    result = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--hide-scrollbars", f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=20000", "--dump-dom",
         (tmp_path / "frames.html").as_uri()], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    found = json.loads(re.search(r'data-found="([^"]*)"', result.stdout)[1].replace("&quot;", '"'))
    pages = {page["width"]: page for page in found}
    assert pages.keys() == {1600, 900, 400}
    for width, page in pages.items():
        for name, (left, top, right, bottom) in page["boxes"].items():
            assert 0 <= left < right <= width, (width, name)
            assert 0 <= top < bottom, (width, name)
    assert {name: bottom for name, (*_, bottom) in pages[1600]["boxes"].items() if bottom > 900} == {}
