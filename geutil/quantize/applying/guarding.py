"""What every insertion of FakeQuant ops is kept from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from geutil.errors import ArgumentTypeError, QuantizeError
from geutil.graph.edits import transaction
from geutil.graph.kinds import Graph, type_name
from geutil.graph.surroundings import count_ops, ops_since
from geutil.select.networks.training import training_ops
from geutil.transform.rewrite.liveness import Liveness
from geutil.transform.step_counter import check_step_variable


@contextmanager
def undone_on_error(graph: Graph) -> Iterator[None]:
    """Undo the edits of a block that raises; ops that it made count no more."""
    count = count_ops(graph)
    try:
        with transaction(graph):
            yield
    except BaseException:
        Liveness(graph).abandon(ops_since(graph, count))
        raise


def refuse_training_ops(graph: Graph) -> None:
    """Raise QuantizeError for a graph that holds gradients or optimizer ops."""
    found = training_ops(graph)
    if found:
        raise QuantizeError(
            f"'{found[0].name}' ({found[0].type}) belongs to gradients or an "
            "optimizer; insert quantization before gradients, into a graph that "
            "has none"
        )


def checked_delay(delay: Any, is_training: bool, step: Any = None) -> int:
    """Return the delay as a number.

    Raises:
        ArgumentTypeError: it is no number, or steps cannot be counted in `step`.
        QuantizeError: it is negative, or makes no sense.
    """
    if step is not None:
        check_step_variable(step)
    if delay is None:
        return 0
    if isinstance(delay, bool) or not isinstance(delay, int):
        raise ArgumentTypeError(
            f"quant_delay is a number of steps or None, not {type_name(delay)}"
        )
    if delay < 0:
        raise QuantizeError(f"quant_delay is {delay}; pass 0 or more")
    if delay and not is_training:
        raise QuantizeError("quant_delay is for training; pass is_training=True")
    return delay
