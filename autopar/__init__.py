"""autopar: an auto-parallel compiler pass for PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar._version import __version__

if TYPE_CHECKING:
    from autopar.api import parallelize
    from autopar.errors import AutoparError
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.plan import Plan
    from autopar.planning import coverage
    from autopar.runtime.module import ParallelModel
    from autopar.trace.trace import trace

# The face is lazy: `import autopar` and `autopar --help` must not wait for torch.
_HOMES = {
    "coverage": "autopar.planning",
    "parallelize": "autopar.api",
    "AutoparError": "autopar.errors",
    "ClusterSpec": "autopar.ir.cluster",
    "Plan": "autopar.ir.plan",
    "ParallelModel": "autopar.runtime.module",
    "trace": "autopar.trace.trace",
}
__all__ = ["AutoparError", "ClusterSpec", "ParallelModel", "Plan", "__version__", "coverage", "parallelize", "trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
