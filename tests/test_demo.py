"""python -m gdn_ref demo: its text, its bigram, its comparison, its exit statuses, its figure."""

import argparse
import math
import re
import sys

import numpy as np
import pytest
import torch

from gdn_ref import demo

pytest.importorskip("tqdm")


def run(*argv):
    """The exit status of the demo with these options."""
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.main(parser.parse_args([*argv, "--threads", "1"]))


@pytest.fixture
def small(monkeypatch):
    """A run of seconds: fewer held-out bytes, shorter comparison."""
    for name, value in (("HELD_OUT_WINDOWS", 4), ("COMPARED", 200), ("PIECES", (0, 1, 66, 190)), ("BATCH", 2)):
        monkeypatch.setattr(demo, name, value)


@pytest.fixture
def easy(small, monkeypatch):
    """A bigram so poor that a few steps beat it."""
    monkeypatch.setattr(demo, "bigram_loss", lambda train, windows: 9.0)


# ---------------------------------------------------------------- text


def test_text_is_split_by_file_and_always_the_same():
    text, again = demo.read_text(), demo.read_text()
    assert text.train_files == again.train_files and text.held_out_files == again.held_out_files
    assert np.array_equal(text.train, again.train) and np.array_equal(text.held_out, again.held_out)
    assert not set(text.train_files) & set(text.held_out_files)
    assert text.train_files == sorted(text.train_files) and "argparse.py" in text.train_files + text.held_out_files
    assert 8 < len(text.train_files) / len(text.held_out_files) < 11
    assert len(text.train) > 1_000_000 and len(text.held_out) > 100_000


def test_text_of_a_folder(tmp_path):
    for n in range(10):
        (tmp_path / f"m{n}.py").write_bytes(bytes([65 + n]))
    text = demo.read_text(tmp_path)
    assert bytes(text.train) == b"A\0B\0C\0D\0E\0G\0H\0I\0J" and bytes(text.held_out) == b"F"


def test_too_few_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="found 0 .py files .* expected 10"):
        demo.read_text(tmp_path)


def test_windows():
    bytes_ = np.arange(250, dtype=np.uint8).repeat(40)
    windows = demo.training_windows(bytes_, torch.Generator().manual_seed(3))
    assert windows.shape == (demo.BATCH, demo.WINDOW + 1) and windows.dtype == torch.int64
    assert torch.equal(windows, demo.training_windows(bytes_, torch.Generator().manual_seed(3)))
    held_out = demo.held_out_windows(bytes_)
    assert held_out.shape == (demo.HELD_OUT_WINDOWS, demo.HELD_OUT_WINDOW + 1)
    assert held_out[0, 0] == 0 and held_out[-1, -1] == 249  # from the first byte to the last


def test_bigram_by_hand():
    """'abab…b' then: P(b|a) = (4 + k)/(4 + 256k), P(a|b) = (3 + k)/(3 + 256k), and the unseen P(c|c) = 1/256."""
    train, k = np.frombuffer(b"abababab", dtype=np.uint8), 0.1
    windows = torch.tensor([[97, 98, 97], [99, 99, 98]])
    expected = [(4 + k) / (4 + 256 * k), (3 + k) / (3 + 256 * k), 1 / 256, 1 / 256]
    assert demo.bigram_loss(train, windows, k) == pytest.approx(-np.log(expected[:2]).sum() / 4 + math.log(256) / 2)


# ---------------------------------------------------------------- model and comparison


def test_model_is_causal_and_tells_its_layers_inputs():
    torch.manual_seed(0)
    model, tokens = demo.ByteModel(), torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert not difference[:12].any() and (difference[12:] > 0).all()
    inputs = model.rule_inputs(tokens)
    H, HV, K, V = demo.HEADS.values()
    assert len(inputs) == demo.LAYERS
    assert [x.shape[1:] for x in inputs[0]] == [(20, H, K), (20, H, K), (20, HV, V), (20, HV), (20, HV)]
    block = model.blocks[0]  # what is told is what the layer really uses
    with torch.no_grad():
        x = block.mixer_norm(model.embedding(tokens))
        o, _ = block.mixer.apply_rule(inputs[0])
        _, z, _ = block.mixer.rule_inputs(x)
        assert torch.allclose(block.mixer.out_proj(block.mixer.norm(o, z).flatten(-2)), block.mixer(x)[0], atol=1e-6)


def test_untrained_loss_is_near_that_of_guessing(small):
    torch.manual_seed(0)
    windows = torch.randint(256, (3, 65))
    model = demo.ByteModel()
    whole = demo.held_out_loss(model, windows)
    assert whole == pytest.approx(demo.loss_of(model, windows).item(), rel=1e-5)  # the batches are weighed rightly
    assert math.log(256) - 0.1 < whole < math.log(256) + 1


def test_learning_rate():
    rates = [demo.learning_rate(p) for p in np.linspace(0, 1, 201)]
    assert 0 < rates[0] < 0.05 * demo.PEAK_LR and max(rates) <= demo.PEAK_LR
    assert np.argmax(rates) == pytest.approx(201 * demo.WARM_UP, abs=2)
    assert rates[-1] == pytest.approx(demo.PEAK_LR * demo.LAST_LR)


def test_compare_finds_every_form_right_and_a_wrong_one_wrong(small, monkeypatch):
    torch.manual_seed(0)
    model = demo.ByteModel()
    inputs, layer = model.rule_inputs(torch.randint(256, (1, demo.COMPARED)))[1], model.blocks[1].mixer
    forms = demo.compare(inputs, layer, rounds=1)
    assert len(forms) == 4
    assert all(max(form.o, form.state) <= demo.BOUND and form.rate > 0 for form in forms)
    assert demo.misses(1.0, 2.0, [forms]) == []

    right = demo.gdn_extend_chunkwise
    monkeypatch.setattr(demo, "gdn_extend_chunkwise", lambda *args, **options: right(*args, **options) * 1.001)
    forms = demo.compare(inputs, layer, rounds=1)
    reasons = demo.misses(1.0, 2.0, [forms])
    assert len(reasons) == 2 and all(re.match(r"layer 1, gdn_extend.*, o: found .*1.0e-03.*1e-05", r) for r in reasons)


def test_misses():
    def form(o, state):
        return demo.Form("chunkwise", o, state, 1.0)

    assert demo.misses(2.2, 2.5, [[form(1e-6, 1e-5)]]) == []
    assert "held-out loss: found 2.300" in demo.misses(2.3, 2.5, [])[0]
    assert "held-out loss" in demo.misses(math.nan, 2.5, [])[0]
    assert len(demo.misses(1.0, 2.5, [[form(math.nan, 2e-5)], [form(2e-5, 0.0)]])) == 3


def test_statistics_by_hand():
    torch.manual_seed(0)
    model = demo.ByteModel()
    layer = model.blocks[0].mixer
    inputs = model.rule_inputs(torch.randint(256, (1, 130)))[0]
    found = demo.statistics(inputs, layer)
    t, h = 100, 3
    rate = layer.A_log[h].exp() * torch.log1p((inputs.a[0, t, h] + layer.dt_bias[h]).exp())
    assert found.half_life[t, h] == pytest.approx(math.log(2) / rate.item(), rel=1e-4)
    assert found.beta[t, h] == pytest.approx(inputs.b[0, t, h].sigmoid().item(), rel=1e-5)
    assert len(found.cosines) == 2 * layer.H * 64 * 63 // 2
    k = torch.nn.functional.normalize(inputs.k[0, :, 0], dim=-1)
    assert found.cosines[0] == pytest.approx((k[1] @ k[0]).item(), abs=1e-5)


# ---------------------------------------------------------------- the command


def test_a_short_run_writes_its_figure_and_a_report_that_parses(easy, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "demo.svg"
    assert run("--steps", "4", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    svg = out.read_text()
    assert svg.startswith("<?xml") and svg.rstrip().endswith("</svg>") and len(svg) < 1_000_000
    assert "fill: #ffffff" in svg and "<dc:date>" not in svg
    losses = re.findall(r"^  (byte bigram|model) +(\d+\.\d+) nats a byte \((\d+\.\d+) bits\)$", printed, re.M)
    assert [name for name, *_ in losses] == ["byte bigram", "model"]
    assert all(float(bits) == pytest.approx(float(nats) / math.log(2), abs=2e-3) for _, nats, bits in losses)
    rows = re.findall(r"^(\d) +(\S.*?) +(\d\.\de-\d\d) +(\d\.\de-\d\d) +([\d,]+)$", printed, re.M)
    assert len(rows) == 4 * demo.LAYERS
    assert all(max(float(o), float(state)) <= demo.BOUND for _, _, o, state, _ in rows)
    assert f"wrote {out}" in printed


def test_steps_can_be_repeated_exactly(small):
    def losses(seed):
        torch.manual_seed(seed)
        return demo.train(demo.ByteModel(), demo.read_text(), steps=3, seed=seed)

    assert losses(1) == losses(1) != losses(2)


def test_seconds_end_a_run_in_time(easy, capsys):
    assert run("--seconds", "0.5", "--no-figure") == 0
    steps = int(re.search(r"in ([\d,]+) steps", capsys.readouterr().out)[1])
    assert 1 <= steps < 200


def test_a_loss_above_the_bigram_is_an_error_and_writes_nothing(small, tmp_path, capsys):
    out = tmp_path / "demo.svg"
    assert run("--steps", "1", "--out", str(out)) == 1
    assert re.search(r"held-out loss: found \d.* expected below 0.9 × 2", capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize("out, reason", [
    ("missing/demo.svg", "found no folder '.*missing', expected one that exists"),
    ("demo.gif", r"found '.*demo.gif', expected a name that ends in .svg, .png or .pdf"),
    ("folder.svg", "found '.*folder.svg', which cannot be written"),
])
def test_bad_out_is_refused_before_training(out, reason, tmp_path, capsys, monkeypatch):
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr(demo, "train", lambda *args: pytest.fail("trained first"))
    assert run("--out", str(tmp_path / out)) == 2
    assert re.search("--out: " + reason, capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["folder.svg"]


@pytest.mark.parametrize("option", ["--steps=0", "--steps=-1", "--steps=1.5", "--steps=x", "--seconds=0",
                                    "--seconds=nan", "--seconds=inf", "--threads=0"])
def test_bad_numbers_are_refused(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(option)
    assert stopped.value.code == 2
    assert re.search(option.split("=")[0] + r": found '.*', expected a", capsys.readouterr().err)


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert run("--no-figure") == 2
    assert "found no tqdm, expected it installed" in capsys.readouterr().err


def test_no_library_to_read(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda name: str(tmp_path))
    assert run("--no-figure") == 2
    assert "text: found 0 .py files" in capsys.readouterr().err
