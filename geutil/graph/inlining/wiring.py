"""What stands for the outputs of a call, and for the call itself, once it is gone.

References are those of a `GraphDef` (`node`, `node:k`, `^node`), and `^node:k` for the
node that yields a tensor in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from geutil.errors import TransformError
from geutil.graph.function_names import is_index, tensor_name
from geutil.graph.inlining.names import Namespace
from geutil.graph.protos import NodeDef


@dataclass
class Group:
    """Ops that are waited for together.

    Attributes:
        members: references to them.
        name: of the NoOp that stands for them if there is not just one.
        device: where to put it.
        reserved: whether the name is kept free for it.
        forced: whether there is a NoOp in any case.
    """

    members: Sequence[str]
    name: str
    device: str
    reserved: bool = False
    forced: bool = False


def wait_for_tensor(tensor: str) -> str:
    """Return a reference to the node that yields a tensor in the end."""
    return f"^{tensor}" if ":" in tensor else f"^{tensor}:0"


class Wiring:
    """Follows references through the calls that were replaced.

    Attributes:
        tensors: the tensor that stands for each output of a call.
        groups: what stands for a call in a control input.
        barriers: the NoOps made so far.
    """

    def __init__(self, space: Namespace) -> None:
        self.tensors: dict[str, str] = {}
        self.groups: dict[str, Group] = {}
        self.barriers: list[Any] = []
        self._space = space
        self._settled: dict[str, str] = {}

    def inputs(self, references: Iterable[str]) -> list[str]:
        """Return the inputs of a node: data first, each control input once."""
        data, controls = [], []
        for reference in references:
            if reference.startswith("^"):
                controls.append(reference)
            else:
                data.append(self.tensor(reference))
        return [*data, *self._controls(controls)] if controls else data

    def tensor(self, reference: str) -> str:
        """Return the tensor that `reference` stands for in the end.

        Cost: constant, on average over the calls passed through.
        """
        known = self.tensors
        if reference not in known:
            return reference
        passed: dict[str, None] = {}
        end = reference
        while end in known:
            if end in passed:
                raise TransformError(
                    f"'{reference}' depends on itself through calls that return "
                    "their arguments; the graph is damaged"
                )
            passed[end] = None
            end = known[end]
        for name in passed:
            known[name] = end
        return end

    def settle(self, reference: str) -> str:
        """Return the name of the op to wait for, and make it if need be.

        Cost: linear in the members of the groups that were not settled before.
        """
        settled = self._settled
        stack, opened = [reference], set()
        while stack:
            top = stack[-1]
            group = self.groups.get(top)
            if top in settled:
                stack.pop()
            elif group is None:
                settled[top] = self._op(top)
                stack.pop()
            elif top not in opened:
                opened.add(top)
                stack.extend(m for m in group.members if m not in settled)
            else:
                settled[top] = self._settle_group(group)
                stack.pop()
        return settled[reference]

    def _settle_group(self, group: Group) -> str:
        names: dict[str, None] = {}
        for member in group.members:
            if member not in self._settled:
                raise TransformError(
                    f"'{group.name}' waits for itself through the functions it calls; "
                    "the graph is damaged"
                )
            names[self._settled[member]] = None
        if len(names) == 1 and not group.forced:
            return next(iter(names))
        name = group.name if group.reserved else self._space.unique(group.name)
        inputs = [f"^{n}" for n in names]
        self.barriers.append(
            NodeDef(name=name, op="NoOp", input=inputs, device=group.device)
        )
        return name

    def _controls(self, references: Iterable[str]) -> list[str]:
        return [f"^{name}" for name in dict.fromkeys(map(self.settle, references))]

    def _op(self, reference: str) -> str:
        name, colon, index = reference[1:].partition(":")
        if not colon:
            return name
        tensor = tensor_name(name, int(index)) if is_index(index) else reference[1:]
        return self.tensor(tensor).partition(":")[0]
