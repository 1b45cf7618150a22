"""The cost of making a weight of a meta model depends on the weight alone, not on the model."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from work import lines_run

from autopar.runtime.parameters.materialise import parameter_source

transformers = pytest.importorskip("transformers")

WIDTH = 4096


def llama(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=14336, vocab_size=128256, num_hidden_layers=layers
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


class LargestInMemory(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator leaves in memory."""

    largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        found = operator(*given, **(options or {}))
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and not one.is_meta:
                self.largest = max(self.largest, one.numel())
        return found


def test_a_small_parameter_of_a_large_model_makes_nothing_large() -> None:
    with LargestInMemory() as memory:
        assert parameter_source(llama(layers=8))("model.layers.7.input_layernorm.weight").shape == (WIDTH,)
    assert memory.largest == WIDTH


def test_a_parameter_of_a_deep_model_visits_each_module_once() -> None:
    work = []
    for layers in (2, 32):
        model = llama(layers)
        source = parameter_source(model)
        source("model.norm.weight")  # what is found out once is not counted
        lines = lines_run(lambda: source("model.layers.1.input_layernorm.weight"))  # noqa: B023
        work.append(lines / len(list(model.modules())))
    assert work[1] < work[0]
