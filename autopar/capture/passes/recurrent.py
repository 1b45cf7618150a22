"""Recurrent networks: a cell becomes linear layers and gates, and layers that drop in between become networks.

A cell is one step, such as `gru_cell` or `lstm_cell`.
"""

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import Compute, Rewrite, argument, put, value

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _layers(emit: Compute, node: fx.Node) -> list[fx.Node] | None:
    """The sequence, and the states of all layers, of a network of several layers that drops between them."""
    if not (argument(node, "dropout") and argument(node, "train") and argument(node, "num_layers") > 1):
        return None
    x, states, weights, has_biases, num_layers, dropout, train, both_ways, batch_first = node.args
    is_lstm = isinstance(states, (list, tuple))
    given: list[Any] = list(states) if isinstance(states, (list, tuple)) else [states]
    assert isinstance(weights, (list, tuple)) and isinstance(num_layers, int), node
    directions = 2 if both_ways else 1
    num_weights = len(weights) // num_layers
    per_state: list[list[fx.Node]] = [[] for _ in given]
    for layer in range(num_layers):
        if layer:
            x = emit(aten.dropout.default, x, dropout, train)
        bounds = (0, layer * directions, (layer + 1) * directions)
        initial = [emit(aten.slice.Tensor, state, *bounds) for state in given]
        part = list(weights[layer * num_weights : (layer + 1) * num_weights])
        options = (has_biases, 1, 0.0, train, both_ways, batch_first)
        outputs = _network(node, (x, initial if is_lstm else initial[0], part, *options), x, initial)
        x = outputs[0]
        for outs, state in zip(per_state, outputs[1:], strict=True):
            outs.append(state)
    return [x, *(emit(aten.cat.default, outs, 0) for outs in per_state)]  # type: ignore[list-item]


def _network(node: fx.Node, args: tuple[Any, ...], x: Any, states: list[fx.Node]) -> list[fx.Node]:
    """One layer, and its outputs as nodes."""
    sequence, steps = value(node)[0], value(x)
    results = (steps.new_empty(sequence.shape), *(value(state).new_empty(value(state).shape) for state in states))
    network = put(node, node.target, args, results)
    return [put(node, operator.getitem, (network, k), result) for k, result in enumerate(results)]


# sequences of other overloads are packed
LAYERS: Mapping[Any, Rewrite] = {getattr(aten, name).input: _layers for name in RECURRENT}


def _products(emit: Compute, node: fx.Node, state: Any) -> tuple[fx.Node, fx.Node]:
    """The products of the input and of the state with their weights."""
    of_input = emit(aten.linear.default, argument(node, "input"), argument(node, "w_ih"), argument(node, "b_ih"))
    return of_input, emit(aten.linear.default, state, argument(node, "w_hh"), argument(node, "b_hh"))


def _gates(emit: Compute, product: fx.Node, count: int) -> list[fx.Node]:
    """The equal parts of a product."""
    size = value(product).shape[1] // count
    return [emit(aten.slice.Tensor, product, 1, k * size, (k + 1) * size) for k in range(count)]


def _gru(emit: Compute, node: fx.Node) -> fx.Node:
    state = argument(node, "hx")
    of_input, of_state = _products(emit, node, state)
    parts = zip(_gates(emit, of_input, 3), _gates(emit, of_state, 3), strict=True)
    (reset_x, reset_h), (update_x, update_h), (new_x, new_h) = parts
    reset = emit(aten.sigmoid.default, emit(aten.add.Tensor, reset_x, reset_h))
    update = emit(aten.sigmoid.default, emit(aten.add.Tensor, update_x, update_h))
    new = emit(aten.tanh.default, emit(aten.add.Tensor, new_x, emit(aten.mul.Tensor, reset, new_h)))
    return emit(aten.add.Tensor, emit(aten.mul.Tensor, emit(aten.sub.Tensor, state, new), update), new)


def _lstm(emit: Compute, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    state, cell = argument(node, "hx")
    total = emit(aten.add.Tensor, *_products(emit, node, state))
    entry, forget, new, out = _gates(emit, total, 4)
    kept = emit(aten.mul.Tensor, emit(aten.sigmoid.default, forget), cell)
    added = emit(aten.mul.Tensor, emit(aten.sigmoid.default, entry), emit(aten.tanh.default, new))
    cell = emit(aten.add.Tensor, kept, added)
    return emit(aten.mul.Tensor, emit(aten.sigmoid.default, out), emit(aten.tanh.default, cell)), cell


def _plain(activation: Any, emit: Compute, node: fx.Node) -> fx.Node:
    return emit(activation, emit(aten.add.Tensor, *_products(emit, node, argument(node, "hx"))))


CELLS: Mapping[Any, Rewrite] = {
    aten.gru_cell.default: _gru,
    aten.lstm_cell.default: _lstm,
    aten.rnn_tanh_cell.default: partial(_plain, aten.tanh.default),
    aten.rnn_relu_cell.default: partial(_plain, aten.relu.default),
}
