"""`ParallelLoader`: batches of one rank, and a position in the data that every plan can go on from."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autopar.errors import Problem, RuntimeInputError, did_you_mean
from autopar.runtime.data.order import undisturbed
from autopar.runtime.data.parts import LoaderOptions as LoaderOptions
from autopar.runtime.data.parts import MapParts, RankPart, Split, StreamParts, state_of

MAX_SEED = 2**63 - 1
_VERSION = 1
_KEYS = ("version", "epoch", "offset", "seed", "shuffle", "length", "stream")


class ParallelLoader:
    """The batches of this rank in the rest of an epoch; `parallel.loader(dataset)` makes it.

    A batch counts as read when the loop gets it. Batches that workers hold in advance do not. Every iteration begins
    with the first sample that was not read, so a loop that was left goes on.

    Example:
        >>> loader = parallel.loader(torch.utils.data.TensorDataset(*batch), shuffle=True)
        >>> for epoch in range(loader.epoch, 2):
        ...     for part in loader:
        ...         loss = parallel.forward_backward(part)
        >>> loader.state_dict()["epoch"]
        2
    """

    def __init__(
        self,
        source: Any,
        split: Split,
        options: LoaderOptions,
        *,
        agree: Callable[[Mapping[str, object]], None],
        lockstep: Callable[[Iterable[Any]], Iterator[Any]],
        short: Callable[[int], str],
    ) -> None:
        self._source, self._split, self._options = source, split, options
        self._agree, self._lockstep, self._short = agree, lockstep, short
        self._length = None if is_stream(source) else len(source)
        self._epoch, self._offset, self._turn = 0, 0, 0
        self._first_state = self._state = state_of(source) if self._length is None else None
        agree(self._facts())
        self._refuse_short()

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0."""
        return self._epoch

    @property
    def global_batch(self) -> int:
        """The samples of one batch on all ranks."""
        return self._split.global_batch

    def __len__(self) -> int:
        """The number of batches of a whole epoch. Raises `TypeError` for a dataset without a length."""
        if self._length is None:
            raise TypeError("the dataset has no length, so the number of its batches is not known")
        return sum(1 for _ in self._split.sizes(self._length))

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the rest of the epoch. Collective, one small all-gather for each batch."""
        self._turn += 1
        turn = self._turn
        self._agree(self._facts())
        self._refuse_short()
        for batch, place, state in self._lockstep(self._read()):
            self._offset, self._state = place, state
            yield batch
            if turn != self._turn:
                raise RuntimeInputError(
                    "another loop over this loader began, or its state was loaded; leave this loop (break) before"
                )
        self._epoch, self._offset, self._state = self._epoch + 1, 0, self._first_state

    def state_dict(self) -> dict[str, Any]:
        """Give the position in the data, as plain data. It is equal on all ranks, and does not depend on the plan.

        Returns:
            The epoch, the samples of it that were read, and the values that decide the order. Of a dataset with a
            state, this state too.

        Example:
            >>> loader = parallel.loader(torch.utils.data.TensorDataset(*batch))
            >>> loader.state_dict()["offset"]
            0
        """
        options = self._options
        position = {"epoch": self._epoch, "offset": self._offset, "length": self._length}
        return {
            "version": _VERSION,
            **position,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "stream": self._state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that `state_dict` gave under any plan.

        Args:
            state: The position.

        Raises:
            RuntimeInputError: The position is of another dataset, seed or order. The message lists every difference.

        Example:
            >>> loader = parallel.loader(torch.utils.data.TensorDataset(*batch))
            >>> loader.load_state_dict(loader.state_dict() | {"epoch": 3})
            >>> loader.epoch
            3
        """
        problems = list(self._problems_of(state))
        if problems:
            raise RuntimeInputError("the position in the data cannot be loaded", problems)
        self._turn += 1
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._state = state["stream"] if self._offset else self._first_state

    def _problems_of(self, state: Mapping[str, Any]) -> Iterator[Problem]:
        for key in state:
            if key not in _KEYS:
                yield Problem(path=str(key), rule=f"is not a known key; {did_you_mean(str(key), _KEYS)}")
        missing = [key for key in _KEYS if key not in state]
        yield from (Problem(path=key, rule="is required") for key in missing)
        if missing:
            return
        if state["version"] != _VERSION:
            yield Problem(path="version", value=state["version"], rule=f"must be {_VERSION}, which this autopar reads")
        for key in ("epoch", "offset"):
            if not isinstance(state[key], int) or isinstance(state[key], bool) or state[key] < 0:
                yield Problem(path=key, value=state[key], rule="must be a whole number of at least 0")
                return
        mine = self.state_dict()
        remedies = {"seed": "pass the saved seed", "shuffle": "pass the saved value", "length": "pass the same dataset"}
        for key, remedy in remedies.items():
            if state[key] != mine[key]:
                rule = f"was {state[key]} when the position was saved, and is {mine[key]} here"
                yield Problem(path=key, rule=rule, suggestion=f"{remedy}, or start without the position")
        if self._length is not None and state["offset"] > self._length:
            yield Problem(path="offset", value=state["offset"], rule=f"must be at most {self._length}")
        if state["stream"] is not None and self._first_state is None and not hasattr(self._source, "load_state_dict"):
            yield Problem(path="stream", rule="is the state of a dataset with load_state_dict; this dataset has none")

    def _facts(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        position = {key: value for key, value in self.state_dict().items() if key not in ("version", "stream")}
        return position | {"global_batch": self.global_batch, "drop_last": self._split.drop_last}

    def _refuse_short(self) -> None:
        """Raise before an epoch whose last batch could not run, and for an epoch without a batch."""
        if self._length is None:
            return
        left, whole = self._length - self._offset, self.global_batch
        if not self._offset and not any(self._split.sizes(self._length)):
            raise RuntimeInputError(
                f"drop_last leaves no batch of {self._length} samples, because a global batch has {whole}; leave "
                "drop_last out, or pass a smaller global_batch"
            )
        reason = self._short(left % whole) if left % whole and not self._split.drop_last else ""
        if reason:
            raise RuntimeInputError(
                f"the last of {left} samples are a batch of {left % whole}, a full one has {whole}, and {reason}; pass "
                "drop_last=True, which leaves them out of the epoch"
            )

    def _read(self) -> Iterator[RankPart]:
        options = self._options
        place = (self._source, options, self._split, self._epoch, self._offset)
        loader = DataLoader(
            MapParts(*place) if self._length is not None else StreamParts(*place, state=self._state),
            batch_size=None,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else torch draws a number of the training loop's
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            pin_memory=options.pin_memory,
        )
        return iter(loader) if options.num_workers else undisturbed(loader)


def _as_it_is(item: Any) -> Any:
    return item


def is_stream(source: Any) -> bool:
    """Whether a dataset is read from its beginning to its end, and not by index."""
    return isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__"))


def loader_problems(source: Any, options: LoaderOptions, global_batch: Any, dp: int) -> Iterator[Problem]:
    """Why a dataset cannot be read so."""
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
