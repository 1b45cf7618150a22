"""The GPU parts of calibration: waiting, TF32, 8-bit products, kernels without their launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional as F

Runnable = Callable[[], object]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_units(device: torch.device) -> int:
    """Multiprocessors; 1 for a CPU, whose threads share one product."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """The dtypes in which products are measured, the most wanted first."""
    if device.type == "cpu":
        return ("float32", "bfloat16", "float64")
    if torch.version.hip is not None:
        return ("bfloat16", "float16", "float32")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:  # no bfloat16 and no TF32 units before Ampere
        return ("float16", "float32")
    return ("bfloat16", "float16", "tf32", "float32", *(("float8",) if (major, minor) >= (8, 9) else ()))


def torch_dtype(name: str) -> torch.dtype:
    dtype = {"tf32": torch.float32, "float8": torch.float8_e4m3fn}.get(name)
    return dtype if dtype is not None else getattr(torch, name)


@contextmanager
def products_in(name: str) -> Iterator[None]:
    """Decide whether products of float32 use TF32 units, and restore the setting of before at the end."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def float8_product(m: int, n: int, k: int, device: torch.device) -> Runnable:
    """A product of 8-bit operands with one scale for each, into bfloat16, as training does it."""
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()  # the units need the second operand by columns
    unit, whole = torch.ones((), device=device), F.ScalingType.TensorWise
    return lambda: F.scaled_mm(a, b, unit, whole, unit, whole, output_dtype=torch.bfloat16, use_fast_accum=True)


def graph_replay(action: Runnable, device: torch.device) -> Runnable:
    """A function that replays the kernels of an action from a CUDA graph, without launches by the host."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # memory of the first runs must not belong to the graph
        for _ in range(3):
            action()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def reserve_bytes(device: torch.device) -> int:
    """Memory of the device that is in use and not torch's tensors: context, libraries, communication buffers."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))
