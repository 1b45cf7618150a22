"""Engine profiles: strict files, and the engine of a published row."""

from pathlib import Path

import pytest

from autopar.cost_model.machine.engine import Engine, engine_named, engines
from autopar.errors import InputError
from autopar.files.strict_model import checked_model
from autopar.files.strict_yaml import read_yaml

FOLDER = Path(__file__).parents[3] / "cost_model" / "machine" / "engines"


def test_every_file_is_an_engine() -> None:
    assert sorted(engines()) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(engines()))
def test_sources_name_fields(name: str) -> None:
    engine = engine_named(name)
    assert set(engine.sources) <= set(Engine.model_fields)
    assert engine.sharded_state_bytes <= engine.state_bytes


def test_no_framework_stands_twice_for_a_year() -> None:
    names = [(name.lower(), engine.until) for engine in engines().values() for name in engine.frameworks]
    assert len(names) == len(set(names))


def test_a_framework_is_a_name_of_its_newest_engine() -> None:
    assert [engine_named(name).name for name in ("Megatron-LM", "torchtitan", "MaxText")] == ["megatron", "fsdp", "jax"]


def test_unknown_name_says_the_nearest() -> None:
    with pytest.raises(InputError, match="megatron"):
        engine_named("megatrn")


def test_a_factor_is_no_mechanism() -> None:
    content, _ = read_yaml(FOLDER / "megatron.yaml")
    assert isinstance(content, dict)
    _, problems = checked_model(Engine, content | {"speedup": 1.1, "gradient_bytes": 3})
    assert sorted(problem.path for problem in problems) == ["gradient_bytes", "speedup"]
