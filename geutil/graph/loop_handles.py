"""What is behind the resources that leave a loop.

TensorFlow's tracer notes it on the loop; an import does not. A second gradient of a
loop that reads a variable needs it.
"""

from __future__ import annotations

import tensorflow as tf

from geutil.graph.kinds import Graph
from geutil.graph.op_types import LOOPS
from geutil.graph.placeholders import copy_handle_data


def carry_loop_handles(graph: Graph) -> None:
    """Let each resource that leaves a loop be like the one that enters it there.

    Cost: linear in the ops.
    """
    for op in graph.get_operations():
        if op.type in LOOPS:
            for before, after in zip(op.inputs, op.outputs, strict=True):
                if before.dtype == tf.resource:
                    copy_handle_data(before, after)
