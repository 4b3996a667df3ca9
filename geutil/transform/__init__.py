"""L3, rebuilding: copies of views, replacements, and the transformer behind both."""

from geutil.transform.copying import (
    copy,
    copy_with_input_replacements,
    graph_replace,
)
from geutil.transform.handlers import (
    assign_renamed_collections_handler,
    copy_op_handler,
    keep_t_if_possible_handler,
    replace_t_with_placeholder_handler,
    transform_op_if_inside_handler,
)
from geutil.transform.partitioning import Partition, PartitionStage, partition
from geutil.transform.placing import Placement, place
from geutil.transform.state import TransformerInfo
from geutil.transform.transformer import Transformer

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
