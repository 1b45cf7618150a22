"""The exception tree, and how a list of problems becomes one message.

A caller catches `AutoparError`; its subclasses say who must act. A message states the expectation, the value and the
remedy. All mistakes of a user input are reported at once, as `Problem`s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A message with hundreds of lines is not read: a file of garbage shows its first problems and a count.
MAX_SHOWN_PROBLEMS = 50
_MAX_VALUE_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in user input.

    `path` names the place (``groups[0].in_host.latency_us``), `value` the wrong value (None without one), `rule` the
    expectation, and `suggestion` the change to make.
    """

    path: str
    rule: str
    value: object = None
    suggestion: str | None = None

    def __str__(self) -> str:
        text = f"{self.path}: " if self.path else ""
        text += self.rule
        if self.value is not None:
            text += f"; got {short_repr(self.value)}"
        if self.suggestion:
            text += f" ({self.suggestion})"
        return text


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose; anything else that escapes is a bug in autopar."""


class ListError(AutoparError):
    """Base of the errors with a list of problems.

    `problems` has everything found. It is empty if the message says all.
    """

    problems: tuple[Problem, ...]
    ending = ""  # of the message

    def __init__(self, message: str, problems: Iterable[Problem] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(format_problems(message + self.ending, self.problems))
        self._message = message

    def __reduce__(self) -> tuple[object, ...]:
        # the default would hand the formatted text back to __init__ when an error crosses a process boundary
        return (type(self), (self._message, self.problems))


class InputError(ListError, ValueError):
    """Raised when something a user wrote or passed is wrong: an option, a file, a name, an argument.

    The command line exits with status 2.
    """


class ClusterError(InputError):
    """Raised when a cluster description cannot be used: bad file, unknown preset, impossible sizes, unknown device."""


class PlanError(InputError):
    """Raised when a plan cannot be used.

    It does not parse, its degrees do not multiply to the world size, it is for another model or schema, or the batch
    cannot be split as it says.
    """


class CheckpointError(InputError):
    """Raised when a checkpoint cannot be written or loaded.

    The disk is full, a file is damaged, another job saves there, or the checkpoint is of another model. All ranks raise
    it.
    """


class CaptureError(AutoparError):
    """Raised when a model cannot be captured as one graph; names the module and the source line.

    `option` is the argument of a call that would permit what was refused, such as ``specialise``, or empty. The message
    has it as ``specialise=True``. The command line shows its own option there.
    """

    def __init__(self, message: str, *, option: str = "") -> None:
        self.option = option
        super().__init__(message)


class RuleError(AutoparError):
    """Raised when an operator rule is malformed, registered twice, or does not fit the operator it is applied to."""


class VerificationError(AutoparError):
    """Raised when a check finds that the split program does not compute what the single-device program computes."""


class RuntimeInputError(InputError):
    """Raised at run time when a batch does not fit the captured program: missing or unknown key, wrong dtype or shape.

    Raised before any collective of the step is entered, so that no rank waits for another.
    """


class RankError(AutoparError):
    """Raised by the process that started ranks when one of them failed; the first failure is the message.

    `rank` is the rank that failed first, None when ranks stopped answering.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class InfeasibleError(AutoparError):
    """Raised when no plan satisfies the constraints; says which constraint binds, by how much, and what would help.

    The command line exits with status 3.
    """


class SearchError(ListError):
    """Raised when the result of a search fails its check: a bug in autopar, not in the request."""

    ending = "; this is a bug in autopar, please report it"


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, or None when nothing is alike. Case, ``-`` and ``_`` do not count as differences."""
    folded: dict[str, str] = {}
    for choice in choices:
        folded.setdefault(_fold(choice), choice)
    # a long "name" is not a misspelling, and difflib is quadratic
    matches = difflib.get_close_matches(_fold(name[:100]), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def did_you_mean(name: str, choices: Sequence[str], *, max_listed: int = 40) -> str:
    """``did you mean 'x'?`` for a near miss, else the valid choices; for the end of a message."""
    guess = nearest(name, choices)
    if guess is not None:
        return f"did you mean {guess!r}?"
    listed = ", ".join(sorted(choices)[:max_listed])
    return f"valid: {listed}{', ...' if len(choices) > max_listed else ''}"


def format_problems(message: str, problems: Sequence[Problem]) -> str:
    """One text of `message` and one indented line per problem; `message` alone when there are none."""
    if not problems:
        return message
    lines = [message.rstrip(":") + ":"]
    lines += [f"  - {problem}" for problem in problems[:MAX_SHOWN_PROBLEMS]]
    if len(problems) > MAX_SHOWN_PROBLEMS:
        lines.append(f"  ... and {len(problems) - MAX_SHOWN_PROBLEMS} more")
    return "\n".join(lines)


def short_repr(value: object) -> str:
    """A repr of at most 80 characters, and of bounded cost whatever the value is."""
    if isinstance(value, str):
        value = value[: _MAX_VALUE_CHARS + 1]
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    elif isinstance(value, (dict, list, tuple, set, frozenset)) and len(value) > 3:
        return f"a {type(value).__name__} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def _fold(name: str) -> str:
    return name.lower().replace("_", "-")
