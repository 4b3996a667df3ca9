"""The public surface of `geutil.tflite`, frozen; see tests/test_public_api.py.

Every call is made with every wrong argument, too: it is refused by an error that names
it, and the file is as it was, or can be written.
"""

import inspect
import operator

import numpy as np
import pytest

from geutil import tflite
from geutil.errors import ArgumentTypeError, GeutilError
from geutil.tflite import LiteFile, LiteGraph, LiteOp, LiteTensor, Quantization
from tests.documented import check_surface, frozen
from tests.tflite.declared import chain

OTHERS = "BrokenFileError"
SIGNATURES = """
LiteFile.add(file: Contents, kind: str, inputs: TensorLike | Iterable[TensorLike |
    None], *, name: str | Sequence[str] | None = None, shape: Sequence[int | None] |
    None = None, dtype: str | None = None, quantization: Quantization | None = None,
    outputs: Sequence[LiteTensor] | None = None, version: int | None = None,
    custom_options: bytes | None = None, at: int | None = None, graph: GraphLike =
    None, **options: Any) -> Any
LiteFile.add_constant(file: Contents, name: str, value: Any, *, dtype: str | None =
    None, quantization: Quantization | None = None, graph: GraphLike = None) ->
    LiteTensor
LiteFile.add_graph(file: Contents, name: str) -> LiteGraph
LiteFile.add_input(file: Contents, name: str, dtype: str, shape: Sequence[int |
    None] | None, *, quantization: Quantization | None = None, graph: GraphLike =
    None) -> LiteTensor
LiteFile.add_signature(file: Contents, key: str, inputs: Mapping[str, TensorLike] |
    None = None, outputs: Mapping[str, TensorLike] | None = None, *, graph:
    GraphLike = None) -> LiteSignature
LiteFile.ancestors(file: Contents, tensors: TensorsLike, *, stop_at: TensorsLike =
    (), graph: GraphLike = None) -> tuple[LiteOp, ...]
LiteFile.append(file: F, other: F, connect: Mapping[str, str] | None = None, *,
    graph: GraphLike = None) -> None
LiteFile.boundary(file: Contents, ops: OpsLike, *, graph: GraphLike = None) ->
    tuple[list[LiteTensor], list[LiteTensor]]
LiteFile.bypass(file: Contents, op: OpLike, read: TensorLike | None = None, *,
    graph: GraphLike = None) -> None
LiteFile.clusters(file: F, parts: Sequence[OpsLike], names: Sequence[str] | None =
    None, *, graph: GraphLike = None) -> F
LiteFile.cut(file: F, inputs: Ends | None = None, outputs: Ends | None = None, *,
    ops: OpsLike | None = None, graph: GraphLike = None) -> F
LiteFile.dequantize(file: Contents) -> Stored
LiteFile.descendants(file: Contents, tensors: TensorsLike, *, stop_at: TensorsLike =
    (), graph: GraphLike = None) -> tuple[LiteOp, ...]
LiteFile.expose(file: Contents, tensors: TensorsLike | Mapping[str, TensorLike], *,
    graph: GraphLike = None) -> None
LiteFile.find(file: Contents, kind: str | Iterable[str] | None = None, *, name: str
    | None = None, regex: str | re.Pattern[str] | None = None, where:
    Callable[[LiteOp], Any] | None = None, graph: GraphLike = None) -> tuple[LiteOp,
    ...]
LiteFile.find_tensors(file: Contents, *, name: str | None = None, regex: str |
    re.Pattern[str] | None = None, dtype: str | None = None, where:
    Callable[[LiteTensor], Any] | None = None, graph: GraphLike = None) ->
    tuple[LiteTensor, ...]
LiteFile.insert(file: Contents, tensor: TensorLike, by: Replacement, *, consumers:
    OpsLike | None = None, name: str | None = None, graph: GraphLike = None,
    **options: Any) -> LiteTensor
LiteFile.keep_signatures(file: F, *keys: str) -> F
LiteFile.keep_subgraphs(file: F, *graphs: GraphLike) -> F
LiteFile.merge(file: F, others: Mapping[str, F]) -> None
LiteFile.op(file: Contents, op: OpLike, *, graph: GraphLike = None) -> LiteOp
LiteFile.prepend(file: F, other: F, connect: Mapping[str, str] | None = None, *,
    graph: GraphLike = None) -> None
LiteFile.remove(file: Contents, ops: OpsLike, *, graph: GraphLike = None) -> None
LiteFile.rename(file: Contents, inputs: Mapping[str, str] | None = None, outputs:
    Mapping[str, str] | None = None, *, tensors: Mapping[str, str] | None = None,
    signatures: Mapping[str, str] | None = None, from_signature: bool | str = False,
    graph: GraphLike = None) -> None
LiteFile.replace(file: Contents, ops: OpsLike, by: Replacement, *, inputs:
    TensorsLike | None = None, graph: GraphLike = None, **options: Any) ->
    tuple[LiteOp, ...]
LiteFile.reroute(file: Contents, old: TensorLike, new: TensorLike, *, consumers:
    OpsLike | None = None, graph: GraphLike = None) -> None
LiteFile.save(self, path: str | os.PathLike[str], *, overwrite: bool = False) ->
    Path
LiteFile.set_batch_size(file: Contents, size: int | None, *, inputs: TensorsLike |
    None = None, graph: GraphLike = None) -> None
LiteFile.set_input_shape(file: Contents, name: TensorLike, shape: Sequence[int |
    None], *, resize: "Literal[scale, keep] | None" = None, graph: GraphLike = None)
    -> None
LiteFile.set_io_type(file: Contents, inputs: Types = None, outputs: Types = None, *,
    steps: Mapping[str, Quantization] | None = None, graph: GraphLike = None) ->
    None
LiteFile.set_outputs(file: Contents, outputs: TensorsLike, *, graph: GraphLike =
    None) -> None
LiteFile.set_quantization(file: Contents, tensor: TensorLike, scale: float |
    Sequence[float], zero_point: int | Sequence[int] = 0, *, graph: GraphLike =
    None) -> Stored
LiteFile.splice(file: F, other: F, at: TensorsLike, *, graph: GraphLike = None) ->
    None
LiteFile.split(file: F, at: TensorsLike, *, graph: GraphLike = None) -> tuple[F, F]
LiteFile.strip(file: Contents, *, unused: bool = True, buffers: bool = True, names:
    bool = False, metadata: bool | str | Iterable[str] = False) -> None
LiteFile.swap(file: Contents, one: TensorLike, other: TensorLike, *, graph:
    GraphLike = None) -> None
LiteFile.tensor(file: Contents, name: TensorLike, *, graph: GraphLike = None) ->
    LiteTensor
LiteFile.to_bytes(self) -> bytes
LiteFile.to_model(self, *, signature: str | None = None) -> Any
LiteFile.verify(file: Contents) -> None
LiteGraph(name: str = ) -> None
LiteGraph.add_op(self, op: LiteOp, at: int | None = None) -> LiteOp
LiteGraph.add_tensor(self, tensor: LiteTensor) -> LiteTensor
LiteGraph.add_tensors(self, tensors: Iterable[LiteTensor | None]) -> None
LiteGraph.drop_tensors(self, tensors: Iterable[LiteTensor]) -> None
LiteGraph.has_tensor(self, tensor: LiteTensor) -> bool
LiteGraph.read_tensors(self, tensors: Iterable[LiteTensor]) -> None
LiteGraph.set_ops(self, ops: Iterable[LiteOp]) -> None
LiteOp(kind: str, inputs: Iterable[LiteTensor | None], outputs:
    Iterable[LiteTensor], options: Mapping[str, Any] | None = None, *, version: int
    = 1, custom_options: bytes | None = None) -> None
LiteOp.copied(self, tensors: Mapping[LiteTensor, LiteTensor], kind: str | None =
    None) -> LiteOp
LiteOp.set_input(self, slot: int, tensor: LiteTensor | None) -> None
LiteOp.set_output(self, slot: int, tensor: LiteTensor) -> None
LiteSignature(key: str, graph: LiteGraph, inputs: dict[str, LiteTensor], outputs:
    dict[str, LiteTensor]) -> None
LiteTensor(name: str, dtype: str, shape: Sequence[int | None] | None, quantization:
    Quantization | None = None, buffer: Buffer | None = None) -> None
LiteTensor.copied(self) -> LiteTensor
LiteTensor.in_steps(self) -> Quantization
LiteTensor.like(self, dtype: str | None = None) -> LiteTensor
LiteTensor.store(self, value: Array, dtype: str) -> None
Quantization(scales: tuple[float, ...], zero_points: tuple[int, ...] = (0,), axis:
    int = 0, block: int = 0, block_scales: LiteTensor | None = None, block_zeros:
    LiteTensor | None = None) -> None
Quantization.along(self, rank: int) -> tuple[Array, Array]
Quantization.of(scales: Array | float, axis: int = 0, zero: int = 0) -> Quantization
open(source: str | os.PathLike[str] | bytes) -> LiteFile
"""


def test_the_public_surface():
    table = frozen(SIGNATURES)
    # Costs are linear where no call says otherwise; see `LiteFile`.
    parts = [name for name in table if name != "open"]
    check_surface(tflite, OTHERS, SIGNATURES, parts)
    members = {name: operator.attrgetter(name)(tflite) for name in table}
    jobs = {n: m for n, m in members.items() if n.startswith("LiteFile.")}
    assert len(jobs) == len(
        [m for m, _ in inspect.getmembers(LiteFile, callable) if m[0] != "_"]
    )
    assert [n for n, m in jobs.items() if "\nExample:\n" not in inspect.getdoc(m)] == []


STEPS = Quantization((0.5,))


def made():
    """Return a file of two ops in integers, a weight, and a signature."""
    m = tflite.LiteFile()
    x = m.add_input("x", "int8", [1, 4], quantization=STEPS)
    w = m.add_constant("w", np.eye(4, dtype=np.int8), quantization=STEPS)
    t = m.add("FULLY_CONNECTED", [x, w, None], name="t", quantization=STEPS)
    m.add("ABS", [t], name="idle", quantization=STEPS)
    m.set_outputs([m.add("ABS", [t], name="y", quantization=STEPS)])
    m.add_signature("serve", {"image": "x"}, {"scores": "y"})
    return m


VALID = {
    "add": lambda m: {"kind": "ABS", "inputs": "y", "name": "z"},
    "add_constant": lambda m: {"name": "c", "value": [1.0, 2.0]},
    "add_graph": lambda m: {"name": "body"},
    "add_input": lambda m: {"name": "more", "dtype": "float32", "shape": [2]},
    "add_signature": lambda m: {"key": "more"},
    "ancestors": lambda m: {"tensors": "y"},
    "append": lambda m: {"other": made()},
    "boundary": lambda m: {"ops": "t"},
    "bypass": lambda m: {"op": "y"},
    "clusters": lambda m: {"parts": [range(1), range(2, 3)]},
    "cut": lambda m: {"outputs": "t"},
    "dequantize": lambda m: {},
    "descendants": lambda m: {"tensors": "x"},
    "expose": lambda m: {"tensors": "t"},
    "find": lambda m: {"kind": "ABS"},
    "find_tensors": lambda m: {"name": "y"},
    "insert": lambda m: {"tensor": "t", "by": "ABS"},
    "keep_signatures": lambda m: {"keys": "serve"},
    "keep_subgraphs": lambda m: {"graphs": 0},
    "merge": lambda m: {"others": {"other": made()}},
    "op": lambda m: {"op": "y"},
    "prepend": lambda m: {"other": made(), "connect": {"scores": "image"}},
    "remove": lambda m: {"ops": "idle"},
    "rename": lambda m: {"inputs": {"x": "z"}},
    "replace": lambda m: {"ops": "y", "by": "RELU"},
    "reroute": lambda m: {"old": "y", "new": "y"},
    "set_batch_size": lambda m: {"size": 2},
    "set_input_shape": lambda m: {"name": "x", "shape": [2, 4]},
    "set_io_type": lambda m: {"inputs": "float32"},
    "set_outputs": lambda m: {"outputs": "t"},
    "set_quantization": lambda m: {"tensor": "y", "scale": 0.25},
    "splice": lambda m: {"other": made(), "at": "t"},
    "split": lambda m: {"at": "t"},
    "strip": lambda m: {},
    "swap": lambda m: {"one": "idle", "other": "y"},
    "tensor": lambda m: {"name": "y"},
    "to_bytes": lambda m: {},
    "verify": lambda m: {},
}
"""Right arguments of each call, without those that can be left out."""
FOREIGN = chain("NEG")
WRONG = {
    "None": None,
    "number": 3,
    "negative": -1,
    "fraction": 1.5,
    "nan": float("nan"),
    "bool": True,
    "bytes": b"x",
    "object": object(),
    "surrogate": "\ud800",
    "unknown": "no such name",
    "empty": "",
    "list": [],
    "objects": [object()],
    "mapping": {},
    "numbers": {1: 2},
    "surrogates": {"x": "\ud800"},
    "nested": [[["x"]]],
    "range": range(7, 9),
    "slice": slice(7, 9),
    "tensor": FOREIGN.tensor("t0"),
    "op": FOREIGN.op("t0"),
    "graph": FOREIGN.graphs[0],
    "file": FOREIGN,
    "steps": Quantization((float("nan"),), (300,)),
    "array": np.zeros([2, 2]),
}


def call(m, name, arguments):
    """Call a method of a file, whose lists of arguments are passed by place."""
    function = getattr(m, name)
    kinds = {n: p.kind for n, p in inspect.signature(function).parameters.items()}
    places = [
        v for n, v in arguments.items() if kinds[n] is inspect.Parameter.VAR_POSITIONAL
    ]
    named = {
        n: v
        for n, v in arguments.items()
        if kinds[n] is not inspect.Parameter.VAR_POSITIONAL
    }
    return function(*places, **named)


@pytest.mark.parametrize("name", VALID)
def test_wrong_arguments_are_refused_by_name(name):
    parameters = inspect.signature(getattr(LiteFile, name)).parameters.values()
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    before = made().to_bytes()
    for parameter in names[1:]:
        for wrong, value in WRONG.items():
            m = made()
            try:
                call(m, name, {**VALID[name](m), parameter: value})
            except ArgumentTypeError as error:
                assert f"{parameter}=" in str(error), (parameter, wrong)
            except GeutilError as error:
                assert isinstance(error, ValueError), (parameter, wrong)
            else:
                # It has a meaning, so the file can be written.
                m.to_bytes()
                continue
            assert m.to_bytes() == before, (parameter, wrong)


@pytest.mark.parametrize("name", VALID)
def test_an_empty_file_is_told(name):
    m = tflite.LiteFile()
    try:
        call(m, name, VALID[name](made()))
    except GeutilError as error:
        assert isinstance(error, ValueError)


@pytest.mark.parametrize("name", VALID)
def test_right_arguments_are_taken(name):
    m = made()
    call(m, name, VALID[name](m))
    m.verify()


WRONGLY_MADE = [
    (lambda: tflite.open(3), "open: source= cannot be 3 of type int; pass"),
    (lambda: made().save(3), "save: path= cannot be 3"),
    (lambda: made().to_model(signature=3), "to_model: signature= cannot be 3"),
    (lambda: LiteTensor(3, "int8", [1]), "name= cannot be 3"),
    (lambda: LiteTensor("x", "int8", "ab"), "shape= cannot be 'ab'"),
    (lambda: LiteOp(None, [], []), "kind= cannot be None"),
    (lambda: LiteOp("NEG", [3], []), "inputs= cannot be .3."),
    (lambda: LiteGraph("m").add_op("NEG"), "op= cannot be 'NEG'"),
    (lambda: LiteGraph("m").add_op(FOREIGN.op(0)), "is in a subgraph already"),
    (lambda: FOREIGN.op(0).set_input(1, None), "has 1 slots, and no slot 1"),
    (lambda: Quantization(0.5), "scales= of steps cannot be 0.5"),
    (lambda: Quantization((0.5,), (1.5,)), "zero_points= of steps cannot be"),
]


@pytest.mark.parametrize("case", WRONGLY_MADE, ids=lambda case: case[1][:24])
def test_wrong_parts_are_refused(case):
    make, reason = case
    with pytest.raises((TypeError, ValueError), match=reason):
        make()
