"""The notebooks run from top to bottom, and are stored as a reader should find them.

    python tests/test_notebooks.py    # executes them and stores what they show

is for after a change of a cell, or of what the library prints.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))
MOST_CHARACTERS = 8_000  # of what one cell prints
MOST_BYTES = 100_000  # of a notebook

# A path of somebody's machine, a temporary file, an address in memory.
_LEAKS = re.compile(r"/(home|root|tmp|Users|work|usr|opt)/|ipykernel_|0x[0-9a-f]{6,}")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each_notebook
def test_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # no profile of the user
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook = read(path)
    for cell in notebook.cells:
        cell.outputs = []
    execute(notebook, tmp_path)
    for cell in code_cells(notebook):
        assert cell.execution_count, cell.source


@each_notebook
def test_notebook_is_stored_with_small_outputs(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    counts = [cell.execution_count for cell in code_cells(read(path))]
    assert counts == list(range(1, len(counts) + 1)), "stored as run from the top"
    printed = [text_of(cell) for cell in code_cells(read(path))]
    assert any(printed)
    assert all(len(text) <= MOST_CHARACTERS for text in printed)


@each_notebook
def test_notebook_shows_nothing_of_a_machine(path: Path) -> None:
    for cell in code_cells(read(path)):
        assert not _LEAKS.search(text_of(cell)), cell.source
        assert "execution" not in cell.metadata, "times of a run"


def test_an_error_in_a_cell_is_found(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute(nbformat.v4.new_notebook(cells=cells), tmp_path)


@pytest.mark.parametrize(
    "text", ["/tmp/ipykernel_12/3.py:4", "<f at 0x7f3a5c1d2e50>", "/home/me/a.py"]
)
def test_a_leak_is_found(text: str) -> None:
    assert _LEAKS.search(text)


# --- helpers --------------------------------------------------------------------------


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def execute(notebook: Any, directory: Path) -> None:
    """Executes all cells in place, in `directory`; raises if one does."""
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=300,  # seconds for a cell
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    ).execute()


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    """All that a cell has printed or shown."""
    shown = (
        output.text if output.output_type == "stream" else str(output.get("data", ""))
        for output in cell.outputs
    )
    return "\n".join(shown)


def store(path: Path) -> None:
    """Executes a notebook and writes it back with its outputs."""
    notebook = read(path)
    with tempfile.TemporaryDirectory() as directory:
        execute(notebook, Path(directory))
    notebook.metadata["language_info"] = {"name": "python"}  # nothing of this machine
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        store(notebook_path)
