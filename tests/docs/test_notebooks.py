"""The notebooks run from top to bottom, and are stored as they were written."""

import json
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS_FOR_A_CELL = 600


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A kernel of this very Python, whatever kernels are installed."""
    for variable in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "this Python",
        "language": "python",
    }
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    specs = KernelSpecManager(
        kernel_dirs=[str(folder.parent)], ensure_native_kernel=False
    )
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    yield manager
    # The client only stops kernels of its own.
    run_sync(manager.shutdown_kernel)(now=True)


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def test_there_are_three():
    assert names(NOTEBOOKS) == ["int8", "memory", "surgery"]


@thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_notebook_runs(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=SECONDS_FOR_A_CELL,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_notebooks_are_listed_and_stored_without_results():
    """They check what they show."""
    listed = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3", path
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert code
        assert [cell.outputs for cell in code] == [[]] * len(code), path
        assert {cell.execution_count for cell in code} == {None}, path
        assert all(cell.metadata == {} for cell in notebook.cells), path
        checks = sum("assert " in cell.source for cell in code)
        assert checks >= len(code) / 2, path
        assert f"examples/notebooks/{path.name}" in listed
