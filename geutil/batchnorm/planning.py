"""Decides what is folded into what, and why the rest is not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from geutil.batchnorm.folds import Fold, composed
from geutil.batchnorm.layers import Layer, layer_of
from geutil.batchnorm.norms import Norm, find_norms
from geutil.batchnorm.origins import Origins
from geutil.batchnorm.passing import axis_after
from geutil.batchnorm.paths import (
    Link,
    Obstacle,
    Path,
    link_of,
    outside_readers,
    path_to,
)
from geutil.batchnorm.steps import step_of
from geutil.batchnorm.training.statistics import depends_on_batch, is_correction
from geutil.batchnorm.values import constant
from geutil.graph.kinds import Graph, Operation
from geutil.transform.rewrite.liveness import Liveness


@dataclass(frozen=True, eq=False)
class Plan:
    """What is folded, and what is not.

    Attributes:
        folds: one for each layer.
        refused: each norm that is left, with what stands in the way.
    """

    folds: list[Fold] = field(default_factory=list)
    refused: list[tuple[Norm, Obstacle]] = field(default_factory=list)


@dataclass(frozen=True)
class Choices:
    """What the caller asks for; see `fold_batch_norms`."""

    scope: str | None = None
    clone_shared: bool = False
    assume_inference: bool = False


class Planner:
    """Plans the folds of a graph as it is now.

    Args:
        graph: the graph.
        kept: the ids of the tensors that are read from outside.
        choices: what the caller asks for.

    Cost: linear in ops and edges.
    """

    def __init__(self, graph: Graph, kept: Collection[int], choices: Choices) -> None:
        self._origins = Origins(graph)
        self._liveness = Liveness(graph)
        self._kept = kept
        self._choices = choices
        self._norms = [
            norm
            for norm in find_norms(graph, self._origins, self._liveness)
            if not is_correction(norm, self._origins)
        ]

    def behind_layers(self) -> Plan:
        """Plan to fold norms into the layers before them."""
        plan = Plan()
        folds: dict[Operation, Fold] = {}
        for norm in self._norms:
            found = self._objection(norm) or path_to(
                norm, self._origins, self._liveness, self._kept
            )
            if isinstance(found, Path):
                found = self._objection_to(found) or found
            if isinstance(found, Obstacle):
                plan.refused.append((norm, found))
                continue
            # A norm further on takes along what was planned for the norms before it.
            earlier = folds.get(found.layer.op)
            inside = {link.op for link in found.links}
            chained = earlier is not None and earlier.end in inside
            norms = (*earlier.norms, norm) if chained and earlier else (norm,)
            if earlier is not None and not chained:
                plan.folds.append(earlier)
            folds[found.layer.op] = Fold(norms, found.layer, found.links)
        plan.folds.extend(folds.values())
        return plan

    def before_layers(self, norms: Sequence[Norm]) -> Plan:
        """Plan to fold norms into the layers behind them.

        Args:
            norms: the norms that no layer before them takes in; by the names of the
                ops they end in, since other folds may have come in between.
        """
        plan = Plan()
        wanted = {norm.result.op for norm in norms}
        for norm in self._norms:
            if norm.result.op not in wanted:
                continue
            found = self._way_on(norm)
            if isinstance(found, Fold):
                plan.folds.append(found)
            else:
                plan.refused.append((norm, found))
        return plan

    def _objection(self, norm: Norm) -> Obstacle | None:
        op = norm.steps[-1].op
        scope = self._choices.scope
        if scope is not None and not norm.name.startswith(scope):
            return Obstacle(f"is outside of scope '{scope}'", op)
        if norm.training and not self._choices.assume_inference:
            return Obstacle(
                "normalizes by the statistics of the batch (is_training=True); pass "
                "assume_inference=True to use the moving ones instead",
                op,
            )
        return None

    def _objection_to(self, path: Path) -> Obstacle | None:
        layer = path.layer
        if layer.sizes(layer.outputs) is None:
            return Obstacle("has weights of a shape that is not known", layer.op)
        for link in path.links if not self._choices.assume_inference else ():
            if link.step is not None and depends_on_batch(link.step, self._origins):
                return Obstacle(
                    "depends on the batch and stands between the layer and the norm",
                    link.op,
                )
        if path.shared and not self._choices.clone_shared:
            return Obstacle(
                f"also reads what lies between '{layer.op.name}' and the norm; pass "
                "clone_shared=True to have the layer computed twice",
                path.shared[0],
            )
        return None

    def _way_on(self, norm: Norm) -> Fold | Obstacle:
        """Return the fold of a norm into the layer behind it, or what is in the way."""
        objection = self._objection(norm)
        if objection is not None:
            return objection
        links = [Link(step.op, step.index, step) for step in norm.steps]
        axis = next((step.axis for step in norm.steps if step.axis is not None), None)
        tensor = norm.result
        while True:
            if id(tensor) in self._kept:
                return Obstacle("is read from outside the graph", tensor.op)
            readers = outside_readers([tensor], (), self._liveness)
            if len(readers) != 1:
                return Obstacle(
                    f"has {len(readers)} readers; it can be folded into a single layer",
                    tensor.op,
                )
            op = readers[0]
            layer = layer_of(op, self._origins)
            if layer is not None and op.inputs[layer.data] is tensor:
                return self._into(norm, layer, links, axis)
            link = link_of(op, self._origins)
            if link is None or link.step is not None:
                return Obstacle(
                    f"({op.type}) stands between the norm and the next layer, and no "
                    "layer comes before the norm",
                    op,
                )
            after = None if axis is None else axis_after(op, axis)
            if after is None:
                return Obstacle("does not hand on each channel as it is", op)
            axis = after
            links.append(link)
            tensor = op.outputs[0]

    def _into(
        self, norm: Norm, layer: Layer, links: list[Link], axis: int | None
    ) -> Fold | Obstacle:
        if axis != layer.axis:
            return Obstacle("has its channels on another axis", layer.op)
        sizes = layer.sizes(layer.inputs)
        count = norm.input.shape[axis] if norm.input.shape.rank else None
        if sizes is None or layer.sizes(layer.outputs) is None or sizes != [count]:
            return Obstacle("has weights for other channels than the norm", layer.op)
        if layer.pads and not _shifts_by_zero(norm):
            return Obstacle(
                f"pads with zeros ({layer.op.get_attr('padding').decode()}), and the "
                "norm shifts what is not padded",
                layer.op,
            )
        return Fold((norm,), layer, tuple(links), self._bias(layer), True)

    def _bias(self, layer: Layer) -> Link | None:
        """Return the op that adds the bias of a layer, if nothing else reads it."""
        if id(layer.result) in self._kept:
            return None
        readers = outside_readers([layer.result], (), self._liveness)
        step = step_of(readers[0], self._origins) if len(readers) == 1 else None
        if step is None or not step.op.type.startswith(("BiasAdd", "Add")):
            return None
        if step.axis != layer.axis:
            return None
        return Link(step.op, step.index, step)


def _shifts_by_zero(norm: Norm) -> bool:
    operands = [
        t
        for step in norm.steps
        for t in (step.op.inputs[1:5] if step.operand is None else [step.operand])
    ]
    if any(constant(t) is None for t in operands):
        return False
    offset = composed(norm.steps, True).offset
    return offset is None or not offset.any()
