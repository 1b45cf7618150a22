"""Captures of the models that autopar builds itself, presets and transformers configs, kept by `autopar.cache.store`.

A capture depends on the config, on its number of layers and width if they were changed, on dtype, sequence length and
mode, and on the versions of the capturing code, torch and transformers. The model that a user's function builds is kept
by `programs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cache.store import capture_versions, kept_file
from autopar.errors import InputError
from autopar.ir.trained import trained_from
from autopar.models.load import checked_dtype, config_named, is_factory, resolve_model

if TYPE_CHECKING:
    from autopar.capture.record.captured import Capture
    from autopar.capture.request import Request
    from autopar.ir.cluster import ClusterSpec
    from autopar.ir.program import Program
    from autopar.models.load import ResolvedModel

# A prime that few dimensions have, so that no other dimension equals the batch by chance.
CAPTURED_BATCH = 7


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedModel:
    """A model captured for any batch. `local_batch` is the batch of a factory's own inputs, None for other models."""

    name: str
    digest: str | None
    read: Callable[[], Capture]
    local_batch: int | None
    notes: tuple[str, ...]
    precision: str | None = None  # of a factory's model

    @cached_property
    def capture(self) -> Capture:
        return self.read()


def captured_model(
    spec: str,
    *,
    folder: Path | None,
    layers: int | None = None,
    hidden: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    specialise: bool = False,
    precision: str | None = None,
    cluster: ClusterSpec | None = None,
    staged: bool = False,
    trains: str = "all",
) -> CapturedModel:
    """The model that `spec` names, captured, or its capture of an earlier time in `folder` (None: keep nothing)."""

    def asked_of(model: ResolvedModel) -> Request:
        from autopar.capture.request import Request

        return Request.of(model.model, model.example_inputs, model.loss_fn, specialise=specialise)

    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "seq_len": seq_len}
    if is_factory(spec):
        from autopar.cache.programs import kept_capture
        from autopar.planning.fixed import program_for
        from autopar.planning.labels import LABELLED
        from autopar.planning.precision import in_precision_of

        source = resolve_model(spec, **sizes, dtype=dtype, trains=trains)
        request = replace(asked_of(source), staged=staged, folder=folder)
        once, usual, why = in_precision_of(
            precision, source.model, cluster,
            lambda named: kept_capture(request.computing_in(named), None),
            lambda captured: program_for(captured, LABELLED),
        )  # fmt: skip
        return CapturedModel(
            name=source.name, digest=None, read=lambda: once, local_batch=request.sizes[0],
            notes=(*source.notes, *why), precision=usual,
        )  # fmt: skip

    def build(batch: int) -> ResolvedModel:
        return resolve_model(spec, **sizes, batch=batch, dtype=dtype, trains=trains)

    def again(batch: int) -> Program:
        from autopar.capture.program import capture_twice

        return capture_twice(asked_of(build(batch)).computing_in(precision)).program

    config, name, _ = config_named(spec)
    options = {**sizes, "dtype": checked_dtype(dtype), "specialise": specialise, "precision": precision}
    options |= {} if trained_from(trains).kind == "all" else {"trains": trains}
    file = None if folder is None else kept_file(folder, "capture", config, options, CAPTURED_BATCH, capture_versions())
    notes: list[str] = []
    if file is not None and file.path.is_file():
        from autopar.capture.record.file import open_capture

        opened = file.read(open_capture, notes.append)
        if opened is not None:
            header, read = opened

            def kept() -> Capture:
                return replace(read(), again=again)

            return CapturedModel(name=name, digest=header.sha256, read=kept, local_batch=None, notes=header.notes)
    from autopar.capture.any_size import capture
    from autopar.capture.record.file import capture_text, digest_of

    built = build(CAPTURED_BATCH)
    made = capture(asked_of(built).computing_in(precision), CAPTURED_BATCH)
    digest = None if made.record is None else digest_of(made.record)
    if file is not None and digest is not None:
        about = {"model": name, **{k: str(v) for k, v in options.items() if v is not None}}
        try:
            file.write(capture_text(made, about=about | capture_versions(), notes=built.notes), notes.append)
        except InputError as error:
            notes.append(str(error))
    return CapturedModel(
        name=built.name, digest=digest, read=lambda: made, local_batch=None, notes=(*built.notes, *notes)
    )
