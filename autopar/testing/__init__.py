"""Checks that users may run on their own operators and models (docs/adding_an_operator.md).

It may import everything but the command line and `autopar.api`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.testing.checks import check_equivalence
    from autopar.testing.rule_proof import prove_rule

# Importing the package must not wait for torch.
_HOMES = {
    "check_equivalence": "autopar.testing.checks",
    "prove_rule": "autopar.testing.rule_proof",
}
__all__ = ["check_equivalence", "prove_rule"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
