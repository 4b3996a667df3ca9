"""geutil: graph surgery for TensorFlow 2.

`import geutil as ge` serves code that was written for
`import tensorflow.contrib.graph_editor as ge`, and adds `transaction`, `verify` and
`allow_stale`. `geutil.model` opens, edits and saves models, `geutil.tflite` TFLite
files; `geutil.rewrite` applies rewrite rules; `geutil.batchnorm` folds batch
norms, and `geutil.quantize` simulates int8 and converts to it. `geutil.gradients` saves
memory in training, and `geutil.memory` predicts and measures it; `geutil.report` draws
graphs, reports and timelines. The names below are grouped by layer; see
CONTRIBUTING.md. All names but the errors are imported at first use.
"""

import typing

from geutil import lazy
from geutil.errors import (
    ArgumentTypeError,
    CycleError,
    FinalizedGraphError,
    GeutilError,
    RerouteError,
    SelectionError,
    StaleGraphError,
    TransformError,
    VerificationError,
)
from geutil.version import __version__

__all__ = [
    # errors
    "ArgumentTypeError",
    "CycleError",
    "FinalizedGraphError",
    "GeutilError",
    "RerouteError",
    "SelectionError",
    "StaleGraphError",
    "TransformError",
    "VerificationError",
    # L0: the graph
    "Violation",
    "allow_stale",
    "find_violations",
    "make_placeholder_from_dtype_and_shape",
    "make_placeholder_from_tensor",
    "ph",
    "placeholder_name",
    "transaction",
    "verify",
    # L1: looking
    "ControlOutputs",
    "OpMatcher",
    "SubGraphView",
    "can_be_regex",
    "check_cios",
    "compute_boundary_ts",
    "filter_ops",
    "filter_ops_from_regex",
    "filter_ts",
    "filter_ts_from_regex",
    "get_backward_walk_ops",
    "get_consuming_ops",
    "get_forward_walk_ops",
    "get_generating_ops",
    "get_name_scope_ops",
    "get_ops_ios",
    "get_tensors",
    "get_walks_intersection_ops",
    "get_walks_union_ops",
    "get_within_boundary_ops",
    "make_list_of_op",
    "make_list_of_t",
    "make_regex",
    "make_view",
    "make_view_from_scope",
    "op_type",
    "select_ops",
    "select_ops_and_ts",
    "select_ts",
    "sgv",
    "sgv_scope",
    # L2: rewiring
    "add_control_inputs",
    "bypass",
    "connect",
    "detach",
    "detach_control_inputs",
    "detach_control_outputs",
    "detach_inputs",
    "detach_outputs",
    "remove_control_inputs",
    "reroute_inputs",
    "reroute_ios",
    "reroute_outputs",
    "reroute_ts",
    "swap_inputs",
    "swap_ios",
    "swap_outputs",
    "swap_ts",
    # L3: rebuilding
    "Transformer",
    "TransformerInfo",
    "assign_renamed_collections_handler",
    "copy",
    "copy_op_handler",
    "copy_with_input_replacements",
    "graph_replace",
    "keep_t_if_possible_handler",
    "replace_t_with_placeholder_handler",
    "transform_op_if_inside_handler",
    # submodules
    "batchnorm",
    "capabilities",
    "edit",
    "gradients",
    "jobs",
    "match",
    "memory",
    "model",
    "pipeline",
    "quantize",
    "report",
    "reroute",
    "rewrite",
    "select",
    "subgraph",
    "tflite",
    "transform",
    "util",
    # the package
    "__version__",
]

if typing.TYPE_CHECKING:
    from geutil import (
        batchnorm,
        capabilities,
        edit,
        gradients,
        jobs,
        match,
        memory,
        model,
        pipeline,
        quantize,
        report,
        reroute,
        rewrite,
        select,
        subgraph,
        tflite,
        transform,
        util,
    )
    from geutil.edit import (
        bypass,
        connect,
        detach,
        detach_control_inputs,
        detach_control_outputs,
        detach_inputs,
        detach_outputs,
    )
    from geutil.graph import (
        Violation,
        allow_stale,
        find_violations,
        transaction,
        verify,
    )
    from geutil.match import OpMatcher, op_type
    from geutil.reroute import (
        add_control_inputs,
        remove_control_inputs,
        reroute_inputs,
        reroute_ios,
        reroute_outputs,
        reroute_ts,
        swap_inputs,
        swap_ios,
        swap_outputs,
        swap_ts,
    )
    from geutil.select import (
        can_be_regex,
        check_cios,
        compute_boundary_ts,
        filter_ops,
        filter_ops_from_regex,
        filter_ts,
        filter_ts_from_regex,
        get_backward_walk_ops,
        get_forward_walk_ops,
        get_name_scope_ops,
        get_ops_ios,
        get_walks_intersection_ops,
        get_walks_union_ops,
        get_within_boundary_ops,
        make_regex,
        select_ops,
        select_ops_and_ts,
        select_ts,
    )
    from geutil.subgraph import SubGraphView, make_view, make_view_from_scope
    from geutil.transform import (
        Transformer,
        TransformerInfo,
        assign_renamed_collections_handler,
        copy,
        copy_op_handler,
        copy_with_input_replacements,
        graph_replace,
        keep_t_if_possible_handler,
        replace_t_with_placeholder_handler,
        transform_op_if_inside_handler,
    )
    from geutil.util import (
        ControlOutputs,
        get_consuming_ops,
        get_generating_ops,
        get_tensors,
        make_list_of_op,
        make_list_of_t,
        make_placeholder_from_dtype_and_shape,
        make_placeholder_from_tensor,
        placeholder_name,
    )

    ph = make_placeholder_from_dtype_and_shape
    sgv = make_view
    sgv_scope = make_view_from_scope
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        exported=__all__,
        submodules=(
            "batchnorm",
            "capabilities",
            "edit",
            "gradients",
            "graph",
            "jobs",
            "match",
            "memory",
            "model",
            "pipeline",
            "quantize",
            "report",
            "reroute",
            "rewrite",
            "select",
            "subgraph",
            "tflite",
            "transform",
            "util",
        ),
        homes=(
            "graph",
            "util",
            "subgraph",
            "match",
            "select",
            "reroute",
            "edit",
            "transform",
        ),
        aliases={
            "ph": "make_placeholder_from_dtype_and_shape",
            "sgv": "make_view",
            "sgv_scope": "make_view_from_scope",
        },
    )

lazy.watch_what_exists(__name__)
lazy.provide(lazy.DRAWING, "geutil.report.pages", "html_of")
lazy.provide("model of a TFLite file", "geutil.model", "from_tflite")
lazy.provide("powers of a file", "geutil.capabilities.scan", "powers")
lazy.provide(
    "powers of a file without values",
    "geutil.capabilities.scan",
    "powers_without_values",
)
lazy.provide(
    "model without powers", "geutil.capabilities.without_powers", "without_powers"
)
