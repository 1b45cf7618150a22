"""The labeller finds Megatron's patterns by itself: no rule, price or option names a module."""

from dataclasses import replace

import pytest
import torch
from label_cases import LAYERS, analysis_of, block_of, in_block, labelled, operator, port, program_of
from listed_conversions import listed_conversions
from torch import nn
from torch.nn import functional as F
from work import lines_run

from autopar.capture.analysis import analyse
from autopar.capture.program import capture_program
from autopar.errors import PlanError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.sharding import I, P, R, S
from autopar.search.labels.check import check
from autopar.search.labels.solve import label

MODELS = ("llama", "gpt2")
TP = Degrees(tp=2)
PLAIN = Degrees(tp=2, sequence_parallel=False)
REQUIRED = Degrees(tp=2, sequence_parallel=True)
BOTH = Degrees(tp=2, dp_shard=2)


@pytest.mark.parametrize("degrees", [TP, PLAIN, Degrees(tp=4), BOTH], ids=str)
def test_llama_is_column_then_row(degrees: Degrees) -> None:
    found, block = labelled("llama", degrees), LAYERS["llama"]
    for name in ("q", "k", "v"):
        assert port(found, block, f"self_attn_{name}_proj_weight") == S(0)
        assert operator(found, block, f"self_attn.{name}_proj:linear:0") == "o.0"
    for name in ("gate", "up"):
        assert port(found, block, f"mlp_{name}_proj_weight") == S(0)
    assert port(found, block, "self_attn_o_proj_weight") == S(1)
    assert port(found, block, "mlp_down_proj_weight") == S(1)
    assert operator(found, block, "self_attn.o_proj:linear:0") == "i.0"
    assert operator(found, block, "mlp.down_proj:linear:0") == "i.0"


def test_gpt2_splits_heads_inside_its_packed_projection() -> None:
    found, block = labelled("gpt2", TP), LAYERS["gpt2"]
    assert port(found, block, "attn_c_attn_weight") == S(1, 1)  # (in, 3 heads width): position 1
    assert port(found, block, "attn_c_attn_bias") == S(0, 1)
    assert port(found, block, "attn_c_proj_weight") == S(0)
    assert port(found, block, "mlp_c_fc_weight") == S(1)
    assert port(found, block, "mlp_c_fc_bias") == S(0)
    assert port(found, block, "mlp_c_proj_weight") == S(0)
    assert port(found, block, "attn_c_proj_bias") in (I, R)  # added once, after the sum or by the first rank


@pytest.mark.parametrize("degrees", [TP, PLAIN, BOTH, Degrees(tp=8)], ids=str)
def test_vocabulary_is_split_at_both_ends_and_no_rank_holds_all_logits(degrees: Degrees) -> None:
    if degrees.tp == 8:
        found = label(program_of("gpt2"), analysis_of("gpt2"), degrees, ClusterSpec.preset("8xcpu"))
        head, names = "transformer_wte_weight", ("transformer.wte:embedding:0",)
    else:
        found, head, names = labelled("llama", degrees), "lm_head_weight", ("model.embed_tokens:embedding:0",)
    assert operator(found, "prologue", names[0]) == "v.0"
    assert operator(found, "epilogue", "cross_entropy_loss:0") == "v.0"
    assert operator(found, "epilogue", "lm_head:linear:0") == "o.0"
    assert port(found, "epilogue", head) == S(0)
    assert block_of(found, "epilogue").results["lm_head"][1] == S(2)
    assert block_of(found, "epilogue").results["div"] == (I, I)


def test_tied_table_has_one_type() -> None:
    found = labelled("gpt2", TP)
    assert port(found, "prologue", "transformer_wte_weight") == port(found, "epilogue", "transformer_wte_weight")


@pytest.mark.parametrize("degrees", [TP, REQUIRED], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_sequence_parallelism(model: str, degrees: Degrees) -> None:
    found, block = labelled(model, degrees), LAYERS[model]
    assert port(found, block, "x") == S(1)
    assert all(types[1] == S(1) for types in block_of(found, block).results.values())
    norms = [t for name, t in block_of(found, block).ports.items() if "norm" in name or name.startswith("ln_")]
    assert norms and all(t[1] == R for t in norms)
    sent = in_block(model, found, block)
    assert [(c.source, c.target) for c in sent] == [(S(1), R), (P, S(1))] * 2
    assert [c.forward for c in sent] == ["all_gather", "reduce_scatter"] * 2
    assert [c.backward for c in sent] == ["reduce_scatter", "all_gather"] * 2


@pytest.mark.parametrize("model", MODELS)
def test_without_sequence_parallelism_two_all_reduces_each_way(model: str) -> None:
    found, block = labelled(model, PLAIN), LAYERS[model]
    assert port(found, block, "x") == I
    sent = in_block(model, found, block)
    assert [(c.source, c.target) for c in sent] == [(I, R), (P, I)] * 2
    assert [c.forward for c in sent].count("all_reduce") == 2
    assert [c.backward for c in sent].count("all_reduce") == 2
    whole = 4 * 16 * 64 * 4  # batch × sequence × hidden × bytes
    assert {c.bytes for c in sent} == {2 * (2 - 1) / 2 * whole}


@pytest.mark.parametrize("model", MODELS)
def test_data_parallel_splits_the_batch_everywhere(model: str) -> None:
    found = labelled(model, BOTH)
    program = program_of(model)
    for index, block in enumerate(program.blocks):
        for name, role in block.ports.items():
            if role == "parameter":
                assert found.blocks[index].ports[name][0] == R
            elif role in ("input", "value") and analysis_of(model).dims[index][name].sizes:
                assert found.blocks[index].ports[name][0] == S(0)
    sent = listed_conversions(program, analysis_of(model), found.blocks, found.mesh)
    assert [(c.source, c.target, c.forward, c.backward) for c in sent if c.mesh_dim == "dp"] == [
        (P, I, "all_reduce", None)  # the sums of the denominator and of the loss
    ] * 2


@pytest.mark.parametrize("model", MODELS)
def test_mesh_dimensions_of_size_one_are_invariant(model: str) -> None:
    found = labelled(model, PLAIN)
    for block in found.blocks:
        assert all(label[0] == "I" for label in block.labels.values())
        assert all(types[0] == I for types in (*block.ports.values(), *block.results.values()))
    assert not labelled(model, Degrees()).objective


@pytest.mark.parametrize("cluster", ["4xcpu", "8xh100", "64xa100-80gb", "8xrtx4090"])
def test_the_pattern_does_not_depend_on_the_cluster(cluster: str) -> None:
    assert labelled("llama", TP, cluster=cluster).blocks == labelled("llama", TP).blocks


@pytest.mark.parametrize("degrees", [TP, PLAIN, BOTH], ids=str)
def test_labels_do_not_depend_on_layers(degrees: Degrees) -> None:
    few, many = labelled("llama", degrees), labelled("llama", degrees, layers=32)
    assert few.blocks == many.blocks


def test_same_labels_every_time() -> None:
    first = labelled("llama", BOTH)
    again = label(program_of("llama"), analyse(program_of("llama")), BOTH, ClusterSpec.preset("4xcpu"))
    assert again.blocks == first.blocks
    assert again.objective == first.objective


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("degrees", [TP, PLAIN, BOTH, REQUIRED, Degrees(dp_shard=4)], ids=str)
def test_proven_optimal_and_legal(model: str, degrees: Degrees) -> None:
    found = labelled(model, degrees)
    assert found.gap < 1e-9
    check(program_of(model), analysis_of(model), found.blocks, found.mesh)


def test_more_freedom_is_never_dearer() -> None:
    """Allowing sequence parallelism, or the hidden axes, enlarges the space: the optimum cannot get worse.

    But for tie-breaks, which count the candidates that come first.
    """
    objective = {d: labelled("llama", d).objective["tp"] for d in (TP, PLAIN, REQUIRED)}
    assert objective[TP] <= min(objective[PLAIN], objective[REQUIRED]) + 1e-3
    hidden = label(
        program_of("llama"),
        analysis_of("llama"),
        TP,
        ClusterSpec.preset("4xcpu"),
        hidden_axes=True,
    )
    assert hidden.objective["tp"] <= objective[TP] + 1e-3


def test_labelling_costs_the_same_for_any_number_of_layers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        dtype=torch.bfloat16,
    )
    tokens = torch.zeros(2, 4096, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    program = capture_program(model, {"input_ids": tokens, "labels": tokens})
    # thirty more calls of the same block: only prices change
    few, few_layers = program, analyse(program)
    calls = program.calls
    middle = [c for c in calls if program.blocks[c.block].name == "model.layers.0"]
    program = replace(program, calls=(*calls[:-1], *[middle[-1]] * 30, calls[-1]))
    analysis, cluster = analyse(program), ClusterSpec.preset("8xh100")
    degrees = Degrees(tp=4, dp_shard=2)
    found = label(program, analysis, degrees, cluster)
    label(few, few_layers, degrees, cluster)  # what is kept from one labelling to the next is not counted
    work = lines_run(lambda: label(few, few_layers, degrees, cluster))
    assert lines_run(lambda: label(program, analysis, degrees, cluster)) < 1.02 * work
    assert found.gap < 1e-9
    assert port(found, "model.layers.0", "x") == S(1)


# ---- degrees that do not divide ----


def refused(model: str, degrees: Degrees, **sizes: int) -> list[str]:
    program = program_of(model, **sizes)
    with pytest.raises(PlanError) as caught:
        label(program, analyse(program), degrees, ClusterSpec.preset("8xcpu"))
    return [str(p) for p in caught.value.problems]


def notes(model: str, degrees: Degrees, **sizes: int) -> list[str]:
    program = program_of(model, **sizes)
    return list(label(program, analyse(program), degrees, ClusterSpec.preset("8xcpu")).notes)


def test_a_batch_and_a_required_sequence_that_cannot_be_cut_are_named_at_once() -> None:
    assert refused("llama", Degrees(tp=7, dp_shard=3, sequence_parallel=True), vocabulary=8) == [
        "batch: 4 sequences are not divisible by dp=3 (nearest legal degrees 2 and 4)",
        "sequence_parallel: sequence length 16 is not divisible by tp=7 (nearest legal degrees 4 and 8)",
    ]


def test_operators_that_a_degree_does_not_divide_are_computed_whole_at_a_price() -> None:
    found = notes("llama", Degrees(tp=7), vocabulary=8)
    assert [note for note in found if "heads" in note] == [
        "tp=7: self_attn:scaled_dot_product_attention:0 is computed whole on every rank, because 7 does not divide 4 "
        "heads; a rank then does 1.37 × its even share of the work; nearest legal degree 4",
    ]


def test_layers_of_one_product_are_split_along_the_residual_stream() -> None:
    """Every layer is a block of its own, so each width is an axis of a value between blocks."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.linear(x))

    class Deep(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    program = capture_program(Deep(*(Layer() for _ in range(4))), (torch.randn(64, 512),))
    found = label(program, analyse(program), Degrees(tp=2), ClusterSpec.preset("2xh100"))
    labels = [label[1] for block in found.blocks for key, label in block.labels.items() if "linear:0" in key]
    assert len(labels) >= 2  # the first layer has no gradient of its input
    assert all(name not in ("I", "R") for name in labels)


def test_a_tied_vocabulary_is_named_once() -> None:
    found = notes("gpt2", Degrees(tp=16, sequence_parallel=False), heads=16, vocabulary=100)
    assert [note for note in found if "rows" in note] == [
        "tp=16: transformer.wte:embedding:0, lm_head:linear:0 and cross_entropy_loss:0 are computed whole on every "
        "rank, because 16 does not divide 100 rows; a rank then does 1.46 × its even share of the work; nearest legal "
        "degrees 15 and 17"
    ]


def test_a_degree_that_splits_nothing_is_refused() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.down(self.up(x).relu()), y)

    program = capture_program(Narrow(), {"x": torch.randn(4, 3), "y": torch.randn(4, 3)})
    with pytest.raises(PlanError) as caught:
        label(program, analyse(program), Degrees(tp=7), ClusterSpec.preset("8xcpu"))
    assert [str(problem) for problem in caught.value.problems] == [
        "width: down.weight has 5 columns or rows, not divisible by tp=7 (nearest legal degree 5)",
        "width: down.weight has 3 columns or rows, not divisible by tp=7 (nearest legal degree 3)",
    ]


def test_axes_of_parameters_are_padded() -> None:
    """An uneven vocabulary and uneven widths are split all the same, and what is padded is noted."""
    program = program_of("llama", heads=30, vocabulary=161)
    found = label(program, analyse(program), Degrees(tp=4), ClusterSpec.preset("8xcpu"))
    block = "model.layers.0"
    assert operator(found, block, "self_attn.q_proj:linear:0") == "o.0"
    assert operator(found, block, "self_attn.o_proj:linear:0") == "i.0"
    embedding = next(b for b in found.blocks if "model_embed_tokens_weight" in b.ports)
    assert embedding.ports["model_embed_tokens_weight"][1] == S(0)
    assert [n for n in found.notes if "padding" in n] == [
        "tp=4: model.embed_tokens.weight: 161 rows are held as 4 × 41, the last ones padding",
        "tp=4: model.layers.0.self_attn.v_proj.weight: 15 heads are held as 4 × 4, the last ones padding",
        "tp=4: lm_head.weight: 161 rows are held as 4 × 41, the last ones padding",
    ]


def test_where_most_would_be_padding_another_axis_is_split() -> None:
    found = notes("gpt2", Degrees(tp=4), heads=6)
    assert [note for note in found if "6 heads" in note] == [
        "tp=4: attn:scaled_dot_product_attention:0 is split along another axis, because 4 does not divide 6 heads; "
        "nearest legal degrees 3 and 6"
    ]


def test_sequence_length_matters_only_where_sequence_parallelism_is_required() -> None:
    program = program_of("llama", heads=12)
    degrees, cluster = Degrees(tp=3), ClusterSpec.preset("8xcpu")
    found = refused("llama", replace(degrees, sequence_parallel=True), heads=12, vocabulary=162)
    assert found == ["sequence_parallel: sequence length 16 is not divisible by tp=3 (nearest legal degrees 2 and 4)"]
    program = program_of("llama", heads=12, vocabulary=162)
    allowed = label(program, analyse(program), degrees, cluster)
    assert port(allowed, "model.layers.0", "x") == I
    assert any("no sequence parallelism" in note for note in allowed.notes)


def test_sequence_parallelism_needs_a_sequence() -> None:
    from tiny_models import mlp

    model, inputs = mlp(2)
    program = capture_program(model, {name: value[:, 0] for name, value in inputs.items()})
    with pytest.raises(PlanError, match="no input has a sequence"):
        label(program, analyse(program), REQUIRED, ClusterSpec.preset("4xcpu"))
