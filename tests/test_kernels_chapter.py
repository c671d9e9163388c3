"""Chapter 12 where Triton is installed: its cells run with the kernels in them, and print what is committed.

Without Triton the chapter prints the same lines and leaves the kernels out, which is what nbval compares.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CHAPTER = NOTEBOOKS / "12_equation_to_triton.ipynb"
# The cells run in a process of their own: they turn warnings into errors and change torch's default dtype.
RUN = """
import contextlib, io, json, sys

names, said = {}, []
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
        said.append(text.getvalue())
assert names["launch"] is not None, "Triton is there, and the chapter left its kernels out"
print(json.dumps(said))
"""


def test_the_chapter_runs_its_kernels():
    command = [sys.executable, "-c", RUN, str(CHAPTER)]
    root = str(NOTEBOOKS.parent)
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=NOTEBOOKS, env=settings)
    assert ran.returncode == 0, ran.stderr[-3000:]
    cells = [cell for cell in json.loads(CHAPTER.read_text())["cells"] if cell["cell_type"] == "code"]
    committed = ["".join(text for out in cell["outputs"] for text in out.get("text", ())) for cell in cells]
    assert json.loads(ran.stdout.splitlines()[-1]) == committed
