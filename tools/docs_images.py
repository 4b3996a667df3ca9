"""Makes the pictures of the README and of the documentation: `make docs-images`.

Pages of `geutil.report` are opened in Chromium and photographed: MobileNetV2 before and
after FakeQuant ops are inserted, and a training step of ResNet50 as it is and with
checkpoints.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from playwright.sync_api import sync_playwright

from examples.training import step_of
from geutil import model, report
from geutil.batchnorm import fold_batch_norms
from geutil.memory import predict
from geutil.quantize import quantize

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1280, "height": 680}
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def int8_page() -> report.Page:
    """Draw MobileNetV2 before and after FakeQuant ops are inserted."""
    network = tf.keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3))
    before, after = model.open(network), model.open(network)
    fold_batch_norms(before)
    fold_batch_norms(after)
    inserted = quantize(after, is_training=False)
    return report.diff(before, after, title="MobileNetV2, quantized", report=inserted)


def memory_page() -> report.Page:
    """Draw what a training step of ResNet50 holds, by prediction."""
    network = tf.keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3))
    sides = []
    for checkpoints in (None, "memory"):
        graph = step_of(network, 16, 224, checkpoints=checkpoints).graph
        sides.append(predict(graph.control_outputs))
    return report.memory(*sides, title="ResNet50, a training step, 16 x 224 px")


def photograph(browser: Any, page: report.Page, name: str) -> Path:
    """Open a page, and write a picture of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = page.save(Path(folder) / "page.html")
        opened = browser.new_page(viewport=SIZE, device_scale_factor=1.5)
        opened.goto(file.as_uri())
        opened.wait_for_selector("body[data-ready]")
        opened.wait_for_timeout(500)
        path = IMAGES / name
        opened.screenshot(path=path)
        opened.close()
    return path


def main() -> int:
    """Write the pictures."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("there is no chromium; install it with `make browser`", file=sys.stderr)
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_FLAGS)
        print(photograph(browser, int8_page(), "int8.png"))
        print(photograph(browser, memory_page(), "memory.png"))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
