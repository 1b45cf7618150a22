"""Models of full width and depth, captured with two layers: the repeated block stands for as many as are asked for."""

from dataclasses import dataclass, replace
from functools import cache

from autopar.cache.captures import captured_model
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.work.block_work import evaluate
from autopar.cost_model.work.program_costs import ProgramWorks
from autopar.ir.cluster import ClusterSpec
from autopar.planning.fixed import program_for
from autopar.planning.labels import LABELLED, SearchLabels
from autopar.search.bounds.lower_bounds import Machinery
from autopar.search.driver.search import SearchState, Works, search_degrees
from autopar.search.space.candidates import tensor_degrees
from autopar.search.space.dimensions import Constraints

CAPTURED_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Deep:
    """A preset of `layers` layers on sequences of `tokens`, in bfloat16."""

    preset: str
    layers: int
    tokens: int

    def works_of(self, cluster: str) -> Works:
        """What its blocks cost, labelled for the links of a cluster's preset."""
        labels = _labels(self.preset, self.tokens, cluster)
        return lambda tp, cp=1, ep=1: deeper(labels.works(tp, cp), self.layers)


@cache
def _labels(preset: str, tokens: int, cluster: str, layers: int = CAPTURED_LAYERS) -> SearchLabels:
    found = captured_model(preset, folder=None, layers=layers, seq_len=tokens, dtype="bfloat16")
    return SearchLabels(program_for(found.capture, LABELLED), ClusterSpec.preset(cluster))


def captured_whole(model: Deep, cluster: str) -> SearchLabels:
    """Every layer captured."""
    return _labels(model.preset, model.tokens, cluster, model.layers)


def deeper(works: ProgramWorks, layers: int) -> ProgramWorks:
    """The same program with `layers` calls of its one repeated block."""
    ((role, count),) = works.counts
    first = works.calls.index(role)
    calls = (*works.calls[:first], *[role] * layers, *works.calls[first + count :])
    block = works.family.block(role, "tp")
    ones = {**dict.fromkeys((*works.mesh.names, "b", "t", "d"), 1.0), "s": 1.0, "S": 1.0}
    split, whole = evaluate((block.parameters_split, block.parameters_whole), ones)
    more = round(float(split + whole)) * (layers - count)
    can_be_stage = (*works.can_be_stage[:first], *[True] * layers, *works.can_be_stage[first + count :])
    return replace(
        works,
        calls=calls,
        can_be_stage=can_be_stage,
        counts=((role, layers),),
        num_parameters=works.num_parameters + more,
    )


def machinery(cluster: ClusterSpec) -> Machinery:
    """What plans in bfloat16 are priced on."""
    engine = engine_named("autopar")
    machine = cluster_machine(cluster, engine, mechanisms(), precision="bf16")
    return Machinery(machine=machine)


def searched(model: Deep, labelled_on: str, cluster: ClusterSpec, global_batch: int) -> SearchState:
    """The best plan of the whole space."""
    constraints = Constraints(
        num_devices=cluster.num_devices,
        global_batch=global_batch,
        most_stages=model.layers,
        tensor_degrees=tensor_degrees(cluster.num_devices),
        devices_per_host=cluster.groups[0].devices_per_host,
    )
    on = machinery(cluster)
    return search_degrees(model.works_of(labelled_on), cluster, constraints, on, most_exact=400)
