"""A trainer finds the noise for a target by itself, and terms that promise little give a
warning."""

import warnings

import optax
import pytest

from jaxdp import data, finetune
from jaxdp.privacy import Ledger, PrivacyWarning, epsilon
from tests.finetune import test_methods as methods

SAMPLER = data.PoissonSampler(400, 0.25)
TARGET = {"epsilon": 2.0, "delta": 1e-5, "steps": 3}


def make(name="dp_sgd", **options):
    method, own = methods.METHODS[name]
    own = {key: value for key, value in own.items() if key != "count_noise"}
    given = {"sampler": SAMPLER, "clip_norm": 1.0, "physical_batch_size": 100, **own, **options}
    return method(methods.loss, optax.sgd(0.1), **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_sgd", "adp_alloc", "adp_clip", "gep, basis kept"])
def test_the_noise_of_a_target_costs_at_most_the_target_and_hardly_less(name):
    event = make(name, **TARGET).event(0, 3)
    assert 1.99 < epsilon(event, delta=1e-5) <= 2.0
    # steps count
    assert epsilon(make(name, **{**TARGET, "steps": 4}).event(0, 3), delta=1e-5) < 1.99


@pytest.mark.slow
def test_the_relation_and_the_accountant_of_the_target_are_used():
    replaced = make(**TARGET, adjacency="replace_one").event(0, 3)
    assert 1.99 < epsilon(replaced, delta=1e-5, adjacency="replace_one") <= 2.0
    assert epsilon(make(**TARGET, accountant="rdp").event(0, 3), delta=1e-5) < 1.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            r"noise_multiplier must be given, or epsilon, delta and steps .* "
            r"Missing: \['epsilon', 'delta', 'steps'\]",
        ),
        ({"epsilon": 2.0, "delta": 1e-5}, r"Missing: \['steps'\]"),
        (
            {**TARGET, "noise_multiplier": 1.0},
            "must be left out, or epsilon and delta and steps, got 1.0",
        ),
        (
            {"noise_multiplier": 1.0, "adjacency": "replace_one"},
            "must be left out, or adjacency, got",
        ),
        ({**TARGET, "epsilon": -1.0}, "epsilon must be finite and > 0, got -1.0"),
        ({**TARGET, "steps": 0}, "steps must be an integer of at least 1, got 0"),
    ],
)
def test_noise_and_target_exclude_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def texts(caught):
    return [str(warning.message) for warning in caught]


def test_terms_that_promise_little_give_a_warning():
    with pytest.warns(PrivacyWarning) as caught:
        make(**{**TARGET, "epsilon": 12.0, "delta": 0.01})
    first, second = texts(caught)
    assert (
        "epsilon 12 is above 10" in first
        and "delta 0.01 is at least 1 / records = 0.0025" in second
    )
    with (
        Ledger.in_memory() as ledger,
        pytest.warns(PrivacyWarning, match="epsilon 10.5 is above 10"),
    ):
        ledger.register("data", adjacency="add_remove", unit="example", epsilon=10.5, delta=1e-5)


def test_training_warns_of_a_batch_of_everything_and_of_a_large_delta():
    source = methods.source_of()
    with Ledger.in_memory() as ledger, pytest.warns(PrivacyWarning) as caught:
        ledger.register("data", adjacency="add_remove", unit="example")
        for q in (0.5, 1.0):
            trainer = make(noise_multiplier=1.0, sampler=data.PoissonSampler(len(source), q))
            account, delta = ledger.account("data"), 1e-5 if q < 1 else 0.1
            finetune.fit(
                trainer,
                methods.params_of(),
                source,
                steps=0,
                account=account,
                delta=delta,
                progress=False,
            )
    assert [text.split(" is ")[0] for text in texts(caught)] == [
        "delta 0.1",
        "sampling_probability",
    ]


def test_an_optimizer_that_adds_up_noisy_gradients_is_refused():
    """Each of four gradients has the noise of a batch, so their mean has four times that of one."""
    several = optax.MultiSteps(optax.sgd(0.1), 4)
    for optimizer in (several, several.gradient_transformation()):
        with pytest.raises(ValueError, match=r"optimizer must not be optax\.MultiSteps"):
            finetune.dp_sgd(
                methods.loss, optimizer, sampler=SAMPLER, clip_norm=1.0, noise_multiplier=1.0
            )


def fitted(optimizer, **options):
    """Returns what a ledger has spent on a run that its user got wrong, and the error."""
    source = methods.source_of()
    trainer = finetune.dp_sgd(
        methods.loss,
        optimizer,
        sampler=data.PoissonSampler(len(source), 0.5),
        clip_norm=1.0,
        noise_multiplier=1.0,
        physical_batch_size=100,
    )
    with Ledger.in_memory() as ledger:
        ledger.register("data", adjacency="add_remove", unit="example", delta=1e-5)
        options = {"account": ledger.account("data"), **options}
        with pytest.raises(TypeError) as error:
            finetune.fit(trainer, methods.params_of(), source, steps=1, progress=False, **options)
        return ledger.epsilon("data"), str(error.value)


@pytest.mark.parametrize("result", ["good", {"accuracy": "good"}, {"accuracy": [0.5, 0.6]}])
def test_an_evaluation_without_numbers_is_named_before_paid_steps_could_be_lost(result, tmp_path):
    """A workdir keeps the steps, so its evaluation comes after them."""
    spent, message = fitted(optax.sgd(0.1), evaluate=lambda params: result)
    assert "evaluate must return numbers by name" in message
    assert spent == 0 and "Nothing is charged yet" in message
    if result == "good":
        evaluate = {"evaluate": lambda params: result, "workdir": tmp_path / "run"}
        spent, message = fitted(optax.sgd(0.1), **evaluate)
        assert spent > 0 and "paid and kept. The same call goes on from them" in message


def test_an_evaluation_does_not_write_over_the_epsilon_of_the_ledger():
    """The report of the run reads epsilon from the rows, where that of `evaluate` was."""
    evaluate = lambda params: {"accuracy": 0.5, "epsilon": 0.0}  # noqa: E731
    spent, message = fitted(optax.sgd(0.1), evaluate=evaluate)
    assert "none named ['epsilon', 'seconds', 'step', 'time']" in message and spent == 0


@pytest.mark.parametrize("difference", [0, 1])
def test_training_warns_if_the_account_declares_another_number(difference):
    source = methods.source_of()
    trainer = make(noise_multiplier=1.0, sampler=data.PoissonSampler(len(source), 0.5))
    with Ledger.in_memory() as ledger, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ledger.register(
            "data", adjacency="add_remove", unit="example", records=len(source) + difference
        )
        finetune.fit(
            trainer,
            methods.params_of(),
            source,
            steps=0,
            account=ledger.account("data"),
            delta=1e-5,
            progress=False,
        )
    expected = [f"account 'data' declares {len(source) + 1} examples"] * difference
    assert [text.split(", ")[0] for text in texts(caught)] == expected


@pytest.mark.slow
def test_a_warning_comes_once_in_a_process(run_in_subprocess):
    code = """
import contextlib, io, warnings
warnings.resetwarnings()
from jaxdp.privacy import Ledger
said = io.StringIO()
with contextlib.redirect_stderr(said), Ledger.in_memory() as ledger:
    for name in "ab":
        ledger.register(name, adjacency="add_remove", unit="example", epsilon=1.0, delta=0.1, records=50)
assert said.getvalue().count("delta 0.1 is at least") == 1, said.getvalue()
"""  # noqa: E501
    run_in_subprocess(code)
