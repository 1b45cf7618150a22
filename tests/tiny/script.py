"""Scripts of the repository as modules: tools and benchmarks are in no package."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


@cache
def script(path: str) -> ModuleType:
    """The module of a script such as ``tools/mutants.py``."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    if str((ROOT / path).parent) not in sys.path:  # a script imports its neighbours
        sys.path.append(str((ROOT / path).parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
