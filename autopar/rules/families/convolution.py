"""Convolutions and their transposes: batch, groups and output channels are parallel, input channels are reduced."""

from collections.abc import Mapping
from math import prod
from typing import Any

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import in_order, rule_from, slot_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Slot, Step


def _flops(sizes: Mapping[str, int]) -> float:
    """Every output element is a product over the input channels of its group and the kernel."""
    return 2.0 * prod(size for name, size in sizes.items() if name[0] != "x")


def _per_dim(argument: Any, count: int) -> list[int]:
    if isinstance(argument, int):
        return [argument] * count
    if isinstance(argument, str):  # "valid" is none, "same" more than none
        return [int(argument == "same")] * count
    if not isinstance(argument, (list, tuple)):
        raise RuleError(f"convolution with {argument!r}")
    return [int(n) for n in argument] * (count if len(argument) == 1 else 1)


def _of_windows(call: Call, source: list[Dim], window: list[Dim], target: list[Dim], bias: Any, **more: Any) -> Rule:
    """The rule of the dims of a value, its kernel and its result; a bias is added to the result."""
    x, weight = slot_of(call.args[0]), slot_of(call.args[1])
    specs = {x: source, weight: window}
    if isinstance(bias, Slot):
        specs[bias.index] = [("g", "o")]
    additive = set(specs) - {x, weight}
    return rule_from(call, in_order(call, specs), target, additive=additive, linear=[{x} | additive], **more)


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
@rule(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def convolution(call: Call) -> Rule:
    """``"n (g i) x, (g o) i k[, (g o)] -> n (g o) y"``. x is ``(y k)`` where the kernel tiles the input, else whole."""
    x, weight = slot_of(call.args[0]), slot_of(call.args[1])
    shape, kernel, out = call.operands[x].shape, call.operands[weight].shape, call.output.shape
    count = len(kernel) - 2
    if len(shape) != count + 2:
        raise RuleError("convolution without a batch")
    groups = call.arg(6, "groups")
    settings = ((3, "stride"), (4, "padding"), (5, "dilation"))
    stride, padding, dilation = (_per_dim(call.arg(*setting), count) for setting in settings)
    sizes = {"g": groups, "o": kernel[0] // groups, "i": kernel[1]}
    whole: set[str] = set()
    source: list[Dim] = [("n",), ("g", "i")]
    window: list[Dim] = [("g", "o"), ("i",)]
    target: list[Dim] = [("n",), ("g", "o")]
    for d in range(count):
        size, width, places = shape[2 + d], kernel[2 + d], out[2 + d]
        tiles = stride[d] == width and not padding[d] and dilation[d] == 1 and size == places * width
        source.append((f"y{d}", f"k{d}") if tiles else (f"x{d}",))
        window.append((f"k{d}",))
        target.append((f"y{d}",))
        whole |= {f"k{d}"} if tiles else {f"k{d}", f"x{d}", f"y{d}"}
        sizes |= {f"k{d}": width, f"y{d}": places} | ({} if tiles else {f"x{d}": size})
    bias, named = call.arg(2, "bias"), call.arg(4, "padding")
    given_padding = named if isinstance(named, str) else padding

    def emit(local: Call) -> tuple[Step, ...]:
        operands = (*local.args[:2], bias, stride, given_padding, dilation)
        return (Step(local.target, (*operands, local.operands[x].shape[1] // local.operands[weight].shape[1])),)

    return _of_windows(call, source, window, target, bias, sizes=sizes, whole=whole, flops=_flops, emit=emit)


def _transposed_flops(sizes: Mapping[str, int]) -> float:
    """Every input element meets the output channels of its group and the kernel."""
    return 2.0 * prod(size for name, size in sizes.items() if name[0] != "y")


@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def transposed_convolution(call: Call) -> Rule:
    """``"n (g i) x, (g i) o k[, (g o)] -> n (g o) y"``. y is ``(x k)`` where places do not overlap, else whole."""
    x, weight = slot_of(call.args[0]), slot_of(call.args[1])
    shape, kernel, out = call.operands[x].shape, call.operands[weight].shape, call.output.shape
    count = len(kernel) - 2
    if len(shape) != count + 2:
        raise RuleError("convolution without a batch")
    settings = ((3, "stride"), (4, "padding"), (5, "output_padding"), (7, "dilation"))
    stride, padding, added, dilation = (_per_dim(call.arg(*setting), count) for setting in settings)
    groups = call.arg(6, "groups")
    sizes = {"g": groups, "i": kernel[0] // groups, "o": kernel[1]}
    whole: set[str] = set()
    source: list[Dim] = [("n",), ("g", "i")]
    window: list[Dim] = [("g", "i"), ("o",)]
    target: list[Dim] = [("n",), ("g", "o")]
    for d in range(count):
        size, width, places = shape[2 + d], kernel[2 + d], out[2 + d]
        apart = stride[d] == width and dilation[d] == 1 and not padding[d] and not added[d]
        source.append((f"x{d}",))
        window.append((f"k{d}",))
        target.append((f"x{d}", f"k{d}") if apart else (f"y{d}",))
        whole |= {f"k{d}"} if apart else {f"k{d}", f"x{d}", f"y{d}"}
        sizes |= {f"x{d}": size, f"k{d}": width} | ({} if apart else {f"y{d}": places})
    bias = call.arg(2, "bias")

    def emit(local: Call) -> tuple[Step, ...]:
        local_groups = local.output.shape[1] // local.operands[weight].shape[1]
        return (Step(local.target, (*local.args[:2], bias, stride, padding, added, local_groups, dilation)),)

    more = {"sizes": sizes, "whole": whole, "flops": _transposed_flops, "emit": emit}
    return _of_windows(call, source, window, target, bias, **more)
