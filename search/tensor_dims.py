"""Whether `tp` should be two mesh dimensions: with grouped queries, heads are a product of key heads and queries per
key head, and `tp` may divide the product without dividing the number of key heads.

The first mesh dimension then splits key heads, the second the queries that share one; keys and values are split by the
first and replicated on the second (Ainslie et al. 2023, "GQA", section 2.2, has whole copies per rank instead).
"""

from collections.abc import Iterator
from math import gcd, prod

from autopar.ir.program import Program
from autopar.search.labels_space import is_paddable, parameter_values
from autopar.trace.analysis import Analysis


def tensor_dims(program: Program, analysis: Analysis, tp: int) -> tuple[int, int] | None:
    """The two degrees that `tp` should be the product of, None where one mesh dimension does."""
    for sizes in _heads(program, analysis):
        first, rest = sizes[0], prod(sizes[1:])
        outer = gcd(first, tp)
        inner = tp // outer
        if first % tp and outer > 1 and (rest % inner == 0 or is_paddable(rest, inner)):
            return outer, inner
    return None


def _heads(program: Program, analysis: Analysis) -> Iterator[tuple[int, ...]]:
    """Axis sizes of every head dimension that is a product: a parallel dimension of a product of activations."""
    for index, bounds in enumerate(analysis.bounds):
        parameters = parameter_values(program, analysis, index)
        for node, bound in bounds.items():
            if bound.rule.flops is None or not parameters.isdisjoint(analysis.operands[index][node]):
                continue
            spec, dims = bound.rule.inputs[0], bound.operands[0]
            for factors, axes, sizes in zip(spec, dims.axes, dims.sizes, strict=True):
                parallel = not bound.rule.whole & set(factors) and not bound.rule.reduced & set(factors)
                own = not set(axes) & (analysis.batch_axes | analysis.sequence_axes)
                if parallel and own and len(sizes) > 1:
                    yield sizes
