"""A charged scaler equals float64 up to its noise, which has the scale that the ledger charged."""

import dataclasses
import fractions
import math

import numpy as np
import pytest

from jaxdp import data, finetune
from jaxdp.finetune import scaler as stage
from jaxdp.privacy import GaussianDpEvent, Ledger, epsilon

SEED = bytes(range(16))
RANGES = {"age": (0, 120), "bmi": (10, 60)}
TABLE = "patient,age,sex,bmi\n" + "".join(
    f"P{k // 2},{'' if k % 5 == 0 else 20 + 3 * k},{'fm'[k % 2]},{15 + k}\n" for k in range(24)
)
AGES = [math.nan if k % 5 == 0 else min(20 + 3 * k, 120) for k in range(24)]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    options = {"categories": {"sex": ("f", "m")}, "missing": {"age": 1000}, "indicators": ("age",)}
    return data.from_csv(path, group="patient", **options)


def account(**terms):
    ledger = Ledger.in_memory()
    ledger.register("t", **{"adjacency": "add_remove", "unit": "example"} | terms)
    return ledger.account("t")


def scaler_of(source, noise_multiplier=1e-6, ranges=RANGES, **options):
    options = {"account": account(delta=1e-5), "seed": SEED} | options
    return finetune.charged_scaler(source, ranges, noise_multiplier=noise_multiplier, **options)


def loop(features, ranges, missing):
    """Returns the vectors of one row, [3, k], one cell at a time."""
    vectors = []
    for column, (low, high) in ranges.items():
        cell = float(features[column])
        is_missing = column in missing and features[missing[column]] == 1
        count = 1 / 2 if column in missing else 0
        if is_missing or math.isnan(cell) or math.isinf(cell):
            vectors.append((0, 0, -count))
        else:
            u = (2 * min(max(cell, low), high) - low - high) / (high - low)
            vectors.append((u, u * u - 1 / 2, count))
    return np.array(vectors).T


@pytest.mark.slow
def test_little_noise_gives_the_moments_of_numpy(rows):
    """The constant of a missing cell plays no role: the mean is over the others."""
    scaler = scaler_of(rows)
    bmi = np.minimum(15 + np.arange(24), 60)
    expected = [np.nanmean(AGES), bmi.mean()], [np.nanstd(AGES), bmi.std()]
    np.testing.assert_allclose([scaler.mean, scaler.std], expected, rtol=1e-4)
    assert (scaler.columns, scaler.missing) == ((0, 4), (1, -1))
    scaled = scaler.apply(rows)
    features = scaled.gather(np.arange(24))["features"]
    known = ~np.isnan(AGES)
    np.testing.assert_array_equal(features[~known, 0], 0)
    np.testing.assert_allclose(features[:, [0, 4]].mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose([features[known, 0].std(), features[:, 4].std()], 1, rtol=1e-3)
    np.testing.assert_array_equal(features[:, 1:4], rows.gather(np.arange(24))["features"][:, 1:4])
    assert scaled.fingerprint != rows.fingerprint and scaled.feature_names == rows.feature_names


def test_noise_of_16_bits_is_noise():
    source = data.from_arrays(features=np.linspace(0, 100, 500).reshape(-1, 1))
    means = [scaler_of(source, z, {"0": (0, 120)}).mean for z in (1.0, np.float16(1.0))]
    assert means[0] == means[1] != (0.0,)


def test_integers_are_scaled_as_floats():
    scaler = finetune.Scaler(
        columns=(0,), missing=(1,), low=(0.0,), high=(100.0,), mean=(20.5,), std=(0.5,)
    )
    cells = np.array([[21, 0, 7], [90, 1, 7]])
    for dtype in (np.int32, np.uint8, np.float32):
        np.testing.assert_array_equal(scaler.normalise(cells.astype(dtype)), [[1, 0, 7], [0, 1, 7]])
    np.testing.assert_array_equal(scaler.normalise(cells[0] > 7), [-39, 0, 0])


def test_a_scaler_is_read_as_it_was_written(rows, tmp_path):
    scaler = scaler_of(rows, 1.0)
    scaler.save(tmp_path / "scaler.json")
    assert finetune.Scaler.load(tmp_path / "scaler.json") == scaler
    assert hash(scaler) == hash(finetune.Scaler.load(tmp_path / "scaler.json"))


HOSTILE = np.array(
    [[0, 0, 7], [1e30, 1, -7], [-1e30, 0, 60], [np.nan, 0, 10], [np.inf, 0, np.nan], [120, 0, 35]],
    np.float32,
)
NAMES = ("age", "age is missing", "bmi")


def hostile(rows):
    source = data.from_arrays(features=HOSTILE[rows])
    return dataclasses.replace(source, feature_names=NAMES)


def test_sums_equal_a_loop_in_float64_for_rows_and_owners(rows):
    measured = stage.columns_of(hostile([0]), RANGES)
    places = {0: RANGES["age"], 2: RANGES["bmi"]}
    each = np.array([loop(row, places, {0: 1}) for row in HOSTILE])
    step = stage.step_of(measured, 1e-3, 6)
    sums = step * stage.column_sums(hostile(range(6)), measured, step)
    np.testing.assert_allclose(sums, each.sum(axis=0), rtol=1e-8, atol=6 * step)
    owners = data.by_group(hostile(range(6)), [1, 2, 1, 1, 3, 1], max_records=3)
    expected = each[[0, 2, 3]].mean(axis=0) + each[1] + each[4]
    sums = step * stage.column_sums(owners, measured, step)
    np.testing.assert_allclose(sums, expected, rtol=1e-8, atol=3 * step)


@pytest.mark.parametrize("names", [NAMES, ("age", "x", "bmi")])
def test_no_row_moves_the_sums_by_more_than_the_sensitivity(names, monkeypatch):
    """Some rows attain it. A replaced row moves by at most twice of it. Broken twin: no clip."""
    source = dataclasses.replace(hostile(range(6)), feature_names=names)
    measured = stage.columns_of(source, RANGES)
    most = stage.sensitivity(measured)
    vectors = stage.contributions(HOSTILE, measured)
    norms = np.sqrt((vectors**2).sum(axis=(1, 2)))
    # A row at the ends of both ranges attains C.
    assert norms.max() <= most + 1e-12 and norms[-1] < most
    ends = stage.contributions(np.array([120.0, 0, 60]), measured)
    assert np.linalg.norm(ends) == pytest.approx(most)
    apart = vectors[:, None] - vectors[None]
    assert np.sqrt((apart**2).sum(axis=(2, 3))).max() <= 2 * most
    monkeypatch.setattr(stage.np, "clip", lambda cells, low, high: cells)
    unclipped = stage.contributions(HOSTILE[:1], measured)
    assert np.linalg.norm(unclipped) > most


@pytest.mark.parametrize("noise_multiplier", [1e-3, 1.0, 77.7])
def test_no_row_exceeds_the_limit_in_steps(noise_multiplier):
    """By integers alone. The longest rows there are, of 100 columns, and owners of seven rows."""
    ends = np.where(np.arange(700).reshape(7, 100) % 3, 120.0, 0.0).astype(np.float32)
    source = data.from_arrays(features=ends)
    measured = stage.columns_of(source, {str(column): (0, 120) for column in range(100)})
    step = stage.step_of(measured, noise_multiplier, 7)
    vectors = stage.rounded(stage.contributions(ends, measured), step)
    squares = [sum(int(x) ** 2 for x in vector.flat) for vector in vectors]
    owner = data.by_group(source, [0] * 7, max_records=7)
    mean = stage.column_sums(owner, measured, step)
    squares.append(sum(int(x) ** 2 for x in mean.flat))
    limit = (2**24 / fractions.Fraction(noise_multiplier)) ** 2
    assert 0.999 * limit < max(squares) <= limit


def test_the_last_digits_tell_nothing_of_a_row():
    """A sum in float64 and noise in float32 told at epsilon 0.06 which of two tables it was of.

    Noise is a float32, and the released sum less the exact one of the other table is none. The
    noise differs from machine to machine: its token covers code and environment.
    """
    columns, noise_multiplier = 64, 3.0
    ages = np.repeat(np.linspace(3, 117, 200, dtype=np.float32)[:, None], columns, axis=1)
    others = ages.copy()
    others[0] = 3.7
    tables = [data.from_arrays(features=features) for features in (ages, others)]
    ranges = {str(column): (0, 120) for column in range(columns)}
    measured = stage.columns_of(tables[0], ranges)
    exact = [stage.contributions(table, measured).sum(axis=0)[0] for table in (ages, others)]
    step = stage.step_of(measured, noise_multiplier, 200)
    # The exact sums are at most 1 from 0, and 200 is 7.4 deviations of 26.8 from that.
    std = noise_multiplier * stage.sensitivity(measured)

    def told(released):
        """Returns how many sums less the exact ones of each table are a float32."""
        noises = [released - sums for sums in exact]
        apart = np.abs([noise - np.float64(np.float32(noise)) for noise in noises])
        return np.sum(apart < 1e-9, axis=1)

    for table, own in zip(tables, exact, strict=True):
        scaler = scaler_of(table, noise_multiplier, ranges)
        released = (np.array(scaler.mean) - 60) / 60 * 200
        assert np.abs(released).max() < 200  # none is cut
        # A sum is one by chance with a probability of 0.006. 8 of 64 are with one of 5e-9.
        assert told(released).max() < 8
        np.testing.assert_allclose(released / step, np.round(released / step), rtol=0, atol=1e-3)
        floats = (std * np.random.default_rng(0).normal(size=columns)).astype(np.float32)
        assert sorted(told(own + floats)) == [0, columns]  # the broken twin tells its table


def test_noise_that_integers_of_64_bits_cannot_carry_is_refused_before_it_is_paid(rows):
    pays = account(delta=1e-5)
    with pytest.raises(ValueError, match=r"noise_multiplier must be at least 8\.7e-11 for 24 rows"):
        scaler_of(rows, 1e-11, account=pays)
    assert pays.epsilon() == 0
    assert scaler_of(rows, 1e-10, account=pays).mean[1] == pytest.approx(26.5, rel=1e-6)


COLUMNS = 1000
WIDE = data.from_arrays(features=np.full((500, COLUMNS), 0.5, np.float32))
ALL = {str(column): (0, 2) for column in range(COLUMNS)}  # u = -1/2


def test_noise_has_the_right_scale_and_wrong_scales_are_rejected():
    """The means of one release. A right scale fails with a probability below 2e-6.

    A mean is cut at 250 / 35.4 = 7.1 deviations. The variances of the wrong scales are 20 and 6
    deviations beyond the limit.
    """

    def accepted(sample):
        spread = abs((sample**2).mean() - 1)
        limit = 4.9 / math.sqrt(COLUMNS)
        return spread < limit * math.sqrt(2) and abs(sample.mean()) < limit

    sigma, most = 1.0, math.sqrt(5 / 4 * COLUMNS)
    means = np.array(scaler_of(WIDE, sigma, ALL).mean)
    drawn = (means - 0.5) * 500 / (sigma * most)
    assert accepted(drawn)
    assert not accepted(0.7 * drawn)
    assert not accepted(1.3 * drawn)


@pytest.mark.slow
def test_the_target_of_training_pays_for_the_scaler_too():
    sampler = data.PoissonSampler(400, 0.1)
    target = {"epsilon": 2.0, "delta": 1e-5, "steps": 20}
    besides = GaussianDpEvent(8.0)
    for calibrate in (
        lambda **more: finetune.options.calibrated(sampler, **target, **more),
        lambda **more: finetune.calibrate_schedule(
            finetune.constant_noise(), sampler, **target, **more
        ),
    ):
        sigma = calibrate(besides=besides)
        both = finetune.options.beside(finetune.event(sigma, sampler, 20), besides)
        assert 1.99 < epsilon(both, delta=1e-5) <= 2 and sigma > calibrate()
