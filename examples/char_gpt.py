"""A character-level GPT as small public training scripts have it, moved to several ranks.

    python examples/char_gpt.py                                             # one device
    torchrun --standalone --nproc-per-node 4 examples/char_gpt.py --tp 2    # four ranks, the same losses

The lines marked `# ranks` are all that the script needs for several ranks. Without torchrun they do nothing.
"""

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # ranks

BLOCK, BATCH, EVERY = 32, 16, 20  # characters of a sequence, sequences of a micro-batch, steps between evaluations


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(BLOCK, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def configured(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character-level GPT.")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of one step")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=3)
    options = parser.parse_args()

    text = options.text.read_text(encoding="utf-8")
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    generator = torch.Generator().manual_seed(1337)

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator)
        rows = torch.stack([data[i : i + BLOCK + 1] for i in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    torch.manual_seed(1337)
    model: Any = GPT(len(chars))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # ranks
        part = tuple(x[: BATCH * options.tp // ranks] for x in get_batch())  # ranks
        generator.manual_seed(1337)
        plan = {"tp": options.tp, "zero": options.zero}
        model = autopar.parallelize(model, autopar.ClusterSpec.detect(), example_inputs=part, plan=plan)  # ranks
    local = model.local_batch if ranks > 1 else lambda batch: batch  # ranks
    no_sync = model.no_sync if ranks > 1 else contextlib.nullcontext  # ranks
    is_first = int(os.environ.get("RANK", "0")) == 0  # ranks

    optimizer = configured(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        total = 0.0
        for k in range(options.accumulate):
            last = k == options.accumulate - 1
            with contextlib.nullcontext() if last else no_sync():
                loss = model(*local(get_batch()))
                (loss / options.accumulate).backward()
            total += loss.item() / options.accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if is_first:
            print(f"step {step}: loss {total:.4f}")
        if step % EVERY == EVERY - 1:
            model.eval()
            with torch.no_grad():
                held_out = model(*local(get_batch())).item()
            model.train()
            if is_first:
                print(f"step {step}: evaluation {held_out:.4f}")


if __name__ == "__main__":
    main()
