"""L3, rebuilding: copies of views, replacements, and the transformer behind both.

Names of `geutil.pipeline` can be imported from here, too.
"""

import typing

from geutil import lazy
from geutil.transform.state import TransformerInfo
from geutil.transform.transformer import (
    Transformer,
    assign_renamed_collections_handler,
    copy,
    copy_op_handler,
    copy_with_input_replacements,
    graph_replace,
    keep_t_if_possible_handler,
    replace_t_with_placeholder_handler,
    transform_op_if_inside_handler,
)

__all__ = [
    "Partition",
    "PartitionStage",
    "Placement",
    "Transformer",
    "TransformerInfo",
    "assign_renamed_collections_handler",
    "copy",
    "copy_op_handler",
    "copy_with_input_replacements",
    "graph_replace",
    "keep_t_if_possible_handler",
    "partition",
    "place",
    "replace_t_with_placeholder_handler",
    "transform_op_if_inside_handler",
]

if typing.TYPE_CHECKING:
    from geutil.pipeline.partitions import (
        Partition,
        PartitionStage,
        Placement,
        partition,
        place,
    )
else:
    __getattr__, __dir__ = lazy.names_of(
        __name__,
        {
            "geutil.pipeline.partitions": (
                *("Partition", "PartitionStage", "partition"),
                *("Placement", "place"),
            ),
        },
    )
