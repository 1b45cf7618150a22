"""Random operators: equal where ranks hold the same values, independent where they hold different parts."""

from dataclasses import dataclass

import torch
from equivalence import case_of, labelled, run
from tiny_models import randomise
from torch import fx, nn

from autopar.ir.sharding import Dims, I, Mesh, S
from autopar.lowering.randomness import attention_with_dropout, bind_streams, drawn, dropout
from autopar.runtime.codegen.randomness import RandomStream

aten = torch.ops.aten
CPU = torch.device("cpu")


@dataclass(frozen=True)
class At:
    """What a stream reads of a mesh dimension."""

    name: str
    coordinate: int


def stream(*coordinates: int, seed: int = 0) -> RandomStream:
    dims = [At(name, at) for name, at in zip(("dp", "tp"), coordinates, strict=False)]
    return RandomStream(dims, seed, CPU)  # type: ignore[arg-type]


def test_equal_coordinates_draw_equal_masks_and_others_independent_ones() -> None:
    x = torch.ones(200, 200)
    masks = {at: stream(*at).keep_mask(x, 0.5) for at in [(0, 0), (0, 1), (1, 0)]}
    assert torch.equal(stream(0, 0).keep_mask(x, 0.5), masks[0, 0])
    for other in ((0, 1), (1, 0)):
        both = torch.stack((masks[0, 0].flatten().double(), masks[other].flatten().double()))
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.03


def test_a_micro_batch_restarts_the_stream() -> None:
    x, one = torch.ones(1000), stream(0)
    one.begin(3, 1)
    first = one.keep_mask(x, 0.3)
    assert not torch.equal(one.keep_mask(x, 0.3), first)
    one.begin(3, 1)
    assert torch.equal(one.keep_mask(x, 0.3), first)
    one.begin(3, 2)
    assert not torch.equal(one.keep_mask(x, 0.3), first)


def test_a_block_run_again_draws_the_same_numbers() -> None:
    """Whatever ran in between: recomputation in backward comes after later blocks and micro-batches."""
    x, one = torch.ones(1000), stream(0)
    one.begin(3, 1, 5)
    first, second = one.keep_mask(x, 0.3), one.keep_mask(x, 0.3)
    one.begin(3, 2, 6)
    other = one.keep_mask(x, 0.3)
    one.begin(3, 1, 5)
    assert torch.equal(one.keep_mask(x, 0.3), first) and torch.equal(one.keep_mask(x, 0.3), second)
    one.begin(3, 1, 6)
    assert not any(torch.equal(one.keep_mask(x, 0.3), earlier) for earlier in (first, second, other))


class Dropped(nn.Module):
    """Outputs a mask of a value that both mesh dimensions split, and one of a value that only `dp` splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 256), nn.Linear(256, 63)  # 63: whole on `tp`
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = self.dropout(self.up(x))
        narrow = self.dropout(self.down(wide))
        again = self.dropout(self.down(wide))
        return {"loss": narrow.square().mean() + again.square().mean(), "wide": wide, "narrow": narrow, "again": again}


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    both = torch.stack((one.flatten().double(), other.flatten().double()))
    return abs(float(torch.corrcoef(both)[0, 1]))


def test_masks_of_a_split_model() -> None:
    """Equal on ranks that hold the same values, uncorrelated between shards and between operators."""
    example = (randomise(Dropped().double()), {"x": torch.randn(16, 6, dtype=torch.float64)})
    case, mesh = case_of(example), Mesh.of(dp=2, tp=2)
    found = run(case, labelled(case, mesh), mesh)
    assert found.disagreement == 0.0
    masks = {name: found.outputs[name] != 0 for name in ("wide", "narrow", "again")}
    for mask in masks.values():
        assert 0.4 < float(mask.double().mean()) < 0.6
        assert correlation(*mask.chunk(2, 0)) < 0.15
        half = mask.shape[1] // 2
        assert correlation(mask[:, :half], mask[:, -half:]) < 0.15
    assert correlation(masks["narrow"], masks["again"]) < 0.15


def test_dropout_scales_and_passes_gradients_where_it_keeps() -> None:
    x = torch.ones(10_000, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.25, stream(0))
    out.sum().backward()
    assert set(out.detach().unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float(out.detach().mean()) - 1) < 0.05
    assert x.grad is not None and torch.equal(x.grad, out.detach())


def test_evaluation_drops_nothing() -> None:
    quiet = stream(0)
    quiet.training = False
    x = torch.randn(2, 2, 4, 8)
    assert torch.equal(dropout(x, 0.9, quiet), x)
    expected = aten.scaled_dot_product_attention.default(x, x, x, None, 0.0, True, scale=0.5)
    found = attention_with_dropout(quiet, x, x, x, None, 0.9, True, scale=0.5)
    assert torch.equal(found, expected)


def test_any_random_operator_draws_from_the_stream() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    x = torch.ones(50)
    first = drawn(stream(1), aten.rand_like.default, x)
    assert torch.equal(first, drawn(stream(1), aten.rand_like.default, x))
    assert not torch.equal(first, drawn(stream(2), aten.rand_like.default, x))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_random_operator_of_a_graph_is_bound_to_the_dimensions_that_split_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [
        graph.call_function(aten.dropout.default, (x, 0.1, True)),
        graph.call_function(aten.rand_like.default, (x,)),
        graph.call_function(aten.bernoulli.p, (x, 0.5)),
        graph.call_function(aten.dropout.default, (x, 0.1, False)),
    ]
    graph.output(tuple(calls))
    for node, types in zip(calls, [(I, S(1)), (S(0), S(1)), (I, I), (I, I)], strict=True):
        node.meta |= {"types": types, "key": f"key of {node.name}"}
    dims = {node.name: Dims.plain((4, 4)) for node in calls}
    streams = bind_streams(graph, Mesh.of(dp=2, tp=2), dims)
    split = {name: use.mesh_dims for name, use in streams.items()}
    assert split == {"random_tp": ("tp",), "random_dp_tp": ("dp", "tp"), "random": ()}
    (draw,) = streams["random_tp"].draws
    assert (draw.key, draw.types, draw.dims.shape) == ("key of dropout_default", (I, S(1)), (4, 4))
    assert [n.target for n in calls] == [dropout, drawn, drawn, aten.dropout.default]
