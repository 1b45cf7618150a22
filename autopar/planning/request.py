"""What is asked of a search, checked before anything costs time."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autopar._version import __version__
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.errors import InputError, PlanError, Problem, did_you_mean
from autopar.planning.degrees import nearest_divisors
from autopar.planning.options import TOP, TRIALS
from autopar.search.driver.study import study_place
from autopar.search.result.result import OBJECTIVES, ON_FEWER_DEVICES
from autopar.search.space.candidates import wishes

if TYPE_CHECKING:
    from autopar.cost_model.machine.machine import Machine
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.program import Program
    from autopar.search.bounds.lower_bounds import Machinery


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What is asked of a search beside the model and the cluster; the words of `plan`.

    The batch is that of all ranks, or `local_batch` of each data-parallel one: then values are of one sequence. With
    `report` the result has what only a report draws: what-if curves and one block as a graph.
    Raises `InputError` where a word or a value is none.
    """

    global_batch: int | None = None
    local_batch: int | None = None
    objective: str = "time"
    fix: Mapping[str, Any] = field(default_factory=dict)
    forbid: Mapping[str, Any] = field(default_factory=dict)
    top: int = TOP
    trials: int = TRIALS
    seed: int = 0
    timeout_s: float | None = None
    study: str | None = None
    what_if: bool = False
    profile: DeviceProfile | None = None
    precision: str | None = None
    report: bool = False

    def __post_init__(self) -> None:
        wishes(self.fix, self.forbid)
        if self.study is not None:
            study_place(self.study, {})
        if self.objective not in OBJECTIVES:
            raise InputError(f"unknown objective {self.objective!r}; {did_you_mean(str(self.objective), OBJECTIVES)}")
        batch = "global_batch" if self.local_batch is None else "local_batch"
        least = {batch: 1, "top": 0, "trials": 0, "seed": 0}
        problems = [
            Problem(path=word, value=value, rule=f"must be a whole number of at least {lowest}")
            for word, lowest in least.items()
            if isinstance(value := getattr(self, word), bool) or not isinstance(value, int) or value < lowest
        ]
        if self.local_batch is not None and self.global_batch is not None:
            problems.append(Problem(path="local_batch", rule="stands beside global_batch", suggestion="keep one"))
        if self.timeout_s is not None and not 0 <= self.timeout_s < float("inf"):
            problems.append(Problem(path="timeout_s", value=self.timeout_s, rule="must be a number of seconds"))
        if problems:
            raise InputError("the search cannot be run like this", problems)

    def check(self, num_devices: int) -> None:
        """Raises `PlanError` with the nearest legal values where no value of a fixed degree divides the devices."""
        if self.objective in ON_FEWER_DEVICES:
            return  # some part of the cluster may have as many
        problems = []
        for word in ("pp", "tp", "dp_shard", "dp_replicate"):
            values = wishes(self.fix).fix.get(word, (1,))
            if all(num_devices % int(value) for value in values):
                near = sorted({one for value in values for one in nearest_divisors(num_devices, int(value))})
                hint = f"nearest: {' or '.join(map(str, near))}"
                rule = f"must divide the {num_devices} devices"
                problems.append(Problem(path=word, value=_one(values), rule=rule, suggestion=hint))
        if problems:
            raise PlanError("the degrees do not fit", problems)


def _one(values: tuple[int | str, ...]) -> object:
    return values[0] if len(values) == 1 else values


def question_of(
    asked: SearchRequest, program: "Program", cluster: "ClusterSpec", on: "Machinery", name: str
) -> dict[str, str | int]:
    """What a study answers, as its attributes: all that prices and candidates depend on."""
    about = question_about(asked, cluster, on.machine, on.precision, name)
    return about | {"engine": on.engine.name, "fingerprint": program.fingerprint, "sequence": program.sequence or 1}


def question_about(
    asked: SearchRequest, cluster: "ClusterSpec", machine: "Machine", precision: str, name: str
) -> dict[str, str | int]:
    """The part of `question_of` that can be said without the program."""
    wanted = wishes(asked.fix, asked.forbid)

    def words(given: Mapping[str, tuple[int | str, ...]]) -> str:
        return json.dumps({word: sorted(map(str, values)) for word, values in given.items()}, sort_keys=True)

    profile = repr(replace(machine, assumptions=()))  # those of a profile's age change from day to day
    return {
        "autopar": __version__,
        "model": name,
        "cluster": cluster.name,
        "cluster_sha256": _sha256(json.dumps(cluster.to_dict(), sort_keys=True)),
        "precision": precision,
        "profile": machine.profile.name,
        "profile_sha256": _sha256(profile),
        "batch": f"global {asked.global_batch}" if asked.local_batch is None else f"local {asked.local_batch}",
        "objective": asked.objective,
        "fix": words(wanted.fix),
        "forbid": words(wanted.forbid),
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
