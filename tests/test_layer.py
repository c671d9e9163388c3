"""GatedDeltaNet against a plain float64 layer of the tests' own; packing, padding, generation against single runs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import l2norm, rand, randn, recurrence, rng

from gdn_ref.layer import GatedDeltaNet, LayerCache, short_convolution

D = 24
SHAPES = {  # name: H, HV, K, V, conv_size
    "plain": (2, 2, 8, 8, 4),
    "K_not_V": (2, 2, 8, 20, 4),
    "GVA2": (2, 4, 16, 8, 4),
    "GVA3_wide_conv": (1, 3, 12, 20, 7),
    "no_conv": (2, 4, 8, 12, 1),
}


def make_layer(shape="GVA2", dtype=torch.float64, **options):
    torch.manual_seed(7)
    H, HV, K, V, W = SHAPES[shape]
    layer = GatedDeltaNet(D, H, HV, K, V, W, **options).to(dtype)
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5)  # else a forgotten weight would not show
        layer.in_proj.weight.mul_(3)
    return layer


def make_x(B=2, T=70, dtype=torch.float64, label=()):
    return randn(rng("layer", B, T, label), B, T, D).to(dtype)


def plain_layer(layer, x):
    """The layer as its docstring draws it, one sequence, float64, with loops: y [T,D], conv [W−1,D], S [HV,K,V]."""
    p = {name: t.detach().double() for name, t in layer.named_parameters()}
    H, HV, K, V = layer.H, layer.HV, layer.K, layer.V
    T, W = len(x), len(p["conv_weight"])
    qkv, z, a, b = (x.double() @ p["in_proj.weight"].T).split([2 * H * K + HV * V, HV * V, HV, HV], dim=-1)
    mixed = torch.zeros_like(qkv)
    for t in range(T):
        for back in range(min(t + 1, W)):
            mixed[t] += p["conv_weight"][W - 1 - back] * qkv[t - back]
    q, k, v = (mixed * mixed.sigmoid()).split([H * K, H * K, HV * V], dim=-1)
    q, k, v = q.reshape(1, T, H, K), k.reshape(1, T, H, K), v.reshape(1, T, HV, V)
    g = -p["A_log"].exp() * torch.log1p((a + p["dt_bias"]).exp())
    o, S = recurrence(l2norm(q), l2norm(k), v, g[None], b.sigmoid()[None])
    o, z = o[0], z.reshape(T, HV, V)
    o = p["norm.weight"] * o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * z * z.sigmoid()
    history = torch.cat([qkv.new_zeros(W - 1, qkv.shape[1]), qkv])[T:]
    return o.reshape(T, HV * V) @ p["out_proj.weight"].T, history, S[0]


def relative(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


# ---------------------------------------------------------------- the layer itself


@pytest.mark.parametrize("T", [1, 2, 3, 64, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_a_plain_layer(shape, T):
    layer, x = make_layer(shape), make_x(T=T)
    y, cache = layer(x, output_cache=True)
    assert y.shape == x.shape
    for n in range(len(x)):
        expected_y, conv, S = plain_layer(layer, x[n])
        assert relative(y[n], expected_y) < 1e-12
        assert torch.allclose(cache.conv[n], conv, atol=1e-13)
        assert relative(cache.state[n], S) < 1e-12


def test_float32_keeps_float32_accuracy():
    layer, x = make_layer(dtype=torch.float32), make_x(B=1, T=130, dtype=torch.float32)
    assert relative(layer(x)[0][0], plain_layer(layer, x[0])[0]) < 1e-5


def test_bfloat16_runs_and_keeps_a_float32_state():
    layer, x = make_layer(dtype=torch.bfloat16), make_x(B=1, dtype=torch.bfloat16)
    y, cache = layer(x, output_cache=True)
    assert y.dtype == torch.bfloat16 and cache.state.dtype == torch.float32
    assert relative(y[0], plain_layer(layer, x[0])[0]) < 5e-2


def test_autocast():
    layer, x = make_layer(dtype=torch.float32), make_x(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = layer(x, output_cache=True)
        layer(x[:, :1], cache)[0].sum().backward()
    assert cache.state.dtype == torch.float32
    assert relative(y, layer(x)[0]) < 5e-2 and layer.A_log.grad.isfinite().all()


def test_shapes_of_a_cache():
    layer = make_layer("GVA3_wide_conv")
    y, cache = layer(make_x(B=2), output_cache=True)
    assert isinstance(cache, LayerCache)
    assert cache.conv.shape == (2, 6, 2 * 12 + 3 * 20) and cache.state.shape == (2, 3, 12, 20)
    assert layer(make_x())[1] is None


def test_no_tokens():
    layer = make_layer()
    y, cache = layer(make_x(T=0), output_cache=True)
    assert y.shape == (2, 0, D)
    assert not cache.conv.any() and not cache.state.any()


def test_causal():
    layer, x = make_layer(), make_x()
    changed = x.clone()
    changed[:, 40] += 1
    difference = (layer(x)[0] - layer(changed)[0]).abs().amax((0, 2))
    assert not difference[:40].any() and (difference[40:44] > 0).all()


def test_initial_gates_are_the_fields():
    """A in [1, 16), softplus(dt_bias) in [1e-3, 1e-1]."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(8, 512, head_k_dim=1)
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= A.min() < 1.5 and 15 < A.max() <= 16
    assert 0.99e-3 < dt.min() < 1.3e-3 and 0.8e-1 < dt.max() < 1.01e-1
    assert abs(dt.log10().mean() + 2) < 0.1  # evenly in the logarithm


@pytest.mark.parametrize("shape", ["K_not_V", "GVA3_wide_conv"])
def test_every_parameter_gets_a_finite_gradient(shape):
    layer, x = make_layer(shape), make_x().requires_grad_()
    y, cache = layer(x, output_cache=True)
    (y.square().sum() + cache.state.sum()).backward()
    for name, tensor in [("x", x), *layer.named_parameters()]:
        assert tensor.grad.isfinite().all() and tensor.grad.abs().max() > 0, name


def test_gradcheck():
    layer = make_layer("no_conv")
    x = make_x(B=1, T=4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


def test_negative_eigenvalues_double_the_write_strength():
    x = make_x()
    wide, narrow = make_layer(allow_neg_eigval=True), make_layer()
    assert relative(wide(x)[0], narrow(x)[0]) > 1e-2


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_backends_agree(backend):
    x = make_x()
    assert relative(make_layer(backend=backend)(x)[0], make_layer()(x)[0]) < 1e-12


# ---------------------------------------------------------------- the convolution alone


@pytest.mark.parametrize("W", [1, 2, 4, 7])
def test_convolution_is_torchs(W):
    x, weight = randn(rng(W), 2, 33, 5), randn(rng(W, 1), W, 5)
    expected = F.conv1d(F.pad(x.mT, (W - 1, 0)), weight.T[:, None], groups=5).mT
    y, history = short_convolution(x, weight)
    assert torch.allclose(y, expected, atol=1e-13)
    assert torch.equal(history, F.pad(x, (0, 0, W - 1, 0))[:, 33:])


# ---------------------------------------------------------------- packed sequences


LENGTHS = [(70, 1, 63, 6), (0, 3, 0, 2, 1, 0), (0, 0), (5,), (1, 1, 1, 1, 1), (130, 2)]


def bounds_of(lengths):
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize("shape", ["GVA2", "GVA3_wide_conv", "no_conv"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: "x".join(map(str, n)))
def test_packed_equals_separate_runs(lengths, shape):
    """V01: y, cache and gradient, from empty and from given caches; no token reaches a neighbour's output."""
    layer, bounds = make_layer(shape), bounds_of(lengths)
    x = make_x(B=1, T=bounds[-1], label=lengths).requires_grad_()
    before = layer(make_x(B=len(lengths), T=5, label="before"), output_cache=True)[1]
    before = LayerCache(*(t.detach() for t in before))
    for cache in (None, before):
        y, after = layer(x, cache, cu_seqlens=torch.tensor(bounds), output_cache=True)
        for n, (start, end) in enumerate(itertools.pairwise(bounds)):
            own = None if cache is None else LayerCache(cache.conv[n : n + 1], cache.state[n : n + 1])
            alone, alone_after = layer(x[:, start:end], own, output_cache=True)
            assert torch.allclose(y[:, start:end], alone, atol=1e-12)
            for found, expected in zip(after, alone_after, strict=True):
                assert torch.allclose(found[n : n + 1], expected, atol=1e-12)
            (grad,) = torch.autograd.grad(y[:, start:end].sum(), x, retain_graph=True)
            outside = torch.cat([grad[:, :start], grad[:, end:]], 1)
            assert not outside.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes_of_cu_seqlens(dtype):
    """V04."""
    layer, x = make_layer(), make_x(B=1, T=9)
    y, _ = layer(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=dtype))
    assert torch.allclose(y, torch.cat([layer(x[:, :4])[0], layer(x[:, 4:])[0]], 1), atol=1e-12)


@pytest.mark.parametrize("bounds", [(0, 4, 7), (0, 0), (0,)])
def test_tokens_beyond_the_last_bound_change_nothing(bounds):
    layer, x, end = make_layer(), make_x(B=1, T=9), bounds[-1]
    cu = torch.tensor(bounds)
    y, cache = layer(x, cu_seqlens=cu, output_cache=True)
    short, short_cache = layer(x[:, :end], cu_seqlens=cu, output_cache=True)
    assert torch.allclose(y[:, :end], short, atol=1e-12) and not y[:, end:].any()
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(cache, short_cache, strict=True))


def test_V06_given_bounds_win_over_a_mask():
    layer, x = make_layer(), make_x(B=1, T=6)
    cu = torch.tensor([0, 3, 6])
    expected = layer(x, cu_seqlens=cu)[0]
    assert torch.equal(layer(x, cu_seqlens=cu, attention_mask=torch.ones(1, 6))[0], expected)
    assert torch.equal(layer(x, cu_seqlens=cu, attention_mask=torch.zeros(1, 6))[0], expected)
    assert not torch.allclose(layer(x)[0], expected)  # the bounds do something


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_V08_left_padding_equals_the_unpadded_run(mask_dtype):
    layer, lengths = make_layer(), (50, 70)
    x = make_x(T=70)
    mask = torch.arange(70) >= 70 - torch.tensor(lengths)[:, None]
    x = torch.where(mask[..., None], x, 1e3 * x)  # garbage at the pads
    y, cache = layer(x, attention_mask=mask.to(mask_dtype), output_cache=True)
    for n, length in enumerate(lengths):
        alone, alone_cache = layer(x[n : n + 1, 70 - length :], output_cache=True)
        assert torch.allclose(y[n, 70 - length :], alone[0], atol=1e-12)
        assert torch.allclose(cache.conv[n], alone_cache.conv[0], atol=1e-12)
        assert torch.allclose(cache.state[n], alone_cache.state[0], atol=1e-12)


def test_pads_leave_a_state_bit_for_bit_as_it_was():
    layer = make_layer(dtype=torch.float32)
    _, before = layer(make_x(dtype=torch.float32), output_cache=True)
    inputs, _, _ = layer.rule_inputs(make_x(T=5, dtype=torch.float32), mask=torch.zeros(2, 5, dtype=torch.bool))
    _, after = layer.apply_rule(inputs, before.state, output_final_state=True, backend="recurrent")
    assert torch.equal(after, before.state)


def test_gradients_through_padding_are_finite_and_not_the_pads():
    layer, x = make_layer(), make_x().requires_grad_()
    mask = torch.arange(70) >= torch.tensor([20, 0])[:, None]
    (layer(x, attention_mask=mask)[0] * mask[..., None]).square().sum().backward()
    assert not x.grad[0, :20].any() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize("shape", ["K_not_V", "GVA2", "GVA3_wide_conv", "no_conv"])
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (63, 64), (65,), (66, 67, 68, 69), (2, 50)], ids=str)
def test_prefill_in_pieces_then_token_by_token_equals_one_run(shape, cuts):
    """T12, N20."""
    layer, x = make_layer(shape), make_x()
    expected, last = layer(x, output_cache=True)
    cache, pieces = None, []
    for start, end in itertools.pairwise([0, *cuts, 70]):
        y, cache = layer(x[:, start:end], cache, output_cache=True)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, 1), expected, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(cache, last, strict=True))


def test_a_cache_is_never_changed():
    layer = make_layer()
    _, cache = layer(make_x(), output_cache=True)
    kept = [t.clone() for t in cache]
    for T in (1, 3, 64):
        layer(make_x(T=T), cache, output_cache=True)
    layer(make_x(B=1, T=9), cache, cu_seqlens=torch.tensor([0, 4, 9]), output_cache=True)
    assert all(torch.equal(now, before) for now, before in zip(cache, kept, strict=True))
    assert cache.conv.untyped_storage().nbytes() == cache.conv.nbytes  # and it holds no more than itself


def test_left_padded_prefill_then_generation():
    layer, x, new = make_layer(), make_x(T=20), make_x(T=1, label="new")
    mask = torch.arange(20) >= torch.tensor([7, 0])[:, None]
    _, cache = layer(x, attention_mask=mask, output_cache=True)
    y, _ = layer(new, cache)
    for n, start in enumerate((7, 0)):
        alone = layer(torch.cat([x[n : n + 1, start:], new[n : n + 1]], 1))[0]
        assert torch.allclose(y[n, 0], alone[0, -1], atol=1e-12)


# ---------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("sizes, name", [
    (dict(num_heads=0), "num_heads"),
    (dict(num_heads=2, num_v_heads=3), "num_v_heads"),
    (dict(num_heads=4, num_v_heads=2), "num_v_heads"),
    (dict(num_heads=2, head_k_dim=-1), "head_k_dim"),
    (dict(num_heads=2, head_v_dim=1.5), "head_v_dim"),
    (dict(num_heads=2, conv_size=0), "conv_size"),
])
def test_bad_sizes(sizes, name):
    with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
        GatedDeltaNet(D, **sizes)


@pytest.mark.parametrize("call, name", [
    (lambda layer, x: layer(x[0]), "x"),
    (lambda layer, x: layer(x[..., :-1]), "x"),
    (lambda layer, x: layer(x, cu_seqlens=torch.tensor([0, 70])), "cu_seqlens"),
    (lambda layer, x: layer(x[:1], cu_seqlens=[0, 70]), "cu_seqlens"),
    (lambda layer, x: layer(x[:1], cu_seqlens=torch.tensor([0, 4, 71])), "cu_seqlens"),
    (lambda layer, x: layer(x[:1], cu_seqlens=torch.tensor([1, 70])), "cu_seqlens"),
    (lambda layer, x: layer(x[:1], cu_seqlens=torch.tensor([0, 9, 4, 70])), "cu_seqlens"),
    (lambda layer, x: layer(x[:1], cu_seqlens=torch.tensor([0.0, 70.0])), "cu_seqlens"),
    (lambda layer, x: layer(x[:1], cu_seqlens=torch.tensor([[0, 70]])), "cu_seqlens"),
    (lambda layer, x: layer(x, attention_mask=torch.ones(2, 69)), "attention_mask"),
    (lambda layer, x: layer(x, attention_mask=torch.arange(70).expand(2, 70) < 9, output_cache=True), "attention_mask"),
    (lambda layer, x: layer(x, layer(x[:1], output_cache=True)[1]), "cache.conv"),
    (lambda layer, x: layer(x, LayerCache(torch.zeros(2, 3, 96), torch.zeros(2, 4, 8, 16))), "cache.state"),
])
def test_bad_arguments(call, name):
    with pytest.raises((ValueError, TypeError), match=f"^{name}: found .*expected"):
        call(make_layer(), make_x())


# ---------------------------------------------------------------- it learns


def test_learns_to_recall():
    """Pairs of key and value, three blanks, then one of the keys: its value is out of the convolution's reach.

    Guessing among all 7 values costs ln 7 = 1.95 nats, among the values that were shown about ln 3 = 1.1.
    """
    torch.manual_seed(0)
    pairs, embed = 3, torch.nn.Embedding(16, D)
    layer, head = GatedDeltaNet(D, 2, head_k_dim=12), torch.nn.Linear(D, 7)
    optimizer = torch.optim.Adam([*embed.parameters(), *layer.parameters(), *head.parameters()], lr=1e-2)
    gen, losses = rng("recall"), []
    for _ in range(120):
        keys = rand(gen, 32, 8).argsort(-1)[:, :pairs]
        values = torch.randint(7, (32, pairs), generator=gen)
        asked = torch.randint(pairs, (32, 1), generator=gen)
        shown = torch.stack([keys, values + 8], -1).flatten(1)
        tokens = torch.cat([shown, torch.full((32, 3), 15), keys.gather(1, asked)], 1)
        loss = F.cross_entropy(head(layer(embed(tokens))[0][:, -1]), values.gather(1, asked)[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.7
