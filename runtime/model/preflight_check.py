"""The check before every step that all ranks run the same step on data that fits, by one small all-gather.

Ranks that differ only in `tp`, `cp` or `pp` must hold the same sequences. Shapes may differ between ranks in the
number of sequences only. All ranks must be at the same step. A difference is an error on all ranks, so that no rank
waits in a collective that another rank never enters.

The cost is an all-gather of 8 × (7 + 2 × inputs) bytes a rank, over gloo on the host, and a checksum of the inputs. Of
an input above 2 MiB an evenly spread part is read, so a difference in a few elements may be missed. Inputs on a GPU are
copied back for it; pass them on CPU to avoid the copy. On 2 gloo ranks of 2 shared CPU cores it took 0.7 ms for
8 × 1,024 token ids and labels, 2.1 ms for 32 images (least of 15 rounds, torch 2.13, 2026-11-23,
`benchmarks/agreement.py`).

A rank also says here whether it is unsure of the indices in its batch (`autopar.runtime.model.index_check`).
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar._torch import private
from autopar.errors import Problem, RuntimeInputError
from autopar.ir.program import InputInfo
from autopar.runtime.checkpoint.saving import Saver
from autopar.runtime.codegen.randomness import seed_from
from autopar.runtime.distributed.mesh import RankMesh, ranks_by
from autopar.runtime.distributed.mesh import named_ranks as _ranks
from autopar.runtime.model.inputs import RankBatch, batch_error
from autopar.runtime.parameters.grad_scaler import SAME_SETTINGS

_KINDS = (
    "reading data",
    "at the end of its data",
    "failing",
    "in forward_backward",
    "in evaluate",
    "logging metrics",
    "not saved",
)
READING, ENDED, FAILED, STEP, EVALUATION, LOGGING, NOT_SAVED = range(len(_KINDS))
NUM_SAMPLED = 16  # elements of a parameter
CHECKSUM_BYTES = 2**21  # of an input, for its checksum
FITS, UNFIT, UNSURE, CHANGED = range(4)  # knowledge of a rank about its batch; CHANGED: its model is another one
_Row = Sequence[int]  # kind and mode, step, knowledge of the batch, sequences, scaler; per input shape and checksum
_OTHERS = "(not in the example)"  # all inputs that the example has not


class PreflightCheck:
    """Compares the next call of the ranks: kind, mode, step, shapes, data, and whether a save in a thread failed."""

    def __init__(self, mesh: RankMesh, inputs: Sequence[InputInfo], saver: Saver) -> None:
        self.mesh, self.inputs, self.saver = mesh, tuple(inputs), saver
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        on_gpu = self.world_size > 1 and dist.get_backend() != "gloo"
        self._group = dist.new_group(backend="gloo", timeout=private.group_timeout()) if on_gpu else None

    def check(
        self, kind: int, training: bool, step: int, batch: RankBatch, unsure: bool, scaler: str = "", change: str = ""
    ) -> tuple[list[int], bool]:
        """Every rank's number of sequences, and whether one is unsure of indices. Raises on all ranks."""
        kind = NOT_SAVED if self.saver.failure else kind
        known = CHANGED if change else UNFIT if batch.problems else UNSURE if unsure else FITS
        row = [2 * kind + training, step, known, batch.sequences]
        row.append(seed_from(scaler) if scaler else 0)
        rows = self.exchange(row if self.world_size == 1 else row + self._data_row(batch))
        if any(r[0] // 2 == NOT_SAVED for r in rows):
            self.saver.finish()
        if change:
            raise RuntimeInputError(change)
        if batch.problems and all(r[0] == row[0] for r in rows):
            raise batch_error(batch.problems)
        more = InputInfo(name=_OTHERS, shape=(), dtype=torch.float32, batch_dim=0, sequence_dim=None)
        text = disagreement(rows, (*self.inputs, more), self.mesh.sample_ranks.of) or _scalers_differ(rows, scaler)
        if text:
            raise RuntimeInputError(text)
        return [r[3] for r in rows], any(r[2] == UNSURE for r in rows)

    def _data_row(self, batch: RankBatch) -> list[int]:
        """Per input of the example the hash of its shape and its checksum, then those of all other inputs."""
        row = list[int]()
        for info in self.inputs:
            value = batch.tensors.get(info.name)
            row += [0, 0] if value is None else [_shape_hash(value, info), checksum(value)]
        others = [i for i in batch.form.inputs if i.name not in {known.name for known in self.inputs}]
        shapes = [(i.name, str(i.dtype), i.batch_dim, _shape_hash(batch.tensors[i.name], i)) for i in others]
        return [*row, seed_from(repr(shapes)), seed_from(repr([checksum(batch.tensors[i.name]) for i in others]))]

    def agree(self, values: Mapping[str, object]) -> None:
        """Raise `RuntimeInputError` on all ranks if their values differ. Collective."""
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        rows = self.exchange([2 * READING, 0, FITS, seed_from(text)])
        groups = list(ranks_by([tuple(row[:1] + row[3:4]) for row in rows]).values())
        if len(groups) > 1:
            others = disagreement([row[:3] for row in rows], (), lambda rank: rank) or (
                f"{_ranks(_joined(groups[1:]))} read other data than {_ranks(groups[0])}; here {text}; pass equal "
                "arguments, and load the same state on every rank"
            )
            raise RuntimeInputError(others)

    def same_weights(self, names: Sequence[str], held: Mapping[str, torch.Tensor], stage: int) -> None:
        """Raise `RuntimeInputError` on all ranks if ranks hold other values of a parameter. Collective."""
        if self.world_size == 1:
            return
        mine = torch.zeros(len(names), 2, dtype=torch.int64)  # which part this rank holds, and the sum of its bits
        for k, parameter in ((k, held[name]) for k, name in enumerate(names) if name in held):
            flat = private.local_part(parameter).detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // NUM_SAMPLED)][:NUM_SAMPLED]
            mine[k] = torch.tensor([seed_from(f"{stage} {shards_of(parameter)}"), checksum(some)])
        for name, rows in zip(names, torch.stack(self._of_all_ranks(mine), 1).tolist(), strict=True):
            groups = ranks_by([tuple(row) for row in rows])
            for place in {place for place, _ in groups}:
                first, *others = (ranks for (at, _), ranks in groups.items() if at == place)
                if others:
                    raise RuntimeInputError(
                        f"parameter {name!r}: {_ranks(_joined(others))} hold other values than {_ranks(first)} of the "
                        "same elements. Ranks changed weights or gradients differently; make each change on all ranks, "
                        "with random numbers of parallel.generator(parameter)"
                    )

    def all_or_none(self, message: str, problems: Sequence[Problem]) -> None:
        """Raise `RuntimeInputError` on all ranks if one has problems. Collective."""
        rows = self.exchange([2 * READING, 0, UNFIT if problems else FITS, 0])
        if problems:
            raise RuntimeInputError(message, problems)
        bad = [rank for rank, row in enumerate(rows) if row[2] == UNFIT]
        if bad:
            raise RuntimeInputError(f"{message} on {_ranks(bad)}; the error of that rank says why")

    def in_lockstep(self, loader: Any) -> Iterator[Any]:
        """The items of a loader while every rank has one. Raises `RuntimeInputError` on all ranks."""
        count, items = 0, iter(loader)
        while True:
            item, kind, cause = None, READING, None
            try:
                item = next(items)
            except StopIteration:
                kind = ENDED
            except Exception as error:
                kind, cause = FAILED, error
            rows = self.exchange([2 * kind, count, 0, 0])
            if cause is not None:
                raise cause
            if all(row[0] == 2 * ENDED for row in rows):
                return
            text = disagreement(rows, (), lambda rank: rank)
            if text:
                raise RuntimeInputError(text)
            yield item
            count += 1

    def exchange(self, row: _Row) -> list[list[int]]:
        """The rows of all ranks. A row has at most 7 + 2 × inputs integers. Collective."""
        width = 7 + 2 * len(self.inputs)  # one shape for all kinds: gloo aborts where shapes differ
        mine = torch.tensor([*row, *[0] * (width - len(row))], dtype=torch.int64)
        return [r.tolist() for r in self._of_all_ranks(mine)]

    def _of_all_ranks(self, mine: torch.Tensor) -> list[torch.Tensor]:
        every = [mine] if self.world_size == 1 else [torch.empty_like(mine) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(every, mine, group=self._group)
        return every


def disagreement(rows: Sequence[_Row], inputs: Sequence[InputInfo], dp_of: Callable[[int], int]) -> str:
    """The message about a disagreement, with ranks and input; empty if the ranks agree."""
    kinds = ranks_by([row[0] // 2 for row in rows])
    if len(kinds) > 1:
        if ENDED in kinds and set(kinds) <= {READING, ENDED}:
            count = rows[kinds[ENDED][0]][1]
            return (
                f"{_ranks(kinds[ENDED])} ran out of data after {count} batches, {_ranks(kinds[READING])} did not; give "
                "every rank the same number of batches: parallel.loader(dataset) does"
            )
        places = "; ".join(f"{_ranks(r)} {_KINDS[k]}" for k, r in kinds.items())
        return f"ranks call different methods: {places}; make the same calls in the same order on every rank"
    modes = ranks_by([row[0] % 2 for row in rows])
    if len(modes) > 1:
        return (
            f"{_ranks(modes[1])} in training mode, but {_ranks(modes[0])} in eval mode; call train() or eval() on "
            "all ranks"
        )
    steps = ranks_by([row[1] for row in rows])
    if len(steps) > 1:
        at = "; ".join(f"{_ranks(ranks)} at {step}" for step, ranks in steps.items())
        return f"ranks are at different steps: {at}; every rank must call forward_backward equally often"
    bad = [rank for rank, row in enumerate(rows) if row[2] == CHANGED]
    if bad:
        return f"the model of {_ranks(bad)} was changed after autopar.parallelize; the error of that rank says how"
    bad = [rank for rank, row in enumerate(rows) if row[2] == UNFIT]
    if bad:
        return f"the batch of {_ranks(bad)} does not fit the plan; the error of that rank says why"
    return _data_disagreement(rows, inputs, dp_of)


def _data_disagreement(rows: Sequence[_Row], inputs: Sequence[InputInfo], dp_of: Callable[[int], int]) -> str:
    replicas = list(ranks_by([dp_of(rank) for rank in range(len(rows))]).values())
    for index, info in enumerate(inputs):
        shapes = ranks_by([row[5 + 2 * index] for row in rows])
        if len(shapes) > 1:
            usual, *unusual = shapes.values()
            if info.name == _OTHERS:
                return (
                    f"{_ranks(_joined(unusual))} got other inputs than {_ranks(usual)}, beside those of the example; "
                    "pass the same inputs on every rank"
                )
            return (
                f"input {info.name!r}: {_ranks(_joined(unusual))} got another shape than {_ranks(usual)}; only the "
                "number of sequences may differ, so pad every rank's batch to one length"
            )
        first: list[int] = []
        others: list[int] = []
        batched = info.batch_dim is not None
        for ranks in replicas if batched else [list(range(len(rows)))]:
            values = ranks_by([(rows[rank][3] if batched else 0, rows[rank][6 + 2 * index]) for rank in ranks])
            named = [[ranks[k] for k in group] for group in values.values()]
            first += named[0] if len(named) > 1 else []
            others += _joined(named[1:])
        if others:
            why = "differ only in tp, cp or pp" if batched else "share this input, which has no batch"
            return (
                f"input {info.name!r}: {_ranks(others)} got other data than {_ranks(first)}, but they {why}; pass the "
                "same data on these ranks: parallel.loader(dataset) does"
            )
    return ""


def _scalers_differ(rows: Sequence[_Row], mine: str) -> str:
    groups = ranks_by([row[4] for row in rows])
    if len(groups) == 1:
        return ""
    without = groups.pop(0, None)
    if without is not None:
        return (
            f"{_ranks(without)} passed no scaler, or a disabled one, and {_ranks(_joined(groups.values()))} passed a "
            "scaler; pass forward_backward one with equal settings on every rank, or none"
        )
    usual, *others = groups.values()
    return (
        f"{_ranks(_joined(others))} passed a scaler with other settings than {_ranks(usual)}; here {mine}; "
        f"{SAME_SETTINGS}"
    )


def checksum(value: torch.Tensor) -> int:
    """A number of a tensor's bits that depends on their order. Of a large tensor a part is read, evenly spread."""
    flat = value.detach().contiguous().reshape(-1)
    step = -(-flat.nbytes // CHECKSUM_BYTES)
    part = flat[:: step | 1] if step > 1 else flat  # an odd step, lest it meets one column of every row
    return zlib.crc32(part.contiguous().view(torch.uint8).cpu().numpy().data)


def shards_of(parameter: torch.Tensor) -> list[tuple[str, int]]:
    """The mesh dimensions that split a parameter, with this rank's coordinates. Equal lists mean equal elements."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
    at = () if mesh is None else zip(mesh.mesh_dim_names or "", mesh.get_coordinate() or (), placements, strict=True)
    return [(name, place) for name, place, placement in at if not placement.is_replicate()]


def _shape_hash(value: torch.Tensor, info: InputInfo) -> int:
    rows = tuple(size for d, size in enumerate(value.shape) if d != info.batch_dim)
    return seed_from(repr(rows))


def _joined(groups: Iterable[Sequence[int]]) -> list[int]:
    return [rank for group in groups for rank in group]
