"""What pydantic's violations are called in our own words, for every file we read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import InputError, Problem, did_you_mean, nearest
from autopar.files.strict_text import read_json
from autopar.files.strict_yaml import MAX_BYTES, read_yaml

_Number = TypeVar("_Number")


class StrictModel(BaseModel):
    """Strict, closed and immutable: no coercion, no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NamedModel(StrictModel):
    """A file that has the name of what it describes. With a field `like` it may name another file, and what differs."""

    name: str


class SourcedNumber(StrictModel, Generic[_Number]):
    """A number and where it comes from."""

    value: _Number
    source: Annotated[str, Field(min_length=8, max_length=400)]

    @property
    def is_assumed(self) -> bool:
        return self.source.startswith("assumed")


M = TypeVar("M", bound=StrictModel)
N = TypeVar("N", bound=NamedModel)


def checked_model(model: type[M], content: object, problems: Sequence[Problem] = ()) -> tuple[M | None, list[Problem]]:
    """`content` as `model` or None, and every violation after the `problems` of its file. A bad file has no content."""
    if content is None and problems:
        return None, [*problems]
    if not isinstance(content, dict):
        rule = f"must be a mapping with the keys {', '.join(model.model_fields)}"
        return None, [*problems, Problem(path="", rule=rule, value=content)]
    try:
        return model.model_validate(content), [*problems]
    except ValidationError as error:
        return None, [*problems, *(_problem(model, detail) for detail in error.errors(include_url=False))]


def read_named(model: type[N], path: Path) -> tuple[N | None, list[Problem]]:
    """A YAML or JSON file as `model`, and everything wrong with it, each path opened by the file's name."""
    content, problems = _read(path)
    if isinstance(content, dict) and "like" in model.model_fields and "like" in content:
        content, wrong = _with_base(content, path)
        problems = problems + wrong
    made, problems = checked_model(model, content, problems)
    if made is not None and made.name != path.stem:
        problems.append(Problem(path="name", value=made.name, rule=f"must be the file's name, {path.stem!r}"))
    return made, [replace(problem, path=f"{path.name}: {problem.path}") for problem in problems]


def _read(path: Path) -> tuple[Any, list[Problem]]:
    return read_json(path, max_bytes=MAX_BYTES) if path.suffix == ".json" else read_yaml(path)


def _with_base(content: dict[str, Any], path: Path) -> tuple[Any, list[Problem]]:
    """The keys of the file that `content` is like, under its own. Mappings are joined key by key."""
    like, names = content["like"], sorted(one.stem for one in path.parent.glob(f"*{path.suffix}"))
    if like not in names or like == path.stem:
        hint = did_you_mean(str(like), names)
        return None, [Problem(path="like", value=like, rule="must name another file of this folder", suggestion=hint)]
    base, problems = _read(path.with_name(f"{like}{path.suffix}"))
    if problems or not isinstance(base, dict) or "like" in base:
        return None, [Problem(path="like", value=like, rule="must name a sound file that is like no other file")]
    merged = base | content
    for key in base.keys() & content.keys():
        if isinstance(base[key], dict) and isinstance(content[key], dict):
            merged[key] = base[key] | content[key]
    return merged, []


def models_in(model: type[N], folder: Traversable, what: str, error: type[InputError] = InputError) -> dict[str, N]:
    """The files of a folder of the package by their names, sorted. Raises `error` with everything wrong with them.

    Names and aliases that are taken twice are wrong too.
    """
    found: dict[str, N] = {}
    taken: dict[str, str] = {}
    problems: list[Problem] = []
    with resources.as_file(folder) as path:
        for file in sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".json")):
            made, wrong = read_named(model, file)
            problems += wrong
            if made is not None:
                found[made.name] = made
                for name in (made.name, *getattr(made, "aliases", ())):
                    if name in taken:
                        problems.append(Problem(path=file.name, rule=f"name {name!r} is taken by {taken[name]!r}"))
                    taken[name] = made.name
    if problems:
        raise error(f"the {what} are malformed", problems)
    return found


def figures_of(model: StrictModel, prefix: str = "") -> Iterator[tuple[str, SourcedNumber[Any]]]:
    """Every number with a source under a model, by path."""
    for name, value in model:
        if isinstance(value, SourcedNumber):
            yield f"{prefix}{name}", value
        elif isinstance(value, StrictModel):
            yield from figures_of(value, f"{prefix}{name}.")


def _path(parts: tuple[object, ...]) -> str:
    """``groups[0].device`` from ("groups", 0, "device")."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else str(part)
    return path


def _problem(model: type[StrictModel], detail: Mapping[str, Any]) -> Problem:
    location: tuple[object, ...] = tuple(detail["loc"])
    path, value, kind = _path(location), detail.get("input"), detail["type"]
    if kind == "extra_forbidden":
        valid = list(_fields_at(model, location[:-1]))
        guess = nearest(str(location[-1]), valid)
        suggestion = f"did you mean {guess!r}?" if guess else f"valid keys: {', '.join(valid)}"
        return Problem(path=path, rule="is not a known key", suggestion=suggestion)
    if kind == "missing":
        return Problem(path=path, rule="is required")
    context = detail.get("ctx", {})
    hint = context["hint"] if "hint" in context else _suggestion(kind, value)
    return Problem(path=path, value=value, rule=_rule(kind, detail, context), suggestion=hint)


def _rule(kind: str, detail: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than_equal": "le", "less_than": "lt"}
    words = {"gt": "greater than", "ge": "at least", "le": "at most", "lt": "less than"}
    if kind in bounds:
        bound = bounds[kind]
        return f"must be {words[bound]} {context[bound]:,}"
    known = {
        "finite_number": "must be a finite number",
        "float_type": "must be a number",
        "int_type": "must be a whole number",
        "int_parsing_size": "must be a whole number of reasonable size",
        "string_type": "must be text",
        "dict_type": "must be a mapping",
        "model_type": "must be a mapping",
        "model_attributes_type": "must be a mapping",
        "list_type": "must be a list",
        "invalid_key": "keys must be text",
    }
    if kind in known:
        return known[kind]
    message: str = detail["msg"]
    return message[:1].lower() + message[1:]


def _suggestion(kind: str, value: object) -> str | None:
    if isinstance(value, bool):
        return "true and false are not numbers"
    if isinstance(value, str) and kind in ("float_type", "int_type"):
        try:
            float(value)
        except ValueError:
            return "write the bare number; the unit is in the key's name"
        return f"write {value.strip()} without quotes"
    if kind == "int_type" and isinstance(value, float):
        return "write it without a decimal point or exponent"
    return None


def _fields_at(model: type[BaseModel], location: tuple[object, ...]) -> list[str]:
    """The keys that `model` knows at `location`, found by walking its annotations."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None or not isinstance(part, str) or part not in current.model_fields:
            continue  # an index into a list of models, whose annotation was resolved already
        current = _model_in(current.model_fields[part].annotation)
    return list(current.model_fields) if current is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
