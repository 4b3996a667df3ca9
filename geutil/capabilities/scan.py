"""The capabilities of a model, read from its files, of whatever kind they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from geutil.capabilities import archives, saved_models
from geutil.capabilities.op_table import POWERS
from geutil.capabilities.report import Powers
from geutil.errors import ModelError
from geutil.formats import is_tflite_file
from geutil.model.files.keras_files import KERAS_SUFFIXES

if TYPE_CHECKING:
    from geutil.model.files.reading import PathLike


def powers(source: PathLike) -> Powers:
    """Report the capabilities of a model beyond computing and keeping its own state.

    A graph of TensorFlow is a program: its ops can read and write files, open
    connections and run Python, as it is loaded or as it runs. Each op of TensorFlow is
    in one class of a table, and an op that the table lacks is reported as unknown.
    Function bodies, initializers and every MetaGraph are looked at. Nothing is run, no
    graph is built, and no TensorFlow is imported, but for text forms.

    Faults of kernels (memory that they write to by mistake) and libraries of custom ops
    are not looked at: a model from a stranger is safest in a process that may do
    nothing else.

    Of files of Keras the configuration is looked through, at any depth: for layers that
    hold code or read files, and for classes and functions of modules that do more than
    compute; of HDF5 files, those in archives too, the links, and of archives the
    entries. Of TFLite files custom ops are reported, and ops of TensorFlow by the same
    table.

    Args:
        source: the directory of a SavedModel, or a `.pb`, `.pbtxt`, `.meta`, `.keras`,
            `.h5` or `.tflite` file.

    Returns:
        The capabilities, op by op.

    Raises:
        ModelError: there is nothing there, it is damaged, or of another kind.

    Cost: linear in the nodes; memory for some of them at a time. Graphs in which ops
    with capabilities are found are held whole, without their long constants. HDF5 is
    read in another process, which takes a third of a second.

    Example:
        >>> from geutil.model import powers
        >>> powers("testdata/two_signatures").computes_only
        True
    """
    return _powers(Path(source))


def powers_without_values(source: PathLike) -> Powers:
    """Report the capabilities of a model whose weights are not read, as `powers` does.

    In HDF5 files of weights within an archive no links are looked for.
    """
    return _powers(Path(source), values=False)


def _powers(path: Path, *, values: bool = True) -> Powers:
    if not path.exists():
        raise ModelError(f"'{path}' does not exist")
    if path.is_dir():
        entries, ops = saved_models.powers_of_directory(path)
    elif path.suffix in KERAS_SUFFIXES:
        entries, ops = archives.powers_of_keras(path, values=values)
    elif is_tflite_file(path):
        entries, ops = archives.powers_of_tflite(path)
    else:
        entries, ops = saved_models.powers_of_file(path)
    # Libraries have their functions in an order that differs from file to file.
    ordered = sorted(
        entries, key=lambda e: (POWERS.index(e.kind), e.when, e.by, e.name, e.place)
    )
    return Powers(path, tuple(ordered), ops)
