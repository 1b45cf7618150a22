"""Reading small YAML files written by people, strictly and within bounds, and writing such files.

YAML 1.2 through ruamel.yaml's safe constructor: ``1e9`` is a number, ``no`` is a string. In addition, duplicate keys
are errors. So are anchors, aliases, tags and further documents: no file of ours needs them, and they make a small file
big. Size, depth and node count are bounded *before* anything is constructed, so a hostile file is refused quickly.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
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
    from ruamel.yaml.error import YAMLError

    reader = _reader()
    try:
        node = reader.compose(text)
        duplicates = list(_duplicates(node, ""))
        return None if node is None else reader.constructor.construct_document(node), duplicates
    except _YamlError as refused:
        return None, [refused.problem]
    except (YAMLError, ValueError, OverflowError, RecursionError, TypeError) as error:
        return None, [_not_yaml(error)]


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


def _reader() -> Any:
    """A reader whose parser stops at the first event beyond the bounds."""
    from ruamel.yaml import YAML, events
    from ruamel.yaml.parser import Parser

    class Strict(Parser):  # type: ignore[misc]  # it has no types
        depth = num_nodes = num_documents = 0

        def get_event(self) -> Any:
            event = super().get_event()
            if isinstance(event, events.DocumentStartEvent):
                self.num_documents += 1
                _refuse_document(event, self.num_documents)
            elif isinstance(event, events.NodeEvent):
                self.num_nodes += 1
                _refuse_forms(event, self.num_nodes, self.depth)
            self.depth += isinstance(event, events.CollectionStartEvent) - isinstance(event, events.CollectionEndEvent)
            return event

    reader = YAML(typ="safe", pure=True)
    reader.Parser = Strict
    reader.allow_duplicate_keys = True  # _duplicates finds them all; the constructor would stop at the first
    return reader


def _refuse_document(event: Any, number: int) -> None:
    if number > 1:
        raise _YamlError(Problem(path=_line(event), rule="a file holds one YAML document"))
    if event.version not in (None, _VERSION):
        value, hint = ".".join(map(str, event.version)), "leave the %YAML line out"
        raise _YamlError(Problem(path=_line(event), value=value, rule="must be YAML 1.2", suggestion=hint))


def _duplicates(node: Any, path: str) -> Iterator[Problem]:
    """The keys that stand twice in a mapping."""
    from ruamel.yaml import nodes

    if isinstance(node, nodes.SequenceNode):
        for index, inner in enumerate(node.value):
            yield from _duplicates(inner, f"{path}[{index}]")
    elif isinstance(node, nodes.MappingNode):
        known: set[str] = set()
        for key, inner in node.value:
            name = str(key.value) if isinstance(key, nodes.ScalarNode) else "?"
            here = f"{path}.{name}" if path else name
            if name in known:
                yield Problem(path=here, rule=f"duplicate key, again at {_line(key)}", suggestion="keep one")
            known.add(name)
            yield from _duplicates(inner, here)


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


def _not_yaml(error: Exception) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    what = getattr(error, "problem", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return Problem(path=where, rule=f"is not valid YAML: {what[:200]}")


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
