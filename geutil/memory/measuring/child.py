"""The measuring process: `python -m geutil.memory.measuring.child JOB RESULT`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from geutil.memory.measuring.running import run


def main(job_path: str, result_path: str) -> None:
    """Run the pickled job of one file and pickle the measurement into another."""
    job, options = pickle.loads(Path(job_path).read_bytes())
    Path(result_path).write_bytes(pickle.dumps(run(job, options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
