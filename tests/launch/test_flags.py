"""A mistake in a flag is a sentence that names the flag."""

import math
import pathlib
import types

import pytest
from ml_collections import ConfigDict

from launch import catalogue, certificates, data, links, parties
from launch.frame import launcher
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
        (
            ValueError("flag --timeout=zz: could not convert string to float: 'zz'"),
            "flag --timeout=zz must be a number.",
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


FINETUNE = ["finetune", "--config=configs/digits_dpsgd.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["audit", "--seed=zz"], "--seed must be 32 hexadecimal digits, which are 16 bytes, got"),
        (["audit", "--seed=00"], "--seed must be 32 hexadecimal digits"),
        (["audit", "--trials=zz"], "flag --trials=zz must be a whole number."),
        ([*FINETUNE, "--workdir="], "--workdir must be a path, got ''."),
        ([*FINETUNE, "--workdir=README.md"], "--workdir must be a folder, got the file"),
        ([*FINETUNE, "--workdir=none", "--ledger="], "--ledger must be a path, got ''."),
        ([*FINETUNE, "--workdir=none", "--ledger=tests"], "--ledger must be a file, got the"),
        ([*FINETUNE, "--dry_run=zz"], "flag --dry_run=zz must be true or false."),
        ([*FINETUNE, "--dry_run", "--log_json=tests"], "--log_json must be a file, got the"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join((value[0], value[-1])),
)
def test_a_wrong_value_of_a_flag_is_named_before_anything_is_made(command, words):
    run = program.call([*program.PYTHON, "-m", f"launch.{command[0]}", *command[1:]])
    assert run.returncode == 2 and words in run.stderr and run.stderr.count("\n") == 1
    assert not pathlib.Path("none").exists()


def test_processes_are_numbered_from_zero():
    with pytest.raises(ValueError, match=r"must have I in 0\.\.N-1, got I=3 and N=2"):
        launcher._mesh("localhost:1,3,2")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"EXCHANGE": ["none"], "TIMEOUT": math.nan}, "--timeout must be a number of seconds"),
        ({"ADDRESS": "zz", "KEYS": "none"}, "--address must be HOST:PORT, got 'zz'"),
        ({"ADDRESS": "zz:1", "KEYS": "none"}, "--keys must be a folder that launch.certificates"),
        ({}, "give either --address and --keys"),
    ],
)
def test_a_link_that_cannot_work_is_refused(monkeypatch, flags, words):
    flags = {"EXCHANGE": [], "ADDRESS": "", "KEYS": "", "TIMEOUT": 1.0, **flags}
    for name, value in flags.items():
        monkeypatch.setattr(links, name, types.SimpleNamespace(value=value))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        links.serve()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("epsilon", -1.0, r"config\.client\.epsilon must be positive"),
        ("images", "none.npz", r"images, or --images, must be an \.npz file .*'none\.npz'"),
    ],
)
def test_a_client_is_checked_before_the_server_is_asked(field, value, words, tmp_path):
    config = catalogue.load("split/two_parties").client
    config[field] = value
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        parties.run_client(config, tmp_path, None)


@pytest.mark.parametrize("hosts", [[], [""], ["localhost", ""]])
def test_a_host_has_a_name(hosts, tmp_path):
    with pytest.raises(ValueError, match="--host must be names or addresses"):
        certificates.make(tmp_path, ["clinic-1"], hosts=hosts)
    assert not list(tmp_path.iterdir())
