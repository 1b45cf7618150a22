"""Functions of generated code on a mesh dimension that records collectives instead of sending."""

import pytest
import torch
from step_traffic import CollectiveTotal, Ledger, PricedDim, collective

from autopar._torch import private
from autopar.ir.sharding import Kind
from autopar.lowering.conversions import CONVERSIONS
from autopar.lowering.functions import CONVERT


@pytest.mark.parametrize("pair", list(CONVERSIONS), ids=str)
def test_conversions_send_what_the_table_says(pair: tuple[Kind, Kind]) -> None:
    ledger = Ledger()
    mesh = PricedDim("tp", 2, None, 0, 1, ledger)  # type: ignore[arg-type]
    dims = {"S": (1,)}.get(pair[0], {"S": (1,)}.get(pair[1], ()))
    with private.fake_tensors():
        x = torch.zeros(4, 6, requires_grad=True)
        out = CONVERT[pair](x, mesh, *((0, 1) if pair == ("S", "S") else dims))
    wide = {("S", "R"): (4, 12), ("S", "I"): (4, 12), ("S", "P"): (4, 12), ("S", "S"): (8, 3)}
    wide |= {(a, "S"): (4, 3) for a in "PIR"}
    assert tuple(out.shape) == wide.get(pair, (4, 6))
    forward = ledger.take()
    out.backward(torch.ones_like(out))
    assert x.grad is not None and x.grad.shape == x.shape
    for kind, sends, operand in zip(CONVERSIONS[pair].wire, (forward, ledger.take()), (x, out), strict=True):
        expected = {} if kind is None else {("tp", kind): collective(kind, 2, operand.numel() * 4)}
        assert sends == expected


def test_bytes_put_in_and_bytes_sent() -> None:
    """Ring algorithms: n - 1 of n parts of the whole, twice for an all-reduce."""
    assert collective("all_gather", 4, 100) == CollectiveTotal(1, 100, 300)
    assert collective("reduce_scatter", 4, 400) == CollectiveTotal(1, 400, 300)
    assert collective("all_reduce", 4, 400) == CollectiveTotal(1, 400, 600)
    assert collective("all_to_all", 4, 400) == CollectiveTotal(1, 400, 300)
    assert CollectiveTotal(1, 2, 3) * 2 + CollectiveTotal(1, 1, 1) == CollectiveTotal(3, 5, 7)
