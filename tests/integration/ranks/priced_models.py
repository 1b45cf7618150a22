"""Plans on four ranks whose global micro-batch is always of `BATCH` sequences, so that a model is captured once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar.capture.request import Request
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.models.load import resolve_model
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for, label_plan
from autopar.runtime.parameters.materialise import parameter_source

RANKS, BATCH, VOCABULARY = 4, 4, 50
LLAMA, GPT2, MIXTRAL, T5, GEMMA2 = "llama3-8b", "gpt2", "mixtral-8x7b", "t5-large", "gemma2-9b"
UNEVEN, GROUPED = "integration_models:padded", "integration_models:grouped"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, wished degrees, and whether gathered values are gathered again in backward."""

    spec: str
    wish: tuple[tuple[str, Any], ...]
    regather: bool = True
    layers: int = 2

    @property
    def name(self) -> str:
        words = [self.spec.rpartition(":")[2], *(f"{key}={value}" for key, value in self.wish)]
        return " ".join((*words, *([] if self.regather else ["kept"])))


def case(spec: str, *, regather: bool = True, layers: int = 2, **wish: Any) -> Case:
    return Case(spec, tuple(wish.items()), regather, layers)


BY_STAGE: dict[str, Any] = {"recompute": "auto", "recompute_blocks": (1, 0), "selective_blocks": (1, 2)}
CASES = (
    case(LLAMA, tp=4, sequence_parallel=False),
    case(LLAMA, tp=4, sequence_parallel=True),
    case(LLAMA, tp=4, sequence_parallel=True, regather=False),
    case(LLAMA, tp=2, dp=2, zero=0, accumulate=2),
    case(LLAMA, tp=2, dp=2, zero=1, accumulate=2),
    case(LLAMA, tp=2, dp=2, zero=2, accumulate=2, sequence_parallel=True),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="full"),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="full", regather=False),
    case(LLAMA, dp=4, zero=2, accumulate=3),
    case(LLAMA, dp=4, zero=3, accumulate=2, recompute="full", recompute_blocks=1),
    case(LLAMA, dp_replicate=2, dp_shard=2, zero=3, accumulate=2),
    case(LLAMA, dp_replicate=2, dp_shard=2, zero=0),
    case(LLAMA, pp=2, tp=2, micro_batches=4, sequence_parallel=True),
    case(LLAMA, pp=2, tp=2, micro_batches=4, sequence_parallel=True, regather=False),
    case(LLAMA, pp=2, tp=2, micro_batches=2, sequence_parallel=True, recompute="full"),
    case(LLAMA, pp=2, tp=2, micro_batches=2, layers=4, recompute="full", recompute_blocks=(2, 0)),
    case(LLAMA, pp=4, micro_batches=4),
    case(LLAMA, pp=2, dp=2, zero=3, micro_batches=3, schedule="gpipe", recompute="full"),
    case(LLAMA, pp=2, dp=2, zero=1, micro_batches=2, accumulate=2, schedule="interleaved-1f1b"),
    case(GPT2, tp=4, sequence_parallel=True),
    case(GPT2, tp=2, dp=2, zero=3, accumulate=2, recompute="full", recompute_blocks=1),
    case(GPT2, dp=4, zero=3, accumulate=2),
    case(GPT2, pp=2, tp=2, micro_batches=2),
    case(GPT2, pp=2, dp=2, zero=2, micro_batches=4),
    case(GPT2, pp=2, dp=2, zero=3, micro_batches=4, schedule="zbv-zero-bubble"),
    case(GPT2, pp=2, dp=2, zero=3, micro_batches=4, order="dp-pp-tp"),
    case(GPT2, pp=2, tp=2, micro_batches=4, schedule="dualpipev"),
    case(GPT2, pp=2, tp=2, micro_batches=4, schedule="dualpipev", regather=False),
    case(GPT2, pp=2, tp=2, micro_batches=2, schedule="interleaved-zero-bubble", recompute="full"),
    case(GROUPED, tp=4, tp_dims=(2, 2)),
    case(UNEVEN, tp=4),
    case(UNEVEN, tp=2, dp=2, zero=3),
    case(LLAMA, tp=4, sequence_parallel=False, loss_chunks=4),
    case(LLAMA, tp=4, sequence_parallel=True, loss_chunks=4),
    case(LLAMA, tp=4, sequence_parallel=True, loss_chunks=2, regather=False),
    case(LLAMA, dp=4, zero=3, accumulate=2, recompute="full", loss_chunks=8),
    case(LLAMA, pp=2, tp=2, micro_batches=4, sequence_parallel=True, loss_chunks=4),
    case(GPT2, tp=2, dp=2, zero=3, accumulate=2, loss_chunks=4),
    case(GPT2, pp=2, tp=2, micro_batches=4, schedule="dualpipev", loss_chunks=2),
    case(GEMMA2, tp=2, dp=2, zero=1, loss_chunks=4),
    case(LLAMA, tp=2, dp=2, zero=0, accumulate=2, precision="bf16"),
    case(LLAMA, tp=2, dp=2, zero=1, accumulate=2, precision="bf16", sequence_parallel=True),
    case(LLAMA, dp=4, zero=2, accumulate=2, precision="bf16", reduce_dtype="bf16"),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, precision="fp16", recompute="full"),
    case(LLAMA, dp_replicate=2, dp_shard=2, zero=3, precision="bf16", reduce_dtype="bf16"),
    case(GPT2, pp=2, dp=2, zero=2, micro_batches=4, precision="bf16"),
    case(GPT2, pp=2, tp=2, micro_batches=2, precision="bf16", reduce_dtype="bf16"),
    case(MIXTRAL, tp=2, dp=2, zero=3),
    case(MIXTRAL, dp=4, zero=3, accumulate=2, recompute="full", recompute_blocks=1),
    case(MIXTRAL, pp=2, dp=2, zero=2, micro_batches=2),
    case(T5, pp=2, tp=2, micro_batches=2),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="selective"),
    case(LLAMA, tp=4, sequence_parallel=True, recompute="selective", loss_chunks=4, regather=False),
    case(LLAMA, dp=4, zero=3, accumulate=2, recompute="auto", recompute_blocks=1, selective_blocks=1),
    case(LLAMA, pp=2, tp=2, micro_batches=4, layers=4, **BY_STAGE),
    case(GPT2, tp=2, dp=2, zero=2, accumulate=2, recompute="selective", recompute_blocks=1),
    case(GPT2, pp=2, dp=2, zero=3, micro_batches=4, schedule="zbv-zero-bubble", recompute="selective"),
    case(MIXTRAL, dp=4, zero=3, accumulate=2, recompute="selective"),
    case(T5, pp=2, tp=2, micro_batches=2, recompute="selective"),
    case(LLAMA, cp=4),
    case(LLAMA, cp=4, zero=0),
    case(LLAMA, cp=2, tp=2, sequence_parallel=True),
    case(LLAMA, cp=2, dp=2, zero=3, accumulate=2),
    case(LLAMA, cp=2, dp=2, zero=1, recompute="full"),
    case(LLAMA, cp=2, dp_replicate=2, dp_shard=1, zero=3, loss_chunks=4),
    case(LLAMA, pp=2, cp=2, micro_batches=4),
    case(GPT2, cp=4, zero=2, accumulate=2),
    case(GPT2, cp=2, dp=2, zero=2, accumulate=2),
    case(MIXTRAL, cp=2, dp=2, zero=3),
    case(LLAMA, cp=2, dp=2, zero=0),
    case(LLAMA, cp=4, context="ring"),
    case(LLAMA, cp=4, context="queries", zero=0),
    case(LLAMA, cp=2, tp=2, context="ring", sequence_parallel=True),
    case(LLAMA, cp=2, dp=2, zero=3, accumulate=2, context="ring", recompute="full"),
    case(GPT2, cp=4, context="ring", zero=2, accumulate=2),
    case(LLAMA, cp_dims=(2, 2), context="ring", zero=1),
    case(MIXTRAL, cp=2, dp=2, zero=3, context="queries"),
)
SHORT = (
    case(LLAMA, cp=2, tp=2, context="ring", sequence_parallel=True),
    case(LLAMA, cp_dims=(2, 2), context="ring", zero=1),
    case(LLAMA, cp=2, tp=2, sequence_parallel=True),
    case(LLAMA, cp=2, dp_replicate=2, dp_shard=1, zero=3, loss_chunks=4),
    case(GPT2, cp=2, dp=2, zero=2, accumulate=2),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="selective"),
    case(LLAMA, pp=2, tp=2, micro_batches=4, layers=4, **BY_STAGE),
    case(LLAMA, tp=4, sequence_parallel=True, loss_chunks=4),
    case(LLAMA, dp=4, zero=3, accumulate=2, recompute="full", loss_chunks=8),
    case(LLAMA, tp=4, sequence_parallel=True),
    case(LLAMA, tp=2, dp=2, zero=1, accumulate=2),
    case(LLAMA, tp=2, dp=2, zero=3, accumulate=2, sequence_parallel=True, recompute="full", regather=False),
    case(LLAMA, dp_replicate=2, dp_shard=2, zero=0),
    case(LLAMA, pp=2, tp=2, micro_batches=4, sequence_parallel=True, regather=False),
    case(LLAMA, pp=2, dp=2, zero=1, micro_batches=2, accumulate=2, schedule="interleaved-1f1b"),
    case(GPT2, tp=2, dp=2, zero=3, accumulate=2, recompute="full", recompute_blocks=1),
    case(GPT2, pp=2, dp=2, zero=3, micro_batches=4, schedule="zbv-zero-bubble"),
    case(GPT2, pp=2, tp=2, micro_batches=2, schedule="interleaved-zero-bubble", recompute="full"),
    case(GPT2, pp=2, tp=2, micro_batches=4, schedule="dualpipev", loss_chunks=2),
    case(UNEVEN, tp=2, dp=2, zero=3),
    case(LLAMA, tp=2, dp=2, zero=1, accumulate=2, precision="bf16", sequence_parallel=True),
    case(GPT2, pp=2, tp=2, micro_batches=2, precision="bf16", reduce_dtype="bf16"),
)


def degrees_of(one: Case) -> Degrees:
    wish = dict(one.wish)
    dp = wish.get("dp", 1) * wish.get("dp_shard", 1) * wish.get("dp_replicate", 1)
    micro_batches = wish.get("micro_batches", 1) * wish.get("accumulate", 1)
    return resolve_degrees(wish, RANKS, BATCH // dp * micro_batches)


@lru_cache(maxsize=2)
def captured(spec: str, layers: int, precision: str | None = None) -> tuple[Program, Callable[[str], torch.Tensor]]:
    """The program and its seeded weights."""
    sizes: dict[str, Any] = {} if ":" in spec else {"layers": layers, "hidden": 64, "seq_len": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = resolve_model(spec, batch=None if ":" in spec else BATCH, dtype="float32", **sizes)
    degrees = Degrees(micro_batch=BATCH, precision=precision)
    program = capture_for(Request.of(found.model, found.example_inputs), degrees)
    return program, parameter_source(found.model)


def planned_case(one: Case) -> tuple[Program, Plan]:
    program, _ = captured(one.spec, one.layers, degrees_of(one).precision)
    plan = label_plan(program, ClusterSpec.preset(f"{RANKS}xcpu"), degrees_of(one), one.name)
    return program, replace(plan, regather=one.regather)
