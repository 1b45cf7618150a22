"""Degrees from a partial wish: missing degrees are derived, illegal ones are listed with the nearest legal values.

    world size   = pp × tp × cp × dp_shard × dp_replicate            where ep divides dp_shard
    global batch = dp × micro_batch × micro_batches × accumulate       where dp = dp_shard × dp_replicate

This module does not import torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import PlanError, Problem
from autopar.ir.degrees import Degrees, degrees_from, offload_problems
from autopar.ir.rank_order import ORDERS
from autopar.ir.schedules.registry import SCHEDULES, schedule_problems

DEFAULT_MICRO_BATCH = 2  # some models cannot run in micro-batches of one sequence


def resolve_degrees(
    wish: Mapping[str, Any] | None, world_size: int, local_batch: int | None = None, *, global_batch: int | None = None
) -> Degrees:
    """Degrees from a partial wish; open ones follow from the others. Without a wish, pure FSDP over all ranks."""
    given = {key: value for key, value in (wish or {}).items() if value is not None}
    degrees = degrees_from(given)
    if not {"dp", "dp_shard"} & set(given):
        others = degrees.pp * degrees.tp * degrees.cp * degrees.dp_replicate
        degrees = replace(degrees, dp_shard=max(1, world_size // others))
    if degrees.pp > 1 and "virtual_stages" not in given:
        degrees = replace(degrees, virtual_stages=SCHEDULES[degrees.schedule].least_stages)
    problems = world_size_problems(degrees, world_size) + _only_with_stages(degrees, given) + _inner_problems(degrees)
    if global_batch is not None:
        more, local_batch = _local_of_global(global_batch, degrees.dp, local_batch)
        problems += more
    resolved, more = _split_in_time(degrees, local_batch, given)
    problems += more + offload_problems(resolved)
    if resolved.pp > 1 and not problems:
        problems = schedule_problems(resolved.schedule, resolved.pp, resolved.virtual_stages, resolved.micro_batches)
    if problems:
        raise PlanError("the degrees do not fit", problems)
    return resolved


def world_size_problems(degrees: Degrees, world_size: int) -> list[Problem]:
    """The reasons why the product of the degrees is not the world size, degree by degree."""
    if degrees.world_size == world_size:
        return []
    values = {name: getattr(degrees, name) for name in ("pp", "tp", "cp", "dp_shard", "dp_replicate")}
    problems = [_no_divisor(name, n, world_size, "ranks") for name, n in values.items() if world_size % n]
    if not problems:
        others = degrees.pp * degrees.tp * degrees.cp * degrees.dp_replicate
        fits = world_size // others if world_size % others == 0 else None
        hint = f"use dp_shard {fits}" if fits else f"or describe a cluster of {degrees.world_size} devices"
        stages = f"pp {degrees.pp} × " if degrees.pp > 1 else ""
        context = f"cp {degrees.cp} × " if degrees.cp > 1 else ""
        rule = (
            f"{stages}tp {degrees.tp} × {context}dp_shard {degrees.dp_shard} × dp_replicate {degrees.dp_replicate} = "
            f"{degrees.world_size} must be the number of ranks, {world_size}"
        )
        problems.append(Problem(path="degrees", rule=rule, suggestion=hint))
    return problems


def _inner_problems(wish: Degrees) -> list[Problem]:
    """The problems of `ep`, and of words about `ep` and `cp`."""
    ways = (("dispatch", wish.dispatch, "ep", wish.ep), ("context", wish.context, "cp", wish.cp))
    problems = [
        Problem(path=word, value=value, rule=f"needs {degree} above 1", suggestion="leave it out")
        for word, value, degree, ranks in ways
        if value is not None and ranks == 1
    ]
    if wish.dp_shard % wish.ep == 0:
        return problems
    return [*problems, _no_divisor("ep", wish.ep, wish.dp_shard, "ranks of dp_shard")]


def _local_of_global(global_batch: int, dp: int, local_batch: int | None) -> tuple[list[Problem], int | None]:
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        return [Problem(path="global_batch", value=global_batch, rule="must be a whole number of at least 1")], None
    if global_batch % dp:
        near = _or(nearest_multiples(dp, global_batch))
        rule = f"must be divisible by the {dp} data-parallel ranks"
        return [Problem(path="global_batch", value=global_batch, rule=rule, suggestion=f"nearest: {near}")], None
    local = global_batch // dp
    if local_batch is not None and local_batch != local:
        rule = f"is {local} sequences for each of {dp} data-parallel ranks, the example inputs have {local_batch}"
        return [Problem(path="global_batch", value=global_batch, rule=rule, suggestion=f"use {local_batch * dp}")], None
    return [], local


def _only_with_stages(wish: Degrees, given: Mapping[str, Any]) -> list[Problem]:
    """The problems of pipeline options in a plan without a pipeline."""
    named = [name for name in ("schedule", "virtual_stages", "micro_batches") if name in given and wish.pp == 1]
    named = [name for name in named if given[name] != getattr(Degrees(), name)]
    hint = "set pp, or use accumulate for micro-batches without a pipeline"
    problems = [Problem(path=n, value=given[n], rule="needs pp above 1", suggestion=hint) for n in named]
    if wish.order != ORDERS[0] and (wish.pp == 1 or wish.dp == 1):
        hint = "leave it out; without both, every order is the same"
        problems.append(Problem(path="order", value=wish.order, rule="needs pp and dp above 1", suggestion=hint))
    if wish.cut_at is not None and len(wish.cut_at) != wish.num_stages - 1:
        rule = f"must have {wish.num_stages - 1} paths, one for each stage after the first; it has {len(wish.cut_at)}"
        problems.append(Problem(path="cut_at", value=", ".join(wish.cut_at), rule=rule))
    problems += [
        problem for name in ("recompute_blocks", "selective_blocks") for problem in _recomputed_blocks(wish, name)
    ]
    return problems


def _recomputed_blocks(wish: Degrees, name: str) -> Iterator[Problem]:
    blocks = getattr(wish, name)
    if blocks is None:
        return
    if isinstance(blocks, tuple) and len(blocks) != wish.num_stages:
        rule = f"must be one number for all stages, or {wish.num_stages} numbers, one for each stage"
        yield Problem(path=name, value=", ".join(map(str, blocks)), rule=rule)
    if wish.recompute == "none":
        rule, hint = "needs recompute = selective, full or auto", f"set it, or leave {name} out"
        yield Problem(path=name, value=blocks, rule=rule, suggestion=hint)
    elif name == "selective_blocks" and wish.recompute != "auto":
        hint = f"recompute_blocks counts the blocks of recompute = {wish.recompute}; leave selective_blocks out"
        yield Problem(path=name, value=blocks, rule="needs recompute = auto", suggestion=hint)


def _split_in_time(wish: Degrees, local_batch: int | None, given: Mapping[str, Any]) -> tuple[Degrees, list[Problem]]:
    """Micro-batch and numbers of micro-batches of one rank's batch. A missing number follows from the others."""
    if local_batch is None:
        least = 1 if wish.pp == 1 else 2 * wish.num_stages
        micro_batches = wish.micro_batches if "micro_batches" in given else least
        return replace(wish, micro_batch=wish.micro_batch or DEFAULT_MICRO_BATCH, micro_batches=micro_batches), []
    open_ = "micro_batches" if wish.pp > 1 else "accumulate"
    other = "accumulate" if wish.pp > 1 else "micro_batches"
    if local_batch % getattr(wish, other):
        return wish, [_no_divisor(other, getattr(wish, other), local_batch)]
    each = local_batch // getattr(wish, other)
    if wish.micro_batch is not None and open_ not in given:
        if each % wish.micro_batch == 0:
            missing: dict[str, Any] = {open_: each // wish.micro_batch}
            return replace(wish, **missing), []
        return wish, [_no_divisor("micro_batch", wish.micro_batch, each)]
    if wish.pp > 1 and open_ not in given:
        return _default_micro_batches(wish, each), []
    count = getattr(wish, open_)
    if each % count:
        return wish, [_no_divisor(open_, count, each)]
    micro_batch = each // count
    if wish.micro_batch not in (None, micro_batch):
        rule = f"times {open_} {count} must be {each}, the sequences of one rank's batch"
        hint = f"use micro_batch {micro_batch}, or leave one of the two out"
        return wish, [Problem(path="micro_batch", value=wish.micro_batch, rule=rule, suggestion=hint)]
    return replace(wish, micro_batch=micro_batch), []


def _default_micro_batches(wish: Degrees, batch: int) -> Degrees:
    def fits(count: int) -> bool:
        enough = batch // count * wish.dp >= DEFAULT_MICRO_BATCH or batch == 1
        return (
            batch % count == 0 and enough and not schedule_problems(wish.schedule, wish.pp, wish.virtual_stages, count)
        )

    counts = [n for n in range(min(batch, 2 * wish.num_stages), 0, -1) if fits(n)]
    count = counts[0] if counts else 1
    return replace(wish, micro_batches=count, micro_batch=batch // count)


def _no_divisor(
    name: str, value: int, number: int, what: str = "sequences of one data-parallel rank's batch"
) -> Problem:
    near = _or(nearest_divisors(number, value))
    return Problem(path=name, value=value, rule=f"must divide the {number} {what}", suggestion=f"nearest: {near}")


def nearest_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` next to `value`, below and above."""
    below = next(d for d in range(min(value, number), 0, -1) if number % d == 0)
    above = next((d for d in range(value, number + 1) if number % d == 0), below)
    return sorted({below, above})


def nearest_multiples(factor: int, value: int) -> list[int]:
    """The positive multiples of `factor` next to `value`, below and above."""
    below = value - value % factor
    return [m for m in (below, below + factor) if m]


def _or(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in values)
