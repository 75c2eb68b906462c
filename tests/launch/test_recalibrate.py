"""The recalibration experiment: what it keeps, what its tables hold, what it refuses."""

import json
import math
import sys

import numpy as np
import pytest

from configs.recalibration import cifar10, digits, imagenet
from jaxdp.privacy import Ledger, PureDpEvent
from jaxdp.privacy.events import composition
from jaxdp.recalibration import experiment
from jaxdp.recalibration.sweep import Order
from jaxdp.release import alone

pytestmark = pytest.mark.usefixtures("quick_compilation")


def small():
    config = digits.get_config()
    config.data.corruptions = ("clean", "contrast", "fog")
    config.model.options.hidden = (16,)
    config.train.steps = 20
    config.methods = ("Acc-T", "HB split", "one source", "none")
    config.method_options["Acc-T"].iterations = 2
    config.method_options["one source"].iterations = 2
    config.sweep.trials = 5
    config.sweep.sources = {"values": (4, 8), "samples": 5, "epsilon": 1.0}
    config.sweep.samples = {"values": (5, 10), "sources": 4, "epsilon": 1.0}
    config.sweep.epsilon = {"values": (0.5, 2.0), "sources": 4, "samples": 10}
    config.sweep.centre = {"sources": 4, "samples": 10, "epsilon": 2.0}
    config.figures.methods = ("Acc-T", "none")
    config.figures.reliability_shift = "fog"
    config.figures.reliability_methods = ("Acc-T", "HB split")
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("recalibrate")
    return root, experiment.run(small(), root)


def float64_scores(logits, labels):
    """ECE in 15 bins and Brier score of the largest softmax probability."""
    logits = logits.astype(np.float64)
    p = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
    right = logits.argmax(1) == labels
    cell = np.minimum(np.floor(p * 15), 14)
    gaps = [abs((right[cell == b] - p[cell == b]).sum()) for b in range(15)]
    return sum(gaps) / len(p), np.mean((right - p) ** 2)


def test_the_baseline_is_judged_on_what_each_trial_leaves_over(finished):
    root, result = finished
    plan = experiment._Plan.of(small())
    with np.load(root / "logits" / "fog.npz") as file:
        logits, labels = file["logits"], file["labels"]
    order = Order.draw(0, records=len(labels), trials=5, settings=plan.settings)
    for factor in ("sources", "samples", "epsilon"):
        found = result["cells"]["fog"]["none"][factor]
        for k, setting in enumerate(plan.parts[factor]):
            kept = [
                np.setdiff1d(np.arange(len(labels)), row[: setting.sources * setting.samples]) for row in order.rows
            ]
            assert {len(rest) for rest in kept} == {1078 - setting.sources * setting.samples}
            eces, briers = zip(*(float64_scores(logits[rest], labels[rest]) for rest in kept), strict=True)
            assert found["ece"][k] == pytest.approx(np.mean(eces), abs=1e-5)
            assert found["ece_error"][k] == pytest.approx(np.std(eces) / math.sqrt(5), abs=1e-5)
            assert found["brier"][k] == pytest.approx(np.mean(briers), abs=1e-5)
    assert result["accuracy"]["fog"] == pytest.approx(np.mean(logits.argmax(1) == labels))


def test_tables_hold_what_was_kept(finished):
    root, result = finished
    assert result == json.loads((root / "result.json").read_text())
    kept = {
        (shift, name): json.loads((root / "sweep" / shift / f"{name.replace(' ', '_')}.json").read_text())
        for shift in ("clean", "contrast", "fog")
        for name in ("Acc-T", "HB split", "one source", "none")
    }
    text = (root / "tables.md").read_text()
    tables = [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("|")]
        for part in text.split("## ")[1:]
    ]
    overall, centre, per_shift, no_privacy, costs = ({row[0]: row[1:] for row in table[2:]} for table in tables)
    for name in ("Acc-T", "HB split", "one source", "none"):
        shifted = [kept[shift, name] for shift in ("contrast", "fog")]  # the clean images do not count
        for table, factors in ((overall, ("sources", "samples", "epsilon")), (centre, ("centre",))):
            for column, (score, mean) in enumerate(
                [("ece", np.median), ("ece", np.mean), ("brier", np.median), ("brier", np.mean)]
            ):
                values = [value for cell in shifted for factor in factors for value in cell[factor][score]]
                assert table[name][column] == f"{mean(values):.4f}"
    assert overall.keys() == centre.keys() and len(overall["none"]) == 4
    for table, part in ((per_shift, "centre"), (no_privacy, "no privacy")):
        assert table["contrast"][0] == f"{result['accuracy']['contrast']:.4f}"
        assert table["contrast"][1:] == [
            f"{kept['contrast', name][part]['ece'][0]:.4f}" for name in ("Acc-T", "HB split", "one source", "none")
        ]
        assert list(table) == ["clean", "contrast", "fog"]
    worst = max(error for cell in kept.values() for part in cell.values() for error in part["ece_error"])
    assert f"means of 5 trials; the standard error of an ECE is at most {worst:.2g}." in text
    assert "binning with a single bin would win" in text and "Brier" in text
    # 3 releases of sensitivity 1 at epsilon 2 are Laplace noise of scale 1.5 from each of 4 sources; 1 release, 0.5.
    assert costs["Acc-T"][0] == "3" and float(costs["Acc-T"][1]) == pytest.approx(1.5 * math.sqrt(2 * 4), rel=0.01)
    assert costs["HB split"][0] == "1" and float(costs["HB split"][1]) == pytest.approx(
        0.5 * math.sqrt(2 * 4), rel=0.01
    )
    assert [costs[name][2] for name in costs] == ["2", "2", "inf", "0"]


def test_settings_are_not_mixed_up(finished):
    _, result = finished
    cell = result["cells"]["contrast"]["HB split"]
    assert cell["centre"] == {score: values[-1:] for score, values in cell["epsilon"].items()}
    assert len({cell["no privacy"]["ece"][0], *cell["epsilon"]["ece"]}) == 3
    for name in ("none", "one source"):  # no noise, whatever epsilon
        found = result["cells"]["contrast"][name]
        assert len({found["no privacy"]["ece"][0], *found["epsilon"]["ece"]}) == 1
    assert result["settings"] == {
        "sources": [[4, 5, 1.0], [8, 5, 1.0]],
        "samples": [[4, 5, 1.0], [4, 10, 1.0]],
        "epsilon": [[4, 10, 0.5], [4, 10, 2.0]],
        "centre": [[4, 10, 2.0]],
    }
    assert cell["sources"]["ece"][0] == cell["samples"]["ece"][0]  # one setting of two factors


def test_the_sources_of_the_diagrams_pay_for_every_method(finished):
    root, result = finished
    with Ledger(root / "ledger.sqlite") as ledger:
        assert len(ledger.report(delta=0.0)["datasets"]) == 4
        for i in range(4):
            (counts,) = map(composition, ledger.events(f"source {i}").values())
            assert counts == {PureDpEvent(2.0): 2}
    diagrams = result["example"]["diagrams"]
    assert list(diagrams) == ["before", "Acc-T", "HB split"]
    assert [sum(diagram["counts"]) for diagram in diagrams.values()] == [1078 - 40] * 3
    assert list(result["example"]["temperatures"]) == ["before", "Acc-T"]
    assert 0.5 < result["example"]["temperatures"]["Acc-T"] < 3


def test_figures_are_drawn(finished):
    root, _ = finished
    names = {path.name for path in (root / "figures").iterdir()}
    assert names == {"clean.png", "contrast.png", "fog.png", "all_shifts.png", "reliability.png"}
    assert all((root / "figures" / name).stat().st_size > 10_000 for name in names)


def test_an_interrupted_experiment_goes_on_where_it_was(finished, tmp_path, monkeypatch, capsys):
    _, result = finished
    simulate, calls = experiment.simulate, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return simulate(*args, **kwargs)

    monkeypatch.setattr(experiment, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(small(), tmp_path)
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "ledger.sqlite").exists()
    with alone(tmp_path), pytest.raises(ValueError, match="another process is running"):
        experiment.run(small(), tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix in (".npz", ".safetensors")}
    kept |= {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("*.json")}
    assert len(kept) == 3 + 1 + 4
    capsys.readouterr()
    again = experiment.run(small(), tmp_path)
    assert "nothing to do" not in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert len(calls) == 7  # contrast and fog once more, nothing of the clean images
    assert again["cells"] == result["cells"] and again["accuracy"] == result["accuracy"]
    assert experiment.run(small(), tmp_path) == again
    assert "nothing to do" in capsys.readouterr().out and len(calls) == 7


@pytest.mark.parametrize("place", ["computed", "kept"])
def test_diagrams_that_were_interrupted_are_the_same_and_are_paid_once(finished, tmp_path, monkeypatch, place):
    """The first method was paid for, and its result was lost before it was kept, or after."""
    root, _ = finished
    plan = experiment._Plan.of(small())
    order = Order.draw(0, records=1078, trials=5, settings=plan.settings)
    (tmp_path / "logits").symlink_to(root / "logits")
    module = sys.modules["jaxdp.recalibration.recalibrate"]
    owner, name = (module, "converse") if place == "computed" else (experiment, "recalibrate")
    work, heard = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        heard.append(work(*args, **kwargs))
        if len(heard) == 1:
            raise KeyboardInterrupt
        return heard[-1]

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiment._example(plan, order, tmp_path)
    assert list(tmp_path.rglob("secret_seed")) != [] or place == "kept"
    example = experiment._example(plan, order, tmp_path)
    first, second = (getattr(found, "parameters", found) for found in heard[:2])
    assert first.temperature == second.temperature == pytest.approx(example["temperatures"]["Acc-T"])
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for i in range(4):
            (counts,) = map(composition, ledger.events(f"source {i}").values())
            assert counts == {PureDpEvent(2.0): 2}  # two methods
    assert not list(tmp_path.rglob("secret_seed"))


def test_another_config_in_the_same_workdir_is_refused(finished):
    config = small()
    config.sweep.trials = 6
    with pytest.raises(ValueError, match=r"another sweep\.trials; use a new workdir"):
        experiment.run(config, finished[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("public_benchmark", False, "config.public_benchmark must be True"),
        ("methods", ("Acc-T", "Acc-U"), r"config.method_options\['Acc-U'\] must have a kind, one of none, acc_t"),
        ("method_options.Acc-T.kind", "acc", "must have a kind, one of none, acc_t, .*, got 'acc'"),
        ("method_options.Acc-T.bins", 3, r"config.method_options\['Acc-T'\] has bins; acc_t has bracket, iterations"),
        ("method_options.Acc-T.bracket", (3.0, 0.5), r"bracket must be \(low, high\) with 0 < low < high"),
        ("method_options.none.bins", 3, "must have a kind"),
        ("data.corruptions", ("clean", "rain"), "config.data.corruptions has 'rain'; there are clean, gaussian_noise"),
        ("figures.methods", ("Acc-T", "ECE-T"), "config.figures.methods has 'ECE-T'; there are Acc-T, HB split"),
        ("figures.reliability_shift", "snow", "config.figures.reliability_shift has 'snow'"),
        ("figures.reliability_methods", ("none",), "config.figures.reliability_methods has 'none'; there are Acc-T"),
        ("figures.reliability_methods", (), "config.figures.reliability_methods must be one to three, got 0"),
        ("sweep.trials", 0, "config.sweep.trials must be an integer of at least 1, got 0"),
        ("sweep.adjacency", "remove", "adjacency must be one of .*, got 'remove'"),
        ("sweep.samples.values", (), "config.sweep.samples must have values"),
        (
            "sweep.samples.samples",
            3,
            "config.sweep.samples must have values, the samples to try, and fix the other two",
        ),
        ("sweep.sources.values", (0, 4), "config.sweep.sources.values must be an integer of at least 1"),
        ("sweep.epsilon.values", (math.inf,), "config.sweep.epsilon.values must be positive"),
        ("sweep.epsilon.values", (1e-12,), "epsilon=1e-12 needs more noise than exact sums hold"),
        ("sweep.centre.samples", 500, "sources x samples must be below 1078, the number of records, got 2000"),
        ("model.preprocessing", None, "config.model.preprocessing must be given"),
    ],
)
def test_mistakes_in_a_config_are_named_before_anything_is_written(tmp_path, field, value, message):
    config = small()
    *parents, last = field.split(".")
    part = config
    for name in parents:
        part = part[name]
    with config.unlocked(), part.unlocked(), part.ignore_type():
        part[last] = value
    with pytest.raises(ValueError, match=message):
        experiment.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        cifar10.get_config(),
        cifar10.get_config("checkpoint"),
        digits.get_config(),
        imagenet.get_config(),
        imagenet.get_config("convnext"),
    ],
    ids=["cifar10", "checkpoint", "digits", "imagenet", "convnext"],
)
def test_configs_are_consistent_and_have_the_fields_of_the_first(config):
    plan = experiment._Plan.of(config)
    assert {"Acc-T", "NLL-T", "ECE-T", "HB published", "none", "one source"} <= set(plan.methods)
    assert plan.centre.epsilon == 1
    assert set(config) == set(cifar10.get_config())
    json.loads(config.to_json())


def test_the_paper_s_factors():
    cifar = experiment._Plan.of(cifar10.get_config()).parts
    assert cifar["sources"][-1] == (250, 10, 1.0) and cifar["samples"][-1] == (50, 50, 1.0)
    assert cifar["epsilon"][0] == (50, 30, 0.2) and cifar["centre"] == [(50, 30, 1.0)]
    large = experiment._Plan.of(imagenet.get_config()).parts
    assert large["sources"][-1] == (2000, 10, 1.0) and large["samples"][-1] == (100, 100, 1.0)
    assert large["epsilon"][0] == (100, 50, 0.2)


@pytest.mark.parametrize(("module", "variant"), [(cifar10, "small"), (imagenet, "resnet")])
def test_an_unknown_variant_is_refused(module, variant):
    with pytest.raises(ValueError, match=f"must be '.*' or '.*', got '{variant}'"):
        module.get_config(variant)
