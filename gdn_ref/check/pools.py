"""Properties of serving over a pool of states: slots, padding rows, stale slots, views."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..gates import l2norm, raw_gates
from . import cases
from .cases import Recipe, Source
from .probe import Probe
from .records import BOUNDS
from .registry import holds

LENGTHS = (70, 1, 33)
STRANGE = 7.0  # what slots hold that no request of the call owns


class Requests(NamedTuple):
    """One call over a pool."""

    q: Tensor  # [T,H,K]
    k: Tensor  # [T,H,K]
    v: Tensor  # [T,HV,V]
    a: Tensor  # [T,HV]
    b: Tensor  # [T,HV]
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV]
    pool: Tensor  # [6,HV,V,K]
    slots: Tensor  # [3]
    bounds: Tensor  # [4]


def requests(probe: Probe, recipe: Recipe, slots: tuple[int, ...] = (4, 0, 2)) -> Requests:
    """Three requests of raw tokens; slot 0 is in use, the idle slots hold sevens."""
    call, source = cases.make(recipe, probe.device), Source("pool", recipe.HV)
    gates = [source.normal(len(call.v[0]), recipe.HV).float().to(probe.device) for _ in range(2)]
    A_log, dt_bias = (0.5 * source.normal(recipe.HV).float().to(probe.device) - 1 for _ in range(2))
    pool = torch.full((6, recipe.HV, recipe.V, recipe.K), STRANGE, device=probe.device)
    start = source.normal(len(slots), *pool.shape[1:]).float().to(probe.device)
    for n, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = start[n]
    where = torch.tensor(slots, device=probe.device)
    return Requests(call.q[0], call.k[0], call.v[0], *gates, A_log, dt_bias, pool, where, call.cu_seqlens)


def reference(x: Requests, states: Tensor) -> tuple[Tensor, Tensor]:
    """o [T,HV,V] and states [3,HV,V,K] in float64; states: what the requests start from, [3,HV,V,K]."""
    wide = [t.cpu().double() if t.is_floating_point() else t.cpu() for t in x]
    q, k, v, a, b, A_log, dt_bias = wide[:7]
    g, beta = raw_gates(a, b, A_log, dt_bias)
    tokens = (t[None] for t in (l2norm(q), l2norm(k), v, g, beta))
    o, S = cases.definition(cases.Call(*tokens, states.cpu().double().mT, wide[-1]))
    return o[0], S.mT


def compare(probe: Probe, recipe: Recipe, o: Tensor, states: Tensor, right: tuple, live=(0, 1, 2), bound=None) -> None:
    """Outputs and states of the requests that were served, each by itself."""
    bounds, ends = bound or BOUNDS[recipe.dtype], [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for n in live:
        here = slice(ends[n], ends[n + 1])
        probe.same(o[here], right[0][here], f"o of request {n}", recipe, bounds.o)
        probe.same(states[n], right[1][n], f"state of request {n}", recipe, bounds.state)


def extend(probe: Probe, x: Requests, pool: Tensor | None = None, **more) -> Tensor:
    """The implementation's own call."""
    with torch.no_grad():
        return probe.implementation.extend(*x[:7], x.pool if pool is None else pool, x.slots, x.bounds, **more)


def _recipe(probe: Probe, note: str) -> Recipe:
    return probe.fit(lengths=LENGTHS, keys="raw", state=False, note=note)


@holds("pool", "each request goes on from its own slot, and leaves its state there", chapter=11, needs="pool")
def pool_agreement(probe: Probe) -> None:
    """Three requests in slots 4, 0 and 2."""
    for dtype in probe.implementation.offers.dtypes:
        recipe = _recipe(probe, "slots 4, 0, 2 of 6")._replace(dtype=dtype)
        with probe.case(recipe):
            x = requests(probe, recipe)
            right = reference(x, x.pool[x.slots])
            o = extend(probe, x)
            compare(probe, recipe, o, x.pool[x.slots], right)


@holds("pool, idle slots", "slots that no request names stay as they are, to the bit", chapter=11, needs="pool")
def pool_idle(probe: Probe) -> None:
    """Slots 1, 3 and 5 hold sevens."""
    recipe = _recipe(probe, "slots 1, 3, 5 are idle")
    with probe.case(recipe):
        x = requests(probe, recipe)
        extend(probe, x)
        for slot in (1, 3, 5):
            probe.claim(bool((x.pool[slot] == STRANGE).all()), f"slot {slot} is as it was", recipe)


@holds("pool, row -1", "a padded row is skipped: as an index it would hit the last slot, or the first", chapter=11,
       needs="pool")  # fmt: skip
def pool_skipped(probe: Probe) -> None:
    """The second request has slot -1: no slot changes by it, and the others are served."""
    recipe = _recipe(probe, "slots 4, -1, 2 of 6")
    with probe.case(recipe):
        x = requests(probe, recipe, (4, -1, 2))
        start = x.pool[x.slots.clamp(min=0)]
        o = extend(probe, x)
        for slot in (0, 1, 3, 5):
            probe.claim(bool((x.pool[slot] == STRANGE).all()), f"slot {slot} is as it was", recipe)
        compare(probe, recipe, o, x.pool[x.slots.clamp(min=0)], reference(x, start), live=(0, 2))


@holds("pool, stale slot", "a new request in a used slot starts from zero, by selection: 0 * NaN is NaN", chapter=11,
       needs="pool fresh")  # fmt: skip
def pool_stale(probe: Probe) -> None:
    """has_initial_state is false for two requests, whose slots hold NaN and sevens."""
    recipe = _recipe(probe, "two stale slots, one of NaN")
    with probe.case(recipe):
        x = requests(probe, recipe)
        x.pool[4], x.pool[2] = float("nan"), STRANGE
        start = x.pool[x.slots]
        start[0], start[2] = 0, 0
        right = reference(x, start)
        o = extend(probe, x, has_initial_state=torch.tensor([False, True, False], device=probe.device))
        compare(probe, recipe, o, x.pool[x.slots], right)


@holds("pool, strided", "the pool may be a view between other data: updated in place, the gaps untouched", chapter=11,
       needs="pool")  # fmt: skip
def pool_strided(probe: Probe) -> None:
    """The pool is every second state of a larger storage."""
    recipe = _recipe(probe, "the pool is every second state of a storage")
    with probe.case(recipe):
        x = requests(probe, recipe)
        storage = torch.full((6, 2, *x.pool.shape[1:]), STRANGE, device=probe.device)
        storage[:, 1] = x.pool
        right = reference(x, x.pool[x.slots])
        o = extend(probe, x, storage[:, 1])
        probe.claim(bool((storage[:, 0] == STRANGE).all()), "the gaps are as they were", recipe)
        compare(probe, recipe, o, storage[x.slots, 1], right)


@holds("pool in bfloat16", "written back in the pool's dtype, or refused; never lost in a copy", chapter=11,
       needs="pool bfloat16_pool")  # fmt: skip
def pool_bfloat16(probe: Probe) -> None:
    """float32 arithmetic, bfloat16 between calls."""
    recipe = _recipe(probe, "pool in bfloat16")
    with probe.case(recipe):
        x = requests(probe, recipe)
        x = x._replace(pool=x.pool.bfloat16())
        right = reference(x, x.pool[x.slots])
        o = extend(probe, x)
        compare(probe, recipe, o, x.pool[x.slots], right, bound=BOUNDS["bfloat16"])


@holds("pool, extreme gates", "a NaN in a pooled state stays for good", chapter=7, needs="pool")
def pool_extreme_gates(probe: Probe) -> None:
    """A_log = 100 with a = -200 and 0: alpha is 1 and 0."""
    recipe = _recipe(probe, "A_log=100, a=-200 and 0")
    with probe.case(recipe):
        x = requests(probe, recipe)
        a = torch.where(x.a > 0, -200.0, 0.0)
        x = x._replace(a=a, A_log=torch.full_like(x.A_log, 100.0), dt_bias=torch.zeros_like(x.dt_bias))
        right = reference(x, x.pool[x.slots])
        o = extend(probe, x)
        compare(probe, recipe, o, x.pool[x.slots], right)
