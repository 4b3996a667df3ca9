"""The inspection of a model by its files, of whatever kind they are.

No TensorFlow is imported, but for text forms.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from geutil.errors import ModelError
from geutil.formats import is_tflite_file
from geutil.model.files import keras_files, tflite_inspection
from geutil.model.files.inspect_files import inspect_graphs
from geutil.model.files.inspection import Inspection

if TYPE_CHECKING:
    from geutil.model.files.reading import PathLike


def inspect(path: PathLike, *, tags: Iterable[str] | None = None) -> Inspection:
    """Describe a model: signatures, ops, functions, variables, sizes.

    Only its files are looked at. No graph is built, no object is made, nothing is
    executed, and the values of variables and large constants are not read.

    Args:
        path: the directory of a SavedModel, a `.pb` or `.pbtxt` file with a GraphDef, a
            `.keras` or `.h5` file, or a `.tflite` file, of which a `TFLiteInspection`
            is returned.
        tags: exactly the tags of the MetaGraph of a SavedModel; None means "serve", or
            the only one there is.

    Raises:
        ModelError: there is nothing there, it is damaged, or of another kind.

    Cost: linear in the nodes; memory for some of them at a time. Text forms are parsed
    whole, by TensorFlow; all else is inspected without it.

    Example:
        >>> found = inspect("testdata/two_signatures")
        >>> print(found.signatures["encode"].inputs["x"], found.variables[0].tensor)
        float32 [n,3] float32 [3,2]
        >>> found.ops["VarHandleOp"]
        1
    """
    source = Path(path)
    if not source.exists():
        raise ModelError(f"'{source}' does not exist")
    is_directory = source.is_dir()
    if not is_directory and source.suffix in keras_files.KERAS_SUFFIXES:
        return keras_files.inspect_keras(source)
    if not is_directory and is_tflite_file(source):
        return tflite_inspection.inspect_tflite(source)
    return inspect_graphs(source, tags, is_directory=is_directory)
