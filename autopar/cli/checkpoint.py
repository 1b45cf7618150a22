"""`autopar checkpoint`: the checkpoints of a folder, and whether their files are as they were saved."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.command import FAILED, Answer
from autopar.cli.options import positional
from autopar.cli.output import console, table
from autopar.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from autopar.runtime.checkpoint.folder import StepFolder


def checkpoint(
    path: Annotated[Path, positional("PATH", "The folder of `parallel.save`.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its SHA-256.")] = False,
) -> Answer:
    """List the checkpoints of a folder. The exit status is 1 if one of them is damaged.

    Manifests and sizes of files are always checked. With --verify every file is read too.

    Example: autopar checkpoint checkpoints --verify
    """
    from autopar.runtime.checkpoint.folder import complete_steps, latest_folder

    if not path.is_dir():
        raise InputError(f"{path} is no folder; name a folder of checkpoints")
    latest = latest_folder(path)
    rows = [_row(s, s == latest, verify) for s in complete_steps(path).values()]
    checked = "files" if verify else "sizes of files"
    is_damaged = any(row["problems"] for row in rows)
    return Answer(data=rows, show=lambda: _show(path, rows, checked), status=FAILED if is_damaged else 0)


def _show(path: Path, rows: list[dict[str, Any]], checked: str) -> None:
    if not rows:
        console().print(f"{path} holds no checkpoint")
        return
    columns = ("step", "", "GB", "saved", "plan", checked)
    cells = [
        (
            str(row["step"]),
            "latest" * row["is_latest"],
            f"{row['num_bytes'] / 1e9:.3f}",
            row["saved_at"],
            row["plan"],
            "; ".join(row["problems"]) or "good",
        )
        for row in rows
    ]
    console().print(table(columns, cells, right=("step", "GB")))


def _row(folder: "StepFolder", is_latest: bool, hashes: bool) -> dict[str, Any]:
    """A step: its size and plan, what is wrong with it, and whether `latest` names it."""
    from autopar.runtime.checkpoint.manifest import file_problems, read_manifest

    about = {"step": folder.step, "folder": folder.path.name, "is_latest": is_latest}
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return about | {"num_bytes": 0, "saved_at": "", "plan": "", "problems": [str(error)]}
    problems = file_problems(folder.path, manifest, manifest.files, hashes=hashes)
    return about | {
        "num_bytes": manifest.num_bytes,
        "saved_at": manifest.saved_at,
        "plan": manifest.made_by.get("plan", ""),
        "problems": [f"{problem.path}: {problem.rule}" for problem in problems],
    }
