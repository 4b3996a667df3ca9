"""Models, data and pages in files; TensorFlow is started only for them.

Importing it takes seconds, and its C++ part writes to stderr while it starts, whatever
its logging is set to; that of older releases also while it converts to TFLite.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.cli.child import go_on_in_a_child
from geutil.cli.options import ModelFormat
from geutil.cli.output import VERBOSE, working
from geutil.errors import GeutilError, TFLiteError
from geutil.formats import TFLITE_SUFFIX, foreign_kind, format_by_name, refusal

if TYPE_CHECKING:
    from geutil.model import Model
    from geutil.report import Page
    from geutil.select.networks.data import NpzBatches

_STDERR = 2


def start_tensorflow() -> None:
    """Import TensorFlow; what it says is told only if that fails.

    The command goes on in a process of its own for it.
    """
    if "tensorflow" in sys.modules:
        return
    go_on_in_a_child()
    with working("starting TensorFlow"), held_back(told_after_errors=True):
        import tensorflow  # noqa: F401


@contextmanager
def held_back(*, told_after_errors: bool = False) -> Iterator[None]:
    """Hold back what TensorFlow's C++ part writes to the process's stderr.

    What Python writes there is not held back.
    """
    if VERBOSE.get():
        yield
        return
    with tempfile.TemporaryFile() as capture_file:
        original_stderr = os.dup(_STDERR)
        os.dup2(capture_file.fileno(), _STDERR)
        try:
            with _python_writes_to(original_stderr):
                yield
        except BaseException:
            if told_after_errors:
                capture_file.seek(0)
                os.write(original_stderr, capture_file.read())
            raise
        finally:
            os.dup2(original_stderr, _STDERR)
            os.close(original_stderr)


@contextmanager
def _python_writes_to(descriptor: int) -> Iterator[None]:
    before = sys.stderr
    if before is not sys.__stderr__:
        # Somebody keeps it elsewhere already.
        yield
        return
    with open(descriptor, "w", buffering=1, closefd=False) as sys.stderr:
        try:
            yield
        finally:
            sys.stderr = before


_SUFFIXES_READ = (".pb", ".pbtxt", ".keras", ".h5", ".hdf5")
_READ = "a SavedModel directory, or a .pb, .pbtxt, .keras, .h5 or .tflite file"


class CommandError(GeutilError, ValueError):
    """What the command is asked for cannot be done."""


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


def check_source(path: Path) -> None:
    """Refuse to read what cannot be a model, before TensorFlow is started."""
    if not path.exists():
        raise CommandError(f"there is nothing at '{path}'; pass {_READ}")
    if path.is_dir() or path.suffix in _SUFFIXES_READ or is_lite(path):
        return
    what = _what_is(path)
    raise CommandError(f"'{path}' is {what}; pass {_READ}")


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
    """Open a model, or the graph of a TFLite file, and start TensorFlow for that."""
    check_source(path)
    start_tensorflow()
    from geutil.model import ModelError, from_tflite, open

    with working(f"opening {path.name}"), held_back():
        if not is_lite(path):
            return open(str(path), signature=signature)
        try:
            return from_tflite(path, signature=signature)
        except (ModelError, TFLiteError) as error:
            raise CommandError(
                f"'{path}' cannot become the graph that this command needs: {error}; "
                "pass the model that it was made from, or `geutil cut` the file"
            ) from error


def read_drawn(path: Path, signature: str | None = None) -> Model | Path:
    """Return what can be drawn: a model, or the path of a TFLite file."""
    check_source(path)
    return path if is_lite(path) else read_model(path, signature)


def check_target(path: Path, chosen: ModelFormat | None, force: bool) -> None:
    """Refuse to write a model where it cannot be, before there is any work done."""
    reason = refusal(path, format_of(path, chosen).value)
    if reason is not None:
        raise CommandError(reason)
    check_place(path, force)


def check_place(path: Path, force: bool) -> None:
    """Refuse to write where something is, before there is any work done."""
    if path.exists() and not force:
        raise CommandError(f"'{path}' is there already; pass --force to replace it")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"there is no directory '{path.parent}' to write to")


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
    # Else what is said is geutil's own.
    quiet = held_back() if form is ModelFormat.tflite else nullcontext()
    with working(f"writing {path.name}"), quiet:
        model.save(path, form.value, overwrite=force, select_tf_ops=tf_ops)


def write_bytes(blob: bytes, path: Path) -> None:
    """Write a file whole, or not at all."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(blob)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


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
