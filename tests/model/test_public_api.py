"""The public surface of `geutil.model`, frozen; see tests/test_public_api.py."""

import inspect

from geutil import GeutilError, model
from tests.documented import check_surface, frozen, missing_parts

OTHERS = """
    BatchEntry BatchReport BatchStep Comparison Difference Inspection Layer ModelError
    ModelFunction Power Powers RayExecutor StripReport Stripped TFLiteInspection
"""
# What methods and functions take and give, annotations included.
SIGNATURES = """
batch(paths: Paths, pipeline: Pipeline, output: PathLike, *, data: Data = None,
    signature: str | None = None, executor: Executor | None = None, workers: int |
    None = None, timeout: float | None = 3600.0, resume: bool = True, pages: bool =
    False, progress: bool | None = None) -> BatchReport
from_tflite(file: LiteFile | str | os.PathLike[str] | bytes, *, signature: str | None =
    None) -> Model
inspect(path: PathLike, *, tags: Iterable[str] | None = None) -> Inspection
open(source: Any, *, signature: str | None = None, tags: Sequence[str] | str | None =
    None, inline: bool = True, inputs: Ends = None, outputs: Ends = None,
    session: Any = None, powers: str = any, isolated: bool = False, trainable:
    Iterable[str] | None = None) -> Model
powers(source: PathLike) -> Powers
tflite_kinds() -> tuple[str, ...]
Model.run(self, data: Any = None, /, **inputs: Any) -> dict[str, np.ndarray[Any,
    Any]]
Model.restore(self, checkpoint: str | Path) -> list[str]
Model.to_function(self) -> ModelFunction
Model.freeze(self) -> Model
Model.thaw(self, regex: str | re.Pattern[str]) -> Model
Model.save(self, path: str | Path, format: str = saved_model, *, overwrite: bool =
    False, select_tf_ops: bool = False) -> Path
Model.cut(self, inputs: Selection | None = None, outputs: Selection | None = None, *,
    signature: str | None = None) -> Model
Model.splice(self, other: Model, replaced: Links, feeds: Links = (), *,
    scope: str = spliced, signature: str | None = None) -> Model
Model.join(self, other: Model, inputs: Mapping[str, str] | Iterable[str] = (), *,
    scope: str = joined, signature: str | None = None) -> Model
Model.prepend(self, other: Model, inputs: Mapping[str, str] | None = None, *,
    signature: str | None = None) -> Model
Model.append(self, other: Model, inputs: Mapping[str, str] | None = None, *,
    signature: str | None = None) -> Model
Model.rename(self, inputs: Mapping[str, str] | None = None, outputs: Mapping[str, str] |
    None = None, signature: str | None = None) -> Model
Model.strip_training(self, *, switches: Mapping[str, Any] | None = None, statistics:
    Mapping[str, tuple[str, str]] | None = None, keep: Iterable[Any] = (), neutral:
    Mapping[str, Any] | None = None) -> Model
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
METHODS = [name.partition(".")[::2] for name in frozen(SIGNATURES) if "." in name]
PROPERTIES = "assets functions graph layers op_count signatures variables"
# For tools that are built on models: they are documented, and may still change.
FOR_TOOLS = """
    concrete_function derived holdings opened_signatures program reached_ops rebuilt
    unopened_signatures
"""


def test_the_public_surface():
    of_bodies = [name for owner, name in METHODS if owner == "Body"]
    whole = ["tflite_kinds", *(f"Body.{name}" for name in of_bodies)]
    check_surface(model, OTHERS, SIGNATURES, whole)
    for name in of_bodies:
        # Bodies have one example, at their class.
        parts = missing_parts(getattr(model.Body, name), raises=True, cost=True)
        assert set(parts) <= {"Example"}, name
    public = [name for name in dir(model.Model) if not name.startswith("_")]
    methods = [name for owner, name in METHODS if owner == "Model"]
    assert {*public} == {*methods, *PROPERTIES.split(), *FOR_TOOLS.split()}
    assert [n for n in public if not inspect.getdoc(getattr(model.Model, n))] == []
    assert {GeutilError, ValueError} <= {*model.ModelError.__mro__}
