"""Twenty models of transformers, with the masks and losses of their training scripts."""

import functools
from typing import Any

import torch
from strangers_list import (
    BATCH,
    CLASSES,
    COUPLED,
    EXPERTS,
    PADDING,
    SIZES,
    STATISTICS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Built,
    Losing,
    labels,
    padding,
    stranger,
    tokens,
)

hugging_face = functools.partial(stranger, "transformers")


def _tokens_of(kind: str, head: str, extra: dict[str, Any] | None = None, **options: Any) -> Built:
    """A text model of two layers with the padding mask and the labels of a masked or causal language model."""
    import transformers

    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    given = {name: value for name, value in (common | options).items() if value is not None}
    model = getattr(transformers, head)(getattr(transformers, kind)(**given))
    ids, mask = tokens(), padding(dtype=torch.long)
    return model, {"input_ids": ids, "attention_mask": mask, "labels": labels(ids, mask)} | (extra or {})


@hugging_face(PADDING)
def albert() -> Built:
    return _tokens_of("AlbertConfig", "AlbertForMaskedLM", embedding_size=16)


@hugging_face(PADDING)
def roformer() -> Built:
    return _tokens_of("RoFormerConfig", "RoFormerForMaskedLM", embedding_size=WIDTH)


@hugging_face(PADDING)
def mpnet() -> Built:
    return _tokens_of("MPNetConfig", "MPNetForMaskedLM", pad_token_id=1)


@hugging_face(PADDING)
def electra() -> Built:
    model, inputs = _tokens_of("ElectraConfig", "ElectraForPreTraining", embedding_size=16)[:2]
    return model, inputs | {"labels": torch.randint(0, 2, (BATCH, TOKENS))}


@hugging_face(PADDING)
def funnel() -> Built:
    sizes: dict[str, Any] = {
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": WIDTH,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 64,
    }
    return _tokens_of("FunnelConfig", "FunnelForMaskedLM", num_hidden_layers=None, **sizes)


@hugging_face(PADDING)
def nystromformer() -> Built:
    sizes: dict[str, Any] = {"segment_means_seq_len": TOKENS, "num_landmarks": TOKENS, "conv_kernel_size": 3}
    return _tokens_of("NystromformerConfig", "NystromformerForMaskedLM", **sizes)


@hugging_face(PADDING)
def squeezebert() -> Built:
    found = _tokens_of(
        "SqueezeBertConfig", "SqueezeBertForSequenceClassification", embedding_size=WIDTH, num_labels=CLASSES
    )
    return found[0], found[1] | {"labels": torch.randint(0, CLASSES, (BATCH,))}


@hugging_face(PADDING, SIZES)
def longformer() -> Built:
    reach = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    reach[:, 0] = 1
    return _tokens_of("LongformerConfig", "LongformerForMaskedLM", {"global_attention_mask": reach}, attention_window=4)


@hugging_face()
def fnet() -> Built:
    model, inputs = _tokens_of("FNetConfig", "FNetForMaskedLM")[:2]
    return model, {name: value for name, value in inputs.items() if name != "attention_mask"}


@hugging_face(PADDING)
def convbert() -> Built:
    return _tokens_of("ConvBertConfig", "ConvBertForMaskedLM", embedding_size=WIDTH, conv_kernel_size=3)


@hugging_face(PADDING)
def pegasus() -> Built:
    sizes: dict[str, Any] = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return _tokens_of("PegasusConfig", "PegasusForConditionalGeneration", decoder_start_token_id=0, **sizes)


@hugging_face(PADDING)
def prophetnet() -> Built:
    sizes: dict[str, Any] = {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "ngram": 2,
    }
    sizes |= {"num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    sizes |= {"num_hidden_layers": None, "decoder_start_token_id": 0}
    return _tokens_of("ProphetNetConfig", "ProphetNetForConditionalGeneration", **sizes)


@hugging_face(PADDING)
def olmo2_left_padded() -> Built:
    model, inputs = _tokens_of("Olmo2Config", "Olmo2ForCausalLM", num_key_value_heads=2, use_cache=False)[:2]
    mask = inputs["attention_mask"].flip(1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    ids = inputs["input_ids"]
    return model, {"input_ids": ids, "attention_mask": mask, "position_ids": places, "labels": labels(ids, mask)}


@hugging_face(PADDING)
def persimmon() -> Built:
    return _tokens_of("PersimmonConfig", "PersimmonForCausalLM", use_cache=False)


@hugging_face(PADDING, EXPERTS)
def exaone_moe() -> Built:
    sizes: dict[str, Any] = {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "num_shared_experts": 1, "sliding_window": 8, "use_cache": False}
    return _tokens_of("ExaoneMoeConfig", "ExaoneMoeForCausalLM", **sizes)


@hugging_face(PADDING, SIZES)
def hubert_ctc() -> Built:
    import transformers

    config = transformers.HubertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        layerdrop=0.0,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    mask = padding(length=400, dtype=torch.long)
    targets = tokens(length=6).masked_fill(~padding(length=6), -100)
    inputs = {"input_values": torch.randn(BATCH, 400), "attention_mask": mask, "labels": targets}
    return transformers.HubertForCTC(config), inputs


@hugging_face(SIZES)
def vit_mae() -> Built:
    import transformers

    config = transformers.ViTMAEConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        decoder_hidden_size=WIDTH,
        decoder_intermediate_size=64,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTMAEForPreTraining(config), {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


@hugging_face(STATISTICS)
def patchtst() -> Built:
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=3,
        context_length=32,
        prediction_length=8,
        patch_length=8,
        patch_stride=4,
        d_model=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        loss="mse",
    )
    inputs = {"past_values": torch.randn(BATCH, 32, 3), "future_values": torch.randn(BATCH, 8, 3)}
    return transformers.PatchTSTForPrediction(config), inputs


@hugging_face(STATISTICS)
def levit() -> Built:
    import transformers

    config = transformers.LevitConfig(
        image_size=64,
        hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=CLASSES,
        down_ops=[["Subsample", 8, 4, 4, 2, 2], ["Subsample", 8, 6, 4, 2, 2]],
    )
    inputs = {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.randint(0, CLASSES, (BATCH,))}
    return transformers.LevitForImageClassification(config), inputs


@hugging_face(PADDING, COUPLED)
def chinese_clip() -> Built:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.ChineseCLIPConfig(
        text_config={**sizes, "vocab_size": VOCABULARY},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )

    def loss(model: Any, ids: torch.Tensor, mask: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask, pixel_values=pixels, return_loss=True).loss
        return found

    inputs = (tokens(), padding(dtype=torch.long), torch.randn(BATCH, 3, 32, 32))
    return Losing(transformers.ChineseCLIPModel(config), loss), inputs
