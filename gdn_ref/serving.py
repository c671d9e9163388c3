"""Prefill over a pool of states: the two serving functions of pymllm under their own names and arguments.

They compute the recurrence, not the formula printed beside them there: its recursion for W has two factors swapped
(3.6) and its U divides by the cumulative decay (7.7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_pool_call
from .gates import raw_gates
from .ops import chunk_gated_delta_rule


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


@torch.no_grad()
def _extend(q, k, v, a, b, A_log, dt_bias, pool, cache_indices, cu_seqlens, chunk_size, has_initial_state, backend):
    check_pool_call(
        q, k, v, a, b, A_log, dt_bias, pool, cache_indices, cu_seqlens, chunk_size, has_initial_state
    )
    slots = cache_indices.to(pool.device).long()
    live = slots >= 0
    state = pool[slots.clamp(min=0)].float()  # [N,HV,V,K]
    known = live if has_initial_state is None else live & has_initial_state.to(pool.device)
    state = torch.where(known[:, None, None, None], state, 0)
    g, beta = raw_gates(a, b, A_log, dt_bias)
    o, state = chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None], initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=cu_seqlens, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    pool[slots[live]] = state[live].to(pool.dtype)
    return torch.where(_served(live, cu_seqlens, len(q))[:, None, None], o[0], 0)


def _served(live: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """Which tokens belong to a request that was not skipped. [total_tokens]"""
    token = torch.arange(total, device=live.device)
    request = torch.searchsorted(cu_seqlens.to(live.device, torch.int64), token, right=True) - 1  # [total_tokens]
    return torch.cat([live, live.new_ones(1)])[request]
