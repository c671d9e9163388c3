"""What holds for the whole suite: one thread, so that results and times do not hang on the machine's load."""

import importlib.util
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, here and in the notebooks' kernels

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is loaded: its kernels are interpreted then


def pytest_configure(config):
    """Give the notebooks that run under nbval a folder of their own for figures, so that a test run changes no file."""
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        import interpreting

        interpreting.watch_addresses()
        interpreting.mend_bfloat16()
    if not os.environ.get("GDN_REF_FIGURES"):
        folder = tempfile.TemporaryDirectory(prefix="gdn_ref_figures_")
        config.add_cleanup(folder.cleanup)
        os.environ["GDN_REF_FIGURES"] = folder.name


def pytest_collection_modifyitems(config, items):
    """GDN_REF_KERNELS=short: of every kernel test with many cases the first and the last."""
    if os.environ.get("GDN_REF_KERNELS") != "short":
        return
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for group in cases.values() for item in (group[0], group[-1])}
    dropped = [i for i in items if i.path.name.startswith("test_kernels") and id(i) not in kept]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [i for i in items if i not in dropped]
