"""First calls in processes of their own: from an empty cache, to time them, or beforehand, to have kernels compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from .bench_peers import IMPLEMENTATIONS
from .bench_record import parse_shape
from .bench_tensors import make_call, make_inputs

CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH",
          "FLASHINFER_WORKSPACE_BASE")  # fmt: skip
FIRST_CALL = "import sys, gdn_ref.bench_processes; gdn_ref.bench_processes.first_call(*sys.argv[1:])"
NOT_DONE = "its first call was not done in the time there was"
POLITELY = "import os; os.nice(19); "  # to whatever is being timed meanwhile


class FirstCallFailed(RuntimeError):
    """A first call in a process of its own did not come out; the message is that process's last line."""


class FirstCall:
    """First calls of an implementation in a fresh Python; what that says goes to a file, which never fills up."""

    def __init__(self, name: str, ops: tuple[str, ...], text: str, first: str = "", **environment: str):
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.ops = ops
        self.said = tempfile.NamedTemporaryFile(prefix="gdn_ref_first_call_")
        self.process = subprocess.Popen([sys.executable, "-c", first + FIRST_CALL, name, text, *ops],
                                        stdout=self.said, stderr=subprocess.STDOUT,
                                        env={**os.environ, "PYTHONPATH": path, **environment})  # fmt: skip

    def lines(self) -> list[str]:
        """What it has said so far."""
        return Path(self.said.name).read_text(errors="replace").strip().splitlines()

    def done(self) -> dict[str, float]:
        """{op: milliseconds} of the calls that it has made so far."""
        words = [line.split() for line in self.lines() if line.startswith("first call: ")]
        return {op: float(ms) for _, _, op, ms, _ in words}

    def wait(self, seconds: float) -> None:
        """Wait for it to end.  Raises FirstCallFailed if it failed, or when `seconds` are over."""
        try:
            status = self.process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise FirstCallFailed(NOT_DONE) from None
        lines = self.lines() or ["it said nothing"]
        if status or len(self.done()) < len(self.ops):
            print(*lines[-15:], sep="\n", file=sys.stderr, flush=True)
            raised = status == 1 and re.match(r"[\w.]*(Error|Exception|Unsupported)\b", lines[-1])
            why = lines[-1].removeprefix("gdn_ref.bench_peers.Unsupported: ")
            raise FirstCallFailed(why if raised else f"exit status {status}: {why}")


def first_call(name: str, text: str, *ops: str) -> None:
    """Print the milliseconds that the first call of each op takes in this process; the first one's hold the imports of
    the implementation."""
    for op in ops:
        x = make_inputs(op, parse_shape(text), seed=1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            make_call(name, op, x).run()
        torch.cuda.synchronize()
        print(f"first call: {op} {(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)


def cold_ms(name: str, op: str, text: str, seconds: float) -> float:
    """Milliseconds of the first call in a new process that finds no compiled kernel anywhere."""
    with tempfile.TemporaryDirectory(prefix="gdn_ref_cold_") as folder:
        call = FirstCall(name, (op,), text, **dict.fromkeys(CACHES, folder))
        call.wait(seconds)
        return call.done()[op]


class Beforehand:
    """First calls made ahead of the measurement, as many at a time as there are processors, so that kernels lie
    compiled in the caches.

    FLA tunes while it compiles; on a GPU that others use at the time it would choose badly, so what it chooses here is
    not kept, and it chooses again in peace.
    """

    def __init__(self, names: list[str], shapes: dict[str, list[str]]):
        """names: of whom some compile long; shapes: {op: shapes}. The longest jobs go first."""
        jobs: dict[tuple, Job] = {}
        for op, texts in shapes.items():
            for name in (name for name in names if IMPLEMENTATIONS[name].compiles):
                for text in texts:
                    job = jobs.setdefault(kernels_of(name, text), Job(name, text, []))
                    job.ops.extend([op] * (op not in job.ops))
        self.waiting = sorted(jobs.values(), key=lambda j: (-len(j.ops), IMPLEMENTATIONS[j.name].compiles == "heads"))
        self.running: list[tuple[Job, FirstCall]] = []
        self.wrong: dict[tuple, str] = {}

    def step(self) -> set[str]:
        """Begin what can begin, end what has ended; the ops that are still to come."""
        for job, call in list(self.running):
            if call.process.poll() is not None:
                self.end(job, call)
        while self.waiting and len(self.running) < max(2, (os.cpu_count() or 2) - 1):
            job = self.waiting.pop(0)
            call = FirstCall(job.name, tuple(job.ops), job.text, POLITELY, FLA_CACHE_RESULTS="0")
            self.running.append((job, call))
        to_come = [op for job, call in self.running for op in job.ops if op not in call.done()]
        return {*to_come, *(op for job in self.waiting for op in job.ops)}

    def end(self, job: Job, call: FirstCall) -> None:
        """Keep why what is missing of a job is missing; if it still runs it is stopped."""
        self.running.remove((job, call))
        try:
            call.wait(0)
        except FirstCallFailed as error:
            made = call.done()
            self.wrong |= {(op, kernels_of(job.name, job.text)): str(error) for op in job.ops if op not in made}

    def wait(self, ops: tuple[str, ...], end: float) -> None:
        """Until these ops are done, or time.monotonic() reaches `end`."""
        while self.step() & set(ops) and time.monotonic() < end:
            time.sleep(0.1)

    def stop(self, op: str) -> None:
        """Give up the jobs that have not done it yet."""
        for job, call in list(self.running):
            if op in job.ops and op not in call.done():
                self.end(job, call)
        late = [job for job in self.waiting if op in job.ops]
        self.waiting = [job for job in self.waiting if job not in late]
        self.wrong |= {(op, kernels_of(job.name, job.text)): NOT_DONE for job in late for op in job.ops}

    def why_not(self, name: str, op: str, text: str) -> str | None:
        """What stopped the kernels of a call from being compiled, if something did."""
        return self.wrong.get((op, kernels_of(name, text)))


class Job(NamedTuple):
    name: str
    text: str
    ops: list[str]


def kernels_of(name: str, text: str) -> tuple:
    """What an implementation compiles anew for: every shape, or only other heads."""
    shape = parse_shape(text)
    return (name, shape.H, shape.HV, shape.packed) if IMPLEMENTATIONS[name].compiles == "heads" else (name, text)
