"""Loops of a step, and what their backward pass could compute again.

The forward loop pushes values onto lists, and the loop of the backward pass pops one of
each every time it turns. Some of these values follow from others: of an LSTM the gates,
from what it reads and its state. Nothing is built here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from geutil.gradients.loops.least_cut import least_cut
from geutil.gradients.segments import why_kept
from geutil.gradients.step import PlainStep
from geutil.graph import function_calls, op_types
from geutil.graph.types import Graph, IdentitySet, Operation, Tensor
from geutil.memory.function_memory import Called, LoopBody, source_of
from geutil.memory.sizes import UNKNOWN, tensor_bytes
from geutil.memory.times import BODIES, HEAVY, op_time

LIGHT, ALL = 1, 2
"""How much of a loop runs again: no products and convolutions, or anything."""

_SMALL = 256
"""Bytes of values that stay in their lists: counters, shapes."""
_SEVERAL = "several loops read its lists"
_SHARED = "another op runs the same function"
_NOTHING = "no list of its own holds values that follow from others"
_NO_ROOM = "it would need more lists than it has"


@dataclass(frozen=True)
class Pile:
    """A list that a loop pushes a value onto each time it turns.

    Attributes:
        output: its place among the results of the loop.
        argument: its place among the arguments of the loop of the backward pass.
        value: the name of the value, in the body.
        pop: the name of the op of the other body that takes the value out again.
    """

    output: int
    argument: int
    value: str
    pop: str


@dataclass(frozen=True)
class LoopCut:
    """What a loop of the backward pass computes again, and from what.

    Attributes:
        dropped: the lists that are not filled.
        read: the values that get the first of these lists, in that order, since what
            runs again reads them.
        ops: the names of the ops of the body that run again.
        saved: the bytes that lists hold less, all iterations together.
        time: how much longer the loop takes, in the unit of `op_time`.
    """

    dropped: tuple[Pile, ...]
    read: tuple[str, ...]
    ops: tuple[str, ...]
    saved: int
    time: float


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop of the forward pass, with that of the backward pass.

    Attributes:
        forward: the loop.
        backward: the one that reads its lists.
        piles: the lists.
        cuts: for `LIGHT` and `ALL` what runs again, where that saves anything.
        reason: why nothing can, if nothing can.
    """

    forward: Operation
    backward: Operation
    piles: tuple[Pile, ...] = ()
    cuts: Mapping[int, LoopCut] = field(default_factory=dict)
    reason: str | None = None


def find_loops(step: PlainStep) -> list[Loop]:
    """Return the loops of a step that are differentiated, in the order of its ops.

    Args:
        step: the step with plain gradients.

    Cost: none without loops; otherwise linear in the ops of the step and of the bodies,
        but for the cuts (`least_cut`).
    """
    backward = frozenset(step.backward)
    ops = step.ops()
    loops = [op for op in ops if op.type in op_types.LOOPS and op not in backward]
    pairs = [(op, readers) for op in loops if (readers := _loops_behind(op, backward))]
    if not pairs:
        return []
    names = (n for c in function_calls.callers_in(step.graph) for n in c.names)
    callers = Counter(names)
    return [_loop(op, readers, step.calls, callers) for op, readers in pairs]


def _loops_behind(op: Operation, backward: Collection[Operation]) -> list[Operation]:
    """Return the loops of the backward pass that read lists of a loop."""
    readers = (
        reader
        for t in op.outputs
        if t.dtype == tf.variant
        for reader in t.consumers()
        if reader.type in op_types.LOOPS and reader in backward
    )
    return list(dict.fromkeys(readers))


def _loop(
    op: Operation,
    readers: Sequence[Operation],
    calls: Mapping[Operation, Called],
    callers: Mapping[str, int],
) -> Loop:
    """Return a loop with the best cut of each level, or why it has none."""
    if len(readers) > 1:
        return Loop(op, readers[0], reason=_SEVERAL)
    (reader,) = readers
    if any(callers[o.get_attr("body").name] > 1 for o in (op, reader)):
        return Loop(op, reader, reason=_SHARED)
    bodies = [calls[o].body if o in calls else None for o in (op, reader)]
    if bodies[0] is None or bodies[1] is None:
        return Loop(op, reader, reason=_NOTHING)
    piles = list(_piles(op, reader, bodies[0], bodies[1]))
    if not piles:
        others = any(t.consumers() not in ([reader], []) for t in _lists(op, reader))
        return Loop(op, reader, reason=_SEVERAL if others else _NOTHING)
    body = _Body(bodies[0], [pile.output for pile in piles])
    times = calls[op].times
    count = UNKNOWN if times is None else times
    cuts: dict[int, LoopCut] = {}
    reasons = []
    for level in (LIGHT, ALL):
        cut = body.cut(piles, count, with_heavy=level == ALL)
        if isinstance(cut, str):
            reasons.append(cut)
        elif not cuts or cut.saved > cuts[LIGHT].saved:
            cuts[level] = cut
    return Loop(op, reader, tuple(piles), cuts, None if cuts else reasons[-1])


def _lists(op: Operation, reader: Operation) -> Iterator[Tensor]:
    """Yield the lists of a loop that another one reads."""
    read = IdentitySet(reader.inputs)
    yield from (t for t in op.outputs if t.dtype == tf.variant and t in read)


def _piles(
    op: Operation, reader: Operation, body: Graph, backward_body: Graph
) -> Iterator[Pile]:
    """Yield the lists that one loop fills and the other one alone empties."""
    argument_of = {id(t): i for i, t in enumerate(reader.inputs)}
    for i, t in enumerate(op.outputs):
        argument = argument_of.get(id(t))
        if t.dtype != tf.variant or argument is None or t.consumers() != [reader]:
            continue
        begins = op.inputs[i]
        if begins.op.type != "EmptyTensorList" or begins.consumers() != [op]:
            continue
        push = source_of(body.outputs[i]).op
        if push.type != "TensorListPushBack":
            continue
        list_before, value = push.inputs
        if source_of(list_before) is not body.inputs[i] or value.dtype == tf.variant:
            continue
        placeholder = backward_body.inputs[argument]
        pops = placeholder.consumers()
        rest = source_of(backward_body.outputs[argument])
        if [pop.type for pop in pops] == ["TensorListPopBack"] and (
            rest is pops[0].outputs[0]
        ):
            yield Pile(i, argument, value.name, pops[0].name)


class _Body:
    """The body of a loop, and what its values weigh in a list.

    Args:
        graph: its FuncGraph.
        piled: the places of the results that are lists for the backward pass.
    """

    def __init__(self, graph: Graph, piled: Collection[int]) -> None:
        self._graph = graph
        self._body = LoopBody(graph)
        others = (i for i in range(len(graph.outputs)) if i not in piled)
        elements = (t for i in others for t in self._body.added(i))
        self._listed = IdentitySet(map(source_of, elements))

    def cut(
        self, piles: Sequence[Pile], count: int, *, with_heavy: bool
    ) -> LoopCut | str:
        """Return what runs again, or why nothing does.

        Args:
            piles: the lists.
            count: how often the loop turns.
            with_heavy: whether heavy ops may run again.
        """
        values = [self._graph.get_tensor_by_name(pile.value) for pile in piles]
        small = IdentitySet(t for t in values if tensor_bytes(t) <= _SMALL)
        pairs = [p for p in zip(piles, values, strict=True) if p[1] not in small]
        needed = [t for _, t in pairs]

        def runs_again(t: Tensor) -> bool:
            return t not in small and self._runs_again(t.op, with_heavy=with_heavy)

        tensors = _behind(needed, runs_again)
        number = {id(t): i for i, t in enumerate(tensors)}
        weights = [0 if t in small else self._bytes(t) for t in tensors]
        again = list(map(runs_again, tensors))
        # Lists of nothing new are no reason to compute, but for the list itself.
        cut = least_cut(
            [weight + 1 for weight in weights],
            [
                [number[id(t)] for t in tensor.op.inputs] if is_again else []
                for tensor, is_again in zip(tensors, again, strict=True)
            ],
            [i for i, is_again in enumerate(again) if not is_again],
            [number[id(t)] for t in needed],
        )
        kept = IdentitySet(tensors[i] for i in cut)
        dropped = [(pile, t) for pile, t in pairs if t not in kept]
        listed = IdentitySet(values)
        read = [t for t in kept if t not in listed]
        saved = sum(self._bytes(t) for _, t in dropped) - sum(map(self._bytes, read))
        if saved <= 0:
            return _NOTHING
        ops = _ops_between(kept, (t for _, t in dropped))
        if len(read) > len(dropped):
            return _NO_ROOM
        return LoopCut(
            tuple(pile for pile, _ in dropped),
            tuple(t.name for t in read),
            tuple(op.name for op in ops),
            count * saved,
            count * sum(map(op_time, ops)),
        )

    def _runs_again(self, op: Operation, *, with_heavy: bool) -> bool:
        """Tell whether an op can run again in the loop of the backward pass."""
        if op.type == "Const":
            return True
        if any(t.dtype in (tf.variant, tf.resource) for t in (*op.inputs, *op.outputs)):
            # An element of a list is there anyway, and a list may have changed.
            return False
        if not with_heavy and op.type in HEAVY:
            return False
        return op.type not in BODIES and why_kept(op) is None

    def _bytes(self, tensor: Tensor) -> int:
        """Return what a list of a value holds each time that is not there anyway."""
        source = source_of(tensor)
        before = self._body.origin(source)
        if (
            source.op.type == "Const"
            or source in self._listed
            or before in self._listed
        ):
            return 0
        if source.op.type == "ReadVariableOp":
            # Each time the same buffer, if it is each time the same variable.
            place = self._body.place(source_of(source.op.inputs[0]))
        elif source.op.type == "TensorListGetItem":
            place = self._body.list_argument(source)
        else:
            place = self._body.place(source)
        return 0 if self._body.stays(place) else tensor_bytes(tensor)


def _behind(
    needed: Iterable[Tensor], runs_again: Callable[[Tensor], bool]
) -> list[Tensor]:
    """Return what some values follow from, these included."""
    waiting = list(needed)
    found = IdentitySet()
    while waiting:
        t = waiting.pop()
        if t not in found:
            found.add(t)
            waiting += t.op.inputs if runs_again(t) else ()
    return list(found)


def _ops_between(kept: IdentitySet, values: Iterable[Tensor]) -> list[Operation]:
    """Return the ops that make values of those kept, each after what it reads."""
    ordered: dict[Operation, None] = {}
    begun: set[Operation] = set()
    stack = [(t.op, False) for t in values]
    while stack:
        op, is_done = stack.pop()
        if is_done:
            ordered[op] = None
        elif op not in begun:
            begun.add(op)
            stack.append((op, True))
            stack += [(t.op, False) for t in op.inputs if t not in kept]
    return list(ordered)
