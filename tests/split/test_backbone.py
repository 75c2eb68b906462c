"""A model cut in two and put together again: at every cut, with another head, and where it cannot
be cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models import MLP, Preprocessing, Swin, ViT
from jaxdp.split.backbone import Backbone, two_thirds

SWIN = Swin(
    num_classes=3, patch_size=2, window=2, width=4, depths=(2, 1), num_heads=(2, 2), mlp_ratio=1
)


def same(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2])
def test_front_and_back_compose_to_the_model(vit, cut):
    backbone = dataclasses.replace(vit.backbone, cut=cut)
    front, back = backbone.divide(vit.params)
    assert set(front) == {"embed", "class_token", "positions"} | {f"block_{k}" for k in range(cut)}
    assert set(back) == {"norm", "head"} | {f"block_{k}" for k in range(cut, 3)}
    assert same({**front, **back}, vit.params)
    representations = jax.jit(backbone.front)(front, vit.images)
    assert (
        representations.shape == (9, *backbone.tokens) == (9, 17, 8)
        and representations.dtype == jnp.float32
    )
    exact = vit.reference.front(vit.exact, vit.images, cut)
    np.testing.assert_allclose(representations, exact, atol=2e-5)
    logits = jax.jit(backbone.back)(back, representations)
    assert logits.shape == (9, backbone.num_classes) == (9, 3)
    np.testing.assert_allclose(logits, vit.reference.back(vit.exact, exact, cut, 3), atol=2e-5)


@pytest.mark.slow
def test_a_swin_composes_too():
    backbone = Backbone(SWIN, Preprocessing(size=8, mean=(0.3,), std=(0.4,)), 2)
    rng = np.random.default_rng(0)
    images = rng.random((2, 8, 8, 1), np.float32)
    shapes = jax.eval_shape(SWIN.init, jax.random.key(0), images)["params"]
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)
    front, back = backbone.divide(params)
    assert same({**front, **back}, params) and not set(front) & set(back)
    # The merging of patches belongs to the block before it.
    before = dataclasses.replace(backbone, cut=1)
    assert "stage_1_merge" in front and "stage_1_merge" in before.divide(params)[1]
    assert backbone.tokens == (4, 8) and before.tokens == (16, 4) and backbone.prefix_tokens == 0

    @jax.jit
    def both(front, back, params, images):
        representations = backbone.front(front, images)
        expected = SWIN.apply({"params": params}, (images - np.float32(0.3)) / np.float32(0.4))
        return representations, backbone.back(back, representations), expected

    representations, logits, expected = both(front, back, params, images)
    assert representations.shape == (2, 4, 8) and np.ptp(expected) > 0.1
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_what_cannot_be_cut_is_refused(vit):
    for cut in (0, 3, -1, 1.0, None):
        with pytest.raises(
            ValueError, match=rf"cut must be in \[1, 2\] .* 3 blocks, got {cut}. .* here 2"
        ):
            dataclasses.replace(vit.backbone, cut=cut)
    with pytest.raises(ValueError, match="model must be a ViT, DeiT or Swin, got MLP"):
        Backbone(MLP(3), vit.backbone.preprocessing, 1)
    with pytest.raises(
        ValueError, match=r"params have no 'block_1', 'embed'. Give the parameters of this model"
    ):
        vit.backbone.divide({k: v for k, v in vit.params.items() if k not in ("embed", "block_1")})


def test_where_the_paper_cuts():
    assert [two_thirds(ViT(10, depth=depth)) for depth in (24, 12, 6, 3, 2)] == [16, 8, 4, 2, 1]
    assert two_thirds(Swin(10, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48))) == 22


@pytest.mark.slow
@pytest.mark.parametrize(("distilled", "hidden"), [(False, 0), (True, 6)])
def test_another_head_and_all_else_kept(vit, distilled, hidden):
    model = vit.backbone.model.clone(distilled=distilled)
    backbone = dataclasses.replace(vit.backbone, model=model, head_hidden=hidden)
    assert backbone.prefix_tokens == 1 + distilled
    before = {**vit.back, "head_of_another_task": vit.back["head"]}
    other, back = backbone.with_head(jax.random.key(1), before, 5)
    assert other == dataclasses.replace(
        backbone, model=model.clone(num_classes=5, head_hidden=hidden)
    )
    assert other.num_classes == 5
    heads = {"head": (hidden or 8, 5)} | (
        {"head_hidden": (8, 6), "head_distilled": (8, 5)} if distilled else {}
    )
    assert set(back) == {"block_2", "norm", *heads}
    assert all(back[name]["kernel"].shape == shape for name, shape in heads.items())
    assert same(
        {k: back[k] for k in ("block_2", "norm")}, {k: vit.back[k] for k in ("block_2", "norm")}
    )
    if distilled:  # Drawn with the key, each layer for itself.
        drawn = [back, backbone.with_head(jax.random.key(2), vit.back, 5)[1]]
        kernels = [np.asarray(params[name]["kernel"]) for params in drawn for name in heads]
        assert len({kernel.tobytes() for kernel in kernels}) == 6


@pytest.mark.slow
def test_a_head_for_one_class_is_refused(vit):
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        vit.backbone.with_head(jax.random.key(0), vit.back, 1)
