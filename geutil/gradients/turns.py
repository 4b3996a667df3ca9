"""Makes a backward pass run in the order that it was planned in."""

from __future__ import annotations

import tensorflow as tf

from geutil.gradients.eligibility import PARAMETERS
from geutil.gradients.prediction import StepProgram
from geutil.gradients.step import Step
from geutil.graph.adjacency import predecessors
from geutil.graph.importing import add_control_edges, neutral, set_new_input
from geutil.graph.kinds import Operation, Tensor, is_reference
from geutil.graph.version_1_flow import unconditional
from geutil.memory.program import Node, Program
from geutil.memory.scheduling import frugal_order, negligible_size

SCOPE = "ordered"
_NEAR = 16
_PASSED_ON = frozenset(
    ("ExpandDims", "Identity", "NoOp", "PlaceholderWithDefault", "Reshape", "Squeeze")
)
"""Types of ops that hand on what they get, or nothing."""
_UNORDERED = _PASSED_ON | {"BiasAddGrad", "Rank", "Shape", "ShapeN", "Size"}
"""oneDNN merges the first with a filter gradient; the last four read no values."""


def take_turns(step: Step) -> None:
    """Let the ops of a backward pass that make or free much run one after the other.

    TensorFlow's executor runs whatever is ready: with several threads at once, and
    otherwise in an order of its own, which is another one in the first step. What it
    starts too early is held until it is needed. So each such op waits for the one
    before it in `frugal_order`, if that is on the same device and not behind one of its
    inputs anyway. It waits by a node on its first input, as kernels bear no control
    edges (see `ControlDelays`).

    Args:
        step: the step, as it will run; its graph is changed.

    Cost: linear in the ops of the step and their edges; some 60 us for each op.
    """
    planned = StepProgram(step)
    program, ops = planned.program(), planned.ops
    late = [op for op, node in zip(ops, program.nodes, strict=True) if node.late]
    able = frozenset(filter(_can_take_turns, unconditional(late)))
    small = negligible_size(program)
    last: dict[str, Operation] = {}
    for i in frugal_order(program):
        op = ops[i]
        if op not in able or _largest(program, program.nodes[i]) <= small:
            continue
        before = last.get(op.device)
        last[op.device] = op
        if before is not None and not _is_behind(before, op):
            _wait(op, before)


def _can_take_turns(op: Operation) -> bool:
    """Tell whether an op belongs to one device, and matters for the order."""
    places = {op.device, *(t.op.device for t in op.inputs)} - {""}
    return op.type not in _UNORDERED and len(places) < 2


def _largest(program: Program, node: Node) -> int:
    return max((program.sizes[t] for t in (*node.inputs, *node.outputs)), default=0)


def _is_behind(before: Operation, op: Operation) -> bool:
    """Tell whether `op` reads what `before` makes, or reads what waits for it.

    Looks only near by: to wait once more does no harm.
    """
    nearest = list(predecessors(op))
    for nearer in nearest:
        if nearer is before:
            return True
        if nearer.type in _PASSED_ON and len(nearest) < _NEAR:
            nearest += predecessors(nearer)
    return False


def _wait(op: Operation, before: Operation) -> None:
    """Let an op wait for another by an input that can be handed on."""
    index = _input_to_hold_back(op)
    if index is not None:
        held = op.inputs[index]
        stand_in = _stand_in(held)
        add_control_edges(stand_in.op, [before])
        set_new_input(op, index, stand_in)


def _input_to_hold_back(op: Operation) -> int | None:
    """Return the place of the first input with values, best one that is no variable."""
    places = [i for i, t in enumerate(op.inputs) if _has_values(t)]
    given = [i for i in places if op.inputs[i].op.type in PARAMETERS]
    return next(iter([i for i in places if i not in given] or places), None)


def _has_values(tensor: Tensor) -> bool:
    """Tell whether a tensor can be handed on, and is no shape that must be known."""
    numbers = tensor.dtype.is_floating or tensor.dtype.is_complex
    return numbers and not is_reference(tensor)


def _stand_in(tensor: Tensor) -> Tensor:
    graph = tensor.graph
    with neutral(graph), graph.name_scope(f"{SCOPE}/"), graph.device(tensor.op.device):
        return tf.raw_ops.PlaceholderWithDefault(
            input=tensor, shape=tensor.shape, name="turn"
        )
