"""Pipeline stages: contiguous calls of a program, the values they receive and send, and the calls they run again.

A value that a later stage uses is sent from stage to stage, up to the last stage that uses it. If the plan says so,
every stage that uses it computes it anew from the inputs: masks and position tables cost less than a message.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

from autopar.errors import PlanError
from autopar.ir.degrees import Degrees
from autopar.ir.offload import ACTIVATIONS
from autopar.ir.program import Block, CallSite, Program

if TYPE_CHECKING:
    from torch import fx


How: TypeAlias = Literal["selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: its calls by their index in the program, values by name."""

    index: int
    calls: tuple[int, ...]
    again: Mapping[int, tuple[str, ...]]  # calls of earlier stages that it runs too, with the results that it keeps
    receives: tuple[str, ...]  # in the order of the messages
    sends: tuple[str, ...]
    parameters: tuple[str, ...]  # of its calls


def main_calls(program: Program) -> list[int]:
    """Indices of the calls that a step runs forward and backward."""
    return [index for index, call in enumerate(program.calls) if call.phase == "main"]


def needed_results(program: Program, *, outputs: bool = False) -> list[list[str]]:
    """Outputs per block that are needed. Training drops the model's `outputs`, and evaluation new values of buffers."""
    used = {program.loss, *program.invariant}
    if outputs:
        used = (used - set(program.updates.values())) | set(program.outputs.values())
    used |= {a for call in program.calls for a in call.arguments if isinstance(a, str)}
    return [
        [o for k, o in enumerate(block.outputs) if any(call.results[k] in used for call in program.uses_of_block(i))]
        for i, block in enumerate(program.blocks)
    ]


def kept_results(program: Program, call: CallSite, kept: Collection[str]) -> list[str]:
    """The results of a call whose outputs in its block are among `kept`."""
    pairs = zip(program.blocks[call.block].outputs, call.results, strict=True)
    return [result for output, result in pairs if output in kept]


def num_averaged(program: Program, degrees: Degrees) -> int:
    """The number of micro-batches over which a step's loss is averaged, 1 for a sum."""
    return degrees.num_micro_batches if program.loss_reduction == "mean" or degrees.per_micro_batch else 1


def needs_denominator(program: Program, stages: Iterable[Stage]) -> bool:
    """Whether a call of some stages takes one of the loss's denominators."""
    calls = (program.calls[i] for stage in stages for i in stage.calls)
    return any(name in program.denominators for call in calls for name in call.arguments)


def recomputed_calls(program: Program, degrees: Degrees, stages: Sequence[Stage]) -> Mapping[int, How]:
    """How the backward pass repeats calls: of each stage the first repeated blocks fully, the next ones selectively."""
    if degrees.recompute == "none":
        return {}
    repeated = {i for i, call in enumerate(program.calls) if len(program.uses_of_block(call.block)) > 1}
    kinds: dict[int, How] = {}
    for stage in stages:
        mine = [i for i in stage.calls if i in repeated or not repeated]
        full = mine[: degrees.full_blocks_of(stage.index)]
        kinds |= dict.fromkeys(full, "full")
        kinds |= dict.fromkeys(mine[len(full) :][: degrees.selective_blocks_of(stage.index)], "selective")
    return kinds


def offloaded_calls(program: Program, degrees: Degrees, stages: Sequence[Stage]) -> frozenset[int]:
    """The calls whose saved tensors are on the host: repeated blocks, or all blocks if none repeats."""
    if not degrees.offloads(ACTIVATIONS):
        return frozenset()
    every = [i for stage in stages for i in stage.calls]
    repeated = [i for i in every if len(program.uses_of_block(program.calls[i].block)) > 1]
    return frozenset(repeated or every)


def values_that_stay(program: Program, calls: Collection[int]) -> frozenset[str]:
    """The values that stay on the device although `calls` save them, as parameters, and results for several calls."""
    results = {result for call in program.calls for result in call.results}
    takers: dict[str, int] = {}
    for call in program.calls:
        for name in {a for a in call.arguments if isinstance(a, str)}:
            takers[name] = takers.get(name, 0) + 1
    taken = {a for i in calls for a in program.calls[i].arguments if isinstance(a, str)}
    return frozenset(name for name in taken if name not in results or takers[name] > 1)


def stages_by_parameter(program: Program, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """The stages that take each parameter. A parameter that no stage takes belongs to the first."""
    holders = {name: tuple(s.index for s in stages if name in s.parameters) for name in program.parameters}
    return {name: held or (0,) for name, held in holders.items()} | dict.fromkeys(program.unused, (0,))


def updated_by_inputs(program: Program) -> frozenset[str]:
    """The buffers whose new values depend on inputs."""
    reached = {info.name for info in program.inputs}
    for call in program.calls:
        block = program.blocks[call.block]
        seen = {port for port, a in zip(block.ports, call.arguments, strict=True) if a in reached}
        for node in block.graph.nodes:
            if node.op == "call_function" and any(n.name in seen for n in node.all_input_nodes):
                seen.add(node.name)
        reached |= {r for output, r in zip(block.outputs, call.results, strict=True) if output in seen}
    return frozenset(buffer for buffer, update in program.updates.items() if update in reached)


def owners(program: Program, calls: Sequence[int]) -> dict[str, int | None]:
    """The call, by its place among `calls`, that alone uses a parameter there; None where several do (tied weights)."""
    places: dict[str, int | None] = {}
    for at, index in enumerate(calls):
        for name in program.calls[index].arguments:
            if isinstance(name, str) and name in program.parameters:
                places[name] = at if places.get(name, at) == at else None
    return places


def stages_of(program: Program, cuts: Sequence[int], recomputed: Sequence[str] = ()) -> tuple[Stage, ...]:
    """The stages of a program, cut before the given main calls. Each stage computes `recomputed` values for itself."""
    calls = main_calls(program)
    bounds = (0, *cuts, len(calls))
    if any(stop <= start for start, stop in pairwise(bounds)):
        raise PlanError(
            f"cuts {list(cuts)} of {len(calls)} calls leave an empty stage; they must rise, from 1 to {len(calls) - 1}"
        )
    parts = [calls[start:stop] for start, stop in pairwise(bounds)]
    by = {result: s for s, indices in enumerate(parts) for i in indices for result in program.calls[i].results}
    _check_recomputed(program, recomputed, by)
    reruns = [_again(program, s, parts, by, recomputed) for s in range(len(parts))]
    last_use = _last_uses(program, parts, by, frozenset(recomputed))
    sent: list[list[str]] = [[] for _ in parts]
    for value, source in by.items():
        for s in range(source, last_use.get(value, -1)):
            sent[s].append(value)
    parameters = [
        tuple(dict.fromkeys(a for i in indices for a in program.calls[i].arguments if a in program.parameters))
        for indices in parts
    ]
    return tuple(
        Stage(
            index=s,
            calls=tuple(indices),
            again=reruns[s],
            receives=tuple(sent[s - 1]) if s else (),
            sends=tuple(sent[s]),
            parameters=tuple(str(name) for name in parameters[s]),
        )
        for s, indices in enumerate(parts)
    )


def _last_uses(
    program: Program, parts: Sequence[Sequence[int]], by: Mapping[str, int], recomputed: frozenset[str]
) -> dict[str, int]:
    """The last stage that must be sent a value. The loss ends in the last stage, where the backward pass starts."""
    last = {program.loss: len(parts) - 1} if program.loss in by else {}
    for s, indices in enumerate(parts):
        for i in indices:
            for a in program.calls[i].arguments:
                if isinstance(a, str) and a in by and a not in recomputed:
                    last[a] = max(last.get(a, s), s)
    return last


def _again(
    program: Program,
    stage: int,
    parts: Sequence[Sequence[int]],
    by: Mapping[str, int],
    recomputed: Sequence[str],
) -> dict[int, tuple[str, ...]]:
    """Calls of earlier stages that make recomputed values which this stage uses, in order."""
    wanted = {a for i in parts[stage] for a in program.calls[i].arguments if a in recomputed and by[str(a)] < stage}
    kept_of: dict[int, tuple[str, ...]] = {}
    if not wanted:
        return kept_of
    for i in reversed([i for indices in parts[:stage] for i in indices]):
        call = program.calls[i]
        kept = tuple(r for r in call.results if r in wanted)
        if kept:
            kept_of[i] = kept
            wanted |= {a for a in sources_of(program, call, kept) if a in by}
    return dict(reversed(kept_of.items()))


def sources_of(program: Program, call: CallSite, results: Sequence[str]) -> tuple[str, ...]:
    """The named arguments of a call that some of its results are computed from."""
    block = program.blocks[call.block]
    outputs = [o for o, r in zip(block.outputs, call.results, strict=True) if r in results]
    needed = {node.name for node in ancestors(block, outputs)}
    pairs = zip(block.ports, call.arguments, strict=True)
    return tuple(a for port, a in pairs if port in needed and isinstance(a, str))


def ancestors(block: Block, outputs: Sequence[str], *, differentiable: bool = False) -> list["fx.Node"]:
    """The nodes of a block that some outputs are computed from, in order. They may be `differentiable` ones alone."""
    needed: set[fx.Node] = set()
    for node in reversed(list(block.graph.nodes)):
        flows = not differentiable or getattr(node.meta.get("info"), "differentiable", False)
        if flows and (node.name in outputs or not needed.isdisjoint(node.users)):
            needed.add(node)
    return [node for node in block.graph.nodes if node in needed]


def _check_recomputed(program: Program, recomputed: Sequence[str], by: Mapping[str, int]) -> None:
    free = {info.name for info in program.inputs} | set(program.constants.results) | set(recomputed)
    makers = {result: call for call in program.calls for result in call.results}
    for value in recomputed:
        if value not in by:
            raise PlanError(f"recomputed value {value!r} is not made by any call; plan again for this model")
        missing = [a for a in sources_of(program, makers[value], (value,)) if a not in free]
        if missing:
            raise PlanError(
                f"value {value!r} cannot be computed anew by every stage: it takes {missing[0]!r}, which is neither an "
                "input nor a constant; leave it out of `recomputed`, so that it is sent"
            )


def stage_of_buffers(program: Program, stages: Sequence[Stage]) -> dict[str, int]:
    """The stage that gives each buffer that forward changes its new value."""
    by = {result: stage.index for stage in stages for i in stage.calls for result in program.calls[i].results}
    return {name: by[update] for name, update in program.updates.items() if update in by}


def check_buffers(program: Program, stages: Sequence[Stage]) -> None:
    """Check that a buffer that forward changes is read where it is changed: no other stage has its new value."""
    written = stage_of_buffers(program, stages)
    for stage in stages:
        for i in stage.calls:
            for name in program.calls[i].arguments:
                if written.get(str(name), stage.index) != stage.index:
                    raise PlanError(
                        f"stage {stage.index} reads buffer {name!r}, which stage {written[str(name)]} changes; cut so "
                        "that one stage has both, or use fewer stages"
                    )


def separates(program: Program, stage: Stage, recomputed: Collection[int]) -> bool:
    """Whether a stage's backward pass runs in two parts: for its received values and for its weights.

    `recomputed` are the recomputed calls. torch would run them in the first part, and once more for every weight in the
    second.

    torch finds the weights' part where each weight meets a received value, and runs every such part once. A weight that
    is used twice, or whose product is used before it meets a received value, is not found or is run twice. A value
    without a gradient, as behind frozen stages, is never met.
    """
    if not stage.index:
        return True  # receives nothing: its backward pass is one part anyway
    if not set(stage.calls).isdisjoint(recomputed):
        return False
    seen: set[str] = set()
    reached = set(stage.receives)
    for i in stage.calls:
        call = program.calls[i]
        block = program.blocks[call.block]
        arguments = dict(zip(block.ports, call.arguments, strict=True))
        infos = {port: program.parameters.get(str(a)) for port, a in arguments.items()}
        trained = {port for port, info in infos.items() if info is not None and info.requires_grad}
        users = {node.name: len(node.users) for node in block.graph.nodes if node.op == "placeholder"}
        names = [str(arguments[port]) for port in trained]
        if any(users[port] > 1 for port in trained) or not seen.isdisjoint(names) or len(set(names)) < len(names):
            return False
        seen.update(names)
        for output, result in zip(block.outputs, call.results, strict=True):
            needed = {node.name for node in ancestors(block, [output], differentiable=True)}
            if any(arguments.get(port) in reached for port in needed):
                reached.add(result)
            elif not trained.isdisjoint(needed):
                return False
    return True
