"""A plan file alone as a page: splits, stages and messages. Seconds and memory are known after a search only."""

from math import prod
from typing import Any

from autopar.ir.explanation import StageSummary, sizes_in_words
from autopar.ir.plan import Plan, sections
from autopar.report.page_tools import render
from autopar.report.parts import Bar
from autopar.report.svg import SIDE, short, tag
from autopar.words.numbers import amount, readable_bytes, readable_seconds


def plan_report(plan: Plan) -> str:
    """The page of a plan."""
    degrees = plan.to_dict()["degrees"]
    summary = plan.summary
    return render(
        "plan.html.jinja",
        plan=plan,
        degrees={name: value for name, value in degrees.items() if value is not None} | {"regather": plan.regather},
        sizes=sizes_in_words(plan.degrees),
        batch=None if plan.degrees.micro_batch is None else plan.degrees.global_batch,
        stages=_stage_bars(() if summary is None else summary.stages),
        parameters=None if summary is None else sum(p.num_copies * prod(p.shape) for p in summary.parameters),
        sections=[section for section in sections(plan, with_order=False) if section.lines or section.rows],
    )


def _stage_bars(stages: tuple[StageSummary, ...]) -> dict[str, Any] | None:
    if not stages:
        return None
    slowest = max(stage.seconds for stage in stages) or 1.0
    largest = max(stage.num_parameters for stage in stages) or 1
    return {
        "seconds": [
            _bar(i, s, s.seconds / slowest, "#1f5fa6", readable_seconds(s.seconds)) for i, s in enumerate(stages)
        ],
        "parameters": [
            _bar(i, s, s.num_parameters / largest, "#2f9a94", amount(s.num_parameters)) for i, s in enumerate(stages)
        ],
        "sent": readable_bytes(max(stage.sent_bytes for stage in stages)),
    }


def _bar(number: int, stage: StageSummary, part: float, colour: str, value: str) -> Bar:
    name = f"stage {number}"
    content = tag("rect", x="0", width=short(SIDE * part), height="1000", fill=colour, data_t=f"{name}: {value}")
    calls = stage.first if stage.num_calls == 1 else f"{stage.first} … {stage.last}"
    return Bar(name=name, content=content, value=value, says=f"{name}: {value}", detail=f"rank {stage.rank}, {calls}")
