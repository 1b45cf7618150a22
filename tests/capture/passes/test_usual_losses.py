"""Losses as people write them: micro-batches and ranks give the loss and gradients of the whole batch.

The reference is the model as it is written, on the whole batch. The second batch has almost no token that counts.
"""

import pytest
import torch
from equivalence import case_of, check, labelled
from suites import thinned
from usual_losses import BATCH, EQUAL, REFUSED, usual_batch, usual_model

from autopar.capture.any_size import capture
from autopar.capture.program import capture_program
from autopar.capture.request import Request
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import Mesh
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.float64_program import promoted
from autopar.runtime.verify.reference import Case, reference_steps

COUNT = 2
ON_RANKS = (
    "cross-entropy, class weights and smoothing",
    "cross-entropy, soft targets",
    "masked, a mean over a mean",
    "by weights of the batch's classes",
    "clipped policy, whitened advantages (PPO)",
    "a sum beside a mean",
)


@pytest.mark.parametrize("name", EQUAL)
def test_micro_batches_have_the_gradients_of_the_batch(name: str) -> None:
    model = usual_model(name)
    program = promoted(capture_program(model, usual_batch(), batch=BATCH // COUNT))
    assert program.mixes_batch is None
    source = parameter_source(model, state=None, seed=0, dtype=None)
    for batch in (usual_batch(), usual_batch(is_sparse=True)):
        found = reference_steps(Case(program, source, [batch], Degrees(accumulate=COUNT)))
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        torch.testing.assert_close(found.losses[0], loss.detach(), rtol=1e-12, atol=1e-15)
        for parameter, tensor in model.named_parameters():
            if tensor.grad is not None:
                torch.testing.assert_close(found.gradients[parameter], tensor.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_no_sum_gives_are_refused(name: str) -> None:
    """Their gradients need values of the whole batch that depend on weights."""
    program = capture_program(usual_model(name), usual_batch(), batch=BATCH // COUNT)
    assert program.mixes_batch is not None


@pytest.mark.parametrize("name", thinned(list(EQUAL), keep=ON_RANKS))
def test_ranks_have_it_too(name: str) -> None:
    model = usual_model(name)
    used = [n for n, p in model.named_parameters() if n.startswith("second")]
    for parameter in used:  # a loss that does not use the second head
        model.get_parameter(parameter).requires_grad_(False)
    case = case_of((model, usual_batch()))
    for mesh in (Mesh.of(dp=2), Mesh.of(dp=2, tp=2)):
        check(case, labelled(case, mesh), mesh)


@pytest.mark.parametrize("name", ["masked, a mean over a mean", "clipped policy, whitened advantages (PPO)"])
def test_the_record_of_a_capture_has_the_totals(name: str) -> None:
    """A program at another batch size is written from the record, and is the program of a capture at that size."""
    found = capture(Request.of(usual_model(name), usual_batch()))
    assert found.record is not None, found.unknown
    written, captured = found.at(batch=6), capture_program(usual_model(name), usual_batch(), batch=6)
    assert written.fingerprint == captured.fingerprint
    assert len(written.denominators) == len(captured.denominators) > 0
    assert written.mixes_batch is None
