"""What --dry_run tells: it agrees with what a run then charges, and writes nothing."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from ml_collections import ConfigDict

import launch.lifecycle
from jaxdp import compilers
from jaxdp.compilers import process, targets
from jaxdp.files import write_durably
from jaxdp.privacy import GaussianDpEvent, SelfComposedDpEvent
from jaxdp.privacy.events import composition, to_json
from launch import adapt, dpadapter, finetune, frame, parties, plans, predict, recalibrate, trainers
from tests.launch import tiny
from tests.launch.test_frame import STUDIES


def parts(text):
    """Returns the rows of each part by its title."""
    found = {}
    for block in text.split("\n\n"):
        title, *rows = block.strip().splitlines()
        found[title] = dict(
            re.findall(r"^  (\S+(?: \S+)*?)  +(.*)$", "\n".join(rows), flags=re.MULTILINE)
        )
    return found


def told(capsys, study, config, workdir=None):
    frame.run(study, config, workdir, dry_run=True)
    return parts(capsys.readouterr().out)


def test_every_study_has_a_plan():
    assert [name for name, (study, _) in STUDIES.items() if study.plan is frame.Study.plan] == [
        "split"
    ]


@pytest.mark.slow
def test_the_plan_of_fine_tuning_is_what_its_run_charges(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny.finetune()
    rows = told(capsys, finetune.STUDY, config, tmp_path / "run")["private"]
    assert list(tmp_path.iterdir()) == []
    assert {"memory (estimate)", "compilation", "run time (estimate)"} <= rows.keys()
    result = frame.run(finetune.STUDY, config, tmp_path / "run")
    assert rows["epsilon"] == f"{result['epsilon']:.6g} at delta {result['delta']:g}, add_remove"
    assert rows["noise multiplier"] == f"{result['noise_multiplier']:.6g}"
    assert rows["ledger"].startswith("new: epsilon 0 is spent")
    capsys.readouterr()
    # Everything is paid for, so the rest of the run costs nothing.
    rest = told(capsys, finetune.STUDY, config, tmp_path / "run")["private"]["ledger"]
    spent = f"{result['epsilon']:.4g}"
    assert f"ledger.sqlite: epsilon {spent} is spent at delta 1e-05, {spent} afterwards" in rest


@pytest.mark.slow
def test_the_field_of_truncated_batches_reaches_the_event(tmp_path):
    config = tiny.finetune(private__truncated_batch_size=80, private__steps=3)
    trainer = finetune.STUDY.open(config, tmp_path).trainer
    [event] = composition(trainer.event(0, 3))
    assert isinstance(event, TruncatedSubsampledGaussianDpEvent)
    assert (event.dataset_size, event.sampling_probability, event.truncated_batch_size) == (
        1168,
        64 / 1168,
        80,
    )
    # Without its own event the noise would be that of Poisson batches, about two thirds of it.
    assert event.noise_multiplier == trainer.privatizer.event_at(0).noise_multiplier > 0.9


def test_a_plan_refuses_what_a_run_refuses(capsys):
    config = tiny.finetune()
    config.private.batch_size = 5000
    with pytest.raises(ValueError, match=r"config\.private\.batch_size must be at most 1168"):
        told(capsys, finetune.STUDY, config)
    for field, value, message in [
        ("prediction.queries", 5000, r"config\.prediction\.queries=5000 must lie in \[1, "),
        ("data.name", "letters", r"config\.data\.name must be one of 'digits', .* got 'letters'"),
        ("data.group", "patient", r"config\.data\.group must be '' for this study"),
    ]:
        config = tiny.predict()
        with config.unlocked():
            config.update_from_flattened_dict({field: value})
        with pytest.raises(ValueError, match=message):
            told(capsys, predict.STUDY, config)


def test_charges_without_training(capsys):
    config = tiny.predict()
    found = told(capsys, predict.STUDY, config)
    total = float(found["answers"]["epsilon"].split()[0])
    assert 0.99 * config.prediction.epsilon < total <= config.prediction.epsilon
    references = [rows for title, rows in found.items() if title.startswith("reference")]
    assert len(references) >= 4 and all("without a budget" in rows["ledger"] for rows in references)
    [(title, rows)] = [
        (t, r)
        for t, r in told(capsys, recalibrate.STUDY, tiny.recalibrate()).items()
        if "event" in r
    ]
    assert rows["event"] == "Pure(2) x 2" and title.endswith(", 4 times")


@pytest.mark.slow
def test_a_table_names_each_kind_of_cell_once(capsys):
    found = told(capsys, dpadapter.STUDY, tiny.dpadapter(methods=("DP-SGD",)))
    assert {"upstream standard, 2 times", "DP-SGD on digits, epsilon 2, 4 times"} <= {*found}


@pytest.mark.slow
def test_the_plan_of_a_lifecycle_tells_what_it_will_hold(tmp_path, capsys):
    config = tiny.lifecycle()
    launch.lifecycle.show_plan(config, tmp_path / "run")
    found = parts(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    rows = found["digits/private, by all stages that are not done"]
    assert "noise multiplier" in found["finetune"] and "run time (estimate)" in found["pretrain"]
    assert rows["event"].count("Gaussian") == 1 and rows["event"].count("Pure") == 1
    assert 4 < float(rows["epsilon"].split()[0]) < config.budgets.private.epsilon


def test_the_charges_of_a_client(capsys):
    terms = {"epsilon": 8.0, "delta": 1e-5, "num_classes": 10, "label_share": 0.5}
    config = ConfigDict(
        {**terms, "laplace_scale": 0.5, "query_laplace_scale": 0.5, "mode": "private"}
    )
    plans.show(parties.client_charges(config, queries=None), None)
    private = parts(capsys.readouterr().out)
    assert (
        "8 afterwards" in private["the upload, private"]["ledger"] and "the queries" not in private
    )
    config.mode = "published"
    plans.show(parties.client_charges(config, queries=None), None)
    published = parts(capsys.readouterr().out)
    assert (
        published["the upload, published"]["epsilon"].startswith("inf")
        and "the queries" in published
    )


def test_estimates_follow_the_number_of_calls_and_the_sizes(capsys):
    function = jax.jit(lambda x, y: x @ y)
    for calls, size in ((1.0, 20), (1e8, 1000)):
        shapes = np.zeros((size, size), np.float32), jax.ShapeDtypeStruct((size, size), np.float32)
        program = function, shapes, calls
        plans.show(
            [plans.Item("products", programs=lambda memory, program=program: [program], runs=3)],
            None,
        )
    once, often = map(parts, capsys.readouterr().out.split("Dry run:")[1:])
    assert "No ledger is charged." in once
    once, often = once["products, 3 times"], often["products, 3 times"]
    assert once["memory (estimate)"].startswith("0 MB") and once["run time (estimate)"].startswith(
        "1 s"
    )
    assert (
        often["memory (estimate)"].startswith("12 MB")
        and " h, from one step" in often["run time (estimate)"]
    )


def test_charges_that_were_made_already_are_left_out(tmp_path):
    step = GaussianDpEvent(5.0)
    run = {"data": SelfComposedDpEvent(step, 3), "other": step}
    assert composition(plans.outstanding(run, tmp_path)["data"]) == {step: 3}
    note = {"charges": [["data", to_json(SelfComposedDpEvent(step, 2))]], "step": 0, "token": "t"}
    write_durably(tmp_path / "charges.jsonl", f"{json.dumps(note)}\n".encode())
    left = plans.outstanding(run, tmp_path)
    assert composition(left["data"]) == {step: 1} and composition(left["other"]) == {step: 1}


# --- Accelerators that are not there ---


def estimated(name, *, total, memory=2**20, turns=3, kernels=0.0, bytes_=0.0, launched=0.0):
    details = {
        "total": total,
        "bytes": bytes_,
        "launched": launched,
        "loops": [{"turns": turns}],
        "compile_s": 4.0,
    }
    details["kernel_cycles"] = kernels
    seconds = total / (compilers.TARGETS[name].clock or 1.0)
    return compilers.Estimate(name, memory, seconds, details)


@pytest.fixture
def answers(monkeypatch):
    """Puts estimates in place of compilers. Returns the function that takes them by the argument of
    a program."""

    def answer(estimates):
        monkeypatch.setattr(targets, "COMPILERS", dict.fromkeys(("tpu", "cuda"), "jax"))
        monkeypatch.setattr(compilers, "estimate", lambda target, function, x: estimates[x])

    return answer


def item(calls, *, steps, runs=1, asked=None):
    """Returns a training whose programs have the argument i and are called `calls[i]` times."""

    def programs(memory):
        if asked is not None:
            asked.append(memory)
        return [(None, (i,), count) for i, count in enumerate(calls)]

    return plans.Item("private", programs=programs, steps=steps, runs=runs)


def test_a_plan_for_a_tpu_sums_the_cycles_of_all_calls(answers, capsys):
    answers(
        [
            estimated("v5e", total=3e6, memory=5 * 10**9),
            estimated("v5e", total=1e6, turns=None, kernels=5e5),
        ]
    )
    asked = []
    public = plans.Item("public", programs=lambda memory: [(None, (0,), 1)])
    plans.show([public, item((2e6, 1e6), steps=10**6, runs=3, asked=asked)], None, "v5e")
    text = capsys.readouterr().out
    rows = parts(text)["private, 3 times"]
    assert rows["memory of v5e"] == "fits: 5,000 MB of 16,911 MB of a chip"
    # Seven million cycles a step at 1.5 GHz.
    assert (
        rows["a step"]
        == "7 million cycles, 4.67 ms at 1.5 GHz: the compiler's estimate, not a time"
    )
    assert rows["of these"] == "0.5 million cycles of Pallas kernels, by an estimate of their own"
    assert rows["compilation"] == "8 s on this machine"
    assert rows["all steps"] == "1.3 hours (78 min) for 1,000,000 of them"
    assert rows["counted once"] == "loops whose turns depend on data: 1"
    assert (
        "All private steps on one v5e: 3.9 h. This is the compiler's estimate, not a time." in text
    )
    assert asked == [compilers.TARGETS["v5e"].memory] and "compiled" not in parts(text).get(
        "public", {}
    )


def test_a_plan_for_a_gpu_has_bytes_kernels_and_the_roofline(answers, capsys):
    answers(
        [
            estimated("h100", total=2e-3, bytes_=4e9, launched=50.0),
            estimated("h100", total=1e-3, bytes_=1e9),
        ]
    )
    plans.show([item((20.0, 10.0), steps=10)], None, "h100")
    rows = parts(capsys.readouterr().out)["private"]
    expected = (
        "9 GB in 100 kernels, 5 ms if each is at its roofline: the compiler's estimate, not a time"
    )
    assert rows["a step"] == expected and "counted once" not in rows


def test_a_program_that_does_not_fit_has_no_time(answers, capsys):
    refused = compilers.Estimate("v5e", 18 * 10**9, None, {})
    answers([refused, estimated("v5e", total=1.0)])
    plans.show([item((1.0, 1.0), steps=1)], None, "v5e")
    text = capsys.readouterr().out
    rows = parts(text)["private"]
    assert rows["memory of v5e"] == "does not fit: 18,000 MB of 16,911 MB of a chip"
    assert "a step" not in rows and "All private steps" not in text and "smaller" in rows["remedy"]


def test_a_target_needs_private_steps_and_a_known_name(answers):
    answers([])
    with pytest.raises(
        ValueError,
        match="--target compiles the private steps of a run, and this config has none",
    ):
        plans.show([plans.Item("public")], None, "v5e")
    with pytest.raises(ValueError, match="target must be one of v5e, v6e, v5p, h100, got 'v2'"):
        plans.show([item((1.0,), steps=1)], None, "v2")


@pytest.fixture
def sent(monkeypatch):
    """Programs and the numbers of their donated arguments, as they go to a compiler that is not
    there."""
    programs = []

    def answer(target, program, donated, seconds, assumed):
        programs.append((jax.export.deserialize(bytearray(program)), donated))
        sizes = {"argument": 1000, "output": 100, "temp": 10, "alias": 0}
        return {
            "total": 1.5e6,
            "kernel_cycles": 0.0,
            "memory": sizes,
            "loops": [],
            "compile_s": 1.0,
        }

    monkeypatch.setattr(targets, "COMPILERS", {"tpu": "jax"})
    monkeypatch.setattr(process, "_answer", answer)
    return programs


@pytest.mark.slow
def test_the_programs_of_a_training_are_those_that_go_to_a_compiler(capsys, sent):
    """They are written for the target, so nothing in them is for this machine."""
    config = tiny.finetune()
    frame.run(finetune.STUDY, config, None, dry_run=True, target="v5e")
    rows = parts(capsys.readouterr().out)["private"]
    assert rows["memory of v5e"].startswith("fits: 0 MB") and rows["epsilon"].endswith("add_remove")
    assert f"for {config.private.steps:,} of them" in rows["all steps"]
    assert all(program.platforms == ("tpu",) for program, _ in sent)
    # at least the noise
    assert any("tpu_custom_call" in program.mlir_module() for program, _ in sent)
    assert sum(donated != () for _, donated in sent) == 2  # the addition and the update


def planned(study, config, capsys):
    """Returns what a plan for a TPU says of each part that takes private steps."""
    frame.run(study, config, None, dry_run=True, target="v5e")
    told_parts = parts(capsys.readouterr().out)
    return {title: rows for title, rows in told_parts.items() if "a step" in rows}


@pytest.mark.slow
def test_an_adaptation_is_planned_by_one_step_of_each_method(capsys, sent):
    """The source model is not trained, and the importance of parameters is not computed for it."""
    config = tiny.adapt(methods=("Tent", "EATA"))
    (rows,) = planned(adapt.STUDY, config, capsys).values()
    assert len(sent) == 2 and all(program.platforms == ("tpu",) for program, _ in sent)
    batches = len(config.data.corruptions) * (config.data.images // config.protocol.batch_size)
    assert f"for {batches} of them" in rows["all steps"]
    # Both methods take as long, so their mean is one of them.
    assert rows["a step"].startswith("1.5 million cycles")
    image = (config.protocol.batch_size, 8, 8, 1)
    assert all(image in [x.shape for x in program.in_avals] for program, _ in sent)


@pytest.mark.slow
def test_a_prediction_is_planned_by_its_trainings(capsys, sent):
    """No feature is computed."""
    config = tiny.predict(certificate__max_distance=2)
    planned_parts = planned(predict.STUDY, config, capsys)
    single, ensemble, dp_sgd = planned_parts.values()
    assert "for 1 of them" in single["all steps"]
    assert f"for {config.ensemble.members} of them" in ensemble["all steps"]
    steps = config.dp_sgd.runs * config.dp_sgd.steps
    assert f"for {steps:,} of them" in dp_sgd["all steps"]
    records = [max(x.shape[0] for x in program.in_avals if x.ndim) for program, _ in sent[:2]]
    assert records[0] >= config.training.records > records[1]


@pytest.mark.slow
def test_a_recalibration_is_planned_by_the_rounds_of_a_source(capsys, sent):
    config = tiny.recalibrate()
    (rows,) = planned(recalibrate.STUDY, config, capsys).values()
    methods = recalibrate.methods(config)
    rounds = sum(methods[name].rounds for name in config.figures.reliability_methods)
    assert f"for {rounds} of them" in rows["all steps"]
    assert len(sent) == 2 * rounds  # a sum and its noise
    # A step is a round, with two programs of 1.5 million cycles.
    assert rows["a step"].startswith("3 million cycles")


def test_the_field_of_participation_reaches_the_sampler(monkeypatch):
    monkeypatch.setitem(trainers._PATTERNS, "balls_in_bins", tiny.few_draws)
    config = tiny.finetune()
    config.private.participation = {"kind": "cyclic_poisson", "separation": 6}
    examples = range(1216)
    sampler = trainers.sampler_of(config.private, examples, "private")
    assert sampler.cycle_length == 6 and sampler.expected_batch_size == 64
    config.private.noise = {"strategy": "banded", "bands": 1}
    assert trainers.sampler_of(config.private, examples, "private").cycle_length == 6
    noise = trainers._noise(config.private, sampler, "private")
    assert (noise.steps, noise.participations, noise.min_separation) == (6, 1, 6)
    config.private.noise.strategy = ""
    config.private.participation.kind = "b_min_sep"
    sampler = trainers.sampler_of(config.private, examples, "private")
    assert sampler.separation == 6 and sampler.expected_batch_size == pytest.approx(64)
    config.private.participation.kind = "balls_in_bins"
    with pytest.raises(ValueError, match="must be 19, the batches of an epoch, got 6"):
        trainers.sampler_of(config.private, examples, "private")
    config.private.participation.separation = 19
    sampler = trainers.sampler_of(config.private, examples, "private")
    assert (sampler.bins, sampler.steps) == (19, 6)
    config.private.truncated_batch_size = 120
    sampler = trainers.sampler_of(config.private, examples, "private")
    assert sampler.largest_batch == 120 and 0 < sampler.truncation_probability < 1e-7
    config.private.noise.strategy = "banded"  # one release, which truncation makes dearer
    truncated = trainers.sampler_of(config.private, examples, "private")
    assert truncated.largest_batch == 120
    event = trainers.event_of(config.private, truncated, "private")(1.0)
    whole = dataclasses.replace(sampler, truncated_batch_size=None)
    assert event != trainers.event_of(config.private, whole, "private")(1.0)
    del config.private.participation
    with pytest.raises(ValueError, match="must be 0 with correlated noise in a fixed order"):
        trainers.sampler_of(config.private, examples, "private")
    config.private.noise.strategy = ""
    config.private.participation = {"kind": "cyclic_poisson", "separation": 19}
    with pytest.raises(ValueError, match="must be 0 with cyclic Poisson sampling, got 120"):
        trainers.sampler_of(config.private, examples, "private")
    config.private.participation.kind = "shuffled"
    with pytest.raises(ValueError, match=r"private\.participation\.kind has 'shuffled'"):
        trainers.sampler_of(config.private, examples, "private")
