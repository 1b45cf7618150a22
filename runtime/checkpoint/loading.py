"""Loading: the manifest, the hashes of all files, the differences from this model, then the tensors.

Nothing of the model changes before every file is verified and every name, dtype and shape agrees. Each file is hashed
by one rank. A rank then reads the elements that it holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import CheckpointError, Problem
from autopar.files.plain_data import read_plain
from autopar.runtime.checkpoint import optimizers
from autopar.runtime.checkpoint.folder import StepFolder, complete_steps, folder_of, listed
from autopar.runtime.checkpoint.manifest import DTYPES, Manifest, file_problems, read_manifest
from autopar.runtime.checkpoint.optimizers import NamedOptimizer, SavedOptimizer
from autopar.runtime.checkpoint.plain import decode, tensors_named
from autopar.runtime.checkpoint.saving import results_on_first
from autopar.runtime.checkpoint.storage import read_chunks, shares
from autopar.runtime.checkpoint.tensor_files import dtype_name
from autopar.runtime.distributed.broadcast import gather_objects, run_on_all_ranks, run_on_first_rank
from autopar.runtime.parameters.flat_shards import FlatShards

Description = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDict:
    """A dict with keys of text, as `encode` writes it."""

    dict: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainData:
    """What a manifest holds beside tensors: the counters of the model, further state, and optimizers."""

    model: EncodedDict
    extra: EncodedDict
    optimizers: tuple[SavedOptimizer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are verified, and the ranks that load it."""

    folder: StepFolder
    manifest: Manifest
    plain: PlainData
    group: dist.ProcessGroup

    def counters(self) -> tuple[int, int]:
        """The number of steps of the saved model, and the seed of its random numbers."""
        model = dict(self.plain.model.dict)
        steps, seed = model.get("steps"), model.get("seed")
        if type(steps) is not int or type(seed) is not int:
            raise CheckpointError(f"{self.folder.path} is no checkpoint of a model: it lacks its steps and its seed")
        return steps, seed


def verified(root: Path, step: int | None, group: dist.ProcessGroup) -> Checkpoint:
    """The checkpoint of a step, by default the latest, with all files as they were written. Collective."""

    def found() -> tuple[StepFolder, Manifest]:
        folder = folder_of(root, step)
        return folder, read_manifest(folder)

    folder, manifest = run_on_first_rank(found, group)
    largest_first = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    mine = shares([{name: file.bytes for name, file in largest_first}] * dist.get_world_size())[dist.get_rank()]
    problems = [p for each in gather_objects(file_problems(folder.path, manifest, mine), group) for p in each]
    if problems:
        others = {n: f for n, f in complete_steps(root).items() if n != folder.step}
        remedy = f"load another step by its number: {listed(others)}" if others else "the folder has no other step"
        raise CheckpointError(
            f"the checkpoint {folder.path} is damaged, and nothing of it was loaded; {remedy}", problems
        )
    plain: PlainData | None = read_plain(PlainData, manifest.plain, problems)
    if plain is None or problems:
        raise CheckpointError(f"{folder.path} is no checkpoint of a model", problems)
    return Checkpoint(folder=folder, manifest=manifest, plain=plain, group=group)


def refuse_differences(
    checkpoint: Checkpoint,
    tensors: Mapping[str, FlatShards],
    given: Sequence[NamedOptimizer],
    extra_names: Sequence[str],
    *,
    weights_only: bool,
) -> None:
    """Raise `CheckpointError` on all ranks with all differences, of optimizers their classes and groups. Collective."""
    own_state = (descriptions(tensors), [(o.kind, o.groups) for o in given], tuple(sorted(extra_names)))
    ranks = gather_objects(own_state, checkpoint.group)
    expected = {name: d for held, _, _ in ranks for name, d in held.items()}
    problems = tensor_differences(checkpoint.manifest, expected, ("model", "buffers"))
    saved = () if weights_only else checkpoint.plain.optimizers
    if len(saved) != len(given) and not weights_only:
        problems.append(
            Problem(
                path="optimizers",
                rule=f"must be {len(saved)}, as in the checkpoint",
                value=len(given),
                suggestion="weights_only=True loads the model alone",
            )
        )
    elif not weights_only:
        for index, entry in enumerate(saved):
            problems += optimizers.differences(entry, index, [kinds[index] for _, kinds, _ in ranks])
    kept = dict(checkpoint.plain.extra.dict)
    names_given = dict.fromkeys(name for _, _, names in ranks for name in names)
    problems += [
        Problem(path=f"extra[{name!r}]", rule="is not in the checkpoint") for name in names_given if name not in kept
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint {checkpoint.folder.path} is not of this model; nothing was loaded", problems
        )


def descriptions(tensors: Mapping[str, FlatShards]) -> dict[str, Description]:
    """The dtype and the global shape of each tensor. Empty tensors are not part of a checkpoint."""
    return {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items() if t.numel()}


def tensor_differences(
    manifest: Manifest, expected: Mapping[str, Description], sections: Sequence[str]
) -> list[Problem]:
    """How the tensors of some sections of a checkpoint differ from the expected ones: names, dtypes, shapes."""
    saved = {name: (t.dtype, t.shape) for name, t in manifest.tensors.items() if name.partition("/")[0] in sections}
    problems = [Problem(path=n, rule="is missing in the checkpoint") for n in expected if n not in saved]
    problems += [Problem(path=n, rule="is in the checkpoint only") for n in saved if n not in expected]
    for name, (dtype, shape) in expected.items():
        if name in saved and saved[name] != (dtype, shape):
            then = f"{saved[name][0]} {saved[name][1]}"
            problems.append(Problem(path=name, rule=f"must be {dtype} {shape}", value=then))
    return problems


def memory_of_plain(checkpoint: Checkpoint, plain: Any) -> dict[str, torch.Tensor]:
    """The tensors in plain data. A file of the checkpoint holds their bytes, so they are not larger. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    for name in tensors_named(plain):
        entry = checkpoint.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{checkpoint.folder.path} lacks the tensor {name}, which its plain data names")
        assert entry.dtype in DTYPES
        tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    read_tensors(checkpoint, tensors)
    return tensors


def read_tensors(checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> None:
    """Read this rank's elements of tensors, in place. Collective."""
    wanted = {name: t for name, t in tensors.items() if t.numel()}
    folder, manifest = checkpoint.folder.path, checkpoint.manifest
    failed = f"reading {folder} failed, and the model may hold a part of it"
    results_on_first(lambda: read_chunks(folder, manifest, wanted), checkpoint.group, failed)


def load_optimizers(checkpoint: Checkpoint, given: Sequence[NamedOptimizer]) -> dict[str, FlatShards]:
    """Prepare optimizers, and give their tensors by name, into which the checkpoint is read. Collective."""
    if not given:
        return {}
    saved = checkpoint.plain.optimizers
    options = [group.options for o in saved for group in o.groups]
    values = [value for o in saved for keys in o.state.values() for value in keys.values()]
    memory = memory_of_plain(checkpoint, [*options, *values])
    tensors: dict[str, FlatShards] = {}

    def prepare() -> dict[str, Description]:
        for each, state in zip(given, saved, strict=True):
            optimizers.set_options(each.optimizer, state, memory)
            optimizers.prepare_state(each, state, memory)
            tensors.update(optimizers.state_tensors(each, state.state))
        return descriptions(tensors)

    expected = {name: d for each in run_on_all_ranks(prepare, checkpoint.group) for name, d in each.items()}
    sections = [f"optimizer.{index}" for index in range(len(saved))]
    problems = tensor_differences(checkpoint.manifest, expected, sections)
    problems = [p for p in problems if p.path not in memory]
    if problems:
        raise CheckpointError(
            f"the optimizer's state in {checkpoint.folder.path} is not that of this optimizer; parameters have "
            "changed, so build the model again",
            problems,
        )
    return tensors


def read_extra(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """The extra data of a checkpoint, and the state of some objects, each of its own. Collective."""
    encoded = dict(checkpoint.plain.extra.dict)
    memory = memory_of_plain(checkpoint, list(encoded.values()))
    values = {name: decode(value, memory) for name, value in encoded.items()}
    return values, [decode(encoded[name], memory) for name in names]
