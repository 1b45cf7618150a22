"""A search's problem from a preset, a cluster and a batch, for the benchmarks of the search beside this file.

Captures are kept in the cache of `autopar plan` (``AUTOPAR_CACHE_DIR``), so only the first run takes long.
"""

from dataclasses import dataclass, field
from functools import cache

from autopar.cache.captures import captured_model
from autopar.cache.store import cache_folder
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.work.program_costs import ProgramWorks, program_works
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.planning.fixed import choose_labels, program_for
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.space.candidates import Split
from autopar.search.space.dimensions import Constraints, divisors

MOST_TENSOR_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A preset at a sequence length, on a cluster, for a batch of sequences. `layers` is None for the preset's own."""

    model: str
    cluster: str
    sequence: int
    global_batch: int
    layers: int | None = None
    known: dict[Split, ProgramWorks] = field(default_factory=dict, compare=False, repr=False)

    @property
    def spec(self) -> ClusterSpec:
        return ClusterSpec.preset(self.cluster)

    @property
    def on(self) -> Machinery:
        engine = engine_named("autopar")
        machine = cluster_machine(self.spec, engine, mechanisms(), precision="bf16")
        return Machinery(machine=machine)

    @property
    def constraints(self) -> Constraints:
        spec = self.spec
        return Constraints(
            num_devices=spec.num_devices,
            global_batch=self.global_batch,
            most_stages=sum(1 for role in self.works(1).calls if role),
            tensor_degrees=tuple(tp for tp in divisors(spec.num_devices) if tp <= MOST_TENSOR_RANKS),
            devices_per_host=spec.groups[0].devices_per_host,
        )

    def works(self, tp: int, cp: int = 1, ep: int = 1) -> ProgramWorks:
        """The works of blocks under the labels for a split. Raises AutoparError if there are no labels."""
        split = Split(tp, cp, ep)
        if split not in self.known:
            wanted = Degrees(tp=tp, cp=cp, ep=ep, dp_shard=2 * ep, micro_batch=1)
            program = _program(self.model, self.sequence, self.layers, wanted.dp)
            degrees, analysis, found = choose_labels(program, self.spec, wanted)
            self.known[split] = program_works(program, analysis, found.blocks, degrees.mesh)
        return self.known[split]


@cache
def _program(model: str, sequence: int, layers: int | None, batch: int) -> Program:
    found = captured_model(model, folder=cache_folder(), layers=layers, seq_len=sequence, dtype="bfloat16")
    return program_for(found.capture, Degrees(dp_shard=batch, micro_batch=1))
