"""What a loader of `ParallelModel` needs to know of the plan: its batch, and the short batches that a step can run."""

from collections.abc import Callable, Iterator
from typing import Any

from autopar.errors import Problem, RuntimeInputError
from autopar.ir.degrees import Degrees
from autopar.runtime.data.loader import LoaderOptions, ParallelLoader, is_stream
from autopar.runtime.data.parts import Split
from autopar.runtime.model.inputs import sequences_to_run
from autopar.runtime.model.preflight_check import PreflightCheck
from autopar.runtime.model.shape_cache import ShapeCache

MAX_SEED = 2**63 - 1


def make_loader(
    source: Any,
    options: LoaderOptions,
    global_batch: int | None,
    *,
    degrees: Degrees,
    index: int,
    shapes: ShapeCache,
    preflight: PreflightCheck,
) -> ParallelLoader:
    """The loader of data-parallel rank `index`. Collective. Raises `RuntimeInputError` on all ranks."""
    planned = degrees.dp * shapes.base.micro_batch * degrees.num_micro_batches
    micro_batches = degrees.num_micro_batches if global_batch in (None, planned) else 1
    wanted = planned if global_batch is None else global_batch
    problems = list(_problems(source, options, wanted, degrees.dp))
    preflight.all_or_none("the data cannot be read", problems)
    split = Split(global_batch=wanted, index=index, count=degrees.dp, drop_last=options.drop_last)
    return ParallelLoader(
        source,
        split,
        options,
        agree=preflight.agree,
        lockstep=preflight.in_lockstep,
        short=_short(split, micro_batches, degrees, shapes),
    )


def _problems(source: Any, options: LoaderOptions, global_batch: Any, dp: int) -> Iterator[Problem]:
    if not _is_count(global_batch) or global_batch < 1 or global_batch % dp:
        rule = f"must be a whole number above 0 that the {dp} data-parallel ranks divide"
        yield Problem(path="global_batch", value=global_batch, rule=rule)
    if not _is_count(options.num_workers) or options.num_workers < 0:
        yield Problem(path="num_workers", value=options.num_workers, rule="must be a whole number of at least 0")
    if not _is_count(options.seed) or not 0 <= options.seed <= MAX_SEED:
        yield Problem(path="seed", value=options.seed, rule=f"must be a whole number from 0 to {MAX_SEED}")
    if not is_stream(source):
        if not len(source):
            yield Problem(path="dataset", rule="has no samples")
        return
    if not hasattr(source, "__iter__"):
        rule = "must have __getitem__ and __len__, or __iter__"
        yield Problem(path="dataset", value=type(source).__name__, rule=rule)
    elif hasattr(source, "__next__"):
        rule = "is an iterator, which can be read only once; pass an object whose __iter__ begins anew"
        yield Problem(path="dataset", value=type(source).__name__, rule=rule)
    if options.shuffle:
        rule = "cannot be true for a dataset without an index; shuffle in the dataset, by its own seed"
        yield Problem(path="shuffle", value=True, rule=rule)


def _short(split: Split, micro_batches: int, degrees: Degrees, shapes: ShapeCache) -> Callable[[int], str]:
    """Why a step cannot run a short global batch, by its size; an empty text if it can."""

    def reason(size: int) -> str:
        try:
            sequences_to_run(
                split.counts(size),
                shapes.base.micro_batch * micro_batches,
                micro_batches,
                pads=shapes.base.ignored is not None,
                captures=shapes.can_capture,
                wants_outputs=False,
                per_micro_batch=degrees.per_micro_batch,
            )
        except RuntimeInputError:
            of = f" of {micro_batches}" if micro_batches > 1 else ""
            return f"the model cannot ignore samples, nor do all ranks have the same multiple{of} of them"
        return ""

    return reason


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
