"""Parts cut out of a model, and models joined; ends renamed, ops replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from geutil.errors import GeutilError, ModelError, SelectionError, Words
from geutil.graph.creation import make_op_like
from geutil.graph.functions import merge_libraries
from geutil.graph.types import (
    IdentitySet,
    Operation,
    Tensor,
    dereference,
    is_op,
    is_tensor,
    type_name,
)
from geutil.graph.walks import node_name
from geutil.model import programs
from geutil.model.core import EditableModel, M
from geutil.model.programs import (
    ModelProgram,
    SharedState,
    legal_name,
    rename_nodes,
    take_name,
)
from geutil.select import selections
from geutil.select.queries import select_ops

Selection = Mapping[str, Any] | Iterable[Any] | Any


def named_tensors(model: EditableModel, selection: Selection) -> dict[str, Tensor]:
    """Return the selected tensors by public name, in order."""
    # A mapping says the names. Without one, ends and layers keep their names and other
    # tensors are called after their ops.
    if isinstance(selection, Mapping):
        if not all(isinstance(name, str) and name for name in selection):
            raise ModelError(f"each end needs a name, got {list(selection)}")
        return {name: tensor_of(model, item) for name, item in selection.items()}
    if is_tensor(selection) or is_op(selection) or selections.is_name(selection):
        selection = [selection]
    named: dict[str, Tensor] = {}
    for item in selection:
        tensor = tensor_of(model, item)
        name = _public_name(model, item, tensor)
        if name in named:
            raise ModelError(
                f"two tensors would be called '{name}': '{named[name].name}' and "
                f"'{tensor.name}'",
                remedy=Words("pass a mapping from names to tensors"),
            )
        named[name] = tensor
    return named


def tensor_of(model: EditableModel, item: Any) -> Tensor:
    """Return one selected tensor of a model."""
    if isinstance(item, str):
        for ends in (model.outputs, model.inputs):
            if item in ends:
                return ends[item]
    try:
        ends_ = [*model.inputs, *model.outputs]
        return selections.tensor_of(model.graph, item, repr(model), ends_)
    except SelectionError as error:
        raise ModelError(str(error)) from error


def _public_name(model: EditableModel, item: Any, tensor: Tensor) -> str:
    if isinstance(item, str) and (item in model.outputs or item in model.inputs):
        return item
    for ends in (model.inputs, model.outputs):
        for name, t in ends.items():
            if t is tensor:
                return name
    plain = tensor.op.name if tensor.value_index == 0 else tensor.name.replace(":", "_")
    return selections.label(model.graph, item) or plain


_logger = logging.getLogger("geutil")


def cut(
    model: M,
    inputs: Selection | None,
    outputs: Selection | None,
    signature: str | None,
) -> M:
    """Return the part of a model between tensors; see `Model.cut`."""
    results = named_tensors(model, model.outputs if outputs is None else outputs)
    if not results:
        raise ModelError(
            "a model needs at least one output",
            remedy=f"name one {Words('in outputs=')}",
        )
    for name, t in results.items():
        if t.dtype in (tf.resource, tf.variant):
            raise ModelError(
                f"'{t.name}' is a {t.dtype.name} and cannot be output '{name}'; cut "
                "behind the ops that read it"
            )
    # The cut can leave out placeholders that nothing feeds, so none is refused yet.
    program = model.program(checked=False)
    program.outputs = {name: t.name for name, t in results.items()}
    if inputs is None:
        needed = programs.needed_names(program, program.outputs.values())
        program.inputs = {
            name: t for name, t in program.inputs.items() if node_name(t) in needed
        }
    else:
        _feed(model, program, named_tensors(model, inputs))
    program.side_effects = _possible_side_effects(model, program)
    if signature is not None:
        return model.derived(program, beside=signature)
    return model.derived(program, holdings=_holdings(model, program), alone=True)


def _feed(
    model: EditableModel, program: ModelProgram, inputs: dict[str, Tensor]
) -> None:
    """Put a placeholder in the place of each tensor in `inputs`."""
    for t in inputs.values():
        if t.dtype in (tf.resource, tf.variant):
            raise ModelError(
                f"'{t.name}' is a {t.dtype.name} and cannot be an input; cut behind "
                "the ops that read it"
            )
    node_names = {node.name for node in program.graph_def.node}
    stand_ins: dict[str, str] = {}
    for name, t in inputs.items():
        if t.name in stand_ins:
            raise ModelError(f"two inputs are '{t.name}', one of them '{name}'")
        stand_ins[t.name] = programs.take_name(node_names, programs.legal_name(name))
        program.graph_def.node.append(programs.placeholder(stand_ins[t.name], t))
    programs.redirect(program, stand_ins)
    _release(program, stand_ins.values())
    fed = {name: f"{stand_ins[t.name]}:0" for name, t in inputs.items()}
    _check_inputs(model, program, fed)
    program.inputs = fed
    _shorten_names(program)


def _release(program: ModelProgram, stand_ins: Iterable[str]) -> None:
    """Let no op that can be computed wait for ops behind the old inputs."""
    # Ops that are cut off cannot be waited for: neither they nor their effects are
    # there.
    stand_in_names = set(stand_ins)
    old = [
        node_name(t)
        for t in program.inputs.values()
        if node_name(t) not in stand_in_names
    ]
    fed = programs.nodes_ahead(program.graph_def, old, data_only=True)
    for node in program.graph_def.node:
        if node.name in fed:
            continue
        inputs = [t for t in node.input if t[0] != "^" or node_name(t) not in fed]
        if len(inputs) != len(node.input):
            node.input[:] = inputs


def _shorten_names(program: ModelProgram) -> None:
    """Drop the parts that are cut off, and give the inputs the names set free."""
    ends = [*program.outputs.values(), *program.side_effects, *program.inputs.values()]
    needed = programs.needed_names(program, ends)
    nodes = [node for node in program.graph_def.node if node.name in needed]
    program.graph_def = programs.subgraph(program.graph_def, nodes)
    names = needed - {node_name(t) for t in program.inputs.values()}
    renamed = {}
    for name, t in program.inputs.items():
        renamed[node_name(t)] = programs.take_name(names, programs.legal_name(name))
    programs.rename_nodes(program, renamed)


def _check_inputs(
    model: EditableModel, program: ModelProgram, fed: dict[str, str]
) -> None:
    """Refuse inputs that no output needs, and outputs that need inputs left out."""
    needed = programs.needed_names(program, program.outputs.values())
    # An input may serve a side effect alone.
    used = needed | programs.needed_names(program, program.side_effects)
    for name, t in fed.items():
        if node_name(t) not in used:
            raise ModelError(
                f"no output depends on '{name}' once the others are inputs; leave "
                "it out"
            )
    for name, t in program.inputs.items():
        if node_name(t) in needed and t not in fed.values():
            raise ModelError(
                f"the outputs {list(program.outputs)} of {model!r} still depend on its "
                f"input '{name}'",
                remedy=f"name it {Words('in inputs=')} too, or cut further behind",
            )


def _possible_side_effects(model: EditableModel, program: ModelProgram) -> list[str]:
    """Return the side effects that need no input which was cut off."""
    kept_inputs = {node_name(t) for t in program.inputs.values()}
    original = {t.op.name for t in model.inputs.values()} - kept_inputs
    possible = []
    for name in program.side_effects:
        if original.isdisjoint(programs.needed_names(program, [name])):
            possible.append(name)
        else:
            _logger.info("'%s' is not in the part that was cut out; left out", name)
    return possible


def _holdings(model: EditableModel, program: ModelProgram) -> SharedState:
    """Return the part's share of the model's shared state."""
    needed = programs.needed_names(program)
    captured = {id(e) for t, e in program.captures.items() if node_name(t) in needed}
    holdings = model.holdings
    resources = [r for r in holdings.resources if id(r.resource_handle) in captured]
    return SharedState(
        {n: v for n, v in holdings.variables.items() if id(v.handle) in captured},
        resources,
        list(holdings.assets) if resources else [],
    )


Replacement = str | Callable[..., Any]


def replace_op(model: M, ops: Any, replacement: Replacement) -> M:
    """Return a model with some ops replaced; see `Model.replace_op`."""
    # Cutting and renaming do not rewrite.
    from geutil.rewrite import Match, Op, Rule, rewrite

    selected = frozenset(op.name for op in _selected(model, ops))
    result = model.derived(model.program())
    op_names = {op.name for op in result.graph.get_operations()}
    unneeded = sorted(selected - op_names)
    if unneeded:
        raise ModelError(
            f"no output of {model!r} depends on {unneeded[:10]}: replacing would "
            "change nothing"
        )

    def build(match: Match) -> list[Any]:
        return _computed(match.root, replacement)

    title = replacement if isinstance(replacement, str) else "replacement"
    rule = Rule(Op(lambda op: op.name in selected, ...), build, name=title)
    try:
        report = rewrite(result.graph, rule)
    except GeutilError as error:
        raise ModelError(f"cannot replace {sorted(selected)[:10]}: {error}") from error
    refused = [f"'{entry.op}': {entry.reason}" for entry in report.refused]
    if refused:
        raise ModelError(f"some ops cannot be replaced: {'; '.join(refused)}")
    # Once more, without the ops that were replaced.
    return result.derived(result.program())


def _selected(model: EditableModel, ops: Any) -> list[Operation]:
    """Return the ops that are selected; see `Model.replace_op`."""
    selected_ops: list[Operation] = []
    if isinstance(ops, str):
        selected_ops = [op for op in model.graph.get_operations() if op.type == ops]
    if not selected_ops and selections.is_name(ops):
        selected_ops = _op_of_layer(model, ops)
    if not selected_ops:
        selected_ops = [ops] if is_op(ops) else select_ops(ops, graph=model.graph)
    # geutil itself added the sinks of outputs.
    own = {id(sink) for sink in model.outputs.sinks.values()}
    selected_ops = [op for op in selected_ops if id(op) not in own]
    if not selected_ops:
        types = sorted({op.type for op in model.graph.get_operations()})
        raise ModelError(
            f"{model!r} has no op of type or name {ops!r}; its types are {types}"
        )
    for op in selected_ops:
        if op.graph is not model.graph:
            raise ModelError(f"'{op.name}' is in another graph than {model!r}")
        if op.type in ("Placeholder", "VarHandleOp"):
            raise ModelError(
                f"'{op.name}' ({op.type}) stands for what comes from outside and "
                "cannot be replaced; use prepend() for inputs, or replace what reads it"
            )
    return selected_ops


def _op_of_layer(model: EditableModel, item: Any) -> list[Operation]:
    """Return the op that a layer computes with in each of its calls, or None."""
    try:
        ops = selections.ops_of_layers(model.graph, item, repr(model))
    except SelectionError as error:
        raise ModelError(str(error)) from error
    computing = [op for op in ops if op.type not in _PARAMETERS]
    if len({op.type for op in computing}) > 1:
        candidates = [f"'{op.name}' ({op.type})" for op in computing[:10]]
        raise ModelError(
            f"layer '{getattr(item, 'path', getattr(item, 'name', item))}' computes "
            f"with several ops: {', '.join(candidates)}; name one of them, or replace "
            "the layer with splice"
        )
    return computing


_PARAMETERS = frozenset(("Const", "Placeholder", "ReadVariableOp", "VarHandleOp"))


def _computed(op: Operation, replacement: Replacement) -> list[Any]:
    """Return the result of the replacement for the inputs of an op."""
    if isinstance(replacement, str):
        return list(make_op_like(op, replacement).outputs)
    result = replacement(*op.inputs)
    if isinstance(result, Mapping):
        result = list(result.values())
    results = list(result) if isinstance(result, list | tuple) else [result]
    results = [t if is_tensor(t) else tf.convert_to_tensor(t) for t in results]
    if len(results) != len(op.outputs):
        raise ModelError(
            f"the replacement of '{op.name}' returns {len(results)} tensors; the op "
            f"has {len(op.outputs)} outputs"
        )
    return results


def rename(
    model: M,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    signature: str | None,
) -> M:
    """Return a model with other names; see `Model.rename`."""
    new_inputs = _renamed(model.inputs, inputs, "input")
    new_outputs = _renamed(model.outputs, outputs, "output")
    if signature is not None and signature != model.signature:
        if signature in model.signatures:
            raise ModelError(
                f"{model!r} has a signature '{signature}' already; rename that "
                "one first"
            )
        if not signature:
            raise ModelError("a signature needs a name")
    program = model.program()
    tensors = list(program.inputs.values())
    program.inputs = dict(zip(new_inputs, tensors, strict=True))
    program.outputs = dict(zip(new_outputs, program.outputs.values(), strict=True))
    node_names = {node.name for node in program.graph_def.node}
    placeholders = {}
    for old, new in inputs.items():
        if new != old:
            before = node_name(program.inputs[new])
            placeholders[before] = take_name(node_names, legal_name(new))
    rename_nodes(program, placeholders)
    return model.derived(program, signature=signature)


def _renamed(ends: Iterable[str], new_names: Mapping[str, str], kind: str) -> list[str]:
    old_names = list(ends)
    for old, new in new_names.items():
        if old not in old_names:
            raise ModelError(f"there is no {kind} '{old}'; there are {old_names}")
        if not new:
            raise ModelError(f"{kind} '{old}' needs a name")
    renamed = [new_names.get(name, name) for name in old_names]
    twice = sorted({name for name in renamed if renamed.count(name) > 1})
    if twice:
        raise ModelError(f"two {kind}s would be called {twice}; choose other names")
    return renamed


Links = Mapping[Any, Any] | Iterable[tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class _JoinedTensor:
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
        _JoinedTensor(tensor_of(model, mine), _end(other, "output", theirs))
        for mine, theirs in _pairs(replaced)
    ]
    feed_links = [
        _JoinedTensor(_end(other, "input", theirs), tensor_of(model, mine))
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
        _JoinedTensor(_end(other, "input", theirs), _end(model, "input", mine))
        for theirs, mine in _pairs(inputs)
    ]
    return _merged(model, other, [], links, scope, signature)


def _merged(
    model: M,
    other: EditableModel,
    links: list[_JoinedTensor],
    feed_links: list[_JoinedTensor],
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
    read = [tensor_of(model, item) for item in inputs.values()]
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


def _check_fit(link: _JoinedTensor) -> None:
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


def _narrow(program: ModelProgram, link: _JoinedTensor) -> None:
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
    needed = programs.needed_names(program)
    return {name for name, t in inputs.items() if node_name(t) in needed}


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
