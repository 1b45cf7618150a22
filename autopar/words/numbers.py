"""Numbers in words: three digits, units, and ticks of axes."""

from math import floor, log10

MAX_NAME_CHARS = 120
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def readable_bytes(count: float) -> str:
    """Decimal units: ``37 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{digits(count)} {unit}"
        count /= 1000
    return f"{digits(count)} TB"


def readable_seconds(seconds: float) -> str:
    """Seconds as s, ms or µs: ``3.4 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.9995:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds * 1e6)} µs"


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(8.3), duration(200), duration(7260), duration(200_000)
    ('8 s', '3 min 20 s', '2 h 1 min', '2 d 7 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def readable_rate(count_per_s: float) -> str:
    """A whole number from 100, three digits below: ``3,308,731`` and ``2.83``."""
    return f"{count_per_s:,.0f}" if count_per_s >= 99.95 else f"{count_per_s:.3g}"


def readable_count(count: float) -> str:
    """``8.03 billion``."""
    for unit in ("", " thousand", " million"):
        if count < 999.5:
            return f"{digits(count)}{unit}"
        count /= 1000
    return f"{digits(count)} billion"


def digits(value: float) -> str:
    """Three digits, without zeros at the end; a larger number is whole."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def amount(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix.

    >>> amount(70781.07, "tokens/s"), amount(312e12, "FLOP/s"), amount(16), amount(0.0119)
    ('70.8 k tokens/s', '312 TFLOP/s', '16', '0.0119')
    """
    is_of_unit = unit.split("/")[0] in ("FLOP", "bytes", "B")
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            gap = "" if is_of_unit else " " if unit else ""
            return f"{digits(value / factor)} {prefix}{gap}{unit}".rstrip()
    return f"{digits(value)} {unit}".rstrip()


def quantity(value: float, unit: str) -> str:
    """A number in its unit, seconds and bytes in the prefix that fits.

    >>> quantity(0.0034, "s"), quantity(14930558976.0, "bytes"), quantity(16.0, "")
    ('3.4 ms', '14.9 GB', '16')
    """
    if unit == "s":
        return readable_seconds(value)
    return readable_bytes(value) if unit == "bytes" else amount(value, unit)


def percent(part: float, digits: int = 0) -> str:
    """A part of 1; small ones are not called nothing.

    >>> percent(0.483), percent(0.0004), percent(0.0)
    ('48 %', '< 0.1 %', '0 %')
    """
    if 0 < part < 0.001:
        return "< 0.1 %"
    return f"{part:.{max(digits, 1) if 0 < part < 0.0095 else digits}%}".replace("%", " %")


def capped(text: str, most: int = MAX_NAME_CHARS) -> str:
    """A text of bounded length."""
    return text if len(text) <= most else text[: most - 1] + "…"


def tick_seconds(seconds: float) -> str:
    """Of a tick: a round number, without zeros at the end.

    >>> tick_seconds(0), tick_seconds(0.25), tick_seconds(2.0)
    ('0', '250 ms', '2 s')
    """
    if seconds == 0:
        return "0"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.999:
            return f"{seconds * factor:.6g} {unit}"
    return f"{seconds * 1e6:.6g} µs"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`.

    >>> ticks(0, 93)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    base: float = 10.0 ** floor(log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    first = -(-low // step)
    return [round((first + i) * step, 12) for i in range(int((high - first * step) / step + 1.0001))]
