"""The tape: the ops of a graph as entries, the way back through each, and spaces."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.errors import TapeError
from geutil.graph import (
    functions,
    gradient_functions,
    op_types,
    runtime,
    types,
    v1_control_flow,
    walks,
)
from geutil.graph.types import Graph, Operation, Tensor, require_tensor


class Identifiers:
    """Gives each object a number of its own, also once another has taken its place."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __call__(self, tensor: Any) -> int:
        """Return the number of a tensor: always the same one."""
        key = id(tensor)
        entry = self._known.get(key)
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        number = next(self._numbers)
        self._known[key] = (weakref.ref(tensor, lambda _: self._forget(key)), number)
        return number

    def _forget(self, key: int) -> None:
        entry = self._known.get(key)
        # Another object may have taken the place by now.
        if entry is not None and entry[0]() is None:
            del self._known[key]


# Returns the number of a tensor: of TensorFlow or numpy, in a graph or not.
tensor_id = Identifiers()


class CapturedTensors:
    """Follows captures, by placeholders of a FuncGraph, to the tensors from outside."""

    def __init__(self) -> None:
        self._outside: dict[Graph, dict[int, Any]] = {}

    def beyond(self, tensor: Any) -> Any:
        """Return the captured tensor of a placeholder; any other tensor itself."""
        while hasattr(tensor, "graph") and tensor.op.type == "Placeholder":
            outside = self._of(tensor.graph).get(id(tensor))
            if outside is None:
                break
            tensor = outside
        return tensor

    def source(self, x: Any) -> Any:
        """Return the captured tensor, or the handle or reference of a variable."""
        if isinstance(x, tf.Variable):
            x = runtime.variable_handle(x)
        return self.beyond(x) if isinstance(x, tf.Tensor) else None

    def _of(self, graph: Graph) -> dict[int, Any]:
        if graph not in self._outside:
            pairs = functions.bindings(graph) if types.is_func_graph(graph) else []
            self._outside[graph] = {id(inside): outside for outside, inside in pairs}
        return self._outside[graph]


def number_of(tensor: Any) -> int:
    """Return the id of a tensor, a variable's handle, or an array."""
    source = CapturedTensors().source(tensor)
    return tensor_id(tensor if source is None else source)


def _record(
    ys: Sequence[Tensor], xs: Sequence[Any]
) -> Iterator[tuple[Operation, list[Any]]]:
    """Yield each op between tensors with its inputs, in order."""
    # A capture of a function's graph counts as the captured tensor: ops of the graphs
    # around it are between `ys` and `xs`, too.
    for y in ys:
        require_tensor(y)
    captured = CapturedTensors()
    reached = set(_ids(t for x in xs if (t := captured.source(x)) is not None))
    for op in _behind(map(captured.beyond, ys), captured):
        inputs = [captured.beyond(t) for t in op.inputs]
        if reached.isdisjoint(_ids(inputs)):
            continue
        if v1_control_flow.is_inside(op):
            raise TapeError(
                f"'{op.name}' ({op.type}) is in a loop or conditional of version 1, "
                "whose gradient a tape cannot hold; use tf.gradients, or control flow "
                "v2 (tf.compat.v1.enable_control_flow_v2)"
            )
        reached.update(_ids(filter(gradient_functions.has_gradient, op.outputs)))
        yield op, inputs


def _ids(tensors: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(tensor_id, tensors))


def _behind(ends: Iterable[Any], captured: CapturedTensors) -> list[Operation]:
    """Return the ops that tensors depend on, each after those that it depends on."""

    def makers(tensors: Iterable[Any]) -> list[Operation]:
        # The last input comes first on the tape.
        return [t.op for t in tensors if hasattr(t, "graph")][::-1]

    return walks.topological_order(
        makers(ends), lambda op: makers(map(captured.beyond, op.inputs))
    )


def _kinds(op: Operation) -> Iterator[tuple[Any, Any] | None]:
    """Yield for each output the shape and dtype to make zeros of, or None."""
    # Where its shape is not known, a tensor is yielded for it.
    is_symbolic = gradient_functions.is_symbolic_call(op)
    for t in op.outputs:
        kind = gradient_functions.default_gradient_kind(t)
        if kind is None and not is_symbolic:
            yield None
            continue
        shape, dtype = kind or (t.shape, t.dtype)
        is_known = shape.is_fully_defined() and dtype != tf.variant
        yield (shape if is_known else t), dtype


class OpGradient:
    """The backward function of an op, which builds ops in a graph."""

    # It returns gradients for as many `inputs` as the op had when it was recorded:
    # differentiating a loop adds some.

    def __init__(self, op: Operation, inputs: int, graph: Graph) -> None:
        self.op_name = op.name
        self._op, self._inputs, self._graph = op, inputs, graph

    def __call__(self, *gradients: Any) -> list[Any]:
        """Return the gradients of the inputs."""
        op = self._op
        try:
            function = gradient_functions.gradient_function(op)
        except LookupError as error:
            raise TapeError(
                f"TensorFlow has no gradient for '{self.op_name}' ({op.type}); "
                "stop in front of it with tf.stop_gradient, or register one with "
                "tf.RegisterGradient"
            ) from error
        # TensorFlow has None for ops that it knows to have no gradient.
        if function is None:
            return [None] * self._inputs
        with (
            self._graph.as_default(),
            tf.device(op.device or None),
            tf.name_scope(f"{op.name}_grad"),
        ):
            made = function(op, *gradients)
        listed = list(made) if isinstance(made, list | tuple) else [made]
        if op.type in op_types.LOOPS:
            listed = listed[: self._inputs]
        self._tell_shapes(listed)
        return listed

    def _tell_shapes(self, gradients: Sequence[Any]) -> None:
        """Let gradients have the static shapes of the inputs that they belong to."""
        for t, gradient in zip(self._op.inputs, gradients, strict=False):
            # The shape of a handle is not that of the variable behind it.
            if not isinstance(gradient, tf.Tensor) or t.dtype == tf.resource:
                continue
            try:
                gradient.set_shape(t.shape)
            except ValueError as error:
                raise TapeError(
                    f"the gradient of '{self.op_name}' ({self._op.type}) by '{t.name}' "
                    f"has shape {gradient.shape}, and that has shape {t.shape}"
                ) from error


Backward = Callable[..., Any]


class TapeEntry(NamedTuple):
    """One operation that was run.

    Attributes:
        op_type: the kind of operation.
        output_ids: the ids of the tensors that it made.
        output_shape_and_dtype: the shape and dtype of each of them, for zeros where no
            gradient arrives; None where the backward function expects None instead.
        input_ids: the ids of the tensors that it read.
        backward_function: takes the gradient of each output, and returns the gradient
            of each input, or None for those that it does not depend on.
    """

    op_type: str
    output_ids: tuple[int, ...]
    output_shape_and_dtype: tuple[tuple[Any, Any] | None, ...]
    input_ids: tuple[int, ...]
    backward_function: Backward


class Tape:
    """Operations in the order in which they were run.

    A tape holds ids of tensors, not the tensors: an intermediate lives as long as the
    backward function that needs it, and the recording code must not hold more. A tape
    is used once: `imperative_grad` removes the entries as it visits them.

    Example:
        >>> import numpy as np
        >>> from geutil.gradients.tape import Tape, imperative_grad, numpy_vspace
        >>> tape = Tape()
        >>> x = np.array([1.0, 2.0])
        >>> y = x * x
        >>> tape.record("square", [y], [x], lambda grad: [2 * x * grad])
        >>> imperative_grad(numpy_vspace(), tape, [y], [x])
        [array([2., 4.])]

        Eager tensors and variables of TensorFlow are recorded likewise:

        >>> import tensorflow as tf
        >>> from geutil.gradients.tape import tensorflow_vspace
        >>> w, tape = tf.Variable([1.0, 2.0]), Tape()
        >>> y = tf.sin(w)
        >>> tape.record("sin", [y], [w], lambda grad: grad * tf.cos(w))
        >>> (gradient,) = imperative_grad(tensorflow_vspace(), tape, [y], [w])
        >>> gradient.numpy()
        array([ 0.54..., -0.41...], dtype=float32)
    """

    def __init__(self) -> None:
        self._tensor_to_op: dict[int, int] = {}
        self._op_to_entry: dict[int, TapeEntry] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._op_to_entry)

    def __contains__(self, tensor: Any) -> bool:
        """Return whether an operation on the tape made a tensor."""
        return number_of(tensor) in self._tensor_to_op

    def record(
        self,
        op_type: str,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        backward_function: Backward,
    ) -> None:
        """Record an operation.

        Args:
            op_type: its kind, for messages and for the gradients that it accepts.
            outputs: the tensors that it made: objects with a shape and a dtype.
            inputs: the tensors that it read. One that is read twice is listed twice.
            backward_function: takes the gradients of the outputs, and returns those of
                the inputs.

        Raises:
            TapeError: an output was recorded before.

        Cost: constant.
        """
        kinds = tuple((t.shape, t.dtype) for t in outputs)
        made, read = (tuple(map(number_of, tensors)) for tensors in (outputs, inputs))
        self._add(TapeEntry(op_type, made, kinds, read, backward_function))

    def export(self) -> tuple[dict[int, int], dict[int, TapeEntry]]:
        """Return the entries; the tape is empty afterwards.

        Returns:
            `(tensor_to_op, op_to_entry)`: the operation's number by the id of each
            tensor that it made, and the entry by that number.
        """
        exported = self._tensor_to_op, self._op_to_entry
        self._tensor_to_op, self._op_to_entry = {}, {}
        return exported

    @classmethod
    def from_graph(
        cls,
        ys: Sequence[Tensor],
        xs: Sequence[Any],
        wrap: Callable[[Backward], Backward] | None = None,
    ) -> Tape:
        """Return a tape of the ops of a graph between some tensors.

        Backward functions build ops in the graph, by the gradient functions that
        TensorFlow has registered: those of `tf.custom_gradient`, and of functional
        loops, branches and calls, among them.

        Args:
            ys: the tensors that will be differentiated.
            xs: the tensors and variables to differentiate with respect to.
            wrap: maps each backward function to the one to record.

        Raises:
            TapeError: an op between them is in a loop or conditional of version 1,
                whose gradients need facts that only `tf.gradients` knows.

        Cost: linear in the ops behind `ys` and their edges.

        Example:
            >>> import tensorflow as tf
            >>> from geutil.gradients.tape import (
            ...     Tape,
            ...     imperative_grad,
            ...     tensorflow_vspace,
            ... )
            >>> @tf.function
            ... def slope(x):
            ...     y = tf.sin(x) * x
            ...     tape = Tape.from_graph([y], [x])
            ...     return imperative_grad(tensorflow_vspace(), tape, [y], [x])
            >>> [float(g) for g in slope(tf.constant(0.0))]
            [0.0]
        """
        tape = cls()
        for op, inputs in _record(ys, xs):
            gradient: Backward = OpGradient(op, len(inputs), ys[0].graph)
            backward = gradient if wrap is None else wrap(gradient)
            kinds = tuple(_kinds(op))
            made, read = _ids(op.outputs), _ids(inputs)
            tape._add(TapeEntry(op.type, made, kinds, read, backward))
        return tape

    def _add(self, entry: TapeEntry) -> None:
        if not self._tensor_to_op.keys().isdisjoint(entry.output_ids):
            raise TapeError(
                f"a tensor that '{entry.op_type}' made is on the tape already; "
                "record each operation once"
            )
        self._op_to_entry[self._count] = entry
        self._tensor_to_op.update(dict.fromkeys(entry.output_ids, self._count))
        self._count += 1


class VSpace(NamedTuple):
    """A vector space of gradients, with addition and zeros.

    Attributes:
        aggregate_fn: returns the sum of a list of gradients, at least one.
        num_elements_fn: returns the number of elements of a gradient.
        tensor_id: returns the number of a tensor on the tape.
        zeros: returns zeros of a shape and dtype.
        ones_like: returns ones of the shape and dtype of a tensor.

    Example:
        >>> # A space that says how many gradients it adds up.
        >>> import numpy as np
        >>> from geutil.gradients.tape import numpy_vspace
        >>> space = numpy_vspace()
        >>> def aggregate(gradients):
        ...     print(len(gradients))
        ...     return space.aggregate_fn(gradients)
        >>> telling = space._replace(aggregate_fn=aggregate)
        >>> telling.aggregate_fn([np.ones(2), np.ones(2)])
        2
        array([2., 2.])
    """

    aggregate_fn: Callable[[Sequence[Any]], Any]
    num_elements_fn: Callable[[Any], int]
    tensor_id: Callable[[Any], int]
    zeros: Callable[[Any, Any], Any]
    ones_like: Callable[[Any], Any]


def numpy_vspace() -> VSpace:
    """Return the space of numpy arrays.

    Example:
        >>> import numpy as np
        >>> from geutil.gradients.tape import numpy_vspace
        >>> numpy_vspace().aggregate_fn([np.ones(2), np.ones(2)])
        array([2., 2.])
    """
    add = functools.partial(functools.reduce, operator.add)
    return VSpace(add, np.size, tensor_id, np.zeros, np.ones_like)


def tensorflow_vspace() -> VSpace:
    """Return the space of TensorFlow's tensors.

    A sum of nothing but slices stays slices.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients.tape import tensorflow_vspace
        >>> rows = tf.IndexedSlices(
        ...     tf.ones([1, 2]), tf.constant([3]), tf.constant([9, 2])
        ... )
        >>> total = tensorflow_vspace().aggregate_fn([rows, rows])
        >>> total.indices.numpy().tolist()
        [3, 3]
    """
    return VSpace(aggregate, num_elements, number_of, zeros, tf.ones_like)


def zeros(shape: Any, dtype: Any) -> Any:
    """Return zeros of a shape, or of that of a tensor."""
    if not isinstance(shape, tf.Tensor):
        return tf.zeros(shape, dtype)
    # Of a tensor nothing but the shape has to be held; a list is made of another one.
    same = dtype == tf.variant
    return tf.zeros_like(shape) if same else tf.zeros(tf.shape(shape), dtype)


def aggregate(gradients: Sequence[Any]) -> Any:
    """Return the sum of tensors or `tf.IndexedSlices`."""
    if len(gradients) == 1:
        return gradients[0]
    if not all(isinstance(g, tf.IndexedSlices) for g in gradients):
        return tf.add_n([tf.convert_to_tensor(g) for g in gradients])
    values = tf.concat([g.values for g in gradients], 0)
    # Of several widths the wider one holds all.
    kinds = {g.indices.dtype for g in gradients}
    kind = kinds.pop() if len(kinds) == 1 else tf.int64
    indices = tf.concat([tf.cast(g.indices, kind) for g in gradients], 0)
    return tf.IndexedSlices(values, indices, gradients[0].dense_shape)


def num_elements(gradient: Any) -> int:
    """Return the number of elements; dimensions that are not known count as one."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    dims = () if gradient.shape.rank is None else gradient.shape.as_list()
    return math.prod(n or 1 for n in dims)
