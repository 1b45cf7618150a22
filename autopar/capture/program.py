"""`capture_program`: from a module and example inputs to a folded, analysed `Program`."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from autopar.capture.axes import axes_of, with_note_on_axes
from autopar.capture.batch_powers import mark_batch_powers, mark_without_twin
from autopar.capture.export.data_reads import refuse_changing
from autopar.capture.export.export import DECISION, capture_flat
from autopar.capture.flat_graph import Flat, literal_of
from autopar.capture.forms import Sizes
from autopar.capture.layers import blocks as folding
from autopar.capture.layers.repeated_layers import Stack, with_all_layers
from autopar.capture.layers.watched_layers import watched_stacks, without_layers
from autopar.capture.nodes import closure, operator_name, output_nodes
from autopar.capture.passes.batch_sums import batch_sums
from autopar.capture.passes.constants import (
    attention_mask,
    constant_nodes,
    make_causal,
    merge_equal,
    recognise_causal,
)
from autopar.capture.passes.loss_terms import average_terms, numbers_as_terms
from autopar.capture.passes.normalize import normalise, remove_dead
from autopar.capture.passes.packings import split_packings
from autopar.capture.passes.scaled_products import scale_products
from autopar.capture.request import Inputs, LossFunction, Request, has_sequence, shape_at
from autopar.capture.state import buffers_of, parameters_of
from autopar.capture.targets import agreed, judged
from autopar.errors import CaptureError
from autopar.ir.program import (
    Block,
    CallSite,
    Constants,
    InputInfo,
    Program,
    Role,
    is_between,
)

_ROLES: Mapping[str, Role] = {"parameter": "parameter", "input": "input", "state": "buffer"}  # of placeholders by kind


def capture_program(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    batch: int | None = None,
    loss_fn: LossFunction | None = None,
    training: bool = True,
    specialise: bool = False,
    precision: str | None = None,
) -> Program:
    """Capture a model's training step as one graph, cut into distinct blocks.

    No parameter is copied, and the model's mode is restored afterwards.

    Args:
        model: The model, on CPU, CUDA or meta.
        example_inputs: The inputs of one micro-batch: a dict of tensors by name, or a tuple. Their shapes are captured.
        batch: The number of sequences to capture instead, in dimension 0 of the inputs.
        loss_fn: A function of (output, target), if the model returns no loss. The target is the last element of the
            tuple, or the key ``target`` of the dict.
        training: Whether to capture in training mode. Otherwise the model is captured in eval mode.
        specialise: Whether branches on inputs are captured as the example inputs take them. The program's `decisions`
            say what a later batch must decide alike.
        precision: "fp32", "bf16", "fp16", "fp8" or "mxfp8": parameters and floating inputs have its dtype of
            computing. By default the model is captured as it is written.

    Returns:
        The captured program. `autopar.estimate` prices it without another capture.

    Raises:
        CaptureError: `torch.export` cannot capture the model. The message names the module and the source line.

    Example:
        >>> program = autopar.capture_program(model, batch, loss_fn=loss_fn)
        >>> [info.name for info in program.inputs]
        ['input', 'target']
    """
    request = Request.of(model, example_inputs, loss_fn, training=training, specialise=specialise)
    return capture_twice(request.computing_in(precision), batch).program


@dataclass(frozen=True, eq=False, kw_only=True)
class Twice:
    """A model captured at the requested sizes and at small sizes. `small` is None if the two graphs differ."""

    program: Program
    small: Program | None
    sizes: Sizes  # without a sequence if the length does not vary
    small_sizes: Sizes
    notes: tuple[str, ...]  # of `program`, which do not depend on sizes
    causal: frozenset[int] = frozenset()  # the places of attention nodes with a causal mask among all nodes
    masks_remain: bool = True  # whether attention has any other mask


def capture_twice(request: Request, batch: int | None = None) -> Twice:
    """The capture of `capture_program`, and the second capture at small sizes."""
    if not request.named_inputs:
        raise CaptureError("example_inputs hold no tensor; pass the tensors of one batch, as a dict or a tuple")
    given, length = request.sizes
    batch = batch or given
    if batch < given and request.reading.specialise and request.reading.answers is None:
        request = request.deciding_as(
            capture_flat(request), may_fail=False, own_sizes=True
        )  # fewer rows may decide otherwise
    big = request.at(batch, length)
    flat, stacks = _captured(big, watched_stacks(big))
    small, others = _small_capture(request, batch, flat, stacks)
    which = Sizes(batch=batch, sequence=None if others.sequence is None else length)
    causal: frozenset[int] = frozenset()
    if small is None:
        mark_without_twin(flat, batch)
    else:
        mark_batch_powers(flat, small, which, others)
        causal = recognise_causal(flat, small)
        for graph in (flat.graph, small.graph):
            remove_dead(graph)
    masks_remain = any(attention_mask(node) is not None for node in flat.graph.nodes)
    program = fold_program(request, flat, which)
    notes, twin = program.notes, None
    if small is None:
        program = replace(program, notes=(*notes, NO_SECOND_CAPTURE))
    else:
        twin = fold_program(request, small, others)
        program = with_note_on_axes(program, [axes_of(block) for block in twin.blocks])
        program, twin = agreed(program, twin)
    return Twice(
        program=program,
        small=twin,
        sizes=which,
        small_sizes=others,
        causal=causal,
        masks_remain=masks_remain,
        notes=notes,
    )


def with_same_sequence(twice: Twice, request: Request) -> Twice:
    """The first capture with a new second one, at the small batch and the first capture's sequence length."""
    others = Sizes(batch=twice.small_sizes.batch, sequence=twice.sizes.sequence)
    small_request = request.at(others.batch, others.sequence).deciding_as(twice.program)
    flat, _ = _captured(small_request, watched_stacks(small_request))
    make_causal(flat.graph, twice.causal)  # the small masks have shown which are causal
    remove_dead(flat.graph)
    program, small = agreed(twice.program, fold_program(request, flat, others))
    return replace(twice, program=program, small=small, small_sizes=others)


def _inputs_at(request: Request, sizes: Sizes) -> tuple[InputInfo, ...]:
    """The inputs of a capture at other sizes."""
    given = request.sizes
    return tuple(
        InputInfo(
            name=name,
            shape=shape_at(t, given, sizes.batch, sizes.sequence or given[1]),
            dtype=t.dtype,
            batch_dim=0 if t.dim() and given[0] == t.shape[0] else None,
            sequence_dim=1 if sizes.sequence is not None and has_sequence(t, given) else None,
        )
        for name, t in request.named_inputs.items()
    )


NO_SECOND_CAPTURE = "a second capture at other sizes gave another graph, so the axes are not confirmed"


def _small_sizes(request: Request, batch: int) -> tuple[int, int | None]:
    """The batch and sequence length of the second capture. No multiple of theirs is one of a dimension of an input."""
    taken = {size for t in request.named_inputs.values() for size in t.shape} | {batch - 1, batch, batch + 1}
    small = next(n for n in (3, 5, 7, 2, *range(4, 100)) if n not in taken)
    _, length = request.sizes
    if length is None:
        return small, None
    free = (n for n in range(6, 100) if n not in taken and n != small)
    return small, next(n for n in free if n * batch != length * small and abs(length - n) != abs(batch - small))


def _captured(request: Request, stacks: tuple[Stack, ...]) -> tuple[Flat, tuple[Stack, ...]]:
    """A capture of the whole model, and the `stacks` if only some of their layers were exported for it."""
    model = request.model
    flat = None
    with contextlib.suppress(CaptureError), without_layers(model, stacks):
        flat = with_all_layers(_normalised(model, capture_flat(request)), stacks) if stacks else None
    whole = flat or _normalised(model, capture_flat(request))
    split_packings(whole, frozenset(n for n, p in parameters_of(model, {}).items() if p.aliases))
    return whole, stacks if flat else ()


def _normalised(model: nn.Module, flat: Flat) -> Flat:
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    names = frozenset(n for n, name in flat.of_kind("parameter").items() if name in trainable)
    updates = normalise(flat.graph, flat.root, names, flat.of_kind("buffer"), len(flat.updates))
    changed = replace(flat, updates=(*flat.updates, *updates))
    refuse_changing(changed.decisions, changed.updates)
    return changed


def _small_capture(request: Request, batch: int, flat: Flat, stacks: tuple[Stack, ...]) -> tuple[Flat | None, Sizes]:
    """The second capture, and its sizes. Half of the sequence length is tried too, for scans in chunks."""
    small, shorter = _small_sizes(request, batch)
    _, length = request.sizes
    request = request.deciding_as(flat)
    for sequence in dict.fromkeys((shorter, (length or 0) // 2 or None, length)):
        try:
            other, _ = _captured(request.at(small, sequence), stacks)
        except CaptureError:
            continue
        same_graph = [n.target for n in other.graph.nodes] == [n.target for n in flat.graph.nodes]
        if same_graph and other.decisions == flat.decisions:
            return other, Sizes(batch=small, sequence=sequence if sequence != length else None)
    return None, Sizes(batch=small)


def fold_program(request: Request, flat: Flat, sizes: Sizes) -> Program:
    """The program of a normalised graph: its constants, denominator, blocks and axes."""
    inputs = _inputs_at(request, sizes)
    kinds = {n: "state" if name in flat.updates else kind for n, (kind, name) in flat.placeholders.items()}
    (loss, *_) = (node for node, name in zip(output_nodes(flat.graph), flat.outputs, strict=False) if name == "loss")
    numbers_as_terms(loss)
    merge_equal(flat.graph, constant_nodes(flat.graph, kinds))
    constants = constant_nodes(flat.graph, kinds)
    is_constant = set(constants)
    described = {info.name: info for info in inputs}
    of_kind = {kind: [n for n in flat.graph.nodes if kinds.get(n.name) == kind] for kind in ("input", "parameter")}
    given = {n: described[name] for n in of_kind["input"] if (name := flat.placeholders[n.name][1]) in described}
    sums = batch_sums(flat.graph, loss, given, constants, of_kind["parameter"])
    average_terms(loss, sums)
    names: dict[fx.Node, str] = {n: flat.placeholders[n.name][1] for n in flat.graph.nodes if n.name in kinds}
    role_of: dict[fx.Node, Role] = {}
    for node in flat.graph.nodes:
        role_of[node] = "constant" if node in is_constant else _ROLES.get(kinds.get(node.name, ""), "value")
    every = output_nodes(flat.graph)
    results = dict(zip(flat.outputs, every[: len(flat.outputs)], strict=True))
    updates = dict(zip(flat.updates, every[len(flat.outputs) :], strict=True))
    main = [n for n in flat.graph.nodes if n.op == "call_function" and n not in is_constant]
    totals = {total for level in sums.levels for total in level}
    needed_elsewhere = set(main).intersection(closure(every, without=totals))
    kept_main = [n for n in main if n in needed_elsewhere]
    segments = folding.cut_into_segments(kept_main, of_kind["parameter"] if request.staged else None)
    in_main = set(main)
    kept = {*updates.values(), *(results[name] for name in results if name.startswith(DECISION))}
    leaves = [n for n in constants if n in kept or not in_main.isdisjoint(n.users)]
    for i, node in enumerate(leaves):
        names[node] = f"constant_{i}"
    distinct, calls = _fold_with_denominators(segments, role_of, names, set(every), sums.levels)
    if request.products is not None:
        distinct = _with_scaled_products(distinct, calls, request.products)
    constant_graph = constants_graph(flat, leaves, [names[n] for n in leaves])
    parameters = parameters_of(request.model, flat.parts)
    used = {a for c in calls for a in c.arguments if isinstance(a, str)}
    program = Program(
        blocks=distinct,
        calls=calls,
        parameters={n: p for n, p in parameters.items() if n in used},
        unused=(unused := {n: p for n, p in parameters.items() if n not in used}),
        notes=(f"parameters that the loss does not use get no gradient: {', '.join(unused)}",)[: len(unused)]
        + flat.notes,
        reads=flat.reads,
        inputs=inputs,
        constants=constant_graph,
        loss=names[loss],
        denominators=tuple(names[total] for level in sums.levels for total in level),
        outputs={
            name: names[node]
            for name, node in results.items()
            if name != "loss" and node in names and not name.startswith(DECISION)
        },
        decisions=tuple(
            replace(decision, name=names[results[f"{DECISION}{k}"]]) for k, decision in enumerate(flat.decisions)
        ),
        batch=sizes.batch,
        sequence=sizes.sequence,
        buffers=buffers_of(request.model),
        updates={name: names[node] for name, node in updates.items()},
        fixed=request.fixed_inputs,
    )
    return judged(program)


def _with_scaled_products(distinct: tuple[Block, ...], calls: tuple[CallSite, ...], format: str) -> tuple[Block, ...]:
    """The blocks; the linear layers of repeated ones are scaled products. Another graph has another signature."""
    repeated, blocks = {call.block for call in calls if not is_between(call.path)}, list[Block]()
    for index, block in enumerate(distinct):
        if index in repeated:
            scale_products(block.graph, block.ports, format)
            signature = folding.signature_of(block.graph, block.ports, block.outputs)
            block = replace(block, signature=signature)
        blocks.append(block)
    return tuple(blocks)


def _fold_with_denominators(
    segments: list[folding.Segment],
    role_of: Mapping[fx.Node, Role],
    names: dict[fx.Node, str],
    used_later: set[fx.Node],
    levels: Sequence[Sequence[fx.Node]],
) -> tuple[tuple[Block, ...], tuple[CallSite, ...]]:
    """Fold the segments. A block for each level of totals comes first, in a phase of its own."""
    blocks, calls, lower = list[Block](), list[CallSite](), set[fx.Node]()
    for level, totals in enumerate(levels):
        nodes = [n for n in closure(totals, without=lower) if role_of[n] == "value" and n.op == "call_function"]
        path = f"denominator_{level}" if level else "denominator"
        segment = folding.Segment(path, nodes)
        ((block,), (call,)) = folding.fold([segment], role_of, names, set(totals))
        blocks.append(block)
        calls.append(replace(call, block=level, phase="denominator"))
        lower.update(totals)
    for node in (node for segment in segments for node in segment.nodes):
        node.meta["main"] = True  # other nodes do not count as users of values
    main_blocks, main_calls = folding.fold(segments, role_of, names, used_later)
    return (*blocks, *main_blocks), (*calls, *(replace(c, block=c.block + len(blocks)) for c in main_calls))


def constants_graph(flat: Flat, leaves: list[fx.Node], names: list[str]) -> Constants:
    """A graph that computes the constants of the blocks from buffers."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    buffers: list[str] = []
    for node in closure(leaves):
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = graph.create_node(node.op, node.target, args, kwargs, operator_name(node))
            values[node].meta = dict(node.meta)
            continue
        values[node] = graph.placeholder(f"buffer_{len(buffers)}")
        values[node].meta["info"] = node.meta["info"]
        if (literal := literal_of(flat, node)) is not None:
            values[node].meta["literal"] = literal
        buffers.append(flat.placeholders[node.name][1] if node.op == "placeholder" else str(node.target))
    graph.output(tuple(values[n] for n in leaves))
    return Constants(graph=graph, buffers=tuple(buffers), results=tuple(names))
