"""The plan: everything decided. A value that prints, compares and round-trips through JSON; running needs only it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.errors import InputError, PlanError, Problem, short_repr
from autopar.files.atomic import write_text
from autopar.files.plain_data import plain_of, read_plain
from autopar.files.strict_text import read_json
from autopar.ir.degrees import Degrees, degrees_from
from autopar.ir.explanation import Prediction, Section, Summary, as_text, bare, header, sections_of
from autopar.ir.sharding import Mesh, Type

_VERSION = 1
MAX_PLAN_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabels:
    """Labels of one distinct block, one entry per mesh dimension of the plan."""

    name: str
    signature: str
    ports: Mapping[str, tuple[Type, ...]] = field(hash=False)  # types of values; of a parameter, as it is stored
    labels: Mapping[str, tuple[str, ...]] = field(hash=False)  # the variant of each operator by node key
    results: Mapping[str, tuple[Type, ...]] = field(hash=False)  # the types in which outputs leave the block
    recomputed: tuple[str, ...] = ()  # keys of operators that selectively recomputed calls compute again for backward


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
    model: str = ""
    degrees: Degrees
    blocks: tuple[BlockLabels, ...]  # one entry for each distinct block
    regather: bool = True  # gathered inputs of products are kept as shards, and gathered again in the backward pass
    batch: int | None = None  # sequences of one micro-batch on all data-parallel ranks
    sequence: int | None = None  # tokens of one sequence
    torch_version: str = ""
    notes: tuple[str, ...] = ()
    summary: Summary | None = None  # the text of `explain`; it decides nothing
    cuts: tuple[int, ...] = ()  # the main calls, numbered from 0, before which a pipeline stage begins
    recomputed: tuple[str, ...] = ()  # values that pipeline stages compute again instead of receiving them
    predicted: Prediction | None = field(default=None, compare=False)  # None in a plan written by hand
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
        data: dict[str, Any] = plain_of(self, {Type: str})
        return data

    def explain(self) -> str:
        """Explain the plan in words and tables.

        Returns:
            The precision and the degrees, then the operators without a rule, the split of every value, and the
            collectives of every block.

        Example:
            >>> parallel.plan.explain().splitlines()[0]
            'Plan for Sequential, computing in the dtype of the model'
        """
        return as_text(sections(self))

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
        data, problems = read_json(file, max_bytes=MAX_PLAN_BYTES)
        if problems:
            raise PlanError(
                f"plan file {file} is not JSON that autopar reads; write it again with `autopar plan`", problems
            )
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
            raise PlanError(f"{source} is no plan, which is a JSON object; write one with `autopar plan`")
        version = data.get("version")
        if version != _VERSION or isinstance(version, bool):
            raise PlanError(
                f"{source}: schema version {short_repr(version)}, this autopar reads {_VERSION}; plan again"
            )
        problems: list[Problem] = []

        def degrees(given: Any) -> Degrees:
            try:
                return degrees_from(given, "degrees")
            except PlanError as error:
                nested = [replace(p, path=f"degrees.{p.path}") for p in error.problems]
                problems.extend(nested or [Problem(path="degrees", rule="must be an object")])
                return Degrees()

        plan: Plan | None = read_plain(Plan, data, problems, readers={Degrees: degrees, Type: Type.parse})
        problems += [] if plan is None else _wrong_numbers(plan)
        if plan is None or problems:
            raise PlanError(f"{source} cannot be used; write the plan again with `autopar plan`", problems)
        return plan


def sections(plan: Plan, *, with_order: bool = True) -> list[Section]:
    """The sections about a plan. Operators without a rule are the second; `with_order` adds the order of passes."""
    parts = [header(plan.model, plan.degrees, plan.sequence, regather=plan.regather)]
    if plan.summary is None:
        parts.append(bare([(block.name, block.labels) for block in plan.blocks]))
    else:
        parts += sections_of(plan.summary, plan.degrees, [block.recomputed for block in plan.blocks], with_order)
    return [*parts, Section(title="Notes", lines=plan.notes)] if plan.notes else parts


def _wrong_numbers(plan: Plan) -> list[Problem]:
    sizes = {"batch": plan.batch, "sequence": plan.sequence}
    rule = "must be a whole number above 0"
    problems = [Problem(path=k, value=v, rule=rule) for k, v in sizes.items() if v is not None and v < 1]
    if plan.degrees.is_recompute_open:
        rule = "needs recompute_blocks or selective_blocks in a plan that runs"
        problems.append(Problem(path="degrees.recompute", value="auto", rule=rule))
    if len(plan.cuts) != plan.degrees.num_stages - 1:
        rule = f"must be {plan.degrees.num_stages - 1} whole numbers, one less than stages"
        problems.append(Problem(path="cuts", value=list(plan.cuts), rule=rule))
    return problems
