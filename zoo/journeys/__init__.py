"""What geutil is asked to do with each model: one column of the page each."""

from collections.abc import Callable

from zoo.journeys.batching import set_batch_size
from zoo.journeys.folding import fold
from zoo.journeys.gradients import bits, fit, gradients_memory, gradients_speed, peak
from zoo.journeys.opening import open_all_ways
from zoo.journeys.quantizing import int8
from zoo.journeys.stripping import strip
from zoo.journeys.visit import Visit
from zoo.results import Cell

JOURNEYS: dict[str, Callable[[Visit], Cell]] = {
    "open": open_all_ways,
    "fold": fold,
    "batch size": set_batch_size,
    "strip": strip,
    "int8": int8,
    "memory": gradients_memory,
    "speed": gradients_speed,
    "fit": fit,
    "peak": peak,
    "bits": bits,
}
