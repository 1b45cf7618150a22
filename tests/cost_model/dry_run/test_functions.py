"""Functions that write down what would be sent: those of the runtime by name, those of the table by what they send."""

import pytest
import torch
from runtime_functions import FUNCTIONS as RUNTIME

from autopar.cost_model.dry_run.functions import FUNCTIONS, Ledger, PricedDim, Traffic, collective
from autopar.cost_model.work.conversions import TABLE
from autopar.ir.sharding import Kind
from autopar.runtime.codegen.generate import FUNCTIONS as GENERATED


def test_names_are_those_of_generated_code() -> None:
    assert FUNCTIONS.keys() == GENERATED.keys()
    assert {function.__name__ for function in RUNTIME.values()} < FUNCTIONS.keys()


@pytest.mark.parametrize("pair", list(TABLE), ids=str)
def test_conversions_send_what_the_table_says(pair: tuple[Kind, Kind]) -> None:
    ledger = Ledger()
    mesh = PricedDim("tp", 2, 0, ledger)
    x = torch.zeros(4, 6, requires_grad=True)
    dims = {"S": (1,)}.get(pair[0], {"S": (1,)}.get(pair[1], ()))
    out = FUNCTIONS[RUNTIME[pair].__name__](x, mesh, *((0, 1) if pair == ("S", "S") else dims))
    wide = {("S", "R"): (4, 12), ("S", "I"): (4, 12), ("S", "P"): (4, 12), ("S", "S"): (8, 3)}
    wide |= {(a, "S"): (4, 3) for a in "PIR"}
    assert tuple(out.shape) == wide.get(pair, (4, 6))
    forward = ledger.take()
    out.backward(torch.ones_like(out))
    assert x.grad is not None and x.grad.shape == x.shape
    for kind, sends, operand in zip(TABLE[pair], (forward, ledger.take()), (x, out), strict=True):
        expected = {} if kind is None else {("tp", kind): collective(kind, 2, operand.numel() * 4)}
        assert sends == expected


def test_bytes_put_in_and_bytes_sent() -> None:
    """Ring algorithms: n - 1 of n parts of the whole, twice for an all-reduce."""
    assert collective("all_gather", 4, 100) == Traffic(1, 100, 300)
    assert collective("reduce_scatter", 4, 400) == Traffic(1, 400, 300)
    assert collective("all_reduce", 4, 400) == Traffic(1, 400, 600)
    assert collective("all_to_all", 4, 400) == Traffic(1, 400, 300)
    assert Traffic(1, 2, 3) * 2 + Traffic(1, 1, 1) == Traffic(3, 5, 7)
