"""Small searches: labelled programs, machines with little memory, and every candidate priced."""

from dataclasses import dataclass, replace
from functools import cache

from label_cases import program_of

from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.work.program_costs import ProgramWorks, program_works
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.device import Link
from autopar.planning.fixed import choose_labels
from autopar.planning.recomputed import with_recomputed
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.space.dimensions import Constraints


@cache
def works_of(
    model: str, tp: int, layers: int = 6, vocabulary: int = 512, selective: bool = False, cp: int = 1, ep: int = 1
) -> ProgramWorks:
    """What the blocks of a tiny model cost, split over tp, cp and ep ranks, perhaps with recomputed operators."""
    program = program_of(model, layers=layers, heads=16, vocabulary=vocabulary, batch=4 * ep)
    wanted = Degrees(tp=tp, cp=cp, ep=ep, dp_shard=2 * ep, micro_batch=1)
    degrees, analysis, found = choose_labels(program, ClusterSpec.preset("8xh100"), wanted)
    blocks, wish = found.blocks, replace(degrees, recompute="auto" if selective else "none")
    speeds = machinery_with(ClusterSpec.preset("8xh100"), 80e9).machine.speeds
    blocks = with_recomputed(program, analysis, blocks, wish, speeds, regather=True)
    return program_works(program, analysis, blocks, degrees.mesh)


def machinery_with(cluster: ClusterSpec, memory_bytes: float, ranks_per_core: float = 1.0) -> Machinery:
    """A cluster on whose devices the tensors of a plan may hold `memory_bytes`."""
    engine = engine_named("autopar")
    machine = cluster_machine(cluster, engine, mechanisms(), precision="bf16")
    tensors = (1 + machine.mechanisms.allocator_cache) * memory_bytes
    memory = (machine.reserve_bytes + tensors) / usable_bytes(1.0)
    return Machinery(
        machine=replace(machine, memory_bytes=memory, ranks_per_core=ranks_per_core),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its sequence as long as `tokens`, on a cluster whose devices have `memory_bytes` beside the reserve; in
    hosts of `per_host` devices that share a link of so many `gigabits` a second, where that is given."""

    model: str
    cluster: str
    global_batch: int
    tokens: int = 16
    memory_bytes: float = 80e9
    ranks_per_core: float = 1.0
    per_host: int | None = None
    gigabits: float = 100.0
    selective: bool = False
    vocabulary: int = 512
    context_degrees: tuple[int, ...] = (1,)
    expert_degrees: tuple[int, ...] = (1,)

    @property
    def spec(self) -> ClusterSpec:
        spec = ClusterSpec.preset(self.cluster)
        if self.per_host is None:
            return spec
        hosts = replace(spec.groups[0], num_hosts=spec.num_devices // self.per_host, devices_per_host=self.per_host)
        link = Link(bytes_per_s=self.gigabits * 1e9 / 8 / self.per_host, latency_s=5e-6, name="network")
        return replace(spec, groups=(hosts,), inter_host=link)

    @property
    def on(self) -> Machinery:
        return machinery_with(self.spec, self.memory_bytes, self.ranks_per_core)

    def works(self, tp: int, cp: int = 1, ep: int = 1) -> ProgramWorks:
        words = {"vocabulary": self.vocabulary, "selective": self.selective, "cp": cp, "ep": ep}
        return replace(works_of(self.model, tp, **words), sequence=self.tokens)

    @property
    def constraints(self) -> Constraints:
        calls = [role for role in works_of(self.model, 1).calls if role]
        return Constraints(
            num_devices=self.spec.num_devices,
            global_batch=self.global_batch,
            most_stages=len(calls),
            tensor_degrees=tuple(tp for tp in (1, 2, 4, 8) if self.spec.num_devices % tp == 0),
            context_degrees=self.context_degrees,
            expert_degrees=self.expert_degrees,
            devices_per_host=self.on.machine.links.devices_per_host,
        )
