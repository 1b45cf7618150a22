"""Whether `tp` becomes two mesh dimensions. This helps if a factor of `tp` divides the heads and `tp` does not.

With grouped queries, the heads are a product of key heads and queries per key head. `tp` may divide the product without
dividing the key heads. Then the first mesh dimension splits the key heads, the second the queries of one key head. Keys
and values are split by the first and replicated on the second. (Ainslie et al. 2023, "GQA", section 2.2, copies them
whole to each rank.) Other heads are split by the first dimension alone. For example, 12 heads over 8 ranks are 4 × 3
heads, each on two ranks. Widths and vocabularies are split by both.
"""

from collections.abc import Iterator
from math import gcd, prod

from autopar.capture.analysis import Analysis, parameter_values
from autopar.ir.program import Program
from autopar.search.labels.choices import is_paddable


def tensor_dims(program: Program, analysis: Analysis, tp: int) -> tuple[int, int] | None:
    """The two degrees whose product is `tp`. None if one mesh dimension is enough."""
    for sizes in _heads(program, analysis):
        first, rest = sizes[0], prod(sizes[1:])
        if first % tp == 0 or (rest == 1 and is_paddable(first, tp)):
            continue
        outer = gcd(first, tp)
        inner = tp // outer
        if outer > 1 and rest > 1 and (rest % inner == 0 or is_paddable(rest, inner)):
            return outer, inner
        if rest == 1:
            fitting = [d for d in range(2, tp) if tp % d == 0 and (first % d == 0 or is_paddable(first, d))]
            if fitting:
                return fitting[-1], tp // fitting[-1]
    return None


def _heads(program: Program, analysis: Analysis) -> Iterator[tuple[int, ...]]:
    """Axis sizes of every dimension that is parallel in a product of activations, and a width of parameters."""
    products = [(i, node, b) for i, bounds in enumerate(analysis.bounds) for node, b in bounds.items() if b.rule.flops]
    parameters = [parameter_values(program, analysis, i) for i in range(len(program.blocks))]
    widths: set[int] = set()
    for i, node, bound in products:
        for name, dims in zip(analysis.operands[i][node], bound.operands, strict=True):
            if name in parameters[i]:
                widths |= {axis for dim in dims.axes for axis in dim}
    widths -= analysis.batch_axes | analysis.sequence_axes
    for i, node, bound in products:
        if not parameters[i].isdisjoint(analysis.operands[i][node]):
            continue
        spec, dims = bound.rule.inputs[0], bound.operands[0]
        for factors, axes, sizes in zip(spec, dims.axes, dims.sizes, strict=True):
            if sizes and widths.issuperset(axes) and (bound.rule.whole | bound.rule.reduced).isdisjoint(factors):
                yield sizes
