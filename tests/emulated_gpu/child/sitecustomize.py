"""Give every new Python program that has this folder in PYTHONPATH the emulated GPU, before it imports torch.

With it, worker processes of a test see the same devices as the test.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent.parent))

from tests.emulated_gpu.activation import activate
from tests.emulated_gpu.build import build

activate(build())
