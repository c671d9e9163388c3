"""Time the torch chunkwise form on a CPU beside transformers' and flash-linear-attention's, in one process.

    pip install transformers==5.24.0 einops && pip install --no-deps fla-core==0.6.0
    python benchmarks/cpu.py --out benchmarks/results/cpu.json

Every round runs each implementation once, in turn, after one call to warm the caches; a ratio is the median over
rounds of "theirs / ours" within the round, so that a machine whose speed drifts does not favour anybody. A peer that is
not installed is left out and said so. Peak memory is what one call adds to the resident size of a fresh
process.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import gdn_ref

HEADS, WIDTH = 4, 128
CASES = [("fwd", 512), ("fwd", 2048), ("fwd", 4096), ("fwdbwd", 512), ("fwdbwd", 2048)]
PACKAGES = {"gdn_ref": "gdn_ref", "transformers": "transformers", "fla_naive": "fla-core"}


def implementations() -> dict:
    """Name -> function of (q, k, v, g, beta) that returns (o, final state)."""
    found = {"gdn_ref": lambda *x: gdn_ref.chunk_gated_delta_rule(*x, output_final_state=True)}
    if importlib.util.find_spec("transformers"):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        found["transformers"] = lambda *x: torch_chunk_gated_delta_rule(*x, output_final_state=True)
    if naive := _fla_naive():
        found["fla_naive"] = lambda *x: naive.naive_chunk_gated_delta_rule(*x, output_final_state=True)
    return found


def _fla_naive():
    """fla/ops/gated_delta_rule/naive.py alone: importing the package would ask for Triton and a GPU driver. None where
    there is no such file: any folder or module may bear the name fla."""
    package = importlib.util.find_spec("fla")
    places = (package.submodule_search_locations or ()) if package else ()
    paths = (Path(place) / "ops/gated_delta_rule/naive.py" for place in places)
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("fla_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(T: int, grad: bool = False) -> list:
    """Unit queries and keys, normal values, decays of a fresh layer, strengths in (0, 1)."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, HEADS, WIDTH), dim=-1) for _ in range(2))
    g = torch.nn.functional.logsigmoid(torch.randn(1, T, HEADS) + 2)
    x = [q, k, torch.randn(1, T, HEADS, WIDTH), g, torch.rand(1, T, HEADS)]
    return [t.requires_grad_(grad) for t in x]


def call(function, op: str, x: list) -> None:
    """One forward, or one forward and backward from the sum of output and state."""
    if op == "fwd":
        with torch.no_grad():
            function(*x)
    else:
        o, state = function(*x)
        torch.autograd.grad(o.sum() + state.sum(), x)


def time_rounds(functions: dict, op: str, T: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every implementation in every round."""
    x = inputs(T, grad=op == "fwdbwd")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            call(function, op, x)
            start = time.perf_counter()
            call(function, op, x)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def peak_memory(op: str, T: int, name: str) -> float:
    """MB that one call takes at its peak, in a fresh process."""
    here = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {here!r}); import cpu; cpu.report_peak({op!r}, {T}, {name!r})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return int(run.stdout.split()[-1]) / 1024


def report_peak(op: str, T: int, name: str) -> None:
    """Print by how many KiB one call raises the resident size at most; Linux only."""
    function, x = implementations()[name], inputs(T, grad=op == "fwdbwd")
    call(function, op, inputs(64, grad=op == "fwdbwd"))  # what is loaded once does not count
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    call(function, op, x)
    print(_resident("VmHWM") - before)


def _resident(field: str) -> int:
    return next(int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith(field))


def main() -> None:
    """Run all cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="rounds of every case (default 25)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory rows")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    functions, rows = implementations(), []
    for missing in PACKAGES.keys() - functions.keys():
        print(f"{missing} is left out: {PACKAGES[missing]} is not installed")
    for op, T in CASES:
        times = time_rounds(functions, op, T, args.rounds)
        for name, ms in times.items():
            ratio = statistics.median(theirs / ours for theirs, ours in zip(ms, times["gdn_ref"], strict=True))
            rows.append(_row(op, T, name, ms=statistics.median(ms), ms_min=min(ms), ratio=ratio))
    for T in () if args.no_memory else (1024, 2048, 4096):
        rows += [_row("fwdbwd_peak", T, name, mb=peak_memory("fwdbwd", T, name)) for name in functions]
    if args.out:
        args.out.write_text(json.dumps(_document(functions, rows, args), indent=1) + "\n")
        print(f"written to {args.out}")


def _row(op: str, T: int, name: str, **figures: float) -> dict:
    figures = {key: round(value, 2) for key, value in figures.items()}
    print(f"{op:12s} T={T:<6d} {name:13s} " + "  ".join(f"{k} {v:g}" for k, v in figures.items()), flush=True)
    return {"op": op, "shape": f"1x{T} {HEADS}/{HEADS}", "impl": name, **figures}


def _document(functions: dict, rows: list, args) -> dict:
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    return {
        "device": f"{cpu or platform.processor()}, {args.threads} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: _version(PACKAGES[name]) for name in functions},
        "dtype": "float32",
        "widths": f"K = V = {WIDTH}",
        "rounds": args.rounds,
        "rows": rows,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return "unknown"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    main()
