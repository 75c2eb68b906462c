"""The audits of a lifecycle have power: run by the stage, halved noise and a forgotten clip are
VIOLATED."""

import importlib
import pathlib
from types import SimpleNamespace

import jax
import pytest

from jaxdp import audit, models
from jaxdp.audit import trials
from jaxdp.finetune.dp_sgd import GradientSum
from jaxdp.finetune.query import QuerySums
from jaxdp.transforms import noise
from launch import models as networks
from launch.lifecycle import finetune, parts, split

pytestmark = pytest.mark.slow

SMALL = {
    "model.options.widths": (8,),
    "finetune.epsilon": 4.0,
    "finetune.batch_size": 192,
    "finetune.steps": 80,
    "finetune.physical_batch_size": 4,
    "split.epsilon": 8.0,
    "audit_finetune.candidates": 2,
    "audit_finetune.trials": 2048,
    "audit_split.trials": 1500,
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Returns the input of a stage after pre-training and fine-tuning, with fresh parameters from
    both."""
    config = importlib.import_module("configs.lifecycle_digits").get_config()
    config.update_from_flattened_dict(SMALL)
    folder = pathlib.Path(tmp_path_factory.mktemp("before"))
    network = networks.network(config.model, 10)
    for name in ("backbone", "model"):
        models.save_params(folder / f"{name}.safetensors", networks.fresh(network, 0))
    before = {name: SimpleNamespace(folder=folder) for name in ("pretrain", "finetune")}
    return SimpleNamespace(config=config, data=parts.load(config.data), before=before)


@pytest.fixture(autouse=True)
def one_seed(monkeypatch):
    for module in (audit.finetune, trials):
        monkeypatch.setattr(module, "new_seed", lambda: bytes(range(16)))


@pytest.fixture
def half_the_noise(monkeypatch):
    def half(key, tree, std, draw=noise.gaussian, **where):
        return draw(key, tree, std / 2, **where)

    for module in (noise, noise.trees):  # what stages call, and what privatize calls
        monkeypatch.setattr(module, "gaussian", half)
    yield
    jax.clear_caches()  # programs that were traced with half the noise


@pytest.fixture
def no_clipping(monkeypatch):
    def sums(self, params, carried, batch, mask, key):
        of_examples = self.gradient.per_example(params, batch, mask)
        total = jax.tree.map(lambda g: g.sum(0), of_examples.grads)
        return QuerySums(total, of_examples.nonfinite)

    monkeypatch.setattr(GradientSum, "sums", sums)


def verdicts(result):
    assert all(audit["ceiling"] > audit["upper"] for audit in result["audits"])
    return [audit["verdict"] for audit in result["audits"]]


def test_the_audits_of_fine_tuning_and_of_the_upload_pass(job):
    assert verdicts(finetune.audit(job)) == ["consistent", "consistent"]
    assert verdicts(split.audit(job)) == ["consistent", "consistent"]


def test_a_forgotten_clip_is_caught(job, no_clipping):
    assert verdicts(finetune.audit(job))[0] == "VIOLATED"


def test_half_the_noise_is_caught(job, half_the_noise):
    """It is the last test, because what is compiled goes with the caches."""
    assert verdicts(finetune.audit(job)) == ["VIOLATED", "consistent"]
    # The noise of an upload is inside a program, unlike that of a step.
    jax.clear_caches()
    assert verdicts(split.audit(job)) == ["VIOLATED", "consistent"]
