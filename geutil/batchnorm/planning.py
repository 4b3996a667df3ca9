"""Decides what is folded into what, and why the rest is not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from geutil.batchnorm.folds import Fold
from geutil.batchnorm.forward import WaysOn
from geutil.batchnorm.moving import Moving, MovingStatistics
from geutil.batchnorm.norms import Norm, find_norms
from geutil.batchnorm.paths import Obstacle, Path, misfit, outside_readers, path_to
from geutil.batchnorm.training.statistics import is_correction
from geutil.graph.kinds import Graph, Operation
from geutil.graph.names import is_in_scope
from geutil.graph.plain_gradients import in_version_1_control_flow
from geutil.select.networks.origins import Origins
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
        self._moving: dict[Norm, tuple[Moving, ...]] = {}
        self._objections: dict[Norm, Obstacle] = {}
        statistics = MovingStatistics(graph, self._origins)
        for norm in self._norms:
            objection = self._objection(norm, statistics)
            if objection is not None:
                self._objections[norm] = objection
        self._barred = {
            step.op: norm for norm in self._objections for step in norm.steps
        }
        steps = {step.op for norm in self._norms for step in norm.steps}
        self._ways_on = WaysOn(self._origins, self._liveness, kept, steps, self._moving)

    def behind_layers(self) -> Plan:
        """Plan to fold norms into the layers before them."""
        plan = Plan()
        folds: dict[Operation, Fold] = {}
        for norm in self._norms:
            found = self._objections.get(norm) or self._way_back(norm)
            if isinstance(found, Obstacle):
                plan.refused.append((norm, found))
                continue
            norms, moving = [norm], [*self._moving.get(norm, ())]
            # A norm further on takes along the norms before it that nobody else reads.
            members = {link.op for link in found.links}
            for link in reversed(found.links):
                earlier = folds.get(link.op)
                if earlier is None:
                    continue
                moving = [*earlier.moving, *moving]
                if not outside_readers([link.op.outputs[0]], members, self._liveness):
                    norms = [*folds.pop(link.op).norms, *norms]
                break
            fold = Fold(tuple(norms), found.layer, found.links, moving=tuple(moving))
            folds[fold.end] = fold
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
        ahead: dict[Operation, Fold] = {}
        for norm in reversed(self._norms):
            if norm.result.op not in wanted:
                continue
            found = self._objections.get(norm) or self._ways_on.from_norm(norm, ahead)
            if isinstance(found, Fold):
                # A norm further back takes along those behind it.
                for later in found.norms[1:]:
                    ahead.pop(later.steps[0].op, None)
                ahead[norm.steps[0].op] = found
            else:
                plan.refused.append((norm, found))
        plan.folds.extend(reversed(ahead.values()))
        plan.refused.reverse()
        return plan

    def _objection(self, norm: Norm, statistics: MovingStatistics) -> Obstacle | None:
        """Return why a norm may not be folded, wherever it is."""
        op = norm.steps[-1].op
        scope = self._choices.scope
        if not is_in_scope(norm.name, scope):
            return Obstacle(f"is outside of scope '{scope}'", op)
        if in_version_1_control_flow(op):
            return Obstacle(
                "is in a loop or conditional of version 1, whose parts cannot be "
                "replaced one by one; make the graph with control flow v2",
                op,
            )
        if norm.training:
            return self._objection_to_training(norm, statistics)
        for t in norm.steps[0].parameters:
            if not self._origins.is_parameter(t):
                return Obstacle(f"reads '{t.name}', which depends on the data", op)
        return None

    def _objection_to_training(
        self, norm: Norm, statistics: MovingStatistics
    ) -> Obstacle | None:
        op = norm.steps[-1].op
        if not self._choices.assume_inference:
            return Obstacle(
                "normalizes by the statistics of the batch (is_training=True); pass "
                "assume_inference=True to use the moving ones instead",
                op,
            )
        moving = statistics.of(norm)
        if moving is None:
            return Obstacle(
                "normalizes by the statistics of the batch (is_training=True), and no "
                "moving statistics are known: the norm does not read them, and no op "
                "updates them",
                op,
            )
        self._moving[norm] = tuple(moving)
        return None

    def _way_back(self, norm: Norm) -> Path | Obstacle:
        found = path_to(norm, self._origins, self._liveness, self._kept, self._barred)
        if isinstance(found, Path):
            return self._objection_to(found) or found
        return found

    def _objection_to(self, path: Path) -> Obstacle | None:
        layer = path.layer
        sizes = layer.sizes(layer.outputs)
        if sizes is None:
            return Obstacle("has weights of a shape that is not known", layer.op)
        if in_version_1_control_flow(layer.op):
            return Obstacle("is in a loop or conditional of version 1", layer.op)
        objection = misfit(path.links, int(np.prod(sizes)))
        if objection is not None:
            return objection
        if path.shared and not self._choices.clone_shared:
            return Obstacle(
                f"also reads what lies between '{layer.op.name}' and the norm; pass "
                "clone_shared=True to have the layer computed twice",
                path.shared[0],
            )
        return None
