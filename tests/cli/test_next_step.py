"""`autopar verify` ends every refusal and every difference with one command to try, and the command parses."""

import pytest
from run import refused
from suites import thinned

from autopar.cli.verify import VerifyCommand, next_after_refusal
from autopar.errors import AutoparError, CaptureError, InputError, PlanError, RankError


@pytest.mark.parametrize(
    ("error", "wish", "says"),
    [
        (PlanError("x"), {"tp": 3}, "autopar verify gpt2 --world-size 4 --dp 4 --batch 1"),
        (
            PlanError("x"),
            {"accumulate": 3, "dp": 4},
            "autopar verify gpt2 --world-size 4 --dp 4  # without micro-batches",
        ),
        (PlanError("x"), {"dp": 4}, "autopar verify gpt2 --world-size 1 --batch 4"),
        (CaptureError("x"), {"tp": 4, "sequence_parallel": False}, "docs/troubleshooting.md"),
        (
            CaptureError("x", option="specialise"),
            {"tp": 4},
            "gpt2 --world-size 4 --tp 4 --specialise  # takes the branch",
        ),
        (RankError("x"), {"tp": 4}, "autopar verify gpt2 --world-size 1  #"),
        (InputError("x"), {}, "autopar verify --help"),
    ],
)
def test_a_command_for_each_refusal(error: AutoparError, wish: dict[str, int], says: str) -> None:
    assert says in next_after_refusal(error, VerifyCommand(model="gpt2", world_size=4), wish)


TOO_MANY = ("--tp", "3")
BATCHES = (("--dp", "4", "--accumulate", "3"), ("--pp", "4"), ("--tp", "4", "--accumulate", "7"), ("--dp", "3"))


PLAIN = [("cli_models:plain", wish) for wish in (TOO_MANY, *BATCHES)]


@pytest.mark.parametrize(("model", "wish"), thinned([("gpt2", TOO_MANY), *PLAIN], keep=PLAIN[:3:2]))
def test_the_next_command_runs(model: str, wish: tuple[str, ...]) -> None:
    """`refused` runs the printed command."""
    pytest.importorskip("transformers")
    assert "autopar: next: autopar verify" in refused("verify", model, "-n", "4", *wish)


def test_the_next_command_takes_a_branch() -> None:
    assert "--specialise" in refused("verify", "cli_models:masked", "-n", "2", "--dp", "2")


def test_a_refusal_ends_with_the_next_command() -> None:
    pytest.importorskip("transformers")
    message = refused("verify", "gpt2", "-n", "4", "--tp", "3")
    assert "autopar: next: autopar verify gpt2 --world-size 4 --dp 4" in message
