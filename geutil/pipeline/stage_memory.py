"""Stages: cuts of a sequence, and the bytes of each stretch of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from geutil.errors import PlanError
from geutil.graph import adjacency, creation, op_types, runtime, types
from geutil.graph.resource_variables import dtype_behind, shape_behind
from geutil.graph.runtime import colocation_names
from geutil.graph.types import GivenShapes, Operation, Tensor, bytes_of_shape
from geutil.memory.costs import tensor_bytes
from geutil.memory.executor import simulate
from geutil.memory.program import Program
from geutil.memory.step_prediction import step_program
from geutil.select.queries import make_view
from geutil.transform.transformer import Transformer

Floats = npt.NDArray[np.float64]
StageCost = Callable[[int, int, int], float]
"""The cost of a stage, by its number and the stretch that it takes: start, end."""

Row = Callable[[int, int], Floats]
"""The costs of a stage from a start on, by its number and the start."""


@dataclass(frozen=True)
class SequenceCut:
    """A sequence cut into stages by their ends; `traffic` is in bytes."""

    ends: tuple[int, ...]
    costs: tuple[float, ...]
    traffic: float


def cut_sequence(
    crossing: Sequence[float], stages: int, row: Row, *, slack: float = 0.02
) -> SequenceCut:
    """Cut a sequence into stages: minimize the largest one, then the traffic."""
    # By dynamic programming over all stretches, whose costs may fall as they grow:
    # stages times the square of the length, in numpy. `crossing` has the bytes that
    # cross each place from 0 to the length, both included; the largest stage may be
    # larger by the share `slack`, to save traffic.
    length = len(crossing) - 1
    if not 1 <= stages <= length:
        raise PlanError(
            f"{length} parts cannot be cut into {stages} stages; ask for 1 to {length}"
        )
    weight = np.array([*crossing[:-1], 0.0])
    least = np.full(length + 1, np.inf)
    least[0] = 0.0
    for stage in range(stages):
        best = np.full(length + 1, np.inf)
        for i in np.flatnonzero(np.isfinite(least[:-1])).tolist():
            costs = np.maximum(row(stage, i), least[i])
            best[i + 1 :] = np.minimum(best[i + 1 :], costs)
        least = best
    limit = float(least[-1]) * (1 + slack)
    traffic = np.full(length + 1, np.inf)
    traffic[0] = 0.0
    steps = []
    for stage in range(stages):
        best, came = np.full(length + 1, np.inf), np.zeros(length + 1, int)
        for i in np.flatnonzero(np.isfinite(traffic[:-1])).tolist():
            sums = np.where(
                row(stage, i) <= limit, traffic[i] + weight[i + 1 :], np.inf
            )
            # Of cuts with the same traffic, the earlier start.
            better = sums < best[i + 1 :]
            best[i + 1 :][better], came[i + 1 :][better] = sums[better], i
        steps.append(came)
        traffic = best
    ends = [length]
    for came in reversed(steps):
        ends.append(int(came[ends[-1]]))
    ends.reverse()
    stretches = enumerate(pairwise(ends))
    return SequenceCut(
        tuple(ends[1:]),
        tuple(float(row(s, i)[j - i - 1]) for s, (i, j) in stretches),
        float(traffic[-1]),
    )


def lower_largest(
    ends: Sequence[int], cost: StageCost, least: StageCost
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Move the ends of the largest stage inwards as long as that helps."""
    # No move of an end of the largest stage by a power of two, with ends behind it
    # moved along, then makes the largest less. No cost is below `least`, which is
    # quick to tell: most tries are ruled out by that, and others by one stage.
    cuts = [0, *ends]

    def costs(cuts: Sequence[int], of: StageCost = cost) -> Iterator[float]:
        return (of(s, i, j) for s, (i, j) in enumerate(pairwise(cuts)))

    known = tuple(costs(cuts))
    while True:
        most = max(known)
        tries = _moves(cuts, known.index(most))
        better = next(
            (
                t
                for t in tries
                if max(costs(t, least)) < most and all(c < most for c in costs(t))
            ),
            None,
        )
        if better is None:
            return tuple(cuts[1:]), known
        cuts, known = better, tuple(costs(better))


def _moves(cuts: Sequence[int], stage: int) -> Iterator[list[int]]:
    """Yield cuts with an end of a stage further in, and ends behind it moved along."""
    for place, way in ((stage, 1), (stage + 1, -1)):
        room = (cuts[stage + 1] - cuts[stage]).bit_length() - 1
        for step in (1 << k for k in range(room, -1, -1)):
            tried, at = list(cuts), place
            # Two ends behind the one that moves are tried along with it.
            while 0 < at < len(cuts) - 1 and abs(at - place) <= 2:
                tried[at] += way * step
                if not all(i < j for i, j in pairwise(tried)):
                    break
                yield list(tried)
                at -= way


@dataclass(frozen=True, eq=False)
class StageMemory:
    """A training step by the pieces of its forward pass."""

    # A stage holds its weights with their gradients, the kept tensors of the micro-
    # batches in flight, and the buffers of its forward and backward pass of one micro-
    # batch. The last is estimated for all stretches at once, or simulated in the step
    # of all stages.

    # The step of one micro-batch, gradients handed on as they come.
    program: Program
    # Of each piece: the nodes; the bytes of weights, their gradients and constants;
    # those that backward ops read of the forward pass; the most besides as it runs.
    nodes: tuple[tuple[int, ...], ...]
    held: Floats
    kept: Floats
    working: Floats
    # Of each tensor between pieces: bytes, who makes it, and who read it.
    inputs: tuple[tuple[int, int, tuple[int, ...]], ...]
    # Of each stage the micro-batches in flight.
    flights: tuple[int, ...]
    # True if a stage recomputes its forward pass to go backward.
    again: bool

    @cached_property
    def bound(self) -> float:
        """No cut into as many stages has a largest stage below it."""
        # When a stage begins to go backward it holds its weights and all forward
        # tensors that its backward ops read; a piece is in one stage; and an op has all
        # its inputs and results.
        pieces = self.held + self.kept
        largest = max(
            self.held[piece] + _least(self.program, i)
            for piece, nodes in enumerate(self.nodes)
            for i in nodes
        )
        return float(max(pieces.sum() / len(self.flights), pieces.max(), largest))

    def estimates(self, stage: int, start: int) -> Floats:
        """Return the estimated peak of a stage from a piece on, by its ends."""
        sums = np.concatenate([[0.0], np.cumsum(self.kept)])
        peaks = np.maximum.accumulate((sums[1:] + self.working)[start:]) - sums[start]
        once = np.cumsum(self.held[start:]) + peaks
        return once + self._of_others(stage, start)

    def peak(self, stage: int, start: int, end: int) -> float:
        """Return the peak of a stage by a simulation of the step."""
        here = {i for nodes in self.nodes[start:end] for i in nodes}
        program = self.program.held_on(here, received=self.program.sizes.__getitem__)
        once = self.held[start:end].sum() + simulate(program).peak
        return float(once + self._of_others(stage, start)[end - start - 1])

    def least(self, stage: int, start: int, end: int) -> float:
        """Return bytes that a stage holds when it begins to go backward."""
        once = self.held[start:end].sum() + self.kept[start:end].sum()
        return float(once + self._of_others(stage, start)[end - start - 1])

    def _of_others(self, stage: int, start: int) -> Floats:
        """Return the bytes of a stage for other micro-batches than one, by its ends."""
        flying = self.flights[stage]
        added = self._early_bytes(stage)[start:].copy()
        for size, made, readers in self._across[start]:
            first = next(r for r in readers if r >= start)
            # As if the stages before were equally long. The result of a stage is sent
            # at once, so that as many arrive as it has in flight.
            maker = stage * made // start
            added[first - start] += size * (max(self.flights[maker], flying) - 1)
            added[readers[-1] - start] += size * self._early(stage, readers[-1])
        if not self.again:
            added += (flying - 1) * self.kept[start:]
        return np.cumsum(added)

    @cached_property
    def _across(self) -> list[list[tuple[int, int, tuple[int, ...]]]]:
        """The tensors that cross the place before each piece."""
        found: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in self.held]
        for entry in self.inputs:
            for place in range(entry[1] + 1, entry[2][-1] + 1):
                found[place].append(entry)
        return found

    def _early_bytes(self, stage: int) -> Floats:
        """Return by how much early gradients grow as a stage ends behind each piece."""
        # They are there until the end is behind the last reader.
        if stage not in self._early_by_stage:
            change = np.zeros(len(self.held))
            for size, made, readers in self.inputs:
                early = size * self._early(stage, readers[-1])
                change[made] += early
                change[readers[-1]] -= early
            self._early_by_stage[stage] = change
        return self._early_by_stage[stage]

    @cached_property
    def _early_by_stage(self) -> dict[int, Floats]:
        return {}

    def _early(self, stage: int, reader: int) -> int:
        """Return how many gradients a reader may send ahead of a stage."""
        stages, flights = len(self.flights), self.flights
        later = max(stages * reader // len(self.held), min(stage + 1, stages - 1))
        ahead = flights[stage] - flights[later]
        return ahead if ahead or stage == later else flights[0] - 1


def _least(program: Program, number: int) -> int:
    """Return the bytes that any device holds while it runs a node."""
    node, sizes = program.nodes[number], program.sizes
    taken_over = {out for out, _ in (*node.aliases, *node.reuses)}
    made = (t for i, t in enumerate(node.outputs) if i not in taken_over)
    return sum(sizes[t] for t in {*node.inputs, *made}) + node.temporary


def stage_memory(
    ys: Sequence[Tensor],
    piece_of: Mapping[Operation, int],
    shared: Collection[Operation],
    held: Sequence[float],
    flights: Sequence[int],
    *,
    again: bool,
    shapes: GivenShapes | None = None,
) -> StageMemory:
    """Read the training step behind some tensors, piece by piece."""
    # The forward pass is copied to another graph and differentiated there by its
    # variables, or where it has none by its feeds. `shared` ops are those of all micro-
    # batches, `held` the bytes of weights with gradients, and of constants, by piece.
    copier = Transformer()
    copier.assign_collections_handler = lambda info, element, copy: None
    graph = creation.new_graph()
    _, info = copier(make_view(list(piece_of)), graph, "", "")
    pieces = {info.transformed(op): piece for op, piece in piece_of.items()}
    copies = [info.transformed(t) for t in ys]
    xs = [info.transformed(t) for t in _differentiated_by(piece_of)]
    gradients = _gradients(graph, copies, xs)
    # A copy has the name of its original.
    named = {
        key if isinstance(key, str) else types.dereference(key).name: shape
        for key, shape in types.pairs_of(shapes)
    }
    read = step_program([copies, gradients], shapes=named)
    program = replace(read, fetched=())
    ops = [graph.get_operation_by_name(node.name) for node in program.nodes]
    place = [_piece(op, pieces) for op in ops]
    is_forward = [op in pieces for op in ops]
    sizes = {
        op.name: [program.sizes[t] for t in node.outputs]
        for op, node in zip(ops, program.nodes, strict=True)
    }
    count = len(held)
    copied = {info.transformed(op) for op in shared}
    program, constant = _without(program, place, [op in copied for op in ops], count)
    nodes: list[list[int]] = [[] for _ in range(count)]
    for i, piece in enumerate(place):
        nodes[piece].append(i)
    kept, working = _kept_and_working(program, place, is_forward, count)
    return StageMemory(
        program,
        tuple(map(tuple, nodes)),
        np.array(held, float) + constant,
        kept,
        working,
        tuple(_inputs(piece_of, shared, sizes)),
        tuple(flights),
        again,
    )


def _differentiated_by(ops: Iterable[Operation]) -> list[Tensor]:
    """Return all variables, or where there are none the feeds."""
    tensors = [t for op in ops for t in op.outputs]
    variables = [t for t in tensors if _is_trained(t)]
    fed = [t for t in tensors if t.op.type in op_types.PLACEHOLDERS]
    return variables or [t for t in fed if t.dtype.is_floating]


def _gradients(graph: Any, ys: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Any]:
    """Return the gradients of the tensors that have any."""
    ys = [y for y in ys if y.dtype.is_floating]
    if not xs or not ys:
        return []
    with graph.as_default():
        try:
            return runtime.plain_gradients(graph, ys, xs, [None] * len(ys), {})
        except LookupError as error:
            raise PlanError(
                "there is no training step whose memory could be balanced; balance by "
                f"'time': {error}"
            ) from error


def _is_trained(tensor: Tensor) -> bool:
    if types.is_reference(tensor):
        return bool(tensor.dtype.is_floating)
    dtype = dtype_behind(tensor)
    return dtype is not None and bool(dtype.is_floating)


def _piece(op: Operation, pieces: Mapping[Operation, int]) -> int:
    """Return the piece of an op, or of the op that a gradient op is colocated with."""
    met: set[Operation] = set()
    # Ops may be colocated with each other, or be on a loop.
    while op not in pieces and op not in met:
        met.add(op)
        names = colocation_names(op)
        readers = list(adjacency.successors(op))
        if names:
            op = op.graph.get_operation_by_name(names[0])
        elif readers:
            op = readers[0]
    return pieces.get(op, max(pieces.values()))


def _without(
    program: Program, place: Sequence[int], is_shared: Sequence[bool], count: int
) -> tuple[Program, Floats]:
    """Take ops that micro-batches share out of a program; return bytes by piece."""
    # Their results are made once, and there till the step ends.
    run = simulate(program)
    sizes, found = list(program.sizes), np.zeros(count)
    maker = program.makers
    for tensor, (born, freed) in enumerate(zip(run.born, run.freed, strict=True)):
        if born < 0 or not is_shared[maker[tensor]]:
            continue
        if not is_shared[run.order[freed]]:
            found[place[maker[tensor]]] += sizes[tensor]
            sizes[tensor] = 0
    return replace(program, sizes=sizes), found


def _kept_and_working(
    program: Program, place: Sequence[int], is_forward: Sequence[bool], count: int
) -> tuple[Floats, Floats]:
    """Return the bytes of each piece for its backward ops, and those besides."""
    run = simulate(program)
    maker = program.makers
    kept, changes = np.zeros(count), np.zeros(len(run.order) + 1)
    for tensor, (born, freed) in enumerate(zip(run.born, run.freed, strict=True)):
        if born < 0 or not program.sizes[tensor]:
            continue
        last = run.order[freed]
        if is_forward[maker[tensor]] and not is_forward[last]:
            kept[place[maker[tensor]]] += program.sizes[tensor]
            changes[born] += program.sizes[tensor]
            # The last reader still holds the buffer while it runs.
            changes[freed + 1] -= program.sizes[tensor]
    besides = np.array(run.held) - np.cumsum(changes)[:-1]
    working = np.zeros(count)
    np.maximum.at(working, [place[i] for i in run.order], besides)
    return kept, working


def _inputs(
    piece_of: Mapping[Operation, int],
    shared: Collection[Operation],
    sizes: Mapping[str, Sequence[int]],
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the tensors between pieces: bytes, who makes and who reads them."""
    found = []
    for op, made in piece_of.items():
        # `_without` counts the results that micro-batches share.
        made_sizes = () if op in shared else sizes.get(op.name, ())
        for t, size in zip(op.outputs, made_sizes, strict=False):
            pieces = {piece_of[r] for r in adjacency.consumers(t) if r in piece_of}
            readers = tuple(sorted(pieces - {made}))
            if readers and size:
                found.append((size, made, readers))
    return found


def is_handle(op: Operation) -> bool:
    """Return whether an op makes the handle of a variable or another resource."""
    return any(t.dtype.name == "resource" for t in op.outputs)


def variable_bytes(op: Operation) -> int:
    """Return the bytes of the variable that an op is or has the handle of, or 0."""
    if op.type in op_types.REF_VARIABLES:
        return tensor_bytes(op.outputs[0])
    if not is_handle(op):
        return 0
    dtype, shape = dtype_behind(op.outputs[0]), shape_behind(op.outputs[0])
    if dtype is None or shape is None or shape.rank is None:
        return 0
    return bytes_of_shape(dtype, shape.as_list()) or 0


def held_bytes(op: Operation) -> int:
    """Return the bytes of a constant; of a variable with its gradient."""
    if op.type == "Const":
        return tensor_bytes(op.outputs[0])
    dtype = dtype_behind(op.outputs[0]) if is_handle(op) else None
    is_trained = dtype is None or dtype.is_floating
    return (1 + is_trained) * variable_bytes(op)
