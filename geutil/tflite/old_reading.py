"""TFLite files read whole: subgraphs, tensors, ops, signatures, quantization.

Flatbuffers are read where they lie, and nothing in them says whether they are intact:
an offset that leads anywhere is followed. So each list is counted against the size of
the file, and each index against the list that it is for.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from geutil.tflite.run import is_tflite, kind_names, schema, type_names

T = TypeVar("T")

CUSTOM, FLEX = "CUSTOM", "Flex"
_FAULTS = (
    # Of struct and numpy where an offset leads out of the file; of text; of unions.
    struct.error,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


class BrokenFileError(ValueError):
    """Bytes that are no whole TFLite file."""


@dataclass(frozen=True)
class Quantization:
    """How integers stand for numbers: `scale * (integer - zero_point)`.

    Attributes:
        scales: the size of a step; one, or one for each index along `axis`.
        zero_points: the integer that stands for 0; one for each scale.
        axis: the dimension along which scales differ.
        block: how many values in a row share a scale; 0 where no blocks are.
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...]
    axis: int = 0
    block: int = 0

    def __str__(self) -> str:
        if self.block:
            return f"blocks of {self.block} along axis {self.axis}"
        if len(self.scales) == 1:
            return f"scale {self.scales[0]:.6g}, zero point {self.zero_points[0]}"
        zero = f", zero point {self.zero_points[0]}" if self._one_zero() else ""
        return (
            f"{len(self.scales)} scales along axis {self.axis}, "
            f"{min(self.scales):.4g} to {max(self.scales):.4g}{zero}"
        )

    def _one_zero(self) -> bool:
        return len(set(self.zero_points)) == 1


@dataclass(frozen=True)
class LiteTensor:
    """A tensor of a TFLite file.

    Attributes:
        name: its name, that of ops it was converted from, joined by ";".
        dtype: the name of its type, such as "int8".
        shape: its size in each dimension, None where it is free; None as a whole if not
            even the rank is known.
        quantization: what its integers stand for; None if they stand for themselves.
        buffer: the number of the buffer with its values.
        stored_bytes: what its values take in the file; 0 of what is computed.
        is_variable: whether it keeps its values from one run to the next.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    quantization: Quantization | None
    buffer: int
    stored_bytes: int
    is_variable: bool

    def __str__(self) -> str:
        sizes = "..." if self.shape is None else ", ".join(map(_size, self.shape))
        return f"{self.dtype} [{sizes}]"


@dataclass(frozen=True)
class LiteOp:
    """An op of a TFLite file.

    Attributes:
        type: its type, such as "CONV_2D"; of custom ops the name, such as "FlexInv".
        inputs: the places of the tensors that it reads; -1 of those left out.
        outputs: the places of those that it makes.
        options: its options by name, as the schema has them.
        is_custom: whether TFLite has no kernel of its own for it.
        subgraphs: the places of the subgraphs that it runs.
        custom_options: of a custom op the options, as its kernel reads them.
    """

    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Mapping[str, Any]
    is_custom: bool
    subgraphs: tuple[int, ...]
    custom_options: bytes = b""


@dataclass(frozen=True)
class LiteGraph:
    """A subgraph of a TFLite file: the network, or a branch or body of a loop.

    Attributes:
        name: its name; "" if it has none.
        tensors: its tensors.
        inputs: the places of the tensors that it is given.
        outputs: the places of those that it gives.
        ops: its ops in the order in which they run.
    """

    name: str
    tensors: tuple[LiteTensor, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[LiteOp, ...]


@dataclass(frozen=True)
class LiteSignature:
    """A signature of a TFLite file.

    Attributes:
        key: its name.
        graph: the place of its subgraph.
        inputs: the places of the tensors that it is given, by name.
        outputs: the places of those that it gives, by name.
    """

    key: str
    graph: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(frozen=True)
class LiteFile:
    """A TFLite file.

    Attributes:
        description: what the converter says of itself.
        runtime: the oldest runtime that has all its kernels; "" if it is not said.
        graphs: its subgraphs, the first of them the main one.
        signatures: its signatures.
        metadata: the names of what else is stored in it.
        bytes_total: its size.
    """

    description: str
    runtime: str
    graphs: tuple[LiteGraph, ...]
    signatures: tuple[LiteSignature, ...]
    metadata: tuple[str, ...]
    bytes_total: int


def read(blob: bytes) -> LiteFile:
    """Return what is in a TFLite file; of weights the sizes alone.

    Args:
        blob: the file.

    Raises:
        BrokenFileError: it is no TFLite file, or is not whole.

    Cost: linear in tensors, ops and scales; some 50 us for each tensor and op.
    """
    if not is_tflite(blob):
        raise BrokenFileError("these bytes are no TFLite file")
    try:
        return _Reader(bytes(blob)).file()
    except BrokenFileError:
        raise
    except _FAULTS as error:
        said = str(error) or type(error).__name__
        raise BrokenFileError(
            f"the TFLite file is cut off or damaged: {said}"
        ) from error


class _Reader:
    """Reads one file, and counts what it reads."""

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        # Of an intact file, all lists together have fewer entries than it has bytes.
        self._left = len(blob)
        self._model = schema().Model.GetRootAs(blob, 0)
        self._buffers = tuple(self._each(self._model, "Buffers", self._stored))
        codes = [*self._each(self._model, "OperatorCodes", lambda code: code)]
        self._codes = [_kind(code) for code in codes]

    def file(self) -> LiteFile:
        """Return the file."""
        model = self._model
        count = self._counted(model.SubgraphsLength())
        graphs = tuple(self._graph(model.Subgraphs(i), count) for i in range(count))
        if not graphs:
            raise BrokenFileError("the TFLite file holds no subgraph")
        entries = dict(
            self._each(
                model, "Metadata", lambda entry: (_text(entry.Name()), entry.Buffer())
            )
        )
        return LiteFile(
            _text(model.Description()),
            self._runtime(entries),
            graphs,
            tuple(
                self._each(
                    model, "SignatureDefs", lambda one: self._signature(one, graphs)
                )
            ),
            tuple(entries),
            len(self._blob),
        )

    def _counted(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise BrokenFileError(
                "the TFLite file is damaged: its lists are longer than the file"
            )
        return count

    def _each(self, owner: Any, field: str, of: Callable[[Any], T]) -> Iterator[T]:
        """Yield what a function makes of each entry of a list."""
        get = getattr(owner, field)
        for i in range(self._counted(getattr(owner, f"{field}Length")())):
            yield of(get(i))

    def _numbers(self, owner: Any, field: str) -> tuple[Any, ...]:
        """Return a list of numbers."""
        if not self._counted(getattr(owner, f"{field}Length")()):
            return ()
        return tuple(getattr(owner, f"{field}AsNumpy")().tolist())

    def _stored(self, buffer: Any) -> tuple[int, int]:
        """Return the place in the file of a buffer's bytes, and how many there are."""
        size = buffer.DataLength()
        start = len(self._blob) - size
        # Those of files above 2 GB lie behind the flatbuffer.
        if hasattr(buffer, "Offset") and buffer.Offset() > 1:
            start, size = buffer.Offset(), buffer.Size()
        elif size:
            table = buffer._tab
            start = table.Vector(table.Offset(4))
        if start < 0 or start + size > len(self._blob):
            raise BrokenFileError(
                f"the TFLite file is cut off: weights of {size:,} bytes end behind its "
                f"{len(self._blob):,}"
            )
        return start, size

    def _graph(self, graph: Any, graphs: int) -> LiteGraph:
        tensors = tuple(self._each(graph, "Tensors", self._tensor))
        ends = (self._numbers(graph, "Inputs"), self._numbers(graph, "Outputs"))
        ops = tuple(self._each(graph, "Operators", lambda op: self._op(op, graphs)))
        for places in (*ends, *(op.inputs for op in ops), *(op.outputs for op in ops)):
            for place in places:
                _checked(place, tensors, "tensor", lowest=-1)
        return LiteGraph(_text(graph.Name()), tensors, *ends, ops)

    def _tensor(self, tensor: Any) -> LiteTensor:
        sizes = self._numbers(tensor, "Shape")
        signature = self._numbers(tensor, "ShapeSignature") or sizes
        shape = tuple(None if size < 0 else size for size in signature)
        dtype = type_names().get(tensor.Type(), "").lower()
        if not dtype:
            raise BrokenFileError(
                f"the TFLite file has a tensor of type {tensor.Type()}, which this "
                "schema lacks: it is damaged, or newer than the runtime installed"
            )
        # Files of old do not say so of tensors without dimensions that are known.
        ranked = not hasattr(tensor, "HasRank") or tensor.HasRank() or bool(shape)
        buffer = tensor.Buffer()
        _, stored = _checked(buffer, self._buffers, "buffer")
        return LiteTensor(
            _text(tensor.Name()),
            dtype,
            shape if ranked or stored else (),
            self._quantization(tensor.Quantization()),
            buffer,
            stored,
            bool(tensor.IsVariable()),
        )

    def _quantization(self, entry: Any) -> Quantization | None:
        """Return how a tensor is quantized; blocks have their scales elsewhere."""
        if entry is None:
            return None
        axis = entry.QuantizedDimension()
        kinds = schema().QuantizationDetails
        if entry.DetailsType() == getattr(kinds, "BlockwiseQuantization", -1):
            blocks = schema().BlockwiseQuantization()
            details = entry.Details()
            blocks.Init(details.Bytes, details.Pos)
            return Quantization((), (), axis, int(blocks.BlockSize()))
        scales = self._numbers(entry, "Scale")
        if not scales:
            return None
        zeros = self._numbers(entry, "ZeroPoint") or (0,)
        if len(zeros) not in (1, len(scales)):
            raise BrokenFileError(
                f"the TFLite file is damaged: {len(scales)} scales with {len(zeros)} "
                "zero points"
            )
        return Quantization(scales, zeros * (len(scales) // len(zeros)), axis)

    def _op(self, op: Any, graphs: int) -> LiteOp:
        """Return an op; what its options call are subgraphs, and -1 is none."""
        kind, is_custom = _checked(op.OpcodeIndex(), self._codes, "op code")
        options = _options(op)
        called = tuple(
            value
            for name, value in options.items()
            if name.lower().endswith("subgraphindex") and isinstance(value, int)
        )
        for place in called:
            _checked(place, range(graphs), "subgraph", lowest=-1)
        return LiteOp(
            kind,
            self._numbers(op, "Inputs"),
            self._numbers(op, "Outputs"),
            options,
            is_custom,
            tuple(place for place in called if place >= 0),
            bytes(self._numbers(op, "CustomOptions")) if is_custom else b"",
        )

    def _signature(self, entry: Any, graphs: tuple[LiteGraph, ...]) -> LiteSignature:
        place = entry.SubgraphIndex()
        graph = _checked(place, graphs, "subgraph")

        def end(tensor: Any) -> tuple[str, int]:
            _checked(tensor.TensorIndex(), graph.tensors, "tensor")
            return _text(tensor.Name()), tensor.TensorIndex()

        return LiteSignature(
            _text(entry.SignatureKey()),
            place,
            dict(self._each(entry, "Inputs", end)),
            dict(self._each(entry, "Outputs", end)),
        )

    def _runtime(self, metadata: Mapping[str, int]) -> str:
        place = metadata.get("min_runtime_version")
        if place is None:
            return ""
        start, size = _checked(place, self._buffers, "buffer")
        return self._blob[start : start + size].rstrip(b"\0").decode("ascii")


def _checked(place: int, entries: Any, what: str, *, lowest: int = 0) -> Any:
    """Return the entry at a place; None for places that mean none."""
    if not lowest <= place < len(entries):
        raise BrokenFileError(
            f"the TFLite file is damaged: it names {what} {place}, and has "
            f"{len(entries)}"
        )
    return entries[place] if place >= 0 else None


def _text(value: bytes | None) -> str:
    return "" if value is None else bytes(value).decode("utf-8")


def _size(size: int | None) -> str:
    return "?" if size is None else str(size)


def _kind(code: Any) -> tuple[str, bool]:
    """Return the type of an op code, and whether it is custom."""
    # Codes above 127 do not fit the field of old, which then holds 127.
    number = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    kind = kind_names().get(number)
    if kind is None:
        raise BrokenFileError(
            f"the TFLite file has an op of number {number}, which this schema lacks: "
            "it is damaged, or newer than the runtime installed"
        )
    return (_text(code.CustomCode()) or kind, True) if kind == CUSTOM else (kind, False)


def _options(op: Any) -> dict[str, Any]:
    """Return the options of an op as plain values."""
    options: dict[str, Any] = {}
    for field in ("BuiltinOptions", "BuiltinOptions2"):
        union = getattr(schema(), field, None)
        kind = getattr(op, f"{field}Type", int)()
        table = getattr(op, field, lambda: None)()
        if union is None or not kind or table is None:
            continue
        name = next((n for n, value in vars(union).items() if value == kind), None)
        if name is None:
            raise BrokenFileError(
                f"the TFLite file has options of number {kind}, which this schema "
                "lacks: it is damaged, or newer than the runtime installed"
            )
        read_options = getattr(schema(), f"{name}T").InitFromObj
        own = getattr(schema(), name)()
        own.Init(table.Bytes, table.Pos)
        options.update(
            (key, _option(key, value))
            for key, value in vars(read_options(own)).items()
            if value is not None
        )
    return options


_ENUMERATIONS = {
    "fusedActivationFunction": "ActivationFunctionType",
    "inDataType": "TensorType",
    "outDataType": "TensorType",
    "outputType": "TensorType",
    "padding": "Padding",
    "quantizedBiasType": "TensorType",
}


def _option(key: str, value: Any) -> Any:
    """Return the value of an option, a word where the schema has one."""
    if key in _ENUMERATIONS and isinstance(value, int):
        words = vars(getattr(schema(), _ENUMERATIONS[key]))
        return next((word for word, n in words.items() if n == value), value)
    return value.tolist() if hasattr(value, "tolist") else value
