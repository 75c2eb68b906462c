"""A mistake in a flag is a sentence that names the flag."""

import subprocess
import sys

import pytest


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
            ["--config=configs/dpadapter_table1.py:digit"],
            "the config takes 'paper', 'cpu' or 'digits' after the colon, got 'digit'.",
        ),
    ],
    ids=["field", "variant"],
)
def test_a_mistake_in_a_flag_is_a_sentence(flags, words):
    command = [sys.executable, "-m", "launch.finetune", "--config", "configs/digits_dpsgd.py"]
    run = subprocess.run([*command, *flags, "--dry_run"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.strip() == words
