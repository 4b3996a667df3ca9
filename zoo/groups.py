"""`python -m zoo.groups [NAME ...]`: groups that point at each other in drawings.

Each model is drawn as it is, folded, quantized, and as a training step with plain
gradients and with checkpoints. The pages are opened in Chromium, and the hierarchy that
the viewer draws is read from them; there should be no cycle in any.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

CHAINS = """(side) => {
  const { graph, hierarchy } = window.geutil.drawings[side];
  return graph.data.names.map((_, op) => {
    const keys = [];
    for (let at = hierarchy.itemOf(op); at.parent; at = at.parent) keys.unshift(at.key);
    return keys;
  });
}"""
"""The keys of the items that each op of a drawing lies in, outer ones first."""


def tied_groups(
    chains: Sequence[Sequence[str]], graph: Mapping[str, Any]
) -> list[list[str]]:
    """Return the groups and ops that form cycles among the items around them.

    Args:
        chains: for each op the items that it lies in, outer ones first, and itself.
        graph: the graph as the viewer takes it.

    Returns:
        The keys of the items of each cycle; the edge back of a loop of version 1 makes
        none.
    """
    import networkx

    back = graph["typeNames"].index("NextIteration") if _loops(graph) else -1
    inside: dict[str, Any] = {}
    for op, chain in enumerate(chains):
        for source in {*graph["inputs"][op][::2], *graph["controls"][op]}:
            if graph["types"][source] == back:
                continue
            pairs = enumerate(zip(chains[source], chain, strict=False))
            depth, ends = next((d, p) for d, p in pairs if p[0] != p[1])
            around = chain[depth - 1] if depth else ""
            inside.setdefault(around, networkx.DiGraph()).add_edge(*ends)
    return [
        sorted(cycle)
        for edges in inside.values()
        for cycle in networkx.strongly_connected_components(edges)
        if len(cycle) > 1
    ]


def _loops(graph: Mapping[str, Any]) -> bool:
    return "NextIteration" in graph["typeNames"]


def drawn(name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the states of a model, each with what opens or builds it anew."""
    import tensorflow as tf

    from geutil import model
    from geutil.batchnorm import fold_batch_norms
    from geutil.gradients import gradients
    from geutil.quantize import quantize
    from zoo.models import MODELS
    from zoo.plain import built, step_of
    from zoo.subject import MANY, ROWS, Function, has_batch

    subject = built(MODELS[name])

    def opened() -> Any:
        if isinstance(subject, Function):
            return model.open(subject.concrete())
        with tempfile.TemporaryDirectory() as folder:
            subject.write(Path(folder) / "model")
            return model.open(Path(folder) / "model")

    def folded() -> Any:
        one = opened()
        fold_batch_norms(one)
        return one

    def quantized() -> Any:
        one = folded()
        quantize(one, is_training=False)
        return one

    def step(take: Callable[..., Any]) -> Any:
        rows = MANY if has_batch(subject) else ROWS
        specs = {
            key: tf.TensorSpec([size or rows for size in spec.shape], spec.dtype)
            for key, spec in subject.inputs.items()
        }
        return step_of(subject, take).get_concrete_function(**specs).graph

    yield from (("plain", opened), ("folded", folded), ("quantized", quantized))
    if isinstance(subject, Function) and subject.trainable:
        yield "gradients", partial(step, tf.gradients)
        yield "checkpoints", partial(step, partial(gradients, checkpoints="memory"))


def _cycles_of(browser: Any, value: Any) -> list[list[str]]:
    """Draw a graph and the functions that it calls, and return their cycles."""
    from geutil import report

    page = report.view(value)
    with tempfile.TemporaryDirectory() as folder:
        tab = browser.new_page()
        tab.goto(page.save(Path(folder) / "page.html").as_uri())
        tab.wait_for_selector("body[data-ready]:not([data-busy])")
        found = []
        for at, graph in enumerate(page.payload["graphs"]):
            if at:
                tab.get_by_label("graph", exact=True).select_option(index=at)
                tab.wait_for_selector("body:not([data-busy])")
            found += tied_groups(tab.evaluate(CHAINS, 0), graph)
        tab.close()
    return found


def main() -> int:
    """Print a line for each model; return whether any has a cycle."""
    from playwright.sync_api import sync_playwright

    from geutil.errors import GeutilError
    from zoo.models import MODELS

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    total = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in sys.argv[1:] or [n for n, e in MODELS.items() if not e.missing]:
            counts = []
            for state, make in drawn(name):
                try:
                    cycles = _cycles_of(browser, make())
                except GeutilError as error:
                    counts.append(f"{state} refused ({type(error).__name__})")
                    continue
                total += len(cycles)
                counts.append(f"{state} {len(cycles)}")
            print(f"{name}: {', '.join(counts)}", flush=True)
        browser.close()
    print(f"{total} cycle(s)")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
