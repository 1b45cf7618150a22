"""Training steps on one GPU, measured beside predicted and beside plain PyTorch: python benchmarks/one_gpu.py

The programs train decoders of transformers with AdamW. Master weights are in float32 and products in bfloat16: by a
plan of autopar, and by `torch.autocast` around the unmodified model. `--profile` takes a file of `autopar calibrate`.

The table has milliseconds of forward and backward pass (median of rounds) and gigabytes of tensors at the peak.
"predicted" is `autopar.estimate` for the same plan: seconds by formulas, and bytes by formulas and counted. With
`--measured` the figures are of a file that `--json` wrote, and no GPU is needed.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.cost_model.parts import MEMORY, OTHER

CLUSTER = "1xh100"
SMALL = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
WIDE = {**SMALL, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32}
WIDE_WORDS = {**SMALL, "vocab_size": 128256, "num_hidden_layers": 4}
EXPERTS = {**SMALL, "intermediate_size": 1408, "num_hidden_layers": 4, "num_local_experts": 16}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, `sequences` of `length` tokens in micro-batches of `micro_batch`, and what a plan recomputes."""

    name: str
    family: str
    config: Mapping[str, int]
    length: int
    sequences: int
    micro_batch: int
    recompute: str = "none"
    is_compiled: bool = False


CASES = (
    Case("narrow", "llama", SMALL, 2048, 4, 4),
    Case("narrow, two micro-batches", "llama", SMALL, 2048, 4, 2),
    Case("narrow, selective", "llama", SMALL, 2048, 4, 4, "selective"),
    Case("narrow, full", "llama", SMALL, 2048, 4, 4, "full"),
    Case("narrow, few tokens", "llama", SMALL, 512, 1, 1),
    Case("narrow, long", "llama", SMALL, 16384, 1, 1, "full"),
    Case("wide", "llama", WIDE, 4096, 2, 2),
    Case("many words", "llama", WIDE_WORDS, 4096, 2, 2),
    Case("experts", "mixtral", EXPERTS, 2048, 4, 4),
    Case("compiled", "llama", SMALL, 2048, 4, 4, is_compiled=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Seconds of a step, and bytes of tensors and of the whole process at the peak."""

    step_s: float
    optimizer_s: float
    tensor_bytes: int
    reserved_bytes: int
    loss: float


def model_of(case: Case, device: str = "cuda") -> nn.Module:
    """The model, with the same weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if case.family == "mixtral":
        config: Any = MixtralConfig(**case.config, use_cache=False, experts_implementation="grouped_mm")
        kind: Any = MixtralForCausalLM
    else:
        config, kind = LlamaConfig(**case.config, use_cache=False), LlamaForCausalLM
    with torch.device(device):
        model: nn.Module = kind(config)
    return model


def batch_of(case: Case, device: str = "cuda") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(case.config["vocab_size"], (case.sequences, case.length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def by_autopar(case: Case, batch: Mapping[str, torch.Tensor], model: nn.Module) -> tuple[Callable[[], Any], nn.Module]:
    found = autopar.parallelize(model, CLUSTER, example_inputs=batch, plan=plan_of(case))
    if case.is_compiled:
        found.compile()
    return lambda: found.forward_backward(batch), found


def by_torch(case: Case, batch: Mapping[str, torch.Tensor], model: nn.Module) -> tuple[Callable[[], Any], nn.Module]:
    """Micro-batches in a loop under autocast. Full recomputation is what transformers calls gradient checkpointing."""
    if case.recompute == "full":
        getattr(model, "gradient_checkpointing_enable")()  # noqa: B009
        model.train()
    called = torch.compile(model) if case.is_compiled else model
    count = case.sequences // case.micro_batch

    def step() -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for index in range(count):
            part = slice(index * case.micro_batch, (index + 1) * case.micro_batch)
            with torch.autocast("cuda", torch.bfloat16):
                loss = called(**{name: value[part] for name, value in batch.items()}).loss / count
            loss.backward()
            total += loss.detach()
        return total

    return step, model


PROGRAMS = {"autopar": by_autopar, "torch": by_torch}


def plan_of(case: Case) -> dict[str, Any]:
    return {"dp": 1, "precision": "bf16", "recompute": case.recompute, "micro_batch": case.micro_batch}


def measured(step: Callable[[], Any], model: nn.Module, rounds: int) -> Found:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loss, times, updates = 0.0, list[float](), list[float]()
    for index in range(rounds + 3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        marks[0].record()
        result = step()
        marks[1].record()
        optimizer.step()
        optimizer.zero_grad()
        marks[2].record()
        torch.cuda.synchronize()
        if index == 0:
            loss = float(result)
        if index >= 3:
            times.append(1e-3 * marks[0].elapsed_time(marks[2]))
            updates.append(1e-3 * marks[1].elapsed_time(marks[2]))
    return Found(
        step_s=statistics.median(times),
        optimizer_s=statistics.median(updates),
        tensor_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        loss=loss,
    )


def fresh(case: Case, program: Callable[..., Any], rounds: int) -> Found:
    """The figures of a program whose model and optimizer are gone afterwards."""
    try:
        step, trained = program(case, batch_of(case), model_of(case))
        return measured(step, trained, rounds)
    finally:
        step = trained = None
        gc.collect()
        torch.cuda.empty_cache()


def measured_cases(cases: Sequence[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """The figures of both programs for every case, measured here."""
    for case in cases:
        found = {name: asdict(fresh(case, program, rounds)) for name, program in PROGRAMS.items()}
        yield {"case": asdict(case), **found}


def predicted(case: Case, profile: str | None) -> tuple[float, float, float]:
    """Seconds of forward and backward pass, and bytes of tensors at the peak: by formulas, and counted."""
    model, batch = model_of(case, "meta"), batch_of(case, "meta")
    by_formulas, counted = (
        autopar.estimate(model, CLUSTER, plan_of(case), example_inputs=batch, profile=profile, exact_memory=is_counted)
        for is_counted in (False, True)
    )
    seconds = by_formulas.step_s - by_formulas.other_s[OTHER["optimizer"]]
    return seconds, tensor_bytes(by_formulas), tensor_bytes(counted)


def tensor_bytes(made: autopar.Estimate) -> float:
    """The predicted bytes without those that are no tensor's."""
    return made.peak_bytes - made.memory_bytes[MEMORY["cache"]] - made.memory_bytes[MEMORY["reserve"]]


def show(found: Mapping[str, Any], case: Case, profile: str | None) -> None:
    seconds, by_formulas, counted = predicted(case, profile)
    ours, theirs = found["autopar"], found["torch"]
    times = (ours["step_s"] - ours["optimizer_s"], seconds, theirs["step_s"] - theirs["optimizer_s"])
    sizes = (ours["tensor_bytes"], by_formulas, counted, theirs["tensor_bytes"])
    text = " ".join([*(f"{1e3 * one:9.1f}" for one in times), *(f"{1e-9 * one:9.2f}" for one in sizes)])
    print(f"{case.name:26s} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", help="a file of `autopar calibrate`; by default the shipped profile")
    parser.add_argument("--json", help="write every measured figure to this file")
    parser.add_argument("--measured", help="take the figures of this file instead of measuring")
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in arguments.cases]
    print(f"{'':26s} {'milliseconds':^29} {'gigabytes':^39}")
    heads = ("autopar", "predicted", "torch", "autopar", "formulas", "counted", "torch")
    print(f"{'case':26s} {' '.join(f'{head:>9}' for head in heads)}")
    if arguments.measured:
        rows: Iterable[dict[str, Any]] = json.loads(Path(arguments.measured).read_text())
    else:
        rows = measured_cases(cases, arguments.rounds)
    found = []
    for row in rows:
        show(row, Case(**row["case"]), arguments.profile)
        found.append(row)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
