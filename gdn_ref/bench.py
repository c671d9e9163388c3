"""`python -m gdn_ref bench`: ours and every peer that can be imported, timed side by side on a GPU.

All tensors are the same for all; widths are K = V = 128 and q, k, v bfloat16. A time is the median over rounds in which
the implementations take turns, so that a drifting clock favours nobody. Within a round an implementation is called
many times in a row, as a model calls it: what is reported is the larger of what the processor needs to launch a call
and what the GPU needs to run it. The calls go round several sets of tensors, more than the cache holds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .bench_peers import IMPLEMENTATIONS, Call, Decode, Prefill, Unsupported, installed
from .bench_record import OPS, WIDTH, Shape, check_document, decode_cost, forward_cost, limit_ms, parse_shape, table
from .gates import l2norm
from .ops import chunk_gated_delta_rule

HEADS = ("16/64", "8/32", "2/8")
SHAPES = tuple(f"1x{T} {heads}" for heads in HEADS for T in (2048, 8192, 32768)) + (
    "4x8192 16/64", "8x1024 16/64", "4096+28672 16/64",
)  # fmt: skip
BATCHES, DECODE_HEADS = (1, 8, 64, 256), "16/32"
SMALL_FORWARD, SMALL_DECODE = "1x2048 16/64", f"1x1 {DECODE_HEADS}"  # where launching and compiling are timed
ROUNDS, BLOCK_MS, SLOWEST_MS = 15, 8.0, 1500.0  # rounds, length of an implementation's turn, its total at most
DEVICE = "cuda"
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH",
          "FLASHINFER_WORKSPACE_BASE")  # fmt: skip

NO_TIME = "no time left in the budget"
FIRST_CALL = "import sys, gdn_ref.bench; gdn_ref.bench.first_call(*sys.argv[1:])"

EXAMPLES = """\
examples:
  python -m gdn_ref bench --out h200.json --figure h200.svg        everything, within eight minutes
  python -m gdn_ref bench --ops decode cpu_call --impl gdn_ref     ours alone, in a few seconds
  python -m gdn_ref bench --shapes "1x8192 16/64" "100+900 2/8"    other shapes: batch x tokens, or packed lengths; H/HV
  python -m gdn_ref bench --draw h200.json --figure h200.svg       table and figure of a recorded run; needs no GPU

what is timed:
  fwd          the forward pass over whole sequences, final state included
  decode       one token a sequence: raw gates, L2 norm, state update, output
  cpu_call     what the processor does for one such call, before the GPU is done with it
  cold_*       the first call in a new process with empty compiler caches, imports included

how to read the table:
  limit        what the GPU allows at best: the larger of the fewest bytes over the measured copy rate and the FLOPs of
               the chunked form (chunks of 64) over the measured bf16 matmul rate
  gdn_ref      milliseconds, and the share of the limit it reaches
  others       milliseconds, and how many times as long as gdn_ref they take; below 1 they are ahead

A peer that is not installed is left out and named.  All of them at once:
  pip install fla-core==0.6.0 einops flash-qla==0.1.3 transformers flashinfer-python
"""


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


def make_inputs(op: str, shape: Shape, seed: int) -> Prefill | Decode:
    """Tensors for one call of "fwd" or "decode"."""
    return (prefill_inputs if op == "fwd" else decode_inputs)(shape, seed)


def make_call(name: str, op: str, x: Prefill | Decode) -> Call:
    """The implementation's call on these tensors.  Raises Unsupported or ImportError where it has none."""
    implementation = IMPLEMENTATIONS[name]
    return (implementation.forward if op == "fwd" else implementation.decode)(x)


# ---- right at all? ---------------------------------------------------------------------------------------------------


def reference(op: str, x: Prefill | Decode) -> tuple[Tensor, Tensor]:
    """o and final state [N,HV,K,V] in float64, by the torch forms that the tests hold against the recurrence."""
    if op == "fwd":
        wide = [t.double() for t in x[:5]]
        return chunk_gated_delta_rule(*wide, output_final_state=True, cu_seqlens=x.cu_seqlens, backend="torch")
    wide = [t.double() for t in (x.q, x.k, x.v, x.a, x.b)]
    return chunk_gated_delta_rule(
        *wide, initial_state=x.state.double().transpose(-1, -2), output_final_state=True, backend="recurrent",
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=x.A_log.double(), dt_bias=x.dt_bias.double(),
        use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def errors(op: str, shape: Shape, x: Prefill | Decode, call: Call, expected: tuple[Tensor, Tensor]) -> dict:
    """Relative L2 of o and of the state, the worst sequence and head of each; NaN where anything is."""
    o, state = call.read(call.run())
    lengths = shape.lengths if op == "fwd" else (1,) * len(shape.lengths)
    pieces = zip(*(t.flatten(0, 1).split(lengths) for t in (o, expected[0])), strict=True)
    worst_o = torch.stack([relative(mine, right, (0, 2)).max() for mine, right in pieces]).max()
    return {"error_o": float(worst_o), "error_state": float(relative(state, expected[1], (2, 3)).max())}


def relative(found: Tensor, expected: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Relative L2 error over `dims`."""
    difference = found.double() - expected.double()
    return difference.square().sum(dims).sqrt() / expected.double().square().sum(dims).sqrt()


# ---- the clock -------------------------------------------------------------------------------------------------------


def gpu_ms(functions: list[Callable], count: int) -> float:
    """Milliseconds a call takes when `count` calls follow each other, going round `functions`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for n in range(count):
        functions[n % len(functions)]()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def time_in_turns(functions: dict[str, list[Callable]], clock: Callable = gpu_ms) -> dict[str, list[float]]:
    """{name: milliseconds a call, one for each round}; a slow implementation leaves after three rounds or more."""
    counts = {name: turn_length(clock(calls, 2), len(calls)) for name, calls in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, calls in functions.items():
            if len(times[name]) < 3 or counts[name] * sum(times[name]) < SLOWEST_MS:
                times[name].append(clock(calls, counts[name]))
    return times


def turn_length(ms: float, sets: int) -> int:
    """How many calls fill a turn: three or more unless they are slow, and whole rounds of the sets of tensors."""
    count = min(max(math.ceil(BLOCK_MS / max(ms, 1e-3)), 3 if ms < 100 else 1), 400)
    return math.ceil(count / sets) * sets


def cpu_ms(calls: list[Callable], count: int) -> float:
    """Milliseconds the processor is busy with a call, the GPU left to itself; few enough calls to fill no queue."""
    count = min(count, 20)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for n in range(count):
        calls[n % len(calls)]()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / count * 1e3


def graph_ms(functions: list[Callable]) -> float:
    """Milliseconds a call takes on the GPU alone: all of them captured in one graph, replayed; a median."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [function() for function in functions]
    graph.replay()
    repeats = turn_length(gpu_ms([graph.replay], 2), 1)
    times = [gpu_ms([graph.replay], repeats) / len(functions) for _ in range(ROUNDS)]
    del kept
    return statistics.median(times)


def measure_limits() -> dict:
    """The two ceilings: device-to-device copy, bytes read plus written, and an 8192^3 bf16 product of random data."""
    source = torch.randn(2**28, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    copy = statistics.median(gpu_ms([lambda: target.copy_(source)], 5) for _ in range(9))
    matmul = statistics.median(gpu_ms([lambda: a @ b], 5) for _ in range(9))
    return {"copy_TBps": 2 * source.nbytes / copy * 1e-9, "matmul_TFLOPs": 2 * 8192**3 / matmul * 1e-9}


def input_sets(op: str, shape: Shape) -> list[Prefill | Decode]:
    """Enough sets of tensors to fill the cache twice over: a call then finds nothing of its own in it."""
    moved, _ = (forward_cost if op == "fwd" else decode_cost)(shape)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return [make_inputs(op, shape, seed) for seed in range(1, 1 + min(64, max(1, math.ceil(2 * cache / moved))))]


# ---- other processes -------------------------------------------------------------------------------------------------


class FirstCall:
    """The first call of an implementation in a fresh Python; what that says goes to a file, which never fills up."""

    def __init__(self, name: str, op: str, text: str, **environment: str):
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-c", FIRST_CALL, name, op, text]
        self.said = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(command, stdout=self.said, stderr=subprocess.STDOUT,
                                        env={**os.environ, "PYTHONPATH": path, **environment})  # fmt: skip

    def ms(self, seconds: float) -> float:
        """What first_call printed.  Raises RuntimeError with the last line instead, or when `seconds` are over."""
        try:
            status = self.process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError("not done in the time there was") from None
        self.said.seek(0)
        lines = self.said.read().strip().splitlines() or ["it said nothing"]
        if status or not lines[-1].startswith("first call: "):
            print(*lines[-15:], sep="\n", file=sys.stderr, flush=True)
            raise RuntimeError(f"exit status {status}: {lines[-1]}")
        return float(lines[-1].split()[2])


def first_call(name: str, op: str, text: str) -> None:
    """Print the milliseconds that the first call takes in this process, imports of the implementation included."""
    x = make_inputs(op, parse_shape(text), seed=1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        make_call(name, op, x).run()
    torch.cuda.synchronize()
    print(f"first call: {(time.perf_counter() - start) * 1e3:.1f} ms")


def cold_ms(name: str, op: str, text: str, seconds: float) -> float:
    """Milliseconds of the first call in a new process that finds no compiled kernel anywhere."""
    with tempfile.TemporaryDirectory(prefix="gdn_ref_cold_") as folder:
        return FirstCall(name, op, text, **dict.fromkeys(CACHES, folder)).ms(seconds)


def compile_beforehand(pairs: list[tuple[str, str]], seconds: float) -> dict[tuple[str, str], str]:
    """Make the first forward call of each (implementation, shape) in a process of its own, as many at a time as there
    are processors, so that the kernels lie compiled in the caches.  {pair: what went wrong}.

    FLA tunes while it compiles; on a GPU that others use at the time it would choose badly, so what it chooses here is
    not kept, and it chooses again in peace.
    """
    wrong, running, waiting, end = {}, {}, list(pairs), time.monotonic() + seconds
    while waiting or running:
        while waiting and len(running) < max(2, (os.cpu_count() or 2) - 2):
            pair = waiting.pop(0)
            running[pair] = FirstCall(pair[0], "fwd", pair[1], FLA_CACHE_RESULTS="0")
        late = time.monotonic() > end
        for pair in [p for p, call in running.items() if late or call.process.poll() is not None]:
            try:
                running.pop(pair).ms(0)
            except RuntimeError as error:
                wrong[pair] = f"compiling beforehand: {error}"
        if late:
            wrong |= dict.fromkeys(waiting, "compiling beforehand: no time left")
            waiting.clear()
        time.sleep(0.1)
    return wrong


# ---- the run ---------------------------------------------------------------------------------------------------------


class Run:
    """The document that is being filled, the clock it is filled against, and how it is said."""

    def __init__(self, names: list[str], budget: float, check: bool = True):
        self.end, self.check = time.monotonic() + budget, check
        versions, left_out = installed(names)
        self.names = list(versions)
        self.document = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "date": datetime.date.today().isoformat(),
            "versions": versions,
            "left_out": left_out,
            "dtype": "bfloat16",
            "widths": f"K = V = {WIDTH}",
            "limits": measure_limits(),
            "rows": [],
            "failures": [],
        }

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return self.end - time.monotonic()

    def row(self, op: str, shape: str, impl: str, ms: float, **more) -> None:
        """Keep one figure and print it."""
        row = {"op": op, "shape": shape, "impl": impl, "ms": ms, **more}
        self.document["rows"].append({k: _short(v) for k, v in row.items()})
        words = "  ".join(f"{k} {_short(v):g}" for k, v in more.items() if k != "rounds")
        print(f"{op:12s}{shape:20s}{impl:14s}{ms:10.4f} ms  {words}", flush=True)

    def failed(self, op: str, shape: str, impl: str, error: object) -> None:
        """Keep why a figure is missing, in a line that names no folder of this machine; print it, and where it was."""
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        if isinstance(error, Unsupported):
            why = str(error)
        elif isinstance(error, Exception):
            traceback.print_exception(error, limit=-4)
        why = re.sub(r"(?:/[\w.+-]+)+/", "", why.splitlines()[0])[:300]
        self.document["failures"].append({"op": op, "shape": shape, "impl": impl, "error": why})
        print(f"{op:12s}{shape:20s}{impl:14s}   missing: {why}", flush=True)


def time_case(run: Run, op: str, text: str, names: list[str]) -> None:
    """One shape of "fwd" or "decode": every implementation checked against float64, then timed in turns."""
    shape = parse_shape(text)
    sets = input_sets(op, shape)
    # A state of its own: whoever updates in place would leave the next one another problem than the reference's.
    first = sets[0]._replace(state=sets[0].state.clone()) if op == "decode" else sets[0]
    expected = reference(op, first) if run.check else None
    calls, notes = {}, {}
    for name in names:
        try:
            fresh = first._replace(state=first.state.clone()) if op == "decode" else first
            call = make_call(name, op, fresh)
            notes[name] = errors(op, shape, fresh, call, expected) if run.check else {}
            calls[name] = [make_call(name, op, x).run for x in sets]
            gpu_ms(calls[name], 2)
        except Exception as error:  # a peer may fail in any way; the others are timed all the same
            calls.pop(name, None)
            run.failed(op, text, name, error)
    del expected
    times = time_in_turns(calls)
    cost = (forward_cost if op == "fwd" else decode_cost)(shape)
    for name, rounds in times.items():
        device = device_time(run, op, text, name, calls[name]) if op == "decode" or name == "gdn_ref" else {}
        spread = {"ms_min": min(rounds), "ms_max": max(rounds), "rounds": len(rounds)}
        run.row(op, text, name, statistics.median(rounds), **spread, **device, **notes[name],
                bytes=cost[0], flops=cost[1], limit_ms=limit_ms(cost, run.document["limits"]))  # fmt: skip


def device_time(run: Run, op: str, text: str, name: str, calls: list[Callable]) -> dict:
    """{"device_ms": the GPU's share alone}, or nothing where the call cannot go into a graph."""
    if not IMPLEMENTATIONS[name].capturable:
        return {}
    try:
        return {"device_ms": graph_ms(calls)}
    except Exception as error:  # whatever stops a capture, the call itself has been timed
        run.failed(f"{op} in a graph", text, name, error)
        return {}


def time_launches(run: Run, names: list[str]) -> None:
    """CPU time a call, where the GPU is quickly done."""
    for op, text in (("fwd", SMALL_FORWARD), ("decode", SMALL_DECODE)):
        x = make_inputs(op, parse_shape(text), seed=1)
        calls = {}
        for name in names:
            try:
                calls[name] = [make_call(name, op, x).run]
                calls[name][0]()
            except Exception as error:  # named, and the others go on
                calls.pop(name, None)
                run.failed("cpu_call", text, name, error)
        for name, rounds in time_in_turns(calls, cpu_ms).items():
            run.row("cpu_call", text, name, statistics.median(rounds), ms_min=min(rounds))


def time_cold(run: Run, op: str, names: list[str]) -> None:
    """First calls, each in a new process; ours first, so that a short budget cuts a peer."""
    kind, text = (("fwd", SMALL_FORWARD) if op == "cold_fwd" else ("decode", SMALL_DECODE))
    for name in names:
        if run.left < 5:
            run.failed(op, text, name, NO_TIME)
            continue
        try:
            make_call(name, kind, make_inputs(kind, parse_shape(text), seed=1))  # does it have one at all?
            run.row(op, text, name, cold_ms(name, kind, text, run.left))
        except Exception as error:  # named, and the others go on
            run.failed(op, text, name, error)


@torch.no_grad()
def measure(names: list[str], ops: list[str], shapes: list[str], batches: list[int], budget: float, check: bool = True,
            keep: Callable = lambda document: None) -> dict:  # fmt: skip
    """Time everything that is asked for within about `budget` seconds; the document of the JSON file.

    keep: called with the document after every case, so that nothing is lost if the run is cut off.
    """
    run = Run(names, budget, check)
    for name, reason in run.document["left_out"].items():
        print(f"{name} is left out: {reason}")
    long = [n for n in run.names if IMPLEMENTATIONS[n].compiles_long] if "fwd" in ops else []
    pairs = [(name, text) for name in sorted(long, reverse=True) for text in shapes]
    wrong = compile_beforehand(pairs, 0.45 * budget) if pairs else {}
    cases = [("fwd", text) for text in shapes if "fwd" in ops]
    cases += [("decode", f"{B}x1 {DECODE_HEADS}") for B in batches if "decode" in ops]
    for op, text in cases:
        skipped = {name: why for (name, shape), why in wrong.items() if op == "fwd" and shape == text}
        if run.left < 5:
            skipped = dict.fromkeys(run.names, NO_TIME)
        for name, why in skipped.items():
            run.failed(op, text, name, why)
        if names_now := [n for n in run.names if n not in skipped]:
            time_case(run, op, text, names_now)
        torch.cuda.empty_cache()
        keep(run.document)
    if "cpu_call" in ops:
        time_launches(run, [n for n in run.names if (n, SMALL_FORWARD) not in wrong])
    for op in ("cold_decode", "cold_fwd"):
        if op in ops:
            time_cold(run, op, run.names)
    keep(run.document)
    return run.document


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _short(value):
    """Five significant digits of a float; anything else as it is."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m gdn_ref bench`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP",
                        help=f"what to time: {', '.join(OPS)} (default all)")
    parser.add_argument("--impl", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS),
                        metavar="NAME", help=f"whom to time: {', '.join(IMPLEMENTATIONS)} (default all that are there)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="SHAPE",
                        help="shapes of fwd, such as '1x8192 16/64' (default the twelve of the README)")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), metavar="N",
                        help=f"batches of decode, H/HV {DECODE_HEADS} (default {' '.join(map(str, BATCHES))})")
    parser.add_argument("--budget", type=float, default=480, metavar="S",
                        help="seconds the whole run may take; what no longer fits is left out and named (default 480)")
    parser.add_argument("--no-check", action="store_true", help="do not compare with float64 before timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write, after every case")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="figure to write, .svg or .png")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="time nothing: show this JSON file; needs no GPU")


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """python -m gdn_ref bench.  0 done, 1 some of ours is missing, 2 it could not be run."""
    try:
        for text in args.shapes:
            parse_shape(text)
        document = json.loads(args.draw.read_text()) if args.draw else None
        if document is not None:
            check_document(document)
    except (OSError, ValueError) as error:
        parser.error(f"--draw: {error}" if args.draw else f"--shapes: {error}")
    if min(args.batches) < 1 or args.budget <= 0:
        parser.error("--batches and --budget: expected positive numbers")
    if document is None and not torch.cuda.is_available():
        print("python -m gdn_ref bench: found no GPU that PyTorch can use, expected one: the times are those of GPU "
              "kernels.\nbenchmarks/cpu.py times the torch form on a CPU; --draw FILE shows a recorded run.",
              file=sys.stderr)
        return 2
    if document is None:
        document = measure(args.impl, args.ops, args.shapes, args.batches, args.budget, not args.no_check, _keep(args))
        print()
    print(table(document))
    if args.figure:
        from .bench_figure import draw
        from .demo_figure import save

        save(draw(document), args.figure)
        print(f"\nwrote {args.figure}")
    return 1 if any(f["impl"] == "gdn_ref" for f in document.get("failures", [])) else 0


def _keep(args: argparse.Namespace) -> Callable[[dict], None]:
    def keep(document):
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n")

    return keep
