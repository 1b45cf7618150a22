"""Recurrent networks whose layers drop in between become one network for each layer, with dropout in between."""

import operator
from typing import Any

from torch import fx

from autopar._torch.operators import aten
from autopar.capture.nodes import argument, compute, operator_name, value

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def drop_between_layers(graph: fx.Graph) -> None:
    """Replace every recurrent network of several layers that drops.

    Its outputs are the sequence of the last layer, and the states of all layers.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or operator_name(node) not in RECURRENT or not isinstance(value(node), tuple):
            continue
        if node.target._overloadname != "input":  # a packed sequence
            continue
        if argument(node, "dropout") and argument(node, "train") and argument(node, "num_layers") > 1:
            with graph.inserting_before(node):
                outputs = _layers(graph, node)
            for user in list(node.users):
                user.replace_all_uses_with(outputs[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)


def _layers(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The sequence, and the states of all layers, of a network that drops between its layers."""
    x, states, weights, has_biases, num_layers, dropout, train, both_ways, batch_first = node.args
    is_lstm = isinstance(states, (list, tuple))
    given: list[Any] = list(states) if isinstance(states, (list, tuple)) else [states]
    assert isinstance(weights, (list, tuple)) and isinstance(num_layers, int), node
    directions = 2 if both_ways else 1
    num_weights = len(weights) // num_layers
    made: list[list[fx.Node]] = [[] for _ in given]
    for layer in range(num_layers):
        if layer:
            x = compute(graph, node, aten.dropout.default, x, dropout, train)
        bounds = (0, layer * directions, (layer + 1) * directions)
        own = [compute(graph, node, aten.slice.Tensor, state, *bounds) for state in given]
        part = list(weights[layer * num_weights : (layer + 1) * num_weights])
        options = (has_biases, 1, 0.0, train, both_ways, batch_first)
        outputs = _network(graph, node, (x, own if is_lstm else own[0], part, *options), x, own)
        x = outputs[0]
        for found, state in zip(made, outputs[1:], strict=True):
            found.append(state)
    return [x, *(compute(graph, node, aten.cat.default, found, 0) for found in made)]  # type: ignore[list-item]


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
