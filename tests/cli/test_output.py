"""Printing: names from the user are shown unchanged."""

import pytest

from autopar.cli.output import console


def test_names_with_colons_stay_text(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("mine:factory: pp 2 × tp 2")
    assert capsys.readouterr().out == "mine:factory: pp 2 × tp 2\n"
