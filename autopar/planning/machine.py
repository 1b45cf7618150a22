"""The machine that prices candidates: the cluster under a profile and a precision, with autopar's engine."""

from typing import TYPE_CHECKING

from autopar.cost_model.machine.cluster import cluster_machine, precision_of
from autopar.cost_model.machine.engine import DEFAULT, engine_named, with_sums_in
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.errors import InputError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.precision import MASTER_BYTES

if TYPE_CHECKING:
    from autopar.search.bounds.lower_bounds import Machinery


def machine_of(
    cluster: ClusterSpec,
    profile: DeviceProfile | None,
    precision: str,
    reduce_dtype: str | None = None,
    stored_bytes: int = MASTER_BYTES,
) -> Machine:
    """The cluster as a machine. Raises `InputError` if the precision is unknown or the devices do not have it."""
    engine = with_sums_in(engine_named(DEFAULT), reduce_dtype, stored_bytes)
    return cluster_machine(cluster, engine, mechanisms(), precision=precision, profile=profile)


def machinery_of(cluster: ClusterSpec, profile: DeviceProfile | None, precision: str) -> "Machinery":
    """The machine of `machine_of` without decisions that all candidates share."""
    from autopar.search.bounds.lower_bounds import Machinery

    return Machinery(machine=machine_of(cluster, profile, precision))


def own_machinery(cluster: ClusterSpec, dtype: str) -> "Machinery":
    """The machinery for plans of given degrees: in the model's precision, or float32 where the devices lack it."""
    try:
        return machinery_of(cluster, None, precision_of(dtype, cluster))
    except InputError:
        return machinery_of(cluster, None, "fp32")
