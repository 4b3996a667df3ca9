"""TFLite files: opened, and saved, all or nothing.

Weights stay where they are, in the file or in its mapping to memory, until they are
asked for, or the file is written.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from geutil.tflite.parts import Contents, LiteGraph, LiteTensor, Quantization
from geutil.tflite.reading import read_into
from geutil.tflite.writing import Writer
from geutil.writing import written_atomically

if TYPE_CHECKING:
    from geutil.tflite.numbers import Constants, Stored

Types = str | Mapping[str, str] | None
"""The type of all inputs or outputs that are quantized, or by name those of some."""
Named = LiteTensor | str
"""A tensor, or the name of one."""


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

    # Numbers and shapes.

    def set_batch_size(
        self,
        size: int | None,
        *,
        inputs: Sequence[Named] | None = None,
        graph: LiteGraph | None = None,
    ) -> None:
        """Set the batch size: the first size of the inputs, and all that follows of it.

        Shapes follow by rules for each kind of op. Constants that hold the batch size,
        such as the targets of Reshapes, are rewritten.

        Args:
            size: the new batch size; None is any.
            inputs: the inputs whose first dimension is the batch; all but scalars if
                None. An input is a tensor, its name, or its name in a signature.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: an op computes along the batch, or a constant could hold the
                batch size by chance, or the shapes of an op cannot be told. The file
                is as it was.

        Cost: linear in ops and tensors.

        Example:
            >>> import numpy as np
            >>> from geutil import tflite
            >>> x = tflite.LiteTensor("x", "float32", [1, 2, 2])
            >>> y = tflite.LiteTensor("y", "float32", [1, 4])
            >>> to = tflite.LiteTensor("to", "int32", [2])
            >>> to.value = np.array([1, 4], np.int32)
            >>> made, graph = tflite.LiteFile(), tflite.LiteGraph("main")
            >>> made.graphs.append(graph)
            >>> graph.inputs, graph.outputs = (x,), (y,)
            >>> _ = graph.add_op(tflite.LiteOp("RESHAPE", [x, to], [y]))
            >>> made.set_batch_size(8)
            >>> graph.outputs, graph.ops[0].inputs[1].value.tolist()
            ((<LiteTensor 'y' float32 [8, 4]>,), [8, 4])
        """
        from geutil.tflite import finding, resizing

        graph = finding.graph_of(self, graph)
        named = [t for t in graph.inputs if t.shape] if inputs is None else inputs
        ends = [finding.input_of(self, graph, one) for one in named]
        resizing.set_batch_size(self, graph, size, ends)

    def set_input_shape(
        self,
        name: Named,
        shape: Sequence[int | None],
        *,
        resize: Literal["scale", "keep"] | None = None,
        graph: LiteGraph | None = None,
    ) -> None:
        """Set the shape of an input, and all that follows of it.

        Args:
            name: the input: a tensor, its name, or its name in a signature.
            shape: its new shape, of the same rank; None is a size that is free.
            resize: where the file resizes an image to a constant size: whether this is
                scaled with the input, or kept. If None, such a file is refused.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: see `set_batch_size`; or weights do not fit the new shape.

        Cost: linear in ops and tensors.

        Example:
            >>> from geutil import tflite
            >>> x, y = (tflite.LiteTensor(n, "float32", [1, 8, 8, 3]) for n in "xy")
            >>> made, graph = tflite.LiteFile(), tflite.LiteGraph("main")
            >>> made.graphs.append(graph)
            >>> graph.inputs, graph.outputs = (x,), (y,)
            >>> _ = graph.add_op(tflite.LiteOp("RELU", [x], [y]))
            >>> made.set_input_shape("x", [1, 32, 32, 3])
            >>> graph.outputs
            (<LiteTensor 'y' float32 [1, 32, 32, 3]>,)
        """
        from geutil.tflite import finding, resizing

        graph = finding.graph_of(self, graph)
        end = finding.input_of(self, graph, name)
        resizing.set_input_shape(self, graph, end, shape, resize)

    @property
    def constants(self) -> Constants:
        """The constants of the file by the names of their tensors, as numbers.

        They are read in float, and written in float and stored in the type and steps of
        the file; numbers out of their range are clipped, with a warning, or with a
        report of `constants.write`.

        Example:
            >>> import numpy as np
            >>> from geutil import tflite
            >>> made, graph = tflite.LiteFile(), tflite.LiteGraph("main")
            >>> made.graphs.append(graph)
            >>> w = tflite.LiteTensor("w", "int8", [3], tflite.Quantization((0.5,)))
            >>> w.value = np.array([-2, 0, 4], np.int8)
            >>> _ = graph.add_tensor(w)
            >>> made.constants["w"]
            array([-1.,  0.,  2.], dtype=float32)
            >>> print(made.constants.write("w", np.array([0.3, 1.0, 99.0])))
            1 tensor changed; clipped: 1 of 'w'
            >>> w.value
            array([  1,   2, 127], dtype=int8)
        """
        from geutil.tflite.numbers import Constants

        return Constants(self, self.graphs)

    def set_quantization(
        self,
        tensor: Named,
        scale: float | Sequence[float],
        zero_point: int | Sequence[int] = 0,
        *,
        graph: LiteGraph | None = None,
    ) -> Stored:
        """Set the scale and zero point of a tensor, and of all that has to follow.

        Tensors that kernels such as those of RESHAPE or CONCATENATION tie to it get the
        same ones; constants among them are stored in the new steps; biases get the
        scale of the input times that of the weights.

        Args:
            tensor: the tensor, or its name: of activations, or weights.
            scale: the size of a step; for weights with scales for each channel, these.
            zero_point: the integer that stands for 0.
            graph: the subgraph of the tensor; the main one if None.

        Returns:
            A report of the tensors that changed, and the numbers that were clipped.

        Raises:
            TFLiteError: it has no steps, or cannot have these: a kernel has its own
                built in, or a bias does not fit. The file is as it was.

        Cost: linear in ops and in the constants that change.

        Example:
            >>> from geutil import tflite
            >>> made, graph = tflite.LiteFile(), tflite.LiteGraph("main")
            >>> made.graphs.append(graph)
            >>> steps = tflite.Quantization((0.5,))
            >>> x, y = (tflite.LiteTensor(n, "int8", [4], steps) for n in "xy")
            >>> graph.inputs, graph.outputs = (x,), (y,)
            >>> _ = graph.add_op(tflite.LiteOp("RESHAPE", [x], [y]))
            >>> print(made.set_quantization("x", 0.25, -3))
            2 tensors changed; none clipped
            >>> print(y.quantization)
            scale 0.25, zero point -3
        """
        from geutil.tflite import finding, numbers

        found = finding.tensor_of(finding.graph_of(self, graph), tensor)
        steps = numbers.new_steps(found, scale, zero_point)
        return numbers.set_quantization(self, found, steps)

    def set_io_type(
        self,
        inputs: Types = None,
        outputs: Types = None,
        *,
        steps: Mapping[str, Quantization] | None = None,
        graph: LiteGraph | None = None,
    ) -> None:
        """Set the types of inputs and outputs: "int8", "uint8", "int16" or "float32".

        Kernels stay as they are: a QUANTIZE or DEQUANTIZE op at the end changes the
        type, and one that is not needed any more goes.

        Args:
            inputs: the type of all inputs that are quantized, or by name those of some.
                Names are those of the signature, if the subgraph has one.
            outputs: the same of outputs.
            steps: by name, the scales and zero points of ends that are float in the
                file's kernels, and are to become integers.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: there is no such end or type, or it cannot have that. The file
                is as it was.

        Cost: linear in the subgraph.

        Example:
            >>> from geutil import tflite
            >>> made, graph = tflite.LiteFile(), tflite.LiteGraph("main")
            >>> made.graphs.append(graph)
            >>> steps = tflite.Quantization((0.5,))
            >>> x, y = (tflite.LiteTensor(n, "int8", [4], steps) for n in "xy")
            >>> graph.inputs, graph.outputs = (x,), (y,)
            >>> _ = graph.add_op(tflite.LiteOp("ABS", [x], [y]))
            >>> made.set_io_type("float32", "uint8")
            >>> [op.kind for op in graph.ops], [t.dtype for t in graph.outputs]
            (['QUANTIZE', 'ABS', 'QUANTIZE'], ['uint8'])
        """
        from geutil.tflite import ends, finding

        found = finding.graph_of(self, graph)
        known = dict(steps or {})
        taken = ends.ends_of(self, found, "input", inputs, known)
        given = ends.ends_of(self, found, "output", outputs, known)
        ends.set_types(self, found, [*taken, *given])

    def dequantize(self) -> Stored:
        """Turn integers, and float16 weights, into float32: weights, kernels and ends.

        Activations that are fused into kernels stay; QUANTIZE and DEQUANTIZE ops go.

        Returns:
            A report of the tensors that changed.

        Raises:
            TFLiteError: a custom op reads or makes integers. The file is as it was.

        Cost: linear in ops and weights, which are four times as large.

        Example:
            >>> from geutil import tflite
            >>> made, graph = tflite.LiteFile(), tflite.LiteGraph("main")
            >>> made.graphs.append(graph)
            >>> steps = tflite.Quantization((0.5,))
            >>> x, y = (tflite.LiteTensor(n, "int8", [4], steps) for n in "xy")
            >>> graph.inputs, graph.outputs = (x,), (y,)
            >>> _ = graph.add_op(tflite.LiteOp("TANH", [x], [y], version=2))
            >>> print(made.dequantize())
            2 tensors changed; none clipped
            >>> graph.inputs, graph.ops[0].version
            ((<LiteTensor 'x' float32 [4]>,), 1)
        """
        from geutil.tflite import floating

        return floating.dequantize(self)

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
