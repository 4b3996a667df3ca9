"""Opening models: SavedModels, of TensorFlow 2 and version 1, and other sources."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from geutil import lazy, tflite
from geutil.errors import ModelError, TFLiteError, Words
from geutil.formats import is_tflite_file
from geutil.graph import functions, keras_calls, protos, replicas, types
from geutil.graph.keras_calls import LayerCall, calls_by_scopes
from geutil.graph.protos import SavedModel
from geutil.graph.resource_variables import VariableFacts, variable_facts
from geutil.graph.types import Graph
from geutil.model.core import Signatures
from geutil.model.files import keras_files, proto_files, validation, wire
from geutil.model.files.proto_files import PathLike
from geutil.model.model import Model
from geutil.model.programs import Ancestor, ModelProgram, SharedState, holdings_of
from geutil.model.sources import graph_defs, objects
from geutil.model.sources.graph_defs import Ends
from geutil.model.sources.objects import DEFAULT_SIGNATURE, Source, program_of_function

if TYPE_CHECKING:
    from geutil.tflite import LiteFile

ACCEPTED = Words(
    "a SavedModel directory, a .pb or .pbtxt file with a GraphDef, a .keras, .h5 or "
    ".tflite file, a tf.compat.v1.GraphDef, a tf.Graph, a concrete function, a "
    "tf.function with an input signature, or a Keras model",
    key="open",
)


def open(
    source: Any,
    *,
    signature: str | None = None,
    tags: Sequence[str] | str | None = None,
    inline: bool = True,
    inputs: Ends = None,
    outputs: Ends = None,
    session: Any = None,
    powers: str = "any",
    isolated: bool = False,
    trainable: Iterable[str] | None = None,
) -> Model:
    """Open a model to edit it.

    No op of the model runs, except those that `tf.saved_model.load` runs to fill the
    tables. If a file can do more than compute, a warning says so first.

    Reference variables of version 1 become resource variables, in branches and loops,
    too. A graph may have been frozen together with ops that change variables, for
    example in a training branch. If the outputs need such an op, it computes the value
    that it would assign without storing it, and a warning names it.

    A TFLite file is not a TensorFlow graph: it is opened as the
    `geutil.tflite.LiteFile` that `geutil.tflite.open` returns.

    Args:
        source: a SavedModel directory, a `.pb` or `.pbtxt` file with a GraphDef, a
            `.keras` or `.h5` file, a `.tflite` file, a `tf.compat.v1.GraphDef`, a
            `tf.Graph`, a concrete function, a `tf.function` with an input signature,
            or a model of Keras or tf_keras (opened as it is called for inference).
        signature: the signature of a SavedModel; `serving_default` or the only one if
            None. Other sources have one signature, which gets this name.
        tags: the tags of a MetaGraph in the SavedModel; if None, `serve`, or the only
            one.
        inline: whether to replace function calls by the functions' bodies. Loops and
            conditionals remain ops either way.
        inputs: for a graph, the tensors that are its inputs; a mapping also gives them
            names. If None, its placeholders.
        outputs: for a graph, the tensors that are its outputs; a mapping also gives
            them names. If None, the tensors that no op reads.
        session: for a `tf.Graph`, the Session that holds its variables' values.
        powers: "compute" refuses a file that can do more than compute and keep its own
            state, before loading any of it; see `geutil.model.powers`. "any" only
            warns.
        isolated: whether to open a file in another process first, which doubles the
            time and adds some seconds: if TensorFlow aborts, only that process dies,
            and the file is refused.
        trainable: for a SavedModel, the names of the trainable variables, or of scopes
            around them. Only files of `Model.export` record layers that Keras froze; in
            those of `tf.saved_model.save` frozen layers are as trainable as others.

    Returns:
        The model of one signature; the others are in its `signatures`. For a TFLite
        file, a `LiteFile`.

    Raises:
        ModelError: the source cannot be opened; the message names the kind found and
            the accepted ones. Or it can do what `powers` does not allow, or crashes the
            process that opens it. Or a name in `trainable` matches no variable.

    Cost: linear in ops, function bodies included, and in the bytes of the variables.

    Example:
        >>> import tensorflow as tf
        >>> from geutil import model
        >>> @tf.function(input_signature=[tf.TensorSpec([None], name="x")])
        ... def double(x):
        ...     return {"y": 2 * x}
        >>> m = model.open(double)
        >>> m
        Model('serving_default', ['x'] -> ['y'], 3 ops)
        >>> m.run(x=[1.0, 2.0])
        {'y': array([2., 4.], dtype=float32)}
    """
    if powers not in _ALLOWED:
        raise ModelError(f"powers={powers!r} is none of {list(_ALLOWED)}")
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    if path is not None and path.is_file() and is_tflite_file(path):
        others = (signature, tags, inputs, outputs, session, trainable)
        if any(other is not None for other in others) or not inline or isolated:
            raise ModelError(
                f"'{source}' is a TFLite file, which has options of its own: open it "
                "by its path, then call keep_signatures, cut or rename"
            )
        return _open_lite(Path(source), powers)
    if not tf.executing_eagerly():
        raise ModelError(
            "models need eager execution, which is off here; call geutil.model outside "
            "graphs and tf.function, in a process that did not disable version 2"
        )
    if not _is_graph_source(source):
        options = {"inputs": inputs, "outputs": outputs, "session": session}
        unused = [f"{name}=" for name, value in options.items() if value is not None]
        if unused:
            raise ModelError(
                f"{', '.join(unused)} is for graphs only; rename or cut the model that "
                "is opened"
            )
    if isinstance(source, str | os.PathLike):
        _check_powers(Path(source), allowed=powers)
        # Where TensorFlow aborts on a file, the other process dies, and not this one.
        if isolated:
            _try_elsewhere(Path(source), {"signature": signature, "tags": tags})
    origin = _source(source, signature, tags, inputs, outputs, session)
    model = _opened(origin, signature, inline)
    if trainable is not None:
        if not isinstance(source, str | os.PathLike):
            raise ModelError(
                "trainable= is for SavedModels; a model of Keras and a function have "
                "flags of their own, such as `layer.trainable`"
            )
        _train_only(model, [trainable] if isinstance(trainable, str) else trainable)
    return model


def open_without_values(path: Path, signature: str | None = None) -> Model:
    """Open a `.keras` file as `open` does, for its graph.

    The values of weights are not read, and are zeros, if the configuration tells all
    else and can do no more than compute.

    Cost: for MobileNetV2 0.7 CPU seconds in the place of 1.5, besides tracing it.
    """
    found = lazy.provided("powers of a file without values")(path)
    keras_model = objects.build_keras_file(path) if found.computes_only else None
    if keras_model is None:
        return open(path, signature=signature)
    return _opened(_of_keras_model(keras_model, signature or DEFAULT_SIGNATURE))


def _opened(origin: Source, signature: str | None = None, inline: bool = True) -> Model:
    """Return the model of a signature, or of the one that is selected."""
    name = origin.chosen(signature)
    return Signatures(origin, inline, {}, tuple(origin.signatures), Model)[name]


def _open_lite(path: Path, powers: str) -> Any:
    """Open a TFLite file, which is no model of TensorFlow's."""
    _check_powers(path, allowed=powers)
    try:
        return tflite.open(path)
    except TFLiteError as error:
        raise ModelError(f"'{path}' cannot be opened: {error}") from error


def _train_only(model: Model, names: Iterable[str]) -> None:
    """Let no variables be trained but those of some names and scopes."""
    chosen: set[str] = set()
    for name in names:
        scope = f"{name.rstrip('/')}/"
        found = [v for v in model.variables if f"{v}/".startswith(scope)]
        if not found:
            raise ModelError(
                f"trainable: '{name}' is the name of no variable and of no scope; "
                f"there are {list(model.variables)}"
            )
        chosen.update(found)
    for name, variable in model.variables.items():
        keras_calls.set_trainable(variable, name in chosen)


_ALLOWED = ("any", "compute")
_logger = logging.getLogger("geutil")


def _check_powers(path: Path, *, allowed: str) -> None:
    """Warn of capabilities of a file beyond computing, or refuse it."""
    if not path.exists():
        return
    try:
        found = lazy.provided("powers of a file")(path)
    except ModelError:
        if allowed == "compute":
            raise
        # Opening tells its kind and its faults.
        return
    if found.computes_only:
        return
    first = str(found).partition("\n")[0].removeprefix("it ")
    if allowed == "compute":
        raise ModelError(
            f"'{path}' {first}: {found.dangers[0]}; geutil.model.powers lists it all, "
            "and powers='any' opens it"
        )
    _logger.warning(
        "'%s' %s; %s lists where", path, first, Words("geutil.model.powers")
    )


_CODE = """
import sys
from geutil.model import ModelError, open
try:
    open(sys.argv[1], **eval(sys.argv[2]))
except ModelError:
    pass
"""


def _try_elsewhere(path: Path, options: dict[str, Any]) -> None:
    """Open a file in a process of its own, and refuse it if that dies."""
    command = [sys.executable, "-c", _CODE, str(path), repr(options)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise ModelError(
            f"'{path}' ends the process that opens it ({name}): it is damaged, or was "
            "made to do that"
        )


def _is_graph_source(source: Any) -> bool:
    if isinstance(source, str | os.PathLike):
        return Path(source).suffix in (".pb", ".pbtxt")
    return isinstance(source, tf.compat.v1.GraphDef) or types.is_graph(source)


def _source(
    source: Any,
    signature: str | None,
    tags: Sequence[str] | str | None,
    inputs: Ends,
    outputs: Ends,
    session: Any,
) -> Source:
    """Return the source for anything that `open` accepts."""
    name = signature or DEFAULT_SIGNATURE
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix in (".pb", ".pbtxt") and not path.is_dir():
            graph_def = proto_files.read_graph_def(path)
            return _of_graph_def(graph_def, f"'{path}'", name, inputs, outputs)
        if path.suffix in keras_files.KERAS_SUFFIXES and path.is_file():
            return _of_keras_model(objects.load_keras_file(path), name)
        if path.is_file():
            raise ModelError(
                f"'{path}' is {proto_files.what_is(path)}; pass {ACCEPTED}"
            )
        return _open_saved_model(path, tags)
    if isinstance(source, tf.compat.v1.GraphDef):
        # The caller's GraphDef must not change when the model is edited.
        copy = type(source)()
        copy.CopyFrom(source)
        return _of_graph_def(copy, "the GraphDef", name, inputs, outputs)
    if types.is_graph(source):
        return _of_graph(source, name, inputs, outputs, session)
    if objects.is_keras_model(source):
        return _of_keras_model(source, name)
    if isinstance(source, tf.types.experimental.ConcreteFunction):
        return _of_function(source, name)
    if isinstance(source, tf.types.experimental.PolymorphicFunction):
        return _of_function(objects.concrete_function_of(source), name)
    raise ModelError(f"cannot open a {types.type_name(source)}; pass {ACCEPTED}")


def _of_graph_def(
    graph_def: Any,
    what: str,
    name: str,
    inputs: Ends,
    outputs: Ends,
) -> Source:
    """Return the source of a GraphDef with one signature."""
    frozen = graph_defs.insert_handles(graph_def)
    validation.check_graph_def(graph_def, what)
    ends = (
        graph_defs.named_ends(graph_def, inputs, what, "input"),
        graph_defs.named_ends(graph_def, outputs, what, "output"),
    )
    programs, holdings = graph_defs.programs_of_graph_def(
        graph_def, {name: ends}, what, frozen=frozen
    )
    return _single(what, name, programs[name], holdings)


def _of_graph(
    graph: Any,
    name: str,
    inputs: Ends,
    outputs: Ends,
    session: Any,
) -> Source:
    """Return a graph as a source, with the values of its variables."""
    graph_def = objects.graph_def_with_shapes(graph)
    what = "the graph"
    ends = (
        graph_defs.named_ends(graph_def, inputs, what, "input"),
        graph_defs.named_ends(graph_def, outputs, what, "output"),
    )
    programs, holdings = graph_defs.programs_of_graph_def(
        graph_def,
        {name: ends},
        what,
        facts=graph_defs.facts_of_graph(graph),
        value_of=graph_defs.values_in_session(graph, session),
    )
    program = programs[name]
    program.ancestors.append(Ancestor(graph))
    # A FuncGraph captures variables from outside, where they have their values.
    if hasattr(graph, "captures"):
        captures = functions.bindings(graph)
        program.captures |= {inner.name: outer for outer, inner in captures}
        read = objects.ordered(graph.variables, (outer for outer, _ in captures))
        holdings.add_variables(read)
    return _single(what, name, program, holdings)


def _of_keras_model(model: Any, name: str) -> Source:
    program, read = objects.program_of_keras_model(model)
    weights = objects.weights_of(model)
    holdings = SharedState()
    holdings.add_variables((w.variable for w in weights), (w.name for w in weights))
    keras_calls.note_owners(model, (weight.variable for weight in weights))
    listed = {id(replicas.whole(weight.variable)) for weight in weights}
    for variable in read:
        if id(replicas.whole(variable)) not in listed:
            # A state that a layer keeps between calls: the model does not train it.
            keras_calls.set_trainable(variable, False)
    holdings.add_variables(read)
    return _single(f"Keras model '{model.name}'", name, program, holdings)


def _of_function(function: Any, name: str) -> Source:
    what = f"function '{tf.compat.as_str(function.name)}'"
    holdings = SharedState()
    try:
        read = objects.ordered(function.variables, function.captured_inputs)
        holdings.add_variables(read)
    except AssertionError as error:
        # TensorFlow holds the variables of a function weakly.
        raise ModelError(
            f"{what} reads a variable that is gone; keep the "
            "object that holds its variables, and open it again"
        ) from error
    program = objects.program_of_function(function)
    return _single(what, name, program, holdings)


def _single(
    what: str, name: str, program: ModelProgram, holdings: SharedState
) -> Source:
    return Source(what, {name: partial(_same, program)}, holdings)


def _same(program: ModelProgram) -> ModelProgram:
    return program


def from_tflite(
    file: LiteFile | str | os.PathLike[str] | bytes, *, signature: str | None = None
) -> Model:
    """Return the model of a TFLite file, which can be trained and converted again.

    Each op of the file becomes TensorFlow ops, named after its tensors. Weights become
    trainable variables, biases and float16 weights included; integers become the
    numbers that they represent, and are rounded by FakeQuant ops with the ranges of the
    file, so that no range has to be calibrated. Quantized inputs and outputs become
    float32.

    Args:
        file: an open `LiteFile`, with its edits; the path of a file, or its bytes.
        signature: the signature to return; `serving_default` or the only one if None.

    Returns:
        The model of one signature; the others are in its `signatures`.

    Raises:
        ModelError: an op of the file has no TensorFlow equivalent, such as an unknown
            custom op; or there is no such signature.
        BrokenFileError: it is not a TFLite file, or is damaged.

    Cost: linear in ops, and in the bytes of the weights.

    Example:
        >>> import numpy as np
        >>> from geutil import model, tflite
        >>> made = tflite.LiteFile()
        >>> graph = tflite.LiteGraph("main")
        >>> made.graphs.append(graph)
        >>> x, y = (tflite.LiteTensor(name, "float32", [2]) for name in "xy")
        >>> graph.inputs, graph.outputs = (x,), (y,)
        >>> _ = graph.add_op(tflite.LiteOp("NEG", [x], [y]))
        >>> m = model.from_tflite(made)
        >>> m.run(x=[1.0, 2.0])
        {'y': array([-1., -2.], dtype=float32)}
    """
    # Other sources need none of its tables of kernels.
    from geutil.model.sources.tflite_files import source_of_lite

    opened = file if isinstance(file, tflite.LiteFile) else tflite.open(file)
    return _opened(source_of_lite(opened), signature)


_INIT_SIGNATURES = frozenset(("__saved_model_init_op", "__saved_model_train_op"))


def _open_saved_model(path: Path, tags: Sequence[str] | None) -> Source:
    """Return a SavedModel as a source."""
    meta_graph = proto_files.select_meta_graph(proto_files.read_saved_model(path), tags)
    what = f"SavedModel '{path}'"
    if meta_graph.object_graph_def.nodes:
        return _of_objects(path, meta_graph, what)
    return _of_version_1(path, meta_graph, what)


def _of_objects(path: Path, meta_graph: Any, what: str) -> Source:
    """Return a SavedModel with objects as a source; signatures are read on demand."""
    loaded = load_saved_model(path, list(meta_graph.meta_info_def.tags))
    signatures = getattr(loaded, "signatures", {})
    if not isinstance(signatures, Mapping):
        raise ModelError(f"{what} has no list of signatures: the file is damaged")
    functions: dict[str, Any] = {}
    for name, function in signatures.items():
        if not isinstance(function, tf.types.experimental.ConcreteFunction):
            raise ModelError(
                f"signature '{name}' of {what} is no function but a "
                f"{types.type_name(function)}: the file is damaged"
            )
        functions[name] = function
    holdings = holdings_of(loaded)
    # Keras, and geutil, list those of frozen layers here; the variables say otherwise.
    frozen = getattr(loaded, "non_trainable_variables", None)
    for variable in frozen if isinstance(frozen, Sequence) else ():
        if isinstance(variable, tf.Variable):
            keras_calls.set_trainable(variable, False)
    classes = _keras_classes(path)
    source = Source(what, {}, holdings, functions)

    def find_layers(graph: Graph) -> tuple[LayerCall, ...]:
        op_names = [op.name for op in graph.get_operations()]
        return calls_by_scopes(op_names, classes, holdings.variables)

    source.find_layers = find_layers
    for name, function in functions.items():
        source.signatures[name] = partial(_program, function, name, what)
    return source


_NODE, _PLACE, _KIND, _METADATA = 1, 3, 4, 5
"""Fields of `keras_metadata.pb`: a node, and in it its place, kind and JSON."""


def _keras_classes(path: Path) -> dict[str, str] | None:
    """Return the classes of layers by path, as tf_keras notes them in a SavedModel."""
    # None if there is no such note, or none that can be read: the model opens without.
    file = path / "keras_metadata.pb"
    if not file.is_file():
        return None
    nodes: dict[str, tuple[str, str]] = {}
    data = file.read_bytes()
    try:
        for node in wire.fields(data, 0, len(data)):
            values = {
                f.number: data[f.start : f.end]
                for f in wire.fields(data, node.start, node.end)
            }
            config = json.loads(values.get(_METADATA, b"{}"))
            kind = values.get(_KIND, b"").decode()
            if node.number == _NODE and "class_name" in config and "metric" not in kind:
                place = values.get(_PLACE, b"").decode()
                nodes[place] = (str(config.get("name")), str(config["class_name"]))
    except (ModelError, ValueError) as error:
        _logger.warning("'%s' cannot be read (%s); layers have no names", file, error)
        return None
    classes = {}
    for place, (_, class_name) in nodes.items():
        parts = place.split(".")
        around = [".".join(parts[:count]) for count in range(2, len(parts) + 1)]
        if around and all(place in nodes for place in around):
            classes["/".join(nodes[place][0] for place in around)] = class_name
    return classes


def _program(function: Any, name: str, what: str) -> ModelProgram:
    """Return the program of a signature."""
    try:
        program = program_of_function(function)
    except ModelError:
        raise
    except Exception as error:
        # TensorFlow restores what a damaged file says without asking if it fits.
        raise ModelError(
            f"signature '{name}' of {what} cannot be opened, the file is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error
    # The file holds a map of them, which each process reads in an order of its own.
    program.outputs = {n: program.outputs[n] for n in sorted(program.outputs, key=_key)}
    return program


def _key(name: str) -> list[Any]:
    """Return the sort key of a name: `output_9` goes before `output_10`."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _of_version_1(path: Path, meta_graph: Any, what: str) -> Source:
    """Return a SavedModel of version 1 as a source."""
    graph_def = meta_graph.graph_def
    frozen = graph_defs.insert_handles(graph_def)
    validation.check_graph_def(graph_def, what)
    signatures = {}
    for name, definition in sorted(meta_graph.signature_def.items()):
        # TensorFlow lists ops that initialize or train among the signatures.
        if name not in _INIT_SIGNATURES:
            inputs = _tensors(definition.inputs, what, name)
            signatures[name] = (inputs, _tensors(definition.outputs, what, name))
    facts = variable_facts(meta_graph.collection_def)
    assets = {
        name: str(path / "assets" / file)
        for name, file in protos.asset_files(meta_graph).items()
    }
    programs, holdings = graph_defs.programs_of_graph_def(
        graph_def,
        signatures,
        what,
        facts=facts,
        value_of=_checkpoint_values(path, facts, what),
        assets=assets,
        frozen=frozen,
    )
    return Source(
        what, {name: partial(_given, p) for name, p in programs.items()}, holdings
    )


def _given(program: ModelProgram) -> ModelProgram:
    return program


def _tensors(infos: Any, what: str, signature: str) -> dict[str, str]:
    tensors = {}
    for name in sorted(infos, key=_key):
        if not infos[name].name:
            raise ModelError(
                f"'{name}' in signature '{signature}' of {what} is no plain tensor; "
                "geutil opens signatures of dense tensors"
            )
        tensors[name] = infos[name].name
    return tensors


def _checkpoint_values(
    path: Path, facts: dict[str, VariableFacts], what: str
) -> Callable[[str, Any], np.ndarray[Any, Any] | None]:
    """Return a function that reads variables from a SavedModel's checkpoint."""
    prefix = path / "variables" / "variables"
    if not prefix.with_suffix(".index").exists():
        return lambda _name, _node: None
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except Exception as error:
        # The reader raises what the C++ status says, in classes of many kinds.
        raise ModelError(f"the variables of {what} cannot be read: {error}") from error

    def value_of(name: str, node: Any) -> np.ndarray[Any, Any] | None:
        """Return the value of a variable, or None if the checkpoint has none."""
        node_facts = facts.get(name)
        key = node_facts.key if node_facts is not None else name
        if not reader.has_tensor(key):
            return None
        try:
            value: np.ndarray[Any, Any] = np.asarray(reader.get_tensor(key))
        except Exception as error:
            raise ModelError(
                f"variable '{key}' of {what} cannot be read: {error}"
            ) from error
        # The parts of a partitioned variable are one entry of the checkpoint.
        if node_facts is not None and node_facts.offset is not None:
            shape = [d.size for d in node.attr["shape"].shape.dim]
            pairs = zip(node_facts.offset, shape, strict=True)
            value = value[tuple(slice(o, o + size) for o, size in pairs)]
        return value

    return value_of


def _open_checkpoint(prefix: Path) -> Any:
    """Check the files of a checkpoint, and open its index."""
    index = proto_files.checked_index(prefix)
    try:
        return tf.train.load_checkpoint(str(prefix))
    except Exception as error:  # TensorFlow raises several kinds, RuntimeError too.
        raise ModelError(f"'{index}' is damaged: {error}") from error


def load_saved_model(path: PathLike, tags: Iterable[str] | None = None) -> Any:
    """Load a SavedModel, checked before.

    Args:
        path: the directory of the SavedModel.
        tags: exactly the tags of the MetaGraph; None means "serve", or the only one
            there is.

    Example:
        >>> loaded = load_saved_model("testdata/two_signatures")
        >>> sorted(loaded.signatures)
        ['decode', 'encode']
    """
    folder = Path(path)
    saved_model = proto_files.read_saved_model(folder)
    chosen = list(proto_files.select_meta_graph(saved_model, tags).meta_info_def.tags)
    _check_saved_model(saved_model, folder)
    del saved_model
    try:
        return tf.saved_model.load(str(folder), tags=chosen)
    except Exception as error:  # The loader raises whatever its Python code meets.
        reason = str(error).strip() or type(error).__name__
        raise ModelError(f"'{folder}' cannot be loaded: {reason}") from error


def _check_saved_model(saved_model: SavedModel, folder: Path) -> None:
    """Check a SavedModel's graphs and its checkpoint."""
    for meta_graph in saved_model.meta_graphs:
        tags = ", ".join(meta_graph.meta_info_def.tags)
        validation.check_graph_def(
            meta_graph.graph_def, f"'{folder}', MetaGraph '{tags}'"
        )
    prefix = proto_files.variables_prefix(folder)
    if proto_files.has_checkpoint(prefix) or any(
        map(_has_variables, saved_model.meta_graphs)
    ):
        _open_checkpoint(prefix)


def _has_variables(meta_graph: Any) -> bool:
    nodes = meta_graph.object_graph_def.nodes
    return any(node.WhichOneof("kind") == "variable" for node in nodes)
