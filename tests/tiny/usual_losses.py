"""Losses as people write them, on one small model of tokens, each with the question whether micro-batches give it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

BATCH, TOKENS, CLASSES, WIDTH = 8, 6, 12, 8
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a loss may read: results of the model first, then inputs."""

    hidden: torch.Tensor  # (batch, token, width)
    logits: torch.Tensor  # (batch, token, class)
    rejected: torch.Tensor  # logits of the other answers
    head: torch.Tensor  # a parameter
    labels: torch.Tensor  # (batch, token), -100 where the token does not count
    others: torch.Tensor  # labels of the other answers
    mask: torch.Tensor  # (batch, token), 1 where the token counts
    score: torch.Tensor  # (batch,)
    teacher: torch.Tensor  # (batch, token, class), logits
    items: torch.Tensor  # one number

    @property
    def losses(self) -> torch.Tensor:
        """The cross-entropy of each token; zero where it does not count."""
        return F.cross_entropy(self.logits.transpose(1, 2), self.labels, reduction="none")

    @property
    def total(self) -> torch.Tensor:
        return (self.losses * self.mask).sum()

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return (values * self.mask).sum(1) / self.mask.sum(1).clamp(min=1)

    def log_probabilities(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the log-probabilities of each answer."""
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (picked * self.mask).sum(1)


Loss = Callable[[Values], torch.Tensor]


def class_weights(v: Values) -> torch.Tensor:
    return F.cross_entropy(v.logits.flatten(0, 1), v.labels.flatten(), WEIGHTS)


def smoothed_class_weights(v: Values) -> torch.Tensor:
    return F.cross_entropy(v.logits.transpose(1, 2), v.labels, WEIGHTS, label_smoothing=0.1)


def weights_of_the_batch(v: Values) -> torch.Tensor:
    """Rare classes of the batch count more."""
    counts = (v.labels.unsqueeze(-1) == torch.arange(CLASSES)).sum((0, 1))
    weights = (1.0 / counts.clamp(min=1).to(v.logits.dtype))[v.labels.clamp(min=0)] * v.mask
    return (v.losses * weights).sum() / weights.sum()


def selected_by_number(v: Values) -> torch.Tensor:
    picked = torch.masked_select(v.losses, v.mask.bool())
    return picked.sum() / picked.shape[0]


def normalised_columns(v: Values) -> torch.Tensor:
    middle, scale = v.teacher.mean((0, 1)), v.teacher.var((0, 1), unbiased=False).add(1e-6).sqrt()
    return F.smooth_l1_loss((v.logits - middle) / scale, (v.teacher - middle) / scale)


def policy(v: Values, advantages: torch.Tensor) -> torch.Tensor:
    """Clipped ratios to the probabilities of a teacher."""
    new = v.logits.log_softmax(-1).gather(-1, v.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    old = v.teacher.log_softmax(-1).gather(-1, v.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def whitened(v: Values) -> torch.Tensor:
    advantages = (v.score - v.score.mean()) / (v.score.std() + 1e-4)
    return (policy(v, advantages.unsqueeze(1)) * v.mask).sum() / v.mask.sum().clamp(min=1)


def of_groups(v: Values) -> torch.Tensor:
    """Advantages are inputs. A penalty keeps the policy near the teacher."""
    gap = v.teacher.log_softmax(-1) - v.logits.log_softmax(-1)
    penalty = (gap.exp() - gap - 1).sum(-1)
    return v.per_sequence(policy(v, v.score.unsqueeze(1)) + 0.04 * penalty).mean()


def preference(v: Values) -> torch.Tensor:
    chosen, rejected = v.log_probabilities(v.logits, v.labels), v.log_probabilities(v.rejected, v.others)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def preference_by_length(v: Values) -> torch.Tensor:
    length = v.mask.sum(1).clamp(min=1)
    chosen, rejected = v.log_probabilities(v.logits, v.labels), v.log_probabilities(v.rejected, v.others)
    return -F.logsigmoid(2.0 * (chosen - rejected) / length - 0.5).mean()


def odds_ratio(v: Values) -> torch.Tensor:
    length = v.mask.sum(1).clamp(min=1)
    chosen = v.log_probabilities(v.logits, v.labels) / length - 1e-3
    rejected = v.log_probabilities(v.rejected, v.others) / length - 1e-3
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return v.total / v.mask.sum() - 0.1 * F.logsigmoid(odds).mean()


def distillation(v: Values) -> torch.Tensor:
    soft = F.kl_div((v.logits / 2).log_softmax(-1), (v.teacher / 2).softmax(-1), reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * F.cross_entropy(v.logits.flatten(0, 1), v.labels.flatten())


def hidden_distillation(v: Values) -> torch.Tensor:
    squares = (v.hidden - v.teacher[..., :WIDTH]).square() * v.mask.unsqueeze(-1)
    return squares.sum() / (v.mask.sum() * WIDTH)


def pooled(values: torch.Tensor, v: Values) -> torch.Tensor:
    return (values * v.mask.unsqueeze(-1)).sum(1) / v.mask.sum(1, keepdim=True).clamp(min=1)


def triplet(v: Values) -> torch.Tensor:
    return F.triplet_margin_loss(v.hidden.mean(1), v.teacher.mean(1)[:, :WIDTH], v.rejected.mean(1)[:, :WIDTH])


def cosine(v: Values) -> torch.Tensor:
    return F.cosine_embedding_loss(v.hidden.mean(1), v.teacher.mean(1)[:, :WIDTH], v.score.sign(), margin=0.1)


def ranking(v: Values) -> torch.Tensor:
    return F.margin_ranking_loss(v.hidden.mean((1, 2)), v.rejected.mean((1, 2)), v.score.sign(), margin=0.2)


def balanced_binary(v: Values) -> torch.Tensor:
    """Positive tokens count as much as negative ones."""
    positive = (v.labels > 5).to(v.logits.dtype) * v.mask
    weight = (v.mask.sum() - positive.sum()) / positive.sum().clamp(min=1)
    losses = F.binary_cross_entropy_with_logits(v.hidden.mean(-1), positive, pos_weight=weight, reduction="none")
    return (losses * v.mask).sum() / v.mask.sum()


def explained_variance(v: Values) -> torch.Tensor:
    return F.mse_loss(v.hidden.mean((1, 2)), v.score) / (v.score.var() + 1e-3)


def heteroscedastic(v: Values) -> torch.Tensor:
    log_variance = v.rejected.mean(-1)
    losses = 0.5 * (log_variance + (v.hidden.mean(-1) - v.teacher.mean(-1)).square() * (-log_variance).exp())
    return (losses * v.mask).sum() / v.mask.sum()


def entropy_bonus(v: Values) -> torch.Tensor:
    log = v.logits.log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    return (v.total - 0.01 * (entropy * v.mask).sum()) / v.mask.sum().clamp(min=1)


def dice(v: Values) -> torch.Tensor:
    """The overlap of each sequence."""
    p, t = v.hidden.mean(-1).sigmoid(), v.mask
    return (1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def contrastive(v: Values) -> torch.Tensor:
    left, right = F.normalize(v.hidden.mean(1), dim=-1), F.normalize(v.rejected.mean(1)[:, :WIDTH], dim=-1)
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


def dice_of_the_batch(v: Values) -> torch.Tensor:
    p, t = v.hidden.mean(-1).sigmoid(), v.mask
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def balance(v: Values) -> torch.Tensor:
    """The load of each class as an expert, as in mixtures."""
    p = v.logits.softmax(-1)
    share = F.one_hot(p.argmax(-1), CLASSES).to(p.dtype).mean((0, 1))
    return v.total / v.mask.sum() + 0.01 * CLASSES * (share * p.mean((0, 1))).sum()


def log_softmax_of(v: Values) -> torch.Tensor:
    return v.logits.log_softmax(-1).flatten(0, 1)


def decay(v: Values) -> torch.Tensor:
    return 0.01 * v.head.square().sum()


def z_loss(v: Values) -> torch.Tensor:
    return 1e-2 * v.logits.logsumexp(-1).square().mean()


EQUAL: Mapping[str, Loss] = {
    "cross-entropy, ignored tokens": lambda v: F.cross_entropy(v.logits.flatten(0, 1), v.labels.flatten()),
    "cross-entropy, label smoothing": lambda v: F.cross_entropy(
        v.logits.flatten(0, 1), v.labels.flatten(), label_smoothing=0.1
    ),
    "cross-entropy, class weights": class_weights,
    "cross-entropy, class weights and smoothing": smoothed_class_weights,
    "cross-entropy, soft targets": lambda v: F.cross_entropy(
        v.logits.flatten(0, 1), v.teacher.softmax(-1).flatten(0, 1)
    ),
    "nll_loss": lambda v: F.nll_loss(log_softmax_of(v), v.labels.flatten()),
    "nll_loss, class weights": lambda v: F.nll_loss(log_softmax_of(v), v.labels.flatten(), WEIGHTS),
    "masked, by tokens": lambda v: v.total / v.mask.sum(),
    "masked, a mean over a mean": lambda v: (v.losses * v.mask).mean() / v.mask.mean(),
    "masked, clamped count": lambda v: v.total / v.mask.sum().clamp(min=1),
    "masked, count plus a constant": lambda v: v.total / (v.mask.sum() + 1),
    "masked, maximum of count and a tensor": lambda v: v.total / torch.maximum(v.mask.sum(), torch.tensor(3.0)),
    "masked, by the average length": lambda v: v.total / v.mask.sum(1).mean(),
    "masked, by the root of the count": lambda v: v.total / v.mask.sum().sqrt(),
    "masked, by weights that sum to one": lambda v: (v.losses * (v.mask / v.mask.sum().clamp(min=1))).sum(),
    "masked, times the reciprocal": lambda v: v.total * (1.0 / v.mask.sum().clamp(min=1)),
    "selected tokens": lambda v: F.cross_entropy(v.logits[v.labels != -100], v.labels[v.labels != -100]),
    "selected tokens, the mean": lambda v: v.losses[v.mask.bool()].mean(),
    "selected tokens, by their number": selected_by_number,
    "selected tokens, mean squares": lambda v: F.mse_loss(
        v.hidden[v.mask.bool()], v.teacher[..., :WIDTH][v.mask.bool()]
    ),
    "selected sequences": lambda v: v.per_sequence(v.losses)[v.mask.sum(1) > 0].mean(),
    "mean squares of normalised columns": normalised_columns,
    "by sequences": lambda v: v.per_sequence(v.losses).mean(),
    "by sequences that have a token": lambda v: (
        (v.per_sequence(v.losses) * (v.mask.sum(1) > 0)).sum() / (v.mask.sum(1) > 0).sum().clamp(min=1)
    ),
    "by the batch size": lambda v: v.total / len(v.mask),
    "by the batch size, before the sum": lambda v: (v.losses * v.mask / (v.mask.shape[0] * v.mask.shape[1])).sum(),
    "by a number that is passed": lambda v: v.total / v.items,
    "by weights of the batch's classes": weights_of_the_batch,
    "by importance": lambda v: (v.per_sequence(v.losses) * (v.score.abs() / v.score.abs().mean())).mean(),
    "a sum": lambda v: v.total,
    "a sum beside a mean": lambda v: 0.01 * v.total + z_loss(v),
    "focal": lambda v: ((1 - (-v.losses).exp()).square() * v.losses * v.mask).sum() / v.mask.sum().clamp(min=1),
    "with z-loss and decay": lambda v: v.total / v.mask.sum().clamp(min=1) + z_loss(v) + decay(v),
    "with an entropy bonus": entropy_bonus,
    "two heads": lambda v: (
        v.total / v.mask.sum() + 0.3 * F.cross_entropy(v.rejected.flatten(0, 1), v.others.flatten(), ignore_index=0)
    ),
    "distillation": distillation,
    "distillation of hidden states": hidden_distillation,
    "preference (DPO)": preference,
    "preference by length (SimPO)": preference_by_length,
    "odds ratio (ORPO)": odds_ratio,
    "clipped policy, whitened advantages (PPO)": whitened,
    "clipped policy of groups (GRPO)": of_groups,
    "triplet": triplet,
    "cosine": cosine,
    "margin ranking": ranking,
    "binary, positives weighted by the batch": balanced_binary,
    "mean squares by the targets' variance": explained_variance,
    "heteroscedastic": heteroscedastic,
    "dice of each sequence": dice,
}
REFUSED: Mapping[str, Loss] = {
    "contrastive, in the batch": contrastive,
    "dice of the batch": dice_of_the_batch,
    "perplexity": lambda v: (v.total / v.mask.sum()).exp(),
    "with a balance loss of experts": balance,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Two residual layers on tokens, and two heads."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head, self.second = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        others: torch.Tensor,
        mask: torch.Tensor,
        score: torch.Tensor,
        teacher: torch.Tensor,
        items: torch.Tensor,
    ) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        given = {"labels": labels, "others": others, "mask": mask, "score": score, "teacher": teacher, "items": items}
        logits, rejected = self.head(hidden), self.second(hidden)
        return self.loss(Values(hidden=hidden, logits=logits, rejected=rejected, head=self.head.weight, **given))


def usual_model(name: str) -> nn.Module:
    """The model with a loss by name, in float64."""
    torch.manual_seed(0)
    return Model((EQUAL | REFUSED)[name]).double()


def usual_batch(*, is_sparse: bool = False, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """A batch with about 40 % of valid tokens; sparse, only the first token of the first sequence counts."""
    generator = torch.Generator().manual_seed(1 + is_sparse)
    shape = (batch, TOKENS)
    mask = (torch.rand(shape, generator=generator) > 0.6).double()
    if is_sparse:
        mask = torch.zeros(shape, dtype=torch.float64)
    mask[0, 0] = 1
    labels = torch.randint(CLASSES, shape, generator=generator).masked_fill(mask == 0, -100)
    return {
        "tokens": torch.randint(CLASSES, shape, generator=generator),
        "labels": labels,
        "others": torch.randint(1, CLASSES, shape, generator=generator),
        "mask": mask,
        "score": torch.randn(batch, generator=generator, dtype=torch.float64),
        "teacher": torch.randn((*shape, CLASSES), generator=generator, dtype=torch.float64),
        "items": torch.tensor(17.0, dtype=torch.float64),
    }
