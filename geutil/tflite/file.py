"""TFLite files: opened, edited, and saved, all or nothing.

Weights stay in the file or its memory map until they are read, or the file is written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from geutil import lazy
from geutil.formats import written_atomically
from geutil.tflite import (
    composition,
    declarations,
    excerpts,
    input_shapes,
    lookups,
    numbers,
    op_names,
    surgery,
    type_changes,
    verify,
)
from geutil.tflite.arguments import checked
from geutil.tflite.flatbuffer import Writer, read_into
from geutil.tflite.kinds import runtime_needed
from geutil.tflite.parts import Contents


class LiteFile(Contents):
    """A TFLite file that can be edited.

    An edit is planned, checked, then applied; one that is refused changes nothing. The
    argument `graph` is a subgraph, its name or its index; the main one if None. Unless
    stated otherwise, the cost is linear in the ops and tensors of the subgraph.

    Attributes:
        graphs: its subgraphs, the first of them the main one.
        signatures: its signatures by their names.
        metadata: the bytes of its other entries, by name.
        description: the converter's description of itself.
        bytes_total: the size of the file that was read.
        path: the path that it was read from; None for bytes.
    """

    path: Path | None = None

    @property
    def runtime(self) -> str:
        """The oldest runtime that has all its kernels; "" if the file has no record.

        It is the one that the converter wrote, until edits add a newer kernel.
        """
        return runtime_needed(self)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            TFLiteError: it has fields that the schema lacks, or is too large for a
                flatbuffer in memory; see `save`.

        Cost: linear in the file's tables, plus one copy of the weights.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> m.set_outputs([m.add_input("x", "float32", [4])])
            >>> m.to_bytes()[4:8]
            b'TFL3'
        """
        return b"".join(Writer(self).pieces())

    @checked
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the file atomically.

        Args:
            path: where to write it; it may be the file that this one was read from.
            overwrite: whether to replace an existing file.

        Returns:
            The path.

        Raises:
            TFLiteError: it has fields that the schema lacks.
            ModelError: `path` exists and `overwrite` is false, or it is a directory; or
                the directory to write to is missing.
            OSError: the disk is full, or writing is forbidden.

        Cost: linear in the file's tables; the weights are copied from file to file.

        Example:
            >>> import os, tempfile
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> m.set_outputs([m.add_input("x", "float32", [4])])
            >>> m.save(os.path.join(tempfile.mkdtemp(), "m.tflite")).name
            'm.tflite'
        """
        target = Path(path)
        pieces = Writer(self).pieces()
        with (
            written_atomically(target, overwrite=overwrite) as new,
            new.open("wb") as opened,
        ):
            opened.writelines(pieces)
        return target

    # The jobs of the editor: each is a function of the module that does it.
    tensor = lookups.tensor
    op = lookups.op
    find = lookups.find
    find_tensors = lookups.find_tensors
    ancestors = lookups.ancestors
    descendants = lookups.descendants
    boundary = lookups.boundary
    add_graph = declarations.add_graph
    add_input = declarations.add_input
    add_constant = declarations.add_constant
    add = declarations.add
    set_outputs = declarations.set_outputs
    add_signature = declarations.add_signature
    cut = excerpts.cut
    split = excerpts.split
    clusters = excerpts.clusters
    keep_signatures = excerpts.keep_signatures
    keep_subgraphs = excerpts.keep_subgraphs
    rename = op_names.rename
    reroute = surgery.reroute
    swap = surgery.swap
    bypass = surgery.bypass
    remove = surgery.remove
    insert = surgery.insert
    replace = surgery.replace
    expose = declarations.expose
    strip = surgery.strip
    verify = verify.verify
    set_batch_size = input_shapes.set_batch_size
    set_input_shape = input_shapes.set_input_shape
    set_quantization = numbers.set_quantization
    set_io_type = type_changes.set_io_type
    dequantize = type_changes.dequantize
    append = composition.append
    prepend = composition.prepend
    splice = composition.splice
    merge = composition.merge

    @property
    def constants(self) -> numbers.Constants:
        """The constants of the file by the names of their tensors, as real values.

        They are read and written as floats, and stored with the type and scale of the
        file; values out of range are clipped, with a warning, or with a report of
        `constants.write`.

        Example:
            >>> import numpy as np
            >>> from geutil import tflite
            >>> m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
            >>> _ = m.add_input("x", "int8", [3])
            >>> w = m.add_constant("w", np.int8([-2, 0, 4]), quantization=steps)
            >>> m.constants["w"]
            array([-1.,  0.,  2.], dtype=float32)
            >>> print(m.constants.write("w", np.array([0.3, 1.0, 99.0])))
            1 tensor changed; clipped: 1 of 'w'
            >>> w.value
            array([  1,   2, 127], dtype=int8)
        """
        return numbers.Constants(self.graphs)

    @checked
    def to_model(self, *, signature: str | None = None) -> Any:
        """Return the model of the file, which can be trained and converted again.

        See `geutil.model.from_tflite`, which also accepts paths.

        Args:
            signature: the signature to return; `serving_default` or the only one if
                None.

        Returns:
            The `geutil.model.Model` of one signature; the others are in its
            `signatures`.

        Raises:
            ModelError: an op of the file has no TensorFlow equivalent, such as an
                unknown custom op; or there is no such signature.

        Cost: linear in ops, and in the bytes of the weights; it imports TensorFlow.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("NEG", [x], name="y")])
            >>> m.to_model().run(x=[1.0, 2.0, 3.0, 4.0])["y"].tolist()
            [-1.0, -2.0, -3.0, -4.0]
        """
        return lazy.provided("model of a TFLite file")(self, signature=signature)

    def __repr__(self) -> str:
        ops = sum(len(graph.ops) for graph in self.graphs)
        return (
            f"LiteFile({list(self.signatures)}, {len(self.graphs)} subgraph(s), "
            f"{ops} ops)"
        )


@checked
def open(source: str | os.PathLike[str] | bytes) -> LiteFile:
    """Open a TFLite file to inspect and edit it.

    Args:
        source: the path of a file, which is memory-mapped, or the bytes of one.

    Raises:
        BrokenFileError: it is not a TFLite file, or is damaged.
        OSError: it cannot be read.

    Cost: linear in tensors, ops and scales; about 50 us for each tensor and op. Weights
        are read on demand.

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
