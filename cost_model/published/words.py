"""The words of a row's columns that name a precision, an attention kernel or an option, read from free text."""

import re
from dataclasses import dataclass
from typing import Literal

from autopar.cost_model.machine.engine import Engine
from autopar.ir.offload import ACTIVATIONS, OPTIMIZER, PARAMETERS

# Pattern and precision, the first match counts. Case does not count.
_PRECISIONS = (
    (r"nv-?fp4", "nvfp4"),
    (r"mx-?fp4|\bfp4|float4|4[ -]?bit", "mxfp4"),
    (r"mx-?fp8", "mxfp8"),
    (r"fp8|float8|e4m3|e5m2|8[ -]?bit float", "fp8"),
    (r"bf-?16|bfloat16", "bf16"),
    (r"fp-?16|float16|\bhalf\b|\bamp\b", "fp16"),
    (r"fp-?32|float32|\bsingle\b", "fp32"),
)
ASSUMED = "bf16"  # of a row whose precision cannot be read

# Patterns of options in the text of a framework. Every option that a text names counts.
_NO_COMPILE = r"\beager\b|\b(?:no|not|without)[ -](?:torch[. -]?)?compil|compile ?[:=]? ?(?:no|off|false)\b"
_COMPILE = r"compile|inductor"
_OVERLAP = r"(?:async(?:hronous)?[ -]?(?:tp\b|tensor)|\b(?:tp|tensor)[ -](?:comm[a-z]*[ -])?overlap|userbuffers)"
_GRAPHS = r"full[ -]iteration (?:cuda )?graph|cuda[ -]?graphs?\b"
_LINEAR_LOSS = r"linear[ -]?cross[ -]?entropy|liger|cut[ -]?cross[ -]?entropy"
_IS_OFFLOADED = (
    (
        PARAMETERS,
        r"zero-?infinity|offload\w*[ _:=-]*(?:the )?(?:param|weight)|(?:param\w*|weights?)[ _-]*(?:cpu )?offload",
    ),
    (
        OPTIMIZER,
        r"zero-?offload|cpu[ _-]?(?:adam|offload)|(?:optimi[sz]er|adam|states?)[ _-]*(?:cpu )?offload|"
        r"offload\w*[ _:=-]*(?:the )?optim|optimi[sz]er (?:states? )?on (?:the )?(?:host|cpu)",
    ),
    (ACTIVATIONS, r"activation\w*[ _-]*(?:cpu )?offload|offload\w*[ _:=-]*(?:the )?activ"),
)
_NOT_OFFLOADED = r"\b(?:no|not|without)[ _-](?:\w+[ _-])?offload|offload\w*[ ]?[:=][ ]?(?:none|no|false|off)\b"

Kernel = Literal["first", "second", "native"]
_IN_PIECES = re.compile(r"unfused|not fused|\b(?:no|without) (?:flash|fused)|eager|\bmath\b|materiali[sz]ed|\bnaive\b")
_VERSION = r"(?:flash[ -]?att(?:ention|n)?|flash|fa)[ -]?v?"
_KERNELS: tuple[tuple[str, Kernel], ...] = (
    (rf"cudnn|{_VERSION}[34]\b|transformer[ -]?engine|\bte\b|\baiter\b|\bck\b", "native"),
    (rf"{_VERSION}2\b|\bsdpa\b", "second"),
    (rf"{_VERSION}1\b|triton|xformers", "first"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Whether attention is one kernel, and its generation."""

    fused: bool
    kernel: Kernel


def precision_of_text(text: str | None) -> tuple[str, str | None]:
    """The precision that a text names, and a warning if it names none."""
    if text is None:
        return ASSUMED, None
    found = next((name for pattern, name in _PRECISIONS if re.search(pattern, text, re.IGNORECASE)), None)
    if found is None:
        return ASSUMED, f"precision {text[:40]!r} is not known; {ASSUMED} is used"
    return found, None


def engine_with_options(engine: Engine, text: str | None) -> Engine:
    """The engine with the options that a text names: torch.compile, CUDA graphs, overlap, loss, host memory."""
    words, changes = (text or "").lower(), dict[str, str]()
    if re.search(_NO_COMPILE, words):
        changes = {"pointwise": "eager", "dispatch": "eager", "loss": "eager"}
    elif re.search(_COMPILE, words):
        changes = {"pointwise": "fused"} | ({"dispatch": "lean"} if engine.dispatch == "eager" else {})
    if re.search(_OVERLAP, words):
        changes["tensor_overlap"] = "none" if re.search(rf"\b(?:no|not|without) {_OVERLAP}", words) else "pipelined"
    if re.search(_GRAPHS, words) and not re.search(rf"\b(?:no|not|without|partial|some) (?:{_GRAPHS})", words):
        changes["dispatch"] = "graph"
    if re.search(_LINEAR_LOSS, words):
        changes["loss"] = "linear"
    if offload := _offload(words):
        changes["offload"] = offload
    return engine.model_copy(update=changes) if changes else engine


def _offload(words: str) -> str | None:
    """A value of `autopar.ir.offload`, None if nothing is said to be on the host. Parameters include the optimizer."""
    if re.search(_NOT_OFFLOADED, words):
        return None
    found = [part for part, pattern in _IS_OFFLOADED if re.search(pattern, words)]
    return "+".join(part for part in found if part != OPTIMIZER or PARAMETERS not in found) or None


def attention_of_text(text: str | None, engine: Engine) -> Attention:
    """The attention that a text names; what it does not say is as in the engine."""
    if text is None:
        return Attention(fused=engine.attention == "fused", kernel=engine.attention_kernel)
    words = text.lower()
    kernel = next((name for pattern, name in _KERNELS if re.search(pattern, words)), engine.attention_kernel)
    return Attention(fused=not _IN_PIECES.search(words), kernel=kernel)
