"""From one call to everybody's own: names, layouts, gates, states. And finding the implementations to check.

    sequence   FLA's names (q, k, v, g, beta, ...), or transformers' (query, key, value, ...), state [N,HV,K,V]
    alpha      FlashInfer: packed tokens [T,H,K], the decay itself and not its logarithm, state [N,HV,V,K]
    pool       pymllm: packed tokens, raw gates, states [pool,HV,V,K] updated in place
    step       one token: step(q, k, v, g, beta, state) -> (o, state), queries scaled, heads repeated

An adapter asks for nothing that the signature does not name: a function that swallows unknown keywords would ignore it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .records import FEATURES, Call, Implementation, Offers, Result

ASSUMED = ("batch", "gva", "widths", "gradients", "large_beta", "default_scale")
BY_PARAMETER = {
    "initial_state": "initial_state",
    "output_final_state": "final_state",
    "cu_seqlens": "packed",
    "scale": "scale",
    "use_qk_l2norm_in_kernel": "l2norm",
    "state_v_first": "state_v_first",
    "chunk_size": "chunk_size",
    "A_log": "raw_gates",
}
POOL_FEATURES = ("batch", "packed", "gva", "widths", "initial_state", "final_state", "normalises", "raw_gates", "pool",
                 "default_scale", "chunk_size")  # fmt: skip
STEP_FEATURES = ("batch", "widths", "initial_state", "final_state", "gradients", "large_beta")
SIXTEEN_BITS = ("bfloat16", "float16")


class LoadError(Exception):
    """The implementation asked for cannot be had; the message says why."""


def name_of(function: Callable) -> str:
    """What to call it in a message; a partial function has no name of its own."""
    return getattr(function, "__name__", type(function).__name__)


# ---- a sequence at a time --------------------------------------------------------------------------------------------


def sequence(function: Callable, names: tuple[str, str, str] = ("q", "k", "v")) -> tuple[Callable, frozenset]:
    """run, and the features its signature names, of a function with FLA's signature.

    names: what it calls q, k and v. Everything goes by keyword: siblings differ in the order of g and beta.
    """
    parameters = inspect.signature(function).parameters
    if missing := [n for n in (*names, "g", "beta") if n not in parameters]:
        found = f"{name_of(function)}({', '.join(parameters)})"
        raise LoadError(f"found the signature {found}, expected parameters named {', '.join(missing)}; see --adapter")

    def run(call: Call) -> Result:
        kwargs = dict(zip(names, call[:3], strict=True), g=call.g, beta=call.beta)
        kwargs |= {n: getattr(call, n) for n in ("initial_state", "cu_seqlens", "scale", "chunk_size")
                   if getattr(call, n) is not None}  # fmt: skip
        kwargs |= {"output_final_state": True} if "output_final_state" in parameters else {}
        kwargs |= {"use_qk_l2norm_in_kernel": True} if call.l2norm else {}
        kwargs |= {"state_v_first": True} if call.state_v_first else {}
        if call.A_log is not None:
            kwargs |= dict(A_log=call.A_log, dt_bias=call.dt_bias)
            kwargs |= {n: True for n in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel") if n in parameters}
        out = function(**kwargs)
        if not isinstance(out, tuple | list):
            return Result(out, None)
        if len(out) != 2:
            raise ValueError(f"found {len(out)} results, expected (o, final state), or o alone")
        return Result(*out)

    named = {feature for parameter, feature in BY_PARAMETER.items() if parameter in parameters}
    return run, frozenset({*ASSUMED, *named})


def flattened(call: Call) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g, beta as packed tokens [T,...] and their boundaries, whether they came packed or as a batch."""
    B, T = call.v.shape[:2]
    bounds = call.cu_seqlens
    if bounds is None:
        bounds = torch.arange(B + 1, device=call.v.device) * T
    return [x.flatten(0, 1) if B > 1 else x[0] for x in call[:5]], bounds


def alpha(function: Callable) -> tuple[Callable, frozenset]:
    """FlashInfer's prefill: packed, the decay as alpha = e^g, gates float32, state [N,HV,V,K]."""

    def run(call: Call) -> Result:
        (q, k, v, g, beta), bounds = flattened(call)
        state = None if call.initial_state is None else call.initial_state.mT.contiguous()
        out = function(
            q.contiguous(), k.contiguous(), v.contiguous(), g=g.float().exp(), beta=beta.float(), scale=call.scale,
            initial_state=state, output_final_state=True, cu_seqlens=bounds,
        )  # fmt: skip
        return Result(out[0].view(call.v.shape), out[1].mT)

    features = ("batch", "packed", "gva", "initial_state", "final_state", "scale", "default_scale")
    return run, frozenset(features)


# ---- over a pool -----------------------------------------------------------------------------------------------------


def raw_from(g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """a and b, float32, with g = -softplus(a) and beta = sigmoid(b); the ends of both ranges by large numbers."""
    g, beta = -g.double(), beta.double()
    a = torch.where(g > 20, g, torch.expm1(g.clamp(max=20)).log()).clamp(-1e4, 1e30)
    return a.float(), torch.logit(beta).clamp(-1e4, 1e4).float()


def pool(function: Callable) -> tuple[Callable, frozenset]:
    """pymllm's prefill, and gdn_decode's kind: a call becomes requests in slots 1 to N of a pool of N + 2."""
    parameters = inspect.signature(function).parameters
    wanted = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_pool", "cache_indices")
    if missing := [n for n in wanted if n not in parameters]:
        found = f"{name_of(function)}({', '.join(parameters)})"
        raise LoadError(f"found the signature {found}, expected parameters named {', '.join(missing)}; see --adapter")

    def run(call: Call) -> Result:
        (q, k, v, g, beta), bounds = flattened(call)
        (HV, V), K, N = v.shape[1:], q.shape[-1], len(bounds) - 1
        states = torch.zeros(N + 2, HV, V, K, device=v.device)
        if call.initial_state is not None:
            states[1:-1] = call.initial_state.mT
        A_log, dt_bias = call.A_log, call.dt_bias
        if A_log is None:
            g, beta = raw_from(g, beta)
            A_log = dt_bias = torch.zeros(HV, device=v.device)
        slots = torch.arange(1, N + 1, device=v.device)
        kwargs = {} if call.chunk_size is None else {"chunk_size": call.chunk_size}
        o = function(q, k, v, g, beta, A_log, dt_bias, states, slots, bounds, **kwargs)
        return Result(o.view(call.v.shape), states[1:-1].mT)

    fresh = ("fresh",) if "has_initial_state" in parameters else ()
    return run, frozenset({*POOL_FEATURES, *fresh} - ({"chunk_size"} - set(parameters)))


def pool_step(function: Callable) -> Callable[[Call], Result]:
    """gdn_decode as a step: q [N,T,H,K] with a few tokens for every request."""

    def run(call: Call) -> Result:
        states = call.initial_state.mT.float().contiguous()
        a, b = raw_from(call.g, call.beta)
        zeros = torch.zeros(call.v.shape[2], device=call.v.device)
        slots = torch.arange(len(states), device=call.v.device)
        o = function(call.q, call.k, call.v, a, b, zeros, zeros, states, slots)
        return Result(o, states.mT)

    return run


# ---- token by token --------------------------------------------------------------------------------------------------


def step(function: Callable) -> tuple[Callable, frozenset]:
    """A function of one token: q, k [B,HV,K], v [B,HV,V], g, beta [B,HV], state [B,HV,K,V] -> (o [B,HV,V], state)."""

    def run(call: Call) -> Result:
        (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
        q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (call.q * K**-0.5, call.k))
        state = call.initial_state
        if state is None:
            state = torch.zeros(B, HV, K, V, dtype=call.g.dtype, device=q.device)
        outputs = []
        for t in range(T):
            o, state = function(q[:, t], k[:, t], call.v[:, t], call.g[:, t], call.beta[:, t], state)
            outputs.append(o)
        return Result(torch.stack(outputs, 1), state)

    return run, frozenset(STEP_FEATURES)


ADAPTERS = {
    "fla": sequence,
    "transformers": lambda function: sequence(function, ("query", "key", "value")),
    "flashinfer": alpha,
    "pymllm": pool,
    "step": step,
}


def guess(function: Callable) -> str:
    """The adapter that the parameters' names call for; FLA's where nothing speaks for another."""
    names = inspect.signature(function).parameters
    if "state_pool" in names:
        return "pymllm"
    if "query" in names:
        return "transformers"
    if "output_final_state" not in names and list(names)[-1:] == ["state"]:
        return "step"
    return "flashinfer" if getattr(function, "__module__", "").startswith("flashinfer") else "fla"


# ---- finding them ----------------------------------------------------------------------------------------------------


def ours(name: str, device: str) -> Implementation:
    """This package: the chunkwise function, the recurrent one, or serving over a pool."""
    import gdn_ref

    dtypes = ("float32", "bfloat16", "float16", "float64")
    if name == "gdn_ref.pool":
        run, features = pool(gdn_ref.gdn_extend_chunkwise)
        return Implementation(name, run, Offers(features | {"bfloat16_pool"}, dtypes[:3]), gdn_ref.__version__,
                              gdn_ref.gdn_extend_chunkwise, pool_step(gdn_ref.gdn_decode))  # fmt: skip
    recurrent, features = sequence(gdn_ref.fused_recurrent_gated_delta_rule)
    if name == "gdn_ref.recurrent":
        return Implementation(name, recurrent, Offers(features, dtypes), gdn_ref.__version__)
    run, features = sequence(gdn_ref.chunk_gated_delta_rule)
    return Implementation(name, run, Offers(features, dtypes), gdn_ref.__version__, step=recurrent)


def fla(name: str, device: str) -> Implementation:
    """flash-linear-attention's Triton functions (on a GPU), or its naive PyTorch forms.

    Where FlashQLA or TileLang is installed it would hand calls over to them; that is switched off.
    """
    os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="0")
    function, chunk = {
        "fla": ("chunk_gated_delta_rule", True),
        "fla.recurrent": ("fused_recurrent_gated_delta_rule", False),
        "fla.naive_chunk": ("naive_chunk_gated_delta_rule", True),
        "fla.naive_recurrent": ("naive_recurrent_gated_delta_rule", False),
    }[name]
    naive = "naive" in name
    run, features = sequence(find("fla.ops.gated_delta_rule.naive" if naive else "fla.ops.gated_delta_rule", function))
    if naive:
        offers = Offers(features - {"gva"}, ("float32",), chunk_sizes=(16, 32, 64))
        return Implementation(name, run, offers, version("fla-core"))
    if device == "cpu":
        raise LoadError("its Triton kernels need a GPU")
    offers = Offers(features | ({"chunk_size"} if chunk else set()), SIXTEEN_BITS)
    return Implementation(name, run, offers, version("fla-core"), refusal="on Hopper GPUs produces incorrect results")


def flash_qla(name: str, device: str) -> Implementation:
    """FlashQLA: bfloat16 and float16, K = V = 128, chunks of 64; it compiles for minutes for every pair of heads."""
    run, features = sequence(find("flash_qla", "chunk_gated_delta_rule"))
    offers = Offers(features - {"widths"}, SIXTEEN_BITS, widths=((128, 128),), heads=((2, 4),))
    return Implementation(name, run, offers, version("flash-qla"))


def flashinfer(name: str, device: str) -> Implementation:
    """FlashInfer's prefill: bfloat16 and float16, K = V = 128."""
    run, features = alpha(find("flashinfer.gdn_prefill", "chunk_gated_delta_rule"))
    return Implementation(name, run, Offers(features, SIXTEEN_BITS, widths=((128, 128),)), version("flashinfer-python"))


def transformers(name: str, device: str) -> Implementation:
    """transformers' own PyTorch functions, without the kernels that it swaps in where it finds them."""
    module = "transformers.models.qwen3_next.modeling_qwen3_next"
    kinds = ("chunk", "recurrent")
    chunk, recurrent = (inspect.unwrap(find(module, f"torch_{kind}_gated_delta_rule")) for kind in kinds)
    named = ("query", "key", "value")
    (run, features), (recurrent, lesser) = sequence(chunk, named), sequence(recurrent, named)
    if name == "transformers.recurrent":
        return Implementation(name, recurrent, Offers(lesser), version("transformers"))
    return Implementation(name, run, Offers(features), version("transformers"), step=recurrent)


BUILT_IN = {
    **dict.fromkeys(("gdn_ref", "gdn_ref.recurrent", "gdn_ref.pool"), ours),
    **dict.fromkeys(("fla", "fla.recurrent", "fla.naive_chunk", "fla.naive_recurrent"), fla),
    "flash_qla": flash_qla,
    "flashinfer": flashinfer,
    **dict.fromkeys(("transformers", "transformers.recurrent"), transformers),
}
OURS = ("gdn_ref", "gdn_ref.recurrent", "gdn_ref.pool")


def load(spec: str, device: str = "cpu", adapter: str | None = None, without: Iterable[str] = (),
         limits: dict | None = None) -> Implementation:  # fmt: skip
    """The implementation under a name of BUILT_IN, or package.module:function.  LoadError says why there is none.

    adapter: a name of ADAPTERS, guessed from the signature if None. without: features it lacks though its signature
    does not show it. limits: fields of Offers, such as dtypes, to put in the place of what is known.
    """
    try:
        if ":" in spec:
            implementation = _of_function(spec, adapter)
        elif spec in BUILT_IN:
            implementation = BUILT_IN[spec](spec, device)
        else:
            raise LoadError(f"found {spec!r}, expected package.module:function or one of {', '.join(BUILT_IN)}")
    except LoadError:
        raise
    except Exception as error:  # whatever an import of somebody else's code raises is what there is to report
        raise LoadError(f"{type(error).__name__}: {error}") from error
    offers = implementation.offers._replace(**limits or {})
    return implementation._replace(offers=offers._replace(features=offers.features - set(without)))


def _of_function(spec: str, adapter: str | None) -> Implementation:
    module, _, name = spec.partition(":")
    function = find(module, name)
    if not callable(function):
        raise LoadError(f"{spec} is a {type(function).__name__}, expected a function")
    adapter = adapter or guess(function)
    run, features = ADAPTERS[adapter](function)
    extend = function if adapter == "pymllm" else None
    dtypes = SIXTEEN_BITS if adapter == "flashinfer" else Offers(frozenset()).dtypes
    return Implementation(spec, run, Offers(features, dtypes), version(module.partition(".")[0]), extend)


def find(module: str, name: str) -> Callable:
    """An attribute of a module, imported now; a dotted name goes deeper."""
    found = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{module} has no {name}")
        found = getattr(found, part)
    return found


def version(package: str) -> str:
    """The version of an installed distribution, or ""."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def lacking(needs: Iterable[str], offers: Offers) -> str:
    """Why a property that needs these features is not offered; "" if it is."""
    missing = [name for name in FEATURES if name in set(needs) - offers.features]
    if "pool" in missing:
        missing = ["pool"]  # what presupposes one goes without saying
    return "no " + ", no ".join(FEATURES[name] for name in missing) if missing else ""
