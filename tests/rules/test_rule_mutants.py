"""The rule proof catches wrong rules: mutants of every rule are drawn, and hardly any may survive."""

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from rule_draws import FEW_POINTWISE, draw_sample

from autopar.rules.families.pointwise import OPERATORS
from autopar.rules.families.random import ALWAYS, DROPS
from autopar.rules.registry import registered, rule_of
from autopar.rules.routed import ROUTED
from autopar.rules.rule import Rule, Spec
from autopar.rules.scaled_product import SCALED_LINEAR
from autopar.rules.variants import split_variants
from autopar.testing.rule_proof import Disproved, OperatorSample, bind_factors, prove

aten = torch.ops.aten
NEEDS_EMISSION = {
    aten.reshape.default, aten.expand.default, aten.repeat.default, aten.slice.Tensor, aten.mean.default, aten.mean.dim,
    aten.full.default, aten.zeros.default, aten.new_full.default, aten.mse_loss.default, aten.group_norm.default,
}  # fmt: skip
ALWAYS_RIGHT = {aten.new_zeros.default, aten.zeros_like.default}  # zeros are linear in anything, whole or not
NUM_DRAWS = 4
NUM_MUTANTS = 2  # per draw
LEAST_CAUGHT = 0.95


def _swaps(spec: Spec, others: Sequence[Spec], sizes: Mapping[str, int]) -> Iterator[Spec]:
    """Two factors of equal size exchanged within one operand; mere renamings are left out."""
    factors = [f for dim in spec for f in dim]
    elsewhere = {f for other in others for dim in other for f in dim}
    for a, b in combinations(factors, 2):
        if sizes[a] == sizes[b] and {a, b} & elsewhere:
            exchanged = {a: b, b: a}
            yield tuple(tuple(exchanged.get(f, f) for f in dim) for dim in spec)


def mutants(rule: Rule, sample: OperatorSample) -> Iterator[tuple[str, Rule]]:
    """Rules that are wrong in one thing."""
    for k, spec in enumerate(rule.inputs):
        others = [*rule.inputs[:k], *rule.inputs[k + 1 :]]
        for swapped in _swaps(spec, [*others, rule.output], rule.sizes):
            yield "swap", replace(rule, inputs=(*rule.inputs[:k], swapped, *rule.inputs[k + 1 :]))
    for swapped in _swaps(rule.output, rule.inputs, rule.sizes):
        yield "swap", replace(rule, output=swapped)
    for k in sorted(rule.additive):
        yield "additive", replace(rule, additive=rule.additive - {k})
    for factor in sorted(rule.whole):
        yield "whole", replace(rule, whole=rule.whole - {factor})
    for factor in sorted(rule.reduced - rule.whole - rule.invariant - rule.outermost):
        yield "reduced", replace(rule, invariant=rule.invariant | {factor})
    for k, operand in enumerate(sample.call.operands):
        if operand.differentiable and not any(k in group for group in rule.linear):
            yield "linear", replace(rule, linear=(*rule.linear, frozenset({k})))
    for group in rule.linear:
        for k in sorted(group) if len(group) > 1 else ():
            yield "linear", replace(rule, linear=(frozenset({k}),))
    if rule.emit is not None and sample.call.target in NEEDS_EMISSION:
        yield "emit", replace(rule, emit=None)


def _same_variants(rule: Rule, mutant: Rule) -> bool:
    """Nothing that is proved differs, so nothing can be caught."""
    if rule.emit is not mutant.emit or rule.linear != mutant.linear:
        return False
    first, second = (bind_factors(r, random.Random(0)) for r in (rule, mutant))
    return all([*split_variants(first, degree)] == [*split_variants(second, degree)] for degree in (2, 3))


def caught(sample: OperatorSample, mutant: Rule) -> bool:
    try:
        for seed in range(2):
            prove(sample, mutant, random.Random(seed))
    except (Disproved, RuntimeError, ValueError, ZeroDivisionError, IndexError):
        return True
    return False


def _targets() -> Iterator[Any]:
    for target in registered():
        if str(target).split(".")[0] not in ("aten", "autopar"):  # rules that other tests and examples registered
            continue
        name = str(target).split(".")[1]
        if target in ROUTED or target is SCALED_LINEAR:  # proved in test_routed_region.py, test_scaled_product.py
            continue
        random_values = target in {*ALWAYS, *DROPS} and target is not aten.scaled_dot_product_attention.default
        if (name not in OPERATORS or name in FEW_POINTWISE) and not random_values and target not in ALWAYS_RIGHT:
            yield target


def test_wrong_rules_are_disproved() -> None:
    met: Counter[str] = Counter()
    survived: dict[str, list[str]] = {}
    for target in _targets():
        for number in range(NUM_DRAWS):
            sample, _ = draw_sample(target, number)
            rule = rule_of(sample.call)
            seen = zlib.crc32(f"{target}{number}".encode())
            every = [m for m in mutants(rule, sample) if rule.known and not _same_variants(rule, m[1])]
            chosen = random.Random(seen).sample(every, min(NUM_MUTANTS, len(every)))
            for kind, mutant in chosen + [m for m in every if m[0] == "additive" and m not in chosen]:
                met[kind] += 1
                if not caught(sample, mutant):
                    survived.setdefault(kind, []).append(f"{target}/{number}: {mutant.inputs} -> {mutant.output}")
    lost = sum(len(found) for found in survived.values())
    score = {kind: f"{count - len(survived.get(kind, ()))} of {count}" for kind, count in sorted(met.items())}
    print(f"mutants caught: {sum(met.values()) - lost} of {sum(met.values())}; {score}")
    assert set(met) == {"swap", "additive", "whole", "reduced", "linear", "emit"}
    assert lost <= (1 - LEAST_CAUGHT) * sum(met.values()), survived
    assert len(survived.get("swap", ())) <= (1 - LEAST_CAUGHT) * met["swap"], survived["swap"]
