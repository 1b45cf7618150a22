"""The plan: everything decided. A value that prints, compares and round-trips through JSON; running needs only it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import PlanError, did_you_mean
from autopar.ir.explanation import as_text
from autopar.ir.sharding import Mesh, Type
from autopar.ir.summary import Summary

VERSION = 1
MAX_PLAN_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of the mesh and how data is cut. `micro_batch` is sequences per data-parallel rank and micro-batch."""

    tp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero: int = 3
    sequence_parallel: bool | None = None
    micro_batch: int | None = None
    accumulate: int = 1

    @property
    def dp(self) -> int:
        """Ranks over which the batch is split."""
        return self.dp_shard * self.dp_replicate

    @property
    def world_size(self) -> int:
        return self.dp * self.tp

    @property
    def mesh(self) -> Mesh:
        """The mesh of labels: `dp` splits the batch, `tp` everything else."""
        return Mesh(("dp", "tp"), (self.dp, self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """Labels of one distinct block, one entry per mesh dimension of the plan.

    `ports` gives the type of what is bound to each placeholder (for parameters: how they are stored), `labels` the
    variant of each operator by node key, `results` the type in which each output leaves the block.
    """

    name: str
    signature: str
    ports: Mapping[str, tuple[Type, ...]]
    labels: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[Type, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement of one program on one mesh. `summary` decides nothing: it is what `explain` says about the rest."""

    fingerprint: str
    model: str
    degrees: Degrees
    blocks: tuple[BlockLabels, ...]
    regather: bool = True
    batch: int | None = None
    sequence: int | None = None
    torch_version: str = ""
    notes: tuple[str, ...] = ()
    summary: Summary | None = None
    version: int = field(default=VERSION)

    @property
    def mesh(self) -> Mesh:
        return self.degrees.mesh

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = asdict(self)
        data["blocks"] = [
            {
                "name": b.name,
                "signature": b.signature,
                "ports": {k: [str(t) for t in v] for k, v in b.ports.items()},
                "labels": {k: list(v) for k, v in b.labels.items()},
                "results": {k: [str(t) for t in v] for k, v in b.results.items()},
            }
            for b in self.blocks
        ]
        data["notes"] = list(self.notes)
        data["summary"] = None if self.summary is None else self.summary.to_dict()
        return data

    def explain(self) -> str:
        """What is split, how, and by which collectives, in words and tables; operators without a rule come first."""
        return as_text(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises `PlanError` where the file cannot be written."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise PlanError(f"plan file {target} cannot be written: {error.strerror or error}") from error

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file. Raises `PlanError` that names file, field and remedy."""
        file = Path(path)
        if not file.is_file():
            raise PlanError(
                f"there is no plan file {file}; write one with `autopar plan MODEL --cluster C --out {file}`"
            )
        if file.stat().st_size > MAX_PLAN_BYTES:
            raise PlanError(f"plan file {file} has {file.stat().st_size} bytes, more than {MAX_PLAN_BYTES}; not a plan")
        try:
            data = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError, UnicodeDecodeError) as error:
            raise PlanError(f"plan file {file} is not JSON: {error}; write it again with `autopar plan`") from error
        return Plan.from_dict(data, str(file))

    @staticmethod
    def from_dict(data: Any, source: str = "plan") -> "Plan":
        """The inverse of `to_dict`; every deviation is a `PlanError`."""
        if not isinstance(data, dict):
            raise PlanError(f"{source}: expected an object, got {type(data).__name__}")
        known = {
            "fingerprint",
            "model",
            "degrees",
            "blocks",
            "regather",
            "batch",
            "sequence",
            "torch_version",
            "notes",
            "summary",
            "version",
        }
        _keys(data, known, {"fingerprint", "degrees", "blocks", "version"}, source)
        if data["version"] != VERSION:
            raise PlanError(f"{source}: schema version {data['version']}, this autopar reads {VERSION}; plan again")
        degrees = degrees_from(data["degrees"], f"{source}: degrees")
        summary = data.get("summary")
        try:
            blocks = tuple(_block_from(b, f"{source}: blocks[{i}]") for i, b in enumerate(data["blocks"]))
            return Plan(
                fingerprint=str(data["fingerprint"]),
                model=str(data.get("model", "")),
                degrees=degrees,
                blocks=blocks,
                regather=bool(data.get("regather", True)),
                batch=data.get("batch"),
                sequence=data.get("sequence"),
                torch_version=str(data.get("torch_version", "")),
                notes=tuple(str(n) for n in data.get("notes", ())),
                summary=None if summary is None else Summary.from_dict(summary, f"{source}: summary"),
            )
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise PlanError(f"{source}: {error}; write the plan again with `autopar plan`") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found


def _keys(data: Mapping[str, Any], known: set[str], required: set[str], source: str) -> None:
    for key in data:
        if key not in known:
            raise PlanError(f"{source}: unknown key {key!r}; {did_you_mean(key, sorted(known))}")
    missing = sorted(required - set(data))
    if missing:
        raise PlanError(f"{source}: missing {missing}")


def _block_from(data: Mapping[str, Any], source: str) -> BlockLabels:
    names = {"name", "signature", "ports", "labels", "results"}
    _keys(data, names, names, source)
    types = {part: {k: tuple(Type.parse(t) for t in v) for k, v in data[part].items()} for part in ("ports", "results")}
    labels = {str(k): tuple(str(x) for x in v) for k, v in data["labels"].items()}
    return BlockLabels(
        name=data["name"], signature=data["signature"], ports=types["ports"], labels=labels, results=types["results"]
    )


_ALIASES = {"dp": "dp_shard"}


def degrees_from(data: Any, source: str = "plan") -> Degrees:
    """Degrees of a mapping such as ``{"tp": 2, "dp": 2, "zero": 3}``; `dp` means `dp_shard`."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{source}: expected a mapping such as {{'tp': 2, 'dp': 2}}, got {type(data).__name__}")
    fields = {"tp", "dp_shard", "dp_replicate", "zero", "sequence_parallel", "micro_batch", "accumulate"}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in data.items():
        name: Any = _ALIASES.get(key, key)
        if name not in fields:
            problems.append(f"unknown key {key!r}; {did_you_mean(str(key), sorted(fields | set(_ALIASES)))}")
        elif name in values:
            problems.append(f"{key!r} says {name} a second time; keep one")
        elif name == "sequence_parallel":
            if value is not None and not isinstance(value, bool):
                problems.append(f"sequence_parallel: expected true, false or null, got {value!r}")
        elif value is None and name == "micro_batch":
            pass
        elif isinstance(value, bool) or not isinstance(value, int):
            problems.append(f"{key}: expected a whole number, got {value!r}")
        elif name == "zero" and value not in (0, 1, 2, 3):
            problems.append(f"zero: expected 0, 1, 2 or 3, got {value}")
        elif value < (0 if name == "zero" else 1) or value > 1_000_000:
            problems.append(f"{key}: expected at least 1 and at most 1000000, got {value}")
        values[name] = value
    if problems:
        raise PlanError(f"{source}: " + "; ".join(problems))
    return Degrees(**values)
