"""In the memory of a TPU, cotangents of tokens lie as in a plain step, and those of pictures as the
kernels of convolutions read them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdp
from jaxdp.compilers import process
from jaxdp.transforms import layouts

TOKENS, FEATURES = 3, 128
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, TOKENS, FEATURES)).astype(np.float32)
# The fewest tokens whose layout is fixed. Programs are only lowered for so many.
MANY = jax.ShapeDtypeStruct((128, 256, FEATURES), np.float32)
PARAMS = {"scale": np.ones(FEATURES, np.float32), "bias": np.zeros(FEATURES, np.float32)}


def loss_fn(params, x):
    """A normalised example [1, T, d] with a scale and a bias, as in a Transformer."""
    x = x[None]
    y = x * params["scale"].reshape(1, 1, -1) + params["bias"].reshape(1, 1, -1)
    return jnp.sum(jnp.tanh(y) ** 2)


def text(function, *args, platform="tpu"):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def constrained(program):
    """Returns the shapes whose layout a program fixes."""
    lines = [line for line in program.splitlines() if "@LayoutConstraint" in line]
    return [line.rsplit("tensor<", 1)[1].split(">")[0] for line in lines]


clipped = jaxdp.clipped_grad(loss_fn, clip_norm=1.0)


def test_a_clipped_gradient_for_a_tpu_fixes_the_layout_of_cotangents_of_tokens():
    program = text(clipped, PARAMS, MANY)
    # Those of the product and of the sum.
    assert constrained(program) == ["128x1x256x128xf32"] * 2
    # XLA writes the orders of axes with the fastest one first.
    assert program.count("result_layouts = [dense<[3, 2, 1, 0]>") == 2
    for platform in ("cpu", "cuda"):
        assert not constrained(text(clipped, PARAMS, MANY, platform=platform))


def test_products_over_tokens_decide_how_tokens_lie():
    """A head that reads one token changes nothing."""

    def with_product(tokens):
        def loss_fn(params, x):
            y = x[:tokens] @ params["kernel"]
            return jnp.sum(y**2) + jnp.sum(jnp.tanh(x * params["scale"][None]) ** 2)

        return jaxdp.clipped_grad(loss_fn, clip_norm=1.0)

    params = {"kernel": np.ones((FEATURES, 2), np.float32), "scale": PARAMS["scale"]}
    assert not constrained(text(with_product(2), params, MANY))
    assert constrained(text(with_product(1), params, MANY)) == ["128x256x128xf32"]


@pytest.mark.parametrize(
    "shape", [(TOKENS, 64), (1, FEATURES), (2, TOKENS, FEATURES), (FEATURES,), ()]
)
def test_what_is_no_array_of_tokens_lies_as_the_compiler_likes(shape):
    x = np.zeros(shape, np.float32)
    assert layouts.of_tokens(x) is x
    assert layouts.of_tokens(X[0]) is not X[0]


def test_an_exported_program_fixes_no_layout_unless_it_is_told_to():
    """JAX gives no guarantee for the call in an exported program, and refuses it."""
    export = functools.partial(jax.export.export, platforms=["tpu"])
    exported = export(jax.jit(clipped))(PARAMS, MANY)
    assert not constrained(exported.mlir_module())
    with layouts.in_exports(), pytest.raises(ValueError, match="LayoutConstraint"):
        export(jax.jit(lambda *args: clipped(*args)))(PARAMS, MANY)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    with layouts.in_exports():
        exported = export(jax.jit(lambda *args: clipped(*args)), disabled_checks=allowed)(
            PARAMS, MANY
        )
    assert len(constrained(exported.mlir_module())) == 2


def test_what_is_compiled_for_an_estimate_has_the_layouts():
    program, _ = process.exported("v5e", clipped, (PARAMS, MANY))
    module = jax.export.deserialize(bytearray(program)).mlir_module()
    assert len(constrained(module)) == 2


def cotangents(x, given):
    """Returns the cotangents of tokens [B, T, d] for those of the result."""
    _, pull = jax.vjp(jax.vmap(layouts.of_tokens), x)
    return pull(given)[0]


@pytest.mark.parametrize("manual", [False, True])
def test_a_program_that_xla_divides_fixes_none(manual):
    """A program of several devices fixes layouts only inside of `jax.shard_map`."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = PartitionSpec("data")
    function = cotangents
    if manual:
        function = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows)
    divided = jax.ShapeDtypeStruct(
        (256, *MANY.shape[1:]), np.float32, sharding=NamedSharding(mesh, rows)
    )
    assert len(constrained(text(function, divided, divided))) == manual


def test_values_and_derivatives_are_those_of_the_array():
    def function(x):
        return jnp.sum(layouts.of_tokens(x) ** 3)

    x = X[0]
    np.testing.assert_array_equal(layouts.of_tokens(x), x)
    np.testing.assert_allclose(jax.grad(function)(x), 3 * x**2, rtol=1e-6)
    value, tangent = jax.jvp(function, (x,), (np.ones_like(x),))
    np.testing.assert_allclose(tangent, np.sum(3 * x**2, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(value, np.sum(x**3, dtype=np.float64), rtol=1e-5, atol=1e-4)


def test_examples_vary_slowest_around_tokens_wherever_vmap_has_them():
    last = np.moveaxis(X, 0, 2)
    gradient = jax.grad(lambda x: jnp.sum(layouts.of_tokens(x) ** 2))
    batched = jax.vmap(gradient, 2, 2)
    np.testing.assert_array_equal(batched(last), 2 * last)
    many_last = jax.ShapeDtypeStruct((*MANY.shape[1:], 128), np.float32)
    assert constrained(text(batched, many_last)) == ["128x256x128xf32"]
    # So do those of an outer vmap. Without any vmap there is no example to lay.
    twice = jax.vmap(jax.vmap(gradient))
    program = text(twice, jax.ShapeDtypeStruct((1, *MANY.shape), np.float32))
    assert constrained(program) == ["1x128x256x128xf32"]
    assert "result_layouts = [dense<[3, 2, 1, 0]>" in program
    assert not constrained(text(gradient, jax.ShapeDtypeStruct((2**15, 128), np.float32)))


def test_few_tokens_lie_as_the_compiler_likes():
    fewer = jax.ShapeDtypeStruct((127, *MANY.shape[1:]), np.float32)
    assert not constrained(text(clipped, PARAMS, fewer))


# --- Pictures ---

SIDE, CHANNELS = 4, 3
KERNELS = {
    "first": RNG.normal(size=(3, 3, CHANNELS, 64)),
    "second": RNG.normal(size=(3, 3, 64, 8)),
}


def picture_loss(spec, params, x):
    """Two convolutions, whose data lie as `spec` tells. `x` is [H, W, C]."""
    x = x.transpose(*("HWC".index(axis) for axis in spec[1:]))[None]
    for name in ("first", "second"):
        kernel = params[name]
        x = jax.lax.conv_general_dilated(
            jnp.tanh(x), kernel, (1, 1), "SAME", dimension_numbers=(spec, "HWIO", spec)
        )
    return jnp.sum(x**2)


def pictures(count):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, SIDE, SIDE, CHANNELS)).astype(np.float32)


@pytest.mark.parametrize(("spec", "order"), [("NHWC", "0, 4, 3, 2, 1"), ("NCHW", "0, 2, 4, 3, 1")])
def test_cotangents_of_pictures_have_the_examples_on_the_lanes(spec, order):
    params = jax.tree.map(np.float32, KERNELS)
    function = jaxdp.clipped_grad(functools.partial(picture_loss, spec), clip_norm=1.0)
    program = text(function, params, pictures(128))
    shape = {"NHWC": "128x1x4x4x64xf32", "NCHW": "128x1x64x4x4xf32"}[spec]
    assert constrained(program) == [shape]  # nothing reads a cotangent of the pictures themselves
    assert f"result_layouts = [dense<[{order}]>" in program
    # The kernels transpose a batch that leaves lanes empty.
    assert not constrained(text(function, params, pictures(96)))
    assert not constrained(text(function, params, pictures(128), platform="cpu"))


def test_the_layout_of_pictures_changes_no_value():
    loss = functools.partial(picture_loss, "NHWC")
    x = pictures(128)
    result = jaxdp.clipped_grad(loss, clip_norm=1.0)(jax.tree.map(np.float32, KERNELS), x).grads
    with jax.enable_x64(True):
        grads = jax.vmap(jax.grad(loss), (None, 0))(KERNELS, x.astype(np.float64))
        squares = sum(np.square(g).sum((1, 2, 3, 4)) for g in grads.values())
        factors = np.minimum(1, 1 / np.sqrt(squares))
        expected = {name: np.einsum("n,nhwio->hwio", factors, g) for name, g in grads.items()}
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-4, atol=1e-4)
