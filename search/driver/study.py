"""The storage of Optuna's trials: memory, or a file or database that several processes and hosts share.

    x.log, x.journal             Optuna's journal: JSON lines, one writer at a time by a lock file, also on NFS
    x.db, sqlite:///x.db, ...    a database by SQLAlchemy

Both are read by optuna-dashboard. Nothing here is unpickled. Neither storage holds pickled objects, and samplers are
made anew from their seed. Redis journals are refused because their snapshots are pickled.

A study answers one question, kept as its user attributes. Opening it for another question is an error.

A storage holds two of Optuna's studies. `NAME` has the question, the result and the record of the search
(`autopar.search.driver.recorded`). `CUTS` has the varied cuts (`autopar.search.driver.optuna_refine`), because they
have other parameters.
"""

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError, Problem
from autopar.files.strict_text import values_of

if TYPE_CHECKING:
    import optuna

NAME = "autopar"
CUTS = "autopar-cuts"
CANDIDATES = "candidates"  # the attribute that is written last: a study that has it is complete
JOURNALS = (".log", ".journal")
DATABASES = (".db", ".sqlite", ".sqlite3")
MAX_JOURNAL_BYTES = 256 * 1024 * 1024
MAX_RECORD_BYTES = 1024 * 1024
WAIT_S = 5.0  # for the process that made a study to write its question
TIMES = 20  # attempts to open a database while another process sets it up
RESULT = "result"  # attributes of the search's result, in pieces
_PIECE = 30_000  # characters of one piece: MySQL's TEXT holds 64 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlace:
    """A study's path or URL, and the question that it answers: plain values by name."""

    where: str
    question: Mapping[str, Any] = field(hash=False)

    def check(self) -> None:
        """Raise the errors of `opened` before the search has taken its time. Makes the study if there is none."""
        self._checked(self._study())

    def opened(self, candidates: Sequence[str], name: str = NAME) -> "tuple[optuna.Study, list[str]]":
        """The study of this name, and the candidates that its trials choose among."""
        study = self._study()
        with _as_input_errors(self.where):
            if CANDIDATES not in _settled(study):
                for word, value in self.question.items():
                    study.set_user_attr(word, value)
                study.set_user_attr(CANDIDATES, list(candidates))
        choices = [str(text) for text in self._checked(study)[CANDIDATES]]
        return study if name == NAME else self._study(name), choices

    @contextmanager
    def writing(self) -> "Iterator[optuna.Study]":
        """The study, with its question. If it is a file, one process at a time has it. Raises the errors of `check`."""
        study = self._study()
        known = self._checked(study)
        with _as_input_errors(self.where), _alone(self.where):
            for word, value in self.question.items():
                if word not in known:
                    study.set_user_attr(word, value)
            yield study

    def attribute(self, name: str) -> str | None:
        """A text that `keep` wrote. None if there is no study, or no such text. Raises the errors of `check`."""
        if "://" not in self.where and not Path(self.where).is_file():
            return None
        known = self._checked(self._study())
        return _text_of(self.where, known, name) if name in known else None

    def keep(self, name: str, text: str) -> None:
        """Write a text of any length into the study, in place of an earlier one. Raises `InputError` if that fails."""
        pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
        with _as_input_errors(self.where):
            study = _set_up(self.where)
            for number, piece in enumerate(pieces):
                study.set_user_attr(f"{name}_{number}", piece)
            study.set_user_attr(name, len(pieces))

    def _study(self, name: str = NAME) -> "optuna.Study":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with _as_input_errors(self.where):
            return _set_up(self.where, name)

    def _checked(self, study: "optuna.Study") -> Mapping[str, Any]:
        """The study's attributes. Raises `InputError` if they answer another question."""
        with _as_input_errors(self.where):
            known: Mapping[str, Any] = study.user_attrs
        wrong = []
        for name, value in self.question.items():
            if name not in known and CANDIDATES in known:
                wrong.append(Problem(path=name, rule="the study was made without it", value=value))
            elif name in known and known[name] != json.loads(json.dumps(value)):
                wrong.append(
                    Problem(path=name, rule=f"the study was made with {json.dumps(known[name])[:60]}", value=value)
                )
        if wrong:
            raise InputError(f"study {self.where} is of another search; repeat that search, or name a new file", wrong)
        return known


@contextmanager
def _as_input_errors(where: str) -> Iterator[None]:
    """Raise `InputError` for any error of a database's driver, the journal or the file system."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        line = _damaged_line(Path(where))
        if line:
            raise InputError(
                f"study {where} is damaged: line {line} is no record of a study; name a new file, or remove this one, "
                "and the search begins anew"
            ) from error
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise InputError(f"study {where} cannot be used: {why}; name a file that you may write") from error


def _damaged_line(path: Path) -> int | None:
    """The first line of a journal that Optuna cannot read. None if it reads all, or the study is no journal."""
    from optuna.storages.journal import BaseJournalBackend, JournalStorage

    if path.suffix not in JOURNALS or not path.is_file():
        return None

    class Lines(BaseJournalBackend):
        def __init__(self, lines: list[bytes]) -> None:
            self.lines = lines

        def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
            return [json.loads(line) for line in self.lines[log_number_from:]]

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            raise AssertionError("nothing is written")

    def is_read(lines: list[bytes]) -> bool:
        try:
            JournalStorage(Lines(lines)).get_all_studies()
        except Exception:
            return False
        return True

    lines = path.read_bytes().splitlines(keepends=True)  # as Optuna reads them
    good, bad = 0, len(lines) + 1  # numbers of lines
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if is_read(lines[:middle]) else (good, middle)
    return bad if bad <= len(lines) else None


def study_place(where: str | Path, question: Mapping[str, Any]) -> StudyPlace:
    """A study by its path or URL. Raises `InputError` if it is neither a journal nor a database."""
    text = str(where)
    if text.startswith("redis"):
        raise InputError(f"study {text}: Redis journals hold pickled snapshots; use a .log file or a database")
    if not is_study(text):
        raise InputError(
            f"study {text}: a study is a journal ({', '.join(JOURNALS)}), a SQLite file ({', '.join(DATABASES)}) or "
            "the URL of a database such as sqlite:///plans.db"
        )
    if "://" not in text and not Path(text).absolute().parent.is_dir():
        raise InputError(f"study {text}: there is no folder {Path(text).absolute().parent}; make it first")
    return StudyPlace(where=text, question=question)


def kept_result(where: str) -> str:
    """The result that a search wrote into its study. Raises `InputError` if there is no study or no result yet."""
    study_place(where, {})
    if "://" not in where and not (Path(where).is_file() and Path(where).stat().st_size):
        raise InputError(f"there is no study {where}; `autopar plan` or `autopar tune` with --study {where} makes it")
    import optuna

    with _as_input_errors(where):
        storage = _storage(where)
        is_ours = NAME in optuna.get_all_study_names(storage)  # a reader makes no study
        known = optuna.load_study(storage=storage, study_name=NAME).user_attrs if is_ours else {}
    if RESULT not in known:
        raise InputError(f"study {where} holds no result yet; let `autopar plan` or `autopar tune --study {where}` end")
    return _text_of(where, known, RESULT)


def _text_of(where: str, known: Mapping[str, Any], name: str) -> str:
    """A text that `StudyPlace.keep` wrote."""
    with study_values(where):
        return "".join(known[f"{name}_{number}"] for number in range(known[name]))


def next_trial(study: "optuna.Study", space: dict[str, Any], place: StudyPlace | None) -> "optuna.Trial":
    """The study's next trial. No two processes get the same one: SQLite itself would give both a queued trial."""
    with nullcontext() if place is None or Path(place.where).suffix in JOURNALS else _alone(place.where):
        return study.ask(space)


def study_values(where: str) -> AbstractContextManager[None]:
    """Raise `InputError` for the errors that the values of a damaged study cause."""
    return values_of(f"study {where}", "name a new file, and the search begins anew")


def is_study(where: str) -> bool:
    """Whether a path or URL can name a study."""
    return "://" in where or Path(where).suffix in (*JOURNALS, *DATABASES)


@contextmanager
def _alone(where: str) -> Iterator[None]:
    """Keep other processes out, if the study is a file. Databases on a server have no such lock."""
    from optuna.storages.journal import JournalFileOpenLock

    path = where.removeprefix("sqlite:///")
    if "://" in path:
        yield
        return
    lock = JournalFileOpenLock(f"{path}.writing")
    lock.acquire()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # another process took the lock after half a minute
            lock.release()


def _set_up(where: str, name: str = NAME) -> "optuna.Study":
    """A study of a storage. Opening a database is tried again while another process makes its tables."""
    import optuna
    from sqlalchemy.exc import IntegrityError, OperationalError

    for attempt in range(TIMES):
        try:
            storage = _storage(where)
            try:
                return optuna.load_study(storage=storage, study_name=name)
            except KeyError:
                return optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        except (IntegrityError, OperationalError, optuna.exceptions.StorageInternalError):
            if attempt == TIMES - 1:
                raise
            time.sleep(0.1)
    raise AssertionError("not reached")


def _storage(where: str) -> "optuna.storages.BaseStorage":
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if "://" in where:
        return optuna.storages.RDBStorage(where)
    path = Path(where)
    if path.suffix in DATABASES:
        return optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
    if path.is_file() and path.stat().st_size > MAX_JOURNAL_BYTES:
        raise InputError(
            f"study {where} has {path.stat().st_size:,} bytes, more than {MAX_JOURNAL_BYTES:,}; name a new file"
        )
    backend = JournalFileBackend(where)
    if path.stat().st_size:
        _refuse_other_logs(path)
        _drop_partial_line(path)
    return optuna.storages.JournalStorage(backend)


def _refuse_other_logs(path: Path) -> None:
    """Refuse a .log file that is no journal of a study, because nothing may be written to it."""
    with path.open("rb") as file:
        first = file.readline(MAX_RECORD_BYTES)
    try:
        is_record = isinstance(record := json.loads(first), dict) and "op_code" in record
    except ValueError:
        is_record = False
    if not is_record:
        raise InputError(f"study {path} cannot be used: the file is not the journal of a study; name a new file")


def _drop_partial_line(path: Path) -> None:
    """Remove the half line that a killed process left. It would make the journal unreadable."""
    from optuna.storages.journal import JournalFileSymlinkLock

    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        with path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read(size).rfind(b"\n") + 1)
    finally:
        lock.release()


def _settled(study: "optuna.Study") -> Mapping[str, Any]:
    """A study's attributes. If another process has just made the study, this waits until it has written them."""
    is_made = bool(study.user_attrs)
    until = time.monotonic() + (WAIT_S if is_made else 0.0)
    while CANDIDATES not in (attributes := study.user_attrs) and time.monotonic() < until:
        time.sleep(0.05)
    return attributes


def importance(study: "optuna.Study") -> dict[str, float]:
    """How much each parameter decides between good and bad trials (PED-ANOVA, Watanabe et al. 2023), as parts of 1.

    Empty if the trials are too few or too alike.
    """
    import optuna

    with suppress(ValueError, RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns if trials are alike and parameters decide equally
        importances = optuna.importance.get_param_importances(study)
        return {name: float(value) for name, value in sorted(importances.items())}
    return {}
