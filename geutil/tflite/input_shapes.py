"""Inputs resized: the shapes of a file followed through its ops, and its constants.

A converter writes sizes that it knows into constants: the target of a Reshape, the
bounds of a slice, the states of a recurrent network. Shapes are followed twice, from
the old inputs and from the new, and where a constant holds a size that changed, the
table `_FITS` says how it changes; a constant that could hold it by chance is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from geutil.errors import TFLiteError
from geutil.tflite import lookups
from geutil.tflite.arguments import checked
from geutil.tflite.effects import resource_of, without
from geutil.tflite.lookups import GraphLike, TensorLike, TensorsLike
from geutil.tflite.parts import (
    LARGEST_SIZE,
    Array,
    Contents,
    LiteGraph,
    LiteOp,
    LiteTensor,
    changed_sizes,
)
from geutil.tflite.schema import DTYPES, words
from geutil.tflite.shapes import (
    Case,
    Known,
    Shape,
    computed,
    constant,
    listed,
    merged,
    output_shapes,
    places_of_slice,
    volume,
)

Resize = Literal["scale", "keep"]
_PROBE = 7
"""A size that is made free is followed as so many times the old one: a prime, which
sizes that differ by it can be told from others by."""
_DEPTH = 32
"""Subgraphs call each other no deeper in files that converters write."""
_TIED = "OfflineMemoryAllocation"
"""Metadata that says where in memory each tensor lies, for microcontrollers."""
_STATES: Mapping[str, str] = {
    **dict.fromkeys(("LSTM", "RNN", "SVDF"), ""),
    **dict.fromkeys(
        words(
            "BIDIRECTIONAL_SEQUENCE_LSTM BIDIRECTIONAL_SEQUENCE_RNN "
            "UNIDIRECTIONAL_SEQUENCE_LSTM UNIDIRECTIONAL_SEQUENCE_RNN"
        ),
        "time_major",
    ),
}
"""Kinds with states among their inputs, and the option by which time comes first."""


class _UnscaledError(Exception):
    """A variable keeps its shape where the batch changes."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key


class Flow:
    """The shapes of tensors, followed through the ops from the inputs."""

    def __init__(self) -> None:
        self.shapes: dict[LiteTensor, Shape] = {}
        self.values: dict[LiteTensor, Array] = {}
        self.constants: dict[tuple[LiteOp, int], Array] = {}
        self.options: dict[LiteOp, dict[str, Any]] = {}
        self.variables: dict[Any, Shape] = {}
        self._handles: dict[LiteTensor, Any] = {}
        self._called: list[LiteGraph] = []

    def follow(self, graph: LiteGraph, given: Mapping[LiteTensor, Shape]) -> Flow:
        """Follow shapes through a subgraph; return self."""
        if graph in self._called or len(self._called) > _DEPTH:
            raise TFLiteError(
                f"subgraph '{graph.name}' calls itself, or calls go deeper than "
                f"{_DEPTH}; its shapes cannot be followed"
            )
        self._called.append(graph)
        for tensor, shape in given.items():
            known = self.shapes.get(tensor, shape)
            if known != shape:
                # A subgraph that is called twice has one set of shapes.
                shape = merged([known, shape])
            self.shapes[tensor] = shape
        for op in graph.ops:
            self.fit(op)
            for tensor, shape in zip(op.outputs, self._made(op), strict=True):
                self.shapes[tensor] = shape
            self.check(op)
        self._called.pop()
        return self

    def fit(self, op: LiteOp) -> None:
        """Adapt the constants of an op to its inputs."""

    def check(self, op: LiteOp) -> None:
        """Check an op whose outputs have their shapes."""

    def shape(self, tensor: LiteTensor | None) -> Shape:
        """Return the shape of a tensor that was reached, or is a constant."""
        if tensor is None:
            return None
        return self.shapes.get(tensor, tensor.shape)

    def case(self, op: LiteOp) -> Case:
        """Return an op with its inputs as they are followed."""
        shapes, values = [], []
        for i, tensor in enumerate(op.inputs):
            value = None if tensor is None else self.values.get(tensor)
            if value is None and tensor is not None and tensor not in self.shapes:
                value = listed(constant(tensor))
            shape = self.shape(tensor)
            new = self.constants.get((op, i))
            if new is not None:
                value, shape = listed(new), new.shape
            shapes.append(shape)
            values.append(value)
        options = self.options.get(op)
        # The op itself stays as it is until all shapes are found.
        if options is not None:
            op = op.copied({})
            op.options.update(options)
        return Case(op, shapes, values)

    def _made(self, op: LiteOp) -> Sequence[Shape]:
        """Return the shapes of outputs; keep values that follow from shapes."""
        case = self.case(op)
        if op.kind == "VAR_HANDLE":
            self._handles[op.outputs[0]] = resource_of(op)
        elif op.kind == "READ_VARIABLE":
            return [self.variables.setdefault(self.handle(op), op.outputs[0].shape)]
        elif op.kind == "CALL_ONCE":
            for graph in op.subgraphs:
                self.follow(graph, {})
        elif op.kind in ("IF", "WHILE"):
            return self._call(op, case)
        made = output_shapes(case.op, case.shapes, case.values)
        value = computed(case, made[0]) if made else None
        if value is not None:
            self.values[op.outputs[0]] = value
        return made

    def handle(self, op: LiteOp) -> Any:
        """Return the names of the variable that an op reads or assigns."""
        tensor = op.inputs[0]
        return None if tensor is None else self._handles.get(tensor)

    def _call(self, op: LiteOp, case: Case) -> Sequence[Shape]:
        """Follow shapes through the subgraphs that an op calls."""
        skipped = 1 if op.kind == "IF" else 0
        tensors, shapes = op.inputs[skipped:], case.shapes[skipped:]
        ends: list[list[Shape]] = [] if skipped else [list(shapes)]
        for graph in reversed(op.subgraphs):
            for inner, tensor in zip(graph.inputs, tensors, strict=True):
                if tensor in self._handles:
                    self._handles[inner] = self._handles[tensor]
            self.follow(graph, dict(zip(graph.inputs, shapes, strict=True)))
            # The condition of a loop makes no output; its body is called before it.
            if skipped or len(ends) == 1:
                ends.append([self.shape(t) for t in graph.outputs])
        return [merged(each) for each in zip(*ends, strict=True)]


class _Fitting(Flow):
    """Shapes followed from new inputs, with constants that fit them."""

    def __init__(self, old: Flow, batch: bool, resize: Resize | None) -> None:
        super().__init__()
        self.old, self.batch, self.resize = old, batch, resize

    def before(self, op: LiteOp, place: int = 0) -> Shape:
        """Return the shape that an input of an op had."""
        return self.old.shape(op.inputs[place])

    def changed(self, op: LiteOp, place: int = 0) -> list[int]:
        """Return the dimensions of an input whose sizes changed."""
        old, new = self.before(op, place), self.case(op).shapes[place]
        return changed_sizes(old, new)

    def fit(self, op: LiteOp) -> None:
        """Adapt the constants of an op to its inputs."""
        self._fit_states(op)
        if op.is_custom:
            if any(self.changed(op, i) for i in range(len(op.inputs))):
                raise TFLiteError(
                    f"custom op {op!r} reads a tensor whose shape changes, and the "
                    "shape of its outputs cannot be told; cut the file in front of it"
                )
            return
        fit = _FITS.get(op.kind)
        if fit is not None:
            fit(self, op)

    def _fit_states(self, op: LiteOp) -> None:
        """Set the batch size of a recurrent op's states to that of its input."""
        shape = self.shape(op.inputs[0]) if op.inputs else None
        if op.kind not in _STATES or not shape:
            return
        time_major = _STATES[op.kind] and op.options.get(_STATES[op.kind])
        batch = shape[1 if time_major else 0]
        for tensor in op.inputs:
            if tensor is not None and tensor.is_variable and tensor.shape:
                self.shapes[tensor] = (batch, *tensor.shape[1:])

    def check(self, op: LiteOp) -> None:
        """Refuse ops that compute along the batch, and shapes that are not known."""
        grown = [i for i in range(len(op.inputs)) if self.changed(op, i)]
        if not grown or not op.outputs:
            return
        for tensor in op.outputs:
            new, old = self.shape(tensor), self.old.shape(tensor)
            if new is None and old is not None and op.kind not in _STATES:
                raise TFLiteError(
                    f"the shape of {tensor.label}, which {op.kind} makes, cannot be "
                    "told of the new input; cut the file in front of it"
                )
        flat = op.kind == "FULLY_CONNECTED" and not op.options.get("keep_num_dims")
        # Such a layer flattens its input: a larger row would become several rows.
        if flat and not self.batch and self._grows(op) and 0 not in self.changed(op):
            raise TFLiteError(
                f"{op!r} takes {self.before(op)} as one row, and gets "
                f"{self.shape(op.inputs[0])}: its weights do not fit; cut the file in "
                "front of it"
            )
        # A result that follows from shapes, such as a size, need not grow.
        if self.batch and not self._grows(op) and op.outputs[0] not in self.values:
            raise TFLiteError(
                f"{op!r} computes along the batch: its input changes from "
                f"{self.before(op, grown[0])} to {self.shape(op.inputs[grown[0]])} and "
                "its output does not; convert the model from its source, at that batch "
                "size"
            )
        axis = _AXES.get(op.kind)
        along = None if axis is None else axis(self.case(op))
        if self.batch and along is not None and 0 in grown:
            rank = len(self.shape(op.inputs[0]) or ())
            if along % rank in self.changed(op):
                raise TFLiteError(
                    f"{op!r} computes along the batch, and its rows depend on each "
                    "other; convert the model from its source, at that batch size"
                )

    def entries(self, op: LiteOp, place: int) -> list[Any] | None:
        """Return the numbers of a constant that an op reads; None if it is computed."""
        tensor = op.inputs[place]
        value = None if tensor is None else constant(tensor)
        return None if value is None else value.reshape(-1).tolist()

    def _grows(self, op: LiteOp) -> bool:
        """Return whether the shape of an output changes."""
        return any(changed_sizes(self.old.shape(t), self.shape(t)) for t in op.outputs)

    def rewrite(self, op: LiteOp, place: int, value: Any) -> None:
        """Replace a constant that an op reads."""
        tensor = op.inputs[place]
        if tensor is None or constant(tensor) is None:
            raise TFLiteError(
                f"input {place} of {op!r} holds a size that changes, and is computed; "
                "replace the op"
            )
        new = np.asarray(value, DTYPES[tensor.dtype])
        known = self.constants.setdefault((op, place), new)
        if not np.array_equal(known, new):
            raise TFLiteError(
                f"{op!r} stands in a subgraph that is called with different shapes"
            )

    def repeat(self, op: LiteOp, place: int, wanted: Shape) -> bool:
        """Repeat the rows of a constant, which are all the same, for a larger batch."""
        tensor = op.inputs[place]
        value = None if tensor is None else constant(tensor)
        if value is None or wanted is None or None in wanted or tensor is None:
            return False
        dims = changed_sizes(value.shape, wanted)
        if len(value.shape) != len(wanted) or len(dims) != 1 or not self.batch:
            return False
        axis = dims[0]
        first = np.take(value, [0], axis)
        if not np.array_equal(value, np.broadcast_to(first, value.shape)):
            raise TFLiteError(
                f"constant {tensor.label} has {value.shape[axis]} rows for the batch, "
                f"which differ, and {wanted[axis]} are needed; give it another value"
            )
        self.rewrite(op, place, np.repeat(first, int(wanted[axis] or 1), axis))
        return True


def _ambiguous(op: LiteOp, why: str, remedy: str = "") -> TFLiteError:
    return TFLiteError(
        f"{op!r}: {why}; "
        f"{remedy or 'replace the op, or convert the model from its source'}"
    )


def _fit_reshape(flow: _Fitting, op: LiteOp) -> None:
    """Scale the entry of a Reshape's target that holds the size that changed."""
    old, new = flow.before(op), flow.case(op).shapes[0]
    made = flow.old.shape(op.outputs[0])
    target = op.inputs[1] if len(op.inputs) > 1 else None
    if not changed_sizes(old, new) or made is None:
        return
    if target is not None and constant(target) is None:
        return  # It is computed, of the new sizes.
    entries = (
        [int(v) for v in op.options.get("new_shape", ())]
        if target is None
        else np.asarray(target.value).reshape(-1).tolist()
    )
    wanted = _regrouped(op, old or (), new or (), made, flow.batch)
    for i, size in enumerate(wanted):
        if entries[i] not in (-1, size):
            entries[i] = size
    if target is None:
        flow.options[op] = {"new_shape": entries}
    elif entries != np.asarray(target.value).reshape(-1).tolist():
        flow.rewrite(op, 1, entries)


def _regrouped(
    op: LiteOp, old: Known, new: Known, made: Known, batch: bool
) -> list[Any]:
    """Return the shape that a Reshape makes of new sizes.

    Dimensions of its input and its output are taken together in the smallest groups
    that hold the same values; a group that grows does so in its one dimension, and by a
    batch in the outermost.
    """
    wanted: list[Any] = list(made)
    for inputs, outputs in _groups(old, made):
        grown = [i for i in inputs if changed_sizes((old[i],), (new[i],))]
        if not grown:
            continue
        before, after = (volume([s[i] for i in inputs]) for s in (old, new))
        if before is None or after is None:
            raise _ambiguous(op, "free sizes and a size that changes are merged")
        merges = batch and old[grown[0]] == 1 and made[outputs[0]] != 1
        if merges and made.count(1) >= old.count(1):
            raise _ambiguous(
                op,
                f"of {list(old)} it makes {list(made)}, which can move the batch or "
                "merge it",
                "replace it by a TRANSPOSE, or convert the model from its source",
            )
        large = [i for i in outputs if made[i] != 1] or outputs[:1]
        # The batch stays in front; another size can grow only where it is alone.
        place = outputs[0] if batch else large[0]
        if not batch and len(large) > 1:
            raise _ambiguous(
                op, f"of {list(old)} it makes {list(made)}, and any size could grow"
            )
        size = (made[place] or 0) * after
        if size % before:
            raise _ambiguous(op, f"{list(new)} does not fit {list(made)}, made larger")
        wanted[place] = size // before
    return wanted


def _groups(old: Known, made: Known) -> Iterable[tuple[list[int], list[int]]]:
    """Yield the dimensions of two shapes in groups that hold the same values."""
    sizes = [[-1 if n is None else n for n in shape] for shape in (old, made)]
    at = [0, 0]

    def left() -> list[int]:
        return [side for side in (0, 1) if at[side] < len(sizes[side])]

    while taking := left():
        groups: tuple[list[int], list[int]] = [], []
        products = [1, 1]
        while taking:
            for side in taking:
                products[side] *= sizes[side][at[side]]
                groups[side].append(at[side])
                at[side] += 1
            # The side that holds fewer values takes one more dimension.
            sides = left() if products[0] != products[1] else []
            fewer = 0 if products[0] < products[1] else 1
            taking = [fewer] if fewer in sides else sides
        # Ones that are left over at the end of one shape change nothing.
        if all(groups):
            yield groups


def _fit_slice(flow: _Fitting, op: LiteOp) -> None:
    """Extend a slice of a whole dimension to the whole of the new one."""
    case, old = flow.case(op), flow.before(op) or ()
    dims = flow.changed(op)
    if not dims:
        return
    begins, sizes = list(case.sizes(1)), list(case.sizes(2))
    for axis in dims:
        if begins[axis] == 0 and sizes[axis] == old[axis]:
            sizes[axis] = -1
        elif flow.batch and sizes[axis] != -1:
            raise _ambiguous(op, f"it takes {sizes[axis]} of {old[axis]} of the batch")
    if sizes != list(case.sizes(2)):
        flow.rewrite(op, 2, sizes)


def _fit_strided_slice(flow: _Fitting, op: LiteOp) -> None:
    """Extend a strided slice of a whole dimension to the whole of the new one."""
    case, old = flow.case(op), flow.before(op) or ()
    dims = flow.changed(op)
    places = places_of_slice(case) if dims else None
    if places is None:
        return
    ellipsis = case.option("ellipsis_mask")
    mask = case.option("end_mask")
    for entry, (word, axis, taken) in enumerate(places):
        size = old[axis] if word != "new" else None
        whole = size is not None and range(size)[taken] == range(size)
        if axis in dims and word == "keep" and whole and taken.stop is not None:
            # Behind an ellipsis, dimensions are not numbered as the bits of the mask.
            if ellipsis:
                raise _ambiguous(op, "its bounds hold a size that changes")
            mask |= 1 << entry
        elif axis in dims and word != "new" and flow.batch and not whole:
            raise _ambiguous(op, "it takes a part of the batch")
        elif axis in dims and word == "shrink" and flow.batch:
            raise _ambiguous(op, "it takes one of the batch")
    if mask != case.option("end_mask"):
        flow.options[op] = {"end_mask": mask}


def _fit_broadcast_to(flow: _Fitting, op: LiteOp) -> None:
    """Broadcast a tensor to the new size of a dimension that it had."""
    sizes, dims = flow.entries(op, 1), flow.changed(op)
    new = flow.case(op).shapes[0]
    if not dims or sizes is None or new is None:
        return
    for axis in dims:
        sizes[axis - len(new)] = new[axis]
    flow.rewrite(op, 1, sizes)


def _fit_transpose_conv(flow: _Fitting, op: LiteOp) -> None:
    """Scale the shape that a transposed convolution makes with its input."""
    sizes, dims = flow.entries(op, 0), flow.changed(op, 2)
    if not dims or sizes is None:
        return
    old, new = flow.before(op, 2) or (), flow.case(op).shapes[2] or ()
    steps = [1]
    steps += [op.options.get(f"stride_{letter}") or 1 for letter in "hw"]
    for axis in dims:
        more = ((new[axis] or 0) - (old[axis] or 0)) * steps[axis]
        if axis == 0 and sizes[0] != old[0]:
            raise _ambiguous(op, "the shape that it makes has another batch")
        sizes[axis] += more
    flow.rewrite(op, 0, sizes)


def _fit_joined(flow: _Fitting, op: LiteOp) -> None:
    """Repeat constants that are joined to, or computed with, rows of a batch."""
    grown = [i for i in range(len(op.inputs)) if flow.changed(op, i)]
    if not grown:
        return
    rank = len(flow.shape(op.inputs[grown[0]]) or ())
    for i, tensor in enumerate(op.inputs):
        if tensor is None or constant(tensor) is None:
            continue
        shape = list(tensor.shape or ())
        if len(shape) != rank:
            continue
        own = op.options.get("axis", 0) % rank if op.kind == "CONCATENATION" else -1
        for axis in flow.changed(op, grown[0]):
            old = (flow.before(op, grown[0]) or ())[axis]
            joined = op.kind in ("CONCATENATION", "PACK")
            # Elementwise kernels broadcast ones; joined shapes have to be the same.
            if shape[axis] == old and axis != own and (joined or old != 1):
                shape[axis] = (flow.shape(op.inputs[grown[0]]) or ())[axis]
        flow.repeat(op, i, tuple(shape))


def _fit_loop(flow: _Fitting, op: LiteOp) -> None:
    """Repeat the constants that a loop begins with for a batch that its body has."""
    case, body = flow.case(op), op.subgraphs[1]
    for _ in range(len(op.inputs)):
        trial = Flow()
        # Tensors that are not reached do not fit yet.
        with suppress(TFLiteError):
            trial.follow(body, dict(zip(body.inputs, case.shapes, strict=True)))
        made = [trial.shapes.get(t, t.shape) for t in body.outputs]
        grown = [
            i for i, shape in enumerate(made) if changed_sizes(case.shapes[i], shape)
        ]
        fitted = [i for i in grown if flow.repeat(op, i, made[i])]
        if not fitted:
            return
        case = flow.case(op)


def _fit_assigned(flow: _Fitting, op: LiteOp) -> None:
    """Repeat the first value of a variable that holds rows of a batch."""
    wanted, value = flow.variables.get(flow.handle(op)), flow.case(op).shapes[1]
    if wanted is None or value is None or not changed_sizes(value, wanted):
        return
    if value == flow.before(op, 1) and constant(op.inputs[1] or op.outputs[0]) is None:
        raise _UnscaledError(flow.handle(op))
    if not flow.repeat(op, 1, wanted):
        raise _ambiguous(op, f"its variable has the shape {wanted}, and gets {value}")


def _fit_resize(flow: _Fitting, op: LiteOp) -> None:
    """Scale the size that an image is resized to, or keep it, as the caller says."""
    dims = [axis for axis in flow.changed(op) if axis in (1, 2)]
    stated = flow.entries(op, 1)
    if not dims or stated is None or flow.resize == "keep":
        return
    if flow.resize is None:
        raise _ambiguous(
            op,
            f"it resizes to {stated}, and nothing says whether that follows its input",
            'pass resize="scale" or resize="keep"',
        )
    old, new = flow.before(op) or (), flow.shape(op.inputs[0]) or ()
    made = [*stated]
    for axis in dims:
        made[axis - 1], left = divmod(made[axis - 1] * (new[axis] or 0), old[axis] or 1)
        if left:
            raise _ambiguous(op, f"{stated} cannot be scaled with its input")
    flow.rewrite(op, 1, made)


Fit = Callable[[_Fitting, LiteOp], None]
_FITS: Mapping[str, Fit] = {
    "ASSIGN_VARIABLE": _fit_assigned,
    "BROADCAST_TO": _fit_broadcast_to,
    "RESHAPE": _fit_reshape,
    "RESIZE_BILINEAR": _fit_resize,
    "RESIZE_NEAREST_NEIGHBOR": _fit_resize,
    "SLICE": _fit_slice,
    "STRIDED_SLICE": _fit_strided_slice,
    "TRANSPOSE_CONV": _fit_transpose_conv,
    "WHILE": _fit_loop,
    **dict.fromkeys(
        (
            *("ADD", "CONCATENATION", "DIV", "MAXIMUM", "MINIMUM", "MUL", "PACK"),
            *("POW", "SELECT_V2", "SQUARED_DIFFERENCE", "SUB"),
        ),
        _fit_joined,
    ),
}
"""Kinds whose constants can hold sizes, and how these follow the inputs."""

_AXES: Mapping[str, Callable[[Case], int | None]] = {
    **dict.fromkeys(("L2_NORMALIZATION", "LOG_SOFTMAX", "SOFTMAX"), lambda case: -1),
    **dict.fromkeys(
        ("CUMSUM", "REVERSE_V2"), lambda case: int(case.value(1).reshape(-1)[0])
    ),
    "REVERSE_SEQUENCE": lambda case: int(case.option("seq_dim")),
}
"""Kinds that keep a shape and compute along a dimension of it, and this dimension."""


@checked
def set_batch_size(
    file: Contents,
    size: int | None,
    *,
    inputs: TensorsLike | None = None,
    graph: GraphLike = None,
) -> None:
    """Set the batch size: the first dimension of the inputs, and what depends on it.

    Shapes are inferred by rules for each kind of op. Constants that contain the batch
    size, such as the targets of Reshapes, are rewritten.

    Args:
        size: the new batch size; None is dynamic.
        inputs: the inputs whose first dimension is the batch; all but scalars if
            None. An input is a tensor, its name, or its name in a signature.

    Raises:
        TFLiteError: an op computes along the batch dimension, a constant may equal the
            batch size by chance, or the shapes of an op cannot be inferred. The file is
            unchanged.

    Example:
        >>> import numpy as np
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [1, 2, 2])
        >>> to = m.add_constant("to", np.array([1, 4], np.int32))
        >>> m.set_outputs([m.add("RESHAPE", [x, to], name="y")])
        >>> m.set_batch_size(8)
        >>> m.tensor("y"), m.tensor("to").value.tolist()
        (<LiteTensor 'y' float32 [8, 4]>, [8, 4])
    """
    if size is not None and not 1 <= size <= LARGEST_SIZE:
        raise TFLiteError(f"a batch has at least one row, not {size!r}; None is any")
    own = lookups.graph_of(file, graph)
    # A scalar has no first size, and may stand beside inputs that have.
    named = [t for t in own.inputs if t.shape] if inputs is None else inputs
    ends = lookups.tensors_of(file, named, own)
    shapes = {t: t.shape or () for t in ends}
    if not shapes or not all(shapes.values()):
        scalars = [t.name for t in shapes or own.inputs if not t.shape]
        raise TFLiteError(
            f"subgraph '{own.name}' has no batch to set: inputs {scalars} are scalars"
        )
    if len({shape[0] for shape in shapes.values()}) > 1:
        listed_shapes = ", ".join(f"{t.label} {t}" for t in ends)
        raise TFLiteError(
            f"the inputs have different first sizes, which are no batch: "
            f"{listed_shapes}; pass inputs=..., or use set_input_shape"
        )
    new = {t: (size, *shape[1:]) for t, shape in shapes.items()}
    _resize(file, own, new, batch=True, resize=None)


@checked
def set_input_shape(
    file: Contents,
    name: TensorLike,
    shape: Sequence[int | None],
    *,
    resize: Literal["scale", "keep"] | None = None,
    graph: GraphLike = None,
) -> None:
    """Set the shape of an input, and all that depends on it.

    Args:
        name: the input: a tensor, its name, or its name in a signature.
        shape: its new shape, of the same rank; None is a dynamic size.
        resize: if the file resizes an image to a constant size, whether to scale this
            size with the input or keep it. If None, such a file is refused.

    Raises:
        TFLiteError: see `set_batch_size`; or weights do not fit the new shape.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("x", "float32", [1, 8, 8, 3])
        >>> m.set_outputs([m.add("RELU", [x], name="y")])
        >>> m.set_input_shape("x", [1, 32, 32, 3])
        >>> m.tensor("y")
        <LiteTensor 'y' float32 [1, 32, 32, 3]>
    """
    own = lookups.graph_of(file, graph)
    tensor = lookups.tensor_of(file, name, own)
    new, old = tuple(shape), tensor.shape or ()
    sizes = [size for size in new if size is not None]
    if len(new) != len(old) or not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise TFLiteError(
            f"input {tensor.label} is {tensor}, and cannot have the shape "
            f"{list(new)}: the rank stays, and sizes are at least 1"
        )
    # The first size alone is the batch, for which ops have rules of their own.
    batch = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b] == [0]
    _resize(file, own, {tensor: new}, batch=batch, resize=resize)


def _resize(
    file: Contents,
    graph: LiteGraph,
    new: Mapping[LiteTensor, Known],
    *,
    batch: bool,
    resize: Resize | None,
) -> None:
    """Plan, check and apply new shapes of inputs."""
    for tensor in new:
        if tensor not in graph.inputs:
            raise TFLiteError(
                f"{tensor!r} is no input of {graph!r}; its inputs are "
                f"{', '.join(t.label for t in graph.inputs)}"
            )
    lookups.check_uncalled(file, graph, "another shape")
    if _TIED in file.metadata:
        raise TFLiteError(
            f"the metadata '{_TIED}' says where each tensor lies in memory, which new "
            "shapes change",
            remedy=f"leave it out first: {without(_TIED)}",
        )
    given: dict[LiteTensor, Shape] = {t: t.shape for t in graph.inputs}
    old = Flow().follow(graph, given)
    # Sizes that are made free are followed as others.
    probe = {
        t: tuple(
            a * _PROBE if a and b is None else b
            for a, b in zip(t.shape or (), shape, strict=True)
        )
        for t, shape in new.items()
    }
    fitted = _fitted(graph, old, {**given, **probe}, batch, resize)
    final: Flow = fitted
    if probe != new:
        _free(fitted, old)
        final = Flow()
        final.constants, final.options = fitted.constants, fitted.options
        final.variables = dict(fitted.variables)
        final.follow(graph, {**given, **new})
    _apply(fitted, old, final)


def _fitted(
    graph: LiteGraph,
    old: Flow,
    given: Mapping[LiteTensor, Shape],
    batch: bool,
    resize: Resize | None,
) -> _Fitting:
    """Return the shapes that follow from inputs, and the constants that fit them."""
    grown = [(old.shape(t), shape) for t, shape in given.items()]
    ratio = [(a[0], b[0]) for a, b in grown if a and b and changed_sizes(a, b)]
    kept: set[Any] = set()
    while True:
        fitting = _Fitting(old, batch, resize)
        for key, shape in old.variables.items():
            if batch and ratio and shape and key not in kept:
                before, after = ratio[0]
                size, left = divmod((shape[0] or 0) * (after or 0), before or 1)
                if not left:
                    fitting.variables[key] = (size, *shape[1:])
        try:
            fitting.follow(graph, given)
        except _UnscaledError as error:
            # Each time, one variable more keeps its shape.
            kept.add(error.key)
        else:
            return fitting


def _free(flow: _Fitting, old: Flow) -> None:
    """Write -1 into rewritten constants for sizes that become free."""
    for (op, place), value in flow.constants.items():
        tensor = op.inputs[place]
        before = None if tensor is None else constant(tensor)
        entries = value.reshape(-1).tolist()
        if op.kind == "RESHAPE" and before is not None:
            flow.constants[op, place] = _freed(op, before, entries, flow, value.dtype)
        # For SLICE, `_fit_slice` has written -1 already.
        elif op.kind != "SLICE":
            raise TFLiteError(
                f"{op!r} needs a constant of the size that is to be free; set a number"
            )
    for op, options in flow.options.items():
        if "new_shape" in options:
            stated = np.asarray(op.options["new_shape"])
            options["new_shape"] = _freed(
                op, stated, options["new_shape"], flow, np.dtype(np.int32)
            ).tolist()


def _freed(
    op: LiteOp, before: Array, entries: list[int], flow: _Fitting, dtype: Any
) -> Array:
    """Return the target of a Reshape with -1 for the size that is made free."""
    stated = before.reshape(-1).tolist()
    made = flow.shape(op.outputs[0]) or ()
    grown = [i for i, (a, b) in enumerate(zip(stated, entries, strict=True)) if a != b]
    fixed = [made[i] if size == -1 else size for i, size in enumerate(entries)]
    if len(grown) != 1 or None in fixed:
        raise _ambiguous(op, f"its target {stated} has more than one free size")
    fixed[grown[0]] = -1
    return np.asarray(fixed, dtype)


def _apply(fitted: _Fitting, old: Flow, final: Flow) -> None:
    """Write shapes, constants and options that were planned."""
    made: dict[tuple[LiteTensor, bytes], LiteTensor] = {}
    for (op, place), value in fitted.constants.items():
        tensor = op.inputs[place]
        if tensor is None or op.graph is None:
            continue
        key = tensor, value.tobytes()
        if key not in made:
            # Other ops can read the old value.
            new = made[key] = tensor.copied()
            new.value = value
        op.set_input(place, made[key])
        if not tensor.readers and tensor not in op.graph.outputs:
            op.graph.drop_tensors([tensor])
            made[key].name = tensor.name
    for op, options in fitted.options.items():
        op.options.update(options)
    for tensor, shape in final.shapes.items():
        if shape is not None and shape != old.shape(tensor) and shape != tensor.shape:
            tensor.shape = shape
