"""Loading: the manifest, the hashes of all files, the differences from this model, then the tensors.

Nothing of the model changes before every file is verified and every name, dtype and shape agrees. Each file is hashed by
one rank. A rank then reads the elements that it holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from autopar.errors import CheckpointError, Problem
from autopar.ir.storage import Storage
from autopar.runtime.checkpoint import optimizers
from autopar.runtime.checkpoint.folder import StepFolder, complete_steps, folder_of, listed
from autopar.runtime.checkpoint.manifest import ITEM_BYTES, Manifest, file_problems, read_manifest, shares
from autopar.runtime.checkpoint.optimizers import Optimizer
from autopar.runtime.checkpoint.plain import decode, tensors_named
from autopar.runtime.checkpoint.saving import failures_text
from autopar.runtime.checkpoint.storage import ManifestReader
from autopar.runtime.checkpoint.tensor_files import dtype_name
from autopar.runtime.distributed.broadcast import gather_objects, run_on_all_ranks, run_on_first_rank
from autopar.runtime.parameters.flat_shards import FlatShards

Description = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files are verified."""

    folder: StepFolder
    manifest: Manifest

    def section(self, name: str) -> Any:
        """A part of the plain data.

        Raises:
            CheckpointError: The checkpoint lacks it.
        """
        plain = self.manifest.plain
        if not isinstance(plain, dict) or name not in plain:
            raise CheckpointError(f"{self.folder.path} is no checkpoint of a model: it lacks {name!r}")
        return plain[name]


def verified(root: Path, step: int | None, group: dist.ProcessGroup) -> Checkpoint:
    """The checkpoint of a step, by default the latest, with all files as they were written. Collective.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged. All ranks raise it.
    """

    def found() -> tuple[StepFolder, Manifest]:
        folder = folder_of(root, step)
        return folder, read_manifest(folder)

    folder, manifest = run_on_first_rank(found, group)
    own = shares(manifest, dist.get_world_size())[dist.get_rank()]
    problems = [p for each in gather_objects(file_problems(folder.path, manifest, own), group) for p in each]
    if problems:
        others = {n: one for n, one in complete_steps(root).items() if n != folder.step}
        remedy = f"load another step by its number: {listed(others)}" if others else "the folder has no other step"
        raise CheckpointError(f"the checkpoint {folder.path} is damaged, and nothing of it was loaded; {remedy}", problems)
    return Checkpoint(folder=folder, manifest=manifest)


def refuse_differences(
    checkpoint: Checkpoint,
    tensors: Mapping[str, FlatShards],
    given: Sequence[Optimizer],
    named: Mapping[str, nn.Parameter],
    extra_names: Sequence[str],
    group: dist.ProcessGroup,
    *,
    weights_only: bool,
) -> None:
    """Raise one `CheckpointError` on all ranks that lists how the checkpoint differs from what it is loaded into.

    `tensors` are the model's. Only the optimizers' classes and groups are compared here. Collective.
    """
    own = (described(tensors), [optimizers.group_names(one, named) for one in given], tuple(sorted(extra_names)))
    ranks = gather_objects(own, group)
    expected = {name: one for held, _, _ in ranks for name, one in held.items()}
    problems = tensor_differences(checkpoint.manifest, expected, ("model", "buffers"))
    saved = [] if weights_only else checkpoint.section("optimizers")
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
        for index, one in enumerate(saved):
            problems += optimizers.differences(one, index, [kinds[index] for _, kinds, _ in ranks])
    kept = dict(checkpoint.section("extra")["dict"])
    asked = dict.fromkeys(name for _, _, names in ranks for name in names)
    problems += [Problem(path=f"extra[{name!r}]", rule="is not in the checkpoint") for name in asked if name not in kept]
    if problems:
        raise CheckpointError(f"the checkpoint {checkpoint.folder.path} is not of this model; nothing was loaded", problems)


def described(tensors: Mapping[str, FlatShards]) -> dict[str, Description]:
    """The dtype and the global shape of each tensor. Empty tensors are not part of a checkpoint."""
    return {name: (dtype_name(one.dtype), tuple(one.shape)) for name, one in tensors.items() if one.numel()}


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


def plain_tensors(checkpoint: Checkpoint, plain: Any) -> dict[str, torch.Tensor]:
    """Memory for the tensors in plain data. A file of the checkpoint holds their bytes, so they are not larger."""
    found: dict[str, torch.Tensor] = {}
    for name in tensors_named(plain):
        entry = checkpoint.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{checkpoint.folder.path} lacks the tensor {name}, which its plain data names")
        assert entry.dtype in ITEM_BYTES
        found[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    return found


def read_tensors(checkpoint: Checkpoint, tensors: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """Read this rank's elements of tensors, in place. Collective.

    Raises:
        CheckpointError: A file cannot be read. All ranks raise it.
    """
    reader = ManifestReader(checkpoint.folder.path, checkpoint.manifest)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted = {name: one for name, one in tensors.items() if one.numel()}
    try:
        dcp.load(wanted, storage_reader=reader, planner=planner, process_group=group)
    except dcp.CheckpointException as error:
        raise CheckpointError(
            f"reading {checkpoint.folder.path} failed, and the model holds a part of it: {failures_text(error)}"
        ) from None


def load_optimizers(
    checkpoint: Checkpoint,
    given: Sequence[Optimizer],
    named: Mapping[str, nn.Parameter],
    held: Mapping[str, Storage],
    group: dist.ProcessGroup,
) -> dict[str, FlatShards]:
    """Prepare optimizers, and give their tensors by name, into which the checkpoint is read. Collective."""
    saved: Sequence[Mapping[str, Any]] = checkpoint.section("optimizers")
    if not given:
        return {}
    memory = plain_tensors(checkpoint, [[one["groups"], one["state"]] for one in _as_trees(saved)])
    read_tensors(checkpoint, memory, group)
    tensors: dict[str, FlatShards] = {}

    def prepare() -> dict[str, Description]:
        for index, (optimizer, one) in enumerate(zip(given, saved, strict=True)):
            optimizers.set_options(optimizer, one, memory)
            optimizers.prepare_state(optimizer, one, named, memory)
            tensors.update(optimizers.state_tensors(optimizer, index, named, held, one))
        return described(tensors)

    expected = {name: one for each in run_on_all_ranks(prepare, group) for name, one in each.items()}
    sections = [f"optimizer.{index}" for index in range(len(saved))]
    problems = tensor_differences(checkpoint.manifest, expected, sections)
    problems = [p for p in problems if p.path not in memory]
    if problems:
        raise CheckpointError(
            f"the optimizer's state in {checkpoint.folder.path} is not that of this optimizer; parameters have changed, "
            "so build the model again",
            problems,
        )
    return tensors


def _as_trees(saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The encoded data of optimizers: options of groups, and values of state that are no tensors."""
    return [
        {
            "groups": [group["options"] for group in one["groups"]],
            "state": [value for keys in one["state"].values() for value in keys.values()],
        }
        for one in saved
    ]


def load_extra(
    checkpoint: Checkpoint, objects: Mapping[str, Any], group: dist.ProcessGroup
) -> dict[str, Any]:
    """The extra data of a checkpoint. Objects get theirs by `load_state_dict`. Collective."""
    encoded = checkpoint.section("extra")
    memory = plain_tensors(checkpoint, encoded)
    read_tensors(checkpoint, memory, group)
    found: dict[str, Any] = decode(encoded, memory)
    for name, one in objects.items():
        one.load_state_dict(decode(dict(encoded["dict"])[name], memory))
    return found
