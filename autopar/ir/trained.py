"""The parameters that a model trains, as words: all, low-rank adapters beside a frozen model, or all but some modules.

    all                                   every parameter that the model itself trains
    lora:r=16,targets=q_proj+v_proj       adapters of rank 16 beside these linear layers; the model is frozen
    qlora:r=16                            the same, beside all linear layers, whose frozen weights have 4 bits (or 8)
    frozen:embed_tokens+lm_head           all but the parameters of these modules

``alpha`` scales an adapter's result by alpha / r (2 · r by default). ``also`` names modules that train beside adapters.
A module is named by the end of its path. (Hu et al. 2021, "LoRA"; Dettmers et al. 2023, "QLoRA".)
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from autopar.errors import InputError, Problem, did_you_mean

TrainedKind = Literal["all", "lora", "qlora", "frozen"]
_KINDS: tuple[TrainedKind, ...] = get_args(TrainedKind)
DEFAULT_RANK, MOST_RANK = 16, 65_536
QUANTISED_BLOCK = 64  # elements of a 4-bit weight that share a scale (QLoRA, section 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedParameters:
    """The parameters that a model trains."""

    kind: TrainedKind = "all"
    rank: int = DEFAULT_RANK  # of an adapter
    alpha: int = 2 * DEFAULT_RANK  # of the scale alpha / rank
    targets: tuple[str, ...] = ()  # linear layers with adapters; (): all but the head
    also: tuple[str, ...] = ()  # modules that train beside adapters
    modules: tuple[str, ...] = ()  # of "frozen"
    bits: int = 4  # of an element of a frozen weight of "qlora"

    @property
    def quantised_bytes(self) -> float:
        """Bytes of an element of a quantised weight, with its part of a scale of 16 bits."""
        return self.bits / 8 + 2 / QUANTISED_BLOCK

    @property
    def has_adapters(self) -> bool:
        return self.kind in ("lora", "qlora")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split("+"))
    if not all(re.fullmatch(r"[\w.]+", name) for name in names):
        raise ValueError("must be names of modules with + between them, such as q_proj+v_proj")
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANK:
        raise ValueError(f"must be a whole number from 1 to {MOST_RANK:,}")
    return int(text)


def _bits(text: str) -> int:
    if text not in ("4", "8"):
        raise ValueError("must be 4 or 8")
    return int(text)


_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "r": ("rank", _count), "alpha": ("alpha", _count), "targets": ("targets", _names), "also": ("also", _names),
    "bits": ("bits", _bits),
}  # fmt: skip


def trained_from(text: str) -> TrainedParameters:
    """The value of the words of ``--trains``. Raises `InputError` with every word that cannot be used."""
    kind, colon, rest = text.strip().partition(":")
    if kind not in _KINDS:
        raise InputError(f"--trains {text[:80]!r}: {kind[:40]!r} is unknown; {did_you_mean(kind, _KINDS)}")
    values, problems = dict[str, Any](), list[Problem]()
    if kind == "frozen":
        try:
            return TrainedParameters(kind="frozen", modules=_names(rest))
        except ValueError as error:
            raise InputError(f"--trains {text[:80]!r}: what is frozen {error}") from None
    if kind == "all":
        if colon:
            raise InputError(f"--trains {text[:80]!r}: all takes no options; leave out what follows it")
        return TrainedParameters()
    for part in filter(None, rest.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in _OPTIONS:
            rule = f"is unknown; {did_you_mean(name, tuple(_OPTIONS))}"
            problems.append(Problem(path=name[:40], rule=rule))
            continue
        if name == "bits" and kind == "lora":
            problems.append(Problem(path=name, rule="is of qlora, whose frozen weights are quantised"))
            continue
        field, parse = _OPTIONS[name]
        try:
            values[field] = parse(value)
        except ValueError as error:
            problems.append(Problem(path=name, value=value[:80], rule=str(error)))
    if problems:
        raise InputError(f"--trains {text[:80]!r} cannot be used", problems)
    return TrainedParameters(kind=kind, **{"alpha": 2 * values.get("rank", DEFAULT_RANK), **values})
