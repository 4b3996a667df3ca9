"""Random directed acyclic graphs for property tests, as hypothesis strategies.

A drawn graph is a list of ops, each a list of the ops it reads, so that the test knows
the edges without asking the code under test.
"""

from dataclasses import dataclass

import networkx as nx
import tensorflow as tf
from hypothesis import strategies as st

SHAPE = [2]


@dataclass(frozen=True)
class DrawnGraph:
    """Ops 0 to n-1; op i reads `inputs[i]` and waits for `controls[i]`."""

    inputs: tuple[tuple[int, ...], ...]
    controls: tuple[tuple[int, ...], ...]

    def build(self) -> list[tf.Tensor]:
        """Make the ops in the default graph and return their outputs."""
        tensors: list[tf.Tensor] = []
        for i, (reads, waits) in enumerate(
            zip(self.inputs, self.controls, strict=True)
        ):
            with tf.control_dependencies([tensors[c].op for c in waits]):
                if reads:
                    t = tf.add_n(
                        [tensors[r] for r in reads] + [tensors[reads[0]]], name=f"op{i}"
                    )
                else:
                    t = tf.constant([float(i + 1), 0.5 * i], name=f"op{i}")
            tensors.append(t)
        return tensors

    def networkx(self, controls: bool = False) -> nx.DiGraph:
        """Return the same edges as a networkx graph over the names of the ops."""
        result = nx.DiGraph()
        result.add_nodes_from(f"op{i}" for i in range(len(self.inputs)))
        for i, reads in enumerate(self.inputs):
            result.add_edges_from((f"op{r}", f"op{i}") for r in reads)
        if controls:
            for i, waits in enumerate(self.controls):
                result.add_edges_from((f"op{w}", f"op{i}") for w in waits)
        return result


@st.composite
def drawn_graphs(draw: st.DrawFn, max_ops: int = 12) -> DrawnGraph:
    count = draw(st.integers(2, max_ops))
    inputs, controls = [], []
    for i in range(count):
        earlier = st.integers(0, i - 1) if i else st.nothing()
        inputs.append(tuple(draw(st.lists(earlier, max_size=3)) if i else ()))
        controls.append(
            tuple(draw(st.lists(earlier, max_size=2, unique=True)) if i else ())
        )
    return DrawnGraph(tuple(inputs), tuple(controls))
