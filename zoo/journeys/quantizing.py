"""Quantizes a model to int8, next to TFLite's own post-training quantization."""

from __future__ import annotations

from typing import Any

from geutil import model
from geutil.batchnorm import fold_batch_norms
from geutil.errors import GeutilError
from geutil.quantize import QuantizeReport, calibrate, quantize, to_int8
from zoo import tflite
from zoo.journeys.visit import Visit
from zoo.results import MISSED, OK, Cell, judged, none, raised
from zoo.values import noise_in_order

NOISE = 1.1
SIZE = 1.05
# Below this both are as good as exact.
_LITTLE = 1e-7


def int8(visit: Visit) -> Cell:
    """Fold, quantize, calibrate, convert, and hold the file against PTQ's."""
    theirs = visit.made["ptq"]
    opened = model.open(visit.saved_model)
    fold_batch_norms(opened)
    try:
        report = quantize(opened, is_training=False)
        if not report.quantized:
            return none("nothing to quantize")
        calibrate(opened, visit.made["calibration"])
        blob = to_int8(opened)
    except GeutilError as error:
        refused = raised(error, is_own=True)
        if isinstance(theirs, str):
            return Cell(OK, "refused: PTQ fails too", f"{refused.note}; PTQ: {theirs}")
        return refused
    return _judged(visit, report, blob, theirs)


def _judged(visit: Visit, report: QuantizeReport, blob: bytes, theirs: Any) -> Cell:
    data, exact = visit.made["calibration"], visit.made["exact"]
    ops = tflite.file_ops(blob)
    floats = [op.kind for op in ops if op.is_float]
    missed = _said_wrongly(report, ops)
    try:
        ours = noise_in_order([tflite.run(blob, sample) for sample in data], exact)
    except (ValueError, RuntimeError) as error:
        return judged(False, "cannot run", " ".join(str(error).split()))
    text = "no float output" if ours is None else f"noise {ours:.1e}"
    if isinstance(theirs, str):
        return Cell(MISSED if missed else OK, f"{text}, PTQ fails", "; ".join(missed))
    if len(floats) > len(theirs["float_ops"]):
        missed.append(f"{len(floats)} float ops, PTQ {len(theirs['float_ops'])}")
    if len(blob) > SIZE * theirs["bytes"]:
        missed.append(f"{len(blob)} bytes, PTQ {theirs['bytes']}")
    found = theirs["outputs"]
    if isinstance(found, str):
        text += ", PTQ's cannot run"
    elif ours is not None:
        other = noise_in_order(found, exact) or 0.0
        ratio = ours / max(other, _LITTLE)
        text += f", {ratio:.2f} of PTQ's"
        if ratio > NOISE and ours > _LITTLE:
            missed.append(f"noise {ours:.1e}, PTQ {other:.1e}")
    return Cell(MISSED if missed else OK, text, "; ".join(missed))


def _said_wrongly(report: QuantizeReport, ops: list[tflite.FileOp]) -> list[str]:
    """Return the ops that the report calls quantized and the file computes in float."""
    by_name: dict[str, list[tflite.FileOp]] = {}
    for op in ops:
        for name in op.results:
            by_name.setdefault(name.split(":")[0], []).append(op)
    wrong = [
        entry
        for entry in report.quantized
        if by_name.get(entry.op) and all(op.is_float for op in by_name[entry.op])
    ]
    return [f"'{e.op}' ({e.op_type}) is float in the file" for e in wrong[:3]]
