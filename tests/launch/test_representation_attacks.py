"""What a server can reconstruct: real digits, a small ViT, and the attackers that know more or
less."""

import dataclasses
import logging
import types

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from launch.discrepancy import discrepancy
from launch.ginver import Ginver
from launch.representation_attacks import (
    Attacker,
    Decoder,
    Reconstruction,
    Simulation,
    align,
    attack,
    decode,
    median_of_copies,
    standard_attackers,
    train_decoder,
)
from launch.split_attackers import ATTACKERS, Knowledge, attackers_of
from tests.launch.attacked import BACKBONE, fresh_params, unlike_digits

pytestmark = pytest.mark.slow

EXTRACT = BACKBONE.front
SCALE, COPIES, PUBLIC = 0.6, 9, 256
TRAINING = {"prefix_tokens": 1, "epochs": 4, "batch_size": 32, "learning_rate": 5e-3}


def model_noise(key, front):
    flat, unravel = jax.flatten_util.ravel_pytree(front)
    return unravel(flat + 0.15 * jnp.abs(flat) * jax.random.normal(key, flat.shape))


def release(key, representations, copy):
    del copy
    return representations + SCALE * jax.random.laplace(key, representations.shape)


def client(key, images):
    """Returns a new frontend, the same with the client's noise, and the uploads."""
    shipped, _ = BACKBONE.divide(fresh_params(key))
    return shipped, *uploaded(key, shipped, images)


@jax.jit
def uploaded(key, shipped, images):
    true = model_noise(jax.random.fold_in(key, 1), shipped)
    clean = EXTRACT(true, images)
    uploads = jax.lax.map(
        lambda copy: release(jax.random.fold_in(key, copy), clean, copy), 2 + jnp.arange(COPIES)
    )
    return true, uploads


@pytest.fixture(scope="module")
def world():
    """Public digits, a client's, both frontends, and what the client uploads."""
    public, references = unlike_digits(public=PUBLIC, references=60)
    return public, references, *client(jax.random.key(0), references)


@pytest.fixture(scope="module")
def found(world):
    public, references, shipped, true, uploads = world
    attackers = standard_attackers(
        EXTRACT, shipped=shipped, true=true, model_noise=model_noise, release=release, copies=COPIES
    )
    return attack(jax.random.key(3), attackers, uploads, references, public=public, **TRAINING)


def test_what_an_attacker_knows_shows_in_what_it_reconstructs(found):
    def gain(better, worse):
        difference = found[better].psnr - found[worse].psnr  # dB, image by image
        return difference.mean() / (
            difference.std(ddof=1) / np.sqrt(len(difference))
        ), difference.mean()

    for better, worse, decibels in (
        ("noise-aware", "noise-unaware", 1.5),
        ("noise-aware", "mean image", 1.0),
        ("aggregating", "noise-aware", 0.5),
        ("oracle", "noise-aware", 0.5),
    ):
        deviations, mean = gain(better, worse)
        assert deviations > 4 and mean > decibels, (better, worse, deviations, mean)
        assert found[better].ssim["uniform7"].mean() > found[worse].ssim["uniform7"].mean()


def test_clean_representations_give_the_images_away_and_nothing_is_compiled_twice(
    world, found, caplog
):
    public, references, shipped, *_ = world
    uploads = jax.jit(EXTRACT)(shipped, references)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        inverse = train_decoder(
            jax.random.key(4), Simulation(BACKBONE.front), shipped, public, **TRAINING
        )
        images = np.asarray(inverse(uploads))
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    # Another attacker draws by a program of its own, and trains by that of the others.
    doubled = Simulation(EXTRACT, release=lambda key, x, copy: 2 * x)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        train_decoder(jax.random.key(4), doubled, shipped, public, **TRAINING)
    (compiled,) = [
        record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()
    ]
    assert "_drawn" in compiled
    error = np.mean((images - references) ** 2, axis=(1, 2, 3))
    assert -10 * np.log10(error.mean()) > found["mean image"].psnr.max()
    assert images.min() >= 0 and images.max() <= 1


def test_a_reconstruction_holds_images_and_their_scores(world, found):
    public, references, *_ = world
    assert list(found) == ["mean image", "noise-unaware", "noise-aware", "aggregating", "oracle"]
    np.testing.assert_allclose(
        found["mean image"].images,
        np.broadcast_to(public.astype(float).mean(0), references.shape),
        atol=1e-6,
    )
    for result in found.values():
        error = np.mean((result.images.astype(float) - references) ** 2, axis=(1, 2, 3))
        np.testing.assert_allclose(result.psnr, -10 * np.log10(error), rtol=1e-5)
        assert list(result.ssim) == ["uniform7"]  # an 11x11 window does not fit into 8x8 pixels
        summary = result.summary()
        assert set(summary) == {"psnr", "ssim_uniform7"}
        mean, deviation = (
            np.mean(result.psnr.astype(float)),
            np.std(result.psnr.astype(float), ddof=1),
        )
        np.testing.assert_allclose(summary["psnr"], (mean, deviation / np.sqrt(60)), rtol=1e-6)


def test_windows_are_those_that_fit_and_one_image_has_no_standard_error():
    for side, windows in ((6, []), (12, ["gaussian11", "uniform7"])):
        pixels = np.random.default_rng(0).uniform(size=(4, side, side, 3)).astype(np.float32)
        (result,) = attack(
            jax.random.key(0),
            {},
            np.zeros((1, 1, 4, 2), np.float32),
            pixels[:1],
            public=pixels,
            **TRAINING,
        ).values()
        assert list(result.ssim) == windows
        assert all(
            np.isfinite(mean) and np.isnan(error) for mean, error in result.summary().values()
        )
    exact = Reconstruction(pixels, {}, np.array([np.inf, 20.0])).summary()["psnr"]
    assert exact.mean == np.inf and np.isnan(exact.error)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_of_copies_is_the_middle_one_or_the_mean_of_two(count, tmp_path):
    shape = (count, 3, 4, 2)
    copies = np.memmap(tmp_path / "copies", np.float32, "w+", shape=shape)
    copies[:] = np.random.default_rng(count).laplace(size=shape)
    ordered = np.sort(np.asarray(copies, np.float64), axis=0)
    expected = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    found = median_of_copies(copies)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # The median of the simulation, which runs on a device.
    front = jnp.asarray(copies)
    simulation = Simulation(
        lambda front, images: images, release=lambda key, x, copy: front[copy], copies=count
    )
    np.testing.assert_allclose(simulation(None, jax.random.key(0), front[0]), expected, atol=1e-5)


def numbered(key, representations, copy):
    """Copies of 10, 11, 12, ... times the representations, with a draw of their own."""
    return representations * (10.0 + copy) + 0.01 * jax.random.uniform(key, representations.shape)


def test_a_simulation_draws_noise_on_the_frontend_then_copies_and_their_median():
    def extract(front, images):
        return images[:, :, :, 0] * front

    def doubled(key, front):
        return 2 * front + 0 * jax.random.uniform(key)

    draw = jax.jit(
        lambda simulation, key: simulation(jnp.float32(3), key, jnp.ones((2, 4, 4, 1))),
        static_argnums=0,
    )
    key = jax.random.key(0)
    np.testing.assert_array_equal(draw(Simulation(extract), key), np.full((2, 4, 4), 3))
    single, several = Simulation(extract, None, numbered), Simulation(extract, doubled, numbered, 4)
    for simulation, low in ((single, 30.0), (several, 2 * 34.5)):
        values = draw(simulation, key)
        assert ((values >= low) & (values <= low + 0.01)).all() and np.unique(values).size > 1
    assert not np.array_equal(draw(single, key), draw(single, jax.random.key(1)))


def fresh(key, representations, copy):
    del copy
    return representations + jax.random.laplace(key, representations.shape)


def test_copies_of_a_simulation_have_noise_of_their_own():
    deviations = {}
    for copies in (1, 25):
        simulation = Simulation(lambda front, images: images[..., 0], None, fresh, copies)
        deviations[copies] = jax.jit(simulation)(
            None, jax.random.key(0), jnp.zeros((20, 20, 20, 1))
        ).std()
    # The median of 25 standard Laplace draws has a standard deviation of 0.2317 (its density,
    # integrated).
    assert deviations[1] == pytest.approx(np.sqrt(2), rel=0.05)
    assert deviations[25] == pytest.approx(0.2317, rel=0.05)


@pytest.mark.parametrize(("tokens", "prefix", "grid"), [(16, 0, 4), (18, 2, 4), (4, 0, 2)])
def test_tokens_become_the_patches_of_a_grid_in_row_major_order(tokens, prefix, grid):
    decoder = Decoder(8, 3, prefix, depth=0)  # no attention: every token makes its patch alone
    params = jax.jit(decoder.init)(jax.random.key(1), jnp.zeros((1, tokens, 6)))["params"]
    representation = np.random.default_rng(0).normal(size=(tokens, 6)).astype(np.float32)
    changed = representation + np.eye(tokens, dtype=np.float32)[:, :, None] * np.arange(
        6, dtype=np.float32
    )
    images = jax.jit(decoder.apply)(
        {"params": params}, np.concatenate([representation[None], changed])
    )
    assert images.shape == (tokens + 1, 8, 8, 3)
    images = np.asarray(images)
    pixels = (images[1:] != images[:1]).any(-1)
    assert not pixels[:prefix].any()
    for token, image in enumerate(pixels[prefix:]):
        row, column = divmod(token, grid)
        expected = np.kron(
            np.eye(grid)[row][:, None] * np.eye(grid)[column], np.ones((8 // grid, 8 // grid))
        )
        np.testing.assert_array_equal(image, expected)


def test_many_representations_are_decoded_in_batches_and_clipped():
    decoder = Decoder(4, 1, 0, depth=0)
    representations = np.random.default_rng(0).normal(size=(70, 4, 3)).astype(np.float32)
    params = jax.jit(decoder.init)(jax.random.key(1), jnp.zeros((1, 4, 3)))["params"]
    direct = np.asarray(jax.jit(decoder.apply)({"params": params}, representations))
    assert direct.min() < 0 and direct.max() > 1
    np.testing.assert_allclose(
        decode(decoder, params, representations), np.clip(direct, 0, 1), atol=1e-6
    )


def test_what_does_not_fit_is_refused_before_training(world):
    public, references, shipped, _, uploads = world
    aware = Simulation(EXTRACT, model_noise, release, COPIES)

    def run(uploads=uploads, references=references, public=public, simulation=aware, **changes):
        attackers = {"mine": Attacker(simulation, shipped)}
        attack(
            jax.random.key(0),
            attackers,
            uploads,
            references,
            public=public,
            **{**TRAINING, **changes},
        )

    for message, changes in {
        r"uploads must be \[c, 60, T, D\].* got \(9, 59": {"uploads": uploads[:, :-1]},
        r"attackers\['mine'\] needs 9 copies, but uploads has 8": {"uploads": uploads[:8]},
        r"simulates \[T, D\] = \(17, 16\), but uploads has \(16, 16\)": {
            "uploads": uploads[:, :, 1:]
        },
        r"public images \(8, 8, 1\) and references \(6, 6, 1\)": {
            "references": references[:, 1:-1, 1:-1]
        },
        r"public must be square images": {"public": public[:, 1:]},
        r"references must be floating point in \[0, 1\]": {"references": references * 255},
        r"17 tokens with prefix_tokens=0 do not form a square grid.* 8x8": {"prefix_tokens": 0},
        r"epochs must be positive": {"epochs": 0},
    }.items():
        with pytest.raises(ValueError, match=message):
            run(**changes)
    with pytest.raises(ValueError, match="copies must be an integer of at least 1, got 0"):
        dataclasses.replace(aware, copies=0)
    with pytest.raises(ValueError, match=r"represent must return representations \[B, T, D\]"):
        train_decoder(
            jax.random.key(0), lambda front, key, images: images, None, public, **TRAINING
        )


def test_alignment_moves_another_frontend_to_the_uploads(world):
    public, references, _, _, uploads = world
    simulation = Simulation(EXTRACT, release=release)
    start, *_ = client(jax.random.key(9), references)
    how = {"public": public, "batch_size": 32, "learning_rate": 5e-3, "penalty": 10.0}
    aligned = align(jax.random.key(4), simulation, start, uploads, steps=30, **how)

    seen = np.asarray(uploads)[:3].reshape(180, 17, 16)

    @jax.jit
    def distance(front):
        return discrepancy(simulation(front, jax.random.key(5), public[:180]), seen)

    assert distance(aligned) < 0.5 * distance(start)
    with pytest.raises(ValueError, match="a simulation of one copy, got copies=2"):
        align(
            jax.random.key(4),
            dataclasses.replace(simulation, copies=2),
            start,
            uploads,
            steps=1,
            **how,
        )
    with pytest.raises(ValueError, match=r"uploads must be \[c, n, T, D\], got \(60, 17, 16\)"):
        align(jax.random.key(4), simulation, start, uploads[0], steps=1, **how)


def test_attackers_have_what_the_server_knows(world):
    """Those of FORA and of Ginver are the ones whose reconstructions are tested above and in
    test_ginver.py."""
    public, _, shipped, true, uploads = world
    # The steps and the batch size of the test above share its program.
    options = types.SimpleNamespace(fora_steps=30, ginver_steps=7, batch_size=32)
    knowledge = Knowledge(BACKBONE, EXTRACT, shipped, public, options, model_noise, release)
    key = jax.random.key(4)
    found = attackers_of(knowledge, ATTACKERS, uploads, true=true, key=key)
    assert tuple(found) == ATTACKERS
    standard = standard_attackers(
        EXTRACT, shipped=shipped, true=true, model_noise=model_noise, release=release, copies=COPIES
    )
    for name, expected in standard.items():
        assert found[name].simulation == expected.simulation
        assert found[name].front is expected.front
    simulation = Simulation(EXTRACT, release=release)
    aligned = align(key, simulation, shipped, uploads, public=public, steps=30, batch_size=32)
    for end, copies in (("", 1), (", aggregating", COPIES)):
        fora, ginver = found[f"FORA{end}"], found[f"Ginver{end}"]
        assert fora.simulation == dataclasses.replace(simulation, copies=copies)
        jax.tree.map(np.testing.assert_array_equal, fora.front, aligned)
        assert ginver == Ginver(extract=EXTRACT, front=shipped, copies=copies, steps=7)
    # One copy has no median.
    names = ("noise-aware", "aggregating", "Ginver", "Ginver, aggregating")
    alone = attackers_of(knowledge, names, uploads[:1], true=true, key=key)
    assert list(alone) == ["noise-aware", "Ginver"]


def test_the_discrepancy_is_that_of_its_definition():
    x, y = (
        np.random.default_rng(k).normal(k, 1, (n, 2, 3)).astype(np.float32)
        for k, n in ((0, 4), (1, 6))
    )
    both = [*x.reshape(4, -1).astype(float), *y.reshape(6, -1).astype(float)]
    squares = np.array([[((a - b) ** 2).sum() for b in both] for a in both])
    kernel = sum(
        np.exp(-squares / (squares.mean() * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2)
    )
    expected = kernel[:4, :4].mean() + kernel[4:, 4:].mean() - 2 * kernel[:4, 4:].mean()
    found, of_itself = jax.jit(lambda: (discrepancy(x, y), discrepancy(x, x)))()
    assert float(found) == pytest.approx(expected, rel=1e-5) and float(found) > 0.1
    assert float(of_itself) == pytest.approx(0, abs=1e-6)
