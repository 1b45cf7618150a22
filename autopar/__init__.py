"""autopar: an auto-parallel compiler pass for PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar._version import __version__

if TYPE_CHECKING:
    from autopar.api import parallelize
    from autopar.cost_model.estimate import Estimate
    from autopar.errors import AutoparError
    from autopar.estimation import estimate
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.plan import Plan
    from autopar.planning import coverage
    from autopar.rules.registry import register_rule
    from autopar.runtime.module import ParallelModel
    from autopar.runtime.rule_proof import prove_rule
    from autopar.search.result import SearchResult
    from autopar.searching import plan
    from autopar.trace.trace import trace

# The face is lazy: `import autopar` and `autopar --help` must not wait for torch.
_HOMES = {
    "coverage": "autopar.planning",
    "estimate": "autopar.estimation",
    "parallelize": "autopar.api",
    "plan": "autopar.searching",
    "AutoparError": "autopar.errors",
    "ClusterSpec": "autopar.ir.cluster",
    "Estimate": "autopar.cost_model.estimate",
    "Plan": "autopar.ir.plan",
    "ParallelModel": "autopar.runtime.module",
    "SearchResult": "autopar.search.result",
    "prove_rule": "autopar.runtime.rule_proof",
    "register_rule": "autopar.rules.registry",
    "trace": "autopar.trace.trace",
}
__all__ = [
    "AutoparError",
    "ClusterSpec",
    "Estimate",
    "ParallelModel",
    "Plan",
    "SearchResult",
    "__version__",
    "coverage",
    "estimate",
    "parallelize",
    "plan",
    "prove_rule",
    "register_rule",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
