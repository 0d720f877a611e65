"""The style sheet, the scripts and the content security policy of the monitor's pages."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources


@functools.cache
def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return (resources.files("pytorchrl.monitor") / "assets" / name).read_text(encoding="utf-8")


def style(*, charts: bool = False) -> str:
    """Return the style sheet of a page; `charts`: with that of uPlot, which draws charts."""
    return asset("page.css") + (asset("uplot/uPlot.css") if charts else "")


def board_script() -> str:
    """Return the script of the list of runs."""
    return "\n".join(map(asset, ("theme.js", "tables.js", "board.js")))


def report_script() -> str:
    """Return the script of a report."""
    return "\n".join(map(asset, ("uplot/uPlot.js", "theme.js", "tables.js", "charts.js")))


def policy(script: str) -> str:
    """Return a content security policy that protects a page of the monitor.

    The page may only run the JavaScript code `script`, use inline styles, show embedded images and media, and send
    requests to its own server.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
            "media-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'")
