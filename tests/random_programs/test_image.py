"""Random programs over images equal one device on random meshes of up to 8 ranks, solved and random labels."""

import pytest
from program_check import check_kind
from suites import thinned


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", thinned(range(4), keep=(0,)))
def test_equal_to_one_device(seed: int) -> None:
    check_kind("image", seed)
