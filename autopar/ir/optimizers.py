"""The state that optimizers hold, for the memory count: one entry of `OPTIMIZERS` for each.

An entry says how many bytes one rank holds beside a parameter and its gradient. Optimizers of single elements hold
state in the layout of the parameter, so ZeRO and tensor parallelism divide it. An optimizer that looks at whole
matrices gets gathered values (`autopar.runtime.parameters.shown_tensor`), and says so.

A plan trains with any optimizer. Its memory is counted for the one that `Degrees.optimizer` names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autopar.errors import did_you_mean

_STEP_BYTES = 4  # torch.optim counts steps in a float32 of each parameter
_QUANTISED_FROM, _QUANTISED_BLOCK, _CODE_VALUES = 4096, 256, 256  # torchao.optim.AdamW8bit


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPart:
    """A trained parameter as an optimizer on one rank sees it."""

    shape: Sequence[int]  # of the whole parameter, as the model shows it
    num_elements: int  # that this rank holds
    element_bytes: int
    is_hidden: bool  # of a repeated block, which is neither the embedding nor the head

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer: the bytes of state that it holds for a parameter on one rank, and where that is written."""

    name: str
    kind: str  # the class, as module:name
    state_bytes: Callable[[OwnPart], int]  # without the number of steps
    source: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the class
    takes: Callable[[OwnPart], bool] = lambda part: True  # the default optimizer trains the other parameters
    runs_split: bool = True  # whether it updates parameters that are split over ranks
    counts_steps: Callable[[OwnPart], bool] = lambda part: True
    is_whole: Callable[[OwnPart], bool] = lambda part: False  # whether it gathers a parameter's gradient in every step

    def held_bytes(self, part: OwnPart) -> int:
        """The state of a parameter with its number of steps."""
        return self.state_bytes(part) + (_STEP_BYTES if self.counts_steps(part) else 0)


def _adamw(part: OwnPart) -> int:
    return 2 * part.num_bytes


def _adafactor(part: OwnPart) -> int:
    """One number for each row and each column, on every rank; a parameter of one dimension keeps its elements."""
    if len(part.shape) < 2:
        return part.num_bytes
    rows, columns = prod(part.shape[:-1]), prod((*part.shape[:-2], part.shape[-1]))
    return (rows + columns) * part.element_bytes


def _adamw8bit(part: OwnPart) -> int:
    """Two moments of one byte an element, a float32 scale for each block of 256, and two tables of 256 values."""
    if part.num_elements < _QUANTISED_FROM or part.num_elements % _QUANTISED_BLOCK:
        return _adamw(part)
    moment = part.num_elements + 4 * (part.num_elements // _QUANTISED_BLOCK) + 4 * _CODE_VALUES
    return 2 * moment


def _takes_muon(part: OwnPart) -> bool:
    return part.is_hidden and len(part.shape) == 2


OPTIMIZERS = {
    o.name: o
    for o in (
        Optimizer(
            name="adamw",
            kind="torch.optim:AdamW",
            state_bytes=_adamw,
            source="torch.optim.AdamW; Kingma and Ba 2015: two moments",
        ),
        Optimizer(
            name="sgd",
            kind="torch.optim:SGD",
            state_bytes=lambda part: 0,
            source="torch.optim.SGD without momentum",
            counts_steps=lambda part: False,
        ),
        Optimizer(
            name="sgd-momentum",
            kind="torch.optim:SGD",
            options={"momentum": 0.9},
            state_bytes=lambda part: part.num_bytes,
            source="torch.optim.SGD with momentum",
            counts_steps=lambda part: False,
        ),
        Optimizer(
            name="adafactor",
            kind="torch.optim:Adafactor",
            state_bytes=_adafactor,
            source="torch.optim.Adafactor; Shazeer and Stern 2018, section 3: rows and columns of the second moment",
            is_whole=lambda part: len(part.shape) > 1,
        ),
        Optimizer(
            name="adamw8bit",
            kind="torchao.optim:AdamW8bit",
            state_bytes=_adamw8bit,
            source="torchao.optim.AdamW8bit; Dettmers et al. 2022: moments in 8 bits in blocks of 256 elements",
            runs_split=False,  # it compiles its step
        ),
        Optimizer(
            name="muon",
            kind="torch.optim:Muon",
            takes=_takes_muon,
            state_bytes=lambda part: part.num_bytes if _takes_muon(part) else _adamw(part),
            source="torch.optim.Muon for matrices of repeated blocks, torch.optim.AdamW for all other parameters",
            is_whole=_takes_muon,
            counts_steps=lambda part: not _takes_muon(part),
        ),
    )
}
DEFAULT_OPTIMIZER = "adamw"


def optimizer_named(name: str) -> Optimizer:
    """The entry of an optimizer. For an unknown name AdamW's, as `assumption_of` says."""
    return OPTIMIZERS.get(name, OPTIMIZERS[DEFAULT_OPTIMIZER])


def assumption_of(name: str) -> str | None:
    """What is assumed about an optimizer that has no entry; None for a known one."""
    if name in OPTIMIZERS:
        return None
    return (
        f"optimizer {name[:80]!r} is unknown: its state is counted as that of {DEFAULT_OPTIMIZER}; "
        f"{did_you_mean(name, tuple(OPTIMIZERS))}"
    )
