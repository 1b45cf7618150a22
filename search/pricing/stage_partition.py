"""Cuts of a program into pipeline stages: the exact partition of its calls that makes the slowest stage fastest.

A weight is the seconds of one call on one rank for one micro-batch, forward and backward, under the labels. Dynamic
programming splits n contiguous calls into p stages so that the largest sum is smallest, in O(p·n²) (Bellman's recursion
for linear partitioning). Of equal partitions the smallest sum of squares wins, so that the other stages are even too.
Every stage holds a trained parameter. Without one its backward pass would have nothing to do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.capture.analysis import Analysis
from autopar.capture.passes.constants import is_random
from autopar.cost_model.work.coverage import works_of
from autopar.cost_model.work.operator_cost import is_view, local_flops
from autopar.errors import PlanError, did_you_mean
from autopar.ir.cluster import ClusterSpec, memory_bytes_per_s, peak_flops_per_s
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.stages import ancestors, main_calls, sources_of, stages_of


def choose_cuts(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, cluster: ClusterSpec
) -> tuple[int, ...]:
    """The main calls before which the program is cut.

    Raises `PlanError` if there are more stages than calls that can make one.
    """
    if degrees.cut_at is not None:
        return cuts_at(program, degrees.cut_at)
    seconds = block_seconds(program, analysis, labels, degrees, cluster)
    calls = [program.calls[i] for i in main_calls(program)]
    trained = [
        any(a in program.parameters and program.parameters[str(a)].requires_grad for a in call.arguments)
        for call in calls
    ]
    if sum(trained) < degrees.num_stages:
        raise PlanError(
            f"{degrees.num_stages} pipeline stages (pp {degrees.pp} × virtual_stages {degrees.virtual_stages}) need as "
            f"many blocks with trained parameters, the model has {sum(trained)}; use fewer stages"
        )
    return partition([seconds[call.block] for call in calls], degrees.num_stages, can_be_alone=trained)


def block_seconds(
    program: Program, analysis: Analysis, labels: Sequence[BlockLabels], degrees: Degrees, cluster: ClusterSpec
) -> dict[int, float]:
    """Seconds of one rank for one call of each distinct block, forward and backward, at the device's peak."""
    seconds = dict.fromkeys(range(len(program.blocks)), 0.0)
    for work in works_of(program, analysis, labels, degrees, cluster):
        seconds[work.block] += work.seconds / (work.num_calls * degrees.num_micro_batches)
    return seconds


def partition(weights: Sequence[float], parts: int, *, can_be_alone: Sequence[bool] | None = None) -> tuple[int, ...]:
    """Cuts of a sequence into contiguous parts with the smallest largest sum.

    Every part has an element that can be alone.

    >>> partition([3, 1, 1, 1, 1, 1], 2)
    (2,)
    """
    return _partition(tuple(weights), parts, tuple(can_be_alone or [True] * len(weights)))


# seconds beside the weights, for the parts at a position from some elements up to others
More = Callable[[int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]


def partition_with(
    weights: Sequence[float], parts: int, more: More, longest: int, *, can_be_alone: Sequence[bool]
) -> tuple[int, ...] | None:
    """`partition` for parts that take `more` seconds in their place; infinite seconds are illegal.

    Parts have at most `longest` elements. None if there is no such partition.
    """
    anchors = np.concatenate([[0], np.cumsum(can_be_alone)])
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    starts = _starts(sums, anchors, parts, longest, more)
    return None if starts is None else _cuts_of(starts, len(weights))


@lru_cache(maxsize=256)  # candidates that differ only in data parallelism have the same cuts
def _partition(weights: tuple[float, ...], parts: int, can_be_alone: tuple[bool, ...]) -> tuple[int, ...]:
    count = len(weights)
    anchors = np.concatenate([[0], np.cumsum(can_be_alone)])
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=np.float64))])
    starts = _starts(sums, anchors, parts, _longest(weights, parts)) or _starts(sums, anchors, parts, count)
    if starts is None:
        raise PlanError(f"{count} calls cannot be cut into {parts} stages")
    return _cuts_of(starts, count)


def _cuts_of(starts: Sequence[NDArray[np.int64]], count: int) -> tuple[int, ...]:
    cuts, stop = [], count
    for start in reversed(starts):
        stop = int(start[stop])
        cuts.append(stop)
    return tuple(reversed(cuts))


def _longest(weights: Sequence[float], parts: int) -> int:
    """The most elements that a part of the best partition can have.

    A part's sum is at most an equal share plus the largest element. Negative elements count as zero, and leave room for
    others.
    """
    above = np.maximum(np.asarray(weights, dtype=np.float64), 0.0)
    sums = np.concatenate([[0.0], np.cumsum(above)])
    room = float(np.sum(above - weights))
    most = (sums[-1] / parts + above.max()) * (1 + 1e-9) + room
    found = np.searchsorted(sums, sums + most, side="right") - 1 - np.arange(len(sums))
    return max(1, min(int(found.max()), len(above)))


def _starts(
    sums: NDArray[np.float64], anchors: NDArray[np.int64], parts: int, longest: int, more: More | None = None
) -> list[NDArray[np.int64]] | None:
    """The position where the last part begins, for every number of parts above 1 and every number of elements.

    Parts have at most `longest` elements. None if there is no such partition. `sums` and `anchors` add up the elements
    before each position.
    """
    stops = np.arange(len(sums))
    begins = stops[:, None] - np.arange(longest, 0, -1)[None, :]  # [i, k]: where the k-th longest part before i begins
    inside = np.maximum(begins, 0)
    own = part = sums[stops][:, None] - sums[inside]
    own[(begins < 0) | (anchors[stops][:, None] <= anchors[inside])] = np.inf
    largest = np.where((stops <= longest) & (anchors > 0), sums, np.inf)
    largest = largest if more is None else largest + more(0, np.zeros_like(stops), stops)
    squares, found, count = largest**2, np.zeros((parts - 1, len(sums)), dtype=np.int64), len(sums) - 1
    worst, even, firsts = np.empty_like(part), np.empty_like(part), stops * longest
    for position in range(1, parts):
        left = parts - 1 - position
        # ends of the part: every later part takes from one to `longest` of the remaining elements
        ends = slice(max(position + 1, count - longest * left), max(count - left, 0) + 1)
        froms, whole, of_part = inside[ends], worst[ends], part[ends]
        if more is not None:
            of_part = own[ends] + more(position, froms, stops[ends, None])
        np.maximum(largest.take(froms, out=whole, mode="clip"), of_part, out=whole)
        best = whole.min(axis=1)
        sum_of = np.add(squares.take(froms, out=even[ends], mode="clip"), of_part**2, out=even[ends])
        sum_of[whole > (best * (1 + 1e-12))[:, None]] = np.inf
        at = sum_of.argmin(axis=1) + firsts[: len(best)]  # in the rows one after the other
        largest.fill(np.inf)
        squares.fill(np.inf)
        found[position - 1, ends] = froms.take(at)
        largest[ends], squares[ends] = best, sum_of.take(at)
    return list(found) if np.isfinite(largest[-1]) else None


def cuts_at(program: Program, paths: Sequence[str]) -> tuple[int, ...]:
    """The cuts before the first call of each module path. Raises `PlanError` naming an unknown path."""
    calls = [program.calls[i] for i in main_calls(program)]
    found = []
    for path in paths:
        at = next((k for k, call in enumerate(calls) if call.path == path or call.path.startswith(f"{path}.")), None)
        if at is None:
            known = sorted({call.path for call in calls})
            raise PlanError(f"cut_at {path!r}: no block of the model has this path; {did_you_mean(path, known)}")
        found.append(at)
    if any(b <= a for a, b in zip((0, *found), found, strict=False)):
        raise PlanError(
            f"cut_at {', '.join(paths)}: these are calls {found} of the model; name them in the model's order, "
            "each one "
            "once, without the first call"
        )
    return tuple(found)


def cuts_like(program: Program, stage_of: Mapping[str, tuple[int, ...]], num_stages: int) -> tuple[int, ...]:
    """Cuts that leave every parameter where it is held: `stage_of` names the stages that hold it.

    They are for a model captured again in eval mode or for another shape. A call without parameters stays with the call
    before it. Raises `PlanError` if the calls do not follow the stages.
    """
    found, stage = [], 0
    for k, index in enumerate(main_calls(program)):
        held = [stage_of[str(a)] for a in program.calls[index].arguments if a in stage_of]
        common = set.intersection(*map(set, held)) if held else {stage}
        later = sorted(s for s in common if s >= stage)
        if not later:
            names = [str(a) for a in program.calls[index].arguments if a in stage_of and stage not in stage_of[str(a)]]
            raise PlanError(
                f"in this mode or shape {program.calls[index].path!r} of pipeline stage {stage} takes {names[0]!r}, "
                f"which stage {stage_of[names[0]][0]} holds; run this mode or shape without a pipeline"
            )
        found += [k] * (later[0] - stage)
        stage = later[0]
    if len(found) != num_stages - 1:
        raise PlanError(
            f"in this mode or shape the model uses {len(found) + 1} of {num_stages} pipeline stages; run it without a "
            "pipeline"
        )
    return tuple(found)


def values_to_recompute(
    program: Program, analysis: Analysis, cuts: Sequence[int], degrees: Degrees, cluster: ClusterSpec
) -> tuple[str, ...]:
    """Values that cross stages and are cheaper to compute from the inputs than to send."""
    free = {info.name for info in program.inputs} | set(program.constants.results)
    makers = {result: call for call in program.calls for result in call.results}
    crossing = dict.fromkeys(value for stage in stages_of(program, cuts) for value in stage.sends)
    stride = degrees.dp * degrees.tp
    link = cluster.link(0, stride) if stride < cluster.num_devices else None
    found: list[str] = []
    for value in crossing:
        call = makers[value]
        block = program.blocks[call.block]
        output = block.outputs[call.results.index(value)]
        nodes = [node for node in ancestors(block, [output]) if node.op == "call_function"]
        is_free = all(a in free or a in found for a in sources_of(program, call, (value,)))
        if value == program.loss or not is_free or any(is_random(node) for node in nodes):
            continue
        seconds = 0.0
        for node in nodes:
            bound, made = analysis.bounds[call.block][node.name], analysis.calls[call.block][node.name]
            seconds += local_flops(bound.rule, {}) / peak_flops_per_s(cluster, made.output.dtype)
            if not is_view(made):
                infos = (*made.operands, made.output)
                touched = sum(float(np.prod(info.shape)) * info.dtype.itemsize for info in infos)
                seconds += touched / memory_bytes_per_s(cluster)
        info = analysis.calls[call.block][output].output if output in analysis.calls[call.block] else None
        size = 0.0 if info is None else float(np.prod(info.shape)) * info.dtype.itemsize
        if info is not None and (link is None or seconds <= size / link.bytes_per_s + link.latency_s):
            found.append(value)
    return tuple(found)
