"""Events: one text per release, exact floats, and nothing unknown gets through."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdp.privacy import events as ev
from jaxdp.privacy.events import (
    ComposedDpEvent,
    CorrelatedSampleDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    OneOfDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RandomizedResponseDpEvent,
    RepeatAndSelectDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    UnprovenDpEvent,
    composition,
    describe,
    from_json,
    parse,
    to_json,
    unproven,
)

positive = st.floats(1e-3, 1e6)
probability = st.floats(0, 1)
gaussians = st.builds(GaussianDpEvent, positive)
leaves = st.one_of(
    gaussians,
    st.builds(LaplaceDpEvent, positive),
    st.builds(PureDpEvent, st.floats(0, 50)),
    st.builds(ev.ZCDpEvent, st.floats(0, 10), st.floats(0, 10)),
    st.builds(RandomizedResponseDpEvent, probability, st.integers(1, 20)),
    st.builds(ev.DiscreteLaplaceDpEvent, positive, st.integers(1, 9)),
    st.builds(PoissonSampledDpEvent, probability, gaussians),
    st.builds(CorrelatedSampleDpEvent, probability, gaussians),
    st.builds(
        ev.TruncatedSubsampledGaussianDpEvent,
        st.integers(0, 99),
        probability,
        st.integers(0, 9),
        positive,
    ),
    st.builds(
        ev.SingleEpochTreeAggregationDpEvent, positive, st.lists(st.integers(1, 9), min_size=1)
    ),
    st.builds(unproven, st.sampled_from(["no proof", "inf", 'quote " and \\ and ü'])),
    st.just(NonPrivateDpEvent()),
    st.just(NoOpDpEvent()),
)
events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(ComposedDpEvent, st.lists(inner, max_size=4)),
        st.builds(SelfComposedDpEvent, inner, st.integers(0, 1000)),
        st.builds(PoissonSampledDpEvent, probability, inner),
        st.builds(OneOfDpEvent, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            RepeatAndSelectDpEvent, inner, st.floats(1, 100), st.sampled_from([0.0, 1.0, math.inf])
        ),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(events)
def test_round_trip_is_exact(event):
    text = to_json(event)
    again = from_json(text)
    assert composition(again) == composition(event)
    assert to_json(again) == text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_json_of_another_writer_is_a_value_error():
    for text, match in (
        ("[" * 10**5, "nested more than 100 deep"),
        ('{"event":' * 200 + "{}" + "}" * 200, "nested more than 100 deep"),
        ('{"type":"Pure","epsilon":NaN}', "NaN is not a number"),
        ('{"type":"Pure","epsilon":1e999}', "beyond float64"),
        (
            '{"type":"Pure","epsilon":1' + "0" * 400 + "}",
            "PureDpEvent.epsilon: must be .* beyond float64",
        ),
        ('{"type":"Pure","epsilon":1,"epsilon":0}', "has the key 'epsilon' twice"),
    ):
        with pytest.raises(ValueError, match=match):
            from_json(text)
    for text in (
        "(" * 10**4 + "1" + ")" * 10**4,
        "+".join(["Gaussian(1)"] * 10**4),
        "-" * 10**5 + "1",
    ):
        with pytest.raises(ValueError, match=r"cannot be read|nests too deeply") as error:
            parse(text)
        assert len(str(error.value)) < 250


def test_an_event_that_could_not_be_read_back_has_no_text():
    event = GaussianDpEvent(1.0)
    for _ in range(101):
        event = RepeatAndSelectDpEvent(event, 2.0, 1.0)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        to_json(event)


def test_a_description_shows_no_control_character():
    assert describe(unproven("no\x1b[31m proof")) == r"Unproven(no\x1b[31m proof)"


@pytest.mark.slow
@given(st.lists(leaves, max_size=5), st.randoms())
def test_order_nesting_and_containers_do_not_show(parts, random):
    shuffled = list(parts)
    random.shuffle(shuffled)
    nested = ComposedDpEvent(
        [ComposedDpEvent(shuffled[:2]), SelfComposedDpEvent(ComposedDpEvent(shuffled[2:]), 1)]
    )
    assert to_json(nested) == to_json(ComposedDpEvent(parts))


def test_equal_events_are_counted():
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    same = PoissonSampledDpEvent(np.float64(0.01), GaussianDpEvent(1))
    event = ComposedDpEvent(
        [SelfComposedDpEvent(SelfComposedDpEvent(step, 1000), 1000), same, NoOpDpEvent()]
    )
    assert composition(event) == {step: 1_000_001}
    assert composition(NoOpDpEvent()) == {}


@pytest.mark.parametrize(
    ("event", "leaf"),
    [
        (PoissonSampledDpEvent(1.0, GaussianDpEvent(2.0)), GaussianDpEvent(2.0)),
        (PoissonSampledDpEvent(0.1, NonPrivateDpEvent()), NonPrivateDpEvent()),
        (GaussianDpEvent(0.0), NonPrivateDpEvent()),
        (LaplaceDpEvent(1e-300), NonPrivateDpEvent()),
        (RandomizedResponseDpEvent(0.0, 2), NonPrivateDpEvent()),
        (
            # GEP releases two clipped sums of one sample: multiplier s / sqrt(2), sampled once.
            PoissonSampledDpEvent(0.1, SelfComposedDpEvent(GaussianDpEvent(2.0), 4)),
            PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)),
        ),
        (
            SampledWithoutReplacementDpEvent(
                10, 5, ComposedDpEvent([GaussianDpEvent(6), GaussianDpEvent(8)])
            ),
            SampledWithoutReplacementDpEvent(10, 5, GaussianDpEvent((1 / 36 + 1 / 64) ** -0.5)),
        ),
        (RepeatAndSelectDpEvent(unproven("why"), 3, 1), UnprovenDpEvent("why")),
        (
            RepeatAndSelectDpEvent(ComposedDpEvent([unproven("a"), GaussianDpEvent(1.0)]), 3, 1),
            UnprovenDpEvent("a"),
        ),
        (OneOfDpEvent([GaussianDpEvent(1.0), unproven("why")]), UnprovenDpEvent("why")),
        (OneOfDpEvent([PureDpEvent(1.0), NoOpDpEvent(), PureDpEvent(1.0)]), PureDpEvent(1.0)),
    ],
)
def test_normal_forms(event, leaf):
    assert composition(event) == {leaf: 1}


def test_one_of_several_drops_what_another_one_contains():
    few = PureDpEvent(1.0)
    many = SelfComposedDpEvent(few, 3)
    other = GaussianDpEvent(1.0)
    assert composition(OneOfDpEvent([few, many])) == {few: 3}
    both = from_json(to_json(OneOfDpEvent([many, other])))
    assert to_json(OneOfDpEvent([many, other, few])) == to_json(OneOfDpEvent([other, many]))
    assert describe(both) == "OneOf((Pure(1) x 3, Gaussian(1)))"
    assert parse(describe(both)) == both
    for wrong in ([], GaussianDpEvent(1.0), 3):
        with pytest.raises((TypeError, ValueError), match=r"OneOfDpEvent.events: must"):
            composition(OneOfDpEvent(wrong))


@pytest.mark.parametrize(
    "event",
    [
        PoissonSampledDpEvent(0.0, GaussianDpEvent(1.0)),
        PoissonSampledDpEvent(0.5, NoOpDpEvent()),
        PureDpEvent(0.0),
        RandomizedResponseDpEvent(1.0, 5),
        RandomizedResponseDpEvent(0.0, 1),
        SelfComposedDpEvent(NonPrivateDpEvent(), 0),
    ],
)
def test_free_events_vanish(event):
    assert composition(event) == {}


class Invented(dp_accounting.DpEvent):
    """An event that nobody has a rule for."""


@pytest.mark.parametrize(
    ("event", "error", "words"),
    [
        (dp_accounting.UnsupportedDpEvent(), ValueError, "vocabulary"),
        (
            dp_accounting.SampledWithReplacementDpEvent(9, 3, GaussianDpEvent(1.0)),
            ValueError,
            "vocabulary",
        ),
        (ComposedDpEvent([GaussianDpEvent(1.0), Invented()]), ValueError, "Invented"),
        (1.0, ValueError, "vocabulary"),
        (GaussianDpEvent(-1.0), ValueError, "GaussianDpEvent.noise_multiplier"),
        (GaussianDpEvent(math.nan), ValueError, "noise_multiplier"),
        (GaussianDpEvent(math.inf), ValueError, "finite"),
        (GaussianDpEvent("1.0"), TypeError, "real number"),
        (GaussianDpEvent(True), TypeError, "real number"),
        (PoissonSampledDpEvent(1.1, GaussianDpEvent(1.0)), ValueError, "sampling_probability"),
        (PoissonSampledDpEvent(0.1, Invented()), ValueError, "Invented"),
        (SelfComposedDpEvent(GaussianDpEvent(1.0), -1), ValueError, "count"),
        (SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5), TypeError, "count"),
        (PureDpEvent(math.inf), ValueError, "finite"),
        (SampledWithoutReplacementDpEvent(3, 9, GaussianDpEvent(1.0)), ValueError, "sample_size"),
        (
            dp_accounting.dp_event.MixtureOfGaussiansDpEvent(1.0, [1.0], [1.0]),
            ValueError,
            "vocabulary",
        ),
        (UnprovenDpEvent(" "), ValueError, "reason"),
    ],
)
def test_impossible_events_are_refused(event, error, words):
    with pytest.raises(error, match=words):
        composition(event)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "object"),
        ('{"type":"Exotic"}', "newer jaxdp"),
        ('{"type":"Gaussian","noise_multiplier":NaN}', "NaN"),
        ('{"type":"Gaussian"}', "fields"),
        ('{"type":"Gaussian","noise_multiplier":1.0,"clip":2.0}', "fields"),
        ('{"type":"Gaussian","noise_multiplier":-1.0}', "noise_multiplier"),
        ('{"type":"Pure","epsilon":"inf"}', "real number"),
        ('{"type":"Composed"}', "unknown type"),
    ],
)
def test_unknown_json_is_refused(text, words):
    with pytest.raises((ValueError, TypeError), match=words):
        from_json(text)


@pytest.mark.slow
def test_description_is_short():
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.00512, GaussianDpEvent(1.1)), 500)
    assert ev.describe(event) == "PoissonSampled(0.00512, Gaussian(1.1)) x 500"
