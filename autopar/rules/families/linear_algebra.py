"""Operators on matrices and vectors: batch dimensions are parallel, and the matrix is whole."""

from autopar._torch.operators import aten
from autopar.rules.families._notation import aligned, broadcast, dim_index, dims, multiply_adds, rule_from
from autopar.rules.operators import output_of
from autopar.rules.registry import Pattern, rule
from autopar.rules.rule import Call, Dim, Rule

for _target in (
    aten.linalg_inv.default,
    aten.inverse.default,
    aten.linalg_cholesky.default,
    aten.linalg_matrix_exp.default,
):
    rule(_target)(Pattern("... m n -> ... m n", whole="m n"))
rule(aten.linalg_det.default)(Pattern("... m n -> ...", whole="m n"))
rule(output_of(aten.linalg_inv_ex.default, 0))(Pattern("... m n -> ... m n", whole="m n"))
rule(aten.cdist.default)(Pattern("... m k, ... n k -> ... m n", whole="k"))
rule(aten.bilinear.default)(Pattern("... i, ... j, o i j[, o] -> ... o", additive=(3,), flops=multiply_adds))
rule(aten.bucketize.Tensor)(Pattern("..., k -> ...", whole="k"))
rule(aten.searchsorted.Tensor)(Pattern("... k, ... m -> ... m", whole="k"))


@rule(aten.cosine_similarity.default)
def cosine_similarity(call: Call) -> Rule:
    rank = len(call.output.shape) + 1
    d = dim_index(call.named("dim", 1), rank)
    spec: list[Dim] = [(f"d{n}",) for n in range(rank)]
    return rule_from(call, broadcast(call, spec), [*spec[:d], *spec[d + 1 :]], whole={f"d{d}"})


@rule(aten.pairwise_distance.default)
def pairwise_distance(call: Call) -> Rule:
    kept = bool(call.named("keepdim", False))
    batch = dims(call.output.shape[:-1] if kept else call.output.shape)
    spec = [*batch, ("k",)]
    inputs = [aligned(spec, operand.shape) for operand in call.operands]
    return rule_from(call, inputs, [*batch, ()] if kept else batch, whole={"k"})


@rule(aten.linalg_cross.default)
def cross(call: Call) -> Rule:
    spec = dims(call.output.shape)
    d = dim_index(call.kwargs.get("dim", -1), len(spec))
    return rule_from(call, broadcast(call, spec), spec, whole={f"d{d}"}, linear=[{0}, {1}])


@rule(aten.diagonal.default)
def diagonal(call: Call) -> Rule:
    spec = dims(call.operands[0].shape)
    places = {dim_index(call.named("dim1", 0), len(spec)), dim_index(call.named("dim2", 1), len(spec))}
    output: list[Dim] = [*(dim for d, dim in enumerate(spec) if d not in places), ("diagonal",)]
    return rule_from(call, [spec], output, whole={"diagonal", *(f"d{d}" for d in places)}, linear=[{0}])


@rule(aten.diag_embed.default)
def diag_embed(call: Call) -> Rule:
    rank = len(call.output.shape)
    places = {dim_index(call.named("dim1", -2), rank), dim_index(call.named("dim2", -1), rank)}
    batch = dims(call.operands[0].shape[:-1])
    rest = iter(batch)
    output: list[Dim] = [(f"m{d}",) if d in places else next(rest) for d in range(rank)]
    whole = {"x", *(f"m{d}" for d in places)}
    return rule_from(call, [[*batch, ("x",)]], output, whole=whole, linear=[{0}])
