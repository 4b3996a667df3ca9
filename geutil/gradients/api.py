"""Memory-saving gradients, and the differences that encodings make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ArgumentTypeError
from geutil.gradients import updates
from geutil.gradients.barriers import HOST
from geutil.gradients.choices import BFLOAT16, MIN_CHECKPOINT_SIZE, Options
from geutil.gradients.dry_run import explained
from geutil.gradients.planning import Budget, Plan
from geutil.gradients.policies import Policy
from geutil.gradients.preparation import prepare
from geutil.gradients.report import publish
from geutil.gradients.step import require_targets
from geutil.gradients.tape.engine import TapeEngine
from geutil.graph.types import GivenShapes, Tensor, is_func_graph


@tf.autograph.experimental.do_not_convert
def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    checkpoints: Any = "collection",
    *,
    min_checkpoint_size: int = MIN_CHECKPOINT_SIZE,
    offload: bool | Policy = False,
    offload_device: str = HOST,
    prefetch: int = 1,
    holds_gradients: bool = False,
    engine: str | TapeEngine = "tensorflow",
    order: bool = True,
    shapes: GivenShapes | None = None,
    encode: str | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Return the gradients of `ys` with respect to `xs`, recomputing forward tensors.

    Gradient checkpointing: only some tensors of the forward pass, the checkpoints, are
    held for the backward pass. The others are recomputed, segment by segment, when the
    backward pass needs them. The results are those of `tf.gradients`: the backward
    graph is TensorFlow's own, unless another engine is asked for, and only reads other
    copies of the same tensors. Works in a version 1 graph and inside `tf.function`.

    With `tf.config.experimental.enable_op_determinism` the results are those of
    `tf.gradients` to the last bit, unless Grappler joins constants in another order
    (see `geutil.gradients.apply`), and as far as `tf.gradients` is reproducible:
    TensorFlow may add three or more tensors in an order that depends on chance (see
    there, too). Otherwise the step also runs in a low-memory order, and adds gradients
    as they arrive: rounded like TensorFlow's with Grappler or, where forward ops have
    to wait and Grappler joins less, without it; and to 1e-6 under XLA, unless the
    differentiated function amplifies a rounding beyond that.

    Nothing stateful runs twice: variable reads, assignments, random numbers, queues and
    prints keep their results. Loops, branches and calls are recomputed as a whole.
    Values that a functional loop keeps from each iteration for its backward pass, such
    as the gates of an LSTM, are recomputed iteration by iteration where "memory" or a
    budget gains by it; its products may then run again, but nothing stateful.

    Args:
        ys: a tensor, or a list or tuple of tensors.
        xs: a tensor, a `tf.Variable` or a Keras variable, or a list or tuple of them.
        grad_ys: the gradients of `ys`, each of its shape; None means ones.
        checkpoints: the tensors to hold. A list of tensors, of Keras layers, or of
            names of either, of ops or scopes; "collection", the tensors in the graph
            collection `checkpoints`; "speed", the results of convolutions, matrix
            products and the like; "memory", the tensors of the least predicted peak; a
            `Budget`, those of the least time whose predicted peak is within it, or of
            the least peak within its extra time; a `Plan`, those found earlier for such
            a budget; or a policy, a predicate on tensors such as `by_type("Conv2D")`.
            None: all that the backward pass reads, as with `tf.gradients`, if only
            `engine` or the report is wanted.
        min_checkpoint_size: modes and policies choose no tensor of fewer elements.
            "memory" also keeps a smaller one that is live across many layers, such as a
            mask that each of them reads.
        offload: whether kept tensors wait in the memory of another device from their
            last use in the forward pass to their first in the backward pass; or a
            policy that selects them. "memory" takes this into account: it offloads as
            few bytes as bring the peak to 0.7 of that without, or to the least peak;
            and none, with a warning, where the peak would fall by less than a
            twentieth. In a function the forward pass waits until all but the last two
            have arrived, so that no more than two are in transit.
        offload_device: that device.
        prefetch: how many segments before its use a tensor starts to come back.
        holds_gradients: whether all gradients are held until the step ends, as when
            they are returned, or clipped by their common norm; otherwise each is
            consumed as it arrives, as by an optimizer. The choice of "memory" and the
            predicted peaks depend on it.
        engine: the builder of the backward graph: "tensorflow", `tf.gradients` itself;
            or "tape", which sums the gradients of a tensor with many readers before all
            of them have arrived (see `geutil.gradients.tape`). A `TapeEngine` sets
            when.
        order: whether the step, its updates included, runs in a planned low-memory
            order, with any number of threads and any load. It costs no time, and saves
            memory without checkpoints, too. In a graph of version 1, updates that a
            Session runs are ordered by `order_updates`. Nothing is ordered under XLA or
            op determinism.
        shapes: shapes for tensors whose static shapes leave dimensions open, such as
            those of feeds: a mapping, or pairs. A key is a tensor, its `ref()` or its
            name. All other sizes are inferred. Without them, an open dimension that
            nothing determines is assumed to be 32, and the report lists these. They
            hold for the graph from then on.
        encode: the form to keep of tensors whose values the backward pass does not
            need. "lossless": the mask of an activation, the positions of the maxima of
            a pool, a shape, a sign, the input of a cast to more bytes. Nothing is
            recomputed for it, and with `checkpoints=None` the gradients are the same to
            the last bit, except under XLA. "bfloat16": these, and all other kept
            tensors of type float32 wait in half the bytes, which changes the gradients;
            `encoding_errors` measures how much. None: nothing is encoded. Encodings are
            also left out where the step would hold more, or, within a budget, take
            longer.
        device: the device of ops that name none, such as "GPU:0", which need not exist:
            checkpoints, order, budget and report are then for its memory
            (`geutil.memory.predict`). It holds for the graph from then on. None: the
            device on which this process runs them.
        **kwargs: further arguments of `tf.gradients` (`name`, `gate_gradients`,
            `aggregation_method`, `stop_gradients`, `unconnected_gradients`) and of
            `tf.compat.v1.gradients` (`colocate_gradients_with_ops`). The tape refuses
            `gate_gradients` and `aggregation_method`.

    Returns:
        A list with a tensor or `tf.IndexedSlices` for each x, or None where no y
        depends on it. `last_report` returns the report on kept and recomputed tensors.
        Its warnings are logged as well, so plain gradients are never returned without a
        warning, unless `checkpoints` is None.

    Raises:
        ArgumentTypeError: an argument is of a wrong type.
        SelectionError: an unknown mode, a checkpoint from another graph, or an empty
            collection; or `shapes` that do not fit the graph.
        PlanError: the function belongs to a DTensor mesh; no choice was found within a
            budget (the message has the least peak that was found); or a plan was made
            for another step.
        TapeError: with the tape, an op has no gradient, or is in a loop or conditional
            of version 1.
        The errors of `tf.gradients`.

    Cost: at most four times that of `tf.gradients`, linear in ops and edges; with a
        budget, also that of the planner, about 10 s for 2,000 ops, and this twice in a
        graph that is not a function's.

    Source: Chen et al., "Training deep nets with sublinear memory cost", 2016,
        arXiv 1604.06174.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients
        >>> @tf.function
        ... def slope(x):
        ...     y = x * x
        ...     z = tf.square(y * y)
        ...     return gradients(z, x, checkpoints=[y])[0]
        >>> slope(tf.constant([1.0, 2.0])).numpy().tolist()
        [8.0, 1024.0]
    """
    kept = (checkpoints, min_checkpoint_size, offload, offload_device, prefetch)
    options = Options(*kept, holds_gradients, engine, order, shapes, encode, device)
    if isinstance(checkpoints, Budget | Plan) and not is_func_graph(
        require_targets(ys)[0].graph
    ):
        # In a graph that stays, impossible requests are refused on a copy.
        explained(ys, xs, grad_ys, options, kwargs)
    prepared = prepare(ys, xs, grad_ys, options, kwargs)
    replanning = prepared.replanning() if order else None
    step, report = prepared.build()
    if replanning:
        replanning.note(step)
    publish(report, step.graph)
    if order:
        updates.order_when_complete(step, report, replanning)
    return list(step.gradients)


def gradients_speed(
    ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> list[Any]:
    """Return `gradients(..., checkpoints="speed")`; can replace `tf.gradients`.

    Convolutions, matrix products and the like run once; the ops between them run again.
    Arguments, errors and cost are those of `gradients`; `args` are the further
    positional arguments of `tf.gradients`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients_speed
        >>> original, tf.gradients = tf.gradients, gradients_speed
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([32, 32])
        ...     y = tf.matmul(tf.tanh(tf.matmul(x, x)), x)
        ...     len(tf.gradients(y, x))
        1
        >>> tf.gradients = original
    """
    return gradients(ys, xs, grad_ys, "speed", **_named(args), **kwargs)


def gradients_memory(
    ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> list[Any]:
    """Return `gradients(..., checkpoints="memory")`; can replace `tf.gradients`.

    Minimizes the predicted peak with at most one extra forward pass. Arguments, errors
    and cost are those of `gradients`; `args` are the further positional arguments of
    `tf.gradients`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients_memory, last_report
        >>> with tf.Graph().as_default():
        ...     x = y = tf.ones([1024])
        ...     for _ in range(30):
        ...         y = tf.tanh(y)
        ...     _ = gradients_memory(y, x)
        >>> report = last_report()
        >>> report.peak < 0.6 * report.plain_peak
        True
    """
    return gradients(ys, xs, grad_ys, "memory", **_named(args), **kwargs)


def gradients_collection(
    ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any
) -> list[Any]:
    """Return `gradients(..., checkpoints="collection")`; can replace `tf.gradients`.

    Keeps the tensors of the graph collection `checkpoints`. Arguments, errors and cost
    are those of `gradients`; `args` are the further positional arguments of
    `tf.gradients`.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import gradients_collection, last_report
        >>> with tf.Graph().as_default():
        ...     x = tf.ones([1024])
        ...     y = tf.sin(tf.sin(x))
        ...     tf.compat.v1.add_to_collection("checkpoints", y)
        ...     _ = gradients_collection(tf.sin(tf.sin(y)), x)
        >>> last_report().mode
        'collection'
    """
    return gradients(ys, xs, grad_ys, "collection", **_named(args), **kwargs)


_POSITIONAL = (
    *("name", "gate_gradients", "aggregation_method", "stop_gradients"),
    "unconnected_gradients",
)


def _named(args: tuple[Any, ...]) -> dict[str, Any]:
    """Name the positional arguments of `tf.gradients` after `grad_ys`."""
    if len(args) > len(_POSITIONAL):
        raise ArgumentTypeError(
            f"expected at most {len(_POSITIONAL) + 3} arguments by position, as "
            "tf.gradients takes them; pass the others by name"
        )
    return dict(zip(_POSITIONAL, args, strict=False))


@dataclass(frozen=True)
class GradientError:
    """The difference between a gradient and that of `tf.gradients`.

    Attributes:
        name: the name of the x that it is the gradient with respect to.
        relative: the Euclidean norm of the difference, divided by the gradient's.
        largest: the largest difference of an element, divided by the largest element.
    """

    name: str
    relative: float
    largest: float


def encoding_errors(
    loss: Callable[..., Any], xs: Sequence[Any], *batch: Any, **options: Any
) -> tuple[GradientError, ...]:
    """Return the error of each gradient with `encode="bfloat16"`, on one batch.

    Both kinds of gradients share one forward pass, which runs once with its side
    effects: moving averages move, and dropout draws.

    Args:
        loss: computes the differentiated tensor from a batch.
        xs: variables, the same in each call.
        *batch: tensors or arrays.
        **options: those of `gradients`; `encode` is "bfloat16" unless given, and
            `checkpoints` is None.

    Returns:
        An error for each x that the loss depends on.

    Raises:
        The errors of `gradients`.

    Cost: two backward passes.

    Example:
        >>> import tensorflow as tf
        >>> from geutil.gradients import encoding_errors
        >>> w = tf.Variable(tf.random.stateless_normal([64, 64], (1, 2)) / 8, name="w")
        >>> def loss(x):
        ...     return tf.reduce_mean(tf.square(tf.tanh(tf.tanh(x @ w) @ w)))
        >>> (error,) = encoding_errors(loss, [w], tf.ones([32, 64]))
        >>> error.name, 0 < error.relative < 0.01
        ('w:0', True)
    """
    # An order changes no value, and takes its time to find.
    options = {"encode": BFLOAT16, "checkpoints": None, **options, "order": False}
    sources = list(xs)

    @tf.function(autograph=False)
    def compare(*args: Any) -> list[Any]:
        value = loss(*args)
        plain = tf.gradients(value, sources)
        encoded = gradients(value, sources, **options)
        return [
            None if p is None else _differences(tf.convert_to_tensor(p), e)
            for p, e in zip(plain, encoded, strict=True)
        ]

    compared = compare(*map(tf.convert_to_tensor, batch))
    return tuple(
        GradientError(x.name, *(float(number) for number in numbers))
        for x, numbers in zip(sources, compared, strict=True)
        if numbers is not None
    )


def _differences(plain: Tensor, encoded: Any) -> tuple[Tensor, Tensor]:
    """Return the relative norm and the relative largest element of a difference."""
    difference = tf.convert_to_tensor(encoded) - plain
    relative = tf.math.divide_no_nan(tf.norm(difference), tf.norm(plain))
    largest = (tf.reduce_max(tf.abs(t)) for t in (difference, plain))
    return relative, tf.math.divide_no_nan(*largest)
