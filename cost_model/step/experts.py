"""Expert parallelism: a rank's part of a block's work, and the exchanges of tokens and of their counts.

A dropless exchange sends as many rows as the routing of a batch asks for. Ranks first send each other these numbers,
the *counts*. The host needs the counts to start the exchange of rows, so it waits for them:

    counts       launch_s + an all-to-all of 8·E·(n-1)/n bytes a rank
    reading      launch_s + one hop of a link inside a host: a kernel copies the counts to the host
    relaunch     3·h + max(0, 4·h - x)

E is the number of experts, n the expert ranks, h the host seconds of one kernel, x the seconds of the exchange of rows,
and launch_s the gap before a kernel on the device. docs/experts.md has the reasons and the sources.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost_model.machine.fitted_constants import Mechanisms, source_of
from autopar.cost_model.machine.machine import Machine
from autopar.cost_model.step.block_time import COLLECTIVE_KERNELS
from autopar.cost_model.step.context import Basis
from autopar.cost_model.step.layouts import Layouts
from autopar.cost_model.work.block_work import Family
from autopar.cost_model.work.operator_cost import EXPERT_PRODUCTS
from autopar.ir.arrays import Floats

COUNT_BYTES = 8.0  # of one count: a whole number of 64 bits
KERNELS_TO_PRODUCT = 4.0  # from the exchange of rows to the first product of experts, this product included


def with_experts(family: Family[Any], layouts: Layouts, constants: Mechanisms) -> Family[Any]:
    """The family with its expert products divided over ranks."""

    def divided(op: Any) -> Any:
        if not is_expert_product(op):
            return op
        return replace(op, count=op.count / layouts.ep, m=op.m * layouts.ep * constants.expert_imbalance)

    def of_block(role: str, _: str, work: Any) -> Any:
        return replace(work, products=tuple(map(divided, work.products))) if has_experts(role) else work

    return family.with_works(of_block)


def has_experts(role: str) -> bool:
    """Whether blocks of a role have experts."""
    return role.startswith("moe_layer")


def exchange_seconds(basis: Basis, layouts: Layouts) -> Floats:
    """Seconds of one all-to-all of a micro-batch's rows over the expert ranks; 0 for one expert rank."""
    shape = basis.shape
    is_split = (layouts.sequence_parallel > 0) | (layouts.etp < layouts.tp)
    tokens = layouts.micro_batch * shape.sequence / layouts.cp / np.where(is_split, layouts.tp, 1)
    links = basis.machine.links
    near = np.clip(links.devices_per_host / layouts.etp, 1, layouts.ep)
    rows = rows_between_hosts(shape.experts_per_token, layouts.ep / near)
    moved = shape.element_bytes * tokens * rows * shape.hidden
    return links.seconds("all_to_all", moved * layouts.ep, layouts.ep, layouts.etp)


def rows_between_hosts(experts_per_token: Floats, hosts: Floats) -> Floats:
    """Rows of one token that are sent over `hosts` hosts: one for each host that has an expert of the token.

    Experts are drawn evenly. On one host each expert gets a row of its own.
    """
    several = np.maximum(hosts, 2.0)
    reached = several * (1 - (1 - 1 / several) ** experts_per_token)
    return np.where(hosts > 1, reached, experts_per_token)


def least_exchange_seconds(basis: Basis, layouts: Layouts, widths: Sequence[Any]) -> Floats:
    """The least seconds of one pass in which tokens reach their experts and come back; 0 for one expert rank."""
    shape, links = basis.shape, basis.machine.links
    tokens = layouts.micro_batch * shape.sequence / layouts.cp / layouts.tp
    narrow = shape.hidden
    for width in widths:
        narrow = np.minimum(narrow, width)
    moved = shape.element_bytes * tokens * narrow * layouts.ep
    rows = links.seconds("all_to_all", moved * shape.experts_per_token, layouts.ep, layouts.tp)
    gathered = links.seconds("all_gather", moved, layouts.ep, layouts.tp)
    return np.where(layouts.ep > 1, 2 * np.minimum(rows, gathered), 0.0)


def count_seconds(
    basis: Basis, family: Family[Any], layouts: Layouts, role: str, exchange_s: Floats, *, are_sent: bool = False
) -> Floats:
    """Seconds of one forward pass of a block in which a rank waits for the counts of its experts' rows."""
    machine, speeds = basis.machine, basis.machine.speeds
    grouped = [op for op in family.block(role, "tp").products if is_expert_product(op)]
    if not grouped or machine.engine.expert_rows == "padded" or machine.engine.dispatch == "graph":
        return np.zeros(1)
    experts = grouped[0].count * layouts.ep
    counts = machine.links.seconds("all_to_all", COUNT_BYTES * experts * layouts.ep, layouts.ep, layouts.tp)
    counts = np.zeros(1) if are_sent else counts
    if not speeds.in_one_thread:
        not_hidden = np.maximum(KERNELS_TO_PRODUCT * speeds.host_s - exchange_s, 0.0)
        reading = 2 * speeds.launch_s + machine.links.in_host_latency_s
        counts = counts + reading + COLLECTIVE_KERNELS * speeds.host_s + not_hidden
    return np.where(layouts.ep > 1, counts, 0.0)


def expert_assumptions(machine: Machine, ep: int) -> tuple[str, ...]:
    """The assumptions of a price with `ep` expert ranks, as sentences with their source; none for one expert rank."""
    if ep <= 1:
        return ()
    imbalance, profile = machine.mechanisms.expert_imbalance, machine.profile
    stated = f"profile {profile.name}: {profile.sources.get('expert_imbalance', 'no source was given')}"
    source = source_of("expert_imbalance") if profile.expert_imbalance is None else stated
    notes = [f"the busiest expert rank has {imbalance:.4g} times the mean of rows (expert_imbalance; {source})"]
    if machine.engine.expert_rows == "counted" and machine.engine.dispatch != "graph":
        notes.append("the host's wait for counts of experts is a formula that no run measured (docs/experts.md)")
    return tuple(notes)


def is_expert_product(op: Any) -> bool:
    """Whether an operator multiplies rows by the matrices of their experts."""
    is_expert: bool = op.kind == "matmul" and op.name.startswith(EXPERT_PRODUCTS)
    return is_expert
