"""The flow of data through a graph: by places, whose values each op reads.

Data comes from the inputs. Results of parameters alone are none; sizes that the
data has are followed only into ops that read nothing else of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from geutil.graph.adjacency import topological_sort
from geutil.graph.op_types import PLACEHOLDERS
from geutil.graph.types import Operation, Tensor
from geutil.tflite import kernels

FARTHEST = 64
"""How many ops are looked at for one of the file: what a kernel takes in is few."""
_ALIKE = 8
Value = tuple[int, int]
"""An op by its place, and which of its outputs."""


class DataFlow:
    """The data of a graph.

    Attributes:
        ops: the ops.
        places: the places of the ops by their names.
        order: the places in topological order.
        fed: for each op whether it makes data.
        reads: for each op the data that it reads.
        readers: for each op those that read it.
        twins: the ops that compute again what another does, and that one: converters
            make one of them. Who reads a twin is taken to read the other.
        twin_counts: how many twins an op has.

    Args:
        ops: the ops of the graph.
        inputs: those of them that are its inputs.
    """

    def __init__(self, ops: Sequence[Operation], inputs: Sequence[Operation]) -> None:
        self.ops = list(ops)
        self.places = {op.name: place for place, op in enumerate(self.ops)}
        self.order = [self.places[op.name] for op in topological_sort(self.ops)]
        self.fed = [False] * len(self.ops)
        for op in inputs:
            self.fed[self.places[op.name]] = True
        self.reads: list[list[Value]] = [[] for _ in self.ops]
        self.readers: list[list[int]] = [[] for _ in self.ops]
        self.twins: dict[int, int] = {}
        self._alike: dict[tuple[str, ...], list[int]] = {}
        self._forwarded: dict[Value, Tensor] = {}
        self._base = list(range(len(self.ops)))
        for place in self.order:
            self._note(place)
        self.twin_counts = Counter(self.twins.values())
        self._read_times = [
            sum(not self.tells_sizes(p) for p in readers) for readers in self.readers
        ]

    def _note(self, place: int) -> None:
        """Note what an op reads, once that is known of those before it."""
        op = self.ops[place]
        read = [
            self._forwarded.get((self.places.get(t.op.name, -1), t.value_index), t)
            for t in op.inputs
        ]
        names = (op.type, *(t.name for t in read))
        if op.type == "IdentityN":
            # Each of its results is one of what it reads, and no other.
            self._forwarded.update(((place, i), t) for i, t in enumerate(read))
            del read[1:]
        if op.type in kernels.MOVES:
            # Sizes that the data has make no data of a constant.
            read = read if self._is_fed(read[0]) else []
        read = [t for t in read if self._is_fed(t)]
        data = [t for t in read if not kernels.is_bookkeeping(t.dtype.name)] or read
        self.fed[place] = self.fed[place] or bool(data)
        self.reads[place] = [(self.places[t.op.name], t.value_index) for t in data]
        if data and self._is_twin(place, names):
            return
        for source in dict.fromkeys(p for p, _ in self.reads[place]):
            self.readers[source].append(place)
        if kernels.is_step(op) and data:
            self._base[place] = self._base[self.reads[place][0][0]]

    def _is_twin(self, place: int, names: tuple[str, ...]) -> bool:
        """Note an op that computes what an earlier one does, and tell if it is one."""
        op, alike = self.ops[place], self._alike.setdefault(names, [])
        for other in alike if not op.op_def.is_stateful else ():
            ours = self.ops[other]
            if dict(ours.node_def.attr) == dict(op.node_def.attr):
                self.twins[place] = other
                self._base[place] = self._base[other]
                self._forwarded.update(
                    ((place, i), t) for i, t in enumerate(ours.outputs)
                )
                return True
        # Of more than a few that differ no twin is looked for.
        if len(alike) < _ALIKE:
            alike.append(place)
        return False

    def _is_fed(self, tensor: Tensor) -> bool:
        place = self.places.get(tensor.op.name)
        return place is not None and self.fed[place]

    def base(self, place: int) -> int:
        """Return the op whose result an op gives, in steps or as it is."""
        return self._base[place]

    def reads_one(self, place: int) -> bool:
        """Tell whether an op reads the data of one op, and of parameters else."""
        return len({source for source, _ in self.reads[place]}) == 1

    def tells_sizes(self, place: int) -> bool:
        """Tell whether an op makes nothing but sizes, indices or lists."""
        return all(
            kernels.is_bookkeeping(t.dtype.name) for t in self.ops[place].outputs
        )

    def is_read_besides(self, source: int, place: int) -> bool:
        """Tell whether others than one op read another, for more than its shape."""
        return self._read_times[source] > int(not self.tells_sizes(place))

    def is_taken_through(self, place: int) -> bool:
        """Tell whether a kernel of a file, behind or before an op, can take it in."""
        op = self.ops[place]
        taken = (kernels.MOVES, kernels.ARITHMETIC, kernels.APPLIED)
        return op.type not in PLACEHOLDERS and (
            kernels.is_step(op)
            or (any(op.type in kinds for kinds in taken) and self.reads_one(place))
        )

    def consumers(self, place: int) -> list[int]:
        """Return the ops that read an op, as data or otherwise."""
        names = (op.name for t in self.ops[place].outputs for op in t.consumers())
        return [self.places[name] for name in names if name in self.places]

    def ahead_of(self, place: int) -> Iterator[int]:
        """Yield an op, and what is ahead of it through ops that kernels take in."""
        waiting, seen = deque([place]), {place}
        while waiting and len(seen) <= FARTHEST:
            place = waiting.popleft()
            yield place
            if self.is_taken_through(place):
                new = [p for p, _ in self.reads[place] if p not in seen]
                seen.update(new)
                waiting.extend(new)
