"""Exported blocks: the files equal a new capture, and agree with captures of real models."""

import warnings
from functools import cache
from itertools import product
from typing import Any

import pytest
from suites import long, thinned

pytest.importorskip("transformers")

import torch
from config_rows import decoders, row_of_config
from exported_blocks import tool, totals
from torch import fx, nn

from autopar._torch.private import fake_tensors
from autopar.capture.request import Request
from autopar.cost_model.published.families import family_name, sizes_of_row
from autopar.cost_model.published.row import Row
from autopar.cost_model.work.block_work import evaluate, family, free_symbols, to_plain
from autopar.cost_model.work.export import block_works
from autopar.cost_model.work.operator_cost import local_flops
from autopar.ir.cluster import ClusterSpec
from autopar.ir.degrees import Degrees
from autopar.ir.program import Program
from autopar.models.load import resolve_model
from autopar.planning.fixed import capture_for, choose_labels
from autopar.presets.models import model_presets
from autopar.rules.variants import by_label, variants

ROLES = ("first", "layer", "moe_layer", "last")
BATCH, SEQUENCE = 2, 512
TOLERANCE = 1e-3
# where experts meet sequence parallelism the labeller's choice for the router depends on the sizes
ROWS = [(name, variant) for name in ("gpt2", "llama3-8b", "qwen3-8b") for variant in ("tp", "sp")]
ROWS += [("mixtral-8x7b", "tp")]


FILES = thinned(
    product(sorted(tool().CAPTURES), (False, True)),
    keep=[("llama", False), ("mixtral", False), ("gpt2", True)],
)


class Pruned(nn.Module):
    """Two products of zero width between two that compute."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # torch has nothing to initialise
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 0), nn.Linear(0, 8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


def test_a_product_of_size_zero_computes_nothing() -> None:
    degrees = Degrees(micro_batch=2, dp_shard=2)
    program = capture_for(Request.of(Pruned(), {"x": torch.randn(2, 4), "target": torch.randn(2, 4)}), degrees)
    degrees, analysis, labelling = choose_labels(program, ClusterSpec.preset("8xa100-80gb"), degrees)
    works = block_works(program, analysis, labelling.blocks, degrees.mesh)
    assert sum(len(work.products) for work in works) == 2


@pytest.mark.parametrize(("name", "over_data"), FILES)
def test_file_is_what_a_capture_gives(name: str, over_data: bool) -> None:
    stored = tool().file_of(name, over_data=over_data).read_text(encoding="utf-8")
    assert stored == tool().lines(to_plain(tool().exported(name, over_data=over_data)), "") + "\n"


POSITIONS = ("n_positions", "max_seq_len", "max_position_embeddings")


def family_and_sizes(config: Any, sequence: int) -> tuple[Any, dict[str, float]]:
    """The family of a preset and its sizes, by the columns of a published run; and the positions of its own table."""
    row = row_of_config(config, "row", seq_len=sequence)
    assert isinstance(row, Row)
    has_table = not dict(config.get("attn_config") or {}).get("alibi")
    table = next((float(config[key]) for key in POSITIONS if config.get(key)), 0.0) * has_table
    return family(family_name(row)), {**sizes_of_row(row), "l": table}


@pytest.mark.parametrize("name", decoders())
def test_parameters_of_presets(name: str) -> None:
    preset = model_presets()[name]
    blocks, sizes = family_and_sizes(preset.config, 1)
    numbers = {**sizes, "b": 1.0, "s": 1.0, "S": 1.0, "t": 1.0}
    found = evaluate(blocks, numbers)
    total = 0.0
    for role in found.roles:
        work = found.block(role, "tp")
        count = 1 if role in ("first", "last") else preset.num_layers
        total += count * (work.parameters_split + work.parameters_whole + work.parameters_expert)
    tied = preset.config.get("tie_word_embeddings", preset.config["model_type"] == "gemma2")
    assert total - tied * numbers["v"] * numbers["h"] == preset.num_parameters


@cache
def captured(name: str) -> Program:
    """Two layers of a preset at its own widths."""
    import transformers

    config = dict(model_presets()[name].config)
    layers = next(key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    made = transformers.CONFIG_MAPPING[config.pop("model_type")](**{**config, layers: 2})
    made.use_cache = False
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).train()
    ids = torch.empty(BATCH, SEQUENCE, dtype=torch.long, device="meta")
    return capture_for(Request.of(model, {"input_ids": ids, "labels": ids.clone()}), Degrees(tp=4, micro_batch=BATCH))


def works_of(name: str, tp: int, is_sequence_parallel: bool) -> tuple[Any, ...]:
    """Program, analysis, labels, and the work of every block, evaluated."""
    program = captured(name)
    degrees = Degrees(tp=tp, micro_batch=BATCH, sequence_parallel=is_sequence_parallel)
    degrees, analysis, labelling = choose_labels(program, ClusterSpec.preset("8xa100-80gb"), degrees)
    works = block_works(program, analysis, labelling.blocks, degrees.mesh)
    numbers = {"b": BATCH, "s": SEQUENCE, "S": SEQUENCE, "t": tp}
    assert {n for work in works for n in free_symbols(work)} <= set(numbers)
    return program, analysis, labelling, degrees, [evaluate(work, numbers) for work in works]


@pytest.mark.parametrize("tp", [long(2), 4])
@pytest.mark.parametrize(("name", "variant"), thinned(ROWS, keep=[("gpt2", "tp"), ("llama3-8b", "sp")]))
def test_row_path_is_graph_path(name: str, variant: str, tp: int) -> None:
    """A family's expressions at a preset's sizes, against that preset captured at its own sizes and labelled there."""
    config = model_presets()[name].config
    program, *_, works = works_of(name, tp, variant == "sp")
    blocks, numbers = family_and_sizes(config, SEQUENCE)
    numbers |= {"b": BATCH, "S": SEQUENCE, "t": tp, "g": max(numbers["g"], tp)}  # each rank holds a key head
    found = evaluate(blocks, numbers)
    for index, role in tool().roles_of(name, program).items():
        one, other = totals(found.block(role, variant)), totals(works[index])
        for what in one:
            assert one[what] == pytest.approx(other[what], rel=TOLERANCE), (role, what)


def flops_by_rules(program: Program, analysis: Any, labels: Any, degrees: Degrees, index: int) -> float:
    """Sums of `local_flops` over the operators of a block, which knows nothing of expressions."""
    whole = 0.0
    for node in program.blocks[index].operators:
        bound, split = analysis.bounds[index][node.name], dict[str, float]()
        for degree, label in zip(degrees.mesh.degrees, labels[index].labels[node.meta["key"]], strict=True):
            variant = by_label(variants(bound, degree), label)
            if variant.factor:
                split[variant.factor] = split.get(variant.factor, 1.0) * degree
        whole += local_flops(bound.rule, split)
    return whole


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_flops_are_those_of_the_rules(name: str) -> None:
    program, analysis, labelling, degrees, works = works_of(name, 4, False)
    for index in range(len(program.blocks)):
        expected = flops_by_rules(program, analysis, labelling.blocks, degrees, index)
        assert totals(works[index])["flops"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "hidden", "plan"),
    [
        long("bert-large", 96, {"tp": 2, "dp_shard": 2}),
        ("t5-large", 96, {"tp": 2}),
        ("vit-l-16", 96, {"tp": 2, "dp_shard": 2}),
        ("llama3-8b", 64, {"tp": 8, "sequence_parallel": True}),  # two tensor mesh dimensions
        long("qwen1.5-moe-a2.7b", 96, {"tp": 2, "dp_shard": 2}),
    ],
)
def test_any_captured_model(name: str, hidden: int, plan: dict[str, Any]) -> None:
    """Encoders, encoder-decoders and images too: symbols for batch, sequence and degrees, numbers for the rest."""
    resolved = resolve_model(name, layers=2, hidden=hidden, seq_len=None if name.startswith("vit") else 16, batch=2)
    degrees = Degrees(micro_batch=2, **plan)
    program = capture_for(Request.of(resolved.model, resolved.example_inputs), degrees)
    degrees, analysis, labelling = choose_labels(program, ClusterSpec.preset("8xa100-80gb"), degrees)
    numbers = {"b": 2, "s": 16, "S": 16, "t": degrees.tp, "d": degrees.dp, **degrees.mesh.as_dict()}
    works = block_works(program, analysis, labelling.blocks, degrees.mesh)
    for index, work in enumerate(works):
        expected = flops_by_rules(program, analysis, labelling.blocks, degrees, index)
        assert totals(evaluate(work, numbers))["flops"] == pytest.approx(expected, rel=1e-12)
    assert sum(evaluate(work, numbers).saved_eager_bytes for work in works) > 0


def test_saved_bytes_are_those_of_one_run_of_the_block() -> None:
    """The layer run once under autograd on one rank, all saved storages summed: no mapping to values is involved."""
    program, *_, works = works_of("llama3-8b", 1, False)
    index = next(i for i, role in tool().roles_of("llama", program).items() if role == "layer")
    block = program.blocks[index]
    saved: dict[int, int] = {}
    with fake_tensors():
        arguments = [torch.empty(n.meta["info"].shape, dtype=n.meta["info"].dtype)
                     for n in block.graph.nodes if n.op == "placeholder"]  # fmt: skip
        for tensor, port in zip(arguments, block.ports, strict=True):
            tensor.requires_grad_(port in block.differentiable_ports)
        kinds = zip(arguments, block.ports.values(), strict=True)
        given = {t.untyped_storage()._cdata for t, role in kinds if role != "value" or not t.requires_grad}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = fx.Interpreter(fx.GraphModule(nn.Module(), block.graph)).run(*arguments)
        assert out[0].requires_grad
    assert works[index].saved_eager_bytes == sum(saved.values())
