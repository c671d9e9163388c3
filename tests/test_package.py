"""The package as an installed thing: what importing it costs, which way its imports run, what it ships."""

import ast
import importlib.metadata
import importlib.resources
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gdn_ref

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gdn_ref"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What each module may import of the package; the arrows run one way, down (see test_arrows_make_no_circle).
BASE = {"arguments", "gates"}
STAGES = BASE | {"chunks", "recurrent", "chunkwise"}
ARROWS = {
    "exact": set(),
    "identities": {"exact"},
    "gates": set(),
    "arguments": {"gates"},
    "chunks": BASE,
    "recurrent": BASE | {"chunks"},
    "chunkwise": BASE | {"chunks"},
    "chunkwise_backward": STAGES,
    "ops": STAGES | {"chunkwise_backward", "kernels"},
    "library": STAGES | {"chunkwise_backward", "ops"},
    "kernels": BASE | {"chunks"},
    "serving": STAGES | {"ops", "kernels"},
    "layer": STAGES | {"ops"},
    "integrations": {"arguments", "ops"},
    "demo_figure": {"notebook"},
    "demo": STAGES | {"ops", "serving", "layer", "notebook", "demo_figure"},
    "notebook": {"identities"},
    "bench_record": set(),
    "bench_peers": {"ops", "serving"},
    "bench_figure": {"bench_record", "notebook"},
    "bench_tensors": {"bench_record", "bench_peers", "gates", "ops"},
    "bench_processes": {"bench_record", "bench_peers", "bench_tensors"},
    "bench": {"bench_record", "bench_peers", "bench_tensors", "bench_processes", "bench_figure", "demo_figure"},
    "check": {"exact", "recurrent", "gates", "__init__"},
    "cli": {"identities", "demo", "bench", "check", "serving", "layer", "ops"},
    "__main__": {"cli"},
    "__init__": STAGES | {"ops", "serving", "layer", "library"},
}


def run(source):
    """Run `source` in a fresh interpreter, away from the checkout; returns what it printed."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", source]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT.parent)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def owner(path):
    """The module a file belongs to, "identities" for everything below that folder."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """Names of the package's own modules that the file imports, wherever in the file."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name.split(".") for a in node.names]
            found |= {(name + ["__init__"])[1] for name in names if name[0] == "gdn_ref"}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level == 0 and module[:1] == ["gdn_ref"]:
                module = module[1:]
            elif node.level != depth:
                continue  # of another package, or of its own folder
            found |= {module[0]} if module else {a.name for a in node.names}
    return found


def test_import_loads_nothing_heavy_and_calls_no_driver():
    added = run(
        "import sys, numpy, torch; before = set(sys.modules); import gdn_ref\n"
        "heavy = {'triton', 'sympy', 'matplotlib', 'tqdm', 'jupyter_core', 'IPython', 'transformers'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)), torch.cuda.is_initialized())"
    )
    assert added == "[] False"


def test_works_where_triton_cannot_be_imported():
    printed = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, gdn_ref\n"
        "q = k = torch.nn.functional.normalize(torch.ones(1, 5, 1, 4), dim=-1); v = torch.ones(1, 5, 1, 3)\n"
        "g = torch.zeros(1, 5, 1); beta = torch.ones(1, 5, 1)\n"
        "o, state = gdn_ref.chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0, output_final_state=True)\n"
        "print(tuple(o.shape), tuple(state.shape), bool((o - v).abs().max() < 1e-5))"
    )
    assert printed == "(1, 5, 1, 3) (1, 1, 4, 3) True"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_run_one_way(path):
    assert owner(path) in ARROWS, "say in ARROWS what this module may import"
    assert imported(path) - {owner(path)} <= ARROWS[owner(path)]


def test_arrows_make_no_circle():
    below = {name: set(names) for name, names in ARROWS.items()}
    while below:
        leaves = {name for name, names in below.items() if not names}
        assert leaves, f"a circle among {sorted(below)}"
        below = {name: names - leaves for name, names in below.items() if name not in leaves}


def test_exact_needs_numpy_alone():
    tree = ast.parse((PACKAGE / "exact.py").read_text())
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not {"torch", "sympy", "math"} & {name.partition(".")[0] for name in names}
    assert not [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, float)]


def test_public_names_are_documented():
    assert gdn_ref.__all__ and len(set(gdn_ref.__all__)) == len(gdn_ref.__all__)
    for name in gdn_ref.__all__:
        value = getattr(gdn_ref, name)
        if callable(value):
            assert len(inspect.getdoc(value) or "") > 80, f"{name}: no docstring to speak of"
            if isinstance(value, type) and issubclass(value, BaseException):
                continue  # a warning's class has no signature to look at
            kinds = [p.kind for p in inspect.signature(value).parameters.values()]
            assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{name}: names are explicit, never **kwargs"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_public_functions_are_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        plain_tuple = isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases)
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if public and not plain_tuple:  # a tuple's fields may speak for it
            assert ast.get_docstring(node), node.name


def test_version_is_one():
    declared = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert gdn_ref.__version__ == declared
    assert importlib.metadata.version("gdn_ref") == declared


def test_types_are_shipped():
    assert importlib.resources.files("gdn_ref").joinpath("py.typed").is_file()
    assert re.search(r'gdn_ref = \["py.typed"\]', (ROOT / "pyproject.toml").read_text())


def test_runtime_needs_torch_and_numpy_alone():
    required = importlib.metadata.requires("gdn_ref")
    names = sorted(re.match(r"[\w-]+", line)[0] for line in required if "extra ==" not in line)
    assert names == ["numpy", "torch"]


def test_constraints_pin_torch_and_leave_triton():
    pins = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ("torch", "2.13.0") in pins
    assert "triton" not in dict(pins)


def test_no_file_names_a_machine_or_a_registry():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    local = "|".join(("work", "root", "home", "opt", "Users"))
    hosts = "|".join(("pypi", "pythonhosted", "npmjs", "debian"))
    pattern = re.compile(rf"(?<![\w.~])/(?:{local})/\w|(?:{hosts})\.org|download\.pytorch", re.IGNORECASE)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in (".svg", ".png"):
            assert not pattern.search(path.read_text(errors="replace")), name


def test_ruff_is_clean():
    pytest.importorskip("ruff", reason="no ruff: style is not checked")
    ran = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
