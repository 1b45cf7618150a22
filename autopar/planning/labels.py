"""Labels of a search: one choice per tensor degree prices the candidates and goes into the best plan.

The plan runs with the labels that it was priced with. They are not chosen anew for its own micro-batch and
data-parallel degree.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cache.labels import AGAIN, CHOSEN_FOR_KEPT, KEPT, Chosen, labels_file, labels_text, read_labels
from autopar.capture.analysis import Analysis, analyse
from autopar.cost_model.work.program_costs import ProgramWorks, merged_works
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.plan import BlockLabels
from autopar.ir.program import Program
from autopar.ir.sharding import I, Mesh
from autopar.planning.fixed import Labelled, choose_labels
from autopar.search.labels.check import check
from autopar.search.labels.result import Labelling

if TYPE_CHECKING:
    from autopar.cost_model.work.autograd_probe import NodeRun
    from autopar.cost_model.work.export import SymbolicWork
    from autopar.cost_model.work.fusion import Flow
    from autopar.search.labels.solve import Known

LABELLED_DP = 2  # data-parallel ranks of the capture that is searched with: labels hold for any number
LABELLED = Degrees(dp_shard=LABELLED_DP, micro_batch=1)


class SearchLabels:
    """Labels for tensor degrees, each chosen at its first use, and the block costs under them."""

    def __init__(
        self,
        program: Program,
        cluster: ClusterSpec,
        sequence_parallel: bool | None = None,
        *,
        regather: bool = True,
        folder: Path | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.program, self.cluster, self.regather, self.folder = program, cluster, regather, folder
        self.on_progress = on_progress
        self.wanted = replace(LABELLED, sequence_parallel=sequence_parallel)
        self.chosen: dict[int, Chosen] = {}
        self.kept: dict[int, Chosen] = {}
        self.known: Known | None = None
        self.blocks: list[_Block] = []
        self.runs: tuple[Mapping[str, NodeRun], ...] | None = None  # of blocks under autograd, for any labels

    def works(self, tp: int) -> ProgramWorks:
        """The block costs. Raises `PlanError` if the degree does not divide the model, and `InfeasibleError`."""
        if tp not in self.chosen:
            wanted = replace(self.wanted, tp=tp)
            how = AGAIN if self.regather else CHOSEN_FOR_KEPT
            self.chosen[tp] = self._from_file(how, wanted, lambda: self._choose(wanted))
        return self.chosen[tp][2]

    def works_kept(self, tp: int) -> ProgramWorks:
        """The block costs under the labels of `works` if gathered values are kept. Raises the same errors."""
        if not self.works(tp).regathers:
            return replace(self.works(tp), regather=False)
        if tp not in self.kept:
            wanted = replace(self.wanted, tp=tp)
            self.kept[tp] = self._from_file(KEPT, wanted, lambda: self._keeping(tp))
        return self.kept[tp][2]

    def _from_file(self, gathers: str, wanted: Degrees, make: Callable[[], Chosen]) -> Chosen:
        if self.folder is None:
            return make()
        file = labels_file(self.folder, self.program, self.cluster, wanted, gathers)
        chosen = file.read(read_labels, self.on_progress)
        if chosen is None:
            chosen = make()
            file.write(labels_text(chosen), self.on_progress)
        return chosen

    def _keeping(self, tp: int) -> Chosen:
        from autopar.cost_model.work.export import kept_work

        degrees, found, _ = self.chosen[tp]
        blocks = self._blocks(found, analyse(self.program, degrees.mesh))
        works = [kept_work(block.flow, block.work) for block in blocks]
        return degrees, found, merged_works(self.program, works, found.blocks, found.mesh, regather=False)

    def _choose(self, wanted: Degrees) -> Chosen:
        from autopar.search.labels.solve import Known

        self.known = self.known or Known()
        degrees, analysis, found = choose_labels(
            self.program, self.cluster, wanted, regather=self.regather, known=self.known
        )
        works = [block.work for block in self._blocks(found, analysis)]
        return degrees, found, merged_works(self.program, works, found.blocks, found.mesh, regather=self.regather)

    def _blocks(self, found: Labelling, analysis: Analysis) -> "list[_Block]":
        """The program's blocks under labels. Blocks of another degree with the same labels are used again."""
        from autopar.cost_model.work.export import block_runs, flow_of, naming_of, work_of  # unused if works are kept

        if self.runs is None:
            self.runs = block_runs(self.program, analysis)
        naming, blocks = naming_of(analysis, found.mesh), []
        for index, labels in enumerate(found.blocks):
            known = (one for one in self.blocks if one.index == index and one.is_under(labels, found.mesh))
            block = next(known, None)
            if block is None:
                flow = flow_of(self.program, index, analysis, labels, naming, self.runs[index], self.regather)
                block = _Block(index=index, mesh=found.mesh, flow=flow, work=work_of(flow))
                self.blocks.append(block)
            blocks.append(block)
        return blocks

    def hold(self, chosen: int, tp: int) -> bool:
        """Whether the labels of one tensor degree are legal for another degree too, and split axes evenly there."""
        self.works(chosen)
        degrees, found, _ = self.chosen[chosen]
        if degrees.tp_dims is not None:
            return False
        analysis = analyse(self.program, degrees.mesh)
        try:
            check(self.program, analysis, found.blocks, replace(degrees, tp=tp).mesh)
        except PlanError:
            return False
        return all(size % tp == 0 for size in _split_sizes(self.program, analysis, found.blocks, degrees.mesh))

    def of(self, program: Program, degrees: Degrees) -> Labelled | None:
        """The labels of a tensor degree for another batch of the program.

        None if its blocks differ from the searched blocks.
        """
        self.works(degrees.tp)
        searched, found, _ = self.chosen[degrees.tp]
        own = replace(degrees, tp_dims=searched.tp_dims)
        if len(program.blocks) != len(found.blocks):
            return None
        blocks = tuple(
            replace(_on(own.mesh, labels), name=block.name, signature=block.signature)
            for block, labels in zip(program.blocks, found.blocks, strict=True)
        )
        analysis = analyse(program, own.mesh)
        try:
            check(program, analysis, blocks, own.mesh)
        except PlanError:
            return None
        return own, analysis, replace(found, mesh=own.mesh, blocks=blocks)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Block:
    """A distinct block under its labels on a mesh, and its work."""

    index: int
    mesh: Mesh
    flow: "Flow"
    work: "SymbolicWork"

    def is_under(self, labels: BlockLabels, mesh: Mesh) -> bool:
        """Whether the block is the same under these labels on this mesh.

        Degrees are symbols, except with two tensor dimensions.
        """
        alike = self.mesh.names == mesh.names and _is_split(self.mesh) == _is_split(mesh)
        return (self.mesh == mesh or (alike and len(mesh.names) == 2)) and self.flow.labels == labels


def _is_split(mesh: Mesh) -> list[bool]:
    return [degree > 1 for degree in mesh.degrees]


def _split_sizes(program: Program, analysis: Analysis, blocks: Sequence[BlockLabels], mesh: Mesh) -> Iterator[int]:
    """The sizes of the axes that labels split over tensor ranks."""
    tensor = mesh.names.index("tp")
    for block, bounds, labels in zip(program.blocks, analysis.bounds, blocks, strict=True):
        for node in block.graph.nodes:
            if node.op == "call_function":
                factor, _, axis = labels.labels[node.meta["key"]][tensor].rpartition(".")
                if factor:
                    yield bounds[node.name].factors[factor][int(axis)][1]


def _on(mesh: Mesh, labels: BlockLabels) -> BlockLabels:
    """The labels without the splits of mesh dimensions that have one rank on `mesh`."""
    is_split = _is_split(mesh)
    return replace(
        labels,
        ports={n: tuple(t if on else I for t, on in zip(ts, is_split, strict=True)) for n, ts in labels.ports.items()},
        labels={
            key: tuple(one if on else "I" for one, on in zip(ones, is_split, strict=True))
            for key, ones in labels.labels.items()
        },
        results={
            n: tuple(t if on else I for t, on in zip(ts, is_split, strict=True)) for n, ts in labels.results.items()
        },
    )
