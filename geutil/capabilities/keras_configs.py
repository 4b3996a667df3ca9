"""The capabilities of Keras layers, read from their configurations in JSON.

A configuration names classes and functions; Keras imports, makes and calls them. Layers
that only compute are known by the module that they come from; the rest is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from geutil.capabilities import power_kinds
from geutil.capabilities.power_kinds import LOADED, RUN, Power
from geutil.graph.walks import tree
from geutil.model.files import wire
from geutil.model.files.wire import Buffer

_CODE = frozenset(
    (
        *("Lambda", "__lambda__", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
        *("TFSMLayer", "InstanceMethod"),
    )
)
"""Classes that hold code, or load it from elsewhere, when they are deserialized."""
_FUNCTION, _TYPE = "function", "__typespec__"
_PACKAGES = (
    *("tensorflow.python.keras", "tensorflow.keras", "keras._legacy"),
    *("keras.src.legacy", "keras.api", "keras.src"),
    *("tf_keras.api", "tf_keras.src", "keras", "tf_keras"),
)
"""Where modules of Keras are found; the longer ones first."""
_CLASSES = frozenset(
    (
        *("", "activations", "applications", "constraints", "distillation"),
        *("dtype_policies", "engine", "experimental", "feature_column"),
        *("initializers", "layers", "losses", "metrics", "mixed_precision", "models"),
        *("ops", "optimizers", "premade_models", "quantizers", "random"),
        "regularizers",
    )
)
"""Modules of Keras whose classes compute."""
_LAYERS_ELSEWHERE = ("FeatureSpace", "Feature", "Cross")
"""Classes of other modules of Keras, `keras.utils`, that compute."""
_FUNCTIONS = frozenset(
    (
        *("activations", "constraints", "initializers", "layers", "losses", "metrics"),
        *("ops", "optimizers", "quantizers", "random", "regularizers"),
    )
)
"""Modules of Keras whose functions compute, but for those of the next table."""
_BUILDERS = frozenset(("deserialize", "get"))
"""Functions of these modules that make objects of a configuration, which is data."""
_SYMBOLS = frozenset(
    (
        *("", "__operators__", "bitwise", "dtypes", "experimental.numpy", "image"),
        *("keras.activations", "keras.backend", "keras.losses", "keras.metrics"),
        *("linalg", "math", "nn", "quantization", "ragged", "random", "sets", "shape"),
        *("signal", "sparse", "strings"),
    )
)
"""Modules of TensorFlow whose functions are ops, reported by the table of these."""
_OP_LAYERS = ("TFOpLambda", "SlicingOpLambda")
_METHODS_OF = ("RaggedTensor", "SparseTensor", "TensorShape")
_FILES = ("vocabulary", "vocabulary_file", "idf_weights")
"""Arguments that are lists, or paths of files that the layer reads."""


def items(config: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all dictionaries of a configuration, with the path to each."""

    def inner(place: tuple[Any, str]) -> list[tuple[Any, str]]:
        item, path = place
        if isinstance(item, dict):
            return [(value, f"{path}.{key}"[-200:]) for key, value in item.items()]
        return [(value, path) for value in item] if isinstance(item, list) else []

    places = tree([(config, "")], inner)
    return (place for place in places if isinstance(place[0], dict))


def powers_of_config(config: Any, place: str) -> Iterator[Power]:
    """Yield the capabilities of classes and functions in a configuration."""
    for item, path in items(config):
        kind = item.get("class_name")
        if not isinstance(kind, str):
            continue
        inner = item.get("config")
        name = item.get("name")
        if isinstance(inner, dict):
            name = inner.get("name", name)
        elif kind == _FUNCTION:
            name = inner
        where = f"{place}, at {path[1:]}" if path else place
        for power, when, detail in _told(item, kind, inner):
            by = ("Keras",) if when == LOADED else ("whoever runs it",)
            yield Power(power, str(name or kind), kind, where, when, by, detail)


def _told(
    item: dict[str, Any], kind: str, inner: Any
) -> Iterator[tuple[str, str, str]]:
    """Yield the capabilities of one object, when they come to bear, and details."""
    module = item.get("module")
    if kind in _CODE:
        yield power_kinds.CODE, LOADED, ""
    elif kind == _FUNCTION:
        detail = _odd_function(module, inner)
        if detail:
            yield power_kinds.CODE, LOADED, detail
    elif kind == _TYPE:
        if not str(item.get("spec_name")).endswith("Spec"):
            yield power_kinds.CODE, LOADED, f"'{item.get('spec_name')}' is no type"
    elif module is not None:
        known = _CLASSES | {"utils"} if kind in _LAYERS_ELSEWHERE else _CLASSES
        if not _is_within(module, known):
            yield (
                power_kinds.CODE,
                LOADED,
                f"module '{module}', which Keras would import",
            )
    elif item.get("registered_name") not in (None, kind):
        detail = f"a class of its own, '{item['registered_name']}'"
        yield power_kinds.UNKNOWN, LOADED, detail
    if isinstance(inner, dict):
        yield from _of_arguments(kind, inner)


def _of_arguments(kind: str, inner: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the capabilities that follow from the arguments of a layer."""
    for key in _FILES:
        if isinstance(inner.get(key), str) and inner[key]:
            yield power_kinds.READ, LOADED, f"'{inner[key]}', its {key}"
    if kind in _OP_LAYERS:
        symbol = str(inner.get("function"))
        power = _power_of_symbol(symbol)
        if power not in power_kinds.HARMLESS:
            yield power, RUN, f"'{symbol}'"
    elif kind == "ClassMethod":
        symbol = str(inner.get("cls_symbol"))
        if symbol.rpartition(".")[2] not in _METHODS_OF:
            yield power_kinds.CODE, RUN, f"'{symbol}.{inner.get('method_name')}'"
    elif kind == "TensorFlowOpLayer":
        node = inner.get("node_def")
        op = str(node.get("op")) if isinstance(node, dict) else ""
        power = _power_of_op(op)
        if power not in power_kinds.HARMLESS:
            yield power, RUN, f"op '{op}'"


def _odd_function(module: Any, name: Any) -> str:
    """Return why a function may do more than compute; "" if it does not."""
    if module == "builtins":
        # Keras looks these up among its activations, losses and their like.
        return "" if str(name) not in _BUILDERS else f"'{name}' of Keras"
    if not _is_within(module, _FUNCTIONS) or str(name) in _BUILDERS:
        return f"'{name}' of module '{module}'"
    return ""


def _is_within(module: Any, known: frozenset[str]) -> bool:
    """Tell whether a module is one of Keras that is known."""
    if module == "builtins":
        return True
    for package in _PACKAGES:
        if module == package or str(module).startswith(f"{package}."):
            return str(module)[len(package) + 1 :].partition(".")[0] in known
    return False


def _power_of_symbol(symbol: str) -> str:
    """Return the capability of a public function of TensorFlow, by its name."""
    space, _, name = symbol.rpartition(".")
    for prefix in ("compat.v1", "compat.v2"):
        if space == prefix or space.startswith(f"{prefix}."):
            space = space[len(prefix) + 1 :]
    power = _by_plain_name().get(_plain(name))
    if space == "raw_ops":
        return power or power_kinds.UNKNOWN
    if power is not None and power not in power_kinds.HARMLESS:
        return power
    is_decoding = space == "io" and name.startswith(("decode_", "parse_"))
    if name.startswith("load_") or not (space in _SYMBOLS or is_decoding):
        return power_kinds.CODE
    # Python's own functions have no op of their name.
    return (
        power_kinds.CODE
        if "py_func" in name or "numpy_f" in name
        else power_kinds.COMPUTE
    )


def _power_of_op(op: str) -> str:
    entry = power_kinds.table().get(op)
    return power_kinds.UNKNOWN if entry is None else entry.power


@cache
def _by_plain_name() -> dict[str, str]:
    """Return the power of each op by its name in lower case, as functions have it."""
    return {_plain(op): entry.power for op, entry in power_kinds.table().items()}


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def powers_of_metadata(buffer: Buffer) -> Iterator[Power]:
    """Yield the capabilities of layers whose configuration stands beside a SavedModel.

    Keras 2 makes layers of it when it loads the SavedModel.
    """
    for span in wire.spans(buffer, (0, len(buffer)), 1):
        for start, end in wire.spans(buffer, span, 5):
            yield from powers_of_text(buffer[start:end], "keras_metadata.pb")


def powers_of_text(text: bytes, place: str) -> Iterator[Power]:
    """Yield the capabilities of the configuration that a text holds, if it is JSON.

    Other objects have other metadata, which nobody builds from.
    """
    try:
        config = json.loads(text)
    except RecursionError:
        detail = "nested too deeply to be looked at"
        found = (place, "layer", place, LOADED, ("Keras",), detail)
        yield Power(power_kinds.UNKNOWN, *found)
    except ValueError:
        return
    else:
        yield from powers_of_config(config, place)
