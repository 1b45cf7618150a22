"""Parameters that only a constructor computes, of a model on meta."""

import torch
from torch import nn

from autopar.runtime.parameters.materialise import parameter_source


class Kept(nn.Module):
    """Keeps what it was built with, as transformers models keep their config."""

    def __init__(self, scale: float = 2.5) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.Linear(4, 4)
        self.log_scale = nn.Parameter(torch.tensor(scale))
        self.table = nn.Parameter(torch.randn(4))


def test_what_a_constructor_computes_is_computed_again() -> None:
    with torch.device("meta"):
        first, second = Kept(1.5), Kept(1.5)
    source, again = (parameter_source(m, state=None, seed=0, dtype=None) for m in (first, second))
    assert float(source("log_scale")) == 1.5
    assert torch.equal(source("table"), again("table"))
    assert source("table").abs().sum() > 0
