"""Offload and optimizers in an estimate: device and host bytes, seconds, and what is assumed."""

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.request import Request
from autopar.cost_model.estimate import Estimate
from autopar.cost_model.parts import MEMORY, OTHER
from autopar.ir.offload import OFFLOADS
from autopar.ir.optimizers import OPTIMIZERS
from autopar.ir.program import Program
from autopar.planning.degrees import resolve_degrees
from autopar.planning.fixed import capture_for

STATE, BATCH = MEMORY["optimizer state"], 4


@pytest.fixture(scope="module")
def program() -> Program:
    """A small Llama in float32."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4}
    with torch.device("meta"):
        made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=8))
    ids = torch.empty(BATCH, 32, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids.clone()}
    return capture_for(Request.of(made.train(), batch), resolve_degrees({"micro_batch": BATCH}, 1))


def estimated(program: Program, cluster: str = "4xh100", *, exact: bool = False, **wish: Any) -> Estimate:
    given = {"dp": 4, "zero": 3, "micro_batch": 1, **wish}
    return autopar.estimate(program, cluster, given, exact_memory=exact)


@pytest.mark.parametrize("offload", OFFLOADS[1:])
@pytest.mark.parametrize("exact", [False, True])
def test_bytes_go_from_the_device_to_the_host(program: Program, offload: str, exact: bool) -> None:
    here, there = (estimated(program, exact=exact, offload=one) for one in ("none", offload))
    assert here.host_bytes == 0.0 < there.host_bytes
    assert there.peak_bytes < here.peak_bytes
    assert (there.memory_bytes[STATE] == 0.0) == (offload != "activations")
    assert sum(there.memory_bytes.values()) == pytest.approx(there.peak_bytes)
    copies = OTHER["host copies"]
    assert here.other_s[copies] == 0.0
    assert there.other_s[copies] > 0 or offload == "parameters"  # its copies hide behind computing here
    assert estimated(program, "4xcpu", offload=offload).other_s[copies] > 0  # nothing hides on a CPU
    assert there.step_s > here.step_s
    total = sum(there.compute_s.values()) + sum(one.exposed_s for one in there.collectives)
    assert total + sum(there.other_s.values()) == pytest.approx(there.step_s)
    assert there.degrees["offload"] == offload


def test_formula_and_count_agree_on_the_host(program: Program) -> None:
    for offload in ("optimizer", "parameters"):
        counted, priced = (estimated(program, exact=exact, offload=offload).host_bytes for exact in (True, False))
        assert priced == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_formula_and_count_agree_on_every_optimizer(program: Program, name: str) -> None:
    """One rank, whose state is neither divided nor held whole on several ranks."""
    wish = {"dp": 1, "micro_batch": BATCH, "optimizer": name}
    counted, priced = (estimated(program, "1xh100", exact=exact, **wish).memory_bytes[STATE] for exact in (True, False))
    assert priced == pytest.approx(counted, rel=0.01)


def test_an_unknown_optimizer_is_an_assumption(program: Program) -> None:
    known, unknown, muon = (estimated(program, optimizer=name) for name in ("adamw", "adamv", "muon"))
    assert unknown.memory_bytes == known.memory_bytes
    assert [one for one in known.assumptions if "optimizer" in one] == []
    (said,) = [one for one in unknown.assumptions if "optimizer" in one]
    assert said == "optimizer 'adamv' is unknown: its state is counted as that of adamw; did you mean 'adamw'?"
    (gathers,) = [one for one in muon.assumptions if "optimizer" in one]
    assert "it gathers whole matrices" in gathers


def test_an_unknown_host_is_an_assumption(program: Program) -> None:
    said = [one for one in estimated(program, "4xcpu", offload="optimizer").assumptions if "host" in one]
    assert said == ["the host of cpu is unknown: its link and memory are assumed to move 16 GB/s, and to have room for "
                    "everything"]  # fmt: skip
