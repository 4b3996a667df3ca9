"""Models, data and pages in files; TensorFlow is started only for them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.cli.options import ModelFormat
from geutil.cli.output import working
from geutil.errors import GeutilError
from geutil.formats import (
    BY_SUFFIX,
    DIRECTORY,
    TFLITE_SUFFIX,
    foreign_kind,
    format_by_name,
    refusal,
)
from geutil.writing import written_atomically

if TYPE_CHECKING:
    from geutil.model import Model
    from geutil.report import Page
    from geutil.select.networks.data import NpzBatches


def start_tensorflow() -> None:
    """Import TensorFlow.

    Raises:
        CommandError: it cannot be imported.
    """
    if "tensorflow" in sys.modules:
        return
    with working("starting TensorFlow"):
        try:
            import tensorflow  # noqa: F401
        except ImportError as error:
            raise CommandError(
                f"TensorFlow does not start: {error}; --verbose shows all that it said"
            ) from error


_SUFFIXES_READ = (".pb", ".pbtxt", ".keras", ".h5", ".hdf5")
_READ = "a SavedModel directory, or a .pb, .pbtxt, .keras or .h5 file"


class CommandError(GeutilError, ValueError):
    """What the command is asked for cannot be done."""


def compiled(regex: str) -> re.Pattern[str]:
    """Compile a regular expression; refuse text that is none."""
    try:
        return re.compile(regex)
    except re.error as error:
        raise CommandError(
            f"'{regex}' is no regular expression: {error}; write a backslash before a "
            "character that stands for itself"
        ) from error


def check_scope(model: Model, scope: str | None) -> None:
    """Refuse a scope or layer that a model does not have."""
    from geutil.graph.types import is_in_scope
    from geutil.select import names

    if scope is None or any(key.startswith(scope) for key in model.functions):
        return
    graphs = [signature.graph for signature in model.signatures.values()]
    scopes = names.scopes_meant(graphs, scope)
    ops = (op for graph in graphs for op in graph.get_operations())
    if not any(is_in_scope(op.name, scopes) for op in ops):
        raise CommandError(
            f"there is no layer or scope '{scope}'; {names.similar(model.graph, scope)}"
        )


def check_source(path: Path, *, or_tflite: bool = False) -> None:
    """Refuse to read what cannot be a model, before TensorFlow is started.

    Args:
        path: what is to be read.
        or_tflite: whether it may be a TFLite file.
    """
    accepted = f"{_READ}; or a .tflite file" if or_tflite else _READ
    if not path.exists():
        raise CommandError(f"there is nothing at '{path}'; pass {accepted}")
    if path.is_dir() or path.suffix in _SUFFIXES_READ or (or_tflite and is_lite(path)):
        return
    what = _what_is(path)
    raise CommandError(f"'{path}' is {what}; pass {accepted}")


def is_lite(path: Path) -> bool:
    """Tell whether a path is that of a TFLite file, by its name."""
    return path.is_file() and path.suffix.lower() == TFLITE_SUFFIX


def is_text(path: Path) -> bool:
    """Tell whether a model is written as text, which TensorFlow parses."""
    if path.is_dir():
        names = ("saved_model.pb", "saved_model.pbtxt")
        return [(path / name).exists() for name in names] == [False, True]
    return path.suffix in (".pbtxt", ".txt")


def _what_is(path: Path) -> str:
    """Say what a file is that is not read, as far as its first bytes tell."""
    with path.open("rb") as opened:
        kind = foreign_kind(opened.read(16))
    return kind or "not of a format to read"


def read_model(path: Path, signature: str | None = None) -> Model:
    """Open a model, and start TensorFlow for that."""
    check_source(path)
    if "tensorflow" not in sys.modules and not is_text(path):
        _check_content(path, signature)
    start_tensorflow()
    from geutil.model import open

    with working(f"opening {path.name}"):
        return open(str(path), signature=signature)


def _check_content(path: Path, signature: str | None) -> None:
    """Refuse a damaged file, or a signature that it has not, without TensorFlow."""
    from geutil.model import inspect

    with working(f"reading {path.name}"):
        signatures = inspect(str(path)).signatures
    if path.is_dir() and signature is not None and signature not in signatures:
        raise CommandError(
            f"'{path}' has no signature '{signature}'; it has {[*signatures]}: pass "
            "--signature with one of these"
        )


def read_drawn(path: Path, signature: str | None = None) -> Model | Path:
    """Return what can be drawn: a model, or the path of a TFLite file."""
    check_source(path, or_tflite=True)
    return path if is_lite(path) else read_model(path, signature)


def check_target(path: Path, chosen: ModelFormat | None, force: bool) -> None:
    """Refuse to write a model where it cannot be, before there is any work done."""
    suffix = path.suffix
    # Versions, as in net.v2, have digits.
    if chosen is None and suffix[1:].isalpha() and suffix.lower() not in BY_SUFFIX:
        reason = refusal(path, DIRECTORY) or (
            f"'{path}' is called a {suffix} file, which geutil does not write; name a "
            "SavedModel directory without a suffix, or pass --format saved_model"
        )
    else:
        reason = refusal(path, format_of(path, chosen).value) or ""
    if reason:
        raise CommandError(reason)
    check_place(path, force)


def check_place(path: Path, force: bool) -> None:
    """Refuse to write where something is, before there is any work done."""
    if path.exists() and not force:
        raise CommandError(f"'{path}' is there already; pass --force to replace it")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"there is no directory '{path.parent}' to write to")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise CommandError(
            f"nothing can be written to the directory '{path.parent}': permission "
            "denied; choose another one"
        )


def format_of(path: Path, chosen: ModelFormat | None) -> ModelFormat:
    """Return the format that is asked for, or that the name of the output says."""
    return chosen or ModelFormat(format_by_name(path))


def write_model(
    model: Model,
    path: Path,
    chosen: ModelFormat | None,
    force: bool,
    *,
    tf_ops: bool = False,
) -> None:
    """Write a model."""
    form = format_of(path, chosen)
    with working(f"writing {path.name}"):
        model.save(path, form.value, overwrite=force, select_tf_ops=tf_ops)


def write_bytes(blob: bytes, path: Path) -> None:
    """Write a file whole, or not at all."""
    with written_atomically(path, overwrite=True) as new:
        new.write_bytes(blob)


@dataclass(frozen=True)
class Batches:
    """Batches from files, by the name of the input.

    Attributes:
        path: a .npz file, which is split, or a directory of them, one for each batch.
        size: how many samples there are in a batch of a file.
    """

    path: Path
    size: int

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise CommandError(
                f"there is no data at '{self.path}'; pass a .npz file, or a directory "
                "of them"
            )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._batches)

    @cached_property
    def _batches(self) -> NpzBatches:
        from geutil.select.networks.data import NpzBatches

        return NpzBatches(self.path, self.size, CommandError)


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


_SUFFIXES = (".html", ".htm")


def check_page(path: Path | None, force: bool) -> None:
    """Refuse to write a page where it cannot be, before there is any work done."""
    if path is None:
        return
    if path.suffix.lower() not in _SUFFIXES:
        raise CommandError(
            f"'{path}' is no name of a page; name a file that ends in .html"
        )
    if path.is_dir():
        raise CommandError(f"'{path}' is a directory, and is not replaced by a page")
    check_place(path, force)


def write_page(path: Path, make: Callable[[], Page]) -> None:
    """Make a page and write it; say so where it does not mix with what is printed."""
    with working(f"drawing {path.name}"):
        make().save(path, overwrite=True)
    print(f"geutil: wrote {path}", file=sys.stderr)
