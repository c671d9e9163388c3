"""The kernels as models call them: heads 128 wide, 16 bits, raw gates and the norm in the kernel, several value heads
a key, by the public function, in the configurations that ship for Hopper: interpreted by their twins in plain Triton,
on a GPU whatever its own table has, Gluon included.
"""

import subprocess
import sys

import helpers as h
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested here; see `make kernels`")

from test_kernels_forward import DEVICE, GPU, to_device

import gdn_ref
from gdn_ref.kernels import launch, launch_backward

RAW = {n: True for n in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")}


@pytest.fixture
def pretended(monkeypatch):
    """pretended(processors): calls are cut as for a device with so many: on a GPU of its own architecture, interpreted
    of Hopper's. Among few processors, wide programs are what shares the work."""

    def pretend(processors):
        architecture = launch.device_of(torch.device(DEVICE, 0)).architecture if GPU else "sm_90"
        for module in (launch, launch_backward):
            monkeypatch.setattr(module, "device_of", lambda _: launch.Device(architecture, processors))
            monkeypatch.setattr(module, "_plans", {})  # which do not say for what device they are
        return architecture

    return pretend


@pytest.fixture
def launched(monkeypatch):
    """(name, constants) of the kernels that are launched, once each."""
    seen, original = set(), launch.Launch.__call__

    def listening(self, *tensors, **options):
        seen.add((self.kernel.__name__, self.constants))
        return original(self, *tensors, **options)

    monkeypatch.setattr(launch.Launch, "__call__", listening)
    return seen


def make(keys, dtype, lengths, H=1, HV=2):
    """Raw inputs: head 0 decays at a rate of A = 16, head 1 of 0.5; q and k of no particular length."""
    x = h.without(h.make(165, H, HV, 128, 128, keys=keys, lengths=lengths, dtype=dtype), "g", "beta")
    gen, T = h.rng("clause", keys, lengths, 0), x["q"].shape[1]
    x |= {"a": h.randn(gen, 1, T, HV).to(dtype), "b": h.randn(gen, 1, T, HV).to(dtype)}
    x |= {"q": x["q"] * 3, "k": x["k"] * 0.5, "initial_state": x["initial_state"].float()}
    x["A_log"] = torch.tensor([16.0, 0.5]).log().repeat(HV // 2)
    x["dt_bias"] = h.randn(gen, HV).float() - 2
    return x


def kernels(q, k, v, a, b, **rest):
    return gdn_ref.chunk_gated_delta_rule(q, k, v, a, b, output_final_state=True, backend="triton", **RAW, **rest)


def oracle(q, k, v, a, b, A_log, dt_bias, **rest):
    return h.recurrence(h.l2norm(q), h.l2norm(k), v, *h.gates(a, b, A_log, dt_bias), **rest)


def heads_apart(results):
    """Gradients of A_log and dt_bias head by head, for what a fast head has is small beside a slow one's."""
    names = ("d_A_log", "d_dt_bias")
    return {n: t[None, :, None, None] if n in names else t for n, t in results.items()}


CASES = [
    ("random", torch.bfloat16, [100, 0, 65], 132), ("correlated", torch.bfloat16, [100, 0, 65], 2),
    ("correlated", torch.float16, [100, 0, 65], 132), ("correlated", torch.bfloat16, None, 2),
    ("correlated", torch.bfloat16, [100, 0, 65], 132),
]  # fmt: skip


@pytest.mark.parametrize("keys, dtype, lengths, processors", CASES)
def test_all_gradients_of_raw_inputs(keys, dtype, lengths, processors, pretended, launched):
    """What is trained, and nothing on the way to it: q, k, v, a, b, A_log, dt_bias and the initial state."""
    x = make(keys, dtype, lengths)
    architecture = pretended(processors)
    found = h.run(kernels, to_device(x))
    expected = h.reference(x, oracle)
    assert set(found) == {"o", "state", *("d_" + n for n in x if n != "cu_seqlens")}
    found = heads_apart({n: t.cpu() for n, t in found.items()})
    h.assert_close(found, heads_apart(expected), {"o": 1e-2, "state": 1e-2, "*": 2e-2}, x.get("cu_seqlens"))
    if architecture == "sm_90":
        assert_cut_as_hopper_cuts(launched, dtype, 128 if processors == 2 else 64)


def assert_cut_as_hopper_cuts(launched, dtype, BV):
    """Chunks of 64 and blocks of BV columns; and on a Hopper GPU, what Gluon has a twin of does not run."""
    shape, names = (1, 2, 128, 128, 64), {name for name, _ in launched}
    for name, its in launched:
        if name in ("scan_kernel", "hopper_scan_kernel", "adjoints_kernel"):
            assert str(shape)[1:-1] in str(its), name
        if name == "scan_kernel":
            assert (*shape, 128, BV) in [its[n : n + 7] for n in range(len(its))]
    if launch.hopper_scan is not None and dtype == torch.bfloat16:
        assert "hopper_gradients_kernel" in names and "gradients_kernel" not in names
        assert ("hopper_scan_kernel" in names) == (BV == 128)


# ---------------------------------------------------------------- rows and sequences among others


def call(x):
    return gdn_ref.chunk_gated_delta_rule(**to_device(x), output_final_state=True, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_alone_is_the_row_among_others(dtype, pretended):
    """Bitwise, where no row is cut into segments."""
    pretended(132)
    T, K = (35, 32) if dtype == torch.float32 else (100, 128)
    x = h.make(T, 1, 2, K, K, B=3, dtype=dtype)
    o, state = call(x)
    for b in range(3):
        alone_o, alone_state = call({n: t[b : b + 1] for n, t in x.items()})
        assert torch.equal(o[b], alone_o[0]) and torch.equal(state[b], alone_state[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_sequence_alone_is_the_sequence_among_others(dtype, pretended):
    """Bitwise, packed either way, wherever its first token lies."""
    pretended(132)
    lengths, K = ([17, 1, 0, 20], 32) if dtype == torch.float32 else ([70, 1, 0, 65], 128)
    x = h.make(H=1, HV=2, K=K, V=K, lengths=lengths, dtype=dtype)
    bounds, (o, state) = h.offsets(lengths), call(x)
    for n, length in enumerate(lengths):
        a, b = bounds[n], bounds[n + 1]
        alone = {m: t[:, a:b] for m, t in x.items() if m in h.TOKEN_INPUTS}
        alone |= {"initial_state": x["initial_state"][n : n + 1], "cu_seqlens": h.offsets([length])}
        alone_o, alone_state = call(alone)
        assert torch.equal(o[:, a:b], alone_o) and torch.equal(state[n], alone_state[0])


@pytest.fixture
def long_rows(pretended, monkeypatch):
    """Three rows of one head, on a device on which one alone is cut into segments and three are not. Interpreted, they
    are eight times as short as those that are cut."""
    pretended(4)
    choose = launch.choose_segments
    rows = [choose(launch.device_of(None), launch.Config(64, 16, 4, 1, False), B, 64, 16, 2) for B in (1, 3)]
    assert rows == [4, 1]
    if not GPU:
        monkeypatch.setattr(
            launch, "choose_segments", lambda d, c, n, chunks, *more: choose(d, c, n, 8 * chunks, *more)
        )
    x = h.make(4096 if GPU else 512, 1, 1, 16, 16, B=3, decays="none", dtype=torch.bfloat16)
    x["beta"] = x["beta"] * 0.02  # or writes leave nothing of what is a segment away
    return x


def test_rows_that_are_cut_into_segments_agree_to_rounding(long_rows, launched):
    """Where heads are few, a long row alone is cut into segments, which rows among others are not: then results are
    equal to what 16 bits keep, and not bitwise."""
    o, state = call(long_rows)
    assert "segment_kernel" not in {name for name, _ in launched}
    alone_o, alone_state = call({n: t[:1] for n, t in long_rows.items()})
    assert "segment_kernel" in {name for name, _ in launched}
    h.assert_close({"o": alone_o, "state": alone_state}, {"o": o[:1].double(), "state": state[:1].double()}, 1e-2)


def test_batch_invariant_rows_have_the_bits_of_rows_alone(long_rows, launched, monkeypatch):
    """GDN_REF_BATCH_INVARIANT=1: all are cut as if alone, forward and backward."""
    monkeypatch.setattr(launch, "BATCH_INVARIANT", True)
    do = to_device({"do": h.randn(h.rng("invariant"), *long_rows["v"].shape).to(torch.bfloat16)})["do"]

    def trained(x, do):
        leaves = {n: t.detach().requires_grad_() for n, t in to_device(x).items()}
        o, state = gdn_ref.chunk_gated_delta_rule(**leaves, output_final_state=True, backend="triton")
        return o, state, *torch.autograd.grad(o, list(leaves.values()), do)

    found = trained(long_rows, do)
    assert {"segment_kernel", "adjoint_segment_kernel"} <= {name for name, _ in launched}
    alone = trained({n: t[1:2] for n, t in long_rows.items()}, do[1:2])
    assert all(torch.equal(one[1:2], other) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("setting, invariant", [(None, False), ("0", False), ("1", True)])
def test_where_rows_are_cut_alone_is_asked_for(setting, invariant, monkeypatch):
    """In the environment, as it is when the kernels are imported."""
    monkeypatch.delenv("GDN_REF_BATCH_INVARIANT", raising=False)
    if setting:
        monkeypatch.setenv("GDN_REF_BATCH_INVARIANT", setting)
    command = [sys.executable, "-c", "from gdn_ref.kernels import launch; print(launch.heads_to_cut_for(3, 16))"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ran.stdout) == (16 if invariant else 48)
