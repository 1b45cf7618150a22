"""Frozen dataclasses as the plain data of JSON, and back.

Annotations give the types: dataclasses, ``tuple[X, ...]`` and ``tuple[X, Y]``, ``Mapping[K, X]``, ``X | None``,
``Literal`` words, numbers, text and ``Any``. Only whole numbers are coerced, to `float`. Every deviation is a
`Problem`.
"""

import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autopar.errors import InputError, Problem, did_you_mean, short_repr

Reader = Callable[[Any], Any]
_WHOLE = re.compile(r"-?[0-9]{1,4000}")
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}


def content_of(data: Any, kind: str, version: int, source: str, *, command: str, again: str) -> dict[str, Any]:
    """The fields of a document of autopar, without its kind and its version."""
    if not isinstance(data, Mapping) or data.get("kind") != kind:
        name = kind.removeprefix("autopar ")
        raise InputError(f"{source} is no {name}; write one with `autopar {command} MODEL --cluster C --json`")
    there = data.get("version")
    if there != version or isinstance(there, bool):
        raise InputError(f"{source}: version {short_repr(there)}, this autopar reads {version}; {again}")
    return {name: value for name, value in data.items() if name not in ("kind", "version")}


def plain_of(value: Any, writers: Mapping[type, Callable[[Any], Any]] | None = None) -> Any:
    """The plain data that `read_plain` reads back. `writers` write values of types of their own."""
    if value is None or (type(value) in _WORDS and type(value) not in (writers or {})):
        return value
    for kind, write in (writers or {}).items():
        if isinstance(value, kind):
            return write(value)
    if is_dataclass(value):
        return {field.name: plain_of(getattr(value, field.name), writers) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain_of(inner, writers) for name, inner in value.items()}
    return [plain_of(inner, writers) for inner in value] if isinstance(value, (tuple, list)) else value


def read_plain(
    kind: Any, data: Any, problems: list[Problem], path: str = "", readers: Mapping[Any, Reader] | None = None
) -> Any:
    """A value of `kind`, or None and entries in `problems`. `readers` make values of types of their own."""
    return _Reading(problems, readers or {}).value(kind, data, path)


@cache
def hints_of(kind: Any, known: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    return get_type_hints(kind, localns={each.__name__: each for each in known})


@dataclass(frozen=True, slots=True)
class _Reading:
    """Makes values of plain data. A deviation is a problem, and its value is None."""

    problems: list[Problem]
    readers: Mapping[Any, Reader]

    def value(self, kind: Any, data: Any, path: str) -> Any:
        reader = self.readers.get(kind)
        if reader is not None:
            try:
                return reader(data)
            except InputError:
                raise
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                return self._refused(path, f"cannot be read: {error}")
        origin, arguments = get_origin(kind), get_args(kind)
        if is_dataclass(origin or kind):
            return self._dataclass(origin or kind, data, path)
        if origin is Literal:
            if data not in arguments:
                self._refused(path, f"must be one of {', '.join(filter(None, arguments))}", _shown(data))
            return data
        if origin in (Union, types.UnionType):
            if data is None and type(None) in arguments:
                return None
            return self.value(next(each for each in arguments if each is not type(None)), data, path)
        if origin is tuple:
            return self._tuple(arguments, data, path)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(arguments, data, path)
        return self._scalar(kind, data, path)

    def _refused(self, path: str, rule: str, value: Any = None) -> Any:
        self.problems.append(Problem(path=path, rule=rule, value=value))

    def _dataclass(self, kind: Any, data: Any, path: str) -> Any:
        if not isinstance(data, Mapping):
            return self._refused(path, "must be an object", data)
        hints = hints_of(kind, tuple(self.readers))
        before = len(self.problems)
        for key in data:
            if key not in hints:
                self._refused(_join(path, str(key)), f"is not a known key; {did_you_mean(str(key), sorted(hints))}")
        values = {}
        for field in fields(kind):
            here = _join(path, field.name)
            if field.name in data:
                values[field.name] = self.value(hints[field.name], data[field.name], here)
            elif field.default is MISSING and field.default_factory is MISSING:
                self._refused(here, "is required")
        return kind(**values) if len(self.problems) == before else None

    def _tuple(self, arguments: tuple[Any, ...], data: Any, path: str) -> Any:
        if not isinstance(data, (list, tuple)):
            return self._refused(path, "must be a list", data)
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(data)
        if len(arguments) != len(data):
            return self._refused(path, f"must have {len(arguments)} entries, has {len(data)}")
        pairs = enumerate(zip(arguments, data, strict=True))
        return tuple(self.value(kind, value, f"{path}[{i}]") for i, (kind, value) in pairs)

    def _mapping(self, arguments: tuple[Any, ...], data: Any, path: str) -> Any:
        if not isinstance(data, Mapping):
            return self._refused(path, "must be an object", data)
        values = {}
        key_kind = str if get_origin(arguments[0]) is Literal else arguments[0]
        for key, value in data.items():
            made: Any = key
            if key_kind is int and isinstance(key, str):  # JSON has no other keys than text
                made = int(key) if _WHOLE.fullmatch(key) else None
            if isinstance(made, key_kind):
                values[made] = self.value(arguments[1], value, _join(path, str(key)))
            else:
                self._refused(_join(path, str(key)), f"its key must be {_WORDS[key_kind]}")
        return values

    def _scalar(self, kind: Any, data: Any, path: str) -> Any:
        is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
        if kind is Any:
            is_odd = isinstance(data, float) and not math.isfinite(data)
            return self._refused(path, "must be a finite number", data) if is_odd else data
        if kind is float and is_number and abs(data) <= sys.float_info.max:
            return float(data)
        if kind is not float and isinstance(data, kind) and (kind is bool or not isinstance(data, bool)):
            return data
        return self._refused(path, f"must be {_WORDS[kind]}", _shown(data))


def _shown(data: Any) -> Any:
    """A value as a problem names it, in which None means that there is none."""
    return "null" if data is None else data


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
