"""Print how quantized files of geutil and of its peers do, next to float.

`python -m benchmarks.quantized [--quick] [--network NAME] [--json PATH]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.glyphs import accuracy
from benchmarks.quantized import networks, peers
from benchmarks.quantized.judging import Array, Judgement, judge
from benchmarks.quantized.made import Made, attempt
from benchmarks.quantized.networks import Subject, subjects
from benchmarks.quantized.schemes import SCHEMES
from geutil import model

OURS = "geutil"
FAMILIES = (
    *(peers.FLOAT, "float16", "16x8", "int8", "4/8"),
    *("weights int8", "weights int4", "dynamic int8", "dynamic int4"),
)
"""In the order of the table; others come behind."""
PYTHON = peers.ROOT / ".venv-peers" / "bin" / "python"
_BATCH = 8


@dataclass(frozen=True)
class QuantizedRow:
    """What came of one scheme for one network.

    Attributes:
        network: its name.
        scheme: "family, variant".
        by: who made the file.
        judgement: what the file is like; None where there is none.
        loss: points of accuracy below float, of a trained network.
        error: what was raised in the place of a file, or of its results.
    """

    network: str
    scheme: str
    by: str
    judgement: Judgement | None
    loss: float | None = None
    error: str = ""

    @property
    def family(self) -> str:
        return self.scheme.partition(", ")[0]

    @property
    def key(self) -> tuple[int, bool]:
        """What rows of a network are sorted by; geutil's come first in their family."""
        places = {family: place for place, family in enumerate(FAMILIES)}
        return places.get(self.family, len(places)), self.by != OURS


def rows(subject: Subject, python: Path) -> Iterator[QuantizedRow]:
    """Make and judge all files of a network."""
    exact = subject(subject.judged)
    right = None
    if subject.labelled is not None:
        right = accuracy(subject, *subject.labelled)
    made = {(name, OURS): attempt(partial(_ours, subject, name)) for name in SCHEMES}
    made |= peers.made_by_peers(subject, python)
    for (scheme, by), each in made.items():
        yield _row(subject, scheme, by, each, exact, right)


def _ours(subject: Subject, name: str) -> bytes:
    m = model.open(subject.network)
    (input_name,) = m.inputs
    data = [
        {input_name: subject.calibration[start : start + _BATCH]}
        for start in range(0, len(subject.calibration), _BATCH)
    ]
    return SCHEMES[name](m, data)


def _row(
    subject: Subject,
    scheme: str,
    by: str,
    made: Made,
    exact: Array,
    right: float | None,
) -> QuantizedRow:
    if made.error:
        return QuantizedRow(subject.name, scheme, by, None, error=made.error)
    try:
        judgement = judge(made.blob, subject, exact)
    except (ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines() or [""]
        return QuantizedRow(subject.name, scheme, by, None, error=first[0])
    loss = None
    if right is not None and judgement.accuracy is not None:
        loss = right - judgement.accuracy
    return QuantizedRow(subject.name, scheme, by, judgement, loss)


def show(found: list[QuantizedRow]) -> None:
    """Print the rows of one network, and what failed."""
    print(f"\n{found[0].network}\n")
    print("| scheme | by | dB | accuracy, % | loss, points | KB | ms |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(found, key=lambda row: row.key):
        if row.judgement is None:
            continue
        each = row.judgement
        right = "" if each.accuracy is None else f"{each.accuracy:.2f}"
        loss = "" if row.loss is None else f"{row.loss:.2f}"
        alone = "" if each.delegates else " (without XNNPACK)"
        print(
            f"| {row.scheme} | {row.by} | {each.decibels:.1f} | {right} | {loss} | "
            f"{each.size / 1000:.0f} | {each.milliseconds:.2f}{alone} |"
        )
    failed = [row for row in found if row.error]
    if failed:
        print()
    for row in failed:
        print(f"{row.scheme} by {row.by}: {row.error}")


def summary(found: list[QuantizedRow]) -> Iterator[str]:
    """Yield lines of a table: geutil's default beside the best of the peers, in dB."""
    names = list(dict.fromkeys(row.network for row in found))
    yield f"| scheme | {' | '.join(names)} | mean |"
    yield f"|---|{'---|' * len(names)}---|"
    for family in FAMILIES:
        ahead = [_ahead([r for r in found if r.network == n], family) for n in names]
        known = [value for value in ahead if value is not None]
        if known:
            cells = ["" if value is None else f"{value:+.1f}" for value in ahead]
            mean = sum(known) / len(known)
            yield f"| {family} | {' | '.join(cells)} | {mean:+.1f} |"


def _ahead(found: list[QuantizedRow], family: str) -> float | None:
    """Return by how many dB geutil's default is ahead; None where one is missing."""
    known = {True: [], False: []}
    for row in found:
        if row.family == family and row.judgement is not None:
            known[row.by == OURS].append(row.judgement.decibels)
    # The first variant is the default.
    return known[True][0] - max(known[False]) if all(known.values()) else None


def main() -> None:
    """Print the tables."""
    options = _options()
    names = options.network or list(
        networks.TRAINED if options.quick else networks.NAMES
    )
    count = 500 if options.quick else 4000
    if not options.peers.exists():
        print(f"no LiteRT quantizer: {options.peers} does not exist")
    found: list[QuantizedRow] = []
    for subject in subjects(names, count):
        these = list(rows(subject, options.peers))
        show(these)
        found += these
    print("\ngeutil's default, ahead of the best of the peers, in dB\n")
    print(*summary(found), sep="\n", flush=True)
    if options.json is not None:
        told: list[dict[str, Any]] = [asdict(row) for row in found]
        options.json.write_text(json.dumps(told, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.quantized")
    parser.add_argument(
        "--quick", action="store_true", help="the trained networks only, fewer images"
    )
    parser.add_argument(
        "--network",
        action="append",
        choices=networks.NAMES,
        metavar="NAME",
        help=f"one network; may be repeated: {', '.join(networks.NAMES)}",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        default=PYTHON,
        metavar="PYTHON",
        help="the Python that the LiteRT quantizer is installed for",
    )
    parser.add_argument("--json", type=Path, help="write the rows, not rounded")
    return parser.parse_args()


if __name__ == "__main__":
    main()
