"""Engine profiles: the mechanisms of training frameworks, one YAML file per engine in ``engines``.

A mechanism is a word out of a short list, never a factor. A word costs the same in every engine
(`autopar.cost_model.machine.fitted_constants`). Planning uses the engine `autopar`. `autopar validate` takes the engine
that a row names. This module does not import torch.
"""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from autopar.errors import InputError, did_you_mean
from autopar.files.strict_model import NamedModel, models_in, read_named

DEFAULT = "autopar"
NEUTRAL = "neutral"  # of a framework that is not known
MASTER = "fp32"
_Text = Annotated[str, Field(min_length=8, max_length=400)]
Module = Literal["core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts"]


class Engine(NamedModel):
    """The mechanisms of a framework beside the arithmetic of the model. docs/cost_model.md explains every key.

    A file states what differs from the usual values below, or from the engine that it is `like`. `sources` has a
    sentence for every number that it states.
    No number is fitted. A source that begins with "assumed" has no publication behind it. The usual values are assumed:
    sums of gradients and gathered weights in 16 bits, sums of shards in float32. ZeRO 1 divides the master weight (4)
    and Adam's moments (8).

    `tests/conformance/test_engines.py` finds every file, and checks that each word of each field changes a price.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    description: _Text
    like: str | None = None
    frameworks: list[str]
    until: Annotated[int, Field(ge=2018, le=2100)] | None = None
    attention: Literal["fused", "materialised"]
    attention_kernel: Literal["first", "second", "native"]
    pointwise: Literal["eager", "fused"]
    dispatch: Literal["eager", "lean", "graph"]
    tensor_overlap: Literal["none", "async", "pipelined"] = "none"
    accumulation: Literal["fused", "kernel"] = "kernel"
    data_ranks: Literal["own", "joint"] = "own"
    gradient_sync: Literal["after", "during"] = "after"
    gradient_bytes: Literal[2, 4] = 2
    parameter_sync: Literal["gathered", "broadcasts"] = "gathered"
    parameter_bytes: Literal[1, 2, 4] = 2
    shard_gather: Literal["prefetched", "blocking"] = "prefetched"
    shard_gradient_bytes: Literal[2, 4] = 4
    messages: Literal["blocking", "overlapped"] = "blocking"
    splits_messages: bool = False
    context: Literal["ring", "gathered", "labels"] = "ring"
    unstated_virtual: Literal["one", "all"] = "one"
    unstated_zero: Literal[0, 1, 3] = 0
    unstated_recompute: Literal["least", "full"] = "least"
    unstated_sequence_parallel: bool = False
    balances_ends: bool = False
    selective: Literal["half", "products"] | list[Module] = Field(default=["core_attn"])
    state_bytes: Literal[16, 18, 20, 22, 28]
    sharded_state_bytes: Literal[12, 16, 24] = 12
    optimizer_bytes: Annotated[int, Field(ge=20, le=100)]
    expert_rows: Literal["counted", "padded"] = "counted"
    gradients: Literal["kept", "made", "stepped"] = "kept"
    low_gradients: Literal["added", "beside"] = "added"
    update: Literal["in_place", "at_once"] = "in_place"
    accumulated: Literal["sharded", "whole"] = "sharded"
    bucket_elements: Annotated[int, Field(ge=0, le=10**10)] = 0
    zero_weights: Literal["shared", "copied"] = "shared"
    loss: Literal["fused", "eager", "in_place", "compiled", "linear"] = "fused"
    saved_operands: Literal["wide", "narrow"] = "wide"
    outputs: Literal["freed", "held"] = "freed"
    offload: Literal[
        "none", "optimizer", "parameters", "activations", "optimizer+activations", "parameters+activations"
    ] = "none"
    sources: dict[str, _Text]

    @property
    def last_year(self) -> float:
        """`until`; infinite for a profile of today."""
        return self.until or math.inf

    @property
    def sends_by_labels(self) -> bool:
        """Whether labels say what context and expert ranks send."""
        return self.context == "labels"

    def computing_in(self, precision: str) -> Engine:
        """This engine in a precision of `autopar.ir.precision`."""
        changes = {}
        if self.low_gradients == "beside" and precision != "bf16":
            changes["low_gradients"] = "added"
        if self.saved_operands == "narrow" and precision in ("bf16", "fp16", "fp32"):
            changes["saved_operands"] = "wide"
        return self.model_copy(update=changes) if changes else self

    def keeping(self, offload: str) -> Engine:
        """This engine with other values on the host."""
        return self if offload == self.offload else self.model_copy(update={"offload": offload})


@functools.cache
def engines() -> dict[str, Engine]:
    """Every engine by its name. Raises InputError when a file is malformed."""
    return models_in(Engine, resources.files("autopar.cost_model.machine") / "engines", "engine profiles")


@functools.cache
def engine_names() -> tuple[str, ...]:
    with _folder() as folder:
        return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


@functools.cache
def engine_named(name: str) -> Engine:
    """The engine of that name, or of the framework. For an unknown name raises InputError, which names the nearest."""
    if name not in engine_names():
        of_framework = [e for e in engines().values() if name.lower() in (word.lower() for word in e.frameworks)]
        if not of_framework:
            raise InputError(f"unknown engine {name[:80]!r}; {did_you_mean(name, engine_names())}")
        return max(of_framework, key=lambda engine: engine.last_year)
    with _folder() as folder:
        engine, problems = read_named(Engine, folder / f"{name}.yaml")
    if engine is None or problems:
        raise InputError("the engine profiles are malformed", problems)
    return engine


def _folder() -> AbstractContextManager[Path]:
    return resources.as_file(resources.files("autopar.cost_model.machine") / "engines")


def with_sums_in(engine: Engine, reduce_dtype: str | None, stored_bytes: int) -> Engine:
    """autopar's engine if ranks sum gradients in a dtype of `autopar.ir.precision`. Other engines keep their bytes."""
    if engine.name != DEFAULT:
        return engine
    size = stored_bytes if reduce_dtype is None else 4 if reduce_dtype == MASTER else 2
    return engine.model_copy(update={"gradient_bytes": size, "shard_gradient_bytes": size})
