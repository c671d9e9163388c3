"""`python -m gdn_ref demo`: the gated delta rule learns real text, and every form of it is held against float64 there.

1. A byte-level language model with two GatedDeltaNet layers reads the Python standard library's own source files for
   about two minutes.  Beside its loss stands that of a byte bigram, which knows one byte of context.
2. What the trained layers make of held-out source text, their q, k, v, a, b, goes through the recurrence, the chunkwise
   form and the serving function; each must agree with the float64 recurrence.
3. A figure shows what was learnt: the loss, how long a head remembers, how strongly it writes, how alike its keys are.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import math
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gates import raw_gates
from .layer import GatedDeltaNet, RuleInputs
from .serving import gdn_extend_chunkwise

D_MODEL, LAYERS, MLP = 192, 2, 512
HEADS = dict(num_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=48)  # H, HV, K, V
BATCH, WINDOW = 4, 256                 # sequences and bytes a training step
PEAK_LR, WARM_UP, LAST_LR = 4e-3, 0.05, 0.05  # LAST_LR is a share of PEAK_LR
HELD_OUT_EVERY = 10                    # one file in ten is held out
HELD_OUT_WINDOWS, HELD_OUT_WINDOW = 64, 512  # the bytes the loss is taken on
COMPARED = 2048                        # held-out tokens that the forms are compared on
PIECES = (0, 1, 65, 300, 1000, 1920)   # prefill in pieces up to the last of these, then token by token
BOUND = 1e-5                           # relative L2 that float32 must keep, on o and state
MARGIN = 0.9                           # the held-out loss must come below this share of the bigram's


# ---- the text --------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """Training and held-out bytes, uint8 arrays, and the names of the files behind each."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: list[str]
    held_out_files: list[str]


def read_text(folder: str | Path | None = None) -> Text:
    """The modules (*.py) right in `folder`, by default the standard library's, split by file: one in ten is held out.

    In the order of their names, so the same Python gives the same split.  Raises FileNotFoundError when there are
    fewer than ten files.
    """
    folder = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    if len(files) < HELD_OUT_EVERY:
        raise FileNotFoundError(f"text: found {len(files)} .py files in {folder}, expected {HELD_OUT_EVERY} or more")
    held_out = files[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    train = [file for file in files if file not in held_out]
    return Text(_joined(train), _joined(held_out), [f.name for f in train], [f.name for f in held_out])


def _joined(files):
    return np.frombuffer(b"\0".join(file.read_bytes() for file in files), dtype=np.uint8).copy()


def training_windows(train: np.ndarray, generator: torch.Generator) -> Tensor:
    """BATCH windows of WINDOW+1 bytes from random places of `train`.  int64 [BATCH, WINDOW+1]."""
    starts = torch.randint(len(train) - WINDOW, (BATCH, 1), generator=generator)
    return torch.from_numpy(train[(starts + torch.arange(WINDOW + 1)).numpy()]).long()


def held_out_windows(held_out: np.ndarray) -> Tensor:
    """Windows spread evenly over the held-out bytes.  int64 [HELD_OUT_WINDOWS, HELD_OUT_WINDOW+1]."""
    starts = np.linspace(0, len(held_out) - HELD_OUT_WINDOW - 1, HELD_OUT_WINDOWS).astype(int)
    return torch.from_numpy(held_out[starts[:, None] + np.arange(HELD_OUT_WINDOW + 1)]).long()


def sample(held_out: np.ndarray) -> Tensor:
    """COMPARED bytes from the middle of the held-out text.  int64 [1, COMPARED]."""
    middle = (len(held_out) - COMPARED) // 2
    return torch.from_numpy(held_out[middle : middle + COMPARED]).long()[None]


def bigram_loss(train: np.ndarray, windows: Tensor, k: float = 0.1) -> float:
    """Nats a byte of an add-k byte bigram, P(y|x) = (n_xy + k) / (n_x + 256 k), counted on `train`.

    Taken on the same windows, int64 [N, W+1], and so on the same predicted bytes, as the model's loss.
    """
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + k
    logp = np.log(counts / counts.sum(1, keepdims=True))
    return float(-logp[windows[:, :-1], windows[:, 1:]].mean())


# ---- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + GatedDeltaNet(norm(x)): tokens mix; then x + SwiGLU(norm(x)): each token by itself.  [B,T,D_MODEL]"""

    def __init__(self):
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(D_MODEL), nn.RMSNorm(D_MODEL)
        self.mixer = GatedDeltaNet(D_MODEL, **HEADS)
        self.up, self.down = nn.Linear(D_MODEL, 2 * MLP, bias=False), nn.Linear(MLP, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))[0]
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class ByteModel(nn.Module):
    """Bytes [B,T] to the logits of the next byte [B,T,256].  No position embedding: the decay gives the order."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, D_MODEL)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(D_MODEL), nn.Linear(D_MODEL, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        for block in self.blocks:      # at first each block adds little to the stream
            nn.init.normal_(block.down.weight, std=0.02)
            nn.init.normal_(block.mixer.out_proj.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def rule_inputs(self, tokens: Tensor) -> list[RuleInputs]:
        """What each layer hands to the gated delta rule on bytes [1,T]: a list of RuleInputs."""
        found, x = [], self.embedding(tokens)
        for block in self.blocks:
            found.append(block.mixer.rule_inputs(block.mixer_norm(x))[0])
            x = block(x)
        return found


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean nats a byte of the model on windows [N, W+1], each read from an empty memory."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Tensor) -> float:
    """`loss_of`, a few windows at a time so that little memory is needed; a float."""
    return sum(loss_of(model, part).item() * len(part) for part in windows.split(BATCH)) / len(windows)


# ---- training --------------------------------------------------------------------------------------------------------


def learning_rate(progress: float) -> float:
    """Warm-up to PEAK_LR, then half a cosine down to LAST_LR of it.  progress in [0, 1]: the share of the run done."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
    return PEAK_LR * min(1.0, progress / WARM_UP + 0.01) * (LAST_LR + (1 - LAST_LR) * cosine)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; weight decay on the matrices of the projections alone, not on gates, norms, convolution or embedding."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, lr: float) -> float:
    """One step down the loss; returns it, in nats a byte."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    loss = loss_of(model, windows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def train(
    model: nn.Module, text: Text, seconds: float | None = None, steps: int | None = None, seed: int = 0
) -> list[float]:
    """Train for `steps` steps, or for `seconds` when steps is None; the learning rate follows the same clock.

    So a slow machine stops in time too, with fewer steps.  Returns the loss of every step, nats a byte.
    """
    from tqdm import tqdm

    generator, optimizer = torch.Generator().manual_seed(seed), make_optimizer(model)
    total, unit = (steps, "step") if steps else (seconds, "s")
    losses, start, done = [], time.perf_counter(), 0.0
    with tqdm(total=total, unit=unit, bar_format="training {percentage:3.0f}%|{bar:30}| {elapsed}{postfix}") as bar:
        while done < total:
            windows = training_windows(text.train, generator)
            losses.append(train_step(model, optimizer, windows, learning_rate(done / total)))
            now = len(losses) if steps else time.perf_counter() - start
            bar.set_postfix_str(f"step {len(losses)}, loss {np.mean(losses[-20:]):.3f}", refresh=False)
            bar.update(min(now, total) - done)
            done = min(now, total)
    return losses


# ---- the forms of the rule, on what the layers made of real text -----------------------------------------------------


class Form(NamedTuple):
    """One way to run the rule: relative L2 of o and of its last state against float64, worst head; tokens a second."""

    name: str
    o: float
    state: float
    rate: float


class Run(NamedTuple):
    """Some tokens done: o [T,HV,V], the state after them [HV,K,V], and the seconds they took."""

    o: Tensor
    state: Tensor
    seconds: float


def worst_head(found: Tensor, exact: Tensor, heads: int) -> float:
    """max over heads of ‖found − exact‖ / ‖exact‖, in float64; `heads` is the axis of the heads."""
    axes = [axis for axis in range(exact.dim()) if axis != heads]
    off = (found.double() - exact).square().sum(axes).sqrt()
    return float((off / exact.square().sum(axes).sqrt()).max())


def judge(name: str, runs: list[Run], exact: Run) -> Form:
    """Several equal runs: their error against `exact`, and the quickest's rate, as other work only ever adds time."""
    o, state = worst_head(runs[0].o, exact.o, heads=1), worst_head(runs[0].state, exact.state, heads=0)
    return Form(name, o, state, len(exact.o) / min(run.seconds for run in runs))


def apply(inputs: RuleInputs, layer: GatedDeltaNet, backend: str, state: Tensor | None = None) -> Run:
    """The layer's rule on inputs [1,T,…] in one call.  state [1,HV,K,V] or None."""
    start = time.perf_counter()
    o, state = layer.apply_rule(inputs, state, output_final_state=True, backend=backend)
    return Run(o[0], state[0], time.perf_counter() - start)


def oracle(inputs: RuleInputs, layer: GatedDeltaNet) -> tuple[Run, Run, Run]:
    """The float64 recurrence on the prompt, on the tokens after it, and on both."""
    layer, prompt = copy.deepcopy(layer).double(), PIECES[-1]
    first = apply(RuleInputs(*(x[:, :prompt].double() for x in inputs)), layer, "recurrent")
    rest = apply(RuleInputs(*(x[:, prompt:].double() for x in inputs)), layer, "recurrent", first.state[None])
    return first, rest, Run(torch.cat([first.o, rest.o]), rest.state, first.seconds + rest.seconds)


def serve(inputs: RuleInputs, layer: GatedDeltaNet) -> tuple[Run, Run]:
    """As a server runs it: one slot of a pool of states, the prompt prefilled in pieces, then token by token.

    inputs [1,T,…].  Returns the prompt's run and that of the tokens after it.  The slot starts with the rubbish of an
    earlier request, here NaN, which has_initial_state = False tells to ignore.
    """
    T, (HV, V), K = inputs.q.shape[1], inputs.v.shape[2:], inputs.q.shape[-1]
    pool = torch.full((3, HV, V, K), float("nan"), dtype=torch.float32)  # the pool stores Sᵀ
    slot = torch.tensor([1])

    def extend(bounds):
        outputs, clock = [], time.perf_counter()
        for start, end in itertools.pairwise(bounds):
            outputs.append(gdn_extend_chunkwise(
                *(x[0, start:end] for x in inputs), layer.A_log, layer.dt_bias, pool, slot,
                torch.tensor([0, end - start]), has_initial_state=torch.tensor([start > 0]),
            ))
        return Run(torch.cat(outputs), pool[1].mT.clone(), time.perf_counter() - clock)

    return extend(PIECES), extend(range(PIECES[-1], T + 1))


@torch.no_grad()
def compare(inputs: RuleInputs, layer: GatedDeltaNet, rounds: int = 3) -> list[Form]:
    """The forms on one layer's inputs [1,T,…], each against the float64 recurrence on the same tokens."""
    prompt, rest, both = oracle(inputs, layer)
    served = [serve(inputs, layer) for _ in range(rounds)]
    return [
        judge("recurrent", [apply(inputs, layer, "recurrent") for _ in range(rounds)], both),
        judge("chunkwise, C = 64", [apply(inputs, layer, "torch") for _ in range(rounds)], both),
        judge("gdn_extend, prefill in pieces", [first for first, _ in served], prompt),
        judge("gdn_extend, then token by token", [after for _, after in served], rest),
    ]


# ---- what was learnt -------------------------------------------------------------------------------------------------


class Statistics(NamedTuple):
    """Of one layer, on held-out text: half_life [T,HV] in tokens; beta [T,HV]; cosines [n] of keys within a chunk."""

    half_life: np.ndarray
    beta: np.ndarray
    cosines: np.ndarray


@torch.no_grad()
def statistics(inputs: RuleInputs, layer: GatedDeltaNet, chunk_size: int = 64) -> Statistics:
    """Gates and keys of one layer.  Half-life: after ln 2 / −g tokens of this gate half of the memory is left."""
    g, beta = raw_gates(inputs.a[0], inputs.b[0], layer.A_log, layer.dt_bias)
    keys = F.normalize(inputs.k[0], dim=-1)                     # [T, H, K]
    keys = keys[: len(keys) // chunk_size * chunk_size].unflatten(0, (-1, chunk_size)).transpose(1, 2)
    earlier = torch.ones(chunk_size, chunk_size, dtype=torch.bool).tril(-1)
    cosines = (keys @ keys.mT)[..., earlier].flatten()          # k_i · k_j, j < i
    half_life = math.log(2) / -g.clamp(max=-1e-9)
    return Statistics(half_life.numpy(), beta.numpy(), cosines.numpy())


# ---- the command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of the command."""
    clock = parser.add_mutually_exclusive_group()
    clock.add_argument("--seconds", type=_positive(float), default=120.0, metavar="S",
                       help="train for so long (default: 120)")
    clock.add_argument("--steps", type=_positive(int), metavar="N",
                       help=f"or for so many steps of {BATCH * WINDOW} bytes; such a run can be repeated exactly")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of the parameters and of the order of the text (default: 0)")
    parser.add_argument("--threads", type=_positive(int), default=min(2, os.cpu_count() or 1), metavar="N",
                        help="processor cores to use (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("figures/demo.svg"), metavar="FILE",
                        help="the figure: .svg, .png or .pdf (default: %(default)s)")
    parser.add_argument("--no-figure", action="store_true", help="write nothing")


def _positive(kind):
    """An argparse type: a finite number of this kind above 0."""

    def read(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            noun = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {noun} above 0")
        return value

    return read


def check_out(out: Path) -> None:
    """ValueError when the figure could not be written to `out`: better now than after two minutes of training."""
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--out: found {str(out)!r}, expected a name that ends in .svg, .png or .pdf")
    if not out.parent.is_dir():
        raise ValueError(f"--out: found no folder {str(out.parent)!r}, expected one that exists, or --no-figure")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"--out: found {str(out)!r}, which cannot be written, expected a file in a folder of yours")


def check_packages(*names: str) -> None:
    """ValueError when one of the packages that a run needs later is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"packages: found no {name}, expected it installed: pip install 'gdn_ref[notebooks]'")


def main(args: argparse.Namespace) -> int:
    """Train, compare, report, draw.  Returns the exit status: 0; 1 when something missed its bound; 2 on bad input.

    Nothing is written unless every bound was kept.
    """
    try:
        check_packages("tqdm", *([] if args.no_figure else ["matplotlib"]))
        if not args.no_figure:
            check_out(args.out)
        text = read_text()
    except (ValueError, OSError) as error:
        print(f"gdn_ref demo: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model, windows = ByteModel(), held_out_windows(text.held_out)
    bigram = bigram_loss(text.train, windows)
    report_start(text, model, args.threads)
    losses = train(model, text, args.seconds, args.steps, args.seed)
    held_out = held_out_loss(model, windows)
    report_loss(len(losses), held_out, bigram, windows)

    inputs, mixers = model.rule_inputs(sample(text.held_out)), [block.mixer for block in model.blocks]
    tables = [compare(*layer) for layer in zip(inputs, mixers, strict=True)]
    learnt = [statistics(*layer) for layer in zip(inputs, mixers, strict=True)]
    report_forms(tables)
    report_statistics(learnt)

    missed = misses(held_out, bigram, tables)
    for reason in missed:
        print(f"gdn_ref demo: {reason}", file=sys.stderr)
    if not missed and not args.no_figure:
        from . import demo_figure

        figure = demo_figure.draw(
            losses, held_out, bigram, learnt, step_bytes=BATCH * WINDOW, key_width=HEADS["head_k_dim"]
        )
        demo_figure.save(figure, args.out)
        print(f"\nwrote {args.out}")
    return 1 if missed else 0


def misses(held_out: float, bigram: float, tables: list[list[Form]]) -> list[str]:
    """What did not come out as it must: a list of reasons, empty when all is well."""
    reasons = []
    if not held_out < MARGIN * bigram:
        reasons.append(f"held-out loss: found {held_out:.3f} nats a byte, expected below {MARGIN} × {bigram:.3f}, "
                       "the bigram's; train for longer")
    for index, forms in enumerate(tables):
        for form in forms:
            for what, error in (("o", form.o), ("state", form.state)):
                if not error <= BOUND:  # NaN, too, is a miss
                    reasons.append(f"layer {index + 1}, {form.name}, {what}: found an error of {error:.1e}, "
                                   f"expected at most {BOUND:.0e}")
    return reasons


def report_start(text: Text, model: nn.Module, threads: int) -> None:
    """Print what is read and what is trained."""
    print(f"training text: {len(text.train):,} bytes, {len(text.train_files)} modules of Python's standard library")
    print(f"held-out text: {len(text.held_out):,} bytes, {len(text.held_out_files)} other modules")
    H, HV, K, V = HEADS.values()
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {LAYERS} layers, d_model {D_MODEL}, "
          f"H {H}, HV {HV}, K {K}, V {V}; threads: {threads}", flush=True)


def report_loss(steps: int, held_out: float, bigram: float, windows: Tensor) -> None:
    """Print the losses side by side, in nats and in bits."""
    print(f"read {steps * BATCH * WINDOW:,} bytes in {steps:,} steps; "
          f"loss on {windows[:, 1:].numel():,} held-out bytes:")
    for name, loss in (("byte bigram", bigram), ("model", held_out)):
        print(f"  {name:<12}{loss:.3f} nats a byte ({loss / math.log(2):.3f} bits)")
    share = 100 * (held_out / bigram - 1)
    print(f"  the model is {abs(share):.0f} % {'below' if share < 0 else 'above'} the bigram")


def report_forms(tables: list[list[Form]]) -> None:
    """Print the errors and rates of every form on every layer."""
    print(f"\nq, k, v, a, b of the trained layers on {COMPARED} held-out bytes, through every form of the rule;")
    print(f"float32 errors against the float64 recurrence: relative L2, worst head, to be at most {BOUND:.0e}")
    print(f"{'layer':<7}{'form':<34}{'o':>9}{'state':>10}{'tokens/s':>11}")
    for index, forms in enumerate(tables):
        for form in forms:
            print(f"{index + 1:<7}{form.name:<34}{form.o:>9.1e}{form.state:>10.1e}{form.rate:>11,.0f}")


def report_statistics(learnt: list[Statistics]) -> None:
    """Print the medians of what the figure draws."""
    print("\nlearnt gates and keys, medians over the same bytes")
    for index, layer in enumerate(learnt):
        lives = ", ".join(f"{life:,.{0 if life >= 10 else 1}f}" for life in np.median(layer.half_life, axis=0))
        print(f"layer {index + 1}: half-life of the memory by head {lives} tokens; "
              f"β {np.median(layer.beta):.2f}; |cosine| of two keys {np.median(np.abs(layer.cosines)):.2f}")
