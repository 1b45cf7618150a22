"""Labels of a search: one choice per tensor degree prices the candidates and goes into the best plan.

The plan runs with the labels that it was priced with. They are not chosen anew for its own micro-batch and
data-parallel degree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cache.labels import AGAIN, CHOSEN_FOR_KEPT, KEPT, LabelledWorks, labels_file, labels_text, read_labels
from autopar.capture.analysis import Analysis, analyse, refining
from autopar.cost_model.work.program_costs import ProgramWorks, dtype_of, merged_works, optimizer_figures
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import EXCHANGE, Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import I, Mesh, Type
from autopar.memo import Memo
from autopar.planning.fixed import Labelled, choose_labels
from autopar.planning.machine import own_machinery
from autopar.planning.recomputed import chosen_keys, fastest, recomputable_of, repeated_blocks
from autopar.rules.routed import ORDER
from autopar.search.labels.check import check
from autopar.search.labels.choices import num_experts
from autopar.search.labels.result import Labelling
from autopar.search.space.candidates import Split
from autopar.search.space.dimensions import divisors

if TYPE_CHECKING:
    from autopar.cost_model.work.export import SymbolicWork
    from autopar.cost_model.work.fusion import Flow

DP = 0  # the place of `dp` among the mesh dimensions of labels
LABELLED_DP = 2  # data-parallel ranks of the capture that is searched with: labels hold for any number
LABELLED = Degrees(dp_shard=LABELLED_DP, micro_batch=1)


@dataclass(frozen=True, eq=False)
class SearchLabels:
    """Labels for tensor degrees, each chosen at its first use, and the block costs under them."""

    program: Program
    cluster: ClusterSpec
    sequence_parallel: bool | None = None
    _: KW_ONLY
    regather: bool = True
    loss_chunks: int = 1
    state: Degrees = LABELLED  # with the optimizer and the precision that decide about state
    folder: Path | None = None
    on_progress: Callable[[str], None] = lambda _: None
    memo: Memo = field(default_factory=Memo)
    selective: bool = False  # whether operators are chosen for selective recomputation
    program_of: Callable[[int], Program] | None = None  # at a number of sequences, for labels of expert ranks
    dispatch: str | None = None
    context: str | None = None

    def works(
        self, tp: int, cp: int = 1, ep: int = 1, *, chunks: int | None = None, keeps: bool = False
    ) -> ProgramWorks:
        """The block costs, also with the loss in `chunks`, or if a rank `keeps` gathered values, under the same labels.

        Raises `PlanError` if a degree does not divide the model or the loss does not run in chunks, and
        `InfeasibleError`.
        """
        if keeps and not self.works(tp, cp, ep).regathers:
            return replace(self.works(tp, cp, ep), regather=False)
        works = self.memo(SearchLabels._labelled, self, self._wanted(tp, cp, ep), chunks or self.loss_chunks, keeps)[2]
        if chunks is not None and not works.is_chunked:
            raise PlanError("the loss does not run in chunks")
        return works

    def chosen(self, tp: int, cp: int = 1, ep: int = 1) -> LabelledWorks:
        """The degrees, labels and block costs of a tensor, a context and an expert degree."""
        return self.memo(SearchLabels._labelled, self, self._wanted(tp, cp, ep), self.loss_chunks, False)

    def labelled_as(self, split: Split) -> Split:
        """The split whose labels a split has."""
        return split._replace(ep=self._wanted(*split).ep)

    @cached_property
    def num_experts(self) -> int:
        """The number that an expert degree must divide; 1 if there are no experts."""
        return gcd(*num_experts(self.program, self.memo(analyse, self.program))) or 1

    @cached_property
    def _wide(self) -> Program:
        """The program with enough sequences for any expert degree."""
        assert self.program_of is not None
        return self.program_of(LABELLED_DP * self.num_experts)

    def _program(self, wanted: Degrees) -> Program:
        return self._wide if wanted.ep > 1 else self.program

    @cached_property
    def experts_of_token(self) -> int:
        """The most experts that a token chooses; 0 if no rows of tokens are sorted."""
        every = self.memo(analyse, self.program).calls
        orders = (call for calls in every for call in calls.values() if call.target is ORDER)
        return max((call.operands[0].shape[-1] for call in orders), default=0)

    def _wanted(self, tp: int, cp: int, ep: int) -> Degrees:
        """The degrees that labels are chosen for. Expert degrees that exchange rows share labels."""
        context = self.context if cp > 1 else None
        wanted = replace(LABELLED, sequence_parallel=self.sequence_parallel, tp=tp, cp=cp, context=context)
        if ep == 1:
            return wanted
        dispatch, least = self.dispatch, 2
        if dispatch is None and 0 < self.experts_of_token <= ep:
            dispatch, least = EXCHANGE, self.experts_of_token
        counts = [n for n in divisors(self.num_experts) if n >= max(least, 2)]
        if dispatch == EXCHANGE and ep in counts:
            ep = counts[0]
        return replace(wanted, ep=ep, dp_shard=LABELLED_DP * ep, dispatch=dispatch)

    def _labelled(self, wanted: Degrees, chunks: int, keeps: bool) -> LabelledWorks:
        """The labels of the search, and block costs with the loss in chunks, or if a rank keeps gathered values."""
        if self.folder is None:
            chosen = self._choose(wanted, chunks, keeps)
        else:
            gathers = KEPT if keeps else AGAIN if self.regather else CHOSEN_FOR_KEPT
            key = replace(wanted, loss_chunks=chunks, recompute="auto" if self.selective else "none")
            file = labels_file(self.folder, self._program(wanted), self.cluster, key, gathers)
            known = file.read(read_labels, self.on_progress)
            chosen = known or self._choose(wanted, chunks, keeps)
            if known is None:
                file.write(labels_text(chosen), self.on_progress)
        degrees, labels, works = chosen
        return degrees, labels, works.with_state_of(self.state)

    def _choose(self, wanted: Degrees, chunks: int, keeps: bool) -> LabelledWorks:
        from autopar.cost_model.work.export import kept_work  # unused if works are kept

        if keeps or chunks != self.loss_chunks:
            degrees, labels, _ = self.chosen(wanted.tp, wanted.cp, wanted.ep)
        else:
            program = self._program(wanted)
            degrees, _, labels = choose_labels(program, self.cluster, wanted, regather=self.regather, memo=self.memo)
            labels = self._selecting(labels, degrees) if self.selective else labels
        blocks = self._blocks(labels, degrees, chunks)
        works = [kept_work(flow, work) if keeps and flow.regathered else work for flow, work in blocks]
        merged = merged_works(
            self.program, works, labels.blocks, labels.mesh, regather=self.regather and not keeps, loss_chunks=chunks,
            optimizers=self.memo(optimizer_figures, self.program),
        )  # fmt: skip
        return degrees, labels, merged

    def _selecting(self, choice: Labelling, degrees: Degrees) -> Labelling:
        """Labels with the operators of repeated blocks that selective recomputation computes again."""
        choose = fastest(own_machinery(self.cluster, dtype_of(self.program)).machine.speeds)
        blocks, labels, mesh = self._blocks(choice, degrees, 1), list(choice.blocks), degrees.mesh
        for index in repeated_blocks(self.program):
            flow, work = blocks[index]
            values = self.memo(recomputable_of, flow, work)
            keys = chosen_keys(values, work, mesh, self.program.sequence, choose)
            labels[index] = replace(labels[index], recomputed=keys)
        return replace(choice, blocks=tuple(labels))

    def _blocks(self, choice: Labelling, degrees: Degrees, chunks: int) -> "list[tuple[Flow, SymbolicWork]]":
        """The program's blocks under labels. Blocks of another degree with the same labels are used again."""
        program = self._program(degrees)
        analysis, symbolic = self.memo(analyse, program, refining(degrees.mesh)), _symbolic(choice.mesh)
        every = [
            self.memo(
                _block,
                self.memo,
                program,
                analysis,
                index,
                replace(labels, recomputed=()),
                symbolic,
                self.regather,
            )
            for index, labels in enumerate(choice.blocks)
        ]
        for index, labels in enumerate(choice.blocks):
            if labels.recomputed:
                every[index] = self.memo(_selected, self.memo, *every[index], labels.recomputed)
        return [p if chunks == 1 else self.memo(_in_chunks, *p, chunks) for p in every]

    def of(self, program: Program, degrees: Degrees) -> Labelled | None:
        """The labels of a tensor degree for another batch of the program. None if its blocks are other blocks."""
        searched, labelled, _ = self.chosen(degrees.tp, degrees.cp, degrees.ep)
        used = replace(degrees, tp_dims=searched.tp_dims, cp_dims=searched.cp_dims)
        if len(program.blocks) != len(labelled.blocks):
            return None
        analysis, kept = analyse(program, used.mesh), labelled.blocks
        if searched.ep > 1 and used.dp == used.ep:
            before = self.memo(analyse, self._wide, refining(searched.mesh))
            kept = tuple(_without_dp(self._wide, before, i, labels) for i, labels in enumerate(kept))
        blocks = tuple(
            replace(_on(used.mesh, labels), name=block.name, signature=block.signature)
            for block, labels in zip(program.blocks, kept, strict=True)
        )
        try:
            check(program, analysis, blocks, used.mesh)
        except PlanError:
            return None
        return used, analysis, replace(labelled, mesh=used.mesh, blocks=blocks)


def _block(
    memo: Memo, program: Program, analysis: Analysis, index: int, labels: BlockLabels, mesh: Mesh, regather: bool
) -> "tuple[Flow, SymbolicWork]":
    """A distinct block under its labels on a mesh, and its work."""
    from autopar.cost_model.work.export import block_runs, flow_of, work_of  # unused if works are kept
    from autopar.cost_model.work.sizes import Naming

    runs = memo(block_runs, program, memo(analyse, program))[index]  # equal for any labels
    flow = flow_of(program, index, labels, memo(Naming, analysis, mesh), runs, regather)
    return flow, work_of(flow)


def _selected(memo: Memo, flow: "Flow", work: "SymbolicWork", keys: tuple[str, ...]) -> "tuple[Flow, SymbolicWork]":
    """A block with selective recomputation of some operators."""
    from autopar.cost_model.work.recomputable import selected

    new = replace(flow, labels=replace(flow.labels, recomputed=keys))
    return new, replace(work, selected=selected(memo(recomputable_of, flow, work), keys))


def _in_chunks(flow: "Flow", work: "SymbolicWork", chunks: int) -> "tuple[Flow, SymbolicWork]":
    """A block whose loss runs in chunks, if it has one."""
    from autopar.cost_model.work.export import work_of

    if flow.region is None:
        return flow, work
    new = replace(flow, loss_chunks=chunks)
    return new, work_of(new)


def _symbolic(mesh: Mesh) -> Mesh:
    """The mesh whose blocks have the same work: degrees are symbols, except with two of one kind."""
    if max(len(mesh.owning("parameters")), len(mesh.owning("sequence"))) > 1:
        return mesh
    return Mesh(mesh.names, tuple(min(degree, 2) for degree in mesh.degrees))


def _without_dp(program: Program, analysis: Analysis, index: int, labels: BlockLabels) -> BlockLabels:
    """The labels of a block for a batch that `ep` alone splits. The batch then has one axis instead of two."""
    gone = {a for a, i in analysis.meant_for.items() if a in analysis.batch_axes and i == DP}
    dims, bounds = analysis.dims[index], analysis.bounds[index]
    names = {node.meta["key"]: node.name for node in program.blocks[index].graph.nodes if node.op == "call_function"}

    def place(axes: Sequence[int], position: int) -> int:
        return position - len(gone.intersection(axes[:position]))

    def types(name: str, kinds: tuple[Type, ...]) -> tuple[Type, ...]:
        axes = dims[name].axes
        return tuple(replace(t, position=place(axes[t.dim], t.position)) if t.kind == "S" else t for t in kinds)

    def label(key: str, text: str) -> str:
        axis, mark, rows = text.partition(":")
        factor, dot, number = axis.rpartition(".")
        if not dot:
            return text
        atoms = [atom for atom, _ in bounds[names[key]].factors[factor]]
        return f"{factor}.{place(atoms, int(number))}{mark}{rows}"

    return replace(
        labels,
        ports={name: types(name, kinds) for name, kinds in labels.ports.items()},
        labels={key: tuple(label(key, x) for x in ones) for key, ones in labels.labels.items()},
        results={name: types(name, kinds) for name, kinds in labels.results.items()},
    )


def _on(mesh: Mesh, labels: BlockLabels) -> BlockLabels:
    """The labels without the splits of mesh dimensions that have one rank on `mesh`."""

    def left(splits: Mapping[str, Sequence[Any]], whole: Any) -> dict[str, tuple[Any, ...]]:
        return {
            name: tuple(split if degree > 1 else whole for split, degree in zip(every, mesh.degrees, strict=True))
            for name, every in splits.items()
        }

    return replace(
        labels, ports=left(labels.ports, I), labels=left(labels.labels, "I"), results=left(labels.results, I)
    )
