"""The walk through functions: calls, conditionals, loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph import call_graph, op_types
from geutil.graph.types import Tensor
from geutil.model.batch_size.batch_edits import (
    BatchObstacle,
    CallAnew,
    Scope,
    Shape,
    scope_of_function,
    shape_of,
)
from geutil.model.batch_size.row_loops import row_loop
from geutil.model.batch_size.sites import Probing, Site, broadcast_for_batch
from geutil.model.batch_size.walk import Walk, walk

OPAQUE = (tf.resource, tf.variant)
"""Handles: their shapes say nothing about what they correspond to."""


@dataclass(frozen=True)
class NamedFunction:
    """A function as a node names it."""

    attribute: str | None
    position: int
    name: str


@dataclass
class FunctionWalk:
    """A walk through a function."""

    callee: NamedFunction
    done: Walk
    results: list[Tensor]


def match_result(site: Site, called: FunctionWalk, index: int, like: Tensor) -> None:
    """Repeat a function's result for the batch where `like` has the batch."""
    probing, result = site.probing, called.results[index]
    axis, shape, like_shape = probing.axis(like), shape_of(result), shape_of(like)
    if (
        axis is None
        or probing.axis(result) is not None
        or shape is None
        or len(shape) != len(like_shape or ())
        or probing.grows(result)
    ):
        return
    dim = (like_shape or ())[axis] or 0
    if shape[axis] != site.sizes.before(dim) or called.done.source is None:
        return
    inner = site.inside(called.done.source)
    broadcast = broadcast_for_batch(
        inner, result, index, axis, site.sizes.factor(dim), result=True
    )
    if broadcast is not None:
        edit, called.results[index] = broadcast
        called.done.plan.edits.append(edit)


def _stand_in(probing: Probing, tensors: Sequence[Tensor]) -> Tensor:
    return probing.placeholder(tensors[0].dtype, _common(tensors), like=list(tensors))


def merged(probing: Probing, tensors: Sequence[Tensor]) -> Tensor:
    """Return a representative of several tensors, one of which it is."""
    if tensors[0].dtype in OPAQUE:
        grown = [t for t in tensors if probing.grows(t)]
        return (grown or list(tensors))[0]
    return _stand_in(probing, tensors)


def _common(tensors: Sequence[Tensor]) -> Shape:
    shapes = [shape_of(t) for t in tensors]
    known_shapes = [s for s in shapes if s is not None]
    if len(known_shapes) < len(shapes) or len({len(s) for s in known_shapes}) != 1:
        return None
    return tuple(
        dims[0] if len(set(dims)) == 1 else None
        for dims in zip(*known_shapes, strict=True)
    )


Body = Callable[[Site, Sequence[Tensor]], FunctionWalk]
"""Walks through a loop's body with its variables."""


@dataclass
class Settled:
    """A loop whose variables keep their shapes."""

    site: Site
    state: list[Tensor]
    called: FunctionWalk  # The walk through its body with these.
    earlier: list[BatchObstacle]
    lost: bool  # Whether less is known of a variable's shape than at the start.

    @property
    def problems(self) -> list[BatchObstacle]:
        """The problems that cannot be mended."""
        return [*self.called.done.plan.all_problems(), *self.site.plan.problems]

    @property
    def sound(self) -> bool:
        """Tell whether nothing speaks against it."""
        return not self.problems and not (self.earlier and self.lost)


def settle(site: Site, body: Body, fixed: frozenset[int]) -> Settled:
    """Find out which of a loop's variables have to have the batch."""
    # A variable that has it after an iteration gets it from the start. Where that leads
    # nowhere, since the first iteration already fails, those get it that start with
    # equal rows, as many as the old batch had. The changes of the result's site are to
    # be adopted.
    settled = _rounds(site.attempt(), body, fixed)
    if settled.sound:
        return settled
    guess = site.attempt()
    guessed = _guess(guess, fixed)
    if guessed:
        other = _rounds(guess, body, fixed)
        keeps_batch = all(site.probing.axis(other.state[i]) == 0 for i in guessed)
        if keeps_batch and other.sound:
            return other
    if settled.lost:
        settled.site.plan.problems += settled.earlier
    return settled


def _guess(site: Site, fixed: frozenset[int]) -> list[int]:
    """Repeat for the batch each start value that looks as if it had it."""
    guessed = []
    for index, t in enumerate(site.operands):
        shape = shape_of(t)
        if index in fixed or t.dtype in OPAQUE or not shape or site.probing.grows(t):
            continue
        equal = shape[0] == site.sizes.old and site.probing.rows_are_equal(t, 0)
        if equal and site.broadcast(index, 0, 1):
            guessed.append(index)
    return guessed


def _rounds(site: Site, body: Body, fixed: frozenset[int]) -> Settled:
    """Walk through a body until the variables keep their shapes."""
    # In each round a variable gains the batch, or loses facts of its shape.
    probing = site.probing
    start = [
        t
        if i in fixed or t.dtype in OPAQUE
        else probing.placeholder(t.dtype, shape_of(t), like=[t])
        for i, t in enumerate(site.operands)
    ]
    state, problems = start, list[BatchObstacle]()
    while True:
        called = body(site, state)
        after = []
        for index, t in enumerate(state):
            if index in fixed:
                after.append(t)
            elif t.dtype in OPAQUE:
                after.append(called.results[index])
            else:
                match_result(site, called, index, t)
                after.append(_next_state(site, index, t, called.results[index]))
        pairs = list(zip(state, after, strict=True))
        state = after
        if all(
            shape_of(a) == shape_of(b) and probing.grows(a) == probing.grows(b)
            for a, b in pairs
        ):
            lost = any(_vaguer(a, b) for a, b in zip(start, state, strict=True))
            return Settled(site, state, called, problems, lost)
        problems += called.done.plan.all_problems()


def _vaguer(before: Tensor, after: Tensor) -> bool:
    """Tell whether less is known of a shape."""
    old, new = shape_of(before), shape_of(after)
    if old is None or new is None:
        return old is not None
    return any(a is not None and b is None for a, b in zip(old, new, strict=False))


def _next_state(site: Site, index: int, before: Tensor, result: Tensor) -> Tensor:
    """Return the state of a variable, given those before and after an iteration."""
    probing = site.probing
    shape, grown = shape_of(before), shape_of(result)
    axis = probing.axis(result)
    if (
        axis is not None
        and shape is not None
        and len(shape) == len(grown or ())
        and probing.axis(before) is None
        and shape[axis] == site.sizes.before((grown or ())[axis] or 0)
        and not probing.grows(site.operands[index])
    ):
        factor = site.sizes.factor((grown or ())[axis])
        if site.broadcast(index, axis, factor):
            return site.operands[index]
    return merged(probing, [before, result])


_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}


def through_calls(site: Site, active: tuple[str, ...]) -> list[Tensor] | None:
    """Walk through the callees of an op, and return its outputs; None without any."""
    op = site.node.op
    if op in site.probing.library:
        return _plain(site, NamedFunction(None, 0, op), active)
    if op in op_types.CALLS:
        return _plain(site, _callees(site, "f")[0], active)
    if op in _BRANCHES:
        callees = [c for name in _BRANCHES[op] for c in _callees(site, name)]
        return _conditional(site, callees, active)
    if op in op_types.LOOPS:
        return _loop(site, active)
    if any(site.probing.grows(t) for t in site.operands):
        inner = [
            n
            for n in call_graph.functions_of_attributes(site.node.attr)
            if n in site.probing.library
        ]
        if inner:
            site.problem(
                f"it calls {inner}, and what {op} does with them is not known",
                "cut the model around it",
            )
    return None


def _callees(site: Site, attribute: str) -> list[NamedFunction]:
    value = site.node.attr[attribute]
    functions = [value.func] if value.HasField("func") else value.list.func
    return [NamedFunction(attribute, i, f.name) for i, f in enumerate(functions)]


def _call(
    site: Site, callee: NamedFunction, args: Sequence[Tensor], active: tuple[str, ...]
) -> FunctionWalk:
    """Walk through the body of a function that an op calls with some arguments."""
    library = site.probing.library
    if callee.name in active:
        raise TransformError(f"function '{callee.name}' calls itself")
    if callee.name not in library:
        raise TransformError(f"function '{callee.name}' is not in the graph")
    attributes = site.node.attr
    # The attributes that a body leaves open are those of the node if the function
    # is the node's type, else those in the attribute that names it.
    if callee.attribute is not None:
        value = attributes[callee.attribute]
        functions = [value.func] if value.HasField("func") else value.list.func
        attributes = functions[callee.position].attr
    scope = scope_of_function(library[callee.name], library, dict(attributes))
    feeds = dict(zip(scope.args, args, strict=True))
    done = walk(scope, feeds, site.probing, through_calls, (*active, callee.name))
    results = [done.values[name] for name in scope.results]
    return FunctionWalk(callee, done, results)


def _commit(site: Site, called: FunctionWalk) -> None:
    """Take the changes of a function over, if anything in it depends on the batch."""
    plan = called.done.plan
    if plan.edits or plan.growing or plan.problems:
        callee = called.callee
        site.edit(
            CallAnew(
                site.node.name, callee.attribute, callee.position, callee.name, plan
            )
        )


def _plain(site: Site, callee: NamedFunction, active: tuple[str, ...]) -> list[Tensor]:
    called = _call(site, callee, site.operands, active)
    _commit(site, called)
    return called.results


def _conditional(
    site: Site, callees: Sequence[NamedFunction], active: tuple[str, ...]
) -> list[Tensor]:
    branches = [_call(site, c, site.operands[1:], active) for c in callees]
    outputs = []
    for index, parallel in enumerate(zip(*(b.results for b in branches), strict=True)):
        for branch in branches:
            for other in parallel:
                match_result(site, branch, index, other)
        together = [branch.results[index] for branch in branches]
        outputs.append(merged(site.probing, together))
    for branch in branches:
        _commit(site, branch)
    _record_shapes(site, outputs)
    return outputs


def _loop(site: Site, active: tuple[str, ...]) -> list[Tensor]:
    """Walk through a loop until the shapes of its state settle; return its outputs."""
    (condition,), (body,) = _callees(site, "cond"), _callees(site, "body")
    fixed = _passed_through(site, body)
    rows = row_loop(site, _scope(site, condition), _scope(site, body))
    settled = settle(site, lambda at, state: _call(at, body, state, active), fixed)
    site.adopt(settled.site)
    asked = _call(site, condition, settled.state, active)
    asked.done.plan.edits += rows.edits
    _commit(site, asked)
    _commit(site, settled.called)
    outputs = [
        t
        if t.dtype in OPAQUE or i in fixed
        else site.probing.placeholder(t.dtype, shape_of(t), like=[t])
        for i, t in enumerate(settled.state)
    ]
    for index in rows.lists:
        site.probing.mark_list_of_rows(outputs[index])
    _record_shapes(site, outputs)
    return outputs


def _scope(site: Site, callee: NamedFunction) -> Scope:
    """Return the scope of a function that a loop calls."""
    library = site.probing.library
    attributes = dict(site.node.attr[callee.attribute or ""].func.attr)
    return scope_of_function(library[callee.name], library, attributes)


def _passed_through(site: Site, body: NamedFunction) -> frozenset[int]:
    """Return the loop variables that the body returns as they are."""
    library = site.probing.library
    if body.name not in library:
        return frozenset()
    scope = _scope(site, body)
    pairs = zip(scope.args, scope.results, strict=True)
    copies = {
        f"{e.node.name}:0": e.inputs[0]
        for e in scope.entries
        if e.node.op == "Identity"
    }
    return frozenset(
        i for i, (a, r) in enumerate(pairs) if a == r or copies.get(r) == a
    )


def _record_shapes(site: Site, outputs: Sequence[Tensor]) -> None:
    """Rewrite the recorded shapes of a loop's or conditional's outputs."""
    if not site.node.attr["output_shapes"].list.shape:
        return
    value = tf.compat.v1.AttrValue()
    for t, old in zip(outputs, site.node.attr["output_shapes"].list.shape, strict=True):
        if t.dtype in OPAQUE or not site.probing.grows(t):
            value.list.shape.add().CopyFrom(old)
        else:
            value.list.shape.add().CopyFrom(
                tf.TensorShape(_new_shape(site, t)).as_proto()
            )
    site.set_attribute("output_shapes", value)


def _new_shape(site: Site, t: Tensor) -> Shape:
    """Return a shape with the new batch size."""
    shape = shape_of(t)
    if shape is None:
        return None
    new = site.sizes.new
    return tuple(
        d
        if not d or not site.sizes.factor(d)
        else None
        if new is None
        else new * site.sizes.factor(d)
        for d in shape
    )
