"""Algorithm 1 against an independent computation in NumPy, SAM against optax, and what must hold of
every step."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxdp.pretrain import amp, dpadapter, sam

RNG = np.random.default_rng(0)
GAMMA = {"global": 0.6, "per_tensor": 0.35}
SIZES = {"w1": (4, 5), "b1": (5,), "w2": (5, 3)}
PARAMS = {name: RNG.normal(size=shape) for name, shape in SIZES.items()}


def batch(size):
    return {"x": RNG.normal(size=(size, 4)), "y": RNG.integers(0, 3, size)}


BATCHES = [(batch(24), batch(6)) for _ in range(4)]


def forward(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"][None]) @ params["w2"]


def mean_loss(params, batch):
    logits = forward(params, jnp.asarray(batch["x"], params["w1"].dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def optimizer(rate=0.3, momentum=0.9, decay=0.05):
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=momentum))


@functools.cache  # Each compiles its own programs.
def made(make=dpadapter, **options):
    return make(mean_loss, optimizer(), **{"gamma": 0.2} | options)


def float32(tree):
    return jax.tree.map(jnp.float32, tree)


def norm(tree):
    return np.sqrt(
        sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))
    )


def run(trainer, batches=BATCHES):
    state, rows = trainer.init(float32(PARAMS)), []
    for first, second in batches:
        state, row = trainer.step(state, first, second)
        rows.append(row)
    return state, rows


# --- Algorithm 1 by hand, in float64 ------------------------------------------------------------


def numpy_gradient(params, batch):
    """Loss and gradient of a mean cross entropy behind one tanh layer, by hand."""
    x, y = batch["x"], batch["y"]
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"]
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probability = shifted / shifted.sum(1, keepdims=True)
    loss = -np.mean(np.log(probability[np.arange(len(y)), y]))
    back = (probability - np.eye(3)[y]) / len(y)
    inner = (back @ params["w2"].T) * (1 - hidden**2)
    return loss, {"w1": x.T @ inner, "b1": inner.sum(0), "w2": hidden.T @ back}


def numpy_run(gamma, rate, steps, ball, rule, learning_rate=0.3, momentum=0.9, decay=0.05):
    params = {name: value.copy() for name, value in PARAMS.items()}
    velocity = {name: np.zeros(shape) for name, shape in SIZES.items()}
    rows = []
    for first, second in BATCHES:
        delta = {name: np.zeros(shape) for name, shape in SIZES.items()}
        for _ in range(steps):
            _, gradient = numpy_gradient({n: params[n] + delta[n] for n in SIZES}, first)
            delta = {n: delta[n] + rate * gradient[n] for n in SIZES}
            for group in [list(SIZES)] if ball == "global" else [[n] for n in SIZES]:
                length = np.sqrt(sum((delta[n] ** 2).sum() for n in group))
                if rule == "normalise" or length > gamma:
                    delta |= {n: gamma / length * delta[n] for n in group}
        loss, gradient = numpy_gradient({n: params[n] + delta[n] for n in SIZES}, second)
        for n in SIZES:
            velocity[n] = momentum * velocity[n] + gradient[n] + decay * params[n]
            params[n] = params[n] - learning_rate * velocity[n]
        rows.append((loss, norm(delta)))
    return params, rows


# Every ball with every rule. The steps of an ascent repeat what a ball and a rule do.
CASES = [
    ("global", "project", 1),
    ("global", "normalise", 2),
    ("per_tensor", "project", 2),
    ("per_tensor", "normalise", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ball", "rule", "steps"), CASES)
def test_four_steps_are_those_of_algorithm_1(ball, rule, steps):
    trainer = dpadapter(
        mean_loss,
        optimizer(),
        gamma=GAMMA[ball],
        ascent_rate=1.5,
        ascent_steps=steps,
        ball=ball,
        rule=rule,
    )
    state, rows = run(trainer)
    params, expected = numpy_run(GAMMA[ball], 1.5, steps, ball, rule)
    for name in SIZES:
        np.testing.assert_allclose(state.params[name], params[name], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(
        [(row["loss"], row["perturbation_norm"]) for row in rows], expected, rtol=2e-5
    )
    assert int(state.step) == len(BATCHES)


def test_the_cases_above_are_different_ones():
    runs = [numpy_run(GAMMA[ball], 1.5, steps, ball, rule)[0] for ball, rule, steps in CASES]
    for i, first in enumerate(runs):
        for second in runs[:i]:
            assert norm({n: first[n] - second[n] for n in SIZES}) > 20 * 2e-5 * norm(first)
    # Projection is active in some steps and idle in others.
    lengths = np.array(
        [length for _, length in numpy_run(GAMMA["global"], 1.5, 1, "global", "project")[1]]
    )
    assert (lengths < GAMMA["global"] - 1e-9).any() and (lengths > GAMMA["global"] - 1e-9).any()


@pytest.mark.slow
def test_the_perturbation_is_in_the_ball():
    for ball, bound in (("global", 0.12), ("per_tensor", 0.12 * np.sqrt(3))):
        state, rows = run(
            dpadapter(mean_loss, optimizer(), gamma=0.12, ascent_rate=100.0, ball=ball)
        )
        assert all(float(row["perturbation_norm"]) <= bound * (1 + 1e-6) for row in rows)
        assert norm(state.perturbation) == pytest.approx(bound, rel=1e-6)
        if ball == "per_tensor":
            assert [norm(leaf) for leaf in state.perturbation.values()] == pytest.approx(
                [0.12] * 3, rel=1e-6
            )


@pytest.mark.slow
def test_an_infinite_ball_is_equation_6():
    state, rows = run(dpadapter(mean_loss, optimizer(), gamma=np.inf, ascent_rate=0.7), BATCHES[:1])
    _, gradient = numpy_gradient(PARAMS, BATCHES[0][0])
    for name in SIZES:
        np.testing.assert_allclose(
            state.perturbation[name], 0.7 * gradient[name], rtol=1e-5, atol=1e-7
        )
    assert float(rows[0]["ascent_gradient_norm"]) == pytest.approx(norm(gradient), rel=1e-5)


# --- Relatives ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_sam_is_that_of_optax():
    rho, both = 0.1, BATCHES[0][0]
    ours, _ = run(sam(mean_loss, optax.sgd(0.3, momentum=0.9), gamma=rho), [(both, both)])
    theirs = optax.contrib.sam(
        optax.sgd(0.3, momentum=0.9),
        optax.chain(optax.contrib.normalize(), optax.sgd(rho)),
        opaque_mode=True,
    )

    @jax.jit
    def stepped(params):
        gradient = jax.grad(mean_loss)
        updates, _ = theirs.update(
            gradient(params, both),
            theirs.init(params),
            params,
            grad_fn=lambda p, _: gradient(p, both),
        )
        return optax.apply_updates(params, updates)

    expected = stepped(float32(PARAMS))
    for name in SIZES:
        np.testing.assert_allclose(ours.params[name], expected[name], rtol=1e-5, atol=1e-6)


def test_amp_is_dpadapter_with_one_batch():
    same = [(second, second) for _, second in BATCHES]
    ours, _ = run(made(amp), same[:2])
    general, _ = run(made(), same[:2])
    jax.tree.map(np.testing.assert_array_equal, ours, general)


def plain_training(batches):
    params, method = float32(PARAMS), optimizer()
    state = method.init(params)

    @jax.jit
    def stepped(params, state, second):
        updates, state = method.update(jax.grad(mean_loss)(params, second), state, params)
        return optax.apply_updates(params, updates), state

    for _, second in batches:
        params, state = stepped(params, state, second)
    return params


def test_without_a_ball_or_without_ascent_it_is_plain_training():
    expected = plain_training(BATCHES)
    for trainer, batches in (
        (sam(mean_loss, optimizer(), gamma=0.0), BATCHES),
        (made(), [(None, second) for _, second in BATCHES]),
    ):
        state, rows = run(trainer, batches)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            state.params,
            expected,
        )
        assert all(
            set(row) == {"loss", "perturbation_norm"} and row["perturbation_norm"] == 0
            for row in rows
        )


@pytest.mark.slow
def test_between_ascents_the_perturbation_stays():
    (first, second), (_, third) = BATCHES[:2]
    trainer = made()
    state, rows = run(trainer, [(first, second), (None, third)])
    before, _ = run(trainer, [(first, second)])
    jax.tree.map(np.testing.assert_array_equal, state.perturbation, before.perturbation)
    shifted = jax.tree.map(np.add, *jax.device_get((before.params, before.perturbation)))
    expected = float(jax.jit(mean_loss)(shifted, third))
    assert float(rows[1]["loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ball"), [(dpadapter, "global"), (sam, "global"), (sam, "per_tensor")]
)
def test_a_zero_gradient_is_no_perturbation(make, ball):
    def flat(params, batch):
        return 0.0 * jnp.sum(params["w1"]) + batch["x"].astype(jnp.float32).mean()

    trainer = make(flat, optax.sgd(0.1), gamma=0.5, ball=ball)
    state, rows = run(trainer, BATCHES[:1])
    assert rows[0]["perturbation_norm"] == rows[0]["ascent_gradient_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, float32(PARAMS))


def test_one_dead_tensor_does_not_hurt_the_others():
    def partly(params, batch):
        return mean_loss({**params, "b1": 0 * params["b1"]}, batch)

    state, _ = run(sam(partly, optax.sgd(0.1), gamma=0.5, ball="per_tensor"), BATCHES[:1])
    assert [norm(state.perturbation[name]) for name in ("w1", "b1", "w2")] == pytest.approx(
        [0.5, 0, 0.5], rel=1e-6
    )


# --- Microbatches, devices, compilation ---------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    return run(made())


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [6, 100])
def test_microbatches_change_nothing(microbatch_size, whole):
    parts, others = run(made(microbatch_size=microbatch_size))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, whole, (parts, others))


MESH = Mesh(np.array(jax.devices()[:4]), ("data",))


def rows_of(path, leaf):
    return PartitionSpec("data") if path == "w1" else PartitionSpec()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "microbatch_size"), [(dpadapter, 8), (sam, None), (amp, None)])
def test_a_mesh_changes_nothing_keeps_shardings_and_compiles_once(make, microbatch_size):
    traces = []

    def traced(params, batch):
        traces.append(len(batch["y"]))
        return mean_loss(params, batch)

    batches = [(first, second if make is dpadapter else first) for first, second in BATCHES]
    alone, _ = run(made(make), batches)
    trainer = make(
        traced,
        optimizer(),
        gamma=0.2,
        microbatch_size=microbatch_size,
        mesh=MESH,
        param_sharding=rows_of,
    )
    state = trainer.init(float32(PARAMS))
    state, _ = trainer.step(state, *batches[0])
    first = len(traces)
    for batch in batches[1:]:
        state, _ = trainer.step(state, *batch)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, state, alone)
    assert len(traces) == first
    assert (
        state.params["w1"].sharding.spec
        == state.perturbation["w1"].sharding.spec
        == PartitionSpec("data")
    )


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_axes_of_any_type_give_the_result_of_one_device(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    alone, expected = run(made())
    state, metrics = run(made(mesh=mesh))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, (state.params, metrics), (alone.params, expected))


def test_devices_divide_the_work_of_a_batch():
    # A copied batch takes as many operations on each device as on one.
    flops = []
    for mesh in (None, MESH):
        trainer = dpadapter(mean_loss, optimizer(), mesh=mesh)
        state, batch = trainer.init(float32(PARAMS)), trainer.placed(BATCHES[0][0])
        layout = None if mesh is None else trainer.layout(state)
        arguments = (
            state.params,
            state.perturbation,
            None,
            batch,
            trainer.everywhere(np.int32(0)),
            layout,
        )
        flops.append(trainer.gradient.lower(*arguments, parts=1).compile().cost_analysis()["flops"])
    assert flops[1] < flops[0] / 3


def test_a_second_step_compiles_nothing(caplog):
    traces = []

    def traced(params, batch):
        traces.append(len(batch["y"]))
        return mean_loss(params, batch)

    trainer = dpadapter(traced, optimizer(), gamma=0.2, ascent_steps=2, microbatch_size=8)
    state = trainer.init({name: 1.0 * value.astype(np.float32) for name, value in PARAMS.items()})
    state, _ = trainer.step(state, *BATCHES[0])
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        for first, second in BATCHES[1:]:
            state, _ = trainer.step(state, first, second)
        trainer.step(state, None, BATCHES[0][1])
    assert sorted(traces) == [6, 8]
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


def test_nothing_moves_between_host_and_device_by_itself():
    trainer = made(microbatch_size=8)
    state = trainer.init(float32(PARAMS))
    first, second = BATCHES[0]
    with jax.transfer_guard("disallow"):
        trainer.step(state, first, second)


@pytest.mark.slow
def test_bfloat16_parameters_keep_their_dtype_and_a_precise_perturbation(caplog):
    def loss(params, batch):
        return mean_loss(float32(params), batch)

    trainer = dpadapter(loss, optimizer(), gamma=0.2)
    state = trainer.init(jax.tree.map(jnp.bfloat16, PARAMS))
    state, _ = trainer.step(state, *BATCHES[0])
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        state, _ = trainer.step(state, *BATCHES[1])
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert norm(state.perturbation) == pytest.approx(0.2, rel=1e-5)


# --- Running statistics -------------------------------------------------------------------------


def with_statistics(params, stats, batch):
    """A loss whose statistic is a sum over the passes of the mean of the hidden layer, which
    depends on params."""
    hidden = jnp.tanh(batch["x"].astype(jnp.float32) @ params["w1"] + params["b1"][None])
    return mean_loss(params, batch), {
        "mean": 0.5 * stats["mean"] + hidden.mean(0),
        "passes": stats["passes"] + 1,
    }


def statistics(trainer, batches):
    state = trainer.init(float32(PARAMS), {"mean": np.zeros(5, np.float32), "passes": np.int32(0)})
    for first, second in batches:
        before = state
        state, _ = trainer.step(state, first, second)
    return before, state


def hidden_mean(params, batch):
    return np.tanh(batch["x"] @ np.asarray(params["w1"]) + np.asarray(params["b1"])).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize(("ascent_steps", "microbatch_size"), [(3, None), (1, 6)])
def test_statistics_are_of_the_clean_pass(ascent_steps, microbatch_size):
    trainer = dpadapter(
        with_statistics,
        optimizer(),
        gamma=0.5,
        ascent_steps=ascent_steps,
        stateful=True,
        microbatch_size=microbatch_size,
    )
    before, after = statistics(trainer, BATCHES[:2])
    expected = 0.5 * hidden_mean(PARAMS, BATCHES[0][0]) + hidden_mean(before.params, BATCHES[1][0])
    np.testing.assert_allclose(after.stats["mean"], expected, rtol=1e-4, atol=1e-5)
    assert after.stats["passes"].dtype == jnp.int32 and int(after.stats["passes"]) == 2


def test_without_ascent_statistics_are_of_the_update_if_it_is_not_perturbed():
    trainer = dpadapter(with_statistics, optimizer(), gamma=0.5, stateful=True)
    _, warm = statistics(trainer, [(None, BATCHES[0][1])])
    np.testing.assert_allclose(
        warm.stats["mean"], hidden_mean(PARAMS, BATCHES[0][1]), rtol=1e-4, atol=1e-5
    )
    before, after = statistics(trainer, [BATCHES[0], (None, BATCHES[1][1])])
    jax.tree.map(np.testing.assert_array_equal, before.stats, after.stats)


@jax.numpy_rank_promotion("allow")  # as by default
def test_statistics_and_parameters_keep_their_shapes():
    """Without the assertions, a wrong shape would broadcast into the state."""

    def wide(params, stats, batch):
        loss, stats = with_statistics(params, stats, batch)
        return loss, {**stats, "mean": stats["mean"][None]}

    trainer = dpadapter(wide, optimizer(), gamma=0.0, stateful=True)
    with pytest.raises(AssertionError, match="batch_loss_fn must keep the shapes of stats"):
        statistics(trainer, BATCHES[:1])
    wider = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u[None], updates))
    trainer = dpadapter(mean_loss, wider, gamma=0.0)
    with pytest.raises(AssertionError, match="optimizer must keep the shapes of params"):
        trainer.step(trainer.init(float32(PARAMS)), *BATCHES[0])


def test_statistics_and_stateful_belong_together():
    with pytest.raises(ValueError, match="stats must be given with stateful=True"):
        dpadapter(with_statistics, optimizer(), stateful=True).init(float32(PARAMS))
    with pytest.raises(ValueError, match="stats must be None with stateful=False"):
        dpadapter(mean_loss, optimizer()).init(float32(PARAMS), {"mean": jnp.zeros(5)})


# --- What is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": -0.1}, "gamma must be at least 0, got -0.1. 0 trains without"),
        ({"gamma": float("nan")}, "gamma must be at least 0, got nan"),
        (
            {"gamma": float("inf"), "rule": "normalise"},
            "gamma must be finite with rule='normalise', got inf",
        ),
        ({"ascent_rate": 0.0}, "ascent_rate must be positive and finite, got 0.0. gamma=0"),
        ({"ascent_rate": -1.0}, "ascent_rate must be positive and finite, got -1.0"),
        ({"ascent_rate": float("nan")}, "ascent_rate must be positive and finite, got nan"),
        ({"ascent_steps": 0}, "ascent_steps must be at least 1, got 0"),
        ({"ball": "tensor"}, "ball must be 'global' or 'per_tensor', got 'tensor'"),
        ({"rule": "clip"}, "rule must be 'project' or 'normalise', got 'clip'"),
        ({"microbatch_size": 0}, "microbatch_size must be at least 1, got 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dpadapter(mean_loss, optimizer(), **arguments)


@pytest.mark.slow
def test_batches_that_cannot_be_are_refused():
    trainer = dpadapter(mean_loss, optimizer(), microbatch_size=5)
    state, (first, second) = trainer.init(float32(PARAMS)), BATCHES[0]
    with pytest.raises(
        ValueError, match="microbatch_size must divide the 24 examples of perturbation_batch, got 5"
    ):
        trainer.step(state, first, second)
    empty = {"x": np.zeros((0, 4)), "y": np.zeros(0, np.int64)}
    with pytest.raises(ValueError, match=r"update_batch must be arrays .* got lengths \[0\]"):
        trainer.step(state, None, empty)
    with pytest.raises(
        ValueError, match=r"perturbation_batch must be arrays .* got lengths \[6, 24\]"
    ):
        trainer.step(state, {"x": first["x"], "y": second["y"]}, second)
