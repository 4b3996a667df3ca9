"""Benchmarks of geutil. `benchmarks/README.md` says how to read them.

Importing this package quiets TensorFlow's start-up messages, so each module of it may
import TensorFlow at its top.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
