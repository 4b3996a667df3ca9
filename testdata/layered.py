"""Random layered computations for the planner: `python -m testdata.layered`.

Writes those of `plans/` anew; from one seed they come out the same.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from geutil.gradients.planner import Problem

HERE = Path(__file__).resolve().parent / "plans"
# (nodes, seed), as wide and as dense as the random graphs that others publish.
KEPT: tuple[tuple[int, int], ...] = (
    *((100, seed) for seed in range(4)),
    *((250, seed) for seed in range(3)),
    *((500, seed) for seed in range(3)),
)


def layered(
    nodes: int,
    *,
    width: tuple[int, int] = (2, 12),
    density: float = 0.35,
    skips: float = 0.3,
    seed: int = 0,
) -> Problem:
    """Return a random computation in layers, numbered in a random order of its own.

    Args:
        nodes: how many there are.
        width: the least and the most nodes of a layer.
        density: the share of pairs of nodes of neighbouring layers that are joined; a
            node reads one of the layer before at least.
        skips: how many inputs a node has from earlier layers, on average.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    layers, made = [], 0
    while made < nodes:
        size = min(int(rng.integers(width[0], width[1] + 1)), nodes - made)
        layers.append(range(made, made + size))
        made += size
    edges: set[tuple[int, int]] = set()
    for before, layer in pairwise(layers):
        for node in layer:
            joined = [u for u in before if rng.random() < density]
            edges |= {(u, node) for u in joined or [int(rng.choice(before))]}
    for place, layer in enumerate(layers[2:]):
        for node in layer:
            for _ in range(rng.poisson(skips)):
                earlier = layers[int(rng.integers(0, place + 1))]
                edges.add((int(rng.choice(earlier)), node))
    # Everything but the last layer is read.
    read = {u for u, _ in edges}
    for layer, after in pairwise(layers):
        edges |= {(u, int(rng.choice(after))) for u in layer if u not in read}
    number = _random_order(nodes, edges, rng)
    times, sizes = rng.integers(1, 50, nodes), rng.integers(1, 100, nodes)
    renamed = sorted((number[a], number[b]) for a, b in edges)
    return Problem(times.tolist(), sizes.tolist(), renamed)


def _random_order(
    nodes: int, edges: set[tuple[int, int]], rng: np.random.Generator
) -> list[int]:
    """Return the place of each node in a topological order, drawn step by step."""
    waits = [0] * nodes
    readers: list[list[int]] = [[] for _ in range(nodes)]
    for tail, head in sorted(edges):
        waits[head] += 1
        readers[tail].append(head)
    ready = [node for node in range(nodes) if not waits[node]]
    number = [0] * nodes
    for place in range(nodes):
        node = ready.pop(int(rng.integers(len(ready))))
        number[node] = place
        for reader in readers[node]:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return number


def training_chain(length: int, time: float = 1.0, size: int = 1) -> Problem:
    """Return a chain of equal nodes and its way back, which reads all of them."""
    edges = [(i, i + 1) for i in range(2 * length - 1)]
    edges += [(i, 2 * length - 1 - i) for i in range(length)]
    count = 2 * length
    return Problem([time] * count, [size] * count, edges, outputs=[count - 1])


def training_blocks(nodes: int, seed: int = 0, block: int = 5) -> Problem:
    """Return a chain of residual blocks and its way back, of random times and sizes."""
    rng = np.random.default_rng(seed)
    forward = nodes // 2
    edges = []
    for i in range(1, forward):
        edges.append((i - 1, i))
        if i % block == 0:
            edges.append((i - block, i))
    for i in range(forward):
        back = nodes - 1 - i
        edges.append((i, back))
        if i:
            edges.append((i - 1, back))
        if back > forward:
            edges.append((back - 1, back))
    times, sizes = rng.integers(1, 20, nodes), rng.integers(1, 50, nodes)
    return Problem(times.tolist(), sizes.tolist(), edges)


def main() -> None:
    """Write the files."""
    HERE.mkdir(exist_ok=True)
    for nodes, seed in KEPT:
        layered(nodes, seed=seed).to_json(HERE / f"layered_{nodes}_{seed}.json")


if __name__ == "__main__":
    main()
