"""What `python -m gdn_ref bench` times: ours and its peers, each behind the same three entries.

An entry takes the tensors of one call and returns a Call: what to run, and how to read what is compared out of the
result. The peers' own names, layouts and gates are met here and nowhere else. A peer is imported when it is first
asked for; an ImportError leaves it out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


class Unsupported(Exception):
    """This implementation does not do what is asked; the message says what."""


class Prefill(NamedTuple):
    """The tensors of one forward call; queries and keys are normalised already, the scale is K**-0.5."""

    q: Tensor  # [B,T,H,K] bfloat16
    k: Tensor  # [B,T,H,K] bfloat16
    v: Tensor  # [B,T,HV,V] bfloat16
    g: Tensor  # [B,T,HV] float32, natural-log decay
    beta: Tensor  # [B,T,HV] float32
    cu_seqlens: Tensor | None  # [N+1] int64 on the device; None: B sequences of T tokens


class Training(NamedTuple):
    """The tensors of a forward and a backward call: those of Prefill, all of which want a gradient, and that of o."""

    q: Tensor  # [B,T,H,K] bfloat16
    k: Tensor  # [B,T,H,K] bfloat16
    v: Tensor  # [B,T,HV,V] bfloat16
    g: Tensor  # [B,T,HV] float32, natural-log decay
    beta: Tensor  # [B,T,HV] float32
    cu_seqlens: Tensor | None  # [N+1] int64 on the device; None: B sequences of T tokens
    do: Tensor  # [B,T,HV,V] bfloat16


class Decode(NamedTuple):
    """The tensors of one decode step: one token a sequence, raw gates, queries and keys not normalised."""

    q: Tensor  # [B,1,H,K] bfloat16
    k: Tensor  # [B,1,H,K] bfloat16
    v: Tensor  # [B,1,HV,V] bfloat16
    a: Tensor  # [B,1,HV] bfloat16
    b: Tensor  # [B,1,HV] bfloat16
    A_log: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV] float32
    state: Tensor  # [B,HV,V,K] float32, the pool's layout; updated in place by those that can
    slots: Tensor  # [B] int32, here 0 to B-1


class Call(NamedTuple):
    run: Callable[[], Any]
    # The result of run -> o [B,T,HV,V], state [N,HV,K,V]; of training o, dq, dk, dv, dg, dbeta.
    read: Callable[[Any], tuple[Tensor, ...]]


class Implementation(NamedTuple):
    name: str
    package: str  # the distribution whose version is recorded
    module: str  # the module that must be there
    forward: Callable[[Prefill], Call]
    decode: Callable[[Decode], Call]
    training: Callable[[Training], Call]
    # Where first calls take tens of seconds they are made beforehand, in other processes: for every "shape", or for
    # every number of "heads" if the kernels depend on nothing else.
    compiles: str = ""
    capturable: bool = True  # a call can go into a CUDA graph
    ops: tuple[str, ...] = ("fwd", "decode", "fwdbwd")  # what it is asked for


def forward_and_backward(x: Training, forward: Callable) -> Call:
    """A step of training as an optimiser sees it: the output, then the gradients of q, k, v, g and beta.

    forward: from q, k, v, g, beta, cu_seqlens to o. No final state is asked for, and none has a gradient.
    """

    def run():
        with torch.enable_grad():
            o = forward(*x[:6])
        return o.detach(), *torch.autograd.grad(o, x[:5], x.do)

    return Call(run, tuple)


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours_forward(x: Prefill) -> Call:
    """gdn_ref.chunk_gated_delta_rule, whatever backend "auto" takes."""
    from .ops import chunk_gated_delta_rule

    return Call(lambda: chunk_gated_delta_rule(*x[:5], output_final_state=True, cu_seqlens=x.cu_seqlens), tuple)


def ours_decode(x: Decode) -> Call:
    """gdn_ref.gdn_decode on the pool itself."""
    from .serving import gdn_decode

    return Call(lambda: gdn_decode(*x), lambda o: (o.reshape(x.v.shape), x.state.transpose(-1, -2)))


def ours_training(x: Training) -> Call:
    """gdn_ref.chunk_gated_delta_rule under autograd, as it comes."""
    from .ops import chunk_gated_delta_rule

    return forward_and_backward(x, lambda *t: chunk_gated_delta_rule(*t[:5], cu_seqlens=t[5])[0])


def ours_training_again(x: Training) -> Call:
    """The same, but nothing is kept between the two passes."""
    from .ops import recompute_states

    call = ours_training(x)

    def run():
        with recompute_states():
            return call.run()

    return Call(run, tuple)


# ---- peers -----------------------------------------------------------------------------------------------------------


def _fla_chunk() -> Callable:
    """flash-linear-attention's own Triton kernels.

    Where FlashQLA or TileLang is installed too, it would hand the call over to them; that is switched off, so that its
    row is its own. The first switch counts at its import, the others, should it have been imported before, at a call.
    """
    os.environ.update(FLA_DISABLE_BACKEND_DISPATCH="1", FLA_FLASH_QLA="0", FLA_TILELANG="0")
    return _find("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")


def fla_forward(x: Prefill) -> Call:
    """Its chunked form."""
    function = _fla_chunk()
    return Call(lambda: function(*x[:5], output_final_state=True, cu_seqlens=x.cu_seqlens), tuple)


def fla_training(x: Training) -> Call:
    """The same under autograd; on Hopper it refuses Triton 3.4 to 3.7.0, which miscompile one of its kernels."""
    function = _fla_chunk()
    return forward_and_backward(x, lambda *t: function(*t[:5], cu_seqlens=t[5])[0])


def fla_decode(x: Decode) -> Call:
    """Its token recurrence with every gate fused; it returns a new state and leaves the old one."""
    function = _find("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    options = dict(
        initial_state=x.state, output_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=x.A_log, dt_bias=x.dt_bias, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    return Call(lambda: function(x.q, x.k, x.v, g=x.a, beta=x.b, **options), _v_first)


def flash_qla_forward(x: Prefill) -> Call:
    """FlashQLA; with its automatic splitting of long sequences, which drops what it takes to be forgotten."""
    function = _find("flash_qla", "chunk_gated_delta_rule")
    return Call(lambda: function(*x[:5], output_final_state=True, cu_seqlens=x.cu_seqlens), tuple)


def flash_qla_training(x: Training) -> Call:
    """The same under autograd."""
    function = _find("flash_qla", "chunk_gated_delta_rule")
    return forward_and_backward(x, lambda *t: function(*t[:5], cu_seqlens=t[5])[0])


def flash_qla_decode(x: Decode) -> Call:
    """There is none."""
    raise Unsupported("FlashQLA has no decode step")


def flashinfer_forward(x: Prefill) -> Call:
    """FlashInfer takes packed tokens and the decay itself, not its logarithm; its state is [N,HV,V,K]."""
    function = _find("flashinfer.gdn_prefill", "chunk_gated_delta_rule")
    B, T = x.v.shape[:2]
    bounds = torch.arange(0, (B + 1) * T, T, device=x.v.device) if x.cu_seqlens is None else x.cu_seqlens
    q, k, v, g, beta = (t.flatten(0, 1).contiguous() for t in x[:5])
    options = dict(g=g.exp(), beta=beta, output_final_state=True, cu_seqlens=bounds)
    return Call(lambda: function(q, k, v, **options), lambda out: (out[0].view_as(x.v), out[1].transpose(-1, -2)))


def flashinfer_decode(x: Decode) -> Call:
    """FlashInfer's step on states [B,HV,V,K], updated in place."""
    function = _find("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    named = dict(state=x.state, A_log=x.A_log, a=x.a, dt_bias=x.dt_bias, b=x.b, use_qk_l2norm=True)
    return Call(lambda: function(x.q, x.k, x.v, **named), _v_first)


def flashinfer_training(x: Training) -> Call:
    """There is none."""
    raise Unsupported("FlashInfer has no backward")


def _transformers_chunk(x: Prefill | Training) -> Callable:
    """transformers' PyTorch code, without the kernels that it swaps in where it finds them."""
    if x.cu_seqlens is not None:
        raise Unsupported("transformers ignores cu_seqlens")
    function = _find_transformers("torch_chunk_gated_delta_rule")
    group = x.v.shape[2] // x.q.shape[2]

    def chunk(q, k, v, g, beta, **options):
        q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))  # as its layer does
        return function(q, k, v, g=g, beta=beta, **options)

    return chunk


def transformers_forward(x: Prefill) -> Call:
    """Its chunked form, in float32 whatever it is given."""
    chunk = _transformers_chunk(x)
    return Call(lambda: chunk(*x[:5], output_final_state=True), tuple)


def transformers_training(x: Training) -> Call:
    """The same under autograd, which keeps every step of its inverse."""
    chunk = _transformers_chunk(x)
    return forward_and_backward(x, lambda *t: chunk(*t[:5])[0])


def transformers_decode(x: Decode) -> Call:
    """transformers' PyTorch recurrence after the gates, as its layer runs them."""
    function = _find_transformers("torch_recurrent_gated_delta_rule")
    group, state = x.v.shape[2] // x.q.shape[2], x.state.transpose(-1, -2)

    def run():
        g = -x.A_log.exp() * softplus(x.a.float() + x.dt_bias)
        q, k = (t.repeat_interleave(group, dim=2) for t in (x.q, x.k))
        named = dict(g=g, beta=x.b.sigmoid(), initial_state=state)
        return function(q, k, x.v, **named, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return Call(run, tuple)


IMPLEMENTATIONS = {
    i.name: i
    for i in (
        Implementation("gdn_ref", "gdn_ref", "gdn_ref", ours_forward, ours_decode, ours_training),
        Implementation("gdn_ref_recompute", "gdn_ref", "gdn_ref", ours_forward, ours_decode, ours_training_again,
                       ops=("fwdbwd",)),
        Implementation("fla", "fla-core", "fla", fla_forward, fla_decode, fla_training, compiles="heads"),
        Implementation("flash_qla", "flash-qla", "flash_qla", flash_qla_forward, flash_qla_decode, flash_qla_training,
                       compiles="shape"),
        Implementation("flashinfer", "flashinfer-python", "flashinfer", flashinfer_forward, flashinfer_decode,
                       flashinfer_training, compiles="heads"),
        Implementation("transformers", "transformers", "transformers", transformers_forward, transformers_decode,
                       transformers_training, capturable=False),
    )
}  # fmt: skip


def installed(names=tuple(IMPLEMENTATIONS)) -> tuple[dict[str, str], dict[str, str]]:
    """({name: version} of those that are there, {name: reason} of the others), by metadata alone: nothing is imported.

    Whether an implementation also loads is seen at its first call.
    """
    versions, left_out = {}, {}
    for name in names:
        implementation = IMPLEMENTATIONS[name]
        if importlib.util.find_spec(implementation.module) is None:
            left_out[name] = f"{implementation.package} is not installed"
        else:
            versions[name] = version_of(implementation)
    return versions, left_out


def version_of(implementation: Implementation) -> str:
    """The version of its distribution, or of the module itself where it runs from a checkout."""
    try:
        return importlib.metadata.version(implementation.package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(importlib.import_module(implementation.module), "__version__", "unknown")


def _find(module: str, name: str) -> Callable:
    return getattr(importlib.import_module(module), name)


def _find_transformers(name: str) -> Callable:
    """Its decorator puts FLA's kernel in the function's place where FLA is installed; the function itself is below."""
    return inspect.unwrap(_find("transformers.models.qwen3_next.modeling_qwen3_next", name))


def _v_first(out) -> tuple[Tensor, Tensor]:
    return out[0], out[1].transpose(-1, -2)
