"""A mistake in a flag is a sentence that names the flag."""

import pytest
from ml_collections import ConfigDict

from launch import catalogue, data
from launch.frame.program import _clear
from launch.settings import check_numbers
from tests.launch import program


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            KeyError('epsilom\nDid you mean "epsilon"?'),
            '--config.private.epsilom=2: the config has no field epsilom. Did you mean "epsilon"?',
        ),
        (
            AttributeError(KeyError("'num_classes'")),
            "--config.data.num_classes=3: the config has no field 'num_classes'. --help lists its "
            "fields.",
        ),
        (
            ValueError("flag --config.data=None: Failed to parse 'None' as a ConfigDict."),
            "flag --config.data=None: Failed to parse 'None' as a ConfigDict. Change its fields "
            "one by one. --help lists them.",
        ),
    ],
)
def test_an_error_of_a_field_names_flag_and_remedy(error, words):
    arguments = ["--config.private.epsilom=2", "--config.data.num_classes=3"]
    assert str(_clear(error, arguments)) == words


def test_a_variant_that_a_config_lacks_is_named():
    with pytest.raises(ValueError, match=r"^--config=digits_dpsgd:x: .*'random_round', .*'x'\.$"):
        catalogue.load("digits_dpsgd:x")


def test_parts_that_are_missing_are_named():
    config = catalogue.load("digits_dpsgd")
    with pytest.raises(ValueError, match=r"config\.data\.parts must name .*, got None"):
        check_numbers(ConfigDict({"data": {"parts": None}}))
    with config.unlocked():
        config.data.parts.private = None
    with pytest.raises(ValueError, match=r"config\.data\.parts\.private must name .* got None"):
        data.specs(config.data, "private", "test", needs=("private",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--config=configs/digits_dpsgd.py", "--config.privat.epsilon=2"],
            "--config.privat.epsilon=2: the config has no field 'privat'. "
            'Did you mean "private" instead of "privat"?',
        ),
        (
            ["--config.private.epsilo=2"],
            "--config.private.epsilo=2: the config has no field 'epsilo'. "
            'Did you mean "epsilon" instead of "epsilo"?',
        ),
        (
            ["--config=configs/dpadapter_table1.py:digit"],
            "--config=configs/dpadapter_table1.py:digit: the config takes 'paper', 'cpu' or "
            "'digits' after the colon, got 'digit'.",
        ),
    ],
    ids=["field", "last field", "variant"],
)
def test_a_mistake_in_a_flag_is_a_sentence(flags, words):
    launcher = [*program.PYTHON, "-m", "launch.finetune", "--config", "configs/digits_dpsgd.py"]
    run = program.call([*launcher, *flags, "--dry_run"])
    assert run.returncode == 2
    assert run.stderr.strip() == words
