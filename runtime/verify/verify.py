"""`verify`: the same seeded steps on one device and in parallel, compared tensor by tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import InputError, VerificationError
from autopar.ir.degrees import Degrees
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.codegen.execute import captured_modules, constant_values, run_calls
from autopar.runtime.codegen.passes.evaluation import use_running_statistics
from autopar.runtime.codegen.passes.without_dropout import without_dropout
from autopar.runtime.model.inputs import split_micro_batches
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.parameters.checkpoint_state import FlatShards
from autopar.runtime.parameters.packed import by_model_parameter, complete_gradients, join_packed, packed_source
from autopar.runtime.verify.error_metrics import TOLERANCES, Quantity, error, rms, weight_error, worst
from autopar.runtime.verify.float64_program import promoted

LEARNING_RATE = 1e-3
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The compared quantities with their worst errors, and whether all are within tolerance."""

    plan: Plan
    quantities: tuple[Quantity, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(q.passed for q in self.quantities)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "world_size": self.plan.degrees.world_size,
            "plan": self.plan.to_dict(),
            "quantities": [q.to_dict() for q in self.quantities],
        }


@dataclass(slots=True)
class Steps:
    """The results of several steps: all compared values."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def reference_steps(
    program: Program, source: Callable[[str], torch.Tensor], data: list[dict[str, torch.Tensor]], degrees: Degrees
) -> Steps:
    """The steps of the captured program on one device, the whole batch at once or in micro-batches."""
    averages = program.loss_reduction == "mean" or degrees.per_micro_batch
    source = packed_source(program, source)
    parameters = {
        name: torch.nn.Parameter(source(name).to(info.dtype).clone(), requires_grad=info.requires_grad)
        for name, info in program.every_parameter.items()
    }
    infos = [n.meta["info"] for n in program.constants.graph.nodes if n.op == "placeholder"]
    literal = [n.meta.get("literal") for n in program.constants.graph.nodes if n.op == "placeholder"]
    buffers = {
        name: source(name).to(infos[i].dtype) for i, name in enumerate(program.constants.buffers) if literal[i] is None
    }
    state = {name: source(name).to(program.buffers[name].dtype).clone() for name in program.updates}
    constants = constant_values(program.constants, buffers, "cpu")
    modules, evaluating = captured_modules(program), captured_modules(program)
    for module in evaluating:
        use_running_statistics(module.graph)
        module.recompile()
    main = [c for c in program.calls if c.phase == "main"]
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE)
    found = Steps()
    for step, batch in enumerate(data):
        pieces = split_micro_batches(program, batch, degrees.num_micro_batches)
        denominators = []
        for piece in pieces:
            values: dict[str, Any] = {**parameters, **state, **constants, **piece}
            run_calls(
                [c for c in program.calls if c.phase == "denominator"],
                lambda _, c: modules[c.block],
                values,
                lambda c: c.results,
            )
            denominators.append(values[program.denominator] if program.denominator else None)
        total, before = torch.zeros((), dtype=torch.float64), state
        for piece, own in zip(pieces, denominators, strict=True):
            values = {**parameters, **state, **constants, **piece}
            if program.denominator:
                every = torch.stack([d for d in denominators if d is not None])
                values[program.denominator] = own if degrees.per_micro_batch else every.sum(0)
            run_calls(main, lambda _, c: modules[c.block], values, lambda c: c.results)
            loss = values[program.loss] / (len(pieces) if averages else 1)
            loss.backward()
            total = total + loss.detach()
            state = {name: values[update].detach() for name, update in program.updates.items()}
        complete_gradients(program, parameters)
        if step == 0:
            if program.updates:  # the outputs are computed in evaluation mode
                given = {program.denominator: values[program.denominator]} if program.denominator else {}
                values = {**parameters, **before, **constants, **pieces[-1], **given}
                run_calls(main, lambda _, c: evaluating[c.block], values, lambda c: c.results)
            found.outputs = {k: values[n].detach() for k, n in program.outputs.items()}
            gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
            found.gradients = join_packed(program, gradients)
        found.losses.append(total)
        found.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = join_packed(program, {n: p.detach() for n, p in parameters.items()})
    found.buffers = state
    return found


def this_ranks_part(
    program: Program, batch: Mapping[str, torch.Tensor], degrees: Any, coordinate: int
) -> dict[str, torch.Tensor]:
    """One data-parallel rank's part of a global batch: its chunk of every micro-batch, in micro-batch order."""
    pieces = split_micro_batches(program, batch, degrees.num_micro_batches)
    dims = {info.name: info.batch_dim for info in program.inputs}
    found = {}
    for name, dim in dims.items():
        if dim is None:
            found[name] = batch[name]
        else:
            found[name] = torch.cat([p[name].chunk(degrees.dp, dim)[coordinate] for p in pieces], dim)
    return found


def _whole(value: Any) -> torch.Tensor:
    """The whole flat tensor of a sharded value. Collective."""
    if isinstance(value, (DTensor, FlatShards)):
        return value.full_tensor().detach()
    out: torch.Tensor = value.detach()
    return out


def parallel_steps(
    program: Program, plan: Plan, source: Callable[[str], torch.Tensor], data: list[dict[str, torch.Tensor]]
) -> Steps:
    """The same steps under a plan on the ranks of the initialised world. Every rank gets whole tensors."""
    model = ParallelModel(program, plan, source, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    coordinate = model.rank_mesh.dims["dp"].coordinate
    found = Steps()
    for step, batch in enumerate(data):
        own = this_ranks_part(program, batch, plan.degrees, coordinate)
        if step == 0:
            micro = split_micro_batches(program, own, plan.degrees.num_micro_batches)[-1]
            out = model.evaluate(micro)
            found.outputs = {k: _whole(v) for k, v in out.items() if k != "loss"}
        found.losses.append(model.forward_backward(own))
        if step == 0:
            found.gradients = model.whole_gradients()
        found.norms.append(model.clip_grad_norm_(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    state = {n: _whole(v) for n, v in model.state_dict().items()}
    found.weights = {n: state[n] for n, _ in by_model_parameter(program) if n in state}
    found.buffers = {n: v for n, v in state.items() if n in program.updates}
    return found


def merge_stages(parts: Sequence[Steps]) -> Steps:
    """The results of all ranks of a pipeline, together. Raises `VerificationError` if two ranks differ."""
    found = parts[0]
    for part in parts[1:]:
        for kind in ("gradients", "outputs", "weights", "buffers"):
            own, other = getattr(found, kind), getattr(part, kind)
            for name, value in other.items():
                if not torch.equal(own.setdefault(name, value), value):
                    raise VerificationError(f"pipeline ranks hold different {kind} of {name!r}")
        for kind in ("losses", "norms"):
            if not all(torch.equal(a, b) for a, b in zip(getattr(found, kind), getattr(part, kind), strict=True)):
                raise VerificationError(f"pipeline ranks have different {kind}")
    return found


def compare_steps(
    reference: Steps, found: Steps, tolerance: float, steps: int
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """Quantities by the error measure, and notes on the weights that were compared by reach."""
    scale = rms(reference.gradients.values())
    losses = {
        f"step {i}": error(b, a, 0.0) for i, (a, b) in enumerate(zip(reference.losses, found.losses, strict=True))
    }
    norms = {f"step {i}": error(b, a, 0.0) for i, (a, b) in enumerate(zip(reference.norms, found.norms, strict=True))}
    missing = torch.full((), float("nan"))
    outputs = {k: error(found.outputs.get(k, missing), v, 0.0) for k, v in reference.outputs.items()}
    gradients = {k: error(found.gradients.get(k, missing), v, scale) for k, v in reference.gradients.items()}
    weights, by_reach = {}, 0
    for name, value in reference.weights.items():
        grad = reference.gradients.get(name)
        reach = 2 * LEARNING_RATE * steps
        weights[name], count = weight_error(found.weights.get(name, missing), value, grad, scale, reach)
        by_reach += count
    notes = (f"{by_reach} weights whose gradient is zero up to rounding were compared by lr·steps",) if by_reach else ()
    buffers = {n: error(found.buffers[n], v, 0.0) for n, v in reference.buffers.items() if n in found.buffers}
    quantities = [
        worst("loss", losses, tolerance),
        worst("outputs", outputs, tolerance),
        worst("gradients", gradients, tolerance),
        worst("clip norm", norms, tolerance),
        worst("parameters after AdamW", weights, tolerance),
    ]
    if buffers:
        quantities.append(worst("buffers changed in forward", buffers, tolerance))
    return tuple(quantities), notes


def check_dtype(dtype: str) -> torch.dtype:
    """The dtype of a verification. Raises `InputError` naming the choices."""
    if dtype not in TOLERANCES:
        raise InputError(f"dtype {dtype!r}: verification knows {sorted(TOLERANCES)}")
    found: torch.dtype = getattr(torch, dtype)
    return found


def in_dtype(program: Program, dtype: str) -> Program:
    """The program to verify: promoted for float64, as captured otherwise; dropout is off."""
    quiet, _ = without_dropout(program)
    return promoted(quiet) if dtype == "float64" else quiet
