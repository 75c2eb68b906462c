"""Language models: causality, checkpoints by layer, LoRA in a scan, generation, and mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxdp
from jaxdp import models

SIZES = {"positions": 8, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
MODEL = models.create("lm_tiny", num_classes=11, **SIZES)


def checkpoint(path):
    shapes = {"wte.weight": (11, 8), "wpe.weight": (8, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    for k in range(2):
        parts = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 12), "mlp.c_proj": (12, 8)}
        for name, shape in {**parts, "ln_1": (8,), "ln_2": (8,)}.items():
            shapes |= {f"h.{k}.{name}.weight": shape, f"h.{k}.{name}.bias": shape[-1:]}
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path)
    return tensors


def test_lora_of_a_checkpoint_is_clipped_merged_and_generates(tmp_path):
    tensors = checkpoint(tmp_path / "model.safetensors")
    public = models.load_checkpoint(tmp_path / "model.safetensors", model=MODEL)
    kernel = public.params["blocks"]["attention"]["key"]["kernel"]
    np.testing.assert_array_equal(kernel[1], tensors["h.1.attn.c_attn.weight"][:, 8:16])
    tuned = models.with_lora(public, rank=2, seed=0)
    params = jax.tree.map(lambda x: x + 0.1, tuned.params["lora"])
    params = {**tuned.params, "lora": params}
    tokens = jnp.asarray(np.random.default_rng(1).integers(11, size=(3, 7)))
    logits = tuned.apply_fn(params, tokens)
    np.testing.assert_allclose(public.apply_fn(models.merge_lora(params), tokens), logits, rtol=1e-3, atol=1e-3)
    changed = tuned.apply_fn(params, tokens.at[:, 4].add(1) % 11)
    np.testing.assert_allclose(changed[:, :4], logits[:, :4], rtol=1e-5, atol=1e-5)  # a later token is not seen

    def loss(params, row):
        return jaxdp.losses.next_token(tuned.apply_fn(params, row[None, :-1])[0], row[1:])

    how = {"clip_norm": 1.0, "trainable": models.trainable("lora", params)}
    ours, theirs = (jaxdp.clipped_grad(loss, engine=engine, **how)(params, tokens) for engine in ("auto", "vmap"))
    np.testing.assert_allclose(ours.norms, theirs.norms, rtol=1e-3)
    written = models.generate(tuned.apply_fn, params, [1, 2], length=8, seed=0)
    assert written[:2].tolist() == [1, 2] and (written >= 0).all()


def test_mistakes_are_sentences(tmp_path):
    checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="at most positions=8 columns, got 9"):
        MODEL.init(jax.random.key(0), jnp.zeros((1, 9), jnp.int32))
    other = models.create("lm_tiny", num_classes=12, **SIZES)
    with pytest.raises(ValueError, match="with its vocabulary"):
        models.load_checkpoint(tmp_path / "model.safetensors", model=other)
    with pytest.raises(ValueError, match="tokens outside of"):
        jaxdp.data.from_texts(["a"], length=4, num_classes=10)
