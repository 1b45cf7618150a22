"""The reference of `verify`: seeded steps of the captured program on one device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.capture.micro_batches import Extreme, extreme_of
from autopar.errors import InputError
from autopar.ir.degrees import Degrees
from autopar.ir.precision import stored_dtype
from autopar.ir.program import CallSite, Program
from autopar.ir.stages import updated_by_inputs
from autopar.runtime.codegen.execute import captured_modules, constant_values, run_calls, use_running_statistics
from autopar.runtime.model.compiled import buffers_read, totals_of
from autopar.runtime.model.inputs import split_micro_batches
from autopar.runtime.model.outputs import at_least_float32
from autopar.runtime.parameters.packed import complete_gradients, join_packed, packed_source
from autopar.runtime.verify.shared_draws import on_one_device

LEARNING_RATE = 1e-3
MAX_NORM = 1.0
EXAMPLE = "loss and gradients of the example"  # a quantity of factories alone
LOSS_SCALE = 1024.0  # in float16
Source = Callable[[str], torch.Tensor]
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """What steps are of: a program, its weights, batches, the degrees, and perhaps the example inputs."""

    program: Program
    source: Source
    data: Sequence[Batch]
    degrees: Degrees
    example: Batch | None = None

    def with_batches(self, function: Callable[[Batch], Batch]) -> "Case":
        """The case with other values in all batches."""
        example = None if self.example is None else function(self.example)
        return replace(self, data=[function(batch) for batch in self.data], example=example)


@dataclass(slots=True)
class Steps:
    """The results of several steps: all compared values. `example` has the loss and gradients of the example inputs."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    example: dict[str, torch.Tensor] = field(default_factory=dict)


def constants_of(program: Program, source: Source) -> dict[str, torch.Tensor]:
    """The results of a program's constant part on one device. `source` gives buffers by name."""
    buffers = {name: source(name).to(info.dtype) for name, info in buffers_read(program.constants)}
    return constant_values(program.constants, buffers, "cpu")


def scaler_of(degrees: Degrees) -> torch.amp.GradScaler | None:
    """torch's scaler for steps in float16, with a scale that small models do not overflow."""
    return torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE) if degrees.precision == "fp16" else None


def step_with(scaler: torch.amp.GradScaler | None, *optimizers: torch.optim.Optimizer) -> None:
    """A step of the optimizers, skipped if the scaler has met an overflow. Gradients are gone after it."""
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        optimizer.zero_grad()
    if scaler is not None:
        scaler.update()


class _Reference:
    """The captured program on one device: its blocks, weights and state."""

    def __init__(self, program: Program, source: Source, degrees: Degrees) -> None:
        self.program, self.degrees = program, degrees
        self.main = [call for call in program.calls if call.phase == "main"]
        source = packed_source(program, source)
        self.parameters = {
            name: torch.nn.Parameter(
                source(name).to(stored_dtype(info, degrees)).clone(), requires_grad=info.requires_grad
            )
            for name, info in program.every_parameter.items()
        }
        self.state = {name: source(name).to(program.buffers[name].dtype).clone() for name in program.updates}
        self.changing = frozenset(self.state) if degrees.per_micro_batch else updated_by_inputs(program)
        self.constants = constants_of(program, source)
        self.streams = on_one_device()
        self.training = captured_modules(program, streams=self.streams)
        self.evaluating = captured_modules(program, streams=self.streams)
        for module in self.evaluating:
            use_running_statistics(module.graph)
            module.recompile()

    def run(
        self, calls: Sequence[CallSite], given: Mapping[str, Any], when: tuple[int, int], *, trains: bool = True
    ) -> dict[str, Any]:
        """All values after some calls, in a step and micro-batch."""
        infos = self.program.every_parameter
        taken = {name: parameter.to(infos[name].dtype) for name, parameter in self.parameters.items()}
        values = {**taken, **self.state, **self.constants, **given}
        modules = self.training if trains else self.evaluating

        def function_of(index: int, call: CallSite) -> fx.GraphModule:
            self.streams.begin(*when, self.program.calls.index(calls[index]), training=trains)
            return modules[call.block]

        run_calls(calls, function_of, values, lambda c: c.results)
        return values

    def denominators(self, pieces: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        """The denominators of each micro-batch's loss, by name."""

        def run(call: CallSite, values: Mapping[str, Any]) -> Mapping[str, Any]:
            return self.run([call], values, (0, 0))

        return totals_of(self.program, pieces, run, per_micro_batch=self.degrees.per_micro_batch)

    def forward_backward(
        self, pieces: Sequence[Batch], step: int, scaler: torch.amp.GradScaler | None = None
    ) -> torch.Tensor:
        """The loss of a step. Gradients, scaled by a `scaler`, and new values of buffers are kept."""
        averages = self.program.loss_reduction == "mean" or self.degrees.per_micro_batch
        total = torch.zeros((), dtype=torch.float64)
        for index, (piece, denominator) in enumerate(zip(pieces, self.denominators(pieces), strict=True)):
            values = self.run(self.main, {**piece, **denominator}, (step, index))
            loss = at_least_float32(values[self.program.loss]) / (len(pieces) if averages else 1)
            if not loss.requires_grad:
                raise no_gradient(self.program)
            (loss if scaler is None else scaler.scale(loss)).backward()
            total = total + loss.detach()
            new = {name: values[update].detach() for name, update in self.program.updates.items()}
            self.state |= {name: v for name, v in new.items() if name in self.changing or index == len(pieces) - 1}
        complete_gradients(self.program, self.parameters)
        return total

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by the model's names."""
        gradients = {n: p.grad.clone() for n, p in self.parameters.items() if p.grad is not None}
        return join_packed(self.program, gradients)

    @torch.no_grad()
    def outputs(self, pieces: Sequence[Batch], step: int) -> dict[str, torch.Tensor]:
        """The outputs of the last micro-batch in evaluation mode, with the random numbers of a step."""
        values = self.run(self.main, {**pieces[-1], **self.denominators(pieces)[-1]}, (step, 0), trains=False)
        return {key: values[name].detach() for key, name in self.program.outputs.items()}


def reference_steps(case: Case) -> Steps:
    """The steps of the captured program on one device, the whole batch at once or in micro-batches."""
    program, degrees, example = case.program, case.degrees, case.example
    model = _Reference(program, case.source, degrees)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=LEARNING_RATE)
    steps, scaler = Steps(), scaler_of(degrees)
    if example is not None:
        loss = model.forward_backward(split_micro_batches(program, example, degrees.num_micro_batches), 0)
        steps.example = {"the loss": loss, **model.gradients()}
        optimizer.zero_grad()
    steps_before = int(example is not None)
    for step, batch in enumerate(case.data):
        pieces = split_micro_batches(program, batch, degrees.num_micro_batches)
        if step == 0 and decides_alone(program, degrees):
            steps.outputs = model.outputs(pieces, steps_before)
        steps.losses.append(model.forward_backward(pieces, step + steps_before, scaler))
        if scaler is not None:
            scaler.unscale_(optimizer)
        if step == 0:
            steps.gradients = model.gradients()
        steps.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters.values(), MAX_NORM))
        step_with(scaler, optimizer)
    steps.weights = join_packed(program, {n: p.detach() for n, p in model.parameters.items()})
    steps.buffers = model.state
    return steps


def decides_alone(program: Program, degrees: Degrees) -> bool:
    """Whether every micro-batch of a step, run without the others, takes the branch of the step."""
    shared: dict[Extreme | None, bool] = {max: False, min: True}
    decisions = [decision for decision in program.decisions if decision.inputs]
    extremes = [extreme_of(program, decision.name) for decision in decisions]
    is_alone = degrees.num_micro_batches == 1 or degrees.per_micro_batch
    return is_alone or all(shared.get(e, d.value) is d.value for e, d in zip(extremes, decisions, strict=True))


def no_gradient(program: Program) -> InputError:
    """The error of a loss that no trained parameter changes."""
    every = program.every_parameter
    trained = [name for name, info in every.items() if info.requires_grad]
    is_frozen = every and not trained
    why = f"all {len(every)} parameters are frozen" if is_frozen else "the loss depends on no trained parameter"
    which = f", such as {next(iter(every))!r}" if is_frozen else ""
    return InputError(
        f"{why}, so there is no gradient to compare; set requires_grad=True on the parameters to train{which}"
    )


def check_reference(reference: Steps) -> None:
    """Raise `InputError` if the model gives no numbers on one device: then a comparison shows nothing."""
    for step, (loss, norm) in enumerate(zip(reference.losses, reference.norms, strict=True)):
        kind = "NaN" if bool(loss.isnan()) else "infinite"
        if not bool(loss.isfinite()):
            raise InputError(
                f"the loss is {kind} on one device too, from step {step} on, so the check would show nothing; run the "
                "model on one device with inputs and weights that give a finite loss, or verify fewer steps"
            )
        if not bool(norm.isfinite()):
            bad = next((n for n, g in reference.gradients.items() if not bool(g.isfinite().all())), None)
            whose = f", first of {bad!r}," if bad and step == 0 else ""
            raise InputError(
                f"gradients{whose} are NaN or infinite on one device too, in step {step}, so the check would show "
                "nothing; find the operator with torch.autograd.detect_anomaly() on one device"
            )
