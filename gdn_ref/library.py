"""The one op that the compiler sees: torch.ops.gdn_ref.chunk_gated_delta_rule, with the arguments of the function.

Outside torch.compile nothing comes through here. Within, the function is one node of the graph, for any number of
tokens: the compiler learns its results' shapes from the fake form, its gradient is a second op, and both look at their
arguments, choose a backend and run when the graph does. Its gradient keeps the inputs and nothing else, and has itself
no gradient.

Every backend but "triton" takes the gradient by chunks, the token recurrence too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import compute_dtype
from .chunkwise import chunkwise_forward
from .chunkwise_backward import Gradients, chunkwise_backward
from .gates import l2norm_backward, log_decay_backward, write_strength_backward
from .ops import Call, check_call, choose, fused_gradients, rule_inputs, run

NAME = "gdn_ref::chunk_gated_delta_rule"
ARGUMENTS = """Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, float? scale, Tensor? initial_state,
    bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval,
    bool state_v_first, Tensor? cu_seqlens, bool use_gate_in_kernel, Tensor? A_log, Tensor? dt_bias, int chunk_size,
    str backend"""
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")

LIBRARY = torch.library.Library("gdn_ref", "DEF")
LIBRARY.define(f"chunk_gated_delta_rule({ARGUMENTS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
LIBRARY.define(
    f"chunk_gated_delta_rule_backward(Tensor? do, Tensor? dstate, {ARGUMENTS}) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(LIBRARY, "chunk_gated_delta_rule", "CompositeExplicitAutograd")
@torch.no_grad()
def forward(*arguments) -> tuple[Tensor, Tensor]:
    """o, and the final state, or an empty tensor where it is not wanted; neither shares memory with an input."""
    call = Call(*arguments)
    o, state = run(call)
    o = o.contiguous() if o.numel() else call.v.new_empty(o.shape)
    return o, o.new_empty(0) if state is None else state.contiguous()


@torch.library.register_fake(NAME, lib=LIBRARY)
def fake_forward(*arguments) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of the results, and the checks of all that is known before values are."""
    call = Call(*arguments)
    sizes = check_call(_without_values(call))
    o = call.v.new_empty(call.v.shape)
    if not call.output_final_state:
        return o, o.new_empty(0)
    shape = (sizes.V, sizes.K) if call.state_v_first else (sizes.K, sizes.V)
    return o, o.new_empty((sizes.N, sizes.HV, *shape), dtype=compute_dtype(*call[:3]))


def _without_values(call: Call) -> Call:
    """Boundaries whose values nobody can look at."""
    bounds = call.cu_seqlens
    return call if bounds is None else call._replace(cu_seqlens=torch.empty_like(bounds, device="meta"))


def gradients(call: Call, do: Tensor | None, dstate: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients by the name of their input, from those of the results; None is zero."""
    call, sizes, chosen = choose(call)
    if chosen == "triton":
        found = fused_gradients(call.scale, call.options(), call.tensors(), do, dstate)
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")
        return dict(zip(names, found, strict=True))
    inputs = rule_inputs(call, sizes)
    done = chunkwise_forward(*inputs[:5], call.scale, inputs.state, call.cu_seqlens, call.chunk_size, keep=True)
    if dstate is not None and call.state_v_first:
        dstate = dstate.transpose(-1, -2)
    do, dstate = (x.new_zeros(()).expand(x.shape) if d is None else d for x, d in ((done.o, do), (done.state, dstate)))
    q, k, _, g, beta, _ = inputs
    return _through_gates(call, chunkwise_backward(q, k, g, beta, call.scale, do, dstate, done.batches, done.kept))


def _through_gates(call: Call, d: Gradients) -> dict[str, Tensor | None]:
    """From the gradients of what the recurrence is given to those of what the call was given."""
    found = d._asdict() | {"initial_state": d.state.transpose(-1, -2) if call.state_v_first else d.state}
    if call.use_qk_l2norm_in_kernel:
        found["q"], found["k"] = l2norm_backward(call.q, d.q), l2norm_backward(call.k, d.k)
    if call.use_gate_in_kernel:
        found["g"], found["A_log"], found["dt_bias"] = log_decay_backward(call.g, call.A_log, call.dt_bias, d.g)
    if call.use_beta_sigmoid_in_kernel:
        found["beta"] = write_strength_backward(call.beta, d.beta, call.allow_neg_eigval)
    return found


@torch.library.impl(LIBRARY, "chunk_gated_delta_rule_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def backward(do: Tensor | None, dstate: Tensor | None, *arguments) -> list[Tensor]:
    """Gradients of the differentiable inputs that were given, in the order of DIFFERENTIABLE."""
    call = Call(*arguments)
    with torch.autocast(call.q.device.type, enabled=False):
        found = gradients(call, do, dstate)
    given = [(name, getattr(call, name)) for name in DIFFERENTIABLE]
    return [found[name].to(x.dtype).contiguous() for name, x in given if x is not None]


@torch.library.register_fake(f"{NAME}_backward", lib=LIBRARY)
def fake_backward(do: Tensor | None, dstate: Tensor | None, *arguments) -> list[Tensor]:
    """Tensors like the differentiable inputs that were given."""
    given = (getattr(Call(*arguments), name) for name in DIFFERENTIABLE)
    return [x.new_empty(x.shape) for x in given if x is not None]


def _keep(ctx, inputs, output) -> None:
    call = Call(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in call))
    ctx.others = call._replace(**dict.fromkeys(n for n, x in call._asdict().items() if isinstance(x, Tensor)))


def _differentiate(ctx, do, dstate) -> tuple:
    call = Call(*(x if x is not None else y for x, y in zip(ctx.saved_tensors, ctx.others, strict=True)))
    dstate = dstate if call.output_final_state else None
    given = [name for name in DIFFERENTIABLE if getattr(call, name) is not None]
    found = dict(zip(given, torch.ops.gdn_ref.chunk_gated_delta_rule_backward(do, dstate, *call), strict=True))
    return tuple(found.get(name) for name in Call._fields)


def _refuse(ctx, *_):
    raise RuntimeError(f"create_graph: found True, but {NAME} has no second derivative; call the function uncompiled")


torch.library.register_autograd(NAME, _differentiate, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd(f"{NAME}_backward", _refuse, lib=LIBRARY)
