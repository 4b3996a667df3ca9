"""What inlining works out before it replaces any call.

For each graph that calls: which calls are replaced, which stay and why, and how large
the result becomes.
"""

from __future__ import annotations

from collections.abc import Iterator

from geutil.errors import TransformError
from geutil.graph.bodies import Body, BodyNode, flat_body
from geutil.graph.calls import Call, Instance, Library
from geutil.graph.dependencies import dependency_order, on_cycles
from geutil.graph.effects import Effects
from geutil.graph.inlining.plan import Plan

_MAX_VERSIONS = 1000
"""Choices of attributes of one function; a few are common, many are an attack."""


class Plans:
    """The plans of a graph and of every function that is inlined into it.

    Args:
        main: the nodes of the graph.
        library: its functions.
        keep: the functions whose calls stay.

    Raises:
        TransformError: a function is missing or damaged, or a call does not fit it.

    Cost: linear in the functions that are reached.
    """

    def __init__(self, main: Body, library: Library, keep: frozenset[str]) -> None:
        self._library = library
        self._keep = keep
        self._effects = Effects(library.functions)
        self._state = Effects(library.functions, reads=True)
        self._versions: dict[str, int] = {}
        self.main = Plan(main, self._effects, self._state)
        self._plans: dict[Instance, Plan] = {}
        for call in self._read(self.main):
            self._add(call)
        self._keep_more()
        self._measure()

    def of(self, call: Call) -> Plan:
        """Return the plan of the function that is called."""
        return self._plans[call.instance]

    def _add(self, first: Call) -> None:
        waiting = [first]
        while waiting:
            call = waiting.pop()
            if call.instance not in self._plans:
                waiting.extend(self._read(self._new_plan(call)))

    def _new_plan(self, call: Call) -> Plan:
        count = self._versions[call.function] = self._versions.get(call.function, 0) + 1
        if count > _MAX_VERSIONS:
            raise TransformError(
                f"function '{call.function}' is called with more than {_MAX_VERSIONS} "
                "choices of its attributes; name it in keep to leave its calls alone"
            )
        functions = self._library.functions
        body = flat_body(functions[call.function], functions, call.attributes)
        plan = self._plans[call.instance] = Plan(body, self._effects, self._state)
        return plan

    def _read(self, plan: Plan) -> Iterator[Call]:
        """Find the calls of a plan; yield those that will be replaced."""
        for node in plan.body.nodes:
            call = self._library.call(node.definition)
            if call is None:
                continue
            if call.function in self._keep:
                reason = "the function is named in keep"
            else:
                reason = self._library.reason_to_keep(node.definition, call.function)
            if reason:
                plan.kept[node.name] = call.function, reason
                continue
            self._check(node, call)
            plan.calls[node.name] = call
            yield call

    def _check(self, node: BodyNode, call: Call) -> None:
        signature = self._library.functions[call.function].signature
        given = sum(1 for name in node.inputs if not name.startswith("^"))
        _check_count(node, call, "arguments", given, len(signature.input_arg))
        if "Tout" in node.definition.attr and node.definition.op != call.function:
            expected = len(node.definition.attr["Tout"].list.type)
            _check_count(node, call, "results", expected, len(signature.output_arg))

    def _keep_more(self) -> None:
        """Leave calls of functions whose bodies cannot stand in the caller's place."""
        calls = {
            instance: [call.instance for call in plan.calls.values()]
            for instance, plan in self._plans.items()
        }
        reasons = dict.fromkeys(on_cycles(calls), "the function calls itself")
        for instance, plan in self._plans.items():
            inside = [name for name in plan.effective if name in plan.branched]
            if inside:
                reasons[instance] = (
                    f"'{inside[0]}' in it has an effect and may stand in a version 1 "
                    "loop or branch, where nothing outside can wait for it"
                )
        for plan in (self.main, *self._plans.values()) if reasons else ():
            for name, call in list(plan.calls.items()):
                if call.instance in reasons:
                    del plan.calls[name]
                    plan.kept[name] = call.function, reasons[call.instance]

    def _measure(self) -> None:
        """Work out the sizes, callees first."""
        needs = {
            instance: [call.instance for call in plan.calls.values()]
            for instance, plan in self._plans.items()
        }
        for instance in dependency_order(needs):
            definition = self._library.functions[instance[0]]
            self._measure_one(self._plans[instance], definition.ByteSize())
        self._measure_one(self.main, 0)

    def _measure_one(self, plan: Plan, own_bytes: int) -> None:
        callees = [self.of(call) for call in plan.calls.values()]
        plan.size = len(plan.body.nodes) + sum(p.size for p in callees)
        plan.automatic = len(plan.automatic_names) + sum(p.automatic for p in callees)
        plan.bytes = own_bytes + sum(p.bytes for p in callees)


def _check_count(
    node: BodyNode, call: Call, what: str, given: int, declared: int
) -> None:
    if given != declared:
        raise TransformError(
            f"'{node.name}' calls function '{call.function}' with {given} {what}, but "
            f"the function has {declared}; the graph is damaged"
        )
