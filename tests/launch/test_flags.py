"""A mistake in a flag is a sentence that names the flag."""

import pytest

from tests.launch import program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--config.privat.epsilon=2"],
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
            "the config takes 'paper', 'cpu' or 'digits' after the colon, got 'digit'.",
        ),
    ],
    ids=["field", "last field", "variant"],
)
def test_a_mistake_in_a_flag_is_a_sentence(flags, words):
    launcher = [*program.PYTHON, "-m", "launch.finetune", "--config", "configs/digits_dpsgd.py"]
    run = program.call([*launcher, *flags, "--dry_run"])
    assert run.returncode == 2
    assert run.stderr.strip() == words
