"""How ranks get their initial weights: cut from a source of their own, or sent by rank 0.

Every rank goes through its own pipeline stages in order, and rank 0 goes through all stages. If rank 0 sends, it cuts
each parameter, and sends one copy of each part to the first rank that holds this part. That rank passes the part on
along the mesh dimensions that do not split the parameter. A rank holds its parts and one tensor more.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError, InputError
from autopar.ir.plan import Plan
from autopar.ir.precision import as_float64, stored_dtype
from autopar.ir.program import Program
from autopar.ir.storage import Storage
from autopar.runtime.distributed.broadcast import (
    broadcast_object,
    gather_objects,
    group_of_messages,
    on_all_ranks,
    receive_tensor,
    send_tensor,
    share_tensor,
)
from autopar.runtime.distributed.launch import device_of_rank
from autopar.runtime.distributed.mesh import MeshDim, RankMesh, named_ranks
from autopar.runtime.parameters.packed import ParameterSource, packed_source
from autopar.runtime.parameters.shards import local_shard

_NUM_COMPARED = 256  # elements of a tensor, to tell whether ranks hold the same weights


def first_rank_sends(model: nn.Module, inputs: Mapping[str, torch.Tensor], *, has_state: bool) -> bool:
    """Whether rank 0's weights go to all ranks. Collective. Raises InputError on all ranks if their models differ."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    every = {**tensors, **{f"example input {name}": tensor for name, tensor in inputs.items()}}
    form = {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in every.items()}
    first = broadcast_object(form)
    other = next((name for name in {**form, **first} if form.get(name) != first.get(name)), None)
    is_whole = has_state or not any(tensor.is_meta for tensor in tensors.values())
    forms = gather_objects((other, form.get(str(other)), is_whole, "" if has_state else _digest(tensors)))
    for rank, (name, there, *_) in enumerate(forms):
        if name is not None:
            raise InputError(
                f"rank {rank} built another model than rank 0: {name!r} is {there or 'missing'} there, and "
                f"{first.get(name, 'missing')} on rank 0; build the same on all ranks"
            )
    whole = [rank for rank, (_, _, is_whole, _) in enumerate(forms) if is_whole]
    if whole and 0 not in whole:
        raise InputError(
            f"{named_ranks(whole)} of {len(forms)} hold weights, and rank 0 holds none: its model is on meta, and it "
            "has no state; build the model or pass the state on rank 0, whose weights are used"
        )
    return any(f != forms[0] for f in forms)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of some elements of every tensor that is not on meta."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            flat = tensor.detach().reshape(-1)
            some = as_float64(flat[:: max(1, flat.numel() // _NUM_COMPARED)]).cpu()
            digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()


def own_buffers(program: Program, source: ParameterSource, *, on_meta: bool) -> dict[str, torch.Tensor]:
    """The buffers that this rank's source gives. Of a model on meta, the others are computed when they are needed."""
    return {name: source(name) for name, info in program.buffers.items() if info.persistent or not on_meta}


def sent_buffers(program: Program, source: ParameterSource) -> dict[str, torch.Tensor]:
    """Rank 0's buffers, whole, on every rank. Collective."""
    is_first = dist.get_rank() == 0
    values = on_all_ranks(lambda: {name: source(name) for name in program.buffers} if is_first else {})
    for name, info in program.buffers.items():
        empty = torch.empty(() if is_first else info.shape, dtype=info.dtype, device=device_of_rank())
        values[name] = values.get(name, empty).to(info.dtype).contiguous()
        share_tensor(values[name])
    return values


class InitialParts:
    """This rank's parts of parameters. If `sent`, ranks ask in the order of stages, and rank 0 calls `pass_on`."""

    def __init__(self, program: Program, plan: Plan, mesh: RankMesh, source: ParameterSource, *, sent: bool) -> None:
        self._program, self._plan, self._mesh, self._sent = program, plan, mesh, sent
        self._source = packed_source(program, source)
        self._dims = [mesh.dims[name] for name in plan.mesh.names]
        self._error: AutoparError | None = None
        if sent:
            group_of_messages()

    def of(self, name: str, storage: Storage) -> torch.Tensor:
        """This rank's part of a parameter; perhaps memory of the model, which the caller must not keep."""
        if not self._sent:
            return self._cut(self._source(name), storage, [dim.coordinate for dim in self._dims], name)
        split = [kind.kind == "S" for kind in storage.types]
        along = [dim for dim, is_split in zip(self._dims, split, strict=True) if not is_split and dim.degree > 1]
        if dist.get_rank() == 0:
            part = self._send(name, storage, along, 0)
            assert part is not None
            part = part.contiguous()
        else:
            shape = storage.dims.local_shape(storage.types, self._plan.mesh.degrees)
            part = torch.empty(shape, dtype=self._dtype(name), device=device_of_rank())
            if not any(dim.coordinate for dim in along):
                receive_tensor(part, 0)
        for i, dim in enumerate(along):
            if not any(later.coordinate for later in along[i + 1 :]):
                share_tensor(part, dim.group)
        return part

    def pass_on(self, stage_rank: int, _: nn.Module, names: Mapping[str, Storage]) -> None:
        """On rank 0: send the parts of a stage that ranks at another coordinate of the pipeline hold."""
        if self._sent and dist.get_rank() == 0:
            for name, storage in names.items():
                pairs = zip(self._dims, storage.types, strict=True)
                self._send(name, storage, [dim for dim, kind in pairs if kind.kind != "S"], stage_rank)

    def end(self) -> None:
        """Raise on all ranks what kept rank 0 from sending. Collective."""
        if self._sent and (error := broadcast_object(self._error)) is not None:
            raise error

    def _send(self, name: str, storage: Storage, along: Iterable[MeshDim], stage_rank: int) -> torch.Tensor | None:
        """Send each part of a parameter to its first rank, and return rank 0's own."""
        whole, mine, pipeline = self._whole(name), None, self._mesh.pipeline
        for rank in range(dist.get_world_size()):
            if (pipeline is None or pipeline.of(rank) == stage_rank) and not any(dim.of(rank) for dim in along):
                part = self._cut(whole, storage, [dim.of(rank) for dim in self._dims], name)
                if rank == 0:
                    mine = part
                else:
                    send_tensor(part, rank)
        return mine

    def _whole(self, name: str) -> torch.Tensor:
        """A whole parameter. After an error zeros, so that the other ranks get what they wait for."""
        try:
            if self._error is None:
                return self._source(name)
        except AutoparError as error:
            self._error = error
        return torch.zeros(self._program.every_parameter[name].shape, dtype=self._dtype(name))

    def _cut(self, whole: torch.Tensor, storage: Storage, at: list[int], name: str) -> torch.Tensor:
        return local_shard(whole.detach(), storage.dims, storage.types, self._plan.mesh, at).to(self._dtype(name))

    def _dtype(self, name: str) -> torch.dtype:
        return stored_dtype(self._program.every_parameter[name], self._plan.degrees)
