"""Every row of the conversion table on all ranks of one process: forward, backward, and sent bytes."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._torch import private
from autopar.ir.sharding import Dims, I, Mesh, P, R, S, Type
from autopar.lowering import functions
from autopar.lowering.conversions import CONVERSIONS, Conversion
from autopar.runtime.distributed.mesh import make_mesh
from autopar.runtime.parameters.shards import all_shards, assemble

# (source, destination) -> collectives of forward and of backward, as in the design's table
SENT = {
    ("I", "R"): ([], ["all_reduce"]),
    ("P", "I"): (["all_reduce"], []),
    ("P", "R"): (["all_reduce"], ["all_reduce"]),
    ("P", "S"): (["reduce_scatter_tensor"], ["all_gather_into_tensor"]),
    ("S", "R"): (["all_gather_into_tensor"], ["reduce_scatter_tensor"]),
    ("S", "I"): (["all_gather_into_tensor"], []),
    ("I", "S"): ([], ["all_gather_into_tensor"]),
    ("S", "S"): (["all_to_all_single"], ["all_to_all_single"]),
    ("I", "P"): ([], []),
    ("S", "P"): ([], []),
    ("R", "I"): ([], []),
    ("R", "S"): ([], []),
    ("R", "P"): ([], []),
}
DIMS = Dims(((6,), (12,), (18,)), ((0,), (1,), (2,)))


class LoggedCollective(TorchDispatchMode):
    """Names of the collectives called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def table() -> list[tuple[object, Type, Type]]:
    """Every conversion, with every tensor dimension (pair) for shards."""
    found: list[tuple[object, Type, Type]] = []
    plain = {"I": I, "R": R, "P": P}
    for (source, target), function in functions.CONVERT.items():
        for a, b in itertools.product(range(3), repeat=2):
            if (source, target) == ("S", "S"):
                if a != b:
                    found.append((function, S(a), S(b)))
            elif a == b and ("S" in (source, target) or a == 0):
                found.append((function, plain.get(source, S(a)), plain.get(target, S(a))))
    return found


def name(value: object) -> str:
    return getattr(value, "__name__", str(value))


def test_the_table_is_complete() -> None:
    assert sorted(CONVERSIONS) == sorted(SENT)


@pytest.mark.parametrize("row", CONVERSIONS.values(), ids=lambda row: row.function)
def test_a_function_has_the_name_of_its_row(row: Conversion) -> None:
    assert getattr(functions, row.function) is functions.CONVERT[row.source, row.target]
    assert getattr(functions, row.function).__name__ == row.function


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(("function", "source", "target"), table(), ids=name)
def test_value_and_gradient_are_kept(function, source: Type, target: Type, degree: int) -> None:  # type: ignore[no-untyped-def]
    """A conversion changes how a value lies, never the value; so its backward keeps the cotangent."""
    mesh = Mesh.of(tp=degree)
    generator = torch.Generator().manual_seed(0)
    whole, cotangent = (torch.randn(DIMS.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    with private.one_process_ranks(degree):
        dim = make_mesh(mesh).dims["tp"]
        x = private.from_ranks(split(whole, source, mesh, generator)).requires_grad_()
        with LoggedCollective() as forward:
            y = function(x, dim, *(t.dim for t in (source, target) if t.kind == "S"))
        # the cotangent of R is partial, that of P is the same on all ranks
        way = {"R": P, "P": I}.get(target.kind, target)
        with LoggedCollective() as backward:
            y.backward(private.from_ranks(split(cotangent, way, mesh, generator)))
        value, apart = assemble(private.to_ranks(y.detach(), degree), DIMS, (target,), mesh)
        gradient, apart_too = assemble(private.to_ranks(x.grad, degree), DIMS, (source,), mesh, cotangent=True)
    torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, cotangent, rtol=1e-12, atol=1e-12)
    assert apart == apart_too == 0
    assert (forward.names, backward.names) == SENT[source.kind, target.kind]


def split(whole: torch.Tensor, kind: Type, mesh: Mesh, generator: torch.Generator) -> list[torch.Tensor]:
    """The parts of a value; a partial one is a random sum of as many terms as there are ranks."""
    held = all_shards(whole, DIMS, (kind,), mesh)
    if kind.kind == "P":
        noise = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in held[1:]]
        return [whole - sum(noise), *noise]
    return held


def test_identity_conversions_of_a_mesh_dimension_of_one_rank() -> None:
    with private.one_process_ranks(1):
        dim = make_mesh(Mesh.of(tp=1)).dims["tp"]
        x = torch.arange(6.0).reshape(2, 3)
        for function in (functions.all_gather_to_replicate, functions.reduce_scatter):
            torch.testing.assert_close(function(x, dim, 1), x)
