"""From an entry of a file to the value that the code uses, and back: keys of files name decimal units, values are SI.

A number of a file may stand with its source, as ``{value: 80, source: data sheet}``.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from autopar.errors import Problem
from autopar.files.plain_data import hints_of, read_plain

GB, US = 1e9, 1e-6
# the key in files and its unit, by the name of the field; other fields have one name and one unit
_WRITTEN: Mapping[str, tuple[str, float]] = {
    "bytes_per_s": ("bandwidth_gb_per_s", GB),
    "call_s": ("call_us", US),
    "host_launch_s": ("host_launch_us", US),
    "latency_s": ("latency_us", US),
    "launch_s": ("launch_us", US),
    "link_bytes_per_s": ("link_gb_per_s", GB),
    "memory_bandwidth_bytes_per_s": ("memory_bandwidth_gb_per_s", GB),
    "memory_bytes": ("memory_gb", GB),
    "memory_bytes_per_s": ("memory_gb_per_s", GB),
    "peak_flops_per_s": ("peak_tflops", 1e12),
    "reserve_bytes": ("reserve_gb", GB),
}
_READ = {key: (name, unit) for name, (key, unit) in _WRITTEN.items()}
_T = TypeVar("_T")


def from_entry(kind: type[_T], entry: Any, **others: Any) -> _T:
    """The value of a checked entry, whose fields have the keys of the file; `others` are fields with other values."""
    hints, problems = hints_of(kind), list[Problem]()  # type: ignore[arg-type]  # a class is hashable
    given = ((name, inner) for name, inner in in_si(entry).items() if name in hints and name not in others)
    values = {name: read_plain(hints[name], inner, problems) for name, inner in given}
    assert not problems, problems
    return kind(**values | others)


def in_si(entry: Any, unit: float | None = None) -> Any:
    """The plain data of an entry by names of fields in SI units, without sources and absent figures."""
    keys = getattr(type(entry), "model_fields", ())
    if set(keys) == {"value", "source"}:
        return in_si(entry.value, unit)
    if keys:
        places = {key: _READ.get(key, (key, unit)) for key in keys}
        return {places[key][0]: in_si(inner, places[key][1]) for key, inner in entry if inner is not None}
    if isinstance(entry, dict):
        return {key: in_si(inner) for key, inner in entry.items()}
    if isinstance(entry, list):
        return [in_si(inner) for inner in entry]
    if unit is None:
        return entry
    number = si(entry, unit)
    return int(number) if unit > 1 else number  # read as a float where the field is one


def in_file(value: Any, unit: float | None = None) -> Any:
    """The content of a file for a value: numbers, and other fields that have no default or another value."""
    if is_dataclass(value):
        content = {}
        for field in fields(value):
            inner = getattr(value, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            is_number = isinstance(inner, int | float) and not isinstance(inner, bool)
            if is_number or (inner is not None and inner != default):
                key, inner_unit = _WRITTEN.get(field.name, (field.name, None))
                content[key] = in_file(inner, inner_unit)
        return content
    if isinstance(value, Mapping):
        return {key: in_file(inner, unit) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [in_file(inner, unit) for inner in value]
    return value if unit is None else in_unit(value, unit)


def si(value: float, unit: float) -> float:
    """`value` in SI units. A unit above 1 gives whole numbers, so that writing and reading a file changes nothing."""
    return float(round(value * unit)) if unit > 1 else value / (1 / unit)


def in_unit(value: float, unit: float) -> float:
    """The shortest decimal that `si` turns back into `value`."""
    for digits in range(1, 18):
        written = float(f"{value / unit:.{digits}g}")
        if si(written, unit) == value:
            return written
    return value / unit
