"""The head's product and the sum of cross-entropies in chunks of tokens, so that the logits never exist whole.

Forward computes the logits of one chunk after the other, adds up their losses, and keeps one number per token: the
logarithm of the sum of exponentials. Backward computes the logits of every chunk again, and from this number their
probabilities. It therefore sends nothing, except for the gradient of hidden states that forward gathered.

With the vocabulary split over ranks, forward sends a maximum and two sums per token, as
`autopar.lowering.vocabulary` does, chunk by chunk. With hidden states split along the sequence, each chunk is gathered
for itself, in backward again. The ranks' parts of a chunk then lie apart in the sequence, and so do its targets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from autopar._torch.operators import aten
from autopar._torch.private import wanted_gradients
from autopar.lowering.communicator import Communicator
from autopar.lowering.functions import all_gather, split_first
from autopar.lowering.vocabulary import own_ids, without_padding

_LOW = (torch.float16, torch.bfloat16)
Chain = Sequence[Sequence[Any]]
# the gradient of an operator's operand, from that of its result: of casts, scales and soft caps
_SLOPES: Mapping[Any, Callable[..., torch.Tensor]] = {
    aten.to.dtype: lambda grad, before, after, dtype: grad.to(before.dtype),
    aten.mul.Tensor: lambda grad, before, after, factor: grad * factor,
    aten.div.Tensor: lambda grad, before, after, divisor: grad / divisor,
    aten.tanh.default: lambda grad, before, after: grad * (1 - after * after),
    aten.neg.default: lambda grad, before, after: -grad,
}
_READ_RESULT = (aten.tanh.default,)  # operators whose slope reads their result


@dataclass(frozen=True, slots=True)
class _How:
    """Everything but the tensors: see `loss_in_chunks`."""

    chunks: int
    chain: Chain
    ignore: int
    classes: int
    vocabulary: Communicator | None
    gathered: Communicator | None
    dim: int

    def pieces(self, x: torch.Tensor) -> Iterator[tuple[int, int]]:
        """The beginning and the size of every chunk, along `dim` of a split value or along all tokens."""
        length = x.shape[self.dim] if self.gathered is not None else prod(x.shape[:-1])
        chunks = max(1, min(self.chunks, length))
        edges = [length * k // chunks for k in range(chunks + 1)]
        for start, stop in pairwise(edges):
            yield start, stop - start

    def hidden(self, x: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """The hidden states of a chunk, gathered if ranks have parts of them."""
        if self.gathered is None:
            return x.flatten(0, -2).narrow(0, start, size)
        return all_gather(x.narrow(self.dim, start, size), self.gathered, self.dim)

    def targets(self, x: torch.Tensor, target: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """The targets of a chunk, in the order of its hidden states."""
        if self.gathered is None:
            return target.narrow(0, start, size)
        whole = [n * self.gathered.degree if d == self.dim else n for d, n in enumerate(x.shape[:-1])]
        of_ranks = target.reshape(whole).unflatten(self.dim, (self.gathered.degree, x.shape[self.dim]))
        piece: torch.Tensor = of_ranks.narrow(self.dim + 1, start, size).reshape(-1)
        return piece

    def values(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """The logits and every result of the chain. The loss reads the last one."""
        found = [logits]
        for operator, *arguments in self.chain:
            options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            found.append(operator(found[-1], *arguments, **options))
        return found

    def read_by_slopes(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values that `through` reads. Of the others it reads the dtype, so they are empty."""
        results = [False, *(operator in _READ_RESULT for operator, *_ in self.chain)]
        return [value if read else value.new_empty(0) for value, read in zip(values, results, strict=True)]

    def through(self, values: Sequence[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
        """The gradient of logits from the gradient of the last of the chain's `values`."""
        for (operator, *arguments), before, after in zip(
            reversed(self.chain), reversed(values[:-1]), reversed(values[1:]), strict=True
        ):
            grad = _SLOPES[operator](grad, before, after, *arguments)
        return grad

    def exact(self, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() if scores.dtype in _LOW else scores
        return scores if self.vocabulary is None else without_padding(scores, self.classes, self.vocabulary)

    def own(self, target: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Targets as columns of a rank's logits, whether they are, and whether they count."""
        valid = target != self.ignore
        if self.vocabulary is not None:
            local, mine = own_ids(target, self.vocabulary, size)
            return local, mine & valid, valid
        return torch.where(valid, target, torch.zeros_like(target)), valid, valid

    @property
    def has_slopes(self) -> bool:
        """Whether the derivative of every operator of the chain is known. Else autograd finds it."""
        return all(operator in _SLOPES and not any(isinstance(a, dict) for a in rest) for operator, *rest in self.chain)


class _LossInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: _How
    ) -> torch.Tensor:
        losses, sums = [], []
        for start, size in how.pieces(x):
            rows = how.hidden(x, start, size).flatten(0, -2)
            scores = how.values(aten.linear.default(rows, weight, bias))[-1]
            dtype, scores = scores.dtype, how.exact(scores)
            local, mine, valid = how.own(how.targets(x, target, start, size), scores.shape[-1])
            zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
            highest = scores.amax(-1)
            if how.vocabulary is not None:
                highest = how.vocabulary.all_reduce(highest, "max")
            wanted = torch.where(mine, torch.gather(scores, -1, local.unsqueeze(-1)).squeeze(-1), zero)
            total = scores.sub_(highest.unsqueeze(-1)).exp_().sum(-1)  # a chunk exists once: nobody else has it
            del scores
            if how.vocabulary is not None:
                total, wanted = how.vocabulary.all_reduce(torch.stack((total, wanted))).unbind(0)
            logarithm = torch.log(total) + highest
            losses.append(torch.where(valid, logarithm - wanted, zero).sum())
            sums.append(logarithm)
        ctx.save_for_backward(x, target, weight, bias, torch.cat(sums))
        ctx.how = how
        return torch.stack(losses).sum().to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, target, weight, bias, sums = ctx.saved_tensors
        plan: _How = ctx.how
        into_x, _, into_weight, into_bias = wanted_gradients(ctx)[:4]
        parts: list[torch.Tensor] = []
        weights: torch.Tensor | None = None
        biases: torch.Tensor | None = None
        done = 0
        for start, size in plan.pieces(x):
            whole = plan.hidden(x, start, size)
            rows = whole.flatten(0, -2)
            part_sums = sums.narrow(0, done, rows.shape[0])
            done += rows.shape[0]
            grad = _of_logits(plan, rows, plan.targets(x, target, start, size), weight, bias, part_sums, grads[0])
            scattering = None
            if into_x:
                into = grad @ weight
                if plan.gathered is not None:
                    shaped = split_first(into.reshape(whole.shape), plan.gathered, plan.dim)
                    scattering = plan.gathered.start_reduce_scatter(shaped)
                else:
                    parts.append(into)
            if into_weight:
                weights = grad.t() @ rows if weights is None else weights.addmm_(grad.t(), rows)
            if into_bias:
                biases = grad.sum(0) if biases is None else biases + grad.sum(0)
            if plan.gathered is not None and scattering is not None:
                parts.append(plan.gathered.wait(scattering))
            del grad
        hidden = None
        if into_x:
            hidden = torch.cat(parts, plan.dim) if plan.gathered is not None else torch.cat(parts).reshape(x.shape)
        return hidden, None, weights, biases, None


def _of_logits(
    plan: _How,
    rows: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sums: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a chunk's logits, which are computed again."""
    logits = aten.linear.default(rows, weight, bias)
    with torch.set_grad_enabled(not plan.has_slopes):
        values = plan.values(logits if plan.has_slopes else logits.detach().requires_grad_())
    exact, dtype = plan.exact(values[-1].detach()), values[-1].dtype
    del logits
    if plan.has_slopes:
        values = plan.read_by_slopes(values)
    is_own = plan.has_slopes and values[-1].numel() == 0
    local, mine, valid = plan.own(target, exact.shape[-1])
    into = (exact.sub_(sums.unsqueeze(-1)) if is_own else exact - sums.unsqueeze(-1)).exp_()
    del exact
    into.scatter_add_(-1, local.unsqueeze(-1), -mine.to(into.dtype).unsqueeze(-1))
    into = into.mul_((valid.to(into.dtype) * grad.to(into.dtype)).unsqueeze(-1)).to(dtype)
    if plan.has_slopes:
        return plan.through(values, into)
    (of_logits,) = torch.autograd.grad(values[-1], values[0], into)
    return of_logits


def loss_in_chunks(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    chunks: int,
    chain: Chain,
    ignore_index: int,
    classes: int,
    vocabulary: Communicator | None,
    gathered: Communicator | None = None,
    dim: int = 0,
) -> torch.Tensor:
    """The sum over tokens of a linear layer's cross-entropy, in chunks. `chain` has the operators in between."""
    plan = _How(chunks, chain, ignore_index, classes, vocabulary, gathered, dim)
    out: torch.Tensor = _LossInChunks.apply(x, target, weight, bias, plan)
    return out
