"""The built site, which several files of tests read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, process_environment


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build the site without network access, with warnings as errors, and return its directory.

    If `make docs` has just built a site, that site is used.
    """
    if "PYTORCHRL_SITE" in os.environ:
        return ROOT / os.environ["PYTORCHRL_SITE"]
    out = tmp_path_factory.mktemp("site")
    environment = process_environment(no_proxy="", https_proxy="http://127.0.0.1:9")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(out)]
    result = subprocess.run(
        command, cwd=out, env=environment, capture_output=True, text=True, check=False, timeout=580)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture(scope="session")
def names(site):
    """Return all names that the API reference describes."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind, entries in inventory.data.items() if kind.startswith("py:") for name in entries}
