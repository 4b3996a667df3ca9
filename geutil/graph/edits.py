"""Changes of edges, here and nowhere else; ops that are live after them.

A caller lists the edits it wants. `apply_edits` checks all of them, changes nothing
when one is refused, and writes into the open transactions how to undo the rest.

An op is retired when a rewrite leaves it without readers. Retired ops stay in the
graph, but they are never matched again and do not count as readers. The graph remembers
them from one call to the next; one that somebody reads again counts again.

The territory of a rewrite holds the ops it may match, and those of them that must
survive.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import tensorflow as tf

from geutil.errors import (
    CycleError,
    FinalizedGraphError,
    StaleGraphError,
    TransformError,
)
from geutil.graph import (
    adjacency,
    creation,
    gradient_functions,
    op_types,
    replicas,
    v1_control_flow,
)
from geutil.graph.adjacency import Rewiring, TopologicalOrder
from geutil.graph.runtime import drop_missing_colocation
from geutil.graph.state import (
    UndoStep,
    check_editable,
    count_ops,
    ops_since,
    slot,
    state_of,
)
from geutil.graph.types import (
    Graph,
    IdentitySet,
    Operation,
    Tensor,
    is_func_graph,
    is_op,
    require_graph,
)

_logger = logging.getLogger("geutil")
_SHOWN = 8
"""How many names of a long cycle a message shows from either end."""


@dataclass(frozen=True, eq=False, slots=True)
class InputEdit:
    """Input `index` of `op` shall be `tensor`."""

    # In a check, None means the output of an op that will be made for it: a
    # placeholder.

    op: Operation
    index: int
    tensor: Tensor | None


def reader_edits(
    old: Tensor, new: Tensor, types: Collection[str] | None = None
) -> list[InputEdit]:
    """Return the edits that let readers of a tensor, of some types, read another."""
    return [
        InputEdit(reader, index, new)
        for reader in dict.fromkeys(old.consumers())
        if types is None or reader.type in types
        for index, t in enumerate(reader.inputs)
        if t is old
    ]


@dataclass(frozen=True, eq=False)
class ControlEdit:
    """The control inputs of `op` shall be `control_inputs`."""

    # Those that it has keep their order as long as all of them stay.

    op: Operation
    control_inputs: tuple[Operation, ...]


def apply_edits(
    graph: Graph,
    inputs: Sequence[InputEdit] = (),
    controls: Sequence[ControlEdit] = (),
) -> None:
    """Check the edits as a whole, then apply them."""
    if not inputs and not controls:
        return
    _check(graph, inputs, controls, keep_order=True)
    state_of(graph).edits += 1
    with _journal(graph) as journal:
        journal.extend(_control_steps(inputs, controls))
        # `before` grows with the edits: an interrupt undoes those made so far.
        before: list[Tensor] = []
        ops = tuple(edit.op for edit in inputs)
        journal.extend(_follow_steps(ops))
        journal.append(UndoStep(partial(_put_back, inputs, before), ops))
        for edit in inputs:
            before.append(edit.op.inputs[edit.index])
            _set_input(edit.op, edit.index, edit.tensor)
        for change in controls:
            _set_controls(change.op, change.control_inputs)


def check_edits(
    graph: Graph,
    inputs: Sequence[InputEdit] = (),
    controls: Sequence[ControlEdit] = (),
) -> None:
    """Raise the errors that `apply_edits` would raise, and change nothing."""
    _check(graph, inputs, controls, keep_order=False)


def _check(
    graph: Graph,
    inputs: Sequence[InputEdit],
    controls: Sequence[ControlEdit],
    *,
    keep_order: bool,
) -> None:
    """Raise if the graph, the frames of loops or a cycle forbid edits."""
    ops = [edit.op for edit in inputs] + [change.op for change in controls]
    if not ops:
        return
    check_editable(graph, ops)
    for edit in inputs:
        if edit.tensor is not None:
            v1_control_flow.check_frames(edit.op, edit.tensor)
    for change in controls:
        # Frames are checked for new edges only: the graph came with the others.
        present = frozenset(change.op.control_inputs)
        for control in change.control_inputs:
            if control not in present:
                v1_control_flow.check_control_frames(change.op, control)
    _check_cycles(graph, inputs, controls, keep_order)


def note_undo(graph: Graph, *steps: UndoStep) -> None:
    """Add undo steps to the innermost open transaction, ahead of the change."""
    journals = _journals(graph)
    if journals:
        journals[-1].extend(steps)


def _journals(graph: Graph) -> list[list[UndoStep]]:
    return state_of(graph).journals.setdefault(threading.get_ident(), [])


@contextmanager
def _journal(graph: Graph) -> Iterator[list[UndoStep]]:
    """Undo the changes of a block that raises; an inner one leaves it to the outer."""
    journals = _journals(graph)
    journal: list[UndoStep] = []
    place = len(journals)
    journals.append(journal)
    try:
        yield journal
        # An interrupt may come anywhere: to undo a step twice does no harm.
        if place:
            journals[place - 1] += journal
    except BaseException:
        # With those of blocks inside that an interrupt kept from ending.
        del journals[place:]
        _undo(graph, journal)
        raise
    del journals[place:]


@contextmanager
def transaction(graph: Graph) -> Iterator[None]:
    """Undo every rewiring made in the block when the block raises.

    Inputs, control inputs and the subgraph views that geutil updated are restored. Ops
    created in the block stay, unconnected: TensorFlow cannot delete an op. Blocks can
    be nested; each undoes its own part.

    Args:
        graph: a `tf.Graph`.

    Raises:
        ArgumentTypeError: `graph` is not a `tf.Graph`.

    Cost: linear in the rewirings made in the block.

    Example:
        >>> import tensorflow as tf
        >>> import geutil as ge
        >>> graph = tf.Graph()
        >>> with graph.as_default():
        ...     x, y = tf.constant(1.0, name="x"), tf.constant(2.0, name="y")
        ...     z = tf.identity(x)
        >>> try:
        ...     with ge.transaction(graph):
        ...         _ = ge.reroute_ts(y, x)
        ...         raise KeyError("something went wrong later")
        ... except KeyError:
        ...     z.op.inputs[0].name
        'x:0'
    """
    require_graph(graph)
    with _journal(graph) as journal:
        try:
            yield
        except BaseException:
            _warn_of_runs(graph, journal)
            raise


def _warn_of_runs(graph: Graph, journal: Iterable[UndoStep]) -> None:
    try:
        check_editable(graph, [op for step in journal for op in step.ops])
    except (StaleGraphError, FinalizedGraphError) as error:
        _logger.warning("a transaction is undone, but not for everybody: %s", error)


def _check_cycles(
    graph: Graph,
    inputs: Iterable[InputEdit],
    controls: Iterable[ControlEdit],
    keep_order: bool,
) -> None:
    """Raise if edits close a cycle; `keep_order` adapts the order of ops to them."""
    state = state_of(graph)
    # The order is made for the first edit: a graph that is only read needs none.
    if state.order is None:
        state.order = TopologicalOrder()
    state.order.refresh(graph)
    cycle = state.order.rewire(_rewiring(inputs, controls), keep=keep_order)
    if cycle is not None:
        names = tuple(op.name for op in (*cycle, cycle[0]))
        raise CycleError(
            f"the edit would close a cycle: {_shortened(names)}; cut one of these "
            "edges first, for example with geutil.detach_inputs, or read a copy "
            "instead (geutil.graph_replace)",
            names,
        )


def _shortened(names: Sequence[str], between: str = " -> ") -> str:
    left_out = len(names) - 2 * _SHOWN
    if left_out > 0:
        names = [*names[:_SHOWN], f"... ({left_out} more) ...", *names[-_SHOWN:]]
    return between.join(names)


def _rewiring(inputs: Iterable[InputEdit], controls: Iterable[ControlEdit]) -> Rewiring:
    return Rewiring(
        {(e.op, e.index): None if e.tensor is None else e.tensor.op for e in inputs},
        {edit.op: edit.control_inputs for edit in controls},
    )


def _follow_steps(ops: Iterable[Operation]) -> Iterator[UndoStep]:
    """Update gradients to the inputs of their ops; yield how to undo that."""
    for op in dict.fromkeys(ops):
        # No op of another type has a gradient that is a closure.
        if op.type != gradient_functions.CLOSURE_TYPE:
            continue
        unfollow = gradient_functions.follow_inputs(op)
        if unfollow is not None:
            yield UndoStep(unfollow, (op,))


def _put_back(edits: Sequence[InputEdit], before: Sequence[Tensor]) -> None:
    """Restore the inputs that ops read before; the last edits come first."""
    for edit, tensor in reversed(list(zip(edits, before, strict=False))):
        with _told_if_it_fails(edit.op):
            edit.op._update_input(edit.index, tensor)


def _set_input(op: Operation, index: int, tensor: Tensor | None) -> None:
    op._update_input(index, tensor)


def _control_steps(
    inputs: Iterable[InputEdit], controls: Iterable[ControlEdit]
) -> Iterator[UndoStep]:
    """Yield undo steps that restore the control inputs of each op, in their order."""
    # An op whose inputs change lists its control inputs in another order afterwards.
    changed = dict.fromkeys(edit.op for edit in controls)
    rewired_ops = dict.fromkeys(edit.op for edit in inputs)
    for op in rewired_ops:
        if op not in changed and op.control_inputs:
            changed[op] = None
    for op in changed:
        yield UndoStep(
            partial(_restore_controls, op, adjacency.control_input_orders(op)), (op,)
        )


def _set_controls(op: Operation, control_inputs: Sequence[Operation]) -> None:
    """Set the control inputs of an op; if none is removed, add the new ones only."""
    # TensorFlow can take off all control inputs only, not one, and needs quadratic time
    # to put many on.
    present = dict.fromkeys(op.control_inputs)
    if not present.keys() <= frozenset(control_inputs):
        op._remove_all_control_inputs()
        present = {}
    op._add_control_inputs([c for c in control_inputs if c not in present])


def _restore_controls(op: Operation, before: tuple[list[Operation], ...]) -> None:
    if adjacency.control_input_orders(op) != before:
        op._remove_all_control_inputs()
        op._add_control_inputs(before[0])


def _undo(graph: Graph, journal: list[UndoStep]) -> None:
    for step in reversed(journal):
        with _told_if_it_fails(*step.ops):
            step.undo()
    state = state_of(graph)
    state.edits += 1
    # The order was mended for edges that are gone again; the next edit makes it anew.
    state.order = None


@contextmanager
def _told_if_it_fails(*ops: Operation) -> Iterator[None]:
    """Log errors raised in a block, so that the remaining undo steps still run."""
    try:
        yield
    except BaseException as error:
        names = _shortened([f"'{op.name}'" for op in ops], ", ") or "something"
        _logger.error("%s could not be put back: %s", names, error)


def set_devices(graph: Graph, devices: Mapping[Operation, str]) -> None:
    """Put ops on devices; a transaction that fails puts them back."""
    check_editable(graph, list(devices))
    for op, device in devices.items():
        undo = partial(creation.set_device, op, op.device)
        note_undo(graph, UndoStep(undo))
        creation.set_device(op, device)


def results_of(graph: Graph) -> list[Tensor]:
    """Return the results of a FuncGraph; of another graph none, since it tells none."""
    return list(graph.outputs) if is_func_graph(graph) else []


def set_results(graph: Graph, tensors: Iterable[Tensor]) -> None:
    """Set the results of a FuncGraph; a failed transaction restores the old ones."""
    if not is_func_graph(graph):
        return
    before = graph.outputs

    def undo() -> None:
        graph.outputs = before

    note_undo(graph, UndoStep(undo))
    graph.outputs = list(tensors)


def order_exchanges(graph: Graph) -> None:
    """Order sums over replicas topologically, one after another."""
    # TensorFlow chains them on each device in the order in which they were made, when
    # it has traced the function. A sum that an edit puts before an older one would wait
    # for that for ever. Each replica has to call this.
    replicas.merge_call(None, lambda _strategy, _contents: _order_exchanges(graph))


def _order_exchanges(graph: Graph) -> None:
    manager = graph.experimental_acd_manager
    chains = _chains(graph)
    if manager is None or not chains:
        return
    place = {
        op: i for i, op in enumerate(adjacency.topological_sort(graph.get_operations()))
    }
    # Each sum has an op on every device, made in turn: all take the order of one.
    first = chains[0]
    order = sorted(range(len(first)), key=lambda i: place[first[i]])
    if any(len(chain) != len(first) for chain in chains):
        raise TransformError(
            "replicas have different numbers of sums over replicas on their devices: "
            f"{[len(chain) for chain in chains]}; quantize each replica alike"
        )
    if order == sorted(order):
        return
    pairs = [pair for chain in chains for pair in pairwise([chain[i] for i in order])]
    controls = [
        ControlEdit(op, (*op.control_inputs, before))
        for before, op in pairs
        if before not in op.control_inputs
    ]
    apply_edits(graph, controls=controls)
    # The last stays in TensorFlow's own chain, before what is made later.
    for before, _ in pairs:
        if _INDEPENDENT not in before.node_def.attr:
            manager.run_independently(before)


_INDEPENDENT = "_independent_side_effects"


def _chains(graph: Graph) -> list[list[Operation]]:
    """Return the ops that TensorFlow would chain on each device, by their tokens."""
    chains: dict[int, list[Operation]] = {}
    for op in graph.get_operations():
        if op.type in op_types.REDUCTIONS_OVER_REPLICAS:
            for t in op.inputs:
                if t.dtype == tf.resource:
                    chains.setdefault(id(t), []).append(op)
    return list(chains.values())


_FEW = 8
"""How many readers besides a match are looked through for one to name."""


class _Retired(dict[Operation, None]):
    """Ops that a rewrite rule left without readers, in order of retirement."""


class Liveness:
    """The readers of each op of a graph, retired ones left out."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._retired = slot(graph, _Retired)
        self._readers: dict[Operation, set[Operation]] = {}
        self._revive(list(self._retired))

    def is_retired(self, op: Operation) -> bool:
        """Return whether a rewrite left `op` without readers."""
        return op in self._retired

    def readers(self, op: Operation) -> set[Operation]:
        """Return the ops that read an output of `op`; not to be changed."""
        readers = self._readers.get(op)
        if readers is None:
            readers = {
                reader
                for tensor in op.outputs
                for reader in tensor.consumers()
                if reader not in self._retired
            }
            self._readers[op] = readers
        return readers

    def waiting(self, op: Operation) -> list[Operation]:
        """Return the ops that have `op` as a control input, in graph order."""
        return [c for c in adjacency.control_outputs(op) if c not in self._retired]

    def take_in(self, ops: Iterable[Operation]) -> None:
        """Add the present inputs of new or rewired ops."""
        for op in ops:
            for tensor in op.inputs:
                readers = self._readers.get(tensor.op)
                if readers is not None:
                    readers.add(op)

    def forget(self, ops: Iterable[Operation]) -> None:
        """Forget the readers of `ops`, which are looked up when next needed."""
        for op in ops:
            self._readers.pop(op, None)

    def retire(
        self, ops: Iterable[Operation], spared: Callable[[Operation], bool]
    ) -> list[Operation]:
        """Retire those of `ops` that nobody reads, and ops that only they read."""
        retired: list[Operation] = []
        first = adjacency.graph_order(dict.fromkeys(ops))
        replaced_ops = frozenset(first)
        # Taken from the end: readers are retired before their producers are asked.
        queue = first
        while queue:
            op = queue.pop()
            if op in self._retired or self.readers(op) or self.waiting(op):
                continue
            # An op outside of the match may have effects or be fed, read or not.
            if spared(op) or (op not in replaced_ops and _must_stay(op)):
                continue
            self._mark(op)
            retired.append(op)
            for producer in dict.fromkeys(t.op for t in op.inputs):
                self.readers(producer).discard(op)
                queue.append(producer)
        return retired

    def abandon(self, ops: Iterable[Operation]) -> None:
        """Retire ops that were made in vain, whoever reads them among themselves."""
        # They may be colocated with an op that was to be made and was not.
        for op in ops:
            drop_missing_colocation(op)
            self._retired.setdefault(op)

    def _mark(self, op: Operation) -> None:
        note_undo(self._graph, UndoStep(lambda: self._unmark(op)))
        self._retired[op] = None

    def _unmark(self, op: Operation) -> None:
        self._retired.pop(op, None)

    def revive(self, ops: Iterable[Operation]) -> list[Operation]:
        """Revive those of `ops` that are read; return them."""
        return self._revive([op for op in ops if op in self._retired])

    def _revive(self, queue: list[Operation]) -> list[Operation]:
        """Revive retired ops that have readers, and then their producers."""
        revived: list[Operation] = []
        while queue:
            op = queue.pop()
            if op not in self._retired:
                continue
            # The known readers lack those that were retired when they were asked for.
            self.forget([op])
            if self.readers(op) or self.waiting(op):
                note_undo(self._graph, UndoStep(partial(self._retired.setdefault, op)))
                self._unmark(op)
                revived.append(op)
                producers = [t.op for t in op.inputs]
                self.forget(producers)
                queue.extend(producers)
        return revived


@contextmanager
def undone_on_error(graph: Graph, liveness: Liveness | None = None) -> Iterator[None]:
    """Put back all edges when the block raises; the ops that it made count no more."""
    count = count_ops(graph)
    try:
        with transaction(graph):
            yield
    except BaseException:
        # The edges are back; the ops that were built for them lead nowhere.
        (liveness or Liveness(graph)).abandon(ops_since(graph, count))
        raise


def _must_stay(op: Operation) -> bool:
    return op.type.startswith("Placeholder") or bool(op.op_def.is_stateful)


class Territory:
    """The limits of a match that its pattern does not state."""

    def __init__(
        self,
        graph: Graph,
        liveness: Liveness,
        within: Iterable[Operation] | None = None,
        keep: Iterable[Operation | Tensor] = (),
    ) -> None:
        listed = list(keep)
        self.liveness = liveness
        self.within = None if within is None else set(within)
        self._kept_ops = frozenset(e for e in listed if is_op(e))
        self._kept = IdentitySet(e for e in listed if not is_op(e))
        self._results = IdentitySet(graph.outputs if is_func_graph(graph) else ())

    def protection(self, op: Operation) -> str | None:
        """Return why the outputs of `op` must survive, or None."""
        if op in self._kept_ops:
            return f"'{op.name}' is in keep"
        for tensor in op.outputs:
            if tensor in self._kept:
                return f"'{tensor.name}' is in keep"
            if tensor in self._results:
                return f"'{tensor.name}' is an output of the function"
        return None

    def outside_reader(self, op: Operation, ops: Iterable[Operation]) -> str | None:
        """Return who needs an output of `op` besides `ops`, or None."""
        protection = self.protection(op)
        if protection is not None:
            return protection
        members = frozenset(ops)
        readers = self.liveness.readers(op)
        if len(readers) > len(members) + _FEW:
            # Not looked through: a constant may be read by every op there is.
            return f"'{op.name}' has {len(readers)} readers"
        others = [r for r in readers if r not in members]
        if not others:
            return None
        # A set has no order of its own; the oldest reader is the one to name.
        return (
            f"'{min(others, key=adjacency.creation_index).name}' reads '{op.name}' too"
        )

    def objection(self, root: Operation, ops: Iterable[Operation]) -> str | None:
        """Return why `ops` cannot be a match with this root, or None."""
        context = adjacency.control_flow_context(root)
        for op in ops:
            if adjacency.control_flow_context(op) is not context:
                return (
                    f"'{op.name}' runs {_where(op)} but '{root.name}' {_where(root)}; "
                    "one match runs in one context"
                )
            if self.within is not None and op not in self.within:
                return f"'{op.name}' is not among ops"
            if op is not root and self.liveness.is_retired(op):
                return f"'{op.name}' was replaced before"
        return None


def _where(op: Operation) -> str:
    name = creation.context_name(op)
    return "outside every v1 context" if name is None else f"in '{name}'"
