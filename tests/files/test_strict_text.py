"""Problems of JSON files name the place."""

from pathlib import Path

import pytest

from autopar.files.strict_text import read_json


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ('{"a": 1, "b": {"c": NaN, "d": [1]}, "e": [[2], [-Infinity]]}', ["c", "e"]),
        ('{"a": [{"b": Infinity}, null]}', ["b"]),
        ('{"a": 1, "a": NaN}', ["a", "a"]),
        ("[1, NaN]", ["it.json"]),
        ("NaN", ["it.json"]),
        ('{"a": "NaN", "b": [1.5, null]}', []),
    ],
)
def test_numbers_that_json_does_not_have_are_named(text: str, places: list[str], tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    file.write_text(text)
    data, problems = read_json(file, max_bytes=1000)
    assert [Path(str(one.path)).name for one in problems] == places
    assert (data is None) == bool(places)
