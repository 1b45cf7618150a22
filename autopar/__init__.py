"""autopar: an auto-parallel compiler pass for PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar._version import __version__ as __version__

if TYPE_CHECKING:
    from autopar.api import parallelize as parallelize
    from autopar.capture.program import capture_program as capture_program
    from autopar.commands.tune import tune as tune
    from autopar.cost_model.estimate import Estimate as Estimate
    from autopar.errors import AutoparError as AutoparError
    from autopar.ir.cluster import ClusterSpec as ClusterSpec
    from autopar.ir.plan import Plan as Plan
    from autopar.planning.estimate import estimate as estimate
    from autopar.planning.fixed import coverage as coverage
    from autopar.planning.search import plan as plan
    from autopar.rules.registry import register_rule as register_rule
    from autopar.runtime.data.loader import ParallelLoader as ParallelLoader
    from autopar.runtime.model.module import ParallelModel as ParallelModel
    from autopar.runtime.parameters.grad_scaler import GradScaler as GradScaler
    from autopar.runtime.recording.run import Run as Run
    from autopar.search.measured.result import TuneResult as TuneResult
    from autopar.search.result.result import SearchResult as SearchResult
    from autopar.testing.rule_proof import prove_rule as prove_rule

# The face is lazy: `import autopar` and `autopar --help` must not wait for torch.
_HOMES = {
    "coverage": "autopar.planning.fixed",
    "estimate": "autopar.planning.estimate",
    "parallelize": "autopar.api",
    "plan": "autopar.planning.search",
    "tune": "autopar.commands.tune",
    "TuneResult": "autopar.search.measured.result",
    "AutoparError": "autopar.errors",
    "ClusterSpec": "autopar.ir.cluster",
    "Estimate": "autopar.cost_model.estimate",
    "GradScaler": "autopar.runtime.parameters.grad_scaler",
    "Plan": "autopar.ir.plan",
    "ParallelLoader": "autopar.runtime.data.loader",
    "ParallelModel": "autopar.runtime.model.module",
    "Run": "autopar.runtime.recording.run",
    "SearchResult": "autopar.search.result.result",
    "prove_rule": "autopar.testing.rule_proof",
    "register_rule": "autopar.rules.registry",
    "capture_program": "autopar.capture.program",
}
__all__ = [*_HOMES]  # noqa: PLE0604  # all of them are text


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
