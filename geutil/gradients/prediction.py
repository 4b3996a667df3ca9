"""What a step would hold if it recomputed by some plan, without building it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from geutil.gradients.pruning import pruned
from geutil.gradients.segments import Recomputation, Segment
from geutil.gradients.sizes import tensor_bytes
from geutil.gradients.step import Step, tensors_of
from geutil.graph.adjacency import control_inputs, graph_order, is_back_edge
from geutil.graph.kinds import Operation, Tensor
from geutil.graph.order import topological_sort
from geutil.memory.predicting.kernels import CHEAP, HELD, aliases, reuses
from geutil.memory.predicting.temporaries import temporary_bytes
from geutil.memory.program import Node, Program
from geutil.memory.simulation import simulate
from geutil.select.walks import get_backward_walk_ops


def predicted_peak(plan: Recomputation) -> int:
    """Return the most bytes that a step holds at once if it recomputes by a plan.

    Variables, constants and what the caller feeds are not counted; an unknown dimension
    counts as 32. Whoever predicts several plans of one step makes its `StepProgram`
    once.

    Args:
        plan: what is recomputed.

    Cost: linear in the ops of the step and their edges; some 40 us for each op.
    """
    return StepProgram(plan.step).peak(plan.segments)


class StepProgram:
    """A step with plain gradients as numbers, from which those of any plan follow.

    Args:
        step: the step.

    Cost: linear in the ops of the step and their edges; some 30 us for each op.
    """

    def __init__(self, step: Step) -> None:
        fetched = [*step.ys, *tensors_of(step.gradients)]
        walked = get_backward_walk_ops(fetched, control_inputs=True)
        self._place: dict[Operation, int] = {}
        self._number: dict[int, int] = {}
        self._sizes: list[int] = []
        self._nodes: list[Node] = []
        ops = [op for op in graph_order(walked) if op.type not in HELD]
        self._order = [op for op in topological_sort(walked) if op.type not in HELD]
        for op in ops:
            self._number_outputs(op)
        for op in ops:
            self._nodes.append(self._node(op))
        self._wanted = [n for t in fetched for n in self._numbers([t])]
        held = fetched if step.holds_gradients else step.ys
        self._held = [n for t in held for n in self._numbers([t])]

    @property
    def size(self) -> int:
        """The number of nodes of the step with plain gradients, at least 1."""
        return max(len(self._nodes), 1)

    def peak(self, segments: Iterable[Segment] = ()) -> int:
        """Return the most bytes held at once; without segments, of plain gradients.

        Cost: linear in nodes and edges; some 10 us for each node.
        """
        return simulate(self.program(segments)).peak

    def program(self, segments: Iterable[Segment] = ()) -> Program:
        """Return the step with the ops of some segments run again.

        Cost: linear in nodes and edges.
        """
        nodes = list(self._nodes)
        sizes = list(self._sizes)
        segments = list(segments)
        gates = range(len(nodes), len(nodes) + len(segments))
        for segment in segments:
            nodes.append(_gate(self._placed(segment.awaited)))
        for segment, gate in zip(segments, gates, strict=True):
            self._add_segment(segment, gate, nodes, sizes)
        return pruned(nodes, sizes, self._wanted, self._held)

    def gradient_bytes(self, backward: Sequence[Operation]) -> list[int]:
        """Return what the backward pass alone holds while each of its ops runs.

        In graph order, and without the forward tensors that it reads.

        Args:
            backward: the backward ops.

        Cost: linear in nodes and edges.
        """
        sizes = [0] * len(self._sizes)
        for place in self._placed(backward):
            for number in self._nodes[place].outputs:
                sizes[number] = self._sizes[number]
        program = Program(self._nodes, sizes, self._held)
        order = self._placed(self._order)
        held = dict(zip(order, simulate(program, order).held, strict=True))
        return [held.get(self._place.get(op, -1), 0) for op in backward]

    def _number_outputs(self, op: Operation) -> None:
        self._place[op] = len(self._place)
        for t in op.outputs:
            self._number[id(t)] = len(self._sizes)
            self._sizes.append(tensor_bytes(t))

    def _node(self, op: Operation) -> Node:
        """Return the node of an op, without what is held all the time."""
        read = [t for t in op.inputs if not is_back_edge(t.op, op)]
        inputs = self._numbers(read)
        places = None if len(inputs) == len(read) else self._places(read)
        return Node(
            name=op.name,
            type=op.type,
            inputs=inputs,
            outputs=self._numbers(op.outputs),
            controls=self._placed(control_inputs(op)),
            aliases=_moved(aliases(op), places) if inputs else (),
            reuses=_moved(reuses(op), places) if inputs else (),
            temporary=temporary_bytes(op),
            cheap=op.type in CHEAP,
        )

    def _placed(self, ops: Iterable[Operation]) -> list[int]:
        found = (self._place.get(op) for op in ops)
        return [place for place in found if place is not None]

    def _numbers(self, tensors: Iterable[Tensor]) -> list[int]:
        found = (self._number.get(id(t)) for t in tensors)
        return [number for number in found if number is not None]

    def _places(self, read: Sequence[Tensor]) -> dict[int, int]:
        """Map the place of each input to its place without what is always held."""
        left = [i for i, t in enumerate(read) if id(t) in self._number]
        return {place: i for i, place in enumerate(left)}

    def _add_segment(
        self, segment: Segment, gate: int, nodes: list[Node], sizes: list[int]
    ) -> None:
        """Add what `build_recomputation` would, in its order."""
        copies: dict[int, int] = {}
        kept = self._numbers(segment.kept)
        for number in kept:
            copies[number] = len(sizes)
            nodes.append(_barrier(number, len(sizes), gate))
            sizes.append(sizes[number])
        places = self._placed(segment.ops)
        copied = {place: len(nodes) + i for i, place in enumerate(places)}
        for place in places:
            node = nodes[place]
            for number in node.outputs:
                copies[number] = len(sizes)
                sizes.append(sizes[number])
            controls = [copied.get(control, control) for control in node.controls]
            nodes.append(
                node.changed(
                    inputs=[copies.get(number, number) for number in node.inputs],
                    outputs=[copies[number] for number in node.outputs],
                    controls=controls if node.inputs else [*controls, gate],
                )
            )
        for number in kept:
            del copies[number]
        for place in self._placed(dict.fromkeys(read.op for read in segment.reads)):
            inputs = [copies.get(number, number) for number in nodes[place].inputs]
            nodes[place] = nodes[place].changed(inputs=inputs)


def _gate(awaited: Sequence[int]) -> Node:
    return Node("gate", "NoOp", controls=awaited, cheap=True)


def _barrier(number: int, made: int, gate: int) -> Node:
    return Node(
        "barrier",
        "PlaceholderWithDefault",
        [number],
        [made],
        controls=[gate],
        aliases=((0, 0),),
        cheap=True,
    )


def _moved(
    pairs: Sequence[tuple[int, int]], places: dict[int, int] | None
) -> Sequence[tuple[int, int]]:
    if places is None or not pairs:
        return pairs
    return [(out, places[place]) for out, place in pairs if place in places]
