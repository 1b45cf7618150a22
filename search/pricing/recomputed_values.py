"""Values that stages compute for themselves instead of receiving them: masks and tables of positions.

A value is computed again if it depends on inputs and constants alone, and if its kernels take no longer than its
message between stages. Both are priced by the machine's rates, as blocks and messages are. Starts of kernels are left
out: a message starts kernels too, on two ranks.
"""

from collections.abc import Sequence

import numpy as np
from torch import fx

from autopar.capture.analysis import Analysis
from autopar.capture.nodes import is_random
from autopar.cost_model.machine.kernel_times import matmul_seconds
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.work.operator_cost import info_bytes, is_view, local_flops
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.ir.stages import ancestors, sources_of, stages_of


def values_to_recompute(
    program: Program, analysis: Analysis, cuts: Sequence[int], degrees: Degrees, machine: Machine
) -> tuple[str, ...]:
    """Values that cross stages and are cheaper to compute from the inputs than to send."""
    free = {info.name for info in program.inputs} | set(program.constants.results)
    makers = {result: call for call in program.calls for result in call.results}
    crossing = dict.fromkeys(value for stage in stages_of(program, cuts) for value in stage.sends)
    is_inside = np.asarray(degrees.pp * degrees.strides["pp"] <= machine.links.devices_per_host)
    values: list[str] = []
    for value in crossing:
        call = makers[value]
        block, calls = program.blocks[call.block], analysis.calls[call.block]
        output = block.outputs[call.results.index(value)]
        nodes = [node for node in ancestors(block, [output]) if node.op == "call_function"]
        is_free = all(a in free or a in values for a in sources_of(program, call, (value,)))
        if value == program.loss or output not in calls or not is_free or any(is_random(node) for node in nodes):
            continue
        seconds = sum(_kernel_seconds(node, analysis, call.block, machine) for node in nodes)
        if seconds <= float(machine.links.message_s(np.asarray(info_bytes(calls[output].output)), is_inside)):
            values.append(value)
    return tuple(values)


def _kernel_seconds(node: fx.Node, analysis: Analysis, block: int, machine: Machine) -> float:
    """Seconds of one operator on whole values, forward."""
    call, speeds = analysis.calls[block][node.name], machine.speeds
    if is_view(call):
        return 0.0
    seconds = matmul_seconds(
        flops=local_flops(analysis.bounds[block][node.name].rule, {}),
        moved_bytes=sum(map(info_bytes, (*call.operands, call.output))),
        part=1.0,
        peak_flops_per_s=speeds.product_flops_per_s,
        bytes_per_s=speeds.bytes_per_s,
        launch_s=0.0,
    )
    return float(seconds)
