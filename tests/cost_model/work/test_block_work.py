"""Expressions of blocks: stored and exported ones are equal; their values over numbers and arrays."""

import subprocess
import sys

import numpy as np
import pytest
from as_sympy import as_sympy

from autopar.cost_model.work.block_work import (
    SYMBOLS,
    evaluate,
    family,
    family_names,
    free_symbols,
    from_plain,
    to_plain,
)
from autopar.cost_model.work.polynomials import symbol
from autopar.errors import InputError

NUMBERS = {name: float(3 + k) for k, name in enumerate(SYMBOLS)}
PAIRS = {symbol(name): value for name, value in NUMBERS.items()}


@pytest.mark.parametrize("name", family_names())
def test_files_are_read_as_written(name: str) -> None:
    assert from_plain(to_plain(family(name))) == family(name)
    assert set(free_symbols(family(name))) <= set(SYMBOLS)


def test_values_are_those_of_sympy() -> None:
    work = family("llama").block("layer", "sp")
    found = evaluate(work, NUMBERS)
    for one, other in zip(work.products, found.products, strict=True):
        assert other.flops == pytest.approx(float(as_sympy(one.flops).subs(PAIRS)), rel=1e-12)
        assert other.name == one.name and other.kernels_forward == one.kernels_forward
    assert found.saved_eager_bytes == pytest.approx(float(as_sympy(work.saved_eager_bytes).subs(PAIRS)), rel=1e-12)


def test_arrays_give_arrays() -> None:
    degrees = np.array([1.0, 2.0, 4.0, 8.0])
    work = family("gpt2").block("layer", "tp")
    found = evaluate(work, {**NUMBERS, "t": degrees})
    for k, t in enumerate(degrees):
        one = evaluate(work, {**NUMBERS, "t": float(t)})
        assert found.saved_fused_bytes[k] == one.saved_fused_bytes
        assert found.products[0].flops[k] == one.products[0].flops


def test_a_missing_number_is_named() -> None:
    with pytest.raises(InputError, match=r"f \(width of the feed-forward layer\)"):
        evaluate(family("llama").block("layer", "tp"), {k: v for k, v in NUMBERS.items() if k != "f"})


def test_an_unknown_family_names_the_known() -> None:
    with pytest.raises(InputError, match="did you mean 'llama'"):
        family("lama")


def test_every_problem_of_a_file_is_reported() -> None:
    data = to_plain(family("llama"))
    block = data["blocks"]["layer"]["tp"]
    block["products"][0]["flops"] = [[1.5, {"b": 1}]]
    block["input_bytes"] = [[2, {"k": 1}]]
    del block["sent"][0]["of"]
    data["blocks"]["middle"] = {}
    with pytest.raises(InputError) as caught:
        from_plain(data)
    paths = {problem.path for problem in caught.value.problems}
    layer = "blocks.layer.tp"
    assert paths == {f"{layer}.products[0].flops", f"{layer}.input_bytes", f"{layer}.sent[0].of", "blocks.middle"}


@pytest.mark.parametrize("power", [0, 17, -(10**12), 1.5, True])
def test_powers_that_nobody_writes_are_refused(power: float) -> None:
    data = to_plain(family("llama"))
    data["blocks"]["layer"]["tp"]["input_bytes"] = [[2, {"b": power}]]
    with pytest.raises(InputError, match="a power must be a whole number from -16 to 16") as caught:
        from_plain(data)
    assert [problem.path for problem in caught.value.problems] == ["blocks.layer.tp.input_bytes"]


def test_nothing_in_a_file_is_evaluated() -> None:
    data = to_plain(family("llama"))
    data["blocks"]["layer"]["tp"]["input_bytes"] = "__import__('os').getpid()"
    with pytest.raises(InputError, match="input_bytes"):
        from_plain(data)


def test_values_need_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from autopar.cost_model.work.block_work import evaluate, family, SYMBOLS; "
        "evaluate(family('llama'), dict.fromkeys(SYMBOLS, 2.0)); assert not {'torch', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
