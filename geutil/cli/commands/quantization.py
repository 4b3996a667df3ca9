"""Commands on the way to int8."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geutil.cli import files, terminal
from geutil.cli.files import Batches, CommandError, Record, tell
from geutil.cli.terminal import (
    FileOrder,
    Method,
    ModelFormat,
    Rounding,
    SchemeName,
    optional,
    plain,
    show,
    working,
)

if TYPE_CHECKING:
    from geutil.quantize.tflite.conversion import KeptRanges

Bits = Annotated[int, typer.Option(min=2, max=16)]
_WITHOUT_DATA = (
    SchemeName.dynamic_range,
    SchemeName.dynamic_range_int4,
    SchemeName.weight_only_int8,
    SchemeName.weight_only_int4,
    SchemeName.float16,
)
"""Schemes whose files need no ranges of activations."""


_OF_FLOATS = "`geutil check FILE --against MODEL --data DATA` does that"


def _next_command(output: Path, path: Path, data: Path | None, is_told: bool) -> str:
    """Return which command runs a file beside its model, layer by layer."""
    if is_told:
        words = "check", output, "--against", path, "--data", data, "--layers"
        return f"`geutil {shlex.join(map(str, words))}` does that, layer by layer"
    return (
        "write the quantized model, too, with another -o: `geutil check FILE --against "
        "QUANTIZED --data DATA --layers` does that, layer by layer"
    )


def quantize(
    path: terminal.Source,
    output: terminal.Target,
    data: Annotated[
        Path | None,
        optional(
            "Data to calibrate with: a .npz or .npy file, or a directory of them."
        ),
    ] = None,
    method: Annotated[Method, typer.Option(help="How.")] = Method.best,
    rounding: terminal.RoundingName = None,
    batch: terminal.BatchSize = 32,
    scheme: Annotated[
        SchemeName | None, optional("What is stored in how many bits.")
    ] = None,
    weight_bits: Bits = 8,
    activation_bits: Bits = 8,
    bits: Annotated[
        Path | None,
        optional("Bits of the weights of each layer: what `geutil bits` wrote."),
    ] = None,
    order: Annotated[
        FileOrder,
        typer.Option(
            help="The order of a .tflite file's ops: least_memory has the smallest "
            "arena."
        ),
    ] = FileOrder.converter,
    input_type: terminal.InputTypes = None,
    output_type: terminal.OutputTypes = None,
    scope: Annotated[
        str | None, typer.Option(help="Only ops of this name scope.")
    ] = None,
    skip: Annotated[
        list[str] | None, optional("A regex of ops to leave in float.")
    ] = None,
    keep_norms: Annotated[
        bool, typer.Option("--keep-norms", help="Do not fold batch norms first.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if an op stays float that need not.")
    ] = False,
    html: terminal.Html = None,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Insert FakeQuant ops, calibrate them, and write a model or a .tflite file.

    Batch norms are folded first. Without a scheme the file is one of int8.
    """
    record = Record(path, output, form, force).checked()
    files.check_page(html, force)
    batches = None if data is None else Batches(data, batch)
    to_file = files.format_of(output, form) is ModelFormat.tflite
    if to_file and batches is None and scheme not in _WITHOUT_DATA:
        raise CommandError(
            "an int8 file needs ranges; pass --data, or write a model and calibrate it"
        )
    if rounding and rounding is not Rounding.nearest and batches is None:
        raise CommandError(f"--rounding {rounding.value} needs data; pass --data")
    if bits is not None and not bits.is_file():
        raise CommandError(
            f"there is no plan of bits at '{bits}'; geutil bits -o writes one"
        )
    if order is FileOrder.least_memory:
        files.check_is_lite("the order least_memory", to_file)
    types_of_ends = _types_of_ends(input_type, output_type, to_file)
    if scheme is SchemeName.float16:
        files.check_is_lite("the scheme float16", to_file)
    for regex in skip or ():
        files.compiled(regex)
    if batches is not None:
        batches = batches.of_file(path, signature)
    model = record.read(signature, to_be_changed=True)
    if batches is not None:
        batches = batches.fitted(model.inputs)
    from geutil import report
    from geutil.batchnorm import fold_batch_norms
    from geutil.quantize.tflite.conversion import KeptRanges

    reports: dict[str, Any] = {}
    chosen: dict[str, int] = {}
    if bits is not None:
        scheme, chosen = _planned(bits, scheme)
    if not keep_norms:
        with working("folding"):
            reports["folded"] = fold_batch_norms(model)
    if scheme is SchemeName.float16:
        reports |= _write(model, output, form, force, scheme, order, types_of_ends)
        reports["written"] = record.written(model, why_not=_OF_FLOATS)
        _show(reports, as_json)
        return
    arguments = {
        "scheme": None if scheme is None else scheme.value,
        "weight_bits": weight_bits,
        "activation_bits": activation_bits,
        "scope": scope,
    }
    kept = KeptRanges(not keep_norms, arguments, tuple(skip or ()), chosen)
    with working("quantizing"):
        reports["quantized"] = inserted = kept.quantize(model, strict=strict)
    if batches is not None:
        reports["calibrated"] = _calibrated(model, batches, method, rounding)
    # Weights that data rounded are no others of the model's than in a model written.
    is_told = batches is not None and not reports["calibrated"].layers
    reports |= _write(
        model,
        output,
        form,
        force,
        scheme,
        order,
        types_of_ends,
        kept=kept if is_told else None,
    )
    why_not = _next_command(output, path, data, is_told) if to_file else ""
    if batches is None and scheme not in _WITHOUT_DATA:
        why_not = (
            "ranges of activations are as they were initialized; `geutil calibrate "
            "--data` sets them"
        )
    reports["written"] = record.written(model, batches, why_not)
    if html is not None:
        before = files.read_model(path, signature)
        title = f"{path.absolute().name}, quantized"
        files.write_page(
            html, lambda: report.diff(before, model, title=title, report=inserted)
        )
    _show(reports, as_json)


def _show(reports: dict[str, Any], as_json: bool) -> None:
    """Print the report of each step."""
    if not as_json:
        for report in reports.values():
            print(report)
        return
    plain_reports = {name: plain(report) for name, report in reports.items()}
    if "quantized" in reports:
        plain_reports["quantized"]["coverage"] = reports["quantized"].coverage
    show(plain_reports, as_json=True)


def _types_of_ends(
    inputs: list[str] | None, outputs: list[str] | None, to_file: bool
) -> dict[str, Any]:
    """Return the types of ends as `to_tflite` takes them."""
    types: dict[str, Any] = {}
    for option, given in (("input_type", inputs), ("output_type", outputs)):
        spelled = f"--{option.replace('_', '-')}"
        if given:
            files.check_is_lite(spelled, to_file)
        named = {"=" in text for text in given or ()}
        if len(named) > 1 or (len(given or ()) > 1 and named == {False}):
            raise CommandError(
                f"{spelled} takes one type for all, or NAME=TYPE for each of some"
            )
        for text in given or ():
            name, _, kind = text.rpartition("=")
            types[option] = {**types.get(option, {}), name: kind} if name else kind
    return types


def _planned(
    path: Path, scheme: SchemeName | None
) -> tuple[SchemeName, dict[str, int]]:
    """Return the scheme of a plan of bits, and the bits of each op by its name."""
    from geutil.quantize import BitPlan

    plan = BitPlan.load(path)
    planned = SchemeName(plan.scheme)
    if scheme is not None and scheme is not planned:
        raise CommandError(
            f"'{path}' is a plan for the scheme {plan.scheme}, and --scheme is "
            f"{scheme.value}; leave that out"
        )
    return planned, {op: layer.bits for layer in plan.layers for op in layer.ops}


def bits(
    path: terminal.Source,
    data: terminal.Data,
    size: Annotated[
        str | None,
        optional("The most bytes of weights, or a share of those in 8 bits, as 60%."),
    ] = None,
    noise: Annotated[
        float | None, optional("The signal to noise at the outputs, in dB.")
    ] = None,
    output: Annotated[
        Path | None,
        optional(
            "Where to write the plan, as JSON, for `geutil quantize --bits`.",
            "--output",
            "-o",
        ),
    ] = None,
    choices: Annotated[
        list[int] | None,
        optional(
            "Bits that a layer may have. Can be given several times.",
            "--bits",
            min=2,
            max=16,
        ),
    ] = None,
    scheme: Annotated[
        SchemeName, typer.Option(help="What is stored in how many bits.")
    ] = SchemeName.int8,
    method: Annotated[Method, typer.Option(help="How.")] = Method.best,
    batch: terminal.BatchSize = 32,
    keep_norms: Annotated[
        bool, typer.Option("--keep-norms", help="Do not fold batch norms first.")
    ] = False,
    html: terminal.Html = None,
    signature: terminal.Signature = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Choose the bits of each layer's weights, by --size or by --noise.

    Batch norms are folded first, as `geutil quantize` does.
    """
    files.check_source(path)
    if (size is None) is (noise is None):
        raise CommandError("bits are chosen under one budget; pass --size or --noise")
    budget = None if size is None else _size(size)
    if output is not None:
        files.check_place(output, force)
    files.check_page(html, force)
    batches = Batches(data, batch).of_file(path, signature)
    model = files.read_model(path, signature)
    batches = batches.fitted(model.inputs)
    from geutil import report
    from geutil.batchnorm import fold_batch_norms
    from geutil.quantize import choose_bits

    # Folding changes the weights whose bits are chosen.
    if not keep_norms:
        with working("folding"):
            fold_batch_norms(model)
    with working("choosing bits"):
        plan = choose_bits(
            model,
            batches,
            size=budget,
            noise=noise,
            bits=choices,
            scheme=scheme.value,
            method=method.value,
        )
    if output is not None:
        plan.save(output, overwrite=force)
    if html is not None:
        title = f"bits of {path.absolute().name}"
        files.write_page(html, lambda: report.bits(plan, title=title))
    show(plan, as_json=as_json)


def _size(text: str) -> int | float:
    """Return bytes, or a share."""
    try:
        if text.endswith("%"):
            return float(text.removesuffix("%")) / 100.0
        return int(text)
    except ValueError as error:
        raise CommandError(
            f"--size {text} is no size; pass whole bytes, or a share such as 60%"
        ) from error


def calibrate(
    path: terminal.Source,
    data: terminal.Data,
    output: terminal.Target,
    method: Annotated[Method, typer.Option(help="How.")] = Method.best,
    rounding: terminal.RoundingName = None,
    batch: terminal.BatchSize = 32,
    input_type: terminal.InputTypes = None,
    output_type: terminal.OutputTypes = None,
    signature: terminal.Signature = None,
    form: terminal.As = None,
    force: terminal.Force = False,
    as_json: terminal.Json = False,
) -> None:
    """Set the ranges of a quantized model from data."""
    record = Record(path, output, form, force).checked()
    to_file = files.format_of(output, form) is ModelFormat.tflite
    types_of_ends = _types_of_ends(input_type, output_type, to_file)
    batches = Batches(data, batch).of_file(path, signature)
    model = record.read(signature)
    batches = batches.fitted(model.inputs)
    report = _calibrated(model, batches, method, rounding)
    _write(model, output, form, force, types_of_ends=types_of_ends)
    written = record.written(model, why_not="it has other ranges")
    tell(written, report, as_json=as_json)


def _calibrated(
    model: Any, batches: Batches, method: Method, rounding: Rounding | None
) -> Any:
    from geutil.quantize import calibrate as set_ranges

    # It shows bars of its own: of batches, and of layers that are rounded.
    name = None if rounding is None else rounding.value
    return set_ranges(model, batches.files, method.value, rounding=name)


def _write(
    model: Any,
    output: Path,
    form: ModelFormat | None,
    force: bool,
    scheme: SchemeName | None = None,
    order: FileOrder = FileOrder.converter,
    types_of_ends: Mapping[str, Any] = MappingProxyType({}),
    *,
    kept: KeptRanges | None = None,
) -> dict[str, Any]:
    """Write a model, or its TFLite file with its ranges; return reports on the file."""
    if files.format_of(output, form) is not ModelFormat.tflite:
        files.write_model(model, output, form, force)
        return {}
    from geutil.quantize import least_memory_order, to_tflite

    reports: dict[str, Any] = {}
    with working("converting"):
        name = None if scheme is None else scheme.value
        blob = to_tflite(model, scheme=name, **types_of_ends)
    if order is FileOrder.least_memory:
        with working("ordering"):
            reports["order"] = reordered = least_memory_order(blob)
        blob = reordered.blob
    if kept is not None:
        blob = kept.within(model, blob)
    files.write_bytes(blob, output)
    return reports
