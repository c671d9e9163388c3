"""The check as a command and as a library: verdicts, reports, errors, exit status."""

import functools
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import gdn_ref
from gdn_ref import cli
from gdn_ref.check import adapters, cases, report, suite
from gdn_ref.check.cases import Recipe
from gdn_ref.check.records import (
    BOUNDS,
    ERROR,
    FAIL,
    FEATURES,
    NOT_OFFERED,
    PASS,
    Implementation,
    Measurement,
    Offers,
    Report,
)

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("agreement", "packing", "gradients", "pool")


@pytest.fixture
def port(monkeypatch):
    """A module of somebody's own, importable as `port`; functions are put into it by name."""
    module = types.ModuleType("port")
    monkeypatch.setitem(sys.modules, "port", module)
    return module


def run(capsys, *argv):
    status = cli.main(["check", "--device", "cpu", *argv])
    return status, capsys.readouterr()


def op(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
       cu_seqlens=None):  # fmt: skip
    return gdn_ref.chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state,
                                          use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)  # fmt: skip


# ---------------------------------------------------------------- ours


@pytest.mark.parametrize("name", adapters.OURS)
def test_ours_pass_every_property_that_they_offer(name):
    found = suite.check_named(name, suite.choose())
    bad = {f.property.name: (f.note, f.worst) for f in found.findings if f.verdict not in (PASS, NOT_OFFERED)}
    assert found.ok and not bad, bad
    lacking = {f.property.name for f in found.findings if f.verdict == NOT_OFFERED}
    offered = [f for f in found.findings if f.verdict == PASS]
    assert len(offered) >= 36 and all(f.cases and f.worst for f in offered)
    if name == "gdn_ref":
        assert all(n.startswith("pool") for n in lacking)


def test_the_full_check_adds_properties_and_passes_them():
    names = {p.name for p in suite.choose(full=True)} - {p.name for p in suite.choose()}
    assert names >= {"odd widths", "empty sequences", "many sequences", "long sequence"}
    small = names - {"long sequence"}
    found = suite.check_named("gdn_ref", suite.choose(small, True), full=True)
    assert {f.verdict for f in found.findings} == {PASS}, [(f.property.name, f.verdict, f.note) for f in found.findings]


def test_every_property_says_why_and_where():
    for p in suite.PROPERTIES:
        assert 20 < len(p.reason) < 110 and "\n" not in p.reason and p.needs <= set(FEATURES), p.name
        assert (ROOT / p.chapter).is_file(), p.chapter
        assert len(p.name) <= 25, "it would not fit the table"
    names = [p.name for p in suite.PROPERTIES]
    assert len(set(names)) == len(names)


def test_the_reference_is_itself_checked(monkeypatch, capsys):
    """Against fractions: a wrong recurrence or a wrong gradient of it stops the check with status 2."""
    assert suite.self_test() == ""
    right = cases.definition

    def wrong(call):
        o, S = right(call)
        return o * (1 + 1e-9), S

    monkeypatch.setattr(suite, "definition", wrong)
    assert "o is" in suite.self_test()
    status, said = run(capsys, "--property", "agreement")
    assert status == 2 and "nothing was checked" in said.err and said.out == ""
    monkeypatch.setattr(suite, "definition", lambda call: right(call._replace(k=call.k.detach())))
    assert "gradient of k" in suite.self_test() or "Error" in suite.self_test()


# ---------------------------------------------------------------- verdicts


def test_what_is_lacking_is_not_offered_and_never_a_pass(port, capsys):
    port.op = op
    status, said = run(capsys, "--impl", "port:op", "--property", *QUICK, "--without", "packed", "gradients")
    assert status == 0 and "1 passed, 0 failed, 3 not offered" in said.out
    assert "not offered (no packed sequences (cu_seqlens)): packing" in said.out


def test_nothing_passed_is_not_a_success(port, capsys):
    port.op = op
    status, said = run(capsys, "--impl", "port:op", "--property", "pool")
    assert status == 1 and "0 passed" in said.out


def test_a_refusal_is_not_offered_with_its_own_words(port, capsys):
    def refusing(q, k, v, g, beta):
        raise NotImplementedError("heads of this width are for next year")

    port.op = refusing
    status, said = run(capsys, "--impl", "port:op", "--property", "agreement")
    assert status == 1 and "not offered (heads of this width are for next year)" in said.out


def test_no_graph_is_no_gradient(port):
    port.op = lambda q, k, v, g, beta: op(*(x.detach() for x in (q, k, v, g, beta)))[0]
    [found] = suite.check_named("port:op", suite.choose(["gradients"])).findings
    assert found.verdict == NOT_OFFERED and "no gradient" in found.note


def test_what_raises_is_reported_and_the_run_goes_on(port, capsys):
    def raising(q, k, v, g, beta, initial_state=None, output_final_state=False):
        if v.shape[1] == 33:
            raise ZeroDivisionError("at /tmp/somebody/else/port.py\nsecond line")
        return op(q, k, v, g, beta, None, initial_state, output_final_state)

    port.op = raising
    status, said = run(capsys, "--impl", "port:op", "--property", "agreement", "scale from K", "lengths")
    assert status == 1 and re.search(r"scale from K +ERROR", said.out) and re.search(r"agreement +pass", said.out)
    assert "it said: ZeroDivisionError: at port.py" in said.out and "somebody" not in said.out
    assert re.search(r"lengths +ERROR", said.out) and "2 raised" in said.out


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (lambda o, S: (o[:, :-1], S), "o: found shape"),
        (lambda o, S: (o, S.mT), "final state: found shape"),
        (lambda o, S: (o, None), "final state: found None"),
        (lambda o, S: (o, S, S), "found 3 results, expected (o, final state)"),
    ],
)
def test_results_of_another_shape(port, spoil, expected):
    port.op = lambda q, k, v, g, beta, initial_state=None, output_final_state=True: spoil(
        *op(q, k, v, g, beta, None, initial_state, True))  # fmt: skip
    [found] = suite.check_named("port:op", suite.choose(["agreement"])).findings
    assert found.verdict == ERROR and expected in found.note


def test_nan_is_a_failure():
    lost = Measurement(float("nan"), 1.0, "o", {})
    assert not lost.ok and lost.ratio == float("inf")
    call = cases.make(Recipe(T=3))
    wrong = {"o": torch.full_like(call.v, float("nan"))}
    assert cases.relative_l2(wrong["o"], cases.expected(call)["o"], call, "token").min() == float("inf")


def test_one_small_head_of_one_sequence_is_not_averaged_away():
    call = cases.make(Recipe(B=2, T=50, HV=4, V=8))
    right = torch.ones(2, 50, 4, 8, dtype=torch.float64)
    right[:, :, 0] *= 1e3
    wrong = right.clone()
    wrong[1, :, 3] *= 1.001
    error = cases.relative_l2(wrong, right, call, "token")
    assert (wrong - right).norm() / right.norm() < BOUNDS["float32"].o < error.max()
    assert divmod(int(error.argmax()), 4) == (1, 3)


# ---------------------------------------------------------------- whom to check


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("no_such_module:op", "ModuleNotFoundError"),
        ("gdn_ref:no_such_function", "gdn_ref has no no_such_function"),
        ("gdn_ref:__version__", "is a str, expected a function"),
        ("gdn_ref:l2norm", "found the signature l2norm(x), expected parameters named q, k, v, g, beta"),
        ("nobody", "expected package.module:function or one of gdn_ref"),
        ("port:broken.inner", "port has no broken.inner"),
    ],
)
def test_what_cannot_be_loaded_is_reported_and_the_run_goes_on(spec, expected, port, capsys):
    status, said = run(capsys, "--impl", spec, "gdn_ref", "--property", "agreement")
    assert status == 1 and f"{spec}: could not be loaded: " in said.out and expected in said.out
    assert "gdn_ref 0" in said.out and "1 passed" in said.out and "Traceback" not in said.out + said.err


def test_functions_without_a_name_are_taken(port):
    """Partial functions and objects that can be called."""
    port.op = functools.partial(gdn_ref.chunk_gated_delta_rule, backend="torch")
    assert suite.check_named("port:op", suite.choose(["agreement"])).ok
    port.op = functools.partial(gdn_ref.l2norm)
    assert "found the signature partial(x)" in suite.check_named("port:op", []).problem


def test_a_module_that_fails_to_import_says_how(tmp_path, monkeypatch, capsys):
    (tmp_path / "breaking.py").write_text("raise OSError('no driver here')")
    monkeypatch.syspath_prepend(tmp_path)
    status, said = run(capsys, "--impl", "breaking:op", "--property", "agreement")
    assert status == 1 and "could not be loaded: OSError: no driver here" in said.out


@pytest.mark.parametrize(
    "function, adapter",
    [
        (op, "fla"),
        (lambda query, key, value, g, beta, **kwargs: 0, "transformers"),
        (gdn_ref.gdn_extend_chunkwise, "pymllm"),
        (gdn_ref.recurrent.recurrent_step, "step"),
    ],
)
def test_the_adapter_is_guessed_from_the_signature(function, adapter):
    assert adapters.guess(function) == adapter


def as_transformers(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                    use_qk_l2norm_in_kernel=False, **kwargs):  # fmt: skip
    return op(query, key, value, g, beta, None, initial_state, output_final_state, use_qk_l2norm_in_kernel)


def as_flashinfer(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                  cu_seqlens=None, use_qk_l2norm_in_kernel=False):  # fmt: skip
    assert q.dim() == 3 and g.dtype == torch.float32 and not (g > 1).any()
    o, S = op(q[None], k[None], v[None], g.log()[None], beta[None], scale, initial_state.mT, True, False, cu_seqlens)
    return o[0], S.mT.contiguous()


def as_pymllm(q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, cu_seqlens, chunk_size=64):
    gates = (a, b, A_log, dt_bias)
    return gdn_ref.gdn_extend_chunkwise(q, k, v, *gates, state_pool, cache_indices, cu_seqlens, chunk_size)


def as_step(q, k, v, g, beta, state):
    o, state = gdn_ref.recurrent.recurrent_step(*(x.float() for x in (q, k, v)), g, beta, state)
    return o.to(v.dtype), state


@pytest.mark.parametrize(
    "function, adapter, lacks",
    [
        (as_transformers, None, {"packing", "scale given", "state as [V, K]"}),
        (as_flashinfer, "flashinfer", {"gradients", "L2 norm"}),
        (as_pymllm, None, {"gradients", "reflection", "pool, stale slot", "pool in bfloat16"}),
        (as_step, None, {"packing", "grouped heads", "scale from K"}),
    ],
)
def test_each_adapter_meets_its_layout(port, function, adapter, lacks):
    """Our own op behind everybody's signature passes; what the signature cannot say is not offered."""
    port.op = function
    found = suite.check_named("port:op", suite.choose(), adapter=adapter)
    verdicts = {f.property.name: f.verdict for f in found.findings}
    assert set(verdicts.values()) == {PASS, NOT_OFFERED}, [(f.property.name, f.note, f.worst) for f in found.findings
                                                          if f.verdict in (FAIL, ERROR)]  # fmt: skip
    assert {n for n, v in verdicts.items() if v == NOT_OFFERED} >= lacks
    assert {n for n in ("agreement", "lengths", "prefill then decode", "strong decay")} <= {
        n for n, v in verdicts.items() if v == PASS}  # fmt: skip


def test_unknown_keywords_are_not_asked_for(port):
    """A function that swallows what it does not know would ignore a boundary in silence."""
    run, features = adapters.sequence(as_transformers, ("query", "key", "value"))
    assert not features & {"packed", "scale", "state_v_first", "raw_gates"}


def test_restrictions_are_kept():
    """Widths, heads and dtypes that an implementation takes are the only ones it is asked for."""
    seen = []

    def recording(call):
        seen.append((call.v.dtype, call.q.shape[-1], *call.v.shape[2:], call.q.shape[2]))
        return adapters.sequence(op)[0](call)

    features = adapters.sequence(op)[1] - {"widths", "gradients"}
    only = Implementation("only", recording, Offers(features, ("bfloat16",), ((128, 128),), ((2, 4),)))
    items = suite.choose(["agreement", "lengths", "grouped heads", "packing", "causality", "padding"])
    found = suite.check(only, items)
    assert set(seen) == {(torch.bfloat16, 128, 4, 128, 2)}
    assert {f.verdict for f in found.findings} == {PASS}, found.findings


def test_limits_of_the_command_line_are_kept(port, capsys):
    """A kernel for one dtype, one width and one pair of heads is asked for nothing else."""

    def narrow(q, k, v, g, beta, output_final_state=False):
        assert v.dtype == torch.bfloat16 and v.shape[2:] == (4, 64) and q.shape[2:] == (2, 64)
        return op(q, k, v, g, beta, output_final_state=True)

    port.op = narrow
    limits = ("--dtype", "bfloat16", "--width", "64x64", "--heads", "2/4", "--without", "gradients")
    status, said = run(capsys, "--impl", "port:op", *limits)
    assert status == 0 and "0 failed" in said.out and "raised" not in said.out
    assert "not offered (asked with K = V only): K other than V; scale from K" in said.out
    assert "not offered (asked with other widths only): width 128" in said.out


def test_a_recipe_makes_the_same_inputs_again():
    recipe = Recipe(lengths=(5, 0, 3), keys="correlated", decays="reset", dtype="bfloat16")
    once, again = cases.make(recipe), cases.make(Recipe(**json.loads(json.dumps(recipe._asdict()))))
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert "lengths 5+0+3" in recipe.text() and "2100x1" in Recipe(lengths=(1,) * 2100).text()


# ---------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def reports():
    def broken(q, k, v, g, beta, output_final_state=False):
        o, S = op(q, k, v, g, beta, None, None, True)
        return (o, 2 * S) if v.shape[1] < 70 else 1 / 0

    run, features = adapters.sequence(broken)
    bad = Implementation("<bad> & worse", run, Offers(features), "1.0")
    items = suite.choose(["agreement", "scale from K", "packing", "L2 norm"])
    gone = Report("gone", "", "cpu", "quick", (), "no\x00 file")
    return [suite.check(bad, items), suite.check_named("gdn_ref", items), gone]


def test_json(reports):
    found = json.loads(json.dumps(report.document(reports), allow_nan=False))
    assert found["gdn_ref"] == gdn_ref.__version__ and found["bounds"]["bfloat16"]["gradient"] == 2e-2
    bad, good, gone = found["reports"]
    assert (bad["ok"], good["ok"], gone["ok"]) == (False, True, False) and gone["problem"]
    by_name = {f["property"]: f for f in bad["findings"]}
    assert by_name["scale from K"]["verdict"] == FAIL and by_name["agreement"]["verdict"] == ERROR
    assert by_name["packing"]["verdict"] == NOT_OFFERED
    worst = by_name["scale from K"]["worst"]
    assert worst["error"] > worst["bound"] and worst["where"].startswith("state, sequence")
    assert cases.make(Recipe(**worst["input"])).v.shape[1] == 33
    assert by_name["agreement"]["failed"][0]["message"].startswith("ZeroDivisionError")


def test_junit(reports):
    root = ElementTree.fromstring(report.junit(reports))
    bad, good, gone = root
    assert (bad.get("tests"), bad.get("failures"), bad.get("errors"), bad.get("skipped")) == ("4", "1", "1", "2")
    assert (good.get("failures"), good.get("errors")) == ("0", "0") and gone.get("errors") == "1"
    [failure] = bad.findall("testcase/failure")
    assert ">" in failure.get("message") and "T=33" in failure.text


def test_html_is_one_page_with_everything_escaped(reports):
    page = report.page(reports)
    assert "<bad>" not in page and "&lt;bad&gt; &amp; worse" in page and "src=" not in page and "http" not in page
    assert page.count("<tr") == 2 * 5 and "could not be loaded" in page


def test_the_table_names_what_failed_and_why(reports):
    text = report.table(reports[0])
    assert re.search(r"scale from K +FAIL +\d\.\de[+-]\d\d +1\.0e-05  state, sequence \d, head \d: B=1 T=33 ", text)
    assert "the default scale is K^-1/2" in text and "notebooks/01_memory_that_overwrites.ipynb" in text


def test_the_command_writes_all_three(tmp_path, capsys):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    status, said = run(capsys, "--impl", "gdn_ref", "--property", "agreement", "repeated key", *options)
    assert status == 0 and said.err == "" and said.out.count("wrote ") == 3
    assert json.loads(files["json"].read_text())["reports"][0]["passed"] == 2
    assert ElementTree.parse(files["junit"]).getroot().tag == "testsuites"
    assert files["html"].read_text().startswith("<!DOCTYPE html>")


# ---------------------------------------------------------------- the command


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for words in ("--impl mypackage.ops:gdn", "what the verdicts mean", "not offered", "exit status", "flashinfer"):
        assert words in text
    for name, meaning in FEATURES.items():
        assert re.search(rf"^(features:)? +{name} +{re.escape(meaning)}$", text, re.M), name
    [named] = re.findall(r'--property (\w+) "([^"]+)"', text)
    assert set(named) <= {p.name for p in suite.PROPERTIES}
    assert 'in quotes, such as "gradients, packing"' in " ".join(text.split())


def test_names_with_commas_can_be_told_from_the_commas_between_them():
    with pytest.raises(ValueError) as error:
        suite.choose(["x"])
    assert re.findall(r"'([^']+)'", str(error.value)) == ["x", *(p.name for p in suite.PROPERTIES)]


def test_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(suite, "check_named", lambda *_: pytest.fail("something was run"))
    status, said = run(capsys, "--list")
    assert status == 0 and all(p.name in said.out and p.reason in said.out for p in suite.PROPERTIES)


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--property", "nonsense"], "--property: found 'nonsense', expected one of 'agreement', "),
        (["--property", "gradients,", "packing"], "found 'gradients,', expected one of 'agreement', "),
        (["--device", "cuda:77"], "--device: found 'cuda:77', which PyTorch cannot use"),
        (["--device", "abacus"], "--device: found 'abacus'"),
        (["--quick", "--full"], "not allowed with"),
        (["--without", "wings"], "invalid choice: 'wings'"),
        (["--width", "128"], "--width: found '128', expected two numbers, such as 128x128"),
        (["--heads", "2/none"], "--heads: found '2/none', expected two numbers"),
        (["--heads", "3/4"], "--heads: found '3/4', expected H/HV with HV a multiple of H, such as 2/4"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments_give_two(argv, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["check", *argv])
    assert stopped.value.code == 2 and expected in capsys.readouterr().err


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress_on_a_terminal(with_tqdm, capsys, monkeypatch):
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, said = run(capsys, "--impl", "gdn_ref", "--property", "agreement")
    assert status == 0 and "checking gdn_ref" in said.err and "checking" not in said.out


def test_threads_are_as_they_were(capsys):
    before = torch.get_num_threads()
    run(capsys, "--impl", "gdn_ref", "--property", "agreement")
    assert torch.get_num_threads() == before


def test_it_loads_no_kernels_and_no_extras():
    """It uses the public API alone, and runs where only torch and numpy are."""
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('triton', 'sympy', 'matplotlib', 'tqdm', 'safetensors'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from gdn_ref import cli\n"
        "sys.exit(cli.main(['check', '--device', 'cpu', '--property', 'agreement', 'pool']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 passed, 0 failed, 1 not offered") == 4 and "2 passed" in done.stdout


@pytest.mark.parametrize("words, verdict", [("this Triton miscompiles", NOT_OFFERED), ("out of memory", ERROR)])
def test_a_known_refusal_may_come_from_the_backward_pass(words, verdict):
    """FLA refuses its Triton backward on some GPUs with a RuntimeError: that is honest; any other is an accident."""

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o):
            return o.clone()

        @staticmethod
        def backward(ctx, d):
            raise RuntimeError(words)

    def run(call):
        o, S = op(*call[:5], None, call.initial_state, True)
        return Refusing.apply(o), S

    features = adapters.sequence(op)[1]
    refusing = Implementation("refusing", run, Offers(features), refusal="this Triton miscompiles")
    [found] = suite.check(refusing, suite.choose(["gradients"])).findings
    assert found.verdict == verdict and words in found.note


# ---------------------------------------------------------------- the appendix


APPENDIX = (ROOT / "notebooks" / "appendix_check.md").read_text()


def test_the_appendix_runs():
    for block in re.findall(r"```python\n(.*?)```", APPENDIX, re.S):
        exec(compile(block, "appendix_check.md", "exec"), {"__name__": "appendix"})


def test_the_appendix_speaks_of_properties_adapters_and_options_that_there_are(capsys):
    names = {p.name for p in suite.PROPERTIES}
    [places] = re.findall(r"## Where to look\n(.*?)\n## ", APPENDIX, re.S)
    first = [row.split("|")[1] for row in places.splitlines() if row.startswith("|")]
    spoken = set(re.findall(r"`([^`]+)`", " ".join(first)))
    assert spoken and spoken <= names, spoken - names
    [signatures] = re.findall(r"## Somebody else's signature\n(.*?)\n## ", APPENDIX, re.S)
    assert set(re.findall(r"^\| `(\w+)`", signatures, re.M)) == set(adapters.ADAPTERS)
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    text = capsys.readouterr().out
    for option in set(re.findall(r"(?<![\w-])--[a-z]+", APPENDIX)):
        assert option in text, option


def test_the_appendix_shows_a_line_as_it_is_printed():
    [sample] = re.findall(r"```text\n(.*?)```", APPENDIX, re.S)
    header, line = sample.splitlines()
    printed = report.table(suite.check_named("gdn_ref", suite.choose(["lengths"]))).splitlines()
    assert header == printed[1]
    assert re.sub(r"\d", "0", line[:53]) == re.sub(r"\d", "0", printed[2][:53])


def test_the_appendix_counts_the_mutants():
    from test_check_mutants import MUTANTS

    assert f"`tests/test_check_mutants.py` has {len(MUTANTS)}" in APPENDIX
