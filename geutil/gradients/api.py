"""Gradients that hold less, and how far encodings move them."""

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
    """Return the gradients of `ys` by `xs`, recomputing tensors that would fill memory.

    Gradient checkpointing: of the forward pass only some tensors, the checkpoints, are
    held for the backward pass. The rest is computed a second time, segment by segment,
    when the backward pass gets there. The results are those of `tf.gradients`: the
    backward graph is TensorFlow's own, unless another engine is asked for, and only
    reads other copies of the same tensors. Works in a version 1 graph and inside
    `tf.function`.

    With `tf.config.experimental.enable_op_determinism` the results are those of
    `tf.gradients` to the last bit, unless Grappler joins constants in another order
    (see `geutil.gradients.apply`), and as far as `tf.gradients` repeats
    itself: the order in which TensorFlow adds three or more tensors can be left to
    chance (see there, too). Otherwise the step also runs in an order that holds little,
    and adds gradients up as they come: rounded like TensorFlow's with Grappler or,
    where forward ops have to wait and Grappler joins less, without it; and to 1e-6
    under XLA, unless the differentiated function amplifies a rounding beyond that.

    Nothing stateful runs twice: variable reads, assignments, random numbers, queues and
    prints keep their results. Loops, branches and calls are recomputed whole. Values
    that a loop of functions keeps of each turn for its backward pass, such as the gates
    of an LSTM, are computed again turn by turn where "memory" or a budget gains by it;
    its products may run again then, nothing stateful.

    Args:
        ys: a tensor, or a list or tuple of tensors.
        xs: a tensor, a `tf.Variable` or a Keras variable, or a list or tuple of them.
        grad_ys: the gradients of `ys`, each of its shape; None means ones.
        checkpoints: the tensors to hold. A list of tensors, of Keras layers, or of
            names of either, of ops or scopes; "collection", the tensors in the graph
            collection `checkpoints`; "speed", the results of convolutions, matrix
            products and the like; "memory", the tensors of the least predicted peak; a
            `Budget`, those of the least time at a predicted peak within it, or of the
            least peak within some more time; a `Plan`, those found for such a budget
            before; or a policy, a predicate on tensors such as `by_type("Conv2D")`.
            None: all that the backward pass reads, as with `tf.gradients`, for the sake
            of `engine` or the report.
        min_checkpoint_size: modes and policies choose no tensor of fewer elements.
            "memory" keeps a tiny one along that reaches over many layers, such as a
            mask that each of them reads.
        offload: whether kept tensors wait in the memory of another device from their
            last use in the forward pass to their first in the backward pass; or a
            policy that selects them. "memory" chooses tensors knowing that: as few
            bytes as bring the peak to 0.7 of that without, or the least peak; and none,
            with a warning, where it would fall by less than a twentieth. In a function
            the forward pass waits until all but the last two have arrived, so that no
            more are held for that.
        offload_device: that device.
        prefetch: how many segments before its use a tensor starts to come back.
        holds_gradients: whether all gradients are held until the step ends, as when
            they are returned, or clipped by their common norm; otherwise each is used
            up as it comes, as by an optimizer. "memory" chooses accordingly, and
            predicted peaks count accordingly.
        engine: the builder of the backward graph: "tensorflow", `tf.gradients` itself;
            or "tape", which adds up the gradients of a tensor that many ops read before
            all of them are there (see `geutil.gradients.tape`). A `TapeEngine` says
            when.
        order: whether the step, its updates included, runs in a planned low-memory
            order, with any number of threads and any load. It takes no time, and pays
            without checkpoints, too. In a graph of version 1, updates that a Session
            runs are ordered by `order_updates`. Under XLA and op determinism nothing is
            ordered.
        shapes: shapes for tensors whose static shapes leave dimensions open, such as
            those of feeds: a mapping, or pairs. A key is a tensor, its `ref()` or its
            name. All other sizes follow. Without them an open dimension that follows
            from nothing is taken for 32; the report names them. They hold for the
            graph from then on.
        encode: the form to keep of tensors whose values the backward pass does not
            need. "lossless": where an activation lets gradients through, the places of
            the maxima of a pool, a shape, a sign, the input of a cast to more bytes.
            Nothing is computed again for it, and with `checkpoints=None` the gradients
            are the same to the last bit, but under XLA. "bfloat16": these, and all
            other kept tensors of type float32 wait in half the bytes, which changes the
            gradients; `encoding_errors` measures how much. None: nothing is encoded.
            Nor is it where the step would hold more, or, within a budget, take longer.
        device: where ops run that name no device, such as "GPU:0", which need not be
            there: checkpoints, order and budget are then for that device's memory, and
            the report is on it (`geutil.memory.predict`). It holds for the graph from
            then on. None is where this process runs them.
        **kwargs: further arguments of `tf.gradients` (`name`, `gate_gradients`,
            `aggregation_method`, `stop_gradients`, `unconnected_gradients`) and of
            `tf.compat.v1.gradients` (`colocate_gradients_with_ops`). The tape refuses
            `gate_gradients` and `aggregation_method`.

    Returns:
        A list with a tensor or `tf.IndexedSlices` for each x, or None where no y
        depends on it. `last_report` tells which tensors are kept and recomputed. Its
        warnings are logged as well, so plain gradients never come without a word,
        unless `checkpoints` is None.

    Raises:
        ArgumentTypeError: an argument is of a wrong type.
        SelectionError: no such mode, a checkpoint from another graph, or an empty
            collection; or `shapes` that do not fit the graph.
        PlanError: the function is one of a DTensor mesh. Or no choice was found within
            a budget; it names the least peak that was. Or a plan was made for another
            step. A function that is being traced keeps the ops of plain gradients then,
            by which was planned; nothing reads them, and no call runs them.
        TapeError: with the tape, an op has no gradient, or is in a loop or conditional
            of version 1.
        The errors of `tf.gradients`.

    Cost: at most four times that of `tf.gradients`, linear in ops and edges; with a
        budget that of the planner besides, some 10 s for 2,000 ops, and twice in a
        graph that is no function's.

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
    Arguments, errors and cost are those of `gradients`; by position, `args` are the
    further ones of `tf.gradients`, in its order.

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

    The least predicted peak at no more than one extra forward pass. Arguments, errors
    and cost are those of `gradients`; by position, `args` are the further ones of
    `tf.gradients`, in its order.

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
    are those of `gradients`; by position, `args` are the further ones of
    `tf.gradients`, in its order.

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
    """How far a gradient is from that of `tf.gradients`.

    Attributes:
        name: the name of the x that it is the gradient by.
        relative: the Euclidean norm of the difference, over that of the gradient.
        largest: the largest difference of an element, over the largest element.
    """

    name: str
    relative: float
    largest: float


def encoding_errors(
    loss: Callable[..., Any], xs: Sequence[Any], *batch: Any, **options: Any
) -> tuple[GradientError, ...]:
    """Return how far each gradient is off with `encode="bfloat16"`, on one batch.

    Both kinds of gradients are computed behind the same forward pass, which runs once,
    with its effects: moving averages move, and dropout draws.

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
    """Return the norm and the largest element of a difference, as parts."""
    difference = tf.convert_to_tensor(encoded) - plain
    relative = tf.math.divide_no_nan(tf.norm(difference), tf.norm(plain))
    largest = (tf.reduce_max(tf.abs(t)) for t in (difference, plain))
    return relative, tf.math.divide_no_nan(*largest)
