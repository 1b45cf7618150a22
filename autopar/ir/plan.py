"""The plan: everything decided. A value that prints, compares and round-trips through JSON; running needs only it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from math import prod
from pathlib import Path
from typing import Any

from autopar.errors import InputError, PlanError, Problem, did_you_mean, short_repr
from autopar.files.atomic import write_text
from autopar.ir.explanation import as_text
from autopar.ir.rank_order import ORDERS, strides
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE, SCHEDULE_NAMES, SCHEDULES, rank_of_stage
from autopar.ir.sharding import Mesh, Type
from autopar.ir.summary import Summary

_VERSION = 1
MAX_PLAN_BYTES = 64 * 1024 * 1024
MAX_DEGREE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of the mesh and how data is cut. `micro_batch` is sequences per data-parallel rank and micro-batch.

    `tp_dims` is `tp` as the product of two mesh dimensions, each of which splits axes of its own: with fewer key heads
    than ranks, the first splits heads of keys, the second the queries that share one. With `per_micro_batch` the loss
    of a step is the mean of the losses of its micro-batches, each computed by itself.

    `pp` ranks hold `virtual_stages` pipeline stages each and run `micro_batches` in the order of `schedule`
    (`autopar.ir.schedules`), `accumulate` times a step. With `recompute` "full" the values inside blocks are computed
    again for the backward pass, in the first `recompute_blocks` repeated blocks of a stage (one number for all stages,
    or one for each), or in all of them. `cut_at` are the module paths at which stages after the first begin, where that
    was asked for. `order` is that of mesh dimensions over ranks (`autopar.ir.rank_order`).
    """

    pp: int = 1
    tp: int = 1
    tp_dims: tuple[int, ...] | None = None
    dp_shard: int = 1
    dp_replicate: int = 1
    zero: int = 3
    sequence_parallel: bool | None = None
    micro_batch: int | None = None
    accumulate: int = 1
    per_micro_batch: bool = False
    schedule: str = DEFAULT_SCHEDULE
    virtual_stages: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    recompute_blocks: int | tuple[int, ...] | None = None
    cut_at: tuple[str, ...] | None = None
    order: str = ORDERS[0]

    @property
    def dp(self) -> int:
        """Ranks over which the batch is split."""
        return self.dp_shard * self.dp_replicate

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step: those of every run of the schedule."""
        return self.micro_batches * self.accumulate

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    def recomputed_blocks_of(self, stage: int) -> int | None:
        """How many repeated blocks of a stage compute again, where anything does; None for all."""
        blocks = self.recompute_blocks
        return blocks[stage] if isinstance(blocks, tuple) else blocks

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline runs backward passes in two parts, one for inputs and one for weights."""
        return self.pp > 1 and SCHEDULES[self.schedule].splits_backward

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return rank_of_stage(self.schedule, self.pp, stage)

    @property
    def strides(self) -> dict[str, int]:
        """How many ranks lie from one rank of pp, dp and tp to the next."""
        return strides(self.order, {"pp": self.pp, "dp": self.dp, "tp": self.tp})

    def coordinate(self, name: str, rank: int) -> int:
        """Where a rank is on pp, dp or tp."""
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return rank // self.strides[name] % sizes[name]

    @property
    def mesh(self) -> Mesh:
        """The mesh of labels: `dp` splits the batch, `tp` (or `tp0` and `tp1`) everything else."""
        if self.tp_dims is None:
            return Mesh(("dp", "tp"), (self.dp, self.tp))
        return Mesh(("dp", *(f"tp{i}" for i in range(len(self.tp_dims)))), (self.dp, *self.tp_dims))


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
    """The placement of one program on one mesh: everything that `autopar.parallelize` needs to run it.

    A plan is a frozen value that prints, compares and round-trips through JSON. `autopar.plan` finds one.

    Example:
        >>> program = autopar.capture_program(model, batch, loss_fn=loss_fn)
        >>> plan = autopar.Plan(fingerprint=program.fingerprint, model="tiny", degrees=parallel.plan.degrees, blocks=())
        >>> plan.degrees.world_size
        1
    """

    fingerprint: str  # of the captured program; another program is refused
    model: str
    degrees: Degrees
    blocks: tuple[BlockLabels, ...]  # one entry for each distinct block
    regather: bool = True  # gathered inputs of products are kept as shards, and gathered again in the backward pass
    batch: int | None = None  # sequences of one micro-batch on all data-parallel ranks
    sequence: int | None = None  # tokens of one sequence
    torch_version: str = ""
    notes: tuple[str, ...] = ()
    summary: Summary | None = None  # the text of `explain`; it decides nothing
    cuts: tuple[int, ...] = ()  # the main calls, numbered from 0, before which a pipeline stage begins
    recomputed: tuple[str, ...] = ()  # values that every pipeline stage computes itself instead of receiving them
    version: int = field(default=_VERSION)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the labels, without pipeline stages."""
        return self.degrees.mesh

    def to_dict(self) -> dict[str, Any]:
        """Convert the plan to plain data for JSON.

        Returns:
            Dicts, lists, texts and numbers. `from_dict` reads them back.

        Example:
            >>> parallel.plan.to_dict()["degrees"]["tp"]
            1
        """
        data = asdict(self)
        data["blocks"] = [labels_to_dict(block) for block in self.blocks]
        for name in ("notes", "cuts", "recomputed"):
            data[name] = list(getattr(self, name))
        data["summary"] = None if self.summary is None else self.summary.to_dict()
        return data

    def explain(self) -> str:
        """Explain the plan in words and tables.

        Returns:
            The operators without a rule, then the split of every value and the collectives of every block.

        Example:
            >>> parallel.plan.explain().splitlines()[0][:20]
            'Every operator has a'
        """
        return as_text(self)

    def to_json(self) -> str:
        """Convert the plan to JSON text.

        Returns:
            The text that `save` writes.

        Example:
            >>> parallel.plan.to_json().startswith("{")
            True
        """
        return json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all.

        Args:
            path: The file to write.

        Raises:
            PlanError: The file cannot be written.

        Example:
            >>> parallel.plan.save("plan.json")
            >>> autopar.Plan.load("plan.json") == parallel.plan
            True
        """
        try:
            write_text(path, self.to_json())
        except InputError as error:
            raise PlanError(f"plan file {error}") from error

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file.

        Args:
            path: The file that `save` or ``autopar plan --out`` wrote.

        Returns:
            The plan.

        Raises:
            PlanError: The file does not exist, is no plan, or has another schema version. The message names file, field
                and remedy.

        Example:
            >>> parallel.plan.save("plan.json")
            >>> autopar.Plan.load("plan.json").degrees.tp
            1
        """
        file = Path(path)
        if not file.is_file():
            raise PlanError(
                f"there is no plan file {file}; write one with `autopar plan MODEL --cluster C --out {file}`"
            )
        if file.stat().st_size > MAX_PLAN_BYTES:
            raise PlanError(f"plan file {file} has {file.stat().st_size} bytes, more than {MAX_PLAN_BYTES}; not a plan")
        try:
            text = file.read_text(encoding="utf-8")
            data = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        except (ValueError, RecursionError, UnicodeDecodeError) as error:
            raise PlanError(f"plan file {file} is not JSON: {error}; write it again with `autopar plan`") from error
        return Plan.from_dict(data, str(file))

    @staticmethod
    def from_dict(data: Any, source: str = "plan") -> "Plan":
        """Read a plan from plain data, strictly.

        Args:
            data: The result of `to_dict`.
            source: The name of the data in messages.

        Returns:
            The plan.

        Raises:
            PlanError: A field is missing, unknown or of a wrong type. The message lists every such field.

        Example:
            >>> autopar.Plan.from_dict(parallel.plan.to_dict()) == parallel.plan
            True
        """
        if not isinstance(data, dict):
            raise PlanError(f"{source}: expected an object, got {type(data).__name__}")
        version = data.get("version")
        if version != _VERSION or isinstance(version, bool):
            raise PlanError(
                f"{source}: schema version {short_repr(version)}, this autopar reads {_VERSION}; plan again"
            )
        problems = _problems(data, _KINDS, _REQUIRED, "")
        degrees, summary = Degrees(), data.get("summary")
        try:
            degrees = degrees_from(data.get("degrees", {}), "degrees")
        except PlanError as error:
            nested = [replace(p, path=f"degrees.{p.path}") for p in error.problems]
            problems += nested or [Problem(path="degrees", rule="must be an object")]
        for i, block in enumerate(data["blocks"] if isinstance(data.get("blocks"), list) else []):
            problems += _problems(block, _BLOCK_KINDS, set(_BLOCK_KINDS), f"blocks[{i}].")
        if problems:
            raise PlanError(f"{source} cannot be used", problems)
        try:
            return Plan(
                fingerprint=data["fingerprint"],
                model=data.get("model", ""),
                degrees=degrees,
                blocks=tuple(labels_from_dict(block) for block in data["blocks"]),
                regather=data.get("regather", True),
                batch=data.get("batch"),
                sequence=data.get("sequence"),
                torch_version=data.get("torch_version", ""),
                notes=tuple(str(n) for n in data.get("notes", ())),
                summary=None if summary is None else Summary.from_dict(summary, f"{source}: summary"),
                cuts=_cuts(data.get("cuts", []), degrees.num_stages),
                recomputed=tuple(str(n) for n in data.get("recomputed", ())),
            )
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise PlanError(f"{source}: {error}; write the plan again with `autopar plan`") from error


_KINDS: Mapping[str, tuple[type, ...]] = {
    "fingerprint": (str,),
    "model": (str,),
    "degrees": (dict,),
    "blocks": (list,),
    "regather": (bool,),
    "batch": (int, type(None)),
    "sequence": (int, type(None)),
    "torch_version": (str,),
    "notes": (list,),
    "cuts": (list,),
    "recomputed": (list,),
    "summary": (dict, type(None)),
    "version": (int,),
}
_REQUIRED = {"fingerprint", "degrees", "blocks", "version"}
_BLOCK_KINDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "signature": (str,),
    "ports": (dict,),
    "labels": (dict,),
    "results": (dict,),
}
_WORDS = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a whole number above 0"}


def _problems(data: Any, kinds: Mapping[str, tuple[type, ...]], required: set[str], prefix: str) -> list[Problem]:
    """Unknown and missing keys, and values of a wrong type, all of them."""
    if not isinstance(data, dict):
        return [Problem(path=prefix.rstrip("."), value=data, rule="must be an object")]
    found = [
        Problem(path=f"{prefix}{key}", rule=f"unknown key; {did_you_mean(str(key), sorted(kinds))}")
        for key in data
        if key not in kinds
    ]
    found += [Problem(path=f"{prefix}{key}", rule="is missing") for key in sorted(required - set(data))]
    for key, allowed in kinds.items():
        if key not in data:
            continue
        value = data[key]
        is_kind = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        if not is_kind or (int in allowed and value is not None and value < 1):
            found.append(Problem(path=f"{prefix}{key}", value=value, rule=f"must be {_WORDS[allowed[0]]}"))
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON has")


def _cuts(data: Sequence[Any], num_stages: int) -> tuple[int, ...]:
    if any(isinstance(cut, bool) or not isinstance(cut, int) for cut in data) or len(data) != num_stages - 1:
        raise ValueError(f"cuts {short_repr(data)}: must be {num_stages - 1} whole numbers, one less than stages")
    return tuple(data)


def labels_to_dict(block: BlockLabels) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "name": block.name,
        "signature": block.signature,
        "ports": {k: [str(t) for t in v] for k, v in block.ports.items()},
        "labels": {k: list(v) for k, v in block.labels.items()},
        "results": {k: [str(t) for t in v] for k, v in block.results.items()},
    }


def labels_from_dict(data: Mapping[str, Any]) -> BlockLabels:
    """The inverse of `labels_to_dict`; raises what Python does on data of another form."""
    types = {part: {k: tuple(Type.parse(t) for t in v) for k, v in data[part].items()} for part in ("ports", "results")}
    labels = {str(k): tuple(str(x) for x in v) for k, v in data["labels"].items()}
    return BlockLabels(
        name=data["name"], signature=data["signature"], ports=types["ports"], labels=labels, results=types["results"]
    )


_ALIASES = {"dp": "dp_shard"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULE_NAMES,
    "recompute": ("none", "full"),
    "order": ORDERS,
}


def degrees_from(data: Any, source: str = "plan") -> Degrees:
    """Degrees of a mapping such as ``{"tp": 2, "dp": 2, "zero": 3}``; `dp` means `dp_shard`."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{source}: expected a mapping such as {{'tp': 2, 'dp': 2}}, got {type(data).__name__}")
    fields = {field.name for field in dataclass_fields(Degrees)}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in data.items():
        name: Any = _ALIASES.get(key, key)
        rule = ""
        if name not in fields:
            rule = f"unknown key; {did_you_mean(str(key), sorted(fields | set(_ALIASES)))}"
            problems.append(Problem(path=str(key), rule=rule))
            continue
        if name in values:
            problems.append(Problem(path=str(key), rule=f"says {name} a second time", suggestion="keep one"))
            continue
        values[name] = value
        if name == "tp_dims":
            values[name], rule = _tensor_dims(value, data.get("tp"))
        elif name == "sequence_parallel":
            rule = "" if value is None or isinstance(value, bool) else "must be true, false or null"
        elif name == "per_micro_batch":
            rule = "" if isinstance(value, bool) else "must be true or false"
        elif name == "cut_at":
            values[name], rule = _paths(value)
        elif name in _CHOICES:
            rule = "" if value in _CHOICES[name] else f"must be one of {', '.join(_CHOICES[name])}"
        elif value is None and name in ("micro_batch", "recompute_blocks"):
            continue
        elif name == "recompute_blocks" and not isinstance(value, int):
            values[name], rule = _blocks_of_stages(value)
        elif isinstance(value, bool) or not isinstance(value, int):
            rule = "must be a whole number"
        elif name == "zero":
            rule = "" if value in (0, 1, 2, 3) else "must be 0, 1, 2 or 3"
        elif not 1 <= value <= MAX_DEGREE:
            rule = f"must be at least 1 and at most {MAX_DEGREE:,}"
        if rule:
            problems.append(Problem(path=str(key), value="null" if value is None else value, rule=rule))
    if problems:
        raise PlanError(f"{source} cannot be used", problems)
    if values.get("tp_dims") is not None:
        values["tp"] = prod(values["tp_dims"])
    return Degrees(**values)


def _paths(value: Any) -> tuple[tuple[str, ...] | None, str]:
    """Module paths, also as one text with commas between them."""
    split = [path.strip() for path in value.split(",")] if isinstance(value, str) else value
    if split is None:
        return None, ""
    if not isinstance(split, (list, tuple)) or not split or any(not isinstance(p, str) or not p for p in split):
        return None, "must be module paths such as layers.2,layers.4"
    return tuple(split), ""


def _blocks_of_stages(value: Any) -> tuple[int | tuple[int, ...] | None, str]:
    """One number for every stage, also as one text with commas between them; a single one is that of all stages."""
    split = [int(n) if n.strip().isdecimal() else n for n in value.split(",")] if isinstance(value, str) else value
    if not isinstance(split, (list, tuple)) or not split or any(not _is_count(one) for one in split):
        return None, "must be a whole number, or one for every stage such as 3,2,1,0"
    if len(split) == 1:
        return split[0], "" if split[0] else "must be at least 1; leave recompute out to recompute nothing"
    return tuple(split), ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DEGREE


def _tensor_dims(value: Any, tp: Any) -> tuple[tuple[int, ...] | None, str]:
    """Two degrees of at least 2 whose product is `tp`, and the rule that they break, if any."""
    if value is None:
        return None, ""
    whole = isinstance(value, (list, tuple)) and all(isinstance(d, int) and not isinstance(d, bool) for d in value)
    if not whole or len(value) != 2 or any(not 2 <= d <= MAX_DEGREE for d in value):
        return None, "must be two whole numbers of at least 2"
    if tp is not None and prod(value) != tp:
        return None, f"must have the product tp = {tp}"
    return tuple(value), ""
