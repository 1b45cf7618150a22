"""Expert parallelism: the host's wait for counts by hand, where it is zero, and the stated imbalance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.capture.request import Request
from autopar.cost_model.machine.cluster import cluster_machine
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.machine.presets import device_profile
from autopar.cost_model.machine.profile_io import dump_profile, load_profile
from autopar.cost_model.parts import COMPUTE
from autopar.cost_model.published.estimate import estimate_rows
from autopar.cost_model.published.row import Row, RowEstimate
from autopar.cost_model.step import block_prices
from autopar.cost_model.step.context import Basis
from autopar.cost_model.step.experts import count_seconds, expert_assumptions, with_experts
from autopar.cost_model.step.layouts import Shape, layouts_from
from autopar.cost_model.work.block_work import BlockWork, Family, Operator
from autopar.errors import ClusterError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.models.load import resolve_model
from autopar.planning.fixed import capture_for

MIXTRAL = Row(
    id="mixtral", model="Mixtral 8x7B", layers=32, hidden=4096, ffn_hidden=14336, n_heads=32, n_kv_heads=8,
    vocab=32000, seq_len=4096, gated_mlp=True, moe_experts=8, moe_topk=2, moe_ffn_hidden=14336, gpu_type="H100-SXM",
    num_gpus=64, gpus_per_node=8, tp=1, pp=1, dp=64, ep=8, zero=1, micro_batch=1, global_batch=256, recompute="none",
    precision="bf16", engine="megatron", attention="fused",
)  # fmt: skip
EXPERTS, CHOICES, WIDTH = 8, 2, 4096
LAYOUT = layouts_from(
    tp=1, pp=1, dp=64, shard=64, zero=1, micro_batch=1, micro_batches=1, sequence_parallel=0, recompute=0, ep=[1, 8]
)  # fmt: skip


def estimated(**changes: Any) -> RowEstimate:
    (found,) = estimate_rows([replace(MIXTRAL, **changes)])
    assert isinstance(found, RowEstimate)
    return found


def machine_of(engine: str, cluster: str = "64xh100", **options: Any) -> Machine:
    spec = ClusterSpec.preset(cluster)
    precision = "fp32" if spec.device_type == "cpu" else "bf16"
    return cluster_machine(spec, engine_named(engine), mechanisms(), precision=precision, **options)


def block(name: str) -> Family[Any]:
    """A block of one product of experts."""
    product = Operator(
        name=name, kind="matmul", flops=0.0, m=np.array([64.0]), n=1.0, k=1.0, count=np.array([float(EXPERTS)]),
        forward_bytes=0.0, backward_bytes=0.0, kernels_forward=1, kernels_backward=2,
    )  # fmt: skip
    work = BlockWork(
        role="moe_layer", products=(product,), eager=(), fused=(), sent=(), saved_eager_bytes=0.0,
        saved_fused_bytes=0.0, saved_operand_bytes=0.0, input_bytes=0.0,
        parameters_split=0.0, parameters_whole=0.0, parameters_expert=0.0,
    )  # fmt: skip
    return Family(name="block", source="", blocks=(("moe_layer", (("tp", work), ("sp", work))),))


def waited(machine: Machine, *, exchange_s: float = 0.0, name: str = "expert_product") -> list[float]:
    """Seconds of the wait with one and with eight expert ranks."""
    shape = Shape(
        counts=(("moe_layer", np.ones(1)),), hidden=np.ones(1), sequence=np.ones(1), experts_per_token=np.ones(1),
        is_tied=np.zeros(1),
    )  # fmt: skip
    basis = Basis(shape=shape, machine=machine)
    family = with_experts(block(name), LAYOUT, machine.mechanisms)
    found = count_seconds(basis, family, LAYOUT, "moe_layer", np.array([exchange_s]))
    return [float(one) for one in np.broadcast_to(found, (2,))]


# ---- the wait by hand ----


def test_the_wait_by_hand() -> None:
    """The exchange of counts, its reading, three launches of the exchange of rows, and four more that it may hide."""
    machine = machine_of("autopar")
    speeds, links, h = machine.speeds, machine.links, machine.speeds.host_s
    sent = 8 * EXPERTS * 7 / 8  # bytes of a rank, by the shortest protocol of a message of this size
    least = sent / links.in_host_bytes_per_s
    for exchange_s, launches in ((0.0, 7.0), (1.5 * h, 5.5), (4 * h, 3.0), (1.0, 3.0)):
        alone, split = waited(machine, exchange_s=exchange_s)
        assert alone == 0.0
        rest = split - launches * h - 2 * speeds.launch_s - links.in_host_latency_s
        assert least <= rest <= least + links.in_host_latency_s + 1e-12


def test_a_leaner_host_waits_less() -> None:
    eager, lean = waited(machine_of("autopar"))[1], waited(machine_of("megatron"))[1]
    assert 0 < lean < eager
    hosts = [machine_of(name).speeds.host_s for name in ("autopar", "megatron")]
    assert eager - lean == pytest.approx(7 * (hosts[0] - hosts[1]))


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("deepspeed-zero3", "expert_product"),  # rows are padded to a capacity
        ("jax", "expert_product"),  # a recorded graph has fixed sizes
        ("autopar", "bmm"),  # every expert has a fixed number of rows
    ],
)
def test_fixed_sizes_need_no_counts(engine: str, name: str) -> None:
    assert waited(machine_of(engine), name=name) == [0.0, 0.0]
    assert waited(machine_of("autopar"))[1] > 0


def test_a_cpu_pays_for_the_message_alone() -> None:
    machine = machine_of("autopar", "8xcpu")
    assert waited(machine)[1] == waited(machine, exchange_s=1.0)[1]
    assert 0 < waited(machine)[1] <= machine.links.in_host_latency_s + 8 * EXPERTS / machine.links.in_host_bytes_per_s


# ---- the wait in a step ----


def test_one_wait_for_each_layer_and_micro_batch() -> None:
    base = estimated()
    assert base.parts["expert counts"] > 0 == estimated(ep=1).parts["expert counts"]
    assert estimated(global_batch=512).parts["expert counts"] == pytest.approx(2 * base.parts["expert counts"])
    assert estimated(layers=16).parts["expert counts"] == pytest.approx(base.parts["expert counts"] / 2)
    assert sum(base.parts.values()) == pytest.approx(base.seconds, rel=1e-9)


def test_recomputation_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait recomputation is shorter by as much as the forward pass."""
    waits, both = estimated().parts["expert counts"], []
    for free in (False, True):
        if free:
            monkeypatch.setattr(block_prices, "count_seconds", lambda *_: np.zeros(1))
        both.append(estimated(recompute="full").parts["recomputation"])
    assert both[0] - both[1] == pytest.approx(waits, rel=1e-9)


# ---- the imbalance of experts ----


def test_a_profile_states_the_imbalance(tmp_path: Path) -> None:
    assumed, stated = device_profile("h100-sxm"), tmp_path / "mine.yaml"
    said = {**assumed.sources, "expert_imbalance": "counted by expert_load"}
    dump_profile(replace(assumed, name="mine", expert_imbalance=1.5, sources=said), stated)
    read = load_profile(stated)
    assert read.expert_imbalance == 1.5
    machine = machine_of("autopar", profile=read)
    assert machine.mechanisms.expert_imbalance == 1.5
    assert machine_of("autopar").mechanisms.expert_imbalance == mechanisms().expert_imbalance == 1.05
    rows = [float(with_experts(block("expert_product"), LAYOUT, m.mechanisms).block("moe_layer", "tp").products[0].m[1])
            for m in (machine, machine_of("autopar"))]  # fmt: skip
    assert rows == pytest.approx([64 * 8 * 1.5, 64 * 8 * 1.05])
    assert expert_assumptions(machine, 1) == ()
    assert "1.5 times" in expert_assumptions(machine, 8)[0]
    assert "profile mine: counted by expert_load" in expert_assumptions(machine, 8)[0]
    assert "1.05 times" in expert_assumptions(machine_of("autopar"), 8)[0]
    assert len(expert_assumptions(machine_of("deepspeed-zero3"), 8)) == 1  # no wait is assumed


def test_an_imbalance_below_one_is_refused(tmp_path: Path) -> None:
    profile = device_profile("h100-sxm")
    path = tmp_path / "mine.yaml"
    dump_profile(replace(profile, expert_imbalance=0.9), path)
    with pytest.raises(ClusterError, match="expert_imbalance"):
        load_profile(path)


def test_estimates_print_what_they_assume() -> None:
    pytest.importorskip("transformers")
    model = resolve_model("mixtral-8x7b", layers=1, hidden=64, seq_len=16)
    program = capture_for(Request.of(model.model, model.example_inputs), Degrees(micro_batch=2))
    ways = ({}, {"ep": 2, "dispatch": "exchange"})
    alone, split = (autopar.estimate(program, "2xh100", {"micro_batch": 1, "zero": 1, **way}) for way in ways)
    assert not any("expert" in one for one in alone.assumptions)
    assert any(one.startswith("the busiest expert rank has 1.05 times") for one in split.assumptions)
    waits = COMPUTE["expert counts"]
    assert split.compute_s[waits] > 0 == alone.compute_s[waits]
