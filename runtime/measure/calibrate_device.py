"""Times of products, attention, memory traffic and launches on one device, each the median of several rounds.

`device_works` lists the measurements of a type of device, `prepared` makes one ready to run, `seconds_of` times it.
All ranks run the same work at once, because ranks on one host share its memory, and on CPU its cores. They agree on
repeats and rounds through a `Pace`.

A CPU rank of one thread counts its processor time, times the ranks that share a core. The wall clock would be wrong for
work shorter than the scheduler's time slice: the rank either had a whole core, or waited. It also counts the machine's
other work.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn import functional as F

from autopar.ir.samples import Work, WorkPart

Runnable = Callable[[], object]
FEWEST_ROUNDS, MOST_ROUNDS, MOST_REPEATS = 3, 9, 2000
LATE = 2.0  # times the budget; then a measurement ends early
# rows are tokens; columns and inner sizes are of small models on CPU and of real models on GPUs
_ROWS = {"cpu": (16, 64, 200, 1024), "cuda": (512, 2048, 8192)}
COLUMNS_AND_INNER = {
    "cpu": ((64, 64), (256, 64), (64, 256), (300, 100), (256, 256), (1024, 256), (256, 1024), (1024, 1024)),
    "cuda": (
        (1024, 128), (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (3000, 2000), (8192, 8192),
        (14336, 4096), (4096, 14336), (32000, 4096),
    ),
}  # fmt: skip
LENGTHS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192, 16384)}
# heads × tokens of a batch, and head sizes
ATTENTION_TOKENS, HEAD_SIZES = {"cpu": 2048, "cuda": 2**18}, {"cpu": (32, 64), "cuda": (64, 128)}
MEMORY_BYTES = {
    "cpu": (2**14, 2**16, 2**18, 2**20, 2**22, 2**24),
    "cuda": (2**26, 2**27, 2**28, 2**29, 2**30),  # more than caches hold
}
_OPERATORS = 100  # tiny ones in one chain
_PRODUCTS = 20  # on a GPU, replayed from one graph: a small product is shorter than its launch by the host


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How ranks keep in step: the `largest` value of all, and `meet`. With `ranks_per_core` processor time counts."""

    largest: Callable[[float], float] = lambda value: value
    meet: Callable[[], None] = lambda: None
    ranks_per_core: float | None = None

    def timed(self, action: Runnable, device: torch.device, repeats: int, *, waits: bool) -> tuple[float, float]:
        """Seconds on the wall clock, and the seconds of the clock that counts."""
        synchronize(device)
        start, used = time.perf_counter(), time.thread_time()
        for _ in range(repeats):
            action()
        if waits:
            synchronize(device)
        wall, used = time.perf_counter() - start, time.thread_time() - used
        return wall, wall if self.ranks_per_core is None else used * self.ranks_per_core


def device_works(device_type: str, dtypes: tuple[str, ...]) -> dict[str, list[Work]]:
    """The measurements of a device by the name of their group. Every group has the quickest first."""
    groups: dict[str, list[Work]] = {
        # the device's part of a launch, and the host's in training. A CPU runs operators, a GPU replays a graph
        "launches": [
            _work("launch", "device", _OPERATORS, trains=0),
            _work("launch", "host", 2.0 * _OPERATORS, trains=1),
        ],
        "memory": [
            _work("memory", *kind) for n in MEMORY_BYTES[device_type] for kind in (("copy", 2.0 * n), ("add", 3.0 * n))
        ],
    }
    for index, dtype in enumerate(dtypes):
        groups[f"products {dtype}"] = _ordered(_products(device_type, dtype, every=1 if index == 0 else 2))
    half = next((d for d in dtypes if d in ("bfloat16", "float16")), dtypes[0])
    groups["attention"] = _ordered(_attention(device_type, dtypes[0]))
    groups["unfused attention"] = _ordered(_unfused(device_type, dtypes[0]))
    if half != dtypes[0] and device_type != "cpu":  # parts of a CPU's 16-bit rate are no parts of its float32 rate
        groups[f"attention {half}"] = _ordered(_attention(device_type, half))[::2]
    return groups


def _ordered(works: Iterator[Work]) -> list[Work]:
    return sorted(works, key=lambda work: work.amount)


def _work(part: WorkPart, name: str, amount: float, **numbers: float) -> Work:
    return Work(part=part, name=name, amount=amount, numbers=numbers)


def _products(device_type: str, dtype: str, *, every: int) -> Iterator[Work]:
    shapes = [(m, n, k) for m in _ROWS[device_type] for n, k in COLUMNS_AND_INNER[device_type]]
    for m, n, k in shapes[::every]:
        if dtype != "float8" or (n % 16 == 0 and k % 16 == 0):  # 8-bit units need multiples of 16
            yield _work("matmul", dtype, 2.0 * m * n * k, count=1, m=m, n=n, k=k)


def _attention(device_type: str, dtype: str) -> Iterator[Work]:
    for length in LENGTHS[device_type]:
        for size in HEAD_SIZES[device_type]:
            count = max(1, ATTENTION_TOKENS[device_type] // length)
            for is_backward in (0, 1):
                flops = 2.0 * count * length * length * size  # two products, half of each under the mask
                numbers = {"count": count, "m": length, "n": length, "k": size}
                yield _work("attention", dtype, flops, **numbers, is_causal=1, is_backward=is_backward)


def _unfused(device_type: str, dtype: str) -> Iterator[Work]:
    """The scores, queries by keys, and the values, scores by values."""
    size = HEAD_SIZES[device_type][-1]
    for length in LENGTHS[device_type][:-1]:
        count = max(1, ATTENTION_TOKENS[device_type] // length)
        for n, k in ((length, size), (size, length)):
            yield _work("products", dtype, 2.0 * count * length * n * k, count=count, m=length, n=n, k=k)


# ---- running ----


def prepared(work: Work, device: torch.device) -> Runnable:
    """A function that does the work once, with its operands made."""
    if work.part in ("matmul", "products"):
        return _product(work, device)
    if work.part == "attention":
        return _attend(work, device)
    if work.part == "memory":
        return _move(work, device)
    assert work.part == "launch", work
    action = _chain(device, trains=bool(work.numbers["trains"]))
    return graph_replay(action, device) if device.type == "cuda" and work.name == "device" else action


def _product(work: Work, device: torch.device) -> Runnable:
    count, m, n, k = (int(work.numbers[key]) for key in ("count", "m", "n", "k"))
    if work.name == "float8":
        return float8_product(m, n, k, device)
    dtype = torch_dtype(work.name)
    if work.part == "products":
        a, b = torch.randn(count, m, k, device=device), torch.randn(count, k, n, device=device)
        a, b = a.to(dtype), b.to(dtype)
        return lambda: torch.bmm(a, b)
    x, weight = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    return lambda: F.linear(x, weight)


def _attend(work: Work, device: torch.device) -> Runnable:
    count, m, n, k = (int(work.numbers[key]) for key in ("count", "m", "n", "k"))
    dtype = torch_dtype(work.name)
    q, key, value = (torch.randn(1, count, size, k, device=device).to(dtype) for size in (m, n, n))
    if not work.numbers["is_backward"]:
        return lambda: F.scaled_dot_product_attention(q, key, value, is_causal=True)
    inputs = [x.requires_grad_() for x in (q, key, value)]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, key, value, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _move(work: Work, device: torch.device) -> Runnable:
    a = torch.ones(int(work.amount / (2 if work.name == "copy" else 3)) // 4, device=device)
    b = torch.ones_like(a)
    return (lambda: b.copy_(a)) if work.name == "copy" else (lambda: a + b)  # the sum makes its tensor, as models do


def _chain(device: torch.device, *, trains: bool) -> Runnable:
    """`_OPERATORS` tiny operators one after the other, and as many backward."""
    x = torch.ones(1, device=device, requires_grad=trains)
    unit = torch.ones(1, device=device)

    def run() -> None:
        y = x
        for _ in range(_OPERATORS):
            y = torch.tanh(y)
        if trains:
            torch.autograd.grad(y, x, unit)

    return run


def seconds_of(action: Runnable, device: torch.device, pace: Pace, budget_s: float, *, waits: bool = True) -> float:
    """Median seconds of an action over rounds that take about `budget_s`. `waits=False` times the host. Collective."""
    once = pace.largest(pace.timed(action, device, 1, waits=waits)[0])
    if once < budget_s / 2:  # the first run loads kernels and memory; after a long one there is no time for others
        once = pace.largest(min(pace.timed(action, device, 1, waits=waits)[0] for _ in range(2)))
    round_s = budget_s / (MOST_ROUNDS + 1)
    most = MOST_REPEATS if waits else 1  # so that the queue of launches does not fill up
    repeats = min(most, max(1, round(round_s / max(once, 1e-9))))
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS if once < budget_s else 1, int(budget_s / max(once * repeats, 1e-9))))
    timed, spent_s = list[float](), 0.0
    for _ in range(rounds):
        pace.meet()
        wall, seconds = pace.timed(action, device, repeats, waits=waits)
        timed.append(seconds / repeats)
        spent_s = pace.largest(spent_s + wall)
        if spent_s > LATE * budget_s and len(timed) >= FEWEST_ROUNDS:  # other processes use this machine
            break
    return median(timed)


def measure(work: Work, device: torch.device, pace: Pace, budget_s: float) -> float:
    """Seconds of a work on this rank. Collective if the pace is."""
    with products_in(work.name), torch.no_grad() if work.numbers.get("trains", 0) == 0 else torch.enable_grad():
        action, count = prepared(work, device), 1
        if device.type == "cuda" and work.part in ("matmul", "products"):
            action, count = graph_replay(_repeated(action, _PRODUCTS), device), _PRODUCTS
        waits = work.name != "host" or device.type == "cpu"
        return seconds_of(action, device, pace, budget_s, waits=waits) / count


def _repeated(action: Runnable, count: int) -> Runnable:
    def run() -> None:
        for _ in range(count):
            action()

    return run
