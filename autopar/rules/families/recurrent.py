"""Recurrent networks: the batch is parallel; time and features are whole."""

from autopar._torch.operators import aten
from autopar.errors import RuleError
from autopar.rules.families._notation import rule_from, slot_of
from autopar.rules.operators import output_of
from autopar.rules.registry import rule
from autopar.rules.rule import Call, Dim, Rule, Slot

SEQUENCE, HIDDEN, CELL = 0, 1, 2  # outputs
GATES = (aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_SEQUENCES = (output_of(aten.lstm.input, SEQUENCE), *(output_of(gate, SEQUENCE) for gate in GATES))
_STATES = (
    output_of(aten.lstm.input, HIDDEN),
    output_of(aten.lstm.input, CELL),
    *(output_of(gate, HIDDEN) for gate in GATES),
)


@rule(*_SEQUENCES, *_STATES)
def recurrent(call: Call) -> Rule:
    """``"t b i, l b h, ... -> t b o"`` for the sequence, ``-> l b h`` for states; weights are whole."""
    x, batch_first = slot_of(call.args[0]), bool(call.args[8])
    if len(call.operands[x].shape) != 3:
        raise RuleError("a recurrent network over one sequence")
    states: list[Slot] = list(call.args[1]) if isinstance(call.args[1], (list, tuple)) else [call.args[1]]
    specs: dict[int, list[Dim]] = {x: [("b",), ("t",), ("i",)] if batch_first else [("t",), ("b",), ("i",)]}
    for n, state in enumerate(states):
        specs[state.index] = [("l",), ("b",), (f"h{n}",)]
    for k, operand in enumerate(call.operands):
        specs.setdefault(k, [(f"w{k}.{d}",) for d in range(len(operand.shape))])
    if call.target in _SEQUENCES:
        output: list[Dim] = [("b",), ("t",), ("o",)] if batch_first else [("t",), ("b",), ("o",)]
    else:
        output = [("l",), ("b",), ("h1" if call.target is output_of(aten.lstm.input, CELL) else "h0",)]
    used = {f for spec in (*specs.values(), output) for dim in spec for f in dim}
    return rule_from(call, specs, output, whole=used - {"b"})
