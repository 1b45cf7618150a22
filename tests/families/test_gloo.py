"""Every family once over real ranks: tensor and sequence parallelism beside ZeRO 3, on one world that stays."""

from types import ModuleType

import pytest
from suites import thinned

pytest.importorskip("transformers")

import zoo

MESH = "tp=2 × dp=2, ZeRO 3, sequence"
DIFFERENT_IN_KIND = ("llama", "mixtral", "resnet")  # the others run in one process


@pytest.mark.parametrize("family", thinned(zoo.FAMILIES, keep=DIFFERENT_IN_KIND))
def test_equal_over_gloo(tool: ModuleType, open_worlds: object, family: str) -> None:
    assert tool.worst_error(family, tool.MESHES[MESH], open_worlds) <= tool.TOLERANCE
