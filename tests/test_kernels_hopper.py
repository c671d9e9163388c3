"""What is in Gluon and its twins in plain Triton: held together on a Hopper GPU, for which alone both are."""

import helpers as h
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so its kernels are not tested here; see `make kernels`")

from test_kernels_backward import backward, check, upstream
from test_kernels_forward import BOUNDS, DEVICE, GPU, among_nan, forward
from test_kernels_forward import check as check_forward

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
    ({**make(20), "q": torch.zeros(1, 20, 1, 129, dtype=torch.bfloat16, device=DEVICE)[..., :128]}, SCAN),
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
    for mine, other, third in zip(found, twin, (turned[0], turned[1].mT), strict=True):
        assert torch.equal(mine, other) and torch.equal(mine, third)  # the same sums in the same order
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
