"""Private training on a mesh of eight devices equals training on one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdp import finetune
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.finetune import dp_sgd, fit
from jaxdp.privacy import Ledger
from tests.compilations import compilations, text_of
from tests.finetune.own_options import own_options

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="fewer than eight devices")

RNG = np.random.default_rng(0)
SOURCE = from_arrays(
    x=RNG.normal(size=(96, 16)).astype(np.float32), y=RNG.normal(size=96).astype(np.float32)
)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(16, 64)), jnp.float32), "v": jnp.ones(64)}
SAMPLER = PoissonSampler(96, 0.4)


def loss(params, example):
    return jnp.square(jnp.tanh(example["x"] @ params["w"]) @ params["v"] - example["y"])


def rule(path, leaf):
    return PartitionSpec("data") if path == "w" else PartitionSpec()


def mesh_of(count=8, kind=jax.sharding.AxisType.Auto):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(kind,))


def trainer_of(make=dp_sgd, physical_batch_size=60, **options):
    return make(
        loss,
        optax.adam(0.1),
        clip_norm=1.0,
        noise_multiplier=1.0,
        sampler=SAMPLER,
        physical_batch_size=physical_batch_size,
        **options,
    )


def trained(trainer, params, steps=2):
    state = trainer.init(params)
    one = trainer_of().init(PARAMS)
    first = one._replace(noise=one.noise._replace(key=jax.random.key(3)), key=jax.random.key(4))
    state = trainer.placed(state._replace(noise=first.noise, key=first.key))
    for _ in range(steps):
        state, _ = trainer.step(state, SOURCE)
    return state


ANCHORS = {
    "x": RNG.normal(size=(12, 16)).astype(np.float32),
    "y": RNG.normal(size=12).astype(np.float32),
}
METHODS = own_options(ANCHORS)
METHODS["dp_sgd"] = {"ascent_radius": 0.1, "ema_decay": 0.9}
METHODS["gep"]["basis_every"] = 2


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_mesh_gives_the_parameters_of_one_device_keeps_their_shardings_and_compiles_once(name):
    make, options = finetune.METHODS[name], METHODS[name]
    one = trained(trainer_of(make, **options), PARAMS, steps=3)
    trainer = trainer_of(make, mesh=mesh_of(), param_sharding=rule, **options)
    many = trained(trainer, PARAMS, steps=2)
    with compilations() as compiled:
        many, _ = trainer.step(many, SOURCE)
    for name, value in one.params.items():
        np.testing.assert_allclose(many.params[name], value, atol=1e-5)
    for kept in (many.params["w"], many.opt_state[0].mu["w"]):
        assert kept.sharding.spec == PartitionSpec("data")
    assert not compiled


def test_each_device_computes_its_part_of_a_batch():
    # A replicated batch takes as many operations on each device as on one.
    flops = []
    for trainer in (trainer_of(physical_batch_size=64), trainer_of(mesh=mesh_of())):
        function, arguments = trainer.programs(trainer.init(PARAMS), SOURCE)["sum 64"]
        flops.append(function.lower(*arguments).compile().cost_analysis()["flops"])
    assert flops[1] < flops[0] / 6


@pytest.mark.slow
def test_fit_restores_a_run_onto_its_mesh(tmp_path):
    placed = jax.device_put(
        PARAMS, {"w": NamedSharding(mesh_of(), PartitionSpec("data")), "v": jax.devices()[0]}
    )
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("d", adjacency="add_remove", unit="example", delta=1e-5)
        for steps in (1, 2):
            state = fit(
                trainer_of(mesh=mesh_of()),
                placed,
                SOURCE,
                steps=steps,
                account=ledger.account("d"),
                workdir=tmp_path / "run",
                checkpoint_every=1,
                progress=False,
            )
    assert state.step == 2 and state.params["w"].sharding.spec == PartitionSpec("data")


def test_the_program_names_the_mesh():
    texts = set()
    for count in (4, 8):
        trainer = trainer_of(mesh=mesh_of(count))
        texts.add(text_of(trainer, trainer.init(PARAMS), SOURCE))
    assert len(texts) == 2


def on_another_mesh(params):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("model",))
    return params | {"w": jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec("model")))}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mesh": 8}, "mesh must be a jax.sharding.Mesh"),
        ({"mesh": mesh_of(), "data_axes": ("rows",)}, "data_axes must be"),
        ({"param_sharding": rule}, "param_sharding needs mesh="),
        (
            {"mesh": mesh_of(), "param_sharding": lambda path, leaf: PartitionSpec("model")},
            "param_sharding gives 'v'",
        ),
        ({"mesh": mesh_of(3), "param_sharding": rule}, "param_sharding gives 'w'"),
        ({"mesh": mesh_of(4)}, "params has 'v' on devices"),
        ({"mesh": mesh_of()}, "params gives 'w' .* the spec .*'model',., which does not fit mesh="),
    ],
)
def test_arguments_that_do_not_fit_the_mesh_cost_nothing(tmp_path, options, match):
    moves = {
        "on devices": lambda tree: jax.device_put(tree, jax.devices()[7]),
        "'model',": on_another_mesh,
    }
    params = next((move(PARAMS) for text, move in moves.items() if text in match), PARAMS)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("d", adjacency="add_remove", unit="example", delta=1e-5)
        with pytest.raises((TypeError, ValueError), match=match):
            fit(
                trainer_of(**options),
                params,
                SOURCE,
                steps=1,
                account=ledger.account("d"),
                progress=False,
            )
        assert ledger.epsilon("d") == 0
