"""Counts the classes of autopar that a model meets on its way to a plan and to a `ParallelModel`.

    python tools/main_path_types.py             # the counts
    python tools/main_path_types.py --names rooms

A tiny Llama is planned for four CPUs (`autopar.plan`), and parallelised over four gloo ranks with given degrees and
with a searched plan (`autopar.parallelize`). Rank 0 counts the classes of autopar in three ways:

    made       an instance was made
    modules    an instance was an argument or the result of a call from one module to another
    rooms      an instance was an argument or the result of a call from one package to another (`autopar.capture`,
               `autopar.search`, ...): a reader needs these types to follow a model from package to package

The model and the cluster are built before. Every call counts, with the items of its tuples, lists and dicts. Private
classes and exceptions do not count.
"""

import argparse
import os
import pickle
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import torch

from autopar import parallelize, plan
from autopar.ir.cluster import ClusterSpec
from autopar.models.load import ResolvedModel, resolve_model

NUM_RANKS = 4
_MOST_ITEMS = 3  # of a container that are looked at: the others are of the same class


class Watch:
    """Records classes of autopar while it is entered: `made`, and passed between `modules` and between `rooms`."""

    def __init__(self) -> None:
        self.made: set[type] = set()
        self.modules: set[type] = set()
        self.rooms: set[type] = set()

    def __enter__(self) -> "Watch":
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, value: object) -> None:
        if event not in ("call", "return"):
            return
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if event == "call" and names and code.co_name in ("__init__", "__new__", "__post_init__"):
            first = frame.f_locals.get(names[0])
            self.made |= set(_classes_in(first))
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back is not None else ""
        if module == caller or not (_is_ours(module) and _is_ours(caller)):
            return
        values = [value] if event == "return" else [frame.f_locals.get(name) for name in names]
        kinds = {kind for one in values for kind in _classes_in(one) if not kind.__name__.startswith("_")}
        self.modules |= kinds
        if _room(module) != _room(caller):
            self.rooms |= kinds


def _is_ours(module: str) -> bool:
    return module == "autopar" or module.startswith("autopar.")


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _classes_in(value: object, depth: int = 2) -> Iterator[type]:
    kind = value if isinstance(value, type) else type(value)
    if _is_ours(getattr(kind, "__module__", "")):
        if not issubclass(kind, BaseException):
            yield kind
    elif depth and isinstance(value, (tuple, list, set, frozenset)):
        for one in list(value)[:_MOST_ITEMS]:
            yield from _classes_in(one, depth - 1)
    elif depth and type(value) is dict:
        for one in [*list(value)[:_MOST_ITEMS], *list(value.values())[:_MOST_ITEMS]]:
            yield from _classes_in(one, depth - 1)


def _planned(found: ResolvedModel, cluster: ClusterSpec) -> object:
    return plan(found.model, cluster, example_inputs=found.example_inputs, global_batch=8)


def _parallelized(found: ResolvedModel, cluster: ClusterSpec, degrees: Mapping[str, int] | None) -> object:
    return parallelize(found.model, cluster, example_inputs=found.example_inputs, plan=degrees)


def watched(run: Callable[[], object], num_ranks: int) -> dict[str, set[str]]:
    """The full names of the classes that a function meets on rank 0, by how they are counted."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        file, children = Path(folder) / "found", []
        for rank in range(num_ranks):
            child = os.fork()
            if not child:
                world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
                os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
                _on_rank(run, file if rank == 0 else None)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert not any(statuses), statuses
        found: dict[str, set[str]] = pickle.loads(file.read_bytes())  # written by our own child
        return found


def _on_rank(run: Callable[[], object], file: Path | None) -> None:
    try:
        torch.set_num_threads(1)
        with Watch() as watch:
            run()
        if file is not None:
            every = {"made": watch.made, "modules": watch.modules, "rooms": watch.rooms}
            names = {how: {f"{one.__module__}.{one.__qualname__}" for one in kinds} for how, kinds in every.items()}
            file.write_bytes(pickle.dumps(names))
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", choices=("made", "modules", "rooms"), help="list these classes")
    named = parser.parse_args().names
    model = resolve_model("llama3-8b", layers=2, hidden=64, seq_len=32, batch=4, dtype="float32")
    cluster = ClusterSpec.parse(f"{NUM_RANKS}xcpu")
    runs: Mapping[str, tuple[Callable[[], object], int]] = {
        "autopar.plan": (lambda: _planned(model, cluster), 1),
        "autopar.parallelize, given degrees": (lambda: _parallelized(model, cluster, {"tp": 2, "dp": 2}), NUM_RANKS),
        "autopar.parallelize, searched": (lambda: _parallelized(model, cluster, None), NUM_RANKS),
    }
    print(f"{'':36}{'made':>9}{'modules':>9}{'rooms':>9}")
    for name, (run, num_ranks) in runs.items():
        found = watched(run, num_ranks)
        print(f"{name:36}{len(found['made']):9}{len(found['modules']):9}{len(found['rooms']):9}")
        if named:
            _print_names(found[named])


def _print_names(names: set[str]) -> None:
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module, _, kind = name.removeprefix("autopar.").rpartition(".")
        by_module[module].append(kind)
    for module, kinds in sorted(by_module.items()):
        print(f"    {module:44} {', '.join(sorted(kinds))}")


if __name__ == "__main__":
    main()
