"""The core of a model: an editable graph with named ends, its signatures, its calls.

`geutil.model.Model` shows the operations to users; they import this class, never that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import tensorflow as tf

from geutil.errors import ModelError
from geutil.graph import functions, keras_calls, replicas
from geutil.graph.state import fingerprint
from geutil.graph.types import Graph, Operation, Tensor, require_tensor, type_name
from geutil.lazy import Shown
from geutil.model import programs, to_graph
from geutil.model.inference_form import StripReport
from geutil.model.programs import ModelProgram, SharedState, check_initialized
from geutil.model.sources.objects import Source
from geutil.model.to_graph import GraphParts, make_sink, materialize
from geutil.select.networks.data import batches, joined, one_batch
from geutil.select.walks import get_backward_walk_ops

Opened = TypeVar("Opened")


class Inputs(Mapping[str, Tensor]):
    """The inputs of a model by name, in order: placeholders of its graph."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"{{{_listed(self)}}}"


class Outputs(MutableMapping[str, Tensor]):
    """The outputs of a model by name, in order.

    An output follows the edits of the graph: `geutil.reroute_ts(new, outputs["y"])`
    makes `new` the output. Assigning does the same; assigning to a new name adds an
    output, and deleting takes one away.
    """

    def __init__(
        self, graph: Graph, inputs: Inputs, sinks: Mapping[str, Operation]
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._sinks = dict(sinks)
        self._publish()

    @property
    def sinks(self) -> dict[str, Operation]:
        """The ops that read the outputs."""
        return dict(self._sinks)

    def __getitem__(self, name: str) -> Tensor:
        return self._sinks[name].inputs[0]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        require_tensor(tensor)
        if tensor.graph is not self._graph:
            raise ModelError(
                f"'{tensor.name}' cannot be output '{name}': it is in another graph; "
                "make it under `with model.graph.as_default():`"
            )
        if tensor.dtype in (tf.resource, tf.variant):
            raise ModelError(
                f"'{tensor.name}' is a {tensor.dtype.name} and cannot be output "
                f"'{name}'; take what is read from it"
            )
        # A new op, because an old one would keep the static shape that it has.
        self._sinks[name] = make_sink(self._graph, name, tensor)
        self._publish()

    def __delitem__(self, name: str) -> None:
        if len(self._sinks) == 1 and name in self._sinks:
            raise ModelError(f"'{name}' is the only output; a model needs one")
        del self._sinks[name]
        self._publish()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sinks)

    def __len__(self) -> int:
        return len(self._sinks)

    def __repr__(self) -> str:
        return f"{{{_listed(self)}}}"

    def _publish(self) -> None:
        """Tell the graph; rewrite rules leave its outputs as they are."""
        results = [sink.outputs[0] for sink in self._sinks.values()]
        functions.set_ends(self._graph, self._inputs.values(), results)


def _listed(ends: Mapping[str, Tensor]) -> str:
    return ", ".join(f"'{name}': {t!r}" for name, t in ends.items())


class Signatures(Mapping[str, Opened], Generic[Opened]):
    """The signatures by name; each is a model that shares the variables."""

    # `make` makes a model of parts, its name, its signatures and its holdings.

    def __init__(
        self,
        source: Source,
        inline: bool,
        opened: Mapping[str, Opened],
        names: tuple[str, ...],
        make: Callable[[GraphParts, str, Signatures[Opened], SharedState], Opened],
    ) -> None:
        self._source = source
        self._inline = inline
        self._opened = dict(opened)
        self._names = names
        self._make = make

    def __getitem__(self, name: str) -> Opened:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._opened:
            program = self._source.signatures[name]()
            parts = materialize(program, inline=self._inline, what=self._source.what)
            if self._source.find_layers is not None and not program.layers:
                calls = self._source.find_layers(parts.graph)
                keras_calls.set_calls(parts.graph, calls)
            self.new(name, parts, self._source.holdings)
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Signatures({list(self._names)})"

    def new(self, name: str, parts: GraphParts, holdings: SharedState) -> Opened:
        """Make a model of parts, and take it in as the signature of that name."""
        model = self._make(parts, name, self, holdings)
        self.take_in(name, model)
        return model

    def take_in(self, name: str, model: Opened) -> None:
        """Take a model in as the signature of that name."""
        self._opened[name] = model
        if name not in self._names:
            self._names = (*self._names, name)

    def opened(self) -> dict[str, Opened]:
        """Return the signatures that are open."""
        return dict(self._opened)

    def unopened(self) -> dict[str, Any]:
        """Return the functions of signatures that nobody has opened."""
        # Signatures that have no function yet are opened on the way.
        for name in self._names:
            if name not in self._opened and name not in self._source.functions:
                self[name]
        closed = [name for name in self._names if name not in self._opened]
        return {name: self._source.functions[name] for name in closed}

    def vacated(self, name: str | None, new: str) -> Signatures[Opened]:
        """Return the others of a signature, whose place is for a model called new."""
        names = tuple(new if n == name else n for n in self._names)
        opened = {n: m for n, m in self._opened.items() if n != name}
        return Signatures(self._source, self._inline, opened, names, self._make)

    def alone(self) -> Signatures[Opened]:
        """Return no signatures, to begin anew."""
        source = Source(self._source.what, {}, SharedState())
        return Signatures(source, self._inline, {}, (), self._make)


def checked_arguments(
    inputs: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments as tensors of the right dtype."""
    names = list(inputs)
    for name in arguments:
        if name not in inputs:
            raise ModelError(f"there is no input '{name}'; the inputs are {names}")
    missing = [name for name in names if name not in arguments]
    if missing:
        raise ModelError(f"inputs {missing} are missing; the inputs are {names}")
    return {name: _fitting(name, t, arguments[name]) for name, t in inputs.items()}


def _fitting(name: str, t: Tensor, value: Any) -> Any:
    try:
        tensor = tf.convert_to_tensor(value, t.dtype)
    except (TypeError, ValueError, tf.errors.OpError):
        tensor = None
    if tensor is None or not t.shape.is_compatible_with(tensor.shape):
        argument = tensor if tensor is not None else value
        shape = getattr(argument, "shape", None)
        raise ModelError(
            f"input '{name}' is {t.dtype.name} of shape {t.shape}, and got "
            f"{type(value).__name__} "
            f"({getattr(getattr(argument, 'dtype', None), 'name', 'no dtype')}, shape "
            f"{shape}); convert it first"
        )
    return tensor


class ModelFunction:
    """A model as a callable: in eager code, inside `tf.function`, under a tape.

    It computes the model's graph as of its creation.

    Args:
        function: the concrete function.
        inputs: the inputs of the model.
        outputs: the names of the outputs, in order.

    Attributes:
        concrete_function: the `tf.types.experimental.ConcreteFunction`.
        variables: the variables that it reads.
        trainable_variables: the trainable ones among them.
    """

    def __init__(
        self, function: Any, inputs: Mapping[str, Tensor], outputs: tuple[str, ...]
    ) -> None:
        self.concrete_function = function
        # A copy does not keep the whole.
        self._variables = tuple(map(replicas.whole, function.variables))
        self._inputs = dict(inputs)
        self._outputs = outputs

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The variables that the function reads; distributed variables count as one."""
        return self._variables

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """The trainable variables that the function reads.

        A variable is trainable unless its own flag or its Keras layer says otherwise.
        For SavedModels, see `trainable` of `geutil.model.open`.
        """
        return keras_calls.trained(self.variables)

    def __call__(self, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Compute the outputs.

        Args:
            *args: values of the first inputs, in their order.
            **kwargs: values of the other inputs, by name.

        Returns:
            The outputs by name, as tensors.

        Raises:
            ModelError: an input is missing, unknown, given twice, or does not fit; or a
                tape watches the call and the model has a loop of version 1.
        """
        names = list(self._inputs)
        if len(args) > len(names):
            raise ModelError(f"{len(args)} values for {len(names)} inputs: {names}")
        positional = dict(zip(names, args, strict=False))
        twice = [name for name in kwargs if name in positional]
        if twice:
            raise ModelError(f"inputs {twice} are given by position and by name")
        arguments = checked_arguments(self._inputs, {**positional, **kwargs})
        try:
            results = functions.call_function(self.concrete_function, arguments)
        except AttributeError as error:
            # A tape that watches the call looks for what Python knows of the loops.
            for op in self.concrete_function.graph.get_operations():
                if op.type == "Exit":
                    raise ModelError(
                        f"a tape cannot differentiate the loop of version 1 at "
                        f"'{op.name}'; call the model outside the tape, or cut the "
                        "loop off with model.cut"
                    ) from error
            raise
        return {name: results[name] for name in self._outputs}

    def __repr__(self) -> str:
        return f"ModelFunction({list(self._inputs)} -> {list(self._outputs)})"


M = TypeVar("M", bound="EditableModel")


class EditableModel(Shown):
    """A graph that can be edited, with named ends and shared state."""

    def __init__(
        self,
        parts: GraphParts,
        signature: str,
        signatures: Signatures[Any],
        holdings: SharedState,
    ) -> None:
        self._graph: Graph = parts.graph
        self.inputs = Inputs(parts.inputs)
        self.outputs = Outputs(parts.graph, self.inputs, parts.sinks)
        self.signature = signature
        self.kept_calls = tuple(parts.kept)
        self.strip_report: StripReport | None = None
        self._side_effects: Operation = parts.side_effects
        self._signatures = signatures
        self._holdings = holdings
        # The state of the graph at the last call, and the function built from it.
        self._built: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        return (
            f"Model('{self.signature}', {list(self.inputs)} -> {list(self.outputs)}, "
            f"{self.op_count} ops)"
        )

    @property
    def op_count(self) -> int:
        """The number of ops, without those that only stand for the model's ends.

        These are one for each output, and one for all side effects; `geutil.report`
        draws them, too.
        """
        return len(self._graph.get_operations()) - len(self.outputs) - 1

    @property
    def graph(self) -> Graph:
        """The graph to edit, up to date: `Model` writes edited functions back to it."""
        return self._graph

    @property
    def signatures(self) -> Mapping[str, Any]:
        """The signatures by name, each a model."""
        return self._signatures

    @property
    def variables(self) -> Mapping[str, tf.Variable]:
        """The variables by name, those that edits have added included."""
        # This writes edited functions back, which may read further ones.
        _ = self.graph
        return MappingProxyType(self.holdings.variables)

    def run(
        self, data: Any = None, /, **inputs: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Compute the outputs for some inputs; see `Model.run`."""
        if data is None:
            return self._run_batch(inputs)
        self._check_given_once(inputs)
        found = batches(data, self.inputs, ModelError)
        return joined([self._run_batch(batch) for batch in found], ModelError)

    def __call__(self, data: Any = None, /, **inputs: Any) -> dict[str, Tensor]:
        """Compute the outputs as tensors; see `Model.__call__`."""
        if data is None:
            return ModelFunction(
                self.concrete_function(), self.inputs, tuple(self.outputs)
            )(**inputs)
        self._check_given_once(inputs)
        batch = one_batch(data, self.inputs, ModelError)
        if batch is None:
            raise ModelError(
                f"a call takes one batch, and got a {type_name(data)}; call run, which "
                "takes many"
            )
        return self(**batch)

    def _check_given_once(self, inputs: Mapping[str, Any]) -> None:
        if inputs:
            raise ModelError(
                f"the inputs are given whole, and {list(inputs)} by name, too; pass "
                "one or the other"
            )

    def _run_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not tf.executing_eagerly():
            raise ModelError(
                "run computes arrays, so it needs eager execution; inside tf.function "
                "and graphs call model.to_function()"
            )
        arguments = checked_arguments(self.inputs, inputs)
        function = self.concrete_function()
        try:
            results = functions.call_function(function, arguments)
        except tf.errors.OpError as error:
            check_initialized(self._holdings, function.variables, error)
            raise
        return {name: np.asarray(results[name].numpy()) for name in self.outputs}

    @property
    def holdings(self) -> SharedState:
        """The state that the signatures share: variables, tables, assets.

        Variables that an edit has added to the graph are among them.
        """
        self._holdings.add_variables(functions.seen_variables(self._graph))
        return self._holdings

    def opened_signatures(self: M) -> dict[str, M]:
        """Return the signatures that were opened, this one among them."""
        return self._signatures.opened()

    def unopened_signatures(self) -> dict[str, Any]:
        """Return the functions of the signatures that nobody has opened."""
        return self._signatures.unopened()

    def _parts(self) -> GraphParts:
        """Return the graph and its ends as they are now."""
        sinks = self.outputs.sinks
        return GraphParts(self._graph, self.inputs, sinks, self._side_effects)

    def concrete_function(self) -> Any:
        """Return a concrete function of the graph as it is now; see `to_function`."""
        sinks = self.outputs.sinks
        state = (fingerprint(self.graph), tuple(sinks), len(self.holdings.variables))
        if self._built is None or self._built[0] != state:
            self._built = (state, to_graph.build(self._parts(), self._holdings))
        return self._built[1]

    def reached_ops(self) -> list[Operation]:
        """Return the ops that outputs and side effects need, in the order of the graph.

        The inputs are among them. Ops that edits left behind are not: it is neither run
        nor saved.

        Cost: linear in ops and edges.
        """
        ends = [*self.outputs.sinks.values(), self._side_effects]
        reached = get_backward_walk_ops(ends, control_inputs=True)
        names = {op.name for op in reached} | {t.op.name for t in self.inputs.values()}
        return [op for op in self.graph.get_operations() if op.name in names]

    def program(self, *, checked: bool = True) -> ModelProgram:
        """Return the graph as a program, the form that it is rebuilt from."""
        # If `checked`, placeholders that nothing feeds are refused.
        # This writes edited functions back.
        _ = self.graph
        parts = self._parts()
        if checked:
            to_graph.ops_to_run(parts)
        program = to_graph.program_of_parts(parts)
        if checked:
            programs.prune(program)
        return program

    def derived(
        self: M,
        program: ModelProgram,
        *,
        holdings: SharedState | None = None,
        signature: str | None = None,
        beside: str | None = None,
        alone: bool = False,
    ) -> M:
        """Return a model of a program, in this one's place among the signatures."""
        # With `beside`, it is a signature of that name instead; with `alone` it has no
        # other signatures, unless it stands beside this one.
        if beside is not None and (not beside or beside in self._signatures):
            raise ModelError(
                f"there is a signature '{beside}' already; choose another name"
                if beside
                else "a signature needs a name"
            )
        parts = materialize(program, inline=False, what=repr(self))
        name = beside or signature or self.signature
        others = self._signatures.vacated(None if beside else self.signature, name)
        if alone and not beside:
            others = others.alone()
        derived: M = others.new(
            name, parts, self.holdings if holdings is None else holdings
        )
        return derived

    def rebuilt(
        self: M, programs: Mapping[str, ModelProgram], holdings: SharedState
    ) -> M:
        """Return a model with a new program for each signature."""
        signatures = self._signatures.alone()
        for name, program in programs.items():
            parts = materialize(program, inline=False, what=repr(self))
            signatures.new(name, parts, holdings)
        rebuilt: M = signatures[self.signature]
        return rebuilt
