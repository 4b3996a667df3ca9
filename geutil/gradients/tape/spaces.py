"""The spaces that gradients live in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from geutil.gradients.tape.identifiers import tensor_id

Array = np.ndarray[Any, Any]


class VSpace(NamedTuple):
    """What an engine needs to know of gradients: they can be added, and there is zero.

    Attributes:
        aggregate_fn: returns the sum of a list of gradients, at least one.
        num_elements_fn: returns how many elements a gradient holds.
        tensor_id: returns the number that stands for a tensor on the tape.
        zeros: returns zeros of a shape and dtype.
        ones_like: returns ones of the shape and dtype of a tensor.

    Example:
        >>> # A space that says how many gradients it adds up.
        >>> import numpy as np
        >>> from geutil.gradients.tape import numpy_vspace
        >>> space = numpy_vspace()
        >>> def aggregate(gradients):
        ...     print(len(gradients))
        ...     return space.aggregate_fn(gradients)
        >>> telling = space._replace(aggregate_fn=aggregate)
        >>> telling.aggregate_fn([np.ones(2), np.ones(2)])
        2
        array([2., 2.])
    """

    aggregate_fn: Callable[[Sequence[Any]], Any]
    num_elements_fn: Callable[[Any], int]
    tensor_id: Callable[[Any], int]
    zeros: Callable[[Any, Any], Any]
    ones_like: Callable[[Any], Any]


def numpy_vspace() -> VSpace:
    """Return the space of numpy arrays.

    Example:
        >>> import numpy as np
        >>> from geutil.gradients.tape import numpy_vspace
        >>> numpy_vspace().aggregate_fn([np.ones(2), np.ones(2)])
        array([2., 2.])
    """
    return VSpace(_sum, np.size, tensor_id, np.zeros, np.ones_like)


def _sum(arrays: Sequence[Array]) -> Array:
    total, *others = arrays
    for other in others:
        total = total + other
    return total
