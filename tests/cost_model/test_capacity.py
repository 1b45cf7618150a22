"""The largest model that fits: published figures of state, and growth with the devices."""

from dataclasses import replace

import pytest

from autopar.cost_model.capacity import WAYS, Largest, capacity, parameters
from autopar.cost_model.interval import usable_bytes
from autopar.cost_model.machine.engine import engine_named
from autopar.cost_model.machine.fitted_constants import mechanisms
from autopar.cost_model.published.machine import row_machine
from autopar.cost_model.published.row import Row
from autopar.errors import InputError

GB = 1e9


def largest(devices: list[int], memory_bytes: float = 80 * GB, sequence: int = 4096) -> dict[tuple[str, int], Largest]:
    machine = row_machine(Row(id="capacity", gpu_type="h100-sxm"), engine_named("fsdp"), mechanisms())
    found = capacity(devices, replace(machine, memory_bytes=memory_bytes), sequence)
    return {(one.way, one.devices): one for one in found}


def test_models_are_drawn_like_llama_3() -> None:
    # 32 blocks of width 4096: Llama 3 8B, 8,030,261,248 parameters
    assert parameters(32) == pytest.approx(8.03e9, rel=1e-3)


def test_more_devices_hold_more_where_state_is_divided() -> None:
    counts = [1, 8, 64, 512]
    found = largest(counts)
    for way in WAYS:
        sizes = [found[way, count].parameters for count in counts]
        assert sizes == sorted(sizes)
    assert found["DDP", 1].parameters == found["DDP", 512].parameters > 0
    for count in counts:
        sizes = [found[way, count].parameters for way in WAYS]
        assert sizes == sorted(sizes)


def test_data_parallelism_holds_what_sixteen_bytes_a_parameter_leave() -> None:
    """16 bytes of state: 80 GB hold at most 5 billion parameters, and ZeRO 1 at most 4 + 12/d bytes' worth."""
    found, usable = largest([8, 512]), usable_bytes(1.0)
    assert 0.8 * usable * 5e9 < found["DDP", 8].parameters < usable * 80 * GB / 16
    bound = usable * 80 * GB / (4 + 12 / 512)
    assert 0.75 * bound < found["ZeRO-1", 512].parameters < bound


def test_peaks_fit_and_a_smaller_device_holds_less() -> None:
    large, small = largest([8]), largest([8], memory_bytes=24 * GB)
    for key, one in large.items():
        assert one.peak_bytes <= 0.96 * 80 * GB
        assert small[key].parameters < one.parameters
        assert one.tp * one.pp * one.dp == one.devices


def test_longer_sequences_leave_less() -> None:
    assert largest([8], sequence=65536)["ZeRO-3", 8].parameters < largest([8])["ZeRO-3", 8].parameters


def test_nothing_fits_a_tiny_device() -> None:
    assert largest([1], memory_bytes=1e6)["best plan", 1].parameters == 0


@pytest.mark.parametrize("devices, sequence", [(0, 4096), (10**9, 4096), (8, 0)])
def test_numbers_that_are_none_are_refused(devices: int, sequence: int) -> None:
    with pytest.raises(InputError, match="must be from 1"):
        largest([devices], sequence=sequence)
