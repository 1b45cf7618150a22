"""Recurrent networks: a cell becomes linear layers and gates, and layers that drop in between become networks.

A cell is one step, such as `gru_cell` or `lstm_cell`.
"""

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, compute, operator_name, replace_node, value

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def drop_between_layers(graph: fx.Graph) -> None:
    """Replace every recurrent network of several layers that drops."""
    for node in list(graph.nodes):
        if node.op != "call_function" or operator_name(node) not in RECURRENT or not isinstance(value(node), tuple):
            continue
        if node.target._overloadname != "input":  # a packed sequence
            continue
        if argument(node, "dropout") and argument(node, "train") and argument(node, "num_layers") > 1:
            with graph.inserting_before(node):
                replace_node(node, _layers(graph, node))


def _layers(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The sequence, and the states of all layers, of a network that drops between its layers."""
    x, states, weights, has_biases, num_layers, dropout, train, both_ways, batch_first = node.args
    is_lstm = isinstance(states, (list, tuple))
    given: list[Any] = list(states) if isinstance(states, (list, tuple)) else [states]
    assert isinstance(weights, (list, tuple)) and isinstance(num_layers, int), node
    directions = 2 if both_ways else 1
    num_weights = len(weights) // num_layers
    per_state: list[list[fx.Node]] = [[] for _ in given]
    for layer in range(num_layers):
        if layer:
            x = compute(graph, node, aten.dropout.default, x, dropout, train)
        bounds = (0, layer * directions, (layer + 1) * directions)
        initial = [compute(graph, node, aten.slice.Tensor, state, *bounds) for state in given]
        part = list(weights[layer * num_weights : (layer + 1) * num_weights])
        options = (has_biases, 1, 0.0, train, both_ways, batch_first)
        outputs = _network(graph, node, (x, initial if is_lstm else initial[0], part, *options), x, initial)
        x = outputs[0]
        for outs, state in zip(per_state, outputs[1:], strict=True):
            outs.append(state)
    return [x, *(compute(graph, node, aten.cat.default, outs, 0) for outs in per_state)]  # type: ignore[list-item]


def _network(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], x: Any, states: list[fx.Node]) -> list[fx.Node]:
    """One layer, and its outputs as nodes."""
    sequence, steps = value(node)[0], value(x)
    results = (steps.new_empty(sequence.shape), *(value(state).new_empty(value(state).shape) for state in states))
    network = graph.call_function(node.target, args)  # type: ignore[arg-type]
    network.meta = dict(node.meta) | {"val": results}
    outputs = []
    for k, result in enumerate(results):
        output = graph.call_function(operator.getitem, (network, k))
        output.meta = dict(node.meta) | {"val": result}
        outputs.append(output)
    return outputs


_Emit = Callable[..., fx.Node]  # of an operator and its arguments


def open_cells(graph: fx.Graph) -> None:
    """Replace the cells of recurrent networks by the operators that torch runs for them."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CELLS:
            with graph.inserting_before(node):
                replace_node(node, _CELLS[node.target](partial(compute, graph, node), node))


def _products(emit: _Emit, node: fx.Node, state: Any) -> tuple[fx.Node, fx.Node]:
    """The products of the input and of the state with their weights."""
    of_input = emit(aten.linear.default, argument(node, "input"), argument(node, "w_ih"), argument(node, "b_ih"))
    return of_input, emit(aten.linear.default, state, argument(node, "w_hh"), argument(node, "b_hh"))


def _gates(emit: _Emit, product: fx.Node, count: int) -> list[fx.Node]:
    """The equal parts of a product."""
    size = value(product).shape[1] // count
    return [emit(aten.slice.Tensor, product, 1, k * size, (k + 1) * size) for k in range(count)]


def _gru(emit: _Emit, node: fx.Node) -> fx.Node:
    state = argument(node, "hx")
    of_input, of_state = _products(emit, node, state)
    parts = zip(_gates(emit, of_input, 3), _gates(emit, of_state, 3), strict=True)
    (reset_x, reset_h), (update_x, update_h), (new_x, new_h) = parts
    reset = emit(aten.sigmoid.default, emit(aten.add.Tensor, reset_x, reset_h))
    update = emit(aten.sigmoid.default, emit(aten.add.Tensor, update_x, update_h))
    new = emit(aten.tanh.default, emit(aten.add.Tensor, new_x, emit(aten.mul.Tensor, reset, new_h)))
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, emit(aten.sub.Tensor, state, new), update), new)


def _lstm(emit: _Emit, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    state, cell = argument(node, "hx")
    total = emit(aten.add.Tensor, *_products(emit, node, state))
    entry, forget, new, out = _gates(emit, total, 4)
    kept = emit(aten.mul.Tensor, emit(aten.sigmoid.default, forget), cell)
    added = emit(aten.mul.Tensor, emit(aten.sigmoid.default, entry), emit(aten.tanh.default, new))
    cell = emit(aten.add.Tensor, kept, added)
    return emit(aten.mul.Tensor, emit(aten.sigmoid.default, out), emit(aten.tanh.default, cell)), cell


def _plain(activation: Any, emit: _Emit, node: fx.Node) -> fx.Node:
    return emit(activation, emit(aten.add.Tensor, *_products(emit, node, argument(node, "hx"))))


_CELLS: Mapping[Any, Callable[[_Emit, fx.Node], fx.Node | tuple[fx.Node, fx.Node]]] = {
    aten.gru_cell.default: _gru,
    aten.lstm_cell.default: _lstm,
    aten.rnn_tanh_cell.default: partial(_plain, aten.tanh.default),
    aten.rnn_relu_cell.default: partial(_plain, aten.relu.default),
}
