"""Test-time adaptation: what it keeps, what it reads, what it refuses."""

import itertools
import json
import math
import shutil
import tracemalloc
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy.special import log_ndtr

from configs.tta import cifar10, cifar10_batch_one, imagenet_c, imagenet_r, usps_shift
from jaxdp import data
from jaxdp.data import shifts
from jaxdp.data.shifts import STRENGTHS, Shift, shifted
from jaxdp.privacy import GaussianDpEvent, Ledger, SelfComposedDpEvent
from jaxdp.tta.adapter import Adapter
from launch import adapt, adapt_figures, adapt_results, adapt_settings, frame, settings
from tests.launch import golden, program, settling, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the workdir and the result of a study, and what its launcher printed."""
    root = tmp_path_factory.mktemp("adapt")
    settling.begin(root, "ledger.sqlite")
    return root, *program.study("adapt", "configs/tta/digits.py", root, tiny.ADAPT)


@pytest.fixture(scope="module")
def task(finished):
    """Returns the task of the study, opened once more."""
    root, _, _ = finished
    return adapt.STUDY.open(tiny.adapt(), root)


def test_what_no_noise_is_in_is_what_it_was(finished):
    _, result, _ = finished
    assert (
        golden.differences(
            "adapt", {"cells": [c for c in result["cells"] if "noise_multiplier" not in c]}
        )
        == []
    )
    result = json.loads(json.dumps(result))
    result["cells"][0]["mean"] += 0.1
    assert (
        golden.differences(
            "adapt", {"cells": [c for c in result["cells"] if "noise_multiplier" not in c]}
        )
        != []
    )


def test_both_epsilons_and_the_costs_are_printed(finished):
    _, _, printed = finished
    assert "2 streams of 2 domains with 32 photographs each" in printed
    assert "epsilon 5: epsilon = 5 for a sample, 7.4" in printed
    assert "for a photograph (seen 2 times), at delta = 1e-06, replace_one" in printed


def cell(result, method, setting):
    (found,) = [c for c in result["cells"] if (c["method"], c["setting"]) == (method, setting)]
    return found


def row(root, *cell):
    return json.loads(root.joinpath("cells", *cell, "row.json").read_text())


def gdp_delta(epsilon, mu):
    """Returns the delta of Dong, Roth, Su 2022, in float64."""
    first, second = log_ndtr(-epsilon / mu + mu / 2), log_ndtr(-epsilon / mu - mu / 2)
    return math.exp(first) - math.exp(epsilon + second)


def test_tables_are_means_over_the_runs_that_were_kept(finished):
    root, result, _ = finished
    assert {(c["method"], c["setting"]) for c in result["cells"]} == {
        *(("Tent-COME", setting) for setting in ("original", "clipped", "epsilon 5")),
        ("no adaptation", "original"),
    }
    runs = [row(root, "runs", "Tent-COME", "epsilon_5", seed) for seed in ("0", "1")]
    means = [np.mean(list(run["accuracy"].values())) for run in runs]
    found = cell(result, "Tent-COME", "epsilon 5")
    np.testing.assert_allclose(
        [found["mean"], found["std"]], [np.mean(means), np.std(means, ddof=1)]
    )
    source = cell(result, "no adaptation", "original")
    np.testing.assert_allclose(found["over_source"][0], found["mean"] - source["mean"], atol=1e-12)
    np.testing.assert_allclose(
        cell(result, "Tent-COME", "clipped")["over_original"][0],
        cell(result, "Tent-COME", "clipped")["mean"]
        - cell(result, "Tent-COME", "original")["mean"],
        atol=1e-12,
    )
    text = (root / "tables.md").read_text()
    assert (
        text.count("## ") == 7 and f"{100 * found['mean']:.1f} ± {100 * found['std']:.1f}" in text
    )
    for name in (
        "by_epsilon.png",
        "stream_original.png",
        "gain_clipped.png",
        "stream_epsilon_5.png",
    ):
        assert (root / name).stat().st_size > 10_000


def test_without_adaptation_the_source_model_predicts(finished, task):
    _, result, _ = finished
    apply_fn = jax.jit(task.apply_fn)
    for name in ("gaussian_noise", "contrast"):
        right = []
        for seed in (0, 1):
            images = task.stream(seed).domains[name].gather(np.arange(32))
            right.append(np.asarray(apply_fn(task.source(0).params, images["image"])).argmax(-1))
            right[-1] = right[-1] == images["label"]
        assert cell(result, "no adaptation", "original")["per_corruption"][name] == np.mean(right)


def test_both_epsilons_are_exact_and_in_the_ledger(finished):
    root, result, _ = finished
    found = cell(result, "Tent-COME", "epsilon 5")
    sigma = found["noise_multiplier"]
    assert found["visits"] == 2  # every photograph comes under two corruptions
    assert gdp_delta(found["epsilon_sample"], 2 / sigma) == pytest.approx(1e-6, rel=0.02)
    assert gdp_delta(found["epsilon_unit"], 2 * math.sqrt(2) / sigma) == pytest.approx(
        1e-6, rel=0.02
    )
    assert found["epsilon_sample"] <= 5 < found["epsilon_unit"]
    with Ledger(root / "ledger.sqlite") as ledger:
        assert ledger.epsilon("Tent-COME, epsilon 5, stream 0") == pytest.approx(
            found["epsilon_unit"], rel=1e-3
        )
        for setting in ("original", "clipped"):
            assert ledger.epsilon(f"Tent-COME, {setting}, stream 1") == math.inf


def test_a_restored_ledger_is_charged_for_what_it_lacks(finished, tmp_path):
    root = shutil.copytree(finished[0], tmp_path / "run")
    settling.check(adapt.STUDY, tiny.adapt(), root, "ledger.sqlite")


def test_hyper_parameters_come_from_the_held_out_corruptions_only(finished, task):
    root, result, _ = finished
    tried = row(root, "tuning", "Tent-COME", "original", "0")["tried"]
    assert [candidate["learning_rate"] for candidate in tried] == [1e-3, 10.0]
    best = max(tried, key=lambda candidate: candidate["accuracy"])
    assert cell(result, "Tent-COME", "original")["learning_rate"] == best["learning_rate"]
    assert tuple(task.tuning) == ("speckle_noise", "gaussian_blur")
    clean = data.bundled("digits").split([0.6, 0.4], seed=0)[1].gather(np.arange(128))["label"]
    seen = [*(task.stream(seed).domains["contrast"] for seed in (0, 1)), *task.tuning.values()]
    # other photographs for each stream and tuning
    parts = [
        clean[:32],
        clean[32:64],
        clean[64:128],
        clean[64:128],
    ]
    for found, expected in zip(seen, parts, strict=True):
        np.testing.assert_array_equal(found.gather(np.arange(len(found)))["label"], expected)


def test_a_crash_in_the_middle_of_a_run_is_charged_once(finished, tmp_path, monkeypatch):
    root, result, _ = finished
    shutil.copy(root / "source.safetensors", tmp_path / "source.safetensors")
    shutil.copytree(root / "cells" / "tuning", tmp_path / "cells" / "tuning")
    step, calls = Adapter.step, itertools.count()

    def dies(adapter, *args, **kwargs):
        found = step(adapter, *args, **kwargs)
        if next(calls) in crashes:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Adapter, "step", dies)
    batches = 64 // tiny.adapt().protocol.batch_size
    # in a run without noise, and twice in one with noise
    crashes = {
        0,
        2 * batches + 2,
        2 * batches + 4,
    }
    study = tiny.opened_once(adapt.STUDY)
    for _ in crashes:
        with pytest.raises(KeyboardInterrupt):
            frame.run(study, tiny.adapt(), tmp_path)
        assert len(list(tmp_path.glob("cells/runs/**/scratch/secret_seed"))) == 1
    again = frame.run(study, tiny.adapt(), tmp_path)
    assert not list(tmp_path.rglob("scratch"))
    assert cell(again, "Tent-COME", "clipped") == cell(result, "Tent-COME", "clipped")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for seed in (0, 1):
            found = ledger.epsilon(f"Tent-COME, epsilon 5, stream {seed}")
            assert found == pytest.approx(
                cell(again, "Tent-COME", "epsilon 5")["epsilon_unit"], rel=1e-3
            )


ABLATIONS = {
    "methods": ("EATA",),
    "fisher_images": 64,
    "clipping": ("image", "batch"),
    "privacy.filters": ("remove", "keep"),
    "privacy.exact": False,
    "data.images": 64,
    "protocol.lengths": (32,),
    "tuning.learning_rates": (1e-2,),
    "tuning.clipped_steps": (1e-2,),
}


def test_ablations_and_shorter_streams(finished, tmp_path):
    shutil.copy(finished[0] / "source.safetensors", tmp_path / "source.safetensors")
    result = frame.run(tiny.undrawn(adapt.STUDY), tiny.adapt(**ABLATIONS), tmp_path)
    settings_of = {"original", "clipped", "clipped per batch"}
    private = {"epsilon 5", "epsilon 5, filters kept"}
    assert {c["setting"] for c in result["cells"]} == settings_of | private
    # Each ablation is compared with the paper's form of it, stream by stream.
    for other, usual in (
        ("clipped per batch", "clipped"),
        ("epsilon 5, filters kept", "epsilon 5"),
    ):
        gaps = [
            row(tmp_path, "runs", "EATA", frame.file_name(other), seed)["mean"]
            - row(tmp_path, "runs", "EATA", frame.file_name(usual), seed)["mean"]
            for seed in ("0", "1")
        ]
        mean, error = cell(result, "EATA", other)["over_usual"]
        np.testing.assert_allclose(mean, np.mean(gaps), atol=1e-12)
        np.testing.assert_allclose(error, np.std(gaps, ddof=1) / math.sqrt(2), atol=1e-12)
        assert "over_usual" not in cell(result, "EATA", usual)
    # A shorter stream has the first photographs of each domain, and an account of its own.
    (shorter,) = result["shorter"]
    assert shorter["images"] == 32
    assert {c["setting"] for c in shorter["cells"]} == {"original", "epsilon 5"}
    task = adapt.STUDY.open(tiny.adapt(**ABLATIONS), tmp_path)
    apply_fn, right = jax.jit(task.apply_fn), []
    for seed in (0, 1):
        images = task.stream(seed).domains["contrast"].gather(np.arange(32))
        logits = np.asarray(apply_fn(task.source(0).params, images["image"]))
        right.append(logits.argmax(-1) == images["label"])
    source = cell(shorter, "no adaptation", "original")
    assert source["per_corruption"]["contrast"] == np.mean(right)
    assert source["per_corruption"] != cell(result, "no adaptation", "original")["per_corruption"]
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        whole = ledger.epsilon("EATA, epsilon 5, stream 0")
        assert ledger.epsilon("EATA, epsilon 5, stream 0, first 32") == pytest.approx(whole)
        assert ledger.epsilon("EATA, clipped per batch, stream 0") == math.inf
    text = (tmp_path / "tables.md").read_text()
    assert "32 photographs" in text and "Difference of kept filters to removed ones" in text
    removed, kept = adapt._descriptions(tiny.adapt(**ABLATIONS), task)
    filters = "Keeps images with entropy H < E0: "
    assert f"{filters}removed" in removed and f"{filters}absorbed" in kept
    rows = adapt_results.by_length(result)
    assert [r["images"] for r in rows if r["setting"] == "epsilon 5"] == [32, 64]
    adapt_figures.draw_lengths(rows[:2], SimpleNamespace(root=tmp_path))
    assert (tmp_path / "by_length_epsilon_5.png").stat().st_size > 10_000


def test_filters_are_kept_where_there_are_any():
    config = usps_shift.get_config("ablations")
    pairs = adapt_settings.compared(config)
    kept = [method for method, setting in pairs if setting == "epsilon 20, filters kept"]
    assert kept == ["EATA", "DeYO"]
    assert ("Tent", "clipped per batch") in pairs
    assert adapt_settings.compared(config, "first 64") == [
        (method, setting) for method in config.methods for setting in ("original", "epsilon 20")
    ]


def test_the_grid_of_imagenet_is_the_paper_s():
    config = imagenet_r.get_config("convnext")
    rates = [1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1, 5e-1, 1.0]
    tried = adapt._candidates("image", config.tuning)
    assert {(c["learning_rate"], c["clip_norm"]) for c in tried} == {
        *itertools.product(rates, (1.0, 5.0, 10.0, 15.0))
    }
    assert [c["learning_rate"] for c in adapt._candidates("", config.tuning)] == rates
    # The small networks vary the product of rate and clip norm instead.
    usps = usps_shift.get_config().tuning
    steps = [c["learning_rate"] * c["clip_norm"] for c in adapt._candidates("batch", usps)]
    assert steps == pytest.approx(usps.clipped_steps)
    assert {c["clip_norm"] for c in adapt._candidates("batch", usps)} == {0.1}


def test_the_private_form_of_each_method_is_described(finished):
    text = (finished[0] / "methods.txt").read_text()
    assert "Tent-COME: private Tent" in text and "COME's entropy of the opinion" in text
    assert "exact: in integers on a grid" in text  # by config.privacy.exact


def test_given_hyper_parameters_are_not_tuned():
    config = tiny.adapt()
    config.hyper_parameters = {"Tent": {"clipped": {"learning_rate": 0.5, "clip_norm": 2.0}}}
    found = adapt.STUDY.run(
        adapt.Cell("tuning", "Tent", "clipped", 0), SimpleNamespace(config=config, shared=None)
    )
    assert found == {"chosen": {"learning_rate": 0.5, "clip_norm": 2.0}, "tried": []}


@pytest.mark.parametrize(
    "config",
    [
        cifar10.get_config(),
        cifar10_batch_one.get_config("8"),
        imagenet_c.get_config(),
        imagenet_c.get_config("episodic"),
        imagenet_c.get_config("convnext"),
        imagenet_c.get_config("convnext_episodic"),
        imagenet_r.get_config(),
        imagenet_r.get_config("convnext"),
        usps_shift.get_config(),
        usps_shift.get_config("episodic"),
        usps_shift.get_config("ablations"),
        cifar10.get_config("group_norm_episodic_filters"),
    ],
    ids=[
        "cifar10",
        "batch_one",
        "imagenet_c",
        "episodic",
        "convnext",
        "convnext_episodic",
        "imagenet_r",
        "imagenet_r_convnext",
        "usps",
        "usps_episodic",
        "usps_ablations",
        "cifar10_filters",
    ],
)
def test_configs_name_known_corruptions_methods_and_settings(config):
    others, strengths = config.data.get("others", {}), config.data.get("strengths", {})
    assert set(config.data.corruptions) <= {*data.CORRUPTIONS, "clean", *others, *strengths}
    assert set(strengths) <= set(STRENGTHS) and not {*config.tuning.corruptions} & {
        *config.data.corruptions
    }
    assert strengths or set(config.tuning.corruptions) == set(data.HELD_OUT_CORRUPTIONS)
    for given in config.hyper_parameters.values():
        # What is not given is chosen, such as the rates of ablations.
        missing = set(adapt_settings.settings(config)) - set(given)
        assert missing <= {"epsilon 20, filters kept", "clipped per batch"} and len(given) > 1
        assert set(given) <= set(adapt_settings.settings(config))
        assert all(choice.learning_rate > 0 for choice in given.values())
    json.loads(config.to_json())
    assert list(adapt.STUDY.cells(config))
    settings.check_numbers(config)


def test_runs_cross_streams_with_source_models(monkeypatch):
    config = usps_shift.get_config()
    rng = np.random.default_rng(0)

    def digits(count):
        image = rng.integers(0, 256, (count, 16, 16, 1)).astype(np.uint8)
        return data.from_arrays(
            image=image, label=np.arange(count) % 10, num_classes=10, name="usps"
        )

    found = {"public": digits(64), "test": digits(70), "tuning": digits(66)}
    monkeypatch.setattr(adapt.data, "parts", lambda *_, **__: found)
    config.data.images, config.tuning.images = 70, 66
    task = adapt.STUDY.open(config, None)
    streams = [task.stream(seed) for seed in range(6)]
    names = [tuple(stream.domains) for stream in streams]
    assert names[0] == names[2] != names[3] == names[5], (
        "seeds 0 to 2 share a stream, with three source models"
    )
    assert {*names[0]} == {*names[3]} == {*config.data.corruptions}
    batches = list(streams[0])
    visits = [unit for batch in batches for unit in batch.units if str(unit).startswith("digits")]
    assert len(visits) == len(set(visits)) == 64, (
        "scikit-learn's digits are photographs of their own"
    )
    labels = found["tuning"].gather(np.arange(66))["label"]
    assert all(
        (domain.gather(np.arange(66))["label"] == labels).all() for domain in task.tuning.values()
    )


class Photographs:
    """A column of images that are made when they are read."""

    shape, dtype = (384, 64, 64, 3), np.dtype(np.uint8)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        return np.zeros((len(rows), *self.shape[1:]), np.uint8)


def peak_of_streams(config):
    """Returns the largest number of bytes alive while two streams are opened and read, and the
    order of the photographs in each."""
    tracemalloc.start()
    try:
        task = adapt.STUDY.open(config, None)
        orders = [[batch.units for batch in task.stream(seed)] for seed in range(2)]
        return tracemalloc.get_traced_memory()[1], orders
    finally:
        tracemalloc.stop()


def test_streams_at_the_size_of_the_paper_keep_one_batch_in_memory(monkeypatch):
    """The twin keeps all images in memory, as config.data.in_memory=True does."""
    read = []

    def published(name, corruption, severity, *, data_dir, in_memory):
        read.append(in_memory)
        columns = {"image": Photographs(), "label": np.zeros(384, np.int32)}
        return data.Examples(columns, num_classes=1000, name=corruption)

    monkeypatch.setattr(shifts, "corrupted_tfds", published)
    monkeypatch.setattr(adapt.data, "parts", lambda *_, **__: {"public": None})
    config = imagenet_c.get_config()
    config.data.images, config.protocol.batch_size = 384, 8
    config.data.corruptions = config.data.corruptions[:3]
    of_one = np.prod(Photographs.shape)  # bytes of a corruption
    peak, (first, second) = peak_of_streams(config)
    assert peak < of_one and read == [False] * 3
    assert sorted(first[0]) != sorted(second[0]), "each stream shuffles the photographs anew"
    one_domain = [unit for batch in first[:48] for unit in batch]
    assert sorted(one_domain) == list(range(384)), "both have the same photographs"
    config.data.in_memory = True
    assert peak_of_streams(config)[0] > 3 * of_one


def test_the_error_counts_streams_and_source_models():
    values = {0: 1.0, 1: 3.0, 2: 2.0, 3: 4.0}  # sources 0 and 1 of streams 0 and 1
    mean, error = adapt_results.crossed(values, 2)
    assert mean == 2.5 and error == pytest.approx(math.sqrt(1.0**2 + 0.5**2))
    assert adapt_results.crossed({0: 1.0, 1: 3.0}, 1) == (2.0, 1.0), (
        "one source model: the standard error over streams"
    )
    assert math.isnan(adapt_results.crossed({0: 1.0}, 1)[1]) and adapt_results.crossed(
        {0: 1.0, 1: 1.0}, 1
    ) == (
        1.0,
        0.0,
    )


@pytest.mark.parametrize("name", STRENGTHS)
def test_shifts_keep_labels_and_change_images_alike_each_time(name):
    source = data.bundled("digits").take(np.arange(8))
    shift = Shift(name, strength=0.7)
    first, again = (shifted(source, shift).gather(np.arange(8)) for _ in range(2))
    np.testing.assert_array_equal(first["image"], again["image"])
    clean = source.gather(np.arange(8))
    np.testing.assert_array_equal(first["label"], clean["label"])
    assert (
        first["image"].shape == clean["image"].shape
        and np.abs(first["image"] - clean["image"]).max() > 0.05
    )


def test_an_unknown_shift_is_refused():
    with pytest.raises(ValueError, match="name must be one of noise, impulse"):
        shifted(data.bundled("digits").take(np.arange(8)), Shift("fog", strength=1.0))
    with pytest.raises(ValueError, match=r"config\.data\.strengths must name noise, impulse"):
        adapt.data.shift(ConfigDict({"strengths": {"fog": 1.0}}), "fog")


def test_correlated_noise_is_compared_with_independent_noise_at_its_price(finished, tmp_path):
    shutil.copy(finished[0] / "source.safetensors", tmp_path / "source.safetensors")
    changes = {
        "methods": ("Tent",),
        "clipping": (),
        "privacy.noise": ("independent", "banded"),
        "privacy.exact": False,
        "protocol.batch_size": 8,
    }
    config = tiny.adapt(**changes)
    assert adapt_settings.period(config) == 4
    ways = adapt_settings.settings(config)
    assert list(ways) == ["original", "epsilon 5", "epsilon 5, banded noise"]
    assert adapt_settings.usual(ways, "epsilon 5, banded noise") == "epsilon 5"
    assert not adapt_settings.usual(ways, "epsilon 5")
    # Shorter streams compare the paper's private form only.
    shorter = adapt_settings.compared(config, "first 8")
    assert shorter == [("Tent", "original"), ("Tent", "epsilon 5")]
    task = adapt.STUDY.open(config, tmp_path)
    rates = {"learning_rate": 1e-3, "clip_norm": 1.0}
    banded = task.adapter(adapt.Cell("runs", "Tent", "epsilon 5, banded noise", 0), rates).method
    assert banded.noise.steps == 4 and banded.noise.buffers > 0
    costs = [item.event for item in adapt.STUDY.plan(config, lambda: task)]
    # A photograph is in two domains, which are two periods of four updates.
    visit = GaussianDpEvent(task.noise["epsilon 5"])
    assert costs[1] == costs[2] == SelfComposedDpEvent(visit, 2)
    assert banded.event.noise_multiplier == pytest.approx(task.noise["epsilon 5"])
    texts = " ".join(adapt._descriptions(config, task))
    assert texts.count("correlated over periods of 4 updates") == 1
