"""Every kernel in every configuration compiles for cards that are not here, fits them, and spills nothing that is hot.

GDN_REF_KERNELS=short leaves all but one configuration of those kernels out that are not hot.
`python tests/compiling.py` is the same report by hand. Each architecture's table is shown in the output of the tests.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import compiling
import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed, so no kernel is compiled here; see `make test`")

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "gdn_ref" / "kernels"


def compile_apart(*arguments, path=ROOT):
    """Run compiling.py in a process of its own, which must not interpret. Returns (its output, rows)."""
    places = [str(path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, places)), "TRITON_DEFAULT_FP_FUSION": "1"}
    report = Path(os.environ["GDN_REF_FIGURES"], f"rows_{os.getpid()}.json")  # a folder that conftest.py clears away
    command = [sys.executable, str(ROOT / "tests" / "compiling.py"), "--json", str(report), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1500, env={**os.environ, **settings})
    assert report.exists(), ran.stdout + ran.stderr
    rows = json.loads(report.read_text())
    report.unlink()
    return ran.stdout, rows


@pytest.fixture(scope="module")
def compiled():
    """Names of the kernels that were compiled, gathered by test_compiles."""
    return {}


@pytest.mark.parametrize("arch", compiling.CARDS)
def test_compiles(arch, compiled, capsys):
    """H06 and the rest: nothing is refused, nothing needs more shared memory than there is, nothing hot spills."""
    short = ["--short"] if os.environ.get("GDN_REF_KERNELS") == "short" else []
    output, rows = compile_apart("--arch", arch, *short)
    with capsys.disabled():
        print("\n" + output)
    assert rows, "no module of gdn_ref.kernels lists targets"
    compiled[arch] = {r["kernel"] for r in rows}
    assert len({r["name"] for r in rows}) == len(rows), "names of targets must differ"
    assert not [f"{r['name']}: {fault}" for r in rows for fault in r["faults"]]


def test_no_kernel_is_left_out(compiled):
    """Whatever is launched ends in _kernel, and is compiled for every architecture; what is in Gluon for Hopper, by the
    Tritons that have what it takes."""
    if not compiled:
        pytest.skip("nothing was compiled in this run")
    defined = set()
    for path in KERNELS.glob("*.py"):
        functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        defined |= {f.name for f in functions if f.decorator_list and f.name.endswith("_kernel")}
    gluon = {"hopper_gradients_kernel", "hopper_scan_kernel", "starts_kernel"}
    assert gluon < defined
    for arch, names in compiled.items():
        has_gluon = arch == "sm_90" and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
        assert names == (defined if has_gluon else defined - gluon), arch


SELECTED = """
import launches
from gdn_ref.kernels import launch, launch_backward as back

for card in launches.PROCESSORS:
    found = set()
    for t in launches.compile_targets(card):
        name, cut = t.kernel.__name__.removeprefix("hopper_"), [t.constexprs.get(x) for x in ("C", "BK", "BV")]
        found |= {(name, cut[0], cut[2], t.num_warps), (name, *cut, t.num_warps)}
    wanted = {("scan_kernel", c.C, c.BV, c.warps) for c in launch.configurations(card)}
    for c in (c for configs in back.CONFIGS[card].values() for c in configs):
        wanted |= {(name, c.C, c.BV, c.warps) for name in ("states_kernel", "adjoints_kernel")}
        wanted |= {("gradients_kernel", c.C, c.BK, c.block, c.gradient_warps)}
    print(card, len(wanted), sorted(wanted - found))
"""


def test_every_configuration_is_compiled():
    """Each that the tables hold is chosen by some call whose launches are listened to."""
    places = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    settings = {**os.environ, "PYTHONPATH": places, "TRITON_INTERPRET": "0"}
    ran = subprocess.run([sys.executable, "-c", SELECTED], capture_output=True, text=True, env=settings)
    assert ran.returncode == 0, ran.stderr
    said = [line.split(" ", 2) for line in ran.stdout.splitlines()]
    assert [card for card, *_ in said] == list(compiling.CARDS)
    assert all(int(number) >= 8 and missing == "[]" for _, number, missing in said), ran.stdout


# ---------------------------------------------------------------- the report itself: a fault must be seen

FAULTY = """
import collections
import triton
import triton.language as tl

Target = collections.namedtuple("Target", "name kernel signature constexprs num_warps num_stages hot")

@triton.jit
def product(a, b, c, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j))
    tl.store(c + i * N + j, x)

@triton.jit
def refused(a, b, c, N: tl.constexpr):
    tl.store(c + tl.arange(0, N), tl.load(a + tl.arange(0, 2 * N)))

def compile_targets(arch):
    pointers = {"a": "*fp16", "b": "*fp16", "c": "*fp16"}
    yield Target("good", product, pointers, {"N": 32}, 4, 1, True)
    yield Target("refused", refused, pointers, {"N": 32}, 4, 1, True)
    yield Target("large", product, pointers, {"N": 256}, 16, 1, True)
    yield Target("spilling", product, pointers, {"N": 128}, 1, 1, True)
"""


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_faults_are_seen(arch, tmp_path):
    (tmp_path / "faulty_kernels.py").write_text(FAULTY)
    output, rows = compile_apart("--arch", arch, "--module", "faulty_kernels", path=tmp_path)
    faults = {r["name"]: " ".join(r["faults"]) for r in rows}
    assert not faults["good"]
    assert "does not compile" in faults["refused"]
    assert "bytes of shared memory" in faults["large"]
    assert arch == "gfx942" or "spills" in faults["spilling"]  # CDNA has 512 registers a thread, and room
    assert "good" in output and "!" in output


def test_ptxas_report():
    log = """
    ptxas info    : Function properties for f
        96 bytes stack frame, 84 bytes spill stores, 88 bytes spill loads
    ptxas info    : Used 168 registers, used 1 barriers
    ptxas info    : (C7519) warpgroup.arrive is injected in around line 7 by compiler in function 'f'
    ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to f
    """
    registers, spills, warnings = compiling.ptxas_report(log)
    assert (registers, spills) == (168, 84)
    assert len(warnings) == 1 and "C7510" in warnings[0]


@pytest.mark.parametrize("where, inside", [(1, False), (3, True), (5, False), (8, False)])
def test_spills_count_where_they_are_repeated(where, inside):
    """Loop at lines 2 to 4; what comes after the last exit waits for a copy and jumps back."""
    sass = [".L_x_0:", "IADD3 R1", ".L_x_1:", "HGMMA", "@P0 BRA `(.L_x_1) ;", "IADD3 R2", "EXIT ;", ".L_x_2:", "SYNCS"]
    sass += ["BRA `(.L_x_0) ;"]
    sass.insert(where, "STL [R1], R0 ;")
    assert compiling.spilled_in_loops("\n".join(sass)) == inside


def test_amdgcn_report():
    assembly = ".private_segment_fixed_size: 40\n.vgpr_count:     128\n.vgpr_spill_count: 10\n"
    assert compiling.amdgcn_report(assembly) == (128, 40, [])


@pytest.mark.parametrize("depth, pendings, found", [(1, 1, ["%b"]), (1, 0, []), (2, 1, [])])
def test_one_deep_buffers(depth, pendings, found):
    """The miscompile of a pipelined tile that a dot in flight still reads (H01), as its TTGIR looks."""
    ttgir = f"""
    %b = ttg.local_alloc : () -> !ttg.memdesc<{depth}x64x64xbf16, #shared, #smem, mutable>
    %r = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>) {{
      %0 = ttg.memdesc_index %b[%c0] : !ttg.memdesc<{depth}x64x64xbf16, #shared> -> !ttg.memdesc<64x64xbf16, #shared>
      %1 = ttg.memdesc_trans %0 {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16, #shared>
      %2 = ttng.warp_group_dot %a, %1, %acc {{isAsync = true}} : tensor<64x64xbf16> * !ttg.memdesc<64x64xbf16>
      %3 = ttng.warp_group_dot_wait %2 {{pendings = {pendings} : i32}} : tensor<64x64xf32>
    }}
    """
    assert compiling.one_deep_buffers(ttgir) == found


@pytest.mark.parametrize("first, found", [("fma.rn.f32 %r9, %r2, %r7, %r8", ["%r2"]), ("mul.f32 %r9, %r7, %r8", [])])
def test_read_accumulators(first, found):
    """A sum of what a product then adds to (H01's kind), as its PTX looks; not what is written anew in between, a copy
    of zeros, or a sum afterwards."""
    ptx = f"""
        mul.f32 \t%r1, %r5, %r6;
        mov.b32 \t%r2, %r1;
        {first};
        fma.rn.f32 \t%r10, %r3, %r7, %r8;
        mul.f32 \t%r3, %r5, %r7;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r2,%r3}}, %rd4, %rd5, %p1, 1, 1, 0, 0;
        wgmma.wait_group.sync.aligned 0;
        fma.rn.f32 \t%r11, %r2, %r7, %r8;
    """
    assert compiling.read_accumulators(ptx) == found


@pytest.mark.parametrize("second, found", [(-9223371899415822336, ["%rd1"]), (4611686293305294976, [])])
def test_shared_descriptors(second, found):
    """Rows of 64 numbers, then rows of 32 from the same place: how a read of shared memory went out of bounds."""
    ptx = f"""
        cvt.u64.u32 \t%rd1, %r178;
        or.b64 \t%rd88, %rd1, 4611686293305294848;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r1,%r2}}, {{%r3,%r4}}, %rd88, %p50, 1, 1, 1;
        add.s64 \t%rd101, %rd1, {second};
        wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{%r1}}, {{%r3,%r4}}, %rd101, %p50, 1, 1, 1;
    """
    assert compiling.shared_descriptors(ptx) == found
