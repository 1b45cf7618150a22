"""Reading small YAML files written by people, strictly and within bounds, and writing such files.

YAML 1.2 through ruamel.yaml's safe constructor: ``1e9`` is a number, ``no`` is a string. In addition, duplicate keys
are errors. So are anchors, aliases, tags and further documents: no file of ours needs them, and they make a small file
big. Size, depth and node count are bounded *before* anything is constructed, so a hostile file is refused quickly.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

from autopar.errors import Problem
from autopar.files.atomic import write_text
from autopar.files.strict_text import read_text

MAX_BYTES = 64 * 1024
_MAX_DEPTH = 16
MAX_NODES = 5_000
_VERSION = (1, 2)  # in others ``no`` is a truth value and ``010`` is eight


class _YamlError(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def read_yaml(path: str | os.PathLike[str]) -> tuple[object, list[Problem]]:
    """The file's content as plain Python values, and the problems of its form.

    If a problem makes the content meaningless (not YAML, too big, an alias), the content is None and the list says why.
    After duplicate keys alone the content is returned too, so that a caller can report all problems at once.
    Never raises for anything the file contains.
    """
    text, problems = read_text(path, max_bytes=MAX_BYTES)
    if text is None:
        return None, problems
    try:
        events, duplicates = _scan(text)
        return _construct(events), duplicates
    except _YamlError as refused:
        return None, [refused.problem]


def write_yaml(path: str | os.PathLike[str], content: object, *, short_on_a_line: bool = False) -> None:
    """Write plain data, whole or not at all. With `short_on_a_line`, the innermost mappings take a line each."""
    from ruamel.yaml import YAML

    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = None if short_on_a_line else False
    writer.sort_base_mapping_type_on_output = False
    writer.width = 1000
    text = io.StringIO()
    writer.dump(content, text)
    write_text(path, text.getvalue())


def files_naming(folder: Path, word: str) -> list[Path]:
    """The folder's YAML files that contain a word: first the file of that name, then those with it as a word."""
    texts = {path: path.read_text("utf-8") for path in sorted(folder.glob("*.yaml"))}
    alone = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
    found = [path for path, text in texts.items() if path.stem == word or word in text]
    return sorted(found, key=lambda path: (path.stem != word, not alone.search(texts[path])))


def _yaml() -> Any:
    from ruamel.yaml import YAML

    reader = YAML(typ="safe", pure=True)
    reader.allow_duplicate_keys = True  # _scan reports them all; the constructor would stop at the first
    return reader


class _Open:
    """A collection whose end has not been seen."""

    __slots__ = ("is_mapping", "key", "keys", "path")

    def __init__(self, path: str, *, is_mapping: bool) -> None:
        self.path = path
        self.is_mapping = is_mapping
        self.keys: set[str] = set()
        self.key: str | None = None


class _Events:
    """Parse events in the place of the parser that a composer asks for them."""

    def __init__(self, events: list[Any]) -> None:
        self.events, self.position = events, 0

    def peek_event(self) -> Any:
        return self.events[self.position]

    def check_event(self, *choices: type) -> bool:
        return isinstance(self.peek_event(), choices)

    def get_event(self) -> Any:
        self.position += 1
        return self.events[self.position - 1]


def _scan(text: str) -> tuple[list[Any], list[Problem]]:
    """Check the bounds on the stream of parse events while they are read; return them and the duplicate keys."""
    from ruamel.yaml import events
    from ruamel.yaml.error import YAMLError

    duplicates: list[Problem] = []
    open_collections: list[_Open] = []
    num_nodes = num_documents = 0
    found = []
    try:
        for event in _yaml().parse(text):
            found.append(event)
            if isinstance(event, events.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise _YamlError(Problem(path=_line(event), rule="a file holds one YAML document"))
                if event.version not in (None, _VERSION):
                    value, hint = ".".join(map(str, event.version)), "leave the %YAML line out"
                    raise _YamlError(Problem(path=_line(event), value=value, rule="must be YAML 1.2", suggestion=hint))
            elif isinstance(event, events.CollectionEndEvent):
                open_collections.pop()
            elif isinstance(event, events.NodeEvent):
                num_nodes += 1
                _refuse_forms(event, num_nodes, len(open_collections))
                path = _enter(event, open_collections, duplicates)
                if isinstance(event, events.CollectionStartEvent):
                    is_mapping = isinstance(event, events.MappingStartEvent)
                    open_collections.append(_Open(path, is_mapping=is_mapping))
    except (YAMLError, ValueError, RecursionError) as error:
        raise _YamlError(_not_yaml(error)) from None
    return found, duplicates


def _refuse_forms(event: Any, num_nodes: int, depth: int) -> None:
    from ruamel.yaml import events

    if isinstance(event, events.AliasEvent) or getattr(event, "anchor", None):
        rule = "anchors (&) and aliases (*) are not allowed"
        raise _YamlError(Problem(path=_line(event), rule=rule, suggestion="write it out"))
    if getattr(event, "tag", None) not in (None, "!"):
        raise _YamlError(Problem(path=_line(event), rule="tags (!) are not allowed", value=str(event.tag)))
    if num_nodes > MAX_NODES:
        raise _YamlError(Problem(path=_line(event), rule=f"at most {MAX_NODES} values"))
    if depth >= _MAX_DEPTH:
        raise _YamlError(Problem(path=_line(event), rule=f"at most {_MAX_DEPTH} levels of nesting"))


def _enter(event: Any, open_collections: list[_Open], duplicates: list[Problem]) -> str:
    """Advance the innermost collection past `event` and return the path of the node that starts with it."""
    if not open_collections:
        return ""
    parent = open_collections[-1]
    if not parent.is_mapping:
        parent.key = str(int(parent.key or "0") + 1)
        return f"{parent.path}[{int(parent.key) - 1}]"
    if parent.key is not None:  # this node is the value of the key read before
        key, parent.key = parent.key, None
        return f"{parent.path}.{key}" if parent.path else key
    parent.key = str(getattr(event, "value", "?"))
    path = f"{parent.path}.{parent.key}" if parent.path else parent.key
    if parent.key in parent.keys:
        duplicates.append(Problem(path=path, rule=f"duplicate key, again at {_line(event)}", suggestion="keep one"))
    parent.keys.add(parent.key)
    return path


def _construct(events: list[Any]) -> object:
    from ruamel.yaml.error import YAMLError

    reader = _yaml()
    reader.Parser = lambda loader: _Events(events)
    try:
        content: object = reader.constructor.get_single_data()
    except (YAMLError, ValueError, OverflowError, RecursionError, TypeError) as error:
        raise _YamlError(_not_yaml(error)) from None
    return content


def _not_yaml(error: Exception) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    what = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return Problem(path=where, rule=f"is not valid YAML: {what[:200]}")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
