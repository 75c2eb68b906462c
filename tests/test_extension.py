"""A toy clipping rule, adaptation method and stage from outside the package work where those of the
package do."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import jaxdp
from jaxdp import data, finetune, tta
from jaxdp.privacy import Ledger, PureDpEvent
from jaxdp.privacy.events import composition
from jaxdp.transforms.clip_rules import CLIP_RULES
from launch import audits, catalogue, frame, lifecycle, report, studies
from launch.audits.case import judge
from tests.launch import program, tiny

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
    if method == "sla_clip":
        # Its slack fills what the global rule leaves, and no other rule.
        with pytest.raises(ValueError, match="clip_rule must be 'global' for SlaClip, got 'half'"):
            make(loss, optax.sgd(1.0), clip_norm=1.0, clip_rule="half", **shared)
        return
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


# --- A stage, its study and its audit: tests/extension --------------------------------------------

STUDY = studies.Listed(
    "tests.extension.study:STUDY", "tests.extension.study", ("epsilons",), "noisy means"
)
CONFIG = """
from ml_collections import ConfigDict

def get_config():
    data = {"source": "bundled", "name": "digits", "split_seed": 0, "parts": {"private": 0.5}}
    return ConfigDict({"data": data, "epsilons": (0.5, 50.0)})
"""


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(studies, "STUDIES", [*studies.STUDIES, STUDY])
    monkeypatch.setattr(audits, "MODULES", [*audits.MODULES, "tests.extension.audit"])


@pytest.mark.slow
def test_the_study_of_a_stage_runs_as_a_launcher_and_pays_once(tmp_path, registered):
    config, workdir = tmp_path / "config.py", tmp_path / "run"
    config.write_text(CONFIG)
    assert studies.recognised(catalogue.load(str(config))) == [STUDY]
    command = [*program.PYTHON, "-m", "tests.extension.study", "--config", str(config)]
    command += ["--workdir", str(workdir)]
    helped, ran, again = (program.call([*command, *more]) for more in (["--help"], [], []))
    assert "--config.epsilons" in helped.stdout, helped.stderr
    assert ran.returncode == again.returncode == 0, ran.stderr + again.stderr
    assert "There is nothing to do" in again.stdout
    assert json.loads((workdir / "result.json").read_text())["50"] < 0.01
    with Ledger(workdir / "ledger.sqlite") as ledger:
        assert composition(ledger.events("digits 0.5")[None]) == {PureDpEvent(0.5): 1}
    assert not list(workdir.rglob("secret_seed"))

    other = program.command("finetune", str(config), workdir, {})
    refused = program.call(other)
    assert refused.returncode == 2
    assert "a config of tests.extension.study, not of launch.finetune" in refused.stderr
    plan = ["-m", "launch.command", "plan", "--config", str(config)]
    planned = program.call([*program.PYTHON, *plan])
    assert planned.returncode == 0 and "No ledger is charged." in planned.stdout, planned.stderr


@pytest.mark.slow
def test_its_report_has_its_title_tables_and_accounts(tmp_path, registered):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    study = studies.named("means")
    frame.run(study, catalogue.load(str(config)), tmp_path / "run")
    page = report.write(tmp_path / "run")
    text = page.read_text()
    assert "Privacy report: noisy means" in text and "Errors" in text and "digits 0.5" in text


@pytest.mark.slow
def test_its_audit_has_power(registered):
    """Honest noise is consistent with the claim, and its twins are VIOLATED."""
    (found,) = (case for case in audits.cases() if case.mechanism == "noisy mean")
    row, is_good = judge(found, bytes(range(16)), None)
    assert is_good, row


@pytest.mark.slow
def test_a_lifecycle_runs_its_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "STUDIES", [STUDY])
    config = tiny.lifecycle()
    config.means = ConfigDict({"epsilon": 0.5})
    for _ in range(2):
        states = lifecycle.run(config, tmp_path)
        assert {name: state["status"] for name, state in states.items()} == {
            "means": "done",
            "audit_means": "done",
        }
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            assert composition(ledger.events("clinic")[None]) == {PureDpEvent(0.5): 1}
    text = (tmp_path / "report.html").read_text()
    assert "<h3>A noisy mean</h3>" in text and "clinic" in text and "consistent" in text
