"""Evaluation: batch norm uses the statistics that it has recorded, not those of the batch."""

from torch import fx

from autopar.rules.operators import BATCH_STATISTIC


def use_running_statistics(graph: fx.Graph) -> None:
    """Replace every choice between a statistic of the batch and the running one by the latter, in place."""
    statistics = [node for node in graph.nodes if node.target is BATCH_STATISTIC]
    for node in statistics:
        node.replace_all_uses_with(node.args[1])
        graph.erase_node(node)
    if statistics:
        graph.eliminate_dead_code()
