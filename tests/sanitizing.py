"""Run a small part of the kernel tests under compute-sanitizer, which sees reads and writes outside of allocations.

    python tests/sanitizing.py                 on a machine with a GPU and CUDA's compute-sanitizer

Nothing else looks at memory that way: a read beyond an end may find numbers and do no harm until it does. First a fault
is planted, to see that the tool sees it here. Exit status: 0 if the tests are clean, 1 if not. Nobody shall
take silence for proof: it is 2 where there is no tool, and 3 where it does not see the planted fault.
"""

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NO_TOOL, BLIND = 2, 3  # exit status where nothing was looked at
ROOT = Path(__file__).resolve().parent.parent
TESTS = "shapes or packed or wide or segments_are or every_config or in_a_row or decode_equals or strid or no_sequence"
PLANTED = """
import torch, triton, triton.language as tl

@triton.jit
def copy(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i))

x, y = torch.zeros(100, device="cuda"), torch.zeros(128, device="cuda")
copy[(1,)](x, y, 128)
torch.cuda.synchronize()
"""


def find_tool():
    """Path of compute-sanitizer, or None."""
    places = sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or (places[-1] if places else None)


def watched(tool, *command):
    """Run Python under the tool, every tensor an allocation of its own. Returns (exit status, output)."""
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GDN_REF_KERNELS": "short", "PYTHONPATH": str(ROOT)}
    line = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, *command]
    ran = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **settings})
    return ran.returncode, ran.stdout + ran.stderr


def main(argv=None):
    """Plant a fault, run the tests, say what was found. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-k", default=TESTS, help="which of the kernel tests, as pytest takes it")
    args = parser.parse_args(argv)
    tool = find_tool()
    if tool is None:
        print("nothing was looked at: no compute-sanitizer on this machine", file=sys.stderr)
        return NO_TOOL
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "planted.py")  # a file, for Triton reads the source of its kernels
        script.write_text(PLANTED)
        status, output = watched(tool, str(script))
    if status != 9 or "Invalid __global__ read" not in output:
        said = "nothing was looked at: compute-sanitizer does not see a planted fault on this machine"
        print(f"{said}\n{output[-1500:]}", file=sys.stderr)
        return BLIND
    print("a planted read beyond the end is seen")
    start, files = time.perf_counter(), sorted(str(p) for p in ROOT.glob("tests/test_kernels_*.py"))
    status, output = watched(
        tool, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "-k", args.k, *files
    )
    print(output[-3000:])
    print(f"{'clean' if not status else 'faulty'}, {time.perf_counter() - start:.0f} s")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
