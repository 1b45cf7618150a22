"""Context parallelism on gloo ranks: equal to one device, equal work of all ranks, clear refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from suites import long, thinned

from autopar.commands.verify import verify
from autopar.errors import PlanError
from autopar.runtime.distributed.launch import Ranks

Worlds = Callable[[int], Ranks]


@pytest.mark.parametrize(("ranks", "tokens", "key_heads"), [(2, 12, 4), (4, 16, 2), long(3, 12, 1), long(2, 6, 4)])
def test_causal_attention_of_split_queries(ranks: int, tokens: int, key_heads: int, worlds: Worlds) -> None:
    """With an even number of queries on each rank, all ranks have the same work. The last case has three."""
    errors, flops = zip(*worlds(ranks).run("context_ranks:attended", tokens, key_heads), strict=True)
    assert max(errors) < 1e-13
    assert (len(set(flops)) == 1) == (tokens // ranks % 2 == 0), flops


RINGS = [(2, 12, 4, True, 8), (4, 16, 2, True, 6), (2, 6, 1, True, 6), (4, 16, 1, False, 8), (3, 12, 2, True, 8)]
RINGS += [(3, 9, 2, False, 6), (4, 12, 4, True, 8)]


@pytest.mark.parametrize(("ranks", "tokens", "key_heads", "causal", "width"), thinned(RINGS, keep=RINGS[1:3]))
def test_ring_attention(ranks: int, tokens: int, key_heads: int, causal: bool, width: int, worlds: Worlds) -> None:
    """Fused kernels and plain products, which values of another width take. Odd parts of a causal ring are uneven."""
    found = worlds(ranks).run("context_ranks:ringed", tokens, key_heads, causal, width)
    errors, flops = zip(*found, strict=True)
    assert max(errors) < 1e-13
    is_even = not causal or tokens // ranks % 2 == 0
    assert width == 8 or (len(set(flops)) == 1) == is_even, flops  # torch does not count the kernel for CPUs


PLANS: dict[str, dict[str, Any]] = {
    "cp 4, fewer key heads": {"cp": 4},
    "cp × tp": {"cp": 2, "tp": 2, "sequence_parallel": True, "loss_chunks": 2},
    "cp × ZeRO 2": {"cp": 2, "dp": 2, "zero": 2, "accumulate": 2},
    "cp × ZeRO 3": {"cp": 2, "dp": 2, "zero": 3, "recompute": "selective"},
    "cp × stages": {"cp": 2, "pp": 2, "zero": 1, "micro_batches": 2},
    "ring": {"cp": 4, "context": "ring"},
    "ring × tp": {"cp": 2, "tp": 2, "context": "ring", "sequence_parallel": True},
    "ring × ZeRO 3": {"cp": 2, "dp": 2, "context": "ring", "zero": 3, "recompute": "full", "accumulate": 2},
    "ring × stages": {"cp": 2, "pp": 2, "context": "ring", "zero": 1, "micro_batches": 2, "recompute": "selective"},
    "queries × heads": {"cp_dims": [2, 2]},
    "ring × heads": {"cp_dims": [2, 2], "context": "ring", "loss_chunks": 2},
    "cp × replicas": {"cp": 2, "dp_replicate": 2, "zero": 3, "recompute": "full"},
}
CASES = [(model, plan) for model in ("llama3-8b", "gpt2", "qwen3-30b-a3b") for plan in PLANS]


@pytest.mark.parametrize(("model", "plan"), thinned(CASES, keep=(CASES[7], CASES[15])), ids=str)
def test_equal_to_one_device(model: str, plan: str, worlds: Worlds) -> None:
    degrees = PLANS[plan]
    cp = degrees.get("cp") or math.prod(degrees["cp_dims"])
    size = cp * math.prod(degrees.get(name, 1) for name in ("pp", "tp", "dp", "dp_replicate"))
    count = degrees.get("accumulate", 1) * degrees.get("micro_batches", 1)
    report = verify(
        model, world_size=size, degrees=degrees, layers=4 if "pp" in degrees else 2, hidden=64, seq_len=16,
        batch=2 * count, steps=3, ranks=worlds(size),
    )  # fmt: skip
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]
    assert report.plan.degrees.cp == cp


@pytest.mark.parametrize("precision", [long("bf16"), long("fp16")])
def test_in_low_precision(precision: str, worlds: Worlds) -> None:
    degrees = {"cp": 2, "dp": 2, "zero": 3, "precision": precision}
    report = verify(
        "llama3-8b", world_size=4, degrees=degrees, layers=2, hidden=64, seq_len=32, batch=2, ranks=worlds(4)
    )
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]


def test_ranks_of_a_sequence_have_the_same_tokens(worlds: Worlds) -> None:
    pytest.importorskip("transformers")
    for message in worlds(4).run("context_ranks:other_data"):
        assert "got other data than" in message and "differ only in tp, cp or pp" in message


@pytest.mark.parametrize("degrees", [{"cp": 4}, long({"cp": 2, "dp": 2, "zero": 3})], ids=str)
def test_packed_documents(degrees: dict[str, Any], worlds: Worlds) -> None:
    """The mask is cut along the queries; keys and values are gathered, or heads are exchanged."""
    pytest.importorskip("transformers")
    report = verify("context_ranks:packed", world_size=4, degrees=degrees, ranks=worlds(4))
    assert report.passed, [(q.name, q.max_error, q.limit, q.where) for q in report.quantities]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("gpt2", {"seq_len": 10}, "sequence length 10 is not divisible by cp=4 .nearest legal degrees 2 and 5"),
        ("vit-l-16", {}, "cp: no input has a sequence"),
    ],
)
def test_what_cannot_be_shared(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(model, world_size=4, degrees={"cp": 4}, layers=2, hidden=32, batch=4, **options)


def test_a_loop_over_tokens_is_not_shared() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(PlanError, match="cp: the model does not run the same operators at another length"):
        verify("context_ranks:scanned", world_size=2, degrees={"cp": 2})
