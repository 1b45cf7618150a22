"""What candidates are priced on: the cluster as a machine under a profile and a precision, with autopar's engine."""

from autopar.cost_model.cluster_machine import cluster_machine
from autopar.cost_model.device_profile import DeviceProfile
from autopar.cost_model.engine import engine_named
from autopar.cost_model.mechanisms import mechanisms
from autopar.cost_model.pricing import ranks_per_core
from autopar.ir.cluster import ClusterSpec
from autopar.search.pinned import Pinned
from autopar.search.screen import Machinery

ENGINE = "autopar"


def machinery_of(
    cluster: ClusterSpec, profile: DeviceProfile | None, precision: str, pinned: Pinned | None = None
) -> Machinery:
    """Raises `InputError` where the precision is unknown or the cluster's devices do not have it."""
    engine, constants = engine_named(ENGINE), mechanisms()
    machine = cluster_machine(cluster, engine, constants, precision=precision, profile=profile)
    return Machinery(
        machine=machine,
        engine=engine,
        mechanisms=constants,
        precision=precision,
        ranks_per_core=ranks_per_core(machine, cluster),
        pinned=pinned or Pinned(),
    )
