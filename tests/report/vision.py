"""How far colours are apart, for normal eyes and for those without a kind of cones."""

import itertools
import math

import numpy as np

# On linear RGB, at severity 1: Machado, Oliveira and Fernandes 2009, table of matrices.
EYES = {
    "normal": np.eye(3),
    "no red cones": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green cones": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no blue cones": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# IEC 61966-2-1: linear sRGB to XYZ, and white.
_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(colour, eyes="normal"):
    """Return the CIELAB values of red, green and blue, each from 0 to 255."""
    parts = np.asarray(colour) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    xyz = _XYZ @ np.clip(EYES[eyes] @ linear, 0, 1) / _WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def apart(one, other):
    """Return the difference of two CIELAB colours: CIEDE2000 (Sharma et al. 2005)."""
    mean = (math.hypot(*one[1:]) + math.hypot(*other[1:])) / 2
    grey = 1.5 - 0.5 * math.sqrt(mean**7 / (mean**7 + 25**7))
    (c1, h1), (c2, h2) = (
        (math.hypot(grey * a, b), math.degrees(math.atan2(b, grey * a)) % 360)
        for _, a, b in (one, other)
    )
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = h1 + turn / 2 if c1 * c2 else h1 + h2
    light, chroma = (one[0] + other[0]) / 2, (c1 + c2) / 2
    cosines = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.2, 4, -63))
    t = 1 + sum(w * math.cos(math.radians(n * hue + by)) for w, n, by in cosines)
    lightness = (other[0] - one[0]) / (
        1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    )
    saturation = (c2 - c1) / (1 + 0.045 * chroma)
    shade = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    shade /= 1 + 0.015 * chroma * t
    blue = 60 * math.exp(-((((hue % 360) - 275) / 25) ** 2))
    rotation = -math.sin(math.radians(blue)) * 2
    rotation *= math.sqrt(chroma**7 / (chroma**7 + 25**7))
    squares = lightness**2 + saturation**2 + shade**2
    return math.sqrt(squares + rotation * saturation * shade)


def nearest(colours):
    """Return the least difference of any two colours, with the eyes and the colours."""
    return min(
        (apart(lab(a, eyes), lab(b, eyes)), eyes, a, b)
        for eyes in EYES
        for a, b in itertools.combinations(colours, 2)
    )
