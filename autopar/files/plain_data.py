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
from dataclasses import MISSING, fields, is_dataclass
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
    own = (readers or {}).get(kind)
    if own is not None:
        try:
            return own(data)
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problems.append(Problem(path=path, rule=f"cannot be read: {error}"))
            return None
    if kind is Any:
        return _finite(data, problems, path)
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(origin or kind):
        return _dataclass(origin or kind, data, problems, path, readers)
    if origin is Literal:
        if data not in arguments:
            rule = f"must be one of {', '.join(filter(None, arguments))}"
            problems.append(Problem(path=path, rule=rule, value="null" if data is None else data))
        return data
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        inner = next(argument for argument in arguments if argument is not type(None))
        return read_plain(inner, data, problems, path=path, readers=readers)
    if origin is tuple:
        return _tuple(arguments, data, problems, path, readers)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(arguments, data, problems, path, readers)
    return _scalar(kind, data, problems, path)


def _dataclass(kind: Any, data: Any, problems: list[Problem], path: str, readers: Mapping[Any, Reader] | None) -> Any:
    if not isinstance(data, Mapping):
        problems.append(Problem(path=path, rule="must be an object", value=data))
        return None
    hints = hints_of(kind, tuple(readers or ()))
    before = len(problems)
    for key in data:
        if key not in hints:
            rule = f"is not a known key; {did_you_mean(str(key), sorted(hints))}"
            problems.append(Problem(path=_join(path, str(key)), rule=rule))
    values = {}
    for field in fields(kind):
        here = _join(path, field.name)
        if field.name in data:
            values[field.name] = read_plain(hints[field.name], data[field.name], problems, path=here, readers=readers)
        elif field.default is MISSING and field.default_factory is MISSING:
            problems.append(Problem(path=here, rule="is required"))
    return kind(**values) if len(problems) == before else None


@cache
def hints_of(kind: Any, known: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    return get_type_hints(kind, localns={each.__name__: each for each in known})


def _tuple(
    arguments: tuple[Any, ...], data: Any, problems: list[Problem], path: str, readers: Mapping[Any, Reader] | None
) -> Any:
    if not isinstance(data, (list, tuple)):
        problems.append(Problem(path=path, rule="must be a list", value=data))
        return None
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(data)
    if len(arguments) != len(data):
        problems.append(Problem(path=path, rule=f"must have {len(arguments)} entries, has {len(data)}"))
        return None
    pairs = enumerate(zip(arguments, data, strict=True))
    return tuple(read_plain(kind, value, problems, path=f"{path}[{i}]", readers=readers) for i, (kind, value) in pairs)


def _mapping(
    arguments: tuple[Any, ...], data: Any, problems: list[Problem], path: str, readers: Mapping[Any, Reader] | None
) -> Any:
    if not isinstance(data, Mapping):
        problems.append(Problem(path=path, rule="must be an object", value=data))
        return None
    found = {}
    key_kind = str if get_origin(arguments[0]) is Literal else arguments[0]
    for key, value in data.items():
        made: Any = key
        if key_kind is int and isinstance(key, str):  # JSON has no other keys than text
            made = int(key) if _WHOLE.fullmatch(key) else None
        if not isinstance(made, key_kind):
            problems.append(Problem(path=_join(path, str(key)), rule=f"its key must be {_WORDS[key_kind]}"))
            continue
        found[made] = read_plain(arguments[1], value, problems, path=_join(path, str(key)), readers=readers)
    return found


def _scalar(kind: Any, data: Any, problems: list[Problem], path: str) -> Any:
    is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
    if kind is float and is_number and abs(data) <= sys.float_info.max:
        return float(data)
    if kind is not float and isinstance(data, kind) and (kind is bool or not isinstance(data, bool)):
        return data
    problems.append(Problem(path=path, rule=f"must be {_WORDS[kind]}", value="null" if data is None else data))
    return None


def _finite(data: Any, problems: list[Problem], path: str) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        problems.append(Problem(path=path, rule="must be a finite number", value=data))
    return data


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
