"""Ranges that are enough: if they are complete and all inputs are inside, no index is outside of its table."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from suites import thinned
from torch import nn
from torch.nn import functional as F

from autopar.capture.input_ranges import safe_ranges
from autopar.capture.known_range import KnownRange
from autopar.capture.lookups import lookups
from autopar.capture.program import capture_program
from autopar.capture.value_range import ValueRange
from autopar.ir.program import Program

ROWS, SHAPE, IGNORED = 12, (4, 6), -100
Index = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Computed:
    """An index of two inputs, and the range of the first one; None if ranges cannot be enough, "any" if no range is
    needed."""

    of: Index
    first: tuple[float, float] | str | None


INF = float("inf")
INDICES: dict[str, Computed] = {
    "as it is": Computed(lambda a, b: a, (0, 12)),
    "shifted": Computed(lambda a, b: a + 2, (-2, 10)),
    "shifted back": Computed(lambda a, b: a - 3, (3, 15)),
    "alpha": Computed(lambda a, b: torch.sub(a, 2, alpha=3), (6, 18)),
    "times": Computed(lambda a, b: a * 5, (0, 3)),
    "floor": Computed(lambda a, b: a // 3, (0, 36)),
    "truncated": Computed(lambda a, b: a.div(3, rounding_mode="trunc"), (0, 36)),
    "truncated below zero": Computed(lambda a, b: a.div(3, rounding_mode="trunc") + 12, None),
    "remainder": Computed(lambda a, b: a % 12, "any"),
    "large remainder": Computed(lambda a, b: a % 30, (0, 12)),
    "clamped below": Computed(lambda a, b: a.clamp(min=0), (-INF, 12)),
    "clamped above": Computed(lambda a, b: a.clamp(max=5), (0, INF)),
    "clamped": Computed(lambda a, b: a.clamp(0, 11), "any"),
    "clamped to an illegal number": Computed(lambda a, b: a.clamp(-5, 11), (0, INF)),
    "clamped by a tensor": Computed(lambda a, b: a.clamp(min=b), None),
    "positive part": Computed(lambda a, b: a.relu(), (-INF, 12)),
    "ignored": Computed(lambda a, b: a.masked_fill(a == -100, 0), (0, 12)),
    "ignored, by an illegal number": Computed(lambda a, b: a.masked_fill(a == -100, -1), None),
    "ignored by where": Computed(lambda a, b: torch.where(a >= 0, a, 0), (-INF, 12)),
    "hidden": Computed(lambda a, b: torch.where(b > 0, a, torch.zeros_like(a)), (0, 12)),
    "hidden, by an illegal number": Computed(lambda a, b: torch.where(b > 0, a, torch.full_like(a, 12)), None),
    "masked by a product": Computed(lambda a, b: a * (b == 1), (0, 12)),
    "masked by a cast": Computed(lambda a, b: a * b.bool(), (0, 12)),
    "masked by a cast twice": Computed(lambda a, b: a * (b == 1).long(), (0, 12)),
    "masked, then illegal": Computed(lambda a, b: (a + 5) * (b == 1) - 2, None),
    "padded": Computed(lambda a, b: F.pad(a, (1, 0), value=3), (0, 12)),
    "padded by an illegal number": Computed(lambda a, b: F.pad(a, (1, 0), value=-1), None),
    "running sum": Computed(lambda a, b: a.cumsum(1), (0, 2)),
    "running sum less one": Computed(lambda a, b: a.cumsum(1) - 1, (1, 3)),
    "counted": Computed(lambda a, b: torch.cumsum(a != 1, 1) * (a != 1) + 1, "any"),
    "counted by a mask": Computed(lambda a, b: torch.cumsum(a, 1) * a.bool(), (0, 2)),
    "number of": Computed(lambda a, b: (a > 3).sum(1), "any"),
    "largest place": Computed(lambda a, b: a.argmax(1), "any"),
    "first place": Computed(lambda a, b: (a == 3).int().argmax(-1), "any"),
    "largest place of all": Computed(lambda a, b: a.argmax(), None),
    "places in order": Computed(lambda a, b: a.sort(1).indices, "any"),
    "largest three": Computed(lambda a, b: a.topk(3, dim=1).indices, "any"),
    "in order": Computed(lambda a, b: a.sort(1).values, (0, 12)),
    "largest": Computed(lambda a, b: a.max(1).values, (0, 12)),
    "largest of two": Computed(lambda a, b: torch.max(a, b), (0, 12)),
    "added": Computed(lambda a, b: a + b, None),
    "negative": Computed(lambda a, b: -a, None),
    "as a fraction": Computed(lambda a, b: a.double().long(), (0, 12)),
    "times a fraction": Computed(lambda a, b: (a.double() * 1.5).long(), None),
    "times, as a fraction": Computed(lambda a, b: (a.double() * 5).long(), None),
    "both": Computed(lambda a, b: torch.cat((a, b), 1), (0, 12)),
    "triangle": Computed(lambda a, b: a.tril(), (0, 12)),
    "triangle, then illegal": Computed(lambda a, b: a.tril() - 1, None),
    "picked": Computed(lambda a, b: a.gather(1, b % 6), (0, 12)),
    "replaced": Computed(lambda a, b: a.scatter(1, b % 6, 3), (0, 12)),
    "replaced by an illegal number": Computed(lambda a, b: a.scatter(1, b % 6, 30), None),
    "added in places": Computed(lambda a, b: a.scatter_add(1, b % 6, a), None),
    "moved": Computed(lambda a, b: a.flip(0).roll(1, 1)[:, 1:].repeat(2, 1), (0, 12)),
    "truth": Computed(lambda a, b: a.bool().long(), "any"),
    "zero times": Computed(lambda a, b: torch.arange(6) + 0 * a, "any"),
}


class Looks(nn.Module):
    """Rows of a table at a computed index, or a loss whose target it is, with one ignored number."""

    def __init__(self, index: Index, is_loss: bool) -> None:
        super().__init__()
        self.index, self.is_loss, self.table = index, is_loss, nn.Embedding(ROWS, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        index = self.index(a, b)
        if self.is_loss:
            scores = self.table.weight.sum(1).expand(index.numel(), ROWS)
            return F.cross_entropy(scores, index.flatten().long(), ignore_index=IGNORED)
        return self.table(index).sum()


def program_of(index: Index, is_loss: bool) -> Program:
    return capture_program(Looks(index, is_loss), {name: torch.ones(SHAPE).long() for name in ("a", "b")})


def drawn(allowed: ValueRange, draw: torch.Generator) -> torch.Tensor:
    """Numbers of a range, its ends and single values among them."""
    low, high = int(max(allowed.low, -300)), int(min(allowed.high, 300))
    values = torch.randint(low, high, SHAPE, generator=draw)
    special = torch.tensor([low, high - 1, *allowed.extra])
    chosen = special[torch.randint(0, len(special), SHAPE, generator=draw)]
    return torch.where(torch.randint(0, 3, SHAPE, generator=draw) == 0, chosen, values)


@pytest.mark.parametrize("is_loss", (False, True))
@pytest.mark.parametrize("case", thinned(INDICES, keep=list(INDICES)[::2]))
def test_no_index_is_outside_if_all_inputs_are_inside(case: str, is_loss: bool) -> None:
    wanted = INDICES[case]
    program = program_of(wanted.of, is_loss)
    found = safe_ranges(program, lookups(program))
    assert found.is_complete == (wanted.first is not None)
    if wanted.first == "any":
        assert found.ranges.keys().isdisjoint(("a", "b"))
    elif wanted.first is not None:
        assert (found.ranges["a"].low, found.ranges["a"].high) == wanted.first
    draw = torch.Generator().manual_seed(0)
    for _ in range(50 if found.is_complete else 0):
        index = wanted.of(*(drawn(found.ranges.get(name, ValueRange()), draw) for name in ("a", "b")))
        assert ((index >= 0) & (index < ROWS) | (is_loss & (index == IGNORED))).all()


@pytest.mark.parametrize("case", INDICES)
def test_a_value_is_within_its_known_ends(case: str) -> None:
    """Every value of the graph, for random inputs."""
    program = program_of(INDICES[case].of, False)
    (block,) = program.blocks
    draw = torch.Generator().manual_seed(1)
    known = KnownRange()
    arguments = dict(zip(block.ports, program.calls[0].arguments, strict=True))
    for _ in range(20):
        given = {name: torch.randint(-30, 40, SHAPE, generator=draw) for name in ("a", "b")}
        values: dict[torch.fx.Node, object] = {}
        for node in block.graph.nodes:
            if node.op == "placeholder" and arguments[node.name] in given:
                values[node] = given[arguments[node.name]]
            elif node.op == "call_function" and all(n in values for n in node.all_input_nodes):
                if "embedding" in str(node.target):
                    continue
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        for node, value in values.items():
            least, most = known.of(node)
            assert least <= float(value.min()) and float(value.max()) <= most, (node, least, most)  # type: ignore[attr-defined]
