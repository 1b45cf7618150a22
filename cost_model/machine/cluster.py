"""The machine of a cluster and a device profile, and the precisions that layouts are priced in."""

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model.machine.engine import Engine
from autopar.cost_model.machine.fitted_constants import Mechanisms
from autopar.cost_model.machine.machine import Machine, links_of, speeds_of
from autopar.cost_model.machine.presets import cluster_profile
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.errors import InputError, did_you_mean
from autopar.ir.cluster import ClusterSpec
from autopar.ir.device import Device, Link

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8", "mxfp8": "float8", "fp32": "float32"}
_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# no message crosses these: a host of one device, a cluster of one host
_NO_LINK = Link(bytes_per_s=1e12, latency_s=1e-6, name="none")


def default_precision(cluster: ClusterSpec) -> str:
    """bf16 on devices that have it, else fp16; fp32 on CPUs."""
    if cluster.device_type == "cpu":
        return "fp32"
    return "bf16" if all("bfloat16" in device.peak_flops_per_s for device in cluster.devices) else "fp16"


def precision_of(dtype: str, cluster: ClusterSpec) -> str:
    """The default precision for pricing a model of `dtype`."""
    return _OF_DTYPE.get(dtype) or default_precision(cluster)


def dtype_assumptions(dtype: str, precision: str, cluster: ClusterSpec) -> tuple[str, ...]:
    """A sentence for the user if the price of a model of `dtype` in `precision` may surprise; else nothing."""
    if DTYPES[precision] == "float8":  # of products alone
        return ()
    if DTYPES[precision] != dtype:
        priced = DTYPES[precision]
        return (f"the model is {dtype}: products are priced in {priced}, weights, activations and messages in {dtype}",)
    if precision == "fp32" and cluster.device_type != "cpu":
        faster = DTYPES[default_precision(cluster)]
        return (f"the model is float32: products are priced without TF32, as it runs; in {faster} they are faster",)
    return ()


def precision_on(precision: str | None, cluster: ClusterSpec) -> str:
    """The requested precision, or the default if `precision` is None. Raises `InputError` for an unknown precision."""
    if precision is None:
        return default_precision(cluster)
    if precision not in DTYPES:
        raise InputError(f"unknown precision {precision[:80]!r}; {did_you_mean(precision, tuple(DTYPES))}")
    return precision


def cluster_machine(
    cluster: ClusterSpec,
    engine: Engine,
    mechanisms: Mechanisms,
    *,
    precision: str,
    profile: DeviceProfile | None = None,
) -> Machine:
    """The machine of the cluster's slowest device.

    Without a `profile`, the profile that the cluster names counts, else the shipped profile of the device.
    """
    precision_on(precision, cluster)
    group = min(cluster.groups, key=lambda g: g.device.peak_flops_per_s.get("bfloat16", 0.0) or _largest(g.device))
    used = profile or cluster_profile(cluster, group.device.name)
    device = used.applied_to(group.device)
    dtype = DTYPES[precision]
    if dtype not in device.peak_flops_per_s and not (precision == "bf16" and "float16" in device.peak_flops_per_s):
        known = tuple(name for name, its in DTYPES.items() if its in device.peak_flops_per_s)
        raise InputError(f"device {device.name!r} has no unit for {precision}; use {' or '.join(known)}")
    if used.expert_imbalance is not None:
        mechanisms = replace(mechanisms, expert_imbalance=used.expert_imbalance)
    given = group.in_host or _NO_LINK
    in_host = replace(used.link("in_host").link or given, is_switched=given.is_switched)  # no ranks measure that
    links = links_of(
        used,
        in_host=in_host,
        inter_host=used.link("inter_host").link or _between(cluster) or in_host,
        devices_per_host=float(group.devices_per_host),
    )
    speeds = speeds_of(device, used, engine, mechanisms, precision=precision)
    return Machine(
        device=device,
        profile=used,
        engine=engine.computing_in(precision),
        mechanisms=mechanisms,
        precision=precision,
        speeds=speeds,
        links=links,
        ranks_per_core=used.measured.ranks_per_core if used.measured and cluster.num_hosts == 1 else 1.0,
        host=device.host,
        memory_bytes=float(cluster.min_memory_bytes),
        peak_flops_per_s=float(device.peak_flops_per_s.get(dtype, speeds.peak_flops_per_s)),
        assumptions=(*cluster.assumptions, *used.assumptions(), *_simplified(cluster)),
    )


def _largest(device: Device) -> float:
    return max(device.peak_flops_per_s.values())


def _between(cluster: ClusterSpec) -> Link | None:
    """The link between hosts. If hosts are on several leaves, it is the slower of leaf and spine."""
    links: Sequence[Link] = [link for link in (cluster.inter_host, cluster.spine) if link is not None]
    return min(links, key=lambda link: link.bytes_per_s) if links else None


def _simplified(cluster: ClusterSpec) -> tuple[str, ...]:
    notes = []
    if cluster.is_heterogeneous:
        notes.append("every device is priced as the slowest device of the cluster")
    if cluster.spine is not None:
        notes.append("traffic between hosts is priced at the slower of leaf and spine, also below one leaf")
    return tuple(notes)
