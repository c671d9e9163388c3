"""The public functions: names, errors before any work, dtypes, flags, backends; every row of the contract."""

import inspect
import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import (
    FP32_BOUND,
    CountOps,
    assert_close,
    check,
    gates,
    l2norm,
    make,
    offsets,
    randn,
    recurrence,
    reference,
    rng,
    run,
    unit,
    where_triton_runs,
    without,
)

import gdn_ref
from gdn_ref import arguments, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, ops, which_backend

BACKENDS = ("torch", "recurrent")
NAN = float("nan")


def chunk(q, k, v, g, beta, **options):
    return chunk_gated_delta_rule(q, k, v, g, beta, **{"output_final_state": True, "backend": "torch", **options})


def fused(q, k, v, g, beta, **options):
    return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **{"output_final_state": True, **options})


def by_backend(backend):
    return lambda *args, **options: chunk(*args, **{**options, "backend": backend})


FORMS = {"chunk-torch": chunk, "chunk-recurrent": by_backend("recurrent"), "fused-auto": fused}
on_forms = pytest.mark.parametrize("op", FORMS.values(), ids=FORMS)


# ---------------------------------------------------------------- names


def parameters(fn):
    return inspect.signature(fn).parameters


SIGNATURES = {
    "chunk_gated_delta_rule": [
        "q",
        "k",
        "v",
        "g",
        "beta",
        "scale",
        "initial_state",
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
        "cu_seqlens",
        "*",
        "use_gate_in_kernel",
        "A_log",
        "dt_bias",
        "chunk_size",
        "backend",
    ],
    "recompute_w_u_fwd": ["k", "v", "beta", "A", "g", "cu_seqlens", "chunk_indices"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_documented_one(name):
    found = []
    for p in parameters(getattr(gdn_ref, name)).values():
        if p.kind is p.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(p.name)
    assert found == SIGNATURES[name]


def test_signature_of_the_recurrent_form():
    p = parameters(fused_recurrent_gated_delta_rule)
    names = list(p)
    assert names[:4] == ["q", "k", "v", "g"] and p["g"].default is None
    assert all(p[n].kind is p[n].KEYWORD_ONLY for n in names[4:]), "beta and everything after it"
    assert names[4:8] == ["beta", "scale", "initial_state", "output_final_state"]
    assert {
        "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
        "use_gate_in_kernel",
        "A_log",
        "dt_bias",
        "cu_seqlens",
        "backend",
    } <= set(names)


def test_defaults_are_the_documented_ones():
    for fn in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        defaults = {
            n: p.default for n, p in parameters(fn).items() if p.default is not p.empty and n not in ("g", "beta")
        }
        none = {"scale", "initial_state", "cu_seqlens", "A_log", "dt_bias"}
        assert all(defaults[n] is None for n in none)
        assert defaults["backend"] == "auto"
        assert all(v is False for n, v in defaults.items() if n not in none | {"backend", "chunk_size"})
    assert parameters(chunk_gated_delta_rule)["chunk_size"].default == 64


PUBLIC = [
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gdn_extend_chunkwise",
    "gdn_extend_chunkwise_torch",
    "recompute_w_u_fwd",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "solve_tril",
    "prepare_chunk_indices",
    "l2norm",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_name_every_parameter(name):
    fn = getattr(gdn_ref, name)
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters(fn).values())
    assert inspect.getdoc(fn), "a public function explains itself"
    assert name in gdn_ref.__all__
    with pytest.raises(TypeError):
        fn(nonsense=1)


def test_unknown_names_are_type_errors():
    x = make(4)
    for op in (chunk, fused):
        with pytest.raises(TypeError, match="inital_state"):
            op(x["q"], x["k"], x["v"], x["g"], x["beta"], inital_state=x["initial_state"])


def test_a_fifth_argument_by_place_is_told_why_it_cannot_be_one():
    """g and beta follow each other in the other function; here Python itself would only count the arguments."""
    x = make(4)
    tokens = [x[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(TypeError, match="found 5 arguments by place, expected q, k, v and g.* beta=beta.*gk"):
        fused_recurrent_gated_delta_rule(*tokens)
    assert_close(
        {"o": fused_recurrent_gated_delta_rule(*tokens[:4], beta=tokens[4])[0]}, {"o": recurrence(*tokens)[0]}
    )


def test_all_lists_names_that_exist():
    assert all(hasattr(gdn_ref, n) for n in gdn_ref.__all__) and len(set(gdn_ref.__all__)) == len(gdn_ref.__all__)


# ---------------------------------------------------------------- errors


def good(**options):
    return make(12, 2, 4, 8, 6, B=2, **options)


def drop_last(t):
    return t[..., :-1]


BAD = {  # what is changed: the argument named, what was found, what was expected
    "q-rank": ("q", lambda x: x | {"q": x["q"][0]}, ["[12, 2, 8]", "[B, T, H, K]"]),
    "k-rank": ("k", lambda x: x | {"k": x["k"][..., None]}, ["[2, 12, 2, 8, 1]", "[B, T, H, K]"]),
    "v-rank": ("v", lambda x: x | {"v": x["v"][0, 0]}, ["[4, 6]", "[B, T, HV, V]"]),
    "g-rank": ("g", lambda x: x | {"g": x["g"][..., None]}, ["[2, 12, 4, 1]", "[B, T, HV]"]),
    "beta-rank": ("beta", lambda x: x | {"beta": x["beta"][0]}, ["[12, 4]", "[B, T, HV]"]),
    "k-width": ("k", lambda x: x | {"k": drop_last(x["k"])}, ["7", "8"]),
    "k-heads": ("k", lambda x: x | {"k": x["k"][:, :, :1]}, ["1", "2"]),
    "k-tokens": ("k", lambda x: x | {"k": x["k"][:, 1:]}, ["11", "12"]),
    "v-tokens": ("v", lambda x: x | {"v": x["v"][:, 1:]}, ["11", "12"]),
    "v-batch": ("v", lambda x: x | {"v": x["v"][:1]}, ["1", "2"]),
    "g-heads": ("g", lambda x: x | {"g": x["g"][..., :2]}, ["2", "4"]),
    "beta-heads": ("beta", lambda x: x | {"beta": x["beta"][..., :1]}, ["1", "4"]),
    "g-broadcast": ("g", lambda x: x | {"g": x["g"][:1]}, ["1", "2"]),
    "state-rank": (
        "initial_state",
        lambda x: x | {"initial_state": x["initial_state"][0]},
        ["[4, 8, 6]", "[N, HV, K, V]"],
    ),
    "state-count": ("initial_state", lambda x: x | {"initial_state": x["initial_state"][:1]}, ["1", "2"]),
    "state-heads": ("initial_state", lambda x: x | {"initial_state": x["initial_state"][:, :2]}, ["2", "4"]),
    "state-transposed": ("initial_state", lambda x: x | {"initial_state": x["initial_state"].mT}, ["8", "6"]),
}
BAD_TYPE = {
    "q-list": ("q", lambda x: x | {"q": x["q"].tolist()}),
    "k-None": ("k", lambda x: x | {"k": None}),
    "v-integers": ("v", lambda x: x | {"v": x["v"].long()}),
    "q-integers": ("q", lambda x: x | {"q": x["q"].int()}),
    "g-integers": ("g", lambda x: x | {"g": x["g"].long()}),
    "beta-bool": ("beta", lambda x: x | {"beta": x["beta"] > 1}),
    "k-complex": ("k", lambda x: x | {"k": x["k"].to(torch.complex64)}),
    "state-integers": ("initial_state", lambda x: x | {"initial_state": x["initial_state"].long()}),
}


def says(error, *words):
    text = str(error.value)
    missing = [w for w in words if w not in text]
    assert not missing, f"{missing} not in: {text}"


@on_forms
@pytest.mark.parametrize("case", BAD)
def test_wrong_shape_is_a_value_error(case, op):
    name, change, words = BAD[case]
    with pytest.raises(ValueError, match=rf"\b{name}\b") as error:
        op(**change(good()))
    says(error, *words)


@on_forms
@pytest.mark.parametrize("case", BAD_TYPE)
def test_wrong_type_is_a_type_error(case, op):
    name, change = BAD_TYPE[case]
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        op(**change(good()))


def entries():
    """{public function: arguments that it takes}."""
    x = good()
    tokens, gates, states = (x["q"], x["k"], x["v"]), (x["g"], x["beta"]), x["initial_state"]
    (B, T, HV), C = x["g"].shape, 4
    rule = dict(zip(("q", "k", "v", "g", "beta"), (*tokens, *gates), strict=True))
    raw = {"A_log": torch.rand(HV), "dt_bias": torch.rand(HV)}
    A = gdn_ref.chunk_scaled_dot_kkt_fwd(x["k"], x["g"], x["beta"], chunk_size=C)
    pool = torch.zeros(3, HV, x["v"].shape[-1], x["k"].shape[-1])
    slots, known = torch.arange(B), torch.ones(B, dtype=torch.bool)
    step = dict(zip("qkvab", (t[:, :2] for t in (*tokens, *gates)), strict=True))
    packed = dict(zip("qkvab", (t[0] for t in (*tokens, *gates)), strict=True))
    one = {"state_pool": pool, "cache_indices": slots[:1], "has_initial_state": known[:1]}
    cu = torch.tensor([0, T])
    return {
        "chunk_gated_delta_rule": rule | {"initial_state": states},
        "fused_recurrent_gated_delta_rule": rule | {"initial_state": states},
        "chunk_gated_delta_rule, raw": rule | raw | {"use_gate_in_kernel": True},
        "fused_recurrent_gated_delta_rule, raw": rule | raw | {"use_gate_in_kernel": True},
        "chunk_gated_delta_rule, packed": {n: t[:1] for n, t in rule.items()} | {"cu_seqlens": cu},
        "gdn_decode": step | raw | {"state_pool": pool, "cache_indices": slots, "has_initial_state": known},
        "gdn_rollback": {
            "states": torch.zeros(B, 2, *pool.shape[1:]), "accepted": slots + 1, "state_pool": pool,
            "cache_indices": slots,
        },
        "gdn_extend_chunkwise": packed | raw | one | {"cu_seqlens": cu},
        "gdn_extend_chunkwise_torch": packed | raw | one | {"cu_seqlens": cu},
        "chunk_local_cumsum": {"g": x["g"]},
        "chunk_scaled_dot_kkt_fwd": {"k": x["k"], "g": x["g"], "beta": x["beta"]},
        "solve_tril": {"A": A},
        "recompute_w_u_fwd": {"k": x["k"], "v": x["v"], "beta": x["beta"], "A": A, "g": x["g"]},
        "prepare_chunk_indices": {"cu_seqlens": cu},
        "l2norm": {"x": x["k"]},
    }  # fmt: skip


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("entry", entries())
def test_what_is_no_tensor_is_named(entry, grad):
    """A list, an array or a number where a tensor is expected, in every argument of every function, by every path."""
    given, function = entries()[entry], getattr(gdn_ref, entry.partition(",")[0])
    with torch.set_grad_enabled(grad):
        function(**given)
        for name in (n for n, x in given.items() if torch.is_tensor(x)):
            for other in (given[name].tolist(), given[name].numpy(), 3.0):
                with pytest.raises(TypeError, match=rf"^{name}: found "):
                    function(**given | {name: other})


@on_forms
@pytest.mark.parametrize("H, HV", [(4, 2), (2, 3), (0, 2), (3, 4), (2, 0)], ids=lambda n: str(n))
def test_heads_that_do_not_divide(H, HV, op):
    q, v, g = torch.zeros(1, 5, H, 4), torch.zeros(1, 5, HV, 4), torch.zeros(1, 5, HV)
    with pytest.raises(ValueError, match=r"\bHV?\b") as error:
        op(q, q, v, g, g)
    says(error, *(["H = 0"] if H == 0 else [f"H = {H}", f"HV = {HV}"]))


CU = {
    "batch": (lambda x: x | {"cu_seqlens": offsets((12,))}, ["2", "1"]),
    "start": (lambda x: first(x) | {"cu_seqlens": torch.tensor([1, 12])}, ["1", "0"]),
    "decreasing": (lambda x: first(x, 3) | {"cu_seqlens": torch.tensor([0, 8, 4, 12])}, ["8", "4"]),
    "beyond": (lambda x: first(x) | {"cu_seqlens": torch.tensor([0, 13])}, ["13", "12"]),
    "negative": (lambda x: first(x, 2) | {"cu_seqlens": torch.tensor([0, -3, 12])}, ["-3"]),
    "rank": (lambda x: first(x) | {"cu_seqlens": torch.tensor([[0, 12]])}, ["2", "1"]),
    "empty": (lambda x: first(x, 0) | {"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, ["0"]),
    "states": (lambda x: first(x, 3) | {"cu_seqlens": offsets((5, 7))}, ["3", "2"]),
}


def first(x, N=1):
    """One batch row, with N initial states."""
    state = x["initial_state"][:1].expand(N, -1, -1, -1)
    return {n: t[:1] for n, t in x.items()} | {"initial_state": state}


@on_forms
@pytest.mark.parametrize("case", CU)
def test_wrong_cu_seqlens_is_a_value_error(case, op):
    change, words = CU[case]
    name = "initial_state" if case == "states" else "cu_seqlens"
    with pytest.raises(ValueError, match=name) as error:
        op(**change(good()))
    says(error, *words)


@on_forms
@pytest.mark.parametrize(
    "cu",
    [torch.tensor([0.0, 12.0]), torch.tensor([False, True]), torch.tensor([0, 12], dtype=torch.int16), "0,12"],
    ids=["float", "bool", "int16", "str"],
)
def test_cu_seqlens_of_another_type(cu, op):
    with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
        op(**first(good()), cu_seqlens=cu)


@pytest.mark.parametrize("chunk_size", [0, -64, 1.5, "64", False], ids=repr)
def test_wrong_chunk_size(chunk_size):
    with pytest.raises((TypeError, ValueError), match="chunk_size"):
        chunk(**good(), chunk_size=chunk_size)


@on_forms
@pytest.mark.parametrize("scale", ["1", torch.tensor(2), torch.ones(3)], ids=["str", "int-tensor", "vector"])
def test_wrong_scale(scale, op):
    with pytest.raises((TypeError, ValueError), match="scale"):
        op(**good(), scale=scale)


@on_forms
@pytest.mark.parametrize("scale", [NAN, float("inf"), float("-inf"), 10**400], ids=["nan", "inf", "-inf", "huge"])
def test_a_scale_that_is_not_finite(scale, op):
    """It would make every number NaN or infinite, far from where it came from; a host number costs no wait."""
    with pytest.raises(ValueError, match=r"^scale: found .*, expected a finite number"):
        op(**good(), scale=scale)


def test_an_integer_scale_is_a_number():
    x = make(9)
    assert_close(run(chunk, x, scale=2), reference(x, scale=2.0))


@on_forms
@pytest.mark.parametrize("missing", ["A_log", "dt_bias"])
def test_missing_gate_parameters(missing, op):
    parts = {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    if missing == "dt_bias":  # a bias may be optional, as in flash-linear-attention: then it is zero
        full = op(**good(), use_gate_in_kernel=True, **parts)
        try:
            bare = op(**good(), use_gate_in_kernel=True, A_log=parts["A_log"])
        except ValueError as error:
            assert "dt_bias" in str(error)
        else:
            assert torch.equal(full[0], bare[0])
        return
    with pytest.raises(ValueError, match=missing):
        op(**good(), use_gate_in_kernel=True, **without(parts, missing))


@on_forms
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_gate_parameters_of_the_wrong_shape(name, op):
    parts = {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4)} | {name: torch.zeros(3)}
    with pytest.raises(ValueError, match=name) as error:
        op(**good(), use_gate_in_kernel=True, **parts)
    says(error, "3", "4")


@on_forms
def test_gate_parameters_without_the_flag_are_not_ignored_in_silence(op):
    with pytest.raises(ValueError, match="use_gate_in_kernel"):
        op(**good(), A_log=torch.zeros(4), dt_bias=torch.zeros(4))


@on_forms
def test_allow_neg_eigval_needs_the_sigmoid_inside(op):
    with pytest.raises(ValueError, match="use_beta_sigmoid_in_kernel"):
        op(**good(), allow_neg_eigval=True)


@on_forms
def test_mixed_devices_name_both(op):
    x = good()
    with pytest.raises(ValueError) as error:
        op(**(x | {"k": x["k"].to("meta")}))
    says(error, "k", "meta", "cpu")


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it lies on a GPU, and counts how often its values are read."""

    device, read = torch.device("cuda", 0), 0

    def tolist(self):
        type(self).read += 1
        return torch.Tensor.tolist(self)


def asked_of_the_gpu():
    """{what is checked: a call of the check with values that are not allowed, on a GPU}."""

    def there(values):
        return torch.Tensor._make_subclass(OnGpu, torch.tensor(values))

    return {
        "cu_seqlens: found 8 then 4": lambda: arguments.check_cu_seqlens(there([0, 8, 4, 12]), 12, 1),
        "cu_seqlens: found a first boundary of 1": lambda: arguments.check_cu_seqlens(there([1, 12]), 12, 1),
        "cu_seqlens: found a last boundary of 13": lambda: arguments.check_cu_seqlens(there([0, 13]), 12, 1),
        "cache_indices: found slot 3 at 1": lambda: arguments.check_slots(there([0, 3]), 3),
        "cache_indices: found slot 1 at both 0 and 2": lambda: arguments.check_slots(there([1, -1, 1]), 3),
        "accepted: found 5 at 1": lambda: arguments.check_accepted(there([1, 5]), there([0, 1]), 4),
    }


@pytest.mark.parametrize("setting", [None, "0", "1"])
@pytest.mark.parametrize("message", asked_of_the_gpu())
def test_values_on_a_gpu_are_looked_at_where_that_is_asked_for(message, setting, monkeypatch):
    """GDN_REF_VALIDATE=1, and nothing else, buys the checks of values there; to read them waits for the device."""
    monkeypatch.delenv("GDN_REF_VALIDATE", raising=False)
    if setting is not None:
        monkeypatch.setenv("GDN_REF_VALIDATE", setting)
    monkeypatch.setattr(OnGpu, "read", 0)
    wrong = asked_of_the_gpu()[message]
    if setting == "1":
        with pytest.raises(ValueError, match=f"^{message}"):
            wrong()
        assert OnGpu.read
    else:
        wrong()
        assert not OnGpu.read


@pytest.mark.parametrize("setting", [None, "1"])
def test_values_on_the_cpu_are_always_looked_at(setting, monkeypatch):
    monkeypatch.delenv("GDN_REF_VALIDATE", raising=False)
    if setting is not None:
        monkeypatch.setenv("GDN_REF_VALIDATE", setting)
    with pytest.raises(ValueError, match="^cu_seqlens: found a last boundary of 13"):
        arguments.check_cu_seqlens(torch.tensor([0, 13]), 12, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="values on a GPU")
def test_values_on_a_real_gpu(monkeypatch):
    """By the public functions, whose later calls of a kind skip the other checks: not these."""
    monkeypatch.setenv("GDN_REF_VALIDATE", "1")
    x = {n: t.cuda() for n, t in make(12, 1, 2, 16, 16, lengths=(5, 7)).items()}
    for op in (by_backend("auto"), fused):
        for _ in range(2):  # the second call has the plan of the first
            op(**x)
            with pytest.raises(ValueError, match="^cu_seqlens: found a last boundary of 13"):
                op(**(x | {"cu_seqlens": torch.tensor([0, 5, 13], device="cuda")}))
    step = {n: torch.zeros(2, 1, *sizes, device="cuda") for n, sizes in (
        ("q", (1, 16)), ("k", (1, 16)), ("v", (2, 16)), ("a", (2,)), ("b", (2,)))}  # fmt: skip
    step |= {n: torch.zeros(2, device="cuda") for n in ("A_log", "dt_bias")}
    pool = torch.zeros(3, 2, 16, 16, device="cuda")
    for _ in range(2):
        gdn_ref.gdn_decode(**step, state_pool=pool, cache_indices=torch.tensor([0, 2], device="cuda"))
        with pytest.raises(ValueError, match="^cache_indices: found slot 3 at 1"):
            gdn_ref.gdn_decode(**step, state_pool=pool, cache_indices=torch.tensor([0, 3], device="cuda"))


def test_errors_come_before_any_work():
    """Not one torch operation on data runs before a bad shape is refused."""
    x = good()
    x["beta"] = x["beta"][..., :1]
    with CountOps() as ops, pytest.raises(ValueError):
        chunk(**x)
    assert ops.count == 0


# ---------------------------------------------------------------- backends


def test_backends_give_the_same():
    x = make(130, 2, 4, keys="correlated", lengths=(60, 0, 70))
    expected = reference(x)
    for backend in ("auto", "torch", "recurrent"):
        assert_close(run(chunk, x, backend=backend), expected, cu_seqlens=x["cu_seqlens"])
        assert_close(run(fused, x, backend=backend), expected, cu_seqlens=x["cu_seqlens"])


@pytest.mark.parametrize("op", [chunk, fused], ids=["chunk", "fused"])
def test_unknown_backend_lists_the_known(op):
    with pytest.raises(ValueError, match="backend") as error:
        op(**good(), backend="cuda")
    says(error, "cuda", "auto", "triton", "torch", "recurrent")


@pytest.mark.parametrize(
    "asked, expected",
    [
        (("cuda",), "x: found str, expected a tensor"),
        ((torch.device("cpu"), "torch"), "x: found device, expected a tensor"),
        ((None, "triton"), "x: found NoneType, expected a tensor"),
    ],
)
def test_which_backend_names_what_is_no_tensor(asked, expected):
    with pytest.raises(TypeError, match=f"^{expected}"):
        which_backend(*asked)


def test_which_backend_names_what_it_cannot_look_at():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="^x: found a tensor without axes"):
        which_backend(x.sum(), "triton")
    with pytest.raises(TypeError, match=r"^others\[1\]: found str, expected a tensor or None"):
        which_backend(x, others=(None, "v"))
    with pytest.raises(TypeError, match="^others: found Tensor, expected a tuple"):
        which_backend(x, others=x)
    assert which_backend(x, others=(None, x)).name == "torch"


@pytest.mark.parametrize("op", [chunk, fused], ids=["chunk", "fused"])
def test_triton_on_a_cpu_says_why_in_one_line(op, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="triton") as error:
        op(**good(), backend="triton")
    assert "\n" not in str(error.value).strip()


def test_triton_on_a_cpu_is_not_asked_for_too_late():
    """Kernels that are defined already are not interpreted any more, and would be handed a CPU's addresses."""
    pytest.importorskip("triton")
    code = """
        import os, torch, triton
        from gdn_ref import chunk_gated_delta_rule
        from gdn_ref.kernels import launch
        os.environ["TRITON_INTERPRET"] = "1"
        x = torch.zeros(1, 3, 1, 16)
        try:
            chunk_gated_delta_rule(x, x, x, None, None, backend="triton")
        except RuntimeError as error:
            print(error)
    """
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "TRITON_INTERPRET=1, set before triton is imported" in said


def test_a_call_of_a_known_kind_goes_by_its_plan(monkeypatch):
    """With and without gradients, and by no other way than the kernels' own."""
    taken = []

    class Plan:
        kept = None

        def run(self, *tensors):
            taken.append("run")
            return tensors[2], tensors[8]

        def run_and_keep(self, *tensors):
            taken.append("keep")
            return tensors[2].clone(), tensors[8].clone(), None

    monkeypatch.setattr(ops, "_recall", lambda *_: Plan())
    o, S = chunk_gated_delta_rule(**SMALL, output_final_state=True)
    assert o is SMALL["v"] and S is SMALL["initial_state"]
    leaves = {n: t.detach().requires_grad_() for n, t in SMALL.items()}
    assert chunk_gated_delta_rule(**leaves, output_final_state=True)[0].requires_grad and taken == ["run", "keep"]
    for other in ({"backend": "torch"}, {"chunk_size": 32}):
        chunk_gated_delta_rule(**SMALL, **other)
    with pytest.raises(ValueError, match="A_log"):
        chunk_gated_delta_rule(**SMALL, use_gate_in_kernel=True)
    assert taken == ["run", "keep"]


def test_triton_serves_interpreted_or_says_what_it_cannot_do(monkeypatch):
    """By name only: "auto" on a CPU stays with torch. What kernels cannot do is said before anything is compiled."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = make(33, 1, 2, 16, 8)
    assert which_backend(x["q"]).name == "torch"
    x = where_triton_runs(x)
    assert which_backend(x["q"], "triton").name == "triton"
    expected = reference(x)
    for op in (chunk, fused):
        assert_close(run(op, x, wrt=[], backend="triton"), {n: expected[n] for n in ("o", "state")})
    wide = torch.zeros(1, 1, 1, 257, device=x["q"].device)
    for name, tensor in (("float64", wide.double()), ("257", wide)):
        with pytest.raises(RuntimeError, match=f"(?s)triton.*{name}"):
            which_backend(tensor, "triton")
    assert which_backend(x["q"].clone().requires_grad_(), "triton").name == "triton", "gradients too"


@pytest.mark.parametrize("op", [chunk, fused], ids=["chunk", "fused"])
@pytest.mark.parametrize("case", ["plain", "packed", "raw", "half"])
def test_triton_differentiates(op, case, monkeypatch):
    """By its own kernels, one node in the graph, gradients in the dtype of their input; no second derivative."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, flags = make(33, 1, 2, 16, 16, lengths=(9, 0, 24) if case == "packed" else None), {}
    if case == "half":
        x |= {n: x[n].half() for n in "qkv"}
    if case == "raw":
        x |= {"A_log": torch.tensor([0.0, 1.0]), "dt_bias": torch.tensor([-1.0, 0.5]), "beta": -x["beta"]}
        flags = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    x = where_triton_runs(x)

    def oracle(q, k, v, g, beta, A_log=None, dt_bias=None, **rest):
        if case != "raw":
            return recurrence(q, k, v, g, beta, **rest)
        return recurrence(l2norm(q), l2norm(k), v, *gates(g, beta, A_log, dt_bias), **rest)

    found = run(op, x, backend="triton", **flags)
    assert all(found["d_" + n].dtype == t.dtype for n, t in x.items() if t.is_floating_point())
    assert_close(found, reference(x, oracle), 5e-3 if case == "half" else FP32_BOUND, x.get("cu_seqlens"))
    leaves = {n: t.detach().requires_grad_(n == "v") if t.is_floating_point() else t for n, t in x.items()}
    o, _ = op(**leaves, backend="triton", **flags)
    with pytest.raises(RuntimeError, match="no second derivative.*torch"):
        torch.autograd.grad(o.sum(), leaves["v"], create_graph=True)


@pytest.fixture
def by_triton(monkeypatch):
    """chunk_gated_delta_rule by the kernels, and the tensors of a small case where they run."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return by_backend("triton"), where_triton_runs(SMALL)


SMALL = make(9, 1, 2, 16, 16, decays="slow")
SUBSETS = {
    False: [("q", "v"), ("k", "g"), ("g", "beta", "initial_state")],
    True: [("v", "A_log"), ("beta", "dt_bias"), ("g", "A_log", "dt_bias", "initial_state")],
}


@pytest.mark.parametrize("gates_in_kernel", [False, True], ids=["gates", "raw"])
@pytest.mark.parametrize("backend", ["torch", "recurrent", "triton"])
def test_several_inputs_require_grad_and_the_others_do_not(backend, gates_in_kernel, request):
    """What is found for some is what is found for all, and nobody else is given any."""
    triton = backend == "triton"
    op, x = request.getfixturevalue("by_triton") if triton else (by_backend(backend), SMALL)
    x, flags = raw_flags(x, gates_in_kernel)
    x = where_triton_runs(x) if triton else x
    gen = rng("some")
    upstream = [randn(gen, *x[n].shape).to(x[n]) for n in ("v", "initial_state")]
    full = None
    for wrt in (tuple(x), *SUBSETS[gates_in_kernel]):
        leaves = {n: t.detach().requires_grad_(n in wrt) for n, t in x.items()}
        torch.autograd.backward(op(**leaves, **flags), upstream)
        found = {n: t.grad for n, t in leaves.items() if t.grad is not None}
        full = full or found
        assert set(found) == set(wrt)
        assert all(torch.allclose(d, full[n], rtol=1e-5, atol=1e-6) for n, d in found.items())


def test_autocast_does_not_reach_the_kernels(by_triton):
    """The dtypes of the inputs decide, forward and backward: the same bits as without."""
    op, x = by_triton
    plain = run(op, x)
    device = x["q"].device.type
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = run(op, x)
    assert all(cast[n].dtype == t.dtype and torch.equal(cast[n], t) for n, t in plain.items())
    x |= {n: x[n].half() for n in "qkv"}
    with torch.autocast(device, dtype=torch.bfloat16):
        o, S = op(**x)
    assert o.dtype == torch.float16 and S.dtype == torch.float32


UPSTREAM = {
    "expanded": lambda d: d.mean().expand(d.shape),
    "expanded-heads": lambda d: d[..., :1, :1].expand(d.shape),
    "transposed": lambda d: d.mT.contiguous().mT,
    "strided": lambda d: torch.stack([d, d], -1).flatten(-2)[..., ::2],
    "heads-first": lambda d: d.transpose(1, 2).contiguous().transpose(1, 2),
    "offset": lambda d: torch.cat([d.flatten(), d.new_zeros(1)]).roll(1)[1:].view(d.shape),
}


@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_upstream_gradients_of_any_strides(backend, kind, request):
    """Of o and of the state: what autograd hands over is seldom laid out as the results are."""
    op, x = request.getfixturevalue("by_triton") if backend == "triton" else (by_backend(backend), SMALL)
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    o, S = op(**leaves)
    gen = rng("strides")
    upstream = [UPSTREAM[kind](randn(gen, *y.shape).to(y)) for y in (o, S)]
    for d in upstream:
        assert kind == "offset" or not d.is_contiguous()
    found = torch.autograd.grad((o, S), list(leaves.values()), upstream, retain_graph=True)
    plain = torch.autograd.grad((o, S), list(leaves.values()), [d.contiguous().clone() for d in upstream])
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    wide = {n: t.detach().cpu().double().requires_grad_() for n, t in x.items()}
    right = torch.autograd.grad(recurrence(**wide), list(wide.values()), [d.cpu().double() for d in upstream])
    names, found = ["d_" + n for n in x], [d.cpu() for d in found]
    assert_close(dict(zip(names, found, strict=True)), dict(zip(names, right, strict=True)))


@pytest.mark.parametrize("lengths", [None, (0, 0)], ids=["dense", "packed"])
@pytest.mark.parametrize("gates_in_kernel", [False, True], ids=["gates", "raw"])
def test_no_tokens_by_triton(by_triton, lengths, gates_in_kernel):
    check_no_tokens(by_triton[0], lengths, gates_in_kernel, place=where_triton_runs)


# ---------------------------------------------------------------- dtypes

HALF, GATE = (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)


@on_forms
@pytest.mark.parametrize(
    "dtypes",
    list(itertools.product(HALF, GATE, GATE)),
    ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d),
)
def test_mixed_dtypes(dtypes, op):
    """g and beta are promoted to float32; o has v's dtype and the state is float32, correct to o's own rounding."""
    x = make(80, 1, 2, 8, 6, decays="slow")
    x = {
        n: t.to(dtypes[0] if n in "qkv" else dtypes[1] if n == "g" else dtypes[2] if n == "beta" else t.dtype)
        for n, t in x.items()
    }
    o, S = op(**x)
    o_ref, S_ref = recurrence(**x)
    assert o.dtype == dtypes[0] and S.dtype == torch.float32
    assert_close(
        {"o": o, "state": S},
        {"o": o_ref, "state": S_ref},
        {"o": 5e-3 if dtypes[0] == torch.bfloat16 else 6e-4, "state": FP32_BOUND},
    )


@on_forms
def test_v_alone_decides_the_dtype_of_o(op):
    x = make(20)
    for dtype in (*HALF, torch.float32):
        o, S = op(**(x | {"v": x["v"].to(dtype)}))
        assert o.dtype == dtype and S.dtype == torch.float32


@on_forms
def test_gradients_have_the_dtype_of_their_input(op):
    x = make(20, 1, 2)
    x |= {"q": x["q"].bfloat16(), "k": x["k"].bfloat16(), "v": x["v"].bfloat16(), "beta": x["beta"].half()}
    results = run(op, x)
    assert all(results["d_" + n].dtype == x[n].dtype for n in ("q", "k", "v", "g", "beta", "initial_state"))
    bound = {"o": 5e-3, "state": FP32_BOUND, "d_q": 5e-3, "d_k": 5e-3, "d_v": 5e-3, "d_beta": 6e-4, "*": FP32_BOUND}
    assert_close(results, reference(x), bound)


@on_forms
def test_float64_in_float64_out(op):
    x = make(70, 1, 2, dtype=torch.float64)
    o, S = op(**x)
    assert o.dtype == S.dtype == torch.float64
    o_ref, S_ref = recurrence(**x)
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref}, 1e-12)


@on_forms
def test_bfloat16_initial_state_is_read_as_it_is(op):
    x = make(20)
    x["initial_state"] = x["initial_state"].bfloat16()
    o, S = op(**x)
    assert S.dtype == torch.float32
    o_ref, S_ref = recurrence(**x)
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref})


# ---------------------------------------------------------------- the contract's values


@on_forms
def test_no_final_state_unless_asked(op):
    x = make(9)
    o, S = op(**x, output_final_state=False)
    assert S is None and torch.equal(o, op(**x)[0])


@on_forms
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_of_either_integer_type(dtype, op):
    x = make(H=1, HV=2, lengths=(20, 0, 45))
    results = run(op, x | {"cu_seqlens": x["cu_seqlens"].to(dtype)})
    assert_close(results, reference(x), cu_seqlens=x["cu_seqlens"])


@on_forms
def test_tokens_beyond_the_last_sequence(op):
    """Output 0 and gradient 0, whatever the tokens hold (NaN too), and no sequence at all is a case of it."""
    for lengths in ((20, 30), (0,), (0, 0)):
        x = make(70, 1, 2, 8, 6)
        n = sum(lengths)
        x |= {"initial_state": randn(rng("beyond"), len(lengths), 2, 8, 6).float(), "cu_seqlens": offsets(lengths)}
        clean = reference(x)
        for name in ("q", "k", "v", "g", "beta"):
            x[name][:, n:] = NAN
        results = run(op, x)
        assert not results["o"][:, n:].any() and not any(
            results["d_" + m][:, n:].any() for m in ("q", "k", "v", "g", "beta")
        )
        assert_close(results, clean, cu_seqlens=x["cu_seqlens"])


@on_forms
@pytest.mark.parametrize("T", [0, 1])
def test_no_tokens_and_one_token(T, op):
    x = make(T, 1, 2, B=2)
    check(op, x)
    results = run(op, x)
    assert results["o"].shape == (2, T, 2, 24)
    if T == 0:
        assert torch.equal(results["state"], x["initial_state"])
        assert torch.equal(op(**without(x, "initial_state"))[1], torch.zeros(2, 2, 16, 24))


@on_forms
def test_no_tokens_can_be_differentiated(op):
    """A loss over an empty batch of tokens is 0 with a gradient, not an error of autograd."""
    x = make(0, 1, 2)
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    o, S = op(**leaves)
    o.sum().backward()
    assert leaves["v"].grad.shape == x["v"].shape
    S.sum().backward()
    assert torch.equal(leaves["initial_state"].grad, torch.ones_like(S))


def raw_flags(x, gates_in_kernel):
    """The inputs with gate parameters and the flags that go with them, or as they are."""
    if not gates_in_kernel:
        return x, {}
    x = x | {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    return x, {
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def check_no_tokens(op, lengths, gates_in_kernel, state_v_first=False, place=lambda x: x):
    """Gradients of every input by itself and of all, of o and of the state, where no sequence has a token: zeros, and
    for the initial state what the final one is given. place: puts the tensors where they are wanted."""
    x = make(0 if lengths is None else sum(lengths), 1, 2, 16, 24, B=2 if lengths is None else 1, lengths=lengths)
    x, flags = raw_flags(x, gates_in_kernel)
    x = place(x)
    if state_v_first:
        x["initial_state"], flags["state_v_first"] = x["initial_state"].mT.contiguous(), True
    names = [n for n, t in x.items() if t.is_floating_point()]
    for wanted in (*([n] for n in names), names):
        leaves = {n: t.detach().requires_grad_(n in wanted) if n in names else t for n, t in x.items()}
        o, S = op(**leaves, **flags)
        assert o.shape == x["v"].shape and torch.equal(S, x["initial_state"])
        inputs = [leaves[n] for n in wanted]
        upstream = torch.ones_like(o), torch.randn_like(S)
        results = [(y, d) for y, d in zip((o, S), upstream, strict=True) if y.requires_grad]
        assert results[0][0] is o, "o is made of every input"
        # no allow_unused: an input without a gradient is an error
        outputs, gradients = zip(*results, strict=True)
        found = torch.autograd.grad(outputs, inputs, gradients)
        for name, leaf, d in zip(wanted, inputs, found, strict=True):
            assert d.shape == leaf.shape and d.dtype == leaf.dtype
            assert torch.equal(d, upstream[1]) if name == "initial_state" else not d.any(), name


@on_forms
@pytest.mark.parametrize("lengths", [None, (0,), (0, 0, 0)], ids=["dense", "packed", "packed-3"])
@pytest.mark.parametrize("state_v_first", [False, True], ids=["KV", "VK"])
@pytest.mark.parametrize("gates_in_kernel", [False, True], ids=["gates", "raw"])
def test_no_tokens_give_every_input_a_gradient_of_zeros(lengths, state_v_first, gates_in_kernel, op):
    """As the kernels do: whoever asks torch.autograd.grad for it does not have to know how many tokens there were."""
    check_no_tokens(op, lengths, gates_in_kernel, state_v_first)


@on_forms
def test_no_tokens_have_a_second_derivative(op):
    x = {n: t.requires_grad_() for n, t in make(0, 1, 2, dtype=torch.float64).items()}
    o, S = op(**x)
    d = torch.autograd.grad(o.sum() + S.square().sum(), list(x.values()), create_graph=True)
    (again,) = torch.autograd.grad(d[-1].sum(), x["initial_state"])
    assert torch.equal(again, torch.full_like(again, 2.0))


@on_forms
def test_tokens_of_no_sequence_give_every_input_a_gradient_of_zeros(op):
    """Sequences of no token in a row that has some: nothing is computed of them, NaN or not."""
    for lengths in ((0, 0), ()):
        x = make(5, 1, 2, 8, 6)
        x |= {n: torch.full_like(x[n], NAN) for n in ("q", "k", "v", "g", "beta")}
        x |= {"initial_state": torch.rand(len(lengths), 2, 8, 6)}
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        o, S = op(**x, cu_seqlens=offsets(lengths))
        found = torch.autograd.grad(o.sum() + S.sum(), list(leaves.values()))
        assert not o.any() and not any(d.any() for d in found[:-1]) and (found[-1] == 1).all()


@on_forms
def test_empty_batch(op):
    x = {n: t[:0] for n, t in make(5).items()}
    o, S = op(**x)
    assert o.shape == (0, 5, 2, 24) and S.shape == (0, 2, 16, 24)


@on_forms
def test_zero_decay_is_the_ungated_rule(op):
    """g = 0 is a legal decay: same as the delta rule written without any gate."""
    x = make(130, 2, K=16, V=16, decays="none", beta="unit")
    S, rows = x["initial_state"].double(), []
    for t in range(130):
        k, v, q = (x[n][:, t, :, None].double() for n in "kvq")
        S = S + x["beta"][:, t, :, None, None].double() * k.mT @ (v - k @ S)
        rows.append((q @ S)[:, :, 0] / 4)
    o, state = op(**x)
    assert_close({"o": o, "state": state}, {"o": torch.stack(rows, 1), "state": S})


@on_forms
def test_minus_infinity_is_an_exact_reset(op):
    """What came before token 33 is gone, forward and backward: bit for bit what a fresh start gives there."""
    x = make(70, 2, decays="slow")
    x["g"][:, 33] = float("-inf")
    results = run(op, x)
    assert_close(results, reference(x))
    other = {n: t.clone() for n, t in x.items()}
    for n in ("q", "k", "v", "beta"):
        other[n][:, :33] = other[n].flip(1)[:, 37:]
    other["initial_state"] *= -100.0
    again = run(op, other)
    assert torch.equal(results["o"][:, 33:], again["o"][:, 33:]) and torch.equal(results["state"], again["state"])
    assert not results["d_g"][:, 33].any()
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}  # gradients of later outputs do not cross it
    d = torch.autograd.grad(op(**leaves)[0][:, 33:].sum(), list(leaves.values()))
    assert not d[-1].any() and not any(t[:, :33].any() for t in d[:-1])


@on_forms
@pytest.mark.parametrize("g", [-88.0, -104.0, -1e4, -3.4e38], ids=str)
def test_small_decays_after_a_huge_one_keep_their_precision(g, op):
    x = make(64, 1, decays="slow")
    x["g"][:, 1] = g
    results = run(op, x)
    assert_close(results, reference(x))


@on_forms
@pytest.mark.parametrize("normalise", [False, True], ids=["as-is", "l2norm"])
def test_zero_rows_of_q_and_k(normalise, op):
    """Output 0 where q is 0, nothing written where k is 0, and gradients that stay modest."""
    x = make(70, 1, 2)
    x["q"][:, 5:9] = 0
    x["k"][:, 7:20] = 0
    results = run(op, x, use_qk_l2norm_in_kernel=normalise)
    assert not results["o"][:, 5:9].any()
    limit = 1e3 if normalise else 1.0  # 1/sqrt(1e-6)
    for n in ("q", "k"):
        d = results["d_" + n]
        assert d.isfinite().all() and d[:, 7:9].abs().max() <= limit * 100

    def oracle(q, k, **rest):
        return recurrence(l2norm(q), l2norm(k), **rest) if normalise else recurrence(q, k, **rest)

    assert_close(results, reference(x, oracle))


@on_forms
def test_initial_state_is_never_written(op):
    x = make(40, 2, decays="slow")
    kept = {n: t.clone() for n, t in x.items()}
    _, S = op(**x)
    assert all(torch.equal(x[n], t) for n, t in kept.items())
    S.zero_()
    assert torch.equal(x["initial_state"], kept["initial_state"])
    empty = {n: t[:, :0] for n, t in x.items() if n != "initial_state"} | {"initial_state": x["initial_state"]}
    op(**empty)[1].zero_()  # with no token the state passes through, but as a copy
    assert torch.equal(x["initial_state"], kept["initial_state"])


@on_forms
def test_state_v_first_is_the_transposed_state_in_and_out(op):
    x = make(70, 1, 2, K=16, V=24)
    o, S = op(**x)
    flipped = x | {"initial_state": x["initial_state"].mT}
    o_v, S_v = op(**flipped, state_v_first=True)
    assert S_v.shape == (1, 2, 24, 16) and torch.equal(o, o_v) and torch.equal(S, S_v.mT)
    with pytest.raises(ValueError, match="initial_state"):
        op(**x, state_v_first=True)


@on_forms
def test_l2norm_flag(op):
    x = make(70, 1, 2)
    x |= {"q": 3.0 * x["q"], "k": 0.01 * x["k"]}
    o, S = op(**x, use_qk_l2norm_in_kernel=True)
    o_ref, S_ref = recurrence(**(x | {"q": l2norm(x["q"]), "k": l2norm(x["k"])}))
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref})


@on_forms
@pytest.mark.parametrize("allow", [False, True])
def test_beta_flags(allow, op):
    x = make(70, 1, 2)
    x["beta"] = randn(rng("logits"), 1, 70, 2).float()
    o, S = op(**x, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow)
    beta = x["beta"].double().sigmoid() * (2.0 if allow else 1.0)
    o_ref, S_ref = recurrence(**(x | {"beta": beta}))
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref})


@on_forms
def test_gate_flag(op):
    x = make(70, 1, 2)
    A_log, dt_bias = torch.tensor([0.5, 2.0]), torch.tensor([-1.0, 0.3])
    a = randn(rng("a"), 1, 70, 2).float()
    o, S = op(**(x | {"g": a}), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    o_ref, S_ref = recurrence(**(x | {"g": gates(a, a, A_log, dt_bias)[0]}))
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref})


def test_unnormalised_keys_are_documented():
    """beta = 2 with unit keys is a reflection, and allowed: the bound is not a strict one."""
    text = inspect.getdoc(chunk_gated_delta_rule)
    assert "must not exceed 2" in text and "below 2" not in text
    assert "beta" in text and ("norm" in text or "‖" in text) and "2" in text and "diverge" in text


def test_docstrings_say_shapes_and_where_the_rest_is_told():
    text = inspect.getdoc(chunk_gated_delta_rule)
    missing = [n for n in (*parameters(chunk_gated_delta_rule), "[B, T, H, K]", "[N, HV, K, V]") if n not in text]
    assert not missing
    assert "chunk_gated_delta_rule" in inspect.getdoc(fused_recurrent_gated_delta_rule)


# ---------------------------------------------------------------- which inputs require grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_subset_of_inputs_requiring_grad(backend):
    x = make(40, 1, 2, 6, 5, decays="slow")
    names = list(x)
    full = run(by_backend(backend), x)
    for size in range(len(names) + 1):
        for wrt in itertools.combinations(names, size):
            some = run(by_backend(backend), x, wrt=wrt)
            assert set(some) == {"o", "state"} | {"d_" + n for n in wrt}
            assert all(torch.allclose(t, full[n], rtol=1e-5, atol=1e-6) for n, t in some.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_one_output_only(backend):
    x = make(40, 1, 2, 6, 5)
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    o, S = by_backend(backend)(**leaves, output_final_state=False)
    assert S is None
    d = torch.autograd.grad(o.sum(), list(leaves.values()))
    d_ref = torch.autograd.grad(
        recurrence(**{n: t.double() for n, t in leaves.items()})[0].sum(), list(leaves.values())
    )
    names = ["d_" + n for n in x]
    assert_close(dict(zip(names, d, strict=True)), dict(zip(names, d_ref, strict=True)))


def test_keys_longer_than_one_diverge_as_the_recurrence_does():
    gen = rng("diverge")
    x = make(24, 1, K=64, V=16)
    x["k"] = randn(gen, 1, 24, 1, 64).float()
    x["beta"] = torch.full_like(x["beta"], 0.5)
    x["g"] = torch.zeros_like(x["g"])
    o, S = chunk(**x)
    o_ref, S_ref = recurrence(**x)
    assert o_ref.abs().max() > 1e5  # no clamping: the numbers are the recurrence's
    assert_close({"o": o, "state": S}, {"o": o_ref, "state": S_ref}, 2e-5)
    assert unit(x["k"]).norm(dim=-1).max() < 1.001


@pytest.mark.parametrize("setting", ["1", "0", None])
def test_recompute_states_outside_and_within(setting):
    """Where a process begins, and that every block ends as it began, whatever happens in it."""
    code = """
import contextlib
from gdn_ref import ops, recompute_states
seen = [ops._States.made_again]
with contextlib.suppress(ZeroDivisionError), recompute_states(not seen[0]):
    seen.append(ops._States.made_again)
    1 / 0
print(*seen, ops._States.made_again)
"""
    environment = {n: v for n, v in os.environ.items() if n != "GDN_REF_RECOMPUTE"}
    environment |= {} if setting is None else {"GDN_REF_RECOMPUTE": setting}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    begins = setting == "1"
    assert ran.stdout.split() == [str(begins), str(not begins), str(begins)]
