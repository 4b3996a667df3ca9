"""The public surface, frozen: names, signatures, and what every docstring holds.

A change here is a change for users: note it in CHANGELOG.md.
"""

import importlib
import inspect
import re
import types

import pytest
import tensorflow as tf

import geutil as ge
from tests.documented import frozen, signature

BUILTIN = {
    "ArgumentTypeError": TypeError,
    "CycleError": ValueError,
    "FinalizedGraphError": RuntimeError,
    "GeutilError": Exception,
    "RerouteError": ValueError,
    "SelectionError": ValueError,
    "StaleGraphError": RuntimeError,
    "TransformError": ValueError,
    "VerificationError": ValueError,
}
ERRORS = list(BUILTIN)

# Packages with names of their own; see the tests of each.
PACKAGES = [
    "batchnorm",
    "capabilities",
    "gradients",
    "jobs",
    "memory",
    "model",
    "pipeline",
    "quantize",
    "report",
    "rewrite",
    "tflite",
]
# Names of one submodule that another has, too.
EXTRA = {
    "transform": ["Partition", "PartitionStage", "Placement", "partition", "place"],
    "select": ["ControlOutputs", "by_device"],
    "util": [
        "ListView",
        "check_graphs",
        "get_unique_graph",
        "is_iterable",
        "scope_basename",
        "scope_dirname",
        "scope_finalize",
    ],
}
ALIASES = {
    "sgv": "make_view",
    "sgv_scope": "make_view_from_scope",
    "ph": "make_placeholder_from_dtype_and_shape",
}

# What code written for tf.contrib.graph_editor finds, flat and in its submodule, and
# what was added. A line that is indented continues the one before.
SIGNATURES = {
    "select": """
can_be_regex(obj: object) -> bool
check_cios(control_inputs: bool = False, control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None) -> tuple[bool, ControlOutputs | None]
compute_boundary_ts(ops: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]
filter_ops(ops: Any, positive_filter: bool | OpFilter) -> list[Operation]
filter_ops_from_regex(ops: Any, regex: str | re.Pattern[str]) -> list[Operation]
filter_ts(ops: Any, positive_filter: bool | TensorFilter) -> list[Tensor]
filter_ts_from_regex(ops: Any, regex: str | re.Pattern[str]) -> list[Tensor]
get_backward_walk_ops(seed_ops: Any, inclusive: bool = True, within_ops: Any = None,
    within_ops_fn: OpPredicate | None = None, stop_at_ts: Any = (), control_inputs: bool
    = False) -> list[Operation]
get_forward_walk_ops(seed_ops: Any, inclusive: bool = True, within_ops: Any = None,
    within_ops_fn: OpPredicate | None = None, stop_at_ts: Any = (), control_outputs:
    ControlOutputs | None = None) -> list[Operation]
get_name_scope_ops(ops: Any, scope: str) -> list[Operation]
get_ops_ios(ops: Any, control_inputs: bool = False, control_outputs: ControlOutputs |
    None = None, control_ios: ControlOutputs | None = None) -> list[Operation]
get_walks_intersection_ops(forward_seed_ops: Any, backward_seed_ops: Any,
    forward_inclusive: bool = True, backward_inclusive: bool = True, within_ops: Any =
    None, within_ops_fn: OpPredicate | None = None, control_inputs: bool = False,
    control_outputs: ControlOutputs | None = None, control_ios: ControlOutputs | None =
    None) -> list[Operation]
get_walks_union_ops(forward_seed_ops: Any, backward_seed_ops: Any, forward_inclusive:
    bool = True, backward_inclusive: bool = True, within_ops: Any = None, within_ops_fn:
    OpPredicate | None = None, control_inputs: bool = False, control_outputs:
    ControlOutputs | None = None, control_ios: ControlOutputs | None = None) ->
    list[Operation]
get_within_boundary_ops(ops: Any, seed_ops: Any, boundary_ops: Any = (), inclusive: bool
    = True, control_inputs: bool = False, control_outputs: ControlOutputs | None = None,
    control_ios: ControlOutputs | None = None) -> list[Operation]
make_regex(obj: str | re.Pattern[str]) -> re.Pattern[str]
select_ops(*args: Any, **kwargs: Any) -> list[Operation]
select_ops_and_ts(*args: Any, **kwargs: Any) -> tuple[list[Operation], list[Tensor]]
select_ts(*args: Any, **kwargs: Any) -> list[Tensor]
""",
    "reroute": """
add_control_inputs(op: Operation, cops: Any) -> None
remove_control_inputs(op: Operation, cops: Any) -> None
reroute_inputs(sgv0: Any, sgv1: Any) -> Views
reroute_ios(sgv0: Any, sgv1: Any) -> Views
reroute_outputs(sgv0: Any, sgv1: Any) -> Views
reroute_ts(ts0: Any, ts1: Any, can_modify: Any = None, cannot_modify: Any = None) -> int
swap_inputs(sgv0: Any, sgv1: Any) -> Views
swap_ios(sgv0: Any, sgv1: Any) -> Views
swap_outputs(sgv0: Any, sgv1: Any) -> Views
swap_ts(ts0: Any, ts1: Any, can_modify: Any = None, cannot_modify: Any = None) -> int
""",
    "edit": """
bypass(sgv: Any) -> tuple[SubGraphView, list[Tensor]]
connect(sgv0: Any, sgv1: Any, disconnect_first: bool = False) -> tuple[SubGraphView,
    SubGraphView]
detach(sgv: Any, control_inputs: bool = False, control_outputs: ControlOutputs | None =
    None, control_ios: ControlOutputs | None = None) -> tuple[SubGraphView,
    list[Tensor], list[Tensor]]
detach_control_inputs(sgv: Any) -> None
detach_control_outputs(sgv: Any, control_outputs: ControlOutputs) -> None
detach_inputs(sgv: Any, control_inputs: bool = False) -> tuple[SubGraphView,
    list[Tensor]]
detach_outputs(sgv: Any, control_outputs: ControlOutputs | None = None) ->
    tuple[SubGraphView, list[Tensor]]
""",
    "subgraph": """
make_view(*args: Any, **kwargs: Any) -> SubGraphView
make_view_from_scope(scope: str, graph: Graph) -> SubGraphView
SubGraphView.__init__(self, inside_ops: Any = (), passthrough_ts: Any = ()) -> None
SubGraphView.from_parts(cls, graph: Graph | None, ops: list[Operation],
    inputs: list[Tensor], outputs: list[Tensor]) -> SubGraphView
SubGraphView.graph: property
SubGraphView.ops: property
SubGraphView.inputs: property
SubGraphView.outputs: property
SubGraphView.connected_inputs: property
SubGraphView.connected_outputs: property
SubGraphView.passthroughs: property
SubGraphView.consumers(self) -> list[Operation]
SubGraphView.op(self, op_id: int) -> Operation
SubGraphView.is_passthrough(self, t: Tensor) -> bool
SubGraphView.input_index(self, t: Tensor) -> int
SubGraphView.output_index(self, t: Tensor) -> int
SubGraphView.find_op_by_name(self, op_name: str) -> Operation
SubGraphView.copy(self) -> SubGraphView
SubGraphView.remap_inputs(self, new_input_indices: Iterable[int | Tensor]) ->
    SubGraphView
SubGraphView.remap_outputs(self, new_output_indices: Iterable[int | Tensor]) ->
    SubGraphView
SubGraphView.remap(self, new_input_indices: Iterable[int | Tensor] | None = None,
    new_output_indices: Iterable[int | Tensor] | None = None) -> SubGraphView
SubGraphView.remap_default(self, remove_input_map: bool = True, remove_output_map: bool
    = True) -> SubGraphView
SubGraphView.remap_outputs_make_unique(self) -> SubGraphView
SubGraphView.remap_outputs_to_consumers(self) -> SubGraphView
SubGraphView.remove_unused_ops(self, control_inputs: bool = True) -> SubGraphView
""",
    "transform": """
assign_renamed_collections_handler(info: TransformState, elem: Element, elem_: Element)
    -> None
copy(sgv: Any, dst_graph: Graph | None = None, dst_scope: str = , src_scope: str = ,
    reuse_dst_scope: bool = False) -> tuple[SubGraphView, TransformerInfo]
copy_op_handler(info: TransformState, op: Operation, new_inputs: Sequence[Tensor],
    copy_shape: bool = False, nodedef_fn: Callable[[Any], Any] | None = None) ->
    tuple[Operation, list[Tensor]]
copy_with_input_replacements(sgv: Any, replacement_ts: Replacements, dst_graph: Graph |
    None = None, dst_scope: str = , src_scope: str = , reuse_dst_scope: bool =
    False) -> tuple[SubGraphView, TransformerInfo]
graph_replace(target_ts: Any, replacement_ts: Replacements, dst_scope: str = ,
    src_scope: str = , reuse_dst_scope: bool = False, dst_graph: Graph | None = None)
    -> Any
keep_t_if_possible_handler(info: TransformState, t: Tensor) -> Tensor
replace_t_with_placeholder_handler(info: TransformState, t: Tensor) -> Tensor
transform_op_if_inside_handler(info: TransformState, op: Operation | None,
    keep_if_possible: bool = True) -> Operation | None
Transformer.__init__(self) -> None
Transformer.__call__(self, sgv: Any, dst_graph: Graph, dst_scope: str, src_scope: str =
    , reuse_dst_scope: bool = False) -> tuple[SubGraphView, TransformerInfo]
TransformerInfo.__init__(self, info: TransformState) -> None
TransformerInfo.transformed(self, original: Any, missing_fn: MissingFunction | None =
    None) -> Any
TransformerInfo.original(self, transformed: Any, missing_fn: MissingFunction | None =
    None) -> Any
""",
    "util": """
make_placeholder_from_dtype_and_shape(dtype: Any, shape: Any = None, scope: str | None =
    None, prefix: str = geph) -> Tensor
make_placeholder_from_tensor(t: Tensor, scope: str | None = None, prefix: str = geph)
    -> Tensor
placeholder_name(t: Tensor | None = None, scope: str | None = None, prefix: str =
    geph) -> str
get_consuming_ops(ts: Any) -> list[Operation]
get_generating_ops(ts: Any) -> list[Operation]
get_tensors(graph: Graph) -> list[Tensor]
make_list_of_op(ops: Any, check_graph: bool = True, allow_graph: bool = True, ignore_ts:
    bool = False) -> list[Operation]
make_list_of_t(ts: Any, check_graph: bool = True, allow_graph: bool = True, ignore_ops:
    bool = False) -> list[Tensor]
ControlOutputs.__init__(self, graph: Graph) -> None
ControlOutputs.update(self) -> ControlOutputs
ControlOutputs.get_all(self) -> dict[Operation, list[Operation]]
ControlOutputs.get(self, op: Operation) -> list[Operation]
ControlOutputs.graph: property
""",
    "match": """
op_type(op_types: str | Iterable[str], op: Operation | None = None) -> Any
OpMatcher.__init__(self, positive_filter: Any) -> None
OpMatcher.__call__(self, op: Operation) -> bool
OpMatcher.input_ops(self, *args: Any) -> OpMatcher
OpMatcher.control_input_ops(self, *args: Any) -> OpMatcher
OpMatcher.output_ops(self, *args: Any) -> OpMatcher
""",
    # Of no submodule.
    "": """
allow_stale(graph: Graph) -> Iterator[None]
find_violations(graph_or_ops: Graph | Iterable[Operation]) -> list[Violation]
ph(dtype: Any, shape: Any = None, scope: str | None = None, prefix: str = geph) ->
    Tensor
transaction(graph: Graph) -> Iterator[None]
verify(graph_or_ops: Graph | Iterable[Operation]) -> None
sgv(*args: Any, **kwargs: Any) -> SubGraphView
sgv_scope(scope: str, graph: Graph) -> SubGraphView
""",
}
TABLES = {module: frozen(signatures) for module, signatures in SIGNATURES.items()}
SIGNED = {name: line for table in TABLES.values() for name, line in table.items()}
NAMES = {m: {name.partition(".")[0] for name in table} for m, table in TABLES.items()}
CLASSES = {name.partition(".")[0] for name in SIGNED if "." in name}
FLAT = {"Violation", "__version__", *NAMES.pop("")}


def public_functions() -> dict[str, object]:
    members = {name: getattr(ge, name) for name in ge.__all__}
    return {name: m for name, m in members.items() if inspect.isfunction(m)}


def public_methods() -> dict[str, object]:
    return {
        f"{cls}.{name}": member
        for cls in CLASSES
        for name, member in vars(getattr(ge, cls)).items()
        if (not name.startswith("_") or name in ("__init__", "__call__"))
        and isinstance(
            member, types.FunctionType | property | classmethod | staticmethod
        )
    }


MEMBERS = {**public_functions(), **public_methods()}
DOCUMENTED = sorted({*FLAT, *set().union(*NAMES.values())} - {*ALIASES, "__version__"})


def test_the_public_names():
    expected = [*ERRORS, *NAMES, *PACKAGES, *FLAT, *set().union(*NAMES.values())]
    assert sorted(ge.__all__) == sorted(expected)


FORMER_HOMES = {
    "geutil.gradients": ("geutil.pipeline", ["PipelinedStep", "pipelined"]),
    "geutil.model": (
        "geutil.jobs",
        ["BatchEntry", "BatchReport", "BatchStep", "RayExecutor", "batch"],
    ),
    "geutil.model ": ("geutil.capabilities", ["Power", "Powers", "powers"]),
    "geutil.transform": (
        "geutil.pipeline",
        ["Partition", "PartitionStage", "Placement", "partition", "place"],
    ),
    "geutil.transform.rewrite": ("geutil.rewrite", None),
    "geutil.transform.rewrite.rules": ("geutil.rewrite.rules", None),
}


@pytest.mark.parametrize("former", FORMER_HOMES)
def test_names_can_be_imported_from_where_they_were(former):
    home, names = FORMER_HOMES[former]
    before, now = map(importlib.import_module, (former.strip(), home))
    names = names or now.__all__
    assert sorted(names) == sorted(set(names) & {*before.__all__, *now.__all__})
    for name in set(names) - {"rules"}:
        assert getattr(before, name) is getattr(now, name)
    assert {*names} <= {*dir(before)}


def test_the_flat_names_that_are_not_exported_are_modules():
    public = {n for n in vars(ge) if not n.startswith("_")} - set(ge.__all__)
    others = [n for n in sorted(public) if not inspect.ismodule(getattr(ge, n))]
    assert others == []


def test_submodules_export_what_is_flat_too_and_nothing_else():
    for module, names in NAMES.items():
        home = importlib.import_module(f"geutil.{module}")
        assert getattr(ge, module) is home
        assert sorted(home.__all__) == sorted([*names, *EXTRA.get(module, [])])
        for name in names:
            assert callable(getattr(ge, name)), name
            assert getattr(home, name) is getattr(ge, name), name


def test_private_names_that_published_code_reads():
    with tf.Graph().as_default():
        x = tf.constant([1.0], name="x")
        parts = tf.split(tf.add(x, x), 1)
    ops = [x.op, x.consumers()[0], parts[0].op]
    read = ge.select._get_input_ts(ops)
    assert [t.name for t in read] == ["x:0", "split/split_dim:0", "Add:0"]
    assert [t.name for t in ge.select._get_output_ts(ops)] == [
        "x:0",
        "Add:0",
        "split:0",
    ]


def test_aliases():
    for alias, name in ALIASES.items():
        assert getattr(ge, alias) is getattr(ge, name), alias


def test_signatures_of_functions_and_methods_which_have_docstrings():
    found = {
        name: f"{name}: property"
        if isinstance(member, property)
        else f"{name}{signature(getattr(member, '__func__', member))}"
        for name, member in MEMBERS.items()
    }
    assert found == SIGNED
    # The docstring of a class describes its __init__.
    names = [name for name in MEMBERS if not name.endswith(".__init__")]
    assert [name for name in names if not inspect.getdoc(MEMBERS[name])] == []


def test_the_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\w|\.)*", ge.__version__)


def test_read_only_aliases_of_transformer_info():
    # Published code that cannot change any more reads them.
    for name in ("_transformed_ops", "_transformed_ts"):
        member = vars(ge.TransformerInfo)[name]
        assert isinstance(member, property), name
        assert member.fset is None, name


# -- errors ----------------------------------------------------------------------------


def test_errors_are_caught_as_the_builtin_that_old_code_catches():
    for name, builtin in BUILTIN.items():
        error = getattr(ge, name)
        assert issubclass(error, ge.GeutilError), name
        assert issubclass(error, builtin), name
        assert error.__doc__, name
    assert issubclass(ge.CycleError, ge.RerouteError)
    assert ge.CycleError("message", ("a", "a")).cycle == ("a", "a")


# -- docstrings ------------------------------------------------------------------------

# Nothing that a caller can do wrong is refused here.
NOTHING_TO_RAISE = {
    "TransformerInfo",  # made by the transformer; its methods say what they raise
    "Violation",
    "assign_renamed_collections_handler",
    "can_be_regex",
    "copy_op_handler",
    "keep_t_if_possible_handler",
    "make_placeholder_from_dtype_and_shape",
    "replace_t_with_placeholder_handler",
    "transform_op_if_inside_handler",
}
# These look at no more than their arguments.
VISITS_NO_GRAPH = NOTHING_TO_RAISE | {
    "OpMatcher",  # an op and its neighbours
    "allow_stale",
    "check_cios",
    "make_placeholder_from_tensor",
    "make_regex",
    "op_type",
    "placeholder_name",
}


def documentation(name: str) -> str:
    """Return the docstring, of a class with those of its methods."""
    member = getattr(ge, name)
    texts = [inspect.getdoc(member) or ""]
    if inspect.isclass(member):
        methods = inspect.getmembers(member, inspect.isfunction)
        texts += [inspect.getdoc(method) or "" for _, method in methods]
    text = "\n".join(texts)
    # "The arguments, result, errors and cost are those of `swap_inputs`."
    reference = re.search(r"errors\s+and\s+cost\s+are\s+those\s+of\s+`(\w+)`", text)
    return text + documentation(reference[1]) if reference else text


def test_docstrings_have_an_example_errors_and_a_cost():
    lacking = []
    for name in DOCUMENTED:
        own, whole = inspect.getdoc(getattr(ge, name)) or "", documentation(name)
        parts = [
            ("Example", own, r"^Example:\n    >>> ", set()),
            ("Raises", whole, r"^Raises:\n    \w", NOTHING_TO_RAISE),
            ("Cost", whole, r"^Cost: \w|\bLinear\b", VISITS_NO_GRAPH),
        ]
        lacking += [
            (name, part)
            for part, text, pattern, exempt in parts
            if name not in exempt and not re.search(pattern, text, re.M)
        ]
    assert lacking == []


def test_errors_that_docstrings_name_exist():
    for name in DOCUMENTED:
        for section in re.findall(
            r"^Raises:\n((?:    .*\n?)+)", documentation(name), re.MULTILINE
        ):
            for error in re.findall(r"\b[A-Z]\w+Error\b", section):
                assert error in ERRORS, f"{name} names {error}"
