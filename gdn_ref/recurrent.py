"""The definition, token by token: the oracle of the package and its decode step.

Nothing here knows of chunks. Run it in float64 and it is what every other form is measured against.
Book: chapter 1.
"""

from __future__ import annotations

import itertools
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

TRAINING_BYTES_WARNED = 2**30


class Step(NamedTuple):
    o: Tensor  # [..., HV, V]
    state: Tensor  # [..., HV, K, V]


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Step:
    """One token: forget, read, correct, answer (1.1).

    q, k: [..., HV, K] with q already scaled; v: [..., HV, V]; g (natural log), beta: [..., HV]; state: [..., HV, K, V].
    The state is decayed before the error is taken. All inputs in one dtype; nothing is modified.
    """
    decayed = g.exp()[..., None, None] * state  # [..., HV, K, V]   (1.1)
    error = v - (k[..., None, :] @ decayed).squeeze(-2)  # [..., HV, V]   (1.1)
    state = decayed + k[..., :, None] * (beta[..., None] * error)[..., None, :]  # (1.1)
    return Step((q[..., None, :] @ state).squeeze(-2), state)


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
) -> Step:
    """The recurrence over whole sequences.

    q, k: [B,T,H,K]; v: [B,T,HV,V]; g (natural log), beta: [B,T,HV]; initial_state: [N,HV,K,V], all of one dtype;
    cu_seqlens: [N+1] on the CPU for packed input (B = 1), else None. Returns o [B,T,HV,V], where tokens beyond
    cu_seqlens[-1] are 0, and the state after each sequence [N,HV,K,V]. Arguments are not checked here: see ops.py.
    Differentiable by autograd to any order, at the price of one kept state a token.
    """
    _warn_of_training_memory(q, k, v, g, beta, initial_state)
    groups = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q * scale, k))  # [B,T,HV,K]
    bounds = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    if not bounds[-1]:
        return _nothing(q, k, v, g, beta, initial_state)
    if cu_seqlens is None:
        return _run(q, k, v, g, beta, initial_state)
    runs = [
        _run(*(x[:, start:end] for x in (q, k, v, g, beta)), initial_state[n : n + 1])
        for n, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    beyond = v.new_zeros(1, v.shape[1] - bounds[-1], *v.shape[2:])
    outputs, states = [run.o for run in runs], [run.state for run in runs]
    return Step(torch.cat([*outputs, beyond], 1), torch.cat([initial_state[:0], *states]))


def _run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Step:
    outputs = []
    for token in zip(*(x.unbind(1) for x in (q, k, v, g, beta)), strict=True):
        o, state = recurrent_step(*token, state)
        outputs.append(o)
    return Step(torch.stack(outputs, 1), state) if outputs else Step(v, state.clone())


def _nothing(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor) -> Step:
    """What no token gives, made of every input all the same, so that each has a gradient, of zeros; o and the states
    have nothing to do with each other, so that either can be differentiated by itself."""
    empty = (x[:, :0] for x in (q, k, v, g, beta))
    o = recurrent_step(*empty, initial_state.sum(0, keepdim=True)[:, None]).o  # [B,0,HV,V]
    return Step(torch.cat([o, v.new_zeros(v.shape)], 1), initial_state.clone())


def _warn_of_training_memory(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *others))
    kept = v.numel() * k.shape[-1] * v.element_size()
    if wanted and kept > TRAINING_BYTES_WARNED:
        warnings.warn(
            f"the token recurrence keeps a state for each of {v.shape[0] * v.shape[1]} tokens for its gradient, "
            f"about {kept / 2**30:.1f} GiB; chunk_gated_delta_rule keeps one a chunk, but for second derivatives",
            stacklevel=2,
        )
