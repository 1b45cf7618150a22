"""Errors of correct programs divided by their measured noise: the table behind the factor of docs/semantics.md, S8.

    python tools/noise_ratios.py [MODEL ...]

A float64 program runs with random labels on two and four ranks in this process. The unmodified model runs in float32
against the float64 program. A ratio belongs to a tensor above the tolerance. The table has the largest ratio of each
model, with noise of one, two, four and eight runs. It needs timm and transformers.
"""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.capture.loss_arguments import named_outputs
from autopar.capture.request import Request
from autopar.ir.sharding import Mesh
from autopar.runtime.verify.error_metrics import Tensors, tensor_errors
from autopar.runtime.verify.noise import MAX_RUNS, Change, Noise
from autopar.runtime.verify.reference import Steps
from autopar.testing.equivalence import run_labels, run_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tiny"))
random_labels = import_module("random_labels").random_labels

Built = tuple[nn.Module, dict[str, torch.Tensor]]
COUNTS = (1, 2, 4, 8)
MESHES = (Mesh.of(dp=2), Mesh.of(tp=2), Mesh.of(dp=2, tp=2))


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(x)
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


def of_timm(name: str, size: int = 48, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        timm = import_module("timm")
        model = Classifier(timm.create_model(name, num_classes=10, **options))
        return model, {"x": torch.randn(4, 3, size, size), "target": torch.arange(4)}

    return build


def of_transformers(config: str, model: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        made = getattr(transformers, config)(vocab_size=128, **options)
        tokens = torch.randint(0, 128, (4, 16))
        return getattr(transformers, model)(made), {"input_ids": tokens, "labels": tokens}

    return build


_SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], Built]] = {
    **{
        name: of_timm(name)
        for name in (
            "resnet18", "resnet50", "efficientnet_b0", "mobilenetv3_small_100", "mobilenetv2_050", "regnety_002",
            "ghostnet_050", "convnext_atto", "mnasnet_small", "repvgg_a0", "densenet121",
        )
    },
    "vit_tiny": of_timm("vit_tiny_patch16_224", img_size=48),
    "bert": of_transformers("BertConfig", "BertForMaskedLM", **_SIZES, **_QUIET),
    "gpt2": of_transformers(
        "GPT2Config", "GPT2LMHeadModel", n_layer=4, n_embd=64, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": of_transformers("LlamaConfig", "LlamaForCausalLM", **_SIZES),
}  # fmt: skip


def values(steps: Steps) -> dict[str, torch.Tensor]:
    own = {"gradient " + n: v for n, v in steps.gradients.items()} | {
        "buffer " + n: v for n, v in steps.buffers.items()
    }
    return {"loss": steps.losses[0], **own, **steps.outputs}


def every_run(noise: Noise) -> list[Steps]:
    found: list[Steps] = []
    noise.verdict(lambda runs: found.__setitem__(slice(None), runs), lambda _, count: count < MAX_RUNS)
    return found


def ratios(found: Tensors, reference: Tensors, moved: Sequence[Tensors], tolerance: float) -> dict[int, float]:
    """The largest ratio of a tensor above the tolerance, by number of noise runs."""
    largest = {}
    for count in COUNTS:
        errors = tensor_errors(found, reference, moved[:count]).values()
        largest[count] = max((m.error / max(m.noise, 1e-300) for m in errors if m.error > tolerance), default=0.0)
    return largest


def of_split(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[dict[int, float], Steps]:
    run = run_model(Request.of(model, inputs))
    reference = Steps([run.loss], [], dict(run.gradients), dict(run.outputs), {}, dict(run.updates))
    moved, worst = [values(m) for m in every_run(run.noise)], dict.fromkeys(COUNTS, 0.0)
    for seed, mesh in enumerate(MESHES):
        out = run_labels(run, random_labels(run.program, run.analysis(mesh), mesh, seed), mesh)
        found = Steps([out.loss], [], dict(out.gradients), dict(out.outputs), {}, dict(out.updates))
        one = ratios(values(found), values(reference), moved, 1e-9)
        worst = {count: max(worst[count], one[count]) for count in COUNTS}
    return worst, reference


def of_float32(model: nn.Module, inputs: dict[str, torch.Tensor], exact: Steps) -> dict[int, float]:
    held = {n: p.detach().clone() for n, p in model.named_parameters()}

    def run(change: Change | None) -> Steps:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(held[name] if change is None else change.of(name, held[name]))
        model.zero_grad()
        given = inputs if change is None else {n: change.of(n, v) for n, v in inputs.items()}
        loss = named_outputs(model(**given))["loss"]
        loss.backward()
        names = exact.gradients.keys()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and n in names}
        return Steps([loss.detach()], [], gradients)

    plain = run(None)
    reference = {n: v for n, v in values(exact).items() if n in values(plain)}
    moved = [
        {n: reference[n].double() + (v.double() - values(plain)[n].double()) for n, v in values(m).items()}
        for m in every_run(Noise(run, plain, samples=0))
    ]
    return ratios(values(plain), reference, moved, 2e-4)


def main() -> None:
    warnings.filterwarnings("ignore")
    print("| model | split, float64: 1, 2, 4, 8 runs | captured, float32: 1, 2, 4, 8 runs |\n|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        started = time.monotonic()
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        split, exact = of_split(model, inputs)
        single = of_float32(model, inputs, exact)
        cells = (", ".join(f"{each[c]:.1f}" for c in COUNTS) for each in (split, single))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
