"""Parameters that several pipeline stages take, such as an embedding that is also the last projection.

Every stage holds its own copy. Stages on different ranks sum their gradients once a step, so that equal optimizers
update equal copies. If several stages are on one rank, the first stage has the user's parameter and the others have a
*twin*. A twin receives the values before a step and gives its gradient after it.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from autopar._torch import private
from autopar.ir.degrees import Degrees
from autopar.ir.precision import summed_dtype
from autopar.runtime.distributed.mesh import RankMesh, group_of_stages
from autopar.runtime.model.stage import StageModule, attribute
from autopar.runtime.parameters.gradients import local_gradient, sum_over


def ranks_of_stages(stages_of: Mapping[str, Sequence[int]], degrees: Degrees) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks of the stages that hold each parameter."""
    return {name: tuple(sorted({degrees.rank_of_stage(s) for s in stages})) for name, stages in stages_of.items()}


class TiedParameters:
    """The parameters that several stages hold. Made collectively: sums over some ranks of a pipeline need a group."""

    def __init__(self, stages_of: Mapping[str, Sequence[int]], degrees: Degrees, mesh: RankMesh) -> None:
        self._stages_of = stages_of
        self._degrees = degrees
        self._ranks_of = ranks_of_stages(stages_of, degrees)
        self.names = tuple(name for name, stages in stages_of.items() if len(stages) > 1)
        shared = dict.fromkeys(ranks for ranks in self._ranks_of.values() if len(ranks) > 1)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {r: group_of_stages(mesh, r) for r in sorted(shared)}
        self._own_rank, self._device = mesh.stage_rank, torch.device(mesh.device_type)

    def num_ranks(self, name: str) -> int:
        """How many ranks of one pipeline hold a parameter."""
        return len(self._ranks_of[name])

    @torch.no_grad()
    def copy_to_twins(self, modules: Mapping[int, StageModule]) -> None:
        """Give twins the values of the parameters that the user has updated."""
        for first, twins in self._twins(modules):
            for twin in twins:
                private.local_part(twin).copy_(private.local_part(first))
                twin.grad = None

    @torch.no_grad()
    def sum_gradients(self, modules: Mapping[int, StageModule]) -> None:
        """Add up the gradients of all copies, on this rank and on others."""
        for first, twins in self._twins(modules):
            for twin in twins:
                if first.grad is None:
                    first.grad = twin.grad
                elif twin.grad is not None:
                    private.local_part(first.grad).add_(private.local_part(twin.grad))
                twin.grad = None
        for ranks, group in self._groups.items():
            names = [name for name in self.names if self._ranks_of[name] == ranks and self._own_rank in ranks]
            gradients = []
            for parameter in (self._copies(name, modules)[0] for name in names):
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    gradient = local_gradient(parameter)
                    assert gradient is not None
                    gradients.append((gradient, summed_dtype(gradient.dtype, self._degrees)))
            sum_over(gradients, group, self._device)

    def _twins(self, modules: Mapping[int, StageModule]) -> list[tuple[nn.Parameter, list[nn.Parameter]]]:
        every = (self._copies(name, modules) for name in self.names)
        return [(copies[0], copies[1:]) for copies in every if len(copies) > 1]

    def _copies(self, name: str, modules: Mapping[int, StageModule]) -> list[nn.Parameter]:
        """This rank's copies of a parameter, by stage."""
        owners = [modules[s].owner_of()[name] for s in self._stages_of[name] if s in modules]
        return [getattr(owner, attribute(name)) for owner in owners]
