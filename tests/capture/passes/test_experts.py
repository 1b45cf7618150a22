"""Products of rows in groups, and counts of integers: one operator that every dtype and device has."""

import pytest
import torch
from torch import fx, nn

from autopar.capture.passes.experts import SCATTER_ADD, operators_of_libraries
from autopar.capture.program import capture_program
from autopar.rules.grouped_product import GROUPED_MM
from autopar.rules.routed import PRODUCT

aten = torch.ops.aten


def test_the_product_is_that_of_each_group_and_gradients_too() -> None:
    """An empty group, rows behind the last one, and operands of any strides."""
    x = torch.randn(4, 7, dtype=torch.float64).t().requires_grad_()
    weight = torch.randn(3, 5, 4, dtype=torch.float64).transpose(1, 2).requires_grad_()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    wanted = torch.cat([x[:2] @ weight[0], x[2:6] @ weight[2], torch.zeros(1, 5, dtype=torch.float64)])
    torch.testing.assert_close(GROUPED_MM(x, weight, ends), wanted)
    assert torch.autograd.gradcheck(lambda a, b: GROUPED_MM(a, b, ends), (x, weight))
    torch.library.opcheck(GROUPED_MM, (x, weight, ends))


class Experts(nn.Module):
    """Rows sorted by expert, counted and multiplied; `as_float` is how transformers counts on a CPU."""

    def __init__(self, *, as_float: bool) -> None:
        super().__init__()
        self.weight, self.as_float = nn.Parameter(torch.randn(4, 8, 16, dtype=torch.bfloat16)), as_float

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        sorted_ids, order = torch.sort(expert)
        counts = torch.histc(sorted_ids.float() if self.as_float else sorted_ids.int(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        out: torch.Tensor = torch.nn.functional.grouped_mm(x[order], self.weight, offs=ends)[back]
        return out.square().mean()


@pytest.mark.parametrize("as_float", [False, True])
def test_what_experts_compute_with_has_rules(as_float: bool) -> None:
    # torch infers the shapes of grouped_mm in bfloat16 only
    inputs = {
        "x": torch.empty(6, 8, device="meta", dtype=torch.bfloat16),
        "expert": torch.zeros(6, dtype=torch.long, device="meta"),
    }
    program = capture_program(Experts(as_float=as_float).to("meta"), inputs)
    targets = [n.target for b in program.blocks for n in b.graph.nodes if n.op == "call_function"]
    assert targets.count(PRODUCT) == 1
    assert {GROUPED_MM, aten._grouped_mm.default, aten.histc.default, aten.empty_like.default}.isdisjoint(targets)


def test_operators_of_libraries_get_torchs_names() -> None:
    class Library:
        __name__ = "deterministic_scatter_add"

        def __call__(self, *args: torch.Tensor) -> torch.Tensor:
            return args[0]

        def __str__(self) -> str:
            return SCATTER_ADD

    graph = fx.Graph()
    out, index, source = (graph.placeholder(name) for name in ("out", "index", "source"))
    node = graph.call_function(Library(), (out, index, source))
    operators_of_libraries(graph)
    assert node.target is aten.scatter_add.default
    assert node.args == (out, 0, index, source)
