"""Batches at run time: read and checked against the plan, padded to its shape, cut into micro-batches."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture.input_leaves import map_leaves, named_leaves
from autopar.errors import RuntimeInputError, did_you_mean, short_repr
from autopar.ir.program import InputInfo, Program

_MISSING = object()
_MAX_CHARS = 80  # of a value in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's batch as it was `given`: tensors by input name, its number of sequences, and its problems."""

    given: Mapping[str, Any] | Sequence[Any]
    form: Program
    tensors: Mapping[str, torch.Tensor]
    sequences: int
    problems: tuple[str, ...] = ()


def read_batch(
    program: Program,
    batch: Mapping[str, Any] | Sequence[Any],
    sequences: int,
    *,
    any_shape: bool,
    casts: bool = False,
    optional: Collection[str] = (),
) -> RankBatch:
    """The tensors of a batch by input name. The batch dimension may have any size, the others only if `any_shape`."""
    problems: list[str] = []
    form, given = program, _given(program, batch, problems)
    if any_shape and isinstance(batch, Mapping):
        form, given = with_optional(program, given, optional)
    infos = {info.name: info for info in form.inputs}
    for name, text in form.fixed.items():
        value = given.pop(name, _MISSING)
        if value is _MISSING:
            problems.append(f"input {name!r} is missing; it was {text[:_MAX_CHARS]} during capture")
        elif repr(value) != text:
            problems.append(
                f"input {name!r} is no tensor, so it is a constant of the captured model: {text[:_MAX_CHARS]} during "
                f"capture, now {short_repr(value)}; pass a tensor, or call parallelize again"
            )
    for name in given:
        if name not in infos:
            problems.append(f"unknown input {name!r}; {did_you_mean(name, sorted({*infos, *optional}))}")
    tensors: dict[str, torch.Tensor] = {}
    for name, info in infos.items():
        value = given.get(name)
        if not isinstance(value, torch.Tensor):
            problems.append(f"input {name!r}: expected a tensor, got {type(value).__name__}")
            continue
        wanted = with_sequences(info, info.shape, sequences)
        fits = (
            value.dim() == len(wanted)
            if any_shape
            else with_sequences(info, value.shape, 0) == with_sequences(info, wanted, 0)
        )
        if not fits:
            problems.append(f"input {name!r}: shape {tuple(value.shape)}, expected {wanted} on this rank")
        if casts and value.is_floating_point() and info.dtype.is_floating_point:
            value = value.to(info.dtype)
        if value.dtype != info.dtype:
            problems.append(f"input {name!r}: dtype {value.dtype}, expected {info.dtype}; convert it with .to(...)")
        tensors[name] = value
    counts = {
        name: tensors[name].shape[info.batch_dim]
        for name, info in infos.items()
        if name in tensors and info.batch_dim is not None and tensors[name].dim() > info.batch_dim
    }
    if len(set(counts.values())) > 1:
        problems.append(f"inputs hold different numbers of sequences: {counts}")
    sequences = next(iter(counts.values()), 0)
    return RankBatch(given=batch, form=form, tensors=tensors, sequences=sequences, problems=tuple(problems))


def with_optional(program: Program, given: dict[str, Any], optional: Collection[str]) -> tuple[Program, dict[str, Any]]:
    """The program with the `optional` inputs that a batch has, and the leaves of the batch. None is no input."""
    known = [*given, *program.fixed, *(info.name for info in program.inputs)]
    free = {name for name in known if name.partition(".")[0] in optional}
    given = {name: value for name, value in given.items() if value is not None or name not in free}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    fixed = {n: text for n, text in program.fixed.items() if n not in free or (text != "None" and n not in tensors)}
    kept = [info for info in program.inputs if info.name in given or info.name not in free]
    dims = {info.name: info.batch_dim for info in kept if info.batch_dim is not None}
    rows = {tensors[name].shape[dim] for name, dim in dims.items() if name in tensors and tensors[name].dim() > dim}
    new = [
        InputInfo(
            name=name,
            shape=tuple(tensors[name].shape),
            dtype=tensors[name].dtype,
            batch_dim=0 if {*tensors[name].shape[:1]} == rows else None,
            sequence_dim=None,
        )
        for name in sorted(tensors.keys() & free - {info.name for info in kept})
    ]
    return replace(program, inputs=(*kept, *new), fixed=fixed), given


def _given(program: Program, batch: Mapping[str, Any] | Sequence[Any], problems: list[str]) -> dict[str, Any]:
    """The leaves of a batch by name. The leaves of a sequence have the names of the example inputs, in order."""
    names = [info.name for info in program.inputs]
    if isinstance(batch, Mapping):  # a list in place of a tensor keeps its name
        tensors = {name: value for name, value in batch.items() if name in names}
        return tensors | named_leaves({name: value for name, value in batch.items() if name not in names})
    leaves = list(named_leaves({"": list(batch)}).values())
    own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(own) != len(names):
        problems.append(f"expected {len(names)} tensors {tuple(names)}, got {len(own)}")
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return dict(zip(names, own, strict=False)) | dict(zip(program.fixed, others, strict=False))


def batch_error(problems: Sequence[str]) -> RuntimeInputError:
    """The error of a batch that cannot be used."""
    return RuntimeInputError("the batch does not fit the plan: " + "; ".join(problems))


def with_sequences(info: InputInfo, shape: Sequence[int], sequences: int) -> tuple[int, ...]:
    """A shape of an input with the given number of sequences."""
    return tuple(sequences if d == info.batch_dim else size for d, size in enumerate(shape))


def sequences_to_run(
    counts: Sequence[int],
    planned: int,
    micro_batches: int,
    *,
    pads: bool,
    captures: bool,
    wants_outputs: bool,
    per_micro_batch: bool = False,
) -> int:
    """The number of sequences that every rank runs, from the number that each has. Raises `RuntimeInputError`."""
    least, most = min(counts), max(counts)
    is_equal = per_micro_batch and micro_batches > 1
    if not most and planned:
        raise RuntimeInputError("the batch has no sequences on any rank; leave the step out")
    if least == most == planned:
        return planned
    may_capture = captures and least == most and most > 0 and most % micro_batches == 0
    if pads and not is_equal and most <= planned and not (wants_outputs and may_capture):
        return planned
    if may_capture:
        return most
    held = f"{most} sequences" if least == most else f"{least} to {most} sequences, different among ranks,"
    per = f" ({micro_batches} micro-batches)" if micro_batches > 1 else ""
    if most > planned:
        remedy = f"pass at most {planned}" + (
            f", or the same multiple of {micro_batches} on every rank" if captures else ", or plan again"
        )
    else:
        same = f", or pass the same multiple of {micro_batches} on every rank" if captures else ""
        why = (
            "every micro-batch has the same weight (per_micro_batch)"
            if is_equal
            else "the loss cannot ignore samples (by ignore_index, or by a mask: (loss * mask).sum() / mask.sum())"
        )
        remedy = f"it cannot be padded, because {why}; drop this batch{same}"
    raise RuntimeInputError(f"the batch of a rank has {held} the plan has {planned}{per}; {remedy}")


def pad_batch(
    batch: RankBatch,
    sequences: int,
    ignored: Mapping[str, int],
    fillers: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Fill a batch: targets and masks with their ignored value, others with a row of data. Zeros could give NaN."""
    padded = {}
    for info in batch.form.inputs:
        value = batch.tensors[info.name]
        missing = 0 if info.batch_dim is None else sequences - batch.sequences
        if missing:
            dim = info.batch_dim or 0
            row = with_sequences(info, value.shape, 1)
            if info.name in ignored:
                filler = torch.full(row, ignored[info.name], dtype=value.dtype, device=value.device)
            elif batch.sequences:
                filler = value.narrow(dim, 0, 1)
            elif info.name in fillers and tuple(fillers[info.name].shape) == row:
                filler = fillers[info.name].to(value.device)
            else:
                filler = torch.zeros(row, dtype=value.dtype, device=value.device)
            repeats = [missing if d == dim else 1 for d in range(value.dim())]
            value = torch.cat((value, filler.repeat(repeats)), dim)
        padded[info.name] = value
    return padded


def first_rows(batch: RankBatch) -> dict[str, torch.Tensor]:
    """The first sequence of every input, for ranks whose next batch is empty."""
    dims = {info.name: info.batch_dim for info in batch.form.inputs}
    return {n: t.detach().narrow(d, 0, 1).clone() for n, t in batch.tensors.items() if (d := dims[n]) is not None}


def split_micro_batches(
    program: Program, inputs: Mapping[str, torch.Tensor], count: int
) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of equal shape, in order."""
    dims = {info.name: info.batch_dim for info in program.inputs}
    pieces = {
        name: [value] * count if dims[name] is None else list(value.chunk(count, dims[name] or 0))
        for name, value in inputs.items()
    }
    return [{name: piece[k] for name, piece in pieces.items()} for k in range(count)]


def as_batch(program: Program, args: Sequence[Any]) -> Mapping[str, Any] | Sequence[Any]:
    """The batch of a call with positional arguments: one dict of inputs by name, or the inputs in order."""
    if len(args) != 1 or not isinstance(args[0], Mapping):
        return args
    names = {name.partition(".")[0] for name in (*(info.name for info in program.inputs), *program.fixed)}
    is_input = len(names) == 1 and names.isdisjoint(args[0])  # the only input of the model is a dict
    return args if is_input else args[0]


def rows_of_rank(program: Program, batch: Mapping[str, Any] | Sequence[Any], index: int, count: int) -> Any:
    """The rows of one of `count` data-parallel ranks in a global batch. Raises `RuntimeInputError`."""
    infos = list(program.inputs)
    if isinstance(batch, Mapping):
        infos = list(with_optional(program, _given(program, batch, []), batch.keys())[0].inputs)
    by_name = {info.name: info for info in infos}

    def part(info: InputInfo | None, value: Any) -> Any:
        if info is None or info.batch_dim is None or not isinstance(value, torch.Tensor):
            return value
        rows = value.shape[info.batch_dim]
        if rows % count:
            raise RuntimeInputError(
                f"input {info.name!r} has {rows} sequences, which {count} data-parallel ranks do not divide; drop "
                f"{rows % count} sequences, or add {count - rows % count}"
            )
        return value.narrow(info.batch_dim, index * (rows // count), rows // count)

    if isinstance(batch, Mapping):
        return map_leaves(batch, lambda name, value: part(by_name.get(name), value))
    tensors = iter(infos)
    changed = map_leaves(
        {"": list(batch)}, lambda _, value: part(next(tensors) if isinstance(value, torch.Tensor) else None, value)
    )
    return tuple(changed[""])
