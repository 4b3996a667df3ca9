"""Two models joined into one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError, Words
from geutil.graph.functions import merge_libraries
from geutil.graph.types import IdentitySet, Tensor, dereference, type_name
from geutil.graph.walks import node_name
from geutil.model import ends, programs
from geutil.model.core import EditableModel, M
from geutil.model.programs import ModelProgram

Links = Mapping[Any, Any] | Iterable[tuple[Any, Any]]
_logger = logging.getLogger("geutil")


@dataclass(frozen=True, eq=False)
class JoinedTensor:
    """One tensor that is read instead of another one, in the other model."""

    old: Tensor
    new: Tensor


def splice(
    model: M,
    other: EditableModel,
    replaced: Links,
    feeds: Links,
    scope: str,
    signature: str | None = None,
    dropped: Iterable[str] = (),
) -> M:
    """Return both models as one; see `Model.splice`."""
    _check_model(model, other)
    links = [
        JoinedTensor(ends.tensor_of(model, mine), _end(other, "output", theirs))
        for mine, theirs in _pairs(replaced)
    ]
    feed_links = [
        JoinedTensor(_end(other, "input", theirs), ends.tensor_of(model, mine))
        for theirs, mine in _pairs(feeds)
    ]
    if not links and not feed_links:
        raise ModelError(
            "nothing connects the two models; say which tensor of one the other reads, "
            "or join them side by side"
        )
    return _merged(model, other, links, feed_links, scope, signature, dropped)


def join(
    model: M,
    other: EditableModel,
    inputs: Mapping[str, str] | Iterable[str],
    scope: str,
    signature: str | None,
) -> M:
    """Return both models side by side; see `Model.join`."""
    _check_model(model, other)
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, Mapping):
        inputs = {name: name for name in inputs}
    links = [
        JoinedTensor(_end(other, "input", theirs), _end(model, "input", mine))
        for theirs, mine in _pairs(inputs)
    ]
    return _merged(model, other, [], links, scope, signature)


def _merged(
    model: M,
    other: EditableModel,
    links: list[JoinedTensor],
    feed_links: list[JoinedTensor],
    scope: str,
    signature: str | None,
    dropped: Iterable[str] = (),
) -> M:
    """Return both models as one, connected or not."""
    for link in (*links, *feed_links):
        _check_fit(link)
    _check_once([link.old for link in (*links, *feed_links)])
    program, added = model.program(), other.program()
    for link in feed_links:
        _narrow(program, link)
    for name in dropped:
        del program.outputs[name]
    before = _needed_inputs(program, program.inputs)
    prefix = _separate(program, added, scope)
    _connect(program, {k.old.name: f"{prefix}{k.new.name}" for k in links})
    _connect(added, {f"{prefix}{k.old.name}": k.new.name for k in feed_links})
    program.graph_def.node.extend(added.graph_def.node)
    _check_acyclic(program, model, other)
    read = {k.new.name for k in links}
    outputs = _added(program.outputs, added.outputs, read, prefix, "output")
    merged = ModelProgram(
        program.graph_def,
        {},
        {**program.outputs, **outputs},
        {**program.captures, **added.captures},
        [*program.side_effects, *added.side_effects],
        [*program.ancestors, *added.ancestors],
        (*program.layers, *added.layers),
    )
    # Inputs that nothing needs any more go, and so do their names.
    needed = _needed_inputs(merged, program.inputs)
    merged.inputs = {
        n: t for n, t in program.inputs.items() if n in needed or n not in before
    }
    fed = {k.old.name for k in feed_links}
    merged.inputs |= _added(merged.inputs, added.inputs, fed, prefix, "input")
    left = [name for name in other.signatures if name != other.signature]
    if left and other.signatures is not model.signatures:
        _logger.info("signatures %s of %r are left out", left, other)
    holdings = model.holdings.merged(other.holdings)
    return model.derived(merged, holdings=holdings, beside=signature)


def prepend(
    model: M,
    other: EditableModel,
    inputs: Mapping[str, Any] | None,
    signature: str | None,
) -> M:
    """Return a model that computes `other` first; see `Model.prepend`."""
    _check_model(model, other)
    if inputs is None:
        inputs = _by_name(model.inputs, other.outputs, "output each input reads")
    links = {_end(model, "input", k).name: v for k, v in inputs.items()}
    return splice(model, other, links, {}, "before", signature)


def append(
    model: M,
    other: EditableModel,
    inputs: Mapping[str, Any] | None,
    signature: str | None,
) -> M:
    """Return a model that computes `other` last; see `Model.append`."""
    _check_model(model, other)
    if inputs is None:
        inputs = _by_name(other.inputs, model.outputs, "output each input reads")
    read = [ends.tensor_of(model, item) for item in inputs.values()]
    dropped = [
        name for name, t in model.outputs.items() if any(t is other for other in read)
    ]
    return splice(model, other, {}, inputs, "after", signature, dropped)


def _check_model(model: EditableModel, other: Any) -> None:
    if not isinstance(other, type(model)):
        raise ModelError(
            f"cannot join a {type_name(other)}; open it with geutil.model.open"
        )


def _check_once(replaced: Iterable[Tensor]) -> None:
    seen = IdentitySet()
    for t in replaced:
        if t in seen:
            raise ModelError(f"'{t.name}' is to be replaced twice; name it once")
        seen.add(t)


def _by_name(
    readers: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str
) -> dict[str, str]:
    """Pair ends of two models: the only ones, or those of the same name."""
    if len(readers) == 1 and len(tensors) == 1:
        return {next(iter(readers)): next(iter(tensors))}
    pairs = {name: name for name in readers if name in tensors}
    if not pairs:
        raise ModelError(
            f"cannot tell which {what}: {list(readers)} and {list(tensors)} have no "
            "name in common",
            remedy=Words("pass inputs= as a mapping"),
        )
    return pairs


def _pairs(links: Links) -> list[tuple[Any, Any]]:
    pairs = list(links.items() if isinstance(links, Mapping) else links)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ModelError(f"expected a mapping or pairs of tensors, got {links!r}")
    return [(dereference(a), dereference(b)) for a, b in pairs]


def _end(model: EditableModel, kind: str, item: Any) -> Tensor:
    """Return an input or output of a model, given by name or as a tensor."""
    ends: Mapping[str, Tensor] = model.inputs if kind == "input" else model.outputs
    if isinstance(item, str) and item in ends:
        return ends[item]
    for t in ends.values():
        if t is item:
            return t
    name = item if isinstance(item, str) else getattr(item, "name", item)
    raise ModelError(f"{model!r} has no {kind} '{name}'; it has {list(ends)}")


def _check_fit(link: JoinedTensor) -> None:
    old, new = link.old, link.new
    if old.dtype.base_dtype != new.dtype.base_dtype:
        raise ModelError(
            f"'{new.name}' ({new.dtype.name}) cannot be read instead of '{old.name}' "
            f"({old.dtype.name}); put a tf.cast between them"
        )
    if not old.shape.is_compatible_with(new.shape):
        raise ModelError(
            f"'{new.name}' of shape {new.shape} cannot be read instead of '{old.name}' "
            f"of shape {old.shape}; resize or reshape between them, or change the "
            "batch size with set_batch_size"
        )


def _narrow(program: ModelProgram, link: JoinedTensor) -> None:
    """Give an input that the other model reads, too, a shape that both take."""
    if link.new.name not in program.inputs.values():
        return
    node = programs.nodes_by_name(program.graph_def)[link.new.op.name]
    own = tf.TensorShape(node.attr["shape"].shape)
    if not own.is_compatible_with(link.old.shape):
        raise ModelError(
            f"'{link.new.name}' cannot be of shape {own} and of shape "
            f"{link.old.shape}, that of '{link.old.name}'; feed these apart"
        )
    both = own.merge_with(link.old.shape).as_proto()
    if both != own.as_proto():
        node.attr["shape"].shape.CopyFrom(both)
        node.attr.pop("_output_shapes", None)
        programs.forget_shapes_behind(program, [link.new.name])


def _separate(program: ModelProgram, added: ModelProgram, scope: str) -> str:
    """Keep the names of two programs apart; return the prefix of the second's."""
    nodes = programs.nodes_by_name(program.graph_def)
    prefix = ""
    if any(node.name in nodes for node in added.graph_def.node):
        # A second use of a frozen model does not need its weights a second time.
        shared = [
            node.name
            for node in added.graph_def.node
            if node.op == "Const" and not node.input and node == nodes.get(node.name)
        ]
        scopes = {name.partition("/")[0] for name in nodes}
        prefix = f"{programs.fresh_name(scopes, scope)}/"
        programs.prefix_nodes(added, prefix)
        _share(added, {f"{prefix}{name}": name for name in shared})
    merge_libraries(program.graph_def, added.graph_def)
    return prefix


def _share(added: ModelProgram, constants: Mapping[str, str]) -> None:
    """Let the nodes of a program read constants of another one, by its names."""
    programs.redirect(added, constants)
    nodes = [node for node in added.graph_def.node if node.name not in constants]
    added.graph_def = programs.subgraph(added.graph_def, nodes)


def _connect(program: ModelProgram, stand_ins: dict[str, str]) -> None:
    # The new tensors may be of other shapes: what was inferred behind the old ones is
    # inferred anew.
    programs.forget_shapes_behind(program, stand_ins)
    programs.redirect(program, stand_ins)


def _added(
    mine: Mapping[str, str],
    theirs: Mapping[str, str],
    used: set[str],
    prefix: str,
    kind: str,
) -> dict[str, str]:
    """Return the ends of the other model that nothing uses, under free names."""
    ends: dict[str, str] = {}
    used = {f"{prefix}{name}" for name in used}
    for name, t in theirs.items():
        if t in used:
            continue
        free = programs.fresh_name({**mine, **ends}, name)
        if free != name:
            _logger.warning(
                "%s '%s' of the second model is called '%s'", kind, name, free
            )
        ends[free] = t
    return ends


def _needed_inputs(program: ModelProgram, inputs: Mapping[str, str]) -> set[str]:
    """Return the names of the inputs that the ends depend on."""
    ends = [*program.outputs.values(), *program.side_effects]
    behind = programs.nodes_behind(program.graph_def, map(node_name, ends))
    names = {node.name for node in behind}
    return {name for name, t in inputs.items() if node_name(t) in names}


def _check_acyclic(
    program: ModelProgram, model: EditableModel, other: EditableModel
) -> None:
    """Refuse a program in which a node depends on itself, loops aside."""
    cycle = programs.cycle_of(program.graph_def)
    if cycle is not None:
        raise ModelError(
            f"{model!r} and {other!r} would depend on each other: "
            f"{' -> '.join(cycle[:20])}; feed the second from a tensor that does not "
            "depend on what is replaced"
        )
