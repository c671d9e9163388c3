"""Test vectors: read with NumPy alone, reproduced by the recurrence that their README prints, same bytes anywhere."""

import hashlib
import itertools
import json
import re

import numpy as np
import pytest
import torch
from helpers import gates, l2norm, recurrence, relative_l2

import gdn_ref
from gdn_ref import cli
from gdn_ref.check import plain, vectors

NAMES = [case.name for case in vectors.CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors")
    vectors.write(path)
    return path


@pytest.fixture(scope="module")
def printed(folder):
    """The two functions in the README, as a port's author would take them."""
    names = {"np": np, "json": json}
    for block in re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S):
        assert len(block.splitlines()) <= 15
        exec(block, names)
    return names


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_the_set_is_small_and_complete(folder):
    files = {path.name for path in folder.iterdir()}
    listed = manifest(folder)
    assert files == {"README.md", "manifest.json", *(case["file"] for case in listed["cases"])}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5e6
    assert listed["version"] == vectors.VERSION and len(listed["cases"]) == len(vectors.CASES)
    assert set(listed["bounds"]) >= {"float32", "bfloat16"} and "decay first" in listed["conventions"]["order"]
    for case in listed["cases"]:
        data = (folder / case["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == case["sha256"]
        assert case["property"] and case["reason"]


@pytest.mark.parametrize("name", NAMES)
def test_numpy_alone_reproduces_it(folder, printed, name):
    """The README's reader and its recurrence, sequence by sequence and head by head."""
    [case] = [c for c in manifest(folder)["cases"] if c["name"] == name]
    x = {n: t.astype(float) if t.dtype.kind == "f" else t for n, t in printed["read"](folder / case["file"]).items()}
    assert {n: list(t.shape) for n, t in x.items()} == case["inputs"] | case["expected"]
    if "A_log" in x:
        x["g"] = -np.exp(x["A_log"]) * np.log1p(np.exp(x["a"] + x["dt_bias"]))
        x["beta"] = 1 / (1 + np.exp(-x["b"]))
    if case["l2norm"]:
        x |= {n: x[n] / np.sqrt((x[n] ** 2).sum(-1, keepdims=True) + 1e-6) for n in "qk"}
    (B, T, HV), H, K = x["v"].shape[:3], *x["q"].shape[2:]
    runs = [(b, b, 0, T) for b in range(B)]
    if "cu_seqlens" in x:
        runs = [(n, 0, a, e) for n, (a, e) in enumerate(itertools.pairwise(x["cu_seqlens"].tolist()))]
    for (n, b, start, end), h in itertools.product(runs, range(HV)):
        q, k = (x[m][b, start:end, h // (HV // H)] for m in "qk")
        v, g, beta = (x[m][b, start:end, h] for m in ("v", "g", "beta"))
        o, S = printed["recurrence"](q, k, v, g, beta, x["initial_state"][n, h], K**-0.5)
        np.testing.assert_allclose(o, x["o"][b, start:end, h], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(S, x["state"][n, h], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_autograd(folder, printed, name):
    x = {n: torch.from_numpy(t.copy()) for n, t in printed["read"](folder / f"{name}.safetensors").items()}
    if "dq" not in x:
        g, beta = gates(*(x[n] for n in ("a", "b", "A_log", "dt_bias")))
        o, S = recurrence(l2norm(x["q"]), l2norm(x["k"]), x["v"], g, beta, initial_state=x["initial_state"])
        assert relative_l2(x["o"], o).max() < 1e-12 and relative_l2(x["state"], S, kind="state").max() < 1e-12
        return
    leaves = {n: x[n].double().requires_grad_() for n in vectors.INPUTS}
    o, S = recurrence(**leaves, cu_seqlens=x.get("cu_seqlens"))
    loss = (o * x["do"].double()).sum() + (S * x["dstate"].double()).sum()
    for n, d in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
        error = (x["d" + n] - d).norm() / d.norm().clamp_min(1e-30)
        assert error < 1e-10, (n, error)


@pytest.mark.parametrize("name", NAMES)
def test_our_op_in_float32_is_within_the_bound_that_is_printed(folder, printed, name):
    x = {n: torch.from_numpy(t.copy()) for n, t in printed["read"](folder / f"{name}.safetensors").items()}
    if "A_log" in x:
        named = dict(g=x["a"], beta=x["b"], A_log=x["A_log"], dt_bias=x["dt_bias"], use_gate_in_kernel=True,
                     use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)  # fmt: skip
    else:
        named = dict(g=x["g"], beta=x["beta"])
    o, S = gdn_ref.chunk_gated_delta_rule(x["q"], x["k"], x["v"], initial_state=x["initial_state"],
                                          output_final_state=True, cu_seqlens=x.get("cu_seqlens"), **named)  # fmt: skip
    bound = manifest(folder)["bounds"]["float32"]
    assert relative_l2(o, x["o"], x.get("cu_seqlens")).max() < bound["o"]
    assert relative_l2(S, x["state"], kind="state").max() < bound["state"]


def test_inputs_are_bfloat16_numbers(folder, printed):
    for name in NAMES:
        for n, x in printed["read"](folder / f"{name}.safetensors").items():
            if x.dtype == "<f4":
                t = torch.from_numpy(x.copy())
                assert torch.equal(t.bfloat16().float(), t), (name, n)


def test_rounding_to_bfloat16_is_torchs():
    some = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    x = torch.cat([some, torch.tensor([0.0, 1 + 2**-8, 1e-30])])
    assert np.array_equal(vectors.bfloat16(x.numpy()), x.bfloat16().float().numpy())
    assert vectors.bfloat16(np.array([-np.inf]))[0] == -np.inf


def test_the_same_bytes_again_and_others_from_another_seed(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vectors, "CASES", vectors.CASES[:2])
    assert cli.main(["vectors", str(tmp_path / "again")]) == 0
    assert "wrote 2 cases" in capsys.readouterr().out
    assert cli.main(["vectors", str(tmp_path / "other"), "--seed", "7"]) == 0
    for name in NAMES[:2]:
        first, again, other = ((p / f"{name}.safetensors").read_bytes() for p in (
            folder, tmp_path / "again", tmp_path / "other"))  # fmt: skip
        assert first == again != other
    assert "version 1, seed 7" in (tmp_path / "other" / "README.md").read_text()


def test_the_bytes_are_what_version_1_is(folder):
    """Whoever changes them raises VERSION, and this digest with it."""
    joined = "".join(case["sha256"] for case in manifest(folder)["cases"])
    assert (vectors.VERSION, hashlib.sha256(joined.encode()).hexdigest()[:16]) == (1, "0035766ab3677581")


def test_exponentials_are_rounded_once():
    assert plain.exponential(-1.0) == 0.36787944117144233 and plain.exponential(float("-inf")) == 0.0
    assert plain.exponential(0.0) == 1.0 and plain.exponential(-1000.0) == 0.0
    assert plain.sigmoid(0.0) == 0.5 and plain.log_decay(0.0, 0.0, 0.0) == -0.6931471805599453


def test_safetensors_agrees_with_its_own_reader(folder):
    reader = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    x = reader.load_file(folder / "packed.safetensors")
    assert x["cu_seqlens"].tolist() == [0, 70, 71, 104] and x["o"].shape == (1, 104, 4, 24)


def test_a_folder_that_cannot_be_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["vectors", str(tmp_path / "file")])
    assert stopped.value.code == 2 and "DIR: found" in capsys.readouterr().err
