"""Functions of ranks in tests of peak memory: `Ranks.run("memory_ranks:name", ...)`."""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autopar.api import parallelize

LENGTH, VOCABULARY = 8, 4096


def configured(width: int) -> Any:
    """A Llama of eight layers. Width 512 has 151 MB in float32, and tensors of up to 8.4 MB."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
        tie_word_embeddings=False,
    )


def on_meta(width: int) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = LlamaForCausalLM(configured(width))
    return model


def _anonymous_bytes() -> int:
    """The resident memory of this process without mapped files, whose pages the system may drop at any time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def _returned_at_once() -> Iterator[None]:
    """Memory of more than 64 KiB goes back to the system when it is freed. Else holes between tensors would count."""
    libc, mmap_threshold = ctypes.CDLL(None), -3
    assert libc.mallopt(mmap_threshold, 1 << 16)
    try:
        yield
    finally:
        libc.mallopt(mmap_threshold, 32 << 20)  # the most to which it rises by itself


def peak_of(action: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes the memory of this process rises while it acts, seen every millisecond, and the result."""
    gc.collect()
    begin = peak = _anonymous_bytes()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(1e-3):
            peak = max(peak, _anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = action()
    finally:
        over.set()
        thread.join()
    return max(peak, _anonymous_bytes()) - begin, result


def peaks(rank: int, world_size: int, wish: Mapping[str, Any], width: int, folder: str, target: str) -> dict[str, int]:
    """The rise of memory in each call, and the bytes of this rank's part. "sent" is an import of rank 0's model."""
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH)
    batch = {"input_ids": ids, "labels": ids}

    def made(width: int, **options: Any) -> Any:
        return parallelize(on_meta(width), f"{world_size}xcpu", example_inputs=batch, plan=wish, **options)

    small = made(64)  # imports, caches and process groups take memory once
    small.export_hf(f"{target}/small")
    small.save(f"{target}/small saved", step=1)
    small.load(f"{target}/small saved")
    found: dict[str, int] = {}
    with _returned_at_once():
        found["import"], parallel = peak_of(lambda: made(width, state=folder))
        found["part"] = sum(getattr(p, "_local_tensor", p).nbytes for p in parallel.parameters())
        found["export"], _ = peak_of(lambda: parallel.export_hf(f"{target}/exported"))
        found["save"], _ = peak_of(lambda: parallel.save(f"{target}/saved", step=1))
        found["load"], _ = peak_of(lambda: parallel.load(f"{target}/saved"))
        del parallel
        model = on_meta(width) if rank else on_meta(width).to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data.fill_(rank)  # memory that is written to counts
        options = {"example_inputs": batch, "plan": wish}
        found["sent"], parallel = peak_of(lambda: parallelize(model, f"{world_size}xcpu", **options))
    return found
