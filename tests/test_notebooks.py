"""The book as committed: whole, run top to bottom, quiet, and in step with the identities and the figures.

That its outputs are also what a run gives is nbval's part (`pytest --nbval`).
"""

import ast
import json
import re
import tokenize
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from gdn_ref.identities import IDENTITIES

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
FIGURES = ROOT / "figures"
CHAPTERS = (
    "01_memory_that_overwrites",
    "02_geometry",
    "03_wy",
    "04_one_chunk",
    "05_gate",
    "06_inverse",
    "07_range_and_precision",
    "08_backward_token",
    "09_backward_chunk",
    "10_affine_maps_compose",
    "11_serving",
    "12_equation_to_triton",
    "13_a_model_that_learns",
)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
FOUND = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
TAGS = [identity.tag for identity in IDENTITIES]
TAG = re.compile(r"\\tag\{(\d+\.\d+)\}")
VERDICT = re.compile(r"^\((\d+\.\d+)\) (proved|refuted, as it should be)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
LONG_FLOAT = re.compile(r"\d\.\d{4,}|\d\.\d{3,}e[-+]?\d")

each_chapter = pytest.mark.parametrize("name", FOUND)


def read(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def prose(name):
    return "\n\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")


def outputs(name):
    return [output for cell in code(name) for output in cell.outputs]


def streams(name, which):
    return "".join(out.text for out in outputs(name) if out.output_type == "stream" and out.name == which)


def calls(source):
    """Names of the functions that a cell calls."""
    return [ast.unparse(n.func) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]


def test_the_book_is_whole():
    assert FOUND, "no notebook found"
    missing = [name for name in CHAPTERS if name not in FOUND]
    assert not missing


@each_chapter
def test_run_top_to_bottom(name):
    counts = [cell.execution_count for cell in code(name)]
    assert counts == list(range(1, len(counts) + 1))
    assert outputs(name), "no output: nbval would compare nothing"


@each_chapter
def test_cells_that_print_kept_their_outputs(name):
    for cell in code(name):
        printing = {"print", "prove", "show_source"} & {
            ast.unparse(node.value.func)
            for node in ast.parse(cell.source).body
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        }
        assert cell.outputs or not printing, cell.source


@each_chapter
def test_first_cell_sets_up(name):
    assert "setup" in [call.rpartition(".")[2] for call in calls(code(name)[0].source)]


@each_chapter
def test_small_enough(name):
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 400_000
    for output in outputs(name):
        assert len(json.dumps(output)) < 50_000


@each_chapter
def test_quiet(name):
    assert streams(name, "stderr") == ""
    assert not [output for output in outputs(name) if output.output_type == "error"]


@each_chapter
def test_nothing_is_kept_from_nbval(name):
    notebook = read(name)
    assert dict(notebook.metadata) == METADATA
    for cell in notebook.cells:
        assert not cell.metadata, cell.metadata
        assert "NBVAL" not in cell.source


@each_chapter
def test_prints_no_raw_floats(name):
    sources = {line.strip() for path in (ROOT / "gdn_ref").rglob("*.py") for line in path.read_text().splitlines()}
    for output in outputs(name):
        text = output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
        shown = [line for line in text.splitlines() if line.strip() not in sources]
        assert not [line for line in shown if LONG_FLOAT.search(line)]


@each_chapter
def test_asserts_and_has_an_exercise(name):
    asserted = [n for cell in code(name) for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Assert)]
    assert len(asserted) >= 5
    assert "<details>" in prose(name) and "</details>" in prose(name)


@each_chapter
def test_markdown_reads_the_same_everywhere(name):
    text = prose(name)
    for directive in ("```{", ":::", "{ref}", "{eq}", "{math}", "{doc}"):
        assert directive not in text
    assert text.count("$$") % 2 == 0


@each_chapter
def test_links_lead_somewhere(name):
    for _, target in LINK.findall(prose(name)):
        if not re.match(r"[a-z]+:|#", target):
            assert (NOTEBOOKS / target.partition("#")[0]).exists(), target


@each_chapter
def test_tags_are_identities(name):
    unknown = set(TAG.findall(prose(name))) - set(TAGS)
    assert not unknown
    assert {tag for tag, _ in VERDICT.findall(streams(name, "stdout"))} <= set(TAGS)


@pytest.mark.parametrize("identity", IDENTITIES, ids=TAGS)
def test_identity_stands_in_its_chapter(identity):
    number = int(identity.tag.partition(".")[0])
    name = next((name for name in FOUND if int(name[:2]) == number), None)
    assert name, f"there is no chapter {number}"
    assert identity.tag in TAG.findall(prose(name)), "its equation is not written there"
    verdicts = dict(VERDICT.findall(streams(name, "stdout")))
    expected = "refuted, as it should be" if identity.refuted else "proved"
    assert verdicts.get(identity.tag) == expected, "its proof is not run there"


def test_each_tag_is_one_identity():
    assert [tag for tag, times in Counter(TAGS).items() if times > 1] == []
    assert TAGS == sorted(TAGS, key=lambda tag: [int(part) for part in tag.split(".")])


@pytest.mark.parametrize("path", sorted((ROOT / "gdn_ref").rglob("*.py")), ids=lambda p: p.stem)
def test_tags_in_comments_are_identities(path):
    with tokenize.open(path) as file:
        comments = [t.string for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT]
    cited = {tag for comment in comments for tag in re.findall(r"\((\d{1,2}\.\d{1,2})\)", comment)}
    assert cited <= set(TAGS)


@each_chapter
def test_figures_are_made_and_shown_in_their_chapter(name):
    shown = [Path(target).name for bang, target in LINK.findall(prose(name)) if bang]
    made = re.findall(r"""\bsave\([^)]*?["'](\w+)["']\)""", "\n".join(cell.source for cell in code(name)))
    assert made, "every chapter has a figure"
    assert {f"{figure}.svg" for figure in made} <= set(shown)
    assert all(figure.startswith(name[:2]) for figure in made)
    assert all((FIGURES / figure).is_file() for figure in shown)


def test_every_figure_is_shown_somewhere():
    pages = [prose(name) for name in FOUND]
    pages += [path.read_text() for path in (ROOT / "README.md", NOTEBOOKS / "index.md") if path.exists()]
    for figure in FIGURES.glob("*"):
        assert any(figure.name in page for page in pages), f"{figure.name} is shown nowhere"


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.svg")), ids=lambda p: p.stem)
def test_figure_is_opaque_and_stable(path):
    text = path.read_text()
    ground = re.search(r'<g id="patch_1">\s*<path[^>]*style="fill: ([^";]+)', text)
    assert ground and ground[1] in ("#ffffff", "white"), "without a white ground it cannot be read on a dark page"
    assert "<dc:date>" not in text, "a date makes every run a change"
    assert path.stat().st_size < 1_000_000
