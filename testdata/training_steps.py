"""Training steps of networks as problems of the planner, from shapes alone.

Forward and backward ops with the bytes and the multiply-adds that those of a network
have whose layers are as large; only forward ops may run again. No TensorFlow is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from geutil.gradients.planner import Problem

_SLOW = 16
"""What moving an element costs, in multiply-adds of a convolution."""
_BYTES = 4


class _Shape(NamedTuple):
    """Height, width and channels; the batch is the step's."""

    height: int
    width: int
    channels: int

    @property
    def elements(self) -> int:
        return self.height * self.width * self.channels


class _Op(NamedTuple):
    """A forward op, and what its gradients need.

    Attributes:
        node: its number.
        inputs: the forward nodes that it reads.
        time: of one run; the gradient of each input takes as long.
        saved: forward nodes that the gradients of its inputs read.
        weights: elements of its weights, whose gradient takes as long as the op.
    """

    node: int
    inputs: tuple[int, ...]
    time: float
    saved: tuple[int, ...]
    weights: int


class _Step:
    """A step while it is written down: forward ops, then their gradients in reverse."""

    def __init__(self, batch: int, shape: _Shape) -> None:
        self._batch = batch
        self._times: list[float] = []
        self._sizes: list[int] = []
        self._edges: list[tuple[int, int]] = []
        self._shapes: list[_Shape] = []
        self._ops: list[_Op] = []
        self.images = self._node(0.0, shape, ())

    def shape(self, node: int) -> _Shape:
        """Return the shape of a forward node."""
        return self._shapes[node]

    def _node(self, time: float, shape: _Shape, inputs: tuple[int, ...]) -> int:
        self._times.append(time)
        self._sizes.append(_BYTES * self._batch * shape.elements)
        node = len(self._times) - 1
        self._edges += [(u, node) for u in inputs]
        self._shapes.append(shape)
        return node

    def op(
        self,
        inputs: tuple[int, ...],
        shape: _Shape,
        *,
        products: int = 0,
        weights: int = 0,
        saves_output: bool = False,
        saves_input: bool = False,
    ) -> int:
        """Add a forward op.

        Args:
            inputs: the forward nodes that it reads.
            shape: of its output.
            products: multiply-adds of an element of its output; 0 if it only moves.
            weights: elements of its weights.
            saves_output: whether its gradient reads its output.
            saves_input: whether its gradient reads its inputs.
        """
        time = float(self._batch * shape.elements * (products or _SLOW))
        node = self._node(time, shape, inputs)
        saved = (*(inputs if saves_input else ()), *((node,) if saves_output else ()))
        self._ops.append(_Op(node, inputs, time, saved, weights))
        return node

    def conv(self, x: int, channels: int, size: int, stride: int = 1) -> int:
        """Add a convolution."""
        height, width, depth = self.shape(x)
        products = size * size * depth
        shape = _Shape(-(-height // stride), -(-width // stride), channels)
        return self.op((x,), shape, products=products, weights=products * channels)

    def depthwise(self, x: int, size: int, stride: int) -> int:
        """Add a convolution of each channel by itself."""
        height, width, depth = self.shape(x)
        shape = _Shape(-(-height // stride), -(-width // stride), depth)
        weights = size * size * depth
        return self.op((x,), shape, products=size * size, weights=weights)

    def norm(self, x: int) -> int:
        """Add a normalization of batches or layers."""
        return self.op((x,), self.shape(x), saves_input=True)

    def relu(self, x: int) -> int:
        """Add an activation whose gradient reads its output."""
        return self.op((x,), self.shape(x), saves_output=True)

    def add(self, x: int, y: int) -> int:
        """Add a sum."""
        return self.op((x, y), self.shape(x))

    def pool(self, x: int, stride: int = 2) -> int:
        """Add the greatest of each window."""
        height, width, depth = self.shape(x)
        shape = _Shape(-(-height // stride), -(-width // stride), depth)
        return self.op((x,), shape, saves_input=True, saves_output=True)

    def problem(self) -> Problem:
        """Return the problem: the forward ops, their gradients and the updates."""
        forward = len(self._times)
        partial: dict[int, list[int]] = {self._ops[-1].node: []}
        scalar = _Shape(1, 1, 1)
        for op in reversed(self._ops):
            shape = self.shape(op.node)
            parts = partial[op.node]
            if not parts:
                given = self._node(float(_SLOW), shape, (op.node,))
            elif len(parts) == 1:
                given = parts[0]
            else:
                moved = float(_SLOW * self._batch * shape.elements)
                given = self._node(moved, shape, tuple(parts))
            if op.weights:
                gradient = self._node(op.time, scalar, (op.inputs[0], given))
                self._sizes[gradient] = _BYTES * op.weights
                update = self._node(float(_SLOW * op.weights), scalar, (gradient,))
                self._sizes[update] = 0
            for x in op.inputs:
                if x == self.images:
                    continue
                is_passed_on = not op.saved and not op.weights
                same = self.shape(x) == shape
                back = (
                    given
                    if is_passed_on and same
                    else self._node(op.time, self.shape(x), (*op.saved, given))
                )
                partial.setdefault(x, []).append(back)
        once = range(forward, len(self._times))
        return Problem(self._times, self._sizes, self._edges, no_recompute=once)


def resnet(
    blocks: tuple[int, ...] = (3, 4, 6, 3), *, batch: int = 8, height: int = 160
) -> Problem:
    """Return a step of a residual network; 3, 4, 6 and 3 blocks are a ResNet50's."""
    step = _Step(batch, _Shape(height, height, 3))
    x = step.pool(step.relu(step.norm(step.conv(step.images, 64, 7, 2))))
    for stage, count in enumerate(blocks):
        channels = 64 << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = step.relu(step.norm(step.conv(x, channels, 1, stride)))
            y = step.relu(step.norm(step.conv(y, channels, 3)))
            y = step.norm(step.conv(y, 4 * channels, 1))
            if not block:
                x = step.norm(step.conv(x, 4 * channels, 1, stride))
            x = step.relu(step.add(x, y))
    return _classified(step, x)


def _classified(step: _Step, x: int) -> Problem:
    """Return the step with a mean over the places, a product and a loss."""
    depth = step.shape(x).channels
    x = step.op((x,), _Shape(1, 1, depth))
    x = step.conv(x, 1000, 1)
    step.op((x,), _Shape(1, 1, 1), saves_input=True)
    return step.problem()


def mobilenet(*, batch: int = 16, height: int = 160) -> Problem:
    """Return a step of a network of inverted residuals, as large as a MobileNetV2."""
    step = _Step(batch, _Shape(height, height, 3))
    x = step.relu(step.norm(step.conv(step.images, 32, 3, 2)))
    # Expansion, channels, blocks, stride.
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, channels, count, first in stages:
        for block in range(count):
            stride = 1 if block else first
            y = x
            if expansion > 1:
                depth = expansion * step.shape(x).channels
                y = step.relu(step.norm(step.conv(x, depth, 1)))
            y = step.relu(step.norm(step.depthwise(y, 3, stride)))
            y = step.norm(step.conv(y, channels, 1))
            x = step.add(x, y) if block else y
    return _classified(step, step.relu(step.norm(step.conv(x, 1280, 1))))


def unet(*, batch: int = 4, height: int = 192, channels: int = 32) -> Problem:
    """Return a step of a U-Net of four levels: what goes down is read on the way up."""
    step = _Step(batch, _Shape(height, height, 3))

    def twice(x: int, depth: int) -> int:
        for _ in range(2):
            x = step.relu(step.norm(step.conv(x, depth, 3)))
        return x

    x, across = step.images, []
    for level in range(4):
        x = twice(x, channels << level)
        across.append(x)
        x = step.pool(x)
    x = twice(x, channels << 4)
    for level in reversed(range(4)):
        height, width, depth = step.shape(across[level])
        x = step.op((x,), _Shape(height, width, 2 * depth))
        x = step.conv(x, depth, 2)
        x = step.op((across[level], x), _Shape(height, width, 2 * depth))
        x = twice(x, depth)
    x = step.conv(x, 2, 1)
    step.op((x,), _Shape(1, 1, 1), saves_input=True)
    return step.problem()


def decoder(
    layers: int = 32, *, batch: int = 4, tokens: int = 128, depth: int = 256
) -> Problem:
    """Return a step of a transformer of some layers, eight heads and wide products."""
    rows = _Shape(tokens, 1, depth)
    step = _Step(batch, rows)
    scored = _Shape(tokens, tokens, 8)

    def product(x: int, channels: int) -> int:
        return step.conv(x, channels, 1)

    x = step.op((step.images,), rows)
    for _ in range(layers):
        y = step.norm(x)
        query, key, value = (product(y, depth) for _ in range(3))
        y = step.op((query, key), scored, products=depth // 8, saves_input=True)
        y = step.relu(y)
        y = step.op((y, value), rows, products=tokens, saves_input=True)
        x = step.add(x, product(y, depth))
        y = product(step.norm(x), 4 * depth)
        y = step.op((y,), step.shape(y), saves_input=True)
        x = step.add(x, product(y, depth))
    x = product(step.norm(x), 1000)
    step.op((x,), _Shape(1, 1, 1), saves_input=True)
    return step.problem()


STEPS: dict[str, Callable[[], Problem]] = {
    "resnet50": resnet,
    "resnet152": partial(resnet, (3, 8, 36, 3)),
    "mobilenet": mobilenet,
    "unet": unet,
    "decoder_12": partial(decoder, 12),
    "decoder_32": decoder,
}
"""Problems by name: some networks of the sizes that are commonly trained."""
