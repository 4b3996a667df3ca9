"""The tape: which operations made which tensors, and how to go back through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from geutil.errors import TapeError
from geutil.gradients.tape.captured import number_of
from geutil.gradients.tape.recording import record_graph
from geutil.graph.kinds import Tensor

Backward = Callable[..., Any]


class TapeEntry(NamedTuple):
    """One operation that was run.

    Attributes:
        op_type: what kind of operation it is.
        output_ids: the ids of the tensors that it made.
        output_shape_and_dtype: for each of them its shape and dtype, from which zeros
            are made where no gradient arrives; None where the backward function wants
            None instead.
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

    A tape holds ids of tensors, and no tensor: what keeps an intermediate alive is the
    backward function that needs it, and who records must not hold on to more. A tape is
    used once: `imperative_grad` takes the entries out as it goes through them.

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
        """Tell whether an operation on the tape made a tensor."""
        return number_of(tensor) in self._tensor_to_op

    def record(
        self,
        op_type: str,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        backward_function: Backward,
    ) -> None:
        """Note an operation.

        Args:
            op_type: what kind it is, for messages and for what its gradient accepts.
            outputs: the tensors that it made: objects with a shape and a dtype.
            inputs: the tensors that it read. One that is read twice is listed twice.
            backward_function: takes the gradients of the outputs, and returns those of
                the inputs.

        Raises:
            TapeError: an output was recorded before.

        Cost: constant.
        """
        kinds = tuple((t.shape, t.dtype) for t in outputs)
        self._add(
            TapeEntry(
                op_type,
                tuple(map(number_of, outputs)),
                kinds,
                tuple(map(number_of, inputs)),
                backward_function,
            )
        )

    def export(self) -> tuple[dict[int, int], dict[int, TapeEntry]]:
        """Hand over what was recorded; the tape is empty afterwards.

        Returns:
            `(tensor_to_op, op_to_entry)`: for the id of each tensor that an operation
            made the number of that operation, and for each number the entry.
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
            xs: tensors and variables to differentiate by.
            wrap: is given each backward function, and returns the one to record.

        Raises:
            TapeError: an op between them is in a loop or conditional of version 1,
                whose gradients need what `tf.gradients` alone knows.

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
        for fields in record_graph(ys, xs):
            entry = TapeEntry(*fields)
            if wrap is not None:
                wrapped = wrap(entry.backward_function)
                entry = entry._replace(backward_function=wrapped)
            tape._add(entry)
        return tape

    def _add(self, entry: TapeEntry) -> None:
        for made in entry.output_ids:
            if made in self._tensor_to_op:
                raise TapeError(
                    f"a tensor that '{entry.op_type}' made is on the tape already; "
                    "record each operation once"
                )
        self._op_to_entry[self._count] = entry
        self._tensor_to_op.update(dict.fromkeys(entry.output_ids, self._count))
        self._count += 1
