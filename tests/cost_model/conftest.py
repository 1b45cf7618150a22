"""What lies beside this file and the tiny models of ../tiny are imported by their own names."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "tiny"):
    sys.path.insert(0, str(folder))
