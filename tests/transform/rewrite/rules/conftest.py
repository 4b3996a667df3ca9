"""Copies of real networks, to be rewritten."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

import geutil as ge
from tests.networks.conftest import (  # noqa: F401
    Traced,
    efficientnet,
    mobilenet,
)


@dataclass(frozen=True)
class Copied:
    """A copy in a graph of its own, and what TensorFlow computes by the original."""

    network: Traced
    image: tf.Tensor
    output: tf.Tensor

    @property
    def graph(self) -> tf.Graph:
        return self.image.graph

    @property
    def images(self) -> np.ndarray:
        return self.network.images

    @property
    def expected(self) -> np.ndarray:
        return self.network.keras_output()


def copied(network: Traced) -> Copied:
    _, info = ge.copy(network.graph, tf.Graph())
    return Copied(network, *info.transformed([network.image, network.output]))


@pytest.fixture
def mobilenet_copy(mobilenet):  # noqa: F811
    return copied(mobilenet)


@pytest.fixture
def efficientnet_copy(efficientnet):  # noqa: F811
    return copied(efficientnet)
