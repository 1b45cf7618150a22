"""Which operators do models of public packages have, and does autopar split them? Models are built on meta:

    python tools/operator_census.py [--only TEXT] [--share 0.1] [--results FILE] [--jobs N] [--write]

Every model of tools/census_models.py whose package is installed is captured and labelled at tp = 2, each in a process
of its own with a time limit. A model that is refused on meta is tried again as a user would: with inputs that have
values and `specialise=True`, then on the CPU if it is small. Results are kept in a JSON file, and a later run goes on
from there. `--write` puts the tables into docs/coverage.md.
"""

import argparse
import hashlib
import json
import multiprocessing as mp
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import census_models
from census_inputs import Built, Entry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
MARKS = ("<!-- census -->", "<!-- end of census -->")
TIMEOUT_S = 240
AIM = 0.9  # of the FLOP are split at tp = 2
SHOWN = 30
MOST_PARAMETERS = 200_000_000  # of a model that is built on the CPU
PRELOADED = ("torch", "torch._dynamo", "autopar", "autopar.planning.fixed", "autopar.capture.program")
CAPTURED = ("split", "partly split")
OUTCOMES = (*CAPTURED, "refused", "internal error", "too slow", "fails alone")  # of a model that is built


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose package and name have this text")
    parser.add_argument("--share", type=float, default=1.0, help="run this share of the models, picked by their name")
    parser.add_argument("--again", default="", help="run models again whose kept outcome has this text")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "census.json", help="kept results")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    kept: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    chosen = [e for e in census_models.entries() if options.only in key(e) and picked(key(e)) < options.share]
    todo = [e for e in chosen if key(e) not in kept or (options.again and options.again in kept[key(e)]["outcome"])]
    print(f"{len(chosen)} models, {len(todo)} to run", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for entry, found in pool.map(run_in_process, todo):
            kept[key(entry)] = found
            options.results.write_text(json.dumps(kept, indent=1))
            print(
                f"{key(entry)}: {found['outcome']} {found.get('reason', '')[:150]} {found['seconds']:.0f} s", flush=True
            )
    text = tables(kept)
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2] or chr(10)}")
    return 0


def key(entry: Entry) -> str:
    """The name of a model in the results."""
    return f"{entry.package}/{entry.name}"


def picked(name: str) -> float:
    """A number from 0 to 1 that depends on nothing but the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def run_in_process(entry: Entry) -> tuple[Entry, dict[str, Any]]:
    """What `measured` finds, or the failure of its process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, entry.package])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, entry.package, entry.name), daemon=True)
    started = time.monotonic()
    process.start()
    send.close()
    try:
        found: dict[str, Any] = (
            receive.recv() if receive.poll(TIMEOUT_S) else {"outcome": "too slow", "reason": f"more than {TIMEOUT_S} s"}
        )
    except EOFError:
        process.join()
        found = {"outcome": "internal error", "reason": f"the process ended with status {process.exitcode}"}
    process.kill()
    process.join()
    return entry, {**found, "seconds": time.monotonic() - started}


def _send(send: Any, package: str, name: str) -> None:
    warnings.filterwarnings("ignore")
    send.send(measured(next(e for e in census_models.PACKAGES[package]() if e.name == name)))


def measured(entry: Entry) -> dict[str, Any]:
    """The outcome of one model, and its operators: calls, calls without a rule, and FLOP."""
    from autopar.cost_model.work.coverage import coverage
    from autopar.errors import AutoparError
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.degrees import Degrees
    from autopar.planning.fixed import choose_labels

    cluster = ClusterSpec.preset("2xcpu")
    try:
        try:
            built = _built(entry)
        except Exception as error:
            if "meta" not in str(error):
                raise
            built = _built(entry, "cpu")  # it reads a value while it is built
    except Exception as error:
        return {"outcome": "not built", "reason": reason_of(error)}
    try:
        program = _captured(entry, built)
        degrees, analysis, found = choose_labels(program, cluster, Degrees(tp=2))
        covered = coverage(program, analysis, found.blocks, degrees, cluster)
    except AutoparError as error:
        alone = "the model fails on one device, without autopar" in str(error)
        return {"outcome": "fails alone" if alone else "refused", "reason": reason_of(error)}
    except Exception as error:
        return {"outcome": "internal error", "reason": reason_of(error)}
    share = covered.split_flops("tp")
    operators = {o.operator: (o.num_calls, o.num_without_rule, o.flops) for o in covered.operators}
    row = {"outcome": CAPTURED[share < AIM], "share": share, "operators": operators}
    return row | {"specialise": True} if any(decision.inputs for decision in program.decisions) else row


def _built(entry: Entry, device: str = "meta") -> Built:
    """The model, all of it on the device, and its inputs."""
    import torch

    with torch.device(device):
        model, inputs, loss_fn = entry.build()
    return model.to(device), inputs, loss_fn


def _captured(entry: Entry, built: Built) -> Any:
    """The program of the first attempt that is not refused. Raises the error of the last attempt."""
    from autopar.capture.request import Request
    from autopar.errors import CaptureError
    from autopar.ir.degrees import Degrees
    from autopar.planning.fixed import capture_for

    refused: CaptureError | None = None
    for (model, inputs, loss_fn), specialise in _attempts(entry, built):
        try:
            return capture_for(Request.of(model.train(), inputs, loss_fn, specialise=specialise), Degrees())
        except CaptureError as error:
            refused = error
    assert refused is not None
    raise refused


def _attempts(entry: Entry, built: Built) -> Iterator[tuple[Built, bool]]:
    """The model on meta, with inputs that have values, and on the CPU; and whether inputs may decide branches."""
    yield built, False
    model, inputs, loss_fn = built
    yield (model, with_values(inputs), loss_fn), True
    if sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS:
        on_cpu = _built(entry, "cpu")
        yield on_cpu, False
        yield on_cpu, True


def with_values(inputs: Any) -> Any:
    """The inputs on the CPU: small numbers instead of tensors on meta."""
    import torch
    from torch.utils import _pytree as pytree

    def filled(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_meta:
            return leaf
        if leaf.dtype.is_floating_point:
            return torch.randn(leaf.shape, dtype=leaf.dtype)
        return torch.randint(1, 4, leaf.shape).to(leaf.dtype)

    return pytree.tree_map_only(torch.Tensor, filled, inputs)


def reason_of(error: Exception) -> str:
    """The error's class and the first lines of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def kind_of(reason: str) -> str:
    """A reason without names, paths and numbers, to count equal ones."""
    text = re.sub(r"module '[^']*' \(\w+\)|\S+\.py:\d+", "…", reason)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", text)
    return text[:140]


def tables(kept: Mapping[str, Any]) -> str:
    """The census as Markdown: outcomes by package, reasons, and operators."""
    built = {name: row for name, row in kept.items() if row["outcome"] != "not built"}
    packages = sorted({name.split("/")[0] for name in built})
    run = [row for row in built.values() if row["outcome"] != "fails alone"]
    lines = [
        f"{len(built)} models of {len(packages)} packages were built from their configurations. {len(run)} of them run "
        "alone, and the shares below count these.",
        "",
        _row("package", "built", *OUTCOMES, "with specialise"),
        _row("---", *["---:"] * (len(OUTCOMES) + 2)),
    ]
    for package in [*packages, ""]:
        own = [row for name, row in built.items() if name.startswith(f"{package}/" if package else "")]
        counts = Counter(row["outcome"] for row in own)
        specialised = sum("specialise" in row for row in own)
        lines.append(_row(package or "all", str(len(own)), *(str(counts[o]) for o in OUTCOMES), str(specialised)))
    captured = [row for row in run if row["outcome"] in CAPTURED]
    specialised = sum("specialise" in row for row in captured)
    split = sum(row["outcome"] == "split" for row in captured)
    total = max(1, len(run))
    lines += [
        "",
        f"Captured: {len(captured) / total:.1%} ({(len(captured) - specialised) / total:.1%} as they are, and "
        f"{specialised / total:.1%} with `specialise=True`). At least {AIM:.0%} of the FLOP split at tp = 2: "
        f"{split / total:.1%}.",
        "",
    ]
    lines += [_row("reason of a refusal", "models"), _row("---", "---:")]
    reasons = Counter(kind_of(row["reason"]) for row in run if "reason" in row)
    lines += [_row(reason.replace("|", "/"), str(count)) for reason, count in reasons.most_common()]
    return "\n".join([*lines, "", *_operator_table(built.values())])


def _operator_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Operators by the models that have calls of it without a rule."""
    with_it, without_rule, flops = Counter[str](), Counter[str](), defaultdict[str, float](float)
    for row in rows:
        whole = sum(work for _, _, work in row.get("operators", {}).values()) or 1.0
        for operator, (_, missing, work) in row.get("operators", {}).items():
            with_it[operator] += 1
            without_rule[operator] += missing > 0
            flops[operator] = max(flops[operator], work / whole if missing else 0.0)
    found = [o for o, count in without_rule.most_common() if count]
    return [
        f"{len(with_it)} operators; {len(found)} of them have calls without a rule.",
        "",
        _row(
            "operator",
            "models that have it",
            "models with calls without a rule",
            "largest share of FLOP of all its calls there",
        ),
        _row("---", "---:", "---:", "---:"),
        *(_row(f"`{o}`", str(with_it[o]), str(without_rule[o]), f"{flops[o]:.1%}") for o in found[:SHOWN]),
    ]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
