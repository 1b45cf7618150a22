"""The result of `autopar.tune` as data: trials, corrections of the prediction, and plans without a trial."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.cost_model.machine.profile import DeviceProfile
from autopar.files.plain_data import plain_of
from autopar.ir.sharding import Type
from autopar.search.measured.study import outcome_to_dict
from autopar.search.measured.tuning import Candidate, Outcome

if TYPE_CHECKING:
    from autopar.ir.plan import Plan

KIND, VERSION = "autopar tuning result", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTrial:
    """One plan that was tried: its prediction before any trial, its outcome, and the number of its trial."""

    number: int
    candidate: Candidate
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """One plan without a trial, and its believed step time."""

    candidate: Candidate
    believed_s: float
    chance: float  # that it is notably faster than the best measured plan
    why: str = ""  # why it cannot run


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of `autopar.tune`: the best measured plan, all trials, and the gain of measuring on.

    best           the position of the best trial in `tried`, None if no trial ran
    is_settled     another trial can hardly pay, and this ended the search
    chance_left    a bound of the chance that an unmeasured plan is notably faster than the best plan
    gain_left      the largest expected part of the step time that one more trial saves
    factors        on the seconds of computing and of the links of each tier

    >>> import torch, autopar
    >>> model, batch = torch.nn.Linear(8, 8), (torch.zeros(4, 8), torch.zeros(4, 8))
    >>> loss = torch.nn.functional.mse_loss
    >>> how = {"global_batch": 8, "trials": 1, "calibrate": False}
    >>> found = autopar.tune(model, "2xcpu", example_inputs=batch, loss_fn=loss, **how)
    >>> found.best, found.tried[0].outcome.state
    (0, 'complete')
    """

    model: str
    cluster: str
    objective: str
    global_batch: int
    sequence: int  # tokens
    tried: tuple[PlanTrial, ...]
    left: tuple[Left, ...]
    best: int | None
    is_settled: bool
    why: str
    chance_left: float
    gain_left: float
    factors: Mapping[str, float] = field(hash=False)
    seconds: float  # of the whole search
    notes: tuple[str, ...] = ()
    plan: "Plan | None" = field(default=None, compare=False)  # the best measured plan, as it runs
    profile: DeviceProfile | None = field(default=None, compare=False)  # corrected by the measurements

    @property
    def step_s(self) -> float | None:
        """The measured seconds of a step of the best plan."""
        outcome = None if self.best is None else self.tried[self.best].outcome
        return None if outcome is None or outcome.seconds is None else outcome.seconds.median

    @property
    def tokens_per_s(self) -> float | None:
        """The measured tokens per second of the best plan."""
        return None if self.step_s is None else self.global_batch * self.sequence / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the plan included.

        Returns:
            Dicts, lists, texts and numbers by the names of the fields, with "kind" and "version".

        >>> import torch, autopar
        >>> model, batch = torch.nn.Linear(8, 8), (torch.zeros(4, 8), torch.zeros(4, 8))
        >>> how = {"loss_fn": torch.nn.functional.mse_loss, "trials": 1, "calibrate": False}
        >>> autopar.tune(model, "2xcpu", example_inputs=batch, global_batch=8, **how).to_dict()["kind"]
        'autopar tuning result'
        """
        data = plain_of(self, {Type: str, Outcome: outcome_to_dict, DeviceProfile: lambda profile: profile.name})
        last = {name: data.pop(name) for name in ("tried", "left", "plan", "profile")}
        figures = {"step_s": self.step_s, "tokens_per_s": self.tokens_per_s}
        return {"kind": KIND, "version": VERSION, **data, **figures, **last}
