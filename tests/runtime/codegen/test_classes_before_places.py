"""A cross-entropy over (batch, classes, places), as segmentation has it: classes may be split all the same."""

import pytest
import torch
from equivalence import case_of, check, check_random
from tiny_models import randomise
from torch import nn

from autopar.capture.request import Request
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import Mesh
from autopar.planning.fixed import capture_for, label_plan
from autopar.search.labels.solve import label

PLACES, CLASSES = 4, 8  # classes over two ranks are as many as places: a mistake would not be seen in shapes


class PlacesModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.score(x).transpose(1, 2), target, ignore_index=1)


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(tp=4), Mesh.of(dp=2, tp=2), Mesh.of(tp=2, tq=2)], ids=str)
def test_equal_to_one_device(mesh: Mesh) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(4, PLACES, 6, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, CLASSES, (4, PLACES), generator=generator),
    }
    case = case_of((randomise(PlacesModel().double()), inputs))
    found = label(case.program, case.analysis(mesh), Degrees(), ClusterSpec.preset("8xh100"), mesh=mesh)
    check(case, found.blocks, mesh)
    split = 0
    for seed in range(4):
        check_random(case, mesh, seed)
    labels = [v for block in found.blocks for k, v in block.labels.items() if "cross_entropy" in k]
    split += sum(part == "v.0" for ways in labels for part in ways)
    assert split, labels  # else nothing of this was seen


def test_its_price_is_in_the_plan() -> None:
    inputs = {"x": torch.zeros(4, PLACES, 6), "target": torch.zeros(4, PLACES, dtype=torch.long)}
    degrees = Degrees(tp=2, micro_batch=4)
    program = capture_for(Request.of(PlacesModel(), inputs), degrees)
    plan = label_plan(program, ClusterSpec.preset("2xcpu"), degrees, "places")
    assert "all-reduce" in plan.explain()
