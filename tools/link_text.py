"""Bandwidth of a link from free text, such as "8x HDR InfiniBand 200Gb/s per node" (`published_columns.py`).

The grammar of a text, its parts in any order, with or without spaces::

    rate    number unit                      400Gb/s, 50 GB/s, 3.2 Tbps, 400 Gbit/s, 400G, 100GbE
            generation [number]              HDR, NDR 400, HDR100: one InfiniBand port
    count   number "x", "x" number           8x, x8, 8 NICs, dual: ports
    scope   per [number] (device | host)     per GPU, /node, each server, per 2 GPUs
    ports   count scope                      8 NICs per node, one per GPU

The letter decides the unit: ``b`` is bits, ``B`` is bytes. A scope belongs to the rate before it, else to the rate
after it. Ports belong to a rate without a scope. A count without a scope counts the ports of a host. A rate without
any of these is of one device, or of a host if no port is as fast; this is a warning. Other words, and numbers of
devices or hosts, are skipped.

One text may state a bandwidth in several ways. If they differ, or a figure is outside the grammar, nothing is read
and `LinkReading.warning` says why.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

# One letter per kind of token, so that the rules below are regular expressions over kinds.
RATE, GENERATION, COUNT, COUNT_AFTER, NUMBER, WORD_NUMBER, SIZE = "R", "G", "C", "A", "N", "U", "Z"
PER, DEVICE, HOST, PORT, SCOPE, PORTS, DIRECTION, WORD = "P", "D", "H", "O", "S", "Q", "T", "w"

_PORT_GBIT = {"edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}  # InfiniBand Trade Association, 4 lanes
_DECIMAL = {"m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
_WORD_NUMBERS = {"one": 1, "single": 1, "two": 2, "dual": 2, "four": 4, "quad": 4, "eight": 8}
_MOST_PORTS = 32  # of a host: a larger bare number beside a generation is Gb/s
_FASTEST_PORT = 100e9  # XDR: a larger figure of nothing is a host's
_SAME = 1.02  # the largest ratio of two bandwidths that agree
_MAX_CHARS = 400

_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_SECOND = r"(?:\s*/\s*s(?:ec(?:ond)?)?\b|(?-i:ps)\b|\s+per\s+s(?:ec(?:ond)?)?\b)"
_NOUNS = {
    DEVICE: r"(?:gpus?|devices?|accelerators?|gcds?|chips?|ranks?)\b",
    HOST: r"(?:nodes?|hosts?|servers?|machines?|instances?|vms?|trays?)\b",
    PORT: r"(?:nics?|ports?|hcas?|adapt[eo]rs?|links?|rails?|cards?)\b",
}
_UNIT = (
    r"(?P<prefix>[mgt])(?:ega|iga|era)?(?P<binary>i)?"
    rf"(?:(?P<byte>bytes?|(?-i:B)){_SECOND}|(?:bits?|(?-i:b))(?:{_SECOND}|e?\b))"
)
# Kind and pattern, the first match counts. A name with a version ("ConnectX-6", "PCIe 4.0 x16") is a word.
_TOKENS = (
    (
        WORD,
        r"\b(?:pci(?:[\s-]?e(?:xpress)?)?(?:[\s-]*gen)?|nvlink|connectx|cx|gen)[\s-]?\d(?:\.\d)?\b(?:\s*x\s*\d+\b)?",
    ),
    (RATE, rf"(?P<rate>{_NUMBER})[\s-]*(?:{_UNIT}|(?P<bare>[gt])(?:e|ige)?\b)"),
    (GENERATION, rf"\b(?P<generation>{'|'.join(_PORT_GBIT)})-?(?P<port_gbit>\d{{3}})?\b"),
    (WORD, r"\d+:\d+"),  # a fat tree's ratio
    (COUNT, r"(?P<before>\d+)(?:[x×*]|\s[x×*](?![a-z]|\d+\b(?!\s*-?[mgt])))"),
    (COUNT_AFTER, r"[x×*]\s?(?P<after>\d+)\b(?!\.\d|\s*-?[mgt](?:i?b|\b))"),
    (PER, rf"\b(?:per|each|every)\b|/(?=\s*(?:{'|'.join(_NOUNS.values())}))"),
    (DIRECTION, r"\b(?:direction|way)\b"),
    *_NOUNS.items(),
    (SIZE, rf"{_NUMBER}\s?[kmgt]i?b\b"),
    (NUMBER, rf"(?P<number>{_NUMBER})"),
    (WORD_NUMBER, rf"\b(?P<word>{'|'.join(_WORD_NUMBERS)})\b"),
    (WORD, r"[a-z]+(?:-?\d[a-z0-9.]*)*"),
)
_KINDS = [kind for kind, _ in _TOKENS]
_SCANNER = re.compile("|".join(f"(?P<token_{i}>{pattern})" for i, (_, pattern) in enumerate(_TOKENS)), re.IGNORECASE)
_BOTH_DIRECTIONS = re.compile(r"\bbi-?dir|\bboth (?:directions|ways)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReading:
    """What a text states about a link.

    `bytes_per_s` is the bandwidth of one device in one direction, None if nothing was read. `warning` is None if the
    text is clear, or states no figure.
    """

    bytes_per_s: float | None = None
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class _Token:
    """A kind and its number: bytes/s of a rate, devices of a scope, ports per device of `PORTS`."""

    kind: str
    value: float = 0.0


def read_link(text: str | None, devices_per_host: float) -> LinkReading:
    """Read the bandwidth of one device from the text of a link."""
    if len(text or "") > _MAX_CHARS:
        return LinkReading(warning=f"is longer than {_MAX_CHARS} characters")
    tokens = _settled([_token(match) for match in _SCANNER.finditer(text or "")], devices_per_host)
    kinds = _kinds(tokens)
    if PER in kinds:
        return LinkReading(warning="states a figure per something that is no port, device or host")
    if RATE not in kinds:
        has_figure = re.search(f"[{COUNT}{COUNT_AFTER}{NUMBER}{SIZE}{PORTS}]", kinds)
        return LinkReading(warning="states a figure that cannot be read" if has_figure else None)
    readings = [_reading(tokens, kinds, match, devices_per_host) for match in _RATE_WITH_COUNTS.finditer(kinds)]
    known = [value for value, _ in readings]
    if not 0 < max(known) < inf:
        return LinkReading(warning="states a figure that cannot be read")
    if not _agree(known):
        return LinkReading(warning="states figures that contradict each other")
    per_device = known[0] / (2 if _BOTH_DIRECTIONS.search(text or "") else 1)
    if any(is_clear for _, is_clear in readings):
        return LinkReading(bytes_per_s=per_device)
    warning = f"does not say per port, device or host; read as {per_device / 1e9:g} GB/s per device"
    return LinkReading(bytes_per_s=per_device, warning=warning)


def _token(match: re.Match[str]) -> _Token:
    part = match.groupdict()
    kind = next(kind for i, kind in enumerate(_KINDS) if part[f"token_{i}"] is not None)
    if kind == RATE:
        scale = (_BINARY if part["binary"] else _DECIMAL)[(part["prefix"] or part["bare"]).lower()]
        return _Token(kind, _number(part["rate"]) * scale / (1 if part["byte"] else 8))
    if kind == GENERATION:
        gbit = part["port_gbit"] or _PORT_GBIT[part["generation"].lower()]
        return _Token(kind, float(gbit) * 1e9 / 8)
    if kind == WORD_NUMBER:
        return _Token(kind, float(_WORD_NUMBERS[part["word"].lower()]))
    return _Token(kind, _number(part["before"] or part["after"] or part["number"] or "0"))


def _number(digits: str) -> float:
    return float(digits.replace(",", ""))


def _agree(bandwidths: Sequence[float]) -> bool:
    return max(bandwidths) <= _SAME * min(bandwidths)


def _settled(tokens: list[_Token], devices_per_host: float) -> list[_Token]:
    """Apply the grammar's rules in their order until rates, counts, scopes and ports are left."""
    devices = {DEVICE: 1.0, HOST: devices_per_host}

    def bare_rate(of: Sequence[_Token]) -> list[_Token]:  # beside a generation
        number = next(one for one in of if one.kind == NUMBER)
        return [_Token(RATE, number.value * 1e9 / 8)] if number.value > _MOST_PORTS else list(of)

    def scope(of: Sequence[_Token]) -> list[_Token]:
        return [_Token(SCOPE, devices[of[-1].kind] * (of[1].value if len(of) == 3 else 1) or inf)]

    def ports(of: Sequence[_Token]) -> list[_Token]:
        return [_Token(PORTS, of[0].value / of[-1].value)]

    def count(of: Sequence[_Token]) -> list[_Token]:
        return [_Token(COUNT, of[0].value), *(one for one in of[1:] if one.kind in (RATE, GENERATION))]

    def said_twice(of: Sequence[_Token]) -> list[_Token]:  # "400 Gb/s (50 GB/s)"
        return [of[0], *(one for one in of[1:] if not _agree((of[0].value, one.value)))]

    def port_rate(of: Sequence[_Token]) -> list[_Token]:
        return [_Token(RATE, of[0].value)]

    def nothing(_: Sequence[_Token]) -> list[_Token]:
        return []

    number = f"[{NUMBER}{WORD_NUMBER}]"
    tokens = _rewrite(tokens, f"{PER}{number}?[{DEVICE}{HOST}]", scope)
    tokens = _rewrite(tokens, f"{PER}(?:[{PORT}{DIRECTION}]|$|(?=[{RATE}{COUNT}]))", nothing)
    if PER in _kinds(tokens):
        return tokens
    tokens = _rewrite(tokens, f"[{WORD}{DIRECTION}]", nothing)
    tokens = _rewrite(tokens, f"[{NUMBER}{WORD_NUMBER}{COUNT}][{DEVICE}{HOST}]{SCOPE}?", nothing)
    tokens = _rewrite(tokens, f"{GENERATION}{NUMBER}(?![{PORT}{SCOPE}])|{NUMBER}{GENERATION}", bare_rate)
    tokens = _rewrite(tokens, f"[{NUMBER}{WORD_NUMBER}{COUNT}]{PORT}?{SCOPE}", ports)
    tokens = _rewrite(tokens, f"{number}{PORT}|{WORD_NUMBER}[{RATE}{GENERATION}]|{NUMBER}{GENERATION}", count)
    tokens = _rewrite(tokens, f"[{DEVICE}{HOST}{PORT}]", nothing)
    tokens = _rewrite(tokens, f"{RATE}{{2,}}", said_twice)
    if RATE in _kinds(tokens):  # "800Gb/s per node (4x HDR)", but not "4x HDR 200Gb/s": there it names the rate
        counted = f"(?<={COUNT}){GENERATION}(?!{RATE})|(?<!{RATE}){GENERATION}(?={COUNT_AFTER})"
        return _rewrite(_rewrite(tokens, counted, port_rate), GENERATION, nothing)
    return _rewrite(tokens, GENERATION, port_rate)


def _kinds(tokens: Sequence[_Token]) -> str:
    return "".join(one.kind for one in tokens)


def _rewrite(tokens: Sequence[_Token], pattern: str, make: Callable[[Sequence[_Token]], list[_Token]]) -> list[_Token]:
    """Tokens with each run of kinds that matches a pattern replaced."""
    found: list[_Token] = []
    end = 0
    for match in re.finditer(pattern, _kinds(tokens)):
        found += [*tokens[end : match.start()], *make(tokens[match.start() : match.end()])]
        end = match.end()
    return [*found, *tokens[end:]]


# Counts belong to the next rate, the last ones to the last rate.
_RATE_WITH_COUNTS = re.compile(f"[^{RATE}]*{RATE}{COUNT_AFTER}?(?:[^{RATE}]*$)?")


def _reading(tokens: Sequence[_Token], kinds: str, match: re.Match[str], devices_per_host: float) -> tuple[float, bool]:
    """Bytes/s of one device as one rate states them, 0 if its counts differ; and whether the text says of what."""
    at = kinds.index(RATE, match.start())
    own = tokens[match.start() : match.end()]
    counts = {one.value for one in own if one.kind in (COUNT, COUNT_AFTER)} or {1.0}
    scopes = [one.value for one in tokens[at:] if one.kind == SCOPE]
    scopes += [one.value for one in reversed(tokens[:at]) if one.kind == SCOPE]
    ports = {one.value for one in tokens if one.kind == PORTS}
    rate, count = tokens[at].value, counts.pop()
    if counts or (len(ports) > 1 and not scopes):
        return 0.0, False
    if scopes:
        return rate * count / scopes[0], True
    if ports:
        return rate * ports.pop(), True
    has_count = any(one.kind in (COUNT, COUNT_AFTER) for one in own)
    is_of_host = has_count or rate > _FASTEST_PORT
    return rate * count / (devices_per_host if is_of_host else 1), has_count
