"""What `python -m gdn_ref bench` gives to every implementation, and what float64 says about what it gives back."""

from __future__ import annotations

import torch
from torch import Tensor

from .bench_peers import IMPLEMENTATIONS, Call, Decode, Prefill, Training
from .bench_record import WIDTH, Shape
from .gates import l2norm
from .ops import chunk_gated_delta_rule

DEVICE = "cuda"
GRADIENTS = ("q", "k", "v", "g", "beta")
# Value heads times tokens that float64 gradients are made for: heads do not touch each other, so one of many will do.
LARGEST_CHECK = 2**18

Inputs = Prefill | Decode | Training


# ---- tensors ---------------------------------------------------------------------------------------------------------


def prefill_inputs(shape: Shape, seed: int) -> Prefill:
    """Unit queries and keys, normal values, decays of a fresh layer, strengths in (0, 1)."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    (B, T), H, HV = shape.rows, shape.H, shape.HV
    q, k = (l2norm(torch.randn(B, T, H, WIDTH, device=DEVICE, generator=gen)).bfloat16() for _ in range(2))
    v = torch.randn(B, T, HV, WIDTH, device=DEVICE, generator=gen).bfloat16()
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, HV, device=DEVICE, generator=gen) + 2)
    beta = torch.randn(B, T, HV, device=DEVICE, generator=gen).sigmoid()
    return Prefill(q, k, v, g, beta, bounds_of(shape) if shape.packed else None)


def training_inputs(shape: Shape, seed: int) -> Training:
    """The tensors of a forward call, all of which want a gradient, and a gradient of the output."""
    x = prefill_inputs(shape, seed)
    gen = torch.Generator(DEVICE).manual_seed(10**6 + seed)
    do = torch.randn(x.v.shape, device=DEVICE, generator=gen).bfloat16()
    return Training(*(t.requires_grad_() for t in x[:5]), x.cu_seqlens, do)


def decode_inputs(shape: Shape, seed: int) -> Decode:
    """Raw queries, keys and gates, normal values and states, every sequence in a slot of its own."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    B, H, HV = len(shape.lengths), shape.H, shape.HV
    q, k = (torch.randn(B, 1, H, WIDTH, device=DEVICE, generator=gen).bfloat16() for _ in range(2))
    v = torch.randn(B, 1, HV, WIDTH, device=DEVICE, generator=gen).bfloat16()
    a, b = (torch.randn(B, 1, HV, device=DEVICE, generator=gen).bfloat16() for _ in range(2))
    A_log, dt_bias = (torch.randn(HV, device=DEVICE, generator=gen) for _ in range(2))
    state = torch.randn(B, HV, WIDTH, WIDTH, device=DEVICE, generator=gen)
    return Decode(q, k, v, a, b, A_log, dt_bias, state, torch.arange(B, device=DEVICE, dtype=torch.int32))


def bounds_of(shape: Shape) -> Tensor:
    """cu_seqlens of packed sequences, int64 [N+1]."""
    return torch.tensor([0, *shape.lengths], device=DEVICE).cumsum(0)


def make_inputs(op: str, shape: Shape, seed: int) -> Inputs:
    """Tensors for one call of "fwd", "decode" or "fwdbwd"."""
    return {"fwd": prefill_inputs, "decode": decode_inputs, "fwdbwd": training_inputs}[op](shape, seed)


def untouched(x: Inputs) -> Inputs:
    """The same problem with a state of its own: whoever updates in place leaves the next one the problem as it was."""
    return x._replace(state=x.state.clone()) if isinstance(x, Decode) else x


def make_call(name: str, op: str, x: Inputs) -> Call:
    """The implementation's call on these tensors.  Raises Unsupported or ImportError where it has none."""
    implementation = IMPLEMENTATIONS[name]
    return {"fwd": implementation.forward, "decode": implementation.decode, "fwdbwd": implementation.training}[op](x)


# ---- right at all? ---------------------------------------------------------------------------------------------------


def reference(op: str, shape: Shape, x: Inputs) -> tuple[Tensor, ...]:
    """What is compared, in float64, by the torch forms that the tests hold against the recurrence.

    o and the final state [N,HV,K,V]; of "fwdbwd" o and the gradients of q, k, v, g, beta, of the last heads if there
    are many.
    """
    if op == "fwdbwd":
        return gradients(shape, x)
    if op == "fwd":
        wide = [t.double() for t in x[:5]]
        return chunk_gated_delta_rule(*wide, output_final_state=True, cu_seqlens=x.cu_seqlens, backend="torch")
    wide = [t.double() for t in (x.q, x.k, x.v, x.a, x.b)]
    return chunk_gated_delta_rule(
        *wide, initial_state=x.state.double().transpose(-1, -2), output_final_state=True, backend="recurrent",
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=x.A_log.double(), dt_bias=x.dt_bias.double(),
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def heads_checked(shape: Shape) -> int:
    """How many key heads, the last ones, gradients are checked of."""
    group = shape.HV // shape.H
    return min(shape.H, max(1, LARGEST_CHECK // (sum(shape.lengths) * group)))


def last_heads(shape: Shape, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Of o, q, k, v, g, beta, or their gradients, those of the key heads that are checked and of their value heads."""
    heads = heads_checked(shape)
    values = heads * (shape.HV // shape.H)
    return [t[:, :, -n:] for t, n in zip(tensors, (values, heads, heads, values, values, values), strict=True)]


def gradients(shape: Shape, x: Training) -> tuple[Tensor, ...]:
    """o, dq, dk, dv, dg, dbeta in float64."""
    do, *inputs = last_heads(shape, (x.do, *x[:5]))
    with torch.enable_grad():
        leaves = [t.detach().double().requires_grad_() for t in inputs]
        o, _ = chunk_gated_delta_rule(*leaves, cu_seqlens=x.cu_seqlens, backend="torch")
        return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def errors(op: str, shape: Shape, call: Call, expected: tuple[Tensor, ...]) -> dict:
    """Relative L2 of everything returned, the worst sequence and head of each; NaN where anything is."""
    found = call.read(call.run())
    if op == "fwdbwd":
        names = ("error_o", *(f"error_d{name}" for name in GRADIENTS))
        triples = zip(names, last_heads(shape, found), expected, strict=True)
        return {name: by_sequence(mine, right, shape.lengths) for name, mine, right in triples}
    lengths = shape.lengths if op == "fwd" else (1,) * len(shape.lengths)
    (o, state), (right_o, right_state) = found, expected
    worst = float(relative(state, right_state, (2, 3)).max())
    return {"error_o": by_sequence(o, right_o, lengths), "error_state": worst}


def by_sequence(found: Tensor, expected: Tensor, lengths: tuple[int, ...]) -> float:
    """The worst relative L2 error of a sequence and head of [B,T,heads] or [B,T,heads,width]."""
    pieces = zip(*(t.reshape(-1, *t.shape[2:]).split(lengths) for t in (found, expected)), strict=True)
    return float(torch.stack([relative(*pair, (0, *range(2, found.dim() - 1))).max() for pair in pieces]).max())


def relative(found: Tensor, expected: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Relative L2 error over `dims`."""
    difference = found.double() - expected.double()
    return difference.square().sum(dims).sqrt() / expected.double().square().sum(dims).sqrt()
