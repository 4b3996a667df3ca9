"""TFLite files: opened, and saved, all or nothing.

Weights stay where they are, in the file or in its mapping to memory, until they are
asked for, or the file is written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from geutil import lazy
from geutil.errors import TFLiteError
from geutil.tflite.parts import Contents
from geutil.tflite.reading import read_into
from geutil.tflite.writing import Writer
from geutil.writing import written_atomically


class LiteFile(Contents):
    """A TFLite file.

    Attributes:
        graphs: its subgraphs, the first of them the main one.
        signatures: its signatures by their names.
        metadata: the bytes that are stored in it besides, by name.
        description: the converter's description of itself.
        bytes_total: the size of the file that was read.
        path: where it was read; None of bytes.
    """

    path: Path | None = None

    @property
    def runtime(self) -> str:
        """The oldest runtime that has all its kernels; "" if the file does not say."""
        entry = self.metadata.get("min_runtime_version")
        if entry is None or entry.data is None:
            return ""
        return entry.data.tobytes().rstrip(b"\0").decode("ascii", "replace")

    def to_bytes(self) -> bytes:
        """Return the file.

        Raises:
            TFLiteError: it has fields that the schema lacks, or is larger than a
                flatbuffer can be in one piece of memory; see `save`.

        Cost: linear in tables; one copy of the weights.
        """
        return b"".join(Writer(self).pieces())

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the file, all or nothing.

        Args:
            path: where to write it; it may be the file that this one was read from.
            overwrite: whether to replace what is there.

        Returns:
            The path.

        Raises:
            TFLiteError: it has fields that the schema lacks.
            ModelError: there is something and `overwrite` is false, or the directory
                is missing.
            OSError: the disk is full, or writing is forbidden.

        Cost: linear in tables; the weights are copied from file to file.
        """
        target = Path(path)
        pieces = Writer(self).pieces()
        with (
            written_atomically(target, overwrite=overwrite) as new,
            new.open("wb") as opened,
        ):
            opened.writelines(pieces)
        return target

    def to_model(self, *, signature: str | None = None) -> Any:
        """Return the model of the file, which can be trained and converted again.

        See `geutil.model.from_tflite`, which takes paths, too.

        Args:
            signature: the signature to return; `serving_default` or the only one if
                None.

        Returns:
            The `geutil.model.Model` of one signature; the others are in its
            `signatures`.

        Raises:
            ModelError: TensorFlow has no op for one of the file, such as a custom op of
                others; or there is no such signature.

        Cost: linear in ops, and in the bytes of the weights; it imports TensorFlow.
        """
        make = lazy.provided("model of a TFLite file")
        if make is None:
            raise TFLiteError("models are made by the whole package; import geutil")
        return make(self, signature=signature)

    def __repr__(self) -> str:
        ops = sum(len(graph.ops) for graph in self.graphs)
        return (
            f"LiteFile({list(self.signatures)}, {len(self.graphs)} subgraph(s), "
            f"{ops} ops)"
        )


def open(source: str | os.PathLike[str] | bytes) -> LiteFile:
    """Open a TFLite file to look at it and to edit it.

    Args:
        source: the path of a file, which is mapped to memory, or the bytes of one.

    Raises:
        BrokenFileError: it is no TFLite file, or is not whole.
        OSError: it cannot be read.

    Cost: linear in tensors, ops and scales; some 50 us for each tensor and op. Weights
        are read when they are asked for.

    Example:
        >>> import numpy as np
        >>> from geutil import tflite
        >>> made = tflite.LiteFile()
        >>> graph = tflite.LiteGraph("main")
        >>> made.graphs.append(graph)
        >>> x, y = (tflite.LiteTensor(name, "float32", [2]) for name in "xy")
        >>> graph.inputs, graph.outputs = (x,), (y,)
        >>> _ = graph.add_op(tflite.LiteOp("NEG", [x], [y]))
        >>> tflite.open(made.to_bytes())
        LiteFile([], 1 subgraph(s), 1 ops)
    """
    file = LiteFile()
    if isinstance(source, bytes | bytearray | memoryview):
        read_into(file, bytes(source))
        return file
    path = Path(source)
    with path.open("rb") as opened:
        # An empty file cannot be mapped.
        size = os.fstat(opened.fileno()).st_size
        blob: Any = (
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        )
    read_into(file, blob)
    file.path = path
    return file
