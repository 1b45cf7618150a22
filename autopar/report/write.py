"""From a file of a search, of a plan or of trials to a page or a trace, each written whole or not at all."""

import json
from pathlib import Path

from autopar.errors import InputError
from autopar.files.atomic import write_text
from autopar.files.strict_text import read_json
from autopar.ir.plan import Plan
from autopar.report.page import html_report
from autopar.report.perfetto import perfetto_trace
from autopar.report.plan_page import plan_report
from autopar.report.run_page import run_report
from autopar.report.tuning import tuning_from, tuning_report
from autopar.runs.record import read_info
from autopar.search.driver.study import is_study, kept_result
from autopar.search.measured.result import KIND as TUNING
from autopar.search.measured.result import TuneResult
from autopar.search.result.result import KIND, SearchResult

_MAX_BYTES = 256 * 1024 * 1024


_Source = SearchResult | TuneResult | Plan | Path  # the directory of a run


def read_source(path: str | Path) -> _Source:
    """The search or tuning result, of a file or a study, the plan in a file, or a run directory; or `InputError`."""
    if is_study(str(path)):
        kept = json.loads(kept_result(str(path)))
        return tuning_from(kept, str(path)) if kept.get("kind") == TUNING else SearchResult.from_dict(kept, str(path))
    file = Path(path)
    if file.is_dir():
        read_info(file)
        return file
    if not file.is_file():
        raise InputError(
            f"there is no file {file}; write one with `autopar plan MODEL --cluster C --json > result.json`"
        )
    data, problems = read_json(file, max_bytes=_MAX_BYTES)
    if problems:
        raise InputError(f"{file} is not JSON that autopar reads; write it again with `autopar plan`", problems)
    if isinstance(data, dict) and data.get("kind") == KIND:
        return SearchResult.from_dict(data, str(file))
    if isinstance(data, dict) and data.get("kind") == TUNING:
        return tuning_from(data, str(file))
    if isinstance(data, dict) and "fingerprint" in data:
        return Plan.load(file)
    raise InputError(f"{file} is neither a search result nor a plan; write one with `autopar plan`")


def write_report(source: _Source, path: str | Path) -> int:
    """Write the page of a search, of trials, of a plan alone or of a run, and return its bytes."""
    if isinstance(source, Path):
        return write_text(path, run_report(str(source)))
    if isinstance(source, TuneResult):
        return write_text(path, tuning_report(source))
    return write_text(path, html_report(source) if isinstance(source, SearchResult) else plan_report(source))


def write_trace(source: _Source, path: str | Path) -> int:
    """Write the predicted time line for ui.perfetto.dev; its bytes. Raises `InputError` where there is none."""
    if isinstance(source, Path):
        raise InputError("a run has no predicted time line; `parallel.trace` writes a measured one")
    if isinstance(source, TuneResult):
        raise InputError(
            "a measured search has no predicted time line; give the result of a search (`autopar plan --json`)"
        )
    if isinstance(source, Plan):
        raise InputError("a plan alone has no predicted time line; give the result of a search (`autopar plan --json`)")
    return write_text(path, json.dumps(perfetto_trace(source), separators=(",", ":")) + "\n")
