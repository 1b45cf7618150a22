"""The check of a whole model, split over ranks in one process."""

from torch import nn

from autopar.capture.request import Inputs, LossFunction, Request
from autopar.errors import InputError, VerificationError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.planning.fixed import choose_labels
from autopar.testing.equivalence import Equivalence, compare_runs, run_labels, run_model

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
    for name, degree in (("tp", tp), ("dp", dp)):
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {degree!r}")
    run = run_model(Request.of(model, example_inputs, loss_fn, specialise=specialise))
    asked = Degrees(tp=tp, dp_shard=dp, sequence_parallel=sequence_parallel)
    degrees, _, found = choose_labels(run.program, ClusterSpec.preset(_CLUSTER), asked)
    outcome = run_labels(run, found.blocks, degrees.mesh, regather=True)
    report = compare_runs(run, outcome, degrees.mesh)
    if not report.passed:
        raise VerificationError(f"the split model differs from one device: {report}; {_WHAT_TO_DO}")
    return report
