"""The load of experts: how many rows of a batch each expert gets, in each call of a block.

Generated code multiplies sorted rows by `expert_product`, whose third operand is the number of each row's expert. The
rows are counted there while a forward pass runs, and summed over ranks.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.capture.nodes import arg
from autopar.ir.program import Program
from autopar.lowering.experts import product_of_experts
from autopar.rules.routed import PRODUCT

Counts = dict[int, list[list[torch.Tensor]]]  # by block, of every call in order: the rows of each expert, per routing


_PRODUCTS = (PRODUCT, product_of_experts)


def counting(modules: Sequence[fx.GraphModule], loads: Counts) -> list[Callable[..., Any]]:
    """The code of every block. A block with experts adds the counts of each of its calls to `loads`."""
    return [
        _counting(module, loads.setdefault(b, [])) if routings(module.graph) else module
        for b, module in enumerate(modules)
    ]


def routings(graph: fx.Graph) -> list[fx.Node]:
    """The values that hold the experts of sorted rows, each once."""
    return list(dict.fromkeys(arg(node, 2) for node in graph.nodes if node.target in _PRODUCTS))


def _counting(module: fx.GraphModule, calls: list[list[torch.Tensor]]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        counts: dict[fx.Node, torch.Tensor] = {}

        class Counter(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                if n.target in _PRODUCTS and arg(n, 2) not in counts:
                    _, weight, expert, _, *expert_ranks = self.fetch_args_kwargs_from_env(n)[0]
                    num_experts = weight.shape[0] * prod(dim.degree for dim in expert_ranks)
                    counts[arg(n, 2)] = torch.bincount(expert, minlength=num_experts)
                return super().run_node(n)

        result = Counter(module).run(*arguments)
        calls.append([counts[node] for node in routings(module.graph)])
        return result

    return run


def load_of_experts(
    program: Program, loads: Counts, own_calls: Sequence[int], device: torch.device
) -> dict[str, torch.Tensor]:
    """The rows of each expert over all ranks, by the path of the call. `own_calls` are those of this rank, in order."""
    mine: dict[int, list[torch.Tensor]] = {}
    for block, counts in loads.items():
        calls = [i for i in own_calls if program.calls[i].block == block]
        mine |= dict(zip(calls, counts, strict=True))
    load: dict[str, torch.Tensor] = {}
    for index, call in enumerate(program.calls):
        for place, routing in enumerate(routings(program.blocks[call.block].graph)):
            graph = program.blocks[call.block].graph
            product = next(node for node in graph.nodes if node.target is PRODUCT and arg(node, 2) is routing)
            none = torch.zeros(arg(product, 1).meta["info"].shape[0], dtype=torch.int64, device=device)
            summed = mine[index][place] if index in mine else none
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(summed)
            copies = int(summed.sum()) // routing.meta["info"].shape[0]
            load[call.path + f" ({place + 1})" * (place > 0)] = summed.cpu() // copies
    return load
