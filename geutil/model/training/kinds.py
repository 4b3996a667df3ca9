"""What ops do besides computing: diagnose, write variables, or something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from geutil.graph.effects import Effects
from geutil.graph.function_attributes import functions_of_attributes

Kind: TypeAlias = Literal["diagnostic", "write", "other"]

PASSING = frozenset(
    (
        "CheckNumerics",
        "CheckNumericsV2",
        "DebugIdentity",
        "DebugIdentityV2",
        "DebugIdentityV3",
        "Print",
    )
)
"""Diagnostics that pass their first input on."""
_SUMMARIES = ("Audio", "Histogram", "Image", "Merge", "Scalar", "Tensor")
DIAGNOSTICS = PASSING | frozenset(
    (
        "Assert",
        "CloseSummaryWriter",
        "CreateSummaryDbWriter",
        "CreateSummaryFileWriter",
        "FlushSummaryWriter",
        "ImportEvent",
        "PrintV2",
        "SummaryWriter",
        "WriteRawProtoSummary",
        "WriteSummary",
        "WriteGraphSummary",
        *(f"{kind}Summary{version}" for kind in _SUMMARIES for version in ("", "V2")),
        *(f"Write{kind}Summary" for kind in _SUMMARIES),
    )
)
_RANDOM_STATE = frozenset(
    (
        "RngReadAndSkip",
        "RngSkip",
        "StatefulRandomBinomial",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
    )
)
_TRAINING = ("ResourceApply", "ResourceSparseApply")
_WRITES = (
    "AssignAddVariable",
    "AssignSubVariable",
    "AssignVariable",
    "ResourceScatter",
)
_RANDOM = ("Multinomial", "Parameterized", "Random", "Stateless", "Truncated")
_DRAWN = ("Binomial", "Gamma", "Multinomial", "Normal", "Poisson", "Shuffle", "Uniform")


def is_training_write(node: Any) -> bool:
    """Tell whether a node is the step of an optimizer."""
    return bool(node.op.startswith(_TRAINING))


def is_write(node: Any) -> bool:
    """Tell whether a node changes the variable that its first input is."""
    return node.op in _RANDOM_STATE or node.op.startswith((*_TRAINING, *_WRITES))


def is_random(node: Any) -> bool:
    """Tell whether a node draws random numbers."""
    if node.op in _RANDOM_STATE:
        return node.op != "RngSkip"
    if "SampleDistortedBoundingBox" in node.op:
        return True
    return node.op.startswith(_RANDOM) and any(word in node.op for word in _DRAWN)


class EffectKinds:
    """Tells of each node which kinds of effects it has.

    Args:
        functions: the definitions of the functions that nodes may call.

    Cost: linear in the nodes of the functions, once.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._effects = Effects(functions)
        self._functions = functions
        self._inside: dict[str, dict[Kind, None]] = {name: {} for name in functions}
        callers: dict[str, list[str]] = {}
        for name, function in functions.items():
            for node in function.node_def:
                called = self.called(node)
                for other in called:
                    callers.setdefault(other, []).append(name)
                if not called:
                    self._inside[name].update(dict.fromkeys(self._own(node)))
        waiting = [name for name, kinds in self._inside.items() if kinds]
        while waiting:
            name = waiting.pop()
            for caller in callers.get(name, ()):
                known = len(self._inside[caller])
                self._inside[caller].update(self._inside[name])
                if len(self._inside[caller]) > known:
                    waiting.append(caller)

    def called(self, node: Any) -> list[str]:
        """Return the functions that a node may call."""
        names = [*functions_of_attributes(node.attr), node.op]
        return [name for name in names if name in self._functions]

    def of(self, node: Any) -> tuple[Kind, ...]:
        """Return the kinds of effects of a node; none if it only computes."""
        called = self.called(node)
        if not called:
            return self._own(node)
        return tuple(dict.fromkeys(k for name in called for k in self._inside[name]))

    def _own(self, node: Any) -> tuple[Kind, ...]:
        if node.op in DIAGNOSTICS:
            return ("diagnostic",)
        if is_write(node):
            return ("write",)
        return ("other",) if self._effects.of(node) else ()
