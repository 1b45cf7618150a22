"""Exports of trained models for transformers, and imports of them, with equal logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_ranks import built, names_in, tokens
from suites import thinned

from autopar.runtime.parameters.state_loading import open_state


@pytest.mark.parametrize(
    ("family", "world_size", "wish"),
    thinned(
        [
            ("llama", 4, {"tp": 2, "dp": 2, "zero": 3}),
            ("llama", 4, {"pp": 2, "tp": 2, "micro_batches": 2}),
            ("gpt2", 4, {"tp": 2, "dp": 2, "zero": 3}),
            ("gpt2", 4, {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2}),
            ("mixtral", 2, {"tp": 2}),
            ("mixtral", 2, {"dp": 2, "zero": 3}),
            ("phi3", 2, {"tp": 2}),
            ("phi3", 2, {"dp": 2, "zero": 3}),
            ("llama", 2, {"pp": 2, "micro_batches": 2, "precision": "bf16"}),
            ("gpt2", 2, {"dp": 2, "zero": 3, "precision": "bf16"}),
        ],
        keep=[
            ("gpt2", 2, {"dp": 2, "zero": 3, "precision": "bf16"}),
            ("mixtral", 2, {"tp": 2}),
        ],
    ),
)
def test_equal_logits(family: str, world_size: int, wish: dict[str, Any], worlds: Any, tmp_path: Path) -> None:
    """Bit-equal weights and equal logits in the unmodified model; names and ties as `save_pretrained` writes them.

    With a precision, the master weights are written. The logits of the ranks are then rounded.
    """
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "exported"
    results = worlds(world_size).run("export_ranks:exported", world_size, family, wish, str(folder), 20_000)
    state = results[0][1]
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    own = loaded.state_dict()
    assert own.keys() == state.keys() and all(torch.equal(own[name], value) for name, value in state.items())
    with torch.no_grad():
        expected = loaded.eval()(**tokens()).logits
    logits = next(result[0] for result in results if result[0] is not None)
    close = {"rtol": 0.05, "atol": 0.02} if "precision" in wish else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(logits.to(expected.dtype), expected, **close)
    for _, _, differing, again in results:
        assert not differing and "is not empty; name a new folder" in again
    loaded.save_pretrained(tmp_path / "theirs")
    assert names_in(folder) == names_in(tmp_path / "theirs")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    theirs, ours = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "theirs", folder))
    assert ours == theirs
    assert all((folder / file).is_file() for file in index["weight_map"].values())
    assert loaded.config.architectures == [type(built(family, 0)).__name__]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "theirs"]
    assert {n: e.shape for n, e in open_state(folder).items()} == {
        n: e.shape for n, e in open_state(tmp_path / "theirs").items()
    }
