"""Parts of the ops of a TFLite file: which ops of the graph each computes.

An op of the file computes the one that it was matched to, and those around it that a
kernel takes in: a bias, an activation that the op is said to apply, a scaling of its
weights, a change of layout.
"""

from __future__ import annotations

from geutil.graph import op_types
from geutil.tflite import kernels
from geutil.tflite.data_flow import DataFlow
from geutil.tflite.parts import LiteGraph, LiteOp


class Parts:
    """The parts of each op of a file."""

    def __init__(self, flow: DataFlow, file: LiteGraph) -> None:
        self.nodes: dict[int, list[int]] = {}
        self.ops: dict[int, list[int]] = {}
        self._flow = flow
        self._file = file
        self._makers = {t: at for at, op in enumerate(file.ops) for t in op.outputs}
        self._behind: dict[int, list[int]] = {}
        self._moved: dict[int, int] = {}
        self._applying: set[int] = set()

    def add(self, at: int, place: int) -> None:
        """Make an op of the graph a part of one of the file."""
        nodes = self.nodes.setdefault(place, [])
        if at not in nodes:
            nodes.append(at)
            self.ops.setdefault(at, []).append(place)
        if self._flow.ops[place].type in kernels.APPLIED:
            self._applying.add(at)

    def are_between(self, place: int) -> bool:
        """Tell whether an op of the file computes an op, more than moving values."""
        nodes = self.nodes.get(place, ())
        return not kernels.is_step(self._flow.ops[place]) and any(
            self._file.ops[at].kind not in kernels.MOVERS for at in nodes
        )

    def complete(self) -> None:
        """Add what each op of the file takes in."""
        self._add_behind(alone=True)
        self._add_before()
        self._add_behind(alone=False)
        for twin, first in self._flow.twins.items():
            nodes = self.nodes.get(first, [])
            if len(nodes) > 1 and self.ops[nodes[-1]][0] == first:
                # The file has the twin as well.
                at = nodes.pop()
                self.nodes[twin], self.ops[at][0] = [at], twin
            else:
                for at in nodes:
                    self.add(at, twin)

    def _open(self) -> list[int]:
        flow = self._flow
        left = (p for p in flow.order if p not in self.nodes and flow.fed[p])
        return [place for place in left if place not in flow.twins]

    def _add_behind(self, *, alone: bool) -> None:
        """Add what forwards a result, or is held by it, to what it forwards."""
        flow = self._flow
        for place in self._open():
            step = kernels.is_step(flow.ops[place])
            computes = not (step or flow.tells_sizes(place))
            for source, _ in flow.reads[place]:
                if alone and computes and flow.is_read_besides(source, place):
                    continue
                at, moved = next(iter(self.nodes.get(source, ())[-1:]), None), []
                while at is not None and not (step or self._holds(at, place, True)):
                    moved.append(at)
                    at = self._moved_by(at)
                if at is not None:
                    self.add(at, place)
                    if alone and computes:
                        self._behind.setdefault(at, []).append(place)
                        self._moved.update(dict.fromkeys(moved, at))
                    break

    def _moved_by(self, at: int) -> int | None:
        """Return the op of the file whose result another one only moves."""
        op = self._file.ops[at]
        makers = [self._makers[t] for t in op.reads if t in self._makers]
        known = op.kind in kernels.MOVERS and bool(makers) and makers[0] in self.ops
        return makers[0] if known else None

    def _add_before(self) -> None:
        """Add what an op of the file reads and can hold to it, the last first."""
        for place in reversed(self._open()):
            readers = {
                at for p in self._flow.consumers(place) for at in self.nodes.get(p, ())
            }
            holding = [at for at in sorted(readers) if self._holds(at, place, False)]
            if holding:
                self.add(holding[0], place)

    def _holds(self, at: int, place: int, behind: bool) -> bool:
        """Tell whether an op of the file can compute one along with its others."""
        node, op = self._file.ops[at], self._flow.ops[place]
        if op.type in op_types.PLACEHOLDERS:
            return False
        if op.type in kernels.LAYOUT or self._flow.tells_sizes(place):
            return True
        if node.kind in kernels.FORMULAS:
            return op.type in kernels.IN_FORMULAS
        if op.type in kernels.ARITHMETIC:
            # An activation ends what weights and biases can be.
            ended = behind and at in self._applying
            takes = node.kind in kernels.TAKES_CONSTANTS and not ended
            return takes and self._flow.reads_one(place)
        applied = node.options.get("fused_activation_function")
        return behind and (
            applied in kernels.APPLIED.get(op.type, ())
            or (op.type in kernels.CLIPS and _is_in_integers(node))
        )

    def result_of(self, at: int) -> int:
        """Return the op whose result an op of the file makes."""
        at = self._moved.get(at, at)
        ops, core = self._flow.ops, self.ops[at][0]
        behind = self._behind.get(at, [])
        last = [p for p in behind if ops[p].type not in kernels.LAYOUT]
        if not last and not self.has_shape(self._file.ops[at], core):
            last = [p for p in behind if self.has_shape(self._file.ops[at], p)]
        return last[-1] if last else core

    def has_shape(self, op: LiteOp, place: int) -> bool:
        """Tell whether the first results of two ops have shapes that can be one."""
        ours = self._flow.ops[place].outputs
        theirs = op.outputs[0].shape if op.outputs else None
        if not ours or ours[0].shape.rank is None or theirs is None:
            return True
        pairs = list(zip(ours[0].shape.as_list(), theirs, strict=False))
        return ours[0].shape.rank == len(theirs) and all(
            a == b for a, b in pairs if a is not None and b is not None
        )


def _is_in_integers(node: LiteOp) -> bool:
    return any(t.quantization is not None for t in node.outputs)
