"""Forms by the platform that a program is compiled for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdp
from jaxdp.transforms import forms
from jaxdp.transforms.forms import by_platform
from jaxdp.transforms.shards import shape_like

X = jnp.arange(1024.0).reshape(8, 128)


def doubled(x, y):
    """The form of a CPU differs, so a test sees which one ran. Real forms are equal."""
    return by_platform(x, y, default=lambda x, y: x * y, cpu=lambda x, y: x * y + 1)


def kernel(x):
    def body(x, result):
        result[...] = 2 * x[...]

    return pl.pallas_call(body, out_shape=shape_like(x, x.shape))(x)


def with_kernel(x):
    return by_platform(x, default=lambda x: x + x, kernels={"tpu": kernel})


def lowered(function, *args, platform):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_a_form_is_that_of_the_platform_that_is_compiled_for():
    np.testing.assert_array_equal(doubled(X, X), X * X + 1)
    np.testing.assert_array_equal(jax.jit(doubled)(X, X), X * X + 1)
    added = {
        name: "stablehlo.add" in lowered(doubled, X, X, platform=name)
        for name in ("cpu", "cuda", "tpu")
    }
    assert added == {"cpu": True, "cuda": False, "tpu": False}


def test_one_artifact_has_the_forms_of_several_platforms():
    """`jax.lax.platform_dependent` fails here: it lowers the kernel of a TPU for the CPU too."""
    exported = jax.export.export(jax.jit(with_kernel), platforms=("cpu", "tpu"))(X)
    assert "tpu_custom_call" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X), X + X)


def test_a_kernel_is_left_out_where_xla_divides_a_program():
    """A compiler refuses a kernel that it would have to divide."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    divided = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    assert "tpu_custom_call" in lowered(with_kernel, X, platform="tpu")
    assert "tpu_custom_call" not in lowered(with_kernel, divided, platform="tpu")
    for check in (True, False):
        spec = PartitionSpec("data")
        shard = jax.shard_map(
            with_kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check
        )
        assert "tpu_custom_call" in lowered(shard, divided, platform="tpu")
        np.testing.assert_array_equal(shard(divided), X + X)


def test_forms_are_batched_and_differentiated():
    batched = jax.vmap(doubled, (0, None))(jnp.stack([X, 2 * X]), X)
    np.testing.assert_array_equal(batched, [X * X + 1, 2 * X * X + 1])
    # The derivative is that of the default form.
    np.testing.assert_array_equal(jax.grad(lambda x: doubled(x, x).sum())(X), 2 * X)
    primal, tangent = jax.jvp(functools.partial(doubled, X), (X,), (jnp.ones_like(X),))
    np.testing.assert_array_equal(primal, X * X + 1)
    np.testing.assert_array_equal(tangent, X)


def test_trees_go_in_and_out():
    result = by_platform(
        {"a": X}, None, default=lambda tree, none: (tree["a"], {"b": 2 * tree["a"]}, none)
    )
    np.testing.assert_array_equal(result[1]["b"], 2 * X)
    assert result[2] is None


def test_a_form_that_closes_over_a_traced_value_is_refused():
    with pytest.raises(TypeError, match="default closes over a traced value"):
        jax.jit(lambda x: by_platform(x, default=lambda y: y * x))(X)


def test_a_function_is_traced_for_each_platform_that_is_compiled_for():
    def named(x):
        return x + 1 if forms.platform() == "tpu" else 2 * x

    def chosen(x):
        return forms.for_platform(named, x)

    added = {name: "add" in lowered(chosen, X, platform=name) for name in ("cpu", "cuda", "tpu")}
    assert added == {"cpu": False, "cuda": False, "tpu": True}
    np.testing.assert_array_equal(jax.jit(chosen)(X), 2 * X)
    with forms.traced_for("tpu"):
        np.testing.assert_array_equal(chosen(X), X + 1)
    assert forms.platform() == "cpu"
    exported = jax.export.export(jax.jit(chosen), platforms=("cpu", "tpu"))(X)
    np.testing.assert_array_equal(exported.call(X), 2 * X)


def test_settings_of_a_call_hold_when_its_forms_are_traced():
    """Forms of other platforms are traced after the call, where the settings no longer hold."""

    def asked(x):
        highest = jax.config.values["jax_default_matmul_precision"] == "highest"
        return x * 3 if highest else x

    with jax.default_matmul_precision("highest"):
        traced = jax.jit(lambda x: forms.for_platform(asked, x)).trace(X)
    for platform in ("cpu", "tpu"):
        assert "multiply" in traced.lower(lowering_platforms=(platform,)).as_text()


def test_one_process_compiles_a_clipped_gradient_for_two_platforms():
    """The forms of a TPU round to bfloat16 and zero no rows in a loop. Those of a CPU do
    neither."""

    def loss(params, example):
        return jnp.tanh(example @ params).sum()

    gradient = jaxdp.clipped_grad(loss, clip_norm=1.0)
    args = (jnp.ones((128, 4)), jnp.ones((3, 8, 128)))
    traced = jax.jit(lambda *args: gradient(*args).grads).trace(*args)
    for platform, on_tpu in (("cpu", False), ("tpu", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("reduce_precision" in text) == on_tpu
        assert ("stablehlo.while" in text) != on_tpu


def test_effects_of_a_form_are_kept(capfd):
    def shown(x):
        jax.debug.print("sum {}", x.sum())
        return x

    jax.block_until_ready(jax.jit(lambda x: forms.for_platform(shown, x))(X))
    jax.effects_barrier()
    assert "sum 523776" in capfd.readouterr().out
