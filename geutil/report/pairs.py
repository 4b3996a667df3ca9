"""The functions of two models, each with what it is in the other one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import tensorflow as tf

from geutil.report.subjects import Subject

Pair = tuple[Subject, Subject]

_NUMBERS = re.compile(r"(_\d+)+$")
"""What TensorFlow puts behind the name of a function each time it is made."""


def pairs_of(before: Subject, after: Subject) -> list[Pair]:
    """Return two subjects, and the pairs of functions that they call.

    Functions belong together that have one name; failing that, one name but for the
    numbers at its end, in their order. What has no counterpart stands beside an empty
    graph.

    Cost: linear in the functions.
    """
    ours = {body.label: body for body in before.bodies}
    theirs = {body.label: body for body in after.bodies}
    left = _by_stem([body for name, body in ours.items() if name not in theirs])
    pairs = [(before, after)]
    for name, body in theirs.items():
        if name in ours:
            pairs.append((ours[name], body))
            continue
        waiting = left[_stem(name)]
        pairs.append((waiting.pop(0) if waiting else _nothing(name), body))
    lonely = [body for waiting in left.values() for body in waiting]
    return pairs + [(body, _nothing(body.label)) for body in lonely]


def _stem(name: str) -> str:
    return _NUMBERS.sub("", name)


def _by_stem(bodies: Sequence[Subject]) -> defaultdict[str, list[Subject]]:
    found: defaultdict[str, list[Subject]] = defaultdict(list)
    for body in bodies:
        found[_stem(body.label)].append(body)
    return found


def _nothing(label: str) -> Subject:
    return Subject(label, tf.Graph())
