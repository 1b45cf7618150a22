"""Make a virtual environment with autopar in it: `python tools/setup_env.py [--venv DIR] [--extras A,B]`.

torch is installed first and alone, at the version of constraints.txt. A resolver that meets torch as somebody's
dependency may choose another build, gigabytes larger. All other packages have the versions of constraints.txt, or with
--versions the newest or the lowest ones that pyproject.toml admits. A stamp in the environment holds a hash of
everything the installation depends on, so a second call returns at once. Only the standard library is used.
"""

from __future__ import annotations  # so that an older Python reaches the version check

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 11)
VERSIONS = ("pinned", "newest", "lowest")
# pip would compile every module, most of which nothing imports, in half a minute. The first import compiles too, and on
# two cores: these modules of torch while pip installs the other packages, then those that ranks and that tests import.
IMPORTS = """
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(Exception):
        importlib.import_module(name)
"""
OF_TORCH = ("torch._dynamo", "torch.export._trace", "torch.distributed.fsdp", "torch._inductor.compile_fx")
OF_RANKS = ("autopar.commands.verify", "autopar.commands.trial", "transformers.models.auto.modeling_auto")
OF_TESTS = ("pytest", "hypothesis", "rich.table", "typer", "optuna.storages", "sqlalchemy.orm", "matplotlib.pyplot")
INPUTS = ("pyproject.toml", "constraints.txt", "tools/setup_env.py", "autopar/_version.py")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a virtual environment with autopar in it.")
    parser.add_argument("--venv", default=".venv", help="where, relative to the repository (default: .venv)")
    parser.add_argument("--extras", default="dev", help="comma-separated, empty for none (default: dev)")
    parser.add_argument("--versions", choices=VERSIONS, default=VERSIONS[0], help="(default: those of constraints.txt)")
    options = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        fail_python()
    venv = ROOT / options.venv
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(venv.parent / f"{venv.name}.lock", "w") as lock:
        # Of two calls at once the second waits, then finds the stamp.
        fcntl.flock(lock, fcntl.LOCK_EX)
        set_up(venv, options.extras, options.versions)


def set_up(venv: Path, extras: str, versions: str) -> None:
    stamp = venv / "autopar.stamp"
    wanted = fingerprint(f"{extras} {versions}")
    if stamp.exists() and stamp.read_text() == wanted and (venv / "bin" / "python").exists():
        return
    started_s = time.monotonic()
    stamp.unlink(missing_ok=True)
    if venv.exists() and not is_usable(venv):
        shutil.rmtree(venv)
    if not venv.exists():
        say(f"creating {venv.name} with Python {sys.version.split()[0]}")
        create(venv)
    torch = torch_pin()
    say(f"installing {torch} into {venv.name}")
    constraints = venv / "constraints.txt"
    constraints.write_text("\n".join([torch, *wanted_versions(extras, versions)]) + "\n")
    pip(venv, constraints, torch)
    package = f".[{extras}]" if extras else "."
    say(f"installing autopar, extras: {extras or 'none'}, versions: {versions} (a minute or two)")
    compiling = [start_importing(venv, OF_TORCH)]
    pip(venv, constraints, "--editable", package)
    compiling += [start_importing(venv, OF_RANKS), start_importing(venv, OF_TESTS)]
    for process in compiling:
        process.wait()
    stamp.write_text(wanted)
    say(f"{venv.name} is ready after {time.monotonic() - started_s:.0f} s")


def fingerprint(extras: str) -> str:
    digest = hashlib.sha256(f"{extras} {sys.version_info[:2]} {ROOT}".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_usable(venv: Path) -> bool:
    """Whether the environment runs, and with this interpreter's minor version."""
    program = f"import pip, sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    try:
        return subprocess.run([venv / "bin" / "python", "-c", program], capture_output=True).returncode == 0
    except OSError:
        return False


def create(venv: Path) -> None:
    result = subprocess.run([sys.executable, "-m", "venv", venv])
    if result.returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        sys.exit(f"setup: `{sys.executable} -m venv` failed, see above; on Debian or Ubuntu install python3-venv")


def torch_pin() -> str:
    pins = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = [pin for pin in pins if pin.startswith("torch==")]
    if len(found) != 1:
        sys.exit(f"setup: constraints.txt should have one line torch==VERSION, it has {len(found)}")
    return found[0]


def wanted_versions(extras: str, versions: str) -> list[str]:
    """The constraints beside torch: those of the file, none, or the lower bounds of pyproject.toml."""
    if versions == "pinned":
        return (ROOT / "constraints.txt").read_text().splitlines()
    if versions == "newest":
        return []
    import tomllib  # not in the Python versions that `main` refuses

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [project["optional-dependencies"][extra] for extra in extras.split(",") if extra]
    bounds = [one.partition(",")[0] for each in (project["dependencies"], *named) for one in each if ">=" in one]
    return [one.replace(">=", "==") for one in bounds if not one.startswith("torch>=")]


def pip(venv: Path, constraints: Path, *what: str) -> None:
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-compile", "-qq"]
    options = ["--disable-pip-version-check", "--constraint", str(constraints)]
    result = subprocess.run([*command, *options, *what], cwd=ROOT, env=environment())
    if result.returncode != 0:
        sys.exit(f"setup: pip could not install {' '.join(what)}; its message is above")


def start_importing(venv: Path, names: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Import the modules that are installed, which compiles them."""
    command = [str(venv / "bin" / "python"), "-c", IMPORTS, *names]
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)


def environment() -> dict[str, str]:
    """The caller's environment, index settings included, less what would lead pip to another interpreter or target."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV"}
    dropped |= {"PYTHONDONTWRITEBYTECODE"}  # `start_importing` is there to write it
    return {name: value for name, value in os.environ.items() if name not in dropped}


def fail_python() -> None:
    needed, found = ".".join(map(str, MIN_PYTHON)), sys.version.split()[0]
    sys.exit(
        f"setup: autopar needs Python {needed} or newer, {sys.executable} is {found}; "
        f"name another one: make PYTHON=/path/to/python{needed} ..."
    )


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
