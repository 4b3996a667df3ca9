"""Models and data from files, and back into files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import geutil.model
from geutil.cli.options import Format
from geutil.cli.output import working
from geutil.errors import GeutilError
from geutil.model import Model

_BY_SUFFIX = {
    ".pb": Format.graph_def,
    ".pbtxt": Format.pbtxt,
    ".tflite": Format.tflite,
}


class CommandError(GeutilError, ValueError):
    """What the command is asked for cannot be done."""


def read_model(path: Path, signature: str | None = None) -> Model:
    """Open a model."""
    if not path.exists():
        raise CommandError(f"there is nothing at '{path}'")
    with working(f"opening {path.name}"):
        return geutil.model.open(str(path), signature=signature)


def check_target(path: Path, force: bool) -> None:
    """Refuse to write where something is, before there is any work done."""
    if path.exists() and not force:
        raise CommandError(f"'{path}' is there already; pass --force to replace it")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"there is no directory '{path.parent}' to write to")


def write_model(model: Model, path: Path, chosen: Format | None, force: bool) -> None:
    """Write a model in the format that is asked for, or that its name says."""
    form = chosen or _BY_SUFFIX.get(path.suffix, Format.saved_model)
    with working(f"writing {path.name}"):
        model.save(path, form.value, overwrite=force)


def write_bytes(blob: bytes, path: Path) -> None:
    """Write a file whole, or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(blob)
    new.replace(path)


def read_batches(path: Path, batch: int) -> Iterator[dict[str, Any]]:
    """Yield batches by the name of the input.

    Args:
        path: a .npz file, which is split, or a directory of them, one for each batch.
        batch: how many samples there are in a batch of a file.
    """
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise CommandError(f"there is no .npz file in '{path}'")
        for file in files:
            yield _arrays(file)
        return
    arrays = _arrays(path)
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise CommandError(f"'{path}' has different numbers of samples: {counts}")
    for start in range(0, next(iter(counts.values()), 0), batch):
        yield {name: array[start : start + batch] for name, array in arrays.items()}


def _arrays(file: Path) -> dict[str, Any]:
    try:
        with np.load(file) as held:
            return {name: held[name] for name in held.files}
    except (OSError, ValueError) as error:
        raise CommandError(
            f"'{file}' is no .npz file: {error}; write one with numpy.savez"
        ) from error


def named(values: list[str] | None) -> Any:
    """Return what is given as `tensor` or `name=tensor`; None for nothing.

    Raises:
        CommandError: some have names and some have not.
    """
    if not values:
        return None
    pairs = [value.partition("=") for value in values]
    marks = {bool(mark) for _, mark, _ in pairs}
    if marks == {False}:
        return values
    if marks == {True}:
        return {name: tensor for name, _, tensor in pairs}
    raise CommandError(
        f"some of {values} have names and some have not; give names to all, as in "
        "name=tensor, or to none"
    )
