"""The words of what a model trains."""

import pytest

from autopar.errors import InputError
from autopar.ir.trained import TrainedParameters, trained_from


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", TrainedParameters()),
        ("lora", TrainedParameters(kind="lora", rank=16, alpha=32)),
        ("lora:r=4", TrainedParameters(kind="lora", rank=4, alpha=8)),
        (
            "lora:r=8,alpha=24,targets=q_proj+v_proj,also=embed_tokens",
            TrainedParameters(kind="lora", rank=8, alpha=24, targets=("q_proj", "v_proj"), also=("embed_tokens",)),
        ),
        ("qlora:bits=8", TrainedParameters(kind="qlora", bits=8)),
        ("frozen:encoder+head.norm", TrainedParameters(kind="frozen", modules=("encoder", "head.norm"))),
    ],
)
def test_words(text: str, expected: TrainedParameters) -> None:
    assert trained_from(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lorra", "lora"),
        ("all:r=4", "leave out"),
        ("lora:r=0", "from 1 to"),
        ("lora:r=four,rank=3", "rank"),
        ("lora:targets=q proj", "names of modules"),
        ("lora:bits=4", "qlora"),
        ("qlora:bits=5", "4 or 8"),
        ("lora:alpha=-1", "from 1 to"),
        ("frozen:", "names of modules"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        trained_from(text)


def test_bytes_of_a_quantised_weight() -> None:
    assert TrainedParameters(kind="qlora").quantised_bytes == pytest.approx(0.53125)  # 4 bits, a 64th of 2 bytes
    assert TrainedParameters(kind="qlora", bits=8).quantised_bytes == pytest.approx(1.03125)
