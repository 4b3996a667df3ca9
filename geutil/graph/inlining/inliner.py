"""Expanding calls level by level: those of the graph, then those of their bodies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import tensorflow as tf

from geutil.graph.bodies import BodyNode
from geutil.graph.dependencies import dependency_order
from geutil.graph.function_names import tensor_name
from geutil.graph.inlining.expansion import Expansion, NewNode, Site
from geutil.graph.inlining.names import Claim, Namespace, call_scope, readable
from geutil.graph.inlining.plan import Plan, is_loop_edge, producer_of
from geutil.graph.inlining.plans import Plans
from geutil.graph.inlining.ties import Surroundings, Ties, find_ties
from geutil.graph.inlining.wiring import Wiring


class Inliner:
    """Makes the nodes of a graph whose calls are replaced.

    Args:
        plans: what to replace.
        protected: the nodes and tensors that will be asked for by name.
    """

    def __init__(self, plans: Plans, protected: Collection[str]) -> None:
        main = plans.main
        self._plans = plans
        self._space = Namespace(main.names)
        self._frames = Namespace(main.frames)
        self._ties: dict[tuple[int, Surroundings], Ties] = {}
        self._devices: dict[tuple[str, str], str] = {}
        around = Surroundings()
        self._main = Site(main, around, self._find_ties(main, around))
        self._forced = _needed_by_name(main, protected)
        self.wiring = Wiring(self._space)

    def run(self) -> list[NewNode]:
        """Return the nodes in topological order, their inputs followed to the end.

        Cost: linear in the nodes and their inputs.
        """
        level = [self._main]
        while level:
            level = [call for site in level for call in self._expand(site)]
            self._name(level)
        nodes = list(_flattened(self._main))
        for node in nodes:
            node.inputs = self.wiring.inputs(node.inputs)
        for name in self._main.plan.calls:
            if name in self._forced:
                self.wiring.settle(f"^{name}")
        for made in self.wiring.barriers:
            inputs, main = list(made.input), self._main
            nodes.append(NewNode(made, made.name, inputs, made.device, main))
        return _in_order(nodes)

    def translated(self) -> dict[str, str]:
        """Return the tensor that stands for each output of a call of the graph."""
        result = {}
        for name, call in self._main.plan.calls.items():
            for index in range(len(self._plans.of(call).body.results)):
                tensor = self.wiring.tensor(tensor_name(name, index))
                result[f"{name}:{index}"] = tensor if ":" in tensor else f"{tensor}:0"
        return result

    def _expand(self, site: Site) -> list[Site]:
        """Make the nodes of a site; return the calls among them."""
        expansion = Expansion(site, self._space, self.wiring)
        told = expansion.told_to_wait()
        calls = []
        for node in site.plan.body.nodes:
            inputs = [*map(site.reference, node.inputs), *told.get(node.name, ())]
            name = site.names.get(node.name, node.name)
            device = self._device(site.device, node.definition.device)
            if node.name in site.plan.calls:
                call = self._call(site, node, name, inputs, device)
                calls.append(call)
                site.items.append(call)
            else:
                site.items.append(
                    NewNode(node.definition, name, inputs, device, site, node.name)
                )
        if site is not self._main:
            expansion.connect(site.name in self._forced)
        return calls

    def _call(
        self, site: Site, node: BodyNode, name: str, inputs: list[str], device: str
    ) -> Site:
        plan = self._plans.of(site.plan.calls[node.name])
        read = [producer_of(r) for r in node.inputs if not r.startswith("^")]
        args = list(zip(read, plan.args, strict=True))
        around = Surroundings(
            late=tuple(arg for name, arg in args if name in site.ties.late),
            seen=tuple(arg for name, arg in args if name in site.ties.seen),
            early=node.name in site.ties.early,
        )
        return Site(
            plan,
            around,
            self._find_ties(plan, around),
            name,
            node.definition.op,
            [r for r in inputs if not r.startswith("^")],
            [r for r in inputs if r.startswith("^")],
            device,
            site.branched or node.name in site.plan.branched,
        )

    def _find_ties(self, plan: Plan, around: Surroundings) -> Ties:
        key = id(plan), around
        if key not in self._ties:
            self._ties[key] = find_ties(plan, around)
        return self._ties[key]

    def _name(self, level: Sequence[Site]) -> None:
        """Choose the names of the nodes of bodies that are equally deep."""
        claims = [
            Claim(
                call_scope(site.name, site.op),
                readable(site.plan.body.name),
                site.plan.names,
                site.plan.automatic_names,
                2 * site.plan.automatic > site.plan.size,
            )
            for site in level
        ]
        for site, names in zip(level, self._space.claim(claims), strict=True):
            site.names = names
            site.frames = {f: self._frames.unique(f) for f in site.plan.frames}

    def _device(self, outer: str, inner: str) -> str:
        """Return the device of a node in a body: what it leaves open, the call says."""
        if not outer or not inner:
            return inner or outer
        key = outer, inner
        if key not in self._devices:
            self._devices[key] = _merged(outer, inner)
        return self._devices[key]


def _needed_by_name(main: Plan, protected: Collection[str]) -> frozenset[str]:
    """Return the calls that will be run by name, as far as anybody can tell."""
    read = {name for needs in main.needs.values() for name in needs}
    read.update(producer_of(name) for name in protected if ":" in name)
    return frozenset(n for n in main.calls if n not in read or n in protected)


def _merged(outer: str, inner: str) -> str:
    try:
        given = tf.DeviceSpec.from_string(inner)
        return tf.DeviceSpec.from_string(outer).make_merged_spec(given).to_string()
    except ValueError:  # TensorFlow will say what is wrong with them.
        return inner


def _flattened(main: Site) -> Iterator[NewNode]:
    stack = [iter(main.items)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, Site):
                stack.append(iter(item.items))
                break
            yield item
        else:
            stack.pop()


def _in_order(nodes: Sequence[NewNode]) -> list[NewNode]:
    by_name = {node.name: node for node in nodes}

    def needs(node: NewNode) -> Iterator[str]:
        for name in map(producer_of, node.inputs):
            producer = by_name.get(name)
            if producer is not None and not is_loop_edge(
                producer.definition.op, node.definition.op
            ):
                yield name

    return [
        by_name[n] for n in dependency_order({n: needs(by_name[n]) for n in by_name})
    ]
