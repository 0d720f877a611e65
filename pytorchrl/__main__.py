"""Run the command `pytorchrl` as `python -m pytorchrl`."""

from __future__ import annotations

import sys

from pytorchrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
