"""`python -m gdn_ref bench`: ours and every peer that can be imported, timed side by side on a GPU.

All tensors are the same for all (see bench_tensors); widths are K = V = 128 and q, k, v bfloat16. A time is the median
over rounds in which the implementations take turns, so that a drifting clock favours nobody. Within a round an
implementation is called many times in a row, as a model calls it: what is reported is the larger of what the processor
needs to launch a call and what the GPU needs to run it. The calls go round several sets of tensors, more than the cache
holds.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from . import bench_tensors
from .bench_peers import IMPLEMENTATIONS, Unsupported, installed
from .bench_processes import Beforehand, FirstCallFailed, cold_ms
from .bench_record import OPS, WIDTH, Shape, check_document, cost_of, limit_ms, markdown, parse_shape, table
from .bench_tensors import Inputs, errors, heads_checked, make_call, make_inputs, reference, untouched

HEADS = ("16/64", "8/32", "2/8")
SHAPES = tuple(f"1x{T} {heads}" for heads in HEADS for T in (2048, 8192, 32768)) + (
    "4x8192 16/64", "8x1024 16/64", "4096+28672 16/64",
)  # fmt: skip
TRAINING_SHAPES = tuple(f"1x{T} {heads}" for heads in HEADS[:2] for T in (2048, 8192, 32768)) + ("4x8192 16/64",)
BATCHES, DECODE_HEADS = (1, 8, 64, 256), "16/32"
SMALL_FORWARD, SMALL_DECODE = "1x2048 16/64", f"1x1 {DECODE_HEADS}"  # where launching and compiling are timed
SLOW_MS = 100.0  # a call that takes as long is a turn by itself
ROUNDS, BLOCK_MS, SLOWEST_MS = 15, 8.0, 1500.0  # rounds, length of an implementation's turn, its total at most
# Shares of the budget after which it no longer waits for peers to compile: in peace, and at all.
IN_PEACE, AT_ALL = 0.45, 0.65

NO_TIME = "no time left in the budget"

EXAMPLES = """\
examples:
  python -m gdn_ref bench --out h200.json --figure h200.svg        everything, within eight minutes
  python -m gdn_ref bench --ops decode cpu_call --impl gdn_ref     ours alone, in a few seconds
  python -m gdn_ref bench --shapes "1x8192 16/64" "100+900 2/8"    other shapes: batch x tokens, or packed lengths; H/HV
  python -m gdn_ref bench --draw h200.json --figure h200.svg       table and figure of a recorded run; needs no GPU
  python -m gdn_ref bench --markdown h200.json                     a recorded run as the tables of the README

what is timed:
  fwd          the forward pass over whole sequences, final state included
  fwdbwd       a step of training: the output, then the gradients of q, k, v, g and beta; with the peak of memory above
               the tensors that are given, in MB (10^6 bytes)
  decode       one token a sequence: raw gates, L2 norm, state update, output
  cpu_call     what the processor does for one such call, before the GPU is done with it
  cold_*       the first call in a new process with empty compiler caches, imports included

how to read the table:
  limit        what the GPU allows at best: the larger of the fewest bytes over the measured copy rate and the FLOPs of
               the chunked form (chunks of 64), nothing made twice, over the measured bf16 matmul rate
  gdn_ref      milliseconds, and the share of the limit it reaches
  others       milliseconds, and how many times as long as gdn_ref they take; below 1 they are ahead

A peer that is not installed is left out and named.  All of them at once:
  pip install fla-core==0.6.0 einops flash-qla==0.1.3 transformers flashinfer-python
"""


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
    """{name: milliseconds a call, one for each round}; a slow implementation leaves after three rounds or more.

    What the one before has left behind, in the allocator too, is not the next one's: each round has an order of its
    own, so that nobody always follows the same one, and before a turn garbage is collected and, of the quick, as much
    as fills BLOCK_MS called without counting it.
    """
    order = random.Random(0)
    first = {name: clock(calls, 2) for name, calls in functions.items()}
    counts = {name: turn_length(first[name], len(calls)) for name, calls in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.freeze()  # what there is already need not be looked through every time
    try:
        for _ in range(ROUNDS):
            for name in order.sample(list(functions), len(functions)):
                if len(times[name]) < 3 or counts[name] * sum(times[name]) < SLOWEST_MS:
                    gc.collect()
                    if first[name] < SLOW_MS:
                        clock(functions[name], fill(first[name]))
                    times[name].append(clock(functions[name], counts[name]))
    finally:
        gc.unfreeze()
    return times


def turn_length(ms: float, sets: int) -> int:
    """How many calls fill a turn: three or more unless they are slow, and whole rounds of the sets of tensors."""
    return math.ceil(max(fill(ms), 3 if ms < SLOW_MS else 1) / sets) * sets


def fill(ms: float) -> int:
    """How many calls of `ms` milliseconds fill BLOCK_MS, up to 400."""
    return min(math.ceil(BLOCK_MS / max(ms, 1e-3)), 400)


def cpu_ms(calls: list[Callable], count: int) -> float:
    """Milliseconds the processor is busy with a call, the GPU left to itself; few enough calls to fill no queue."""
    count = min(count, 50)
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
    source = torch.randn(2**28, device=bench_tensors.DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=bench_tensors.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    copy = statistics.median(gpu_ms([lambda: target.copy_(source)], 5) for _ in range(9))
    matmul = statistics.median(gpu_ms([lambda: a @ b], 5) for _ in range(9))
    return {"copy_TBps": 2 * source.nbytes / copy * 1e-9, "matmul_TFLOPs": 2 * 8192**3 / matmul * 1e-9}


def peak_MB(run: Callable) -> float:
    """The most memory, in 10^6 bytes, that a call holds at any time beyond what was there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def input_sets(op: str, shape: Shape) -> list[Inputs]:
    """Enough sets of tensors to fill the cache twice over: a call then finds nothing of its own in it."""
    moved, _ = cost_of(op, shape)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return [make_inputs(op, shape, seed) for seed in range(1, 1 + min(64, max(1, math.ceil(2 * cache / moved))))]


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
        words = "  ".join(f"{k} {_short(v):g}" for k, v in more.items() if k not in ("rounds", "each"))
        print(f"{op:12s}{shape:20s}{impl:14s}{ms:10.4f} ms  {words}", flush=True)

    def failed(self, op: str, shape: str, impl: str, error: object) -> None:
        """Keep why a figure is missing, in a line that names no folder of this machine; print it, and where it was."""
        why = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        if isinstance(error, Unsupported | FirstCallFailed):
            why = str(error)
        elif isinstance(error, Exception):
            traceback.print_exception(error, limit=-4)
        why = re.sub(r"(?:/[\w.+-]+)+/", "", why.splitlines()[0])[:300]
        self.document["failures"].append({"op": op, "shape": shape, "impl": impl, "error": why})
        print(f"{op:12s}{shape:20s}{impl:14s}   missing: {why}", flush=True)


def time_case(run: Run, op: str, text: str, names: list[str]) -> None:
    """One shape of "fwd", "decode" or "fwdbwd": all implementations checked against float64, then timed in turns."""
    shape = parse_shape(text)
    sets = input_sets(op, shape)
    first = untouched(sets[0])  # the problem that answers are held against, whatever is timed in between
    expected = reference(op, shape, first) if run.check else None
    calls, notes = {}, {}
    for name in names:
        try:
            call = make_call(name, op, untouched(first))
            notes[name] = errors(op, shape, call, expected) if run.check else {}
            calls[name] = [make_call(name, op, x).run for x in sets]
            gpu_ms(calls[name], 2)
            if op == "fwdbwd":
                notes[name] |= {"peak_MB": peak_MB(calls[name][0])}
        except Exception as error:  # a peer may fail in any way; the others are timed all the same
            calls.pop(name, None)
            run.failed(op, text, name, error)
    del expected, first
    times = time_in_turns(calls)
    cost = cost_of(op, shape)
    checked = {"heads_checked": heads_checked(shape)} if run.check and op == "fwdbwd" else {}
    for name, rounds in times.items():
        alone = op == "decode" or (op == "fwd" and name == "gdn_ref")
        device = device_time(run, op, text, name, calls[name]) if alone else {}
        spread = {"ms_min": min(rounds), "ms_max": max(rounds), "rounds": len(rounds), "each": rounds}
        run.row(op, text, name, statistics.median(rounds), **spread, **device, **notes[name], **checked,
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
        for name in (n for n in names if op in IMPLEMENTATIONS[n].ops):
            try:
                calls[name] = [make_call(name, op, x).run]
                calls[name][0]()
            except Exception as error:  # named, and the others go on
                calls.pop(name, None)
                run.failed("cpu_call", text, name, error)
        for name, rounds in time_in_turns(calls, cpu_ms).items():
            run.row("cpu_call", text, name, statistics.median(rounds), ms_min=min(rounds))


def time_cold(run: Run, op: str, name: str, ahead: Beforehand) -> None:
    """A first call in a new process."""
    kind = op.removeprefix("cold_")
    text = SMALL_DECODE if kind == "decode" else SMALL_FORWARD
    if why := ahead.why_not(name, kind, text) or (NO_TIME if run.left < 5 else None):
        run.failed(op, text, name, why)
        return
    try:
        make_call(name, kind, make_inputs(kind, parse_shape(text), seed=1))  # does it have one at all?
        run.row(op, text, name, cold_ms(name, kind, text, run.left))
    except Exception as error:  # named, and the others go on
        run.failed(op, text, name, error)


@torch.no_grad()
def measure(names: list[str], ops: list[str], shapes: dict[str, list[str]], budget: float, check: bool = True,
            keep: Callable = lambda document: None) -> dict:  # fmt: skip
    """Time everything that is asked for within about `budget` seconds; the document of the JSON file.

    shapes: {"fwd": [..], "fwdbwd": [..], "decode": [..]}; keep: called with the document after every case, so that
    nothing is lost if the run is cut off.
    """
    run = Run(names, budget, check)
    for name, reason in run.document["left_out"].items():
        print(f"{name} is left out: {reason}")
    shapes = {op: shapes[op] for op in ("fwd", "fwdbwd", "decode") if op in ops}
    ahead = Beforehand(run.names, {op: texts for op, texts in shapes.items() if op != "decode"})
    in_peace, at_all = (time.monotonic() + share * run.left for share in (IN_PEACE, AT_ALL))
    ahead.wait(("fwd", "fwdbwd"), in_peace)
    for op in sorted(shapes, key=lambda op: op in ahead.step()):  # first those for which nobody compiles any more
        if op != "decode":
            ahead.wait((op,), at_all)
            ahead.stop((op,))
        for text in shapes[op]:
            time_or_skip(run, op, text, ahead)
            keep(run.document)
    if "cpu_call" in ops:
        time_launches(run, [n for n in run.names if not ahead.why_not(n, "fwd", SMALL_FORWARD)])
    cold = [op for op in ("cold_decode", "cold_fwd", "cold_fwdbwd") if op in ops]
    for name in run.names:  # ours first, so that a short budget cuts a peer
        for op in (op for op in cold if op.removeprefix("cold_") in IMPLEMENTATIONS[name].ops):
            time_cold(run, op, name, ahead)
            keep(run.document)
    keep(run.document)
    return run.document


def time_or_skip(run: Run, op: str, text: str, ahead: Beforehand) -> None:
    """Time a case, without those whose kernels could not be compiled and without anybody if time is over."""
    names = [name for name in run.names if op in IMPLEMENTATIONS[name].ops]
    skipped = {name: why for name in names if (why := ahead.why_not(name, op, text))}
    if run.left < 5:
        skipped = dict.fromkeys(names, NO_TIME)
    for name, why in skipped.items():
        run.failed(op, text, name, why)
    if names_now := [name for name in names if name not in skipped]:
        time_case(run, op, text, names_now)
    torch.cuda.empty_cache()


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _short(value):
    """Five significant digits of a float, and of those in a list; anything else as it is."""
    if isinstance(value, list):
        return [_short(x) for x in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m gdn_ref bench`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), metavar="OP",
                        help=f"what to time: {', '.join(OPS)} (default all)")
    parser.add_argument("--impl", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS),
                        metavar="NAME", help=f"whom to time: {', '.join(IMPLEMENTATIONS)} (default all that are there)")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE",
                        help="shapes of fwd and fwdbwd, such as '1x8192 16/64' (default those of the README)")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), metavar="N",
                        help=f"batches of decode, H/HV {DECODE_HEADS} (default {' '.join(map(str, BATCHES))})")
    parser.add_argument("--budget", type=float, default=480, metavar="S",
                        help="seconds the whole run may take; what no longer fits is left out and named (default 480)")
    parser.add_argument("--no-check", action="store_true", help="do not compare with float64 before timing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write, after every case")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="figure to write, .svg or .png")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="time nothing: show this JSON file; needs no GPU")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="time nothing: print this JSON file as the README's tables; needs no GPU")


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """python -m gdn_ref bench.  0 done, 1 some of ours is missing, 2 it could not be run."""
    for text in args.shapes or ():
        try:
            parse_shape(text)
        except ValueError as error:
            parser.error(f"--shapes: {error}")
    if min(args.batches) < 1 or args.budget <= 0:
        parser.error("--batches and --budget: expected positive numbers")
    if args.markdown:
        print(markdown(recorded("--markdown", args.markdown, parser)))
        return 0
    document = recorded("--draw", args.draw, parser) if args.draw else None
    if document is None and not torch.cuda.is_available():
        print("python -m gdn_ref bench: found no GPU that PyTorch can use, expected one: the times are those of GPU "
              "kernels.\nbenchmarks/cpu.py times the torch form on a CPU; --draw FILE shows a recorded run.",
              file=sys.stderr)
        return 2
    if document is None:
        shapes = {"fwd": args.shapes or SHAPES, "fwdbwd": args.shapes or TRAINING_SHAPES,
                  "decode": [f"{B}x1 {DECODE_HEADS}" for B in args.batches]}  # fmt: skip
        document = measure(args.impl, args.ops, shapes, args.budget, not args.no_check, _keep(args))
        print()
    print(table(document))
    if args.figure:
        from .bench_figure import draw
        from .demo_figure import save

        save(draw(document), args.figure)
        print(f"\nwrote {args.figure}")
    return 1 if any(f["impl"] == "gdn_ref" for f in document.get("failures", [])) else 0


def recorded(option: str, path: Path, parser: argparse.ArgumentParser) -> dict:
    """The document in a file; ends the command, naming the option, if there is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        check_document(document)
    except (json.JSONDecodeError, UnicodeDecodeError):
        parser.error(f"{option}: found {str(path)!r}, which is not JSON; expected a file that --out wrote")
    except (OSError, ValueError) as error:
        parser.error(f"{option}: {error}")
    return document


def _keep(args: argparse.Namespace) -> Callable[[dict], None]:
    def keep(document):
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n")

    return keep
