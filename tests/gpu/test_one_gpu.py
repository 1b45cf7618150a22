"""One GPU under nccl: losses, gradients and weights of several steps, against the same model in plain PyTorch."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autopar

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WORDS, WIDTH, LENGTH, SEQUENCES, STEPS = 96, 64, 32, 8, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Decoder().to("cuda", dtype)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(WORDS, (STEPS, SEQUENCES, LENGTH + 1), generator=generator).cuda()
    return [{"tokens": row[:, :-1].contiguous(), "targets": row[:, 1:].contiguous()} for row in rows]


def trained(step: Callable[[Mapping[str, torch.Tensor]], torch.Tensor], held: nn.Module) -> list[torch.Tensor]:
    """Losses, gradients of the last step, and weights after it."""
    optimizer, losses = torch.optim.AdamW(held.parameters(), lr=1e-3), list[torch.Tensor]()
    for batch in batches():
        optimizer.zero_grad()
        losses.append(torch.as_tensor(float(step(batch)), dtype=torch.float64))
        optimizer.step()
    parameters = [_whole(p) for p in held.parameters()]
    return [*losses, *(_whole(p.grad) for p in held.parameters()), *parameters]  # type: ignore[arg-type]


def _whole(value: Any) -> torch.Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().double().cpu()  # type: ignore[no-any-return]


def plainly(dtype: torch.dtype) -> list[torch.Tensor]:
    own = model(dtype)

    def step(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = own(**batch)
        loss.backward()
        return loss.detach()

    return trained(step, own)


def in_parallel(dtype: torch.dtype, compiled: bool = False, **plan: Any) -> list[torch.Tensor]:
    parallel = autopar.parallelize(
        model(dtype),
        autopar.ClusterSpec.detect(),
        example_inputs=batches()[0],
        plan={"dp": 1, "precision": "fp32" if dtype == torch.float32 else None, **plan},
    )
    if compiled:
        parallel.compile()
    return trained(parallel.forward_backward, parallel)


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The worst relative distance of a tensor."""
    shapes = [tuple(one.shape) for one in expected]
    assert [tuple(one.shape) for one in found] == shapes
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def together(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The losses, and all gradients and weights as one vector: rounding of a small gradient does not count alone."""
    return [torch.stack(tensors[:STEPS]), torch.cat([one.flatten() for one in tensors[STEPS:]])]


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"micro_batch": 2},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"loss_chunks": 4},
        {"zero": 3, "offload": "parameters"},
        {"offload": "optimizer"},
        {"offload": "activations", "micro_batch": 4},
    ],
    ids=str,
)
def test_equal_in_float64(plan: dict[str, Any]) -> None:
    assert distance(in_parallel(torch.float64, **plan), plainly(torch.float64)) < 1e-11


@pytest.mark.parametrize("plan", [{}, {"recompute": "full"}, {"micro_batch": 2}, {"compiled": True}], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_near_in_16_bits(precision: str, plan: dict[str, Any]) -> None:
    found, expected = in_parallel(torch.float32, precision=precision, **plan), plainly(torch.float32)
    assert 1e-6 < distance(together(found), together(expected)) < (0.02 if precision == "bf16" else 0.005)


def test_compiled_code_is_near_in_float32() -> None:
    found, expected = in_parallel(torch.float32, compiled=True), plainly(torch.float32)
    assert distance(together(found), together(expected)) < 1e-4


def test_a_checkpoint_goes_on_with_equal_bits(tmp_path: Path) -> None:
    def begun() -> tuple[Any, torch.optim.Optimizer]:
        parallel = autopar.parallelize(
            model(torch.float32), "1xh100", example_inputs=batches()[0], plan={"dp": 1, "precision": "bf16"}
        )
        return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    def stepped(parallel: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.zero_grad()
        parallel.forward_backward(batches()[index])
        optimizer.step()

    first = begun()
    stepped(*first, 0)
    first[0].save(tmp_path, first[1], step=1)
    first[0].finish_saving()
    stepped(*first, 1)
    second = begun()
    second[0].load(tmp_path, second[1])
    stepped(*second, 1)
    for ours, theirs in zip(second[0].parameters(), first[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_trace_has_every_block_on_the_device(tmp_path: Path) -> None:
    parallel = autopar.parallelize(model(torch.float32), "1xh100", example_inputs=batches()[0], plan={"dp": 1})
    parallel.trace(tmp_path / "trace.json", batches()[0])
    slices = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {(one["name"], one["args"]["pass"]) for one in slices if one.get("cat") == "compute" and one["dur"] > 0}
    assert {(f"layers.{index}", kind) for index in range(3) for kind in "FB"} <= found


def test_the_weights_of_the_caller_are_not_moved() -> None:
    own = model(torch.float32)
    before = copy.deepcopy(own.state_dict())
    autopar.parallelize(own, "1xh100", example_inputs=batches()[0], plan={"dp": 1})
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
