"""Random programs over token tables equal one device on random meshes of up to 8 ranks, solved and random labels."""

import pytest
from program_check import check_kind


@pytest.mark.timeout(600)
def test_equal_to_one_device() -> None:
    check_kind("tokens")
