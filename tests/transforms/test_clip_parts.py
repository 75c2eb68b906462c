"""Norms of their own for parts of params: every engine against float64, and what is refused."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxdp
from jaxdp.transforms import clipped_sums
from jaxdp.transforms.clipping import paths_of
from tests.transforms.small_net import ENGINES, draws, factors_of_other_parts

BATCH = 6
CLIP = {"backbone/.*": 0.3, "head|mix": 0.05, "table": 0.02}
_SHAPES = ((5, 4), (4,), (4, 3), (3,), (7, 5))
_NAMES = ("backbone/w", "backbone/b", "head", "mix", "table")


def params_of(dtype: Any = jnp.float32) -> Any:
    w, b, head, mix, table = (x.astype(dtype) for x in draws(0, *_SHAPES))
    return {"backbone": {"w": w, "b": b}, "head": head, "mix": mix, "table": table}


def batch_of(size: int = BATCH) -> Any:
    tokens = np.random.default_rng(1).integers(7, size=(size, 8))
    (y,) = draws(2, (size, 3))
    return {"tokens": tokens, "y": y * np.geomspace(0.01, 10, size)[:, None].astype(np.float32)}


def loss(p: Any, example: Any) -> Any:
    """Evaluates a lookup, a dense layer, and a weight that is computed from two leaves."""
    sums = p["table"][example["tokens"]] @ p["backbone"]["w"]
    hidden = jnp.tanh(sums + p["backbone"]["b"][None])
    logits = hidden @ (p["head"] * p["mix"][None])
    return jnp.mean(jnp.square(logits - example["y"].astype(logits.dtype)[None]))


def gradients(params: Any, batch: Any) -> dict[str, np.ndarray]:
    """Returns the per-example gradients [B, ...] by path, in float64 by the rules of calculus."""
    w, b, head, mix, table = (
        np.asarray(x, np.float64)
        for x in (*(params["backbone"][n] for n in "wb"), *(params[n] for n in _NAMES[2:]))
    )
    x = table[batch["tokens"]]
    hidden = np.tanh(x @ w + b)
    error = 2 * (hidden @ (head * mix) - batch["y"][:, None]) / (x.shape[1] * len(mix))
    of_product = np.einsum("bth,btc->bhc", hidden, error)
    before = (error @ (head * mix).T) * (1 - hidden**2)
    rows = np.zeros((len(x), *table.shape))
    for example, tokens in enumerate(batch["tokens"]):
        np.add.at(rows[example], tokens, before[example] @ w.T)
    by_leaf = (
        np.einsum("btd,bth->bdh", x, before),
        before.sum(1),
        of_product * mix,
        (of_product * head).sum(1),
        rows,
    )
    return dict(zip(_NAMES, by_leaf, strict=True))


PART = {"backbone/w": 0, "backbone/b": 0, "head": 1, "mix": 1, "table": 2}


def clipped(grads: dict[str, np.ndarray], clip: dict[str, float]) -> tuple[Any, list[np.ndarray]]:
    """Returns the sums by path, and the norms [B] of each part."""
    norms = []
    for number in range(len(clip)):
        own = [g.reshape(len(g), -1) for path, g in grads.items() if PART[path] == number]
        norms.append(np.linalg.norm(np.concatenate(own, 1), axis=1))
    factors = [np.minimum(1, c / n) for c, n in zip(clip.values(), norms, strict=True)]
    sums = {path: np.tensordot(factors[PART[path]], g, 1) for path, g in grads.items()}
    return sums, norms


def by_path(tree: Any) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float64) for path, leaf in paths_of(tree)}


def assert_sums(actual: Any, expected: dict[str, np.ndarray], rtol: float) -> None:
    for path, value in by_path(actual).items():
        size = np.abs(expected[path]).max()
        np.testing.assert_allclose(value, expected[path], rtol=rtol, atol=rtol * size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "microbatch"), [*((engine, None) for engine in ENGINES), ("auto", 4)]
)
def test_every_engine_clips_each_part_as_float64_does(engine: Any, microbatch: int | None) -> None:
    params, batch = params_of(), batch_of()
    f = jaxdp.clipped_grad(loss, clip_norm=CLIP, engine=engine, microbatch_size=microbatch)
    out = f(params, batch)
    sums, norms = clipped(gradients(params, batch), CLIP)
    assert_sums(out.grads, sums, 1e-5)
    for pattern, expected in zip(CLIP, norms, strict=True):
        np.testing.assert_allclose(out.part_norms[pattern], expected, rtol=1e-5)
    np.testing.assert_allclose(out.norms, np.sqrt(np.square(norms).sum(0)), rtol=1e-5)
    assert any((n > c).any() and (n < c).any() for n, c in zip(norms, CLIP.values(), strict=True))


@pytest.mark.slow
def test_a_component_of_two_parts_is_kept_and_cut() -> None:
    """`head * mix` is one weight of two leaves, here in two parts."""
    params, batch = params_of(), batch_of()
    clip = {"head": 0.05, "mix": 0.01, "backbone/.*|table": 1.0}
    f = jaxdp.clipped_grad(loss, clip_norm=clip, engine="bookkeeping")
    out = f(params, batch)
    grads = gradients(params, batch)
    for path in ("head", "mix"):
        norms = np.linalg.norm(grads[path].reshape(BATCH, -1), axis=1)
        expected = np.tensordot(np.minimum(1, clip[path] / norms), grads[path], 1)
        np.testing.assert_allclose(out.grads[path], expected, rtol=1e-5, atol=1e-7)
    methods = {plan.path: plan.method for plan in f.plan(params, batch)}
    assert methods["head"] == methods["mix"] == "keep"


@pytest.mark.slow
def test_every_treatment_of_a_layer_clips_each_part_as_float64_does(oracle: Any) -> None:
    """Norms come from factors, from kept gradients, and from gradients that are formed twice."""
    params, batch = params_of(), batch_of()
    sums, norms = clipped(gradients(params, batch), CLIP)
    treatments = ("factors", "keep", "drop")
    results = oracle.every_method(loss, treatments, params, batch, clip_norm=CLIP)
    assert tuple(results) == treatments
    for out in results.values():
        assert_sums(out.grads, sums, 1e-5)
        for pattern, expected in zip(CLIP, norms, strict=True):
            np.testing.assert_allclose(out.part_norms[pattern], expected, rtol=1e-5)


@pytest.mark.slow
def test_the_sensitivity_is_reached_and_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One example alone moves the sum by it. A twin that claims the largest norm, or one with the
    factor of another part, claims too little."""
    params, batch = params_of(), batch_of(1)
    batch["y"] = 1e3 * batch["y"]
    honest = jaxdp.clipped_grad(loss, clip_norm=CLIP)
    bound, moved = honest.sensitivity(), _length(honest(params, batch).grads)
    np.testing.assert_allclose(moved, bound, rtol=1e-5)
    assert moved > 1.01 * max(CLIP.values())
    monkeypatch.setattr(clipped_sums, "_engine_result", factors_of_other_parts)
    broken = jaxdp.clipped_grad(loss, clip_norm=CLIP)
    assert _length(broken(params, batch).grads) > 1.02 * bound


def _length(tree: Any) -> float:
    squares = [np.square(leaf).sum() for leaf in by_path(tree).values()]
    return math.sqrt(sum(squares))


@pytest.mark.slow
def test_bfloat16_keeps_the_bound_of_each_part() -> None:
    params, batch = params_of(jnp.bfloat16), batch_of(1)
    f = jaxdp.clipped_grad(loss, clip_norm=CLIP)
    for scale in (1.0, 1e3):
        scaled = {**batch, "y": np.float32(scale) * batch["y"]}
        sums = by_path(f(params, scaled).grads)
        for number, norm in enumerate(CLIP.values()):
            own = {path: value for path, value in sums.items() if PART[path] == number}
            assert _length(own) <= (1 + 2**-8) * norm


@pytest.mark.slow
def test_an_example_that_is_not_finite_in_one_part_contributes_to_none() -> None:
    params, batch = params_of(), batch_of()
    batch["y"][2] = np.nan
    f = jaxdp.clipped_grad(loss, clip_norm=CLIP)
    out = f(params, batch)
    others = jax.tree.map(lambda x: np.delete(x, 2, axis=0), batch)
    assert int(out.nonfinite) == 1
    assert_sums(out.grads, by_path(f(params, others).grads), 1e-5)
    assert_sums(f(params, batch, np.zeros(BATCH, bool)).grads, by_path(_zeros(params)), 0)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


@pytest.mark.slow
@pytest.mark.parametrize("manual", [True, False])
def test_two_devices_clip_each_part_as_float64_does(manual: bool) -> None:
    params, batch = params_of(), batch_of()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    f = jaxdp.clipped_grad(loss, clip_norm=CLIP)
    expected, _ = clipped(gradients(params, batch), CLIP)

    def summed(params: Any, batch: Any) -> Any:
        return jax.lax.psum(f(params, batch).grads, "data")

    whole, rows = PartitionSpec(), PartitionSpec("data")
    if manual:
        sharded = jax.shard_map(summed, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
        assert_sums(jax.jit(sharded)(params, batch), expected, 1e-5)
        return
    params = jax.device_put(params, NamedSharding(mesh, whole))
    batch = jax.device_put(batch, NamedSharding(mesh, rows))
    out = jax.jit(f)(params, batch)
    assert len(out.part_norms["table"].sharding.device_set) == 2
    assert_sums(out.grads, expected, 1e-5)


@pytest.mark.slow
def test_new_norms_do_not_recompile() -> None:
    params, batch = params_of(), batch_of()
    f = jaxdp.clipped_grad(loss, clip_norm=CLIP)
    traces = []

    @jax.jit
    def step(norms: Any) -> Any:
        traces.append(norms)
        return dataclasses.replace(f, clip_norm=norms)(params, batch).grads

    halved = {pattern: norm / 2 for pattern, norm in CLIP.items()}
    step(CLIP)
    assert_sums(step(halved), clipped(gradients(params, batch), halved)[0], 1e-5)
    assert len(traces) == 1


def test_sensitivity_is_the_root_of_the_sum_of_squares() -> None:
    f = jaxdp.clipped_grad(loss, clip_norm={"a": 3.0, "b": 4.0})
    assert f.sensitivity() == 5.0
    assert f.sensitivity("replace_one") == 10.0
    assert jaxdp.privatize(f, noise_multiplier=1.0, divisor=1.0).clip_norm == 5.0


def test_a_change_of_the_mapping_changes_nothing() -> None:
    norms = {".*": 1.0}
    f = jaxdp.clipped_grad(loss, clip_norm=norms)
    norms[".*"] = 9.0
    assert f.sensitivity() == 1.0


@pytest.mark.parametrize("by", ["uniform", "dimension"])
@pytest.mark.parametrize("depth", [None, 1])
def test_a_split_has_the_total_and_one_part_for_each_leaf(by: Any, depth: int | None) -> None:
    params = params_of()
    norms = jaxdp.split_clip_norm(params, 0.7, by=by, depth=depth)
    f = jaxdp.clipped_grad(loss, clip_norm=norms)
    np.testing.assert_allclose(f.sensitivity(), 0.7, rtol=1e-12)
    assert len(norms) == (4 if depth else 5)
    if by == "dimension" and depth is None:
        np.testing.assert_allclose(norms["mix"], 0.7 * math.sqrt(3 / 74), rtol=1e-12)
    f.plan(params, batch_of())  # which matches every leaf


def test_a_split_of_what_is_trained() -> None:
    norms = jaxdp.split_clip_norm(params_of(), 1.0, trainable=lambda path, leaf: path == "head")
    assert norms == {"head": 1.0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"total": 0.0}, "total must be positive"),
        ({"total": 1.0, "by": "size"}, "by must be"),
        ({"total": 1.0, "depth": 0}, "depth must be"),
        ({"total": 1.0, "trainable": lambda path, leaf: False}, "params must have a trainable"),
    ],
)
def test_a_split_refuses(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        jaxdp.split_clip_norm(params_of(), **options)


@pytest.mark.parametrize(
    ("clip_norm", "text"),
    [
        ({"backbone/.*": 1.0}, "parameter 'head', which matches none"),
        ({"backbone/.*": 1.0, ".*": 1.0}, r"parameter 'backbone/b', which matches \['backbone"),
        ({".*": 1.0, "bakcbone/.*": 1.0}, "has 'bakcbone/.*', which matches no trained"),
        ({"backbone/**": 1.0}, r"regular expressions of paths to norms, got 'backbone/\*\*'"),
        ({}, "at least one part"),
        ({".*": -1.0}, r"clip_norm\['\.\*'\] must be at least 0"),
        ({".*": "1"}, r"clip_norm\['\.\*'\] must be a number, got str"),
        ({3: 1.0}, "got the key 3"),
    ],
)
def test_wrong_parts_are_refused(clip_norm: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        jaxdp.clipped_grad(loss, clip_norm=clip_norm)(params_of(), batch_of())
