"""The helper modules of this folder, the tiny models and the worlds of ranks are imported by their own names."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tiny")]
