"""Networks as training steps, for the benchmarks and the tests of gradients."""

from benchmarks.networks.networks import NETWORKS, MakeStep
from benchmarks.networks.step import Call, Step, Wrap, unwrapped

__all__ = ["NETWORKS", "Call", "MakeStep", "Step", "Wrap", "unwrapped"]
