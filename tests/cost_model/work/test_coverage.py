"""The counts of coverage, the price of whole operators, and plans that are refused because they cannot fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from planned import make_plan
from torch import nn

import autopar
from autopar.capture.analysis import analyse
from autopar.cost_model.memory.lower_bound import least_memory
from autopar.cost_model.work.coverage import Coverage
from autopar.errors import InfeasibleError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees

ROWS, WIDTH, INNER = 8, 16, 32
PRODUCT = 2 * ROWS * WIDTH * INNER


class Feed(nn.Module):
    """Two linears around an activation, which may be one without a rule, and a product without one."""

    def __init__(self, *, known: bool) -> None:
        super().__init__()
        self.up, self.down, self.known = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), known

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = torch.relu(y) if self.known else torch.special.bessel_j0(y)
        return self.down(y).square().mean()


def covered(model: nn.Module, **degrees: Any) -> Coverage:
    cluster = ClusterSpec.preset(f"{degrees.get('tp', 1) * degrees.get('dp', 1)}xh100")
    inputs = {"x": torch.empty(ROWS // degrees.get("dp", 1), WIDTH, device="meta")}
    return autopar.coverage(model.to("meta"), cluster, example_inputs=inputs, plan=degrees)


def test_products_count_and_split() -> None:
    found = covered(Feed(known=True), tp=4)
    linear = next(o for o in found.operators if o.operator == "linear")
    assert (linear.num_calls, linear.flops, linear.split_flops) == (2, 2 * PRODUCT, {"tp": 2 * PRODUCT})
    assert found.split_flops("tp") == 1.0
    assert not [w for w in found.whole if w.flops]


@pytest.mark.parametrize(("precision", "itemsize"), [({}, 2), ({"precision": "fp32"}, 4)], ids=["bf16", "fp32"])
def test_an_operator_without_a_rule_has_a_price(precision: dict[str, str], itemsize: int) -> None:
    """In the precision of `parallelize`: bf16 on GPUs, or the named one."""
    found = covered(Feed(known=False), tp=4, **precision)
    whole = next(w for w in found.whole if w.operator == "special_bessel_j0")
    assert not whole.has_rule
    assert whole.kept_bytes == ROWS * INNER * itemsize
    bandwidth = ClusterSpec.preset("4xh100").devices[0].memory_bandwidth_bytes_per_s
    assert whole.seconds == pytest.approx(3 * 2 * ROWS * INNER * itemsize / bandwidth)
    assert found.split_bytes("tp") < 1.0


class Product(nn.Module):
    """One product of two views that have a rule, through an operator that torch counts and autopar has no rule for."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bii,bij->bj", x, y).square().mean()


def test_products_that_no_rule_covers_count_as_whole() -> None:
    inputs = {"x": torch.empty(4, 8, 8, device="meta"), "y": torch.empty(4, 8, 8, device="meta", requires_grad=True)}
    found = autopar.coverage(Product(), "2xh100", example_inputs=inputs, plan={"tp": 2})
    einsum = next(o for o in found.operators if o.operator == "einsum")
    assert einsum.num_without_rule == 1 and einsum.flops > 0
    assert found.split_flops("tp") == 0.0


def test_products_grouped_by_expert_count() -> None:
    """Token, hidden and feed-forward sizes of the two products of every layer, though torch does not count them."""
    pytest.importorskip("transformers")
    from autopar.models.load import resolve_model

    model = resolve_model("mixtral-8x7b", layers=1, hidden=64, seq_len=16)
    found = autopar.coverage(model.model, "1xh100", example_inputs=model.example_inputs)
    grouped = [o for o in found.operators if "expert_product" in o.operator]
    ffn, tokens = 224, 2 * 16 * 2
    assert sum(o.flops for o in grouped) == 2 * tokens * 64 * (2 * ffn + ffn)


def test_several_mesh_dimensions_are_counted_apart() -> None:
    found = covered(Feed(known=True), tp=2, dp=2)
    assert found.mesh == {"dp": 2, "tp": 2}
    assert found.split_flops("dp") == found.split_flops("tp") == 1.0
    as_data = found.to_dict()
    assert as_data["split"]["tp"]["flops"] == 1.0


def test_heads_that_do_not_divide_count_for_what_a_rank_does() -> None:
    """12 heads over 8 ranks: a rank has 3 of them, all their scores and half the columns of their values."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=96, n_layer=2, n_head=12, vocab_size=160))
        tokens = torch.zeros(2, 16, dtype=torch.long)
    found = autopar.coverage(model, "8xh100", example_inputs={"input_ids": tokens, "labels": tokens}, plan={"tp": 8})
    assert found.mesh == {"tp0": 4, "tp1": 2}
    attention = next(o for o in found.operators if o.operator == "scaled_dot_product_attention")
    shares = {name: split / attention.flops for name, split in attention.split_flops.items()}
    assert shares == pytest.approx({"tp": (1 - 0.75 / 4) / (1 - 1 / 8), "tp0": 1.0, "tp1": 0.5})
    linear = next(o for o in found.operators if o.operator == "linear")
    assert linear.split_flops["tp"] == pytest.approx(linear.flops)
    assert found.to_dict()["split"]["tp"]["flops"] == found.split_flops("tp") < 1.0


def test_padding_counts_as_work() -> None:
    """30 columns over 4 ranks are 4 × 8: a rank does 8/30, not a quarter."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x))).square().mean()

    assert covered(Odd(), tp=4).split_flops("tp") == pytest.approx((1 - 8 / 30) / (1 - 1 / 4))


# ---- what cannot fit ----


def small_memory(memory_bytes: int, ranks: int) -> ClusterSpec:
    cluster = ClusterSpec.preset(f"{ranks}xcpu")
    group = replace(cluster.groups[0], device=replace(cluster.groups[0].device, memory_bytes=memory_bytes))
    return replace(cluster, groups=(group,))


@pytest.mark.parametrize(("zero", "copies"), [(0, 4.0), (1, 3.0), (2, 2.5), (3, 2.0)])
def test_state_by_zero_stage(zero: int, copies: float) -> None:
    """Two data-parallel ranks: the moments are halved from ZeRO 1 on, gradients from 2, parameters from 3."""
    model = Feed(known=True)
    degrees = Degrees(dp_shard=2, zero=zero)
    program, plan = make_plan(model, ClusterSpec.preset("2xcpu"), {"x": torch.zeros(4, WIDTH)}, degrees)
    least = least_memory(program, analyse(program, degrees.mesh), plan.blocks, degrees)
    assert least.state_bytes == 4 * copies * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("zero", "each"), [(0, 16.0), (1, 8.0), (2, 8.0), (3, 8.0)])
def test_state_with_float32_masters(zero: int, each: float) -> None:
    """Bytes of a parameter on two ranks: under ZeRO 1 and 2 whole parameters have 16 bits, masters are shards."""
    model, degrees = Feed(known=True), Degrees(dp_shard=2, zero=zero, precision="bf16")
    program, plan = make_plan(model, ClusterSpec.preset("2xcpu"), {"x": torch.zeros(4, WIDTH)}, degrees)
    least = least_memory(program, analyse(program, degrees.mesh), plan.blocks, degrees)
    assert least.state_bytes == each * sum(p.numel() for p in model.parameters())


def planned(memory_bytes: int, batch: int, **degrees: Any) -> None:
    wish = Degrees(**degrees)
    inputs = {"x": torch.zeros(batch, WIDTH)}
    make_plan(Feed(known=False), small_memory(memory_bytes, wish.world_size), inputs, wish)


def test_state_that_does_not_fit_is_refused() -> None:
    state = 16 * (2 * WIDTH * INNER + WIDTH + INNER)
    planned(2 * state, batch=2)
    with pytest.raises(InfeasibleError, match=r"at least 1\d\.\d kB, a device has 10 kB.*split the state over"):
        planned(10_000, batch=2)


def test_a_whole_operator_that_does_not_fit_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"special_bessel_j0.* 262 kB \(whole on every rank\).*give the operator"):
        planned(200_000, batch=1024, tp=2)
