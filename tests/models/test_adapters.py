"""Models that train a part of their parameters."""

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.ir.trained import trained_from
from autopar.models.adapters import with_trained


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        loss: torch.Tensor = self.head(x + self.down(self.up(x).relu())).logsumexp(-1).mean()
        return loss

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def _trained(text: str) -> dict[str, int]:
    model = with_trained(Mlp(), trained_from(text))
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_beside_all_linear_layers_but_the_head() -> None:
    pytest.importorskip("peft")
    sizes = _trained("lora:r=2")
    assert sum(sizes.values()) == 2 * (8 + 32) * 2
    assert {name.partition(".")[0] for name in sizes} == {"up", "down"}


def test_named_layers_and_modules_train_beside_adapters() -> None:
    pytest.importorskip("peft")
    sizes = _trained("lora:r=4,targets=down,also=embed")
    assert sum(sizes.values()) == 4 * (32 + 8) + 16 * 8


def test_frozen_modules_do_not_train() -> None:
    assert set(_trained("frozen:embed+head")) == {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lora:targets=embed", "no linear layer 'embed'"),
        ("frozen:heat", "did you mean 'head'"),
        ("lora:also=x", "'x'"),
        ("qlora", "use lora"),
    ],
)
def test_what_the_model_does_not_have_is_named(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        with_trained(Mlp(), trained_from(text))


def test_a_search_leaves_the_model_as_it_is_and_needs_less_memory() -> None:
    pytest.importorskip("peft")
    model, inputs = Mlp(), {"tokens": torch.zeros(4, 3, dtype=torch.long)}
    every, adapters = (
        autopar.plan(model, "2xcpu", example_inputs=inputs, global_batch=8, trains=trains, fix={"zero": 0, "tp": 1})
        for trains in ("all", "lora:r=1")
    )
    assert all(p.requires_grad for p in model.parameters()) and not hasattr(model.up, "lora_A")
    assert every.best is not None and adapters.best is not None
    assert adapters.best.peak_bytes < every.best.peak_bytes
