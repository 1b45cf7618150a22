"""Operators that take pieces of a tensor or put pieces together. All are linear."""

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import dim_index, dims, rule_from, slots_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Emit, Rule, Step


def _emit_slice(d: int, index: int, step: int, pieces: int) -> Emit:
    """Piece `index` of equal ones; with a step, the elements whose position is `index` modulo `step`."""

    def emit(local: Call) -> tuple[Step, ...]:
        length = local.output.shape[d]
        if step == 1:
            return (Step(aten.slice.Tensor, (local.args[0], d, index * length, (index + 1) * length)),)
        return (Step(aten.slice.Tensor, (local.args[0], d, index, length * pieces, step)),)

    return emit


def _piece(call: Call, d: int, start: int, length: int, step: int) -> Rule:
    """Elements ``start, start + step, ...`` of dimension d, `length` of them. A part that is cut unevenly is whole."""
    source = call.operands[0].shape
    spec, output = dims(source), dims(source)
    size = source[d]
    if length == size:
        return rule_from(call, [spec], output, linear=[{0}], emit=_emit_slice(d, 0, 1, 1))
    sizes = {f"d{i}": n for i, n in enumerate(source) if i != d}
    if length > 1 and step == 1 and size % length == 0 and start % length == 0:
        spec[d], index = ("c", "e"), start // length
    elif length > 1 and step > 1 and size == length * step and start < step:
        spec[d], index = ("e", "c"), start
    else:
        spec[d], output[d] = ("x",), ("y",)
        return rule_from(call, [spec], output, sizes=sizes | {"x": size, "y": length}, whole="xy", linear=[{0}])
    output[d] = ("e",)
    sizes |= {"c": size // length, "e": length}
    emit = _emit_slice(d, index, step, size // length)
    return rule_from(call, [spec], output, sizes=sizes, whole={"c"}, linear=[{0}], emit=emit)


@rule(aten.slice.Tensor)
def slice_(call: Call) -> Rule:
    source = call.operands[0].shape
    d = dim_index(call.named("dim", 0), len(source))
    start, end, step = call.named("start"), call.named("end"), call.named("step", 1)
    if not all(isinstance(n, int) or n is None for n in (start, end, step)):
        raise RuleError("a slice with bounds that are not numbers")
    bounds = range(*slice(start, end, step).indices(source[d]))
    return _piece(call, d, bounds.start, len(bounds), bounds.step)


@rule(aten.narrow.default)
def narrow(call: Call) -> Rule:
    source = call.operands[0].shape
    d = dim_index(call.args[1], len(source))
    start, length = call.args[2:4]
    if not isinstance(start, int):
        raise RuleError("a slice with bounds that are not numbers")
    return _piece(call, d, start % source[d], length, 1)


@rule(aten.select.int)
def select(call: Call) -> Rule:
    """The selected dimension is whole."""
    spec = dims(call.operands[0].shape)
    d = dim_index(call.args[1], len(spec))
    return rule_from(call, [spec], spec[:d] + spec[d + 1 :], whole={f"d{d}"}, linear=[{0}])


@rule(aten.diff.default)
def diff(call: Call) -> Rule:
    """Differences of neighbours, after putting something before and behind: their dimension is whole."""
    output = dims(call.output.shape)
    d = dim_index(call.named("dim", -1), len(output))
    specs = [[*output[:d], (f"x{k}",), *output[d + 1 :]] for k in range(len(call.operands))]
    output[d] = ("y",)
    whole = {"y", *(f"x{k}" for k in range(len(specs)))}
    return rule_from(call, specs, output, whole=whole, linear=[set(range(len(specs)))])


@rule(aten.cat.default, aten.concat.default)
def cat(call: Call) -> Rule:
    """Equal pieces are ``e, e -> (c e)``: c is whole, e may be split. Else the dimension is whole."""
    shapes = [operand.shape for operand in call.operands]
    if len({len(shape) for shape in shapes}) != 1 or slots_of(call.args[0]) != list(range(len(shapes))):
        raise RuleError("cat of tensors that differ in rank or occur twice")
    d = dim_index(call.named("dim", 0), len(shapes[0]))
    output = dims(call.output.shape)
    specs = [list(output) for _ in shapes]
    linear = [set(range(len(shapes)))]
    sizes = {f"d{i}": n for i, n in enumerate(call.output.shape) if i != d}
    if len({shape[d] for shape in shapes}) == 1 and shapes[0][d] > 1:
        for spec in specs:
            spec[d] = ("e",)
        output[d] = ("c", "e")
        sizes |= {"c": len(shapes), "e": shapes[0][d]}
        return rule_from(call, specs, output, sizes=sizes, whole={"c"}, linear=linear)
    for k, spec in enumerate(specs):
        spec[d] = (f"x{k}",)
        sizes[f"x{k}"] = shapes[k][d]
    output[d] = ("y",)
    whole = {"y", *(f"x{k}" for k in range(len(shapes)))}
    return rule_from(call, specs, output, sizes=sizes | {"y": call.output.shape[d]}, whole=whole, linear=linear)


@rule(aten.stack.default)
def stack(call: Call) -> Rule:
    """The new dimension is whole."""
    if slots_of(call.args[0]) != list(range(len(call.operands))):
        raise RuleError("stack of tensors that occur twice")
    spec = dims(call.operands[0].shape)
    d = dim_index(call.named("dim", 0), len(spec) + 1)
    output = [*spec[:d], ("stack",), *spec[d:]]
    linear = [set(range(len(call.operands)))]
    return rule_from(call, [spec] * len(call.operands), output, whole={"stack"}, linear=linear)


@rule(aten.glu.default)
def glu(call: Call) -> Rule:
    """The two halves ``(c e)`` of a dimension meet in e. Not linear."""
    source = call.operands[0].shape
    d = dim_index(call.named("dim", -1), len(source))
    spec, output = dims(source), dims(source)
    if source[d] > 2:
        spec[d] = ("c", "e")
        output[d] = ("e",)
        sizes = {f"d{i}": n for i, n in enumerate(source)} | {"c": 2, "e": source[d] // 2}
        return rule_from(call, [spec], output, sizes=sizes, whole={"c"})
    output[d] = ()
    return rule_from(call, [spec], output, whole={f"d{d}"})
