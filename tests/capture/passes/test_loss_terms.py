"""Losses with several terms: micro-batches give the gradients of the whole batch if each term is a sum or a mean."""

from collections.abc import Callable, Mapping

import pytest
import torch
from equivalence import case_of, check, labelled
from torch import nn
from torch.nn import functional as F

from autopar.capture.program import capture_program
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.ir.sharding import Mesh
from autopar.rules.operators import OVER_MICRO_BATCHES
from autopar.runtime.parameters.materialise import parameter_source
from autopar.runtime.verify.float64_program import promoted
from autopar.runtime.verify.reference import Case, reference_steps

BATCH, TOKENS, CLASSES = 6, 5, 7


class TwoHeads(nn.Module):
    """Two heads whose targets are ignored in different places; `terms` makes the loss of everything."""

    def __init__(self, terms: Callable[..., torch.Tensor], sums: bool = False) -> None:
        super().__init__()
        self.sums = sums
        self.table, self.first, self.second = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)
        self.terms = terms

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, next_labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).tanh()
        scores, more = self.first(x), self.second(x)
        one = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        two = F.cross_entropy(more.flatten(0, 1), next_labels.flatten())
        z = scores.logsumexp(-1).square()
        return self.terms(one, two, z.sum() if self.sums else z.mean(), self.first.weight.square().sum())


Terms = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
EXACT: Mapping[str, Terms] = {
    "one mean": lambda one, two, z, w: one,
    "a factor": lambda one, two, z, w: 0.5 * one,
    "and a mean of tokens": lambda one, two, z, w: one + 0.1 * z,
    "minus a mean of tokens": lambda one, two, z, w: 2 * one - z / 3,
    "and a decay": lambda one, two, z, w: one + 0.01 * w,
    "two means": lambda one, two, z, w: one + 0.3 * two,
    "everything": lambda one, two, z, w: (one + 0.3 * (two - 0.2 * z)) * 2 + 0.01 * w,
    "a stack": lambda one, two, z, w: one + 0.1 * torch.stack([z, 2 * z, two]).mean(),
    "a mean of tokens": lambda one, two, z, w: z + 0.01 * w,
    "plus zero": lambda one, two, z, w: one + 0.0,
    "and numbers": lambda one, two, z, w: 2.0 - 3 * (one + 0.5) + 0.1 * (z - 1),
    "a number with a factor": lambda one, two, z, w: torch.add(one, 0.5, alpha=3) + torch.tensor(0.25),
    "a mean of tokens and a number": lambda one, two, z, w: 1.5 - z,
}
COUPLED: Mapping[str, Terms] = {
    "a square": lambda one, two, z, w: one + z.square(),
    "a product": lambda one, two, z, w: one + one * z,
    "a quotient": lambda one, two, z, w: one / z,
    "a limit": lambda one, two, z, w: one + z.clamp(max=1.0),
}


def model_of(terms: Terms) -> nn.Module:
    torch.manual_seed(0)
    return TwoHeads(terms).double()


def batch_of(batch: int = BATCH) -> dict[str, torch.Tensor]:
    """The first sequences have more targets than the last."""
    generator = torch.Generator().manual_seed(1)
    found = {
        n: torch.randint(CLASSES, (batch, TOKENS), generator=generator) for n in ("tokens", "labels", "next_labels")
    }
    for row in range(batch):
        found["labels"][row, : row % TOKENS] = -100
        found["next_labels"][row, TOKENS - row // 2 :] = -100
    return found


def captured(terms: Terms, count: int) -> tuple[nn.Module, Program]:
    model = model_of(terms)
    return model, promoted(capture_program(model, batch_of(), batch=BATCH // count))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_micro_batches_have_the_gradients_of_the_batch(name: str, count: int) -> None:
    model, program = captured(EXACT[name], count)
    assert program.mixes_batch is None
    source = parameter_source(model, state=None, seed=0, dtype=None)
    found = reference_steps(Case(program, source, [batch_of()], Degrees(accumulate=count)))
    loss = model(**batch_of())
    loss.backward()
    torch.testing.assert_close(found.losses[0], loss.detach(), rtol=1e-12, atol=0)
    for parameter, tensor in model.named_parameters():
        if tensor.grad is not None:
            torch.testing.assert_close(found.gradients[parameter], tensor.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["everything", "two means", "and a decay", "and numbers"])
def test_ranks_have_it_too(name: str) -> None:
    case = case_of((model_of(lambda *terms: EXACT[name](*terms) + 0.0 * terms[1]), batch_of()))
    for mesh in (Mesh.of(dp=2), Mesh.of(dp=3, tp=2)):
        check(case, labelled(case, mesh), mesh)


@pytest.mark.parametrize("name", COUPLED)
def test_terms_that_couple_samples_are_named(name: str) -> None:
    _, program = captured(COUPLED[name], 2)
    assert program.mixes_batch is not None
    case = case_of((model_of(lambda *terms: COUPLED[name](*terms) + 0.0 * (terms[1] + terms[3])), batch_of()))
    check(case, labelled(case, Mesh.of(dp=2)), Mesh.of(dp=2))  # ranks split the batch in space


class ReportsTerms(TwoHeads):
    """Terms are outputs too."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, next_labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.first(self.table(tokens).tanh())
        term = 0.1 * scores.logsumexp(-1).square().mean()
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()) + 0.5 * term, "term": term}


class SumsBeforeTheMean(TwoHeads):
    """The last term looks like a mean, and is a sum over the batch."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, next_labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens, labels, next_labels)
        return loss + self.first(self.table(tokens)).square().sum(0).mean()


def test_a_sum_that_looks_like_a_mean_is_refused() -> None:
    """A sum over the batch is no mean of the sums over micro-batches."""
    program = capture_program(SumsBeforeTheMean(EXACT["one mean"]), batch_of(), batch=2)
    assert "adds a sum over the batch to a mean" in str(program.mixes_batch)


class CountsSequences(TwoHeads):
    """The loss has the number of sequences as a term."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, next_labels: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, labels, next_labels) + 0.01 * len(tokens)


def test_outputs_are_those_of_the_model() -> None:
    """A term that is an output is not divided there."""
    torch.manual_seed(0)
    model = ReportsTerms(EXACT["one mean"]).double()
    program = promoted(capture_program(model, batch_of(), batch=BATCH // 2))
    assert program.mixes_batch is None
    source = parameter_source(model, state=None, seed=0, dtype=None)
    found = reference_steps(Case(program, source, [batch_of()], Degrees(accumulate=2)))
    last = {name: tensor[BATCH // 2 :] for name, tensor in batch_of().items()}
    torch.testing.assert_close(found.outputs["term"], model(**last)["term"].detach())
    torch.testing.assert_close(found.losses[0], model(**batch_of())["loss"].detach())


def test_a_number_that_depends_on_the_batch_size_is_refused() -> None:
    """The batch has another number than its micro-batches."""
    program = capture_program(CountsSequences(EXACT["one mean"]), batch_of(), batch=2)
    assert "depends on the batch size" in str(program.mixes_batch)


def test_a_loss_of_one_term_is_left_alone() -> None:
    for name in ("one mean", "a factor", "a mean of tokens"):
        _, program = captured(EXACT[name], 2)
        targets = [n.target for block in program.blocks for n in block.graph.nodes]
        assert OVER_MICRO_BATCHES not in targets
