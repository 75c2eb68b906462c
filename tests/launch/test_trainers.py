"""What the fields of a config for private training mean."""

import jax.numpy as jnp
import numpy as np
import pytest

from launch import curve, trainers
from launch.config_dict import ConfigDict

PARAMS = {"body": {"w": jnp.zeros((3, 4))}, "head": {"b": jnp.zeros(4)}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 2.0),
        ("uniform", {"body/w": 2 / 2**0.5, "head/b": 2 / 2**0.5}),
        ("dimension", {"body/w": 2 * 0.75**0.5, "head/b": 1.0}),
        ("body/.*=0.1 head/.*=1", {"body/.*": 0.1, "head/.*": 1.0}),
    ],
)
def test_clip_parts(text, expected):
    config = ConfigDict({"clip_norm": 2.0, "clip_parts": text})
    norms = trainers._clip_norm(config, PARAMS, None, "private")
    assert type(norms) is type(expected)
    if text:
        assert list(norms) == list(expected)
        np.testing.assert_allclose(list(norms.values()), list(expected.values()))


def test_a_config_without_the_field_has_one_norm():
    assert trainers._clip_norm(ConfigDict({"clip_norm": 2.0}), PARAMS, None, "private") == 2.0


@pytest.mark.parametrize("text", ["uniformly", "head/.*=", "=1.0", "head/.*=big"])
def test_what_is_no_part_is_refused(text):
    config = ConfigDict({"clip_norm": 2.0, "clip_parts": text})
    with pytest.raises(ValueError, match=r"config.private.clip_parts must be .* got '"):
        trainers._clip_norm(config, PARAMS, None, "private")


def test_a_point_of_a_curve_has_one_learning_rate():
    points = {"epsilons": (1.0, 1.0), "learning_rates": (0.1, 0.5), "runs": 1}
    with pytest.raises(ValueError, match=r"curve.epsilons must have each epsilon once, got \(1.0"):
        list(curve._cells(ConfigDict({"curve": points})))
