"""The command line, python -m gdn_ref.  Exit status: 0 done, 1 something did not hold, 2 it could not be run."""

import argparse
import functools
import importlib
import os
import sys

ABOUT = """\
Gated DeltaNet, proved and running.

  S_t = α_t (I − β_t k_tᵀk_t) S_{t−1} + β_t k_tᵀv_t        o_t = q_t S_t

Each command below does one of the things this project is for.  Try, in this order:

  python -m gdn_ref prove --chapter 1     the first chapter's identities, in about a second
  python -m gdn_ref prove                 the whole book's algebra
  python -m gdn_ref demo                  train a small model and hold every form of the algorithm against float64
  python -m gdn_ref check                 hold this package, or --impl anybody's, against the definition: seconds
  python -m gdn_ref vectors DIR           test vectors for a port in another language
  python -m gdn_ref bench                 time it beside every other implementation that is there; needs a GPU
"""

CHECK = """\
Holds an implementation of Gated DeltaNet against the definition, property by property: agreement with the float64
token recurrence, exact resets, closed forms, causality, packing, layouts, padding, pools, gradients.  Without --impl it
checks this package on this machine.  An error is a relative L2 norm, taken for each sequence and head by itself, so
that a fault in one of them is not averaged away; the worst is reported with its bound and its input.
"""

VECTORS = """\
Writes test vectors: small inputs with their float64 outputs, states and gradients, the bound to hold them to, and a
README that says how to read them in any language.  The files are the same, byte for byte, wherever they are made.
"""

BENCH = """\
Times gdn_ref and every peer that is installed (flash-linear-attention, FlashQLA, FlashInfer, transformers) on the same
tensors in one process, holds each against float64 first, and sets the times against what the GPU allows at best.
"""

PROVE = """\
Proves every tagged identity of the book, by computer algebra, and prints a table.

The proofs are of three kinds: fixed small sizes with a symbol for every entry; any size, with noncommutative symbols
for whole matrices (the induction steps); and gdn_ref/exact.py itself run on symbols and on fractions, so that the
lines that ship are the lines that are proved.  Some formulas in circulation are wrong; they are listed as refuted, and
their proof shows that the residual is not zero.

What the verdicts mean:
  proved     both sides are the same, exactly
  refuted    the sides differ, as the book says; the line below gives the residual
  FAILED     the book is wrong here; the residual is printed, and the exit status is 1
"""

EXAMPLES = """\
examples:
  python -m gdn_ref prove                     all of them
  python -m gdn_ref prove --chapter 5         the gate
  python -m gdn_ref prove --tag 3.6 5.7       two formulas that are printed wrong elsewhere
  python -m gdn_ref prove --chapter 6 --list  the statements only, nothing is run
"""

DEMO = """\
Trains a byte-level language model with two GatedDeltaNet layers on the Python standard library's own sources, for
about two minutes on two cores, and sets its loss beside that of a byte-bigram model.  Then takes what the trained
layers produce on held-out text, runs the recurrent, the chunkwise and the serving form on it, prints their errors
against float64 and their speed, and draws the loss, the gates and the keys into figures/demo.svg.
"""


def main(argv=None):
    """Run one command; ``argv`` is a list of strings, sys.argv[1:] if None.  Returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Greek letters shows ? and not a traceback
    parser, commands = make_parser(argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args, commands[args.command]) or 0
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def make_parser(argv):
    """The parser and its subparsers by name.  Options that need torch are only read when their command is asked for."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m gdn_ref", description=ABOUT, formatter_class=raw)
    sub = parser.add_subparsers(dest="command", metavar="command", title="commands (each has its own --help)")
    prove = sub.add_parser("prove", help="prove the book's identities", description=PROVE, epilog=EXAMPLES,
                           formatter_class=raw)
    prove.add_argument("--chapter", nargs="+", type=int, metavar="N", default=[], help="only these chapters, such as 5")
    prove.add_argument("--tag", nargs="+", metavar="T", default=[], help="only these identities, such as 5.4")
    prove.add_argument("--list", action="store_true", help="print the statements and run nothing")
    prove.set_defaults(run=run_prove)
    demo = sub.add_parser("demo", help="train a small model, compare every form on it", description=DEMO,
                          formatter_class=raw)
    demo.set_defaults(run=run_demo)
    parsers = {"prove": prove, "demo": demo}
    for name, what, module, description in (
        ("check", "hold an implementation against the definition", "check.command", CHECK),
        ("vectors", "write test vectors for ports in other languages", "check.vectors", VECTORS),
        ("bench", "time it beside its peers on a GPU", "bench", BENCH),
    ):
        parsers[name] = sub.add_parser(name, help=what, description=description, formatter_class=raw)
        parsers[name].set_defaults(run=functools.partial(run_module, module))
        if argv[:1] == [name]:
            importlib.import_module(f"gdn_ref.{module}").add_arguments(parsers[name])
    if argv[:1] == ["demo"]:
        from .demo import add_arguments

        add_arguments(demo)
    return parser, parsers


def run_demo(args, parser):
    """python -m gdn_ref demo."""
    from .demo import main as run

    return run(args)


def run_module(module, args, parser):
    """The command that gdn_ref.<module> holds: check, vectors, bench."""
    return importlib.import_module(f"gdn_ref.{module}").main(args, parser)


# ---- prove -----------------------------------------------------------------------------------------------------------


def run_prove(args, parser):
    """python -m gdn_ref prove.  Returns 0 if all went through, 1 if one failed, 2 without SymPy."""
    try:
        from . import identities
    except ImportError as error:
        print(f"python -m gdn_ref prove: {error}", file=sys.stderr)
        return 2
    chosen = choose(identities, args, parser)
    if args.list:
        for identity in chosen:
            print(f"({identity.tag})  {'refuted' if identity.refuted else '       '}  {identity.statement}")
        return 0
    results = [identities.check(identity.tag) for identity in progress(chosen)]
    print_table(results)
    return 0 if all(result.ok for result in results) else 1


def choose(identities, args, parser):
    """The identities asked for, in the book's order; without --chapter and --tag, all of them."""
    chapters = sorted({identity.chapter for identity in identities.IDENTITIES})
    for chapter in args.chapter:
        if chapter not in chapters:
            parser.error(f"--chapter: found {chapter}, expected one of {', '.join(map(str, chapters))}")
    try:
        tags = {identities.get(tag).tag for tag in args.tag}
    except KeyError as error:
        parser.error(f"--{error.args[0]}")
    everything = not args.chapter and not tags
    return [i for i in identities.IDENTITIES if everything or i.chapter in args.chapter or i.tag in tags]


def progress(chosen):
    """Go through the identities with a bar on stderr: tqdm's, or a plain count without tqdm; none off a terminal."""
    if not sys.stderr.isatty():
        yield from chosen
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for done, identity in enumerate(chosen):
            print(f"\rproving {done + 1}/{len(chosen)}  ({identity.tag})  ", end="", file=sys.stderr, flush=True)
            yield identity
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
        return
    with tqdm(chosen, desc="proving", unit="identity", leave=False, file=sys.stderr) as bar:
        for identity in bar:
            bar.set_postfix_str(f"({identity.tag})")
            yield identity


def print_table(results):
    """Tag, verdict, milliseconds, statement; under a refuted or failed one its residual."""
    print(f"{'tag':<7}{'verdict':<9}{'ms':>6}  statement")
    for r in results:
        verdict = "FAILED" if not r.ok else "refuted" if r.refuted else "proved"
        print(f"{f'({r.tag})':<7}{verdict:<9}{r.seconds * 1000:>6.0f}  {r.statement}")
        if r.residual:
            print(f"{'':<24}residual: {r.residual}")
    failed = [r.tag for r in results if not r.ok]
    refuted = sum(r.ok and r.refuted for r in results)
    proved = len(results) - refuted - len(failed)
    print(f"\n{len(results)} identities: {proved} proved, {refuted} refuted as they should be, {len(failed)} failed; "
          f"{sum(r.seconds for r in results):.1f} s")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
