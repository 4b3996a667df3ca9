"""The graphs that are measured."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

SIZES = (1_000, 10_000, 100_000)
OPS_PER_SCOPE = 50
LOCAL_REACH = 50

# Op types by their number of inputs, and how often each number is drawn.
_TYPES = ("Const", "Neg", "AddV2", "AddN")
_WEIGHTS = (5, 30, 40, 25)


def random_graph_def(
    count: int, reach: int | None = None, seed: int = 0
) -> tf.compat.v1.GraphDef:
    """Draw a graph of `count` ops, each of which reads up to three earlier ones.

    Args:
        count: the number of ops.
        reach: how far back an op reads; None is all the way.
        seed: the seed.
    """
    rng = random.Random(seed)
    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.producer = tf.version.GRAPH_DEF_VERSION
    names: list[str] = []
    for i in range(count):
        earlier = names if reach is None else names[-reach:]
        inputs = rng.choices(range(4), _WEIGHTS)[0] if earlier else 0
        name = f"scope{i // OPS_PER_SCOPE}/op{i}"
        node = graph_def.node.add(name=name, op=_TYPES[inputs])
        node.input.extend(rng.choice(earlier) for _ in range(inputs))
        names.append(name)
        if inputs:
            node.attr["T"].type = tf.float32.as_datatype_enum
        else:
            node.attr["dtype"].type = tf.float32.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([1.0, i]))
        if inputs == 3:
            node.attr["N"].i = inputs
    return graph_def


def import_graph(graph_def: tf.compat.v1.GraphDef) -> tf.Graph:
    """Return a new graph of these nodes."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
    return graph


def trace_resnet152() -> tf.Graph:
    """Return the graph of Keras ResNet152 as `tf.function` traces it."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet152(weights=None, input_shape=(64, 64, 3))
    image = tf.TensorSpec((1, 64, 64, 3), tf.float32)
    return tf.function(model).get_concrete_function(image).graph


@dataclass(frozen=True)
class Case:
    """One graph, and what the benchmarks ask of it.

    Attributes:
        name: as the table shows it.
        make: builds the graph.
        regex: finds some of the ops.
        size: the number of ops, where graphs of several sizes shall be compared.
    """

    name: str
    make: Callable[[], tf.Graph] = field(repr=False)
    regex: str
    size: int | None = None

    @cached_property
    def graph(self) -> tf.Graph:
        return self.make()

    @cached_property
    def ops(self) -> list[tf.Operation]:
        return self.graph.get_operations()

    @cached_property
    def graph_def(self) -> tf.compat.v1.GraphDef:
        return self.graph.as_graph_def()

    @property
    def scope(self) -> str:
        """The middle one of the outermost name scopes that hold the most ops."""
        counts = Counter(op.name.split("/")[0] for op in self.ops)
        largest = max(counts.values())
        scopes = [scope for scope, count in counts.items() if count == largest]
        return scopes[len(scopes) // 2]

    def settle(self) -> None:
        """Build the graph, and take it out of the garbage collector's view.

        It stays for the whole run: a collection before each measured call would scan
        all of it for nothing. `gc.unfreeze` ends this.
        """
        for op in self.ops:
            # TensorFlow makes some Python objects when they are first asked for.
            for t in (*op.inputs, *op.outputs):
                t.op.name, t.consumers()
        gc.collect()
        gc.freeze()

    def sources(self) -> list[tf.Operation]:
        """The ops that read nothing: a forward walk from them meets every op."""
        return [op for op in self.ops if not op.inputs]

    def sinks(self) -> list[tf.Operation]:
        """The ops that nobody reads: a backward walk from them meets every op."""
        return [op for op in self.ops if not any(t.consumers() for t in op.outputs)]


def groups(quick: bool) -> list[list[Case]]:
    """Return the cases, not yet built; those of a group are measured in turn."""
    small, medium, large = (
        Case(
            f"{size:,}",
            lambda size=size: import_graph(random_graph_def(size)),
            ".*op.*7.*",
            size,
        )
        for size in SIZES
    )
    resnet = Case("ResNet152", trace_resnet152, ".*conv.*7.*")
    return [[small], [medium] if quick else [medium, large], [resnet]]
