"""Plans and reasons in sentences."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autopar.ir.explanation import recomputation_of
from autopar.ir.offload import NO_OFFLOAD, offload_in_words
from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import DEFAULT_SCHEDULE
from autopar.search.result.format import plan_in_words, readable_value, step_in_words
from autopar.search.result.result import Contender, SearchResult
from autopar.words.numbers import amount, capped, percent, readable_bytes, readable_seconds

if TYPE_CHECKING:
    from autopar.search.measured.result import TuneResult


def degrees_in_words(degrees: Mapping[str, Any]) -> str:
    """The degrees of a plan in words."""
    return ", ".join(_degree_words(degrees))


def _degree_words(d: Mapping[str, Any]) -> Iterator[str]:
    pp, tp, cp = d.get("pp", 1), d.get("tp", 1), d.get("cp", 1)
    shard, copies = d.get("dp_shard", 1), d.get("dp_replicate", 1)
    if pp > 1:
        stages = f", {d['virtual_stages']} stages a rank" if d.get("virtual_stages", 1) > 1 else ""
        schedule, count = d.get("schedule", DEFAULT_SCHEDULE), d.get("micro_batches", 1)
        yield f"pipeline of {pp} ({schedule}{stages}, {count} micro-batch{'es' * (count > 1)})"
    if tp > 1:
        yield f"tensor parallel {tp}"
    if cp > 1:
        yield f"context parallel {cp}" + (f" with ZeRO {d['zero']}" if shard * copies == 1 and d.get("zero") else "")
    if shard * copies > 1:
        zero, dp = d.get("zero", 3), shard * copies
        held = f" with ZeRO {zero}" if zero and shard > 1 else ""
        over = f" in shards of {shard}" if held and copies > 1 else ""
        yield (
            f"fully sharded data parallel {dp} (ZeRO 3){over}"
            if zero == 3 and held
            else f"data parallel {dp}{held}{over}"
        )
    if d.get("ep", 1) > 1:
        yield f"experts over {d['ep']} of these ranks"
    if pp * tp * cp * shard * copies == 1:
        yield "one device"
    if d.get("order", ORDERS[0]) != ORDERS[0]:
        yield f"rank order {d['order']}"
    if d.get("micro_batch") is not None:
        yield f"micro-batch {d['micro_batch']}"
    if d.get("accumulate", 1) > 1:
        yield f"{d['accumulate']} micro-batches accumulated"
    if d.get("recompute", "none") != "none":
        yield recomputation_of(d)
    if not d.get("regather", True):
        yield "gathered inputs are saved"
    if d.get("loss_chunks", 1) > 1:
        yield f"logits and loss in {d['loss_chunks']} chunks of tokens"
    if d.get("offload", NO_OFFLOAD) != NO_OFFLOAD:
        yield offload_in_words(d["offload"])


_BEST_AS = {"cost": "costs least as", "energy": "takes least energy as", "memory": "needs least memory as"}


def plan_sentence(result: SearchResult) -> str:
    """The plan, its throughput and its utilisation in one sentence."""
    assert result.best is not None
    best, devices = result.best, f"{result.num_devices:,} devices"
    if best.num_devices < result.num_devices:
        devices = f"{best.num_devices:,} of {devices}"
    spent = f" and {readable_value(best.value, result.unit)}" if result.objective in ("cost", "energy") else ""
    unit = step_in_words(result.global_batch, result.sequence)[1]
    rate = amount(result.global_batch * result.sequence / best.step_s, unit)
    return (
        f"{step_sentence(result, best.degrees, devices, 'A step', best.step_s, spent)}, that is {rate}, and its "
        f"fullest rank needs {readable_bytes(best.peak_bytes)} of {readable_bytes(result.device_bytes)}."
    )


def step_sentence(
    result: "SearchResult | TuneResult", degrees: Mapping[str, Any], devices: str, step: str, step_s: float, spent: str
) -> str:
    """The best plan on its devices, and the time of its step, which ends the text. `spent` is its cost or energy."""
    batch, _ = step_in_words(result.global_batch, result.sequence)
    return (
        f"On {devices} {capped(result.model)} {_BEST_AS.get(result.objective, 'runs fastest as')} "
        f"{degrees_in_words(degrees)}. {step} of {batch} takes {readable_seconds(step_s)}{spent}"
    )


def as_sentence(text: str) -> str:
    """A text of the command line as a sentence of a page."""
    return f"{text[0].upper()}{text[1:]}."


def why_best(result: SearchResult) -> list[str]:
    """Comparisons with all candidates, with the next plan, and with the plans that people choose by hand."""
    assert result.best is not None
    lines = [as_sentence(proof_in_words(result))]
    behind = [p for p in (*result.others, *result.baselines) if p.fits and p.degrees != result.best.degrees]
    following = min(behind, key=lambda p: p.value, default=None)
    if following is not None and not following.name:
        lines.append(f"The next plan, {plan_in_words(following.degrees)}, {_loses(result, following)}.")
    for plan in result.baselines:
        name = plan.name[:1].upper() + plan.name[1:] or "A plan chosen by hand"
        if plan.degrees == result.best.degrees:
            lines.append(f"{name} is this plan.")
        else:
            following_one = " and comes next" if plan is following else ""
            lines.append(f"{name}, {plan_in_words(plan.degrees)}, {_loses(result, plan)}{following_one}.")
    return lines


def proof_in_words(result: SearchResult) -> str:
    """Whether a candidate may be better than the best plan."""
    priced = f"{result.counted.priced:,} priced exactly"
    if result.bound is None and result.best is not None and result.best.degrees.get("loss_chunks", 1) > 1:
        return "no candidate fits with whole logits; with the loss in chunks this plan does"
    if result.bound is None:
        return f"no candidate fits; with refined stages this plan does ({result.refined:,} variations tried)"
    if result.saved_by_own_stages:
        saved = f"{result.saved_by_own_stages:.1%}"
        return f"proven: before refining, no candidate is better ({priced}); refining its stages saves {saved}"
    if result.is_proven:
        return f"proven: no candidate is better ({priced}, lower bounds rule out the rest)"
    if not result.bound:
        return f"not proven: the time ended before all plans had a lower bound ({priced})"
    bound = readable_value(result.bound, result.unit)
    return f"not proven: a candidate may be up to {result.gap:.1%} better ({priced}, no lower bound below {bound})"


def _loses(result: SearchResult, plan: Contender) -> str:
    if not plan.fits:
        return plan.reason
    assert result.best is not None
    more = plan.value / result.best.value - 1
    if more <= 0:
        return "is as good"
    what = {"time": "takes {} longer", "memory": "needs {} more memory"}.get(result.objective, "takes {} more")
    return f"{what.format(percent(more, 1))} ({plan.reason})" if plan.reason else what.format(percent(more, 1))
