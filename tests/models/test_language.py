"""Language models: logits of their publisher, causality, LoRA in a scan, remat, generation, and
mistakes."""

import importlib.util
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxdp
from jaxdp import models

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location(
    "make_checkpoints", ROOT / "golden" / "make_checkpoints.py"
)
make_checkpoints = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_checkpoints)

SIZES = {"positions": 16, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
FORMS = {
    "hf_gpt2": {},
    "hf_llama": {"form": "llama", "kv_heads": 1, "tied": False, "rotary_base": 500.0},
}
LOGITS = dict(np.load(make_checkpoints.LANGUAGE / "logits.npz"))
TOKENS = jnp.asarray(make_checkpoints.tokens(), jnp.int32)


def build(case, **attributes):
    return models.create("lm_tiny", num_classes=31, **SIZES | FORMS[case] | attributes)


def load(case, path=None, **attributes):
    path = path or make_checkpoints.LANGUAGE / case / "model.safetensors"
    return models.load_checkpoint(path, model=build(case, **attributes))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf_gpt2", "hf_llama", "gpt2"])
def test_logits_are_those_of_the_publishing_library(case, tmp_path):
    """A twin that turns neighbouring entries in place of halves, or pairs heads and keys otherwise,
    is far off."""
    path, form = None, "hf_gpt2" if case == "gpt2" else case
    if case == "gpt2":  # the first files of the publisher
        path = tmp_path / "model.safetensors"
        tensors = load_file(make_checkpoints.LANGUAGE / form / "model.safetensors")
        save_file({name.removeprefix("transformer."): x for name, x in tensors.items()}, path)
    public = load(form, path)
    logits = jax.jit(public.apply_fn)(public.params, TOKENS)
    assert LOGITS[form].std() > 0.1 and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, LOGITS[form], atol=1e-4)


@pytest.mark.slow
def test_embeddings_are_the_states_behind_the_publishers_logits():
    """The output layer of GPT-2 is its embedding, so states give logits. The twin takes the last
    column in place of the last token."""
    public = load("hf_gpt2")
    table = np.asarray(public.params["embed"]["embedding"])
    tokens, expected = TOKENS.at[0, 5:].set(-1), LOGITS["hf_gpt2"]
    compute = jax.jit(models.text_embeddings, static_argnums=0, static_argnames="pooling")
    last = np.asarray(compute(public, tokens))
    np.testing.assert_allclose(last @ table.T, [expected[0, 4], expected[1, -1]], atol=1e-4)
    mean = np.asarray(compute(public, tokens, pooling="mean"))
    means = [expected[0, :5].mean(axis=0), expected[1].mean(axis=0)]
    np.testing.assert_allclose(mean @ table.T, means, atol=1e-4)
    assert np.abs(last[0] @ table.T - expected[0, -1]).max() > 0.01
    assert not np.asarray(compute(public, jnp.full_like(tokens, -1))).any()  # no token


def test_embeddings_of_other_models_or_poolings_are_refused():
    with pytest.raises(ValueError, match="pooling must be 'last' or 'mean', got 'first'"):
        models.text_embeddings(load("hf_gpt2"), TOKENS, pooling="first")
    images = models.Pretrained(models.create("cnn", num_classes=2), {}, None)
    with pytest.raises(ValueError, match="pretrained must be a language model, got CNN"):
        models.text_embeddings(images, TOKENS)


@pytest.mark.parity
@pytest.mark.parametrize("case", FORMS)
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_live_parity_of_language_models(case, tmp_path, record_property):
    """Logits of a language model with random weights, loaded from the file that transformers
    writes."""
    path, expected = make_checkpoints.write_language(case, tmp_path, seed=1234)
    public = load(case, path)
    difference = np.abs(public.apply_fn(public.params, TOKENS) - expected).max()
    record_property("compared with", "transformers")
    record_property("largest difference", f"{difference:.1e}")
    record_property("allowed", "1e-4")
    assert difference <= 1e-4 and np.abs(expected - LOGITS[case]).max() > 0.01


def moved(network):
    """Parameters with LoRA factors away from zero."""
    return {**network.params, "lora": jax.tree.map(lambda x: x + 0.1, network.params["lora"])}


def loss_of(network):
    def loss(params, row):
        return jaxdp.losses.next_token(network.apply_fn(params, row[None, :-1])[0], row[1:])

    return loss


@pytest.mark.slow
def test_lora_of_a_checkpoint_is_clipped_merged_and_generates():
    public = load("hf_llama")
    tuned = models.with_lora(public, rank=2, seed=0)
    params, apply = moved(tuned), jax.jit(tuned.apply_fn)
    logits = apply(params, TOKENS)
    np.testing.assert_allclose(
        jax.jit(public.apply_fn)(models.merge_lora(params), TOKENS), logits, rtol=1e-3, atol=1e-3
    )
    assert np.abs(logits - LOGITS["hf_llama"]).max() > 0.01
    changed = apply(params, TOKENS.at[:, 4].add(1) % 31)
    # a later token is not seen
    np.testing.assert_allclose(changed[:, :4], logits[:, :4], rtol=1e-5, atol=1e-5)
    how = {"clip_norm": 1.0, "trainable": models.trainable("lora", params)}
    ours, theirs = (
        jax.jit(jaxdp.clipped_grad(loss_of(tuned), engine=engine, **how))(params, TOKENS)
        for engine in ("auto", "vmap")
    )
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        ours.grads["lora"],
        theirs.grads["lora"],
    )
    # frozen: zeros
    assert not jax.tree.leaves(jax.tree.map(lambda x: x.any() or None, ours.grads["blocks"]))
    written = models.generate(tuned.apply_fn, params, [1, 2], length=8, seed=0)
    assert written[:2].tolist() == [1, 2] and (written >= 0).all()


@pytest.mark.slow
def test_remat_and_bfloat16_change_cost_and_rounding_only():
    """Gradients of tied embeddings in a scan are those of engine vmap in float32. In bfloat16 the
    sums are float32."""
    public = load("hf_gpt2")
    network = load("hf_gpt2", remat=True, dtype=jnp.bfloat16)
    plain = jaxdp.clipped_grad(loss_of(public), clip_norm=0.5, engine="vmap")(public.params, TOKENS)
    ours = jaxdp.clipped_grad(loss_of(network), clip_norm=0.5)(public.params, TOKENS)
    assert {x.dtype for x in jax.tree.leaves((ours.grads, ours.norms))} == {jnp.dtype("float32")}
    np.testing.assert_allclose(ours.norms, plain.norms, rtol=0.05)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), ours.grads, plain.grads)


@pytest.mark.slow
def test_generation_is_greedy_at_temperature_zero_and_repeats_by_seed():
    public = load("hf_llama")
    tokens = models.generate(public.apply_fn, public.params, [3], length=6, seed=0, temperature=0.0)
    logits = np.asarray(jax.jit(public.apply_fn)(public.params, tokens[None]))
    np.testing.assert_array_equal(tokens[1:], logits[0, :-1].argmax(-1))
    drawn = [
        models.generate(public.apply_fn, public.params, [3], length=6, seed=seed)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()


def test_mistakes_are_sentences(tmp_path):
    public = load("hf_llama")
    with pytest.raises(ValueError, match=r"at most positions=16 columns, got 17. Cut the texts"):
        build("hf_gpt2").init(jax.random.key(0), jnp.zeros((1, 17), jnp.int32))
    with pytest.raises(
        ValueError, match=r"layers must match a dense layer, got 'query'.*blocks/attention/query"
    ):
        models.with_lora(public, rank=2, layers="query", seed=0)
    with pytest.raises(ValueError, match=r"trainable='atention/.*' matches no parameter"):
        models.trainable("atention/.*", public.params)
    with pytest.raises(
        ValueError, match=r"needs a model with .*num_heads=2, not 4; rotary_base=500.0, not 10000.0"
    ):
        load("hf_llama", num_heads=4, rotary_base=1e4)
    with pytest.raises(ValueError, match="needs a model with positions=16, not 17"):
        load("hf_llama", positions=17)
    # shorter texts need no table of positions
    assert load("hf_llama", positions=9).model.positions == 9
    # no config.json
    path = Path(shutil.copy(make_checkpoints.LANGUAGE / "hf_gpt2" / "model.safetensors", tmp_path))
    (tmp_path / "config.json").write_text('{"num_key_value_heads": 2}')  # as many as heads
    load("hf_gpt2", path)
    with pytest.raises(
        ValueError, match=r"(?s)with its vocabulary and number of positions.*wte.weight"
    ):
        models.load_checkpoint(path, model=models.create("lm_tiny", num_classes=32, **SIZES))
    with pytest.raises(ValueError, match=r"encode returns tokens outside of 0..9. Set num_classes"):
        jaxdp.data.from_texts(["a"], length=4, num_classes=10)
    with pytest.raises(ValueError, match=r"encode returns tokens outside of 0..255"):
        jaxdp.data.from_texts(["a"], length=4, encode=lambda text: [7, -1])  # -1 is padding
    with pytest.raises(ValueError, match="length must be at least 2"):
        jaxdp.data.from_texts(["a"], length=1)
    with pytest.raises(ValueError, match="without lone surrogates") as caught:
        jaxdp.data.from_texts(["secret\udc80"], length=4)
    # A traceback shows the causes too.
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    for given, options, message in (
        ("ab", {}, r"several texts, got one\. Give \[text\]"),
        (["a", None], {}, "texts must be texts, got NoneType among them"),
        (["a"], {"encode": lambda text: [1.7]}, "encode must return whole numbers, got dtype f"),
    ):
        with pytest.raises(TypeError, match=message):
            jaxdp.data.from_texts(given, length=4, **options)
    with pytest.raises(TypeError, match=r"prompt must have token ids, .* got \[1\.5\]"):
        models.generate(public.apply_fn, public.params, [1.5], length=4, seed=0)
    size = public.model.num_classes
    for prompt, options, message in (
        ([], {}, "prompt must have 1 to length - 1 = 3 tokens, got 0"),
        ([0, size], {}, rf"prompt must have tokens in \[0, {size}\), got \[0, {size}\]"),
        ([-1], {}, r"prompt must have tokens in .* got \[-1\]"),
        ([1], {"temperature": -1.0}, "temperature must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            models.generate(public.apply_fn, public.params, prompt, length=4, seed=0, **options)


def test_no_gradient_of_a_large_vocabulary_is_kept_per_example():
    """Gram norms of the tied embedding of 50,257 tokens. A twin without a limit keeps 40 MB per
    text."""
    model = models.create(
        "lm_tiny", **{**SIZES, "positions": 128, "width": 200}, num_classes=50_257
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    rows = np.zeros((2, 129), np.int32)
    plan = jaxdp.clipped_grad(loss_of(models.Pretrained(model, params, None)), clip_norm=1.0).plan(
        params, rows
    )
    assert {leaf.path: leaf.method for leaf in plan}["embed/embedding"] == "factors"
