"""The checks of a model under degrees: with the labels that autopar chooses, and with random ones."""

from collections.abc import Iterable

from torch import nn

from autopar.capture.export.export import Inputs, LossFunction
from autopar.errors import InputError, VerificationError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import Mesh
from autopar.planning.fixed import choose_labels
from autopar.testing.equivalence import Equivalence, SingleDeviceRun, compare_runs, run_labels, run_model
from autopar.testing.random_labels import random_labels

_CLUSTER = "8xh100"  # its link speeds decide between correct labels
_WHAT_TO_DO = "prove the rules of your own operators with autopar.prove_rule; if they hold, please report this"


def check_equivalence(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    tp: int = 1,
    dp: int = 1,
    sequence_parallel: bool | None = None,
    loss_fn: LossFunction | None = None,
    specialise: bool = False,
) -> Equivalence:
    """Check that a model split over ranks computes the loss, outputs and gradients of one device.

    All ranks run in this process, in float64. Both sides draw the same random numbers. Pipeline stages and ZeRO are
    not run; use ``autopar verify`` for them.

    Args:
        model: The model with its weights on CPU or CUDA, small enough to run `tp` × `dp` times.
        example_inputs: The inputs of one micro-batch of all data-parallel ranks: a dict of tensors by name, or a tuple.
        tp: Ranks that split the tensors.
        dp: Ranks that split the batch.
        sequence_parallel: Whether activations are split along the sequence between tensor-parallel products. `None`
            lets the labeller decide.
        loss_fn: A function of (output, target), if the model returns no loss. The target is the last element of the
            tuple, or the key ``target`` of the dict.
        specialise: Whether branches on inputs are captured as the example inputs take them.

    Returns:
        The relative error of every compared tensor.

    Raises:
        VerificationError: An error is above 1e-9. The message names the worst tensor.
        InputError: The model is on meta.
        CaptureError: The model cannot be captured.
        PlanError: A degree does not divide the model.

    Example:
        >>> import torch
        >>> from autopar.testing import check_equivalence
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
        >>> inputs = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
        >>> report = check_equivalence(model, inputs, tp=2, dp=2, loss_fn=torch.nn.functional.cross_entropy)
        >>> report.worst_error < 1e-9
        True
    """
    _check_degrees(tp=tp, dp=dp)
    run = run_model(model, example_inputs, loss_fn, specialise=specialise)
    asked = Degrees(tp=tp, dp_shard=dp, sequence_parallel=sequence_parallel)
    degrees, _, found = choose_labels(run.program, ClusterSpec.preset(_CLUSTER), asked)
    outcome = run_labels(run, found.blocks, degrees.mesh, regather=True)
    return _passed(compare_runs(run, outcome, degrees.mesh), "")


def check_random_labels(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    tp: int = 1,
    dp: int = 1,
    seeds: Iterable[int] = range(4),
    loss_fn: LossFunction | None = None,
    specialise: bool = False,
) -> tuple[Equivalence, ...]:
    """Run a model with randomly drawn legal labels on every operator, and compare with one device.

    The labeller chooses few labels of a rule. Random labels use the others too, so they find wrong rules and wrong
    conversions sooner.

    Args:
        model: The model with its weights on CPU or CUDA, small enough to run `tp` × `dp` times for each seed.
        example_inputs: The inputs of one micro-batch of all data-parallel ranks: a dict of tensors by name, or a tuple.
        tp: Ranks on the first mesh dimension.
        dp: Ranks on the second mesh dimension. Here both may split any axis.
        seeds: The seeds of the drawn labels.
        loss_fn: A function of (output, target), if the model returns no loss.
        specialise: Whether branches on inputs are captured as the example inputs take them.

    Returns:
        The relative errors, one entry for each seed.

    Raises:
        VerificationError: An error is above 1e-9. The message names the seed and the worst tensor.
        InputError: The model is on meta.
        CaptureError: The model cannot be captured.

    Example:
        >>> import torch
        >>> from autopar.testing import check_random_labels
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
        >>> inputs = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
        >>> len(check_random_labels(model, inputs, tp=2, seeds=[0, 1], loss_fn=torch.nn.functional.cross_entropy))
        2
    """
    _check_degrees(tp=tp, dp=dp)
    run = run_model(model, example_inputs, loss_fn, specialise=specialise)
    # an axis belongs to one mesh dimension, so a dimension of one rank would leave axes whole
    mesh = Mesh.of(**{name: degree for name, degree in (("dp", dp), ("tp", tp)) if degree > 1})
    return tuple(_passed(_random_run(run, mesh, seed), f"with random labels of seed {seed}, ") for seed in seeds)


def _check_degrees(**degrees: int) -> None:
    for name, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {degree!r}")


def _random_run(run: SingleDeviceRun, mesh: Mesh, seed: int) -> Equivalence:
    labels = random_labels(run.program, run.analysis(mesh), mesh, seed)
    return compare_runs(run, run_labels(run, labels, mesh), mesh)


def _passed(report: Equivalence, where: str) -> Equivalence:
    if not report.passed:
        raise VerificationError(f"{where}the split model differs from one device: {report}; {_WHAT_TO_DO}")
    return report
