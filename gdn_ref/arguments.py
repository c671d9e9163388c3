"""The contract for every input: all checks of the public functions, in one place (l2norm's is beside it, in gates.py).

Every message names the argument, says what was found and what was expected. Shapes, dtypes and devices are always
checked; values (cu_seqlens, cache_indices) only where they lie on the CPU, or on a GPU if GDN_REF_VALIDATE=1, since
reading them there waits for the device.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from .gates import at_least_float32

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
MOST_DECODE_TOKENS = 8
BACKENDS = ("auto", "triton", "torch", "recurrent")


class Sizes(NamedTuple):
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def check_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    *,
    scale,
    initial_state,
    state_v_first,
    cu_seqlens,
    use_beta_sigmoid_in_kernel,
    allow_neg_eigval,
    use_gate_in_kernel,
    A_log,
    dt_bias,
    chunk_size=64,
) -> Sizes:
    """Check the arguments of the two delta-rule functions: q, k [B,T,H,K]; v [B,T,HV,V]; g, beta [B,T,HV] or None."""
    sizes = _check_qkv(q, k, v, lead="B, T", names=("B", "T"))
    B, T, H, HV, K, V, _ = sizes
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            check_tensor(name, x, FLOATS, {"B": B, "T": T, "HV": HV}, device=q.device)
    _check_scale(scale)
    check_chunk_size(chunk_size)
    N = check_cu_seqlens(cu_seqlens, T, B)
    state = {"N": N, "HV": HV, "V": V, "K": K} if state_v_first else {"N": N, "HV": HV, "K": K, "V": V}
    if initial_state is not None:
        check_tensor("initial_state", initial_state, FLOATS, state, device=q.device)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: found True without use_beta_sigmoid_in_kernel, expected both (it doubles the "
            "sigmoid), or a beta in [0, 2] passed as it is"
        )
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError("beta: found None with use_beta_sigmoid_in_kernel=True, expected the raw gate b [B, T, HV]")
    _check_gate_parameters(use_gate_in_kernel, g, A_log, dt_bias, HV, q.device)
    return sizes._replace(N=N)


def check_pool_call(q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, cu_seqlens, chunk_size, fresh) -> Sizes:
    """Check the arguments of the serving functions. q, k: [T,H,K]; v: [T,HV,V]; a, b: [T,HV]; see serving.py."""
    sizes = _check_qkv(q, k, v, lead="total_tokens", names=("total_tokens",))
    _, T, H, HV, K, V, _ = sizes
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, FLOATS, {"total_tokens": T, "HV": HV}, device=q.device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(name, x, FLOATS, {"HV": HV}, device=q.device)
    check_chunk_size(chunk_size)
    if cu_seqlens is None:
        raise TypeError("cu_seqlens: found None, expected an int32 or int64 tensor [batch_size + 1]")
    N = check_cu_seqlens(cu_seqlens, T, 1)
    _check_pool(state_pool, HV, V, K, q.device)
    check_tensor("cache_indices", cache_indices, INTEGERS, {"batch_size": N})
    if fresh is not None:
        check_tensor("has_initial_state", fresh, (torch.bool,), {"batch_size": N})
    if readable(cache_indices):
        _check_slots(cache_indices.tolist(), len(state_pool))
    return sizes._replace(N=N)


def check_decode_call(q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, fresh) -> None:
    """Check the arguments of gdn_decode but for the slots' values. q, k: [N,T,H,K]; v: [N,T,HV,V]; a, b: [N,T,HV]."""
    names = ("batch_size", "tokens")
    N, T, _, HV, K, V, _ = _check_qkv(q, k, v, lead=", ".join(names), names=names)
    if not 1 <= T <= MOST_DECODE_TOKENS:
        raise ValueError(
            f"q: found {T} tokens a request in shape {list(q.shape)}, expected 1 to {MOST_DECODE_TOKENS}; "
            "gdn_extend_chunkwise takes more"
        )
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, FLOATS, {"batch_size": N, "tokens": T, "HV": HV}, device=q.device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(name, x, FLOATS, {"HV": HV}, device=q.device)
    _check_pool(state_pool, HV, V, K, q.device)
    check_tensor("cache_indices", cache_indices, INTEGERS, {"batch_size": N}, device=q.device)
    if fresh is not None:
        check_tensor("has_initial_state", fresh, (torch.bool,), {"batch_size": N}, device=q.device)


def check_rollback_call(states, accepted, state_pool, cache_indices) -> None:
    """Check the arguments of gdn_rollback but for values. states: [N,T,HV,V,K]; accepted, cache_indices: [N]."""
    axes = dict.fromkeys(("batch_size", "tokens", "HV", "V", "K"))
    check_tensor("states", states, FLOATS, axes)
    N, _, HV, V, K = states.shape
    _check_pool(state_pool, HV, V, K, states.device)
    if states.dtype != state_pool.dtype:
        raise ValueError(f"states: found dtype {states.dtype}, expected the pool's, {state_pool.dtype}")
    for name, x in (("accepted", accepted), ("cache_indices", cache_indices)):
        check_tensor(name, x, INTEGERS, {"batch_size": N}, device=states.device)


def check_slots(cache_indices: Tensor, pool_size: int) -> None:
    """Every slot is -1 or in the pool, none named twice; looked at where the values may be read."""
    if readable(cache_indices):
        _check_slots(cache_indices.tolist(), pool_size)


def check_accepted(accepted: Tensor, cache_indices: Tensor, tokens: int) -> None:
    """Requests that are not skipped accept 1 to all of their tokens; looked at where the values may be read."""
    if not readable(accepted):
        return
    for row, (n, slot) in enumerate(zip(accepted.tolist(), cache_indices.tolist(), strict=True)):
        if slot >= 0 and not 1 <= n <= tokens:
            raise ValueError(f"accepted: found {n} at {row}, expected 1 to {tokens}, the tokens of the decode call")


STAGE_AXES = {
    **dict.fromkeys(("q", "k"), ("B", "T", "H", "K")),
    **dict.fromkeys(("v", "u", "delta"), ("B", "T", "HV", "V")),
    **dict.fromkeys(("g", "beta"), ("B", "T", "HV")),
    "w": ("B", "T", "HV", "K"),
    "A": ("B", "T", "HV", "chunk_size"),
}


def check_stage(cu_seqlens, chunk_size, **tensors) -> None:
    """Check the tensors of one stage of the chunkwise pass, by the axes in STAGE_AXES. Of several g may be None.

    The size that most of them give an axis is taken as the meant one, so that the odd one out is named.
    """
    check_chunk_size(chunk_size)
    if len(tensors) > 1 and tensors.get("g", tensors) is None:
        del tensors["g"]
    for name, x in tensors.items():
        check_tensor(name, x, FLOATS, dict.fromkeys(STAGE_AXES[name]))
    votes: dict[str, Counter] = {}
    for name, x in tensors.items():
        for axis, size in zip(STAGE_AXES[name], x.shape, strict=True):
            votes.setdefault(axis, Counter())[size] += 1
    meant = {axis: sizes.most_common(1)[0][0] for axis, sizes in votes.items()} | {"chunk_size": chunk_size}
    for name, x in tensors.items():
        check_tensor(name, x, FLOATS, {axis: meant[axis] for axis in STAGE_AXES[name]})
        if STAGE_AXES[name][2] == "H" and "HV" in meant and (not meant["H"] or meant["HV"] % meant["H"]):
            raise ValueError(f"{name}: found H = {meant['H']} key heads, expected a divisor of HV = {meant['HV']}")
    check_cu_seqlens(cu_seqlens, meant["T"], meant["B"])


def check_tensor(
    name: str, x, dtypes: tuple, shape: dict[str, int | None], device: torch.device | None = None
) -> None:
    """Type, dtype, shape ({"B": 2, "K": None} names the axes; None is any size) and device of one argument."""
    axes = "[" + ", ".join(shape) + "]"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: found {type(x).__name__}, expected a tensor {axes}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: found dtype {x.dtype}, expected {' or '.join(str(d) for d in dtypes)}")
    sizes = [size if size is not None else found for size, found in zip(shape.values(), x.shape, strict=False)]
    if x.dim() != len(shape) or list(x.shape) != sizes:
        wanted = ", ".join(axis if size is None else f"{axis} = {size}" for axis, size in shape.items())
        raise ValueError(f"{name}: found shape {list(x.shape)}, expected {axes} with {wanted}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: found on device {x.device}, expected {device}, where q is")


def check_chunk_size(chunk_size) -> None:
    """chunk_size is a whole number from 1 to 256."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size: found {type(chunk_size).__name__}, expected an int")
    if not 1 <= chunk_size <= 256:
        raise ValueError(f"chunk_size: found {chunk_size}, expected a number from 1 to 256")


def check_backend(backend) -> None:
    """backend is one of BACKENDS."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: found {backend!r}, expected one of {', '.join(map(repr, BACKENDS))}")


def check_backend_query(x, others) -> None:
    """What which_backend is asked about: a tensor x with an axis at least, and further tensors or None."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: found {type(x).__name__}, expected a tensor")
    if not x.dim():
        raise ValueError("x: found a tensor without axes, expected the head width as its last one")
    if not isinstance(others, (tuple, list)):
        raise TypeError(f"others: found {type(others).__name__}, expected a tuple of tensors or None")
    for n, other in enumerate(others):
        if other is not None and not isinstance(other, Tensor):
            raise TypeError(f"others[{n}]: found {type(other).__name__}, expected a tensor or None")


def check_cu_seqlens(cu_seqlens, T: int, B: int) -> int:
    """Check sequence boundaries [N+1] over T tokens; returns N, which is B without them."""
    if cu_seqlens is None:
        return B
    check_tensor("cu_seqlens", cu_seqlens, INTEGERS, {"N + 1": None})
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: found no entry, expected N + 1 boundaries, the first of them 0")
    if B != 1:
        raise ValueError(f"cu_seqlens: found with a batch of B = {B}, expected B = 1, all sequences packed in one row")
    if readable(cu_seqlens):
        _check_boundaries(cu_seqlens.tolist(), T)
    return cu_seqlens.shape[0] - 1  # len() would make a number of it for the compiler


def compute_dtype(*inputs: Tensor) -> torch.dtype:
    """The dtype of the arithmetic and of the state: float64 if one of the inputs is, else float32."""
    return at_least_float32(*(x.dtype for x in inputs))


def readable(x: Tensor) -> bool:
    """Whether the values of x may be looked at: on the CPU always, on a GPU with GDN_REF_VALIDATE=1."""
    return x.device.type == "cpu" or os.environ.get("GDN_REF_VALIDATE") == "1"


def _check_qkv(q, k, v, lead: str, names: tuple[str, ...]) -> Sizes:
    free = dict.fromkeys(names)
    check_tensor("q", q, FLOATS, {**free, "H": None, "K": None})
    *lead_sizes, H, K = q.shape
    known = dict(zip(names, lead_sizes, strict=True))
    check_tensor("k", k, FLOATS, {**known, "H": H, "K": K}, device=q.device)
    check_tensor("v", v, FLOATS, {**known, "HV": None, "V": None}, device=q.device)
    HV, V = v.shape[-2:]
    for name, x, axis, size in (("q", q, "H", H), ("q", q, "K", K), ("v", v, "V", V)):
        if size < 1:
            raise ValueError(f"{name}: found {axis} = 0 in shape {list(x.shape)}, expected {axis} >= 1")
    if HV < 1 or HV % H:
        raise ValueError(f"v: found HV = {HV} value heads for H = {H} query/key heads, expected a multiple of H")
    B = lead_sizes[0] if len(names) == 2 else 1
    return Sizes(B, lead_sizes[-1], H, HV, K, V, B)


def _check_scale(scale) -> None:
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: found {type(scale).__name__}, expected a Python number, or None for K**-0.5")
    if not abs(scale) <= sys.float_info.max:  # NaN, infinite, or a whole number that no float can hold
        found = scale if isinstance(scale, float) else "a whole number beyond 1e308"
        raise ValueError(f"scale: found {found}, expected a finite number, or None for K**-0.5")


def _check_gate_parameters(in_kernel: bool, g, A_log, dt_bias, HV: int, device: torch.device) -> None:
    given = {name: x for name, x in (("A_log", A_log), ("dt_bias", dt_bias)) if x is not None}
    if not in_kernel:
        for name in given:
            raise ValueError(f"{name}: found with use_gate_in_kernel=False, expected None: g is the decay already")
        return
    for name, x in (("g", g), ("A_log", A_log)):
        if x is None:
            what = "the raw gate a [B, T, HV]" if name == "g" else "a tensor [HV]"
            raise ValueError(f"{name}: found None with use_gate_in_kernel=True, expected {what}")
    for name, x in given.items():
        check_tensor(name, x, FLOATS, {"HV": HV}, device=device)


def _check_boundaries(bounds: list[int], T: int) -> None:
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: found a first boundary of {bounds[0]}, expected 0")
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(f"cu_seqlens: found {start} then {end} at {n} and {n + 1}, expected no decrease")
    if bounds[-1] > T:
        raise ValueError(f"cu_seqlens: found a last boundary of {bounds[-1]}, expected at most T = {T}")


def _check_pool(pool, HV: int, V: int, K: int, device: torch.device) -> None:
    if isinstance(pool, Tensor) and pool.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"state_pool: found dtype {pool.dtype}, expected torch.float32 or torch.bfloat16")
    check_tensor("state_pool", pool, FLOATS, {"pool_size": None, "HV": HV, "V": V, "K": K}, device=device)
    if pool.stride(-1) != 1 and K > 1:
        raise ValueError(f"state_pool: found an inner stride of {pool.stride(-1)}, expected 1 along K")


def _check_slots(slots: list[int], pool_size: int) -> None:
    seen: dict[int, int] = {}
    for row, slot in enumerate(slots):
        if not -1 <= slot < pool_size:
            raise ValueError(
                f"cache_indices: found slot {slot} at {row}, expected -1 (skip) or 0 to {pool_size - 1}, "
                f"the pool's {pool_size} slots"
            )
        if slot >= 0 and slot in seen:
            raise ValueError(f"cache_indices: found slot {slot} at both {seen[slot]} and {row}, expected distinct ones")
        seen[slot] = row
