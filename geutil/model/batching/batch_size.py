"""Giving a model another batch size."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from geutil.errors import TransformError
from geutil.graph.kinds import Tensor
from geutil.model.batching.calling import through_calls
from geutil.model.batching.edits import Plan
from geutil.model.batching.fixing import fixed_graph_def
from geutil.model.batching.frames import walk_loops
from geutil.model.batching.probing import REFUSALS, Probing
from geutil.model.batching.proving import prove
from geutil.model.batching.scopes import scope_of_graph
from geutil.model.batching.sites import attribute_of_shape
from geutil.model.batching.sizes import Sizes, choose_probe
from geutil.model.batching.walking import Walk, walk
from geutil.model.core import EditableModel, M
from geutil.model.errors import ModelError
from geutil.model.programs.program import Program, node_of, nodes_by_name

_logger = logging.getLogger("geutil")


def set_batch_size(
    model: M,
    size: int | None,
    *,
    inputs: Iterable[str] | None,
    samples: Mapping[str, Any] | None,
    verify: bool,
) -> M:
    """Return a model with another batch size; see `Model.set_batch_size`."""
    if size is not None and (type(size) is not int or size < 1):
        raise ModelError(f"a batch size is a positive number or None, not {size!r}")
    batched = _batched_inputs(model, inputs)
    old = _old_size(batched)
    program = model.program()
    if old is not None:
        sizes = Sizes(old, choose_probe(program.graph_def), size)
        done = _walked(model, program, batched, sizes)
        _refuse(model, done.plan, size)
        for edit in done.plan.edits:
            _logger.debug("batch size %s of %r: %s", size, model, edit)
        program.graph_def = fixed_graph_def(program.graph_def, done.plan, size)
    else:
        growing = Plan(growing={n.name for n in program.graph_def.node})
        program.graph_def = fixed_graph_def(program.graph_def, growing, size)
    _set_placeholders(program, batched, size)
    # The graph on trial is one by itself: a refusal leaves no trace.
    changed = _derived(model, program, size)
    if verify:
        prove(model, changed, list(batched), old, size, samples)
    return changed


def _batched_inputs(
    model: EditableModel, names: Iterable[str] | None
) -> dict[str, Tensor]:
    """Return the inputs whose first axis is the batch."""
    known = list(model.inputs)
    if names is None:
        for name, t in model.inputs.items():
            if t.shape.rank is None:
                raise ModelError(
                    f"input '{name}' has an unknown rank, so there is no telling "
                    "whether it has a batch axis; name the inputs that have one "
                    "with inputs=[...]"
                )
        names = [name for name, t in model.inputs.items() if t.shape.rank]
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in model.inputs:
            raise ModelError(f"there is no input '{name}'; the inputs are {known}")
        if not model.inputs[name].shape.rank:
            raise ModelError(
                f"input '{name}' of shape {model.inputs[name].shape} has no batch axis"
            )
    if not names:
        raise ModelError(f"{model!r} has no input with a batch axis")
    return {name: model.inputs[name] for name in names}


def _old_size(batched: Mapping[str, Tensor]) -> int | None:
    found = {name: t.shape.as_list()[0] for name, t in batched.items()}
    if len(set(found.values())) > 1:
        raise ModelError(
            f"the inputs do not agree on the batch size: {found}; name those whose "
            "first axis is the batch with inputs=[...]"
        )
    size: int | None = next(iter(found.values()))
    return size


def _walked(
    model: EditableModel, program: Program, batched: Mapping[str, Tensor], sizes: Sizes
) -> Walk:
    library = {f.signature.name: f for f in program.graph_def.library.function}
    probing = Probing(sizes, library)
    feeds = {}
    for name, tensor in program.inputs.items():
        shape = model.inputs[name].shape
        if name in batched:
            shape = [sizes.probe, *shape.as_list()[1:]]
        feeds[tensor] = probing.placeholder(model.inputs[name].dtype, shape)
    probing.mark([feeds[program.inputs[name]] for name in model.inputs])
    variables = model.holdings.by_handle()
    for name, outside in program.captures.items():
        variable = variables.get(id(outside))
        feeds[name] = (
            probing.placeholder(outside.dtype, outside.shape)
            if variable is None
            else probing.variable(variable.dtype, variable.shape)
        )
    try:
        scope = scope_of_graph(program.graph_def)
        return walk_loops(
            scope,
            probing,
            lambda starts: walk(scope, feeds, probing, through_calls, starts=starts),
        )
    except (*REFUSALS, TransformError) as error:
        raise ModelError(
            f"{model!r} cannot be followed with another batch size: {error}"
        ) from error


def _refuse(model: EditableModel, plan: Plan, size: int | None) -> None:
    problems = plan.all_problems()
    if problems:
        listed = "\n  ".join(str(p) for p in problems)
        raise ModelError(
            f"{model!r} cannot have batch size {size}; these ops hold on to the old "
            f"one:\n  {listed}"
        )


def _set_placeholders(
    program: Program, batched: Mapping[str, Tensor], size: int | None
) -> None:
    nodes = nodes_by_name(program.graph_def)
    for name, tensor in batched.items():
        node = nodes[node_of(program.inputs[name])]
        dims = tensor.shape.as_list()
        node.attr["shape"].CopyFrom(attribute_of_shape((size, *dims[1:])))
        node.attr.pop("_output_shapes", None)


def _derived(model: M, program: Program, size: int | None) -> M:
    try:
        return model.derived(program)
    except ModelError as error:
        raise ModelError(f"{model!r} cannot have batch size {size}: {error}") from error
