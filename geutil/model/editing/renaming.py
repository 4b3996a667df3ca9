"""Renaming the ends and the signature of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from geutil.model.core import M
from geutil.model.errors import ModelError
from geutil.model.programs.program import fresh_name, legal_name, node_of
from geutil.model.programs.rewiring import rename_placeholders


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
    taken = {node.name for node in program.graph_def.node}
    placeholders = {}
    for old, new in inputs.items():
        if new != old:
            before = node_of(program.inputs[new])
            placeholders[before] = fresh_name(taken, legal_name(new))
            taken.add(placeholders[before])
    rename_placeholders(program, placeholders)
    return model.derived(program, signature=signature)


def _renamed(ends: Iterable[str], names: Mapping[str, str], kind: str) -> list[str]:
    known = list(ends)
    for old, new in names.items():
        if old not in known:
            raise ModelError(f"there is no {kind} '{old}'; there are {known}")
        if not new:
            raise ModelError(f"{kind} '{old}' needs a name")
    renamed = [names.get(name, name) for name in known]
    twice = sorted({name for name in renamed if renamed.count(name) > 1})
    if twice:
        raise ModelError(f"two {kind}s would be called {twice}; choose other names")
    return renamed
