"""Models with gradients of their own, flows and others, with the losses of their training scripts."""

from typing import Any

import torch
import torch.nn.functional as F
from strangers_list import (
    BATCH,
    CLASSES,
    GRADIENT,
    PADDING,
    SIZES,
    STATISTICS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Built,
    Losing,
    classes,
    classified,
    padding,
    stranger,
    token_loss,
    tokens,
)
from torch import nn

Tensor = torch.Tensor


# Gradients of their own.


@stranger("snntorch", GRADIENT)
def spikes() -> Built:
    import snntorch
    from snntorch import surrogate

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.leaky = snntorch.Leaky(beta=0.9, spike_grad=surrogate.atan())
            self.last = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            one, two = self.leaky.init_leaky(), self.last.init_leaky()
            found = []
            for _ in range(3):
                spiked, one = self.leaky(self.first(x), one)
                _, two = self.last(self.second(spiked), two)
                found.append(two)
            return torch.stack(found).mean(0)

    return classified(Spiking(), torch.randn(BATCH, 16))


@stranger("entmax", GRADIENT)
def sparse_probabilities() -> Built:
    from entmax import entmax15, sparsemax_loss

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            x = entmax15(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1) @ v
            found: Tensor = sparsemax_loss(self.out(x.mean(1)), target).mean()
            return found

    return Sparse(), (torch.randn(BATCH, TOKENS, WIDTH), classes())


@stranger("torchdiffeq", GRADIENT)
def adjoint() -> Built:
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

    def loss(field: Any, x: Tensor, y: Tensor) -> Tensor:
        end = odeint_adjoint(field, x, torch.tensor([0.0, 1.0], dtype=x.dtype), method="rk4")[-1]
        return F.mse_loss(end, y)

    return Losing(Field(), loss), (torch.randn(BATCH, 8), torch.randn(BATCH, 8))


@stranger("pytorch-revgrad", GRADIENT)
def domains() -> Built:
    from pytorch_revgrad import RevGrad

    class Adversarial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU())
            self.classes = nn.Linear(WIDTH, CLASSES)
            self.domains = nn.Sequential(RevGrad(alpha=0.5), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

        def forward(self, x: Tensor, target: Tensor, domain: Tensor) -> Tensor:
            x = self.body(x)
            return F.cross_entropy(self.classes(x), target) + F.cross_entropy(self.domains(x), domain)

    return Adversarial(), (torch.randn(BATCH, 16), classes(), torch.arange(BATCH) % 2)


@stranger("torchani", SIZES)
def energies() -> Built:
    from torchani.nn import AtomicNetwork, Ensemble, SingleNN

    symbols = ("H", "C", "O")
    members = [SingleNN(symbols, AtomicNetwork((26, WIDTH, 3)), embed_kind="continuous") for _ in range(2)]

    def loss(model: Any, elements: Tensor, features: Tensor, energy: Tensor) -> Tensor:
        return F.mse_loss(model(elements, features), energy)

    missing = torch.arange(5) >= torch.tensor([5, 4, 3, 5])[:, None]
    elements = torch.randint(0, 3, (BATCH, 5)).masked_fill(missing, -1)
    return Losing(Ensemble(members), loss), (elements, torch.randn(BATCH, 5, 16), torch.randn(BATCH))


# Flows and operators.


@stranger("normflows")
def spline_flow() -> Built:
    import normflows

    flows = [normflows.flows.AutoregressiveRationalQuadraticSpline(4, 1, 16) for _ in range(2)]
    model = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4, trainable=False), flows)

    def loss(model: Any, x: Tensor) -> Tensor:
        found: Tensor = model.forward_kld(x)
        return found

    return Losing(model, loss), (torch.randn(8, 4),)


@stranger("zuko")
def conditional_flow() -> Built:
    import zuko

    def loss(flow: Any, x: Tensor, context: Tensor) -> Tensor:
        found: Tensor = -flow(context).log_prob(x).mean()
        return found

    flow = zuko.flows.NSF(4, context=3, transforms=2, hidden_features=[WIDTH])
    return Losing(flow, loss), (torch.randn(8, 4), torch.randn(8, 3))


@stranger("nflows", STATISTICS)
def masked_flow() -> Built:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.transforms import BatchNorm, CompositeTransform, MaskedAffineAutoregressiveTransform

    steps = [MaskedAffineAutoregressiveTransform(4, 16), BatchNorm(4), MaskedAffineAutoregressiveTransform(4, 16)]

    def loss(flow: Any, x: Tensor) -> Tensor:
        found: Tensor = -flow.log_prob(x).mean()
        return found

    return Losing(Flow(CompositeTransform(steps), StandardNormal([4])), loss), (torch.randn(8, 4),)


@stranger("neuraloperator")
def fourier_operator() -> Built:
    from neuralop.models import FNO

    model = FNO(n_modes=(4, 4), hidden_channels=16, in_channels=2, out_channels=1, n_layers=2)
    return model, (torch.randn(BATCH, 2, 8, 8), torch.randn(BATCH, 1, 8, 8)), F.mse_loss


@stranger("torch-rechub", PADDING)
def interests() -> Built:
    from torch_rechub.basic.layers import MLP

    class Interests(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(VOCABULARY, 16, padding_idx=0)
            self.weigh, self.tower = MLP(64, dims=[16], activation="prelu"), MLP(32, dims=[16], activation="prelu")

        def forward(self, history: Tensor, target: Tensor, clicked: Tensor) -> Tensor:
            old, new = self.items(history), self.items(target)[:, None].expand(-1, history.shape[1], -1)
            pairs = torch.cat([new, old, new - old, new * old], -1)
            weight = self.weigh(pairs.flatten(0, 1)).view(*history.shape, 1) * (history > 0)[..., None]
            scores = self.tower(torch.cat([(weight * old).sum(1), new[:, 0]], -1)).squeeze(-1)
            return F.binary_cross_entropy_with_logits(scores, clicked)

    history = tokens(length=8).masked_fill(~padding(length=8), 0)
    return Interests(), (history, tokens(length=1)[:, 0], torch.randint(0, 2, (BATCH,)).float())


@stranger("loralib")
def adapted() -> Built:
    import loralib

    model = nn.Sequential(loralib.Linear(16, WIDTH, r=4), nn.GELU(), loralib.Linear(WIDTH, CLASSES, r=4))
    loralib.mark_only_lora_as_trainable(model, bias="lora_only")
    return classified(model, torch.randn(BATCH, 16))


@stranger("g-mlp-pytorch")
def gated_units() -> Built:
    from g_mlp_pytorch import gMLP

    def loss(model: Any, ids: Tensor) -> Tensor:
        return token_loss(model(ids[:, :-1]), ids[:, 1:])

    model = gMLP(num_tokens=VOCABULARY, dim=WIDTH, depth=2, seq_len=TOKENS, causal=True, prob_survival=0.9)
    return Losing(model, loss), (tokens(length=TOKENS + 1),)
