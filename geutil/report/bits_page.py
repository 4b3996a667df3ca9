"""A page of a plan of bits: size against noise, and the bits of each layer.

It needs no script: the curve is drawn as SVG here, and the rest is a table.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from geutil.errors import ArgumentTypeError
from geutil.graph.types import type_name
from geutil.quantize import BitPlan, LayerBits
from geutil.quantize.bit_plans import decibels
from geutil.report.page import Page
from geutil.version import __version__

# Pixels, chosen by eye: the page is 60rem wide, and scales the drawing to that.
_WIDTH, _HEIGHT = 720, 340
# Margins that hold labels of 12 px, chosen by eye.
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 20, 48
# Round distances between ticks in decimals: 1, 2 or 5 times a power of ten.
_STEPS = (1, 2, 5, 10)
_TICKS = 6  # about so many on an axis, by eye: as many labels do not touch
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; color: light-dark(#1b2430, #eef2f7);
  background: light-dark(#fff, #14181d); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: light-dark(#4a5665, #a9b4c0); }
.grid { stroke: light-dark(#d9dee5, #333c46); }
.curve { stroke: light-dark(#1f5fb4, #7ab2ff); fill: none; stroke-width: 2; }
.point { fill: light-dark(#1f5fb4, #7ab2ff); }
.chosen { fill: light-dark(#b34700, #ff9a5c); }
.predicted { stroke: light-dark(#6b7684, #98a3af); fill: none; stroke-dasharray: 4 4; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid light-dark(#d9dee5, #333c46);
  text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
.bits { color: light-dark(#b34700, #ff9a5c); font-weight: 600; }
/* On a phone the name of a layer has a line of its own above its numbers. */
@media (max-width: 40rem) {
  tr { display: grid; grid-template-columns: repeat(var(--numbers), minmax(0, 1fr)); }
  th, td { padding: .2rem; font-size: .75rem; overflow-wrap: anywhere; }
  th:first-child, td:first-child { grid-column: 1 / -1; border-bottom: 0; }
}
"""


def bits(plan: BitPlan, *, title: str | None = None) -> Page:
    """Draw a bit plan: the curve of size against noise, and a table of layers.

    The curve shows the signal-to-noise ratio of the best choice of each size, as
    measured and as predicted by the sum of the layers' noise; the chosen point is
    marked. The table shows for each layer its bits, its bytes, and the noise of each
    option, alone and with all others in 8 bits.

    Args:
        plan: the result of `geutil.quantize.choose_bits`, or of `BitPlan.load`.
        title: the title of the page.

    Returns:
        The page, to `save`; a notebook shows it.

    Raises:
        ArgumentTypeError: `plan` is not a bit plan.

    Cost: linear in the layers.

    Example:
        >>> from geutil import report
        >>> from geutil.quantize import BitOption, BitPlan, LayerBits
        >>> options = (BitOption(4, 32, 0.01, 0.02), BitOption(8, 64, 0.0001, 0.01))
        >>> layer = LayerBits(("dense",), "MatMul", 64, 4, options)
        >>> plan = BitPlan("int8", "size 40", (layer,), (), 32, 64, 0.02, 0.02, 0.01)
        >>> "<td>dense</td>" in report.bits(plan, title="small").html
        True
    """
    if not isinstance(plan, BitPlan):
        raise ArgumentTypeError(
            f"a geutil.quantize.BitPlan is drawn, not a {type_name(plan)}; "
            "geutil.quantize.choose_bits makes one"
        )
    heading = "bits of weights" if title is None else title
    payload = {
        "kind": "bits",
        "title": heading,
        "versions": f"geutil {__version__}",
    }
    return Page(heading, payload, "\n".join(_body(plan, heading)), _STYLE)


def _body(plan: BitPlan, heading: str) -> Iterator[str]:
    yield f"<main><h1>{html.escape(heading)}</h1>"
    head = str(plan).splitlines()[: 3 + (plan.scores is not None)]
    yield from (f"<div>{html.escape(line.strip())}</div>" for line in head)
    if plan.curve:
        yield "<h2>Size and noise</h2>"
        yield from _drawing(plan)
    yield "<h2>Layers</h2>"
    yield from _table(plan)
    if plan.left:
        yield "<h2>Left in float</h2><ul>"
        for name, reason in plan.left:
            yield f"<li>{html.escape(name)}: {html.escape(reason)}</li>"
        yield "</ul>"
    yield "</main>"


class _Axis:
    """Places numbers of a range between two pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
        self._low, self._high = low - margin, high + margin
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """Return a few round numbers within the range."""
        rough = (self._high - self._low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * s for s in _STEPS if power * s >= rough)
        first = math.ceil(self._low / step)
        last = math.floor(self._high / step)
        return [n * step for n in range(first, last + 1)]


def _drawing(plan: BitPlan) -> Iterator[str]:
    """Yield the curve as SVG."""
    # Without noise there is no number to draw.
    points = [p for p in plan.curve if p.noise > 0]
    if not points:
        yield "<p>No choice makes any noise.</p>"
        return
    predicted = [(p.size, decibels(p.predicted)) for p in points if p.predicted > 0]
    measured = [(p.size, p.decibels) for p in points]
    both = [*measured, *predicted]
    x = _Axis([size for size, _ in both], _LEFT, _WIDTH - _RIGHT)
    y = _Axis([value for _, value in both], _HEIGHT - _BOTTOM, _TOP)
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    yield "<title>Signal to noise by the bytes of the weights</title>"
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for tick in y.ticks():
        at = y(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{tick:g}</text>'
    for tick in x.ticks():
        at = x(tick)
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>'
    middle = (_LEFT + right) // 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">bytes</text>'
    yield f'<text x="{_LEFT - 8}" y="{_TOP - 6}" text-anchor="end">dB</text>'
    for name, pairs in (("predicted", predicted), ("curve", measured)):
        places = " ".join(f"{x(size)},{y(value)}" for size, value in pairs)
        yield f'<polyline class="{name}" points="{places}"/>'
    for size, value in measured:
        name = "chosen" if size == plan.size else "point"
        yield (
            f'<circle class="{name}" cx="{x(size)}" cy="{y(value)}" r="4">'
            f"<title>{size:,} bytes, {value:.1f} dB</title></circle>"
        )
    yield "</svg>"
    yield "<p>Solid: measured. Dashed: predicted, as the sum of what layers add.</p>"


def _table(plan: BitPlan) -> Iterator[str]:
    """Yield the layers as a table, with the noise of each option."""
    options = sorted({o.bits for layer in plan.layers for o in layer.options})
    heads = ["layer", "type", "weights", "bits", "bytes"]
    heads += [f"{each} bits, alone / with others, dB" for each in options]
    yield f'<table style="--numbers: {len(heads) - 1}"><thead><tr>'
    yield "".join(f"<th>{head}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for layer in plan.layers:
        yield f"<tr>{''.join(_cells(layer, options))}</tr>"
    yield "</tbody></table>"


def _cells(layer: LayerBits, options: Sequence[int]) -> Iterator[str]:
    yield f"<td>{html.escape(', '.join(layer.ops))}</td>"
    yield f"<td>{html.escape(layer.op_type)}</td><td>{layer.weights:,}</td>"
    yield f'<td class="bits">{layer.bits}</td><td>{layer.size:,}</td>'
    by_bits = {option.bits: option for option in layer.options}
    for each in options:
        option = by_bits[each]
        yield f"<td>{_told(option.alone)} / {_told(option.together)}</td>"


def _told(noise: float) -> str:
    return f"{decibels(noise):.1f}" if noise > 0 else "no noise"
