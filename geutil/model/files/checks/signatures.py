"""What an op type takes and gives, from its definition and a node's attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from geutil.graph.protos import OpDef, op_def_of
from geutil.model.errors import ModelError

Types: TypeAlias = tuple[int, ...]
"""Numbers of data types, one for each tensor; UNKNOWN where nothing tells it."""

UNKNOWN = 0
MOST_TENSORS = 2**20
"""No op yields more: a number beyond it is damage, and TensorFlow would allocate it."""

_FIRST_REFERENCE = 100


@dataclass(frozen=True)
class Signature:
    """The definition of an op type or of a function.

    Attributes:
        op_def: the definition.
    """

    op_def: OpDef

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The declaration of each attribute by name."""
        return {a.name: a for a in self.op_def.attr}

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The attributes without a default."""
        return tuple(
            a.name for a in self.op_def.attr if not a.HasField("default_value")
        )

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The input arguments."""
        return tuple(self.op_def.input_arg)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The output arguments."""
        return tuple(self.op_def.output_arg)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the attributes that have one."""
        return {
            a.name: a.default_value
            for a in self.op_def.attr
            if a.HasField("default_value")
        }

    @cached_property
    def fixed_inputs(self) -> Types | None:
        """The types of the inputs, if they are the same for each node."""
        return self._fixed(self.inputs)

    @cached_property
    def fixed_outputs(self) -> Types | None:
        """The types of the outputs, if they are the same for each node."""
        return self._fixed(self.outputs)

    def _fixed(self, args: Sequence[Any]) -> Types | None:
        if all(a.type and not a.number_attr for a in args):
            return tuple(base_type(a.type) for a in args)
        return None

    def input_types(self, attributes: Mapping[str, Any]) -> Types | None:
        """Return the types of a node's inputs, or None if not even their number shows.

        Raises:
            ModelError: the attributes ask for an absurd number.
        """
        if self.fixed_inputs is not None:
            return self.fixed_inputs
        return self._flat(self.inputs, attributes)

    def output_types(self, attributes: Mapping[str, Any]) -> Types | None:
        """Return the types of a node's outputs; see `input_types`."""
        if self.fixed_outputs is not None:
            return self.fixed_outputs
        return self._flat(self.outputs, attributes)

    def named_outputs(self, attributes: Mapping[str, Any]) -> dict[str, Types | None]:
        """Return the types of each output argument by its name."""
        return {arg.name: self._arg(arg, attributes) for arg in self.outputs}

    def _flat(self, args: Sequence[Any], attributes: Mapping[str, Any]) -> Types | None:
        flat: list[int] = []
        for arg in args:
            types = self._arg(arg, attributes)
            if types is None:
                return None
            flat += types
        return tuple(flat)

    def _arg(self, arg: Any, attributes: Mapping[str, Any]) -> Types | None:
        if arg.type_list_attr:
            value = self._value(arg.type_list_attr, attributes)
            if value is None or value.WhichOneof("value") != "list":
                return None
            return tuple(base_type(t) for t in value.list.type)
        kind = base_type(arg.type)
        if arg.type_attr:
            value = self._value(arg.type_attr, attributes)
            kind = UNKNOWN if value is None else base_type(value.type)
        if not arg.number_attr:
            return (kind,)
        value = self._value(arg.number_attr, attributes)
        if value is None or value.WhichOneof("value") != "i":
            return None
        if not 0 <= value.i <= MOST_TENSORS:
            raise ModelError(
                f"attribute '{arg.number_attr}' asks for {value.i} tensors; accepted "
                f"are 0 to {MOST_TENSORS}"
            )
        return (kind,) * value.i

    def _value(self, name: str, attributes: Mapping[str, Any]) -> Any:
        value = attributes.get(name)
        return self.defaults.get(name) if value is None else value


class Signatures:
    """Looks op types up: functions of a library first, then TensorFlow's own ops.

    Args:
        functions: the functions of the library by name.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.functions = functions
        self._known: dict[str, Signature | None] = {}

    def get(self, op_type: str) -> Signature | None:
        """Return the signature of an op type, or None if nobody knows it."""
        try:
            return self._known[op_type]
        except KeyError:
            pass
        function = self.functions.get(op_type)
        op_def = op_def_of(op_type) if function is None else function.signature
        signature = None if op_def is None else Signature(op_def)
        self._known[op_type] = signature
        return signature


def base_type(number: int) -> int:
    """Return the number of a data type without its mark for references."""
    return number - _FIRST_REFERENCE if number > _FIRST_REFERENCE else number
