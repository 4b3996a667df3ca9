"""Models, data and pages in files, and reports of written ones.

TensorFlow is started only for them.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geutil.cli.imports import import_keras, import_tensorflow, register_all
from geutil.cli.terminal import ModelFormat, plain, show, show_written, working
from geutil.errors import GeutilError, TFLiteError
from geutil.formats import (
    BY_SUFFIX,
    DIRECTORY,
    TFLITE_SUFFIX,
    foreign_kind,
    format_by_name,
    refusal,
    written_atomically,
)
from geutil.sizes import size_of, size_text

if TYPE_CHECKING:
    from geutil.data_files import FileBatches, Wanted
    from geutil.model import Model
    from geutil.report import Page

DEFAULT = "serving_default"
"""The signature that is opened where none is named."""


def start_tensorflow(*, registers: bool = True) -> None:
    """Import TensorFlow; with `registers` all that graphs in files may name."""
    if "tensorflow" not in sys.modules:
        with _starting("TensorFlow"):
            import_tensorflow()
    # Graphs that Keras traces name only ops and types that it has imported.
    if registers:
        register_all()


def start_keras() -> None:
    """Import Keras behind TensorFlow, for files of Keras."""
    start_tensorflow(registers=False)
    if not any(name in sys.modules for name in ("keras", "tf_keras")):
        with _starting("Keras"):
            import_keras()


@contextmanager
def _starting(name: str) -> Iterator[None]:
    """Import a package, and report it if it cannot be imported."""
    with working(f"starting {name}"):
        try:
            yield
        except ImportError as error:
            raise CommandError(
                f"{name} does not start: {error}; --verbose shows all that it said"
            ) from error


_KERAS_SUFFIXES = (".keras", ".h5", ".hdf5")
_GRAPH_SUFFIXES = (".pb", ".pbtxt")
_SUFFIXES_READ = (*_GRAPH_SUFFIXES, *_KERAS_SUFFIXES)
_READ = "a SavedModel directory, or a .pb, .pbtxt, .keras, .h5 or .tflite file"


class CommandError(GeutilError, ValueError):
    """A command cannot be carried out."""


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
    from geutil.select import selections

    if scope is None or any(key.startswith(scope) for key in model.functions):
        return
    graphs = [signature.graph for signature in model.signatures.values()]
    scopes = selections.scopes_meant(graphs, scope)
    ops = (op for graph in graphs for op in graph.get_operations())
    if not any(is_in_scope(op.name, scopes) for op in ops):
        similar = selections.similar(model.graph, scope)
        raise CommandError(f"there is no layer or scope '{scope}'; {similar}")


def check_source(path: Path) -> None:
    """Refuse a path that cannot be a model, before TensorFlow is started."""
    if not path.exists():
        raise CommandError(f"there is nothing at '{path}'; pass {_READ}")
    if path.is_dir() or path.suffix in _SUFFIXES_READ or is_lite(path):
        return
    what = _what_is(path)
    raise CommandError(f"'{path}' is {what}; pass {_READ}")


def is_lite(path: Path) -> bool:
    """Return whether a path is that of a TFLite file, by its name."""
    return path.is_file() and path.suffix.lower() == TFLITE_SUFFIX


def is_text(path: Path) -> bool:
    """Return whether a model is written as text, which TensorFlow parses."""
    if path.is_dir():
        names = ("saved_model.pb", "saved_model.pbtxt")
        return [(path / name).exists() for name in names] == [False, True]
    return path.suffix in (".pbtxt", ".txt")


def _what_is(path: Path) -> str:
    """Return the kind of a file that is not read, by its first bytes."""
    with path.open("rb") as opened:
        kind = foreign_kind(opened.read(16))
    return kind or "not of a format to read"


def read_model(
    path: Path, signature: str | None = None, *, values: bool = True
) -> Model:
    """Open a model, or the graph of a TFLite file, and start TensorFlow for that.

    Args:
        path: the place of the file.
        signature: the signature to open.
        values: whether the values of weights are asked for.
    """
    check_source(path)
    # A broken file is refused without waiting for TensorFlow, and a network of Keras
    # would take any name for its only signature.
    is_first = "tensorflow" not in sys.modules or signature is not None
    if is_first and not is_text(path):
        _check_content(path, signature)
        if values and path.suffix == ".keras":
            _read_links(path)
    # A graph has no signatures, and would take any name for its only one.
    is_graph = path.is_file() and path.suffix in _GRAPH_SUFFIXES
    if is_graph and signature not in (None, DEFAULT):
        raise _no_signature(path, str(signature), [DEFAULT])
    start_keras() if path.suffix in _KERAS_SUFFIXES else start_tensorflow()
    from geutil.model import ModelError, from_tflite, open
    from geutil.model.opener import open_without_values

    with working(f"opening {path.name}"):
        if not is_lite(path):
            # Looks need ops and shapes, and reading the weights takes most of the time.
            if not values and path.suffix == ".keras" and path.is_file():
                return open_without_values(path, signature)
            return open(str(path), signature=signature)
        file: Any = open(str(path))
        try:
            return from_tflite(file, signature=signature)
        except (ModelError, TFLiteError) as error:
            raise CommandError(
                f"{path} cannot become the graph that this command needs: {error}; "
                "pass the model that it was made from, or `geutil cut` the file"
            ) from error


def _check_content(path: Path, signature: str | None) -> None:
    """Refuse a damaged file, or a signature that it has not, without TensorFlow."""
    from geutil.model import inspect

    with working(f"reading {path.name}"):
        signatures = inspect(str(path)).signatures
    states_all = path.is_dir() or path.suffix in _KERAS_SUFFIXES
    if states_all and signature is not None and signature not in signatures:
        raise _no_signature(path, signature, [*signatures])


def _no_signature(path: Path, signature: str, known: list[str]) -> CommandError:
    return CommandError(
        f"'{path}' has no signature '{signature}'; it has {known}: pass "
        "--signature with one of these"
    )


def _read_links(path: Path) -> None:
    """Read the weights of a file in a process that needs no TensorFlow."""
    # `open` asks again, and gets what was found; then no copy of this process is safe.
    from geutil.model import powers

    # Opening it tells of its faults.
    with suppress(GeutilError):
        powers(str(path))


def _stated_inputs(source: Path, signature: str | None) -> Mapping[str, Any]:
    """Return the inputs that a file states, without TensorFlow; none if it does not."""
    from geutil.model import inspect

    if is_text(source):
        return {}
    try:
        signatures = inspect(str(source)).signatures
    except GeutilError:
        # Opening it tells why.
        return {}
    name = signature or (DEFAULT if DEFAULT in signatures else "")
    ends = signatures.get(name)
    if ends is None and len(signatures) == 1:
        (ends,) = signatures.values()
    return ends.inputs if ends else {}


def check_same_inputs(paths: tuple[Path, Path], signature: str | None) -> None:
    """Refuse two models whose files state other inputs, before one is opened."""
    ours, theirs = (_stated_inputs(path, signature) for path in paths)
    is_one = len(ours) == len(theirs) == 1
    if ours and theirs and not is_one and set(ours) != set(theirs):
        raise CommandError(
            f"the inputs do not match: {[*ours]} and {[*theirs]}; `geutil rename "
            "--input` one of the models"
        )


def read_drawn(
    path: Path, signature: str | None = None, *, values: bool = True
) -> Model | Path:
    """Return a subject that can be drawn: a model, or the path of a TFLite file."""
    check_source(path)
    return path if is_lite(path) else read_model(path, signature, values=values)


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
    try:
        # Permissions say less than an attempt: of a full or a read-only disk nothing.
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise CommandError(
            f"'{path}' cannot be written: {error.strerror}; name a place to write to"
        ) from error


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
    """Batches from files, by the names of the inputs of a model.

    Attributes:
        path: a .npz or .npy file, which is split, or a directory of them, one for each
            batch.
        size: how many samples there are in a batch of a file, where a model takes any
            number.
        inputs: the inputs of the model, once they are known.
    """

    path: Path
    size: int
    inputs: Mapping[str, Wanted] | None = None

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise CommandError(
                f"there is no data at '{self.path}'; pass a .npz or .npy file, or a "
                "directory of them"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.files)

    def of_file(self, source: Path, signature: str | None = None) -> Batches:
        """Return the batches for the inputs that a file states, or refuse them.

        That needs no TensorFlow. Files that do not say are opened first: `fitted`.
        """
        inputs = _stated_inputs(source, signature)
        return self.fitted(inputs, tell=False) if inputs else self

    def fitted(self, inputs: Mapping[str, Any], *, tell: bool = True) -> Batches:
        """Return the batches for the inputs of a model, one array for each input."""
        from geutil.data_files import wanted

        taken = {name: wanted(t) for name, t in inputs.items()}
        sizes = {want.shape[0] for want in taken.values() if want.shape}
        size = (sizes.pop() if len(sizes) == 1 else None) or self.size
        fitted = Batches(self.path, size, taken)
        fitted.files.check(tell=tell)
        return fitted

    @cached_property
    def files(self) -> FileBatches:
        """The batches as the library takes them."""
        from geutil.data_files import FileBatches
        from geutil.tflite.op_names import file_names

        return FileBatches(self.path, self.size, CommandError, self.inputs, file_names)


def named(values: list[str] | None) -> Any:
    """Return names or pairs of `tensor` or `name=tensor`; None for nothing."""
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


def check_page(path: Path | None, force: bool) -> None:
    """Refuse to write a page where it cannot be, before there is any work done."""
    check_file(path, force, "a page", ".html", ".htm")


def check_file(path: Path | None, force: bool, kind: str, *suffixes: str) -> None:
    """Refuse to write a file of one kind where it cannot be; None is not written."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise CommandError(
            f"'{path}' is no name of {kind}; name a file that ends in {suffixes[0]}"
        )
    if path.is_dir():
        raise CommandError(f"'{path}' is a directory, and is not replaced by {kind}")
    check_place(path, force)


def check_is_lite(subject: str, to_file: bool) -> None:
    """Refuse an option that is for .tflite files where none is written."""
    if not to_file:
        raise CommandError(
            f"{subject} is for .tflite files; name the output so, or pass --format "
            "tflite"
        )


def write_page(path: Path, make: Callable[[], Page]) -> None:
    """Make a page and write it, and print its place on stderr."""
    with working(f"drawing {path.name}"):
        make().save(path, overwrite=True)
    print(f"geutil: wrote {path}", file=sys.stderr)


if TYPE_CHECKING:
    from geutil.model import Model
    from geutil.model.comparison import Comparison
    from geutil.select.networks.outputs import Motion

_SAMPLES = 2
"""Samples that are drawn: the fewest by which an output is seen to move (`Motion`)."""
_BATCH_SAMPLES = 8
"""Rows of given data: as many as `Model.compare` draws samples by default."""


@dataclass(frozen=True)
class Written:
    """The report of a written model or file.

    Attributes:
        path: the place.
        format: its format.
        bytes: its size.
        bytes_before: the size of the model that was read.
        ops_added: how many ops of each type there are more, in the graph that was
            worked on.
        ops_removed: how many there are less.
        difference: the largest difference of outputs from those of what was read; None
            if it was not run.
        samples: on how many inputs.
        given: whether these were given; else they were drawn.
        not_compared: why it was not run; "" if it was.
        seconds: from the start of the command.
        relative: the difference relative to the largest magnitude of its output.
        motions: how much each output moves with the samples.
    """

    path: Path
    format: str
    bytes: int
    bytes_before: int
    ops_added: dict[str, int]
    ops_removed: dict[str, int]
    difference: float | None
    samples: int
    given: bool
    not_compared: str
    seconds: float
    relative: float | None = None
    motions: Mapping[str, Motion] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the lines that a command prints about the file that it wrote."""
        added, removed = (sum(c.values()) for c in (self.ops_added, self.ops_removed))
        sizes = f"{size_text(self.bytes)}, before {size_text(self.bytes_before)}"
        lines = [f"wrote '{self.path}' ({self.format}): {sizes}; {self.seconds:.1f} s"]
        # A TFLite file has kinds of its own, so that such counts tell nothing.
        if self.format != ModelFormat.tflite.value:
            lines.append(f"ops: {added} added, {removed} removed")
        if self.difference is None:
            lines.append(f"not run beside what was read: {self.not_compared}")
        else:
            shown = f"{self.difference:.3g}"
            if self.relative:
                shown += f" ({self.relative:.2g} of the output)"
            lines.append(
                f"largest difference from what was read: {shown}, on "
                f"{self.samples} {'given' if self.given else 'drawn'} input(s)"
            )
            lines += [
                f"  output '{name}' {motion}"
                for name, motion in self.motions.items()
                if str(motion)
            ]
        return "\n".join(lines)


@dataclass
class Record:
    """A command from its start: the model that it reads, and the one that it writes.

    Args:
        path: the model that is read.
        output: where the result goes.
        form: the format that was asked for.
        force: whether the file at the output is replaced.
    """

    path: Path
    output: Path
    form: ModelFormat | None
    force: bool
    _began: float = field(default_factory=time.monotonic)
    _kinds: Counter[str] = field(default_factory=Counter)
    _before: Any = None
    _bytes_before: int = 0

    def checked(self) -> Record:
        """Refuse a path or an output before there is any work done."""
        check_source(self.path)
        check_target(self.output, self.form, self.force)
        return self

    def read(self, signature: str | None, *, to_be_changed: bool = False) -> Model:
        """Read the model; a copy of one that is edited in place is kept."""
        model = read_model(self.path, signature)
        self._bytes_before, self._kinds = size_of(self.path), _kinds(model)
        self._before = model.cut() if to_be_changed else model
        return model

    def write(self, model: Model, why_not: str = "", *, as_json: bool) -> None:
        """Write the model, and show it; see `written`."""
        write_model(model, self.output, self.form, self.force)
        show_written(model, self.written(model, why_not=why_not), as_json=as_json)

    def written(
        self,
        model: Model,
        data: Batches | None = None,
        why_not: str = "",
        *,
        compared: Callable[[], Comparison] | None = None,
        format: str = "",
    ) -> Written:
        """Return the report of a written model."""
        kinds = _kinds(model)
        found: Comparison | None = None
        if not why_not:
            try:
                with working("running both"):
                    found = (
                        self._compared(model, data) if compared is None else compared()
                    )
            # The file is written already: a run that fails is told, and no more.
            except GeutilError as error:
                why_not = str(error)
        return Written(
            self.output,
            format or format_of(self.output, self.form).value,
            size_of(self.output),
            self._bytes_before,
            dict(kinds - self._kinds),
            dict(self._kinds - kinds),
            None if found is None else found.largest,
            0 if found is None else found.samples,
            data is not None,
            why_not,
            time.monotonic() - self._began,
            None if found is None else found.relative,
            {} if found is None else found.motions,
        )

    def _compared(self, model: Model, data: Batches | None) -> Comparison:
        inputs = None
        if data is not None:
            inputs = [{n: v[:_BATCH_SAMPLES] for n, v in next(iter(data)).items()}]
        found: Comparison = self._before.compare(model, inputs, _SAMPLES)
        return found


def tell(written: Written, report: Any, *, as_json: bool) -> None:
    """Print the report of a command, and of the file that it wrote."""
    if not as_json:
        print(report)
        print(written)
        return
    show({**plain(report), "written": plain(written)}, as_json=True)


def _kinds(model: Model) -> Counter[str]:
    """Count the ops that outputs depend on by their types."""
    from geutil.select import get_backward_walk_ops

    outputs = list(model.outputs.values())
    return Counter(op.type for op in get_backward_walk_ops(outputs, inclusive=True))
