"""Help for tests of tracebacks."""

from __future__ import annotations

import re


def without_forks_frames(text):
    """Return the output of a script that ran in a fork without the frames that a script in a new process lacks."""
    return re.sub(r'  File "(?:[^"]*/forkserver\.py|<frozen runpy>)", line .*\n(?:    .*\n)*', "", text)
