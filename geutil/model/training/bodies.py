"""What serves training inside functions: loops, branches and calls that are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from geutil.model.training.kinds import DIAGNOSTICS, EffectKinds, is_random, is_write
from geutil.model.training.report import Stripped
from geutil.select.networks.norms import FUSED

_SHOWN = 5


def candidates_in_bodies(graph_def: Any) -> list[Stripped]:
    """Return an entry for each node whose functions hold what would be stripped.

    Cost: linear in the nodes, and for each node that calls functions in their nodes.
    """
    functions = {f.signature.name: f for f in graph_def.library.function}
    kinds = EffectKinds(functions)
    entries = []
    for node in graph_def.node:
        found = list(_found(node, functions, kinds))
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            reason = (
                f"its functions hold {', '.join(found[:_SHOWN])}{more}; bodies are not "
                "stripped: edit them, or trace the function for inference"
            )
            entries.append(Stripped("kept", "body", node.name, reason))
    return entries


def _found(node: Any, functions: dict[str, Any], kinds: EffectKinds) -> Iterator[str]:
    waiting = kinds.called(node)
    seen = set(waiting)
    for name in waiting:
        for inner in functions[name].node_def:
            if _serves_training(inner):
                yield f"{inner.op} '{inner.name}'"
            for called in kinds.called(inner):
                if called not in seen:
                    seen.add(called)
                    waiting.append(called)


def _serves_training(node: Any) -> bool:
    if node.op in FUSED:
        return bool(node.attr["is_training"].b)
    return node.op in DIAGNOSTICS or is_write(node) or is_random(node)


def random_ops(graph_def: Any) -> list[Stripped]:
    """Return an entry for each random op of a graph that was left."""
    reason = "it is no part of a dropout or noise layer that geutil knows"
    return [
        Stripped("kept", "random", node.name, f"{reason} ({node.op})")
        for node in graph_def.node
        if is_random(node)
    ]
