"""What devices exchange in a private step, from compiled programs: little more than in a plain
step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import bench_scale
from jaxdp.compilers import hlo
from jaxdp.data import from_arrays
from jaxdp.transforms import meshes, shards

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="fewer than eight devices")

RNG = np.random.default_rng(0)
SOURCE = from_arrays(
    x=RNG.normal(size=(32, 8, 8, 8)).astype(np.float32), y=RNG.normal(size=32).astype(np.float32)
)
PARAMS = {
    "kernel": jnp.asarray(RNG.normal(size=(3, 3, 8, 16)), jnp.float32),
    "bias": jnp.zeros(16),
    "dense": jnp.asarray(RNG.normal(size=(16, 64)), jnp.float32),
    "scale": jnp.ones(64),
    "head": jnp.ones(64),
}


def losses(params, batch):
    h = jax.lax.conv_general_dilated(
        batch["x"], params["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h = (
        jnp.tanh(jnp.tanh(h + params["bias"][None, None, None]) @ params["dense"])
        * params["scale"][None, None, None]
    )
    return jnp.square(h.mean((1, 2)) @ params["head"] - batch["y"])


def counts_of(layout, **options):
    return bench_scale.steps(
        lambda params, example: losses(params, jax.tree.map(lambda x: x[None], example))[0],
        lambda params, batch: losses(params, batch).mean(),
        PARAMS,
        SOURCE,
        32,
        **{"devices": 8, "layout": layout, "optimizer": optax.sgd(0.1), **options},
    )


def excess(counts):
    """Returns by how many collectives, and by how many bytes, the private step exceeds the plain
    step."""
    plain, private = counts["plain"], counts["private"]
    return private.messages - plain.messages, private.moved - plain.moved


@pytest.mark.parametrize(
    ("layout", "twin"),
    [
        ("data", None),
        ("fsdp", None),
        ("data", (shards, "auto_devices", lambda: 1)),  # a sum for each position of a kernel
        # XLA alone places what is divided
        (
            "fsdp",
            (meshes.Layout, "whole", lambda layout: layout),
        ),
    ],
)
@pytest.mark.slow
def test_a_private_step_exchanges_what_a_plain_step_does_and_the_norms(layout, twin, monkeypatch):
    if twin:
        monkeypatch.setattr(*twin)
    more, moved = excess(counts_of(layout))
    # The norms, 4 bytes for each of 32 examples. The norm of the released gradient is a sum over
    # divided parameters.
    assert (more <= 1 + (layout == "fsdp") and moved <= 4 * 32 + 8) == (twin is None)


def test_loops_count_as_often_as_they_run_and_branches_once():
    def run(w, x):
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=5)
        return jax.lax.cond(y[0, 0] > 0, lambda: y @ w, lambda: y)

    shapes = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    found = hlo.count(jax.jit(run).lower(*shapes).compile())
    assert 6 * 2 * 8 * 16 * 16 <= found.flops <= 1.1 * 6 * 2 * 8 * 16 * 16
    assert not found.collectives


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    """Otherwise the counts would be those of a smaller mesh."""
    count = len(jax.devices())
    assert bench_scale.mesh_of(count).size == count
    with pytest.raises(ValueError, match=f"{count + 1} devices are needed, but JAX has {count}"):
        bench_scale.mesh_of(count + 1)
