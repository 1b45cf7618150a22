"""Random programs over images equal one device on random meshes of up to 8 ranks, solved and random labels."""

import pytest
from program_check import FEW, MANY, check_kind
from suites import long


@pytest.mark.parametrize("num_programs", (FEW, long(MANY)))
def test_equal_to_one_device(num_programs: int) -> None:
    check_kind("image", num_programs)
