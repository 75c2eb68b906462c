"""A batch of any size is cut into physical batches of few sizes, and no example is lost."""

import numpy as np
import pytest

from jaxdp.data import PhysicalSizes, PoissonSampler, pad_to_physical
from jaxdp.data.physical import FIRST_STEPS

SEED = bytes(range(16))


@pytest.mark.parametrize(("size", "rows"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_padding_to_physical_batches(size, rows):
    indices = np.arange(100, 100 + size)
    padded, mask = pad_to_physical(indices, 4)
    assert padded.shape == mask.shape == (rows, 4)
    assert (padded.dtype, mask.dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(padded[mask], indices)
    assert np.all(padded[~mask] == 0)


@pytest.mark.slow
def test_padding_refuses_what_is_not_a_batch_of_indices():
    with pytest.raises(ValueError, match="physical_batch_size must be at least 1, got 0"):
        pad_to_physical(np.arange(3), 0)
    with pytest.raises(ValueError, match="one-dimensional"):
        pad_to_physical(np.zeros((2, 2), int), 4)
    with pytest.raises(TypeError, match="indices must be integers, got dtype float64"):
        pad_to_physical(np.zeros(2), 4)


def expected_padding(sizes, sampler):
    drawn = [len(sampler.batch(step)) for step in range(200)]
    rows = [sum(size * count for size, count in sizes.counts(size).items()) for size in drawn]
    return sum(rows) / sum(drawn) - 1


@pytest.mark.parametrize("expected", [32, 64, 200, 1000])
def test_chosen_sizes_pad_little(expected):
    sampler = PoissonSampler(2000, expected / 2000, seed=SEED)
    chosen = PhysicalSizes.choose(sampler, largest=300)
    assert 1 <= len(chosen.sizes) <= 3 and max(chosen.sizes) <= 300
    assert chosen == PhysicalSizes.choose(sampler, largest=300)  # the program of a resumed run
    assert expected_padding(chosen, sampler) < 0.035
    if expected < 300:  # one size pads far more
        assert expected_padding(PhysicalSizes((expected + expected // 4,)), sampler) > 0.1
    for step in range(20):
        indices = sampler.batch(step)
        parts = chosen.cut(indices)
        np.testing.assert_array_equal(np.concatenate([rows[mask] for rows, mask in parts]), indices)
        assert all(len(rows) in chosen.sizes for rows, _ in parts)
        # All parts but the last of each size are full.
        assert sum(not mask.all() for _, mask in parts) <= 1


@pytest.mark.parametrize(
    ("num_examples", "probability", "options", "sizes"),
    [(10, 1.0, {}, (10,)), (1, 0.5, {}, (1,)), (100, 0.9, {"truncated_batch_size": 7}, (7,))],
)
def test_sizes_of_batches_that_do_not_vary(num_examples, probability, options, sizes):
    sampler = PoissonSampler(num_examples, probability, **options)
    assert PhysicalSizes.choose(sampler, largest=1000).sizes == sizes


def test_an_empty_batch_has_one_physical_batch():
    ((rows, mask),) = PhysicalSizes((20, 3), 1.0).cut(np.zeros(0, np.int64))
    assert rows.tolist() == [0, 0, 0] and not mask.any()
    with pytest.raises(ValueError, match="physical_batch_size must be at least 1, got 0"):
        PhysicalSizes((0,))
    with pytest.raises(ValueError, match="largest must be at least 1, got 0"):
        PhysicalSizes.choose(PoissonSampler(3, 0.5), largest=0)


def test_the_token_has_all_that_decides_a_cut():
    """Other sizes, another overhead, or another number of first steps is another cut, so the text
    must differ. Its bytes are part of tokens: a change of them charges interrupted runs again."""
    sizes = PhysicalSizes((20, 3), 1.5)
    assert sizes.token_text() == "first steps=8\nPhysicalSizes(sizes=(20, 3), overhead=1.5)"
    assert sizes.of_step(FIRST_STEPS) == sizes
    assert sizes.of_step(FIRST_STEPS - 1).sizes == (20,)
