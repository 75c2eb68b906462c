"""A toy clipping rule, adaptation method and stage from outside the package work where those of the
package do."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import jaxdp
from jaxdp import data, finetune, tta
from jaxdp.audit import multi_run
from jaxdp.privacy import Ledger, PureDpEvent
from jaxdp.privacy.events import composition
from jaxdp.release import Release, Till, stream
from jaxdp.transforms import noise
from jaxdp.transforms.clip_rules import CLIP_RULES
from launch import data as images
from launch import frame

# --- A clipping rule -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Half:
    """Clips to half of the clip norm."""

    def factor(self, norms, clip_norm):
        return jnp.minimum(1, 0.5 * clip_norm / jnp.maximum(norms, 1e-12))

    def bound(self, clip_norm):
        return 0.5 * clip_norm


def loss(params, example):
    return jnp.vdot(params["w"], example["features"])


@pytest.mark.slow
def test_a_clipping_rule_reaches_every_engine_and_trainer(monkeypatch):
    monkeypatch.setitem(CLIP_RULES, "half", Half())
    examples = data.from_arrays(
        features=np.diag([4.0, 0.1, 8.0]).astype(np.float32), label=np.zeros(3, int), num_classes=2
    )
    params = {"w": jnp.zeros(3)}
    for engine in ("auto", "bookkeeping", "vmap"):
        f = jaxdp.clipped_grad(loss, clip_norm=1.0, clip_rule="half", engine=engine)
        grads = f(params, examples.gather(np.arange(3))).grads["w"]
        np.testing.assert_allclose(grads, [0.5, 0.1, 0.5], rtol=1e-6)
        assert f.sensitivity("add_remove") == 0.5
    shared = {
        "sampler": data.PoissonSampler(3, 1.0),
        "noise_multiplier": 1.0,
        "physical_batch_size": 4,
    }
    trainer = finetune.dp_sgd(loss, optax.sgd(1.0), clip_norm=1.0, clip_rule="half", **shared)
    sums = trainer.sums(trainer.init(params), examples, np.arange(3))
    np.testing.assert_allclose(sums["w"], [0.5, 0.1, 0.5], rtol=1e-6)
    assert trainer.query.sensitivity("add_remove") == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(finetune.METHODS))
def test_no_contribution_exceeds_the_sensitivity_under_a_rule_of_ones_own(monkeypatch, method):
    monkeypatch.setitem(CLIP_RULES, "half", Half())
    rows = (
        np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
        * np.logspace(-3, 3, 8)[:, None]
    )
    examples = data.from_arrays(
        features=rows.astype(np.float32), label=np.zeros(8, int), num_classes=2
    )
    own = {
        "adp_alloc": {"schedule": finetune.exponential_noise(0.1)},
        "adp_clip": {"count_noise": 4.0},
        "gep": {
            "anchors": examples.gather(np.arange(6)),
            "basis_size": 2,
            "groups": 1,
            "residual_clip_norm": 2.0,
        },
    }
    shared = {
        "sampler": data.PoissonSampler(8, 1.0),
        "noise_multiplier": 1.0,
        "physical_batch_size": 8,
    }
    make = finetune.METHODS[method]
    trainer = make(
        loss, optax.sgd(1.0), clip_norm=1.0, clip_rule="half", **shared, **own.get(method, {})
    )
    state = trainer.refreshed(trainer.init({"w": jnp.zeros(6)}))
    lengths = [
        float(optax.tree.norm(trainer.sums(state, examples, np.array([row])))) for row in range(8)
    ]
    assert max(lengths) <= trainer.query.sensitivity("add_remove") * (1 + 1e-5)
    assert max(lengths) > 0.9 * trainer.query.sensitivity("add_remove")  # nor is noise wasted


# --- A method of test-time adaptation -----------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Confident(tta.Method):
    """Tent on images whose class has a probability of a half."""

    def reliable(self, sample):
        """filter on one image: its class has a probability of a half"""
        return jax.nn.softmax(sample.logits).max() > 0.5


@pytest.mark.slow
def test_a_method_adapts_privately_and_is_served(monkeypatch):
    monkeypatch.setitem(tta.METHODS, "Confident", Confident)
    params = {"norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}

    def apply_fn(params, x):
        return x.reshape(len(x), 4) * params["norm"]["scale"][None] + params["norm"]["bias"][None]

    pictures = np.random.default_rng(0).random((16, 2, 2, 1)).astype(np.float32)
    source = data.from_arrays(image=pictures, label=np.zeros(16, int), num_classes=4)
    method = tta.private(tta.METHODS["Confident"](), clip_norm=1.0, noise_multiplier=2.0)
    assert "its class has a probability of a half" in method.describe()
    adapter = tta.Adapter(apply_fn, params, method, optax.sgd(0.1), adapted=lambda path, leaf: True)
    with Ledger.in_memory() as ledger:
        ledger.register("stream", adjacency="replace_one", unit="image", delta=1e-5)
        served = tta.serve(
            adapter,
            tta.Stream({"clean": source}, batch_size=8, seed=0),
            account=tta.StreamAccount(
                ledger.account("stream", label="toy"), event=method.event, unit="sample"
            ),
        )
        assert ledger.epsilon("stream") == pytest.approx(method.epsilon(delta=1e-5), rel=1e-6)
    assert int(served.state.step) == 2 and (served.state.params["norm"]["scale"] != 1).any()


# --- A stage and its study ----------------------------------------------------------------------


def event(epsilon):
    """What a mean costs."""
    return PureDpEvent(epsilon)


def noisy_mean(values, *, epsilon, account, workdir=None, seed=None):
    """The mean of numbers in [0, 1] with Laplace noise; their number is public."""

    def compute(secret):
        zero = jnp.float32(0)
        return {
            "mean": np.mean(values)
            + noise.laplace(stream(secret, "mean"), zero, 1 / (epsilon * len(values)))
        }

    what = Release(
        label="noisy mean",
        charges=[(account, event(epsilon))],
        facts=lambda: [values, epsilon],
        compute=compute,
    )
    with Till(workdir, seed=seed) as till:
        return float(till.once(what)["mean"])


class Cell(NamedTuple):
    epsilon: float


def run_one(cell, work):
    values = np.clip(images.everything(work.shared["private"])["image"].mean((1, 2, 3)), 0, 1)
    terms = {"adjacency": "replace_one", "unit": "image", "records": len(values)}
    with frame.account(work.root / "ledger.sqlite", f"digits {cell.epsilon:g}", **terms) as account:
        found = noisy_mean(
            values, epsilon=cell.epsilon, account=account, workdir=work.folder(cell) / "scratch"
        )
    return {"error": abs(found - float(values.mean()))}


STUDY = frame.Study(
    name="means",
    open=lambda config, root: images.parts(config.data, "private"),
    cells=lambda config: map(Cell, config.epsilons),
    run=run_one,
    result=lambda rows, work: {f"{row['epsilon']:g}": row["error"] for row in rows},
    summary=str,
    tables=lambda result, work: {"Errors": [{"epsilon": k, "error": v} for k, v in result.items()]},
)


@pytest.mark.slow
def test_a_stage_pays_once_and_its_study_runs_in_the_frame(tmp_path):
    shared = {"source": "bundled", "name": "digits", "split_seed": 0, "parts": {"private": 0.5}}
    config = ConfigDict({"data": shared, "epsilons": (0.5, 50.0)})
    result = frame.run(STUDY, config, tmp_path)
    assert result["50"] < 0.01 and frame.run(STUDY, config, tmp_path) == result
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert composition(ledger.events("digits 0.5")[None]) == {PureDpEvent(0.5): 1}
    assert "## Errors" in (tmp_path / "tables.md").read_text() and not list(
        tmp_path.rglob("secret_seed")
    )


@pytest.mark.slow
def test_its_audit_has_power():
    """Honest noise is consistent with the claim. An eighth of it is VIOLATED.

    The noise depends on the host. A wrong verdict has a probability below 0.001.
    """

    def outputs(epsilon, values, seed):
        with Ledger.in_memory() as ledger:
            ledger.register("x", adjacency="replace_one", unit="number")
            return noisy_mean(values, epsilon=epsilon, account=ledger.account("x"), seed=seed)

    def audit(epsilon):
        seeds = [number.to_bytes(16, "little") for number in range(200)]
        near = np.array([outputs(epsilon, np.zeros(1), seed) for seed in seeds[:100]])
        far = np.array([outputs(epsilon, np.ones(1), seed) for seed in seeds[100:]])
        return multi_run(far, near, upper=1.0, delta=0.0, confidence=0.999)

    assert audit(1.0).verdict == "consistent" and audit(8.0).verdict == "VIOLATED"
