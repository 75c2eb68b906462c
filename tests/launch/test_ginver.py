"""What a generator reconstructs whose images have the uploaded representations."""

import jax
import numpy as np
import pytest

from launch.ginver import Ginver
from launch.representation_attacks import attack
from tests.launch.attacked import BACKBONE, fresh_params, unlike_digits

TRAINING = {"prefix_tokens": 1, "batch_size": 20}
COPIES, STEPS = 9, 50


@pytest.fixture(scope="module")
def world():
    """Public digits, a client's, the frontend, and representations of the client."""
    public, references = unlike_digits(public=100, references=20)
    shipped, _ = BACKBONE.divide(fresh_params(jax.random.key(0)))
    return public, references, shipped, np.asarray(jax.jit(BACKBONE.front)(shipped, references))


def ginver(shipped, **options):
    return Ginver(extract=BACKBONE.front, front=shipped, steps=STEPS, learning_rate=1e-2, **options)


def gain(better, worse):
    """Returns the mean difference in dB, and its standard error."""
    difference = better.psnr - worse.psnr
    return difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))


@pytest.mark.slow
def test_it_sees_images_where_nothing_protects_them_and_none_in_noise(world):
    public, references, shipped, exact = world
    noise = np.random.default_rng(0).laplace(size=(COPIES, *exact.shape)).astype(np.float32)
    attackers = {"one": ginver(shipped), "several": ginver(shipped, copies=COPIES)}

    def seen(uploads, names):
        some = {name: attackers[name] for name in names}
        key = jax.random.key(1)
        return attack(key, some, uploads, references, public=public, **TRAINING)

    clean = seen(exact[None], ["one"])
    floor = clean["mean image"]
    decibels, error = gain(clean["one"], floor)
    assert decibels > 4 and decibels > 4 * error
    noisy = seen(exact + 0.5 * noise, ["one", "several"])
    decibels, error = gain(noisy["several"], noisy["one"])
    assert decibels > 0.5 and decibels > 4 * error
    # The twin: uploads that hold nothing of the images.
    empty = seen(noise, ["one", "several"])
    assert empty["one"].psnr.mean() < floor.psnr.mean()
    assert empty["several"].psnr.mean() < floor.psnr.mean()


@pytest.mark.slow
def test_each_step_reads_every_upload_and_calls_share_a_program(world, caplog):
    public, _, shipped, exact = world
    learn = ginver(shipped, smoothness=0.0).learn
    with caplog.at_level("WARNING"), jax.log_compiles():
        images = learn(jax.random.key(2), exact, public, **TRAINING)(exact)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    assert images.shape == (20, 8, 8, 1)
    assert float(images.min()) > 0 and float(images.max()) < 1


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [("steps", 0, "positive"), ("copies", 0, "positive"), ("smoothness", -1.0, "at least 0")],
)
def test_numbers_out_of_range_are_refused(name, value, bound):
    options = {"steps": 1, name: value}
    with pytest.raises(ValueError, match=f"{name} must be {bound}, got {value}"):
        Ginver(extract=BACKBONE.front, front={}, **options)
