"""Prefill and decode over a pool of states.

The two prefill functions are those of pymllm under their own names and arguments. They compute the recurrence, not the
formula printed beside them there: its recursion for W has two factors swapped (3.6) and its U divides by the cumulative
decay (7.7).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import (
    check_accepted,
    check_decode_call,
    check_pool_call,
    check_rollback_call,
    check_slots,
    compute_dtype,
    readable,
)
from .gates import l2norm, raw_gates
from .ops import _announce, chunk_gated_delta_rule, which_backend
from .recurrent import recurrent_step

MOST_PLANS = 1000


def gdn_extend_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    cache_indices: Tensor,
    cu_seqlens: Tensor,
    chunk_size: int = 64,
    *,
    has_initial_state: Tensor | None = None,
) -> Tensor:
    """Extend every request by its new tokens, its state taken from and put back into the pool.

    q, k: [total_tokens, H, K], not normalised (the L2 norm with eps 1e-6 inside the root is applied here; the scale
    is
        K**-0.5); v: [total_tokens, HV, V]; a, b: [total_tokens, HV], raw gates: g = -exp(A_log) * softplus(a +
        dt_bias), beta = sigmoid(b); A_log, dt_bias: [HV].
    state_pool: [pool_size, HV, V, K], the state transposed, float32 or bfloat16 (the arithmetic is float32 either
    way),
        updated in place at the listed slots alone. It may be a strided view; its last stride must be 1.
    cache_indices: [batch_size] int32 or int64, the slot of each request; -1 skips the request: output 0, no slot
    touched.
    cu_seqlens: [batch_size + 1] int32 or int64, the requests' boundaries. Tokens beyond the last give 0.
    has_initial_state: [batch_size] bool; where False the request starts from zero whatever its slot holds, NaN
    included.
        None: every request goes on from its slot.

    Returns [total_tokens, HV, V] in v's dtype. Nothing is differentiable here. Raises ValueError or TypeError,
    naming the
    argument, before the pool is touched: a slot out of range or named twice, another pool dtype or layout, wrong
    sizes.

    Source: book chapters 5 and 11.
    """
    return _extend(
        q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, cu_seqlens, chunk_size, has_initial_state, "auto"
    )


def gdn_extend_chunkwise_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    cache_indices: Tensor,
    cu_seqlens: Tensor,
    chunk_size: int = 128,
    *,
    has_initial_state: Tensor | None = None,
) -> Tensor:
    """gdn_extend_chunkwise on the torch backend, whatever the device.

    Arguments, result and errors are those of gdn_extend_chunkwise; only the default of chunk_size differs.
    """
    return _extend(
        q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, cu_seqlens, chunk_size, has_initial_state, "torch"
    )


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    cache_indices: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    state_after_each: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Advance every request by its next tokens, 1 to 8 of them, its state taken from and put back into the pool.

    q, k: [N, T, H, K], not normalised (L2 norm and scale K**-0.5 as in gdn_extend_chunkwise); v: [N, T, HV, V];
    a, b: [N, T, HV], raw gates; A_log, dt_bias: [HV].
    state_pool: [pool_size, HV, V, K], the state transposed, float32 or bfloat16, updated in place at the listed slots
        alone, in its own dtype. It may be a strided view; its last stride must be 1.
    cache_indices: [N] int32 or int64, the slot of each request; -1 skips it: output 0, no slot touched.
    has_initial_state: [N] bool; where False the request starts from zero whatever its slot holds. None: all go on.
    state_after_each: also return the state after each token, so that gdn_rollback can undo rejected draft tokens.

    Returns o [N, T, HV, V] in v's dtype, or with state_after_each (o, states [N, T, HV, V, K] in the pool's dtype), of
    which states[:, -1] is what the pool holds now. Arithmetic is float32, in the pool's dtype only between calls. A
    float16 output overflows to inf beyond 65504.

    On a GPU this is one kernel. It waits for nothing and reads no index on the host, so it can be captured in a CUDA
    graph whose replays find other slots, flags and inputs in the same tensors; call it once before, to compile.
    Raises ValueError or TypeError, naming the argument, before the pool is touched; what slots hold is checked on the
    CPU, on a GPU with GDN_REF_VALIDATE=1 only. Nothing is differentiable here.

    Source: book (1.1), chapter 11.
    """
    call = (q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, has_initial_state)
    run = _decode_plan(call, bool(state_after_each))
    check_slots(cache_indices, len(state_pool))
    o, states = run(*call)
    return (o, states) if state_after_each else o


def gdn_rollback(states: Tensor, accepted: Tensor, state_pool: Tensor, cache_indices: Tensor) -> None:
    """Put the state after the accepted tokens of a decode call back into the pool; the rejected ones are forgotten.

    states: [N, T, HV, V, K], from gdn_decode with state_after_each; accepted: [N] int32 or int64, 1 to T (the first
        token of a verification is no draft: it was sampled before).
    state_pool, cache_indices: those of the decode call. Slot -1 is skipped.

    The slot then holds what gdn_decode of the accepted tokens alone would have left: bitwise on a CPU, to float32
    rounding on a GPU. One kernel there, capturable as gdn_decode is. Raises ValueError or TypeError, naming the
    argument, before the pool is touched.

    Source: book chapter 11.
    """
    call = (states, accepted, state_pool, cache_indices)
    run = _plan(call, False, check_rollback_call, _new_put)
    check_slots(cache_indices, len(state_pool))
    check_accepted(accepted, cache_indices, states.shape[1])
    run(*call)


@torch.no_grad()
def _extend(q, k, v, a, b, A_log, dt_bias, pool, cache_indices, cu_seqlens, chunk_size, has_initial_state, backend):
    check_pool_call(
        q, k, v, a, b, A_log, dt_bias, pool, cache_indices, cu_seqlens, chunk_size, has_initial_state
    )
    if _one_token_each(cu_seqlens, len(q)):  # a chunk of one token is all overhead
        slots, known = (x if x is None else x.to(q.device) for x in (cache_indices, has_initial_state))
        call = (*(x[:, None] for x in (q, k, v, a, b)), A_log, dt_bias, pool, slots, known)
        o, _ = _decode_torch(*call) if backend == "torch" else _decode_plan(call, False)(*call)
        return o[:, 0]
    taken = _taken(pool, cache_indices, has_initial_state)
    o, state = chunk_gated_delta_rule(
        q[None], k[None], v[None], a[None], b[None], initial_state=taken.state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True, cu_seqlens=cu_seqlens,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    put = (state.to(pool.dtype)[:, None], torch.ones_like(taken.slots), pool, taken.slots)
    (_put_torch if backend == "torch" else _plan(put, False, check_rollback_call, _new_put))(*put)
    return torch.where(_served(taken.live, cu_seqlens, len(q))[:, None, None], o[0], 0)


def _served(live: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Which tokens belong to a request that was not skipped. [total_tokens]"""
    token = torch.arange(total, device=live.device)
    request = torch.searchsorted(cu_seqlens.to(live.device, torch.int64), token, right=True) - 1  # [total_tokens]
    return torch.cat([live, live.new_ones(1)])[request]


def _one_token_each(cu_seqlens: Tensor, total: int) -> bool:
    if len(cu_seqlens) != total + 1 or not readable(cu_seqlens):
        return False
    return cu_seqlens.tolist() == list(range(total + 1))


class Taken(NamedTuple):
    slots: Tensor  # [N]
    live: Tensor  # [N] bool
    state: Tensor  # [N, HV, V, K]


def _taken(pool: Tensor, cache_indices: Tensor, known: Tensor | None) -> Taken:
    """The requests' states, in float32; zero, whatever the slot holds, for those skipped or fresh."""
    slots = cache_indices.to(pool.device).long()
    live = slots >= 0
    reads = live if known is None else live & known.to(pool.device)
    state = pool.index_select(0, slots.clamp(min=0)).float()
    if reads.device.type == "cpu" and reads.all():
        return Taken(slots, live, state)
    return Taken(slots, live, torch.where(reads[:, None, None, None], state, 0))


@torch.no_grad()
def _decode_torch(q, k, v, a, b, A_log, dt_bias, pool, cache_indices, known, keep=False):
    """gdn_decode in PyTorch, token by token: o [N,T,HV,V], states [N,T,HV,V,K] or None."""
    taken = _taken(pool, cache_indices, known)
    live = taken.live[:, None, None]
    dtype, outputs, states = compute_dtype(q, k, v), [], []
    with torch.autocast(q.device.type, enabled=False):
        g, beta = (x.to(dtype) for x in raw_gates(a, b, A_log, dt_bias))
        groups = v.shape[2] // q.shape[2]
        q, k = (l2norm(x.to(dtype)).repeat_interleave(groups, dim=2) for x in (q, k))  # [N,T,HV,K]
        state = taken.state.to(dtype).transpose(-1, -2)  # [N,HV,K,V]
        tokens = (x.unbind(1) for x in (q * q.shape[-1] ** -0.5, k, v.to(dtype), g, beta))
        for token in zip(*tokens, strict=True):
            o, state = recurrent_step(*token, state)
            outputs.append(torch.where(live, o, 0).to(v.dtype))
            if keep:
                states.append(torch.where(live[..., None], state, 0).transpose(-1, -2).to(pool.dtype))
    _put_torch(state.transpose(-1, -2)[:, None], torch.ones_like(taken.slots), pool, taken.slots)
    return torch.stack(outputs, 1), torch.stack(states, 1) if keep else None


@torch.no_grad()
def _put_torch(states: Tensor, accepted: Tensor, pool: Tensor, slots: Tensor) -> None:
    """gdn_rollback in PyTorch: states[n, accepted[n] - 1] into the slot of every request that is not skipped."""
    row = (slots >= 0).nonzero().squeeze(1)
    picked = row * states.shape[1] + accepted[row] - 1
    pool.index_copy_(0, slots[row].long(), states.flatten(0, 1).index_select(0, picked).to(pool.dtype))


def _decode_plan(call: tuple, keep: bool) -> Callable:
    return _plan(call, keep, check_decode_call, _new_decode)


def _plan(call: tuple, keep: bool, check: Callable, new: Callable) -> Callable:
    """What runs calls of this layout: shapes, strides, dtypes and devices are looked at once, then remembered.

    Looking them up costs a few microseconds, checking them and making ready to launch ten times that.
    """
    try:
        key = (new, keep, *[x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in call])
    except (AttributeError, TypeError):
        check(*call)  # which says what is no tensor
        raise
    run = _plans.get(key)
    if run is None:
        check(*call)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        run = _plans[key] = new(call, keep)
    return run


_plans: dict[tuple, Callable] = {}


def _new_decode(call: tuple, keep: bool) -> Callable:
    if _kernels_serve(*call[:3]):
        from .kernels.decode import DecodePlan

        return DecodePlan(*call, keep=keep)
    return functools.partial(_decode_torch, keep=keep)


def _new_put(call: tuple, keep: bool) -> Callable:
    if _kernels_serve(call[0]):
        from .kernels.decode import RollbackPlan

        return RollbackPlan(*call)
    return _put_torch


@torch.no_grad()
def _kernels_serve(x: Tensor, *others: Tensor) -> bool:
    return _announce(which_backend(x, decode=True, others=others), x).name == "triton"
