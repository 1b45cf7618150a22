"""Training loops as people write them: groups by dimensions, torch's clipping, hooks, optimizers of whole matrices."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop_ranks import OPTIMIZERS
from suites import long, thinned
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.runtime.distributed.launch import Ranks

TOLERANCE = 1e-9
PLAIN: dict[str, Any] = {}
UNEVEN = {"width": 30, "heads": 3}  # three heads over two ranks
GROUPED = {"kv_heads": 2}  # queries, keys and values of other sizes in one projection
PLANS = (
    {"tp": 2, "dp": 2, "zero": 1},
    long({"tp": 2, "dp": 2, "zero": 0}),
    long({"tp": 2, "dp": 2, "zero": 2}),
    {"tp": 2, "dp": 2, "zero": 3},
    long({"tp": 4}),
    long({"dp": 2, "dp_replicate": 2, "zero": 1}),
)


@pytest.mark.parametrize("options", [long(PLAIN), long(UNEVEN), GROUPED], ids=["packed", "uneven", "grouped"])
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_users_see_the_models_parameters(wish: dict[str, Any], options: dict[str, Any], four_ranks: Ranks) -> None:
    assert four_ranks.run("loop_ranks:seen", wish, 4, options) == [[]] * 4


@pytest.mark.parametrize("options", [long(PLAIN), GROUPED], ids=["packed", "grouped"])
@pytest.mark.parametrize(
    "wish", [{"tp": 2, "dp": 2, "zero": 1}, long({"tp": 4}), long({"tp": 2, "dp": 2, "zero": 3})], ids=str
)
def test_what_users_do_to_a_parameter(wish: dict[str, Any], options: dict[str, Any], four_ranks: Ranks) -> None:
    for found in four_ranks.run("loop_ranks:changed", wish, 4, options):
        assert {name: worst for name, worst in found.items() if not worst < TOLERANCE} == {}


@pytest.mark.long
def test_a_compiled_step_is_refused(two_ranks: Ranks) -> None:
    for message in two_ranks.run("loop_ranks:compiled_step", {"tp": 2}, 2):
        assert "torch.compile traces an optimizer whose parameters are split" in message


@pytest.mark.parametrize("options", [PLAIN, long(UNEVEN), long(GROUPED)], ids=["packed", "uneven", "grouped"])
@pytest.mark.parametrize("name", thinned(OPTIMIZERS, keep=("muon",)))
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_parameters_are_those_of_one_device(
    wish: dict[str, Any], name: str, options: dict[str, Any], four_ranks: Ranks
) -> None:
    assert max(four_ranks.run("loop_ranks:trained", wish, 4, name, True, options)) < TOLERANCE


@pytest.mark.parametrize("options", [PLAIN, long(GROUPED)], ids=["packed", "grouped"])
@pytest.mark.parametrize("name", thinned(OPTIMIZERS, keep=("decay by dim",)))
def test_in_a_pipeline(name: str, options: dict[str, Any], four_ranks: Ranks) -> None:
    wish = {"pp": 2, "tp": 2, "micro_batches": 2}
    assert max(four_ranks.run("loop_ranks:trained", wish, 4, name, False, options)) < TOLERANCE


@pytest.mark.parametrize("wish", [{"pp": 2, "tp": 2}, long({"pp": 2, "dp": 2, "zero": 1})], ids=str)
def test_a_norm_of_one_stage_is_refused(wish: dict[str, Any], four_ranks: Ranks) -> None:
    for messages in four_ranks.run("loop_ranks:norm_in_stages", wish, 4):
        assert len(messages) == 2
        assert all("parallel.clip_grad_norm_(max_norm)" in message for message in messages)


@pytest.mark.parametrize(
    "wish", [{"tp": 2, "dp": 2, "zero": 3}, long({"tp": 2, "dp": 2, "zero": 0}), long({"pp": 2, "tp": 2})], ids=str
)
@pytest.mark.parametrize("options", [long(PLAIN), GROUPED], ids=["packed", "grouped"])
def test_hooks_get_the_gradient_of_all_ranks(wish: dict[str, Any], options: dict[str, Any], four_ranks: Ranks) -> None:
    found = four_ranks.run("loop_ranks:hooked", wish, 4, options)
    assert max(worst for worst, _ in found) < TOLERANCE
    assert all(len(called) == 3 * len(set(called)) for _, called in found)
    assert max(four_ranks.run("loop_ranks:summed_calls", wish, 4, options)) < TOLERANCE


@pytest.mark.parametrize("calls", [long(1), 2])
@pytest.mark.parametrize("wish", PLANS, ids=str)
def test_the_loop_of_one_device(wish: dict[str, Any], calls: int, four_ranks: Ranks) -> None:
    """``loss = parallel(**batch); loss.backward()``, with several calls for each step."""
    assert max(four_ranks.run("loop_ranks:called", wish, 4, calls)) < TOLERANCE


def test_a_call_in_stages_shows_the_line_to_write(four_ranks: Ranks) -> None:
    for message in four_ranks.run("loop_ranks:called_in_stages", {"pp": 2, "tp": 2}, 4):
        assert "loss = parallel.forward_backward(batch)" in message


def test_scaled_losses_and_autocast_are_refused_by_name(two_ranks: Ranks) -> None:
    for messages in two_ranks.run("loop_ranks:refused", {"tp": 2}, 2):
        assert ["autocast is on" in one for one in messages] == [True, True, False, False, False]
        assert ["leave backward() out" in one for one in messages] == [False, False, True, True, True]


def test_hooks_that_nothing_would_call_are_refused() -> None:
    batch = (torch.randn(4, 8), torch.arange(4))
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    handle = model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(InputError, match="backward hooks of module '1' would never be called"):
        autopar.parallelize(model, "1xcpu", example_inputs=batch, loss_fn=F.cross_entropy)
    handle.remove()
    model[2].bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(InputError, match=r"gradient hooks of parameter '2.bias' .* parallel\.named_parameters"):
        autopar.parallelize(model, "1xcpu", example_inputs=batch, loss_fn=F.cross_entropy)


@pytest.mark.parametrize(
    "wish", [{"tp": 2, "dp": 2, "zero": 1}, long({"dp": 4, "zero": 0}), long({"pp": 2, "dp": 2, "zero": 3})], ids=str
)
def test_ranks_that_hold_the_same_elements_draw_alike(wish: dict[str, Any], four_ranks: Ranks) -> None:
    assert [error for error, _ in four_ranks.run("loop_ranks:noisy", wish, 4, True)] == [""] * 4


@pytest.mark.parametrize("wish", [{"tp": 2, "dp": 2, "zero": 0}, long({"pp": 2, "dp": 2, "zero": 0})], ids=str)
def test_weights_that_differ_are_found_after_the_first_step(wish: dict[str, Any], four_ranks: Ranks) -> None:
    found = four_ranks.run("loop_ranks:noisy", wish, 4, False)
    assert all("hold other values than rank" in error and "parallel.generator" in error for error, _ in found)
    assert len({len(seen) for _, seen in found}) == wish.get("pp", 1)


def test_a_model_that_one_rank_changes_is_an_error_on_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run("loop_ranks:changed_on_one_rank", {"dp": 2}, 2)
    assert first == "the model of rank 1 was changed after autopar.parallelize; the error of that rank says how"
    assert "1 (LeakyReLU): attribute 'negative_slope' was 0.1" in second
