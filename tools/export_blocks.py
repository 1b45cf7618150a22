"""Write `cost_model/blocks/FAMILY.json`: what a block of each family of decoders costs, as expressions.

    python tools/export_blocks.py            all families
    python tools/export_blocks.py llama      some

Each family is captured as a small model whose sizes are pairwise distinct, in bfloat16, and labelled at tp = 2 with and
without sequence parallelism; sizes become the symbols of `autopar.cost_model.expressions`. `exported` is what the
tests compare the files with.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.cost_model.block_export import block_works
from autopar.cost_model.expressions import ROLES, BlockWork, Expr, Family, symbol, to_json
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Degrees
from autopar.ir.program import Program
from autopar.planning import capture_for, choose_labels

FOLDER = Path(__file__).resolve().parent.parent / "cost_model" / "blocks"
SIZES = {
    "b": 34, "s": 22, "h": 380, "a": 20, "g": 4, "e": 14, "f": 122, "v": 202, "l": 46, "x": 58, "y": 3, "m": 62, "w": 74
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A family: a transformers config whose values are symbols or numbers, and sizes other than `SIZES`.

    `symbols` are those that the family has, beside b and s.
    """

    model_type: str
    config: Mapping[str, Any]
    symbols: str
    sizes: Mapping[str, int] = field(default_factory=dict)

    def size(self, name: str) -> int:
        return {**SIZES, **self.sizes}[name]


_LLAMA = {
    "hidden_size": "h",
    "intermediate_size": "f",
    "num_attention_heads": "a",
    "num_key_value_heads": "g",
    "head_dim": "e",
    "vocab_size": "v",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
CAPTURES: Mapping[str, Capture] = {
    "gpt2": Capture(
        model_type="gpt2",
        config={"n_embd": "h", "n_inner": "f", "n_head": "a", "vocab_size": "v", "n_positions": "l", "n_layer": 2},
        symbols="haefvl",
        sizes={"h": 280},
    ),
    "llama": Capture(model_type="llama", config=_LLAMA, symbols="hagefv"),
}


def by_size(capture: Capture) -> dict[int, Expr]:
    """What each captured size is called: symbols, halves of a rotated head, queries per key head, s + 1 labels."""
    found: dict[int, Expr] = {}
    for name in capture.symbols:
        found[capture.size(name)] = symbol(name)
    if "e" in capture.symbols:
        found[capture.size("e") // 2] = symbol("e") / 2
    if "g" in capture.symbols:
        found[capture.size("a") // capture.size("g")] = symbol("a") / symbol("g")
    found[capture.size("s") + 1] = symbol("s") + 1
    return found


def captured(capture: Capture) -> Program:
    """The captured model of a family."""
    import transformers

    transformers.logging.set_verbosity_error()
    fields = {key: capture.size(value) if isinstance(value, str) and value in SIZES else value
              for key, value in capture.config.items()}  # fmt: skip
    config = transformers.CONFIG_MAPPING[capture.model_type](**fields, bos_token_id=0, eos_token_id=1)
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    ids = torch.empty(capture.size("b"), capture.size("s"), dtype=torch.long, device="meta")
    degrees = Degrees(tp=2, micro_batch=capture.size("b"))
    return capture_for(model, {"input_ids": ids, "labels": ids.clone()}, degrees)


def exported(name: str) -> Family[Expr]:
    """The expressions of a family, captured anew. Raises `ValueError` where its blocks are not those of a decoder."""
    capture = CAPTURES[name]
    program = captured(capture)
    roles = roles_of(name, program)
    found: dict[str, list[tuple[str, BlockWork[Expr]]]] = {}
    for variant in ("tp", "sp"):
        degrees = Degrees(tp=2, micro_batch=capture.size("b"), sequence_parallel=variant == "sp")
        cluster = ClusterSpec.parse("8xa100-80gb")
        degrees, analysis, labelling = choose_labels(program, cluster, degrees)
        works = block_works(program, analysis, labelling.blocks, degrees.mesh, by_size=by_size(capture), roles=roles)
        for index, role in roles.items():
            earlier = dict(found.get(role, ())).get(variant)
            if earlier is None:
                found.setdefault(role, []).append((variant, works[index]))
    blocks = tuple((role, tuple(found[role])) for role in ROLES if role in found)
    return Family(name=name, source=f"transformers {capture.model_type}, bfloat16", blocks=blocks)


def roles_of(name: str, program: Program) -> dict[int, str]:
    """What each distinct block is: what comes before the layers, a dense or an expert layer, what comes after."""
    found: dict[int, str] = {}
    for call in program.calls:
        if call.phase == "denominator":
            continue
        if call.path in ("prologue", "epilogue"):
            found[call.block] = "first" if call.path == "prologue" else "last"
        else:
            targets = {str(node.target) for node in program.blocks[call.block].graph.nodes}
            found[call.block] = "moe_layer" if any("grouped_mm" in target for target in targets) else "layer"
    if sorted(set(found.values()) - {"moe_layer"}) not in (["first", "last", "layer"], ["first", "last"]):
        raise ValueError(f"{name}: blocks {[block.name for block in program.blocks]} are not those of a decoder")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(CAPTURES), help=", ".join(CAPTURES))
    logging.disable(logging.WARNING)
    for name in parser.parse_args().families:
        text = to_json(exported(name))
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {len(text) / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
