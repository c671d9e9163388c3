"""Run the book and build its site: what `make book` calls.

Every notebook is run top to bottom in a copy under build/, so that the committed files stay as they are.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
CELL_SECONDS = 120
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
VERDICT = re.compile(r"^\((\d+\.\d+)\) (?:proved|refuted)", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

EPILOG = """examples:
  python notebooks/build.py                 the whole book, then the site; what `make book` does
  python notebooks/build.py --only 5 7      two chapters, to try a change; no site
  python notebooks/build.py --only 5 --write
                                            run chapter 5 and put its outputs and figures back into the
                                            checkout: the way to refresh what is committed
  python notebooks/build.py --site-only     the site from the committed outputs, without running anything

The table at the end counts, for each chapter, the identities whose proof ran (lines such as "(5.1) proved" or
"(5.7) refuted") and the checks (every assert in its cells; one that fails stops the chapter).
Exit status: 0 all well, 1 a chapter failed (its cell is named), 2 wrong arguments, 3 the site did not build."""


@dataclass
class Chapter:
    """One notebook's run: where it lies, what it proved, and the cell that failed if one did."""

    path: Path
    proved: set = field(default_factory=set)
    checks: int = 0
    seconds: float = 0.0
    failure: str = ""


def chapters(folder: Path, only: list[int] | None = None) -> list[Path]:
    """The notebooks of `folder` in reading order, or those whose number is in `only`."""
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if only is None:
        return found
    missing = set(only) - {int(path.name[:2]) for path in found}
    if missing:
        sys.exit(f"no chapter {', '.join(map(str, sorted(missing)))} in {folder}; there are {len(found)}")
    return [path for path in found if int(path.name[:2]) in only]


def count_checks(notebook) -> int:
    """How many assertions stand in the code: assert statements, and calls such as testing.assert_close."""
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            called = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].startswith("assert_")
            count += called or isinstance(node, ast.Assert)
    return count


def code_cells(notebook) -> list[int]:
    """Positions of the cells that will run: code, and not blank."""
    return [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and cell.source.strip()]


def tags_printed(notebook) -> set[str]:
    """Tags of the identities whose verdict the outputs show."""
    texts = (out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    return {tag for text in texts for tag in VERDICT.findall(text)}


def run_chapter(path: Path, bar: tqdm) -> Chapter:
    """Run one notebook where it lies, write its outputs into it, and move `bar` one step a cell."""
    chapter, notebook = Chapter(path), nbformat.read(path, as_version=4)
    chapter.checks = count_checks(notebook)
    positions, start = code_cells(notebook), time.perf_counter()
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # a kernel's start-up advice would cut through the bar
        resources={"metadata": {"path": str(path.parent)}},
    )
    done, where = 0, 0
    try:
        with client.setup_kernel():
            for number, where in enumerate(positions, start=1):
                client.execute_cell(notebook.cells[where], where, execution_count=number)
                bar.update()
                done += 1
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        chapter.failure = describe(path, notebook.cells[where], done + 1, where + 1, error)
        bar.update(len(positions) - done)
    chapter.seconds = time.perf_counter() - start
    chapter.proved = tags_printed(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    nbformat.write(notebook, path)
    return chapter


def describe(path: Path, cell, number: int, position: int, error: Exception) -> str:
    """The failing cell, its first line and the last line of what went wrong."""
    reason = [line for line in COLOUR.sub("", str(error)).splitlines() if line.strip()] or [type(error).__name__]
    first = cell.source.strip().splitlines()[0]
    return f"{path.name}, code cell [{number}] (cell {position} of the notebook): {first}\n    {reason[-1].strip()}"


def workplace() -> Path:
    """A fresh copy of the book under build/, beside links to the code that its pages point to."""
    place = ROOT / "build" / "book"
    shutil.rmtree(place, ignore_errors=True)
    for name in ("notebooks", "figures"):
        (ROOT / name).mkdir(exist_ok=True)
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("gdn_ref", "tests", "benchmarks", "README.md", "LICENSE", "CHANGELOG.md"):
        if (ROOT / name).exists():
            (place / name).symlink_to(ROOT / name)
    return place


def run_book(place: Path, only: list[int] | None) -> list[Chapter]:
    """Run the chapters in `place`, one progress bar over all their cells."""
    paths = chapters(place / "notebooks", only)
    total = sum(len(code_cells(nbformat.read(path, as_version=4))) for path in paths)
    os.environ["GDN_REF_FIGURES"] = str(place / "figures")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    with tqdm(total=total, unit="cell", desc="book", smoothing=0, dynamic_ncols=True) as bar:
        for path in paths:
            bar.set_description(path.stem)
            results.append(run_chapter(path, bar))
        bar.set_description("book")
    return results


def build_site(source: Path, target: Path) -> None:
    """Sphinx over `source` (a notebooks folder) into `target`; leaves with status 3 when a page is wrong.

    What was in `target` goes; a folder that holds anything but an earlier site is refused.
    """
    if target.exists() and any(target.iterdir()) and not (target / "objects.inv").exists():
        print(f"--out: found something else in {target}, expected a new folder or an earlier site", file=sys.stderr)
        sys.exit(2)
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going"]
    with tempfile.TemporaryDirectory() as scratch:  # Sphinx and myst-nb leave things beside what they build
        pages = Path(scratch) / "pages" / "html"
        ran = subprocess.run([*sphinx, "-d", f"{scratch}/doctrees", str(source), str(pages)])
        if ran.returncode:
            print("the site did not build; what is wrong stands above", file=sys.stderr)
            sys.exit(3)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(pages, target)


def write_back(place: Path, results: list[Chapter]) -> None:
    """Copy the chapters that ran without failure, and their figures, into the checkout."""
    for chapter in results:
        if not chapter.failure:
            shutil.copy(chapter.path, ROOT / "notebooks")
            for figure in (place / "figures").glob(f"{chapter.path.name[:2]}_*.svg"):
                shutil.copy(figure, ROOT / "figures")


def table(results: list[Chapter]) -> str:
    """What ran, as the lines that `make book` ends with."""
    rows = [(c.path.stem, len(c.proved), c.checks, c.seconds, "FAILED" if c.failure else "") for c in results]
    good = [row for row in rows if not row[4]]
    rows.append(("all", *(sum(row[i] for row in good) for i in (1, 2, 3)), ""))
    width = max(len(row[0]) for row in rows)
    lines = [f"{'chapter':<{width}}  identities proved  checks passed  seconds"]
    for name, proved, checks, seconds, failed in rows:
        passed = failed or str(checks)
        lines.append(f"{name:<{width}}  {proved:>17}  {passed:>13}  {seconds:>7.1f}")
    lines.insert(-1, "-" * len(lines[0]))
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; see EPILOG for what each form is for."""
    parser = argparse.ArgumentParser(
        prog="python notebooks/build.py",
        description="Run the book's notebooks top to bottom and build its site.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run these chapters alone; builds no site")
    parser.add_argument("--write", action="store_true", help="put outputs and figures back into the checkout")
    parser.add_argument("--no-site", action="store_true", help="run the chapters, build no site")
    parser.add_argument("--site-only", action="store_true", help="run nothing, build the site from what is committed")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder for the site (default: site/)")
    args = parser.parse_args(argv)
    if args.site_only and (args.only or args.write or args.no_site):
        parser.error("--site-only runs nothing: it goes with --out alone")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit status."""
    args = parse(argv)
    page = args.out / "index.html"
    if args.site_only:
        build_site(ROOT / "notebooks", args.out)
        print(f"open {page}")
        return 0
    place = workplace()
    results = run_book(place, args.only)
    if not results:
        print("no chapter found in notebooks/", file=sys.stderr)
        return 1
    failures = [chapter.failure for chapter in results if chapter.failure]
    if args.write:
        write_back(place, results)
    if not (failures or args.only or args.no_site):
        build_site(place / "notebooks", args.out)
    print(table(results))
    if failures:
        print("\nfailed:\n" + "\n".join(failures), file=sys.stderr)
        return 1
    if not (args.only or args.no_site):
        print(f"\nopen {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
