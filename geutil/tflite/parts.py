"""The parts of a TFLite file as objects with identity: subgraphs, ops and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from geutil.errors import ArgumentTypeError, TFLiteError
from geutil.tflite.arguments import check_numbers, check_text, checked
from geutil.tflite.schema import DTYPES, PACKED_BITS, options_table, schema

Array = np.ndarray[Any, Any]
T = TypeVar("T")

FLEX = "Flex"
"""The names of custom ops that are ops of TensorFlow begin so."""


@dataclass(frozen=True)
class Quantization:
    """The map from integers to numbers: `scale * (integer - zero_point)`.

    Attributes:
        scales: the scales; one, or one for each index along `axis`.
        zero_points: the integers that represent 0; one for each scale.
        axis: the dimension of the scales.
        block: the number of consecutive values that share a scale; 0 without blocks.
        block_scales: the tensor with the scales of blocks.
        block_zeros: the tensor with their zero points; None if they are 0.
    """

    scales: tuple[float, ...]
    zero_points: tuple[int, ...] = (0,)
    axis: int = 0
    block: int = 0
    block_scales: LiteTensor | None = None
    block_zeros: LiteTensor | None = None

    @classmethod
    @checked
    def of(cls, scales: Array | float, axis: int = 0, zero: int = 0) -> Quantization:
        """Return a quantization with one scale, or one for each index along an axis.

        Args:
            scales: the scales, which are stored in float32.
            axis: the axis, if there are several scales.
            zero: the integer that represents 0.
        """
        sizes = np.asarray(scales, np.float32).reshape(-1)
        several = sizes.size > 1
        return cls((*sizes.tolist(),), (zero,) * sizes.size, axis if several else 0)

    @property
    def sizes(self) -> Array:
        """Its scales, as the file stores them."""
        return np.asarray(self.scales, np.float32)

    def __str__(self) -> str:
        if self.block:
            return f"blocks of {self.block} along axis {self.axis}"
        if not self.scales or not self.zero_points:
            return "no steps"
        if len(self.scales) == 1:
            return f"scale {self.scales[0]:.6g}, zero point {self.zero_points[0]}"
        is_one = len({*self.zero_points}) == 1
        zero = f", zero point {self.zero_points[0]}" if is_one else ""
        return (
            f"{len(self.scales)} scales along axis {self.axis}, "
            f"{min(self.scales):.4g} to {max(self.scales):.4g}{zero}"
        )

    def __post_init__(self) -> None:
        for name, kind in (("scales", float), ("zero_points", int)):
            check_numbers(getattr(self, name), kind, f"{name}= of steps")

    def along(self, rank: int) -> tuple[Array, Array]:
        """Return scales and zero points that broadcast over values of a given rank."""
        shape = [1] * rank
        if len(self.scales) > 1:
            shape[self.axis] = -1
        zeros = np.asarray(self.zero_points[: len(self.scales)], np.int64)
        is_one = len(self.zero_points) <= 1
        return self.sizes.reshape(shape), zeros.reshape([1] * rank if is_one else shape)


class _Text:
    """A text of a file, which is checked when it is set."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __get__(self, owner: Any, kind: Any = None) -> str:
        text: str = getattr(owner, "text", "")
        return text

    def __set__(self, owner: Any, value: str) -> None:
        owner.text = check_text(value, f"the name of a {self._owner}")


class Buffer:
    """Bytes of a file: of constants, which several tensors can share, or metadata."""

    __slots__ = ("data",)

    def __init__(self, data: Array | None = None) -> None:
        self.data = data

    @property
    def size(self) -> int:
        """The bytes that it takes in the file."""
        return 0 if self.data is None else int(self.data.size)


LARGEST_SIZE = 2**31 - 1
"""The schema has sizes of 32 bits."""
Sizes = Sequence[int | None] | None
"""A shape, with None for sizes that are free; None for an unknown rank."""


def changed_sizes(old: Sizes, new: Sizes) -> list[int]:
    """Return the dimensions whose sizes are known and differ; none of other ranks."""
    if old is None or new is None or len(old) != len(new):
        return []
    pairs = enumerate(zip(old, new, strict=True))
    return [i for i, (a, b) in pairs if None not in (a, b) and a != b]


class LiteTensor:
    """A tensor of a subgraph of a TFLite file; compared by identity.

    Attributes:
        name: its name: those of the ops it was converted from, joined by ";".
        dtype: the name of its type, such as "int8".
        quantization: the scale and zero point of its integers; None if it is not
            quantized.
        buffer: the buffer of its values, which is empty for computed tensors.
        is_variable: whether it keeps its values from one run to the next.
    """

    __slots__ = (
        "as_read",
        "buffer",
        "dtype",
        "is_variable",
        "makers",
        "quantization",
        "readers",
        "record",
        "text",
    )
    name = _Text("tensor")

    @checked
    def __init__(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int | None] | None,
        quantization: Quantization | None = None,
        buffer: Buffer | None = None,
    ) -> None:
        self.record = schema().TensorT()
        self.readers: dict[LiteOp, int] = {}
        self.makers: dict[LiteOp, int] = {}
        self.name, self.dtype, self.shape = name, dtype, shape
        self.quantization = quantization
        # Of a tensor that was read, its steps as the record has them.
        self.as_read: Quantization | None = None
        self.buffer = buffer or Buffer()
        self.is_variable = False

    @classmethod
    def read(cls, record: Any, dtype: str, buffer: Buffer) -> LiteTensor:
        """Return the tensor of a schema record; its quantization is read later."""
        tensor = cls.__new__(cls)
        tensor.record, tensor.dtype, tensor.buffer = record, dtype, buffer
        tensor.name = text(record.name)
        tensor.is_variable = bool(record.isVariable)
        tensor.readers, tensor.makers = {}, {}
        tensor.quantization = tensor.as_read = None
        return tensor

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """Its size in each dimension, None if dynamic; None for an unknown rank."""
        sizes = self.record.shapeSignature
        if sizes is None or not len(sizes):
            sizes = self.record.shape
        known = () if sizes is None else tuple(int(size) for size in sizes)
        return tuple(None if size < 0 else size for size in known)

    @shape.setter
    def shape(self, shape: Sequence[int | None] | None) -> None:
        """Set the shape; None as a size is free, as a whole an unknown rank."""
        sizes = () if shape is None else tuple(shape)
        for size in sizes:
            is_whole = isinstance(size, int | np.integer)
            if size is not None and not (is_whole and 0 <= size <= LARGEST_SIZE):
                raise TFLiteError(
                    f"tensor {self.label} cannot have the shape {[*sizes]}: sizes are "
                    "whole numbers from 0 to 2^31 - 1, and None where they are free"
                )
        free = any(size is None for size in sizes)
        signature = [-1 if size is None else size for size in sizes]
        # As the converter does, the shape has 1 where the signature leaves it free.
        self.record.shape = np.asarray(
            [1 if size is None else size for size in sizes], np.int32
        )
        self.record.shapeSignature = np.asarray(signature, np.int32) if free else None
        self.record.hasRank = shape is not None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape before any input is resized: 1 for a dynamic size."""
        sizes = self.record.shape
        return () if sizes is None else tuple(int(size) for size in sizes)

    @property
    def stored_bytes(self) -> int:
        """The size in bytes of its values in the file; 0 for computed tensors."""
        return self.buffer.size

    @property
    def producer(self) -> LiteOp | None:
        """The op that computes it; None for constants and for inputs of a subgraph."""
        return next(iter(self.makers), None)

    @property
    def consumers(self) -> tuple[LiteOp, ...]:
        """The ops that read it, each once."""
        return tuple(self.readers)

    @property
    def is_sparse(self) -> bool:
        """True if the file leaves out zeros among its values."""
        return self.record.sparsity is not None

    @property
    def value(self) -> Array | None:
        """The array that the file holds; None for computed tensors, and for strings.

        Integers of 2 and 4 bits are returned as int8; sparse tensors have None, since
        their omitted zeros are not filled in. The array is read-only.

        Raises:
            TFLiteError: the number of bytes does not fit its shape.
        """
        data = self.buffer.data
        if data is None or not data.size or self.is_sparse:
            return None
        if self.dtype not in DTYPES and self.dtype not in PACKED_BITS:
            return None
        try:
            if self.dtype in DTYPES:
                return data.view(DTYPES[self.dtype]).reshape(self.sizes)
            count = int(np.prod(self.sizes, dtype=np.int64))
            return _unpacked_bits(data, self.dtype, count).reshape(self.sizes)
        except ValueError as error:
            raise TFLiteError(
                f"the {data.size:,} bytes of {self!r} do not fit its shape"
            ) from error

    @value.setter
    def value(self, value: Array) -> None:
        # The bytes of a buffer can be those of other tensors, too.
        array = np.asarray(value)
        self.buffer = Buffer(stored(array, self.dtype))
        if array.shape != self.sizes or self.shape is None:
            self.shape = array.shape
        self.record.sparsity = None

    def in_steps(self) -> Quantization:
        """Return the numbers that its integers represent.

        Raises:
            TFLiteError: it is not quantized.
        """
        if self.quantization is None:
            raise TFLiteError(f"tensor {self.label} of the file has no steps")
        return self.quantization

    @checked
    def store(self, value: Array, dtype: str) -> None:
        """Set its values and their type."""
        self.dtype = dtype
        self.value = value

    @checked
    def like(self, dtype: str | None = None) -> LiteTensor:
        """Return a computed tensor of its name and shape, which is not quantized."""
        return LiteTensor(self.name, dtype or self.dtype, self.shape)

    def copied(self) -> LiteTensor:
        """Return a copy with the same buffer, which no op reads or computes."""
        new = LiteTensor.__new__(LiteTensor)
        new.record = copied_record(self.record)
        new.readers, new.makers = {}, {}
        new.name, new.dtype, new.buffer = self.name, self.dtype, self.buffer
        new.quantization, new.as_read = self.quantization, self.as_read
        new.is_variable = self.is_variable
        return new

    def __str__(self) -> str:
        sizes = ("?" if size is None else str(size) for size in self.shape or ())
        return f"{self.dtype} [{', '.join(sizes)}]"

    def __repr__(self) -> str:
        return f"<LiteTensor {self.label} {self}>"

    @property
    def label(self) -> str:
        """Its name for messages; without one, the op that computes or reads it."""
        if self.name:
            return f"'{self.name}'"
        for op in (*self.makers, *self.readers):
            word = "output" if op in self.makers else "input"
            ends: tuple[LiteTensor | None, ...] = getattr(op, f"{word}s")
            place = next(i for i, t in enumerate(ends) if t is self)
            return f"{word} {place} of op {op.label}"
        return "''"


class LiteOp:
    """An op of a TFLite file; compared by identity.

    Attributes:
        kind: its kind, such as "CONV_2D"; the name of a custom op, such as "FlexInv".
        version: the version of its kernel.
        is_custom: whether it has no builtin TFLite kernel.
        options: its options by their names in the schema; an option that refers to a
            subgraph holds that subgraph. Empty for kinds without options.
        custom_options: the options of a custom op, as its kernel reads them.
        intermediates: tensors for the intermediate results of a kernel.
    """

    __slots__ = (
        "_inputs",
        "_outputs",
        "code",
        "custom_options",
        "graph",
        "intermediates",
        "is_custom",
        "kind",
        "options",
        "record",
        "table",
        "version",
    )

    @checked
    def __init__(
        self,
        kind: str,
        inputs: Iterable[LiteTensor | None],
        outputs: Iterable[LiteTensor],
        options: Mapping[str, Any] | None = None,
        *,
        version: int = 1,
        custom_options: bytes | None = None,
    ) -> None:
        self.record = schema().OperatorT()
        self.graph: LiteGraph | None = None
        self.code: Code | None = None
        self.kind, self.version = kind, version
        self.is_custom = custom_options is not None
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        # Options of custom ops are bytes; those of others have a table in the schema.
        self.table = None if self.is_custom else options_table(kind)
        self.options = dict(options or {})
        self.custom_options = custom_options or b""
        self.intermediates: tuple[LiteTensor | None, ...] = ()

    @classmethod
    def read(
        cls,
        code: Code,
        record: Any,
        inputs: tuple[LiteTensor | None, ...],
        outputs: tuple[LiteTensor, ...],
    ) -> LiteOp:
        """Return the op of an operator code and a schema record, without options."""
        op = cls.__new__(cls)
        op.code, op.record, op.is_custom = code, record, code.is_custom
        op.kind, op.version, op.graph = code.kind, code.version, None
        op.inputs, op.outputs, op.intermediates = inputs, outputs, ()
        op.table, op.options, op.custom_options = None, {}, b""
        return op

    @property
    def inputs(self) -> tuple[LiteTensor | None, ...]:
        """The tensors that it reads; None for omitted inputs."""
        return self._inputs

    @inputs.setter
    def inputs(self, tensors: Iterable[LiteTensor | None]) -> None:
        new = tuple(tensors)
        if self.graph is not None:
            self._relink(self.graph, self._inputs, new, "readers")
        self._inputs = new

    @property
    def outputs(self) -> tuple[LiteTensor, ...]:
        """The tensors that it computes."""
        return self._outputs

    @outputs.setter
    def outputs(self, tensors: Iterable[LiteTensor]) -> None:
        new = tuple(tensors)
        if self.graph is not None:
            self._relink(self.graph, self._outputs, new, "makers")
        self._outputs = new

    def _relink(
        self,
        graph: LiteGraph,
        old: Iterable[LiteTensor | None],
        new: Sequence[LiteTensor | None],
        field: str,
    ) -> None:
        _count(self, old, field, -1)
        _count(self, new, field)
        graph.add_tensors(new)

    @checked
    def set_input(self, slot: int, tensor: LiteTensor | None) -> None:
        """Replace the input at an index."""
        self.inputs = self._with(self._inputs, slot, tensor)

    @checked
    def set_output(self, slot: int, tensor: LiteTensor) -> None:
        """Replace the output at an index."""
        self.outputs = self._with(self._outputs, slot, tensor)

    def _with(self, tensors: tuple[T, ...], slot: int, new: T) -> tuple[T, ...]:
        if not 0 <= slot < len(tensors):
            raise TFLiteError(f"{self!r} has {len(tensors)} slots, and no slot {slot}")
        return (*tensors[:slot], new, *tensors[slot + 1 :])

    @property
    def reads(self) -> tuple[LiteTensor, ...]:
        """The tensors that it reads, without omitted inputs."""
        return tuple(t for t in self._inputs if t is not None)

    @property
    def result(self) -> str:
        """The name of its first output; "" if it has none."""
        return self._outputs[0].name if self._outputs else ""

    @property
    def subgraphs(self) -> tuple[LiteGraph, ...]:
        """The subgraphs that it calls."""
        values = (
            item
            for value in self.options.values()
            for item in (value if isinstance(value, list) else (value,))
        )
        return tuple(item for item in values if isinstance(item, LiteGraph))

    @checked
    def copied(
        self, tensors: Mapping[LiteTensor, LiteTensor], kind: str | None = None
    ) -> LiteOp:
        """Return a copy in no subgraph, with tensors replaced by others.

        Args:
            tensors: the tensors to replace and their replacements.
            kind: the kind of the copy; that of this op if None.
        """
        kind = kind or self.kind
        new = LiteOp(
            kind,
            (t and tensors.get(t, t) for t in self._inputs),
            (tensors.get(t, t) for t in self._outputs),
            self.options,
            version=self.version,
        )
        new.record, new.is_custom = copied_record(self.record), self.is_custom
        new.custom_options = self.custom_options
        new.intermediates = tuple(t and tensors.get(t, t) for t in self.intermediates)
        # The code and the table of options are those of the old kind.
        if kind == self.kind:
            new.code, new.table = self.code, self.table
        return new

    def __repr__(self) -> str:
        if not all(t.name for t in self._outputs):
            return f"<LiteOp {self.label}>"
        made = ", ".join(f"'{t.name}'" for t in self._outputs)
        return f"<LiteOp {self.kind} -> {made}>"

    @property
    def label(self) -> str:
        """Its index and its kind, for messages."""
        place = -1 if self.graph is None else self.graph.ops.index(self)
        return self.kind if place < 0 else f"{place} ({self.kind})"


def check_free(op: LiteOp) -> None:
    """Refuse an op that is in a subgraph."""
    if op.graph is not None:
        raise TFLiteError(f"{op!r} is in a subgraph already; pass op.copied({{}})")


def _count(
    op: LiteOp, tensors: Iterable[LiteTensor | None], field: str, step: int = 1
) -> None:
    """Count how often an op reads or makes each tensor."""
    for tensor in tensors:
        if tensor is not None:
            ops = getattr(tensor, field)
            ops[op] = ops.get(op, 0) + step
            if not ops[op]:
                del ops[op]


class LiteGraph:
    """A subgraph of a TFLite file: the network, or a branch or body of a loop.

    Attributes:
        name: its name; "" if it has none.
        inputs: its input tensors.
        outputs: its output tensors.
    """

    __slots__ = ("_listed", "_ops", "_tensors", "inputs", "outputs", "record", "text")
    name = _Text("subgraph")

    def __init__(self, name: str = "") -> None:
        self.record = schema().SubGraphT()
        self._tensors: dict[LiteTensor, None] = {}
        self._ops: list[LiteOp] = []
        self._listed: tuple[LiteOp, ...] | None = None
        self.name = name  # noqa: PLE0237 (a descriptor)
        self.inputs: tuple[LiteTensor, ...] = ()
        self.outputs: tuple[LiteTensor, ...] = ()

    @property
    def ops(self) -> tuple[LiteOp, ...]:
        """Its ops in execution order."""
        if self._listed is None:
            self._listed = tuple(self._ops)
        return self._listed

    @property
    def tensors(self) -> tuple[LiteTensor, ...]:
        """Its tensors, in the order of the file."""
        return tuple(self._tensors)

    def has_tensor(self, tensor: LiteTensor) -> bool:
        """Return whether the subgraph has a tensor."""
        return tensor in self._tensors

    @checked
    def read_tensors(self, tensors: Iterable[LiteTensor]) -> None:
        """Set the tensors of a subgraph that has no ops yet."""
        self._tensors = dict.fromkeys(tensors)

    @checked
    def add_tensor(self, tensor: LiteTensor) -> LiteTensor:
        """Append a tensor; return it."""
        self._tensors[tensor] = None
        return tensor

    @checked
    def add_tensors(self, tensors: Iterable[LiteTensor | None]) -> None:
        """Append those of the tensors that the subgraph does not have yet."""
        for tensor in tensors:
            if tensor is not None:
                self._tensors.setdefault(tensor)

    @checked
    def add_op(self, op: LiteOp, at: int | None = None) -> LiteOp:
        """Insert an op at an index of the order, at the end if None; return it.

        Tensors that the subgraph does not have yet are added.

        Cost: linear in the ops after it.
        """
        check_free(op)
        self._ops.insert(len(self._ops) if at is None else at, op)
        self._listed = None
        self._attach(op)
        return op

    def _attach(self, op: LiteOp) -> None:
        op.graph = self
        _count(op, op.inputs, "readers")
        _count(op, op.outputs, "makers")
        for tensor in (*op.inputs, *op.outputs, *op.intermediates):
            if tensor is not None:
                self._tensors.setdefault(tensor)

    @checked
    def set_ops(self, ops: Iterable[LiteOp]) -> None:
        """Set the ops of the subgraph, in this order.

        Cost: linear in both.
        """
        new = [*ops]
        for op in self._ops:
            _count(op, op.inputs, "readers", -1)
            _count(op, op.outputs, "makers", -1)
            op.graph = None
        self._ops, self._listed = new, None
        for op in self._ops:
            self._attach(op)

    @checked
    def drop_tensors(self, tensors: Iterable[LiteTensor]) -> None:
        """Remove tensors that no op reads or computes."""
        for tensor in tensors:
            self._tensors.pop(tensor, None)

    def __repr__(self) -> str:
        return f"<LiteGraph '{self.name}', {len(self._ops)} ops>"


@dataclass(eq=False)
class LiteSignature:
    """A signature of a TFLite file.

    Attributes:
        key: its name.
        graph: its subgraph.
        inputs: its input tensors, by name.
        outputs: its output tensors, by name.
    """

    key: str
    graph: LiteGraph
    inputs: dict[str, LiteTensor]
    outputs: dict[str, LiteTensor]


@dataclass(frozen=True, eq=False)
class Code:
    """An op code: a kind of ops and the version of its kernel."""

    kind: str
    version: int
    is_custom: bool
    record: Any

    @classmethod
    def of(cls, op: LiteOp) -> Code | None:
        """Return the code that an op was read with, if it has its kind and version."""
        code = op.code
        if code is None or (code.kind, code.version) != (op.kind, op.version):
            return None
        return code


class Contents:
    """The contents of a TFLite file; see `LiteFile` for what callers use.

    Attributes:
        record: the schema's object of the file, for tables that are read no further.
        codes: the op codes of the file that was read.
        buffers: its buffers in their order.
        kept: the places of buffers that nothing named; they are written all the same.
        old_metadata: buffers that old files list as metadata.
        unknown: a field of it that the schema lacks; "" if it has none.
        is_split: whether weights lie behind the flatbuffer, as in files above 2 GB.
        archive: the zip archive behind it, of labels and other files that metadata
            names; None without one.
    """

    def __init__(self) -> None:
        """Begin a file without subgraphs."""
        self.graphs: list[LiteGraph] = []
        self.signatures: dict[str, LiteSignature] = {}
        self.metadata: dict[str, Buffer] = {}
        self.description = ""
        self.bytes_total = 0
        self.record = schema().ModelT()
        self.record.version = 3
        self.codes: list[Code] = []
        self.buffers: list[Buffer] = [Buffer()]
        self.kept: set[int] = {0}
        self.old_metadata: list[Buffer] = []
        self.unknown = ""
        self.is_split = False
        self.archive: Array | None = None

    @property
    def tensors(self) -> Iterator[LiteTensor]:
        """The tensors of all subgraphs."""
        return (t for graph in self.graphs for t in graph.tensors)

    @property
    def ops(self) -> Iterator[LiteOp]:
        """The ops of all subgraphs, in their order."""
        return (op for graph in self.graphs for op in graph.ops)


def text(value: bytes | None) -> str:
    """Return the text of a string of the schema, "" without one."""
    return "" if value is None else bytes(value).decode("utf-8")


def copied_record(record: Any) -> Any:
    """Return an object of the schema with the same fields."""
    new = type(record)()
    vars(new).update(vars(record))
    return new


def stored(value: Array, dtype: str) -> Array:
    """Return the bytes of an array as a file holds them.

    Example:
        >>> import numpy as np
        >>> from geutil.tflite.parts import stored
        >>> stored(np.array([1, -1, 7]), "int4").tolist()
        [241, 7]
    """
    is_complex = value.dtype.kind == "c"
    # Numpy would drop imaginary parts with no more than a warning.
    if value.dtype.kind not in "biufc" or is_complex > dtype.startswith("complex"):
        raise ArgumentTypeError(
            f"{dtype} is stored of numbers, not of {value.dtype}; convert the array"
        )
    if dtype in PACKED_BITS:
        bits = PACKED_BITS[dtype]
        low = 0 if dtype[0] == "u" else -(2 ** (bits - 1))
        if ((value < low) | (value >= low + 2**bits)).any():
            raise _unlike(dtype)
        flat = _whole(value, dtype, np.int8).reshape(-1).view(np.uint8) & (2**bits - 1)
        each = 8 // bits
        # The last byte may be filled in part only.
        flat = np.append(flat, np.zeros(-flat.size % each, np.uint8)).reshape(-1, each)
        shifts = np.arange(each, dtype=np.uint8) * bits
        packed: Array = np.bitwise_or.reduce(flat << shifts, axis=1).astype(np.uint8)
        return packed
    if dtype not in DTYPES:
        raise TFLiteError(
            f"arrays cannot be stored as {dtype}; the types are {sorted(DTYPES)} and "
            f"{sorted(PACKED_BITS)}"
        )
    raw: Array = np.ascontiguousarray(_whole(value, dtype, DTYPES[dtype]))
    return np.frombuffer(raw.tobytes(), np.uint8)


def _whole(value: Array, dtype: str, kind: Any) -> Array:
    """Return numbers in a type of numpy, which integers have to be exactly."""
    if value.dtype == kind:
        return value
    with np.errstate(invalid="ignore", over="ignore"):
        made = value.astype(kind)
    # Floats are rounded, and infinite only where they were.
    is_exact = kind == np.bool_ or np.issubdtype(kind, np.integer)
    if ((made != value) if is_exact else np.isfinite(made) != np.isfinite(value)).any():
        raise _unlike(dtype)
    return made


def _unlike(dtype: str) -> TFLiteError:
    return TFLiteError(
        f"the array has numbers that {dtype} cannot be; round and clip them, or write "
        "them as numbers in steps by m.constants"
    )


def _unpacked_bits(data: Array, dtype: str, count: int) -> Array:
    """Return the integers that bytes hold several in each."""
    bits = PACKED_BITS[dtype]
    shifts = np.arange(8 // bits, dtype=np.uint8) * bits
    flat = (data[:, None] >> shifts & (2**bits - 1)).reshape(-1)[:count].view(np.int8)
    if dtype.startswith("u"):
        return flat
    return np.where(flat >= 2 ** (bits - 1), flat - 2**bits, flat).astype(np.int8)
