"""Saved tensors on the host: equal gradients, one copy of each storage there and back, and what stays."""

from collections.abc import Iterator
from typing import Any

import torch

from autopar.lowering.saved_on_host import saved_on_host


class Copies:
    """Copies, which are counted."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.there: list[torch.Tensor] = []
        self.num_back = 0

    def to_host(self, value: torch.Tensor) -> torch.Tensor:
        self.there.append(value.clone())
        return self.there[-1]

    def to_device(self, host: Any) -> torch.Tensor:
        self.num_back += 1
        found: torch.Tensor = host.clone()
        return found


def gradients(copies: Copies | None, run: Any, *given: torch.Tensor) -> list[torch.Tensor]:
    leaves = [one.clone().requires_grad_() for one in given]
    if copies is None:
        out = run(*leaves)
    else:
        with saved_on_host(copies, leaves):
            out = run(*leaves)
    out.backward()
    return [one.grad for one in leaves if one.grad is not None]


def parts_of_one_storage(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ w).chunk(3, -1)
    return (q * k + v.t().sin().t()).exp().sum()


def values() -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    yield torch.randn(4, 6, dtype=torch.float64)
    yield torch.randn(6, 12, dtype=torch.float64)


def test_views_of_one_storage_go_once_and_come_back_once() -> None:
    copies, given = Copies(), list(values())
    expected, found = (gradients(one, parts_of_one_storage, *given) for one in (None, copies))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    sizes = sorted(one.numel() for one in copies.there)
    assert sizes == [16, 48]  # the exponential's result, and the product with its three parts
    assert copies.num_back == len(copies.there)


def test_what_stays_is_not_copied() -> None:
    copies, (x, w) = Copies(), values()
    gradients(copies, lambda x, w: (x @ w).sum(), x, w)
    assert copies.there == []
    kept: list[torch.Tensor] = []
    leaf = x.clone().requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one.detach(), lambda one: one)  # type: ignore[func-returns-value]
    with hooks, saved_on_host(copies, [leaf]):
        (leaf * leaf).sum().backward()
    assert [one.data_ptr() for one in kept] == [leaf.data_ptr()] * 2


def test_a_graph_that_runs_twice() -> None:
    copies, (x, w) = Copies(), values()
    leaf = x.clone().requires_grad_()
    with saved_on_host(copies, [leaf, w]):
        out = (leaf @ w).sin().sum()
    out.backward(retain_graph=True)
    once = leaf.grad
    assert once is not None
    first = once.clone()
    out.backward()
    assert torch.equal(once, 2 * first)
