"""The drop-in for transformers on tiny random models that remember: logits, caches, gradients, generation, who ran.

A model as it is initialised forgets within a token or two and hides most faults.  Here it forgets at a rate of 0.02 to
0.5 a token, its weights are five times as wide, and all is float32.
"""

import importlib
import importlib.metadata
import inspect
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import randn, relative_l2, rng

transformers = pytest.importorskip("transformers")

from gdn_ref.integrations import transformers as drop_in  # noqa: E402

BOUND = 1e-5
T, BATCH, VOCABULARY = 150, 2, 64
LAYERS = ["linear_attention", "linear_attention", "full_attention"]
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=len(LAYERS), layer_types=LAYERS,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512, initializer_range=0.02,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
    num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
FAMILIES = {  # module: the classes of its configuration and of its language model
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
}
QWEN = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


def make_model(family="qwen3_next", **sizes):
    config, model = FAMILIES[family]
    config = importlib.import_module(f"transformers.models.{family}.configuration_{family}").__dict__[config]
    torch.manual_seed(3)
    model = module_of(family).__dict__[model](config(**{**SIZES, **sizes})).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(0.02, 0.5).log_()
            elif weight.dim() > 1:
                weight.mul_(5)
    return model


def module_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def make_tokens(batch=BATCH, length=T):
    return torch.randint(2, VOCABULARY, (batch, length), generator=rng("tokens", batch, length))


def logits_of(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, use_cache=False, **options).logits


def in_pieces(model, tokens, bounds):
    """Logits of the pieces between bounds, each going on from the cache of the one before."""
    found, cache = [], None
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        for start, end in itertools.pairwise(bounds):
            out = model(tokens[:, start:end], use_cache=True, **{argument: cache})
            found, cache = found + [out.logits], out.past_key_values
    return torch.cat(found, dim=1)


def error(found, expected):
    """Relative L2, the worst row."""
    return relative_l2(found[:, :, None], expected[:, :, None]).max().item()


@pytest.fixture
def calls(monkeypatch):
    """How often each of our functions has run: the proof that it was they who served."""
    counts = SimpleNamespace(chunk=0, token=0)

    def counted(name, function):
        def run(*args, **options):
            setattr(counts, name, getattr(counts, name) + 1)
            return function(*args, **options)

        return run

    monkeypatch.setattr(drop_in, "chunk_gated_delta_rule", counted("chunk", drop_in.chunk_gated_delta_rule))
    monkeypatch.setattr(
        drop_in, "fused_recurrent_gated_delta_rule", counted("token", drop_in.fused_recurrent_gated_delta_rule)
    )
    return counts


@pytest.fixture(autouse=True)
def left_as_found():
    """Every test leaves transformers with its own functions."""
    before = drop_in.report()
    yield
    assert drop_in.report() == before
    assert not any("gdn_ref" in row.function for row in before)


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_models_made_before_and_after(family, calls):
    before, tokens = make_model(family), make_tokens()
    theirs = logits_of(before, tokens)
    assert (calls.chunk, calls.token) == (0, 0)
    with drop_in.use():
        after = make_model(family)
        for count, model in enumerate((before, after), 1):
            assert error(logits_of(model, tokens), theirs) <= BOUND
            assert (calls.chunk, calls.token) == (2 * count, 0)
    assert torch.equal(logits_of(after, tokens), theirs)
    assert calls.chunk == 4


@pytest.mark.parametrize("backend", ["torch", "recurrent"])
def test_backend_is_handed_on(backend):
    model, tokens = make_model(), make_tokens(length=70)
    theirs = logits_of(model, tokens)
    with drop_in.use(backend) as used:
        assert all(row.function.endswith(f"backend {backend}") for row in used.served)
        assert error(logits_of(model, tokens), theirs) <= BOUND


@pytest.mark.parametrize("family", QWEN)
def test_prefill_in_pieces_goes_on_from_the_cache(family, calls):
    model, tokens = make_model(family), make_tokens()
    whole, bounds = logits_of(model, tokens), [0, 70, 71, 72, 140, T]
    with drop_in.use():
        assert error(in_pieces(model, tokens, bounds), whole) <= BOUND
    assert (calls.chunk, calls.token) == (2 * 3, 2 * 2)


@pytest.mark.parametrize("family", QWEN)
def test_gradients_of_training(family, calls):
    model, tokens = make_model(family).train(), make_tokens()
    names, weights = zip(*model.named_parameters(), strict=True)

    def gradients():
        loss = model(tokens, labels=tokens, use_cache=False).loss
        return torch.autograd.grad(loss, weights, allow_unused=True)

    theirs = gradients()
    with drop_in.use():
        ours = gradients()
    assert calls.chunk == 2
    assert any(name.endswith("A_log") and d.abs().max() > 1e-4 for name, d in zip(names, theirs, strict=True))
    for name, found, expected in zip(names, ours, theirs, strict=True):
        if expected is None:
            assert found is None
        else:
            off = relative_l2(found, expected, kind="parameter").item()
            assert off <= BOUND, f"{name}: {off:.1e}"


@pytest.mark.parametrize("family", QWEN)
def test_greedy_generation_gives_the_same_tokens(family, calls):
    model, tokens = make_model(family), make_tokens(length=80)
    mask = torch.ones_like(tokens)
    mask[1, :13], tokens[1, :13] = 0, 0
    options = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    theirs = model.generate(tokens, **options)
    with drop_in.use():
        ours = model.generate(tokens, **options)
    assert torch.equal(ours, theirs)
    assert len(ours[0, 80:].unique()) > 3  # a model stuck on one token would agree with anything
    assert (calls.chunk, calls.token) == (2, 2 * 19)


def test_padded_rows_are_what_the_row_alone_gives():
    model, tokens = make_model(), make_tokens()
    mask = torch.ones_like(tokens)
    mask[1, :37] = 0
    with drop_in.use():
        padded = logits_of(model, tokens, attention_mask=mask)
        assert error(padded[:1], logits_of(model, tokens[:1])) <= BOUND
        assert error(padded[1:, 37:], logits_of(model, tokens[1:, 37:])) <= BOUND


def test_bfloat16_models_keep_their_dtype():
    model, tokens = make_model().bfloat16(), make_tokens(length=90)
    theirs = logits_of(model, tokens)
    with drop_in.use():
        ours = logits_of(model, tokens)
    assert ours.dtype == torch.bfloat16 and error(ours, theirs) <= 5e-2


def test_models_compiled_before(calls):
    layer, x = make_model().model.layers[0].linear_attn, randn(rng("compiled"), 1, 70, SIZES["hidden_size"]).float()
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        theirs = compiled(x)
        with drop_in.use():
            assert error(compiled(x), theirs) <= BOUND and calls.chunk == 1
        assert torch.equal(compiled(x), theirs) and calls.chunk == 1


def test_an_export_takes_theirs(calls, monkeypatch):
    model, tokens = make_model(), make_tokens(length=70)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    theirs = in_pieces(model, tokens, [0, 69, 70])
    with drop_in.use():
        assert torch.equal(in_pieces(model, tokens, [0, 69, 70]), theirs)
    assert (calls.chunk, calls.token) == (0, 0)


# ---------------------------------------------------------------- packed sequences


def packed_layer(width):
    layer = make_model(linear_conv_kernel_dim=width).model.layers[0].linear_attn
    return layer, randn(rng("packed"), 1, 90, SIZES["hidden_size"]).float(), torch.tensor([0, 20, 85, 90])


def test_packed_sequences_are_kept_apart_by_the_rule():
    layer, x, bounds = packed_layer(width=1)  # a convolution of one token mixes nothing
    with torch.no_grad(), drop_in.use():
        with pytest.warns(UserWarning, match="cu_seqlens without seq_idx.*convolution"):
            packed = layer(x, cu_seq_lens_q=bounds)
        alone = torch.cat([layer(part) for part in x.split([20, 65, 5], dim=1)], dim=1)
    for start, end in itertools.pairwise(bounds):
        assert error(packed[:, start:end], alone[:, start:end]) <= BOUND


def test_the_convolution_is_theirs_and_the_warning_is_true():
    layer, x, bounds = packed_layer(width=4)
    with torch.no_grad(), drop_in.use():
        with pytest.warns(UserWarning, match="cu_seqlens without seq_idx"):
            packed = layer(x, cu_seq_lens_q=bounds)
        assert error(packed[:, 20:85], layer(x[:, 20:85])) > 1e-2


# ---------------------------------------------------------------- the tests can fail


@pytest.mark.parametrize("fault", ["state", "decay", "scale"])
def test_a_fault_in_the_rule_would_show(fault, monkeypatch):
    right = drop_in.chunk_gated_delta_rule

    def wrong(q, k, v, g, beta, **options):
        if fault == "state":
            options["initial_state"] = None
        if fault == "decay":
            g = g.roll(1, dims=1)
        return right(q, k, v, g, beta, **options, **({"scale": 0.26} if fault == "scale" else {}))

    model, tokens = make_model(), make_tokens()
    whole = logits_of(model, tokens)
    monkeypatch.setattr(drop_in, "chunk_gated_delta_rule", wrong)
    with drop_in.use():
        assert error(in_pieces(model, tokens, [0, 70, T]), whole) > 100 * BOUND


# ---------------------------------------------------------------- putting in place and taking out


def global_of(family="qwen3_next", name=drop_in.CHUNK):
    return getattr(module_of(family), name)


def test_nested_and_repeated_uses():
    theirs = global_of()
    first, second = drop_in.use(), drop_in.use("recurrent")
    assert "recurrent" in first.served[0].function  # the last one serves
    with drop_in.use("torch") as third:
        assert "backend torch" in third.served[0].function
    assert "recurrent" in first.served[0].function
    first.restore()
    assert "recurrent" in first.served[0].function  # the second still holds
    first.restore()
    second.restore()
    assert global_of() is theirs
    second.restore()
    assert global_of() is theirs


def test_an_exception_restores_too():
    theirs = global_of()
    with pytest.raises(KeyError), drop_in.use():
        assert global_of() is not theirs
        raise KeyError
    assert global_of() is theirs


def test_what_others_put_there_since_is_left_alone(monkeypatch):
    theirs, other = global_of(), lambda *args, **options: None
    with monkeypatch.context() as patch:
        with drop_in.use():
            patch.setattr(module_of("qwen3_next"), drop_in.CHUNK, other)
        assert global_of() is other
        assert global_of("qwen3_5") is not other
    setattr(module_of("qwen3_next"), drop_in.CHUNK, theirs)


def test_a_use_says_who_serves():
    with drop_in.use() as used:
        printed = str(used)
        assert printed.splitlines()[0].startswith(f"transformers {transformers.__version__}: the gated delta rule")
        for family in QWEN:
            assert f"  {family:<14}gdn_ref.chunk_gated_delta_rule, backend auto" in printed
        assert printed.count("gdn_ref.chunk_gated_delta_rule") == printed.count("gdn_ref.fused_recurrent") >= 3
        assert drop_in.report() == used.served
    assert "gdn_ref" not in str(used)
    assert "modeling_qwen3_next.torch_chunk_gated_delta_rule" in str(drop_in.report())


def test_report_looks_behind_the_wrapper(monkeypatch):
    def implementation(query):
        return query

    def wrapped(query):
        return implementation(query)

    wrapped.__wrapped__ = global_of()
    assert drop_in._working(wrapped) == f"{__name__}.implementation"
    assert drop_in._working(torch.nn.ReLU()).endswith(".ReLU")


def test_arguments_of_a_model_that_are_not_the_rules_are_dropped():
    q, v, gate = torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4), torch.zeros(1, 3, 1)
    others = dict(position_ids=None, scale=1.0)
    with drop_in.use():
        for name in (drop_in.CHUNK, drop_in.TOKEN):
            o, state = global_of(name=name)(
                query=q, key=q / 2, value=v, g=gate, beta=gate + 1, output_final_state=True, **others
            )
            assert torch.allclose(o, 2 * v) and state.shape == (1, 1, 4, 4)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("found", ["4.57.0", "5.14.1", "5.25.0.dev0", "6.0.0"])
def test_another_release_is_refused(found, monkeypatch):
    monkeypatch.setattr(drop_in.importlib.metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=f"transformers: found {found}, expected 5.15 to 5.24") as refused:
        drop_in.use()
    newer = found > "5.2"
    assert ("untried=True" in str(refused.value)) == newer
    if not newer:
        with pytest.raises(ImportError, match="found"):
            drop_in.use(untried=True)


def test_a_newer_release_on_request(monkeypatch):
    monkeypatch.setattr(drop_in.importlib.metadata, "version", lambda name: "5.99.0")
    with drop_in.use(untried=True) as used:
        assert "transformers 5.99.0" in repr(used) and "gdn_ref" in repr(used)


def test_no_transformers_at_all(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(drop_in.importlib.metadata, "version", version)
    with pytest.raises(ImportError, match="transformers: found none, expected 5.15 to 5.24: pip install"):
        drop_in.use()
    monkeypatch.undo()


def test_a_release_that_looks_otherwise_is_refused(monkeypatch):
    module = module_of("qwen3_next")
    with monkeypatch.context() as patch:
        patch.setattr(module, drop_in.CHUNK, lambda query, key, value, beta: None)
        with pytest.raises(ImportError, match=f"qwen3_next.{drop_in.CHUNK}: found no argument g, initial_state"):
            drop_in.use()
        patch.delattr(module, drop_in.CHUNK)
        with pytest.raises(ImportError, match=f"qwen3_next: found no function {drop_in.CHUNK}, expected one"):
            drop_in.use()
    monkeypatch.setattr(drop_in, "_families", lambda: ["qwen3_next", "qwen3_5"])
    with pytest.raises(ImportError, match="found no gated delta rule in qwen3_5_moe, expected one"):
        drop_in.use()
    monkeypatch.undo()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend: found 'cuda'"):
        drop_in.use("cuda")


def test_importing_the_drop_in_imports_no_transformers():
    source = "import sys, gdn_ref.integrations.transformers; print('transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "False", ran.stderr
