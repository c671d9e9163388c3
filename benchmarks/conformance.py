"""Verdicts of the check on gdn_ref and its peers, recorded in benchmarks/results/conformance.json.

    python benchmarks/conformance.py                       CPU: ours, transformers, FLA's naive forms; a few minutes
    python benchmarks/conformance.py --device cuda --seconds 200 --out gpu.json      ours, FLA, FlashQLA, FlashInfer
    python benchmarks/conformance.py --merge gpu.json      put another machine's verdicts into the recorded file
    python benchmarks/conformance.py --markdown            the recorded verdicts as a table

Every implementation is checked in processes of its own, several at a time: peers compile for long, and one that
brings the GPU down must not take the others with it. What it was asked for (widths, heads, dtypes) is recorded, and so
is every property for which there was no time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from gdn_ref.check import adapters, report, suite
from gdn_ref.check.records import BOUNDS, ERROR, FAIL, NOT_OFFERED, PASS

RECORDED = Path(__file__).resolve().parent / "results" / "conformance.json"
CPU = ("gdn_ref", "gdn_ref.recurrent", "gdn_ref.pool", "transformers", "transformers.recurrent", "fla.naive_chunk",
       "fla.naive_recurrent")  # fmt: skip
GPU = ("flash_qla", "fla", "fla.recurrent", "gdn_ref", "gdn_ref.recurrent", "gdn_ref.pool", "flashinfer")
# On a GPU peers compile for 40 seconds or more for every width, pair of heads, dtype and chunk size.
ASKED = {
    "fla": dict(dtypes=("bfloat16",), widths=((128, 128), (64, 128)), heads=((2, 4),), chunk_sizes=(64,)),
    "fla.recurrent": dict(dtypes=("bfloat16",), widths=((128, 128), (64, 128)), heads=((2, 4),)),
    "flash_qla": dict(dtypes=("bfloat16",)),
}
PROCESSES = {"flash_qla": 8, "fla": 4, "gdn_ref": 4, "gdn_ref.pool": 2}  # on a GPU; one where nothing is said


# ---- in a process of its own -----------------------------------------------------------------------------------------


def work(name: str, device: str, full: bool, names: list[str], path: Path) -> None:
    """Check one implementation, writing a line to `path` before and after each property; stop when the GPU is lost."""
    torch.set_num_threads(1)
    with path.open("a") as file:

        def say(**line):
            print(json.dumps(line, allow_nan=False), file=file, flush=True)

        try:
            implementation = adapters.load(name, device, limits=ASKED.get(name) if device != "cpu" else None)
        except adapters.LoadError as error:
            return say(problem=report.plain(str(error)))
        say(version=implementation.version)
        for item in suite.choose(names, full):
            say(begun=item.name)
            finding = suite.examine(item, implementation, device, full)
            say(finding=compact(finding))
            if suite.is_fatal(finding):
                os._exit(3)  # the driver would raise once more on an orderly way out


def compact(finding) -> dict:
    """A finding as it is recorded: inputs only where something failed."""
    row = {"property": finding.property.name, "verdict": finding.verdict}
    if finding.worst and finding.verdict != NOT_OFFERED:
        worst = report._measurement(finding.worst)
        row |= {"error": worst["error"], "bound": worst["bound"]}
    if finding.verdict in (FAIL, ERROR):
        row |= {"cases": finding.cases, "failures": finding.failures, "where": finding.worst.what,
                "input": finding.worst.case}  # fmt: skip
    return row | ({"note": report.plain(finding.note)} if finding.note else {})


# ---- all of them -----------------------------------------------------------------------------------------------------


class Worker:
    """One process, the properties it was given, and the file it writes to."""

    def __init__(self, name: str, names: list[str], args: argparse.Namespace, folder: Path):
        self.name, self.names, self.path = name, names, folder / f"{name}.{time.monotonic_ns()}.jsonl"
        self.path.touch()
        command = [sys.executable, __file__, "--worker", name, "--device", args.device, "--part", str(self.path),
                   "--property", *names] + ["--full"] * args.full  # fmt: skip
        self.log = self.path.with_suffix(".log").open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def lines(self) -> list[dict]:
        """What it has written so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]

    def outcome(self) -> tuple[dict, list[str]]:
        """What it found, by property, and which properties it has not begun; one that it died in is an ERROR."""
        lines = self.lines()
        found = {x["finding"]["property"]: x["finding"] for x in lines if "finding" in x}
        begun = [x["begun"] for x in lines if "begun" in x]
        code = self.process.poll()
        if begun and begun[-1] not in found and code not in (None, 0, -15, -9):
            note = f"the process ended with status {code}"
            found[begun[-1]] = {"property": begun[-1], "verdict": ERROR, "note": note}
        return found, [n for n in self.names if n not in found]


def run(args: argparse.Namespace) -> dict:
    """Check everything within the time; the document."""
    end = time.monotonic() + args.seconds
    names = [p.name for p in suite.choose(args.property, args.full)]
    found = {name: {} for name in args.impl}
    with tempfile.TemporaryDirectory(prefix="gdn_ref_check_") as folder:
        waiting, running, heads = [], [], {}
        for name in args.impl:
            many = PROCESSES.get(name, 1) if args.device != "cpu" else 1
            waiting += [(name, names[n::many]) for n in range(min(many, len(names)))]
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < args.jobs:
                running.append(Worker(*waiting.pop(0), args, Path(folder)))
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                left = gather(worker, found, heads)
                if left and left != worker.names and "problem" not in heads[worker.name]:
                    waiting.append((worker.name, left))  # it lost the GPU, or its life, on the way
            time.sleep(0.2)
            bar(found, running, len(names))
        for worker in running:
            worker.process.kill()
            worker.process.wait()
            gather(worker, found, heads)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return document(args, names, found, heads)


def gather(worker: Worker, found: dict, heads: dict) -> list[str]:
    """Take in what a worker found; what it has not begun."""
    results, left = worker.outcome()
    found[worker.name] |= results
    head = heads.setdefault(worker.name, {})
    for line in worker.lines():
        head |= {n: line[n] for n in ("version", "problem") if n in line}
    if not head:
        said = worker.path.with_suffix(".log").read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        head["problem"] = report.plain(said[-1])
    return left


def bar(found: dict, running: list[Worker], total: int) -> None:
    """One line on stderr: how far each has come."""
    if sys.stderr.isatty():
        here = {w.name: len(w.outcome()[0]) for w in running}
        parts = (f"{name} {len(rows) + here.get(name, 0)}/{total}" for name, rows in found.items())
        print("\r" + "  ".join(parts)[:150].ljust(150), end="", file=sys.stderr, flush=True)


def document(args: argparse.Namespace, names: list[str], found: dict, heads: dict) -> dict:
    """What is recorded of one machine."""
    reports = []
    for name in args.impl:
        rows = [found[name][n] for n in names if n in found[name]]
        counts = {v: sum(r["verdict"] == v for r in rows) for v in (PASS, FAIL, ERROR, NOT_OFFERED)}
        asked = {"asked": ASKED[name]} if args.device != "cpu" and name in ASKED else {}
        missing = [n for n in names if n not in found[name]]
        head = heads.get(name) or {"problem": "no time was left to begin with it"}
        if "problem" not in head and missing:
            head = head | {"not_run": missing}
        reports.append({"name": name, **head, **asked, **counts, "findings": rows})
    return {
        "device": suite.device_name(args.device),
        "level": "full" if args.full else "quick",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "reports": reports,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the recorded file -----------------------------------------------------------------------------------------------


def merged(recorded: dict, new: dict) -> dict:
    """The recorded file with this machine's verdicts in the place of older ones of the same kind of device; what was
    found there with the same Python, torch and Triton, and not again, stays."""
    machines = {m["device"]: m for m in recorded.get("machines", [])}
    old = machines.get(new["device"], {"reports": []})
    if old["reports"] and all(old.get(n) == new.get(n) for n in ("level", "python", "torch", "triton")):
        reports = {r["name"]: r for r in old["reports"]}
        reports |= {r["name"]: completed(reports.get(r["name"], r), r) for r in new["reports"]}
        new = new | {"reports": list(reports.values())}
    machines[new["device"]] = new
    properties = [{"name": p.name, "reason": p.reason, "chapter": p.chapter, "full": p.full} for p in suite.PROPERTIES]
    return {"bounds": {dtype: bound._asdict() for dtype, bound in BOUNDS.items()}, "properties": properties,
            "machines": sorted(machines.values(), key=lambda m: m["device"] != "cpu")}  # fmt: skip


def completed(old: dict, new: dict) -> dict:
    """What an earlier run of the same version had no time for, or did not know of yet, joined by a run of nothing else;
    or `new`."""
    known, found = ({f["property"] for f in r.get("findings", ())} for r in (old, new))
    if not found or known & found or old.get("version") != new.get("version"):
        return new
    order = [p.name for p in suite.PROPERTIES]
    findings = sorted(old["findings"] + new["findings"], key=lambda f: order.index(f["property"]))
    counts = {v: sum(f["verdict"] == v for f in findings) for v in (PASS, FAIL, ERROR, NOT_OFFERED)}
    left = [n for n in old.get("not_run", ()) if n not in found]
    head = {n: x for n, x in old.items() if n not in ("not_run", "findings")}
    return head | ({"not_run": left} if left else {}) | counts | {"findings": findings}


def markdown(recorded: dict) -> str:
    """The table of the README: one row an implementation, its failures by name."""
    lines = ["| implementation | where | passed | failed | not offered | what failed |", "|---|---|---|---|---|---|"]
    for machine in recorded["machines"]:
        where = machine["device"].removeprefix("NVIDIA ")
        for r in machine["reports"]:
            name = " ".join(filter(None, (f"`{r['name']}`", r.get("version"))))
            if "problem" in r:
                lines.append(f"| {name} | {where} | | | | not run: {r['problem']} |")
                continue
            bad = [f"{f['property']} ({_short(f)})" for f in r["findings"] if f["verdict"] in (FAIL, ERROR)]
            bad += [f"no time for {len(r['not_run'])} properties"] if "not_run" in r else []
            counts = f"{r[PASS]} | {r[FAIL] + r[ERROR]} | {r[NOT_OFFERED]}"
            lines.append(f"| {name} | {where} | {counts} | {'; '.join(bad)} |")
    return "\n".join(lines)


def _short(f: dict) -> str:
    if f["verdict"] == ERROR:
        return "raises"
    return f"{f['error']:.1e}" if f["error"] is not None else "not finite"


def summary(doc: dict) -> str:
    """A few lines a machine: counts, and the input of every failure."""
    lines = []
    for r in doc["reports"]:
        counts = ", ".join(f"{r[v]} {v}" for v in (PASS, FAIL, ERROR, NOT_OFFERED))
        missing = f"; no time for {len(r['not_run'])}" if "not_run" in r else ""
        lines.append(f"{r['name']} {r.get('version', '')}: {r.get('problem') or counts}{missing}")
        bad = [f for f in r["findings"] if f["verdict"] in (FAIL, ERROR)]
        lines += [f"  {f['property']}: {_short(f)} {f.get('where', '')} {f.get('note', '')}"[:110] for f in bad]
    return "\n".join(lines)


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", nargs="+", choices=list(adapters.BUILT_IN), metavar="NAME",
                        help="whom (default: those named above)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--full", action="store_true", help="the full check; the default on a CPU is full too")
    parser.add_argument("--quick", action="store_true", help="the quick check; the default on a GPU")
    parser.add_argument("--seconds", type=float, default=1800, help="for everything; what is left then is named")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes at a time")
    parser.add_argument("--out", type=Path, help="write this machine's verdicts here, not into the recorded file")
    parser.add_argument("--merge", type=Path, help="run nothing: put this file's verdicts into the recorded file")
    parser.add_argument("--markdown", action="store_true", help="run nothing: print the recorded verdicts as a table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--property", nargs="+", default=[], metavar="NAME", help="only these properties")
    args = parser.parse_args(argv)
    args.full = args.full or (args.device == "cpu" and not args.quick)
    args.impl = args.impl or list(CPU if args.device == "cpu" else GPU)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run, merge or print."""
    args = parse(argv)
    if args.worker:
        work(args.worker, args.device, args.full, args.property, args.part)
        return 0
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if args.markdown:
        print(markdown(recorded))
        return 0
    new = json.loads(args.merge.read_text()) if args.merge else run(args)
    print(summary(new))
    if args.out:
        args.out.write_text(json.dumps(new, indent=1) + "\n")
    else:
        RECORDED.write_text(json.dumps(merged(recorded, new), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
