"""Values of variables from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from geutil.model.errors import ModelError
from geutil.model.holdings import Holdings


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
