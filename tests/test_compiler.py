"""The one op of the compiler: the whole function in a graph, for any number of tokens, forward and backward."""

import shutil

import pytest
import torch
import torch._dynamo.testing
from helpers import assert_close, gates, l2norm, make, offsets, rand, randn, recurrence, rng, run, where_triton_runs
from torch.library import opcheck

import gdn_ref
from gdn_ref import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

OP = torch.ops.gdn_ref.chunk_gated_delta_rule
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
BACKENDS = ("eager", "aot_eager")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chunked(q, k, v, g, beta, **options):
    return chunk_gated_delta_rule(q, k, v, g, beta, **{"output_final_state": True, **options})


def raw(T, H=1, HV=2, K=8, V=6, dtype=torch.float32, **options):
    """Inputs with raw gates, and the flags that go with them."""
    x, gen = make(T, H, HV, K, V, dtype=dtype, **options), rng("raw compile", T)
    x |= {"g": randn(gen, *x["g"].shape), "beta": randn(gen, *x["beta"].shape)}
    x |= {"A_log": rand(gen, HV), "dt_bias": randn(gen, HV), "q": 2 * x["q"], "k": 3 * x["k"]}
    return {n: t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t for n, t in x.items()}


FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
    "use_gate_in_kernel": True,
}


def raw_oracle(q, k, v, g, beta, A_log, dt_bias, **rest):
    g, beta = gates(g, beta, A_log, dt_bias, 2.0)
    return recurrence(l2norm(q), l2norm(k), v, g, beta, **rest)


def same(actual, expected):
    """To rounding: inside the op gates and norm are differentiated by formula, outside by autograd."""
    assert set(actual) == set(expected)
    for name, t in expected.items():
        assert actual[name].dtype == t.dtype and actual[name].shape == t.shape
        torch.testing.assert_close(actual[name], t, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["plain", "raw"])
def test_one_graph_for_any_number_of_tokens(backend, kind):
    """No graph break (fullgraph) and one compilation for all lengths, gradients included."""
    options = FLAGS if kind == "raw" else {}
    made = raw if kind == "raw" else lambda T: make(T, 1, 2, 8, 6)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda **x: chunked(**x, **options), fullgraph=True, dynamic=True, backend=counter)
    for T in (70, 33, 130, 200):
        same(run(compiled, made(T)), run(chunked, made(T), **options))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_are_found_to_vary_without_being_told(backend):
    """By default the first length is taken as fixed and the second as one of many: two compilations for all."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(chunked, fullgraph=True, backend=counter)
    for T in (70, 33, 130, 200, 7):
        same(run(compiled, make(T, 1, 2, 8, 6)), run(chunked, make(T, 1, 2, 8, 6)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_of_any_number_and_lengths(backend):
    """Boundaries are data: nothing is compiled anew for them, and they are checked when the graph runs."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(chunked, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ((70, 0, 3, 64), (1, 2, 3, 4), (10, 20, 30, 40, 50)):
        x = make(H=1, HV=2, K=8, V=6, lengths=lengths)
        same(run(compiled, x), run(chunked, x))
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="cu_seqlens: found a last boundary"):
        compiled(**(x | {"cu_seqlens": offsets((10, 20, 30, 40, 51))}))


@pytest.mark.parametrize("wrt", [(), ("v",), ("k", "initial_state")], ids=lambda w: "-".join(w) or "none")
def test_some_inputs_want_a_gradient(wrt):
    x = make(70, 1, 2, 8, 6)
    compiled = torch.compile(chunked, fullgraph=True, backend="aot_eager")
    same(run(compiled, x, wrt=wrt), run(chunked, x, wrt=wrt))


@pytest.mark.parametrize("leave", ["g", "beta", "initial_state", "final"])
def test_what_may_be_left_out(leave):
    x = make(70, 1, 2, 8, 6)
    if leave != "final":
        x[leave] = None
    wrt = [n for n in NAMES if x[n] is not None]
    options = {"output_final_state": leave != "final"}

    def both(q, k, v, g, beta, initial_state):
        o, state = chunked(q, k, v, g, beta, initial_state=initial_state, **options)
        assert (state is None) == (leave == "final")
        return o, o[:, -1:] if state is None else state

    same(run(torch.compile(both, fullgraph=True, backend="aot_eager"), x, wrt=wrt), run(both, x, wrt=wrt))


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_a_backend_by_name_and_states_of_either_layout(backend):
    x = make(33, 1, 2, 8, 6)
    x["initial_state"] = x["initial_state"].mT
    options = {"state_v_first": True, "backend": backend, "scale": 0.5, "chunk_size": 16}
    compiled = torch.compile(lambda **t: chunked(**t, **options), fullgraph=True, backend="aot_eager")
    same(run(compiled, x), run(chunked, x, **options))


def test_the_token_form_too():
    x = make(20, 1, 2, 8, 6)

    def token(q, k, v, g, beta, initial_state):
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=initial_state, output_final_state=True
        )

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    same(run(torch.compile(token, fullgraph=True, dynamic=True, backend=counter), x), run(token, x))
    assert counter.frame_count == 1


def test_gradients_of_the_compiled_call_against_the_oracle():
    x = raw(130, K=16, V=12)
    compiled = torch.compile(lambda **t: chunked(**t, **FLAGS), fullgraph=True, backend="aot_eager")
    wide = {n: t.double() for n, t in x.items()}
    assert_close(run(compiled, x), run(raw_oracle, wide))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_are_kept(dtype):
    x = make(70, 1, 2, 8, 6, dtype=dtype)
    found = run(torch.compile(chunked, fullgraph=True, backend="aot_eager"), x)
    assert all(found["d_" + n].dtype == dtype for n in NAMES) and found["o"].dtype == dtype
    assert found["state"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    same(found, run(chunked, x))


def test_autocast_does_not_reach_inside_the_graph():
    """The dtypes of the inputs decide, compiled or not: float32 inputs give the numbers they give without autocast."""
    x = make(70, 1, 2, 8, 6)

    def cast(**t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chunked(**t)

    found = run(torch.compile(cast, fullgraph=True, backend="aot_eager"), x)
    assert found["o"].dtype == torch.float32
    same(found, run(chunked, x))


def test_a_wrong_shape_is_named_while_the_graph_is_made():
    x = make(70, 1, 2, 8, 6)
    x["beta"] = x["beta"][..., :1]
    with pytest.raises(Exception, match=r"beta: found shape \[1, 70, 1\]"):
        torch.compile(chunked, fullgraph=True, backend="aot_eager")(**x)


def test_in_a_checkpoint_and_in_a_larger_function():
    x = make(70, 1, 2, 8, 6)

    def layer(q, k, v, g, beta, initial_state):
        o, state = torch.utils.checkpoint.checkpoint(
            lambda *t: chunked(*t[:5], initial_state=t[5]), q.tanh(), k, v, g, beta, initial_state, use_reentrant=False
        )
        return o * 2 + 1, state

    same(run(torch.compile(layer, fullgraph=True, backend="aot_eager"), x), run(layer, x))


def test_the_layer_is_one_graph():
    torch.manual_seed(0)
    layer = gdn_ref.GatedDeltaNet(32, 2, 4)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter), []
    for T in (40, 70, 33):
        x = torch.randn(2, T, 32, requires_grad=True)
        d = [torch.autograd.grad(f(x)[0].square().sum(), [x, *layer.parameters()]) for f in (compiled, layer)]
        torch.testing.assert_close(d[0], d[1], rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
def test_inductor_serves_it_too():
    x = make(70, 1, 2, 8, 6)

    def layer(q, k, v, g, beta, initial_state):
        o, state = chunked(q.sin(), k, v, g, beta.sigmoid(), initial_state=initial_state)
        return (o * 2).cos(), state

    same(run(torch.compile(layer, fullgraph=True, dynamic=True), x), run(layer, x))


# ---------------------------------------------------------------- the op by itself


def arguments(x, **options):
    """The op's arguments, all by place."""
    defaults = {"scale": None, "initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": False}
    defaults |= dict.fromkeys(("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first"), False)
    defaults |= {"cu_seqlens": None, "use_gate_in_kernel": False, "A_log": None, "dt_bias": None}
    given = defaults | {"chunk_size": 64, "backend": "auto"} | {n: t for n, t in x.items()} | options
    names = ("q", "k", "v", "g", "beta", *defaults, "chunk_size", "backend")
    return tuple(given[n] for n in names)


OPCHECK = {
    "plain": (lambda: make(20, 1, 2, 8, 6, dtype=torch.float64), {}),
    "float32": (lambda: make(70, 1, 2, 8, 6), {"chunk_size": 16}),
    "bare": (lambda: make(20, 1, 2, 8, 6, state=False), {"g": None, "beta": None, "output_final_state": False}),
    "raw": (lambda: raw(20), FLAGS),
    "packed": (lambda: make(H=1, HV=2, K=8, V=6, lengths=(7, 0, 12)), {}),
    "no-token": (lambda: make(0, 1, 2, 8, 6), {}),
}


@pytest.mark.parametrize("case", OPCHECK)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_opcheck(case, grad):
    """Schema, fake form, registration of the gradient, and the traced graph against the op itself."""
    made, options = OPCHECK[case]
    x = {
        n: t.requires_grad_(grad) if torch.is_tensor(t) and t.is_floating_point() else t
        for n, t in made().items()
        if t is not None
    }
    opcheck(OP, arguments(x, **options))


def test_opcheck_of_the_gradient():
    x = make(20, 1, 2, 8, 6)
    o, state = chunked(**x)
    opcheck(torch.ops.gdn_ref.chunk_gated_delta_rule_backward, (torch.ones_like(o), None, *arguments(x)))


def test_the_op_is_the_function():
    x = raw(70)
    o, state = OP(*arguments(x, **FLAGS))
    expected = chunked(**x, **FLAGS)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_the_op_checks_its_arguments():
    x = make(20, 1, 2, 8, 6)
    with pytest.raises(ValueError, match="initial_state: found shape"):
        OP(*arguments(x | {"initial_state": x["initial_state"][:, :1]}))


def test_a_second_derivative_of_the_op_is_refused_by_name():
    leaves = {n: t.requires_grad_() for n, t in make(20, 1, 2, 8, 6).items()}
    o, _ = OP(*arguments(leaves))
    d = torch.autograd.grad(o.square().sum(), list(leaves.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        d[0].sum().backward()


def test_a_second_derivative_through_a_compiled_call_is_refused():
    """By PyTorch, in whose words it is said what to do; never a gradient that is wrong in silence."""
    leaves = {n: t.requires_grad_() for n, t in make(20, 1, 2, 8, 6).items()}
    o, _ = torch.compile(chunked, fullgraph=True, backend="aot_eager")(**leaves)
    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double backward"):
        d = torch.autograd.grad(o.square().sum(), list(leaves.values()), create_graph=True)
        d[0].sum().backward()


def test_gradcheck_of_the_op():
    x = {n: t.requires_grad_() for n, t in raw(6, K=3, V=2, dtype=torch.float64).items()}

    def f(*values):
        return OP(*arguments(dict(zip(x, values, strict=True)), **FLAGS, chunk_size=16))

    assert torch.autograd.gradcheck(f, tuple(x.values()))


def test_the_same_bits_every_time():
    x = make(130, 2, 4)
    compiled = torch.compile(chunked, fullgraph=True, backend="aot_eager")
    first, second = run(compiled, x), run(compiled, x)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_exported_programs_hold_it():
    class Rule(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return chunked(q, k, v, g, beta)

    x = {n: t for n, t in make(70, 1, 2, 8, 6, state=False).items() if t is not None}
    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(Rule(), tuple(x.values()), dynamic_shapes=({1: T},) * 5)
    assert OP.default in {node.target for node in program.graph.nodes}
    y = {n: t for n, t in make(33, 1, 2, 8, 6, state=False).items() if t is not None}
    assert all(torch.equal(a, b) for a, b in zip(program.module()(*y.values()), chunked(**y), strict=True))


def test_uncompiled_calls_do_not_come_through_it():
    """They keep what the backward pass needs, which the op does not."""
    x = {n: t.requires_grad_() for n, t in make(20, 1, 2, 8, 6).items()}
    assert "ChunkwiseDeltaRule" in chunked(**x)[0].grad_fn.name()


# ---------------------------------------------------------------- by the kernels, interpreted where there is no GPU


@pytest.mark.parametrize("kind", ["plain", "raw", "packed"])
def test_the_kernels_serve_a_compiled_call(kind):
    pytest.importorskip("triton")
    made = {"plain": lambda: make(33, 1, 2, 16, 16), "raw": lambda: raw(20, K=16, V=16)}
    x = made.get(kind, lambda: make(H=1, HV=2, K=16, V=16, lengths=(7, 0, 18)))()
    x = where_triton_runs(x)
    options = {**(FLAGS if kind == "raw" else {}), "backend": "triton"}
    compiled = torch.compile(lambda **t: chunked(**t, **options), fullgraph=True, backend="aot_eager")
    with gdn_ref.recompute_states():  # what is compiled keeps its inputs alone
        found, expected = run(compiled, x), run(chunked, x, **options)
    assert all(torch.equal(found[n], t) for n, t in expected.items())


# ---------------------------------------------------------------- on a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_device(x, dtype=torch.bfloat16):
    """The case on a GPU, q, k and v in dtype."""
    x = {n: t.cuda() if torch.is_tensor(t) else t for n, t in x.items()}
    return x | {n: x[n].to(dtype) for n in "qkv"}


def gpu_case(T, **options):
    return on_device(make(T, 2, 4, 64, 64, beta="unit", **options))


@on_gpu
def test_gpu_auto_is_the_kernels_with_a_gradient_too():
    x = gpu_case(200)
    assert gdn_ref.which_backend(x["q"].requires_grad_()).name == "triton"
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    o, state = chunked(**leaves)
    assert "FusedDeltaRule" in o.grad_fn.name()
    assert_close(run(chunked, x), run(recurrence, {n: t.double() for n, t in x.items()}), 2e-2)


@on_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gpu_compiled_by_inductor(mode):
    def layer(q, k, v, g, beta, initial_state):
        o, state = chunked(q * 1.0, k, v, g, beta, initial_state=initial_state)
        return o * 2, state

    compiled = torch.compile(layer, fullgraph=True, dynamic=mode == "default", mode=mode)
    for T in (200, 130, 200) if mode == "default" else (200, 200, 200):
        x = gpu_case(T)
        found, expected = run(compiled, x), run(layer, x)
        assert_close(found, {n: t.double() for n, t in expected.items()}, 1e-2)


@on_gpu
def test_gpu_opcheck():
    x = {n: t.requires_grad_() for n, t in gpu_case(100).items()}
    opcheck(OP, arguments(x), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@on_gpu
def test_gpu_forward_and_backward_in_one_graph():
    """Captured once, replayed on other numbers; nothing in it waits for the device."""
    x = {n: t.detach().requires_grad_() for n, t in gpu_case(200).items()}

    def step():
        o, state = chunked(**x)
        return o, state, *torch.autograd.grad(o.float().square().sum() + state.square().sum(), list(x.values()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for n, t in gpu_case(200, label="other").items():
            x[n].copy_(t)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@on_gpu
def test_gpu_the_same_bits_every_time():
    x = gpu_case(500)
    first, second = run(chunked, x), run(chunked, x)
    assert all(torch.equal(first[n], second[n]) for n in first)
