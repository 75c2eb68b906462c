"""Private prediction: what it charges, keeps, refuses and computes, on a small version of the
digits config."""

import dataclasses
import importlib
import json
import math
import os
import pathlib
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy import special

from jaxdp import data, finetune, models
from jaxdp.privacy import BudgetExceeded, Ledger, PureDpEvent, SelfComposedDpEvent, epsilon
from jaxdp.privacy.events import composition
from launch import frame, predict, release, teachers
from launch.models import Dense
from tests.launch import program, settling, tiny

pytestmark = pytest.mark.slow

CONFIGS = [
    ("blobs", ()),
    ("blobs", ("close",)),
    ("blobs", ("mlp",)),
    ("digits", ()),
    ("pneumonia", ()),
    ("pneumonia", ("published",)),
    ("octmnist", ()),
    ("octmnist", ("published",)),
    ("sst2", ()),
    ("imdb", ()),
    ("imdb", ("embeddings",)),
    ("imdb", ("published",)),
]
FIGURES = {"certified.png", "accuracy_by_epsilon.png", "accuracy_by_queries.png", "flips.png"}
RELEASE = {
    "config.json",
    "answers.npz",
    "student.safetensors",
    "ledger.sqlite",
    "result.json",
    "rows.jsonl",
    "cells",
}
RELEASE |= {"report.html", "ledger.json", "released.json"}
LEDGERS = ("ledger.sqlite", "references/ledger.sqlite")
ANSWERS = pathlib.Path("cells") / "single_model" / "released"


def load(name, *variant):
    return importlib.import_module(f"configs.predict.{name}").get_config(*variant)


def run(config, root):
    return frame.run(predict.STUDY, config, root)


def files(root):
    return {
        path.name
        for path in root.iterdir()
        if not path.name.endswith(("-wal", "-shm", ".head", ".anchor", ".lock", ".copy"))
    }


def bench_of(config):
    return teachers.Bench(config, pathlib.Path("nowhere"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the workdir and the result of a study, and what its launcher printed."""
    root = tmp_path_factory.mktemp("predict") / "run"
    settling.begin(root, *LEDGERS)
    return root, *program.study("predict", "configs/predict/digits.py", root, tiny.PREDICT)


# --- A whole run --------------------------------------------------------------------------------


def test_the_launcher_prints_what_it_asks(finished):
    _, _, printed = finished
    assert "1078 private records (digits/train), 539 test inputs" in printed
    assert "30 answers about digits/train" in printed


def test_the_workdir_holds_the_release_the_figures_and_the_references(finished):
    root, result, _ = finished
    assert files(root) == RELEASE | FIGURES | {
        "references",
        "tables.json",
        "tables.md",
        "tables.tex",
    }
    assert json.loads((root / "result.json").read_text()) == result
    assert all((root / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    saved = np.load(root / "answers.npz")
    assert saved["answers"].shape == (30,) and set(saved["answers"]) <= set(range(10))
    assert len(set(saved["rows"].tolist())) == 30 and saved["rows"].max() < 539
    assert models.load_params(root / "student.safetensors")["dense_0"]["kernel"].shape == (6, 10)


def test_the_answers_cost_what_the_plan_says_and_nothing_else_is_charged(finished):
    root, result, _ = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        (counts,) = map(composition, ledger.events("digits/train").values())
    assert counts == {PureDpEvent(result["epsilon_per_query"]): 30}
    assert 9.9 < result["epsilon"] <= 10.0
    # The plan spends all of the budget: one more answer of the same kind would not fit.
    assert (
        epsilon(SelfComposedDpEvent(PureDpEvent(result["epsilon_per_query"]), 31), delta=1e-5) > 10
    )


def test_references_are_charged_to_a_ledger_of_their_own(finished):
    root, result, _ = finished
    with Ledger(root / "references" / "ledger.sqlite") as ledger:
        (counts,) = map(composition, ledger.events("digits/train").values())
        assert ledger.epsilon("digits/train", delta=1e-5) == pytest.approx(
            result["references_epsilon"]
        )
    # Two pools and two mechanisms, each 30 answers in 3 repetitions.
    assert counts[PureDpEvent(result["epsilon_per_query"])] == 4 * 30 * 3
    kinds = Counter(type(event).__name__ for event in counts)
    # the latter: PATE, DP-SGD
    assert kinds == {
        "PureDpEvent": 1,
        "GaussianDpEvent": 2,
        "PoissonSampledDpEvent": 1,
    }
    assert (
        sum(n for event, n in counts.items() if type(event).__name__ == "PoissonSampledDpEvent")
        == 3 * 2
    )
    assert result["references_epsilon"] == pytest.approx(67.6632105)  # as in the releases before


def test_a_ledger_is_charged_for_what_it_lacks(finished):
    root, _, _ = finished
    settling.check(predict.STUDY, tiny.predict(), root, *LEDGERS)


def test_the_table_has_a_row_for_every_teacher_and_mechanism(finished):
    root, result, _ = finished
    rows = {(row["teacher"], row["answers"]): row for row in result["rows"]}
    pools = [
        (pool, way)
        for pool in ("single model", "2 models")
        for way in (teachers.GLOBAL, teachers.OURS)
    ]
    extra = [
        ("2 models", "PATE (Confident-GNMax)"),
        ("DP-SGD", "any number"),
        ("single model", "without noise"),
    ]
    assert list(rows) == [*pools, *extra]
    for pool in pools:
        assert (
            len(rows[pool]["per_query"]) == 3
            and len(rows[pool]["student"]) == 2
            and 0 < rows[pool]["expected"] < 1
        )
    assert len(rows["DP-SGD", "any number"]["student"]) == 2
    for text in (predict.STUDY.summary(result), (root / "tables.md").read_text()):
        assert "randomised response (ours)" in text and "±" in text
    assert "figures are not private" in predict.STUDY.summary(result)


def test_an_interrupted_run_keeps_the_answers_that_it_paid_for(tmp_path, monkeypatch, capsys):
    """Also tests that the declared number of records is used, not the private number."""
    config = tiny.predict(training__records=1000, references=False)
    divisors, certified = [], teachers.Bench.certified
    monkeypatch.setattr(
        teachers.Bench, "certified", lambda *args: (divisors.append(args[-1]), certified(*args))[1]
    )
    student = teachers.Bench.student

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(teachers.Bench, "student", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    answers = np.load(tmp_path / "answers.npz")["answers"]
    (tmp_path / "answers.npz").unlink()  # paid, and lost while the run keeps them
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npz")["answers"], answers)
    monkeypatch.setattr(teachers.Bench, "student", student)
    result = run(config, tmp_path)
    assert set(divisors) == {result["private_records"]} == {1000}
    assert "1000 private records (digits/train)" in capsys.readouterr().out
    assert files(tmp_path) == RELEASE and "rows" not in result
    assert not (tmp_path / ANSWERS / "scratch").exists()
    for name in ("result.json", ANSWERS / "row.json"):
        (tmp_path / name).unlink()
        assert run(config, tmp_path) == result
        (tmp_path / "result.json").unlink()
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npz")["answers"], answers)
    # Without what was kept, asking again would be a second release.
    (tmp_path / "answers.npz").unlink()
    (tmp_path / ANSWERS / "row.json").unlink()
    with pytest.raises(BudgetExceeded, match="digits/train"):
        run(config, tmp_path)


class PowerCut(BaseException):
    """Replaces a crash."""


def test_a_run_that_dies_after_every_step_repeats_it_and_pays_once(tmp_path, monkeypatch):
    """Loses everything noisy once: computed and paid for, but not kept. At last it dies with all
    kept."""
    heard = []

    def dying(work, noted=lambda found: found):
        def worked(*args, **kwargs):
            found = work(*args, **kwargs)
            heard.append(noted(found))
            if len(heard) % 2:
                raise PowerCut
            return found

        return worked

    def remembered(self, examples, divisor):  # a new process would train the same model again
        key = examples["features"].tobytes()
        if key not in known:
            known[key] = certified(self, examples, divisor)
        return known[key]

    known, certified = {}, teachers.Bench.certified
    pate, fit = predict.prediction.ConfidentGNMax, sys.modules["jaxdp.finetune.loop"]
    monkeypatch.setattr(teachers.Bench, "certified", remembered)
    trained = dying(fit._Run.train, lambda state: state.params)
    monkeypatch.setattr(fit._Run, "train", trained)
    study = dataclasses.replace(predict.STUDY, figures=dying(lambda *_: None))
    monkeypatch.setattr(teachers.mechanisms, "_answer", dying(teachers.mechanisms._answer))
    monkeypatch.setattr(teachers.ensembles, "laplace_vote", dying(teachers.ensembles.laplace_vote))
    monkeypatch.setattr(pate, "answer", dying(pate.answer))
    cheap_plan(monkeypatch)
    config, deaths = tiny.predict(repetitions=1, student__repetitions=1, dp_sgd__runs=1), 0
    while True:
        try:
            result = frame.run(study, config, tmp_path)
            break
        except PowerCut:
            deaths += 1
    # The answers, then four mechanisms, PATE and DP-SGD in the table, then the figures.
    assert deaths == 8 and len(heard) == 16
    for lost, repeated in zip(heard[::2], heard[1::2], strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, lost, repeated))
    np.testing.assert_array_equal(np.load(tmp_path / "answers.npz")["answers"], heard[0])
    each, charged = PureDpEvent(result["epsilon_per_query"]), []
    for path in ("ledger.sqlite", "references/ledger.sqlite"):
        with Ledger(tmp_path / path) as ledger:
            (counts,) = map(composition, ledger.events("digits/train").values())
            assert ledger.report()["datasets"][0]["open"] == []
        charged.append(counts)
    assert charged[0] == {each: 30} and charged[1].pop(each) == 4 * 30
    # steps of DP-SGD, thresholds and answers of PATE
    assert sorted(charged[1].values()) == [
        3,
        30,
        30,
    ]
    assert not list(tmp_path.rglob("secret_seed"))


def cheap_plan(monkeypatch):
    """Replaces the plan by privacy loss distributions, which takes a third of a second per point of
    a figure."""
    monkeypatch.setattr(
        predict.prediction,
        "query_epsilon",
        lambda epsilon, delta, queries: epsilon / queries**0.5 / 5,
    )


# --- Configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variant"), CONFIGS)
def test_configs_have_the_fields_of_the_digits_config(name, variant):
    config, digits = load(name, *variant), load("digits")
    assert json.loads(config.to_json())
    assert set(config) == set(digits)
    for part in (
        "model",
        "training",
        "certificate",
        "prediction",
        "ensemble",
        "pate",
        "student",
        "dp_sgd",
    ):
        assert set(config[part]) == set(digits[part])
    assert (config.prediction.queries, config.prediction.epsilon, config.prediction.delta) == (
        100,
        10.0,
        1e-5,
    )
    # A part of the data holds enough records for every distance, and distances have no gap.
    assert config.certificate.max_distance >= 31  # needed_distance at epsilon 0.204
    assert next(iter(predict.STUDY.cells(config))) == predict.RELEASED


@pytest.mark.download
def test_real_x_rays(tmp_path):
    config = load("pneumonia")
    config.update_from_flattened_dict(
        {
            "references": False,
            "data.data_dir": os.environ["JAXDP_DATA_DIR"],
            "data.network.steps": 50,
            "certificate.max_distance": 30,
        }
    )
    result = run(config, tmp_path)
    assert result["dataset"] == "pneumonia_mnist/train" and result["private_records"] == 4708
    # Chance is 62.5 %. Four standard errors of 100 answers that are right four times in five are 16
    # %.
    assert result["released"]["per_query"] > 0.625
    assert np.load(tmp_path / "answers.npz")["answers"].shape == (100,)
    assert sorted(models.load_params(tmp_path / "network.safetensors")) == ["conv_0", "conv_1"]


# --- Parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "bias"), [(2, True), (3, True), (3, False)])
def test_logits_and_loss_are_those_of_a_dense_network(classes, bias):
    model = Dense(inputs=4, num_classes=classes, hidden=(5,), bias=bias, init_seed=0)
    start = jax.device_get(model.init())
    example = {"features": np.float32([0.5, -1.0, 2.0, 0.1]), "label": np.int32(1)}

    @jax.jit
    def computed(params):
        return model.logits(params, example["features"]), model.loss(params, example)

    # the last layer is zero
    assert float(computed(start)[1]) == pytest.approx(math.log(classes), rel=1e-6)

    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32), start)
    hidden, last = (
        {name: np.asarray(leaf, np.float64) for name, leaf in params[layer].items()}
        for layer in ("dense_0", "dense_1")
    )
    x = np.asarray(example["features"], np.float64)
    x = np.maximum(x @ hidden["kernel"] + hidden.get("bias", 0), 0)
    z = x @ last["kernel"] + last.get("bias", 0)
    expected = np.log1p(np.exp(-z[0])) if classes == 2 else np.log(np.exp(z).sum()) - z[1]
    logits, loss = computed(params)
    assert logits.shape == (() if classes == 2 else (3,))
    np.testing.assert_allclose(logits, z[0] if classes == 2 else z, rtol=1e-5)
    assert float(loss) == pytest.approx(expected, rel=1e-5)

    batch = {"features": np.stack([example["features"]] * 2), "label": np.array([0, 1])}
    assert model.accuracy(params, batch) in (0.0, 0.5)


def test_one_step_has_the_distances_of_the_closed_form():
    config = tiny.predict(certificate__max_distance=60)
    bench = bench_of(config)
    _, found, distances = bench.certified(bench.train, len(bench.train["label"]))

    clip, x = config.training.clip, bench.train["features"].astype(np.float64)
    residuals = np.eye(10)[bench.train["label"]] - 0.1
    moved = np.stack([np.clip(residuals[:, [c]] * x, -clip, clip).sum(axis=0) for c in range(10)])
    queries = bench.test["features"].astype(np.float64)
    logits = queries @ moved.T
    label = logits.argmax(axis=1)
    gaps = logits.max(axis=1, keepdims=True) - logits
    gaps[np.arange(len(label)), label] = np.inf
    # k records move each entry of the sum by at most k clip, so a difference of two logits by 2 k
    # clip |x|_1.
    exact = gaps.min(axis=1) / (2 * clip * np.abs(queries).sum(axis=1))
    np.testing.assert_array_equal(found, label)
    inside = np.abs(exact - np.round(exact)) > 0.01  # away from where rounding decides
    np.testing.assert_array_equal(distances[inside], np.minimum(np.floor(exact), 60)[inside])
    assert inside.sum() > 500 and np.median(exact) > 5


def replaced(**changes):
    """Returns a config of two digits and 216 records, one of which may be replaced."""
    options = {"data__classes": (3, 8), "training__clip": 0.2, "certificate__max_distance": 60}
    config = tiny.predict(training__threat="replace_one", **options, **changes)
    config.training.records = 216
    return config


def test_replaced_records_have_the_distances_of_theorem_4_6():
    """A float64 computation of one step. The twin, added or removed records, reaches further."""
    config = replaced()
    bench = bench_of(config)
    _, found, distances = bench.certified(bench.train, 216)
    clip, x = config.training.clip, bench.train["features"].astype(np.float64)
    steps = np.sort(np.clip((0.5 - bench.train["label"])[:, None] * x, -clip, clip), axis=0)
    queries = bench.test["features"].astype(np.float64)
    certified = np.zeros(len(queries), int)
    for k in range(1, 61):
        # The sums of all but the k largest and all but the k smallest, and k records at the clip.
        low = steps[: len(steps) - k].sum(axis=0) - k * clip
        high = steps[k:].sum(axis=0) + k * clip
        centre, radius = queries @ (low + high), np.abs(queries) @ (high - low)
        certified += np.abs(centre) > radius
    np.testing.assert_array_equal(found, (queries @ steps.sum(axis=0) < 0).astype(int))
    assert (distances <= certified).all()  # bounds of float32 are rounded outward
    assert np.mean(distances == certified) > 0.95 and 2 < np.median(certified) < 50
    config.training.threat = "add_remove"
    assert (bench.certified(bench.train, 216)[2] > certified).mean() > 0.5


def test_the_relation_of_the_ledger_is_that_of_the_bounds(tmp_path):
    config = replaced(references=False)
    result = run(config, tmp_path)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (dataset,) = ledger.report()["datasets"]
    assert dataset["adjacency"] == "replace_one" and 9.9 < result["epsilon"] <= 10
    assert "(one example replaced)" in predict.STUDY.summary(result)
    # PATE pays for both members that a replacement may change. A record costs it half the noise.
    event = predict._pate(config).event(30, max_answers=30)
    costs = [epsilon(event, delta=1e-5, adjacency=name) for name in ("replace_one", "add_remove")]
    assert costs[1] < 6 and 9.9 < costs[0] <= 10


def test_the_relation_of_the_data_must_be_that_of_the_threat():
    config = tiny.predict(training__threat="replace_one")
    with config.unlocked():
        config.data.adjacency = "add_remove"
    with pytest.raises(ValueError, match=r"config\.data\.adjacency must be 'replace_one'"):
        list(predict.STUDY.cells(config))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("votes", [False, True])
def test_expected_accuracies_are_those_of_the_answers(classes, votes):
    generator = np.random.default_rng(0)
    truth = generator.integers(0, classes, 1600)
    off = generator.random((6, 1600)) < 0.25
    label, *members = (truth + off * generator.integers(1, classes, (6, 1600))) % classes
    distance = generator.integers(0, 9, 1600)
    pool = teachers.Pool(label, distance, classes, np.stack(members) if votes else None)
    rows = np.tile(np.arange(1600), 50)
    key = jax.random.key(7)
    for way in teachers.MECHANISMS.values():
        if way == teachers.SMOOTH and classes > 2:
            continue
        accuracy = np.mean(pool.answer(way, 0.4, key, rows) == truth[rows])
        # 80000 answers, each right or wrong: five standard errors. The vote's expectation has as
        # many draws.
        tolerance = 5 * math.sqrt(0.25 / 80_000 * (2 if votes and way == teachers.GLOBAL else 1))
        assert abs(accuracy - pool.expected_accuracy(way, 0.4, truth)) < tolerance
        # the test can tell
        assert abs(accuracy - pool.expected_accuracy(way, 1.2, truth)) > tolerance


def test_dp_sgd_costs_the_total_and_follows_the_clipped_gradient(monkeypatch):
    config = tiny.predict(dp_sgd__steps=1, dp_sgd__clip_norm=0.3, dp_sgd__learning_rate=2.0)
    generator = np.random.default_rng(0)
    features, label = generator.normal(size=(40, 6)), generator.integers(0, 10, 40)
    source = data.from_arrays(features=features, label=label, num_classes=10)
    train = source.gather(np.arange(40))
    config.training.records = config.dp_sgd.batch_size = (
        40  # a sampling probability of one: every record takes part
    )
    model = Dense(inputs=6, num_classes=10, hidden=(), bias=False, init_seed=0)
    assert 9.9 < epsilon(predict.dp_sgd(config, model, 40).event(0, 1), delta=1e-5) <= 10.0

    make = finetune.dp_sgd

    def exact(*args, epsilon, delta, adjacency, steps, **how):
        return make(*args, noise_multiplier=0.0, **how)

    monkeypatch.setattr(finetune, "dp_sgd", exact)
    gradients = np.einsum(
        "nc,nd->ndc", 0.1 - np.eye(10)[train["label"]], train["features"].astype(np.float64)
    )
    norms = np.linalg.norm(gradients, axis=(1, 2), keepdims=True)
    assert (norms > 0.3).any()
    # what is declared, by which sums are divided, and more than that cannot be drawn
    for records in (
        40,
        32,
    ):
        config.training.records, config.dp_sgd.batch_size = records, 32
        trainer = predict.dp_sgd(config, model, 40)
        state = trainer.init(model.init())
        drawn = trainer.drawn(state)
        clipped = gradients[drawn] * np.minimum(1, 0.3 / norms[drawn])
        state, _ = trainer.step(state, source)
        expected = -2.0 * clipped.sum(axis=0) / 32
        np.testing.assert_allclose(
            state.params["dense_0"]["kernel"], expected, rtol=1e-4, atol=1e-6
        )


def test_members_are_trained_on_disjoint_parts_with_a_public_normaliser(monkeypatch):
    bench = bench_of(tiny.predict(ensemble__members=2))
    seen, certified = [], teachers.Bench.certified

    def spy(self, examples, divisor):
        seen.append((examples["features"], divisor))
        return certified(self, examples, divisor)

    monkeypatch.setattr(teachers.Bench, "certified", spy)
    pool = bench.pools["2 models"]
    assert pool.votes.shape == (2, 539) and pool.label.shape == pool.distance.shape == (539,)
    *members, single = seen
    assert {divisor for _, divisor in members} == {1078 // 2} and single[1] == 1078
    rows = Counter(part.tobytes() for features, _ in members for part in features)
    assert rows == Counter(row.tobytes() for row in bench.train["features"])


def test_one_record_less_changes_no_setting(monkeypatch):
    """Tests that the private number of records is not used. Divisors and distances follow the
    declared one."""
    config = tiny.predict(certificate__max_distance=2000)
    bench, settings = bench_of(config), []
    found = predict.prediction.Certificates(*[np.zeros(1, np.int32)] * 3)
    monkeypatch.setattr(
        predict.prediction,
        "train_with_bounds",
        lambda *args, **options: settings[-1].append(options),
    )
    monkeypatch.setattr(predict.prediction, "certify", lambda *args: found)
    whole = bench.train
    for count in (1078, 1077):
        bench.train = {name: column[:count] for name, column in whole.items()}
        bench.__dict__.pop("pools", None), bench.__dict__.pop("single", None)
        settings.append([])
        assert len(bench.pools) == 2
        settings[-1].append(predict.dp_sgd(config, bench.model, count).event(0, 3))
    assert len(settings[0]) == 4 and settings[0] == settings[1]


def test_which_inputs_are_asked_about_is_a_public_choice_without_repeats():
    bench = bench_of(tiny.predict(query_seed=3))
    chosen = bench.asked(0)
    assert len(set(chosen.tolist())) == 30 and (np.diff(chosen) > 0).all() and chosen.max() < 539
    np.testing.assert_array_equal(chosen, bench.asked(0))
    np.testing.assert_array_equal(bench.asked(1), bench_of(tiny.predict(query_seed=4)).asked(0))
    assert (chosen != bench.asked(1)).any()


def test_two_classes_have_the_paper_s_mechanism_in_the_table_and_in_every_figure(
    tmp_path, monkeypatch
):
    drawn = {}
    monkeypatch.setattr(
        predict, "plot_curves", lambda path, curves, **_: drawn.update({path.name: curves})
    )
    cheap_plan(monkeypatch)
    config = tiny.predict(certificate__max_distance=5, repetitions=1, student__repetitions=1)
    blobs = {"kind": "blobs", "separation": 1.25, "std": 0.35, "train": 200, "test": 120, "seed": 0}
    with config.ignore_type(), config.unlocked():
        config.data = ConfigDict(blobs)
    config.mechanisms = ("global", "smooth", "ours")
    config.training.records = 200
    result = run(config, tmp_path)
    ways = {row["answers"] for row in result["rows"]}
    assert ways >= {teachers.SMOOTH, teachers.GLOBAL, teachers.OURS}

    assert set(drawn) == FIGURES
    each = result["epsilon_per_query"]
    flips = {name: dict(curve) for name, curve in drawn["flips.png"].items()}
    assert flips["randomised response (ours)"][3] == pytest.approx(
        math.exp(-3 * each) / (1 + math.exp(each))
    )
    assert flips["global sensitivity"][3] == pytest.approx(math.exp(-each / 2) / 2)
    # P(Cauchy(6 exp(-eps k / 6) / eps) > 1/2)
    assert flips["Cauchy, paper"][3] == pytest.approx(
        0.5 - math.atan(each / 12 * math.exp(each / 2)) / math.pi
    )
    assert len(flips) == 5
    for name in ("accuracy_by_epsilon.png", "accuracy_by_queries.png"):
        assert len(drawn[name]) == 6
        ours = [accuracy for _, accuracy in drawn[name]["single model, ours"]]
        assert ours == sorted(ours, reverse=name == "accuracy_by_queries.png")
    for curve in drawn["certified.png"].values():
        shares = [share for _, share in curve]
        assert shares[0] == 1.0 and shares == sorted(shares, reverse=True) and len(shares) == 6


def test_the_student_is_released_with_its_features_and_their_account(finished, tmp_path):
    """The features are computed in float32, and those of the study in float64."""
    root, result, _ = finished
    folder = release.write(root, tmp_path / "release")
    served = models.load_released(folder)
    (guarantee,) = served.card["guarantees"]
    assert guarantee["name"] == "digits/train"
    assert float(guarantee["epsilon"]) == pytest.approx(result["epsilon"], abs=0.01)
    bench = teachers.Bench(tiny.predict(), root)
    images = data.bundled("digits").split([0.6, 0.1, 0.3], seed=0)[2]
    student = models.load_params(root / "student.safetensors")
    scores = np.asarray(bench.model._batched(student, bench.test["features"]))
    rows = images.gather(np.arange(len(images)))["image"]
    np.testing.assert_allclose(served(rows), special.softmax(scores, axis=1), atol=1e-4)
