"""TFLite files: opened, and saved, all or nothing.

Weights stay where they are, in the file or in its mapping to memory, until they are
asked for, or the file is written.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from geutil import lazy
from geutil.errors import TFLiteError
from geutil.tflite import (
    cutting,
    edit,
    joining,
    looking,
    making,
    renaming,
    stripping,
    verify,
)
from geutil.tflite.cutting import Ends
from geutil.tflite.looking import GraphLike, OpLike, OpsLike, TensorLike, TensorsLike
from geutil.tflite.parts import (
    Contents,
    LiteGraph,
    LiteOp,
    LiteSignature,
    LiteTensor,
    Quantization,
)
from geutil.tflite.reading import read_into
from geutil.tflite.writing import Writer
from geutil.writing import written_atomically

if TYPE_CHECKING:
    from geutil.tflite.numbers import Constants, Stored

Types = str | Mapping[str, str] | None
"""The type of all inputs or outputs that are quantized, or by name those of some."""


class LiteFile(Contents):
    """A TFLite file.

    Attributes:
        graphs: its subgraphs, the first of them the main one.
        signatures: its signatures by their names.
        metadata: the bytes that are stored in it besides, by name.
        description: the converter's description of itself.
        bytes_total: the size of the file that was read.
        path: where it was read; None of bytes.
    """

    path: Path | None = None

    @property
    def runtime(self) -> str:
        """The oldest runtime that has all its kernels; "" if the file does not say."""
        entry = self.metadata.get("min_runtime_version")
        if entry is None or entry.data is None:
            return ""
        return entry.data.tobytes().rstrip(b"\0").decode("ascii", "replace")

    def to_bytes(self) -> bytes:
        """Return the file.

        Raises:
            TFLiteError: it has fields that the schema lacks, or is larger than a
                flatbuffer can be in one piece of memory; see `save`.

        Cost: linear in tables; one copy of the weights.
        """
        return b"".join(Writer(self).pieces())

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the file, all or nothing.

        Args:
            path: where to write it; it may be the file that this one was read from.
            overwrite: whether to replace an existing file.

        Returns:
            The path.

        Raises:
            TFLiteError: it has fields that the schema lacks.
            ModelError: there is something and `overwrite` is false, or it is a
                directory; or the directory to write to is missing.
            OSError: the disk is full, or writing is forbidden.

        Cost: linear in tables; the weights are copied from file to file.
        """
        target = Path(path)
        pieces = Writer(self).pieces()
        with (
            written_atomically(target, overwrite=overwrite) as new,
            new.open("wb") as opened,
        ):
            opened.writelines(pieces)
        return target

    def add_graph(self, name: str) -> LiteGraph:
        """Add an empty subgraph, such as a branch or the body of a loop; return it."""
        return making.add_graph(self, name)

    def add_input(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int | None] | None,
        *,
        quantization: Quantization | None = None,
        graph: GraphLike = None,
    ) -> LiteTensor:
        """Add an input to a subgraph; return its tensor.

        Args:
            name: its name.
            dtype: the name of its type, such as "float32".
            shape: its size in each dimension, None where it is free.
            quantization: the scales and zero points of its integers.
            graph: the subgraph, or its name or place; the main one, which is begun in
                an empty file, if None.

        Raises:
            TFLiteError: there is no such type or subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> m.add_input("x", "float32", [None, 4])
            <LiteTensor 'x' float32 [?, 4]>
        """
        return making.add_input(self, name, dtype, shape, quantization, graph)

    def add_constant(
        self,
        name: str,
        value: Any,
        *,
        dtype: str | None = None,
        quantization: Quantization | None = None,
        graph: GraphLike = None,
    ) -> LiteTensor:
        """Add a constant to a subgraph; return its tensor.

        Args:
            name: its name.
            value: an array, or numbers. Of a quantized constant, the integers.
            dtype: the name of its type, such as "int4"; that of the array if None.
            quantization: the scales and zero points of its integers.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: TFLite has no such type.

        Example:
            >>> import numpy as np
            >>> from geutil import tflite
            >>> tflite.LiteFile().add_constant("w", np.ones([2, 3], np.float32))
            <LiteTensor 'w' float32 [2, 3]>
        """
        return making.add_constant(self, name, value, dtype, quantization, graph)

    def add(
        self,
        kind: str,
        inputs: TensorLike | Iterable[TensorLike | None],
        *,
        name: str | Sequence[str] | None = None,
        shape: Sequence[int | None] | None = None,
        dtype: str | None = None,
        quantization: Quantization | None = None,
        outputs: Sequence[LiteTensor] | None = None,
        version: int | None = None,
        custom_options: bytes | None = None,
        at: int | None = None,
        graph: GraphLike = None,
        **options: Any,
    ) -> Any:
        """Add an op to a subgraph; return the tensor that it makes, or a tuple of them.

        Args:
            kind: its kind, such as "CONV_2D".
            inputs: the tensors that it reads, or their names; None for those left out.
                One tensor need not be in a list.
            name: the name of the tensor that it makes, or of each of several; its kind
                if None.
            shape: the shape of the tensor; by the rule of the kind if None.
            dtype: its type; by the rule of the kind, or of the first input, if None.
            quantization: the scales and zero points of its integers.
            outputs: new tensors that it makes, in the place of the four arguments
                before: for results that differ in type or shape.
            version: the version of its kernel; the oldest that computes it if None.
            custom_options: of an op of your own, its options as its kernel reads them.
            at: its place in the order; the end if None.
            graph: the subgraph, as in `add_input`.
            **options: its options by their names in the schema, such as
                `stride_w=2`, `padding="SAME"`; those left out are 0.

        Raises:
            TFLiteError: TFLite has no such kind, the kind has no such option, an input
                is not in the subgraph, or the kind has no rule for its shape.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [2, 4])
            >>> m.add("ADD", [x, x], name="y", fused_activation_function="RELU")
            <LiteTensor 'y' float32 [2, 4]>
        """
        return making.add(
            self,
            kind,
            inputs,
            making.Made(name, shape, dtype, quantization, outputs),
            options,
            version=version,
            custom_options=custom_options,
            at=at,
            graph=graph,
        )

    def set_outputs(self, outputs: TensorsLike, *, graph: GraphLike = None) -> None:
        """Let a subgraph give these tensors and no others; see `expose` to add some."""
        making.set_outputs(self, outputs, graph)

    def add_signature(
        self,
        key: str,
        inputs: Mapping[str, TensorLike] | None = None,
        outputs: Mapping[str, TensorLike] | None = None,
        *,
        graph: GraphLike = None,
    ) -> LiteSignature:
        """Add a signature of a subgraph.

        Args:
            key: its name.
            inputs: a name for each input; those of the tensors if None.
            outputs: a name for each output; those of the tensors if None.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: there is one of the name, or an end has no name, or two.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("NEG", [x], name="y")])
            >>> _ = m.add_signature("negate", {"image": "x"})
            >>> m
            LiteFile(['negate'], 1 subgraph(s), 1 ops)
        """
        return making.add_signature(self, key, inputs, outputs, graph)

    def tensor(self, name: TensorLike, *, graph: GraphLike = None) -> LiteTensor:
        """Return a tensor of a subgraph by its name, or the one that a signature has.

        Raises:
            TFLiteError: there is none, or there are several; the message lists names
                that are near.
        """
        return looking.tensor_of(self, name, looking.graph_of(self, graph))

    def op(self, op: OpLike, *, graph: GraphLike = None) -> LiteOp:
        """Return the op that makes the tensor of a name, or that has a place.

        Raises:
            TFLiteError: there is none.
        """
        return looking.op_of(self, op, looking.graph_of(self, graph))

    def find(
        self,
        kind: str | Iterable[str] | None = None,
        *,
        name: str | None = None,
        regex: str | re.Pattern[str] | None = None,
        where: Callable[[LiteOp], Any] | None = None,
        graph: GraphLike = None,
    ) -> tuple[LiteOp, ...]:
        """Return the ops for which all that is given holds, in their order.

        Args:
            kind: their kind, or several kinds.
            name: the name of a tensor that they make.
            regex: a regular expression that is searched in these names.
            where: a predicate.
            graph: a subgraph, as in `add_input`; all if None.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> y = m.add("NEG", [m.add("NEG", [x], name="a/neg")], name="b/neg")
            >>> m.find("NEG", regex="^b/")
            (<LiteOp NEG -> 'b/neg'>,)
        """
        graphs = self.graphs if graph is None else [looking.graph_of(self, graph)]
        return looking.find(graphs, kind, name, regex, where)

    def find_tensors(
        self,
        *,
        name: str | None = None,
        regex: str | re.Pattern[str] | None = None,
        dtype: str | None = None,
        where: Callable[[LiteTensor], Any] | None = None,
        graph: GraphLike = None,
    ) -> tuple[LiteTensor, ...]:
        """Return the tensors for which all that is given holds, as `find` does."""
        graphs = self.graphs if graph is None else [looking.graph_of(self, graph)]
        return looking.find_tensors(graphs, name, regex, dtype, where)

    def ancestors(
        self,
        tensors: TensorsLike,
        *,
        stop_at: TensorsLike = (),
        graph: GraphLike = None,
    ) -> tuple[LiteOp, ...]:
        """Return the ops that tensors are computed by, in the order in which they run.

        Args:
            tensors: one or several tensors, or their names.
            stop_at: tensors that the walk does not go behind.
            graph: the subgraph, as in `add_input`.

        Cost: linear in the ops of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> y = m.add("EXP", [m.add("NEG", [x], name="a")], name="b")
            >>> [op.kind for op in m.ancestors("b", stop_at="a")]
            ['EXP']
        """
        own = looking.graph_of(self, graph)
        ends = [looking.tensors_of(self, some, own) for some in (tensors, stop_at)]
        found = {*looking.behind(*ends)}
        return tuple(op for op in own.ops if op in found)

    def descendants(
        self,
        tensors: TensorsLike,
        *,
        stop_at: TensorsLike = (),
        graph: GraphLike = None,
    ) -> tuple[LiteOp, ...]:
        """Return the ops that depend on tensors, as `ancestors` does."""
        own = looking.graph_of(self, graph)
        ends = [looking.tensors_of(self, some, own) for some in (tensors, stop_at)]
        found = {*looking.ahead(*ends)}
        return tuple(op for op in own.ops if op in found)

    def boundary(
        self, ops: OpsLike, *, graph: GraphLike = None
    ) -> tuple[list[LiteTensor], list[LiteTensor]]:
        """Return the tensors that ops read from outside, and those that they give.

        Constants and variables are not among them.

        Args:
            ops: ops, tensors that they make, places, a slice or a range of these.
            graph: the subgraph, as in `add_input`.
        """
        own = looking.graph_of(self, graph)
        return looking.boundary(looking.ops_of(self, ops, own), own)

    def cut(
        self,
        inputs: Ends | None = None,
        outputs: Ends | None = None,
        *,
        ops: OpsLike | None = None,
        graph: GraphLike = None,
    ) -> LiteFile:
        """Return the part of a subgraph between tensors, or of some ops, as a new file.

        Variables and tables come along with the ops that write to them, subgraphs with
        those that call them. Metadata that describe the ends are left out where these
        change. Weights are not copied.

        Args:
            inputs: the tensors that become inputs, or their names, or a mapping from
                the name of each in the signature; those of the subgraph that the
                outputs need if None.
            outputs: the tensors that become outputs, given likewise; those of the
                subgraph if None.
            ops: the ops to take, in the place of both: ops, tensors that they make,
                places, a slice or a range. Those that compute their weights come along.
            graph: the subgraph, as in `add_input`; it becomes the main one.

        Raises:
            TFLiteError: the outputs still depend on an input that is not cut off, or do
                not depend on a given one; metadata tie ops by their places.

        Cost: linear in the ops and tensors of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
            >>> m.cut(inputs="a").find()
            (<LiteOp EXP -> 'b'>,)
            >>> m.cut(ops=range(1)).find()
            (<LiteOp NEG -> 'a'>,)
        """
        return cutting.cut(self, inputs, outputs, ops, graph)

    def split(
        self, at: TensorsLike, *, graph: GraphLike = None
    ) -> tuple[LiteFile, LiteFile]:
        """Return two new files: the ops ahead of tensors, and those behind.

        The first gives these tensors and the outputs that do not depend on them; the
        second takes them, and the inputs that it reads besides. Ops behind that write
        to a variable of the first stay with it.

        Args:
            at: the tensors, or their names.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: the ops behind read other tensors from ahead, which the message
                names; or there is nothing ahead or behind.

        Cost: linear in the ops and tensors of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
            >>> [half.find() for half in m.split("a")]
            [(<LiteOp NEG -> 'a'>,), (<LiteOp EXP -> 'b'>,)]
        """
        return cutting.split(self, at, graph)

    def clusters(
        self,
        parts: Sequence[OpsLike],
        names: Sequence[str] | None = None,
        *,
        graph: GraphLike = None,
    ) -> LiteFile:
        """Return a new file in which each cluster of ops is a subgraph of its own.

        `cut(ops=...)` makes a file of one.

        Args:
            parts: the ops of each, as in `cut`.
            names: the names of the subgraphs and their signatures; "part_0" and so on
                if None.
            graph: the subgraph that they are in, as in `add_input`.

        Raises:
            TFLiteError: two have one name, or one cannot be cut.

        Cost: linear in the ops and tensors of the subgraph, times the clusters.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
            >>> m.clusters([range(1), range(1, 2)], ["stem", "head"])
            LiteFile(['stem', 'head'], 2 subgraph(s), 2 ops)
        """
        return cutting.clusters(self, parts, names, graph)

    def keep_signatures(self, *keys: str) -> LiteFile:
        """Return a new file with some signatures and the subgraphs that they need.

        Raises:
            TFLiteError: there is no such signature, or metadata tie ops by place.

        Cost: linear in the ops and tensors.
        """
        return cutting.keep_signatures(self, keys)

    def keep_subgraphs(self, *graphs: GraphLike) -> LiteFile:
        """Return a new file with some subgraphs, and those that they call.

        Args:
            *graphs: the subgraphs, their names or places; the first of them in the file
                becomes the main one.

        Raises:
            TFLiteError: there is no such subgraph, or metadata tie ops by place.

        Cost: linear in the ops and tensors.
        """
        return cutting.keep_graphs(self, graphs)

    def rename(
        self,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        *,
        tensors: Mapping[str, str] | None = None,
        signatures: Mapping[str, str] | None = None,
        from_signature: bool | str = False,
        graph: GraphLike = None,
    ) -> None:
        """Give inputs, outputs, tensors and signatures other names.

        Args:
            inputs: the new name of each input to rename, in signatures and as tensor.
            outputs: the new name of each output to rename, likewise.
            tensors: the new name of each other tensor to rename.
            signatures: the new name of each signature to rename.
            from_signature: whether ends take the names that signatures have for them,
                in the place of such as "serving_default_x:0"; or the name of the
                signature whose ends do.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: there is nothing of an old name, or two would have one name.

        Cost: linear in the tensors of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("serving_default_x:0", "float32", [4])
            >>> m.set_outputs([m.add("NEG", [x], name="y")])
            >>> m.rename({"serving_default_x:0": "image"}, {"y": "scores"})
            >>> m.graphs[0].inputs
            (<LiteTensor 'image' float32 [4]>,)
        """
        renaming.rename(
            self,
            inputs or {},
            outputs or {},
            tensors or {},
            signatures or {},
            from_signature,
            graph,
        )

    def reroute(
        self,
        old: TensorLike,
        new: TensorLike,
        *,
        consumers: OpsLike | None = None,
        graph: GraphLike = None,
    ) -> None:
        """Let the readers of a tensor read another one of its type and shape.

        Args:
            old: the tensor that is read.
            new: the tensor that will be.
            consumers: the ops that change over; all, and the outputs, if None.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: the two differ in type, shape or quantization, there would be a
                circle, or metadata tie ops by their places. Nothing has changed.

        Cost: linear in the ops and edges of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
            >>> m.reroute("a", "x")
            >>> m.op("b").inputs
            (<LiteTensor 'x' float32 [4]>,)
        """
        edit.reroute(self, old, new, consumers, graph)

    def swap(
        self, one: TensorLike, other: TensorLike, *, graph: GraphLike = None
    ) -> None:
        """Let two tensors change their readers, as two calls of `reroute` at once."""
        edit.swap(self, one, other, graph)

    def bypass(
        self, op: OpLike, read: TensorLike | None = None, *, graph: GraphLike = None
    ) -> None:
        """Leave out an op: the readers of its result read its input.

        Args:
            op: the op, or the name of the tensor that it makes.
            read: the input to read; the only one that is no constant if None.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: input and result differ in type, shape or quantization, or it
                makes several. Nothing has changed.

        Cost: linear in the ops and edges of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
            >>> m.bypass("a")
            >>> m.find()
            (<LiteOp EXP -> 'b'>,)
        """
        edit.bypass(self, op, read, graph)

    def remove(self, ops: OpsLike, *, graph: GraphLike = None) -> None:
        """Leave out ops whose results nothing else reads.

        Raises:
            TFLiteError: something reads them. Nothing has changed.

        Cost: linear in the ops and edges of the subgraph.
        """
        edit.remove(self, ops, graph)

    def insert(
        self,
        tensor: TensorLike,
        by: edit.Replacement,
        *,
        consumers: OpsLike | None = None,
        name: str | None = None,
        graph: GraphLike = None,
        **options: Any,
    ) -> LiteTensor:
        """Put an op or a part between a tensor and its readers.

        Args:
            tensor: the tensor.
            by: the kind of an op that reads it and makes its like; an op in no subgraph
                that reads it; or a file, or a subgraph, that takes one tensor and gives
                one.
            consumers: the readers behind it; all, and the outputs, if None.
            name: the name of the new tensor.
            graph: the subgraph, as in `add_input`.
            **options: the options of the kind.

        Returns:
            The tensor that they read now.

        Raises:
            TFLiteError: it differs from the old one in type, shape or quantization, or
                metadata tie ops by their places. Nothing has changed.

        Cost: linear in the ops and edges of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("NEG", [x], name="a")])
            >>> m.insert("a", "RELU")
            <LiteTensor 'a/relu' float32 [4]>
        """
        return edit.insert(self, tensor, by, consumers, name, options, graph)

    def replace(
        self,
        ops: OpsLike,
        by: edit.Replacement,
        *,
        inputs: TensorsLike | None = None,
        graph: GraphLike = None,
        **options: Any,
    ) -> tuple[LiteOp, ...]:
        """Replace ops by other ones, or by a part of a file.

        Args:
            ops: the ops: objects, tensors that they make, places, a slice or a range.
            by: the kind of the op that replaces each of them; an op in no subgraph that
                replaces all; or a file, or a subgraph, whose inputs and outputs are put
                in the place of theirs, in the order of `boundary`.
            inputs: the tensors that a part takes, in the order of its inputs; those of
                the boundary if None.
            graph: the subgraph, as in `add_input`.
            **options: the options of the kind.

        Returns:
            The new ops.

        Raises:
            TFLiteError: ends differ in number, type, shape or quantization, or metadata
                tie ops by their places. Nothing has changed.

        Cost: linear in the ops and edges of the subgraph and of the part.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("RELU6", [x], name="y")])
            >>> m.replace("y", "RELU")
            (<LiteOp RELU -> 'y'>,)
        """
        return edit.replace(self, ops, by, options, inputs, graph)

    def expose(
        self,
        tensors: TensorsLike | Mapping[str, TensorLike],
        *,
        graph: GraphLike = None,
    ) -> None:
        """Let tensors be outputs besides those that there are.

        Args:
            tensors: the tensors, their names, or a mapping from the name of each in
                signatures.
            graph: the subgraph, as in `add_input`.

        Raises:
            TFLiteError: a signature has an output of the name, or a tensor is a handle.

        Cost: linear in the tensors of the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> m.set_outputs([m.add("EXP", [m.add("NEG", [x], name="a")], name="b")])
            >>> m.expose("a")
            >>> [t.name for t in m.graphs[0].outputs]
            ['b', 'a']
        """
        edit.expose(self, tensors, graph)

    def strip(
        self,
        *,
        unused: bool = True,
        buffers: bool = True,
        names: bool = False,
        metadata: bool | str | Iterable[str] = False,
    ) -> None:
        """Leave out the parts that the outputs of the file do not need.

        Args:
            unused: whether ops go that no output needs and that change no state,
                tensors and buffers that nothing uses, and subgraphs that nothing calls.
            buffers: whether tensors with the same bytes share a buffer.
            names: whether names of tensors inside and of subgraphs go.
            metadata: whether metadata go, all but the version of the runtime, with the
                description and the files that are packed with them; or the names of
                those that do.

        Raises:
            TFLiteError: there are no such metadata, or others tie ops by their places.

        Cost: linear in ops and tensors; `buffers` reads the weights that have the size
            of others.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [4])
            >>> y = m.add("EXP", [x], name="unread")
            >>> m.set_outputs([m.add("NEG", [x], name="y")])
            >>> m.strip()
            >>> m.find()
            (<LiteOp NEG -> 'y'>,)
        """
        stripping.strip(
            self, unused=unused, buffers=buffers, names=names, metadata=metadata
        )

    def verify(self) -> None:
        """Check that the file keeps every invariant of `geutil.tflite.verify`.

        Raises:
            VerificationError: with a line and a `Violation` for each breach.

        Cost: linear in ops and tensors.
        """
        verify.verify(self)

    # Numbers and shapes.

    def set_batch_size(
        self,
        size: int | None,
        *,
        inputs: TensorsLike | None = None,
        graph: GraphLike = None,
    ) -> None:
        """Set the batch size: the first size of the inputs, and all that follows of it.

        Shapes follow by rules for each kind of op. Constants that hold the batch size,
        such as the targets of Reshapes, are rewritten.

        Args:
            size: the new batch size; None is any.
            inputs: the inputs whose first dimension is the batch; all but scalars if
                None. An input is a tensor, its name, or its name in a signature.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: an op computes along the batch, or a constant could hold the
                batch size by chance, or the shapes of an op are unknown. The file is as
                it was.

        Cost: linear in ops and tensors.

        Example:
            >>> import numpy as np
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [1, 2, 2])
            >>> to = m.add_constant("to", np.array([1, 4], np.int32))
            >>> m.set_outputs([m.add("RESHAPE", [x, to], name="y")])
            >>> m.set_batch_size(8)
            >>> m.tensor("y"), m.tensor("to").value.tolist()
            (<LiteTensor 'y' float32 [8, 4]>, [8, 4])
        """
        from geutil.tflite import resizing

        graph = looking.graph_of(self, graph)
        named = [t for t in graph.inputs if t.shape] if inputs is None else inputs
        ends = looking.tensors_of(self, named, graph)
        resizing.set_batch_size(self, graph, size, ends)

    def set_input_shape(
        self,
        name: TensorLike,
        shape: Sequence[int | None],
        *,
        resize: Literal["scale", "keep"] | None = None,
        graph: GraphLike = None,
    ) -> None:
        """Set the shape of an input, and all that follows of it.

        Args:
            name: the input: a tensor, its name, or its name in a signature.
            shape: its new shape, of the same rank; None is a size that is free.
            resize: where the file resizes an image to a constant size: whether this is
                scaled with the input, or kept. If None, such a file is refused.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: see `set_batch_size`; or weights do not fit the new shape.

        Cost: linear in ops and tensors.

        Example:
            >>> from geutil import tflite
            >>> m = tflite.LiteFile()
            >>> x = m.add_input("x", "float32", [1, 8, 8, 3])
            >>> m.set_outputs([m.add("RELU", [x], name="y")])
            >>> m.set_input_shape("x", [1, 32, 32, 3])
            >>> m.tensor("y")
            <LiteTensor 'y' float32 [1, 32, 32, 3]>
        """
        from geutil.tflite import resizing

        graph = looking.graph_of(self, graph)
        end = looking.tensor_of(self, name, graph)
        resizing.set_input_shape(self, graph, end, shape, resize)

    @property
    def constants(self) -> Constants:
        """The constants of the file by the names of their tensors, as numbers.

        They are read in float, and written in float and stored in the type and steps of
        the file; numbers out of their range are clipped, with a warning, or with a
        report of `constants.write`.

        Example:
            >>> import numpy as np
            >>> from geutil import tflite
            >>> m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
            >>> _ = m.add_input("x", "int8", [3])
            >>> w = m.add_constant("w", np.int8([-2, 0, 4]), quantization=steps)
            >>> m.constants["w"]
            array([-1.,  0.,  2.], dtype=float32)
            >>> print(m.constants.write("w", np.array([0.3, 1.0, 99.0])))
            1 tensor changed; clipped: 1 of 'w'
            >>> w.value
            array([  1,   2, 127], dtype=int8)
        """
        from geutil.tflite.numbers import Constants

        return Constants(self.graphs)

    def set_quantization(
        self,
        tensor: TensorLike,
        scale: float | Sequence[float],
        zero_point: int | Sequence[int] = 0,
        *,
        graph: GraphLike = None,
    ) -> Stored:
        """Set the scale and zero point of a tensor, and of all that has to follow.

        Tensors that kernels such as those of RESHAPE or CONCATENATION tie to it get the
        same ones; constants among them are stored in the new steps; biases get the
        scale of the input times that of the weights.

        Args:
            tensor: the tensor, or its name: of activations, or weights.
            scale: the size of a step; for weights with scales for each channel, these.
            zero_point: the integer of the value 0.
            graph: the subgraph of the tensor; the main one if None.

        Returns:
            A report of the tensors that changed, and the numbers that were clipped.

        Raises:
            TFLiteError: it has no steps, or cannot have these: a kernel has its own
                built in, or a bias does not fit. The file is as it was.

        Cost: linear in ops and in the constants that change.

        Example:
            >>> from geutil import tflite
            >>> m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
            >>> x = m.add_input("x", "int8", [4], quantization=steps)
            >>> m.set_outputs([m.add("SQUEEZE", [x], name="y", quantization=steps)])
            >>> print(m.set_quantization("x", 0.25, -3))
            2 tensors changed; none clipped
            >>> print(m.tensor("y").quantization)
            scale 0.25, zero point -3
        """
        from geutil.tflite import numbers

        found = looking.tensor_of(self, tensor, looking.graph_of(self, graph))
        steps = numbers.new_steps(found, scale, zero_point)
        return numbers.set_quantization(self, found, steps)

    def set_io_type(
        self,
        inputs: Types = None,
        outputs: Types = None,
        *,
        steps: Mapping[str, Quantization] | None = None,
        graph: GraphLike = None,
    ) -> None:
        """Set the types of inputs and outputs: "int8", "uint8", "int16" or "float32".

        Kernels stay as they are: a QUANTIZE or DEQUANTIZE op at the end changes the
        type, and one that is not needed any more goes.

        Args:
            inputs: the type of all inputs that are quantized, or by name those of some.
                Names are those of the signature, if the subgraph has one.
            outputs: the same of outputs.
            steps: by name, the scales and zero points of ends that are float in the
                file's kernels, and are to become integers.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: there is no such end or type, or it cannot have that. The file
                is as it was.

        Cost: linear in the subgraph.

        Example:
            >>> from geutil import tflite
            >>> m, steps = tflite.LiteFile(), tflite.Quantization((0.5,))
            >>> x = m.add_input("x", "int8", [4], quantization=steps)
            >>> m.set_outputs([m.add("ABS", [x], name="y", quantization=steps)])
            >>> m.set_io_type("float32", "uint8")
            >>> [op.kind for op in m.ops], [t.dtype for t in m.graphs[0].outputs]
            (['QUANTIZE', 'ABS', 'QUANTIZE'], ['uint8'])
        """
        from geutil.tflite import ends

        found = looking.graph_of(self, graph)
        known = dict(steps or {})
        taken = ends.ends_of(self, found, "input", inputs, known)
        given = ends.ends_of(self, found, "output", outputs, known)
        idle = [*{*known} - {end.name for end in (*taken, *given)}]
        if idle:
            raise TFLiteError(
                f"there are steps for {sorted(idle)}, whose types are not to change"
            )
        ends.set_types(self, found, [*taken, *given])

    def dequantize(self) -> Stored:
        """Turn integers, and float16 weights, into float32: weights, kernels and ends.

        Activations that are fused into kernels stay; QUANTIZE and DEQUANTIZE ops go.

        Returns:
            A report of the tensors that changed.

        Raises:
            TFLiteError: a custom op reads or makes integers. The file is as it was.

        Cost: linear in ops and weights, which are four times as large.

        Example:
            >>> from geutil import tflite
            >>> m, steps = tflite.LiteFile(), tflite.Quantization((1 / 128,))
            >>> x = m.add_input("x", "int8", [4], quantization=steps)
            >>> y = m.add("TANH", [x], name="y", quantization=steps, version=2)
            >>> m.set_outputs([y])
            >>> print(m.dequantize())
            2 tensors changed; none clipped
            >>> m.tensor("y"), m.graphs[0].ops[0].version
            (<LiteTensor 'y' float32 [4]>, 1)
        """
        from geutil.tflite import floating

        return floating.dequantize(self)

    def append(
        self,
        other: LiteFile,
        connect: Mapping[str, str] | None = None,
        *,
        graph: GraphLike = None,
    ) -> None:
        """Put the main subgraph of another file behind: its inputs are outputs of this.

        Where types or steps differ, a QUANTIZE or DEQUANTIZE op stands between. Outputs
        that are not connected stay; so do the other file's inputs. Variables that have
        the same name in both files stay apart. The other file is not changed.

        Args:
            other: the other file.
            connect: by the names of its inputs, the names of outputs of this file, or
                of inputs that both are given. If None, those of the same name, or the
                only one and the only one.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: it is not clear which ends belong together, or shapes or types
                do not fit. The file is as it was.

        Cost: linear in both; weights are not copied.

        Example:
            >>> from geutil import tflite
            >>> first, second = tflite.LiteFile(), tflite.LiteFile()
            >>> for m, kind in ((first, "EXP"), (second, "NEG")):
            ...     m.set_outputs([m.add(kind, [m.add_input("x", "float32", [2])])])
            >>> first.append(second)
            >>> [op.kind for op in first.graphs[0].ops]
            ['EXP', 'NEG']
        """
        joining.append(self, other, connect, graph)

    def prepend(
        self,
        other: LiteFile,
        connect: Mapping[str, str] | None = None,
        *,
        graph: GraphLike = None,
    ) -> None:
        """Put the main subgraph of another file before: its outputs are inputs of this.

        Args:
            other: the other file; see `append`.
            connect: by the names of its outputs, the names of inputs of this file.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: see `append`.

        Cost: linear in both; weights are not copied.

        Example:
            >>> from geutil import tflite
            >>> first, second = tflite.LiteFile(), tflite.LiteFile()
            >>> for m, kind in ((first, "EXP"), (second, "NEG")):
            ...     m.set_outputs([m.add(kind, [m.add_input("x", "float32", [2])])])
            >>> first.prepend(second)
            >>> [op.kind for op in first.graphs[0].ops]
            ['NEG', 'EXP']
        """
        joining.prepend(self, other, connect, graph)

    def splice(
        self, other: LiteFile, at: TensorsLike, *, graph: GraphLike = None
    ) -> None:
        """Put the main subgraph of another file between tensors and their readers.

        Args:
            other: the other file, which takes and gives as many tensors; see `append`.
            at: the tensor, or tensors. Their readers, and the outputs that they are,
                get the outputs of the other file.
            graph: the subgraph; the main one if None.

        Raises:
            TFLiteError: see `append`.

        Cost: linear in both; weights are not copied.

        Example:
            >>> from geutil import tflite
            >>> m, part = tflite.LiteFile(), tflite.LiteFile()
            >>> for one, kind in ((m, "EXP"), (part, "ABS")):
            ...     x = one.add_input("x", "float32", [2])
            ...     one.set_outputs([one.add(kind, [x])])
            >>> m.splice(part, at="x")
            >>> [op.kind for op in m.graphs[0].ops]
            ['ABS', 'EXP']
        """
        joining.splice(self, other, at, graph)

    def merge(self, others: Mapping[str, LiteFile]) -> None:
        """Put other files beside this one: one file, a signature for each.

        Equal weights are stored once. Variables of different files stay apart.

        Args:
            others: the other files by the names of their signatures here; where one has
                several, they are called `<name>_<its own name>`.

        Raises:
            TFLiteError: there is a signature of that name. The file is as it was.

        Cost: linear in all of them, and in their weights, which are compared.

        Example:
            >>> from geutil import tflite
            >>> first, second = tflite.LiteFile(), tflite.LiteFile()
            >>> for m, kind in ((first, "EXP"), (second, "NEG")):
            ...     m.set_outputs([m.add(kind, [m.add_input("x", "float32", [2])])])
            >>> first.merge({"negative": second})
            >>> first
            LiteFile(['serving_default', 'negative'], 2 subgraph(s), 2 ops)
        """
        joining.merge(self, others)

    def to_model(self, *, signature: str | None = None) -> Any:
        """Return the model of the file, which can be trained and converted again.

        See `geutil.model.from_tflite`, which takes paths, too.

        Args:
            signature: the signature to return; `serving_default` or the only one if
                None.

        Returns:
            The `geutil.model.Model` of one signature; the others are in its
            `signatures`.

        Raises:
            ModelError: TensorFlow has no op for one of the file, such as a custom op of
                others; or there is no such signature.

        Cost: linear in ops, and in the bytes of the weights; it imports TensorFlow.
        """
        return lazy.provided("model of a TFLite file")(self, signature=signature)

    def __repr__(self) -> str:
        ops = sum(len(graph.ops) for graph in self.graphs)
        return (
            f"LiteFile({list(self.signatures)}, {len(self.graphs)} subgraph(s), "
            f"{ops} ops)"
        )


def open(source: str | os.PathLike[str] | bytes) -> LiteFile:
    """Open a TFLite file to look at it and to edit it.

    Args:
        source: the path of a file, which is mapped to memory, or the bytes of one.

    Raises:
        BrokenFileError: it is no TFLite file, or is not whole.
        OSError: it cannot be read.

    Cost: linear in tensors, ops and scales; some 50 us for each tensor and op. Weights
        are read when they are asked for.

    Example:
        >>> import numpy as np
        >>> from geutil import tflite
        >>> made = tflite.LiteFile()
        >>> graph = tflite.LiteGraph("main")
        >>> made.graphs.append(graph)
        >>> x, y = (tflite.LiteTensor(name, "float32", [2]) for name in "xy")
        >>> graph.inputs, graph.outputs = (x,), (y,)
        >>> _ = graph.add_op(tflite.LiteOp("NEG", [x], [y]))
        >>> tflite.open(made.to_bytes())
        LiteFile([], 1 subgraph(s), 1 ops)
    """
    file = LiteFile()
    if isinstance(source, bytes | bytearray | memoryview):
        read_into(file, bytes(source))
        return file
    path = Path(source)
    with path.open("rb") as opened:
        # An empty file cannot be mapped.
        size = os.fstat(opened.fileno()).st_size
        blob: Any = (
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        )
    read_into(file, blob)
    file.path = path
    return file
