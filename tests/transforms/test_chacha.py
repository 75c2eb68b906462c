"""ChaCha12 against published blocks, and its keys as keys of `jax.random`. Failure rates are those
of test_noise.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp.transforms import chacha

KEY = jax.random.key(7, impl=chacha.CHACHA12)
ZEROS = bytes(32)
COUNTED = bytes(range(32))

# (rounds, key, words 12 to 15, first 16 and last 4 bytes of the block). 20 rounds: RFC 8439,
# section 2.3.2 and appendix A.1. 12 rounds: the first test of
# draft-strombergson-chacha-test-vectors.
VECTORS = [
    (20, COUNTED, (1, 0x09000000, 0x4A000000, 0), "10f1e7e4d13b5915500fdd1fa32071c4", "a2503c4e"),
    (20, ZEROS, (0, 0, 0, 0), "76b8e0ada0f13d90405d6ae55386bd28", "b2ee6586"),
    (20, ZEROS, (1, 0, 0, 0), "9f07e7be5551387a98ba977c732d080d", "4b794d6f"),
    (20, bytes(31) + b"\1", (1, 0, 0, 0), "3aeb5224ecf849929b9d828db1ced4dd", "006c13a0"),
    (12, ZEROS, (0, 0, 0, 0), "9bf49a6a0755f953811fce125f2683d5", "411326be"),
]


def words(data):
    return jnp.asarray(np.frombuffer(data, "<u4").astype(np.uint32))


@pytest.mark.parametrize(("rounds", "key", "inputs", "first", "last"), VECTORS)
def test_blocks_are_those_of_the_standard(monkeypatch, rounds, key, inputs, first, last):
    """Fails if the cipher differs from the published one, or if noise takes fewer than 12
    rounds."""
    if rounds != 12:
        monkeypatch.setattr(chacha, "DOUBLE_ROUNDS", rounds // 2)
    rolled = chacha.block(words(key), inputs)[:, 0]
    unrolled = jnp.stack(chacha.unrolled_block(words(key), inputs))
    for found in (rolled, unrolled):
        hexadecimal = np.asarray(found).astype("<u4").tobytes().hex()
        assert hexadecimal.startswith(first) and hexadecimal.endswith(last)


def test_each_counter_has_its_own_block():
    both = chacha.block(words(ZEROS), (jnp.arange(2, dtype=jnp.uint32), 0, 0, 0))
    assert both.shape == (16, 2)
    for i in range(2):
        assert (both[:, i] == chacha.block(words(ZEROS), (i, 0, 0, 0))[:, 0]).all()


def test_bits_children_and_noise_of_a_key_are_different_blocks():
    data = jax.random.key_data(KEY)
    blocks = [chacha.block(data, (0, 0, 0, purpose))[:8, 0] for purpose in range(4)]
    children = (jax.random.split(KEY)[0], jax.random.fold_in(KEY, 0))
    read = [jax.random.bits(KEY, (8,)), *map(jax.random.key_data, children)]
    assert len({tuple(block.tolist()) for block in blocks}) == 4
    for block, found in zip(blocks, read, strict=False):
        assert (block == found).all()


@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits_have_their_shape_and_type(width):
    bits = jax.random.bits(KEY, (3, 7), f"uint{width}")
    assert bits.shape == (3, 7) and bits.dtype == f"uint{width}" and len(np.unique(bits)) > 15
    assert jax.random.bits(KEY, (0,), f"uint{width}").shape == (0,)


def test_64_bits_are_two_words():
    with jax.enable_x64(True):
        wide = jax.random.bits(KEY, (5,), jnp.uint64)
        high, low = jax.random.bits(KEY, (2, 5), jnp.uint32).astype(jnp.uint64)
        assert (
            wide.dtype == jnp.uint64 and (wide >> 32 == high).all() and (wide % 2**32 == low).all()
        )


def test_large_seeds_and_their_lower_halves_give_different_keys():
    with jax.enable_x64(True):
        data = [
            jax.random.key_data(jax.random.key(seed, impl=chacha.CHACHA12))
            for seed in (5, 5 + 2**40)
        ]
    assert data[0].tolist() == [5, *[0] * 7] and data[1].tolist() == [5, 2**8, *[0] * 6]


@pytest.mark.slow
def test_bits_of_children_are_uniform_and_unrelated():
    steps = 64
    keys = jax.vmap(lambda t: jax.random.fold_in(KEY, t))(jnp.arange(steps))
    bits = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (1024,)))(keys))
    assert (
        bits[3] == jax.random.bits(jax.random.fold_in(KEY, 3), (1024,))
    ).all()  # vmap and jit change nothing
    # about bits.size**2 / 2**33 = 0.5 collisions expected
    assert len(np.unique(bits)) > bits.size - 20
    assert stats.chisquare(np.bincount((bits >> 24).ravel(), minlength=256)).pvalue > 1e-6
    ones = np.unpackbits(bits.view(np.uint8).reshape(steps, -1), axis=1).astype(np.float64)
    assert np.abs(np.corrcoef(ones) - np.eye(steps)).max() < 6.5 / math.sqrt(ones.shape[1])
