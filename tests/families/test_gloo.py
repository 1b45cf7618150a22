"""Every family once over real ranks: tensor and sequence parallelism beside ZeRO 3, on one world that stays."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from suites import thinned

pytest.importorskip("transformers")

import zoo

TOOL = Path(__file__).parents[2] / "tools" / "equivalence.py"
MESH = "tp=2 × dp=2, ZeRO 3, sequence"
DIFFERENT_IN_KIND = ("llama", "t5", "mixtral", "resnet", "phi3_grouped")  # the others run in one process


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("equivalence_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def open_worlds(tool: ModuleType) -> Iterator[object]:
    with tool.worlds() as found:
        yield found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", thinned(zoo.FAMILIES, keep=DIFFERENT_IN_KIND))
def test_equal_over_gloo(tool: ModuleType, open_worlds: object, family: str) -> None:
    assert tool.worst_error(family, tool.MESHES[MESH], open_worlds) <= tool.TOLERANCE
