"""The docstrings of the public API have the sections that apply. The examples of all docstrings run."""

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar import testing

ROOT = Path(autopar.__file__).parents[1]
PACKAGES = {"autopar": "autopar"} | {name: f"autopar.{name}" for name in ("search", "cost_model", "runtime")}
CLASSES = ("ParallelModel", "ParallelLoader", "GradScaler", "Run", "SearchResult", "TuneResult", "Plan", "ClusterSpec")
# Our own rooms call these methods, and no page for users shows them. A line is enough.
INTERNAL = "code_modules|exchange|own_buffers|stage_modules|stages_in|stored_parameters|link|place_of|tier"
NO_SECTIONS = ("__version__", "AutoparError", "Estimate")  # values without arguments or methods of their own
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def public_functions() -> Iterator[tuple[str, Any]]:
    for name in autopar.__all__:
        if name not in (*NO_SECTIONS, *CLASSES):
            yield name, getattr(autopar, name)
    for name in testing.__all__:
        yield f"testing.{name}", getattr(testing, name)


def public_methods(name: str) -> Iterator[tuple[str, Any]]:
    """The methods of a class that autopar defines, inherited ones included; properties are not methods."""
    kind = getattr(autopar, name)
    for attribute in dir(kind):
        method = inspect.getattr_static(kind, attribute)
        function = getattr(method, "__func__", method)
        is_ours = (getattr(function, "__module__", None) or "").startswith("autopar.")
        if not re.fullmatch(rf"_.*|{INTERNAL}", attribute) and inspect.isfunction(function) and is_ours:
            yield f"{name}.{attribute}", function


def properties(name: str) -> Iterator[tuple[str, Any]]:
    kind = getattr(autopar, name)
    for attribute, value in inspect.getmembers_static(kind):
        is_ours = isinstance(value, property) and value.fget.__module__.startswith("autopar.")
        if is_ours and not attribute.startswith("_"):
            yield f"{name}.{attribute}", value


def everything() -> dict[str, Any]:
    found = dict(public_functions())
    for name in CLASSES:
        found[name] = getattr(autopar, name)
        found |= dict(public_methods(name))
    return found


def missing_in(function: Callable[..., Any]) -> list[str]:
    """The sections that a function's docstring lacks."""
    text = inspect.getdoc(function) or ""
    source = inspect.unwrap(function)
    parameters = [p for p in inspect.signature(source).parameters.values() if p.name not in ("self", "cls")]
    returns = inspect.signature(source).return_annotation
    tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))
    lacking = [] if text.split("\n")[0].endswith(".") else ["a summary line"]
    lacking += [f"Args: {p.name}" for p in parameters if f"\n    {p.name}: " not in text or "\nArgs:\n" not in text]
    if returns not in (None, "None") and "\nReturns:\n" not in text and "\nYields:\n" not in text:
        lacking.append("Returns:")
    if raises and "\nRaises:\n" not in text:
        lacking.append("Raises:")
    return lacking + ([] if ">>> " in text else ["an example"])


def missing_in_class(kind: type[Any]) -> list[str]:
    text = inspect.getdoc(kind) or ""
    return [what for what, has in (("a docstring", text), ("an example", ">>> " in text)) if not has]


def test_every_public_name_has_its_sections() -> None:
    missing = {}
    for name, value in everything().items():
        lacking = missing_in_class(value) if inspect.isclass(value) else missing_in(value)
        missing |= {name: lacking} if lacking else {}
    for name in CLASSES:
        missing |= {prop: ["a docstring"] for prop, value in properties(name) if not inspect.getdoc(value)}
    missing |= {name: ["a docstring"] for name in NO_SECTIONS[1:] if not inspect.getdoc(getattr(autopar, name))}
    assert missing == {}, "\n".join(f"{name} lacks {', '.join(what)}" for name, what in missing.items())


def test_no_page_shows_an_internal_method() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]:
        assert not re.search(rf"\.({INTERNAL})\(", page.read_text()), page


@pytest.fixture(scope="module")
def small_model() -> dict[str, Any]:
    """The names that all examples may use: a small model, its batch and its loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 4))
    batch = (torch.randn(4, 8), torch.arange(4))
    return {
        "autopar": autopar, "torch": torch, "model": model, "batch": batch,
        "loss_fn": torch.nn.functional.cross_entropy,
    }  # fmt: skip


@pytest.fixture(scope="module")
def parallel_model(small_model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """With them the model on a job of one rank, as `parallel`."""
    model, batch, loss_fn = (small_model[name] for name in ("model", "batch", "loss_fn"))
    parallel = autopar.parallelize(model, "1xcpu", example_inputs=batch, plan={"dp": 1}, loss_fn=loss_fn)
    yield small_model | {"parallel": parallel}
    dist.destroy_process_group()


def run_examples(values: dict[str, Any], names: dict[str, Any]) -> None:
    parser, runner, failed = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS), list[str]()
    for name, value in values.items():
        example = parser.get_doctest(inspect.getdoc(value) or "", dict(names), name, None, 0)
        runner.run(example, out=failed.append)
    assert not failed, "".join(failed)


def needs_a_job(value: Any) -> bool:
    lines = (inspect.getdoc(value) or "").splitlines()
    return any("parallel" in line for line in lines if ">>> " in line)


def test_examples_without_ranks_run(
    small_model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that examples write
    run_examples({name: value for name, value in everything().items() if not needs_a_job(value)}, small_model)


def test_examples_on_a_rank_run(
    parallel_model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples({name: value for name, value in everything().items() if needs_a_job(value)}, parallel_model)


def modules_with_examples() -> Iterator[str]:
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[:1] != ("__main__",) and parts[0] not in PACKAGES and ">>> " in path.read_text():
                yield ".".join((package, *parts)).removesuffix(".__init__")


def test_examples_of_other_names_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    public = {inspect.getdoc(value) for value in everything().values()}
    runner, failed, found = doctest.DocTestRunner(optionflags=FLAGS), list[str](), 0
    for name in modules_with_examples():
        for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
            if example.examples and inspect.cleandoc(example.docstring or "") not in public:
                runner.run(example, out=failed.append)
                found += 1
    assert found >= 5
    assert not failed, "".join(failed)
