"""Names of the ops of TFLite files, and of the graph ops that these were made from.

Ops of a file have no names, its tensors have. The converter calls a tensor after the op
that made it; after all of them, with ";" between, where it fused several; and it puts a
number behind a name that is taken.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TypeVar

from geutil.errors import TFLiteError, Words
from geutil.graph.op_types import CALLS, FAKE_QUANT
from geutil.tflite import lookups
from geutil.tflite.arguments import checked
from geutil.tflite.lookups import GraphLike
from geutil.tflite.parts import Contents, LiteGraph, LiteSignature, LiteTensor

T = TypeVar("T")

_DIGITS = "0123456789"
_SIMULATIONS = sorted(FAKE_QUANT)


def sources_of(tensor_name: str) -> list[str]:
    """Return the names of the ops that a tensor is named after, its maker's first.

    Example:
        >>> sources_of("net/Relu;net/conv:0;net/bias")
        ['net/Relu', 'net/conv', 'net/bias']
    """
    parts = (part.partition(":")[0].strip() for part in tensor_name.split(";"))
    return [part for part in parts if part]


def spellings(name: str) -> Iterator[str]:
    """Yield the names that a file's name of an op can stand for, the likeliest first.

    Example:
        >>> list(spellings("MatMul_11"))
        ['MatMul_11', 'MatMul_1', 'MatMul_']
    """
    yield name
    while name and name[-1] in _DIGITS:
        name = name[:-1]
        if name:
            yield name


def called(name: str, ops: Mapping[str, T]) -> T | None:
    """Return the op that a file's name of it stands for; None if there is none.

    Example:
        >>> called("net/MatMul_12", {"net/MatMul": 0, "net/MatMul_1": 1})
        1
    """
    for spelling in spellings(name):
        # `to_int8` calls a FakeQuant op of a scope of its own after the scope.
        for full in (spelling, *(f"{spelling}/{kind}" for kind in _SIMULATIONS)):
            if full in ops:
                return ops[full]
    return None


def names_result(name: str) -> bool:
    """Return whether a name is that of a whole function's result, and so of no op."""
    return name.rpartition("/")[2].rstrip(_DIGITS).rstrip("_") in CALLS


def op_names(graph: LiteGraph) -> list[str]:
    """Return a name for each op of a subgraph, all different, by its first result."""
    unique = UniqueNames()
    wanted = (next(iter(sources_of(op.result)), op.kind.lower()) for op in graph.ops)
    return [*map(unique.name, wanted)]


class UniqueNames:
    """Names of which none is given twice."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def name(self, wanted: str) -> str:
        """Return a name, or that name with a number behind it where it is taken."""
        name = wanted
        while name in self._times:
            self._times[wanted] += 1
            name = f"{wanted}_{self._times[wanted]}"
        self._times[name] = 0
        return name


def file_names(names: Sequence[str]) -> dict[str, str]:
    """Return the names of inputs or outputs in a file, as Python's arguments.

    Example:
        >>> from geutil.tflite.op_names import file_names
        >>> file_names(["image", "in", "a/b", "a_b", "1st"])
        {'image': 'image', 'in': 'in_', 'a/b': 'a_b_1', 'a_b': 'a_b', '1st': '_1st'}
    """
    file_name_of: dict[str, str] = {}
    used_names = {name for name in names if _is_callable(name)}
    for name in names:
        file_name = name
        if not _is_callable(name):
            base = re.sub(r"\W|^(?=\d)", "_", name)
            base = f"{base}_" if keyword.iskeyword(base) else base
            numbered = (f"{base}_{number}" for number in count(1))
            free = (each for each in chain((base,), numbered) if each not in used_names)
            file_name = next(free)
            used_names.add(file_name)
        file_name_of[name] = file_name
    return file_name_of


def _is_callable(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


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
    """Rename inputs, outputs, tensors and signatures.

    Args:
        inputs: the new name of each input to rename, in signatures and of its tensor.
        outputs: the same for outputs.
        tensors: the new name of each other tensor to rename.
        signatures: the new name of each signature to rename.
        from_signature: whether inputs and outputs get their names in the signatures,
            instead of names such as "serving_default_x:0"; or the name of the signature
            to use.

    Raises:
        TFLiteError: an old name does not exist, or two would have the same name.

    Example:
        >>> from geutil import tflite
        >>> m = tflite.LiteFile()
        >>> x = m.add_input("serving_default_x:0", "float32", [4])
        >>> m.set_outputs([m.add("NEG", [x], name="y")])
        >>> m.rename({"serving_default_x:0": "image"}, {"y": "scores"})
        >>> m.graphs[0].inputs
        (<LiteTensor 'image' float32 [4]>,)
    """
    own = lookups.graph_of(file, graph)
    new: dict[LiteTensor, str] = {}
    if from_signature:
        if not file.signatures:
            raise TFLiteError("the file has no signature whose names it could take")
        named_by = [*file.signatures.values()]
        if from_signature is not True:
            named_by = [lookups.signature_of(file, from_signature)]
        own = named_by[0].graph
        for signature in named_by:
            for name, t in (*signature.inputs.items(), *signature.outputs.items()):
                # A tensor has one name: of several signatures the first one gives it.
                new.setdefault(t, name)
    ends: dict[str, _Ends] = {"inputs": {}, "outputs": {}}
    for field, names in (("inputs", inputs), ("outputs", outputs)):
        for old, name in (names or {}).items():
            t = _end(file, old, own, field)
            new[t] = name
            ends[field][t] = old, name
    for old, name in (tensors or {}).items():
        new[lookups.tensor_of(file, old, own)] = name
    for one in file.graphs:
        _check_names(new, one)
    keys = _new_keys(file, signatures or {})
    renamed = {
        (s, field): _renamed(s, field, ends[field])
        for s in lookups.signatures_of(file, own)
        for field in ("inputs", "outputs")
    }
    # All names are checked, and nothing is refused from here on.
    for t, name in new.items():
        t.name = name
    for (signature, field), named in renamed.items():
        setattr(signature, field, named)
    for old, signature in file.signatures.items():
        signature.key = keys[old]
    file.signatures = {s.key: s for s in file.signatures.values()}


def _end(file: Contents, name: str, graph: LiteGraph, field: str) -> LiteTensor:
    """Return the input or output that a signature or the tensor itself calls so."""
    ends: tuple[LiteTensor, ...] = getattr(graph, field)
    signatures = lookups.signatures_of(file, graph)
    known = [t for s in signatures for n, t in getattr(s, field).items() if n == name]
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
        lookups.signature_of(file, old)
    keys = {key: names.get(key, key) for key in file.signatures}
    if len({*keys.values()}) != len(keys) or not all(keys.values()):
        raise TFLiteError(f"signatures need different names, not {[*keys.values()]}")
    return keys
