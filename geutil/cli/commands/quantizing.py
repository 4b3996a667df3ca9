"""Commands on the way to int8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from geutil.cli import files, options
from geutil.cli.files import Batches, CommandError
from geutil.cli.options import (
    As,
    BatchSize,
    Force,
    Json,
    Method,
    ModelFormat,
    SchemeName,
    Source,
)
from geutil.cli.output import counted, plain, show, working

Bits = Annotated[int, typer.Option(min=2, max=16)]
_WITHOUT_DATA = (
    SchemeName.dynamic_range,
    SchemeName.weight_only_int8,
    SchemeName.weight_only_int4,
    SchemeName.float16,
)
"""Schemes whose files need no ranges of activations."""


def quantize(
    path: Source,
    output: options.Target,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data to calibrate with: a .npz file, or a directory of them.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[Method, typer.Option(help="How.")] = Method.best,
    batch: BatchSize = 32,
    scheme: Annotated[
        SchemeName | None,
        typer.Option(help="What is stored in how many bits.", show_default=False),
    ] = None,
    weight_bits: Bits = 8,
    activation_bits: Bits = 8,
    scope: Annotated[
        str | None, typer.Option(help="Only ops of this name scope.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="A regex of ops to leave alone.", show_default=False),
    ] = None,
    keep_norms: Annotated[
        bool, typer.Option("--keep-norms", help="Do not fold batch norms first.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if an op stays float that need not.")
    ] = False,
    html: options.Html = None,
    signature: options.Signature = None,
    form: As = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Insert FakeQuant ops, calibrate them, and write a model or a .tflite file.

    Batch norms are folded first. Without a scheme the file is one of int8.
    """
    files.check_source(path)
    files.check_target(output, form, force)
    files.check_page(html, force)
    batches = None if data is None else Batches(data, batch)
    to_file = files.format_of(output, form) is ModelFormat.tflite
    if to_file and batches is None and scheme not in _WITHOUT_DATA:
        raise CommandError(
            "an int8 file needs ranges; pass --data, or write a model and calibrate it"
        )
    if scheme is SchemeName.float16 and not to_file:
        raise CommandError(
            "the scheme float16 is one of .tflite files; name the output so, or pass "
            "--format tflite"
        )
    model = files.read_model(path, signature)
    from geutil import report
    from geutil.batchnorm import fold_batch_norms
    from geutil.quantize import quantize as insert

    reports: dict[str, Any] = {}
    if not keep_norms:
        with working("folding"):
            reports["folded"] = fold_batch_norms(model)
    if scheme is SchemeName.float16:
        _write(model, output, form, force, scheme)
        _show(reports, as_json)
        return
    with working("quantizing"):
        reports["quantized"] = inserted = insert(
            model,
            scheme=None if scheme is None else scheme.value,
            is_training=False,
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            scope=scope,
            overrides=dict.fromkeys(skip or (), "skip"),
            strict=strict,
        )
    if batches is not None:
        reports["calibrated"] = _calibrated(model, batches, method)
    _write(model, output, form, force, scheme)
    if html is not None:
        before = files.read_model(path, signature)
        title = f"{path.absolute().name}, quantized"
        files.write_page(
            html, lambda: report.diff(before, model, title=title, report=inserted)
        )
    _show(reports, as_json)


def _show(reports: dict[str, Any], as_json: bool) -> None:
    """Print what was done, step by step."""
    if not as_json:
        for report in reports.values():
            print(report)
        return
    plain_reports = {name: plain(report) for name, report in reports.items()}
    if "quantized" in reports:
        plain_reports["quantized"]["coverage"] = reports["quantized"].coverage
    show(plain_reports, as_json=True)


def calibrate(
    path: Source,
    data: options.Data,
    output: options.Target,
    method: Annotated[Method, typer.Option(help="How.")] = Method.best,
    batch: BatchSize = 32,
    signature: options.Signature = None,
    form: As = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Set the ranges of a quantized model from data."""
    files.check_source(path)
    files.check_target(output, form, force)
    batches = Batches(data, batch)
    model = files.read_model(path, signature)
    report = _calibrated(model, batches, method)
    _write(model, output, form, force)
    show(report, as_json=as_json)


def _calibrated(model: Any, batches: Batches, method: Method) -> Any:
    from geutil.quantize import calibrate as set_ranges

    counted_batches = counted(batches, "calibrating", len(batches))
    return set_ranges(model, counted_batches, method.value, progress=False)


def _write(
    model: Any,
    output: Path,
    form: ModelFormat | None,
    force: bool,
    scheme: SchemeName | None = None,
) -> None:
    """Write a model, or its TFLite file."""
    if files.format_of(output, form) is not ModelFormat.tflite:
        files.write_model(model, output, form, force)
        return
    from geutil.quantize import to_tflite

    with working("converting"), files.held_back():
        blob = to_tflite(model, scheme=None if scheme is None else scheme.value)
    files.write_bytes(blob, output)
