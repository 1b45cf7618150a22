"""Numbers as a report prints them: three digits, units, and ticks of axes."""

from math import floor, log10

MAX_NAME_CHARS = 120
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def readable_seconds(seconds: float) -> str:
    """Three digits of s, ms or µs.

    >>> readable_seconds(3.7), readable_seconds(0.0034), readable_seconds(1234.5), readable_seconds(0.0)
    ('3.70 s', '3.40 ms', '1234 s', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def readable_bytes(count: float) -> str:
    """Three digits and a decimal unit.

    >>> readable_bytes(37e9), readable_bytes(999.9e6), readable_bytes(12)
    ('37.0 GB', '1.00 GB', '12.0 bytes')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{_three(count)} {unit}"
        count /= 1000
    return f"{_three(count)} TB"


def _three(value: float) -> str:
    """Three digits, zeros at the end among them."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def amount(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix.

    >>> amount(70781.07, "tokens/s"), amount(312e12, "FLOP/s"), amount(16), amount(0.0119)
    ('70.8 k tokens/s', '312 TFLOP/s', '16', '0.0119')
    """
    is_of_unit = unit.split("/")[0] in ("FLOP", "bytes", "B")
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            gap = "" if is_of_unit else " " if unit else ""
            return f"{_digits(value / factor)} {prefix}{gap}{unit}".rstrip()
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def quantity(value: float, unit: str) -> str:
    """A number in its unit, seconds and bytes in the prefix that fits.

    >>> quantity(0.0034, "s"), quantity(14930558976.0, "bytes"), quantity(16.0, "")
    ('3.40 ms', '14.9 GB', '16')
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
