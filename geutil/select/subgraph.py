"""A view of part of a graph: its ops, and the tensors that it takes and gives."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_index
from types import TracebackType
from typing import Any

from geutil.errors import ArgumentTypeError, SelectionError
from geutil.graph import types
from geutil.graph.adjacency import consumers
from geutil.graph.types import Element, Graph, Operation, Tensor
from geutil.lazy import Shown
from geutil.select import selections, walks
from geutil.select.selections import ListView


class SubGraphView(Shown):
    """Part of a graph, viewed as a function from its inputs to its outputs.

    A view has ops, input tensors and output tensors. An input or output is *connected*
    if an op of the view reads or computes it, and *passthrough* otherwise: such a
    tensor goes directly from the inputs to the outputs. Remapping drops inputs (they
    are then *hidden*: taken as given) or repeats and reorders outputs. A view does not
    change the graph. Functions that rewire views update them in place; other edits may
    leave a view out of date, so keep views short-lived.

    Args:
        inside_ops: the ops (anything that `make_list_of_op` takes).
        passthrough_ts: tensors; those that an op of the view reads or computes are left
            out.

    Raises:
        ArgumentTypeError: an argument is not made of ops, or of tensors.
        SelectionError: the elements belong to different graphs.

    Cost: linear in the ops and their edges; look-ups by tensor or op take constant
    time after a linear first one.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> with tf.Graph().as_default():
        ...     x = tf.constant(1.0, name="x")
        ...     y = tf.negative(x, name="y")
        >>> view = ge.SubGraphView(y.op)
        >>> view.inputs, view.outputs
        ([<tf.Tensor 'x:0' shape=() dtype=float32>],
         [<tf.Tensor 'y:0' shape=() dtype=float32>])
    """

    _graph: Graph | None
    _ops: list[Operation]
    _input_ts: list[Tensor]
    _output_ts: list[Tensor]
    _passthrough_ts: list[Tensor]
    _lookups: dict[str, tuple[list[Any], dict[int, int]]]

    def __init__(self, inside_ops: Any = (), passthrough_ts: Any = ()) -> None:
        ops = list(dict.fromkeys(selections.make_list_of_op(inside_ops)))
        passthroughs = selections.make_list_of_t(passthrough_ts)
        self._graph = selections.graph_of_all((*ops[:1], *passthroughs))
        self._ops = ops
        self._lookups = {}
        if passthroughs:
            members = frozenset(ops)
            # A tensor that the ops make or read is an end of theirs already.
            passthroughs = types.unique(
                t
                for t in passthroughs
                if t.op not in members and members.isdisjoint(t.consumers())
            )
        inputs, outputs = walks.ends_of(ops)
        self._passthrough_ts = passthroughs
        self._input_ts = inputs + passthroughs
        self._output_ts = outputs + passthroughs

    @classmethod
    def from_parts(
        cls,
        graph: Graph | None,
        ops: list[Operation],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> SubGraphView:
        """Return a view of consistent parts, without checking their edges.

        Args:
            graph: the graph; None if there are no ops.
            ops: the ops, each once.
            inputs: tensors that they read and do not compute, each once.
            outputs: tensors that they compute.
        """
        view = cls.__new__(cls)
        view._graph, view._ops = graph, ops
        view._input_ts, view._output_ts = inputs, outputs
        view._passthrough_ts, view._lookups = [], {}
        return view

    # -- what the view holds ---------------------------------------------------------

    @property
    def graph(self) -> Graph | None:
        """The graph, or None for the empty view."""
        return self._graph

    @property
    def ops(self) -> list[Operation]:
        """The ops."""
        return self._ops

    @property
    def inputs(self) -> ListView:
        """The input tensors, connected ones first."""
        return ListView(self._input_ts)

    @property
    def outputs(self) -> ListView:
        """The output tensors, connected ones first."""
        return ListView(self._output_ts)

    @property
    def connected_inputs(self) -> list[Tensor]:
        """The inputs that an op of the view reads."""
        return [t for t in self._input_ts if not self.is_passthrough(t)]

    @property
    def connected_outputs(self) -> list[Tensor]:
        """The outputs that an op of the view computes."""
        return [t for t in self._output_ts if not self.is_passthrough(t)]

    @property
    def passthroughs(self) -> ListView:
        """The tensors that go directly from the inputs to the outputs."""
        return ListView(self._passthrough_ts)

    def consumers(self) -> list[Operation]:
        """Return the ops that read an output, each once, output by output."""
        return types.unique(op for t in self._output_ts for op in consumers(t))

    # -- look-ups --------------------------------------------------------------------

    def op(self, op_id: int) -> Operation:
        """Return the op at an index."""
        return self._ops[op_id]

    def is_passthrough(self, t: Tensor) -> bool:
        """Return whether `t` is a passthrough tensor."""
        return bool(self._passthrough_ts) and id(t) in self._index("_passthrough_ts")

    def input_index(self, t: Tensor) -> int:
        """Return the index of `t` among the inputs.

        Raises:
            SelectionError: it is not among them.
        """
        return self._position("_input_ts", t, "an input")

    def output_index(self, t: Tensor) -> int:
        """Return the first index of `t` among the outputs.

        Raises:
            SelectionError: it is not among them.
        """
        return self._position("_output_ts", t, "an output")

    def find_op_by_name(self, op_name: str) -> Operation:
        """Return the op called `op_name`.

        Raises:
            SelectionError: the view has no such op.
        """
        if self._graph is not None:
            try:
                op = self._graph.get_operation_by_name(op_name)
            except (KeyError, ValueError):
                op = None
            # The graph may have the op outside of the view.
            if op is not None and id(op) in self._index("_ops"):
                return op
        raise SelectionError(f"no op '{op_name}' in {self!r}")

    def _position(self, attribute: str, t: Tensor, what: str) -> int:
        position = self._index(attribute).get(id(t))
        if position is None:
            name = getattr(t, "name", t)
            raise SelectionError(f"'{name}' is not {what} of {self!r}")
        return position

    def _index(self, attribute: str) -> dict[int, int]:
        """Return positions by id in one of the lists, made once for each list."""
        elements = getattr(self, attribute)
        lookup = self._lookups.get(attribute)
        if lookup is None or lookup[0] is not elements:
            lookup = self._lookups[attribute] = (
                elements,
                types.index_by_identity(elements),
            )
        return lookup[1]

    # -- views made from this one ----------------------------------------------------

    def copy(self) -> SubGraphView:
        """Return an equal view; the graph is not copied."""
        result = type(self).__new__(type(self))
        result._assign_from(self)
        return result

    __copy__ = copy

    def remap_inputs(self, new_input_indices: Iterable[int | Tensor]) -> SubGraphView:
        """Return a view with these inputs only, in this order.

        Args:
            new_input_indices: indices into the inputs, or inputs, without repetitions.

        Raises:
            ArgumentTypeError: an element is neither an index nor a tensor.
            SelectionError: an index is out of range, a tensor is not an input, or one
                of them is repeated.

        Example:
            >>> import tensorflow as tf
            >>> import geutil as ge
            >>> with tf.Graph().as_default():
            ...     z = tf.add(tf.constant(1.0, name="x"), tf.constant(2.0, name="y"))
            >>> view = ge.sgv(z.op)
            >>> [t.name for t in view.remap_inputs([1]).inputs]
            ['y:0']
            >>> [t.name for t in view.remap_inputs([view.inputs[1]]).inputs]
            ['y:0']
        """
        return self.remap(new_input_indices=new_input_indices)

    def remap_outputs(self, new_output_indices: Iterable[int | Tensor]) -> SubGraphView:
        """Return a view with these outputs, in this order; repetitions are allowed.

        Args:
            new_output_indices: indices into the outputs, or outputs.

        Raises:
            ArgumentTypeError: an element is neither an index nor a tensor.
            SelectionError: an index is out of range, or a tensor is not an output.
        """
        return self.remap(new_output_indices=new_output_indices)

    def remap(
        self,
        new_input_indices: Iterable[int | Tensor] | None = None,
        new_output_indices: Iterable[int | Tensor] | None = None,
    ) -> SubGraphView:
        """Return a view with other inputs and outputs; None keeps the current ones.

        Raises:
            ArgumentTypeError: an element is neither an index nor a tensor.
            SelectionError: an index is out of range, a tensor is not in the view, or an
                input is repeated.
        """
        result = self.copy()
        if new_input_indices is not None:
            chosen = _listed(new_input_indices)
            indices = [self._place("_input_ts", i, "an input") for i in chosen]
            # As in contrib.graph_editor: an output may be repeated, an input may not.
            if len(set(indices)) != len(indices):
                raise SelectionError(f"an input may be listed once only, got {indices}")
            result._input_ts = [self._input_ts[i] for i in indices]
        if new_output_indices is not None:
            chosen = _listed(new_output_indices)
            indices = [self._place("_output_ts", i, "an output") for i in chosen]
            result._output_ts = [self._output_ts[i] for i in indices]
        return result

    def _place(self, attribute: str, chosen: Any, what: str) -> int:
        """Return the index of an element, chosen by its index or as a tensor."""
        if types.is_tensor(chosen):
            return self._position(attribute, chosen, what)
        try:
            place = as_index(chosen)
        except TypeError:
            raise ArgumentTypeError(
                f"expected an index or a tensor, got {types.type_name(chosen)}"
            ) from None
        count = len(getattr(self, attribute))
        if not 0 <= place < count:
            raise SelectionError(
                f"there is no index {place}: the view has {count} here"
            )
        return place

    def remap_default(
        self, remove_input_map: bool = True, remove_output_map: bool = True
    ) -> SubGraphView:
        """Return a view with the default inputs and outputs of its ops.

        Args:
            remove_input_map: whether to reset the inputs.
            remove_output_map: whether to reset the outputs.
        """
        result = self.copy()
        inputs, outputs = walks.ends_of(self._ops)
        if remove_input_map:
            result._input_ts = inputs + self._passthrough_ts
        if remove_output_map:
            result._output_ts = outputs + self._passthrough_ts
        return result

    def remap_outputs_make_unique(self) -> SubGraphView:
        """Return a view with each output once."""
        result = self.copy()
        result._output_ts = types.unique(self._output_ts)
        return result

    def remap_outputs_to_consumers(self) -> SubGraphView:
        """Return a view with each output repeated for each input that reads it."""
        result = self.copy()
        result._output_ts = [
            t for t in types.unique(self._output_ts) for _ in range(len(t.consumers()))
        ]
        return result

    def remove_unused_ops(self, control_inputs: bool = True) -> SubGraphView:
        """Return a view without the ops that neither use inputs nor lead to outputs.

        Args:
            control_inputs: whether a control input of another op counts as used.
        """
        result = self.copy()
        used = set(
            walks.get_walks_union_ops(
                self.connected_inputs,
                self.connected_outputs,
                within_ops=self._ops,
                control_inputs=control_inputs,
            )
        )
        result._ops = [op for op in self._ops if op in used]
        return result

    def _assign_from(self, other: SubGraphView) -> None:
        """Make this view equal to `other`."""
        if not isinstance(other, SubGraphView):
            raise ArgumentTypeError(
                f"expected a SubGraphView, got {types.type_name(other)}"
            )
        self._graph = other._graph
        self._ops = list(other._ops)
        self._passthrough_ts = list(other._passthrough_ts)
        self._input_ts = list(other._input_ts)
        self._output_ts = list(other._output_ts)
        self._lookups = {}

    # -- Python protocol -------------------------------------------------------------

    def __bool__(self) -> bool:
        return self._graph is not None

    def __enter__(self) -> SubGraphView:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing to release: the block only shows how long the view shall live."""

    def __repr__(self) -> str:
        return (
            f"<SubGraphView: {len(self._ops)} ops, {len(self._input_ts)} inputs, "
            f"{len(self._output_ts)} outputs>"
        )

    def __str__(self) -> str:
        if not self:
            return "SubGraphView: empty"
        lines = [f"SubGraphView (graphid={id(self._graph)}):"]
        for title, elements in (
            ("ops", self._ops),
            ("inputs", self._input_ts),
            ("outputs", self._output_ts),
        ):
            lines.append(
                f"** {title}[{len(elements)}]:" if elements else f"** {title}: empty"
            )
            lines += map(self._label, elements)
        return "\n".join([*lines, ""])

    def _label(self, element: Element) -> str:
        name: str = element.name
        return f"{name} *" if self.is_passthrough(element) else name


def _listed(chosen: Any) -> list[Any]:
    # To iterate over a tensor would make ops.
    if not selections.is_iterable(chosen):
        raise ArgumentTypeError(
            f"expected a list of indices or tensors, got {types.type_name(chosen)}"
        )
    return list(chosen)
