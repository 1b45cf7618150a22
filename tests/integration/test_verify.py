"""`verify` on four gloo ranks: scaled-down Llama 3 and GPT-2 under tensor, sequence and data parallelism and ZeRO."""

from itertools import product
from typing import Any

import pytest
from suites import long, thinned

from autopar.commands.verify import verify
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.verify.verify import Report

MODELS = ("llama3-8b", "gpt2")
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "seq_len": 16, "batch": 4, "steps": 2}
QUANTITIES = ("loss", "outputs", "gradients", "clip norm", "parameters after AdamW")


def errors(report: Report) -> dict[str, float]:
    return {q.name: q.scaled_error for q in report.quantities}


def check(spec: str, ranks: Ranks, tolerance: float = 1e-9, dtype: str = "float64", **wish: Any) -> Report:
    report = verify(spec, world_size=4, degrees=wish, dtype=dtype, ranks=ranks, **SIZES)
    found = errors(report)
    assert report.passed, found
    assert set(QUANTITIES) <= set(found)
    assert max(found[name] for name in QUANTITIES) <= tolerance, found
    return report


@pytest.mark.parametrize("sequence_parallel", (long(False), True))
@pytest.mark.parametrize("spec", thinned(MODELS, keep=("gpt2",)))
def test_tensor_parallel(spec: str, sequence_parallel: bool, four_ranks: Ranks) -> None:
    check(spec, four_ranks, tp=4, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", (long(False), True))
@pytest.mark.parametrize(("spec", "zero"), thinned(product(MODELS, range(4)), keep=(("llama3-8b", 2), ("gpt2", 0))))
def test_tensor_and_data_parallel(spec: str, zero: int, sequence_parallel: bool, four_ranks: Ranks) -> None:
    check(spec, four_ranks, tp=2, dp=2, zero=zero, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(
    "sequence_parallel", (long(False), True)
)  # nothing splits the sequence here, and nothing refuses
@pytest.mark.parametrize("spec", thinned(MODELS, keep=("gpt2",)))
def test_data_parallel(spec: str, sequence_parallel: bool, four_ranks: Ranks) -> None:
    check(spec, four_ranks, dp=4, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("spec, zero", (long("llama3-8b", 1), long("gpt2", 2), ("llama3-8b", 3)))
def test_replicated_shards(spec: str, zero: int, four_ranks: Ranks) -> None:
    check(spec, four_ranks, dp_replicate=2, dp_shard=2, zero=zero)


@pytest.mark.parametrize("spec, zero", (long("llama3-8b", 0), ("llama3-8b", 1), long("gpt2", 2), ("gpt2", 3)))
def test_accumulation_of_three_micro_batches(spec: str, zero: int, four_ranks: Ranks) -> None:
    sizes = SIZES | {"batch": 6}
    wish = {"tp": 2, "dp": 2, "zero": zero, "accumulate": 3}
    report = verify(spec, world_size=4, degrees=wish, ranks=four_ranks, **sizes)
    assert report.passed and max(errors(report)[name] for name in QUANTITIES) <= 1e-9, errors(report)


def test_single_precision(four_ranks: Ranks) -> None:
    check("llama3-8b", four_ranks, tolerance=2e-4, dtype="float32", tp=2, dp=2, zero=3, sequence_parallel=True)
