"""The public surface of `geutil.model`, frozen; see tests/test_public_api.py."""

from __future__ import annotations

import inspect

from geutil import GeutilError, model
from tests.documented import frozen, missing_parts, signature

NAMES = """
    BatchEntry BatchReport BatchStep Body Comparison Difference Inspection Layer Model
    ModelError ModelFunction Power Powers RayExecutor StripReport Stripped
    TFLiteInspection batch inspect open powers
"""
# What methods and functions take and give, annotations included.
SIGNATURES = """
batch(paths: Paths, pipeline: Pipeline, output: PathLike, *, data: Data = None,
    signature: str | None = None, executor: Executor | None = None, workers: int |
    None = None, timeout: float | None = 3600.0, resume: bool = True, pages: bool =
    False, progress: bool | None = None) -> BatchReport
inspect(path: PathLike, *, tags: Iterable[str] | None = None) -> Inspection
open(source: Any, *, signature: str | None = None, tags: Sequence[str] | str | None =
    None, inline: bool = True, inputs: Ends = None, outputs: Ends = None,
    session: Any = None, powers: str = any, isolated: bool = False) -> Model
powers(source: PathLike) -> Powers
Model.run(self, data: Any = None, /, **inputs: Any) -> dict[str, np.ndarray[Any,
    Any]]
Model.restore(self, checkpoint: str | Path) -> list[str]
Model.to_function(self) -> ModelFunction
Model.freeze(self) -> Model
Model.thaw(self, regex: str | re.Pattern[str]) -> Model
Model.save(self, path: str | Path, format: str = saved_model, *, overwrite: bool =
    False, select_tf_ops: bool = False) -> Path
Model.cut(self, inputs: Selection | None = None, outputs: Selection | None = None) ->
    Model
Model.splice(self, other: Model, replaced: joining.Links, feeds: joining.Links = (), *,
    scope: str = spliced) -> Model
Model.prepend(self, other: Model, inputs: Mapping[str, str] | None = None) -> Model
Model.append(self, other: Model, inputs: Mapping[str, str] | None = None) -> Model
Model.rename(self, inputs: Mapping[str, str] | None = None, outputs: Mapping[str, str] |
    None = None, signature: str | None = None) -> Model
Model.strip_training(self, *, switches: Mapping[str, Any] | None = None, statistics:
    Mapping[str, tuple[str, str]] | None = None, keep: Iterable[Any] = ()) -> Model
Model.without_powers(self) -> Model
Model.unroll(self, loops: Any = None, *, max_ops: int = 100000) -> Model
Model.replace_op(self, ops: Any, replacement: str | Callable[..., Any]) -> Model
Model.set_batch_size(self, size: int | None, *, inputs: Iterable[str] | None = None,
    samples: Mapping[str, Any] | None = None, verify: bool = True) -> Model
Model.compare(self, other: Model, inputs: Any = None, samples: int = 8, rtol: float =
    1e-05, atol: float = 1e-06) -> Comparison
Body.add_input(self, name: str, dtype: Any, shape: Any = None, *, value: Value) ->
    Tensor
Body.remove_input(self, name: str) -> None
Body.add_output(self, name: str, tensor: Tensor | Mapping[str, Tensor]) ->
    tuple[Tensor, ...]
Body.remove_output(self, name: str) -> None
"""
FROZEN = frozen(SIGNATURES)
PROPERTIES = ["assets", "functions", "graph", "layers", "signatures", "variables"]
# For tools that are built on models: they are documented, and may still change.
FOR_TOOLS = """
    concrete_function derived holdings opened_signatures program reached_ops rebuilt
    unopened_signatures
"""
CLASSES = {"Model": model.Model, "Body": model.Body}


def member(name: str) -> object:
    owner, _, method = name.rpartition(".")
    return getattr(CLASSES[owner], method) if owner else getattr(model, name)


def test_the_public_names():
    assert sorted(model.__all__) == sorted(NAMES.split())


def test_signatures():
    found = {name: f"{name}{signature(member(name))}" for name in FROZEN}
    assert found == FROZEN


def test_a_model_has_no_other_members():
    public = {name for name in dir(model.Model) if not name.startswith("_")}
    methods = {n.partition(".")[2] for n in FROZEN if n.startswith("Model.")}
    assert public == methods | set(PROPERTIES) | set(FOR_TOOLS.split())


def test_docstrings():
    missing = {
        name: missing_parts(member(name), raises=True, cost=True) for name in FROZEN
    }
    # Bodies have one example, at their class.
    needed = {
        n: [p for p in parts if p != "Example" or not n.startswith("Body")]
        for n, parts in missing.items()
    }
    assert {name: parts for name, parts in needed.items() if parts} == {}
    public = [name for name in dir(model.Model) if not name.startswith("_")]
    assert [n for n in public if not inspect.getdoc(getattr(model.Model, n))] == []


def test_a_model_error_is_a_value_error():
    assert issubclass(model.ModelError, GeutilError)
    assert issubclass(model.ModelError, ValueError)
