"""Models of attention, of mixtures, of codebooks and of tables, with the masks and losses of their training scripts."""

from typing import Any

import torch
import torch.nn.functional as F
from strangers_list import (
    BATCH,
    CLASSES,
    COUPLED,
    EXPERTS,
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
    labels,
    padding,
    stranger,
    token_loss,
    tokens,
)
from torch import nn

Tensor = torch.Tensor


def _masked_loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The next-token loss of a decoder that takes a boolean mask."""
    return token_loss(model(ids, mask=mask)[:, :-1], labels(ids, mask)[:, 1:])


# Attention.


@stranger("local-attention", PADDING)
def local_transformer() -> Built:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=2, dim_head=16, local_attn_window_size=8
    )
    return Losing(model, _masked_loss), (tokens(), padding())


@stranger("linear-attention-transformer", PADDING)
def linear_attention() -> Built:
    from linear_attention_transformer import LinearAttentionTransformerLM

    model = LinearAttentionTransformerLM(
        num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=4, causal=True, blindspot_size=4
    )

    def loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        return token_loss(model(ids, input_mask=mask)[:, :-1], labels(ids, mask)[:, 1:])

    return Losing(model, loss), (tokens(), padding())


@stranger("reformer-pytorch", GRADIENT, PADDING)
def hashed_attention() -> Built:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(
        num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=2, bucket_size=4, n_hashes=2, causal=True
    )

    def loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        return token_loss(model(ids, input_mask=mask)[:, :-1], labels(ids, mask)[:, 1:])

    return Losing(model, loss), (tokens(), padding())


@stranger("performer-pytorch", PADDING)
def random_features() -> Built:
    from performer_pytorch import PerformerLM

    model = PerformerLM(
        num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=4, dim_head=8, feature_redraw_interval=None
    )
    return Losing(model, _masked_loss), (tokens(), padding())


@stranger("routing-transformer", PADDING, STATISTICS)
def clustered_attention() -> Built:
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(
        num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=4, window_size=8, causal=True
    )

    def loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        logits, auxiliary = model(ids, input_mask=mask)
        total: Tensor = token_loss(logits[:, :-1], labels(ids, mask)[:, 1:]) + auxiliary.sum()
        return total

    return Losing(model, loss), (tokens(), padding())


@stranger("perceiver-pytorch", PADDING)
def latent_array() -> Built:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        dim=WIDTH, queries_dim=WIDTH, logits_dim=CLASSES, depth=1, num_latents=8, latent_dim=WIDTH, latent_heads=2
    )

    def loss(model: Any, x: Tensor, mask: Tensor, queries: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(x, mask=mask, queries=queries).mean(1), target)

    x, queries = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, 4, WIDTH)
    return Losing(model, loss), (x, padding(), queries, classes())


@stranger("conformer", STATISTICS)
def convolution_attention() -> Built:
    from conformer import Conformer

    model = Conformer(dim=WIDTH, depth=2, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=5)
    return model, (torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)), F.mse_loss


@stranger("nystrom-attention", PADDING, COUPLED)
def landmarks() -> Built:
    from nystrom_attention import Nystromformer

    model = Nystromformer(dim=WIDTH, depth=2, dim_head=8, heads=4, num_landmarks=4, pinv_iterations=3)

    def loss(model: Any, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        error = (model(x, mask=mask) - y).square().mean(-1) * mask
        total: Tensor = error.sum() / mask.sum()
        return total

    return Losing(model, loss), (torch.randn(BATCH, TOKENS, WIDTH), padding(), torch.randn(BATCH, TOKENS, WIDTH))


@stranger("axial-attention")
def axes_of_images() -> Built:
    from axial_attention import AxialImageTransformer

    model = AxialImageTransformer(dim=WIDTH, depth=2, heads=4, dim_heads=8, reversible=False)
    return model, (torch.randn(BATCH, WIDTH, 8, 8), torch.randn(BATCH, WIDTH, 8, 8)), F.mse_loss


@stranger("slot-attention")
def slots() -> Built:
    from slot_attention import SlotAttention

    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.decoder = SlotAttention(num_slots=4, dim=WIDTH, iters=2), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.decoder(self.attention(x)).mean(1), x.mean(1))

    return Slots(), (torch.randn(BATCH, TOKENS, WIDTH),)


@stranger("minGRU-pytorch")
def minimal_recurrence() -> Built:
    from minGRU_pytorch.minLM import minLM

    def loss(model: Any, ids: Tensor) -> Tensor:
        found: Tensor = model(ids, return_loss=True)
        return found

    return Losing(minLM(num_tokens=VOCABULARY, dim=WIDTH, depth=2), loss), (tokens(length=TOKENS + 1),)


@stranger("mambapy", GRADIENT)
def parallel_scan() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.layers = Mamba(MambaConfig(d_model=WIDTH, n_layers=2, d_state=8))

        def forward(self, ids: Tensor) -> Tensor:
            return token_loss(self.head(self.layers(self.embedding(ids[:, :-1]))), ids[:, 1:])

    return Decoder(), (tokens(length=TOKENS + 1),)


# Mixtures of experts, and codebooks.


class _Routed(nn.Module):
    """A mixture between an embedding and a head; the loss has the mixture's own terms."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.embedding, self.mixture, self.head = nn.Embedding(VOCABULARY, WIDTH), mixture, nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.mixture(self.embedding(ids[:, :-1]))
        out, more = (found[0], found[1]) if isinstance(found, tuple) else (found, 0.0)
        return token_loss(self.head(out), ids[:, 1:]) + more


def _mixture_of_experts(routing: type) -> nn.Module:
    """A mixture of pytorch-mixtures."""
    from pytorch_mixtures import MoEConfig

    sizes: dict[str, Any] = {"hidden_dim": WIDTH, "intermediate_dim": 64, "num_experts": 4, "topk": 2}
    more: dict[str, Any] = {"expert_fn": "ff", "expert_act": "silu", "router_fn": None, "capacity_factor": 1.5}
    return _Routed(routing(MoEConfig(**sizes, **more, dtype=torch.get_default_dtype())))


@stranger("pytorch-mixtures", EXPERTS)
def experts_of_tokens() -> Built:
    from pytorch_mixtures import TopkMoE

    return _mixture_of_experts(TopkMoE), (tokens(length=TOKENS + 1),)


@stranger("pytorch-mixtures", EXPERTS, COUPLED)
def tokens_of_experts() -> Built:
    from pytorch_mixtures import ExpertChoiceMoE

    return _mixture_of_experts(ExpertChoiceMoE), (tokens(length=TOKENS + 1),)


@stranger("mh-moe", EXPERTS)
def noisy_experts() -> Built:
    from mh_moe.main import SparseMoE

    return _Routed(SparseMoE(dim=WIDTH, num_experts=4, top_k=2)), (tokens(length=TOKENS + 1),)


@stranger("torch-mice", EXPERTS)
def convex_experts() -> Built:
    from torch_mice import VectorHull

    return _Routed(VectorHull(WIDTH, petals=4, invert=False)), (tokens(length=TOKENS + 1),)


class _Coded(nn.Module):
    """An autoencoder around a codebook."""

    def __init__(self, code: nn.Module) -> None:
        super().__init__()
        self.encoder, self.code, self.decoder = nn.Linear(WIDTH, WIDTH), code, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        coded, _, *more = self.code(self.encoder(x))
        return F.mse_loss(self.decoder(coded), x) + (more[0].sum() if more else 0.0)


@stranger("vector-quantize-pytorch", STATISTICS)
def codebook() -> Built:
    from vector_quantize_pytorch import VectorQuantize

    model = _Coded(VectorQuantize(dim=WIDTH, codebook_size=16, decay=0.8, commitment_weight=1.0))
    return model, (torch.randn(BATCH, TOKENS, WIDTH),)


@stranger("vector-quantize-pytorch", COUPLED)
def codes_without_table() -> Built:
    from vector_quantize_pytorch import LFQ

    model = LFQ(codebook_size=16, dim=WIDTH, entropy_loss_weight=0.1, diversity_gamma=1.0)

    class Coded(_Coded):
        def forward(self, x: Tensor) -> Tensor:
            coded, _, entropy = self.code(self.encoder(x))
            total: Tensor = F.mse_loss(self.decoder(coded), x) + entropy
            return total

    return Coded(model), (torch.randn(BATCH, TOKENS, WIDTH),)


# Tables, sequences and graphs.


@stranger("tab-transformer-pytorch")
def tables() -> Built:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(categories=(5, 6, 7), num_continuous=4, dim=WIDTH, dim_out=CLASSES, depth=2, heads=4)
    return classified(model, torch.randint(0, 5, (BATCH, 3)), torch.randn(BATCH, 4))


@stranger("rtdl_revisiting_models", STATISTICS)
def residual_table() -> Built:
    from rtdl_revisiting_models import ResNet

    model = ResNet(
        d_in=8, d_out=CLASSES, n_blocks=2, d_block=WIDTH, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0
    )
    return classified(model, torch.randn(BATCH, 8))


@stranger("rtdl_num_embeddings")
def numbers_in_pieces() -> Built:
    from rtdl_num_embeddings import PeriodicEmbeddings

    embedding = PeriodicEmbeddings(8, 16, lite=False)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(128, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    return classified(model, torch.randn(BATCH, 8))


@stranger("pytorch-crf", PADDING)
def random_field() -> Built:
    from torchcrf import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.field = CRF(CLASSES, batch_first=True)

        def forward(self, ids: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
            found: Tensor = -self.field(self.out(self.embedding(ids)), tags, mask=mask, reduction="token_mean")
            return found

    return Tagger(), (tokens(), torch.randint(0, CLASSES, (BATCH, TOKENS)), padding())


def _embedder() -> nn.Module:
    return nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


@stranger("pytorch-metric-learning", COUPLED, SIZES)
def triplets() -> Built:
    from pytorch_metric_learning.losses import TripletMarginLoss

    return _embedder(), (torch.randn(8, 16), torch.arange(8) % 3), TripletMarginLoss(margin=0.1)


@stranger("pytorch-metric-learning", COUPLED, SIZES)
def contrasts() -> Built:
    from pytorch_metric_learning.losses import SupConLoss

    return _embedder(), (torch.randn(8, 16), torch.arange(8) % 3), SupConLoss(temperature=0.1)


@stranger("egnn-pytorch", PADDING)
def moving_points() -> Built:
    from egnn_pytorch import EGNN

    def loss(model: Any, feats: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        found, moved = model(feats, at, mask=mask)
        total: Tensor = (((moved - at).square().sum(-1) + found.square().mean(-1)) * mask).sum() / mask.sum()
        return total

    return Losing(EGNN(dim=WIDTH, m_dim=8), loss), (
        torch.randn(BATCH, 8, WIDTH),
        torch.randn(BATCH, 8, 3),
        padding(length=8) | (torch.arange(8) == 0),
    )


@stranger("pytorch-tabnet", STATISTICS)
def chosen_columns() -> Built:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(8, CLASSES, n_d=8, n_a=8, n_steps=2, virtual_batch_size=4, group_attention_matrix=torch.eye(8))

    def loss(model: Any, x: Tensor, target: Tensor) -> Tensor:
        logits, sparse = model(x)
        total: Tensor = F.cross_entropy(logits, target) - 1e-3 * sparse
        return total

    return Losing(model, loss), (torch.randn(BATCH, 8), classes())


@stranger("pytorch-tcn")
def causal_convolutions() -> Built:
    from pytorch_tcn import TCN

    model = TCN(num_inputs=8, num_channels=[16, 16], kernel_size=3, use_norm="weight_norm", dropout=0.0)
    return model, (torch.randn(BATCH, 8, TOKENS), torch.randn(BATCH, 16, TOKENS)), F.mse_loss


@stranger("ncps")
def liquid() -> Built:
    from ncps.torch import CfC

    class Liquid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = CfC(8, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(self.cell(x)[0][:, -1])
            return out

    return classified(Liquid(), torch.randn(BATCH, 6, 8))
