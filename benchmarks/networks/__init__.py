"""Networks as training steps, for the benchmarks and the tests of gradients."""

from benchmarks.networks.networks import ALL_NETWORKS, NETWORKS, MakeStep
from benchmarks.networks.step import Call, Step, Wrap, unwrapped

__all__ = ["ALL_NETWORKS", "NETWORKS", "Call", "MakeStep", "Step", "Wrap", "unwrapped"]
