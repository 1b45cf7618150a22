"""Reading text and JSON files that others wrote, within a size and strictly. Nothing in a file can raise here."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autopar.errors import AutoparError, InputError, Problem


def read_text(path: str | os.PathLike[str], *, max_bytes: int) -> tuple[str | None, list[Problem]]:
    """The text of a regular UTF-8 file, or None and the reason why it cannot be read."""
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to must not wait
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return _refused(path, "no such file", "check the path")
    except (OSError, ValueError) as error:
        return _refused(path, f"cannot be opened: {error}")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return _refused(path, "must be a regular file")
    with open(descriptor, "rb") as file:
        is_large = (
            os.fstat(descriptor).st_size > max_bytes
        )  # a file of holes has a size, and costs memory when it is read
        data = b"" if is_large else file.read(max_bytes + 1)
    if is_large or len(data) > max_bytes:
        return _refused(path, f"must be at most {max_bytes} bytes", "is it the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _refused(path, f"must be UTF-8 text; byte {error.start} is not")
    return _refused(path, "must be text; it has NUL bytes") if "\0" in text else (text, [])


def read_json(path: str | os.PathLike[str], *, max_bytes: int) -> tuple[Any, list[Problem]]:
    """The data of a JSON file, or None and every problem: also keys that stand twice, and ``NaN``."""
    text, problems = read_text(path, max_bytes=max_bytes)
    if text is None:
        return None, problems

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = [name for name in content if names.count(name) > 1]
            problems.extend(Problem(path=name, rule="duplicate key", suggestion="keep one") for name in twice)
        if odd:
            problems.extend(Problem(path=name, rule=no_number) for name, value in pairs if holds_odd(value))
        return content

    odd: list[str] = []  # what JSON does not have, and the mark of its place
    no_number = "is NaN or Infinity, which JSON does not have"

    def constant(name: str) -> list[str]:
        odd.append(name)
        return odd

    def holds_odd(value: Any) -> bool:
        return value is odd or (isinstance(value, list) and any(map(holds_odd, value)))

    try:
        content = json.loads(text, object_pairs_hook=mapping, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        problems.append(Problem(path=str(path), rule=what[:300]))
    if odd and not problems:
        problems.append(Problem(path=str(path), rule=no_number))
    return (None, problems) if problems else (content, [])


@contextmanager
def values_of(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Raise `InputError` for the errors that a file's values cause where they are used."""
    try:
        yield
    except AutoparError as error:
        if os.path.basename(path) in str(error):
            raise
        if not isinstance(error, InputError):
            raise InputError(f"{os.fspath(path)}: {error}") from error
        error.args = (f"{os.fspath(path)}: {error}",)
        raise
    except OSError:
        raise
    except Exception as error:
        reason = "a value is missing or of another type"
        if not isinstance(error, (AttributeError, LookupError, TypeError)):
            reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise InputError(f"{os.fspath(path)} is damaged: {reason}; {remedy}") from error


def _refused(path: str | os.PathLike[str], rule: str, suggestion: str | None = None) -> tuple[None, list[Problem]]:
    return None, [Problem(path=os.fspath(path), rule=rule, suggestion=suggestion)]
