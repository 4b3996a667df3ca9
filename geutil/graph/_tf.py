"""TensorFlow's private names: the one module that imports any.

TensorFlow promises nothing of them. Each is bound once, so that a version that moves or
drops one is met here. On TensorFlow 2.16 to 2.21 all of them are in the same place, and
`import tensorflow` alone imports the modules that they are in.
"""

from __future__ import annotations

from tensorflow.core.framework.function_pb2 import FunctionDef, FunctionDefLibrary
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.core.framework.types_pb2 import DataType
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.function.polymorphism.function_type import (
    from_structured_signature,
)
from tensorflow.core.function.trace_type.default_types import Literal as TraceLiteral
from tensorflow.core.protobuf.control_flow_pb2 import ValuesDef
from tensorflow.core.protobuf.device_properties_pb2 import NamedDevice
from tensorflow.core.protobuf.meta_graph_pb2 import AssetFileDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow.core.protobuf.saved_object_graph_pb2 import SavedObjectGraph
from tensorflow.python.autograph.core.ag_ctx import Status as AutographStatus
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import autograph_artifact, tf_convert
from tensorflow.python.client.pywrap_tf_session import (
    TF_DeleteFunction,
    TF_FunctionToFunctionDef,
    TF_GetBuffer,
    TF_GraphToFunction_wrapper,
)
from tensorflow.python.client.session import BaseSession
from tensorflow.python.distribute.distribute_utils import value_container
from tensorflow.python.eager.backprop_util import IsTrainable
from tensorflow.python.eager.context import FunctionCallOptions
from tensorflow.python.eager.context import context as eager_context
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.eager.polymorphic_function.attributes import (
    MONOMORPHIC_FUNCTION_ALLOWLIST,
)
from tensorflow.python.eager.polymorphic_function.concrete_function import (
    ConcreteFunction,
)
from tensorflow.python.eager.polymorphic_function.function_type_utils import (
    canonicalize_function_inputs,
)
from tensorflow.python.eager.record import (
    could_possibly_record,
    record_operation,
    should_record_backprop,
    stop_recording,
)
from tensorflow.python.framework import function as version_1_functions
from tensorflow.python.framework import ops
from tensorflow.python.framework.c_api_util import tf_buffer
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.framework.cpp_shape_inference_pb2 import CppShapeInferenceResult
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph
from tensorflow.python.framework.kernels import get_registered_kernels_for_op
from tensorflow.python.framework.op_def_registry import get as get_op_def
from tensorflow.python.grappler.cluster import Cluster
from tensorflow.python.grappler.tf_optimizer import OptimizeGraph
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops.control_flow_ops import CondContext, WhileContext
from tensorflow.python.ops.control_flow_util import (
    GetContainingWhileContext,
    GetOutputContext,
    GraphOrParentsInXlaContext,
    IsLoopEnter,
    IsSwitch,
)
from tensorflow.python.ops.default_gradient import (
    shape_and_dtype,
    supports_default_grad,
)
from tensorflow.python.ops.handle_data_util import (
    copy_handle_data,
    get_handle_data,
    get_resource_handle_data,
    set_handle_data,
)
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    UninitializedVariable,
    variable_accessed,
)
from tensorflow.python.util._pywrap_util_port import IsMklEnabled
from tensorflow.python.util.object_identity import Reference

default_graph_stack = ops._default_graph_stack
get_gradient_function = ops.get_gradient_function
gradient_registry = ops.gradient_registry

default_grad_ys = gradients_util._DefaultGradYs
gradients_helper = gradients_util._GradientsHelper
symbolic_gradient = gradients_util._SymGrad

Version1FuncGraph = version_1_functions._FuncGraph

__all__ = [
    # How graphs and models are written down. `geutil.graph.protos` shows those of use
    # to other layers, along with what `tf.compat.v1` shows.
    "AssetFileDef",
    "CppShapeInferenceResult",
    "DataType",
    "FunctionDef",
    "FunctionDefLibrary",
    "OpDef",
    "SavedModel",
    "SavedObjectGraph",
    "TensorProto",
    "TensorShapeProto",
    "ValuesDef",
    "VariableDef",
    "get_op_def",
    # Functions: their graphs, their signatures, and their way into C++ and back.
    "AtomicFunction",
    "ConcreteFunction",
    "FuncGraph",
    "MONOMORPHIC_FUNCTION_ALLOWLIST",
    "TF_DeleteFunction",
    "TF_FunctionToFunctionDef",
    "TF_GetBuffer",
    "TF_GraphToFunction_wrapper",
    "TraceLiteral",
    "Version1FuncGraph",
    "canonicalize_function_inputs",
    "from_structured_signature",
    "function_def_to_graph",
    "tf_buffer",
    # Modules and a class that geutil puts wrappers into, to learn when a graph becomes
    # a function or is run. Whoever would bind the function itself would miss them.
    "BaseSession",
    "atomic_function",
    "version_1_functions",
    # Gradients: the registry, the engine behind `tf.gradients`, and tapes.
    "IsTrainable",
    "could_possibly_record",
    "default_grad_ys",
    "get_gradient_function",
    "gradient_registry",
    "gradients_helper",
    "pack_tangents",
    "record_operation",
    "shape_and_dtype",
    "should_record_backprop",
    "stop_recording",
    "supports_default_grad",
    "symbolic_gradient",
    # Loops and conditionals of version 1 know in Python which ops they hold.
    "CondContext",
    "GetContainingWhileContext",
    "GetOutputContext",
    "IsLoopEnter",
    "IsSwitch",
    "WhileContext",
    # Variables, and what is behind a resource handle.
    "ResourceVariable",
    "UninitializedVariable",
    "copy_handle_data",
    "get_handle_data",
    "get_resource_handle_data",
    "set_handle_data",
    # Where a call is made: the graphs being built, autograph, XLA, the process.
    "AutographStatus",
    "Cluster",
    "GraphOrParentsInXlaContext",
    "IsMklEnabled",
    "NamedDevice",
    "OptimizeGraph",
    "autograph_artifact",
    "control_status_ctx",
    "default_graph_stack",
    "FunctionCallOptions",
    "eager_context",
    "get_registered_kernels_for_op",
    "is_op_determinism_enabled",
    "tf_convert",
    # A tensor as a key.
    "Reference",
    # Variables of a strategy, which tapes watch.
    "value_container",
    "variable_accessed",
]
