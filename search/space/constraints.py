"""The constraints of a search: the values that the user fixed or forbade, and the limits of the model and the cluster.

`autopar.planning.options.PlanOptions` is the user's request. `Constraints` is the same request, checked for one model
on one cluster. Some words of ``fix`` are dimensions of the space (`WORDS`). The other words (`PINS`) hold for every
plan of the search. This module does not import numpy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import InputError, PlanError, Problem, did_you_mean
from autopar.ir.degrees import degrees_from
from autopar.ir.offload import NO_OFFLOAD, OFFLOADS
from autopar.search.space.dimensions import BY_WORD, WORDS

EVERY_BLOCK = 1_000_000  # `recompute_blocks` of a plan that recomputes all blocks
# words of `fix` with one value, which all plans of the search share
PINS = (
    *("sequence_parallel", "per_micro_batch", "recompute", "recompute_blocks", "cut_at", "regather", "loss_chunks"),
    *("precision", "reduce_dtype", "optimizer", "dispatch", "context"),
)
# words of `fix` and `forbid` with values that the search tries one after another, each in a search of its own
IN_TURN = {"offload": OFFLOADS}
_PRICED_AS = ("recompute", "recompute_blocks", "regather")  # pins that pricing decides if they are not given

Values = Mapping[str, tuple[Any, ...]]  # values by word


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Everything that decides which candidates a search lists.

    A candidate uses `num_devices` devices, or one of `fewer_devices`. Just one of `global_batch` and `local_batch` is
    given.
    """

    num_devices: int
    most_stages: int  # calls of the model that can be cut into stages
    tensor_degrees: tuple[int, ...]
    global_batch: int | None = None  # sequences of a step, of all ranks
    local_batch: int | None = None  # sequences of a step, of each data-parallel rank
    accumulates: bool = True  # whether the batch may be split in time without changing the loss
    accumulates_singly: bool = True  # whether a global micro-batch of it may be one sequence
    fewer_devices: tuple[int, ...] = ()
    context_degrees: tuple[int, ...] = (1,)
    expert_degrees: tuple[int, ...] = (1,)
    devices_per_host: float | None = None  # None: the order of ranks makes no difference
    fix: Values = field(default_factory=dict, hash=False)  # values that a word must have
    forbid: Values = field(default_factory=dict, hash=False)  # values that a word must not have
    cuts: tuple[int, ...] | None = None  # calls before which stages begin; None: chosen by the search

    def __post_init__(self) -> None:
        assert (self.global_batch is None) != (self.local_batch is None), (self.global_batch, self.local_batch)

    def narrowed(self, fix: Mapping[str, Any] | None = None, forbid: Mapping[str, Any] | None = None) -> "Constraints":
        """The same limits with other values fixed and forbidden. Raises `InputError` as `checked_values` does."""
        fixed, forbidden = checked_values(fix, forbid)
        return replace(self, fix=fixed, forbid=forbidden)

    def allows(self, word: str, value: int | str) -> bool:
        """Whether a word may have a value."""
        return (word not in self.fix or value in self.fix[word]) and value not in self.forbid.get(word, ())

    @property
    def offloads(self) -> tuple[str, ...]:
        """The values of `offload` that a plan may have: the given ones, or else the ones that are not forbidden."""
        given = self.fix.get("offload", OFFLOADS)
        return tuple(value for value in OFFLOADS if value in given and self.allows("offload", value))

    @property
    def first_offloads(self) -> tuple[str, ...]:
        """The values that are searched whether memory is short or not."""
        if "offload" in self.fix or NO_OFFLOAD not in self.offloads:
            return self.offloads
        return (NO_OFFLOAD,)

    def batch_of_rank(self, dp: int) -> int | None:
        """Sequences of one of `dp` data-parallel ranks in a step; None if they do not divide the batch."""
        if self.global_batch is None:
            return self.local_batch
        return self.global_batch // dp if self.global_batch % dp == 0 else None

    @property
    def recompute_blocks(self) -> int | tuple[int, ...] | None:
        """Blocks that every stage recomputes, or each stage; None: the fewest with which the plan fits."""
        return recompute_blocks_of(self.fix)

    @property
    def num_stages(self) -> int | None:
        """The number of stages of every plan, if `cuts` or `recompute_blocks` decide it."""
        counts = {"cut_at": len(self.cuts) + 1} if self.cuts is not None else {}
        if isinstance(self.recompute_blocks, tuple):
            counts["recompute_blocks"] = len(self.recompute_blocks)
        if len(set(counts.values())) > 1:
            said = " and ".join(f"{word} {count}" for word, count in counts.items())
            raise PlanError(f"the numbers of stages differ: {said}; recompute_blocks has one number for every stage")
        return next(iter(counts.values()), None)

    def without_one(self) -> Iterator[tuple[str, "Constraints"]]:
        """The constraints without each dimension of `fix` and `forbid`, behind that dimension as text."""
        for kind, given in (("fix", self.fix), ("forbid", self.forbid)):
            for word, values in ((word, values) for word, values in given.items() if word in (*WORDS, *IN_TURN)):
                fewer: Any = {other: theirs for other, theirs in given.items() if other != word}
                yield f"{kind} {word} = {', '.join(map(str, values))}", replace(self, **{kind: fewer})


def checked_values(
    fix: Mapping[str, Any] | None = None, forbid: Mapping[str, Any] | None = None
) -> tuple[Values, Values]:
    """`fix` and `forbid` with a tuple of values for each word."""
    problems: list[Problem] = []
    checked: list[dict[str, tuple[Any, ...]]] = []
    for option, given in (("fix", fix), ("forbid", forbid)):
        checked.append({})
        for word, value in (given or {}).items():
            values = tuple(value) if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            if word in PINS and option == "fix":
                pinned, wrong = _pinned(word, value)
                problems += wrong
                checked[-1][word] = (pinned,)
            elif word in IN_TURN:
                rule = f"must be one of {', '.join(IN_TURN[word])}"
                wrong = [value for value in values if value not in IN_TURN[word]]
                problems += [Problem(path=f"{option} {word}", value=value, rule=rule) for value in wrong]
                checked[-1][word] = values
            elif word not in WORDS:
                known = (*WORDS, *IN_TURN, *PINS) if option == "fix" else (*WORDS, *IN_TURN)
                rule = "can only be fixed" if word in PINS else f"is unknown; {did_you_mean(word, known)}"
                problems.append(Problem(path=f"{option} {word}", rule=rule))
            else:
                problems += [p for v in values if (p := BY_WORD[word].problem(f"{option} {word}", v)) is not None]
                checked[-1][word] = values
    if checked[0].get("recompute") == ("auto",) and "recompute_blocks" in checked[0]:
        rule = "needs recompute = selective or full; with auto the search decides the blocks"
        problems.append(Problem(path="fix recompute_blocks", rule=rule))
    if problems:
        raise InputError("the search cannot be narrowed like this", problems)
    return checked[0], checked[1]


def recompute_blocks_of(fix: Values) -> int | tuple[int, ...] | None:
    """How many blocks of every stage, or of each stage, recompute under `fix`; None if it does not say."""
    if fix.get("recompute") == ("none",):
        return 0
    if "recompute_blocks" in fix:
        blocks: int | tuple[int, ...] = fix["recompute_blocks"][0]
        return blocks
    return EVERY_BLOCK if fix.get("recompute", ("auto",)) != ("auto",) else None


def is_selective(fix: Values) -> bool:
    """Whether plans may recompute selectively under `fix`. A number of blocks without a word means full."""
    return fix.get("recompute", ("full",) if "recompute_blocks" in fix else ("auto",))[0] in ("selective", "auto")


def most_level_of(fix: Values) -> int:
    """The highest level of recomputation of plans under `fix`, a position in `RECOMPUTE`."""
    return 1 if fix.get("recompute") == ("selective",) else 2


def shared_degrees(fix: Values) -> dict[str, Any]:
    """The fields of `Degrees` that `fix` gives to every plan and that pricing does not decide."""
    return {word: fix[word][0] for word in PINS if word in fix and word not in _PRICED_AS}


def _pinned(word: str, value: Any) -> tuple[Any, list[Problem]]:
    """The one value of a word of `PINS`, in the form that a plan or its degrees have."""
    if isinstance(value, tuple) and len(value) == 1 and word != "cut_at":
        value = value[0]
    if word == "regather":
        rule = "must be true or false"
        return value, [] if isinstance(value, bool) else [Problem(path=f"fix {word}", value=value, rule=rule)]
    try:
        return getattr(degrees_from({word: value}), word), []
    except PlanError as error:
        return value, [replace(problem, path=f"fix {problem.path}") for problem in error.problems]
