"""Decides which batch norms in training are folded, and why the rest is not."""

from __future__ import annotations

from dataclasses import dataclass, field

from geutil.batchnorm.norms import Norm, find_norms
from geutil.batchnorm.paths import Obstacle, Path, outside_readers, path_to
from geutil.batchnorm.training.building import TrainingFold
from geutil.batchnorm.training.statistics import is_correction, statistics_of
from geutil.graph.kinds import Graph, Operation
from geutil.graph.names import is_in_scope
from geutil.select.networks.origins import Origins
from geutil.transform.rewrite.liveness import Liveness


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """What is folded, and what is not; norms at inference are in neither.

    Attributes:
        folds: one for each norm.
        refused: for the last op of each norm that is left, the norm and what stands in
            the way.
    """

    folds: list[TrainingFold] = field(default_factory=list)
    refused: dict[Operation, tuple[Norm, Obstacle]] = field(default_factory=dict)


def plan_training(graph: Graph, scope: str | None, *, freezes: bool) -> TrainingPlan:
    """Plan to fold the norms in training of a graph into the layers before them.

    Args:
        graph: the graph.
        scope: a name scope: only norms in it; None is all.
        freezes: whether moving averages are to stop.

    Cost: linear in ops and edges.
    """
    planner = _Planner(graph, scope, freezes)
    plan = TrainingPlan()
    for norm in find_norms(graph, planner.origins, planner.liveness):
        if not norm.training or is_correction(norm, planner.origins):
            continue
        found = planner.fold_of(norm)
        if isinstance(found, Obstacle):
            plan.refused[norm.result.op] = norm, found
        else:
            plan.folds.append(found)
    return plan


class _Planner:
    def __init__(self, graph: Graph, scope: str | None, freezes: bool) -> None:
        self.origins = Origins(graph)
        self.liveness = Liveness(graph)
        self._scope = scope
        self._freezes = freezes

    def fold_of(self, norm: Norm) -> TrainingFold | Obstacle:
        if not is_in_scope(norm.name, self._scope):
            return Obstacle(f"is outside of scope '{self._scope}'", norm.result.op)
        # The old layer stays, for its statistics: others may go on reading it.
        path = path_to(norm, self.origins, self.liveness, (), {})
        if isinstance(path, Obstacle):
            return path
        objection = self._objection(norm, path)
        if objection is not None:
            return objection
        found = statistics_of(norm, self.origins, with_mean=self._freezes)
        if isinstance(found, Obstacle):
            return found
        return TrainingFold((norm,), path.layer, path.links, statistics=found)

    def _objection(self, norm: Norm, path: Path) -> Obstacle | None:
        layer = path.layer
        if layer.sizes(layer.outputs) is None:
            return Obstacle("has weights of a shape that is not known", layer.op)
        members = {step.op for step in norm.steps}
        for link in path.links:
            step = link.step
            if step is None or step.op in members:
                continue
            # Of other steps `path_to` says so.
            if step.operand is None and step.op.get_attr("is_training"):
                return Obstacle(
                    "depends on the batch and stands between the layer and the norm",
                    step.op,
                )
        inside = [step.result for step in norm.steps[:-1]]
        readers = outside_readers(inside, members, self.liveness)
        if readers:
            return Obstacle("reads what is computed within the norm", readers[0])
        return None
