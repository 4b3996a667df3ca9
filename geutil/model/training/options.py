"""What the caller asks of stripping, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.model.core import EditableModel
from geutil.model.errors import ModelError


@dataclass(frozen=True)
class Options:
    """What to do apart from what the graph tells.

    Attributes:
        switches: the value for each input or placeholder that is to be a constant.
        statistics: for batch norms the variables of their moving mean and variance.
        keep: ops and name scopes that stay as they are.
    """

    switches: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, tuple[tf.Variable, tf.Variable]] = field(
        default_factory=dict
    )
    keep: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        """Tell whether an op of that name stays as it is."""
        return any(name == kept or name.startswith(f"{kept}/") for kept in self.keep)


def checked_options(
    model: EditableModel,
    switches: Mapping[str, Any] | None,
    statistics: Mapping[str, tuple[str, str]] | None,
    keep: Iterable[str],
) -> Options:
    """Return the options.

    Raises:
        ModelError: a name is not in the model.
    """
    kept = (keep,) if isinstance(keep, str) else tuple(keep)
    options = Options(dict(switches or {}), _variables(model, statistics or {}), kept)
    names = [op.name for op in model.graph.get_operations()]
    for name in kept:
        if not any(n == name or n.startswith(f"{name}/") for n in names):
            raise ModelError(f"keep: {model!r} has no op or name scope '{name}'")
    return options


def _variables(
    model: EditableModel, statistics: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[tf.Variable, tf.Variable]]:
    found = {}
    for norm, names in statistics.items():
        for name in names:
            if name not in model.variables:
                raise ModelError(
                    f"statistics: {model!r} has no variable '{name}' for '{norm}'; it "
                    f"has {list(model.variables)[:20]}"
                )
        mean, variance = names
        found[norm] = (model.variables[mean], model.variables[variance])
    return found
