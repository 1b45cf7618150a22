"""Damage to the files that commands read: every value of a JSON document in turn, and the text as a whole."""

import json
import re
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (None, "x", -1, 0, 10**400, 1e308, True, [], {}, [[1]], {"a": 1}, 99, "")
DEEP = "[" * 100_000 + "]" * 100_000


def damaged(data: Any, each: int = 3) -> Iterator[tuple[str, str]]:
    """Names and texts. Each kind of place gets `each` of the `VALUES`, and is left out. Entries of a list are alike."""
    text = json.dumps(data)
    for part in (0, 1, 3):
        yield f"cut at {part}/4", text[: len(text) * part // 4]
    yield "nested", DEEP
    yield "bytes", text.replace("a", "\0", 1)
    seen = set[str]()
    count = 0
    for owner, key, path in list(_places(data, "")):
        kind = re.sub(r"\[\d+\]", "[]", path)
        if kind in seen:
            continue
        seen.add(kind)
        kept = owner[key]
        for _ in range(each):
            value = VALUES[count % len(VALUES)]
            count += 1
            owner[key] = value
            yield f"{path} = {str(value)[:20]}", json.dumps(data)
        owner[key] = "DEEP"
        yield f"{path} nested", json.dumps(data).replace('"DEEP"', "[" * 3000 + "]" * 3000)
        owner[key] = kept
        if isinstance(owner, dict):
            before = dict(owner)
            del owner[key]
            yield f"{path} missing", json.dumps(data)
            owner.clear()
            owner.update(before)
        elif owner:
            last = owner.pop()
            yield f"{path} shorter", json.dumps(data)
            owner.append(last)


def _places(data: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        here = f"{path}.{key}" if isinstance(data, dict) else f"{path}[{key}]"
        yield data, key, here
        yield from _places(value, here)
