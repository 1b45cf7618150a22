"""Which operators do published models have, and which of them have a rule?

    python tools/operator_census.py [--few] [--package NAME] [--limit SECONDS] [--write] [RESULTS.json]

Models of the installed packages are built on meta from configurations, captured and labelled at tp 2. Each model has a
process of its own with a time limit. RESULTS.json keeps every result, so that a stopped run goes on. `--write` renews
the section of docs/coverage.md from the results and runs no model.
"""

import argparse
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from census_models import build, installed, names

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
HEADING = "## Operators of other packages' models"
SHARE = 0.9
FEW = 5  # models of a package with --few
MAX_ROWS = 40
MAX_REASONS = 12
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="census.json", help="results so far (default: census.json)")
    parser.add_argument("--package", action="append", help="only this package; may be repeated")
    parser.add_argument("--few", action="store_true", help=f"{FEW} models of every package")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one model")
    parser.add_argument("--write", action="store_true", help="write the section of docs/coverage.md")
    options = parser.parse_args(arguments)
    path = Path(options.results)
    results: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}
    if not options.write:
        _run(results, path, options.package or installed(), options.few, options.limit)
    section = report(results)
    if options.write:
        PAGE.write_text(PAGE.read_text().split(HEADING)[0].rstrip() + "\n\n" + section)
    print(section)
    return 0


def _run(results: dict[str, Result], path: Path, packages: Sequence[str], few: bool, limit_s: float) -> None:
    """Run every model that has no result yet; the result file is renewed after each."""
    chosen = [list(names(package)) for package in packages]
    picked = [(known[:: max(len(known) // FEW, 1)][:FEW] if few else known) for known in chosen]
    turns = max(map(len, picked), default=0)
    for turn in range(turns):  # packages take turns, so that a stopped run has seen all
        for package, known in zip(packages, picked, strict=True):
            name = f"{package}:{known[turn]}" if turn < len(known) else ""
            if name and name not in results:
                results[name] = _in_process(package, known[turn], limit_s)
                path.write_text(json.dumps(results, indent=1))
                found = results[name]
                print(f"{name}: {found['status']} {found.get('reason', '')[:120]} {found['seconds']:.0f} s", flush=True)


def _in_process(package: str, name: str, limit_s: float) -> Result:
    """The result of one model from a child process, which may crash or hang."""
    started = time.monotonic()
    context = multiprocessing.get_context("fork")  # the packages are imported once
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, package, name))
    child.start()
    sender.close()
    result: Result = {"status": "timeout", "reason": "time limit"}
    if receiver.poll(limit_s):
        try:
            result = receiver.recv()
        except EOFError:
            result = {"status": "crash", "reason": "the process ended"}
    child.kill()
    child.join()
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def _send(sender: Any, package: str, name: str) -> None:
    warnings.simplefilter("ignore")
    sender.send(measure(package, name))
    sender.close()


def measure(package: str, name: str) -> Result:
    """Build, capture and label one model: its operators, and the share of its FLOP that tp 2 splits."""
    from autopar.capture.program import capture_program
    from autopar.cost_model.work.coverage import coverage
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.degrees import Degrees
    from autopar.planning.fixed import choose_labels

    try:
        model, inputs, loss_fn = build(package, name)
    except Exception as error:
        return {"status": "unbuilt", "reason": _short(error)}
    try:
        program = capture_program(model, inputs, loss_fn=loss_fn)
    except Exception as error:
        return {"status": "uncaptured", "reason": _short(error)}
    cluster = ClusterSpec.preset("2xh100")
    try:
        degrees, analysis, labelled = choose_labels(program, cluster, Degrees(tp=2))
        found = coverage(program, analysis, labelled.blocks, degrees, cluster)
    except Exception as error:
        return {"status": "refused", "reason": _short(error), "operators": _operators(program)}
    operators = {o.operator: [o.num_calls, o.num_without_rule, o.flops] for o in found.operators}
    return {"status": "split", "share": found.split_flops("tp"), "operators": operators}


def _operators(program: Any) -> dict[str, list[float]]:
    counted: Counter[str] = Counter()
    for block in program.blocks:
        counted.update(str(n.target).removeprefix("aten.") for n in block.graph.nodes if n.op == "call_function")
    return {name: [n, 0, 0.0] for name, n in counted.items()}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def kind_of(reason: str) -> str:
    """A reason without the names and numbers of one model, so that alike reasons are counted together."""
    text = re.sub(r"module '[^']*' \([^)]*\), \S+: ", "", reason)
    text = re.sub(r"\"[^\"]*\"|'[^']*'|\([\d, ]*\)|\[[^\]]*\]", "…", text)
    return re.sub(r"\d+", "n", text).replace("|", "/")[:110]


def report(results: dict[str, Result]) -> str:
    """The section of docs/coverage.md."""
    built = {name: r for name, r in results.items() if r["status"] != "unbuilt"}
    captured = {name: r for name, r in built.items() if r["status"] in ("split", "refused")}
    labelled = {name: r for name, r in captured.items() if r["status"] == "split"}
    high = [name for name, r in labelled.items() if r["share"] >= SHARE]
    packages = sorted({name.partition(":")[0] for name in built})
    lines = [
        HEADING,
        "",
        f"{len(built)} models of {len(packages)} packages, built from configurations without weights, at tp 2. "
        "Written by `python tools/operator_census.py --write`.",
        "",
        "| package | models | captured | split ≥ 90 % of FLOP | refused | no result in time |",
        "|---|---|---|---|---|---|",
    ]
    for package in [*packages, ""]:
        inside = [name for name in built if not package or name.startswith(f"{package}:")]
        late = [n for n in inside if built[n]["status"] in ("timeout", "crash")]
        refused = [n for n in inside if built[n]["status"] in ("uncaptured", "refused")]
        cells = [_of(inside, captured), _of(inside, high), _part(len(refused), inside), _part(len(late), inside)]
        lines.append(f"| {package or 'all'} | {len(inside)} | {' | '.join(cells)} |")
    lines += ["", "| reason of a refusal | models |", "|---|---|"]
    reasons = Counter(kind_of(r["reason"]) for r in built.values() if r["status"] in ("uncaptured", "refused"))
    lines += [f"| {reason} | {count} |" for reason, count in reasons.most_common(MAX_REASONS)]
    with_it: Counter[str] = Counter()
    without: Counter[str] = Counter()
    for r in labelled.values():
        with_it.update(list(r["operators"]))
        without.update(name for name, (_, unknown, _) in r["operators"].items() if unknown)
    split = len(with_it) - len(without)
    lines += [
        "",
        f"The models have {len(with_it)} operators; {split} of them have a rule for every call. The others:",
        "",
    ]
    lines += ["| operator | models with it | models that compute a call whole for want of a rule |", "|---|---|---|"]
    lines += [f"| `{name}` | {with_it[name]} | {count} |" for name, count in without.most_common(MAX_ROWS)]
    return "\n".join(lines) + "\n"


def _of(inside: Sequence[str], among: Any) -> str:
    return _part(sum(name in among for name in inside), inside)


def _part(count: int, inside: Sequence[str]) -> str:
    return f"{count} ({count / max(len(inside), 1):.0%})"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
