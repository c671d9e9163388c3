"""One to eight tokens of every request in one kernel: gates, L2 norm, state update, output.

A step reads and writes every state once and does next to nothing with it, so memory sets its time: 2 V K words a head.
The pool's layout [V, K] puts K along the lanes of a warp. One warp owns a few whole rows, each with its own value v_i:
both products with the state, k S and q S, are sums along a row, no warp waits for another, nothing goes through
shared memory. Book: (1.1), chapters 11 and 12.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .calls import Launch, current_stream
from .gates import inverse_norm, log_decay, write_strength

# Entries of the state that one warp holds: 32 registers and, in float32, eight 16-byte loads in flight a lane. Twice as
# many leave registers for half as many warps on a processor; half as many repeat what all rows of a head share.
ENTRIES_PER_WARP = 1024


@triton.jit
def load_token(
    p_q, p_k, p_v, p_a, p_b, t, q_token, k_token, v_token, a_token, b_token, columns, rows, K: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """q, k [BK], v [BV] and the raw gates a, b of token t, as they come."""
    b_q = tl.load(p_q + t * q_token + columns, mask=columns < K, other=0.0)
    b_k = tl.load(p_k + t * k_token + columns, mask=columns < K, other=0.0)
    b_v = tl.load(p_v + t * v_token + rows, mask=rows < V, other=0.0)
    return b_q, b_k, b_v, tl.load(p_a + t * a_token), tl.load(p_b + t * b_token)


@triton.jit(do_not_specialize=["T"])
def decode_kernel(
    q, k, v, a, b, A_log, dt_bias, pool, slots, known, o, states, scale, T,
    q_request, q_token, q_head, k_request, k_token, k_head, v_request, v_token, v_head,
    a_request, a_token, b_request, b_token, pool_slot, pool_head, pool_row,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_KNOWN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """BV rows of the state of one head of one request, over its T tokens. Grid: N * HV * cdiv(V, BV).

    q, k: [N,T,H,K]; v: [N,T,HV,V]; a, b: [N,T,HV]; A_log, dt_bias: [HV]; pool: [pool,HV,V,K]; slots: [N], -1 skips;
    known: [N] bool, read if HAS_KNOWN; o: [N,T,HV,V]; states: [N,T,HV,V,K], written if KEEP. The innermost stride of
    all is 1; o and states are contiguous. BK >= K and BV are powers of two. T is no constant, so that one kernel serves
    drafts of every length, and n tokens leave bitwise what n calls with one would (in a float32 pool).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    rows = program % NV * BV + tl.arange(0, BV)
    columns = tl.arange(0, BK)
    head = program // NV % HV
    h, hk = head.to(tl.int64), (head // (HV // H)).to(tl.int64)
    n = (program // (NV * HV)).to(tl.int64)

    # load: a skipped or fresh request reads no column of the state; what the slot holds, NaN too, must not enter by a
    # product. The cache need not keep a state that nobody asks for again before the next step.
    slot = tl.load(slots + n).to(tl.int64)
    live = slot >= 0
    written = tl.where(live, K, 0)
    read = written
    if HAS_KNOWN:
        read = tl.where(tl.load(known + n) != 0, written, 0)
    inside = (rows < V)[:, None]
    home = pool + slot * pool_slot + h * pool_head + rows.to(tl.int64)[:, None] * pool_row + columns[None, :]
    S = tl.load(home, mask=inside & (columns < read)[None, :], other=0.0, eviction_policy="evict_first")
    S = S.to(tl.float32)  # [BV, BK], S transposed
    rate, bias = tl.load(A_log + h).to(tl.float32), tl.load(dt_bias + h).to(tl.float32)

    q, k, v = q + n * q_request + hk * q_head, k + n * k_request + hk * k_head, v + n * v_request + h * v_head
    a, b = a + n * a_request + h, b + n * b_request + h
    t = tl.zeros([], tl.int64)
    next_q, next_k, next_v, next_a, next_b = load_token(
        q, k, v, a, b, t, q_token, k_token, v_token, a_token, b_token, columns, rows, K, V
    )
    while t < T:
        # the next token comes while this one is worked on; the last one comes twice
        b_q, b_k, b_v = next_q.to(tl.float32), next_k.to(tl.float32), next_v.to(tl.float32)
        b_a, b_b = next_a.to(tl.float32), next_b.to(tl.float32)
        next_q, next_k, next_v, next_a, next_b = load_token(
            q, k, v, a, b, tl.minimum(t + 1, T - 1), q_token, k_token, v_token, a_token, b_token, columns, rows, K, V
        )

        # compute
        b_k *= inverse_norm(b_k)  # (2.5)
        b_q *= inverse_norm(b_q) * scale  # (2.5)
        S *= tl.exp(log_decay(b_a, rate, bias))  # (1.1)
        error = b_v - tl.sum(S * b_k[None, :], 1)  # (1.1)
        S += (write_strength(b_b) * error)[:, None] * b_k[None, :]  # (1.1)
        b_o = tl.sum(S * b_q[None, :], 1)

        # store: the answer, and the state as it would be after this token
        place = ((n * T + t) * HV + h) * V + rows
        tl.store(o + place, tl.where(live, b_o, 0.0).to(o.dtype.element_ty), mask=rows < V)
        if KEEP:
            copy = tl.where(live, S, 0.0).to(states.dtype.element_ty)
            tl.store(states + place[:, None] * K + columns[None, :], copy, mask=inside & (columns < K)[None, :])
        t += 1
    kept = inside & (columns < written)[None, :]
    tl.store(home, S.to(pool.dtype.element_ty), mask=kept, eviction_policy="evict_first")


@triton.jit
def rollback_kernel(
    states, accepted, pool, slots, n_states, pool_slot, pool_head, pool_row,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV rows of one head of one request: the pool takes the state after the accepted tokens. Grid as above.

    states: [N,n_states,HV,V,K], contiguous; accepted: [N], 1 to n_states; pool, slots: as above.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    rows = (program % NV * BV + tl.arange(0, BV)).to(tl.int64)[:, None]
    columns = tl.arange(0, BK)[None, :]
    h = (program // NV % HV).to(tl.int64)
    n = (program // (NV * HV)).to(tl.int64)

    slot = tl.load(slots + n).to(tl.int64)
    last = tl.load(accepted + n).to(tl.int64) - 1
    mask = (rows < V) & (columns < tl.where(slot >= 0, K, 0))
    S = tl.load(states + (((n * n_states + last) * HV + h) * V + rows) * K + columns, mask=mask, other=0.0)

    tl.store(pool + slot * pool_slot + h * pool_head + rows * pool_row + columns, S, mask=mask)


def tile_of(K: int, V: int) -> tuple[int, int]:
    """(BK, BV): the columns and rows of the state that one warp holds, on any device."""
    BK = triton.next_power_of_2(K)
    return BK, min(max(1, ENTRIES_PER_WARP // BK), triton.next_power_of_2(V))


class DecodePlan:
    """A call of decode_kernel prepared for one layout: the shapes, strides, dtypes and devices of its arguments.

    The first call compiles (or finds compiled) through Triton's own launch, which looks at every argument again and
    takes 30 to 40 microseconds each time. Later ones go straight to the compiled kernel, with addresses.
    """

    def __init__(self, q, k, v, a, b, A_log, dt_bias, pool, slots, known, *, keep: bool):
        (N, T, H, K), (HV, V) = q.shape, v.shape[2:]
        inputs = (q, k, v, a, b, A_log, dt_bias, slots, known)
        self.copies = any(x is not None and not _dense_inside(x) for x in inputs)
        q, k, v, a, b = (_inner_dense(x) for x in (q, k, v, a, b))
        BK, BV = tile_of(K, V)
        strides = (*_steps(q, 3), *_steps(k, 3), *_steps(v, 3), *_steps(a, 2), *_steps(b, 2), *_steps(pool, 3))
        numbers = (K**-0.5, T, *strides, H, HV, K, V, BK, BV, known is not None, keep)
        self.states_shape = (N, T, HV, V, K) if keep else None
        self.launch = SmallLaunch(decode_kernel, N * HV * triton.cdiv(V, BV), numbers, pool.device)

    def __call__(self, q, k, v, a, b, A_log, dt_bias, pool, slots, known) -> tuple[Tensor, Tensor | None]:
        """o [N,T,HV,V] in v's dtype, and the states [N,T,HV,V,K] in the pool's dtype, or None."""
        if self.copies:
            inputs = (q, k, v, a, b, A_log, dt_bias, slots, known)
            q, k, v, a, b, A_log, dt_bias, slots, known = (x if x is None else _inner_dense(x) for x in inputs)
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        states = None if self.states_shape is None else pool.new_empty(self.states_shape)
        # Another pointer stands in for what is not there; the kernel never reads it.
        unread, unwritten = slots if known is None else known, pool if states is None else states
        self.launch(q, k, v, a, b, A_log, dt_bias, pool, slots, unread, o, unwritten)
        return o, states


class RollbackPlan:
    """A call of rollback_kernel prepared for one layout of its arguments."""

    def __init__(self, states, accepted, pool, slots):
        N, T, HV, V, K = states.shape
        BK, BV = tile_of(K, V)
        numbers = (T, *_steps(pool, 3), HV, K, V, BK, BV)
        self.launch = SmallLaunch(rollback_kernel, N * HV * triton.cdiv(V, BV), numbers, pool.device)

    def __call__(self, states, accepted, pool, slots) -> None:
        """Write states [N,T,HV,V,K] after accepted [N] tokens into the pool's slots [N]."""
        states = states.contiguous()
        self.launch(states, _inner_dense(accepted), pool, _inner_dense(slots))


class SmallLaunch:
    """A kernel of one warp a program, with numbers that a plan knows, on the plan's device and its current stream.

    Once it is compiled tensors go to it as addresses, and nothing looks at their dtypes again: one layout only.
    """

    def __init__(self, kernel, programs: int, numbers: tuple, device: torch.device):
        self.launch, self.device = Launch(kernel, programs, numbers, num_warps=1), device

    def __call__(self, *tensors: Tensor) -> None:
        """No wait, nothing read from the device."""
        if not self.launch.grid[0]:
            return
        if self.device.type != "cuda" or self.device.index == torch.cuda.current_device():
            self._launch(tensors)
        else:
            with torch.cuda.device(self.device):
                self._launch(tensors)

    def _launch(self, tensors: tuple[Tensor, ...]) -> None:
        launch, addresses, bits = self.launch, [x.data_ptr() for x in tensors], 0
        for address in addresses:
            bits |= address
        if bits & 15:  # what is kept is compiled for arguments aligned to 16 bytes; Triton finds the right one
            launch.kernel[launch.grid](*tensors, *launch.constants, **launch.options)
        elif launch.run is None:
            launch(tensors)
        else:
            launch(addresses, current_stream(self.device))


def _dense_inside(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


def _inner_dense(x: Tensor) -> Tensor:
    return x if _dense_inside(x) else x.contiguous()


def _steps(x: Tensor, n: int) -> tuple[int, ...]:
    """The first n strides of x; 0 along an axis of one entry, where a stride says nothing."""
    return tuple(step if size > 1 else 0 for step, size in zip(x.stride()[:n], x.shape, strict=False))
