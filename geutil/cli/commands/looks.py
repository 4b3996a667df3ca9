"""Commands that look at models: inspect, compare, draw."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geutil.cli import files, terminal
from geutil.cli.files import Batches
from geutil.cli.terminal import optional, plain, show, show_rows, working
from geutil.progress import counted

if TYPE_CHECKING:
    from geutil.quantize import Int8Comparison


def view(
    paths: terminal.SourcesOrLite,
    output: Annotated[
        Path | None,
        optional(
            "The page to write; by default the first model's name with .html.",
            "--output",
            "-o",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        optional(
            "Of several models: a .npz or .npy file, or a directory, to colour "
            "the layers of the last, a .tflite file, by their noise."
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Show what the model holds in memory, op by op."),
    ] = False,
    training: Annotated[
        bool,
        typer.Option(
            "--training", help="Draw a training step, and what it holds in memory."
        ),
    ] = False,
    size: Annotated[
        list[str] | None,
        optional(
            "input=8,8,3: with --memory or --training, the shape of an input "
            "whose file leaves sizes open."
        ),
    ] = None,
    batch: terminal.BatchSize = 32,
    signature: terminal.Signature = None,
    force: terminal.Force = False,
) -> None:
    """Draw models as a page to look into: one file that needs no network.

    Several models are stages of a pipeline (original, folded, quantized, file): any two
    of them are drawn side by side, with what changed. With --data, the quantized model
    before the file and the file are coloured by the noise of each layer. With --memory
    or --training a slider goes through a step, and lights the ops whose results are in
    memory, as predicted for a batch of --batch.
    """
    page = Path(f"{paths[0].absolute().stem}.html") if output is None else output
    if data is not None and not (len(paths) > 1 and files.is_lite(paths[-1])):
        raise files.CommandError(
            "--data tells the noise of a .tflite file behind the quantized model that "
            "it was made from; pass both, the file last"
        )
    held = memory or training
    if held and (len(paths) > 1 or (memory and training)):
        raise files.CommandError(
            "--memory and --training are of one model; give one of the two"
        )
    if size and not held:
        raise files.CommandError("--size goes with --memory or --training")
    for path in paths:
        files.check_source(path)
    files.check_page(page, force)
    # The page of a file alone needs no TensorFlow.
    if len(paths) == 1 and files.is_lite(paths[0]) and not held:
        from geutil.report.tflite_nodes import view_file

        title = paths[0].absolute().name
        files.write_page(page, lambda: view_file(paths[0], title))
        return
    batches = None if data is None else Batches(data, batch).of_file(paths[-2])
    read = files.read_model if held else files.read_drawn
    models = [read(path, signature, values=len(paths) > 1) for path in paths]
    files.start_tensorflow(registers=False)
    noise = None if batches is None else _noise_of(models, batches)
    from geutil import report

    if len(paths) == 1:
        title = paths[0].absolute().name
        if held:
            graph, timeline = _step_of(models[0], batch, size, training)
            title += ", a training step" if training else ", memory"
            files.write_page(
                page, lambda: report.view(graph, title=title, report=timeline)
            )
            return
        files.write_page(page, lambda: report.view(models[0], title=title))
        return
    stages = list(zip(_stage_names(paths), models, strict=True))
    files.write_page(page, lambda: report.pipeline(stages, noise=noise))


def _step_of(
    model: Any, batch: int, size: list[str] | None, training: bool
) -> tuple[Any, Any]:
    """Return the graph of a step, of the model or its training, and its timeline."""
    from geutil.cli.commands.memory import check_inputs, given_shapes, input_shapes
    from geutil.cli.training_step import TrainingStep
    from geutil.memory import predict

    given = given_shapes(size)
    check_inputs(model, given)
    shapes = input_shapes(model, batch, given)
    with working("predicting the memory"):
        if training:
            step = TrainingStep(model, shapes).built(None)
            return step.fetches[0].graph, step.timeline()
        of_tensors = {model.inputs[name].name: shape for name, shape in shapes.items()}
        return model, predict(list(model.outputs.values()), shapes=of_tensors)


def _stage_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of files; with their folders, or numbers, where names repeat."""
    absolute = [path.absolute() for path in paths]
    for depth in (1, 2):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [f"{at}: {name}" for at, name in enumerate(names, 1)]


def _noise_of(models: Sequence[Any], batches: Batches) -> Int8Comparison:
    """Return the noise of the layers of the last file, made from a model before it."""
    from geutil.quantize import compare_int8
    from geutil.report.stage_pairs import simulates_quantization

    quantized = [one for one in models if simulates_quantization(one)]
    if not quantized:
        raise files.CommandError(
            "none of the models simulates quantization, so the noise of layers is not "
            "known; pass the quantized model before the file, or leave out --data"
        )
    batches = batches.fitted(quantized[-1].inputs)
    blob = Path(models[-1]).read_bytes()
    counted_batches = counted(batches, len(batches), None, "running both")
    return compare_int8(quantized[-1], blob, counted_batches, layers=True)


Other = Annotated[Path, typer.Argument(help="The other model.", show_default=False)]


def diff(
    path: terminal.SourceOrLite,
    other: Other,
    html: terminal.Html = None,
    force: terminal.Force = False,
    signature: terminal.Signature = None,
    as_json: terminal.Json = False,
) -> int:
    """Show which ops two models have and have not in common; exit with 1 if any.

    Of a model and a .tflite file: what each op of the file computes, what is fused,
    what is missing, and what computes in floats.
    """
    files.check_source(other)
    files.check_page(html, force)
    are_files = files.is_lite(path) and files.is_lite(other)
    ours = files.read_drawn(path, signature)
    theirs = files.read_drawn(other, signature)
    from geutil import report
    from geutil.report.differences import diff_files

    difference = report.difference(ours, theirs)
    if html is not None:
        labels = (path.name, other.name)
        files.write_page(
            html,
            lambda: (
                diff_files(path, other, labels)
                if are_files
                else report.diff(ours, theirs, labels=labels)
            ),
        )
    show(difference, as_json=as_json)
    return 0 if difference.is_empty else 1


# The tolerances of `Model.compare`; samples as for one batch of a page.
_SAMPLES, _RTOL, _ATOL, _STEPS = 8, 1e-5, 1e-6, 1


def check(
    path: terminal.SourceOrLite,
    other: Annotated[
        Path | None, typer.Argument(help="The other model.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None, optional("A .npz or .npy file, or a directory.")
    ] = None,
    batch: terminal.BatchSize = 32,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many inputs to draw without data.",
            show_default=str(_SAMPLES),
        ),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(help="The relative tolerance.", show_default=str(_RTOL)),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(help="The absolute tolerance.", show_default=str(_ATOL)),
    ] = None,
    against: Annotated[
        Path | None,
        optional(
            "Of a .tflite file: the quantized model that it was made from; with "
            "--layers also the one in float that `geutil quantize` read."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many steps a file may be off its model.",
            show_default=str(_STEPS),
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Tell what each layer of a file costs.")
    ] = False,
    html: terminal.Html = None,
    force: terminal.Force = False,
    signature: terminal.Signature = None,
    as_json: terminal.Json = False,
) -> int:
    """Run two models on the same inputs; exit with 1 if what they give differs.

    A .tflite file is run beside the model that it was made from, with --against and
    --data, and differs if a value is more steps off than --steps: of a network that
    ends in a softmax one, of logits behind many layers some more.
    """
    tolerances = {"--samples": samples, "--rtol": rtol, "--atol": atol}
    of_files = {"--steps": steps, "--layers": layers or None, "--html": html}
    files.check_source(path)
    batches = None if data is None else Batches(data, batch)
    if not files.is_lite(path) or (other is not None and files.is_lite(other)):
        _refuse_unused({"--against": against, **of_files}, "are of .tflite files")
        if other is None:
            raise files.CommandError(f"pass another model to run beside '{path}'")
        limits = _RTOL if rtol is None else rtol, _ATOL if atol is None else atol
        return _check_models(
            (path, other), batches, samples or _SAMPLES, limits, signature, as_json
        )
    _refuse_unused(tolerances, "are of two models, and no .tflite file")
    if against is None or batches is None:
        model = "the quantized model that it was made from with --against"
        lacking = [] if against else [model]
        lacking += [] if batches is not None else ["inputs with --data"]
        raise files.CommandError(
            f"'{path}' is a TFLite file; pass {', and '.join(lacking)}"
        )
    files.check_page(html, force)
    comparison = _file_compared(path, against, batches, signature, layers, html)
    close = comparison.most <= (_STEPS if steps is None else steps)
    said = {**plain(comparison), "most": comparison.most, "close": close}
    show(said if as_json else comparison, as_json=as_json)
    return 0 if close else 1


def _check_models(
    paths: tuple[Path, Path],
    batches: Batches | None,
    samples: int,
    limits: tuple[float, float],
    signature: str | None,
    as_json: bool,
) -> int:
    """Run two models, show how far they are apart, and return the exit code."""
    files.check_source(paths[1])
    if batches is not None:
        batches = batches.of_file(paths[0], signature)
    files.check_same_inputs(paths, signature)
    ours, theirs = (files.read_model(path, signature) for path in paths)
    if batches is None:
        with working("running both"):
            comparison = ours.compare(theirs, None, samples, *limits)
    else:
        batches = batches.fitted(ours.inputs)
        counted_batches = counted(batches, len(batches), None, "running both")
        comparison = ours.compare(theirs, counted_batches, samples, *limits)
    equal = comparison.equal
    if as_json:
        show({**plain(comparison), "equal": equal}, as_json=True)
    else:
        print(comparison)
    return 0 if equal else 1


def _refuse_unused(given: Mapping[str, object], why: str) -> None:
    """Refuse options that would have no effect."""
    unused = [option for option, value in given.items() if value is not None]
    if unused:
        them = "it" if len(unused) == 1 else "them"
        raise files.CommandError(f"{', '.join(unused)} {why}; leave {them} out")


def _file_compared(
    path: Path,
    against: Path,
    batches: Batches,
    signature: str | None,
    layers: bool,
    html: Path | None,
) -> Int8Comparison:
    """Compare a file with its model, and draw both if there is to be a page."""
    batches = batches.of_file(against, signature)
    model = files.read_model(against, signature)
    batches = batches.fitted(model.inputs)
    from geutil import report
    from geutil.quantize import compare_int8

    if layers:
        _restore_quantization(model, path, against)
    blob = path.read_bytes()
    counted_batches = counted(batches, len(batches), None, "running both")
    comparison = compare_int8(model, blob, counted_batches, layers=layers)
    if html is not None:
        labels = (against.name, path.name)
        files.write_page(
            html, lambda: report.diff(model, blob, labels=labels, report=comparison)
        )
    return comparison


def _restore_quantization(model: Any, path: Path, against: Path) -> None:
    """Quantize a model in float as the file says that it was made from it."""
    from geutil import tflite
    from geutil.batchnorm import fold_batch_norms
    from geutil.quantize.tflite.conversion import ranges_kept
    from geutil.report.stage_pairs import simulates_quantization

    # The model that was passed is the quantized one, with nothing to restore.
    if simulates_quantization(model):
        return
    kept = ranges_kept(tflite.open(path))
    if kept is None:
        raise files.CommandError(
            f"'{against}' holds no FakeQuant op, and '{path}' keeps no ranges: make it "
            "with `geutil quantize --data`, or pass the quantized model that it was "
            "made from"
        )
    with working("quantizing as the file was"):
        # The ranges are those of layers whose batch norms were folded.
        if kept.folded:
            fold_batch_norms(model)
        kept.restore(model)


# Lines of scopes; the rest is counted.
_SHOWN = 12
# The exit code of `inspect --strict`; 1 and 2 are those of errors and usage.
_STRICT = 3


def inspect(
    path: terminal.SourceOrLite,
    with_scopes: Annotated[
        bool,
        typer.Option(
            "--scopes",
            help="Count the ops of each name scope, too; the model is opened for it.",
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 3 if the model can do more than compute."
        ),
    ] = False,
    signature: terminal.Signature = None,
    as_json: terminal.Json = False,
) -> int:
    """Show what is in a model: ops, inputs, outputs, variables, functions, size.

    And what it can do beyond computing, such as to write files. Of a .tflite file also
    what its ops compute in, and its quantization. TensorFlow is started for `--scopes`
    and for text forms only.
    """
    files.check_source(path)
    if files.is_lite(path):
        scopes = True if with_scopes else None
        unused = {"--scopes": scopes, "--signature": signature}
        _refuse_unused(unused, "is of models, and no .tflite file")
    if not with_scopes:
        _refuse_unused({"--signature": signature}, "goes with --scopes")
    if with_scopes or files.is_text(path):
        files.start_tensorflow()
    import geutil.model

    with working(f"reading {path.name}"):
        inspection = geutil.model.inspect(str(path))
        powers = geutil.model.powers(str(path))
    code = _STRICT if strict and not powers.computes_only else 0
    told = {**plain(inspection), "powers": plain(powers.entries)}
    # These facts need no opening, which can be refused below.
    if not as_json:
        print(inspection)
        print(f"capabilities: {powers}")
    if not with_scopes:
        if as_json:
            show(told, as_json=True)
        return code
    try:
        opened = files.read_model(path, signature, values=False)
        names = [op.name for op in opened.graph.get_operations()]
        counts, unknown = _scopes(names), ""
    except geutil.model.ModelError as error:
        counts, unknown = None, str(error)
    if as_json:
        show({**told, "scopes": counts}, as_json=True)
    else:
        print("\n".join(_shown(counts, unknown)))
    return code


def _scopes(names: Iterable[str]) -> dict[str, int]:
    """Return how many ops each scope holds, the largest first.

    The scopes are those of the first depth that has several.
    """
    paths = [name.split("/")[:-1] for name in names if "/" in name]
    counts: Counter[str] = Counter()
    for depth in range(1, max(map(len, paths), default=0) + 1):
        counts = Counter("/".join(path[:depth]) for path in paths)
        if len(counts) > 1:
            break
    return dict(counts.most_common())


def _shown(scopes: dict[str, int] | None, unknown: str) -> Iterator[str]:
    if scopes is None:
        yield f"ops by scope: not known, since the model cannot be opened: {unknown}"
        return
    yield f"ops by scope: {len(scopes)} scope(s)"
    yield from (f"  {name}: {n}" for name, n in list(scopes.items())[:_SHOWN])
    if len(scopes) > _SHOWN:
        yield f"  and {len(scopes) - _SHOWN} more (all of them with --json)"


def ops(
    path: terminal.SourceOrLite,
    regex: Annotated[
        str | None, typer.Option(help="Only ops whose names hold this.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="Only ops of this type.")
    ] = None,
    scope: Annotated[
        str | None, typer.Option(help="Only ops of this name scope or Keras layer.")
    ] = None,
    signature: terminal.Signature = None,
    as_json: terminal.Json = False,
) -> int:
    """List the ops of a model, one a line: name, type, shapes of the results.

    Of a .tflite file those of all subgraphs, with their types; TensorFlow is not
    started. Exit with 1 if there is no such op.
    """
    files.check_source(path)
    pattern = None if regex is None else files.compiled(regex)
    if files.is_lite(path):
        _refuse_unused({"--signature": signature}, "is of models, and no .tflite file")
        listed = _ops_of_file(path)
        scopes: tuple[str, ...] | None = None if scope is None else (scope,)
    else:
        graph = files.read_model(path, signature, values=False).graph
        from geutil.select import selections

        scopes = selections.scopes_meant([graph], scope)
        listed = [
            (op.name, op.type, ", ".join(str(t.shape) for t in op.outputs))
            for op in graph.get_operations()
        ]
    inside = tuple(f"{s.rstrip('/')}/" if s else "" for s in scopes or ("",))
    rows = [
        (name, type_, shapes)
        for name, type_, shapes in listed
        if (pattern is None or pattern.search(name))
        and (kind is None or type_ == kind)
        and f"{name}/".startswith(inside)
    ]
    # A program reads an empty list, where a person reads the message.
    if rows or as_json:
        show_rows(["name", "type", "shapes"], rows, as_json=as_json)
    if not rows:
        print(f"geutil: {_nothing(listed, regex, kind, scope)}", file=sys.stderr)
    return 0 if rows else 1


def _ops_of_file(path: Path) -> list[tuple[str, str, str]]:
    """Return the ops of a TFLite file: names, types, dtypes and shapes of results."""
    from geutil.report.tflite_nodes import file_subject

    drawn = file_subject(path)
    return [
        (f"{scope}{node.name}", node.type, ", ".join(node.outputs))
        for one in (drawn, *drawn.bodies)
        for scope in ("" if one is drawn else f"{one.label}/",)
        for node in one.nodes
        if node.op is not None
    ]


def _nothing(
    listed: Sequence[tuple[str, str, str]],
    regex: str | None,
    kind: str | None,
    scope: str | None,
) -> str:
    """Return the message that no op matches, with similar names."""
    kinds = sorted({type_ for _, type_, _ in listed})
    if kind is not None and kind not in kinds:
        return f"there is no op of type '{kind}'{meant(kind, kinds)}"
    scopes = sorted({name.rpartition("/")[0] for name, *_ in listed} - {""})
    if scope is not None and not any(
        s == scope or s.startswith(f"{scope}/") for s in scopes
    ):
        parts = {part for s in scopes for part in (s, *_above(s))}
        return f"there is no scope '{scope}'{meant(scope, sorted(parts))}"
    # With other options beside it, the expression may match ops that they leave out.
    if regex is not None and (kind is None and scope is None):
        names = [name for name, *_ in listed]
        return f"no name of an op holds '{regex}'{meant(regex, names)}"
    return "no op matches all of that; leave one of the options out"


def meant(word: str, words: Sequence[str]) -> str:
    """Return a question with the words that are nearest; "" if none is near.

    Example:
        >>> meant("conv2d", ["Conv2D", "Relu"])
        '; did you mean Conv2D?'
    """
    by_lower = {other.lower(): other for other in reversed(words)}
    near = get_close_matches(word.lower(), by_lower, n=3, cutoff=0.6)
    near += [low for low in by_lower if word.lower() in low and low not in near]
    found = ", ".join(by_lower[low] for low in near[:3])
    return f"; did you mean {found}?" if near else ""


def _above(scope: str) -> Iterator[str]:
    """Yield the scopes that hold a scope."""
    while "/" in scope:
        scope = scope.rpartition("/")[0]
        yield scope
