"""Functions that ranks run in test_modes: training, evaluation in eval mode and at another length, more training."""

import copy
from collections.abc import Mapping
from typing import Any

import integration_models
import torch
from data_ranks import gradient_error, largest, on_any_rank, whole
from torch import nn

from autopar.api import parallelize
from autopar.runtime.model.module import ParallelModel
from autopar.runtime.verify.error_metrics import error

Batch = dict[str, torch.Tensor]


def filled(model: nn.Module) -> nn.Module:
    """The model in float64 with random values for every parameter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def pictures(count: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 6, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 6, (count,), generator=generator)}


def sequences(count: int, length: int, seed: int) -> Batch:
    tokens = torch.randint(0, 50, (count, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def own_part(parallel: ParallelModel, batch: Batch) -> Batch:
    """This data-parallel rank's part of a global batch."""
    dim = parallel.rank_mesh.sample_ranks
    return {name: value.chunk(dim.degree)[dim.coordinate] for name, value in batch.items()}


def step(parallel: ParallelModel, reference: nn.Module, batch: Batch) -> float:
    """Worst error of loss and gradients of one step of both, after which both have moved."""
    loss = reference(**batch)["loss"]
    loss.backward()
    worst = largest(
        (
            error(parallel.forward_backward(own_part(parallel, batch)), loss.detach()),
            gradient_error(parallel, reference),
        )
    )
    for model in (parallel, reference):
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
        model.zero_grad()
    return worst


def evaluation(parallel: ParallelModel, reference: nn.Module, batch: Batch, output: str) -> float:
    """Worst error of loss and of one output in eval mode."""
    parallel.eval()
    reference.eval()
    with torch.no_grad():
        expected = reference(**batch)
    found = parallel.evaluate(own_part(parallel, batch))
    parallel.train()
    reference.train()
    if output not in found and parallel.plan.degrees.pp > 1:  # another stage's
        return error(found["loss"], expected["loss"])
    value: Any = found[output]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return largest((error(found["loss"], expected["loss"]), error(value, expected[output])))


def with_batch_norm(rank: int, world_size: int, wish: Mapping[str, Any]) -> dict[str, float]:
    model = filled(integration_models.Residual())
    example = pictures(8 // wish.get("dp", 1), 0)
    parallel = parallelize(copy.deepcopy(model), f"{world_size}xcpu", example_inputs=example, plan=wish)
    found = {"steps": largest(step(parallel, model, pictures(8, seed)) for seed in range(3))}
    found["evaluation"] = evaluation(parallel, model, pictures(8, 3), "scores")
    found["evaluation of fewer"] = evaluation(parallel, model, pictures(4, 4), "scores")
    found["step after it"] = step(parallel, model, pictures(8, 5))
    state, expected = whole(parallel), model.state_dict()
    assert on_any_rank(state) == expected.keys()
    found["state"] = largest(error(value, expected[name]) for name, value in state.items())
    return found


def other_layouts(rank: int, world_size: int, spec: str, wish: Mapping[str, Any]) -> dict[str, float]:
    model = filled(getattr(integration_models, spec)()[0])
    example = sequences(4, 16, 0)
    parallel = parallelize(copy.deepcopy(model), f"{world_size}xcpu", example_inputs=example, plan=wish)
    return {
        "step": step(parallel, model, sequences(4, 16, 1)),
        "evaluation": evaluation(parallel, model, sequences(4, 16, 2), "logits"),
        "evaluation of another length": evaluation(parallel, model, sequences(4, 12, 3), "logits"),
        "step of another length": step(parallel, model, sequences(4, 12, 4)),
        "step after it": step(parallel, model, sequences(4, 16, 5)),
    }
