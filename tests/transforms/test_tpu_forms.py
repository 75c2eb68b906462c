"""Clipped gradients in the forms of a TPU, with its kernels run by JAX on the CPU, against
float64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdp
from jaxdp.transforms import channel_weights, clipped_sums, forms, sites, walker
from jaxdp.transforms import dense as dense_forms
from jaxdp.transforms.kernels import cells, formed, gram, weighted
from tests.transforms.small_net import factors_of_other_parts
from tests.transforms.test_dense_kernels import few_examples_share_a_step

B, T, P, Q = 3, 48, 64, 80
WORDS = 150


@contextlib.contextmanager
def on_a_tpu():
    """Traces the forms of a TPU, with its kernels as plain JAX and one example in a turn of their
    loops, so that little is compiled. Yields a list of the kernels that were traced."""
    traced = []

    def with_kernels(*args, default, kernels=None, **others):
        if not kernels:
            return default(*args)
        traced.append(kernels["tpu"])
        return kernels["tpu"](*args)

    with pytest.MonkeyPatch.context() as patch, forms.traced_for("tpu"):
        patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
        patch.setattr(forms, "by_platform", with_kernels)
        few_examples_share_a_step(patch, most=1)
        patch.setattr(cells.Plan, "unrolled", 1)
        yield traced


def dense(params, x):
    return jnp.square(jnp.tanh(x @ params["first"]) @ params["second"]).sum()


def stacked(params, x):
    """Two layers by a scan, whose weights are slices."""

    def layer(x, weight):
        return jnp.tanh(x @ weight), None

    return jnp.square(jax.lax.scan(layer, x, params["stack"])[0]).sum()


def adapted(params, x):
    """Adapters of rank 2 in a scan, whose gradients the loop forms."""

    def layer(x, adapter):
        down, up = adapter
        return x + jnp.tanh((x @ down) @ up), None

    return jnp.square(jax.lax.scan(layer, x, (params["down"], params["up"]))[0]).sum()


def convolution(params, picture, strides, padding):
    numbers = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        picture, params["kernel"], strides, padding, dimension_numbers=numbers
    )
    return jnp.square(jnp.tanh(out)).sum()


def patches(params, x):
    """A convolution of patches that do not overlap is dense."""
    return convolution(params, x.reshape(1, 6, 8, P), (1, 1), "VALID")


def embedded(params, x):
    """A convolution of larger patches that do not overlap, which XLA multiplies."""
    return convolution(params, x.reshape(1, 16, 24, 8), (4, 4), "VALID")


def tied(params, x):
    """A weight that is applied twice, once transposed, has no kernel for its norm."""
    return jnp.square(jnp.tanh(x @ params["weight"]) @ params["weight"].T).sum()


def next_words(params, x):
    """A table whose rows are read and whose transpose is applied, as in a language model.

    The positions of its logits are on the lanes, and a product picks columns of their cotangents.
    """
    words = (1e3 * x[:, 0]).astype(jnp.int32) % WORDS
    return jnp.square(jnp.tanh((x + params["table"][words]) @ params["table"].T)).sum()


def convolved(params, x):
    """A convolution, with a norm by a kernel and a sum by XLA."""
    return convolution(params, x.reshape(1, 16, 24, 8), (1, 2), "SAME")


def standardised(params, x):
    return jnp.square(jnp.tanh(standardised_outputs(params, x))).sum()


def standardised_outputs(params, x):
    """A convolution whose kernel is standardised in each channel, as by `jaxdp.models`."""
    return standardised_picture(params, x.reshape(1, 16, 24, 8), (1, 2))


def standardised_picture(params, picture, strides):
    kernel, gain = params["kernel"], params["gain"]
    rows = kernel.size // kernel.shape[-1]
    centred = kernel - kernel.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(centred).mean((0, 1, 2), keepdims=True)
    scale = gain.reshape(1, 1, 1, -1) * jax.lax.rsqrt(jnp.maximum(rows * variance, 1e-4))
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        picture, centred * scale, strides, "SAME", dimension_numbers=numbers
    )


SHAPES = {
    standardised: {"gain": (16,), "kernel": (3, 3, 8, 16)},
    convolved: {"kernel": (3, 3, 8, 16)},
    dense: {"first": (P, Q), "second": (Q, P)},
    stacked: {"stack": (2, P, P)},
    adapted: {"down": (2, P, 2), "up": (2, 2, P)},
    patches: {"kernel": (1, 1, P, 72)},
    embedded: {"kernel": (4, 4, 8, 16)},
    tied: {"weight": (P, Q)},
    next_words: {"table": (WORDS, P)},
}


def problem(loss, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    params = {name: 0.1 * rng.normal(size=shape) for name, shape in SHAPES[loss].items()}
    batch = rng.normal(size=(B, T, P))
    return jax.tree.map(lambda x: x.astype(dtype), (params, batch))


@functools.cache
def gradients_by_vmap(loss):
    return jax.jit(jax.vmap(jax.grad(loss), (None, 0)))


def gradients(loss, params, batch):
    """Returns the gradient of each example in float64, as rows."""
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (params, batch))
        grads = gradients_by_vmap(loss)(*wide)
    return np.concatenate(
        [np.float64(g).reshape(len(batch), -1) for g in jax.tree.leaves(grads)], 1
    )


def flat(tree):
    return np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "dtype"), [*((loss, jnp.float32) for loss in SHAPES), (dense, jnp.bfloat16)]
)
def test_clipped_sums_and_norms(loss, dtype, monkeypatch):
    """Factors of float32 are rounded to bfloat16, as in a plain step on a TPU.

    The norm and the sum have the same factors, so bounds hold to far more digits than bfloat16 has.
    """
    params, batch = problem(loss, dtype)
    batch[1] = np.nan
    if loss is next_words:  # as for a vocabulary whose gradients are too large to be kept
        monkeypatch.setattr(clipped_sums, "choose_method", lambda *_: "factors")
    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    with on_a_tpu() as traced:
        masks = [np.ones(B, bool), *np.eye(B, dtype=bool)]
        result, *alone = [jax.device_get(clipped(params, batch, mask=mask)) for mask in masks]
    assert bool(traced) == (loss not in (embedded, tied, adapted))

    exact = gradients(loss, params, batch[np.array([0, 2])])
    norms = np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(result.norms[np.array([0, 2])], norms, rtol=0.02)
    expected = (exact * np.minimum(1, 0.5 / norms)[:, None]).sum(0)
    assert np.linalg.norm(flat(result.grads) - expected) < 0.02 * np.linalg.norm(expected)

    sums = [flat(one.grads) for one in alone]
    assert result.nonfinite == 1 and not sums[1].any()
    for i in (0, 2):
        np.testing.assert_allclose(np.linalg.norm(sums[i]), 0.5, rtol=1e-4)
    np.testing.assert_allclose(flat(result.grads), sums[0] + sums[2], atol=1e-5)


def sites_of(loss, platform):
    params, batch = problem(loss)
    leaves = list(params.values())
    own = []
    for number, leaf in enumerate(leaves):
        axes = tuple(range(leaf.ndim))
        own.append(walker.Value(data=False, leaves=frozenset({number}), source=axes))

    def flat_loss(*args):
        return loss(dict(zip(params, args[:-1], strict=True)), args[-1])

    program = jax.make_jaxpr(flat_loss)(*leaves, batch[0])
    with forms.traced_for(platform):
        plan = walker.make_plan(program.jaxpr, program.consts, [*own, walker.Value(data=True)])
    return plan.sites


def rules_of(loss, platform):
    return [type(site.rule) for site in sites_of(loss, platform)]


def test_the_positions_of_a_result_of_a_transposed_table_are_on_the_lanes():
    """A TPU multiplies the table as it lies in memory, with the contracted axis on the lanes."""
    rows, head = sites_of(next_words, "tpu")
    assert isinstance(rows.rule, sites.Lookup) and head.lanes == (False, True)
    first, second = sites_of(tied, "tpu")
    assert (first.lanes, second.lanes) == ((False, False), (False, True))


def test_a_loop_forms_only_gradients_that_are_smaller_than_their_factors():
    assert rules_of(adapted, "tpu") == rules_of(adapted, "cuda") == 2 * [sites.OnWeight]
    assert rules_of(adapted, "cpu") == 2 * [sites.Dot]
    assert rules_of(stacked, "tpu") == [sites.Dot]
    assert rules_of(dense, "tpu") == 2 * [sites.Dot]  # without a loop nothing is stacked


@pytest.mark.slow
@pytest.mark.parametrize("is_twin", [False, True])
def test_kernels_clip_each_part_to_its_norm(is_twin, monkeypatch):
    """The twin applies the factors of one part to the other."""
    params, batch = problem(dense)
    batch[1] = np.nan
    if is_twin:
        monkeypatch.setattr(clipped_sums, "_engine_result", factors_of_other_parts)
    norms = {"first": 0.5, "second": 0.1}  # in the order of the leaves
    with on_a_tpu() as traced:
        result = jax.device_get(jaxdp.clipped_grad(dense, clip_norm=norms)(params, batch))
    assert len(traced) == 4  # a norm and a sum of each part
    assert result.nonfinite == 1
    counted = np.array([0, 2])
    exact = gradients(dense, params, batch[counted])
    for (name, norm), of_part in zip(norms.items(), np.split(exact, 2, axis=1), strict=True):
        lengths = np.linalg.norm(of_part, axis=1)
        np.testing.assert_allclose(result.part_norms[name][counted], lengths, rtol=0.02)
        expected = (of_part * np.minimum(1, norm / lengths)[:, None]).sum(0)
        difference = np.linalg.norm(flat(result.grads[name]) - expected)
        assert (difference < 0.02 * np.linalg.norm(expected)) != is_twin


@pytest.mark.slow
def test_gradients_of_examples_are_formed_where_kernels_have_their_norms():
    params, batch = problem(convolved)
    with on_a_tpu():
        found = jaxdp.clipped_grad(convolved, clip_norm=0.5).per_example(params, batch)
    expected = gradients(convolved, params, batch).reshape(B, *SHAPES[convolved]["kernel"])
    np.testing.assert_allclose(found.grads["kernel"], expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.slow
def test_factors_of_eight_bits_would_be_seen(monkeypatch):
    params, batch = problem(dense)
    summed = weighted.weighted_sum
    monkeypatch.setattr(
        weighted,
        "weighted_sum",
        lambda u, w, factors, **lanes: summed(u, w, jax.lax.reduce_precision(factors, 8, 7)),
    )
    clipped = jaxdp.clipped_grad(dense, clip_norm=0.5)
    with on_a_tpu():
        grads = clipped(params, batch[:1]).grads
    assert abs(np.linalg.norm(flat(grads)) - 0.5) > 0.5e-4


@pytest.mark.slow
def test_a_batch_of_pictures_on_the_lanes():
    """Kernels of convolutions compute the norm and the sum of 128 examples."""
    rng = np.random.default_rng(0)
    params = {"kernel": np.float32(0.1 * rng.normal(size=(3, 3, 16, 16)))}
    batch = rng.normal(size=(128, 16, 8, 16)).astype(np.float32)

    def loss(params, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(
            x[None], params["kernel"], (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.square(jnp.tanh(out)).sum()

    clipped = jaxdp.clipped_grad(loss, clip_norm=0.5)
    batch[1] = np.nan
    with on_a_tpu() as traced:
        result = jax.device_get(clipped(params, batch))
    assert len(traced) == 2
    finite = np.arange(128) != 1
    exact = gradients(loss, params, batch[finite])
    norms = np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(result.norms[finite], norms, rtol=0.02)
    expected = (exact * np.minimum(1, 0.5 / norms)[:, None]).sum(0)
    assert result.nonfinite == 1
    assert np.linalg.norm(flat(result.grads) - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.slow
def test_standardised_kernels_of_a_batch_on_the_lanes(monkeypatch):
    """One kernel forms the gradient and all that the standardisation reads of it.

    The twin forgets what the standardisation takes away, and the gradient of the gain.
    """
    rng = np.random.default_rng(0)
    params = {"gain": rng.normal(size=16), "kernel": rng.normal(size=(3, 3, 16, 16))}
    params = jax.tree.map(np.float32, params)
    params["gain"][0] = 0
    batch = rng.normal(size=(128, 16, 8, 16)).astype(np.float32)
    batch[1] = np.nan

    def loss(params, x):
        out = standardised_picture(params, x[None], (1, 1))
        return (jnp.square(out) + 0.1 * out).sum()

    counted = np.array([0, 2, 127])
    mask = np.isin(np.arange(128), [1, *counted])

    def clipped(params, batch):
        return jaxdp.clipped_grad(loss, clip_norm=0.5)(params, batch, mask=mask)

    def twin(params, batch):
        """Returns what only norms decide, so that XLA compiles no sum."""
        result = clipped(params, batch)
        return result.norms, result.nonfinite

    with on_a_tpu() as traced:
        result = jax.device_get(clipped(params, batch))
    assert len(traced) == 2 and "_column_sums_of_pictures" in {kernel.__name__ for kernel in traced}
    exact = gradients(loss, params, batch[counted])
    norms = np.linalg.norm(exact, axis=1)
    np.testing.assert_allclose(result.norms[counted], norms, rtol=0.02)
    assert result.nonfinite == 1
    expected = (exact * np.minimum(1, 0.5 / norms)[:, None]).sum(0)
    assert np.linalg.norm(flat(result.grads) - expected) < 0.02 * np.linalg.norm(expected)

    with_terms = channel_weights.Form.with_terms

    def forgetful(form, products):
        return jax.tree.map(jnp.zeros_like, with_terms(form, products))

    monkeypatch.setattr(channel_weights.Form, "with_terms", forgetful)
    with on_a_tpu() as traced:
        forgotten, nonfinite = jax.device_get(jax.jit(twin)(params, batch))
    assert len(traced) == 2 and nonfinite == 1
    assert not np.allclose(forgotten[counted], norms, rtol=0.02)


def test_the_kernels_serve_the_shapes_of_these_tests():
    assert all(kernel.suits(T, P, Q) for kernel in (gram, formed, weighted))


@pytest.mark.slow
@pytest.mark.parametrize("manual", [True, False])
def test_a_program_of_several_devices_has_kernels_only_in_a_shard_map(manual):
    """XLA cannot divide a kernel."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    params, batch = problem(dense)
    batch = jax.device_put(batch[:2], NamedSharding(mesh, PartitionSpec("data")))
    clipped = jaxdp.clipped_grad(dense, clip_norm=0.5)

    def summed(params, batch):
        return clipped(params, batch).grads

    def shard(params, batch):
        return jax.lax.psum(summed(params, batch), "data")

    specs = (PartitionSpec(), PartitionSpec("data"))
    function = (
        jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        if manual
        else summed
    )
    text = jax.jit(function).trace(params, batch).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == (4 if manual else 0)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0**40, 2.0**-40])
def test_bounds_of_the_rounding_neither_under_nor_overflow(scale):
    """Squares of the entries of a Gram matrix are fourth powers of those of a layer."""
    rng = np.random.default_rng(0)
    u, w = (rng.normal(size=(2, 1, T, n)).astype(jnp.bfloat16) for n in (P, Q))
    u, w = u * jnp.bfloat16(scale), w * jnp.bfloat16(1 / scale)
    bounded = jax.jit(functools.partial(dense_forms.gram_norm, lanes=(False, False)))
    with on_a_tpu():
        squares, spread, *_ = jax.device_get(bounded(u, w))
    exact = np.einsum("bstp,bstq->bspq", np.float64(u), np.float64(w))
    np.testing.assert_allclose(squares, np.square(exact).sum((1, 2, 3)), rtol=1e-4)
    assert np.all(spread / squares > 1e-6) and np.all(spread / squares < 1e-2)
