"""Prices of one mesh dimension, at a reference workload.

The degree is given, so the question is how to split, not whether. Three prices therefore assume a workload that is
worth splitting. For models of ordinary size they change nothing.

* Latency counts as if the largest value between blocks had at least `REFERENCE_BYTES`. A two-layer test model then gets
the labels of the same model at full width.
* Arithmetic counts at least `BALANCE` times the seconds of sending a product's activations. Otherwise a slow link or a
  narrow model would leave everything whole.
* A parameter's state costs `MEMORY_WEIGHT` times the arithmetic of its elements. This shadow price of memory depends on
  neither layers nor device. It keeps a large batch from replicating the weights.

All other prices are seconds on the given cluster: bytes over the link, bytes over the memory bus.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from autopar.capture.analysis import Analysis, parameter_values
from autopar.cost_model.machine.collectives import hops, sent_bytes
from autopar.ir.cluster import ClusterSpec, memory_bytes_per_s, peak_flops_per_s
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.lowering.conversions import Collective
from autopar.rules.rule import Call
from autopar.search.labels.choices import Boundary

REFERENCE_BYTES = 64 * 1024 * 1024  # 8192 tokens × 4096 × 2 bytes
BALANCE = 2.0
MEMORY_WEIGHT = 2.0
CAUSAL = 0.5  # of attention's FLOP, which count all pairs of positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks of one mesh dimension: how many, and their slowest link."""

    ranks: int
    bytes_per_s: float
    latency_s: float

    def seconds(self, kind: Collective, whole_bytes: float) -> float:
        """Time of the bytes of one collective over a tensor of `whole_bytes` in all."""
        return sent_bytes(kind, whole_bytes, self.ranks) / self.bytes_per_s

    def latency_of(self, kind: Collective) -> float:
        return hops(kind, self.ranks) * self.latency_s


def ring_of(cluster: ClusterSpec, mesh: Mesh, index: int) -> Ring:
    """The ring of mesh dimension `index`, with the link of its first and last rank, which lie farthest apart."""
    ranks, stride = mesh.degrees[index], prod(mesh.degrees[index + 1 :])
    last = min((ranks - 1) * stride, cluster.num_devices - 1)
    link = cluster.link(0, last) if last > 0 else cluster.groups[0].in_host or cluster.inter_host
    if link is None:  # one device: nothing to price
        return Ring(ranks=ranks, bytes_per_s=1e9, latency_s=0.0)
    return Ring(ranks=ranks, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds per unit of everything that the objective counts. The solver's objective is in units of `unit_s`."""

    ring: Ring
    flop_s: Mapping[str, float] = field(hash=False)
    byte_s: float
    state_byte_s: float
    saved_byte_s: float
    latency_scale: float  # by which the reference workload changed the cluster's figures
    compute_scale: float  # likewise
    unit_s: float
    hiding: float  # the share of computing, at the device's peak, that hides what is sent beside it

    def peak_s(self, call: Call) -> float:
        """Seconds of a FLOP of an operator at the device's peak."""
        return self.flop_s[str(call.output.dtype)] / self.compute_scale


def intensity(program: Program, analysis: Analysis) -> tuple[float, float, float]:
    """FLOP per activation element, FLOP per parameter element, and bytes per activation element, of all products.

    Only products with a parameter count. A distinct block counts once, so the number of layers makes no difference.
    """
    flops = activations = parameters = activation_bytes = 0.0
    for i in range(len(program.blocks)):
        from_parameter = parameter_values(program, analysis, i)
        for node, bound in analysis.bounds[i].items():
            names = analysis.operands[i][node]
            work = bound.rule.factor_flops()
            if not work or not any(name in from_parameter for name in names):
                continue
            call = analysis.calls[i][node]
            flops += work
            infos = list(zip(names, call.operands, strict=True))
            parameters += sum(_elements(info.shape) for name, info in infos if name in from_parameter)
            others = [info for name, info in infos if name not in from_parameter]
            for info in (*others, call.output):
                activations += _elements(info.shape)
                activation_bytes += _elements(info.shape) * info.dtype.itemsize
    if not flops:
        return 0.0, 0.0, 4.0
    return flops / activations, flops / parameters, activation_bytes / activations


def _elements(shape: tuple[int, ...]) -> float:
    return float(prod(shape))


def prices_of(
    program: Program, analysis: Analysis, boundary: Boundary, cluster: ClusterSpec, mesh: Mesh, index: int
) -> Prices:
    """Prices of mesh dimension `index`."""
    ring = ring_of(cluster, mesh, index)
    dtypes = {str(c.output.dtype): c.output.dtype for calls in analysis.calls for c in calls.values()}
    peaks = {name: peak_flops_per_s(cluster, dtype) for name, dtype in dtypes.items()}
    per_element, per_parameter, item = intensity(program, analysis)
    held = {str(dtype) for dtype in {p.dtype for p in program.parameters.values()}}
    peak = max((peaks[name] for name in held if name in peaks), default=1e12)
    wanted = BALANCE * item * peak / ring.bytes_per_s
    compute_scale = max(1.0, wanted / per_element) if per_element else 1.0
    flop_s = {name: compute_scale / peak_ for name, peak_ in peaks.items()}
    crossing = [c for c in boundary.classes.values() if c.role == "value" and c.differentiable]
    largest = max((c.itemsize * _elements(c.dims.shape) for c in crossing), default=1.0)
    state = MEMORY_WEIGHT * 3.0 * per_parameter * compute_scale / peak / 16.0
    return Prices(
        ring=ring,
        flop_s=flop_s,
        byte_s=1 / memory_bytes_per_s(cluster),
        state_byte_s=state,
        saved_byte_s=2 / memory_bytes_per_s(cluster),
        latency_scale=min(1.0, largest / REFERENCE_BYTES),
        compute_scale=compute_scale,
        hiding=0.0 if cluster.device_type == "cpu" else CAUSAL,
        unit_s=ring.seconds("all_reduce", largest) or 1e-9,
    )
