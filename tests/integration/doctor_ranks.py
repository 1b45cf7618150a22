"""Ranks with something wrong: what they run is the doctor, after a fault was planted."""

import time
from typing import Any

import torch

from autopar.commands.doctor import examine
from autopar.ir.cluster import ClusterSpec
from autopar.runtime.codegen import conversions
from autopar.runtime.measure import doctor_speed

FEW_ROUNDS, TINY = 3, {"cpu": 64}


def with_fault(rank: int, num_ranks: int, who: int, fault: str) -> dict[str, Any]:
    """A diagnosis where rank `who` has a fault; measured briefly, and of nothing large."""
    kept = {name: getattr(doctor_speed, name) for name in ("ROUNDS", "MATMUL_SIZE", "multiply")}
    conversion = conversions.all_gather_
    doctor_speed.ROUNDS, doctor_speed.MATMUL_SIZE = FEW_ROUNDS, TINY
    if rank == who:
        plant(fault)
    try:
        return examine(ClusterSpec.preset(f"{num_ranks}xcpu"), timeout_s=90).to_dict()
    finally:
        conversions.all_gather_ = conversion
        for name, value in kept.items():
            setattr(doctor_speed, name, value)


def plant(fault: str) -> None:
    """Let this rank gather in the wrong order, multiply slowly, or fail in a conversion."""
    if fault == "broken":
        right = conversions.all_gather_

        def wrong(x: torch.Tensor, mesh: Any, dim: int, to: int) -> torch.Tensor:
            return right(x, mesh, dim, to).flip(dim)

        conversions.all_gather_ = wrong
    elif fault == "slow":

        def slowly(a: torch.Tensor, b: torch.Tensor) -> None:
            time.sleep(0.2)  # far longer than the product, however busy the machine
            torch.mm(a, b)

        doctor_speed.multiply = slowly
    elif fault == "raise":

        def fail(*_: Any) -> torch.Tensor:
            raise ValueError("a planted fault")

        conversions.all_gather_ = fail
