"""Check 3: each parameter's gradient is summed exactly once over each mesh dimension.

On a mesh dimension a parameter's own gradient is

* a shard (stored ``S``). Each rank has its whole part, and nobody sums.
* invariant (stored ``I``). The gradient is equal on all ranks. Every use is invariant, or the backward pass of its
  conversion sums (an all-reduce for ``I -> R``, an all-gather for ``I -> S``).
* partial (stored ``R``). Nothing in the block sums. Either the deferred sum or ZeRO must sum, and never both.

The table is read from the generated graphs, use by use, not from the labels that made them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import VerificationError
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh, Type, shares_parameter
from autopar.lowering.functions import conversion_of
from autopar.lowering.gather_linear import gather_linear, kept_gather_linear
from autopar.lowering.local_graph import LocalGraph

# the type of the gradient that a use returns, by the type in which the use takes the value
COTANGENT_OF = {"I": "I", "R": "partial", "S": "S", "P": "I"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRow:
    """One parameter on one mesh dimension. `summed_by` is "nobody", "operator", "deferred sum" or "ZeRO"."""

    parameter: str
    mesh_dim: str
    stored: Type
    summed_by: str
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.parameter} on {self.mesh_dim}: stored as {self.stored}, summed by {self.summed_by} ({self.reason})"
        )


def gradient_table(
    program: Program, generated: Sequence[LocalGraph], mesh: Mesh, *, zero: int = 0
) -> tuple[GradientRow, ...]:
    """The row of every trainable parameter and every mesh dimension of degree > 1.

    Raises `VerificationError` if a gradient would be summed twice or not at all. The message names parameter and mesh
    dimension. The plan's ZeRO stage is `zero`, and ZeRO sums over `dp` from stage 1 on.
    """
    types = _stored(program, generated)
    rows: list[GradientRow] = []
    problems: list[str] = []
    for name, info in program.parameters.items():
        if not info.requires_grad or name not in types:
            continue
        for index, (mesh_dim, degree) in enumerate(zip(mesh.names, mesh.degrees, strict=True)):
            if degree == 1:
                continue
            row, problem = _row(program, generated, name, index, mesh_dim, types[name][index], zero)
            rows.append(row)
            problems += [problem] if problem else []
    if problems:
        raise VerificationError("gradients are not summed exactly once:\n" + "\n".join(f"  {p}" for p in problems))
    return tuple(rows)


def _stored(program: Program, generated: Sequence[LocalGraph]) -> dict[str, tuple[Type, ...]]:
    """How every parameter is stored, the same at every call that uses it."""
    types: dict[str, tuple[Type, ...]] = {}
    for call in program.calls:
        ports = generated[call.block].ports
        for port, name in zip(program.blocks[call.block].ports, call.arguments, strict=True):
            if isinstance(name, str) and name in program.parameters:
                own = tuple(ports[port])
                if types.setdefault(name, own) != own:
                    raise VerificationError(f"{name} is stored as {types[name]} and, at {call.path}, as {own}")
    return types


def _row(
    program: Program,
    generated: Sequence[LocalGraph],
    name: str,
    index: int,
    mesh_dim: str,
    stored: Type,
    zero: int,
) -> tuple[GradientRow, str]:
    """The row of one parameter and mesh dimension, and its problem, "" if it has none."""
    uses = _uses(program, generated, name, index, mesh_dim)
    arriving = {cotangent for cotangent, _ in uses}
    operators = sorted({operator for _, operator in uses if operator})
    zero_sums = zero > 0 and shares_parameter(mesh_dim, stored)
    outside = "ZeRO" if zero_sums else "deferred sum"
    problem = ""
    if stored.kind == "R":
        summed_by, reason = outside, "every use is replicated, so each rank has a part of the sum"
        wanted = {"partial"}
    elif stored.kind == "S":
        summed_by, reason, wanted = "nobody", "each rank holds its own part", {"S"}
    elif stored.kind == "I":
        wanted = {"I"}
        summed_by = "operator" if operators else "nobody"
        reason = ", ".join(operators) if operators else "every use is invariant"
    else:
        summed_by, reason, wanted = "nobody", "", set()
        problem = f"{name} on {mesh_dim}: a parameter cannot be stored as {stored}"
    if zero_sums and stored.kind == "I":
        problem = f"{name} on {mesh_dim}: stored as {stored}, whose gradient is whole already, and ZeRO sums it again"
    if arriving - wanted and not problem:
        found = ", ".join(sorted(arriving - wanted))
        problem = f"{name} on {mesh_dim}: stored as {stored}, but a use returns a gradient of type {found}"
    row = GradientRow(parameter=name, mesh_dim=mesh_dim, stored=stored, summed_by=summed_by, reason=reason)
    return row, problem


def _uses(
    program: Program, generated: Sequence[LocalGraph], name: str, index: int, mesh_dim: str
) -> list[tuple[str, str]]:
    """For each use of a parameter, the type of the returned gradient, and the conversion that sums it."""
    found: list[tuple[str, str]] = []
    for block in {call.block for call in program.calls if name in call.arguments}:
        for call in program.uses_of_block(block):
            for port, argument in zip(program.blocks[block].ports, call.arguments, strict=True):
                if argument == name:
                    graph = generated[block].graph
                    node = next(n for n in graph.nodes if n.op == "placeholder" and n.name == port)
                    found += _returns(node, index, mesh_dim)
    return list(dict.fromkeys(found))


def _returns(node: fx.Node, index: int, mesh_dim: str) -> list[tuple[str, str]]:
    """The gradient types of a value's uses on a mesh dimension. Conversions on other mesh dimensions are skipped."""
    found: list[tuple[str, str]] = []
    for user in node.users:
        conversion = conversion_of(user.target)
        if conversion is not None:
            axis = user.args[1]
            assert isinstance(axis, fx.Node)
            if mesh_dim not in (str(axis.target), *str(axis.target).split("_")):
                found += _returns(user, index, mesh_dim)
                continue
            communicates = (conversion.source, conversion.target) in (("I", "R"), ("I", "S"))
            found.append((_word(conversion.source), f"{_name(user)} in backward" if communicates else ""))
        elif user.target in (gather_linear, kept_gather_linear):
            found += [(_word(t[index].kind), "") for t in _operand_types(node, user)]
        elif user.op == "output":
            found.append((_word(node.meta["types"][index].kind), ""))
        elif "operand_types" in user.meta:
            found += [(_word(t[index].kind), "") for t in _operand_types(node, user)]
        else:  # a reshape around a conversion of a packed dimension
            found += _returns(user, index, mesh_dim)
    return found


def _operand_types(node: fx.Node, user: fx.Node) -> list[tuple[Type, ...]]:
    """The types in which a call takes a value, one per operand. The value's own type if the call has no such types."""
    operands = [a for a in _flat(user.args) if isinstance(a, fx.Node) and "types" in a.meta]
    kept: Sequence[tuple[Type, ...]] = user.meta.get("operand_types", ())
    if len(kept) != len(operands):
        return [node.meta["types"]]
    return [types for operand, types in zip(operands, kept, strict=True) if operand is node]


def _flat(value: object) -> list[object]:
    return [leaf for v in value for leaf in _flat(v)] if isinstance(value, (list, tuple)) else [value]


def _word(kind: str) -> str:
    return COTANGENT_OF[kind]


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
