"""What is measured: networks in settings, and what they must reach."""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTE = ("recompute_grad",)
REMAT = ("RematScope full", "RematScope activations")


@dataclass(frozen=True)
class Setting:
    """How TensorFlow runs a step.

    Attributes:
        name: as the table shows it.
        xla: whether XLA compiles the step.
        grappler: whether Grappler optimizes it.
        onednn: whether oneDNN is on, with the allocator that keeps statistics.
    """

    name: str
    xla: bool = False
    grappler: bool = True
    onednn: bool = True


DEFAULT = Setting("default")
XLA = Setting("XLA", xla=True)
NO_GRAPPLER = Setting("Grappler off", grappler=False)
NO_ONEDNN = Setting("oneDNN off", onednn=False)
SETTINGS = {s.name: s for s in (DEFAULT, XLA, NO_GRAPPLER, NO_ONEDNN)}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        network: a name in `benchmarks.networks.NETWORKS`.
        size: its batch, as the table shows it.
        setting: the setting.
        peak_limit: the largest ratio of the peaks.
        time_limit: the largest ratio of the step times.
        peers: the ways besides ours that can be had without rewriting the model.
    """

    network: str
    size: str
    setting: Setting
    peak_limit: float
    time_limit: float
    peers: tuple[str, ...] = ()


_CHAIN = "64 layers, 4096 x 1024"
_RESNET = "16 x 224 px"
CASES = (
    Case("chain", _CHAIN, DEFAULT, 0.30, 1.40, RECOMPUTE),
    Case("chain", _CHAIN, XLA, 0.33, 1.40, RECOMPUTE),
    Case("ResNet50", _RESNET, DEFAULT, 0.50, 1.40, REMAT),
    Case("ResNet50", _RESNET, XLA, 0.70, 1.50),
    Case("ResNet50", _RESNET, NO_GRAPPLER, 0.50, 1.40),
    Case("ResNet50", _RESNET, NO_ONEDNN, 0.50, 1.40),
    Case("MobileNetV2", "16 x 224 px", DEFAULT, 0.45, 1.45, REMAT),
    Case("DenseNet121", "8 x 224 px", DEFAULT, 0.40, 1.45, REMAT),
    Case("EfficientNetB0", "8 x 224 px", DEFAULT, 0.45, 1.45, REMAT),
    Case("U-Net", "4 x 256 px", DEFAULT, 0.65, 1.40, (*RECOMPUTE, *REMAT)),
    Case("encoder", "4 x 512 tokens", DEFAULT, 0.40, 1.40, (*RECOMPUTE, *REMAT)),
)
