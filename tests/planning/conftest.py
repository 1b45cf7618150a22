"""The models that tests of the search take, and the tiny ones, are imported by their own names."""

import sys
from pathlib import Path

for folder in ("search", "tiny"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
