"""Names of a TFLite file changed: of inputs, outputs, tensors, signatures."""

from __future__ import annotations

from collections.abc import Mapping

from geutil.errors import TFLiteError, Words
from geutil.tflite import looking
from geutil.tflite.arguments import checked
from geutil.tflite.looking import GraphLike
from geutil.tflite.parts import Contents, LiteGraph, LiteSignature, LiteTensor

Names = Mapping[str, str]
_Ends = dict[LiteTensor, tuple[str, str]]
"""Ends, with the names that the caller has for them and gives them."""


@checked
def rename(
    file: Contents,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    *,
    tensors: Mapping[str, str] | None = None,
    signatures: Mapping[str, str] | None = None,
    from_signature: bool | str = False,
    graph: GraphLike = None,
) -> None:
    """Give inputs, outputs, tensors and signatures other names.

    Args:
        inputs: the new name of each input to rename, in signatures and as tensor.
        outputs: the new name of each output to rename, likewise.
        tensors: the new name of each other tensor to rename.
        signatures: the new name of each signature to rename.
        from_signature: whether ends take the names that signatures have for them,
            in the place of such as "serving_default_x:0"; or the name of the
            signature whose ends do.

    Raises:
        TFLiteError: there is nothing of an old name, or two would have one name.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("serving_default_x:0", "float32", [4])
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> m.rename({"serving_default_x:0": "image"}, {"y": "scores"})
        >>> m.graphs[0].inputs
        (<LiteTensor 'image' float32 [4]>,)
    """
    own = looking.graph_of(file, graph)
    new: dict[LiteTensor, str] = {}
    if from_signature:
        new = _of_signature(file, from_signature)
        own = next(iter(_signatures(file, from_signature))).graph
    ends: dict[str, _Ends] = {"inputs": {}, "outputs": {}}
    for field, names in (("inputs", inputs), ("outputs", outputs)):
        for old, name in (names or {}).items():
            t = _end(file, old, own, field)
            new[t] = name
            ends[field][t] = old, name
    for old, name in (tensors or {}).items():
        new[looking.tensor_of(file, old, own)] = name
    for one in file.graphs:
        _check_names(new, one)
    keys = _new_keys(file, signatures or {})
    renamed = {
        (s, field): _renamed(s, field, ends[field])
        for s in file.signatures.values()
        if s.graph is own
        for field in ("inputs", "outputs")
    }
    for t, name in new.items():
        t.name = name
    for (signature, field), named in renamed.items():
        setattr(signature, field, named)
    for old, signature in file.signatures.items():
        signature.key = keys[old]
    file.signatures = {s.key: s for s in file.signatures.values()}


def _signatures(file: Contents, key: bool | str) -> list[LiteSignature]:
    """Return the signature of a name, or all of them."""
    if not file.signatures:
        raise TFLiteError("the file has no signature whose names it could take")
    if key is True:
        return [*file.signatures.values()]
    if key not in file.signatures:
        raise TFLiteError(
            f"there is no signature '{key}'; there are {[*file.signatures]}"
        )
    return [file.signatures[str(key)]]


def _of_signature(file: Contents, key: bool | str) -> dict[LiteTensor, str]:
    """Return the names that signatures have for tensors; inputs' names first."""
    new: dict[LiteTensor, str] = {}
    for signature in _signatures(file, key):
        for ends in (signature.inputs, signature.outputs):
            for name, t in ends.items():
                new.setdefault(t, name)
    return new


def _end(file: Contents, name: str, graph: LiteGraph, field: str) -> LiteTensor:
    """Return the input or output that a signature or the tensor itself calls so."""
    ends: tuple[LiteTensor, ...] = getattr(graph, field)
    known = [
        t
        for s in file.signatures.values()
        if s.graph is graph
        for n, t in getattr(s, field).items()
        if n == name
    ]
    found = [*dict.fromkeys(known or [t for t in ends if t.name == name])]
    if len(found) != 1:
        raise TFLiteError(
            f"'{name}' names {len(found)} {field} of {graph!r}; they are called "
            f"{[t.name for t in ends]}"
        )
    return found[0]


def _check_names(new: Mapping[LiteTensor, str], graph: LiteGraph) -> None:
    """Refuse names that would mean two tensors."""
    taken = {t.name: t for t in graph.tensors if t not in new}
    for t, name in new.items():
        if not name:
            raise TFLiteError(f"{t!r} needs a name; strip(names=True) leaves names out")
        if not graph.has_tensor(t):
            continue
        other = taken.setdefault(name, t)
        if other is not t:
            call = Words(f"rename(tensors={{'{other.name}': ...}})", other.name)
            raise TFLiteError(
                f"{t!r} and {other!r} would both be called '{name}'",
                remedy=f"rename the other one, too: {call}",
            )


def _renamed(
    signature: LiteSignature, field: str, names: _Ends
) -> dict[str, LiteTensor]:
    old: dict[str, LiteTensor] = getattr(signature, field)
    new: dict[str, LiteTensor] = {}
    for key, t in old.items():
        called, name = names.get(t, (key, key))
        # Of several names for one tensor, the one that was passed changes.
        stays = key != called and old.get(called) is t
        new[key if stays else name] = t
    if len(new) != len(old):
        raise TFLiteError(
            f"two {field} of signature '{signature.key}' would have one name: "
            f"{dict(names.values())}"
        )
    return new


def _new_keys(file: Contents, names: Names) -> dict[str, str]:
    for old in names:
        if old not in file.signatures:
            raise TFLiteError(
                f"there is no signature '{old}'; there are {[*file.signatures]}"
            )
    keys = {key: names.get(key, key) for key in file.signatures}
    if len({*keys.values()}) != len(keys) or not all(keys.values()):
        raise TFLiteError(f"signatures need different names, not {[*keys.values()]}")
    return keys
