"""Collectives that the search and `estimate` price, against the dry run of the plan, rank by rank.

The dry run is proven equal to a step that runs (`test_priced_is_run.py`). The time model prices other code: expressions
of blocks (`autopar.cost_model.work.export`), the collectives of ZeRO (`autopar.cost_model.step.data_parallel`) and
messages. Calls and bytes of every collective over tensor ranks, bytes of every message, and bytes over data-parallel
ranks are equal, up to the differences below. Each is exact, has a name, and is in docs/priced_is_run.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import pytest
from counted_prices import MESSAGE, Key, priced_collectives
from priced_models import CASES, SHORT, Case, planned_case
from step_traffic import CollectiveTotal, Ledger, StageTraffic, collective, parts_of_step, run_stages, zero_step
from step_traffic import Key as LedgerKey
from suites import thinned

from autopar.capture.analysis import analyse
from autopar.ir.stages import Stage
from autopar.runtime.dry_run.rank_view import RankView, rank_view
from autopar.runtime.dry_run.zero import ROOT, ParameterGroup, groups_of, stage_passes

DATA_DIMS = ("dp", "dp_cp", "dp_shard", "dp_replicate")
BOTH_ENDS_ON_A_RANK = ("zbv-zero-bubble",)  # the time model has the first and the last stage on two ranks


@dataclass(frozen=True, eq=False)
class Rank:
    """The dry run of one rank under a plan."""

    setting: RankView

    @cached_property
    def runs(self) -> dict[int, StageTraffic]:
        return run_stages(self.setting)

    @cached_property
    def parts(self) -> Mapping[str, Mapping[LedgerKey, CollectiveTotal]]:
        return {str(name): part for name, part in parts_of_step(self.setting, self.runs).items()}

    @property
    def data_dims(self) -> tuple[str, ...]:
        """Mesh dimensions whose bytes are counted together. ZeRO without dp_shard sends over the ranks of cp."""
        return DATA_DIMS if self.setting.plan.degrees.dp_shard > 1 else (*DATA_DIMS, "cp", "cp0_cp1")

    def tensor(self) -> dict[LedgerKey, tuple[float, float]]:
        """Calls and bytes over tensor ranks that are priced for a step.

        Left out: the gradients of parameters that tensor ranks replicate, a call for each mesh dimension in a step, and
        the loss's denominator, a call of 4 bytes in a micro-batch.
        """
        found = {k: (t.calls, t.sent_bytes) for k, t in self.parts["blocks"].items() if k[0] not in self.data_dims}
        for key, more in self.end_of_recomputation().items():
            calls, size = found.get(key, (0, 0.0))
            found[key] = (calls + more.calls, size + more.sent_bytes)
        for key, less in self.gathered_in_both_parts().items():
            found[key] = (found[key][0] - less.calls, found[key][1] - less.sent_bytes)
        return found

    def gathered_in_both_parts(self) -> Mapping[LedgerKey, CollectiveTotal]:
        """Hidden states of the loss in chunks are priced once; both parts of a backward pass gather them."""
        setting, ledger = self.setting, Ledger()
        for stage in setting.own_stages:
            run = self.runs[stage.index]
            if setting.plan.degrees.loss_chunks > 1 and setting.splits_backward(stage):
                orders = stage_passes(setting.plan.degrees, stage.index)
                in_parts = sum(action.kind == "I" for order in orders for action in order)
                whole, parts = (
                    one.get(("tp", "all_gather"), CollectiveTotal()) for one in (run.backward, run.backward_in_parts)
                )
                assert parts.bytes >= whole.bytes
                more = CollectiveTotal(
                    parts.calls - whole.calls, parts.bytes - whole.bytes, parts.sent_bytes - whole.sent_bytes
                )
                ledger.add("tp", "all_gather", more, in_parts)
        return ledger.take()

    def end_of_recomputation(self) -> Mapping[LedgerKey, CollectiveTotal]:
        """The whole forward pass is priced again; torch's checkpoint stops before a block's last collective."""
        setting, ledger = self.setting, Ledger()
        degrees, program = setting.plan.degrees, setting.program
        for stage in setting.own_stages:
            full = {i for i in stage.calls if setting.recomputed.get(i) == "full"}
            for index in full if degrees.tp > 1 else ():
                block = program.blocks[program.calls[index].block]
                node = next(n for n in block.graph.nodes if n.name == block.outputs[0])
                whole = prod(node.meta["info"].shape) // degrees.dp * node.meta["info"].dtype.itemsize
                last = collective("reduce_scatter", degrees.tp, whole)
                ledger.add("tp", "reduce_scatter", last, degrees.num_micro_batches)
        return ledger.take()

    def data_bytes(self) -> float:
        """Bytes over data-parallel ranks, without the gradients of a pipeline rank."""
        blocks = sum(t.sent_bytes for key, t in self.parts["blocks"].items() if key[0] in self.data_dims)
        return blocks + (self.gradient_bytes() if self.setting.plan.degrees.pp == 1 else 0.0)

    def gradient_bytes(self) -> float:
        """Bytes of gradients and parameters over data-parallel ranks as they are priced."""
        if not self.setting.plan.degrees.zero:
            return sum(t.sent_bytes for key, t in self.parts["replicated"].items() if key[0] in ("dp", "dp_cp"))
        setting = self.setting
        if setting.plan.degrees.pp > 1:  # priced as ZeRO 1, gathered and summed once a step, whatever stage of ZeRO
            degrees = replace(setting.plan.degrees, zero=1)
            setting = replace(setting, plan=replace(setting.plan, degrees=degrees))
        groups = [
            (stage, group)
            for stage in setting.own_stages
            for group in groups_of(setting, stage, self.runs[stage.index])
        ]
        return sum(priced_bytes(setting, stage, group) for stage, group in groups)

    def messages(self) -> tuple[float, float]:
        sent = self.parts["messages"].get(("pp", "send"), CollectiveTotal())
        return sent.calls, sent.bytes


def priced_bytes(setting: RankView, stage: Stage, group: ParameterGroup) -> float:
    """What is priced of ZeRO's collectives for a group of parameters."""
    ledger, degrees = Ledger(), setting.plan.degrees
    zero_step(degrees, stage.index, [group], ledger)
    sent = {key: traffic.sent_bytes for key, traffic in ledger.take().items()}
    gathers = sum(size for (_, kind), size in sent.items() if kind == "all_gather")
    scatters = sum(size for (_, kind), size in sent.items() if kind == "reduce_scatter")
    copies = sum(size for (_, kind), size in sent.items() if kind == "all_reduce")
    if degrees.pp == 1 and degrees.zero == 2:
        # of ZeRO 2 the blocks' gradients: neither the one gather of a step, nor embedding and head
        gathers, scatters, copies = (0.0, 0.0, 0.0) if is_end(setting, stage, group) else (0.0, scatters, copies)
    elif degrees.pp == 1 and degrees.zero == 3 and group.call == ROOT:
        gathers, scatters = 4 * gathers, 2 * scatters  # a tied table: twice at both ends instead of once
    elif degrees.zero == 3 and degrees.pp == 1 and is_end(setting, stage, group):
        copies = 0.0  # sums of embedding and head over replicas are not priced
    return (gathers + scatters + copies) * without_padding(setting, group)


def is_end(setting: RankView, stage: Stage, group: ParameterGroup) -> bool:
    if group.call == ROOT:
        return True
    return setting.program.calls[stage.calls[group.call]].path.startswith(("prologue", "epilogue", "between_"))


def without_padding(setting: RankView, group: ParameterGroup) -> float:
    """The part of a group's elements that is no padding: expressions divide by degrees."""
    even = 0.0
    for name in group.names:
        storage = setting.placements[name]
        split = prod(n for at, n in zip(storage.splits, storage.degrees, strict=True) if at is not None)
        even += setting.program.parameters[name].num_elements / split
    return even / sum(setting.shard_elements(name, padded=True) * group.ranks for name in group.names)


def tensor_dims(setting: RankView) -> dict[tuple[int, int], str]:
    """Names of tensor and context dimensions, single and joined, by their ranks and how far apart these lie."""
    mesh, found = setting.plan.mesh, {}
    for i, (name, degree) in enumerate(zip(mesh.names, mesh.degrees, strict=True)):
        joined = mesh.joined(i)
        if name not in ("dp", "cp" if setting.plan.degrees.dp_shard == 1 else "") and degree > 1:
            found[degree, prod(mesh.degrees[i + 1 :])] = name
        if joined is not None and (joined != "cp0_cp1" or setting.plan.degrees.dp_shard > 1):
            found[mesh.degree_of(joined), prod(mesh.degrees[i + 2 :])] = joined
    return found


def flat(counts: Mapping[LedgerKey, tuple[float, float]]) -> dict[str, float]:
    calls = {f"calls {key}": calls for key, (calls, _) in counts.items()}
    return calls | {f"bytes {key}": size for key, (_, size) in counts.items()}


def split(priced: Mapping[Key, tuple[float, float]], names: Mapping[tuple[int, int], str]) -> tuple[
    dict[LedgerKey, tuple[float, float]], float
]:  # fmt: skip
    """Calls and bytes over tensor dimensions, and bytes over data-parallel ranks."""
    tensor, data = {}, 0.0
    for (kind, ranks, stride), (calls, size) in priced.items():
        if (ranks, stride) in names:
            tensor[names[ranks, stride], kind] = (calls, size)
        elif (kind, ranks, stride) != MESSAGE:
            data += size
    return tensor, data


@pytest.mark.parametrize("one", thinned(CASES, keep=SHORT), ids=lambda one: one.name)
def test_priced_collectives_are_those_of_the_dry_run(one: Case) -> None:
    program, plan = planned_case(one)
    analysis, degrees = analyse(program, plan.mesh), plan.degrees
    ranks = [Rank(rank_view(program, plan, r * degrees.strides["pp"])) for r in range(degrees.pp)]
    # every pipeline rank is priced as the one with the largest end
    gradients = max(rank.gradient_bytes() for rank in ranks) if degrees.pp > 1 else 0.0
    for r, rank in enumerate(ranks):
        found = priced_collectives(program, analysis, plan, r)
        tensor, data = split(found, tensor_dims(rank.setting))
        assert flat(tensor) == pytest.approx(flat(rank.tensor())), r
        if degrees.schedule not in BOTH_ENDS_ON_A_RANK:
            assert data == pytest.approx(rank.data_bytes() + gradients), r
        calls, size = rank.messages()
        if all(len(stage.sends) <= 1 for stage in rank.setting.stages):
            assert found.get(MESSAGE, (0.0, 0.0)) == pytest.approx((calls, size)), r
        else:  # one message carries the values between blocks; an encoder's output goes beside it
            assert 0 < found[MESSAGE][1] < size
