"""Compile every kernel in every configuration that can be selected, for cards that are not here, and report.

    python tests/compiling.py                        every architecture, a table
    python tests/compiling.py --arch sm_90 --only scan

Triton cannot interpret and compile in one process: this file is a program of its own, which test_compile.py runs. What
is to be compiled, launches.py finds out by making calls; its Target says what is known of each. A module named by
--module has a function compile_targets(arch) of its own.
"""

import argparse
import collections
import dataclasses
import fnmatch
import functools
import importlib
import json
import multiprocessing
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name: (backend, architecture, lanes a warp, bytes of shared memory one program may have)
CARDS = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}


# Four registers kept in memory once, outside of every loop, cost nothing that could be measured.
TOLERATED_SPILLS = 16
# What a release leaves at most, in bytes a thread, where another spills nothing: {(card, names): {release: ..}}.
KNOWN_SPILLS = {
    ("sm_80", "prepare/*"): {"3.8": 256, "3.9": 36},  # it has no loop over chunks
    ("sm_90", "scan/bf16/K128/*/BV64/*/few"): {"3.4": 20, "3.9": 44},  # in segments: some in the loop over these
    ("sm_90", "adjoint_segment/*"): {"3.4": 84, "3.5": 4},
    ("sm_90", "adjoints/bf16/K128/*/BV64/*/kept"): {"3.4": 100, "3.9": 56},
    ("sm_90", "adjoints/bf16/K128/*/BV64/*/few/remade"): {"3.9": 44},
    ("sm_90", "adjoints/bf16/K128/*/BV128/*/kept"): {"3.4": 20},
    ("sm_90", "pairs/bf16/K128/*"): {"3.4": 60, "3.5": 16, "3.6": 4, "3.7": 32, "3.9": 4},
    ("sm_90", "hopper_gradients/*"): {"3.6": 28, "3.7": 28},  # addresses, read again once a head
    ("sm_90", "hopper_scan/*/prompt/many"): {"3.6": 36, "3.7": 40, "3.8": 32, "3.9": 36},
    ("sm_90", "hopper_scan/*/packed/*"): {"3.9": 32},
    ("sm_100", "gradients/bf16/K256/*"): {"3.4": 28},
    ("sm_100", "decode/*/every_state"): {"3.7": 20},
    ("gfx942", "scan/bf16/K128/*"): {"3.4": 28},
    ("gfx942", "adjoints/bf16/K256/*"): {"3.8": 160},
}


@dataclasses.dataclass
class Row:
    """What became of one kernel in one configuration on one architecture."""

    arch: str
    name: str
    kernel: str
    hot: bool
    warps: int
    stages: int
    shared: int = 0  # bytes a program
    registers: int = 0  # a thread
    spills: int = 0  # bytes a thread stored to memory for want of registers
    faults: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


# ---------------------------------------------------------------- what the compiler says


def ptxas_report(log):
    """(registers, spilled bytes, [C75xx warnings of products that wait for each other]) of ptxas -v."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    return max(registers, default=0), sum(spills), [w.strip() for w in re.findall(r".*C75\d\d.*serializ.*", log)]


def spilled_in_loops(sass):
    """Whether a register goes to memory, or comes back, inside a loop. What waits for a copy is written behind the
    last exit and jumps back: no loop."""
    lines = sass.splitlines()
    end = max((n for n, line in enumerate(lines) if re.search(r"\bEXIT\b", line)), default=0)
    labels = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r"\s*(\.L\w+):", line))}
    jumps = [(labels.get(m[1], n), n) for n, line in enumerate(lines) if (m := re.search(r"BRA.*`\((\.L\w+)\)", line))]
    loops = [(first, last) for first, last in jumps if first < last <= end]
    spills = [n for n, line in enumerate(lines) if re.search(r"\b(STL|LDL)\b", line)]
    return any(first <= n <= last for n in spills for first, last in loops)


def disassembled(cubin):
    """The machine code of a compiled kernel, by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def amdgcn_report(assembly):
    """(vector registers, bytes of scratch, []) of an AMD kernel's metadata."""
    values = collections.defaultdict(int)
    for name, n in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly):
        values[name] = max(values[name], int(n))
    return values["vgpr_count"], values["private_segment_fixed_size"], []


def one_deep_buffers(ttgir):
    """Shared-memory buffers one deep that asynchronous dots read in a loop where some dots are left in flight.

    The next iteration's copy would overwrite what a dot in flight still reads: that is how a correct kernel came out
    wrong at one tile width only. A buffer is one deep if it is allocated outside the loop as memdesc<1x...>.
    """
    found = []
    for loop in loops(ttgir):
        inside = "\n".join(loop)
        waits = [int(n) for n in re.findall(r"warp_group_dot_wait.*?pendings = (\d+)", inside)]
        if not any(waits):
            continue
        single = set(re.findall(r"(%[\w#]+) = ttg\.local_alloc\s*:.*memdesc<1x", ttgir)) - set(
            re.findall(r"(%[\w#]+) = ttg\.local_alloc", inside)
        )
        views = {}
        for line in loop:
            if m := re.match(r"\s*(%[\w#]+) = ttg\.memdesc_\w+ (%[\w#]+)", line):
                views[m[1]] = views.get(m[2], m[2])
        for line in loop:
            if "ttng.warp_group_dot " in line:
                operands = re.findall(r"%[\w#]+", line.split("=", 1)[1])[:2]
                found += [views.get(x, x) for x in operands if views.get(x, x) in single]
    return sorted(set(found))


def read_accumulators(ptx):
    """Registers that a product of Hopper's adds to in place and that something else reads before it.

    ptxas 12.8 may move that read behind the product, and what it gives is another sum: dg was wrong for it, by warps of
    four and in bfloat16 alone. Setting a register like another, as zeros are, is no read, and nothing moves from one
    block to the next: what a loop's last turn has read the next may overwrite.
    """
    found, reads = set(), set()
    for line in ptx.splitlines():
        if line.startswith("$L__BB"):
            reads = set()
        elif "wgmma.mma_async" in line:
            found |= reads & set(re.findall(r"%[rf]\d+", line[line.index("{") : line.index("}")]))
        elif m := re.match(r"\s*(?:@!?%p\d+\s+)?(?!mov|wgmma)([a-z][\w.:]*)\s+(.*)", line):
            written, _, read = ("", "", m[2]) if m[1].startswith(("st", "red", "bar")) else m[2].partition(",")
            if written.startswith("{"):
                written, _, read = m[2].partition("}")
            reads |= set(re.findall(r"%[rf]\d+", read))
            reads -= set(re.findall(r"%[rf]\d+", written))
    return sorted(found)


def shared_descriptors(ptx):
    """Addresses in shared memory that products of Hopper's take operands of two kinds from, by one register: rows of 32
    numbers, say, where rows of 64 were.

    ptxas 12.8 may build the second descriptor from a register that nobody set. Found by the 64-bit constants that are
    added to the address: their high halves say how rows lie.
    """
    steps = {m[1]: (m[2], int(m[3])) for m in re.finditer(r"(?:add\.s64|or\.b64)\s+(%rd\d+), (%rd\d+), (-?\d+);", ptx)}
    kinds = collections.defaultdict(set)
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            for register in re.findall(r"%rd\d+", line):
                offset = 0
                while register in steps:
                    register, more = steps[register]
                    offset += more
                kinds[register].add(offset % 2**64 >> 32)
    return sorted(register for register, found in kinds.items() if len(found) > 1)


def loops(ttgir):
    """The lines of each innermost scf.for, by indentation."""
    lines = ttgir.splitlines()
    for n, line in enumerate(lines):
        if "scf.for" in line:
            depth = len(line) - len(line.lstrip())
            end = next(m for m in range(n + 1, len(lines)) if lines[m].startswith(" " * depth + "}"))
            if not any("scf.for" in inner for inner in lines[n + 1 : end]):
                yield lines[n + 1 : end]


# ---------------------------------------------------------------- one compilation


def source(target):
    """The target as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    names = target.kernel.arg_names
    signature = {n: "constexpr" if n in target.constexprs else target.signature[n] for n in names}
    divisible = {n for n, t in signature.items() if t.startswith("*") or n in getattr(target, "divisible", ())}
    divisible -= set(target.constexprs)
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in divisible}
    if getattr(target.kernel, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    return ASTSource(fn=target.kernel, signature=signature, constexprs=dict(target.constexprs), attrs=attrs)


def known_spills(row):
    """Bytes that a kernel is known to spill under this release of Triton."""
    import triton

    release = ".".join(triton.__version__.split(".")[:2])
    of_card = {names: its for (arch, names), its in KNOWN_SPILLS.items() if arch == row.arch}
    return max((its.get(release, 0) for names, its in of_card.items() if fnmatch.fnmatch(row.name, names)), default=0)


def harmless(row, made):
    """Whether the few bytes that a kernel spills stay outside of its loops."""
    if CARDS[row.arch][0] != "cuda" or row.spills > TOLERATED_SPILLS:
        return False
    return not spilled_in_loops(disassembled(made.asm["cubin"]))


def compile_one(target, arch):
    """Compile one target for one architecture. Returns its Row; whatever goes wrong is in Row.faults."""
    import triton
    from triton.backends.compiler import GPUTarget

    backend, number, lanes, limit = CARDS[arch]
    row = Row(arch, target.name, target.kernel.__name__, bool(target.hot), target.num_warps, target.num_stages)
    options = {"num_warps": target.num_warps, "num_stages": target.num_stages}
    if backend == "cuda" and getattr(target, "maxnreg", None):
        options["maxnreg"] = target.maxnreg
    start, logs = time.perf_counter(), _PTXAS_LOGS
    logs.clear()
    try:
        made = triton.compile(source(target), target=GPUTarget(backend, number, lanes), options=options)
    except Exception as e:  # whatever it is, it is this row's fault and belongs into the report
        row.faults.append(f"does not compile: {type(e).__name__}: {str(e).strip()[-300:]}")
        return row
    row.seconds, row.shared = time.perf_counter() - start, made.metadata.shared
    report = ptxas_report("\n".join(logs)) if backend == "cuda" else amdgcn_report(made.asm["amdgcn"])
    row.registers, row.spills, row.faults = report
    if row.shared > limit:
        row.faults.append(f"{row.shared} bytes of shared memory, the card has {limit}")
    if row.hot and row.spills > known_spills(row) and not harmless(row, made):
        row.faults.append(f"spills {row.spills} bytes a thread, and it is hot")
    row.faults += [f"buffer {b} is one deep and read by a dot in flight" for b in one_deep_buffers(made.asm["ttgir"])]
    if "ptx" in made.asm:
        row.faults += [f"{r} is read before a product adds to it" for r in read_accumulators(made.asm["ptx"])[:1]]
        row.faults += [f"{r} has descriptors of two kinds" for r in shared_descriptors(made.asm["ptx"])]
    return row


_PTXAS_LOGS = []


def keep_ptxas_logs():
    """Triton deletes what ptxas -v says about registers and spills: read it in passing."""
    run = subprocess.run

    def listening(command, *args, stderr=None, **kwargs):
        try:
            return run(command, *args, stderr=stderr, **kwargs)
        finally:
            if "--gpu-name" in str(command) and hasattr(stderr, "name"):
                _PTXAS_LOGS.append(Path(stderr.name).read_text())

    subprocess.run = listening


def stand_in_for_the_amd_linker(folder):
    """Triton before 3.5 calls ROCm's ld.lld last. What is checked is made by then; where none is, a copy will do."""
    from triton.backends.amd.compiler import HIPBackend

    try:
        getattr(HIPBackend, "path_to_rocm_lld", bool)()
    except Exception:  # Triton raises just that
        linker = Path(folder, "ld.lld")
        linker.write_text('#!/bin/sh\n[ "$1" = --version ] && echo stand-in || cp "$4" "$6"\n')
        linker.chmod(linker.stat().st_mode | stat.S_IXUSR)
        os.environ["TRITON_HIP_LLD_PATH"] = str(linker)


# ---------------------------------------------------------------- all of them


@functools.cache
def targets(arch, module):
    """Every target of a module that lists some, for one architecture."""
    return list(importlib.import_module(module).compile_targets(arch))


def _work(task):
    arch, n, module = task
    return compile_one(targets(arch, module)[n], arch)


def compile_all(archs, module, only="*", workers=None, short=False):
    """Rows of everything, compiled by as many processes as there are processors."""
    tasks = []
    for arch in archs:
        known = set()
        for n, target in enumerate(targets(arch, module)):
            wanted = not short or target.hot or target.kernel not in known
            known.add(target.kernel)
            if wanted and fnmatch.fnmatch(target.name, only):
                tasks.append((arch, n, module))
    with multiprocessing.get_context("fork").Pool(workers or os.cpu_count()) as pool:
        return pool.map(_work, tasks, chunksize=1)


def table(rows):
    """The report: one line a kernel and configuration, the architectures side by side."""
    archs = sorted({r.arch for r in rows}, key=list(CARDS).index)
    by_name = collections.defaultdict(dict)
    for r in rows:
        by_name[r.name][r.arch] = r
    width = max(map(len, by_name), default=4)
    lines = ["K: KiB of shared memory, r: registers a thread, s: bytes it spilled; * must not spill, ! faulty"]
    lines += ["  ".join([" " * width, *(f"{a:>18}" for a in archs)])]
    for name, found in by_name.items():
        cells = [f"{_cell(found.get(a)):>18}" for a in archs]
        lines.append("  ".join([f"{name:{width}}", *cells]))
    return "\n".join(lines)


def _cell(row):
    if row is None:
        return "-"
    marks = ("*" if row.hot else "") + ("!" if row.faults else "")
    return f"{row.shared / 1024:.0f}K {row.registers}r {row.spills}s{marks}"


def main():
    """Compile, print the table and the faults; exit 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--arch", action="append", choices=list(CARDS), help="all of them if left out")
    parser.add_argument("--module", default="launches", help="whose compile_targets; those of launches.py if left out")
    parser.add_argument("--only", default="*", help="pattern of target names, such as 'scan*'")
    parser.add_argument("--short", action="store_true", help="what is hot, and one configuration of every other kernel")
    parser.add_argument("--json", help="write the rows here as well")
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    import triton

    keep_ptxas_logs()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gdn_ref_compile_") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # empty, or the compiler would not run and say nothing
        stand_in_for_the_amd_linker(folder)
        rows = compile_all(args.arch or list(CARDS), args.module, args.only, args.workers, args.short)
    print(f"Triton {triton.__version__}: {len(rows)} compilations in {time.perf_counter() - start:.0f} s")
    print(table(rows))
    faulty = [r for r in rows if r.faults]
    for r in faulty:
        print(f"{r.arch} {r.name}: " + "; ".join(r.faults))
    if args.json:
        Path(args.json).write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1))
    return 1 if faulty else 0


if __name__ == "__main__":
    os.environ.update(TRITON_INTERPRET="0", TRITON_ALWAYS_COMPILE="1")  # what is taken from a cache reports nothing
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
