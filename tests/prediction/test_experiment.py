"""The prediction experiment: what it charges, keeps, refuses and computes, on a small version of the digits config."""

import importlib.util
import json
import math
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxdp import models
from jaxdp.prediction import experiment, tasks
from jaxdp.privacy import BudgetExceeded, Ledger, PureDpEvent, epsilon
from jaxdp.privacy.events import composition
from jaxdp.release import alone

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {
    "repetitions": 3,
    "data.features.dimensions": 6,
    "certificate.max_distance": 12,
    "prediction.queries": 30,
    "ensemble.members": 2,
    "student.steps": 3,
    "student.repetitions": 2,
    "dp_sgd.steps": 3,
    "dp_sgd.batch_size": 64,
    "dp_sgd.runs": 2,
}
FIGURES = {"certified.png", "accuracy_by_epsilon.png", "accuracy_by_queries.png", "flips.png"}
RELEASE = {"config.json", "answers.npz", "student.safetensors", "ledger.sqlite", "result.json", "private", "lock"}


def small_config(**overrides):
    path = ROOT / "configs" / "predict" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.update_from_flattened_dict({**SMALL, **{k.replace("__", "."): v for k, v in overrides.items()}})
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished experiment and its result."""
    root = tmp_path_factory.mktemp("experiment") / "run"
    return root, experiment.run(small_config(), root)


def files(root):
    return {path.name for path in root.iterdir() if not path.name.endswith(("-wal", "-shm", ".head"))}


# --- A whole run -----------------------------------------------------------------------------------------------------


def test_the_workdir_holds_the_release_the_figures_and_the_references(finished):
    root, result = finished
    assert files(root) == RELEASE | FIGURES | {"references"}
    assert json.loads((root / "result.json").read_text()) == result
    assert all((root / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    saved = np.load(root / "answers.npz")
    assert saved["answers"].shape == (30,) and set(saved["answers"]) <= set(range(10))
    assert len(set(saved["rows"].tolist())) == 30 and saved["rows"].max() < 539
    assert models.load_params(root / "student.safetensors")["dense_0"]["kernel"].shape == (6, 10)


def test_the_answers_cost_what_the_plan_says_and_nothing_else_is_charged(finished):
    root, result = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        (counts,) = map(composition, ledger.events("digits/train").values())
    assert counts == {PureDpEvent(result["epsilon_per_query"]): 30}
    assert 9.9 < result["epsilon"] <= 10.0
    # The plan spends all of the budget: one more answer of the same kind would not fit.
    assert epsilon(experiment.SelfComposedDpEvent(PureDpEvent(result["epsilon_per_query"]), 31), delta=1e-5) > 10


def test_references_are_charged_to_a_ledger_of_their_own(finished):
    root, result = finished
    with Ledger(root / "references" / "ledger.sqlite") as ledger:
        (counts,) = map(composition, ledger.events("digits/train").values())
        assert ledger.epsilon("digits/train", delta=1e-5) == pytest.approx(result["references_epsilon"])
    # Two pools and two mechanisms, each 30 answers in 3 repetitions.
    assert counts[PureDpEvent(result["epsilon_per_query"])] == 4 * 30 * 3
    kinds = Counter(type(event).__name__ for event in counts)
    assert kinds == {"PureDpEvent": 1, "GaussianDpEvent": 2, "PoissonSampledDpEvent": 1}  # the latter: PATE, DP-SGD
    assert sum(n for event, n in counts.items() if type(event).__name__ == "PoissonSampledDpEvent") == 3 * 2


def test_the_table_has_a_row_for_every_teacher_and_mechanism(finished):
    _, result = finished
    rows = {(row["teacher"], row["answers"]): row for row in result["rows"]}
    pools = [(pool, way) for pool in ("single model", "2 models") for way in (experiment.GLOBAL, experiment.OURS)]
    extra = [("2 models", "PATE (Confident-GNMax)"), ("DP-SGD", "any number"), ("single model", "without noise")]
    assert list(rows) == [*pools, *extra]
    for pool in pools:
        assert len(rows[pool]["per_query"]) == 3 and len(rows[pool]["student"]) == 2 and 0 < rows[pool]["expected"] < 1
    assert len(rows["DP-SGD", "any number"]["student"]) == 2
    text = experiment._summary(result)
    assert "randomised response (ours)" in text and "±" in text and "evaluation, not private" in text


def test_a_finished_run_is_not_run_again(finished, monkeypatch, capsys):
    root, result = finished
    monkeypatch.setattr(tasks, "load", None)
    assert experiment.run(small_config(), root) == result
    assert "holds a finished run" in capsys.readouterr().out


def test_a_workdir_belongs_to_one_config(finished):
    root, _ = finished
    with pytest.raises(ValueError, match=r"another prediction\.queries, repetitions; use a new workdir"):
        experiment.run(small_config(prediction__queries=31, repetitions=4), root)


def test_an_interrupted_run_keeps_the_answers_that_it_paid_for(tmp_path):
    config = small_config(references=False)
    first = experiment.run(config, tmp_path)
    assert files(tmp_path) == RELEASE and "rows" not in first
    answers = np.load(tmp_path / "answers.npz")["answers"]
    for lost in ([], ["answers.npz"]):
        for name in ["result.json", *lost]:
            (tmp_path / name).unlink()
        assert experiment.run(config, tmp_path) == first
        np.testing.assert_array_equal(np.load(tmp_path / "answers.npz")["answers"], answers)
    # Paid and lost: asking again would be a second release.
    (tmp_path / "result.json").unlink()
    (tmp_path / "answers.npz").unlink()
    (tmp_path / "private" / "released.safetensors").unlink()
    with pytest.raises(BudgetExceeded, match="digits/train"):
        experiment.run(config, tmp_path)


def zero_concentrated(epsilon, delta, queries):
    """The paper's epsilon per query: quick."""
    log_delta = math.log(1 / delta)
    each = math.sqrt(2 / queries) * (math.sqrt(log_delta + epsilon) - math.sqrt(log_delta))
    return max(epsilon / queries, each)


class PowerCut(BaseException):
    """In place of a crash."""


def test_a_run_that_dies_after_every_step_repeats_it_and_pays_once(tmp_path, monkeypatch):
    """Everything noisy is lost once: computed and paid for, but not kept. At last it dies with all kept."""
    heard = []

    def dying(work):
        def worked(*args, **kwargs):
            heard.append(work(*args, **kwargs))
            if len(heard) % 2:
                raise PowerCut
            return heard[-1]

        return worked

    def remembered(config, model, examples, divisor):  # a process of its own would train the same again
        key = examples["features"].tobytes()
        if key not in known:
            known[key] = certified(config, model, examples, divisor)
        return known[key]

    def dying_dp_sgd(*args):
        event, train_once = dp_sgd(*args)
        return event, dying(train_once)

    known, certified, dp_sgd = {}, experiment._certified, experiment._dp_sgd
    pate = experiment.ensembles.ConfidentGNMax
    monkeypatch.setattr(experiment, "_certified", remembered)
    monkeypatch.setattr(experiment, "_dp_sgd", dying_dp_sgd)
    monkeypatch.setattr(experiment, "_draw", dying(lambda *_: None))
    monkeypatch.setattr(experiment.mechanisms, "_sample", dying(experiment.mechanisms._sample))
    monkeypatch.setattr(experiment.ensembles, "laplace_vote", dying(experiment.ensembles.laplace_vote))
    monkeypatch.setattr(pate, "answer", dying(pate.answer))
    monkeypatch.setattr(experiment.private, "query_epsilon", zero_concentrated)
    config, deaths = small_config(repetitions=1, student__repetitions=1, dp_sgd__runs=1), 0
    while True:
        try:
            result = experiment.run(config, tmp_path)
            break
        except PowerCut:
            deaths += 1
    # The answers; four mechanisms, PATE and DP-SGD in the table; the figures.
    assert deaths == 8 and len(heard) == 16
    for lost, repeated in zip(heard[::2], heard[1::2], strict=True):
        same = jax.tree.map(np.array_equal, lost, repeated)
        assert jax.tree.all(same)
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npz")["answers"], heard[0])
    each, charged = PureDpEvent(result["epsilon_per_query"]), []
    for path in ("ledger.sqlite", "references/ledger.sqlite"):
        with Ledger(tmp_path / path) as ledger:
            (counts,) = map(composition, ledger.events("digits/train").values())
            assert ledger.report()["datasets"][0]["open"] == []
        charged.append(counts)
    assert charged[0] == {each: 30} and charged[1].pop(each) == 4 * 30
    assert sorted(charged[1].values()) == [3, 30, 30]  # steps of DP-SGD; thresholds and answers of PATE
    assert not list(tmp_path.rglob("secret_seed"))


def test_a_workdir_in_use_is_refused(tmp_path):
    with alone(tmp_path), pytest.raises(ValueError, match="another process is running"):
        experiment.run(small_config(references=False), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"prediction__queries": 539}, r"config.prediction.queries=539 must lie in \[1, 539\)"),
        ({"dp_sgd__batch_size": 2000}, r"config.dp_sgd.batch_size=2000 must lie in \[1, 1078\]"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_is_spent(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        experiment.run(small_config(**overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- Parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "bias"), [(2, True), (3, True), (3, False)])
def test_logits_and_loss_are_those_of_a_dense_network(classes, bias):
    model = experiment._Model(inputs=4, num_classes=classes, hidden=(5,), bias=bias, init_seed=0)
    start = model.init()
    example = {"features": jnp.asarray([0.5, -1.0, 2.0, 0.1]), "label": jnp.int32(1)}
    assert float(model.loss(start, example)) == pytest.approx(math.log(classes), rel=1e-6)  # the last layer is zero

    key = jax.random.key(1)
    params = jax.tree.map(lambda leaf: leaf + jax.random.normal(key, leaf.shape), start)
    hidden, last = (
        {name: np.asarray(leaf, np.float64) for name, leaf in params[layer].items()} for layer in ("dense_0", "dense_1")
    )
    x = np.asarray(example["features"], np.float64)
    x = np.maximum(x @ hidden["kernel"] + hidden.get("bias", 0), 0)
    z = x @ last["kernel"] + last.get("bias", 0)
    expected = np.log1p(np.exp(-z[0])) if classes == 2 else np.log(np.exp(z).sum()) - z[1]
    logits = model.logits(params, example["features"])
    assert logits.shape == (() if classes == 2 else (3,))
    np.testing.assert_allclose(logits, z[0] if classes == 2 else z, rtol=1e-5)
    assert float(model.loss(params, example)) == pytest.approx(expected, rel=1e-5)

    batch = {"features": np.stack([np.asarray(example["features"])] * 2), "label": np.array([0, 1])}
    assert model.accuracy(params, batch) in (0.0, 0.5)


def test_one_step_has_the_distances_of_the_closed_form():
    config = small_config(certificate__max_distance=60)
    task = tasks.load(config.data)
    train, test = experiment._all(task.train), experiment._all(task.test)
    model = experiment._Model.of(config.model, task)
    bounds = experiment._certified(config, model, train, len(train["label"]))
    found = experiment.agt.certify(bounds, model.logits, test["features"])

    clip, x = config.training.clip, train["features"].astype(np.float64)
    residuals = np.eye(10)[train["label"]] - 0.1
    moved = np.stack([np.clip(residuals[:, [c]] * x, -clip, clip).sum(axis=0) for c in range(10)])
    queries = test["features"].astype(np.float64)
    logits = queries @ moved.T
    label = logits.argmax(axis=1)
    gaps = logits.max(axis=1, keepdims=True) - logits
    gaps[np.arange(len(label)), label] = np.inf
    # k records move each entry of the sum by at most k clip, hence a difference of two logits by 2 k clip |x|_1.
    exact = gaps.min(axis=1) / (2 * clip * np.abs(queries).sum(axis=1))
    np.testing.assert_array_equal(found.label, label)
    inside = np.abs(exact - np.round(exact)) > 0.01  # away from where rounding decides
    np.testing.assert_array_equal(np.asarray(found.distance)[inside], np.minimum(np.floor(exact), 60)[inside])
    assert inside.sum() > 500 and np.median(exact) > 5


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("votes", [False, True])
def test_expected_accuracies_are_those_of_the_answers(classes, votes):
    generator = np.random.default_rng(0)
    truth = generator.integers(0, classes, 1600)
    off = generator.random((6, 1600)) < 0.25
    label, *members = (truth + off * generator.integers(1, classes, (6, 1600))) % classes
    distance = generator.integers(0, 9, 1600)
    pool = experiment._Certified(label, distance, classes, np.stack(members) if votes else None)
    rows = np.tile(np.arange(1600), 50)
    key = jax.random.key(7, impl="rbg")
    for way in experiment._ways(classes):
        accuracy = np.mean(experiment._answer(pool, way, 0.4, key, rows) == truth[rows])
        # 80000 answers, each right or wrong: five standard errors. The vote's expectation has as many draws.
        tolerance = 5 * math.sqrt(0.25 / 80_000 * (2 if votes and way == experiment.GLOBAL else 1))
        assert abs(accuracy - pool.expected_accuracy(way, 0.4, truth)) < tolerance
        assert abs(accuracy - pool.expected_accuracy(way, 0.8, truth)) > tolerance  # the test can tell


def test_dp_sgd_costs_the_total_and_follows_the_clipped_gradient(monkeypatch):
    config = small_config(dp_sgd__steps=1, dp_sgd__clip_norm=0.3, dp_sgd__learning_rate=2.0)
    generator = np.random.default_rng(0)
    train = {
        "features": generator.normal(size=(40, 6)).astype(np.float32),
        "label": generator.integers(0, 10, 40).astype(np.int32),
    }
    config.training.records = config.dp_sgd.batch_size = 40  # a sampling probability of one: every record takes part
    model = experiment._Model(inputs=6, num_classes=10, hidden=(), bias=False, init_seed=0)
    event, _ = experiment._dp_sgd(config, model, train)
    assert 9.9 < epsilon(event, delta=1e-5) <= 10.0

    monkeypatch.setattr(experiment, "calibrate_noise", lambda *_, **__: 0.0)
    _, train_once = experiment._dp_sgd(config, model, train)
    gradients = np.einsum("nc,nd->ndc", 0.1 - np.eye(10)[train["label"]], train["features"].astype(np.float64))
    norms = np.linalg.norm(gradients, axis=(1, 2), keepdims=True)
    expected = -2.0 * (gradients * np.minimum(1, 0.3 / norms)).sum(axis=0) / 40
    assert (norms > 0.3).any()
    np.testing.assert_allclose(train_once(bytes(16))["dense_0"]["kernel"], expected, rtol=1e-4, atol=1e-6)


def test_dp_sgd_repeats_batches_and_noise_with_its_secret_only():
    config = small_config(dp_sgd__steps=2)
    generator = np.random.default_rng(0)
    train = {"features": generator.normal(size=(90, 6)).astype(np.float32), "label": generator.integers(0, 10, 90)}
    model = experiment._Model(inputs=6, num_classes=10, hidden=(), bias=False, init_seed=0)
    _, train_once = experiment._dp_sgd(config, model, train)
    one, again, other = (train_once(secret)["dense_0"]["kernel"] for secret in (bytes(16), bytes(16), bytes(15) + b"1"))
    assert (one == again).all() and (one != other).any()


def test_members_are_trained_on_disjoint_parts_with_a_public_normaliser(monkeypatch):
    config = small_config(ensemble__members=2)
    task = tasks.load(config.data)
    train, test = experiment._all(task.train), experiment._all(task.test)
    model = experiment._Model.of(config.model, task)
    seen = []
    certified = experiment._certified

    def spy(config, model, examples, divisor):
        seen.append((examples["features"], divisor))
        return certified(config, model, examples, divisor)

    monkeypatch.setattr(experiment, "_certified", spy)
    votes, count = experiment._members(config, model, train, test["features"])
    assert count == 2 and votes["label"].shape == votes["distance"].shape == (2, 539)
    assert {divisor for _, divisor in seen} == {1078 // 2}
    rows = Counter(part.tobytes() for features, _ in seen for part in features)
    assert rows == Counter(row.tobytes() for row in train["features"])


def test_one_record_less_changes_no_setting(monkeypatch):
    """How many private records there are is private: divisors, distances and probabilities follow what is declared."""
    config = small_config(certificate__max_distance=2000)
    task = tasks.load(config.data)
    model = experiment._Model.of(config.model, task)
    certificate = experiment._Certified(np.zeros(1, np.int32), np.zeros(1, np.int32), 10)
    settings = []
    monkeypatch.setattr(experiment.agt, "train_with_bounds", lambda *args, **options: settings[-1].append(options))
    monkeypatch.setattr(experiment.agt, "certify", lambda *args: certificate)
    for count in (1078, 1077):
        train = experiment._take(experiment._all(task.train), np.arange(count))
        settings.append([])
        experiment._members(config, model, train, None)
        settings[-1].append(experiment._dp_sgd(config, model, train)[0])
    assert len(settings[0]) == 3 and settings[0] == settings[1]


def test_the_number_of_records_is_the_declared_one(tmp_path, monkeypatch, capsys):
    divisors, certified = [], experiment._certified
    monkeypatch.setattr(experiment, "_certified", lambda *args: (divisors.append(args[-1]), certified(*args))[1])
    result = experiment.run(small_config(training__records=1000, references=False), tmp_path)
    assert divisors == [result["private_records"]] == [1000]
    assert "1000 private records (digits/train)" in capsys.readouterr().out


def test_which_inputs_are_asked_about_is_a_public_choice_without_repeats():
    chosen = experiment._choose(50, 20, seed=3)
    assert len(set(chosen.tolist())) == 20 and (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(chosen, experiment._choose(50, 20, seed=3))
    assert (chosen != experiment._choose(50, 20, seed=4)).any()


def test_two_classes_have_the_paper_s_mechanism_in_the_table_and_in_every_figure(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(experiment, "plot_curves", lambda path, curves, **_: drawn.update({path.name: curves}))
    # The plan by privacy loss distributions takes a third of a second for each number of queries in a figure.
    monkeypatch.setattr(experiment.private, "query_epsilon", zero_concentrated)
    config = small_config(certificate__max_distance=5, repetitions=1, student__repetitions=1)
    blobs = {"kind": "blobs", "separation": 1.25, "std": 0.35, "train": 200, "test": 120, "seed": 0}
    with config.ignore_type(), config.unlocked():
        config.data = ConfigDict(blobs)
    config.training.records = 200
    result = experiment.run(config, tmp_path)
    ways = {row["answers"] for row in result["rows"]}
    assert ways >= {experiment.SMOOTH, experiment.GLOBAL, experiment.OURS}

    assert set(drawn) == FIGURES
    each = result["epsilon_per_query"]
    flips = {name: dict(curve) for name, curve in drawn["flips.png"].items()}
    assert flips["randomised response (ours)"][3] == pytest.approx(math.exp(-3 * each) / (1 + math.exp(each)))
    assert flips["global sensitivity"][3] == pytest.approx(math.exp(-each / 2) / 2)
    # P(Cauchy(6 exp(-eps k / 6) / eps) > 1/2)
    assert flips["Cauchy, paper"][3] == pytest.approx(0.5 - math.atan(each / 12 * math.exp(each / 2)) / math.pi)
    assert len(flips) == 5
    for name in ("accuracy_by_epsilon.png", "accuracy_by_queries.png"):
        assert len(drawn[name]) == 6
        ours = [accuracy for _, accuracy in drawn[name]["single model, ours"]]
        assert ours == sorted(ours, reverse=name == "accuracy_by_queries.png")
    for curve in drawn["certified.png"].values():
        shares = [share for _, share in curve]
        assert shares[0] == 1.0 and shares == sorted(shares, reverse=True) and len(shares) == 6
