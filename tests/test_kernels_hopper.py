"""What is in Gluon and its twins in plain Triton: held together on a Hopper GPU, for which alone both are."""

from typing import NamedTuple

import helpers as h
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested here; see `make kernels`")

from test_kernels_backward import GRADIENTS, backward, check, upstream
from test_kernels_forward import BOUNDS, DEVICE, GPU, among_nan, fits, for_this_card, forward, to_device
from test_kernels_forward import check as check_forward

import gdn_ref
from gdn_ref.kernels import launch, launch_backward, tiles

SCAN = launch.configs_for("sm_90", 2, 128)[1]  # the wide one
IN_GLUON = launch_backward.configs_for("sm_90", 2, 128)
HOPPER = GPU and launch.device_of(torch.device(DEVICE, 0)).architecture == "sm_90"
on_hopper = pytest.mark.skipif(not HOPPER or launch_backward.hopper is None, reason="a Hopper GPU, Triton from 3.6 on")


def make(T=200, H=1, HV=2, **options):
    return h.make(T, H, HV, 128, 128, dtype=torch.bfloat16, **options)


def is_in_gluon(x, config=None):
    """Whether a call with x would run the kernel in Gluon."""
    q, k, v = (x[n].to(DEVICE) for n in ("q", "k", "v"))
    return launch_backward._cut(q, k, v, v, x.get("cu_seqlens"), config)[0].gluon


@pytest.mark.parametrize("x, config", [
    (make(20, 2, 2), IN_GLUON[0]),  # every head has its own key
    (h.make(20, 1, 2, 128, 64, dtype=torch.bfloat16), IN_GLUON[0]),
    (h.make(20, 1, 2, 64, 128, dtype=torch.bfloat16), IN_GLUON[0]),
    (h.make(20, 1, 2, 128, 128, dtype=torch.float16), IN_GLUON[0]),
    (make(20), IN_GLUON[0]._replace(gluon=False)),
    (make(20), IN_GLUON[0]._replace(BK=32)),
])  # fmt: skip
def test_what_it_does_not_fit_runs_its_twin(x, config, monkeypatch):
    monkeypatch.setattr(launch_backward, "hopper", launch_backward.hopper or "not interpreted, but there")
    assert is_in_gluon(make(20), IN_GLUON[0])
    assert not is_in_gluon(x, config)


def test_no_configuration_but_hoppers_has_it():
    for arch in ("sm_80", "sm_100", "gfx942", "some other card"):
        found = [c for size in (2, 4) for K in (64, 256) for c in launch_backward.configs_for(arch, size, K)]
        assert found and not any(c.gluon for c in found)
    assert all(c.gluon for c in IN_GLUON) and not any(c.gluon for c in launch_backward.configs_for("sm_90", 2, 256))


@on_hopper
@pytest.mark.parametrize("decays", h.DECAYS)
@pytest.mark.parametrize("keys", h.KEYS)
def test_it_is_chosen_and_right(keys, decays):
    x = make(keys=keys, decays=decays)
    assert is_in_gluon(x)
    check(x)


@on_hopper
@pytest.mark.parametrize("config", IN_GLUON, ids=lambda c: f"BV{c.BV}")
@pytest.mark.parametrize("lengths", [None, [100, 0, 65, 130]], ids=["plain", "packed"])
@pytest.mark.parametrize("norm", [False, True], ids=["given", "norm"])
@pytest.mark.parametrize("H, HV", [(1, 2), (2, 6), (1, 4), (2, 16)])
def test_the_twins_agree(H, HV, norm, lengths, config):
    """To the rounding of what they return."""
    x = make(295, H, HV, keys="correlated", lengths=lengths)
    given = upstream(x)
    found, twins = (backward(x, *given, use_qk_l2norm=norm, config=config._replace(gluon=g)) for g in (True, False))
    for name, gradient in found.items():
        bound = 1e-4 if gradient.dtype == torch.float32 else 4e-3
        h.assert_close({name: gradient}, {name: twins[name].double()}, bound, x.get("cu_seqlens"))
    if not norm:
        check(x, config=config)


@pytest.mark.parametrize("config", IN_GLUON, ids=lambda c: f"BV{c.BV}")
@pytest.mark.parametrize("t", [64, 37])
def test_no_gradient_against_time(t, config):
    """In Gluon on a Hopper GPU, elsewhere by its twin: outputs before token t, at a chunk's end and within one, say
    nothing about what comes at it or after."""
    x = make(100, state=False)
    assert is_in_gluon(x, config) or not HOPPER or launch_backward.hopper is None
    do, _ = upstream(x)
    do[:, t:] = 0
    with fits(config):
        found = backward(x, do, None, config=for_this_card(config))
    assert not any(d[:, t:].any() for d in found.values())
    assert all(d[:, 1:t].any() for d in found.values())


@pytest.mark.parametrize("config", IN_GLUON, ids=lambda c: f"BV{c.BV}")
@pytest.mark.parametrize("rate", [None, 16.0], ids=["given", "raw"])
def test_a_first_token_decays_nothing(rate, config):
    """dg, and da too, of every sequence that starts from nothing: exactly 0, whatever comes after it."""
    lengths = [50, 1, 0, 65]
    x = make(lengths=lengths, state=False)
    options = {} if rate is None else {"A_log": torch.tensor([rate, 0.5]).log().to(DEVICE)}
    with fits(config):
        found = backward(x, *upstream(x), config=for_this_card(config), **options)["d_g"]
    assert not found[:, [0, 50, 51]].any()
    assert found[:, 1:50].any() and found[:, 52:].any()


@on_hopper
@pytest.mark.parametrize("lengths", [None, [70, 0, 130]], ids=["plain", "packed"])
def test_nothing_is_read_around_the_inputs(lengths):
    x = make(lengths=lengths)
    do, dstate = upstream(x)
    nan = {n: among_nan(t.to(DEVICE)) if n != "cu_seqlens" else t for n, t in x.items()}
    found = backward(nan, among_nan(do.to(DEVICE)), among_nan(dstate.to(DEVICE)))
    assert all(torch.equal(t, found[n]) for n, t in backward(x, do, dstate).items())


@on_hopper
def test_packed_mates_of_nan_do_not_matter_and_results_repeat():
    """Bitwise: sequences end inside of chunks, and what follows them is NaN, upstream too."""
    x = make(lengths=[100, 90, 70])
    do, dstate = upstream(x)
    first = backward(x, do, dstate)
    for name in h.TOKEN_INPUTS:
        if name in x:
            x[name][:, 100:190] = float("nan")
    do[:, 100:190] = float("nan")
    for _ in range(3):
        found = backward(x, do, dstate)
        for name in ("d_q", "d_k", "d_v", "d_g", "d_beta"):
            assert torch.equal(found[name][:, :100], first[name][:, :100])
            assert torch.equal(found[name][:, 190:], first[name][:, 190:])


@on_hopper
def test_rows_at_odd_multiples_of_sixteen_bytes():
    """q and k as views of one projection, whose tokens lie 8 numbers further apart than a power of two."""
    x = make(150)
    wide = {n: torch.nn.functional.pad(x[n], (0, 8)).to(DEVICE)[..., :128] for n in ("q", "k")}
    assert all(t.stride(1) % 16 == 8 for t in wide.values()) and is_in_gluon(x | wide)
    given = upstream(x)
    found, plain = (backward(t, *given, config=IN_GLUON[0]) for t in (x | wide, x))
    assert all(torch.equal(found[n], plain[n]) for n in plain)


@on_hopper
@pytest.mark.parametrize("packed", [False, True])
def test_captured_in_a_graph(packed):
    """Boundaries and numbers may change between replays; the shapes may not."""
    x = to_device(make(300, lengths=[100, 200] if packed else None))
    do, dstate = (t.to(DEVICE) for t in upstream(x))
    assert is_in_gluon(x)
    call = lambda: launch_backward.chunk_backward(  # noqa: E731
        *(x[n] for n in h.TOKEN_INPUTS), 128**-0.5, x["initial_state"], x.get("cu_seqlens"), do, dstate
    )
    found = captured(call)
    other = make(300, lengths=[299, 1] if packed else None, label=("replay",))
    replay(found, x, other)
    expected = h.reference(other)
    found = {n: t.cpu() for n, t in zip(GRADIENTS, found.results, strict=True) if t is not None}
    h.assert_close_for_dtype(found, {n: expected[n] for n in found}, other, 2e-2)


class Captured(NamedTuple):
    graph: object
    results: tuple


def captured(call):
    """A CUDA graph of a call that has run once, and what the replays write into."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return Captured(graph, results)


def replay(one, x, other):
    """On the numbers of another case of the same shapes."""
    for name, t in other.items():
        if torch.is_tensor(t):
            x[name].copy_(t)
    one.graph.replay()
    torch.cuda.synchronize()


@on_hopper
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode, monkeypatch):
    """Forward and backward in Gluon, which is chosen for the scan where processors are few; both are captured where
    overhead is to be reduced."""
    names, original = set(), launch.Launch.__call__

    def listening(self, *tensors, **options):
        names.add(self.kernel.__name__)
        return original(self, *tensors, **options)

    monkeypatch.setattr(launch.Launch, "__call__", listening)
    for module in (launch, launch_backward):
        monkeypatch.setattr(module, "device_of", lambda _: launch.Device("sm_90", 2))
        monkeypatch.setattr(module, "_plans", {})

    def layer(q, k, v, g, beta, initial_state):
        o, state = gdn_ref.chunk_gated_delta_rule(
            q * 1.0, k, v, g, beta, initial_state=initial_state, output_final_state=True, backend="triton"
        )
        return o * 2, state

    def oracle(**x):
        o, state = h.recurrence(**x)
        return o * 2, state

    compiled = torch.compile(layer, fullgraph=True, dynamic=mode == "default", mode=mode)
    for T in (200, 130, 200) if mode == "default" else (200, 200, 200):
        x = make(T, beta="unit", label=(mode, T))
        x["initial_state"] = x["initial_state"].float()
        found = {n: t.cpu() for n, t in h.run(compiled, to_device(x)).items()}
        h.assert_close(found, h.reference(x, oracle), {"o": 1e-2, "state": 1e-2, "*": 2e-2})
    assert {"hopper_scan_kernel", "hopper_gradients_kernel"} <= names


# ---------------------------------------------------------------- the scan


def launches_of(x, config=None, segments=None, keep=None):
    """The names of what a forward call with x launches."""
    given = (*(x[n].to(DEVICE) for n in ("q", "k", "v", "g", "beta")), None, None, x.get("cu_seqlens"), None)
    options = (1.0, True, False, False, False, True)
    return set(launch.make_plan(*given, *options, keep, config, segments).launches)


@pytest.mark.parametrize("x, config", [
    (h.make(20, 1, 2, 128, 64, dtype=torch.bfloat16), SCAN._replace(BV=64)),
    (h.make(20, 1, 2, 64, 128, dtype=torch.bfloat16), SCAN),
    (h.make(20, 1, 2, 128, 128, dtype=torch.float16), SCAN),
    (make(20), SCAN._replace(gluon=False)),
    # rows at no multiples of 16 bytes
    ({**make(20), "q": torch.zeros(1 + 20 * 128, dtype=torch.bfloat16, device=DEVICE)[1:].view(1, 20, 1, 128)}, SCAN),
])  # fmt: skip
def test_what_the_scan_does_not_fit_runs_its_twin(x, config, monkeypatch):
    there = launch.hopper_scan or type("Module", (), {"hopper_scan_kernel": None})
    monkeypatch.setattr(launch, "hopper_scan", there)
    monkeypatch.delitem(tiles.WIDENED, torch.bfloat16, raising=False)
    assert "hopper_scan" in launches_of(make(20), SCAN)
    assert not {"hopper_scan", "hopper_scan_segments"} & launches_of(x, config)


def test_wide_programs_are_chosen_where_they_share_what_they_load():
    device = launch.Device("sm_90", 132)

    def cut(heads, tokens, gluon=True):
        config, segments = launch.choose_cut(device, 2, 128, 128, heads, tokens, gluon)
        return config.BV, segments

    assert cut(64, 8192) == (64, 1) and cut(256, 8192) == (128, 1) and cut(512, 1024) == (128, 1)
    assert cut(32, 32768) == (128, 4) and cut(32, 32768, gluon=False) == (64, 2)
    assert cut(8, 32768) == (64, 8) and cut(32, 2048) == (64, 1)
    assert cut(100, 0) == (64, 1) and cut(400, 0) == (128, 1)  # packed


@on_hopper
@pytest.mark.parametrize("decays", h.DECAYS)
@pytest.mark.parametrize("keys", h.KEYS)
@pytest.mark.parametrize("lengths", [None, [100, 0, 65, 130]], ids=["plain", "packed"])
def test_the_scan_is_right_and_as_its_twin(lengths, keys, decays):
    x = make(295, 2, 6, keys=keys, decays=decays, lengths=lengths)
    found, twin = (forward(x, config=SCAN._replace(gluon=g)) for g in (True, False))
    turned = forward(x | {"initial_state": x["initial_state"].mT.contiguous()}, config=SCAN, state_v_first=True)
    narrow = forward(x, config=launch.configs_for("sm_90", 2, 128)[0])  # which fewer sequences may choose
    for mine, other, third, fourth in zip(found, twin, (turned[0], turned[1].mT), narrow, strict=True):
        assert torch.equal(mine, other) and torch.equal(mine, third)  # the same sums in the same order
        assert torch.equal(mine, fourth)
    expected = dict(zip(("o", "state"), h.recurrence(**x), strict=True))
    actual = {"o": found[0].cpu(), "state": found[1].cpu()}
    h.assert_close_for_dtype(actual, expected, x, BOUNDS[torch.bfloat16])


@on_hopper
@pytest.mark.parametrize("decays", h.DECAYS)
@pytest.mark.parametrize("segments", [2, 5])
def test_the_scan_in_segments(segments, decays):
    """All that the last token sees of the initial state came through every segment."""
    x = make(64 * 10 + 7, 1, 2, keys="correlated", decays=decays, B=2 if segments == 2 else 1)
    x["initial_state"] = x["initial_state"] * 10
    check_forward(x, config=SCAN, segments=segments)


@on_hopper
@pytest.mark.parametrize("size", [1e-12, 1e6, 1e30])
@pytest.mark.parametrize("segments", [None, 2])
def test_the_scan_goes_again_for_values_of_any_size(size, segments):
    x = make(200, 1, 2)
    x["v"], x["initial_state"] = (x["v"].float() * size).bfloat16(), x["initial_state"] * size
    check_forward(x, config=SCAN, segments=segments)


@on_hopper
@pytest.mark.parametrize("lengths, segments", [(None, 1), (None, 2), ([100, 0, 65, 130], 1)])
def test_the_scan_keeps_what_its_twin_keeps(lengths, segments):
    x = make(295, 1, 2, lengths=lengths)
    given = (*(x[n].to(DEVICE) for n in ("q", "k", "v", "g", "beta")), None, None, x.get("cu_seqlens"), None)
    options, kept = (1.0, True, False, False, False, True, lambda *_: (64, 128)), []
    for gluon in (True, False):
        plan = launch.make_plan(*given, *options, SCAN._replace(gluon=gluon), segments)
        parts = plan.kept.tensors(plan.run_and_keep(*given)[2])
        kept.append([parts[name] for name in ("S", "E")])
    starts = [0, 100, 100, 165] if lengths else [0]
    chunks = [s // 64 + n + c for n, s in enumerate(starts) for c in range(-(-(lengths or [295])[n] // 64))]
    for mine, other in zip(*kept, strict=True):
        assert torch.equal(mine[:, chunks], other[:, chunks])


@on_hopper
@pytest.mark.parametrize("lengths", [None, [70, 0, 130]], ids=["plain", "packed"])
def test_the_scan_reads_nothing_around_its_inputs(lengths):
    x = make(lengths=lengths)
    nan = {n: among_nan(t.to(DEVICE)) if n != "cu_seqlens" else t for n, t in x.items()}
    assert all(torch.equal(a, b) for a, b in zip(forward(nan, config=SCAN), forward(x, config=SCAN), strict=True))


@on_hopper
def test_packed_mates_of_nan_do_not_matter_to_the_scan_and_it_repeats():
    x = make(lengths=[100, 90, 70])
    first, _ = forward(x, config=SCAN)
    for name in h.TOKEN_INPUTS:
        if name in x:
            x[name][:, 100:190] = float("nan")
    for _ in range(3):
        o, _ = forward(x, config=SCAN)
        assert torch.equal(o[:, :100], first[:, :100]) and torch.equal(o[:, 190:], first[:, 190:])


@on_hopper
def test_the_scan_takes_rows_at_odd_multiples_of_sixteen_bytes():
    x = make(150)
    wide = {n: torch.nn.functional.pad(x[n], (0, 8)).to(DEVICE)[..., :128] for n in ("q", "k")}
    wide["v"] = torch.nn.functional.pad(x["v"].flatten(2), (0, 8)).to(DEVICE)[..., :256].view(1, 150, 2, 128)
    assert "hopper_scan" in launches_of(x | wide, SCAN)
    found, plain = (forward(t, config=SCAN) for t in (x | wide, x))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@on_hopper
@pytest.mark.parametrize("packed, segments", [(False, 1), (False, 2), (True, 1)])
def test_the_scan_is_captured_in_a_graph(packed, segments):
    x = to_device(make(300, lengths=[100, 200] if packed else None))
    assert {"hopper_scan", "hopper_scan_segments"} & launches_of(x, SCAN, segments)
    one = captured(lambda: forward(x, config=SCAN, segments=segments))
    other = make(300, lengths=[299, 1] if packed else None, decays="slow", label=("replay",))
    replay(one, x, other)
    found = {n: t.cpu() for n, t in zip(("o", "state"), one.results, strict=True)}
    h.assert_close(found, dict(zip(("o", "state"), h.recurrence(**other), strict=True)), 1e-2, other.get("cu_seqlens"))


@pytest.mark.parametrize("decays", ["none", "ordinary", "reset"])
@pytest.mark.parametrize("config", launch.configs_for("sm_90", 2, 128), ids=lambda c: f"BV{c.BV}")
def test_segments_as_they_ship(config, decays):
    """In full width, by the copy engine, several value heads a key: on a Hopper GPU the wide ones in Gluon, elsewhere
    by their twin. All that the last token sees of the initial state came through every segment."""
    x = make(64 * 4 + 7, keys="correlated", decays=decays)
    x["initial_state"] = x["initial_state"] * 10
    with fits(config):
        check_forward(x, bound=1e-2, config=for_this_card(config), segments=3)
