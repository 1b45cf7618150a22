"""Convolutions and their transposes: batch, groups and output channels are parallel, input channels are reduced."""

from collections.abc import Mapping
from math import prod
from typing import Any

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import rule_from, slot_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Slot, Step


def _per_dim(argument: Any, count: int) -> list[int]:
    if isinstance(argument, int):
        return [argument] * count
    if isinstance(argument, str):  # "valid" is none, "same" more than none
        return [int(argument == "same")] * count
    if not isinstance(argument, (list, tuple)):
        raise RuleError(f"convolution with {argument!r}")
    return [int(n) for n in argument] * (count if len(argument) == 1 else 1)


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
@rule(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
@rule(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def convolution(call: Call) -> Rule:
    """``"n (g i) x, (g o) i k[, (g o)] -> n (g o) y"``. x is ``(y k)`` where the kernel tiles the input, else whole.

    A transpose has the kernel ``"(g i) o k"``, and y is ``(x k)`` where places do not overlap.
    """
    is_transpose = str(call.target).startswith("aten.conv_transpose")
    x, weight = slot_of(call.args[0]), slot_of(call.args[1])
    shape, kernel, out = call.operands[x].shape, call.operands[weight].shape, call.output.shape
    count = len(kernel) - 2
    if len(shape) != count + 2:
        raise RuleError("convolution without a batch")
    settings = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, added = (_per_dim(call.named(setting, 0), count) for setting in settings)
    groups = call.named("groups")
    first, second = ("i", "o") if is_transpose else ("o", "i")  # channels of the kernel's dimensions
    few, many = ("x", "y") if is_transpose else ("y", "x")  # the value with one place for each window, and the other
    windows, others = (shape, out) if is_transpose else (out, shape)
    sizes = {"g": groups, first: kernel[0] // groups, second: kernel[1]}
    whole: set[str] = set()
    window: list[Dim] = [("g", first), (second,)]
    dims: dict[str, list[Dim]] = {"x": [("n",), ("g", "i")], "y": [("n",), ("g", "o")]}
    for d in range(count):
        width, places, size = kernel[2 + d], windows[2 + d], others[2 + d]
        tiles = stride[d] == width and not padding[d] and not added[d] and dilation[d] == 1 and size == places * width
        dims[few].append((f"{few}{d}",))
        dims[many].append((f"{few}{d}", f"k{d}") if tiles else (f"{many}{d}",))
        window.append((f"k{d}",))
        whole |= {f"k{d}"} if tiles else {f"k{d}", f"x{d}", f"y{d}"}
        sizes |= {f"k{d}": width, f"{few}{d}": places} | ({} if tiles else {f"{many}{d}": size})
    bias, named = call.named("bias"), call.named("padding")
    given_padding = named if isinstance(named, str) else padding

    def emit(local: Call) -> tuple[Step, ...]:
        value = local.output if is_transpose else local.operands[x]
        local_groups = value.shape[1] // local.operands[weight].shape[1]
        rest = (added, local_groups, dilation) if is_transpose else (dilation, local_groups)
        return (Step(local.target, (*local.args[:2], bias, stride, given_padding, *rest)),)

    def flops(sizes: Mapping[str, int]) -> float:
        """Every place of a window is a product over the channels of its group and the kernel."""
        return 2.0 * prod(size for name, size in sizes.items() if name[0] != many)

    specs = {x: dims["x"], weight: window}
    if isinstance(bias, Slot):
        specs[bias.index] = [("g", "o")]
    additive = set(specs) - {x, weight}
    return rule_from(
        call, specs, dims["y"], additive=additive, linear=[{x} | additive], sizes=sizes, whole=whole,
        flops=flops, emit=emit,
    )  # fmt: skip
