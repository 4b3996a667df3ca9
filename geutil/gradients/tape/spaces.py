"""The spaces of gradients.

TensorFlow's tensors, captured ones and numbers that stand for them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from geutil.graph import functions, runtime
from geutil.graph.types import Graph, is_func_graph


class Identifiers:
    """Gives each object a number of its own.

    The number that Python itself gives an object is used again once the object is
    gone, and on a tape it must not be.
    """

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


tensor_id = Identifiers()
"""Returns the number of a tensor: of TensorFlow or numpy, in a graph or not."""


class CapturedTensors:
    """Follows captures to the tensors that they stand for.

    A FuncGraph reads what is outside by placeholders, one for each tensor. What they
    stand for, in the graphs around it or eager, is one tensor for all of them.
    """

    def __init__(self) -> None:
        self._outside: dict[Graph, dict[int, Any]] = {}

    def beyond(self, tensor: Any) -> Any:
        """Return what a tensor stands for: itself, but for placeholders of captures."""
        while hasattr(tensor, "graph") and tensor.op.type == "Placeholder":
            outside = self._of(tensor.graph).get(id(tensor))
            if outside is None:
                break
            tensor = outside
        return tensor

    def source(self, x: Any) -> Any:
        """Return the tensor that a tensor or variable stands for; None for others.

        That is the handle of a variable, or the reference to one without a handle.
        """
        if isinstance(x, tf.Variable):
            x = runtime.variable_handle(x)
        return self.beyond(x) if isinstance(x, tf.Tensor) else None

    def _of(self, graph: Graph) -> dict[int, Any]:
        if graph not in self._outside:
            pairs = functions.bindings(graph) if is_func_graph(graph) else []
            self._outside[graph] = {id(inside): outside for outside, inside in pairs}
        return self._outside[graph]


def number_of(tensor: Any) -> int:
    """Return the number of the tensor that a tensor or variable stands for.

    Arrays and eager tensors stand for themselves.
    """
    source = CapturedTensors().source(tensor)
    return tensor_id(tensor if source is None else source)


Array = np.ndarray[Any, Any]


class VSpace(NamedTuple):
    """What an engine needs to know of gradients: they can be added, and there is zero.

    Attributes:
        aggregate_fn: returns the sum of a list of gradients, at least one.
        num_elements_fn: returns how many elements a gradient holds.
        tensor_id: returns the number that stands for a tensor on the tape.
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
    return VSpace(_sum, np.size, tensor_id, np.zeros, np.ones_like)


def _sum(arrays: Sequence[Array]) -> Array:
    total, *others = arrays
    for other in others:
        total = total + other
    return total


Gradient = Any
"""A tensor, or `tf.IndexedSlices`."""


def tensorflow_vspace() -> VSpace:
    """Return the space of TensorFlow's tensors.

    Slices stay slices as long as all that is added is slices.

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
    """Return zeros.

    Args:
        shape: their shape, or a tensor of that shape. A list of tensors can only be
            made of such a list.
        dtype: their dtype.
    """
    if not isinstance(shape, tf.Tensor):
        return tf.zeros(shape, dtype)
    # The shape is all that has to be held of the tensor.
    same = dtype == tf.variant
    return tf.zeros_like(shape) if same else tf.zeros(tf.shape(shape), dtype)


def aggregate(gradients: Sequence[Gradient]) -> Gradient:
    """Return the sum of gradients."""
    if len(gradients) == 1:
        return gradients[0]
    if all(isinstance(g, tf.IndexedSlices) for g in gradients):
        return _concatenated(gradients)
    return tf.add_n([tf.convert_to_tensor(g) for g in gradients])


def _concatenated(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    values = tf.concat([s.values for s in slices], 0)
    # Of several widths the wider one holds all.
    kinds = {s.indices.dtype for s in slices}
    kind = slices[0].indices.dtype if len(kinds) == 1 else tf.int64
    indices = tf.concat([tf.cast(s.indices, kind) for s in slices], 0)
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def num_elements(gradient: Gradient) -> int:
    """Return the number of elements; dimensions that are not known count as one."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    shape = gradient.shape
    return 1 if shape.rank is None else int(np.prod([n or 1 for n in shape.as_list()]))
