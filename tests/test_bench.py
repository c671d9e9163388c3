"""The benchmark, as far as it goes without a GPU: what it counts, records, shows and refuses, and how it calls peers.

The peers are stood in for by functions with the peers' own signatures, layouts and gates, as far as the adapters use
them. Where the real ones can be found (installed, or unpacked below $GDN_REF_PEERS), their sources are read and the
signatures compared.
"""

import ast
import copy
import gc
import importlib.util
import inspect
import json
import os
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from gdn_ref import (
    bench,
    bench_figure,
    bench_peers,
    bench_processes,
    bench_record,
    bench_tensors,
    chunk_gated_delta_rule,
    cli,
    demo_figure,
)

ROOT = Path(__file__).resolve().parent.parent

GRADIENTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
LIMITS = {"copy_TBps": 4.0, "matmul_TFLOPs": 500.0}


# ---- shapes and costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, lengths, packed, heads, rows", [
    ("1x8192 16/64", (8192,), False, (16, 64), (1, 8192)),
    ("4x100 2/2", (100,) * 4, False, (2, 2), (4, 100)),
    ("4096+28672 16/64", (4096, 28672), True, (16, 64), (1, 32768)),
])
def test_shapes_are_read(text, lengths, packed, heads, rows):
    shape = bench_record.parse_shape(text)
    assert (shape.lengths, shape.packed, (shape.H, shape.HV), shape.rows) == (lengths, packed, heads, rows)
    assert shape.text == text


@pytest.mark.parametrize(
    "text", ["", "1x8192", "8192 16/64 2", "1xx2 1/2", "1x2x3 1/2", "ax2 1/2", "1x2 1", "1x2 1/2/3"]
)
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="shape: found .* expected 'BxT H/HV' or 'T"):
        bench_record.parse_shape(text)


@pytest.mark.parametrize("text", ["0x8 1/1", "1x0 1/1", "1x8 0/2", "1x8 3/4", "-1x8 1/1", "5+0 1/1"])
def test_impossible_sizes_are_refused(text):
    with pytest.raises(ValueError, match="expected positive sizes and HV a multiple of H"):
        bench_record.parse_shape(text)


def test_the_default_shapes_are_those_promised():
    shapes = [bench_record.parse_shape(text) for text in bench.SHAPES]
    assert len(set(bench.SHAPES)) == 12
    promised = {(1, T, HV) for T in (2048, 8192, 32768) for HV in (64, 32, 8)} | {(4, 8192, 64), (8, 1024, 64)}
    assert promised == {(*s.rows, s.HV) for s in shapes if not s.packed}
    assert [s.lengths for s in shapes if s.packed] == [(4096, 28672)]
    shapes = [bench_record.parse_shape(text) for text in bench.TRAINING_SHAPES]
    promised = {(1, T, HV) for T in (2048, 8192, 32768) for HV in (64, 32)} | {(4, 8192, 64)}
    assert promised == {(*s.rows, s.HV) for s in shapes} and len(shapes) == len(promised)


def test_a_forward_call_by_hand():
    """Two packed sequences of 3 and 5 tokens, one key head, two value heads."""
    moved, flops = bench_record.forward_cost(bench_record.parse_shape("3+5 1/2"))
    per_token = 2 * 128 * 2 + 2 * 2 * 128 * 2 + 2 * 2 * 4  # q, k; v, o; g, beta
    assert moved == 8 * per_token + 2 * 2 * 128 * 128 * 4
    assert flops == 8 * (2 * (6 * 128 * 128 + 4 * 64 * 128 + 64 * 64 // 3) + 4 * 64 * 128)


def test_a_training_call_by_hand():
    """Products with a state are 2 K V FLOPs a token, those inside a chunk 2 C V or 2 C K."""
    shape = bench_record.parse_shape("3+5 1/2")
    with_states, inside = 2 * 128 * 128, 2 * 64 * 128
    backward = 8 * 2 * (6 * with_states + 8 * inside)
    assert bench_record.training_cost(shape)[1] == bench_record.forward_cost(shape)[1] + backward


def test_bytes_are_those_of_the_tensors(on_the_cpu):
    for text in ("3x5 2/4", "3+5 1/2"):
        shape = bench_record.parse_shape(text)
        x = bench_tensors.prefill_inputs(shape, seed=0)
        o, state = chunk_gated_delta_rule(*x[:5], output_final_state=True, cu_seqlens=x.cu_seqlens)
        assert bench_record.forward_cost(shape)[0] == sum(t.nbytes for t in (*x[:5], o, state))
        x = bench_tensors.training_inputs(shape, seed=0)
        o, *grads = bench_peers.ours_training(x).run()
        assert [(t.shape, t.dtype) for t in grads] == [(t.shape, t.dtype) for t in x[:5]]
        read_twice, read, written = x[:5], [x.do], [o, *grads]
        assert bench_record.training_cost(shape)[0] == sum(t.nbytes for t in (*read_twice, *x[:5], *read, *written))
    x = bench_tensors.decode_inputs(bench_record.parse_shape("3x1 1/2"), seed=0)
    assert bench_record.decode_cost(bench_record.parse_shape("3x1 1/2"))[0] == 2 * x.state.nbytes


def test_the_limit_is_the_longer_of_two_times():
    assert bench_record.limit_ms((4_000_000_000, 0), LIMITS) == pytest.approx(1.0)  # 4 GB at 4 TB/s
    assert bench_record.limit_ms((1, 500_000_000_000), LIMITS) == pytest.approx(1.0)  # 500 GFLOP at 500 TFLOP/s
    assert bench_record.limit_ms((8_000_000_000, 500_000_000_000), LIMITS) == pytest.approx(2.0)


# ---- the document ----------------------------------------------------------------------------------------------------


def recorded():
    """A document as `bench` writes it."""
    rows = []
    times = {"1x2048 16/64": (0.1, 0.8, 0.2), "1x8192 8/32": (0.3, 0.6, 0.15)}
    for shape, ms in times.items():
        moved, flops = bench_record.forward_cost(bench_record.parse_shape(shape))
        more = {"bytes": moved, "flops": flops, "limit_ms": bench_record.limit_ms((moved, flops), LIMITS)}
        names = ("gdn_ref", "fla", "flash_qla")
        rows += [{"op": "fwd", "shape": shape, "impl": n, "ms": t, **more} for n, t in zip(names, ms, strict=True)]
    for shape, ms in {"8x1 16/32": (0.02, 0.06), "64x1 16/32": (0.08, 0.1)}.items():
        moved, flops = bench_record.decode_cost(bench_record.parse_shape(shape))
        more = {"bytes": moved, "flops": flops, "limit_ms": bench_record.limit_ms((moved, flops), LIMITS)}
        rows += [{"op": "decode", "shape": shape, "impl": n, "ms": t, "device_ms": t / 2, **more}
                 for n, t in zip(("gdn_ref", "fla"), ms, strict=True)]
    for shape, ms in {"1x2048 16/64": (0.4, 0.3, 0.8), "1x8192 8/32": (0.9, 0.7, 0.6)}.items():
        moved, flops = bench_record.training_cost(bench_record.parse_shape(shape))
        more = {"bytes": moved, "flops": flops, "limit_ms": bench_record.limit_ms((moved, flops), LIMITS)}
        rows += [{"op": "fwdbwd", "shape": shape, "impl": n, "ms": t, "peak_MB": 1000 * t, **more}
                 for n, t in zip(("gdn_ref", "gdn_ref_recompute", "flash_qla"), ms, strict=True)]
    rows.append({"op": "cold_fwd", "shape": "1x2048 16/64", "impl": "gdn_ref", "ms": 7000})
    failures = [{"op": "decode", "shape": s, "impl": "flash_qla", "error": "no decode step"}
                for s in ("8x1 16/32", "64x1 16/32")]
    return {
        "device": "GPU", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-29",
        "versions": {"gdn_ref": "0.1.0", "gdn_ref_recompute": "0.1.0", "fla": "0.6.0", "flash_qla": "0.1.3"},
        "limits": dict(LIMITS), "rows": rows, "failures": failures,
    }  # fmt: skip


def test_the_document_is_accepted():
    bench_record.check_document(json.loads(json.dumps(recorded())))


@pytest.mark.parametrize("path, value, message", [
    (("device",), 3, "device: found 3, expected a str"),
    (("rows",), None, "rows: found None, expected a list"),
    (("limits", "copy_TBps"), 0, "limits.copy_TBps: found 0"),
    (("rows", 0, "op"), "forward", r"rows\[0\].op: found 'forward', expected one of fwd, decode"),
    (("rows", 1, "impl"), "somebody", r"rows\[1\].impl: found 'somebody', expected one of \['gdn_ref'"),
    (("rows", 2, "ms"), -1, r"rows\[2\].ms: found -1, expected a positive number"),
    (("rows", 2, "ms"), float("nan"), r"rows\[2\].ms: found nan"),
    (("rows", 3, "shape"), "8192", "shape: found '8192'"),
])
def test_a_broken_document_is_named(path, value, message):
    document = copy.deepcopy(recorded())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        bench_record.check_document(document)


def test_ratios_are_theirs_over_ours():
    cases = bench_record.by_case(recorded())
    assert list(cases) == ["fwd", "decode", "fwdbwd", "cold_fwd"]
    assert bench_record.ratios(cases["fwd"], "fla") == pytest.approx({"1x2048 16/64": 8, "1x8192 8/32": 2})
    assert bench_record.ratios(cases["fwd"], "transformers") == {}
    assert bench_record.ratios(cases["decode"], "fla") == pytest.approx({"8x1 16/32": 3, "64x1 16/32": 1.25})


def test_the_table_says_who_is_ahead_and_what_is_missing():
    text = bench_record.table(recorded())
    assert "copy 4.00 TB/s, bf16 matmul 500 TFLOP/s" in text and "fla 0.6.0, flash_qla 0.1.3" in text
    line = next(line for line in text.splitlines() if line.startswith("1x2048 16/64"))
    share = 100 * recorded()["rows"][0]["limit_ms"] / 0.1
    assert f"0.1000 ({share:.0f} %)" in line and "0.8000 (8.00x)" in line and "0.2000 (2.00x)" in line
    assert "fla: 4.00x in geometric mean, 2.00x at least\n" in text
    assert "flash_qla: 1.00x in geometric mean, 0.50x at least; ahead on 1x8192 8/32" in text
    assert text.endswith("missing: flash_qla, decode 8x1 16/32; decode 64x1 16/32: no decode step")
    assert "gdn_ref_recompute:" not in text  # it is ours, no peer that could be ahead
    memory = text[text.index("peak MB") :].splitlines()
    assert memory[0].split() == ["peak", "MB", "gdn_ref", "gdn_ref_recompute", "flash_qla"]
    assert memory[1].split() == ["1x2048", "16/64", "400", "300", "800"]


def test_the_readme_s_tables():
    text = bench_record.markdown(recorded())
    first, second, third, below = text.split("\n\n")
    head = "| forward, tokens and H/HV | gdn_ref | FLA 0.6.0 | FlashQLA 0.1.3 | of the roofline |"
    assert first.splitlines()[0] == head
    share = 100 * recorded()["rows"][0]["limit_ms"] / 0.1
    assert first.splitlines()[2] == f"| 1x2048 16/64 | 0.100 | 0.800 (8.00×) | 0.200 (2.00×) | {share:.0f} % |"
    assert second.splitlines()[0] == "| decode, batch (HV = 32) | gdn_ref | FLA 0.6.0 | of the copy bandwidth |"
    assert second.splitlines()[2].startswith("| 8 | 0.020 | 0.060 (3.00×) | ")
    head, line, row, _ = third.splitlines()
    columns = ("forward + backward, ms / peak MB", "gdn_ref", "states made again", "FlashQLA 0.1.3", "of the roofline")
    assert head == f"| {' | '.join(columns)} |"
    assert row.startswith("| 1x2048 16/64 | 0.400 / 400 | 0.300 (0.75×) / 300 | 0.800 (2.00×) / 800 | ")
    assert {len(one.split("|")) for one in third.splitlines()} == {7}
    assert "fwdbwd, FlashQLA: 1.15× in geometric mean, 0.67× at least; ahead on 1x8192 8/32" in below
    assert "cold_fwd: 7.0 s" in below


@pytest.mark.parametrize("line", bench_record.markdown(json.loads((ROOT / "benchmarks/results/h200.json").read_text()))
                         .split("\n\n")[:-1])  # fmt: skip
def test_the_readme_shows_the_recorded_run(line):
    """Its tables are what `python -m gdn_ref bench --markdown benchmarks/results/h200.json` prints."""
    assert line in (ROOT / "README.md").read_text()


def test_the_readme_s_words_are_those_of_the_recorded_run():
    cases = bench_record.by_case(json.loads((ROOT / "benchmarks/results/h200.json").read_text()))
    words = " ".join((ROOT / "README.md").read_text().split())
    seconds = {op: f"{rows['gdn_ref']['ms'] / 1e3:.1f} s" for op in cases if op.startswith("cold_")
               for rows in cases[op].values()}  # fmt: skip
    assert seconds and all(text in words for text in seconds.values()), seconds
    micros = [f"{rows['gdn_ref']['ms'] * 1e3:.0f} µs" for rows in cases["cpu_call"].values()]
    assert all(text in words for text in micros), micros


def test_without_ours_there_are_no_ratios():
    document = recorded()
    document["rows"] = [row for row in document["rows"] if row["impl"] != "gdn_ref"]
    assert "x)" not in bench_record.table(document)


def test_the_figure_shows_the_rows(tmp_path):
    document = recorded()
    fig = bench_figure.draw(document)
    forward, decode, training, memory = fig.axes
    assert [label.get_text() for label in forward.get_yticklabels()] == ["1x2048 16/64", "1x8192 8/32"]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in forward.get_lines()}
    assert drawn["FLA 0.6.0"] == ([0.8, 0.6], [0, 1])
    ends = [bar.get_x() + bar.get_width() for bar in forward.patches]
    assert ends == pytest.approx([row["limit_ms"] for row in document["rows"][:4:3]])
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in decode.get_lines()}
    batches, rates = drawn["gdn_ref, by call"]
    assert batches == [8, 64] and rates[1] == pytest.approx(2 * 4 * 64 * 32 * 128 * 128 / 0.08e-3 * 1e-12)
    assert drawn["gdn_ref, the GPU alone"][1] == pytest.approx([2 * rate for rate in rates])
    drawn = {line.get_label(): list(line.get_xdata()) for line in training.get_lines()}
    again = {"gdn_ref, states made again": [0.3, 0.7]}
    assert drawn == {"gdn_ref 0.1.0": [0.4, 0.9], "FlashQLA 0.1.3": [0.8, 0.6]} | again
    drawn = {line.get_label(): list(line.get_xdata()) for line in memory.get_lines()}
    assert drawn["FlashQLA 0.1.3"] == pytest.approx([0.8, 0.6])
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    demo_figure.save(fig, files[0])
    demo_figure.save(bench_figure.draw(document), files[1])
    assert files[0].read_bytes() == files[1].read_bytes() and b"<svg" in files[0].read_bytes()


def test_a_figure_needs_something_to_show():
    document = recorded()
    document["rows"] = document["rows"][-1:]
    with pytest.raises(ValueError, match="rows: found none of fwd, decode and fwdbwd"):
        bench_figure.draw(document)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for words in ("examples:", "--draw h200.json", "how to read the table:", "cold_*", "pip install fla-core"):
        assert words in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["bench"]) == 2
    captured = capsys.readouterr()
    assert "found no GPU that PyTorch can use, expected one" in captured.err and "benchmarks/cpu.py" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("argv, message", [
    (["--shapes", "8192"], "--shapes: shape: found '8192'"),
    (["--ops", "backward"], "invalid choice: 'backward'"),
    (["--impl", "somebody"], "invalid choice: 'somebody'"),
    (["--batches", "0"], "--batches and --budget: expected positive numbers"),
    (["--budget", "0"], "--batches and --budget: expected positive numbers"),
    (["--draw", "nowhere.json"], "--draw: "),
    (["--draw", __file__], "which is not JSON; expected a file that --out wrote"),
    (["--markdown", __file__], f"--markdown: found {__file__!r}, which is not JSON; expected a file that --out wrote"),
    (["--markdown", sys.executable], "which is not JSON; expected a file that --out wrote"),
])
def test_bad_arguments_give_two(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *argv])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_broken_recording_is_named(tmp_path, capsys):
    document = recorded()
    document["rows"][0]["op"] = "forward"
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(SystemExit):
        cli.main(["bench", "--draw", str(tmp_path / "run.json")])
    assert "--draw: rows[0].op: found 'forward'" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("[1, 2]")
    with pytest.raises(SystemExit):
        cli.main(["bench", "--markdown", str(tmp_path / "run.json")])
    assert "--markdown: found a list, expected the JSON document that --out writes" in capsys.readouterr().err


def test_a_recording_is_drawn_without_a_gpu(tmp_path, capsys):
    (tmp_path / "run.json").write_text(json.dumps(recorded()))
    argv = ["bench", "--draw", str(tmp_path / "run.json"), "--figure", str(tmp_path / "run.svg")]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "0.8000 (8.00x)" in out and f"wrote {tmp_path / 'run.svg'}" in out
    assert (tmp_path / "run.svg").stat().st_size > 5000
    assert cli.main(["bench", "--markdown", str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out == bench_record.markdown(recorded()) + "\n"


# ---- the peers -------------------------------------------------------------------------------------------------------

# Their signatures, and the files that they are declared in.
SIGNATURES = {
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "fla/ops/gated_delta_rule/chunk.py"):
        "q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, "
        "use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices, "
        "cp_context, **kwargs",
    ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", "fla/ops/gated_delta_rule/fused_recurrent.py"):
        "q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, "
        "use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, "
        "**kwargs",
    ("flash_qla", "chunk_gated_delta_rule", "flash_qla/ops/gated_delta_rule/chunk/__init__.py"):
        "q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, head_first, "
        "state_v_first, auto_cp, enable_fwd_cp_cache, cp_context, force_intra_cp",
    ("flashinfer.gdn_prefill", "chunk_gated_delta_rule", "flashinfer/gdn_prefill.py"):
        "q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, "
        "output_state, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, use_cp, state_indices, "
        "_cp_chunk_len, backend, max_seqlen, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, "
        "cu_seqlens_cpu, output_state_indices, checkpoint_state_indices, prefix_lens",
    ("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose", "flashinfer/gdn_decode.py"):
        "q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, initial_state, initial_state_indices, "
        "output_state_indices, intermediate_states_buffer, disable_state_update, backend",
    ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule",
     "transformers/models/qwen3_next/modeling_qwen3_next.py"):
        "query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs",
    ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_recurrent_gated_delta_rule",
     "transformers/models/qwen3_next/modeling_qwen3_next.py"):
        "query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs",
}  # fmt: skip


def source_of(path):
    """The file of a peer: below $GDN_REF_PEERS, or where the package is installed; None where it is not."""
    for folder in filter(None, os.environ.get("GDN_REF_PEERS", "").split(os.pathsep)):
        if (Path(folder) / path).is_file():
            return Path(folder) / path
    package, _, rest = path.partition("/")
    spec = importlib.util.find_spec(package)
    found = spec and spec.submodule_search_locations and Path(spec.submodule_search_locations[0]) / rest
    return found if found and found.is_file() else None


@pytest.mark.parametrize("place", SIGNATURES, ids=lambda place: f"{place[0].split('.')[0]}.{place[1]}")
def test_signatures_are_the_real_ones(place):
    _, name, path = place
    source = source_of(path)
    if source is None:
        pytest.skip(f"{path.split('/')[0]} is neither installed nor unpacked below $GDN_REF_PEERS")
    function = next(n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == name)
    a = function.args
    real = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + ([f"**{a.kwarg.arg}"] if a.kwarg else [])
    assert ", ".join(real) == SIGNATURES[place]


def strict(place, body):
    """`body` behind the peer's signature: names that it does not have raise, and nothing may land in **kwargs."""
    names = [n for n in SIGNATURES[place].split(", ") if not n.startswith("**")]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(n, kind, default=None) for n in names])

    def function(*args, **kwargs):
        return body(**signature.bind(*args, **kwargs).arguments)

    return function


def chunk(query, key, value, **options):
    options = {"scale": None, **options}
    return chunk_gated_delta_rule(query, key, value, **options)


def in_place(q, k, v, state, A_log, a, dt_bias, b, use_qk_l2norm):
    o, new = chunk(q, k, v, g=a, beta=b, initial_state=state, output_final_state=True, state_v_first=True, A_log=A_log,
                   dt_bias=dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                   use_qk_l2norm_in_kernel=use_qk_l2norm)
    state.copy_(new)
    return o, state


def packed_linear(q, k, v, g, beta, cu_seqlens, output_final_state):
    assert g.dtype == beta.dtype == torch.float32 and all(t.is_contiguous() for t in (q, k, v))
    o, state = chunk(q[None], k[None], v[None], g=g[None].log(), beta=beta[None], cu_seqlens=cu_seqlens,
                     output_final_state=output_final_state, state_v_first=True)
    return o[0], state


def same_heads(query, key, value, **options):
    assert query.shape[2] == key.shape[2] == value.shape[2]
    return chunk(query, key, value, **options)


def named_qkv(q, k, v, **options):
    return chunk(q, k, v, **options)


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules under the peers' names, with the peers' signatures, that compute by gdn_ref's torch form."""
    bodies = {"fla": named_qkv, "flash_qla": named_qkv, "transformers": same_heads}
    for place in SIGNATURES:
        module, name, _ = place
        parts = module.split(".")
        for n in range(1, len(parts) + 1):
            full = ".".join(parts[:n])
            if not hasattr(sys.modules.get(full), "stand_in"):
                made = types.ModuleType(full)
                made.stand_in = True
                monkeypatch.setitem(sys.modules, full, made)
        inner = {"gdn_prefill": packed_linear, "gdn_decode": in_place}.get(parts[-1], bodies.get(parts[0]))
        function = strict(place, inner)
        if parts[0] == "transformers":  # as its decorator leaves it where FLA is installed
            swapped = lambda *args, **kwargs: pytest.fail("the swapped-in kernel was called")  # noqa: E731
            swapped.__wrapped__ = function
            function = swapped
        setattr(sys.modules[module], name, function)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The benchmark's tensors and clocks without a GPU; the clock is Python's, and graphs are ordinary calls."""

    def clock(functions, count):
        start = time.perf_counter()
        for n in range(count):
            functions[n % len(functions)]()
        return max((time.perf_counter() - start) / count * 1e3, 1e-6)

    monkeypatch.setattr(bench_tensors, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setattr(bench, "BLOCK_MS", 1e-3)
    monkeypatch.setattr(bench, "gpu_ms", clock)
    monkeypatch.setattr(bench, "graph_ms", lambda functions: clock(functions, len(functions)))
    monkeypatch.setattr(bench, "measure_limits", lambda: dict(LIMITS))
    monkeypatch.setattr(bench, "peak_MB", lambda run: 7.0)
    two_sets = lambda op, shape: [bench_tensors.make_inputs(op, shape, seed) for seed in (1, 2)]  # noqa: E731
    monkeypatch.setattr(bench, "input_sets", two_sets)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a CPU")
    defaults = bench.time_in_turns.__defaults__
    monkeypatch.setattr(bench.time_in_turns, "__defaults__", (clock, *defaults[1:]))


@pytest.mark.parametrize("name", bench_peers.IMPLEMENTATIONS)
@pytest.mark.parametrize("op, text", [("fwd", "2x70 1/2"), ("fwd", "5+70 2/2"), ("decode", "3x1 1/2"),
                                      ("fwdbwd", "2x70 1/2"), ("fwdbwd", "5+70 2/2")])
def test_every_adapter_computes_the_rule(name, op, text, stand_ins, on_the_cpu):
    """Against float64: a transposed state, a gate of the wrong kind or a lost sequence would be far off."""
    shape = bench_record.parse_shape(text)
    x = bench_tensors.make_inputs(op, shape, seed=3)
    expected = bench_tensors.reference(op, shape, x)
    try:
        call = bench_tensors.make_call(name, op, bench_tensors.untouched(x))
    except bench_peers.Unsupported:
        assert (name, op) in (("flash_qla", "decode"), ("flashinfer", "fwdbwd")) or (
            (name, text) == ("transformers", "5+70 2/2")
        )
        return
    found = bench_tensors.errors(op, shape, call, expected)
    assert list(found) == ["error_o", "error_state"] if op != "fwdbwd" else [f"error_{n}" for n in GRADIENTS]
    assert max(found.values()) < 1e-2
    call = bench_tensors.make_call(name, op, bench_tensors.untouched(x))
    if op == "fwdbwd":
        wrong = (*expected[:-1], 2 * expected[-1])
        assert bench_tensors.errors(op, shape, call, wrong)["error_dbeta"] == pytest.approx(0.5, abs=0.01)
    else:
        wrong = (expected[0], expected[1].transpose(-1, -2))
        assert bench_tensors.errors(op, shape, call, wrong)["error_state"] > 0.1


def test_whoever_moves_the_state_on_spoils_nobody_s_check(stand_ins, peers_there):
    """FlashInfer and gdn_ref update in place: each decode is held against its own problem, whoever came first."""
    for names in (["flashinfer", "gdn_ref", "fla"], ["fla", "gdn_ref"]):
        run = bench.Run(names, budget=100)
        bench.time_case(run, "decode", "3x1 1/2", names)
        assert {row["impl"] for row in run.document["rows"]} == set(names)
        assert all(row["error_o"] < 1e-2 and row["error_state"] < 1e-2 for row in run.document["rows"])


def test_gradients_of_many_heads_are_checked_on_the_last_ones(on_the_cpu, monkeypatch):
    shape = bench_record.parse_shape("1x40 3/6")
    assert bench_tensors.heads_checked(shape) == 3
    monkeypatch.setattr(bench_tensors, "LARGEST_CHECK", 80)
    assert bench_tensors.heads_checked(shape) == 1
    x = bench_tensors.training_inputs(shape, seed=1)
    expected = bench_tensors.reference("fwdbwd", shape, x)
    assert [t.shape[2] for t in expected] == [2, 1, 1, 2, 2, 2]
    call = bench_peers.ours_training(x)
    assert max(bench_tensors.errors("fwdbwd", shape, call, expected).values()) < 1e-2
    monkeypatch.setattr(bench_tensors, "LARGEST_CHECK", 10**9)
    for few, many in zip(expected, bench_tensors.reference("fwdbwd", shape, x), strict=True):
        torch.testing.assert_close(few, many[:, :, -few.shape[2] :])
    assert bench_tensors.heads_checked(bench_record.parse_shape("4x8192 16/64")) >= 1


def test_errors_take_the_worst_head_and_see_nan(on_the_cpu):
    shape = bench_record.parse_shape("5+7 1/2")
    x = bench_tensors.prefill_inputs(shape, seed=0)
    expected = bench_tensors.reference("fwd", shape, x)
    o = expected[0].clone()
    o[0, 5:, 1] *= 1.5  # the second sequence, the second head
    found = bench_tensors.errors("fwd", shape, bench_peers.Call(lambda: (o, expected[1]), tuple), expected)
    assert found["error_o"] == pytest.approx(0.5) and found["error_state"] == 0
    o[0, 3, 0] = float("nan")
    found = bench_tensors.errors("fwd", shape, bench_peers.Call(lambda: (o, expected[1]), tuple), expected)
    assert found["error_o"] != found["error_o"]


def test_fla_is_kept_from_handing_over(stand_ins, on_the_cpu, monkeypatch):
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    monkeypatch.setenv("FLA_TILELANG", "1")
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    bench_tensors.make_call("fla", "fwd", bench_tensors.prefill_inputs(bench_record.parse_shape("1x4 1/1"), seed=0))
    assert os.environ["FLA_FLASH_QLA"] == os.environ["FLA_TILELANG"] == "0"
    assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"


def test_whoever_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_qla" else object())
    versions, left_out = bench_peers.installed(["gdn_ref", "flash_qla"])
    assert list(versions) == ["gdn_ref"] and left_out == {"flash_qla": "flash-qla is not installed"}


# ---- the clock and the other processes -------------------------------------------------------------------------------


def test_turns_alternate_and_the_slow_leave_early():
    order, ms = [], {"quick": 0.01, "middling": 50.0, "slow": 300.0}
    clock = lambda calls, count: order.append((calls[0], count)) or ms[calls[0]]  # noqa: E731
    times = bench.time_in_turns({name: [name] for name in ms}, clock)
    left = {name: len(rounds) for name, rounds in times.items()}
    assert left == {"quick": bench.ROUNDS, "middling": 10, "slow": 5}  # 10 * 3 * 50 ms and 5 * 300 ms reach SLOWEST_MS
    # what is not slow has calls that do not count, 8 ms of them, before those that do
    turns = {"quick": [("quick", 400)] * 2, "middling": [("middling", 1), ("middling", 3)], "slow": [("slow", 1)]}
    rounds, taken = [order[n : n + 5] for n in range(3, 28, 5)], []
    for calls in rounds:
        names = list(dict.fromkeys(name for name, _ in calls))
        assert calls == [call for name in names for call in turns[name]] and set(names) == set(ms)
        taken.append(names)
    followed = {name: {(names * 2)[names.index(name) + 2] for names in taken} for name in ms}
    assert all(len(before) == 2 for before in followed.values())  # nobody always follows the same one
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("ms, sets, expected", [(0.01, 1, 400), (1.0, 1, 8), (50.0, 1, 3), (500.0, 1, 1), (0.5, 7, 21),
                                                (1.0, 50, 50)])
def test_length_of_a_turn(ms, sets, expected):
    assert bench.turn_length(ms, sets) == expected


def test_a_first_call_in_another_process(monkeypatch):
    def say(script, seconds=30, ops=("fwd",)):
        monkeypatch.setattr(bench_processes, "FIRST_CALL", script)
        call = bench_processes.FirstCall("gdn_ref", ops, "1x8 1/1")
        call.wait(seconds)
        return call.done()

    both = "print('warning'); print('first call: fwd 12.5 ms'); print('first call: fwdbwd 3.0 ms')"
    assert say(both, ops=("fwd", "fwdbwd")) == {"fwd": 12.5, "fwdbwd": 3.0}
    for script, message in (
        ("import sys; sys.exit('no such kernel')", "exit status 1: no such kernel"),
        ("raise RuntimeError('Triton refuses')", "^RuntimeError: Triton refuses"),
        ("print('first call: fwdbwd 1.0 ms')", None),
        ("pass", "exit status 0: it said nothing"),
    ):
        if message:
            with pytest.raises(bench_processes.FirstCallFailed, match=message):
                say(script)
    with pytest.raises(bench_processes.FirstCallFailed, match="exit status 0: first call: fwd 1.0 ms"):
        say("print('first call: fwd 1.0 ms')", ops=("fwd", "fwdbwd"))
    with pytest.raises(bench_processes.FirstCallFailed, match="not done in the time there was"):
        say("import time; time.sleep(60)", 0.2)


def test_a_cold_call_finds_an_empty_cache(monkeypatch):
    report = "import os; print('first call: fwd %d ms' % (os.listdir(os.environ['TRITON_CACHE_DIR']) == []))"
    monkeypatch.setattr(bench_processes, "FIRST_CALL", report)
    assert bench_processes.cold_ms("gdn_ref", "fwd", "1x8 1/1", 30) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_child_says_why_it_cannot():
    with pytest.raises(bench_processes.FirstCallFailed, match="CUDA|NVIDIA"):
        bench_processes.FirstCall("gdn_ref", ("fwd",), "1x8 1/1").wait(100)


def test_what_is_compiled_beforehand():
    shapes = {"fwd": ["1x8 1/1", "1x9 1/1", "4+5 1/1", "1x8 2/2"], "fwdbwd": ["1x9 1/1", "1x8 2/2"]}
    ahead = bench_processes.Beforehand(["gdn_ref", "fla", "flash_qla", "transformers"], shapes)
    jobs = [(job.name, job.text, *job.ops) for job in ahead.waiting]
    assert jobs == [
        ("flash_qla", "1x9 1/1", "fwd", "fwdbwd"), ("flash_qla", "1x8 2/2", "fwd", "fwdbwd"),
        ("fla", "1x8 1/1", "fwd", "fwdbwd"), ("fla", "1x8 2/2", "fwd", "fwdbwd"),  # their kernels know no lengths
        ("flash_qla", "1x8 1/1", "fwd"), ("flash_qla", "4+5 1/1", "fwd"), ("fla", "4+5 1/1", "fwd"),
    ]  # fmt: skip


def test_compiling_beforehand(monkeypatch):
    script = "import sys; [print(f'first call: {op} 1 ms') for op in sys.argv[3:] if sys.argv[1] == 'flash_qla' or op"
    monkeypatch.setattr(bench_processes, "FIRST_CALL", script + " == 'fwd']; assert 'fla' != sys.argv[1], 'broken'")
    ahead = bench_processes.Beforehand(["fla", "flash_qla"], {"fwd": ["1x8 1/1"], "fwdbwd": ["1x8 1/1", "1x9 1/1"]})
    ahead.wait(("fwd", "fwdbwd"), time.monotonic() + 60)
    assert ahead.step() == set()
    assert ahead.why_not("fla", "fwdbwd", "1x9 1/1") == "AssertionError: broken"
    assert not ahead.why_not("fla", "fwd", "1x8 1/1") and not ahead.why_not("flash_qla", "fwdbwd", "1x9 1/1")


def test_compiling_beforehand_ends_in_time(monkeypatch):
    forward_only = "import time; print('first call: fwd 1 ms', flush=True); time.sleep(60)"
    monkeypatch.setattr(bench_processes, "FIRST_CALL", forward_only)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    texts = [f"1x{n} 1/1" for n in range(1, 6)]
    started = time.monotonic()
    ahead = bench_processes.Beforehand(["flash_qla"], {"fwd": texts, "fwdbwd": texts})
    while not (len(ahead.running) == 2 and all(call.done() for _, call in ahead.running)):
        ahead.step()
        assert time.monotonic() - started < 30
    assert ahead.step() == {"fwd", "fwdbwd"}  # of those that wait
    ahead.stop("fwd")  # those that have done it go on
    assert len(ahead.running) == 2 and ahead.step() == {"fwdbwd"}
    ahead.stop("fwdbwd")
    assert not ahead.running and ahead.step() == set()
    assert not ahead.why_not("flash_qla", "fwd", texts[0])
    for op, text in (("fwdbwd", texts[0]), ("fwd", texts[4]), ("fwdbwd", texts[4])):
        assert "not done in the time there was" in ahead.why_not("flash_qla", op, text)


# ---- a whole run -----------------------------------------------------------------------------------------------------


class Compiled:
    """Stands in for Beforehand: everything is compiled, except what `failed` says."""

    failed: dict = {}

    def __init__(self, names, shapes):
        self.order = list(shapes)

    def step(self):
        return set()

    def wait(self, ops, end):
        pass

    def stop(self, op):
        pass

    def why_not(self, name, op, text):
        return self.failed.get((name, op, text))


@pytest.fixture
def peers_there(monkeypatch, stand_ins, on_the_cpu):
    monkeypatch.setattr(bench, "installed", lambda names: ({n: "1" for n in names if n != "flashinfer"},
                                                           {"flashinfer": "flashinfer-python is not installed"}))
    monkeypatch.setattr(bench, "SMALL_FORWARD", "1x64 1/1")
    monkeypatch.setattr(bench, "SMALL_DECODE", "1x1 1/2")
    monkeypatch.setattr(bench, "DECODE_HEADS", "1/2")
    monkeypatch.setattr(bench, "Beforehand", Compiled)
    monkeypatch.setattr(bench, "cold_ms", lambda name, op, text, seconds: 1000.0)


def run_all(budget=1000.0, **options):
    shapes = {"fwd": ["1x70 1/2", "5+60 1/2"], "fwdbwd": ["1x70 1/2"], "decode": ["1x1 1/2", "2x1 1/2"]}
    return bench.measure(list(bench_peers.IMPLEMENTATIONS), list(bench_record.OPS), shapes, budget, **options)


def test_a_run_writes_what_is_promised(peers_there, tmp_path, capsys):
    kept = []
    document = run_all(keep=lambda document: kept.append(len(document["rows"])))
    document = json.loads(json.dumps(document))
    bench_record.check_document(document)
    cases = bench_record.by_case(document)
    assert set(cases) == set(bench_record.OPS)
    assert set(cases["fwd"]["1x70 1/2"]) == {"gdn_ref", "fla", "flash_qla", "transformers"}
    assert set(cases["fwd"]["5+60 1/2"]) == {"gdn_ref", "fla", "flash_qla"}
    assert list(cases["decode"]) == ["1x1 1/2", "2x1 1/2"] and set(cases["cold_decode"]) == {"1x1 1/2"}
    row = cases["fwd"]["1x70 1/2"]["gdn_ref"]
    assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["error_o"] < 1e-2 and row["device_ms"] > 0
    assert row["limit_ms"] == pytest.approx(bench_record.limit_ms((row["bytes"], row["flops"]), LIMITS), rel=1e-3)
    assert "device_ms" not in cases["decode"]["1x1 1/2"]["transformers"]
    assert kept == sorted(kept) and kept[-1] == len(document["rows"])
    missing = {(f["impl"], f["op"]) for f in document["failures"]}
    assert missing == {("transformers", "fwd"), ("flash_qla", "decode"), ("flash_qla", "cpu_call"),
                       ("flash_qla", "cold_decode")}
    assert {"gdn_ref", "fla", "flash_qla", "transformers"} <= set(cases["fwdbwd"]["1x70 1/2"])
    for row in cases["fwdbwd"]["1x70 1/2"].values():
        assert row["peak_MB"] == 7 and row["heads_checked"] == 1 and "device_ms" not in row
        assert max(row[f"error_{name}"] for name in GRADIENTS) < 1e-2
    assert "gdn_ref" in cases["cold_fwdbwd"]["1x64 1/1"]
    demo_figure.save(bench_figure.draw(document), tmp_path / "run.svg")
    assert "flashinfer is left out: flashinfer-python is not installed" in capsys.readouterr().out


def test_a_peer_that_breaks_stops_nobody(peers_there, monkeypatch):
    broken = bench_peers.IMPLEMENTATIONS["fla"]._replace(forward=lambda x: 1 / 0)
    monkeypatch.setitem(bench_peers.IMPLEMENTATIONS, "fla", broken)
    monkeypatch.setattr(Compiled, "failed", {("flash_qla", "fwd", "1x70 1/2"): "nvcc is not there"})
    document = run_all(check=False)
    cases = bench_record.by_case(document)
    assert set(cases["fwd"]["1x70 1/2"]) == {"gdn_ref", "transformers"}
    why = {f["error"] for f in document["failures"] if f["op"] == "fwd" and f["shape"] == "1x70 1/2"}
    assert why == {"ZeroDivisionError: division by zero", "nvcc is not there"}
    assert "error_o" not in cases["fwd"]["1x70 1/2"]["gdn_ref"]


def test_what_did_not_compile_is_not_started_again(peers_there, monkeypatch):
    refused = "RuntimeError: not with this Triton"
    monkeypatch.setattr(Compiled, "failed", {("fla", "fwdbwd", text): refused for text in ("1x70 1/2", "1x64 1/1")})
    called = []
    monkeypatch.setattr(bench, "cold_ms", lambda name, op, *rest: called.append((name, op)) or 1.0)
    document = run_all(check=False)
    assert ("fla", "fwd") in called and ("fla", "fwdbwd") not in called and ("gdn_ref", "fwdbwd") in called
    why = {f["op"]: f["error"] for f in document["failures"] if f["impl"] == "fla"}
    assert why == {"fwdbwd": refused, "cold_fwdbwd": refused}


def test_a_failure_is_a_line_that_names_no_folder(peers_there, capsys):
    run = bench.Run(["gdn_ref"], budget=10)
    run.failed("fwd", "1x8 1/1", "fla", RuntimeError("nvcc: /tmp/some.where/x-1/kernel.cu(3): error\nand much more"))
    assert run.document["failures"][0]["error"] == "RuntimeError: nvcc: kernel.cu(3): error"
    assert "kernel.cu" in capsys.readouterr().out


def test_what_does_not_fit_the_budget_is_named(peers_there):
    document = run_all(budget=1.0)  # below the five seconds that a case is begun with
    assert {row["op"] for row in document["rows"]} == {"cpu_call"}
    left = {(f["op"], f["shape"]) for f in document["failures"] if f["error"] == "no time left in the budget"}
    assert left >= {("fwd", "1x70 1/2"), ("fwd", "5+60 1/2"), ("decode", "1x1 1/2"), ("cold_fwd", "1x64 1/1")}


def test_the_status_says_whether_ours_is_complete(peers_there, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "run.json"
    argv = ["bench", "--shapes", "1x70 1/2", "--ops", "fwd", "--impl", "gdn_ref", "transformers", "--out", str(out)]
    assert cli.main(argv) == 0
    bench_record.check_document(json.loads(out.read_text()))
    assert "geometric mean" in capsys.readouterr().out
    broken = bench_peers.IMPLEMENTATIONS["gdn_ref"]._replace(forward=lambda x: 1 / 0)
    monkeypatch.setitem(bench_peers.IMPLEMENTATIONS, "gdn_ref", broken)
    assert cli.main(argv) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_real_run(tmp_path, capsys):
    """Real clocks, graphs and a cold process: what the stand-ins above cannot show."""
    out = tmp_path / "run.json"
    argv = ["bench", "--shapes", "1x512 2/4", "100+412 2/4", "--batches", "2", "--impl", "gdn_ref", "--out", str(out),
            "--ops", "fwd", "decode", "fwdbwd", "cpu_call", "cold_decode"]
    assert cli.main(argv) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    bench_record.check_document(document)
    rows = {(row["op"], row["shape"]): row for row in document["rows"]}
    for text in ("1x512 2/4", "100+412 2/4"):
        assert rows["fwd", text]["error_o"] < 1e-2 and rows["fwd", text]["error_state"] < 1e-2
        assert 0 < rows["fwd", text]["device_ms"] < 2 * rows["fwd", text]["ms"]
        assert max(rows["fwdbwd", text][f"error_{name}"] for name in GRADIENTS) < 2e-2
        assert rows["fwdbwd", text]["peak_MB"] > 0.5  # o and five gradients
    assert 0.1 < document["limits"]["copy_TBps"] < 20 and 10 < document["limits"]["matmul_TFLOPs"] < 5000
    assert rows["cold_decode", bench.SMALL_DECODE]["ms"] > rows["cpu_call", bench.SMALL_DECODE]["ms"]


# ---- benchmarks/cpu.py -----------------------------------------------------------------------------------------------


@pytest.fixture
def cpu_script(tmp_path, monkeypatch):
    """The script, where `fla` can only be what lies in tmp_path."""
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "cpu.py"
    spec = importlib.util.spec_from_file_location("cpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    return module


@pytest.mark.parametrize("files", [("fla/notes.txt",), ("fla.py",), ("fla/__init__.py",)], ids=" ".join)
def test_cpu_takes_nothing_else_of_that_name_for_fla(files, cpu_script, tmp_path):
    """A folder, a module and a package that is another one."""
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    assert cpu_script._fla_naive() is None


def test_cpu_takes_fla_from_a_checkout(cpu_script, tmp_path):
    """Without what an installer would know of it."""
    (tmp_path / "fla/ops/gated_delta_rule").mkdir(parents=True)
    (tmp_path / "fla/__init__.py").write_text("raise ImportError('no driver')")
    (tmp_path / "fla/ops/gated_delta_rule/naive.py").write_text("naive_chunk_gated_delta_rule = 'found'")
    assert cpu_script._fla_naive().naive_chunk_gated_delta_rule == "found"
    assert cpu_script._version("no-such-package") == "unknown"
