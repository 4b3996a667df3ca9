"""Which nodes do more than compute their outputs, and which depend on what others did.

A call runs every stateful op of its body, whichever of its outputs is asked for, after
all that it reads and before all that reads it. Once the body stands in the caller's
place, only data and control edges order it, and only what an output needs is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geutil.graph.function_attributes import names_of_functions
from geutil.graph.function_names import signature_of
from geutil.graph.kinds import Operation, is_reference

# Stateful by their signature, but they make a handle or a random number: nobody notices
# whether or when they ran.
_UNNOTICED = frozenset(
    (
        "HashTableV2",
        "Multinomial",
        "MutableHashTableV2",
        "RandomGamma",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
        "VarHandleOp",
        "VariableShape",
        "VariableV2",
    )
)
# Nobody notices whether they ran, but what they see depends on when.
_READS = frozenset(
    (
        "DisableCopyOnRead",
        "IsVariableInitialized",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
    )
)
# Stateful by their signature, and made for what they yield.
_GIVEN = frozenset(("IteratorGetNext", "IteratorV2", "Placeholder"))
# They read a variable of version 1, or hand it on.
_QUIET_READS = frozenset(
    ("Identity", "IsVariableInitialized", "RefEnter", "RefIdentity", "RefSwitch")
)
# They do what a function of theirs does.
_AS_THEIR_FUNCTIONS = frozenset(
    (
        "Case",
        "If",
        "PartitionedCall",
        "StatefulPartitionedCall",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "SymbolicGradient",
        "While",
    )
)


class Effects:
    """Tells which nodes have an effect, given the functions that they may call.

    Args:
        functions: all functions by name, as `FunctionDef`.
        reads: whether a read of a variable or table counts as an effect, too.

    Cost: linear in the nodes of the functions, once.
    """

    def __init__(self, functions: Mapping[str, Any], *, reads: bool = False) -> None:
        self._functions = functions
        self._reads = reads
        callers: dict[str, list[str]] = {}
        found: dict[str, None] = {}
        for name, function in functions.items():
            for node in function.node_def:
                if self._depends(node):
                    for called in names_of_functions(node):
                        callers.setdefault(called, []).append(name)
                if self._by_itself(node):
                    found[name] = None
        waiting = list(found)
        while waiting:
            for caller in callers.get(waiting.pop(), ()):
                if caller not in found:
                    found[caller] = None
                    waiting.append(caller)
        self._found = found

    def of(self, node: Any) -> bool:
        """Tell whether a node has an effect."""
        return self._by_itself(node) or (
            self._depends(node)
            and any(name in self._found for name in names_of_functions(node))
        )

    def is_kernel(self, node: Any) -> bool:
        """Tell whether a node is an op that only computes."""
        signature = signature_of(node.op, {})
        return not (self._depends(node) or signature is None or signature.is_stateful)

    def _depends(self, node: Any) -> bool:
        return node.op in _AS_THEIR_FUNCTIONS or node.op in self._functions

    def _by_itself(self, node: Any) -> bool:
        if self._depends(node):
            # An attribute of the function decides what is called.
            return any(
                value.WhichOneof("value") == "placeholder" and name in _FUNCTION
                for name, value in node.attr.items()
            )
        if node.op in _UNNOTICED:
            return False
        if node.op in _READS:
            return self._reads
        signature = signature_of(node.op, {})
        return signature is None or signature.is_stateful


_FUNCTION = frozenset(("f", "body", "cond", "then_branch", "else_branch", "branches"))


def changes_state(op: Operation) -> bool:
    """Tell whether running an op changes what others see: a variable, a file, a queue.

    A call does what its function does, which is not looked at: it counts if TensorFlow
    calls it stateful.
    """
    if any(is_reference(t) for t in op.inputs):
        # TensorFlow does not call the assignments of version 1 stateful.
        return op.type not in _QUIET_READS
    definition = op.op_def
    stateful = definition is None or bool(definition.is_stateful)
    return stateful and op.type not in _UNNOTICED | _READS | _GIVEN
