"""The walk through functions: calls, conditionals, loops."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from geutil.errors import TransformError
from geutil.graph.function_attributes import functions_of_attributes
from geutil.graph.kinds import Tensor
from geutil.graph.op_types import CALLS, LOOPS
from geutil.model.batching.edits import CallAnew
from geutil.model.batching.functions import (
    OPAQUE,
    Called,
    Callee,
    match_result,
    merged,
)
from geutil.model.batching.loops import settle
from geutil.model.batching.scopes import scope_of_function
from geutil.model.batching.sites import Site
from geutil.model.batching.sizes import Shape, shape_of
from geutil.model.batching.walking import walk

_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}


def through_calls(site: Site, active: tuple[str, ...]) -> list[Tensor] | None:
    """Walk through what an op calls, and return its outputs; None if it calls nothing.

    Cost: linear in the bodies; a loop's body once more for each kind of growth.
    """
    op = site.node.op
    if op in site.probing.library:
        return _plain(site, Callee(None, 0, op), active)
    if op in CALLS:
        return _plain(site, _callees(site, "f")[0], active)
    if op in _BRANCHES:
        callees = [c for name in _BRANCHES[op] for c in _callees(site, name)]
        return _conditional(site, callees, active)
    if op in LOOPS:
        return _loop(site, active)
    if any(site.probing.grows(t) for t in site.operands):
        inner = [
            n
            for n in functions_of_attributes(site.node.attr)
            if n in site.probing.library
        ]
        if inner:
            site.problem(
                f"it calls {inner}, and what {op} does with them is not known",
                "cut the model around it",
            )
    return None


def _callees(site: Site, attribute: str) -> list[Callee]:
    value = site.node.attr[attribute]
    functions = [value.func] if value.HasField("func") else value.list.func
    return [Callee(attribute, i, f.name) for i, f in enumerate(functions)]


def _call(
    site: Site, callee: Callee, args: Sequence[Tensor], active: tuple[str, ...]
) -> Called:
    library = site.probing.library
    if callee.name in active:
        raise TransformError(f"function '{callee.name}' calls itself")
    if callee.name not in library:
        raise TransformError(f"function '{callee.name}' is not in the graph")
    attributes = site.node.attr
    if callee.attribute is not None:
        value = attributes[callee.attribute]
        functions = [value.func] if value.HasField("func") else value.list.func
        attributes = functions[callee.position].attr
    scope = scope_of_function(library[callee.name], library, dict(attributes))
    feeds = dict(zip(scope.args, args, strict=True))
    done = walk(scope, feeds, site.probing, through_calls, (*active, callee.name))
    results = [done.values[name] for name in scope.results]
    return Called(callee, done, results)


def _commit(site: Site, called: Called) -> None:
    """Take the changes of a function over, if anything in it depends on the batch."""
    plan = called.done.plan
    if plan.edits or plan.growing or plan.problems:
        callee = called.callee
        site.edit(
            CallAnew(
                site.node.name, callee.attribute, callee.position, callee.name, plan
            )
        )


def _plain(site: Site, callee: Callee, active: tuple[str, ...]) -> list[Tensor]:
    called = _call(site, callee, site.operands, active)
    _commit(site, called)
    return called.results


def _conditional(
    site: Site, callees: Sequence[Callee], active: tuple[str, ...]
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
    (condition,), (body,) = _callees(site, "cond"), _callees(site, "body")
    fixed = _passed_through(site, body)
    settled = settle(site, lambda at, state: _call(at, body, state, active), fixed)
    site.adopt(settled.site)
    _commit(site, _call(site, condition, settled.state, active))
    _commit(site, settled.called)
    outputs = [
        t
        if t.dtype in OPAQUE or i in fixed
        else site.probing.placeholder(t.dtype, shape_of(t), like=[t])
        for i, t in enumerate(settled.state)
    ]
    _record_shapes(site, outputs)
    return outputs


def _passed_through(site: Site, body: Callee) -> frozenset[int]:
    """Return the loop variables that the body returns as they are."""
    library = site.probing.library
    if body.name not in library:
        return frozenset()
    scope = scope_of_function(
        library[body.name], library, dict(site.node.attr["body"].func.attr)
    )
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
    """Say anew what shapes the outputs of a loop or conditional have."""
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
