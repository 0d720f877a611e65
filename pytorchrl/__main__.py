"""Run the command `pytorchrl` as `python -m pytorchrl`."""

from __future__ import annotations

import os
import sys

# Python has put the working directory on its path, where a file `numpy.py` would be imported in place of the package.
# Nothing else is imported before it is taken off, unless it contains this package.
if os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

from pytorchrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
