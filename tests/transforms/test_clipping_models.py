"""Every engine, and every way to treat a layer, gives what float64 micro-batching of one gives,
model by model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

BATCH = 5
# A case has the default engine, and in turn one of the ways to treat a layer whether or not "auto"
# would choose it.
TREATMENTS = ("factors", "drop", "keep")
# These have all ways. With them each rule meets every treatment: once and several times, of one
# leaf and of several, and in loops that slice its weight or repeat it.
WITH_ALL_TREATMENTS = {
    "convolution_with_a_weight_standardised_kernel",
    "linen_lstm",
    "loops_that_index_their_layers",
    "nested_scans_with_outer_inner_and_shared_weights",
    "scan_that_starts_from_returns_and_stacks_weights",
    "weight_decay_inside_the_loss",
}
# Engine "vmap" treats all programs alike, "bookkeeping" mixes the ways above. They meet every kind
# of params here, and random programs in test_programs.
WITH_ALL_ENGINES = {
    *(
        "mlp",
        "tied_embedding_and_logits",
        "nnx_model",
        "equinox_module",
        "branches",
        "weights_of_no_consequence",
    ),
    *(
        "loss_without_data",
        "loss_that_ignores_a_parameter_and_one_that_is_none",
        "frozen_and_integer_leaves",
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    loss: Callable[..., Any]
    params: Any
    batch: Any
    trainable: Callable[[str, Any], bool] = lambda path, leaf: True


CASES: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    CASES[build.__name__] = build
    return build


def draws(seed: int, *shapes: tuple[int, ...], scale: float = 0.5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.normal(size=s)).astype(np.float32) for s in shapes]


def plain(loss: Callable[..., Any], params: Any, *example: tuple[int, ...], seed: int = 1) -> Case:
    """Builds a case with params drawn from their shapes. An example is one array or a tuple of
    arrays."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    shapes, structure = jax.tree.flatten(params, is_leaf=is_shape)
    batch = draws(seed + 100, *((BATCH, *s) for s in example), scale=1.0)
    return Case(
        loss,
        jax.tree.unflatten(structure, draws(seed, *shapes)),
        batch[0] if len(batch) == 1 else tuple(batch),
    )


def drawn(shapes: Any, seed: int = 3) -> Any:
    """Draws parameters, near 1 for scales and variances. The initialisers would be compiled one by
    one."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        near = float(
            any(name in jax.tree_util.keystr(path) for name in ("scale", "var", "norm.weight"))
        )
        return (near + rng.normal(size=x.shape) * (0.1 if near or x.ndim < 2 else 0.5)).astype(
            x.dtype
        )

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def energy(x: Any) -> Any:
    """Returns a scalar that no symmetry of a layer makes constant."""
    return jnp.sum(jnp.sin(x) + 0.3 * jnp.square(x)) / 2


# --- A weight meets data in a product ---


@case
def mlp() -> Case:
    def loss(p: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ p["a"] + p["b"])
        return energy(hidden @ p["c"] + p["d"])

    return plain(loss, {"a": (4, 6), "b": (6,), "c": (6, 3), "d": (3,)}, (4,))


@case
def dense_on_a_sequence() -> Case:
    return plain(lambda w, x: energy(jnp.tanh(x @ w[0]) @ w[1]), [(7, 9), (9, 8)], (3, 7))


@case
def dense_on_a_long_sequence() -> Case:
    return plain(lambda w, x: energy(jnp.tanh(x @ w[0] + w[1])), [(3, 2), (2,)], (20, 3))


@case
def weight_on_the_left() -> Case:
    return plain(lambda w, x: energy(jnp.tanh(w @ x)), (5, 4), (4, 6))


@case
def einsums_with_several_contracted_and_free_axes() -> Case:
    def loss(p: Any, x: Any) -> Any:
        heads = jnp.einsum("td,dhk->htk", x, p["in"])
        return energy(jnp.einsum("khd,htk->td", p["out"], jnp.tanh(heads)))

    return plain(loss, {"in": (4, 2, 3), "out": (3, 2, 5)}, (6, 4))


@case
def mixture_of_experts() -> Case:
    def loss(p: Any, x: Any) -> Any:
        inner = jax.nn.gelu(jnp.einsum("td,edf->etf", x, p["up"]))
        return energy(jnp.einsum("etf,efd->etd", inner, p["down"]))

    return plain(loss, {"up": (3, 4, 5), "down": (3, 5, 4)}, (6, 4))


@case
def vmapped_over_heads() -> Case:
    return plain(
        lambda w, x: energy(jax.vmap(lambda wh, xh: jnp.tanh(xh @ wh), (2, 1))(w, x)),
        (4, 3, 2),
        (6, 2, 4),
    )


@case
def vector_products() -> Case:
    return plain(
        lambda p, e: energy(jnp.dot(p[0], e[0])) + energy(jnp.dot(e[1], p[1] @ e[0])),
        [(4,), (3, 4)],
        (4,),
        (3,),
    )


@case
def low_rank_adapter() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return energy(x @ p["w"] + jnp.tanh((x @ p["a"]) @ p["b"]) + x @ (p["c"] @ p["d"]))

    return plain(loss, {"w": (4, 5), "a": (4, 2), "b": (2, 5), "c": (4, 2), "d": (2, 5)}, (3, 4))


@case
def moved_weights() -> Case:
    def loss(p: Any, x: Any) -> Any:
        x = jnp.tanh(x @ p["flat"].reshape(4, 5))
        x = jnp.tanh(x @ jnp.flip(p["flip"].T, 0)[None].squeeze(0))
        return energy(jnp.einsum("td,d...->t...", x, p["cube"].swapaxes(0, 2)))

    return plain(loss, {"flat": (20,), "flip": (6, 5), "cube": (2, 3, 6)}, (3, 4))


@case
def weights_cut_and_joined() -> Case:
    def loss(p: Any, x: Any) -> Any:
        joined = jnp.concatenate([p["a"], 2 * p["b"]], axis=1)
        q, k = jnp.split(joined, 2, axis=1)
        return energy((x @ q) @ (x @ k).T) + energy(x @ p["a"][:, 1:])

    return plain(loss, {"a": (4, 3), "b": (4, 5)}, (3, 4))


@case
def computed_weights() -> Case:
    def loss(p: Any, x: Any) -> Any:
        w = p["w"] / jnp.sqrt(jnp.square(p["w"]).sum(0, keepdims=True) + 1e-3) * p["gain"]
        return energy(x @ w + jax.nn.softplus(p["bias"]))

    return plain(loss, {"w": (4, 5), "gain": (1, 5), "bias": (5,)}, (3, 4))


@case
def weights_through_functions_of_one_argument() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return (
            energy(x @ jnp.tanh(p["a"]))
            + energy(x @ jnp.cumsum(p["b"], 0))
            + energy(x @ jnp.broadcast_to(p["c"], (4, 3)))
        )

    return plain(loss, {"a": (4, 3), "b": (4, 3), "c": (4, 1)}, (3, 4))


@case
def weights_of_no_consequence() -> Case:
    """Tests gradients that are zero or far smaller than the gradient of the value that meets
    data."""

    def loss(p: Any, x: Any) -> Any:
        return energy(x @ (p["w"] * 1e-6 + 1)) + energy(
            x @ (p["row"] - p["row"].mean(0, keepdims=True)) ** 2
        )

    return plain(loss, {"w": (1, 3), "row": (1, 3)}, (3, 1))


# --- A weight is used more than once ---


@case
def same_dense_twice() -> Case:
    return plain(lambda w, x: energy(jnp.tanh(jnp.tanh(x @ w) @ w)), (4, 4), (4,))


@case
def same_dense_twice_on_a_sequence() -> Case:
    return plain(lambda w, x: energy(jnp.tanh(jnp.tanh(x @ w) @ w) @ w), (4, 4), (2, 4))


@case
def weight_and_its_transpose() -> Case:
    return plain(lambda w, x: energy(jnp.tanh(jnp.tanh(x @ w) @ w.T)), (4, 6), (3, 4))


@case
def transpose_first() -> Case:
    return plain(lambda w, x: energy(w @ jnp.tanh(w.T @ x)), (4, 6), (4, 3))


@case
def reshaped_weight_twice() -> Case:
    def loss(p: Any, x: Any) -> Any:
        w = p.reshape(4, 4)
        return energy(jnp.tanh(jnp.tanh(x @ w) @ w))

    return plain(loss, (16,), (2, 4))


@case
def two_leaves_shared_by_two_layers() -> Case:
    return plain(
        lambda p, x: energy(jnp.tanh(x @ (p[0] + p[1])) @ (p[0] * p[1])), [(4, 4), (4, 4)], (3, 4)
    )


@case
def leaves_that_share_layers_in_a_chain() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return energy(jnp.tanh(x @ (p[1] + p[2])) @ (p[0] - p[1]) @ (p[2] * p[3]))

    return plain(loss, [(4, 4)] * 4, (2, 4))


@case
def one_weight_twice_in_one_primitive() -> Case:
    def loss(p: Any, x: Any) -> Any:
        y = lax.cond(
            x[0] > 0, lambda a, b, x: x @ a, lambda a, b, x: jnp.sin(x) @ b, p["w"], p["w"], x
        )
        return (
            energy(y)
            + energy(jnp.where(x > 0.5, p["s"], p["s"]) * x)
            + energy(lax.clamp(p["s"], x, p["s"]))
        )

    return plain(loss, {"w": (3, 3), "s": (3,)}, (3,))


@case
def same_kernel_in_two_convolutions() -> Case:
    def loss(w: Any, x: Any) -> Any:
        conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
        numbers = ("NHWC", "HWIO", "NHWC")
        return energy(
            conv(
                jnp.tanh(conv(x[None], w, dimension_numbers=numbers)), w, dimension_numbers=numbers
            )
        )

    return plain(loss, (3, 3, 2, 2), (4, 4, 2))


@case
def tied_embedding_and_logits() -> Case:
    def loss(p: Any, tokens: Any) -> Any:
        hidden = jnp.tanh(p["table"][tokens] @ p["w"])
        return -jnp.sum(jax.nn.log_softmax(hidden @ p["table"].T)[jnp.arange(4), tokens])

    case = plain(loss, {"table": (7, 4), "w": (4, 4)}, (4,))
    return dataclasses.replace(
        case, batch=np.random.default_rng(0).integers(0, 7, (BATCH, 4), np.int32)
    )


@case
def logits_before_tied_embedding() -> Case:
    def loss(table: Any, example: Any) -> Any:
        x, tokens = example
        return energy(jnp.tanh(x @ table.T) @ jnp.tanh(table[tokens]))

    tokens = np.random.default_rng(0).integers(0, 7, (BATCH, 7), np.int32)
    return Case(loss, draws(1, (7, 4))[0], (draws(2, (BATCH, 3, 4))[0], tokens))


# --- Embeddings ---


@case
def linen_embedding_with_positions() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = (
                nn.Embed(11, 6)(tokens)
                + self.param("positions", nn.initializers.normal(1.0), (5, 6))[: len(tokens)]
            )
            return nn.Dense(3)(jnp.tanh(x))

    model, tokens = (
        Model(),
        np.array(
            [[0, 1, 2, 3], [5, 5, 5, 5], [10, 0, 10, 0], [7, 8, 9, 9], [4, 3, 2, 1]], np.int32
        ),
    )
    params = drawn(jax.eval_shape(model.init, jax.random.key(0), tokens[0]))
    return Case(lambda p, t: energy(model.apply(p, t)), params, tokens)


@case
def take_out_of_range() -> Case:
    def loss(p: Any, index: Any) -> Any:
        clipped = jnp.take(p["clip"], index, axis=0, mode="clip")
        filled = jnp.nan_to_num(jnp.take(p["fill"], index, axis=0, mode="fill", fill_value=0))
        wrapped = jnp.take(p["wrap"], index, axis=0, mode="wrap")
        return energy(clipped) + energy(filled) + energy(jnp.tanh(wrapped))

    index = np.array(
        [[0, 5, 99, -1], [-99, -2, 4, 4], [5, 6, 7, 8], [-5, -6, -7, 0], [2, 2, 2, 2]], np.int32
    )
    params = dict(zip(("clip", "fill", "wrap"), draws(3, (6, 3), (6, 3), (6, 2, 2)), strict=True))
    return Case(loss, params, index)


@case
def lookups_by_small_integers() -> Case:
    """Uses index dtypes that cannot represent -1 or the last row of a table."""

    def loss(p: Any, index: Any) -> Any:
        small, signed = index
        return (
            energy(jnp.take(p["clip"], small, axis=0, mode="clip"))
            + energy(jnp.nan_to_num(jnp.take(p["fill"], small, axis=0, mode="fill", fill_value=0)))
            + energy(jnp.take(p["clip"], signed, axis=0, mode="clip"))
            + energy(p["short"].at[small].get(mode="fill", fill_value=0))
        )

    rng = np.random.default_rng(5)
    params = dict(zip(("clip", "fill", "short"), draws(3, (300, 2), (300, 2), (7, 2)), strict=True))
    index = (rng.integers(0, 256, (BATCH, 6)), rng.integers(-128, 128, (BATCH, 6)))
    return Case(loss, params, (index[0].astype(np.uint8), index[1].astype(np.int8)))


@case
def linen_embedding_of_bytes() -> Case:
    model, tokens = (
        nn.Embed(257, 3),
        np.random.default_rng(0).integers(0, 256, (BATCH, 8)).astype(np.uint8),
    )
    params = drawn(jax.eval_shape(model.init, jax.random.key(0), tokens[0]))
    return Case(lambda p, t: energy(jnp.tanh(model.apply(p, t))), params, tokens)


@case
def lookups_that_are_not_of_rows() -> Case:
    def loss(p: Any, example: Any) -> Any:
        i, j = example
        return (
            energy(p["w"][i[0]])
            + energy(p["w"][i, j])
            + energy(p["v"][:, i])
            + energy(jnp.tanh(p["u"][i[:, None], j]))
        )

    index = np.random.default_rng(0).integers(0, 4, (2, BATCH, 3), np.int32)
    return Case(
        loss,
        dict(zip("wvu", draws(3, (4, 4), (2, 4), (4, 4, 2)), strict=True)),
        (index[0], index[1]),
    )


# --- Convolutions, normalisation, attention, through Linen, NNX and Equinox ---


def linen(model: nn.Module, *example: tuple[int, ...], seed: int = 0) -> Case:
    """Passes one example with a leading axis of one to the model, as users do."""
    (x,) = draws(seed + 7, (BATCH, *example[0]), scale=1.0)
    params = drawn(jax.eval_shape(model.init, jax.random.key(seed), x[:1]), seed)
    return Case(lambda p, x: energy(model.apply(p, x[None])), params, x)


@case
def linen_convnet() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(4, (3, 3), strides=2)(x)
            x = nn.relu(nn.GroupNorm(2)(x))
            x = nn.Conv(
                4, (2, 2), feature_group_count=2, kernel_dilation=2, padding=((1, 0), (0, 2))
            )(x)
            x = jnp.tanh(nn.ConvTranspose(3, (3, 2), strides=(2, 1))(x))
            return nn.Dense(3)(x[:, ::2].reshape(len(x), -1))

    return linen(Model(), (6, 5, 2))


@case
def convolutions_of_one_and_three_dimensions() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Conv(3, (3,), padding="CIRCULAR")(x.reshape(1, 12, 2))
            z = nn.Conv(2, (2, 1, 2), padding="VALID", strides=(1, 1, 2), use_bias=False)(
                x.reshape(1, 3, 2, 4, 1)
            )
            return jnp.concatenate([jnp.tanh(y).ravel(), jnp.tanh(z).ravel()])

    return linen(Model(), (24,))


@case
def lax_convolution_of_channels_first_with_negative_padding() -> Case:
    def loss(w: Any, x: Any) -> Any:
        y = lax.conv_general_dilated(
            x[None],
            w,
            (2, 1),
            ((2, -1), (0, 3)),
            (1, 2),
            (1, 2),
            ("NCHW", "OIHW", "NCHW"),
            feature_group_count=2,
        )
        return energy(jnp.tanh(y))

    return plain(loss, (4, 1, 3, 2), (2, 6, 4))


@case
def convolution_with_a_weight_standardised_kernel() -> Case:
    def loss(p: Any, x: Any) -> Any:
        w = p["w"]
        w = (w - w.mean((0, 1, 2))) / jnp.sqrt(w.var((0, 1, 2)) + 1e-4) * p["gain"]
        y = lax.conv_general_dilated(
            x[None], w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return energy(jnp.tanh(y))

    return plain(loss, {"w": (3, 3, 2, 4), "gain": (4,)}, (5, 5, 2))


@case
def convolution_of_data_as_the_kernel() -> Case:
    def loss(w: Any, x: Any) -> Any:
        return energy(
            lax.conv_general_dilated(w, x, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
        )

    return plain(loss, (1, 6, 2), (3, 2, 3))


@case
def transformer_block() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            return x + nn.Dense(4)(nn.gelu(nn.Dense(6)(nn.RMSNorm()(x))))

    return linen(Model(), (5, 4))


@case
def frozen_batch_norm() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x))

    case = linen(Model(), (3,))
    statistics = case.params["batch_stats"]
    model = Model()
    loss = lambda p, x: energy(model.apply({"params": p, "batch_stats": statistics}, x[None]))  # noqa: E731
    return Case(loss, case.params["params"], case.batch)


@case
def linen_remat_scan() -> Case:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + jnp.tanh(nn.Dense(4)(nn.LayerNorm()(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            stack = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return stack()(x, None)[0]

    return linen(Model(), (2, 4))


@case
def linen_lstm() -> Case:
    model = lambda dtype: nn.RNN(nn.OptimizedLSTMCell(3, param_dtype=dtype))  # noqa: E731
    case = linen(model(jnp.float32), (4, 2))
    return dataclasses.replace(case, loss=lambda p, x: energy(model(x.dtype).apply(p, x[None])))


@case
def nnx_model() -> Case:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(2, 3, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(3, num_groups=1, rngs=rngs)
            self.out = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    graph, params = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    loss = lambda p, x: energy(nnx.merge(graph, p)(x[None]))  # noqa: E731
    return Case(loss, drawn(params), draws(3, (BATCH, 4, 4, 2), scale=1.0)[0])


@case
def equinox_module() -> Case:
    class Model(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.LayerNorm
        drop: eqx.nn.Dropout  # keeps a rate and a flag among its leaves
        mlp: eqx.nn.MLP

        def __init__(self, key: jax.Array):
            a, b = jax.random.split(key)
            self.conv = eqx.nn.Conv2d(2, 3, 3, stride=2, padding=1, key=a)
            self.norm = eqx.nn.LayerNorm((3, 2, 2))
            self.drop = eqx.nn.Dropout(0.5, inference=True)
            self.mlp = eqx.nn.MLP(12, 3, 4, 1, key=b)

        def __call__(self, x: Any) -> Any:
            return self.mlp(self.drop(self.norm(jnp.tanh(self.conv(x)))).ravel())

    model = drawn(eqx.filter_eval_shape(Model, jax.random.key(0)))
    return Case(lambda m, x: energy(m(x)), model, draws(3, (BATCH, 2, 4, 4), scale=1.0)[0])


# --- Calls, loops and branches ---


@case
def checkpoints() -> Case:
    def loss(p: Any, x: Any) -> Any:
        block = lambda w, x: jnp.sin(jnp.tanh(x @ w["a"]) @ w["b"])  # noqa: E731
        x = jax.checkpoint(block)(p[0], x)
        return energy(jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)(p[1], x))

    layer = {"a": (4, 5), "b": (5, 4)}
    return plain(loss, [layer, layer], (3, 4))


@case
def one_compiled_layer_called_twice() -> Case:
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w["w"] + w["b"]))
    parameters = {"w": (4, 4), "b": (4,)}
    return plain(
        lambda p, x: energy(layer(p[1], layer(p[0], layer(p[1], x)))),
        [parameters, parameters],
        (3, 4),
    )


@case
def scan_over_stacked_layers() -> Case:
    def loss(p: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            h = h + jnp.tanh(h @ layer["w"] + layer["b"])
            return h, h.sum() * layer["b"][0]

        h, ys = lax.scan(body, x, p)
        return energy(h) + energy(ys)

    return plain(loss, {"w": (3, 4, 4), "b": (3, 4)}, (2, 4))


@case
def scan_that_uses_each_layer_twice() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return energy(lax.scan(lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w.T), None), x, p)[0])

    return plain(loss, (3, 4, 5), (2, 4))


@case
def recurrent_net_with_shared_weights() -> Case:
    def loss(p: Any, x: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ p["h"] + x @ p["x"] + p["b"])
            return h, h @ p["out"]

        return energy(lax.scan(body, jnp.zeros(4, x.dtype), x, reverse=True)[1])

    return plain(loss, {"h": (4, 4), "x": (2, 4), "b": (4,), "out": (4, 3)}, (5, 2))


@case
def nested_scans_with_outer_inner_and_shared_weights() -> Case:
    def loss(p: Any, x: Any) -> Any:
        def outer(h: Any, layer: Any) -> Any:
            def inner(h: Any, given: Any) -> Any:
                w, t = given
                return jnp.tanh(h @ w @ layer["square"] + t * layer["bias"] @ p["shared"]), None

            return lax.scan(inner, h, (layer["inner"], x))[0], None

        return energy(lax.scan(outer, jnp.ones((2, 3), x.dtype), p["layers"])[0])

    shapes = {"inner": (2, 4, 3, 3), "square": (2, 3, 3), "bias": (2, 3)}
    return plain(loss, {"layers": shapes, "shared": (3, 3)}, (4, 1))


@case
def scan_that_starts_from_returns_and_stacks_weights() -> Case:
    def loss(p: Any, x: Any) -> Any:
        def body(carry: Any, given: Any) -> Any:
            h, counter = carry
            t, w = given
            return (jnp.tanh(h * t @ p["w"]), counter + 1), (w * 2, p["w"][0], counter)

        (h, _), (ws, firsts, counts) = lax.scan(body, (p["start"], 0), (x, p["stack"]))
        return (
            energy(h) + energy(ws.sum(0) * x[0]) + energy(firsts) + jnp.sum(counts).astype(h.dtype)
        )

    return plain(loss, {"w": (3, 3), "start": (3,), "stack": (4, 3)}, (4, 3))


@case
def scan_over_weights_alone() -> Case:
    def loss(p: Any, x: Any) -> Any:
        product = lax.scan(lambda m, w: (jnp.tanh(m @ w), None), p["eye"], p["stack"])[0]
        return energy(x @ product)

    return plain(loss, {"eye": (3, 3), "stack": (3, 3, 3)}, (2, 3))


@case
def scan_with_a_constant_table_of_scales() -> Case:
    def loss(p: Any, x: Any) -> Any:
        scales = jnp.arange(1, 4).astype(x.dtype) / 3
        return energy(lax.scan(lambda h, s: (jnp.tanh(h @ (p * s)), None), x, scales)[0])

    return plain(loss, (4, 4), (2, 4))


@case
def loops_that_index_their_layers() -> Case:
    def loss(p: Any, x: Any) -> Any:
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["stack"][i]), x)
        return energy(lax.map(lambda row: jnp.tanh(row @ p["w"]), x)) + energy(
            lax.associative_scan(jnp.add, x * p["s"])
        )

    return plain(loss, {"stack": (3, 4, 4), "w": (4, 2), "s": (4,)}, (2, 4))


@case
def branches() -> Case:
    def loss(p: Any, x: Any) -> Any:
        y = lax.cond(x[0] > 0, lambda x: jnp.tanh(x @ p["a"]), lambda x: x @ p["b"], x)
        y = lax.switch((x[1] > 0).astype(np.int32), [lambda y: y * p["s"], lambda y: y + p["s"]], y)
        return energy(jnp.where(p["s"] > y, p["s"] * y, y))

    return plain(loss, {"a": (4, 3), "b": (4, 3), "s": (3,)}, (4,))


@case
def while_loop_beside_the_gradient() -> Case:
    def loss(p: Any, x: Any) -> Any:
        frozen = lax.stop_gradient(p["w"])
        steps = lax.while_loop(
            lambda s: s[1] < 3, lambda s: (jnp.tanh(s[0] @ frozen), s[1] + 1), (x, 0)
        )[0]
        return energy(
            lax.stop_gradient(steps) @ p["v"] + x @ p["w"] + x @ lax.stop_gradient(p["v"])
        )

    return plain(loss, {"w": (3, 3), "v": (3, 3)}, (3,))


# --- Custom derivatives and primitives without a rule ---


@case
def custom_derivatives_without_weights() -> Case:
    @jax.custom_vjp
    def scaled_gradient(x: Any) -> Any:
        return jnp.sin(x)

    scaled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))

    @jax.custom_jvp
    def bent(x: Any) -> Any:
        return x * jax.nn.sigmoid(x)

    bent.defjvp(lambda primals, tangents: (bent(*primals), 0.5 * tangents[0]))
    return plain(
        lambda p, x: energy(bent(scaled_gradient(x @ p[0]) @ p[1])), [(4, 5), (5, 3)], (2, 4)
    )


@case
def custom_derivatives_with_weights() -> Case:
    @jax.custom_vjp
    def layer(w: Any, x: Any) -> Any:
        return x @ w

    # Not linear in the cotangent: only a backward pass of each example by itself gives this
    # gradient.
    def backward(residual: Any, g: Any) -> Any:
        w, x = residual
        g = jnp.clip(g, -0.1, 0.2)
        return x.T @ g, g @ w.T

    layer.defvjp(lambda w, x: (x @ w, (w, x)), backward)

    @jax.custom_jvp
    def scaled(w: Any, x: Any) -> Any:
        return w * x

    scaled.defjvp(
        lambda primals, tangents: (
            scaled(*primals),
            tangents[0] * primals[1] + 2 * primals[0] * tangents[1],
        )
    )
    return plain(
        lambda p, x: energy(scaled(p["s"], layer(p["w"], x))), {"w": (4, 3), "s": (3,)}, (2, 4)
    )


@case
def custom_derivatives_of_weights_alone() -> Case:
    """Uses a derivative that is not linear in the cotangent and does not commute with a clipped
    sum."""

    @jax.custom_vjp
    def bent(w: Any) -> Any:
        return jnp.sin(w)

    bent.defvjp(lambda w: (jnp.sin(w), w), lambda w, g: (jnp.clip(g, -0.1, 0.2) * jnp.cos(w),))
    inside = jax.checkpoint(lambda w: 2 * bent(w))

    def loss(p: Any, x: Any) -> Any:
        steps = lax.scan(
            lambda h, _: (jnp.tanh(h @ inside(p["b"])), None), x @ bent(p["a"]), None, length=2
        )[0]
        return energy(steps)

    return plain(loss, {"a": (4, 3), "b": (3, 3)}, (2, 4))


@case
def straight_through_quantised_weights() -> Case:
    @jax.custom_jvp
    def quantise(w: Any) -> Any:
        return jnp.round(w * 4) / 4

    quantise.defjvp(lambda primals, tangents: (quantise(*primals), tangents[0]))
    return plain(lambda w, x: energy(jnp.tanh(x @ quantise(w))), (4, 3), (2, 4))


@case
def weight_and_data_in_primitives_without_a_rule() -> Case:
    def loss(p: Any, x: Any) -> Any:
        system = p["w"] @ p["w"].T + x.T @ x + 2 * jnp.eye(3, dtype=x.dtype)
        solved = jnp.linalg.solve(system, x[0] + p["b"])
        return (
            energy(solved)
            + energy(jnp.sort(x[0] * p["b"]))
            + energy(jnp.maximum(x, p["b"]))
            + energy(x[1] ** p["e"] ** 2)
        )

    case = plain(loss, {"w": (3, 3), "b": (3,), "e": (3,)}, (2, 3))
    return dataclasses.replace(case, batch=np.abs(case.batch) + np.float32(0.1))


@case
def weights_that_make_each_others_kernel() -> Case:
    return plain(
        lambda p, x: energy(x @ (p["a"] * jnp.tanh(x @ p["b"])[:, None])),
        {"a": (3, 4), "b": (3, 3)},
        (3,),
    )


# --- Weights that become complex ---


def as_complex(x: Any) -> Any:
    return lax.complex(x, jnp.zeros_like(x))


@case
def complex_weights_of_two_parts() -> Case:
    def loss(p: Any, x: Any) -> Any:
        y = as_complex(x) @ lax.complex(p["re"], p["im"]) + lax.complex(p["b"], 2 * p["b"])
        return energy(jnp.abs(y)) + energy((y**2).imag)

    return plain(loss, {"re": (4, 3), "im": (4, 3), "b": (3,)}, (2, 4))


@case
def global_filter() -> Case:
    """Multiplies by a weight between two Fourier transforms, as in GFNet and FNO."""

    def loss(p: Any, x: Any) -> Any:
        y = jnp.fft.irfft(jnp.fft.rfft(x, axis=0) * lax.complex(p["re"], p["im"]), n=6, axis=0)
        spectrum = jnp.einsum(
            "kd,kde->ke", jnp.fft.rfft(jnp.tanh(y), axis=0), jnp.fft.rfft(p["mix"], axis=0)
        )
        return energy(jnp.fft.irfft(spectrum, n=6, axis=0))

    return plain(loss, {"re": (4, 2), "im": (4, 2), "mix": (6, 2, 3)}, (6, 2))


@case
def diagonal_state_space() -> Case:
    """Evaluates the complex recurrence of S4D by a scan and by Fourier transforms."""

    def loss(p: Any, x: Any) -> Any:
        rate = lax.complex(-jnp.exp(p["re"]), p["im"])
        out = lax.scan(
            lambda s, u: (jnp.exp(rate) * s + u, jnp.sum((as_complex(p["c"]) * s).real)),
            0 * rate,
            as_complex(x),
        )[1]
        kernel = jnp.real(
            jnp.exp(as_complex(jnp.arange(5).astype(x.dtype))[:, None] * rate)
            @ lax.complex(p["c"], p["im"])
        )
        return energy(out) + energy(
            jnp.fft.irfft(jnp.fft.rfft(x, 10) * jnp.fft.rfft(kernel, 10), 10)
        )

    return plain(loss, {"re": (3,), "im": (3,), "c": (3,)}, (5,))


@case
def complex_values_of_weights_alone() -> Case:
    def loss(p: Any, x: Any) -> Any:
        unitary = (
            jnp.abs(jnp.exp(lax.complex(0 * p["w"], p["angle"])) + as_complex(p["shift"]))
            + jnp.fft.ifft(jnp.fft.fft(p["w"])).real
        )
        stack = lambda h, w: (jnp.tanh((as_complex(h) @ lax.complex(w, 2 * w)).real), None)  # noqa: E731
        return energy(lax.scan(stack, x @ unitary, jnp.stack([p["w"], 2 * p["w"].T]))[0])

    return plain(loss, {"angle": (3, 3), "shift": (3, 3), "w": (3, 3)}, (2, 3))


@case
def real_weights_of_complex_data() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return energy(
            jnp.abs(jnp.fft.fft(x, axis=0) @ as_complex(p["w"]) + as_complex(p["b"]))
        ) + energy(x @ p["w"])

    return plain(loss, {"w": (4, 3), "b": (3,)}, (5, 4))


# --- Losses ---


@case
def weight_decay_inside_the_loss() -> Case:
    def loss(p: Any, x: Any) -> Any:
        return energy(jnp.tanh(x @ p["w"] + p["b"])) + 0.1 * sum(
            jnp.sum(jnp.square(w)) for w in jax.tree.leaves(p)
        )

    return plain(loss, {"w": (4, 3), "b": (3,)}, (2, 4))


@case
def loss_without_data() -> Case:
    return plain(lambda p, x: energy(p["w"]), {"w": (4, 3), "unused": (2,)}, (2,))


@case
def loss_that_ignores_a_parameter_and_one_that_is_none() -> Case:
    case = plain(lambda p, x: energy(x @ p["w"]), {"w": (4, 3), "unused": (2, 2)}, (4,))
    return dataclasses.replace(case, params={**case.params, "none": None})


@case
def frozen_and_integer_leaves() -> Case:
    def loss(p: Any, x: Any) -> Any:
        x = jnp.tanh(x[p["order"]] @ p["frozen"]["w"] + p["head"]["b"])
        return energy(x @ p["head"]["w"])

    shapes = {"frozen": {"w": (4, 3)}, "head": {"w": (3, 2), "b": (3,)}}
    case = plain(loss, shapes, (4,))
    params = {**case.params, "order": np.array([2, 0, 3, 1], np.int32)}
    return dataclasses.replace(
        case, params=params, trainable=lambda path, leaf: path.startswith("head/")
    )


# --- The conformance tests ---

TOGETHER = 8  # references of so many cases are one program, which compiles faster


@pytest.fixture(scope="module")
def known(oracle: Any) -> Callable[[str], tuple[Case, Any]]:
    """Returns a function that gives the case of a name, and its reference in float64."""
    names = list(CASES)

    def options(case: Case) -> str:
        return repr(oracle.compiler_options((case.params, case.batch)))

    @functools.cache
    def group(start: int) -> dict[str, tuple[Case, Any]]:
        cases = {name: CASES[name]() for name in names[start : start + TOGETHER]}
        found: dict[str, tuple[Case, Any]] = {}
        # What needs options that compile slowly is apart.
        for alike in {options(case) for case in cases.values()}:
            chosen = {name: case for name, case in cases.items() if options(case) == alike}
            references = oracle.micro_batches_of_one_each(list(chosen.values()))
            found |= dict(zip(chosen, zip(chosen.values(), references, strict=True), strict=True))
        return found

    def of(name: str) -> tuple[Case, Any]:
        return group(names.index(name) // TOGETHER * TOGETHER)[name]

    return of


def check(case: Case, reference: Any, methods: tuple[str, ...], oracle: Any) -> None:
    clip_norm = float(np.median(reference.norms))
    expected = reference.clipped_sum(clip_norm)
    arrays, static = eqx.partition(case.params, eqx.is_array)

    def run(arrays: Any, batch: Any) -> Any:
        settings = {"clip_norm": clip_norm, "trainable": case.trainable}
        return oracle.every_method(
            case.loss, methods, eqx.combine(arrays, static), batch, **settings
        )

    options = oracle.compiler_options((arrays, case.batch))
    found = jax.device_get(jax.jit(run, compiler_options=options)(arrays, case.batch))
    for method, out in found.items():
        np.testing.assert_allclose(
            out.losses, reference.losses, rtol=2e-5, atol=1e-6, err_msg=method
        )
        np.testing.assert_allclose(
            out.norms, reference.norms, rtol=1e-5, atol=1e-12, err_msg=method
        )
        oracle.assert_same_sum(case.params, out.grads, expected, err=method)
        assert out.nonfinite == 0


assert CASES.keys() >= WITH_ALL_ENGINES | WITH_ALL_TREATMENTS


def methods_of(name: str) -> tuple[str, ...]:
    place = list(CASES).index(name) % len(TREATMENTS)
    treatments = TREATMENTS if name in WITH_ALL_TREATMENTS else (TREATMENTS[place],)
    engines = ("vmap", "bookkeeping") if name in WITH_ALL_ENGINES else ()
    return "auto", *treatments, *engines


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_methods_equal_float64_micro_batches_of_one(name: str, known: Any, oracle: Any) -> None:
    with jax.numpy_rank_promotion("allow"):
        check(*known(name), methods_of(name), oracle)
