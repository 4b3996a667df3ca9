"""Images of characters: drawn from fonts, then distorted at random.

The fonts are those that matplotlib ships. Each character of each face is drawn once,
large enough to be turned and scaled; an image is a sample of such a drawing under an
affine map, blurred, coloured, on a background with a slope, with noise.
"""

from __future__ import annotations

import string
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
PIXELS = 32
CHANNELS = 3
# Roman, bold, italic and bold italic of four families, and what Computer Modern has.
# Display, symbol and mathematics faces lack letters or figures.
FACES = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold"),
    *("DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic"),
    "DejaVuSerif-BoldItalic",
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmti10", "cmss10", "cmtt10"),
)

_CANVAS = 64
"""Pixels of a drawing; an em takes 44 of them, so that turned ones have room."""
_EM = 44
_SAMPLES = 4
"""Samples of a pixel of a drawing, in each direction."""
_OUTLINE = 2048
"""Points of the size at which outlines are read: hinting moves nothing that counts."""
_SHARE = 500
"""Images that are made at a time, which bounds the memory."""
_LINE, _CONIC, _CUBIC = 2, 3, 4
_STEPS = 8
"""Straight pieces of a curve."""


def images(
    count: int, seed: int, strength: float = 1.0
) -> tuple[Floats, NDArray[np.int64]]:
    """Return images of characters and which ones they are.

    The same for the same count and seed. Every face and character is as likely as any
    other, so some images cannot be told: of "O" and "0", "s" and "S", "l" and "I".

    Args:
        count: how many.
        seed: of all that is drawn at random.
        strength: how far they are distorted, as a share; training begins with less.

    Returns:
        The images, float32 [count, 32, 32, 3] from -1 to 1, and the places of their
        characters in `CHARACTERS`, int64 [count].
    """
    random = np.random.default_rng(seed)
    labels = random.integers(len(CHARACTERS), size=count)
    faces = random.integers(len(FACES), size=count)
    made = np.empty((count, PIXELS, PIXELS, CHANNELS), np.float32)
    for start in range(0, count, _SHARE):
        part = slice(start, start + _SHARE)
        ink = _distorted(drawings()[faces[part], labels[part]], strength, random)
        made[part] = _coloured(_blurred(ink, random), strength, random)
    return made, labels


@cache
def drawings(characters: str = CHARACTERS) -> Floats:
    """Return characters of every face: float32 [faces, characters, 64, 64].

    1 is ink. Characters stand on one baseline, in the size that their face gives them.
    """
    return np.stack([_face(name, characters) for name in FACES])


def _face(name: str, characters: str) -> Floats:
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    font = FT2Font(str(folder / f"{name}.ttf"))
    font.set_size(_OUTLINE, 72)
    drawn = []
    for character in characters:
        font.load_char(ord(character))
        drawn.append(_filled(_edges(*font.get_path())))
    return np.stack(drawn)


def _edges(points: Any, codes: Any) -> NDArray[np.float64]:
    """Return an outline as straight edges, [edges, 2 ends, x and y], in ems."""
    edges: list[tuple[Any, Any]] = []
    at = start = np.zeros(2)
    index = 0
    while index < len(codes):
        code = codes[index]
        if code == _LINE:
            bends, index = points[index : index + 1], index + 1
        elif code in (_CONIC, _CUBIC):
            bends, index = points[index : index + code - 1], index + code - 1
        else:
            # The contour before is closed; the next one begins.
            edges.append((at, start))
            at = start = points[index]
            index += 1
            continue
        for end in _curve(np.stack([at, *bends])):
            edges.append((at, end))
            at = end
    edges.append((at, start))
    return np.array(edges) / _OUTLINE


def _curve(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ends of the straight pieces of a Bezier curve (de Casteljau)."""
    if len(points) == 2:
        return points[1:]
    share = np.linspace(0, 1, _STEPS + 1)[1:, None, None]
    rows = np.broadcast_to(points, (_STEPS, *points.shape))
    while rows.shape[1] > 1:
        rows = (1 - share) * rows[:, :-1] + share * rows[:, 1:]
    return rows[:, 0]


def _filled(edges: NDArray[np.float64]) -> Floats:
    """Return what an outline encloses, by winding numbers that are not zero."""
    size = _CANVAS * _SAMPLES
    # The middle of the em in x, that of the capitals in y, onto the middle.
    middle = (edges[..., 0].min() + edges[..., 0].max()) / 2
    x = ((edges[..., 0] - middle) * _EM + _CANVAS / 2) * _SAMPLES
    y = (_CANVAS / 2 - (edges[..., 1] - 0.35) * _EM) * _SAMPLES
    rows = np.arange(size)[:, None] + 0.5
    down, up = (
        (y[:, 0] <= rows) & (rows < y[:, 1]),
        (y[:, 1] <= rows) & (rows < y[:, 0]),
    )
    row, edge = np.nonzero(down | up)
    share = (rows[row, 0] - y[edge, 0]) / (y[edge, 1] - y[edge, 0])
    column = np.ceil(x[edge, 0] + share * (x[edge, 1] - x[edge, 0]) - 0.5).astype(int)
    turns = np.zeros((size, size + 1), int)
    np.add.at(turns, (row, column.clip(0, size)), np.where(down[row, edge], 1, -1))
    inside = turns.cumsum(1)[:, :size] != 0
    shape = (_CANVAS, _SAMPLES, _CANVAS, _SAMPLES)
    return inside.reshape(shape).mean((1, 3), dtype=np.float32)


def _distorted(drawn: Floats, strength: float, random: np.random.Generator) -> Floats:
    """Return samples of drawings under affine maps, [n, 32, 32]."""
    count = len(drawn)
    angle = strength * random.normal(0, 0.14, count)
    scale = 1.1 + strength * random.uniform(-0.15, 0.15, count)
    stretch = np.exp(strength * random.normal(0, 0.08, count))
    shear = strength * random.normal(0, 0.1, count)
    shift = strength * random.uniform(-2, 2, (count, 2, 1, 1))
    cosine, sine = np.cos(angle), np.sin(angle)
    # Of the drawing's pixels by the image's: a turn, a shear, then the sizes.
    step = _CANVAS / PIXELS / scale
    across, along = step * stretch, step / stretch
    a, b = across * (cosine - shear * sine), across * (sine + shear * cosine)
    c, d = -along * sine, along * cosine
    grid = np.arange(PIXELS) - (PIXELS - 1) / 2
    y = grid[:, None] - shift[:, 0]
    x = grid[None, :] - shift[:, 1]
    a, b, c, d = (value[:, None, None] for value in (a, b, c, d))
    middle = (_CANVAS - 1) / 2
    return _bilinear(drawn, c * x + d * y + middle, a * x + b * y + middle)


def _bilinear(drawn: Floats, y: NDArray[np.float64], x: NDArray[np.float64]) -> Floats:
    """Return drawings at fractions of pixels; beyond their ends they are empty."""
    last = _CANVAS - 1
    outside = (y < 0) | (y > last) | (x < 0) | (x > last)
    y, x = y.clip(0, last - 1e-3), x.clip(0, last - 1e-3)
    top, left = y.astype(int), x.astype(int)
    y, x = y - top, x - left
    each = np.arange(len(drawn))[:, None, None]
    upper = (1 - x) * drawn[each, top, left] + x * drawn[each, top, left + 1]
    lower = (1 - x) * drawn[each, top + 1, left] + x * drawn[each, top + 1, left + 1]
    return np.where(outside, 0, (1 - y) * upper + y * lower).astype(np.float32)


def _blurred(ink: Floats, random: np.random.Generator) -> Floats:
    """Return images under Gaussian blurs of up to 1.3 pixels."""
    width = random.uniform(0.3, 1.3, (len(ink), 1))
    reach = 3
    kernel = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * width**2))
    kernel = (kernel / kernel.sum(1, keepdims=True)).astype(np.float32)
    for axis in (1, 2):
        wide = np.pad(ink, [(0, 0) if i != axis else (reach, reach) for i in range(3)])
        ink = sum(
            kernel[:, i, None, None] * np.take(wide, np.arange(i, i + PIXELS), axis)
            for i in range(2 * reach + 1)
        )
    return ink


def _coloured(ink: Floats, strength: float, random: np.random.Generator) -> Floats:
    """Return coloured images with slopes and noise, [n, 32, 32, 3]."""
    shape = (len(ink), 1, 1, CHANNELS)
    paper = random.uniform(-0.8, 0.8, (len(ink), 1, 1, 1))
    # Dark on light or light on dark, whichever way there is more room.
    contrast = random.uniform(1.2 - 0.7 * strength, 1.6, paper.shape)
    contrast = contrast * np.where(paper > 0, -1, 1)
    paper = paper + random.normal(0, 0.15, shape)
    contrast = contrast * (1 + random.normal(0, 0.15, shape))
    grid = np.linspace(-1, 1, PIXELS)
    slope = strength * random.normal(0, 0.15, (2, *shape))
    paper = paper + slope[0] * grid[:, None, None] + slope[1] * grid[None, :, None]
    loud = strength * random.uniform(0, 0.2, (len(ink), 1, 1, 1))
    noise = random.standard_normal((*ink.shape, CHANNELS), np.float32)
    made = paper + contrast * ink[..., None] + loud.astype(np.float32) * noise
    return np.clip(made, -1, 1).astype(np.float32)
