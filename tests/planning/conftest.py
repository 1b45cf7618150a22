"""The models that tests of the search take are imported by their own names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "search"))
