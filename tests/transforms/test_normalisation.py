"""Scales and offsets of normalisation layers, found in the program whatever the layers are
called."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxdp import models
from jaxdp.transforms.clipping import paths_of
from jaxdp.transforms.normalisation import normalisation_leaves

EPSILON = 1e-6
IMAGES = jax.ShapeDtypeStruct((2, 4, 4, 3), jnp.float32)
ROWS = jax.ShapeDtypeStruct((2, 6), jnp.float32)


def uses(apply_fn, params, x=ROWS):
    """Returns {path: role} of the leaves that are found."""
    with jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(apply_fn)(params, x)
    paths = [path for path, _ in paths_of(params)]
    found = normalisation_leaves(program, len(paths))
    return {paths[leaf]: use.role for leaf, use in found.uses.items()}


def both(*layers, scale="scale", offset="bias", separator="/"):
    """Returns the roles of a scale and an offset in each layer."""
    roles = {f"{layer}{separator}{scale}": "scale" for layer in layers}
    return roles | {f"{layer}{separator}{offset}": "offset" for layer in layers}


# --- Plain functions: every way to write a normalisation of rows [B, 6] ---

ONE = jnp.ones(6)
STORED = jnp.linspace(0.1, 1, 6)


def centre(x):
    return x - x.mean(-1, keepdims=True)


def inverse(x):
    return lax.rsqrt(x.var(-1, keepdims=True) + EPSILON)


def _fused(p, x):
    factor = inverse(x) * p["g"]
    return x * factor + (p["b"] - x.mean(-1, keepdims=True) * factor)


def _two_moments(p, x):
    mean, square = x.mean(-1, keepdims=True), jnp.square(x).mean(-1, keepdims=True)
    return (x - mean) * (lax.rsqrt(jnp.maximum(square - mean**2, 0) + EPSILON) * p["g"]) + p["b"]


def _einsum(p, x):
    square = jnp.einsum("bd,bd->b", x, x)[:, None] / 6
    return x / jnp.sqrt(square + EPSILON) * p["g"] + p["b"]


def _safe(p, x):
    square = jnp.sum(x * x, -1, keepdims=True)
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 1.0)
    return x / norm * p["g"] + p["b"]


def _stored(p, x):
    return (x - STORED) * lax.rsqrt(STORED + EPSILON) * p["g"] + p["b"]


def _stored_early(p, x):
    return p["g"] * lax.rsqrt(STORED + EPSILON) * (x - STORED) + p["b"]


def _stored_fused(p, x):
    factor = p["g"] / jnp.sqrt(STORED + EPSILON)
    return x * factor + (p["b"] - STORED * factor)


def _low_precision(p, x):
    y = x.astype(jnp.bfloat16).astype(jnp.float32)
    return (centre(y) * inverse(y)).astype(jnp.bfloat16) * p["g"].astype(jnp.bfloat16) + p[
        "b"
    ].astype(jnp.bfloat16)


FORMS = {
    "textbook": lambda p, x: centre(x) * inverse(x) * p["g"] + p["b"],
    "divided by a deviation": lambda p, x: (
        centre(x) / (jnp.std(x, -1, keepdims=True) + EPSILON) * p["g"] + p["b"]
    ),
    "power": lambda p, x: (
        centre(x) * (x.var(-1, keepdims=True) + EPSILON) ** -0.5 * p["g"] + p["b"]
    ),
    "scale first": lambda p, x: p["g"] * x * inverse(x) + p["b"],
    "scale meets the root": lambda p, x: (inverse(x) * p["g"]) * centre(x) + p["b"],
    "scale over the root": lambda p, x: (
        centre(x) * (p["g"] / jnp.sqrt(x.var(-1, keepdims=True) + EPSILON)) + p["b"]
    ),
    "fused": _fused,
    "two moments": _two_moments,
    "standardize": lambda p, x: jax.nn.standardize(x) * p["g"] + p["b"],
    "norm": lambda p, x: x / jnp.linalg.norm(x, axis=-1, keepdims=True) * p["g"] + p["b"],
    "einsum": _einsum,
    "guarded": _safe,
    "one plus scale": lambda p, x: x * inverse(x) * (1 + p["g"]) + p["b"],
    "stored": _stored,
    "stored, scale first": _stored_early,
    "stored, fused": _stored_fused,
    "low precision": _low_precision,
    "checkpoint": lambda p, x: jax.checkpoint(_two_moments)(p, x),
    "vmap": lambda p, x: jax.vmap(_two_moments, in_axes=(None, 0))(p, x),
    "custom rule": lambda p, x: _with_custom_rule(p, x),
    "branch": lambda p, x: lax.cond(p["head"][0, 0] > 0, _two_moments, _fused, p, x),
}


@jax.custom_vjp
def _with_custom_rule(p, x):
    return _two_moments(p, x)


_with_custom_rule.defvjp(
    lambda p, x: (_two_moments(p, x), (p, x)), lambda kept, g: jax.vjp(_two_moments, *kept)[1](g)
)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_one_layer(form):
    params = {"g": ONE, "b": ONE, "first": jnp.ones((6, 6)), "head": jnp.ones((6, 3))}

    def apply_fn(p, x):
        return jnp.tanh(FORMS[form](p, x @ p["first"])).astype(jnp.float32) @ p["head"]

    assert uses(apply_fn, params) == {"g": "scale", "b": "offset"}


@pytest.mark.parametrize(("kept", "role"), [("g", "scale"), ("b", "offset")])
def test_a_scale_or_an_offset_alone(kept, role):
    def apply_fn(p, x):
        n = centre(x) * inverse(x)
        return jnp.tanh(n * p["g"] if kept == "g" else n + p["b"]) @ p["head"]

    assert uses(apply_fn, {kept: ONE, "head": jnp.ones((6, 3))}) == {kept: role}


def test_layers_in_a_loop_are_stacked_parameters():
    params = {
        "blocks": {"g": jnp.ones((3, 6)), "b": jnp.ones((3, 6)), "w": jnp.ones((3, 6, 6))},
        "h": jnp.ones((6, 3)),
    }

    def block(x, p):
        return x + _two_moments(p, x) @ p["w"], None

    looped = uses(lambda p, x: lax.scan(block, x, p["blocks"])[0] @ p["h"], params)
    assert looped == {"blocks/g": "scale", "blocks/b": "offset"}

    def unrolled(p, x):
        for k in range(3):
            x, _ = block(x, jax.tree.map(lambda leaf: leaf[k], p["blocks"]))  # noqa: B023
        return x @ p["h"]

    assert uses(unrolled, params) == looped


# --- What looks like a normalisation ---


def _weight_standardisation(p, x):
    w = p["w"] - p["w"].mean(0)
    return x @ (w * lax.rsqrt(p["w"].var(0) + EPSILON) * p["v"]) + p["b"]


def _weight_normalisation(p, x):
    return (x @ p["w"]) * (p["v"] / jnp.linalg.norm(p["w"], axis=0)) + p["b"]


def _spectral(p, x):
    u = p["v"] / jnp.linalg.norm(p["v"])
    return x @ (p["w"] / (u @ p["w"] @ u)) * p["v"] + p["b"]


def _cosine_attention(p, x):
    q, k = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (x @ p["w"], x @ p["w"].T))
    return jax.nn.softmax(q @ k.T * jnp.exp(p["t"])) @ x * p["v"] + p["b"]


def _temperature(p, x):
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True) * p["t"]) @ p["w"] + p["b"]


def _layer_scale(p, x):
    return x + p["v"] * jnp.tanh(centre(x) * inverse(x) @ p["w"] + p["b"])


def _positions(p, x):
    return (centre(x) * inverse(x) + p["w"][:2]) @ p["w"]


def _response(p, x):
    norms = jnp.sqrt(jnp.square(x).sum(0, keepdims=True))
    return p["v"] * (x * (norms / (norms.mean(-1, keepdims=True) + EPSILON))) + p["b"] + x


DECOYS = {
    "weight standardisation": _weight_standardisation,
    "weight normalisation": _weight_normalisation,
    "spectral normalisation": _spectral,
    "cosine attention": _cosine_attention,
    "temperature": _temperature,
    "layer scale": _layer_scale,
    "positions": _positions,
    "softmax": lambda p, x: jax.nn.softmax(x @ p["w"]) * p["v"] + p["b"],
    "sum of one": lambda p, x: x / jnp.abs(x).sum(-1, keepdims=True) * p["v"] + p["b"],
    "largest": lambda p, x: x / jnp.sqrt(jnp.square(x).max(-1, keepdims=True)) * p["v"] + p["b"],
    "constant root": lambda p, x: (x @ p["w"]) / jnp.sqrt(6.0) * p["v"] + p["b"],
    "scaled input": lambda p, x: (x - STORED) / STORED * p["v"] + p["b"],
    "gate of another value": lambda p, x: x * inverse(jnp.tanh(x @ p["w"])) * p["v"] + p["b"],
    "response normalisation": _response,
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_what_is_no_normalisation(decoy):
    params = {"w": jnp.ones((6, 6)), "v": ONE, "b": ONE, "t": jnp.ones(())}
    assert uses(lambda p, x: jnp.tanh(DECOYS[decoy](p, x)) @ p["w"], params) == {}


def test_only_the_first_vectors_after_a_normalisation_are_its_own():
    def apply_fn(p, x):
        return (
            jnp.tanh((_two_moments(p, x) + p["position"]) * p["layer_scale"] + p["shift"])
            @ p["head"]
        )

    params = dict.fromkeys(["g", "b", "position", "layer_scale", "shift"], ONE) | {
        "head": jnp.ones((6, 3))
    }
    assert uses(apply_fn, params) == {"g": "scale", "b": "offset"}


def test_normalised_queries_have_scales():
    def apply_fn(p, x):
        q, k = (_two_moments(p[name], x @ p["w"]) for name in "qk")
        return jax.nn.softmax(q @ k.T) @ x

    params = {"q": {"g": ONE, "b": ONE}, "k": {"g": ONE, "b": ONE}, "w": jnp.ones((6, 6))}
    assert uses(apply_fn, params) == both("q", "k", scale="g", offset="b")


# --- Libraries ---


class Linen(nn.Module):
    """A module with each layer of Flax, under names that do not tell."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(3, name="gn2")(nn.Conv(6, (3, 3), name="abnormality")(x)))
        x = nn.relu(
            nn.BatchNorm(use_running_average=True, name="bn1")(nn.Conv(6, (3, 3), name="conv")(x))
        )
        x = nn.relu(
            nn.InstanceNorm(name="a")(nn.WeightNorm(nn.Conv(6, (3, 3)), name="weight_norm")(x))
        )
        x = models.WSConv(6, (3, 3), name="norm_free")(x)
        x = nn.relu(models.FrozenBatchNorm(name="b")(x)).mean((1, 2))
        x = nn.Dense(6, name="denormalise")(nn.RMSNorm(name="rms_1")(x))
        return nn.Dense(3, name="normalised_head")(nn.LayerNorm(name="c")(x))


@pytest.mark.slow
def test_linen():
    variables = dict(jax.eval_shape(Linen().init, jax.random.key(0), IMAGES))
    params = variables.pop("params")
    stats = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), variables)
    expected = both("gn2", "bn1", "a", "b", "c") | {"rms_1/scale": "scale"}
    assert uses(lambda p, x: Linen().apply({"params": p, **stats}, x), params, IMAGES) == expected
    # Stored statistics are no scale and no offset, also among the parameters.
    whole = {"params": params, **variables}
    assert uses(Linen().apply, whole, IMAGES) == {
        f"params/{path}": role for path, role in expected.items()
    }


@pytest.mark.slow
def test_haiku():
    def network(x):
        x = jax.nn.relu(
            hk.BatchNorm(True, True, 0.9)(hk.Conv2D(6, 3)(x), is_training=hk.running_init())
        )
        x = jax.nn.relu(hk.GroupNorm(3)(hk.Conv2D(6, 3)(x))).mean((1, 2))
        x = hk.Linear(6)(hk.RMSNorm(-1)(x))
        return hk.Linear(3)(hk.LayerNorm(-1, True, True, name="abc")(x))

    made = hk.without_apply_rng(hk.transform_with_state(network))
    with jax.numpy_dtype_promotion("standard"):
        params, state = jax.eval_shape(made.init, jax.random.key(0), IMAGES)
    state = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)
    expected = both("batch_norm", "group_norm", "abc", offset="offset") | {
        "rms_norm/scale": "scale"
    }
    assert uses(lambda p, x: made.apply(p, state, x)[0], params, IMAGES) == expected


@pytest.mark.slow
def test_equinox():
    keys = iter(jax.random.split(jax.random.key(0), 9))
    conv = functools.partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
    first = eqx.nn.Sequential(
        [conv(3, 6, key=next(keys)), eqx.nn.GroupNorm(3, 6), eqx.nn.Lambda(jax.nn.relu)]
    )
    last = eqx.nn.Sequential(
        [eqx.nn.LayerNorm(6), eqx.nn.Linear(6, 6, key=next(keys)), eqx.nn.RMSNorm(6)]
    )
    norm = eqx.nn.BatchNorm(6, "batch", mode="batch")
    head = eqx.nn.Linear(6, 3, key=next(keys))
    state = eqx.nn.State(norm)
    state = state.set(norm.batch_state_index, (jnp.zeros(6), jnp.ones(6)))
    params, static = eqx.partition([first, norm, last, head], eqx.is_inexact_array)

    def apply_fn(params, images):
        first, norm, last, head = eqx.combine(params, static)

        def one(image):
            x, _ = norm(first(image), state, inference=True)
            return head(last(jax.nn.relu(x).mean((1, 2))))

        return jax.vmap(one)(images)

    found = uses(apply_fn, params, jax.ShapeDtypeStruct((2, 3, 4, 4), jnp.float32))
    expected = both("0/layers/1", "1", "2/layers/0", "2/layers/2", scale="weight")
    assert found == expected


@pytest.mark.slow
def test_nnx():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 6, (3, 3), rngs=rngs)
            self.one = nnx.BatchNorm(6, use_running_average=True, rngs=rngs)
            self.two = nnx.GroupNorm(6, 3, rngs=rngs)
            self.three = nnx.LayerNorm(6, rngs=rngs)
            self.head = nnx.Linear(6, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.two(nnx.relu(self.one(self.conv(x)))))
            return self.head(self.three(x.mean((1, 2))))

    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    pure = nnx.to_pure_dict(params)

    def apply_fn(p, x):
        return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, p)), rest)(x)

    assert uses(apply_fn, pure, IMAGES) == both("one", "two", "three")


# --- The families of this project: the leaves that its own names say ---

FAMILIES = {
    "vit_tiny": (32, 18),
    "resnet20": (32, 38),
    "resnet18": (32, 40),
    "convnext_tiny": (32, 46),
}


@pytest.mark.parametrize(
    "name", [n if n == "vit_tiny" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]
)
def test_families(name):
    side, count = FAMILIES[name]
    images = jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32)
    model = models.create(name, num_classes=10)
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), images))
    params = variables.pop("params")
    stats = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), variables)
    found = uses(lambda p, x: model.apply({"params": p, **stats}, x), params, images)
    named = [
        path for path, _ in paths_of(params) if "norm" in path.rpartition("/")[0].rpartition("/")[2]
    ]
    assert found == {path: "scale" if path.endswith("scale") else "offset" for path in named}
    assert len(found) == count


def test_the_last_layer_and_what_a_kernel_hides():
    def apply_fn(p, x):
        hidden = jax.pure_callback(lambda g, x: np.asarray(g * x), ROWS, p["hidden"], x)
        return centre(hidden) * inverse(hidden) * p["g"] + p["b"]

    params = {"b": ONE, "g": ONE, "hidden": ONE}
    with jax.numpy_rank_promotion("allow"):
        found = normalisation_leaves(jax.make_jaxpr(apply_fn)(params, ROWS), 3)
    assert found.last == {0, 1} and found.opaque == {2} and set(found.uses) == {0, 1}
