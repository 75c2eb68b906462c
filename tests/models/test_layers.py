import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.models import FrozenBatchNorm, GroupNorm, WSConv, layers


@pytest.mark.slow
def test_a_standardised_kernel_ignores_shift_and_scale_of_its_weights():
    x = np.random.default_rng(0).standard_normal((2, 5, 5, 3)).astype(np.float32)
    layer = WSConv(4, (3, 3))
    params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
    moved = {**params, "kernel": 3 * np.asarray(params["kernel"]) + np.float32(0.7)}
    apply = jax.jit(layer.apply)
    np.testing.assert_allclose(
        apply({"params": moved}, x), apply({"params": params}, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_a_constant_kernel_is_bounded_by_the_floor_on_the_variance():
    """var = 0: the formula divides by sqrt(1e-4), so the result is zero and the gradient finite."""
    x = np.ones((1, 3, 3, 1), np.float32)
    layer = WSConv(1, (3, 3))
    params = {"kernel": jnp.full((3, 3, 1, 1), 0.5), "gain": jnp.ones(1), "bias": jnp.full(1, 0.25)}

    def corner(params):
        y = layer.apply({"params": params}, x)
        return y[0, 0, 0, 0], y

    gradients, output = jax.jit(jax.grad(corner, has_aux=True))(params)
    np.testing.assert_allclose(output, 0.25)
    gradient = np.asarray(gradients["kernel"])
    centred = np.zeros((3, 3))
    centred[1:, 1:] = 1  # the corner sees four of the nine weights
    np.testing.assert_allclose(gradient[..., 0, 0], 100 * (centred - 4 / 9), rtol=1e-4)


@pytest.mark.parametrize("size", [7, 8])
def test_ws_conv_pads_like_a_same_convolution(size):
    layer = WSConv(2, (3, 3), strides=(2, 2))
    shape = jax.eval_shape(
        layer.init_with_output, jax.random.key(0), jnp.zeros((1, size, size, 1))
    )[0].shape
    assert shape == (1, 4, 4, 2)


@pytest.mark.slow
def test_frozen_batch_norm_starts_as_the_identity_and_uses_its_statistics():
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    layer = FrozenBatchNorm(epsilon=1e-3)
    variables, apply = jax.jit(layer.init)(jax.random.key(0), x), jax.jit(layer.apply)
    np.testing.assert_allclose(apply(variables, x), x / np.sqrt(1 + 1e-3), rtol=1e-5)
    mean, var = np.arange(6.0), np.arange(1.0, 7.0)
    stats = {"mean": jnp.asarray(mean), "var": jnp.asarray(var)}
    output = apply({**variables, "batch_stats": stats}, x)
    np.testing.assert_allclose(output, (x - mean) / np.sqrt(var + 1e-3), rtol=1e-5)
    assert jax.eval_shape(layer.apply, variables, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_group_norm_is_that_of_flax(dtype):
    """A norm over the wrong channels, or one that forgets a size, has other values and
    gradients."""
    x = jnp.asarray(2 + 3 * np.random.default_rng(0).standard_normal((2, 3, 4, 6)), dtype)
    params = {"scale": jnp.arange(1.0, 7), "bias": jnp.arange(6.0)}

    def gradients(layer):
        def loss(params, x):
            y = layer.apply({"params": params}, x)
            assert y.dtype == dtype
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    ours, theirs = gradients(GroupNorm(2, dtype=dtype)), gradients(nn.GroupNorm(2, dtype=dtype))
    near = {"float32": 1e-4, "bfloat16": 0.05}[dtype]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=near, atol=near),
        *jax.tree.map(np.float32, (ours, theirs)),
    )


@pytest.mark.parametrize(
    ("kind", "args", "x"),
    [
        ("Dense", (3,), np.ones((2, 4))),
        ("Conv", (3, (3, 3)), np.ones((2, 5, 5, 1))),
        ("LayerNorm", (), np.ones((2, 4))),
        ("RMSNorm", (), np.ones((2, 4))),
        ("Embed", (7, 4), np.ones(2, int)),
    ],
)
def test_layers_are_those_of_flax_and_refuse_the_same_shapes(kind, args, x):
    ours, theirs = (getattr(library, kind)(*args) for library in (layers, nn))
    results = jax.jit(lambda *at: [layer.init_with_output(*at) for layer in (ours, theirs)])
    (found, params), expected = results(jax.random.key(0), x)
    chex.assert_trees_all_equal((found, params), expected)
    longer = jax.tree.map(lambda leaf: jnp.ones((*leaf.shape[:-1], leaf.shape[-1] + 1)), params)
    told = []
    for layer in (ours, theirs):
        with pytest.raises(flax.errors.ScopeParamShapeError) as error:
            layer.apply(longer, x)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_a_parameter_that_is_given_traces_no_initializer():
    def fails(key, shape, dtype):
        raise RuntimeError("traced")

    params = {"params": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
    assert layers.Dense(3, kernel_init=fails).apply(params, jnp.ones((2, 4))).shape == (2, 3)
    for layer, given in ((nn.Dense, params), (layers.Dense, {"params": {}})):
        with pytest.raises(RuntimeError, match="traced"):
            layer(3, kernel_init=fails).apply(
                given, jnp.ones((2, 4)), mutable=["params"], rngs=jax.random.key(0)
            )
