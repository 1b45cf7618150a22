"""The blocks of a published run that trains adapters beside a frozen model, from the blocks of the whole model.

An adapter of rank r beside a linear layer of `in` and `out` features has r · (in + out) parameters and two products.
peft runs it as operators of their own: a dropout of the input, its cast to float32 as adapters have it, the two
products, a scale, and a sum with the layer's result. The frozen layer saves no input. An adapter saves its own.

A quantised model (QLoRA) keeps its linear layers in 4 or 8 bits. Each pass makes 16-bit weights of a layer at a time.
Parameters count in 16-bit elements.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.work.block_work import BlockWork, Family, Operator, memory_operator
from autopar.ir.arrays import Floats
from autopar.ir.trained import TrainedParameters

ELEMENT = 2.0  # bytes
# names of linear layers in published configurations, and the features that go in and come out: h of attention's input
# and of every result, x of the feed-forward's input (as many as h), a of queries, g of keys and values, f of the
# feed-forward's inside
_LAYERS = {
    "q_proj": "ha", "k_proj": "hg", "v_proj": "hg", "o_proj": "ah", "out_proj": "ah", "dense": "ah", "c_proj": "ah",
    "gate_proj": "xf", "up_proj": "xf", "down_proj": "fh", "w1": "xf", "w2": "fh", "w3": "xf", "fc1": "xf", "fc2": "fh",
    "dense_h_to_4h": "xf", "dense_4h_to_h": "fh",
}  # fmt: skip
_JOINT = {
    **dict.fromkeys(("query_key_value", "qkv_proj", "Wqkv", "c_attn", "W_pack"), ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_ATTENTION, _GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_PLAIN = ("up_proj", "down_proj")


def known_targets() -> tuple[str, ...]:
    """The names of linear layers that a row may have adapters beside."""
    return (*_LAYERS, *_JOINT)


def with_adapters(
    family: Family[Any], trained: TrainedParameters, numbers: Mapping[str, Floats], layouts: Layouts, *, is_gated: bool
) -> Family[Any]:
    """A family, with numbers in place of its expressions, that trains adapters alone."""
    if not trained.has_adapters:
        return family
    features = {
        "h": numbers["h"],
        "x": numbers["h"],
        "a": numbers["a"] * numbers["e"],
        "g": numbers["g"] * numbers["e"],
        "f": numbers["f"],
    }
    every = (*_ATTENTION, *(_GATED if is_gated else _PLAIN))
    targets = [name for target in trained.targets or every for name in _JOINT.get(target, (target,))]
    sides = [(features[_LAYERS[name][0]], features[_LAYERS[name][1]]) for name in targets]
    # saved for gradients of frozen weights, and by no adapter; attention saves its own result
    with_adapter = {_LAYERS[name][0] for name in targets}
    dropped = sum((features[side] for side in "hxf" if side not in with_adapter), np.zeros(1))
    tokens = layouts.micro_batch * numbers["s"] / layouts.cp
    quantised, stored = trained.kind == "qlora", trained.quantised_bytes

    def of_block(role: str, work: BlockWork[Any]) -> BlockWork[Any]:
        products = tuple(replace(op, only="left") if op.kind == "matmul" else op for op in work.products)
        if role not in ("layer", "moe_layer"):
            frozen = work.parameters_split + work.parameters_whole
            return replace(work, products=products if role == "last" else (), frozen_dense=frozen)
        linear = sum((op.k * op.n * op.count for op in work.products if op.kind == "matmul"), np.zeros(1))
        is_split = work.parameters_split > work.parameters_whole  # on one rank they count as whole
        left = 1 - quantised * (1 - stored / ELEMENT) * linear / (work.parameters_split + work.parameters_whole)
        split = work.parameters_split * np.where(is_split, left, 1.0)
        whole = work.parameters_whole * np.where(is_split, 1.0, left)
        added = sum((trained.rank * (a + b / layouts.tp) for a, b in sides), np.zeros(1))
        results = sum((b / layouts.tp for _, b in sides), np.zeros(1))
        inputs = sum((a for a, _ in sides), np.zeros(1))
        forward = ELEMENT * tokens * (2 * inputs + 5 * results)  # dropout; a scale, a sum
        backward = ELEMENT * tokens * (2 * inputs + 3 * inputs + 2 * results)
        beside = [memory_operator("adapters", forward, backward, (3 * len(sides), 3 * len(sides)), np.zeros(1))]
        if quantised:
            moved = (stored + ELEMENT) * linear
            kernels = (len(every), len(every))
            beside.append(memory_operator("dequantised weights", moved, moved, kernels, np.zeros(1)))
        # results of the first products, a mask of the dropout, and the input in the float32 of the adapter
        more = tokens * (ELEMENT * trained.rank * len(sides) + (1 + 4) * inputs)
        saved = {
            name: np.maximum(getattr(work, name) + more - ELEMENT * tokens * dropped, work.input_bytes)
            for name in ("saved_eager_bytes", "saved_fused_bytes")
        }
        return replace(
            work,
            products=(*products, *(op for side in sides for op in _products(trained.rank, side, tokens, layouts))),
            eager=(*work.eager, *beside),
            fused=(*work.fused, *beside),
            parameters_split=split + added,
            parameters_whole=whole,
            frozen_dense=split + whole,
            frozen_expert=work.parameters_expert,
            **saved,
        )

    return family.with_works(lambda role, _, work: of_block(role, work))


def _products(rank: int, side: tuple[Floats, Floats], tokens: Floats, layouts: Layouts) -> list[Operator[Any]]:
    """The two products of an adapter."""
    into, out = side[0], side[1] / layouts.tp
    return [
        Operator(
            name="adapter", kind="matmul", flops=2 * tokens * n * k, m=tokens, n=n, k=k, count=np.ones(1),
            forward_bytes=np.zeros(1), backward_bytes=np.zeros(1), kernels_forward=1, kernels_backward=2,
        )
        for n, k in ((np.full(1, float(rank)), into), (out, np.full(1, float(rank))))
    ]  # fmt: skip
