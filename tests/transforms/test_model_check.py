"""`jaxdp.check` finds each mistake, with its remedy, and finds none in a sound model."""

import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdp

X = jax.ShapeDtypeStruct((4,), jnp.float32)
EXAMPLE = {"x": X, "y": jax.ShapeDtypeStruct((), jnp.int32)}
WEIGHT = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
W = jax.device_put(WEIGHT)
PARAMS = {"w": W, "b": jax.device_put(np.zeros(3, np.float32))}


def cross_entropy(p: Any, e: Any) -> Any:
    return jaxdp.losses.softmax_cross_entropy(e["x"] @ p["w"] + p["b"], e["y"])


def energy(p: Any, x: Any) -> Any:
    return jnp.sum(jnp.square(x @ p["w"]))


def on_a_batch(p: Any, e: Any) -> Any:
    return jax.vmap(cross_entropy, (None, 0))(p, e).mean()


def mixing(p: Any, e: Any) -> Any:
    hidden = e["x"] @ p["w"] + p["b"]
    hidden = hidden - hidden.mean(0)
    return jax.vmap(jaxdp.losses.softmax_cross_entropy)(hidden, e["y"]).mean()


def contrastive(p: Any, e: Any) -> Any:
    hidden = e["x"] @ p["w"] + p["b"]
    return jax.vmap(jaxdp.losses.softmax_cross_entropy, (0, 0))(
        hidden @ hidden.T, jnp.arange(len(hidden))
    )


def messages(report: jaxdp.ModelCheck) -> list[str]:
    return [f"{severity}: {message}" for severity, message in report.findings]


def only(report: jaxdp.ModelCheck, pattern: str) -> None:
    """Asserts that the findings are exactly one, which matches."""
    [found] = messages(report)
    assert re.search(pattern, found, flags=re.DOTALL), found
    assert found.endswith((".", "]")) and found in str(report).replace("  ", "")


@pytest.mark.slow
def test_a_sound_model_has_no_finding_and_a_plan() -> None:
    report = jaxdp.check(cross_entropy, PARAMS, EXAMPLE)
    assert report.ok and not report.findings
    plan = {leaf.path: leaf for leaf in report.leaves}
    assert (
        plan["w"].rules == ("dot_general",)
        and plan["w"].method == "factors"
        and plan["w"].bytes == 0
    )
    assert plan["b"].rules == ("direct",) and plan["b"].bytes == 12
    assert "15 numbers" in str(report) and "60 B" in str(report)
    assert re.search(
        r"^w +4x3 +float32 +dot_general +factors +[\d.]+x +0 B$",
        report.explain(),
        flags=re.MULTILINE,
    )
    head = jaxdp.check(
        cross_entropy, PARAMS, EXAMPLE, trainable=lambda path, leaf: path == "b", engine="vmap"
    )
    assert [leaf.method for leaf in head.leaves] == ["vmap", "frozen"]
    unused = jaxdp.check(cross_entropy, {**PARAMS, "old": W}, EXAMPLE, engine="vmap")
    only(unused, "warning: .*'old', which gets no gradient")


@pytest.mark.slow
def test_values_of_the_example_are_not_read() -> None:
    nan = {"x": np.full(4, np.nan, np.float32), "y": np.int32(2)}
    assert str(jaxdp.check(cross_entropy, PARAMS, nan)) == str(
        jaxdp.check(cross_entropy, PARAMS, EXAMPLE)
    )


@pytest.mark.slow
def test_losses_of_batches() -> None:
    with jax.numpy_rank_promotion("allow"):
        only(jaxdp.check(on_a_batch, PARAMS, EXAMPLE), r"error: .*written for a batch.*x\[None\]")
        for loss in (mixing, contrastive):
            first, second, *_ = messages(jaxdp.check(loss, PARAMS, EXAMPLE))
            assert "written for a batch" in first and "error: loss_fn mixes the examples" in second
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), EXAMPLE)
        only(
            jaxdp.check(on_a_batch, PARAMS, batch),
            "note: All leaves of example have a leading axis of 8.*pass ONE example",
        )
        only(
            jaxdp.check(mixing, PARAMS, batch),
            "note: .*pass ONE example.* In that case, loss_fn mixes the examples",
        )
        mean = lambda p, e: (on_a_batch(p, e), e["y"])  # noqa: E731
        only(jaxdp.check(mean, PARAMS, EXAMPLE, has_aux=True), "written for a batch")


@pytest.mark.slow
def test_groups_of_records() -> None:
    """A leaf used by three records has the gradient of a group. The twin without group= takes the
    group for a batch."""
    records = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), EXAMPLE)
    report = jaxdp.check(cross_entropy, PARAMS, records, group=True)
    alone = jaxdp.check(cross_entropy, PARAMS, EXAMPLE)
    assert report.ok and not report.findings
    assert [leaf.path for leaf in report.leaves] == [leaf.path for leaf in alone.leaves]
    assert sum(leaf.work for leaf in report.leaves) > sum(leaf.work for leaf in alone.leaves)
    assert not jaxdp.check(cross_entropy, PARAMS, records).ok
    with jax.numpy_rank_promotion("allow"):
        only(
            jaxdp.check(on_a_batch, PARAMS, records, group=True),
            "error: loss_fn is written for a batch",
        )
    ragged = {**records, "y": jax.ShapeDtypeStruct((2,), jnp.int32)}
    only(
        jaxdp.check(cross_entropy, PARAMS, ragged, group=True),
        "error: example must have leaves .* of ONE group",
    )


def linen_batch_norm(**how: Any) -> Any:
    model = nn.BatchNorm(use_running_average=False)
    variables = jax.jit(model.init)(jax.random.key(0), np.ones((1, 4), np.float32))
    loss = lambda p, x: jnp.sum(model.apply({**variables, "params": p}, x[None], **how)[0])  # noqa: E731
    return loss, variables["params"]


def haiku_batch_norm(training: bool) -> Any:
    network = hk.transform_with_state(
        lambda x, training: hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), training)
    )
    params, state = jax.jit(lambda key: network.init(key, np.ones((1, 4), np.float32), True))(
        jax.random.key(0)
    )
    return lambda p, x: jnp.sum(
        jnp.square(network.apply(p, state, None, x[None], training)[0])
    ), params


def equinox_batch_norm() -> Any:
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    return lambda p, x: jnp.sum(eqx.combine(p, static)(x, state)[0]), params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "pattern"),
    [
        (lambda: linen_batch_norm(mutable=["batch_stats"]), "BatchNorm in batch mode"),
        (lambda: linen_batch_norm(), "updates a collection of a Linen module.*GroupNorm"),
        (lambda: haiku_batch_norm(True), "BatchNorm in batch mode.*is_training=False"),
        (equinox_batch_norm, "collective such as the mean.*GroupNorm"),
    ],
    ids=["linen", "linen, immutable", "haiku", "equinox"],
)
def test_batch_norm(build: Any, pattern: str) -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, params = build()
        only(jaxdp.check(loss, params, X), f"error: .*{pattern}")


@pytest.mark.slow
def test_frozen_batch_norm_of_haiku_is_allowed() -> None:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loss, params = haiku_batch_norm(False)
        assert jaxdp.check(loss, params, X).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "params", "pattern"),
    [
        (lambda p, x: x @ p["w"], {"w": W}, "error: .*floating scalar for ONE example"),
        (
            lambda p, x: x @ p["w"] @ p["w"],
            {"w": W},
            "error: loss_fn fails on one example with TypeError: dot_general",
        ),
        (
            lambda p, x: energy(p, x),
            {"w": W, "steps": jax.device_put(np.arange(3, dtype=np.int32))},
            "note: .*'steps' of dtype int32.*never trained",
        ),
        (
            lambda p, x: energy({"w": p["w"].astype(jnp.float32)}, x),
            {"w": jax.device_put(WEIGHT.astype(jnp.bfloat16))},
            "warning: .*'w' of dtype bfloat16.*float32",
        ),
        (
            lambda p, x: energy(p, x) + jnp.sum(p["c"].real),
            {"w": W, "c": jax.device_put(np.ones(2, np.complex64))},
            "error: .*complex leaf 'c'.*jax.lax.complex",
        ),
        (
            lambda p, x: energy(p, x),
            {"w": jax.device_put(np.where(np.arange(12).reshape(4, 3), WEIGHT, np.float32("nan")))},
            "NaN or infinite values in 'w'",
        ),
        (
            lambda p, x: energy(p, x),
            {"w": W, "rate": 0.5},
            r"error: .*'rate' of type float.*jnp.asarray",
        ),
        (
            energy,
            {"w": W, "old": jax.device_put(np.ones(2, np.float32))},
            "warning: .*'old', which gets no gradient.*trainable",
        ),
        (
            lambda p, x: jnp.sqrt(energy(p, x)),
            {"w": W},
            "warning: The gradient is NaN.*examples of zeros",
        ),
        (
            lambda p, x: energy(p, x) + jnp.log(x[0]),
            {"w": W},
            "warning: The loss is NaN.*examples of zeros",
        ),
    ],
    ids=[
        "vector",
        "fails",
        "integer",
        "bf16",
        "complex",
        "NaN",
        "float",
        "unused",
        "NaN gradient",
        "infinite loss",
    ],
)
def test_losses_and_leaves(loss: Any, params: Any, pattern: str) -> None:
    report = jaxdp.check(loss, params, X)
    assert any(re.search(pattern, found) for found in messages(report)), str(report)
    assert len(report.findings) == (2 if "NaN or" in pattern else 1)


@pytest.mark.slow
def test_closed_over_weights_are_found() -> None:
    report = jaxdp.check(lambda p, x: energy({"w": W}, x) + jnp.sum(p["b"] * x[0]), PARAMS, X)
    unused, closed = messages(report)
    assert re.search(
        "warning: .*'w', which gets no gradient.*closes over an array of its shape", unused
    )
    assert re.search(r"note: loss_fn closes over 1 .* \(4, 3\)", closed)


@pytest.mark.slow
def test_a_large_leaf_without_a_rule_is_found() -> None:
    sort = lambda p, x: jnp.sum(jnp.sort(p["w"] * x[0]))  # noqa: E731
    only(
        jaxdp.check(sort, {"w": jnp.ones(2**18)}, X),
        "note: .*'w', whose per-example gradients of 1.05 MB",
    )


def test_nothing_to_train_and_examples_that_are_no_numbers() -> None:
    first, second = messages(jaxdp.check(lambda p, x: p["w"] * jnp.sum(x), {"w": 1.0}, X))
    assert "'w' of type float, no array. To train it, convert it with jnp.asarray" in first
    assert "no array of floating dtype" in second
    only(jaxdp.check(energy, {"w": W}, (X, "name")), "error: example must be .* type str")


@pytest.mark.slow
def test_random_numbers() -> None:
    noisy = lambda p, x, *, key: energy(p, x) * jax.random.uniform(key)  # noqa: E731
    only(jaxdp.check(noisy, {"w": W}, X), "warning: loss_fn takes key=.*stochastic=True")
    assert not jaxdp.check(noisy, {"w": W}, X, stochastic=True).findings
    fixed = lambda p, x: energy(p, x) * jax.random.uniform(jax.random.key(0))  # noqa: E731
    only(jaxdp.check(fixed, {"w": W}, X), "error: .*neither on the example nor on key=")
    dropout = nn.Sequential([nn.Dense(3), nn.Dropout(0.5, deterministic=False)])
    params = jax.jit(nn.Sequential([nn.Dense(3)]).init)(jax.random.key(0), np.ones(4, np.float32))[
        "params"
    ]
    with jax.numpy_rank_promotion("allow"):
        report = jaxdp.check(lambda p, x: jnp.sum(dropout.apply({"params": p}, x)), params, X)
        only(report, r"error: loss_fn needs random numbers.*rngs=\{'dropout': key\}")
    network = hk.transform(lambda x: jnp.sum(hk.dropout(hk.next_rng_key(), 0.5, x)))
    only(
        jaxdp.check(lambda p, x: network.apply(p, None, x), {"w": W}, X),
        "error: loss_fn needs random numbers.*transformed.apply",
    )


def nnx_dropout() -> Any:
    rngs = nnx.Rngs(0, dropout=1)
    return nnx.split(
        nnx.Sequential(nnx.Linear(4, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)), nnx.Param, ...
    )


@pytest.mark.slow
def test_nnx_dropout_has_one_mask_per_example_or_is_refused() -> None:
    """A shared mask, the broken twin of the reseeded model, would give equal examples equal
    gradients."""
    graph, params, rest = nnx_dropout()

    def loss(p: Any, x: Any, copy: bool, **streams: Any) -> Any:
        model = nnx.merge(graph, p, rest, copy=copy)
        nnx.reseed(model, **streams)
        return jnp.sum(model(x))

    x = jnp.ones((3, 4))
    with jax.numpy_rank_promotion("allow"):
        reseeded = jaxdp.clipped_grad(
            lambda p, x, *, key: loss(p, x, True, dropout=key), clip_norm=1.0
        )
        norms = [reseeded(params, x, key=jax.random.key(seed)).norms for seed in (0, 1)]
        assert len(set(np.concatenate(norms).tolist())) > 3
        for call, pattern in [
            (lambda p, x, *, key: loss(p, x, False, dropout=key), "Merge a copy.*nnx.reseed"),
            (lambda p, x, *, key: loss(p, x, True), "neither on the example nor on key="),
            (
                lambda p, x, *, key: loss(p, x, True, default=key),
                "neither on the example nor on key=.*streams",
            ),
        ]:
            with pytest.raises(ValueError, match=pattern):
                jaxdp.clipped_grad(call, clip_norm=1.0)(params, x, key=jax.random.key(0))
    whole = nnx.split(nnx.merge(graph, params, rest))[1]
    report = jaxdp.check(lambda p, x: jnp.sum(x), whole, X)
    assert "error: params has the random key 'layers/1/rngs/key/value'" in messages(report)[0]


def test_models_in_place_of_params_get_a_sentence() -> None:
    graph, params, rest = nnx_dropout()
    network = hk.transform(lambda x: x)
    for model, pattern in [
        (
            nnx.merge(graph, params, rest),
            r"NNX module, Sequential.*nnx.split\(model, nnx.Param, ...\)",
        ),
        ({"encoder": nnx.merge(graph, params, rest)}, "NNX module, Sequential"),
        (nn.Dense(3), r"Linen module, Dense. Pass model.init\(key, inputs\)\['params'\]"),
        (network, r"Haiku functions, Transformed. Pass transformed.init\(key, inputs\)"),
        (hk.transform_with_state(lambda x: x), "Haiku functions, TransformedWithState"),
    ]:
        with pytest.raises(TypeError, match=pattern):
            jaxdp.clipped_grad(lambda p, x: 0.0, clip_norm=1.0)(model, jnp.ones((2, 4)))
        only(
            jaxdp.check(lambda p, x: 0.0, model, X),
            f"error: params must be a pytree of arrays, got .*{pattern}",
        )


KEYED = {
    "jit": lambda k, x: jax.jit(lambda k: jax.random.normal(k))(k),
    "scan": lambda k, x: jax.lax.scan(
        lambda c, _: (jax.random.split(c)[0], jax.random.uniform(c)), k, None, 3
    )[1][2],
    "cond": lambda k, x: jax.lax.cond(x[0] > 0, jax.random.uniform, lambda k: 0.5, k),
    "while": lambda k, x: jax.lax.while_loop(
        lambda c: c[1] < 2,
        lambda c: (jax.random.split(c[0])[0], c[1] + jax.random.uniform(c[0])),
        (k, 0.0),
    )[1],
    "checkpoint": lambda k, x: jax.checkpoint(jax.random.normal)(k),
    "gamma": lambda k, x: jax.random.gamma(k, 2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYED)
def test_draws_are_followed_through_control_flow(name: str) -> None:
    draw = KEYED[name]
    drawn = lambda p, x, *, key: energy(p, x) * draw(key, x)  # noqa: E731
    shared = lambda p, x, *, key: energy(p, x) * draw(jax.random.key(3), jnp.ones(4))  # noqa: E731
    assert jaxdp.clipped_grad(drawn, clip_norm=1.0).plan(
        {"w": W}, jnp.ones((2, 4)), key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match="neither on the example nor on key="):
        jaxdp.clipped_grad(shared, clip_norm=1.0).plan(
            {"w": W}, jnp.ones((2, 4)), key=jax.random.key(0)
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_source_with_numbers_that_are_not_finite(bad):
    x = np.zeros((30, 4), np.float32)
    x[[3, 7], 1] = bad
    source = jaxdp.data.from_arrays(x=x, y=np.zeros(30, np.int32))
    report = jaxdp.check(cross_entropy, PARAMS, EXAMPLE, source=source)
    about = [finding.message for finding in report.findings if "first 30" in finding.message]
    assert report.ok and bool(about) == (bad != 0)
    assert all("2 of the first 30 examples" in text for text in about)
    assert [("2 in 'x'" in text) for text in about] == ([True, False] if bad else [])


def log_loss(params, x):
    return jnp.log(x["x"] @ params["w"])


@pytest.mark.parametrize(
    ("bad", "severity", "words"),
    [
        (0, None, ""),
        (4, "warning", "for 4 of the first 40 examples of source"),
        (5, "warning", "allow_nonfinite=True"),
        (40, "error", "starts no run"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_examples_of_a_source_that_a_step_would_drop(bad, severity, words, grouped):
    """The logarithm of a negative number, which no column shows. The twin has one more."""
    x = np.ones((40, 4), np.float32)
    x[:bad] = -1
    source = jaxdp.data.from_arrays(x=x)
    example = {"x": np.ones(4, np.float32)}
    if grouped:  # every owner has two records, the second a good one in padding or in truth
        source = jaxdp.data.by_group(source, np.arange(40), max_records=2)
        example = {"x": np.ones((2, 4), np.float32)}
    params = {"w": jnp.ones(4)}
    report = jaxdp.check(log_loss, params, example, source=source, group=grouped)
    about = [finding for finding in report.findings if "first 40" in finding.message]
    assert [finding.severity for finding in about] == [severity] * bool(bad)
    assert all(words in finding.message for finding in about)
    assert ("allow_nonfinite" in str(report)) == (bad == 5)


def test_a_wrong_column_is_named_with_those_that_the_example_has() -> None:
    columns = {"features": X, "label": jnp.int32(1)}
    (finding,) = jaxdp.check(lambda p, row: row["image"] @ p["w"], {"w": W}, columns).findings
    assert "KeyError: 'image'. The example has 'features', 'label'" in finding.message
