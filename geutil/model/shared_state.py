"""State that the signatures of a model share: variables, values, tables, assets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from geutil.errors import ModelError
from geutil.model.programs import fresh_name


@dataclass
class Holdings:
    """What a model holds besides its graphs.

    Attributes:
        variables: the variables by name.
        resources: the objects that own tables and the like, to be saved along.
        assets: the files that tables are read from.
    """

    variables: dict[str, tf.Variable] = field(default_factory=dict)
    resources: list[Any] = field(default_factory=list)
    assets: list[tf.saved_model.Asset] = field(default_factory=list)

    def add_variables(
        self, variables: Iterable[tf.Variable], names: Iterable[str] = ()
    ) -> None:
        """Hold more variables, under given or their own names where these are free."""
        known = {id(v) for v in self.variables.values()}
        for variable, given in itertools.zip_longest(variables, names):
            if id(variable) not in known:
                known.add(id(variable))
                name = given or variable.name.partition(":")[0]
                self.variables[fresh_name(self.variables, name)] = variable

    def merged(self, other: Holdings) -> Holdings:
        """Return the holdings of both; variables of the same name are numbered."""
        both = Holdings(
            dict(self.variables),
            _unique([*self.resources, *other.resources]),
            _unique([*self.assets, *other.assets]),
        )
        both.add_variables(other.variables.values())
        return both

    def by_handle(self) -> dict[int, tf.Variable]:
        """Return the variables by the identity of their handles."""
        return {id(v.handle): v for v in self.variables.values()}


def holdings_of(root: Any) -> Holdings:
    """Return what a trackable object and its parts hold.

    Cost: linear in the objects that can be reached.
    """
    holdings = Holdings()
    variables = []
    for obj in tf.train.TrackableView(root).descendants():
        if isinstance(obj, tf.Variable):
            variables.append(obj)
        elif isinstance(obj, tf.saved_model.Asset):
            holdings.assets.append(obj)
        elif hasattr(obj, "resource_handle"):
            holdings.resources.append(obj)
    holdings.add_variables(variables)
    return holdings


def _unique(objects: Iterable[Any]) -> list[Any]:
    return list({id(o): o for o in objects}.values())


def check_initialized(
    holdings: Holdings, variables: Iterable[tf.Variable], error: Exception
) -> None:
    """Raise, in place of an error of TensorFlow, if variables have no values.

    Raises:
        ModelError: one of `variables` has no value.
    """
    names = {id(v): name for name, v in holdings.variables.items()}
    empty = [names.get(id(v), v.name) for v in variables if not v.is_initialized()]
    if empty:
        more = " and more" if len(empty) > 10 else ""
        raise ModelError(
            f"the variables {empty[:10]}{more} have no value: the graph was not "
            "frozen; read a checkpoint with model.restore(path) or assign values"
        ) from error


def restore(holdings: Holdings, checkpoint: str) -> list[str]:
    """Assign the values of a checkpoint by name; see `Model.restore`."""
    try:
        reader = tf.train.load_checkpoint(checkpoint)
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise ModelError(f"'{checkpoint}' is no checkpoint: {error}") from error
    found = {n: v for n, v in holdings.variables.items() if n in shapes}
    if not found:
        raise ModelError(
            f"checkpoint '{checkpoint}' has none of {list(holdings.variables)[:10]}; "
            f"it has {sorted(shapes)[:10]}"
        )
    for name, variable in found.items():
        if not variable.shape.is_compatible_with(shapes[name]) or (
            variable.dtype != dtypes[name]
        ):
            raise ModelError(
                f"variable '{name}' is {variable.dtype.name} of shape "
                f"{variable.shape}; the checkpoint has {dtypes[name].name} of shape "
                f"{shapes[name]}"
            )
    for name, variable in found.items():
        variable.assign(reader.get_tensor(name))
    return [name for name in holdings.variables if name not in found]
