"""`CheckpointedModel`: how a model is saved and loaded; every plan loads the checkpoints of every other plan."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.errors import CheckpointError, InputError
from autopar.ir.explanation import sizes_in_words
from autopar.ir.precision import stored_dtype
from autopar.runtime.checkpoint import optimizers
from autopar.runtime.checkpoint.export import Export
from autopar.runtime.checkpoint.folder import latest_folder
from autopar.runtime.checkpoint.loading import (
    load_optimizers,
    read_extra,
    read_tensors,
    refuse_differences,
    verified,
)
from autopar.runtime.checkpoint.plain import encode
from autopar.runtime.checkpoint.saving import Snapshot
from autopar.runtime.distributed.broadcast import run_on_all_ranks, run_on_first_rank
from autopar.runtime.model.running import RunningModel
from autopar.runtime.parameters.flat_shards import FlatShards
from autopar.runtime.parameters.packed import by_model_parameter, joint_of, names_of_state
from autopar.runtime.parameters.shown_tensor import as_shards, whole_of
from autopar.runtime.parameters.transformers_names import name_to_keep

Path_ = str | os.PathLike[str]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class CheckpointedModel(RunningModel):
    """The checkpoints of a model. `autopar.runtime.model.module.ParallelModel` is the class that users know."""

    def save(
        self,
        path: Path_,
        optimizer: Optimizers = None,
        extra: Mapping[str, Any] | None = None,
        *,
        step: int,
        keep_last: int | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Save a checkpoint that every plan of this model loads. Collective.

        The checkpoint is a folder of its own in `path`. It gets its name when all of its files are on disk, and then
        `latest` names it. A save that fails or is killed leaves the checkpoints before as they were.

        Args:
            path: The folder of this run's checkpoints, on a file system that all hosts share.
            optimizer: The optimizer, or several.
            extra: Further state by name: numbers, text, lists, dicts and tensors, or objects with `state_dict()`, such
                as a schedule of the learning rate, a `GradScaler` or a data loader. All ranks pass equal values.
            step: The number of training steps so far. A step that is saved again is replaced.
            keep_last: How many checkpoints remain, this one included. By default all do.
            asynchronous: Whether to return after a copy in host memory, and write in a thread. The next `save`, `load`,
                `forward_backward` or `finish_saving` raises its error. The memory of the copy is kept.

        Raises:
            CheckpointError: The disk is full, another job saves in the folder, a parameter is not finite, or the ranks
                pass different values. All ranks raise it.
            InputError: A value cannot be saved.

        Example:
            >>> optimizer = torch.optim.AdamW(parallel.parameters())
            >>> parallel.save("checkpoints", optimizer, {"epoch": 3}, step=20)
            >>> parallel.latest_step("checkpoints")
            20
        """
        self._saver.finish()
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
            raise InputError(f"step must be a whole number from 0 on; got {step!r}")
        if keep_last is not None and keep_last < 1:
            raise InputError(f"keep_last must be at least 1; got {keep_last!r}")
        self._compare_weights()
        tensors, plain_tensors = self._saved_tensors(), dict[str, torch.Tensor]()
        states = {
            name: item.state_dict() if callable(getattr(item, "state_dict", None)) else item
            for name, item in (extra or {}).items()
        }
        common = {
            "model": encode({"steps": self._step, "seed": self.streams.seed}, "model", plain_tensors),
            "extra": encode(states, "extra", plain_tensors),
        }
        given = self._listed(optimizer)
        parts = [optimizers.described(each, plain_tensors) for each in given]
        for each in given:
            tensors |= optimizers.state_tensors(each)
        snapshot = Snapshot(
            root=Path(path),
            step=step,
            keep_last=keep_last,
            tensors=tensors,
            common=common,
            plain_tensors=plain_tensors,
            optimizers=parts,
            finite=frozenset(f"model/{name}" for name, _ in self.named_parameters()),
            made_by={"plan": sizes_in_words(self.plan.degrees), "ranks": str(torch.distributed.get_world_size())},
        )
        self._saver.save(snapshot, asynchronous=asynchronous)

    def load(
        self,
        path: Path_,
        optimizer: Optimizers = None,
        extra: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        weights_only: bool = False,
    ) -> dict[str, Any]:
        """Load a checkpoint of this model that any plan has saved. Collective.

        Before anything changes, every file is compared with its SHA-256, and all names, dtypes and shapes with this
        model. Dropout goes on where it was, with the seed of the saved model.

        Args:
            path: The folder that was saved to.
            optimizer: The optimizers that were saved, in their order. They need no state yet.
            extra: Objects with `load_state_dict()`, by the names under which they were saved.
            step: The step to load. By default the one that `latest` names.
            weights_only: Whether to load parameters and buffers alone.

        Returns:
            The extra state by name, as it was saved. It has the state of objects too.

        Raises:
            CheckpointError: There is no such checkpoint, a file is damaged, or the checkpoint differs from this model.
                The message lists the differences. All ranks raise it.

        Example:
            >>> optimizer = torch.optim.AdamW(parallel.parameters())
            >>> parallel.save("checkpoints", optimizer, {"epoch": 3}, step=20)
            >>> parallel.load("checkpoints", optimizer)
            {'epoch': 3}
        """
        self._saver.finish()
        given, objects = [] if weights_only else self._listed(optimizer), dict(extra or {})
        for name, item in objects.items():
            if not hasattr(item, "load_state_dict"):
                raise InputError(f"extra[{name!r}] has no load_state_dict(); load returns plain values, leave it out")
        checkpoint = verified(Path(path), step, self._saver.group)
        tensors = self._saved_tensors()
        refuse_differences(checkpoint, tensors, given, list(objects), weights_only=weights_only)
        values, states = read_extra(checkpoint, list(objects))
        counters = checkpoint.counters()
        tensors |= load_optimizers(checkpoint, given)
        read_tensors(checkpoint, tensors)
        if not weights_only:
            self._step, seed = counters
            self.streams.reseed(seed)
        for item, state in zip(objects.values(), states, strict=True):
            item.load_state_dict(state)
        return values

    def latest_step(self, path: Path_) -> int | None:
        """Give the step of the newest complete checkpoint. Collective.

        Args:
            path: The folder of checkpoints.

        Returns:
            The step that `load` takes by default. None if the folder is missing or holds no checkpoint.

        Raises:
            CheckpointError: The folder cannot be read, or `latest` names no checkpoint. All ranks raise it.

        Example:
            >>> parallel.latest_step("nowhere") is None
            True
        """
        latest = run_on_first_rank(lambda: latest_folder(Path(path)), self._saver.group)
        return None if latest is None else latest.step

    def finish_saving(self) -> None:
        """Wait until the asynchronous save is on disk. Call it before the program ends.

        Raises:
            CheckpointError: The save failed. All ranks raise it.

        Example:
            >>> parallel.save("checkpoints", step=30, asynchronous=True)
            >>> parallel.finish_saving()
            >>> parallel.latest_step("checkpoints")
            30
        """
        self._saver.finish()

    def export_hf(self, path: Path_, *, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write a folder that `from_pretrained` of transformers loads: config, safetensors and their index. Collective.

        One tensor after the other is gathered, so no rank holds the whole model. Tied weights are written once, and
        all weights have the names and shapes of transformers' own files.

        Args:
            path: The folder, which must be new or empty, on a file system that all hosts share.
            max_shard_bytes: The size of a file. A larger tensor has a file of its own.

        Raises:
            InputError: The model is no model of transformers, or the folder is not empty. All ranks raise it.
            CheckpointError: The folder cannot be written. All ranks raise it.

        Example:
            >>> parallel.export_hf("exported")
            Traceback (most recent call last):
            autopar.errors.InputError: export_hf needs a model of transformers itself, which has a config; ...
        """
        group, root = self._saver.group, Path(path).absolute()
        model = None if self._origin is None else self._origin.weightless
        names = {name_to_keep(model, aliases): aliases[0] for aliases in names_of_state(self.program)}
        wholes = {name: self._on_meta(first) for name, first in names.items()}
        export = Export(model, wholes, root, max_shard_bytes)
        try:
            run_on_first_rank(export.begin, group)
            run_on_all_ranks(lambda: export.write(self._gathered(names)), group)
            run_on_first_rank(export.end, group)
        except CheckpointError:
            run_on_first_rank(export.discard, group)
            raise

    def _on_meta(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the model without values. It may be another stage's."""
        infos = dict(by_model_parameter(self.program))
        if name in infos:
            dtype = stored_dtype(infos[name][0], self.plan.degrees)
            return torch.empty(joint_of(infos[name]).shape, dtype=dtype, device="meta")
        info = self.program.buffers[name]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def _gathered(self, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The whole tensors of this rank's stages, one at a time. Only the first rank of each stage keeps them."""
        state, at = self.state_dict(), self.rank_mesh.device_mesh.get_coordinate()
        is_first = not any(at or ())
        for name, first in names.items():
            if first in state:
                whole = whole_of(state[first])
                yield name, whole.detach() if is_first else None

    def _saved_tensors(self) -> dict[str, FlatShards]:
        """This rank's chunks of parameters, persistent buffers, and the other buffers that the forward pass changes."""
        tensors = {f"model/{name}": as_shards(parameter.detach()) for name, parameter in self.named_parameters()}
        for name, buffer, persistent in self.own_buffers():
            tensors[f"{'model' if persistent else 'buffers'}/{name}"] = as_shards(buffer)
        return tensors

    def _listed(self, optimizer: Optimizers) -> list[optimizers.NamedOptimizer]:
        every: Sequence[torch.optim.Optimizer] = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ()
        )
        named = dict(self.named_parameters())
        return [optimizers.NamedOptimizer(index, each, named) for index, each in enumerate(every)]
