"""Types of ops that several packages tell apart, each table once.

Types of version 1 (`RefEnter`, `Variable`) stand beside those that took their place.
"""

from __future__ import annotations

from functools import cache


def types_in(names: str) -> frozenset[str]:
    """Return the types of ops that a text names."""
    return frozenset(names.split())


ADDITIONS = frozenset(("Add", "AddV2"))
"""Sums of two tensors."""
SUMS = ADDITIONS | {"AddN"}
"""Sums of two or more tensors."""
BIAS_ADDITIONS = ADDITIONS | {"BiasAdd"}
"""Ops that add a bias, or other tensors."""
MATRIX_PRODUCTS = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"))
"""Products of matrices, or of stacks of matrices."""
SHIFTS = BIAS_ADDITIONS | {"Sub"}
"""Ops that shift values by others."""
SCALINGS = frozenset(("Mul", "RealDiv"))
"""Ops that scale values by others."""
SELECTS = frozenset(("Select", "SelectV2"))
"""Ops that choose element by element."""
LOOKUPS = frozenset(
    ("Gather", "GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd")
)
"""Ops that, where their first input is a parameter, look rows up in it."""
UNIFORM_DRAWS = frozenset(
    (
        "RandomUniform",
        "StatefulUniform",
        "StatelessRandomUniform",
        "StatelessRandomUniformV2",
    )
)
"""Ops that draw floats evenly from 0 to 1."""
NORMAL_DRAWS = frozenset(
    (
        "RandomStandardNormal",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatelessRandomNormal",
        "StatelessRandomNormalV2",
        "StatelessTruncatedNormal",
        "StatelessTruncatedNormalV2",
        "TruncatedNormal",
    )
)
"""Ops that draw floats around 0."""
REDUCTIONS_OVER_REPLICAS = frozenset(
    (
        "CollectiveReduce",
        "CollectiveReduceV2",
        "CollectiveReduceV3",
        "CrossReplicaSum",
        "NcclAllReduce",
    )
)
"""Ops that reduce their first input over replicas; the others are keys and tokens."""

FUSED_NORMS = frozenset(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"))
"""Batch norms that are a single op."""
FAKE_QUANT = frozenset(
    (
        "FakeQuantWithMinMaxArgs",
        "FakeQuantWithMinMaxVars",
        "FakeQuantWithMinMaxVarsPerChannel",
    )
)
"""Ops that round values to steps, as integers would."""
CONVOLUTIONS_2D = frozenset(("Conv2D", "DepthwiseConv2dNative"))
"""Convolutions of images."""

CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
"""Ops that call a function and do nothing else."""
LOOPS = frozenset(("While", "StatelessWhile"))
"""Loops of functions."""
BRANCHINGS = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
"""Conditionals of functions."""
PYTHON_CALLS = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))
"""Ops that call a Python function, which no file can hold."""

ENTERS = frozenset(("Enter", "RefEnter"))
"""How a tensor gets into a loop of version 1."""
MERGES = frozenset(("Merge", "RefMerge"))
"""Where ways of version 1 meet: a loop's rounds, or branches."""
NEXT_ITERATIONS = frozenset(("NextIteration", "RefNextIteration"))
"""How a tensor gets into the next round of a loop of version 1."""
SWITCHES = frozenset(("Switch", "RefSwitch"))
"""Where ways of version 1 part."""
VERSION_1_FLOW = ENTERS | MERGES | SWITCHES
"""Control flow of version 1: loops and branches."""

SHAPE_READERS = frozenset(("Rank", "Shape", "ShapeN", "Size"))
"""Ops that read the shape of a tensor and tell it."""
VALUE_BLIND = SHAPE_READERS | {"OnesLike", "ZerosLike"}
"""Ops that read only the shape of a tensor.

Where the shape is known, Grappler makes constants of them, and who else reads the
tensor is left alone with it.
"""

AXES = frozenset(("BroadcastGradientArgs",))
"""Ops that yield axes of tensors with the shapes that they read."""
FORWARDING = frozenset(
    (
        "Assign",
        "AssignAdd",
        "AssignSub",
        "Bitcast",
        "CheckNumerics",
        "DestroyTemporaryVariable",
        "EnsureShape",
        "Enter",
        "Exit",
        "ExpandDims",
        "Identity",
        "LoopCond",
        "NextIteration",
        "PlaceholderWithDefault",
        "PreventGradient",
        "RefEnter",
        "RefExit",
        "RefIdentity",
        "RefNextIteration",
        "Reshape",
        "Snapshot",
        "Squeeze",
        "StopGradient",
    )
)
"""Ops of which the output is the first input, in the same buffer, whatever its size."""
LIST_ELEMENTS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Ops that put an element into a list, and which of their inputs that is."""

PLACEHOLDERS = frozenset(("Placeholder", "PlaceholderV2"))
"""Placeholders that have to be fed."""
REF_VARIABLES = frozenset(("Variable", "VariableV2"))
"""Variables of version 1 that are no resources."""
VARIABLES = REF_VARIABLES | {"VarHandleOp"}
"""Variables of both kinds."""
ASSIGNMENTS = frozenset(("Assign", "AssignVariableOp"))
"""Ops that give a variable a new value."""
INCREMENTS = frozenset(
    ("AssignAdd", "AssignAddVariableOp", "AssignSub", "AssignSubVariableOp")
)
"""Ops that add something to a variable, or subtract it."""

RANDOM_STATE = frozenset(
    (
        "RngReadAndSkip",
        "RngSkip",
        "StatefulRandomBinomial",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
    )
)
"""Ops that draw random numbers from a generator, a variable, and move it on."""
_RANDOM = ("Multinomial", "Parameterized", "Random", "Stateless", "Truncated")
_DRAWN = ("Binomial", "Gamma", "Multinomial", "Normal", "Poisson", "Shuffle", "Uniform")


@cache
def is_random(kind: str) -> bool:
    """Return whether ops of a type draw random numbers."""
    if kind in RANDOM_STATE:
        # RngSkip moves the state on and draws nothing.
        return kind != "RngSkip"
    if "SampleDistortedBoundingBox" in kind:
        return True
    return kind.startswith(_RANDOM) and any(word in kind for word in _DRAWN)
