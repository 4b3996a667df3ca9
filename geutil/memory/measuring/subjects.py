"""From what a caller wants measured to a job for the measuring process."""

from __future__ import annotations

import functools
import pickle
import pickletools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from geutil.errors import ArgumentTypeError, MeasurementError
from geutil.graph.function_graphs import bindings, side_effects
from geutil.graph.kinds import (
    Graph,
    Tensor,
    is_graph,
    is_op,
    is_tensor,
    type_name,
)
from geutil.graph.snapshots import bound_arguments, is_compiled
from geutil.memory.measuring.graphs import graph_job
from geutil.memory.measuring.job import CallJob, Job

_ACCEPTED = (
    "(graph, fetches, feeds), a tf.function, a ConcreteFunction or another callable"
)


def job_of(
    what: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    session: Any,
    jit_compile: bool,
) -> tuple[Job, bool]:
    """Return the job that measures something, and whether XLA compiles it.

    See `measure` for the arguments.
    """
    if isinstance(what, tuple):
        if args or kwargs:
            raise ArgumentTypeError(
                "args and kwargs go with a callable; values for a graph are its feeds"
            )
        return _job_of_graph(what, session, jit_compile), jit_compile
    if session is not None:
        raise ArgumentTypeError("session goes with (graph, fetches, feeds)")
    if isinstance(what, tf.types.experimental.ConcreteFunction):
        compiled = jit_compile or is_compiled(what)
        return _job_of_function(what, args, kwargs, None), compiled
    if isinstance(what, tf.types.experimental.PolymorphicFunction):
        traced = what.get_concrete_function(*args, **kwargs)
        compiled = jit_compile or is_compiled(traced)
        return _job_of_function(traced, args, kwargs, what), compiled
    if not callable(what):
        raise ArgumentTypeError(f"cannot measure a {type_name(what)}; pass {_ACCEPTED}")
    if jit_compile:
        raise ArgumentTypeError(
            "jit_compile goes with a graph or a tf.function; decorate what the "
            "callable calls with tf.function(jit_compile=True)"
        )
    return CallJob(_pickled(what, args, kwargs)), False


def _job_of_graph(what: tuple[Any, ...], session: Any, jit_compile: bool) -> Job:
    if len(what) != 3 or not is_graph(what[0]):
        kinds = ", ".join(type_name(part) for part in what)
        raise ArgumentTypeError(
            f"expected (graph, fetches, feeds), got a tuple of ({kinds})"
        )
    graph, fetches, feeds = what
    bound = bindings(graph) if hasattr(graph, "captures") else []
    return graph_job(
        graph,
        _fetched(graph, fetches),
        [_feed(graph, tensor, value) for tensor, value in _pairs(feeds)],
        bound,
        session,
        as_function=jit_compile,
    )


def _job_of_function(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], traced_from: Any
) -> Job:
    try:
        bound = bound_arguments(function, args, kwargs, traced_from)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"args and kwargs do not fit the function: {error}"
        ) from error
    fetches = [*function.outputs, *side_effects(function.graph)]
    return graph_job(function.graph, fetches, [], bound, None, as_function=True)


def _fetched(graph: Graph, fetches: Any) -> list[Any]:
    """Return the fetches as a flat list of ops and tensors of the graph."""
    flat = tf.nest.flatten(fetches, expand_composites=True)
    if not flat:
        raise ArgumentTypeError("there is nothing to fetch; name an op or a tensor")
    return [_in_graph(graph, fetch) for fetch in flat]


def _feed(graph: Graph, tensor: Any, value: Any) -> tuple[Tensor, Any]:
    """Return a feed as a tensor of the graph and an array that fits it."""
    tensor = _in_graph(graph, tensor)
    if not is_tensor(tensor):
        raise ArgumentTypeError(
            f"'{tensor.name}' is an op; feed a tensor, for example '{tensor.name}:0'"
        )
    array = np.asarray(value, tensor.dtype.as_numpy_dtype)
    if not tensor.shape.is_compatible_with(array.shape):
        raise MeasurementError(
            f"a value of shape {array.shape} does not fit '{tensor.name}' of shape "
            f"{tensor.shape}"
        )
    return tensor, array


def _in_graph(graph: Graph, element: Any) -> Any:
    """Return an op or tensor of the graph that is given as such or by name."""
    if isinstance(element, str):
        try:
            return graph.as_graph_element(element)
        except (KeyError, ValueError) as error:
            raise ArgumentTypeError(
                f"'{element}' is no op or tensor of the graph: {error}"
            ) from error
    if not (is_op(element) or is_tensor(element)):
        hint = "; leave out unconnected gradients" if element is None else ""
        raise ArgumentTypeError(
            f"expected an op or tensor of the graph, got {type_name(element)}{hint}"
        )
    if element.graph is not graph:
        raise ArgumentTypeError(f"'{element.name}' belongs to another graph")
    return element


def _pairs(feeds: Any) -> Iterable[tuple[Any, Any]]:
    """Return (tensor or name, value) for each feed.

    Tensors of a FuncGraph cannot be keys of a dictionary, so pairs will do.
    """
    if feeds is None:
        return []
    pairs = list(feeds.items() if isinstance(feeds, Mapping) else feeds)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentTypeError(
            "feeds are a mapping from tensors or their names to values, or a list of "
            "(tensor, value) pairs"
        )
    return [(_dereferenced(key), value) for key, value in pairs]


def _dereferenced(key: Any) -> Tensor:
    """Return the tensor that `tensor.ref()` stands for, anything else as it is."""
    return key.deref() if hasattr(key, "deref") else key


def _pickled(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return a callable and its arguments as a pickle that another process can load.

    Raises:
        MeasurementError: it can be found in this process only.
    """
    try:
        pickled = pickle.dumps((function, tuple(args), dict(kwargs)))
    # Objects refuse to be pickled by whatever error they like.
    except Exception as error:
        raise _not_importable(function, f"it cannot be pickled: {error}") from error
    for _, argument, _ in pickletools.genops(pickled):
        if argument == "__main__":
            raise _not_importable(function, "it is defined in the main script")
    return pickled


def _not_importable(function: Any, reason: str) -> MeasurementError:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type_name(function))
    return MeasurementError(
        f"a fresh process cannot import '{name}': {reason}; put it at the top level of "
        "a module, decorate it with tf.function, or pass (graph, fetches, feeds)"
    )
