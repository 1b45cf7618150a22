"""A survey of models that nothing else in the repository names: python tools/strangers.py --out results.jsonl

Each model is verified as its package builds it and as it trains, under tp 2, under tp 2 x dp 2 with ZeRO-3, and in two
pipeline stages. The commands run in this process, one after another, with a limit of time. They share the processes of
their ranks. If a command is refused or differs, the command that `next:` prints is tried once, unless it accepts
another loss. Results are appended to a file of JSON lines, and a model and plan that the file has are not run again. At
the end the tool prints tables as Markdown; --table prints them alone.

The packages are installed by hand: pip install NAME for each name of --packages, without torchvision and torchaudio.
The builds of PyPI break the import of transformers beside the CPU build of torch.
"""

import argparse
import importlib
import json
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from strangers_list import KINDS, STRANGERS
from typer.testing import CliRunner

from autopar.cli.app import app_of
from autopar.commands import verify
from autopar.runtime.distributed.launch import Ranks

for module in ("strangers_transformers", "strangers_packages", "strangers_gradients"):
    importlib.import_module(module)

PLANS = {
    "tp 2": "--world-size 2 --tp 2",
    "tp 2 × dp 2 ZeRO-3": "--world-size 4 --tp 2 --dp 2 --zero 3",
    "pp 2": "--world-size 2 --pp 2",
}
OUTCOMES = ("equal", "refused", "different", "internal error", "too slow")
ANOTHER_LOSS = "--per-micro-batch"
Result = dict[str, Any]


WORLDS: dict[int, Ranks] = {}


class TooSlow(BaseException):
    """The limit of a command is over. No handler of errors catches it."""


@contextmanager
def kept_ranks(world_size: int) -> Iterator[Ranks]:
    """The ranks of all commands of this world size. They stay open if the command succeeds."""
    if world_size not in WORLDS or not WORLDS[world_size].is_open:
        WORLDS[world_size] = Ranks(world_size)
    try:
        yield WORLDS[world_size]
    except BaseException:
        WORLDS.pop(world_size).close()
        raise


def outcome_of(command: Sequence[str], limit_s: float) -> tuple[str, str]:
    """What became of one `autopar` command, and what it wrote."""

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(limit_s))
    try:
        with patch.object(verify, "Ranks", kept_ranks):
            done = CliRunner().invoke(app_of(command), [*command])
    except TooSlow:
        return "too slow", ""
    finally:
        signal.alarm(0)
    if "this is a bug" in done.output:
        return "internal error", done.output
    return {0: "equal", 1: "different", 2: "refused"}.get(done.exit_code, "internal error"), done.output


def message_of(text: str) -> str:
    """The line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if re.match(r"(error|FAILED|autopar|\w*Error)\b", line)] or lines[-1:] or [""]
    return found[0][:600]


def remedy_of(text: str) -> str | None:
    """The command that `next:` prints."""
    found = re.search(r"next: .*?\b(autopar verify [^`\n]+)", text)
    return None if found is None else found[1].strip()


def surveyed(name: str, plan: str, limit_s: float) -> Result:
    """One model under one plan, and after its remedy."""
    entry, started = STRANGERS[name], time.monotonic()
    outcome, text = outcome_of(["verify", f"{entry.module}:{name}", *shlex.split(PLANS[plan])], limit_s)
    found: Result = {"name": name, "package": entry.package, "kinds": entry.kinds, "plan": plan, "outcome": outcome}
    if outcome != "equal":
        remedy = remedy_of(text)
        found |= {"message": message_of(text), "text": text[-4000:], "remedy": remedy}
        if remedy is not None and ANOTHER_LOSS not in remedy:
            found["after"], after = outcome_of(shlex.split(remedy, comments=True)[1:], limit_s)
            found["after_message"] = message_of(after)
    return found | {"seconds": round(time.monotonic() - started, 1)}


def tables(results: Sequence[Result]) -> str:
    """Counts by plan, and the models that are not equal under every plan, with the first message of each."""
    rows = [f"| plan | models | {' | '.join(OUTCOMES)} | equal after the remedy |", "|---" * (len(OUTCOMES) + 3) + "|"]
    for plan in PLANS:
        own = [r for r in results if r["plan"] == plan]
        count = Counter(r["outcome"] for r in own)
        after = sum("equal" in (r["outcome"], r.get("after")) for r in own)
        rows.append(f"| {plan} | {len(own)} | {' | '.join(str(count[o]) for o in OUTCOMES)} | {after} |")
    rows += ["", f"| model | package | {' | '.join(PLANS)} | message |", "|---" * (len(PLANS) + 3) + "|"]
    for name, entry in STRANGERS.items():
        found = {r["plan"]: r for r in results if r["name"] == name}
        failed = [r for r in found.values() if r["outcome"] != "equal"]
        if failed:
            cells = [_cell(found[plan]) if plan in found else "" for plan in PLANS]
            message = re.sub(r"/\S*/site-packages/|^autopar: |\|", "", failed[0]["message"])
            rows.append(f"| {name} | {entry.package} | {' | '.join(cells)} | {message[:300]} |")
    return "\n".join(rows)


def _cell(result: Result) -> str:
    """The outcome of a model under a plan, and of its remedy."""
    outcome: str = result["outcome"]
    return outcome + (f", {result['after']} with {_options(result['remedy'])}" if "after" in result else "")


def _options(command: str) -> str:
    """The options of a printed command that decide: not those of the ranks."""
    return re.sub(r"autopar verify \S+ (--world-size \d+ ?)?|#.*", "", command).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("strangers.jsonl"))
    parser.add_argument("--only", nargs="*", default=list(STRANGERS), help="names of models")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS), help="names of plans")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one command")
    parser.add_argument("--table", action="store_true", help="print the tables of the file, and run nothing")
    parser.add_argument("--packages", action="store_true", help="print the names of packages and the number of models")
    chosen = parser.parse_args()
    if chosen.packages:
        print(*sorted({entry.package for entry in STRANGERS.values()}))
        print(len(STRANGERS), {kind: sum(kind in e.kinds for e in STRANGERS.values()) for kind in KINDS})
        return
    results: list[Result] = []
    if chosen.out.exists():
        results = [json.loads(line) for line in chosen.out.read_text().splitlines()]
    done = {(r["name"], r["plan"]) for r in results}
    for plan in () if chosen.table else chosen.plans:
        for name in chosen.only:
            if (name, plan) not in done:
                results.append(surveyed(name, plan, chosen.limit))
                with chosen.out.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    for world in WORLDS.values():
        world.close()
    print(tables(results))


if __name__ == "__main__":
    main()
