"""From a dataset and a plan to a loader. Arguments are checked on all ranks before any rank reads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from autopar.errors import Problem
from autopar.ir.degrees import Degrees
from autopar.runtime.data.loader import LoaderOptions, ParallelLoader, is_stream
from autopar.runtime.data.parts import Split

MAX_SEED = 2**63 - 1


class Ranks(Protocol):
    """What ranks tell each other of their data. Collective: `autopar.runtime.model.preflight_check`."""

    def agree(self, values: Mapping[str, object]) -> None: ...
    def all_or_none(self, message: str, problems: Sequence[Problem]) -> None: ...
    def in_lockstep(self, loader: Iterable[Any]) -> Iterator[Any]: ...


def make_loader(
    source: Any,
    options: LoaderOptions,
    global_batch: int | None,
    *,
    degrees: Degrees,
    micro_batch: int,
    index: int,
    ranks: Ranks,
    refusal: Callable[[Sequence[int], int], str],
) -> ParallelLoader:
    """The loader of data-parallel rank `index`. Raises `RuntimeInputError` on all ranks."""
    planned = degrees.dp * micro_batch * degrees.num_micro_batches
    wanted = planned if global_batch is None else global_batch
    ranks.all_or_none("the data cannot be read", list(_problems(source, options, wanted, degrees.dp)))
    split = Split(global_batch=wanted, index=index, count=degrees.dp, drop_last=options.drop_last)
    micro_batches = degrees.num_micro_batches if wanted == planned else 1
    return ParallelLoader(
        source,
        split,
        options,
        agree=ranks.agree,
        lockstep=ranks.in_lockstep,
        short=lambda size: refusal(split.counts(size), micro_batches),
    )


def _problems(source: Any, options: LoaderOptions, global_batch: Any, dp: int) -> Iterator[Problem]:
    if not _is_count(global_batch) or global_batch < 1 or global_batch % dp:
        rule = f"must be a whole number above 0 that the {dp} data-parallel ranks divide"
        yield Problem(path="global_batch", value=global_batch, rule=rule)
    if not _is_count(options.num_workers) or options.num_workers < 0:
        yield Problem(path="num_workers", value=options.num_workers, rule="must be a whole number of at least 0")
    if options.prefetch_factor is not None and not options.num_workers:
        yield Problem(path="prefetch_factor", rule="needs num_workers of at least 1", value=options.prefetch_factor)
    if not _is_count(options.seed) or not 0 <= options.seed <= MAX_SEED:
        yield Problem(path="seed", value=options.seed, rule=f"must be a whole number from 0 to {MAX_SEED}")
    if isinstance(source, DataLoader):
        rule = "must be a dataset, not a loader; pass loader.dataset, or iterate over parallel.batches(loader)"
        yield Problem(path="dataset", value=type(source).__name__, rule=rule)
        return
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
