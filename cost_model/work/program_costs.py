"""The blocks of a captured program in the roles of the time model, as expressions.

All calls before the first repeated block together are "first". All calls behind the last repeated block are "last".
Every other distinct block has its own role with a number: "moe_layer" if it has experts, else "layer". If a model has
no repeated blocks, its longest call takes their place. Labels decide whether activations between blocks are split over
tensor ranks. All variants of a role are therefore the same work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.capture.analysis import Analysis
from autopar.cost_model.work.block_work import VARIANTS, BlockWork, Family, SelectiveWork, evaluate
from autopar.cost_model.work.operator_cost import EXPERT_PRODUCTS
from autopar.cost_model.work.polynomials import Polynomial
from autopar.ir.degrees import Degrees
from autopar.ir.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, OwnPart, optimizer_named
from autopar.ir.plan import BlockLabels
from autopar.ir.precision import MASTER_BYTES
from autopar.ir.program import Program, hidden_parameters, is_between
from autopar.ir.sharding import Mesh
from autopar.ir.stages import main_calls

_ENDS = ("first", "last")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFigures:
    """What an optimizer of `autopar.ir.optimizers` holds of one trained parameter, as the mean over a model."""

    master_bytes: float = 8.0  # of the state beside master weights
    own_bytes: float = 8.0  # of the state beside parameters in the model's own dtype
    gathered_part: float = 0.0  # of the elements, whose gradients are gathered for the update


@dataclass(frozen=True, eq=False, kw_only=True)
class ProgramWorks:
    """A captured and labelled program, ready to be priced at any micro-batch.

    `calls` has the roles of the main calls in their order. A role that covers several calls stands at the first of
    them, and the others have "". A call with a role and a trained parameter `can_be_stage` by itself. `counts` has the
    number of calls of each repeated role. Sizes are captured sizes:
    `sequence` tokens, `hidden` elements of a token between blocks, `element_bytes` per element. With `regather`,
    backward gathers the gathered inputs of products again. The loss runs in `loss_chunks` chunks, if it can.
    """

    family: Family[Polynomial]
    calls: tuple[str, ...]
    can_be_stage: tuple[bool, ...]
    counts: tuple[tuple[str, int], ...]
    mesh: Mesh
    sequence: int
    hidden: int
    element_bytes: int
    dtype: str
    num_parameters: int
    num_frozen: int  # of them
    num_experts: int
    experts_per_token: float
    is_tied: bool
    sequence_parallel: bool
    regather: bool = True
    loss_chunks: int = 1
    optimizers: Mapping[str, "OptimizerFigures"] = field(default_factory=dict)
    optimizer: str = DEFAULT_OPTIMIZER
    has_master_weights: bool = False  # whether a `precision` of the plan keeps parameters in float32

    @property
    def moment_bytes(self) -> float:
        """Bytes of the chosen optimizer's state of one trained parameter, as the mean over the model."""
        return self.moment_bytes_of(self.optimizer)

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of a parameter between steps, and of its gradient."""
        return max(MASTER_BYTES, self.element_bytes) if self.has_master_weights else self.element_bytes

    def moment_bytes_of(self, optimizer: str) -> float:
        """Bytes of an optimizer's state of one trained parameter, as the mean over the model."""
        figures = self.optimizers.get(optimizer_named(optimizer).name, OptimizerFigures())
        return figures.master_bytes if self.has_master_weights else figures.own_bytes

    def with_state_of(self, degrees: Degrees) -> "ProgramWorks":
        """These works with the optimizer and the stored dtype of a plan."""
        return replace(self, optimizer=degrees.optimizer, has_master_weights=degrees.precision is not None)

    @property
    def is_chunked(self) -> bool:
        """Whether the head's product and the loss run in chunks."""
        roles = (self.family.block(role, VARIANTS[0]) for role in self.family.roles)
        return any(op.kind == "again" for work in roles for op in work.products)

    @property
    def has_selected(self) -> bool:
        """Whether operators of repeated blocks are chosen for selective recomputation."""
        return any(self.family.block(role, VARIANTS[0]).selected is not None for role in self.family.roles)

    @property
    def regathers(self) -> bool:
        """Whether backward gathers any value again instead of saving it."""
        roles = (self.family.block(role, VARIANTS[0]) for role in self.family.roles)
        return any(sent.of == "regather" for work in roles for sent in work.sent)


def program_works(
    program: Program,
    analysis: Analysis,
    labels: Sequence[BlockLabels],
    mesh: Mesh,
    *,
    regather: bool = True,
    loss_chunks: int = 1,
) -> ProgramWorks:
    """The work of a program under labels on a mesh of data and tensor dimensions."""
    from autopar.cost_model.work.export import block_works  # not needed if works are cached

    works = block_works(program, analysis, labels, mesh, regather=regather, loss_chunks=loss_chunks)
    return merged_works(program, works, labels, mesh, regather=regather, loss_chunks=loss_chunks)


def merged_works(
    program: Program,
    works: Sequence[BlockWork[Polynomial]],
    labels: Sequence[BlockLabels],
    mesh: Mesh,
    *,
    regather: bool = True,
    loss_chunks: int = 1,
    optimizers: Mapping[str, OptimizerFigures] | None = None,
) -> ProgramWorks:
    """The work of a program. `works` has the work of each of its distinct blocks."""
    roles = _roles(program)
    used: dict[str, list[BlockWork[Polynomial]]] = {"first": [], "last": []}
    for call, role in zip(main_calls(program), roles, strict=True):
        block = program.calls[call].block
        if role in ("first", "last"):
            used[role].append(works[block])
        else:
            used.setdefault(role, [works[block]])
    renamed = {role: _name(role, works, i) for i, (role, works) in enumerate(used.items())}
    merged = {role: _merged(renamed[role], works) for role, works in used.items()}
    if any(work.selected is not None for work in merged.values()):
        merged = {role: work if role in _ENDS else _with_selected(work) for role, work in merged.items()}
    family = Family(
        name="captured",
        source=f"{program.fingerprint[:12]}, labelled on {dict(mesh.as_dict())}",
        blocks=tuple((renamed[role], tuple((v, work) for v in VARIANTS)) for role, work in merged.items()),
    )
    # several calls of an end are priced with the first call
    calls = tuple("" if role in _ENDS and role in roles[:i] else renamed[role] for i, role in enumerate(roles))
    repeated = [renamed[role] for role in used if role not in ("first", "last")]
    hidden, size, dtype = _residual(program, roles)
    experts, per_token = _experts(works, mesh)
    return ProgramWorks(
        family=family,
        calls=calls,
        can_be_stage=tuple(
            bool(role) and is_trained for role, is_trained in zip(calls, _trained(program), strict=True)
        ),
        counts=tuple((role, calls.count(role)) for role in repeated),
        mesh=mesh,
        sequence=program.sequence or 1,
        hidden=hidden,
        element_bytes=size,
        dtype=dtype,
        num_parameters=sum(info.num_elements for info in program.parameters.values()),
        num_frozen=sum(info.num_elements for info in program.parameters.values() if not info.requires_grad),
        num_experts=experts,
        experts_per_token=per_token,
        is_tied=_is_tied(program, roles),
        sequence_parallel=_is_split(program, roles, labels, mesh),
        regather=regather,
        loss_chunks=loss_chunks,
        optimizers=optimizer_figures(program) if optimizers is None else optimizers,
    )


def optimizer_figures(program: Program) -> dict[str, OptimizerFigures]:
    """What each optimizer holds of a trained parameter of a program."""
    hidden, trained = hidden_parameters(program), [i for i in program.parameters.values() if i.requires_grad]
    state_parts = [
        OwnPart(
            shape=info.shape,
            num_elements=info.num_elements,
            element_bytes=info.dtype.itemsize,
            is_hidden=info.name in hidden,
        )
        for info in trained
    ]
    master = [replace(part, element_bytes=MASTER_BYTES) for part in state_parts]
    total = max(1, sum(part.num_elements for part in state_parts))
    return {
        name: OptimizerFigures(
            master_bytes=sum(kind.state_bytes(part) for part in master) / total,
            own_bytes=sum(kind.state_bytes(part) for part in state_parts) / total,
            gathered_part=sum(part.num_elements for part in state_parts if kind.is_whole(part)) / total,
        )
        for name, kind in OPTIMIZERS.items()
    }


def _with_selected(work: BlockWork[Polynomial]) -> BlockWork[Polynomial]:
    """A block beside blocks with selective recomputation. Without chosen operators it saves everything."""
    nothing: SelectiveWork[Polynomial] = SelectiveWork(saved_bytes=work.saved_eager_bytes, operators=())
    return work if work.selected is not None else replace(work, selected=nothing)


def dtype_of(program: Program) -> str:
    """The dtype of the activations between blocks, such as "bfloat16"."""
    return _residual(program, _roles(program))[2]


def _roles(program: Program) -> list[str]:
    """A role per main call. The role of a repeated block is the number of the block."""
    calls = [program.calls[i] for i in main_calls(program)]
    repeated = [i for i, call in enumerate(calls) if not is_between(call.path)]
    if not repeated:
        sizes = [len(program.blocks[call.block].graph.nodes) for call in calls]
        repeated = [sizes.index(max(sizes))]
    return [
        "first" if i < repeated[0] else "last" if i > repeated[-1] else str(call.block) for i, call in enumerate(calls)
    ]


def _trained(program: Program) -> list[bool]:
    """For every main call, whether it has a trained parameter."""
    trained = {name for name, info in program.parameters.items() if info.requires_grad}
    return [not trained.isdisjoint(map(str, program.calls[i].arguments)) for i in main_calls(program)]


def _name(role: str, works: Sequence[BlockWork[Polynomial]], position: int) -> str:
    if role in ("first", "last"):
        return role
    kind = "moe_layer" if works[0].parameters_expert.terms else "layer"
    return f"{kind}:{position}"


def _merged(role: str, works: Sequence[BlockWork[Polynomial]]) -> BlockWork[Polynomial]:
    """Several calls as one."""
    sums: dict[str, Any] = {
        name: sum((getattr(work, name) for work in works), start=Polynomial())
        for name in (
            "saved_eager_bytes",
            "saved_fused_bytes",
            "saved_operand_bytes",
            "parameters_split",
            "parameters_whole",
            "parameters_expert",
        )
    }
    for name in ("frozen_dense", "frozen_expert"):
        parts = [part for work in works if (part := getattr(work, name)) is not None]
        sums[name] = sum(parts, start=Polynomial()) if parts else None
    lists: dict[str, Any] = {
        name: tuple(op for work in works for op in getattr(work, name)) for name in ("products", "eager", "fused")
    }
    lists["sent"] = tuple(s for work in works for s in work.sent if not s.is_once_a_step)
    chosen = works[0].selected if len(works) == 1 and role not in _ENDS else None
    of_inputs = works[0].input_bytes if works else Polynomial()
    return BlockWork(role=role, input_bytes=of_inputs, selected=chosen, **sums, **lists)


def _residual(program: Program, roles: Sequence[str]) -> tuple[int, int, str]:
    """Elements per token of a repeated block's input, the bytes of an element, and its dtype."""
    for call, role in zip(main_calls(program), roles, strict=True):
        block = program.blocks[program.calls[call].block]
        infos = {node.name: node.meta["info"] for node in block.graph.nodes if "info" in node.meta}
        shaped = [infos[port] for port in block.differentiable_ports if block.ports[port] == "value"]
        shaped = [info for info in shaped if info.shape]  # a sum between blocks has no elements per token
        if role not in ("first", "last") and shaped:
            return shaped[0].shape[-1], shaped[0].dtype.itemsize, str(shaped[0].dtype).removeprefix("torch.")
    dtypes = [info.dtype for info in program.parameters.values()]
    return 1, dtypes[0].itemsize if dtypes else 4, str(dtypes[0]).removeprefix("torch.") if dtypes else "float32"


def _experts(works: Sequence[BlockWork[Polynomial]], mesh: Mesh) -> tuple[int, float]:
    """The numbers of experts of a block and of a token: 0 and 1 if there are no experts."""
    ones = dict.fromkeys((*mesh.names, "b", "s", "t", "d"), 1.0)
    grouped = [op for work in works for op in work.products if op.name.startswith(EXPERT_PRODUCTS)]
    if not grouped:
        return 0, 1.0
    product = evaluate(grouped[0], ones)
    return round(product.count), product.m * product.count


def _is_tied(program: Program, roles: Sequence[str]) -> bool:
    """Whether a parameter is used both before and behind the repeated blocks."""
    ends: Mapping[str, set[str]] = {"first": set(), "last": set()}
    for call, role in zip(main_calls(program), roles, strict=True):
        if role in ends:
            ends[role].update(str(a) for a in program.calls[call].arguments if a in program.parameters)
    return bool(ends["first"] & ends["last"])


def _is_split(program: Program, roles: Sequence[str], labels: Sequence[BlockLabels], mesh: Mesh) -> bool:
    """Whether a repeated block's input is split over tensor ranks."""
    tensor = [i for i in mesh.owning("parameters") if mesh.degrees[i] > 1]
    for call, role in zip(main_calls(program), roles, strict=True):
        index = program.calls[call].block
        block = program.blocks[index]
        ports = [port for port in block.differentiable_ports if block.ports[port] == "value"]
        if role not in ("first", "last") and ports:
            return any(labels[index].ports[ports[0]][i].kind == "S" for i in tensor)
    return False
