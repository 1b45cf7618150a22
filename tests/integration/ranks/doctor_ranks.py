"""Ranks with a planted fault, which run the doctor."""

import time
from typing import Any

import torch

from autopar.commands.diagnosis import Diagnosis
from autopar.commands.doctor import examine
from autopar.ir.cluster import ClusterSpec
from autopar.runtime.distributed.mesh import MeshDim
from autopar.runtime.measure import doctor_speed

FEW_ROUNDS, TINY = 3, {"cpu": 64}


def with_fault(rank: int, num_ranks: int, who: int, fault: str) -> Diagnosis:
    """A diagnosis where rank `who` has a fault; measured briefly, and of nothing large."""
    kept = {name: getattr(doctor_speed, name) for name in ("ROUNDS", "MATMUL_SIZE", "multiply")}
    gather = MeshDim.start_all_gather
    doctor_speed.ROUNDS, doctor_speed.MATMUL_SIZE = FEW_ROUNDS, TINY
    if rank == who:
        plant(fault)
    try:
        return examine(ClusterSpec.preset(f"{num_ranks}xcpu"), timeout_s=600)
    finally:
        MeshDim.start_all_gather = gather  # type: ignore[method-assign]
        for name, value in kept.items():
            setattr(doctor_speed, name, value)


def plant(fault: str) -> None:
    """Let this rank gather in the wrong order, multiply slowly, or fail in a conversion."""
    if fault == "broken":
        right = MeshDim.start_all_gather

        def wrong(mesh: MeshDim, x: torch.Tensor) -> torch.Tensor:
            return mesh.wait(right(mesh, x)).flip(0)

        MeshDim.start_all_gather = wrong  # type: ignore[method-assign]
    elif fault == "slow":

        def slowly(a: torch.Tensor, b: torch.Tensor) -> None:
            time.sleep(0.05)  # far longer than the product, however busy the machine
            torch.mm(a, b)

        doctor_speed.multiply = slowly
    elif fault == "raise":

        def fail(*_: Any) -> torch.Tensor:
            raise ValueError("a planted fault")

        MeshDim.start_all_gather = fail  # type: ignore[method-assign]
