"""python -m gdn_ref check: what it says, its options, its progress bar, its exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import report, suite
from .adapters import ADAPTERS, BUILT_IN, OURS
from .records import BOUNDS, FEATURES, Report

FEATURE_LINES = f"\n{'':<14}".join(f"{name:<14}{meaning}" for name, meaning in FEATURES.items())
EXAMPLES = f"""\
examples:
  python -m gdn_ref check                                      ours: by chunks, token by token, over a pool
  python -m gdn_ref check --impl mypackage.ops:gdn             any callable with flash-linear-attention's signature
  python -m gdn_ref check --impl fla transformers --json r.json    two peers that are installed
  python -m gdn_ref check --impl my.port:prefill --adapter flashinfer --without gradients
  python -m gdn_ref check --impl my.cuda:gdn --dtype bfloat16 --width 128x128 --heads 2/4     what it takes, and no more
  python -m gdn_ref check --property packing "gradients, packing" --full    two properties, all their cases
  python -m gdn_ref check --list                               what is checked, why, and the chapter that shows it

what the verdicts mean:
  pass          every case within its bound
  FAIL          a case out of bounds; the lines below say what it means and how many cases
  ERROR         the call raised; its own message is shown, and the run goes on
  not offered   the implementation has no such feature, by its signature, by --without or by its own refusal
                (NotImplementedError); it counts for nothing, and never as a pass

built in:     {", ".join(BUILT_IN)}
adapters:     fla           f(q, k, v, g, beta, scale=, initial_state=, output_final_state=, cu_seqlens=, ...)
                            -> (o, state)
              transformers  the same with query, key, value
              flashinfer    packed [T,H,K], g is alpha = e^g, state [N,HV,V,K]
              pymllm        f(q, k, v, a, b, A_log, dt_bias, state_pool, cache_indices, cu_seqlens) -> o
              step          one token: f(q, k, v, g, beta, state) -> (o, state)
features:     {FEATURE_LINES}

exit status:  0 everything on offer passed, 1 something failed or could not be loaded, 2 it could not be run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m gdn_ref check`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--impl", nargs="+", default=list(OURS), metavar="NAME",
                        help="package.module:function, or a built-in name (default: this package's three)")
    parser.add_argument("--adapter", choices=list(ADAPTERS), metavar="NAME",
                        help="whose signature package.module:function has (default: guessed from its parameters)")
    parser.add_argument("--without", nargs="+", default=[], choices=list(FEATURES), metavar="FEATURE",
                        help="features that it lacks though its signature does not show it")
    parser.add_argument("--dtype", nargs="+", choices=list(BOUNDS), metavar="NAME",
                        help="the only dtypes of q, k, v that it takes; most cases run in the first")
    parser.add_argument("--width", nargs="+", type=pair("x"), metavar="KxV", help="the only widths that it takes")
    parser.add_argument("--heads", nargs="+", type=heads, metavar="H/HV",
                        help="the only heads to ask it for, of keys and of values, HV a multiple of H")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="well under a minute on two cores; the default on a CPU")
    level.add_argument("--full", action="store_true", help="more lengths, widths and dtypes; the default on a GPU")
    parser.add_argument("--device", help="where to run, such as cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--property", nargs="+", default=[], metavar="NAME",
                        help='only these, a name with spaces in quotes, such as "gradients, packing"; see --list')
    parser.add_argument("--list", action="store_true", help="print the properties and run nothing")
    for name, what in (("json", "everything"), ("junit", "XML for a test dashboard"), ("html", "a page to read")):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"also write a report: {what}")


def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """python -m gdn_ref check.  0 all on offer passed, 1 something failed, 2 it could not be run."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    full = args.full or (not args.quick and device != "cpu")
    try:
        torch.empty(0, device=device)
        properties = suite.choose(args.property, full)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: found {device!r}, which PyTorch cannot use: {report.plain(str(error))}")
    except ValueError as error:
        parser.error(f"--property: {error}")
    if args.list:
        print(listing(properties if args.property else suite.PROPERTIES))
        return 0
    if wrong := suite.self_test():
        print(f"python -m gdn_ref check: its reference is wrong here, nothing was checked: {wrong}", file=sys.stderr)
        return 2
    limits = {"dtypes": args.dtype, "widths": args.width, "heads": args.heads}
    limits = {name: tuple(values) for name, values in limits.items() if values}
    reports = []
    with one_thread(device):
        for spec in args.impl:
            with progress(spec, len(properties)) as done:
                named = (spec, properties, device, full, args.adapter, args.without, limits)
                reports.append(suite.check_named(*named, done))
            print(report.table(reports[-1]), end="\n\n", flush=True)
    write(args, reports)
    if len(reports) > 1:
        print("\n".join(report.summary(r) for r in reports))
    return 0 if all(r.ok for r in reports) else 1


def pair(between: str) -> Callable[[str], tuple[int, int]]:
    """What reads two positive numbers, such as 128x128."""

    def read(text: str) -> tuple[int, int]:
        parts = text.split(between)
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected two numbers, such as 128{between}128")
        return int(parts[0]), int(parts[1])

    return read


def heads(text: str) -> tuple[int, int]:
    """What reads heads, such as 2/4."""
    H, HV = pair("/")(text)
    if HV % H:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected H/HV with HV a multiple of H, such as 2/4")
    return H, HV


def listing(properties: list) -> str:
    """Name, reason and chapter of each property, with what it needs."""
    lines = []
    for p in properties:
        needs = f"; needs {', '.join(sorted(p.needs))}" if p.needs else ""
        lines.append(f"{p.name:<26}{p.reason}\n{'':<26}{p.chapter}{needs}{'; only with --full' if p.full else ''}")
    return "\n".join(lines)


def write(args: argparse.Namespace, reports: list[Report]) -> None:
    """The files that were asked for."""
    texts = {"json": lambda: json.dumps(report.document(reports), indent=1, allow_nan=False) + "\n",
             "junit": lambda: report.junit(reports), "html": lambda: report.page(reports)}  # fmt: skip
    for name, text in texts.items():
        if path := getattr(args, name):
            path.write_text(text(), encoding="utf-8")
            print(f"wrote {path}")


@contextlib.contextmanager
def one_thread(device: str) -> Iterator[None]:
    """One processor inside the block, on a CPU: the cases are small, and threads would mostly wait for each other."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def progress(spec: str, total: int) -> Iterator[Callable]:
    """A bar on stderr: tqdm's, or a plain count without tqdm; none off a terminal. Yields what to call after each."""
    if not sys.stderr.isatty():
        yield lambda item, finding: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        seen = []

        def count(item, finding):
            seen.append(item)
            print(f"\rchecking {spec} {len(seen)}/{total}  {item.name:<30}", end="", file=sys.stderr, flush=True)

        yield count
        print("\r" + " " * 110 + "\r", end="", file=sys.stderr, flush=True)
        return
    with tqdm(total=total, desc=f"checking {spec}", unit="property", leave=False, file=sys.stderr) as bar:

        def advance(item, finding):
            bar.set_postfix_str(item.name)
            bar.update()

        yield advance
