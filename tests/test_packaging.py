"""The repository describes itself correctly: packages, links, version, dependencies, commands."""

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import autopar
from autopar._version import __version__

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("cost_model", "runtime", "search")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in_tree() -> list[str]:
    """Import names of all folders with an `__init__.py`, the linked folders under the names they are imported by."""
    found = []
    for top, prefix in {"autopar": "", **dict.fromkeys(LINKED, "autopar.")}.items():
        for folder, folders, files in os.walk(ROOT / top, followlinks=False):
            folders[:] = [name for name in folders if name != "__pycache__"]
            if "__init__.py" in files:
                found.append(prefix + Path(folder).relative_to(ROOT).as_posix().replace("/", "."))
    return sorted(found)


def folders_with_modules() -> set[str]:
    found = set()
    for top in ("autopar", *LINKED):
        for folder, _, files in os.walk(ROOT / top, followlinks=False):
            if any(name.endswith(".py") for name in files):
                found.add(folder)
    return found


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file() and not path.is_symlink()]


def test_packages_equal_the_tree() -> None:
    assert packages_in_tree() == sorted(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_with_modules_is_a_package() -> None:
    assert [folder for folder in sorted(folders_with_modules()) if not (Path(folder) / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", LINKED)
def test_folder_is_mapped_to_its_import_name(name: str) -> None:
    assert PYPROJECT["tool"]["setuptools"]["package-dir"][f"autopar.{name}"] == name


def test_every_package_says_what_it_holds() -> None:
    silent = [
        f for f in folders_with_modules() if not ast.get_docstring(ast.parse((Path(f) / "__init__.py").read_text()))
    ]
    assert not silent


def test_a_folder_holds_at_most_20_modules() -> None:
    assert {folder for folder in folders_with_modules() if len(list(Path(folder).glob("*.py"))) > 20} == set()


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_reaches_its_folder(name: str) -> None:
    link = ROOT / "autopar" / name
    if not os.path.lexists(link):
        pytest.skip("links were lost on the way here, the mapping of the installed package replaces them")
    assert os.readlink(link) == f"../{name}"
    assert link.samefile(ROOT / name)


@pytest.mark.parametrize("name", LINKED)
def test_installed_name_is_this_tree(name: str) -> None:
    module = importlib.import_module(f"autopar.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).samefile(ROOT / name / "__init__.py")


def test_version_has_a_single_source() -> None:
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "autopar._version.__version__"}
    literal = re.compile(r"^__version__\b[^=]*=\s*[\"']", re.MULTILINE)
    sources = [path for path in tracked_files() if path.suffix == ".py" and literal.search(path.read_text())]
    assert sources == [ROOT / "autopar" / "_version.py"]


def test_version_is_the_same_everywhere() -> None:
    assert autopar.__version__ == __version__ == importlib.metadata.version("autopar")


def test_constraints_pin_every_direct_dependency() -> None:
    def canonical(requirement: str) -> str:
        return re.split(r"[\s<>=!~\[;]", requirement)[0].lower().replace("_", "-")

    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [canonical(line) for line in lines if line and not line.startswith("#")]
    assert pinned[0] == "torch"
    assert sorted(pinned) == sorted({canonical(name) for name in wanted} - {"autopar"})


def test_an_advised_install_is_one_of_the_requirements() -> None:
    """autopar is on no index, so no message names it; and the versions are the ones that autopar works with."""
    project = PYPROJECT["project"]
    known = {*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)}
    advised = {
        (path.relative_to(ROOT).as_posix(), found)
        for path in tracked_files()
        if path.suffix in (".py", ".md") and "tests" not in path.parts and path.name != "CHANGELOG.md"
        for found in re.findall(r"pip install ['\"]([^'\"]+)['\"]", path.read_text(encoding="utf-8"))
    }
    assert len(advised) > 5
    assert {(path, found) for path, found in advised if found not in known and not found.startswith(".[")} == set()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_commands_of_the_readme_exist(target: str) -> None:
    assert re.search(rf"^make {target}\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_no_file_names_the_place_it_was_written_in() -> None:
    absolute, beside = "/" + "work", "shared" + "/"
    place = re.compile(rf"(?<![\w.]){absolute}(?![\w-])|(?<![\w-]){re.escape(beside)}", re.MULTILINE)
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content:
            lines = content.decode().splitlines()
            found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if place.search(line)]
    assert found == []
