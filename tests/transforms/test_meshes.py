"""`clipped_grad` and noise on meshes of eight devices, whose axes JAX types as Auto or Explicit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxdp
from jaxdp.transforms import noise

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="fewer than eight devices")

RNG = np.random.default_rng(0)
PARAMS = {
    "table": RNG.normal(size=(16, 8)).astype(np.float32),
    "w": RNG.normal(size=(8, 3)).astype(np.float32),
    "b": np.zeros(3, np.float32),
}
BATCH = (RNG.integers(16, size=(32, 4)), RNG.normal(size=(32, 3)).astype(np.float32))
SPECS = {"table": PartitionSpec("data"), "w": PartitionSpec("data"), "b": PartitionSpec()}


def loss(params, example):
    tokens, y = example
    return jnp.square(
        jnp.tanh(params["table"][tokens].mean(0)) @ params["w"] + params["b"] - y
    ).sum()


def mesh_of(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def on_mesh(mesh, specs=SPECS):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put(PARAMS, shardings), jax.device_put(BATCH, rows)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vmap", "auto"])
def test_explicit_axes_give_the_sums_of_one_device_with_the_shardings_of_the_parameters(engine):
    # Without `shards.automatic` the first contraction over the batch raises ShardingTypeError.
    f = jaxdp.clipped_grad(loss, clip_norm=1.0, engine=engine)
    one, many = f(PARAMS, BATCH), f(*on_mesh(mesh_of(AxisType.Explicit)))
    for got, want in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert (
        not many.grads["w"].sharding.is_fully_replicated
        and not many.norms.sharding.is_fully_replicated
    )


@pytest.mark.slow
def test_every_device_works_on_every_microbatch():
    # Chunks of contiguous rows take as many operations on each device as on one.
    f = jaxdp.clipped_grad(loss, clip_norm=1.0, microbatch_size=8)
    flops = [
        jax.jit(lambda p, b: f(p, b).grads).lower(*arguments).compile().cost_analysis()["flops"]
        for arguments in ((PARAMS, BATCH), on_mesh(mesh_of(AxisType.Auto), PartitionSpec()))
    ]
    assert flops[1] < flops[0] / 4


@pytest.mark.slow
def test_noise_is_computed_in_parts_with_the_values_of_one_device():
    mesh, key = mesh_of(AxisType.Auto), noise.stream(b"a secret of 16 b", "test")
    specs = {"w": PartitionSpec(None, "data"), "b": PartitionSpec(), "table": PartitionSpec("data")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    shapes = {"w": (32, 2048), "b": (5,), "table": (48, 7, 3)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    whole = (
        jax.jit(lambda key: noise.gaussian(key, tree, 2.0), out_shardings=shardings)
        .lower(key)
        .compile()
    )
    parts = (
        jax.jit(lambda key: noise.gaussian(key, tree, 2.0, shardings=shardings))
        .lower(key)
        .compile()
    )
    drawn = parts(key)
    for name, value in noise.gaussian(key, tree, 2.0).items():
        # JAX 0.10 gives equal bits. Later releases round a product and a sum at once in one of the
        # programs only.
        np.testing.assert_array_max_ulp(np.asarray(drawn[name]), np.asarray(value), maxulp=2)
        assert drawn[name].sharding.is_equivalent_to(shardings[name], value.ndim)
    assert parts.memory_analysis().temp_size_in_bytes < 4 * 32 * 2048  # less than all values
    # Without `shardings` devices exchange what they have computed.
    names = ("all-gather(", "all-reduce(", "collective-permute(", "all-to-all(")
    assert [any(name in program.as_text() for name in names) for program in (parts, whole)] == [
        False,
        True,
    ]
