"""Pipelines of devices, simulated: step time, bubble, traffic and peaks.

Each stage of a model is on a device of its own; micro-batches of a step go through the
stages forwards, and back. Numbers only: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import Literal

from geutil.errors import PlanError

Schedule = Literal["gpipe", "1f1b"]
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Stage:
    """The time and memory of a stage for one micro-batch.

    Attributes:
        forward: the seconds of its forward pass.
        backward: those of its backward pass, what it computes again included.
        sent: the bytes that it sends to the next stage; as many come back as gradients.
        kept: the bytes that it holds of each micro-batch from its forward pass to its
            backward pass.
        transient: the bytes that a pass holds besides while it runs.
        held: the bytes that it holds all the time: weights, their gradients, and what
            an optimizer keeps.
        gradients: the bytes of the gradients that replicas exchange.
    """

    forward: float
    backward: float
    sent: int = 0
    kept: int = 0
    transient: int = 0
    held: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Pipeline:
    """Stages on devices of their own, and how a step goes through them.

    Attributes:
        stages: the stages, first to last.
        micro_batches: how many of them a step has, on each replica.
        schedule: "gpipe" runs all forward passes and then all backward passes; "1f1b"
            begins with as many forward passes as there are stages from here on, and
            then alternates.
        bandwidth: of each link between two devices, in bytes per second.
        latency: what each message takes besides, in seconds.
        speed: how many times as fast as in `stages` the devices compute.
        replicas: how many such pipelines share the batch. After its last backward pass
            each stage sums its gradients with its replicas, in a ring.
    """

    stages: Sequence[Stage]
    micro_batches: int
    schedule: Schedule = "1f1b"
    bandwidth: float = float("inf")
    latency: float = 0.0
    speed: float = 1.0
    replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"{self.schedule!r} is no schedule; pass one of {', '.join(SCHEDULES)}"
            )
        for name in ("micro_batches", "replicas"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is 1 or more, got {getattr(self, name)!r}")
        for name in ("bandwidth", "speed"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is above 0, got {getattr(self, name)!r}")
        if not self.stages:
            raise PlanError("there is no stage: pass one for each device")

    @property
    def devices(self) -> int:
        """The number of devices, replicas included."""
        return len(self.stages) * self.replicas

    def flying(self, stage: int) -> int:
        """Return how many micro-batches a stage has begun with and not ended."""
        if self.schedule == "gpipe":
            return self.micro_batches
        return min(self.micro_batches, len(self.stages) - stage)

    def passes(self, stage: int) -> list[tuple[bool, int]]:
        """Return the passes of a stage in their order: is it backward, micro-batch."""
        count, first = self.micro_batches, self.flying(stage)
        order = [(False, m) for m in range(first)]
        for m in range(count):
            order.append((True, m))
            if first + m < count:
                order.append((False, first + m))
        return order


@dataclass(frozen=True)
class PipelineRun:
    """The time, traffic and memory of a step of a pipeline.

    Attributes:
        pipeline: the pipeline.
        seconds: from the first pass to the last, sums over replicas included.
        busy: the seconds for which each stage computes.
        in_flight: the most micro-batches that each stage holds at once.
        peaks: the most bytes that each stage's device holds.
        traffic: the bytes that go over the link behind each stage in a step, both ways.
        exchanged: the bytes that each device sends to replicas of its stage in a step.
    """

    pipeline: Pipeline
    seconds: float
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    peaks: tuple[int, ...]
    traffic: tuple[int, ...]
    exchanged: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The part of all devices' time in which they compute nothing."""
        if not self.seconds:
            return 0.0
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)

    @property
    def peak(self) -> int:
        """The most bytes that a device holds."""
        return max(self.peaks)


def run_pipeline(pipeline: Pipeline) -> PipelineRun:
    """Simulate one step of a pipeline.

    A pass begins when the device is free, by the stage's own order, and what it reads
    has come. Sending takes no time of the device, and a link carries one message after
    another in each direction.

    Args:
        pipeline: the stages, the schedule and the machine.

    Returns:
        The time of the step, the bubble, the bytes on each link, the peaks.

    Cost: linear in stages times micro-batches.

    Source: Huang et al., "GPipe", 2018, arXiv 1811.06965; Narayanan et al.,
        "PipeDream", 2019 (1F1B); the ring of replicas sends 2 (r - 1) / r of the
        gradients (Patarasu and Yuan 2009).

    Example:
        Four equal stages idle for 3 of 11 passes' time with 8 micro-batches:

        >>> run = run_pipeline(Pipeline([Stage(1.0, 2.0)] * 4, micro_batches=8))
        >>> run.seconds, round(run.bubble * 11, 6), run.in_flight
        (33.0, 3.0, (4, 3, 2, 1))
    """
    stages, count = pipeline.stages, pipeline.micro_batches
    orders = [pipeline.passes(s) for s in range(len(stages))]
    place = [0] * len(stages)
    free = [0.0] * len(stages)
    links = _Links(pipeline)
    waiting = list(range(len(stages)))
    while waiting:
        stage = waiting.pop()
        while place[stage] < len(orders[stage]):
            is_backward, batch = orders[stage][place[stage]]
            came = links.arrival(stage, batch, is_backward=is_backward)
            if came is None:
                break
            own = stages[stage]
            taken = (own.backward if is_backward else own.forward) / pipeline.speed
            free[stage] = max(free[stage], came) + taken
            place[stage] += 1
            neighbour = links.send(stage, batch, free[stage], is_backward=is_backward)
            if neighbour is not None:
                waiting.append(neighbour)
    # A ring sums up the gradients of replicas in so many messages of equal size.
    messages = 2 * (pipeline.replicas - 1)
    exchanged = [messages * s.gradients // pipeline.replicas for s in stages]
    summing = [n / pipeline.bandwidth + messages * pipeline.latency for n in exchanged]
    # A pass forwards takes up a micro-batch, one backwards lets go of it.
    taken_up = ([1 - 2 * is_backward for is_backward, _ in order] for order in orders)
    in_flight = [max(accumulate(changes)) for changes in taken_up]
    peaks = (
        s.held + n * s.kept + s.transient
        for s, n in zip(stages, in_flight, strict=True)
    )
    return PipelineRun(
        pipeline,
        max(map(add, free, summing)),
        tuple(count * (s.forward + s.backward) / pipeline.speed for s in stages),
        tuple(in_flight),
        tuple(peaks),
        tuple(2 * count * s.sent for s, _ in pairwise(stages)),
        tuple(exchanged),
    )


class _Links:
    """The messages between neighbouring stages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._last = len(pipeline.stages) - 1
        self._arrived: dict[tuple[int, int, bool], float] = {}
        self._free: dict[tuple[int, bool], float] = {}

    def arrival(self, stage: int, batch: int, *, is_backward: bool) -> float | None:
        """Return when what a pass reads has come; None if it was not sent yet."""
        if not is_backward and stage == 0:
            return 0.0
        return self._arrived.get((stage, batch, is_backward))

    def send(
        self, stage: int, batch: int, now: float, *, is_backward: bool
    ) -> int | None:
        """Send what a pass has made; return the stage that waits for it, if any."""
        if not is_backward and stage == self._last:
            self._arrived[stage, batch, True] = now
            return None
        target = stage - 1 if is_backward else stage + 1
        if target < 0:
            return None
        pipeline = self._pipeline
        size = pipeline.stages[min(stage, target)].sent
        link = (min(stage, target), is_backward)
        begins = max(now, self._free.get(link, 0.0))
        self._free[link] = begins + size / pipeline.bandwidth
        self._arrived[target, batch, is_backward] = self._free[link] + pipeline.latency
        return target
