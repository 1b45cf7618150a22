"""Files that are like another file of their folder."""

from pathlib import Path

import pytest

from autopar.files.strict_model import NamedModel, read_named


class Profile(NamedModel):
    like: str | None = None
    size: int
    sources: dict[str, str]


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\n{text}\n", encoding="utf-8")
    return folder


def test_a_file_that_is_like_another_states_what_differs(tmp_path: Path) -> None:
    written(tmp_path, base="size: 1\nsources: {a: old, b: same}", other="like: base\nsize: 2\nsources: {a: new}")
    made, problems = read_named(Profile, tmp_path / "other.yaml")
    assert not problems
    assert made == Profile(name="other", like="base", size=2, sources={"a": "new", "b": "same"})


@pytest.mark.parametrize(
    ("like", "rule"),
    [
        ("bas", "did you mean 'base'"),
        ("other", "must name another file of this folder"),
        ("../base", "must name another file of this folder"),
        ("[base]", "must name another file of this folder"),
        ("third", "must name a sound file that is like no other file"),
        ("broken", "must name a sound file that is like no other file"),
    ],
)
def test_a_file_that_it_cannot_be_like(like: str, rule: str, tmp_path: Path) -> None:
    written(tmp_path, base="size: 1\nsources: {}", other=f"like: {like}", third="like: base", broken="size: [")
    made, problems = read_named(Profile, tmp_path / "other.yaml")
    assert made is None
    assert problems[0].path == "other.yaml: like" and rule in str(problems[0])


class Plain(NamedModel):
    size: int


def test_a_model_without_the_field_has_no_such_key(tmp_path: Path) -> None:
    written(tmp_path, base="size: 1", other="like: base")
    made, problems = read_named(Plain, tmp_path / "other.yaml")
    assert made is None and any("like" in problem.path for problem in problems)
