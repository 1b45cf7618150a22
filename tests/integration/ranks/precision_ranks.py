"""Functions that ranks run in test_precision: steps with a scaler, and what ranks hold under a precision."""

import copy
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import RuntimeInputError
from autopar.runtime.parameters.gradients import local_gradient
from autopar.runtime.parameters.shown_tensor import parts_of
from autopar.runtime.verify.verify import this_ranks_part

HUGE = 60_000.0  # a sample so large that the gradients of float16 overflow


class Net(nn.Module):
    """Three blocks that a pipeline can cut. The last layer has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return {"loss": nn.functional.mse_loss(self.last(h).float(), target.float(), reduction="mean")}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(overflows: tuple[int, ...], steps: int = 6) -> list[dict[str, torch.Tensor]]:
    """Batches of eight samples. In the steps of `overflows` the last sample is huge, so one rank alone overflows."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        x, target = (torch.randn(8, 8, generator=generator) for _ in range(2))
        if step in overflows:
            x[-1] *= HUGE
        found.append({"x": x, "target": target})
    return found


Trace = list[tuple[float, dict[str, torch.Tensor]]]


def single_steps(data: list[dict[str, torch.Tensor]], micro_batches: int) -> Trace:
    """torch's scaler on one device: the scale and the weights after every step, by the rules of fp16."""
    masters, low = net(), net().half()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    found: Trace = []
    for batch in data:
        with torch.no_grad():
            for own, master in zip(low.parameters(), masters.parameters(), strict=True):
                own.copy_(master)
        for index in range(micro_batches):
            piece = {name: value.chunk(micro_batches)[index].half() for name, value in batch.items()}
            low.zero_grad()
            scaler.scale(low(**piece)["loss"] / micro_batches).backward()
            for own, master in zip(low.parameters(), masters.parameters(), strict=True):
                assert own.grad is not None
                master.grad = own.grad.float() if master.grad is None else master.grad + own.grad.float()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), copy.deepcopy({n: p.detach() for n, p in masters.named_parameters()})))
    return found


def scaled_steps(rank: int, degrees: dict[str, Any], overflows: tuple[int, ...], kind: str) -> Trace:
    """The same steps on ranks. `kind` is how the scaler gets in: "torch", "autopar" or "loop"."""
    data = batches(overflows)
    world = torch.distributed.get_world_size()
    dp = degrees.get("dp", 1)
    example = {name: value[: 8 // dp] for name, value in data[0].items()}
    parallel = autopar.parallelize(net(), f"{world}xcpu", example_inputs=example, plan={"precision": "fp16", **degrees})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    made = autopar.GradScaler if kind == "autopar" else torch.amp.GradScaler
    scaler = made("cpu", init_scale=256.0, growth_interval=2)
    found: Trace = []
    for batch in data:
        own = this_ranks_part(
            parallel.program, batch, parallel.plan.degrees, parallel.rank_mesh.sample_ranks.coordinate
        )
        if kind == "loop":
            scaler.scale(parallel(**own)).backward()
        else:
            parallel.forward_backward(own, scaler=scaler)
        scaler.unscale_(optimizer)
        parallel.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in parallel.state_dict().items()}
        found.append((scaler.get_scale(), {n: v.clone() for n, v in state.items()}))
    assert {p.dtype for p in parallel.parameters()} == {torch.float32}
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}
    return found


def different_scalers(rank: int, degrees: dict[str, Any], kind: str) -> list[str]:
    """The messages of steps whose scalers differ on rank 1, and the losses of a step with equal scalers after them.

    `kind` says how the scalers differ. In a loop of the user, the scaler itself compares them.
    """
    world = torch.distributed.get_world_size()
    data = batches(())[0]
    example = {name: value[: 8 // degrees.get("dp", 1)] for name, value in data.items()}
    parallel = autopar.parallelize(net(), f"{world}xcpu", example_inputs=example, plan={"precision": "fp16", **degrees})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
    own = this_ranks_part(parallel.program, data, parallel.plan.degrees, parallel.rank_mesh.sample_ranks.coordinate)
    is_odd = rank == 1
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
    odd = {
        "scale": lambda: autopar.GradScaler("cpu", init_scale=512.0),
        "interval": lambda: torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3),
        "missing": lambda: None,
        "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
        "another class": lambda: object(),
        "loaded": lambda: loaded(torch.amp.GradScaler("cpu", init_scale=256.0)),
        "set": lambda: autopar.GradScaler("cpu", init_scale=256.0),
        "loop": lambda: autopar.GradScaler("cpu", init_scale=512.0),
    }[kind]
    if kind == "loop":
        scaler = autopar.GradScaler("cpu", init_scale=256.0)
    if is_odd:
        scaler = odd()
    found = []
    if kind == "set":  # equal settings, until rank 1 sets its scale
        parallel.forward_backward(own, scaler=scaler)
        scaler.step(optimizer)
        scaler.update(1024.0 if is_odd else None)
    try:
        if kind == "loop":
            scaler.scale(parallel(**own)).backward()
            scaler.unscale_(optimizer)
        else:
            parallel.forward_backward(own, scaler=scaler)
    except RuntimeInputError as error:
        found.append(str(error))
    optimizer.zero_grad()
    equal = torch.amp.GradScaler("cpu", init_scale=128.0)
    found.append(str(float(parallel.forward_backward(own, scaler=equal))))
    return found


def loaded(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """A scaler with the state of a checkpoint that the other ranks did not load."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2048.0})
    return scaler


def overflow_in_a_shard(rank: int, degrees: dict[str, Any]) -> tuple[float, bool, bool]:
    """A step in which only the gradients that rank 1 holds overflow: the scale, whether it was skipped, as it is said
    and as the weights show it."""
    world = torch.distributed.get_world_size()
    data = batches(())[0]
    example = {name: value[: 8 // degrees.get("dp", 1)] for name, value in data.items()}
    parallel = autopar.parallelize(net(), f"{world}xcpu", example_inputs=example, plan={"precision": "fp16", **degrees})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
    scaler = autopar.GradScaler("cpu", init_scale=256.0)
    own = this_ranks_part(parallel.program, data, parallel.plan.degrees, parallel.rank_mesh.sample_ranks.coordinate)
    parallel.forward_backward(own, scaler=scaler)
    parts = [part for parameter in parallel.parameters() for part in parts_of(parameter)]
    if rank == 1:
        held = [g for part in parts if (g := local_gradient(part)) is not None and g.numel()]
        held[0].view(-1)[0] = float("inf")
    before = [local_value(part).clone() for part in parts]
    scaler.step(optimizer)
    scaler.update()
    is_unchanged = all(torch.equal(old, local_value(part)) for old, part in zip(before, parts, strict=True))
    return scaler.get_scale(), scaler.skipped, is_unchanged


def local_value(part: torch.Tensor) -> torch.Tensor:
    return part.to_local().detach() if hasattr(part, "to_local") else part.detach()


def logged_skips(rank: int, folder: str) -> list[bool]:
    """Whether each step was skipped, as the scaler says it and as rank 0 logs it."""
    data = batches((1, 4))
    world = torch.distributed.get_world_size()
    example = {name: value[:4] for name, value in data[0].items()}
    plan = {"precision": "fp16", "dp": 2, "tp": 2}
    parallel = autopar.parallelize(net(), f"{world}xcpu", example_inputs=example, plan=plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
    scaler = autopar.GradScaler("cpu", init_scale=256.0)
    found = [scaler.skipped]
    with autopar.Run(folder, parallel) as run:
        for step, batch in enumerate(data):
            loss = parallel.forward_backward(parallel.local_batch(batch), scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.log(step, loss, skipped=scaler.skipped)
            found.append(scaler.skipped)
    return found


def steps_of_t5(rank: int, degrees: dict[str, Any]) -> tuple[int, float, list[float]]:
    """20 steps of a small T5 in float16 from torch's first scale: skipped steps, the last scale and the losses."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=64, d_kv=32, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    ids = torch.randint(0, 512, (4, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    parallel = autopar.parallelize(model, f"{size}xcpu", example_inputs=batch, plan={"precision": "fp16", **degrees})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    scaler = autopar.GradScaler("cpu")
    skipped, losses = 0, []
    for _ in range(20):
        losses.append(float(parallel.forward_backward(batch, scaler=scaler)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += scaler.skipped
    return skipped, scaler.get_scale(), losses


def nonfinite_norm(rank: int) -> str:
    """The message for a NaN in the batch of the last rank."""
    world = torch.distributed.get_world_size()
    data = batches(())[0]
    parallel = autopar.parallelize(
        net(), f"{world}xcpu", example_inputs={n: v[:4] for n, v in data.items()}, plan={"dp": 2, "tp": 2}
    )
    own = this_ranks_part(parallel.program, data, parallel.plan.degrees, parallel.rank_mesh.sample_ranks.coordinate)
    if parallel.rank_mesh.sample_ranks.coordinate == 1:
        own["x"][0] = float("nan")
    parallel.forward_backward(own)
    try:
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeInputError as error:
        return str(error)
    return ""
