"""The functions that a model calls, each opened as a model on demand.

Its body is a graph that is edited while its callers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import tensorflow as tf

from geutil.bodies.function_bodies import add_ends, read_body
from geutil.errors import ModelError, TransformError
from geutil.graph import creation, function_calls, functions
from geutil.graph.function_calls import Caller, callers_in
from geutil.graph.state import fingerprint
from geutil.graph.types import Graph, Operation, Tensor, require_tensor
from geutil.graph.walks import topological_order
from geutil.model import programs, to_graph
from geutil.model.core import EditableModel, Inputs, Outputs
from geutil.model.programs import SharedState, fresh_name
from geutil.model.to_graph import GraphParts


def materialize_body(
    definition: Any, library: Mapping[str, Any], handles: Mapping[str, Tensor]
) -> GraphParts:
    """Make an editable graph of a function's definition."""
    # Of arguments that are resources, the body takes the handle data from `handles`,
    # tensors that a caller passes.
    name = definition.signature.name
    try:
        read = read_body(
            definition, library.values(), handles, to_graph.release_colocation
        )
    except TransformError as error:
        raise ModelError(f"function '{name}' cannot be opened: {error}") from error
    except Exception as error:
        # The importer raises whatever the C++ status and its own checks make of it.
        raise ModelError(f"TensorFlow refuses function '{name}': {error}") from error

    results = {name: _behind_copies(t) for name, t in read.results().items()}
    sinks, effects = add_ends(
        read.graph, results, read.side_effects(), programs.legal_name
    )
    return GraphParts(read.graph, read.inputs, sinks, effects)


def _behind_copies(t: Tensor) -> Tensor:
    """Return a result as it is before the Identity ops that tracing adds."""
    while (
        t.op.type == "Identity"
        and t.op.name.rpartition("/")[2].startswith("Identity")
        and not t.consumers()
        and not t.op.control_inputs
    ):
        (t,) = t.op.inputs
    return t


def result_shapes(parts: GraphParts) -> list[tf.TensorShape]:
    """Return the static shapes of the results, as TensorFlow infers them."""
    return [sink.inputs[0].shape for sink in parts.sinks.values()]


class BodyOutputs(Outputs):
    """The results of a function by name, in order."""

    # They follow edits and can be set, to a tensor of the same dtype. Adding and taking
    # away is up to `Body.add_output` and `Body.remove_output`.

    def __init__(
        self, graph: Graph, inputs: Inputs, sinks: Mapping[str, Operation], what: str
    ) -> None:
        super().__init__(graph, inputs, sinks)
        self._what = what

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        require_tensor(tensor)
        if name not in self:
            raise ModelError(
                f"{self._what} has no output '{name}'; its callers must be given the "
                "new output too: use add_output"
            )
        # Setting an output leaves the callers and their readers as they were made.
        if tensor.dtype != self[name].dtype:
            raise ModelError(
                f"output '{name}' of {self._what} is {self[name].dtype.name}, and "
                f"'{tensor.name}' is {tensor.dtype.name}; the callers read the former: "
                "cast it, or use remove_output and add_output"
            )
        if not self[name].shape.is_compatible_with(tensor.shape):
            raise ModelError(
                f"output '{name}' of {self._what} is of shape {self[name].shape}, and "
                f"'{tensor.name}' of shape {tensor.shape}; the callers were made for "
                "the former: reshape it, or use add_output"
            )
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        raise ModelError(
            f"output '{name}' of {self._what} may be read by callers; use remove_output"
        )

    def changed(self, inputs: Inputs, sinks: Mapping[str, Operation]) -> BodyOutputs:
        """Return the outputs with other arguments and other sinks."""
        return BodyOutputs(self._graph, inputs, sinks, self._what)

    def with_added(self, inputs: Inputs, name: str, tensor: Tensor) -> BodyOutputs:
        """Return the outputs with one more, at the end."""
        sink = to_graph.make_sink(self._graph, name, tensor)
        return self.changed(inputs, {**self.sinks, name: sink})


class EditableBody(EditableModel):
    """The body of a function: changes here stay in this graph."""

    # `geutil.model.Body` offers users edits that change the callers, too.

    inputs: Inputs  # The arguments by name, in order: placeholders of the graph.
    outputs: BodyOutputs  # The results by name, in order.
    live: Graph  # The graph, while nothing is written back on access.

    def concrete_function(self) -> Any:
        """Return a concrete function of the body as it is now.

        Raises:
            ModelError: an argument is a resource, which only a caller can pass.
        """
        self._refuse_resources()
        return super().concrete_function()

    def _refuse_resources(self) -> None:
        for name, t in self.inputs.items():
            if t.dtype in (tf.resource, tf.variant):
                raise ModelError(
                    f"input '{name}' of {self!r} is a {t.dtype.name}, which cannot be "
                    "given by value; run the model that calls the function"
                )

    @property
    def side_effects(self) -> Operation:
        """The op that waits for the body's side effects."""
        return self._side_effects

    def state(self) -> Any:
        """Return a value that changes with each edit."""
        ends = [*self.inputs.values(), *self.outputs.sinks.values()]
        return fingerprint(self.live), tuple(map(id, ends))

    def needed_ops(self) -> list[Operation]:
        """Return the ops that a call runs."""
        return to_graph.ops_to_run(self._parts())

    def captured(self) -> dict[str, Tensor]:
        """Return the placeholders of the body's captures, by new names."""
        names: dict[str, Tensor] = {}
        if functions.bindings(self.live):
            for _, inside in to_graph.captures_of(self.live, self.needed_ops()):
                name = inside.op.name.replace("/", "_").lower()
                names[programs.fresh_name({*self.inputs, *names}, name)] = inside
        return names

    def forget_capture(self, inside: Tensor) -> Any:
        """Unbind the placeholder of a capture, and return the captured tensor."""
        outside = next(o for o, i in functions.bindings(self.live) if i is inside)
        functions.unbind(self.live, outside)
        return outside

    def require_own(self, tensor: Tensor) -> None:
        """Raise unless a tensor is one of this body."""
        require_tensor(tensor)
        if tensor.graph is not self.live:
            raise ModelError(
                f"'{tensor.name}' is no tensor of {self!r}; make it under `with "
                "body.graph.as_default():`"
            )

    def new_input(self, name: str, spec: Any, like: Tensor) -> Tensor:
        """Add an argument; a resource is one like another tensor."""
        with creation.neutral(self.live):
            placeholder = tf.compat.v1.placeholder(
                spec.dtype, spec.shape, programs.legal_name(name)
            )
        creation.copy_handle_data(like, placeholder)
        self.take_input(name, placeholder)
        return placeholder

    def take_input(self, name: str, placeholder: Tensor) -> None:
        """Make a placeholder an argument."""
        self._set_ends({**self.inputs, name: placeholder}, self.outputs.sinks)

    def drop_input(self, index: int) -> None:
        """Forget an argument."""
        inputs = [p for i, p in enumerate(self.inputs.items()) if i != index]
        self._set_ends(dict(inputs), self.outputs.sinks)

    def take_output(self, name: str, tensor: Tensor) -> None:
        """Add a result."""
        self.outputs = self.outputs.with_added(self.inputs, name, tensor)

    def drop_output(self, index: int) -> None:
        """Forget a result."""
        sinks = [s for i, s in enumerate(self.outputs.sinks.items()) if i != index]
        self._set_ends(self.inputs, dict(sinks))

    def _set_ends(
        self, inputs: Mapping[str, Tensor], sinks: Mapping[str, Operation]
    ) -> None:
        self._built = None  # It may have other arguments.
        self.inputs = Inputs(inputs)
        self.outputs = self.outputs.changed(self.inputs, sinks)


@dataclass(eq=False)
class Entry:
    """A function of a model."""

    key: str  # Its name for users, which stays.
    # Its `FunctionDef`, under the name that it has now.
    definition: Any = field(repr=False)
    body: EditableBody | None = None  # The model of it, once it is open.
    written: Any = None  # The state of the body that the definition is made from.
    # The static shapes of the results.
    shapes: list[tf.TensorShape] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name that TensorFlow knows the function by."""
        name: str = self.definition.signature.name
        return name

    @property
    def graph(self) -> Graph | None:
        """The graph of the body, once it is open."""
        return None if self.body is None else self.body.live

    def opened(self) -> EditableBody:
        """Return the body, which is open."""
        if self.body is None:
            raise LookupError(f"'{self.key}' is not open")
        return self.body

    @property
    def edited(self) -> bool:
        """True if the body is another than the definition."""
        return self.body is not None and self.body.state() != self.written


MakeBody = Callable[["FunctionLibrary", Entry, GraphParts], EditableBody]


class FunctionLibrary:
    """The functions that can be reached from a model's ops."""

    def __init__(self, root: Graph, holdings: SharedState, make_body: MakeBody) -> None:
        self.root = root
        self.holdings = holdings
        # Ops that other ops have replaced; they do not count as callers.
        self.retired: set[Operation] = set()
        self._make_body = make_body
        self._entries: dict[str, Entry] = {}
        self._by_name: dict[str, Entry] = {}
        self._seen: Any = None
        self._callers: dict[int, tuple[Any, list[Caller]]] = {}
        self._syncing = False

    @property
    def is_written(self) -> bool:
        """True if bodies are being written back, and none is on access."""
        return self._syncing

    def edited(self, besides: Entry | None = None) -> list[Entry]:
        """Return the functions whose bodies were edited, apart from one."""
        entries = self._entries.values()
        return [e for e in entries if e is not besides and e.edited]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write no bodies back on access while this context is open."""
        before, self._syncing = self._syncing, True
        try:
            yield
        finally:
            self._syncing = before

    def entries(self) -> list[Entry]:
        """Return the functions that can be reached, callers before their callees."""
        state = self._state()
        if self._seen is None or self._seen[0] != state:
            order = topological_order(self.called_in(None)[::-1], self._callees)
            self._seen = (state, [self._by_name[name] for name in reversed(order)])
        return list(self._seen[1])

    def _state(self) -> Any:
        return tuple(fingerprint(graph) for graph in self.graphs())

    def _callees(self, name: str) -> list[str]:
        # Backwards, so that the order read from its end is that of the calls.
        return self.called_in(self._by_name[name])[::-1]

    def called_in(self, entry: Entry | None) -> list[str]:
        """Return the functions that an entry, or the model's graph, calls itself."""
        if entry is not None and entry.graph is None:
            names = dict.fromkeys(
                function_calls.called_names(entry.definition.node_def)
            )
        else:
            callers = self.callers_in(self.root if entry is None else entry.graph)
            names = dict.fromkeys(n for caller in callers for n in caller.names)
        return [name for name in names if self._known(name)]

    def callers_in(self, graph: Graph | None) -> list[Caller]:
        """Return the ops of a graph that call functions, without retired ones."""
        if graph is None:
            return []
        cached = self._callers.get(id(graph))
        if cached is None or cached[0] != fingerprint(graph):
            cached = self._callers[id(graph)] = fingerprint(graph), callers_in(graph)
        return [c for c in cached[1] if c.op not in self.retired]

    def callers_of(self, entries: Iterable[Entry]) -> list[Caller]:
        """Return the ops that call functions; the bodies that hold some are opened."""
        names = {entry.name for entry in entries}
        for caller in self.entries():
            if caller.graph is None and not names.isdisjoint(self.called_in(caller)):
                self.open(caller)
        return [
            caller
            for graph in self.graphs()
            for caller in self.callers_in(graph)
            if not names.isdisjoint(caller.names)
        ]

    def _known(self, name: str) -> bool:
        if name in self._by_name:
            return True
        definitions = (
            function_calls.definition_in(graph, name) for graph in self.graphs()
        )
        definition = next((d for d in definitions if d is not None), None)
        if definition is None:
            return False
        key = fresh_name(self._entries, function_calls.readable_name(name))
        self._entries[key] = self._by_name[name] = Entry(key, definition)
        return True

    def graphs(self) -> list[Graph]:
        """Return the graph of the model and those of the open bodies."""
        opened = [e.graph for e in self._entries.values() if e.graph is not None]
        return [self.root, *opened]

    def reachable(self, start: Entry | None) -> list[Entry]:
        """Return all functions that an entry, or the model, calls, also indirectly."""
        if start is None:
            return self.entries()
        called = set(topological_order(self.called_in(start), self._callees))
        return [entry for entry in self.entries() if entry.name in called]

    def entry(self, name: str) -> Entry:
        """Return the entry of a function by the name that it has now."""
        return self._by_name[name]

    def redefine(self, entry: Entry, definition: Any) -> None:
        """Give an entry a definition under a new name."""
        del self._by_name[entry.name]
        entry.definition = definition
        self._by_name[entry.name] = entry
        self._seen = None

    def definitions_for(self, start: Entry | None) -> dict[str, Any]:
        """Return the definitions of an entry's callees, by name."""
        return {e.name: e.definition for e in self.reachable(start)}

    def open(self, entry: Entry) -> EditableBody:
        """Return the model of a function, made when it is first asked for."""
        # A body takes its resources' handle data from a caller, so the bodies around it
        # are opened too.
        if entry.body is not None:
            return entry.body
        entries = self.entries()
        for opening in self._way_to(entry):
            parts = materialize_body(
                opening.definition, self.definitions_for(opening), self.handles(opening)
            )
            opening.shapes = result_shapes(parts)
            opening.body = body = self._make_body(self, opening, parts)
            opening.written = body.state()
            # An open body calls what its definition calls.
            self._seen = (self._state(), entries)
        return entry.opened()

    def _way_to(self, entry: Entry) -> list[Entry]:
        """Return the closed bodies from the first open caller down to an entry."""
        way: list[Entry] = []
        current: Entry | None = entry
        while current is not None and current.graph is None and current not in way:
            way.append(current)
            name = current.name
            open_graphs = (self.callers_in(graph) for graph in self.graphs())
            if any(name in c.names for callers in open_graphs for c in callers):
                break
            around = (e for e in self.entries() if name in self.called_in(e))
            current = next(around, None)
        return way[::-1]

    def handles(self, entry: Entry) -> dict[str, Tensor]:
        """Return, for arguments that are resources, a tensor that is passed."""
        for graph in self.graphs():
            for caller in self.callers_in(graph):
                if entry.name in caller.names:
                    passed = caller.passed(entry.definition)
                    kinds = (tf.resource, tf.variant)
                    return {name: t for name, t in passed.items() if t.dtype in kinds}
        return {}


Opened = TypeVar("Opened", bound=EditableBody)


class Functions(Mapping[str, Opened], Generic[Opened]):
    """The functions that a model calls, by name, each a model."""

    def __init__(self, library: FunctionLibrary, start: Entry | None = None) -> None:
        self._library = library
        self._start = start

    def _found(self) -> dict[str, Entry]:
        return {e.key: e for e in self._library.reachable(self._start)}

    def __getitem__(self, name: str) -> Opened:
        # Only the maker of the library knows the class of its bodies.
        return cast(Opened, self._library.open(self._found()[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __repr__(self) -> str:
        return f"Functions({list(self)})"
