"""`autopar.plan`: from a model and a cluster to the best plan and why it is the best.

The model is captured once without memory. Its blocks are labelled for every tensor degree that could be the best. All
degrees are searched (`autopar.search.driver.search`). The best plan gets its labels at its own micro-batch, as it will
run.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture.record.captured import Capture
from autopar.capture.request import Inputs, LossFunction, Request
from autopar.capture.weightless import weightless
from autopar.cost_model.interval import DEFAULT_CHANCE
from autopar.cost_model.machine.engine import DEFAULT, engine_named
from autopar.cost_model.machine.profile import DeviceProfile
from autopar.ir.cluster import ClusterSpec
from autopar.ir.trained import trained_from
from autopar.models.adapters import with_trained
from autopar.planning.captured_search import search_captured
from autopar.planning.fixed import program_for
from autopar.planning.labels import LABELLED, LABELLED_DP
from autopar.planning.measured import is_trace, profile_for
from autopar.planning.options import TOP, TRIALS, PlanOptions
from autopar.planning.precision import in_precision_of, with_bf16_beside
from autopar.search.result.result import SearchResult


def plan(
    model: nn.Module,
    cluster: ClusterSpec | str,
    *,
    example_inputs: Inputs,
    global_batch: int | None = None,
    local_batch: int | None = None,
    objective: str = "time",
    loss_fn: LossFunction | None = None,
    fix: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    top: int = TOP,
    trials: int = TRIALS,
    seed: int = 0,
    timeout_s: float | None = None,
    chance: float = DEFAULT_CHANCE,
    study: str | Path | None = None,
    profile: DeviceProfile | str | Path | None = None,
    measured: str | Path | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    name: str = "",
    on_progress: Callable[[str], None] | None = None,
    specialise: bool = False,
    trains: str = "all",
) -> SearchResult:
    """Search the best plan of a model on a cluster, without any device.

    Args:
        model: A module, on meta or with weights.
        cluster: A `ClusterSpec`, or its name or file: ``"64xh100"``, ``"cluster.yaml"``.
        example_inputs: A dict or tuple of tensors. Their shapes count, but not their batch.
        global_batch: Sequences of one step on all ranks.
        local_batch: Sequences on each data-parallel rank instead. Time, cost and energy are then per sequence.
        objective: "time", "memory", "cost" or "energy". The last two may use fewer devices.
        loss_fn: A function of (output, target), if the model returns no loss.
        fix: The values that a word of `Plan.degrees` must have, one or several: ``{"tp": (4, 8)}``.
        forbid: The values that a word must not have.
        top: The number of other plans to explain.
        trials: The variations of stage cuts that Optuna tries, if a pipeline is among the best plans.
        seed: The seed of Optuna's sampler.
        timeout_s: Seconds until the search ends with the best plan so far and its gap.
        chance: The probability with which a plan must fit, by the interval of its memory.
        study: A journal (``plan.log``) or database (``plan.db``, ``sqlite:///plan.db``) of trials, perhaps shared.
        profile: A device profile or its file; by default the cluster's, else the shipped one.
        measured: A CSV file of measured steps, or a trace, which correct the profile (``docs/estimate.md``).
        precision: Of computing, such as "fp32". By default float32 models on GPUs have bf16 (``docs/precision.md``).
        reduce_dtype: The dtype of gradient sums over ranks.
        name: The model's name in the result; by default its class.
        on_progress: A function that receives a text before each part of the work.
        specialise: Whether branches on inputs are captured as the example inputs take them.
        trains: The parameters to train, such as "lora:r=16" (`autopar.ir.trained`).

    Returns:
        The best plan, the plans next to it, and the proof. `SearchResult.plan` is None if no plan fits.

    Raises:
        InputError: An argument cannot be used.
        PlanError: No plan is legal.
        ClusterError: The cluster cannot be read, or lacks a figure that the objective needs.
        CaptureError: The model cannot be captured.

    >>> import torch, autopar
    >>> batch, loss = (torch.zeros(4, 8), torch.zeros(4, 8)), torch.nn.functional.mse_loss
    >>> result = autopar.plan(torch.nn.Linear(8, 8), "4xcpu", example_inputs=batch, loss_fn=loss, global_batch=8)
    >>> result.is_proven, result.plan.degrees.world_size
    (True, 4)
    """
    spec = ClusterSpec.parse(cluster) if isinstance(cluster, str) else cluster
    options = PlanOptions(
        global_batch=global_batch, local_batch=local_batch, objective=objective, fix=fix or {}, forbid=forbid or {},
        top=top, trials=trials, seed=seed, timeout_s=timeout_s, chance=chance, precision=precision,
        profile=profile_for(profile, measured, spec, precision), reduce_dtype=reduce_dtype,
        study=None if study is None else str(study),
    )  # fmt: skip
    options.check_search(spec.num_devices)
    (report := on_progress or (lambda _: None))("capturing")
    request = Request.of(_training(model, trains), example_inputs, loss_fn, specialise=specialise)
    search = partial(_captured_and_searched, request, spec, measured, name or type(request.model).__name__, report)
    return with_bf16_beside(search(options), options, spec, search)


def _training(model: nn.Module, trains: str) -> nn.Module:
    """The model, or a copy of it that trains other parameters."""
    trained = trained_from(trains)
    return model if trained.kind == "all" else with_trained(copy.deepcopy(weightless(model)), trained)


def _captured_and_searched(
    request: Request,
    cluster: ClusterSpec,
    measured: str | Path | None,
    name: str,
    on_progress: Callable[[str], None],
    options: PlanOptions,
) -> SearchResult:
    captured, used, notes = captured_as_asked(request, cluster, options)
    used = with_trace(used, measured, captured, cluster, on_progress)
    result = search_captured(captured, cluster, used, name=name, on_progress=on_progress)
    return replace(result, notes=(*result.notes, *notes))


def captured_as_asked(
    request: Request, cluster: ClusterSpec, options: PlanOptions
) -> tuple[Capture, PlanOptions, tuple[str, ...]]:
    """A model captured in its precision, the request with this precision, and notes for the user."""
    from autopar.cache.programs import kept_capture

    staged = replace(request, staged=options.is_staged)
    captured, precision, notes = in_precision_of(
        options.precision, request.model, cluster,
        lambda precision: kept_capture(staged.computing_in(precision), LABELLED_DP),
        lambda captured: program_for(captured, LABELLED),
    )  # fmt: skip
    return captured, replace(options, precision=precision), notes


def with_trace(
    options: PlanOptions,
    trace: str | Path | None,
    captured: Capture,
    cluster: ClusterSpec,
    on_progress: Callable[[str], None],
) -> PlanOptions:
    """The request with its profile corrected, if the measured steps are a trace of the captured model."""
    if not is_trace(trace):
        return options
    from autopar.planning.estimate import profile_by_trace

    on_progress("pricing the traced step")
    at = partial(program_for, captured)
    engine = engine_named(DEFAULT)
    profile = profile_by_trace(trace, at, cluster, engine=engine, precision=options.precision, profile=options.profile)
    return replace(options, profile=profile)
