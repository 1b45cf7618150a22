"""`verify` of a model that float32 cannot judge: the unmodified model is compared in float64 there."""

from dataclasses import replace

from autopar.capture.request import Request
from autopar.commands import verify as command
from autopar.commands.unmodified import against_module
from autopar.commands.verify import Job, verify
from autopar.ir.degrees import Degrees
from autopar.planning.fixed import capture_for
from autopar.runtime.distributed.launch import Ranks
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.random_batches import random_batches
from autopar.runtime.verify.reference import Case, reference_steps
from autopar.runtime.verify.verify import in_dtype

SPEC = "input_factories:sensitive"


def test_a_model_that_float32_cannot_judge(two_ranks: Ranks) -> None:
    report = verify(SPEC, world_size=2, degrees={"dp": 2}, steps=1, ranks=two_ranks)
    found = {q.name: q for q in report.quantities}
    assert found["captured gradients"].outcome == "equal", found
    assert found["captured gradients"].max_error < 1e-3
    assert any("values of the unmodified model are compared in float64" in note for note in report.notes)


def test_a_capture_of_another_model_differs_there() -> None:
    model = command.resolve_job(Job(spec=SPEC, dtype="float64"))
    program = in_dtype(capture_for(Request.of(model.model, model.example_inputs), Degrees(micro_batch=4)), "float64")
    source = parameter_source(model.model, state=None, seed=0, dtype=None)
    (batch,) = random_batches(program, Degrees(), 1, 0)
    reference = reference_steps(Case(program, source, [batch], Degrees()))

    def outcomes() -> list[str]:
        quantities, _ = against_module(model, Case(program, source, [batch], Degrees()), reference)
        return [q.outcome for q in quantities]

    assert outcomes() == ["equal"] * 4
    other = {name: value * (0.9 if name == "up.weight" else 1) for name, value in reference.gradients.items()}
    reference = replace(reference, gradients=other)
    assert outcomes() == ["equal", "different", "equal", "equal"]
