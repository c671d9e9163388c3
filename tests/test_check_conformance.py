"""Recorded verdicts: each can be traced to an input, and the script that makes them survives a bad peer."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from gdn_ref.check import adapters, cases, suite
from gdn_ref.check.cases import Recipe
from gdn_ref.check.records import BOUNDS, ERROR, FAIL, NOT_OFFERED, PASS

ROOT = Path(__file__).resolve().parent.parent
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "conformance.json").read_text())
VERDICTS = (PASS, FAIL, ERROR, NOT_OFFERED)


def load():
    spec = importlib.util.spec_from_file_location("conformance", ROOT / "benchmarks" / "conformance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reports():
    return [(m, r) for m in RECORDED["machines"] for r in m["reports"] if "problem" not in r]


def test_the_record_says_what_it_was_held_to():
    assert RECORDED["bounds"] == {dtype: bound._asdict() for dtype, bound in BOUNDS.items()}
    assert [p["name"] for p in RECORDED["properties"]] == [p.name for p in suite.PROPERTIES]
    for machine in RECORDED["machines"]:
        assert machine["torch"] and machine["date"] and machine["level"] in ("quick", "full")


def test_ours_pass_all_and_every_peer_has_a_version():
    assert {r["name"] for _, r in reports()} >= {*adapters.OURS, "transformers", "fla.naive_chunk"}
    for machine, r in reports():
        assert r["version"], r["name"]
        assert {v: r[v] for v in VERDICTS} == {v: sum(f["verdict"] == v for f in r["findings"]) for v in VERDICTS}
        if machine["device"] == "cpu" and r["name"] in adapters.OURS:
            assert r[FAIL] == r[ERROR] == 0 and r[PASS] >= 40


def test_every_failure_has_its_input():
    """A number out of its bound, and a recipe that makes the tensors again."""
    for _, r in reports():
        for f in r["findings"]:
            if f["verdict"] == FAIL:
                assert f["error"] is None or f["error"] > f["bound"]
                small = Recipe(**f["input"])._replace(T=1)
                assert f["where"] and cases.make(small).v.shape[1] >= 1


def test_the_table_names_every_failure(capsys):
    text = load().markdown(RECORDED)
    for _, r in reports():
        [row] = [line for line in text.splitlines() if f"`{r['name']}` {r['version']} |" in line][:1]
        assert all(f["property"] in row for f in r["findings"] if f["verdict"] in (FAIL, ERROR)) or r[FAIL] == 0


def test_a_run_survives_a_peer_that_kills_its_process(tmp_path, monkeypatch):
    """What was begun is an ERROR, the rest is taken up by another process, and what cannot be had says why."""
    (tmp_path / "dying.py").write_text(
        "import os, gdn_ref\n"
        "def op(q, k, v, g, beta, output_final_state=False):\n"
        "    if v.shape[1] == 33: os._exit(11)\n"
        "    return gdn_ref.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    script = load()
    names = ["agreement", "scale from K", "padding", "packing"]
    args = script.parse(["--quick", "--property", *names, "--seconds", "120", "--jobs", "2"])
    args.impl = ["dying:op", "nobody"]
    found = script.run(args)
    dying, nobody = found["reports"]
    assert {f["property"]: f["verdict"] for f in dying["findings"]} == {
        "agreement": PASS, "scale from K": ERROR, "padding": PASS, "packing": NOT_OFFERED}  # fmt: skip
    assert "status 11" in next(f["note"] for f in dying["findings"] if f["verdict"] == ERROR)
    assert "expected package.module:function" in nobody["problem"] and "not_run" not in dying
    assert "dying:op" in script.summary(found) and "scale from K (raises)" in script.markdown(script.merged({}, found))


def test_what_had_no_time_is_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["conformance"])
    script = load()
    args = script.parse(["--quick", "--property", "agreement", "--seconds", "0", "--impl", "gdn_ref"])
    [report] = script.run(args)["reports"]
    assert report["problem"] == "no time was left to begin with it" and report[PASS] == 0


def test_another_machine_does_not_replace_this_one():
    script = load()
    gpu = {"device": "a GPU", "triton": "3.6.0", "reports": []}
    both = script.merged(RECORDED, gpu)
    assert [m["device"] for m in both["machines"]][0] == "cpu" and gpu in both["machines"]
    nobody = [{"name": "nobody", "problem": "is not there"}]
    again = script.merged(both, gpu | {"reports": nobody})
    assert len(again["machines"]) == len(both["machines"]) and again["machines"][-1]["reports"] == nobody


def test_what_had_no_time_or_was_not_known_is_joined_by_a_run_of_nothing_else():
    script = load()
    machine = next(m for m in RECORDED["machines"] if m["device"] != "cpu")
    whole = next(r for r in machine["reports"] if r["name"] == "flash_qla")
    first, *later = whole["findings"]
    cut = whole | {"findings": later, first["verdict"]: whole[first["verdict"]] - 1}
    for before in (cut, cut | {"not_run": [first["property"]]}):
        old = machine | {"reports": [r if r is not whole else before for r in machine["reports"]]}
        new = machine | {"reports": [whole | {"findings": [first]}]}
        assert script.merged({"machines": [old]}, new)["machines"] == [machine]


def test_what_was_found_again_replaces_what_was_found():
    """Of the same implementation in the same surroundings; in others it replaces all of the machine's."""
    script = load()
    machine = next(m for m in RECORDED["machines"] if m["device"] != "cpu")
    whole = next(r for r in machine["reports"] if r["name"] == "flash_qla")
    for other in (
        whole | {"version": "another", "findings": whole["findings"][:1]},
        whole | {"findings": whole["findings"][:2]},
        {"name": "flash_qla", "problem": "is not there"},
    ):
        new = machine | {"reports": [other]}
        kept = [r if r is not whole else other for r in machine["reports"]]
        assert script.merged({"machines": [machine]}, new)["machines"] == [machine | {"reports": kept}]
        elsewhere = new | {"triton": "another"}
        assert script.merged({"machines": [machine]}, elsewhere)["machines"] == [elsewhere]


def test_nobody_is_given_nothing_to_do(monkeypatch):
    """Fewer properties than an implementation has processes on a GPU."""
    script, begun = load(), []

    class Idle:
        process = type("", (), {"poll": staticmethod(lambda: 0)})

        def __init__(self, name, names, *rest):
            begun.append((name, names))
            self.name, self.names = name, names

    monkeypatch.setattr(script, "Worker", Idle)
    monkeypatch.setattr(script, "gather", lambda *_: [])
    monkeypatch.setattr(script, "bar", lambda *_: None)
    monkeypatch.setattr(script, "document", lambda *_: {})
    script.run(script.parse(["--device", "cuda", "--impl", "flash_qla", "--property", "agreement", "packing"]))
    assert sorted(begun) == [("flash_qla", ["agreement"]), ("flash_qla", ["packing"])]


@pytest.mark.parametrize("name", ["fla", "flash_qla", "flashinfer"])
def test_peers_that_need_a_gpu_or_are_not_there_say_so(name):
    found = suite.check_named(name, suite.choose(["agreement"]))
    assert found.problem and not found.ok
