"""The measured step time and memory of a published row, in seconds and bytes.

A stated step time is used as it is. Otherwise it follows from a throughput of B sequences of s tokens on N devices:

    seconds = B·s / (tokens/s/device · N)  =  B / (samples/s)  =  FLOP(B, s) / (FLOP/s/device · N)

FLOP are counted as the source counted them (`tflops_kind`):

    model      forward and backward
    hardware   model FLOP and recomputation: of all layers (full), or of the attention core (selective)

`tflops_attention` says how attention was counted: whole (1), or half (0.5) because of the causal mask. If it is not
stated, attention is counted whole and the time is ambiguous.

With l layers, hidden size h, ffn width 4h and V words, Narayanan
et al. (SC'21, appendix) give

    model      72·B·s·l·h²(1 + s/6h + V/12lh)
    hardware   96·B·s·l·h²(1 + s/6h + V/16lh)

`model_flops` counts the same products for grouped heads, gated layers and expert layers.

Some rows state both a time and TFLOP/s. Their two times agree within 1 % for megatron_sc21, bigscience_tr11,
llm-foundry and internevo. For bigscience_tr3m the second time is 14 % too long, because its authors counted fewer FLOP.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.published.row import Row
from autopar.cost_model.work.block_work import PASSES

# Memory "GB" of every source is read as GiB, because torch's allocator and nvidia-smi count in powers of two. The
# largest figures of nvidia-smi rows (79 of an 80 GB device, 30 of 32) are the devices' sizes in GiB.
BYTES_PER_GB = 2**30
NOTABLE_STEP_TIME = 0.02  # of a step time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A measured step time and how it follows from the row."""

    seconds: float
    derivation: str
    least_seconds: float | None = None  # of an ambiguous time, if its source counted half of attention

    @property
    def is_ambiguous(self) -> bool:
        """Whether the row does not say how its FLOP were counted, and the two times are notably different."""
        return self.least_seconds is not None and self.least_seconds < (1 - NOTABLE_STEP_TIME) * self.seconds


def measured_seconds(row: Row, *, global_batch: int | None = None) -> StepTime | None:
    """The step time of a row that ran, or None if the row states no time and no throughput."""
    if row.outcome == "oom":
        return None
    if row.step_time_s is not None:
        return StepTime(seconds=row.step_time_s, derivation="stated")
    if row.step_time_derived_s is not None:
        return StepTime(seconds=row.step_time_derived_s, derivation=row.step_time_derivation or "derived by the source")
    batch = row.global_batch or global_batch
    if batch is None or row.seq_len is None or row.num_gpus is None:
        return None
    if row.tokens_per_s_per_gpu is not None:
        seconds = batch * row.seq_len / (row.tokens_per_s_per_gpu * row.num_gpus)
        return StepTime(seconds=seconds, derivation="tokens of a step / tokens/s")
    if row.samples_per_s is not None:
        return StepTime(seconds=batch / row.samples_per_s, derivation="sequences of a step / samples/s")
    return _from_flops(row, batch)


def measured_bytes(row: Row) -> float | None:
    """Peak memory of the fullest device of a row that ran."""
    return None if row.peak_mem_gb is None or row.outcome == "oom" else row.peak_mem_gb * BYTES_PER_GB


def model_flops(row: Row, batch: int, *, attention: float = 1.0) -> float | None:
    """FLOP of forward and backward of `batch` sequences; None if a size is not stated."""
    parts = _forward_flops(row, batch, attention)
    return None if parts is None else PASSES * sum(parts)


def hardware_flops(row: Row, batch: int, *, attention: float = 1.0) -> float | None:
    """`model_flops` and the FLOP of recomputation; None if it is not stated, or is of modules beside attention."""
    parts = _forward_flops(row, batch, attention)
    if parts is None or row.recompute is None or row.recompute_modules not in (None, ("core_attn",)):
        return None
    products, core, logits = parts
    extra = {"none": 0.0, "selective": core, "full": products + core}[row.recompute]
    return PASSES * (products + core + logits) + extra


def _from_flops(row: Row, batch: int) -> StepTime | None:
    """The time of the FLOP of a step at the stated rate of one device."""
    if row.tflops_per_gpu is None or row.tflops_kind is None:
        return None
    flops_of = model_flops if row.tflops_kind == "model" else hardware_flops
    part, derivation = row.tflops_attention, f"{row.tflops_kind} FLOP / TFLOP/s"
    flops, least = (flops_of(row, batch, attention=counted) for counted in ((part or 1.0), 0.5))
    if flops is None or least is None:
        return None
    rate = row.tflops_per_gpu * 1e12 * (row.num_gpus or 1)
    return StepTime(
        seconds=flops / rate,
        derivation=derivation if part else f"{derivation}, attention counted whole, which is not stated",
        least_seconds=None if part else least / rate,
    )


def _forward_flops(row: Row, batch: int, attention_part: float) -> tuple[float, float, float] | None:
    """FLOP of the layers' products with weights, of the attention cores, and of the logits."""
    if row.layers is None or row.hidden is None or row.ffn_hidden is None or row.n_heads is None:
        return None
    if row.vocab is None or row.seq_len is None or row.attention_type not in (None, "mha", "gqa", "mqa"):
        return None
    heads = row.n_heads
    head_dim = row.head_dim or row.hidden // heads
    groups = row.n_kv_heads or heads
    matrices = 3 if row.gated_mlp else 2
    attention_weights = row.hidden * head_dim * (2 * heads + 2 * groups)
    widths = row.layers * row.ffn_hidden
    if row.moe_experts is not None:
        num_moe = row.layers if row.moe_layers is None else row.moe_layers
        expert = (row.moe_topk or 1) * (row.moe_ffn_hidden or row.ffn_hidden) + (row.moe_shared_ffn or 0)
        widths = (row.layers - num_moe) * row.ffn_hidden + num_moe * expert
    tokens = float(batch) * row.seq_len
    products = 2 * tokens * (row.layers * attention_weights + matrices * row.hidden * widths)
    attention = attention_part * 4 * tokens * row.seq_len * row.layers * heads * head_dim
    return products, attention, 2 * tokens * row.hidden * row.vocab
