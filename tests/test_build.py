"""`make book`'s runner on a little book: what it counts, what it says of a failing cell, what it leaves alone."""

import importlib.util
import sys
from pathlib import Path

import nbformat
import pytest

BUILD = Path(__file__).resolve().parent.parent / "notebooks" / "build.py"
GOOD = ["x = 2\nprint('(1.1) proved')", "", "assert x == 2\nassert x > 1\nprint('(1.5) refuted, as it should be')"]
BAD = ["x = 2", "y = x + 1\nassert y == 4, 'y is three'", "print('never reached')"]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """The runner, set on an empty book in a folder of its own."""
    spec = importlib.util.spec_from_file_location("build", BUILD)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("GDN_REF_FIGURES", "unset")  # the runner sets it; this puts the old value back afterwards
    (tmp_path / "notebooks").mkdir()
    return module


def write(folder, name, cells):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    path = folder / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def test_counts_and_leaves_the_checkout_alone(build, tmp_path, capsys):
    path = write(tmp_path, "01_good", GOOD)
    before = path.read_bytes()
    assert build.main(["--no-site"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("01_good"))
    assert row.split()[1:3] == ["2", "2"]
    assert path.read_bytes() == before


def test_names_the_failing_cell_and_goes_on(build, tmp_path, capsys):
    write(tmp_path, "01_bad", BAD)
    write(tmp_path, "02_good", GOOD)
    assert build.main(["--no-site"]) == 1
    shown = capsys.readouterr()
    assert "01_bad.ipynb, code cell [2] (cell 2 of the notebook): y = x + 1" in shown.err
    assert "y is three" in shown.err
    assert "FAILED" in shown.out and "02_good" in shown.out


def test_write_refreshes_only_what_ran_well(build, tmp_path):
    good, bad = write(tmp_path, "01_good", GOOD), write(tmp_path, "02_bad", BAD)
    before = bad.read_bytes()
    assert build.main(["--write", "--no-site"]) == 1
    assert bad.read_bytes() == before
    notebook = nbformat.read(good, as_version=4)
    assert [cell.execution_count for cell in notebook.cells] == [1, None, 2]
    assert notebook.cells[0].outputs[0].text == "(1.1) proved\n"
    assert dict(notebook.metadata) == build.METADATA


def test_an_empty_book_is_a_failure(build, capsys):
    assert build.main([]) == 1
    assert "no chapter" in capsys.readouterr().err


def test_wrong_arguments(build, tmp_path):
    write(tmp_path, "01_good", GOOD)
    with pytest.raises(SystemExit, match="no chapter 9"):
        build.main(["--only", "9"])
    with pytest.raises(SystemExit) as stop:
        build.main(["--site-only", "--write"])
    assert stop.value.code == 2


def test_a_folder_of_something_else_is_not_overwritten(build, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep me")
    with pytest.raises(SystemExit) as stop:
        build.main(["--site-only", "--out", str(tmp_path / "mine")])
    assert stop.value.code == 2 and "something else" in capsys.readouterr().err
    assert (tmp_path / "mine" / "letter.txt").read_text() == "keep me"
