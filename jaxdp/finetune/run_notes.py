"""What a workdir says about its run, for the report: the ledger, the method and its settings."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from typing import Any

import numpy as np

from jaxdp.data import Owners, PoissonSampler, Source
from jaxdp.files import read_json, write_json
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import Account, epsilon, unit_words
from jaxdp.privacy.events import describe
from jaxdp.release import Till
from jaxdp.report.runs import FILE
from jaxdp.version import __version__

# Rows of the epsilons of owners, each of which costs a composition.
_LEVELS = 5
_LIBRARIES = ("jax", "optax", "numpy")
_METHODS = {
    "GradientSum": "DP-SGD",
    "QuantileClipping": "AdpClip",
    "GradientEmbedding": "GEP",
    "SlackClipping": "SlaClip",
}


def write(
    workdir: pathlib.Path,
    trainer: PrivateTrainer,
    source: Source,
    steps: int,
    account: Account,
) -> None:
    """Writes run.json. It keeps the words by which ledgers know the earlier calls of the run."""
    path = workdir / FILE
    runs: list[str] = read_json(path)["runs"] if path.exists() else []
    ledger = account.ledger
    runs = list(dict.fromkeys([*runs, ledger.run]))
    is_file = ledger.path != ":memory:"
    settings = _settings(trainer, steps, account)
    if isinstance(source, Owners):
        settings |= _owners(source, trainer, steps, account)
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    content = {
        "kind": "fit",
        # Relative, so that both may be moved together.
        "ledger": os.path.relpath(ledger.path, workdir) if is_file else None,
        "dataset": account.name,
        "runs": runs,
        "settings": settings,
        "exact": trainer.privatizer.grid is not None,
        "versions": {"jaxdp": __version__, "python": platform.python_version(), **versions},
    }
    write_json(path, content)


def settle_run(till: Till, trainer: PrivateTrainer, account: Account) -> None:
    """Charges an account for the notes of its run, also for those under its earlier names.

    Raises ValueError if the earlier steps protect another unit than the trainer does.
    """
    if till.workdir is not None and till.notes():
        # An account of patients must not take charges of steps that clipped each of their records.
        _check_unit(till.workdir, trainer)
    till.settle([account], under_any_name=True)


def _check_unit(workdir: pathlib.Path, trainer: PrivateTrainer) -> None:
    """Raises ValueError if a run began with another unit."""
    if not (workdir / FILE).exists():
        return
    before = read_json(workdir / FILE, keys=["settings"])["settings"].get("unit", trainer.unit)
    if before != trainer.unit:
        raise ValueError(
            f"workdir holds a run that protects one {before!r}, but the trainer protects one "
            f"{trainer.unit!r}. Nothing is spent. Give the trainer unit={before!r}, or begin a new "
            "run in a new workdir."
        )


def _settings(trainer: PrivateTrainer, steps: int, account: Account) -> dict[str, Any]:
    """Returns the public settings of a run by their names for people."""
    query = type(trainer.query).__name__
    noise = trainer.privatizer.noise_multiplier
    clip_norm = trainer.query.gradient.clip_norm
    return {
        "method": _METHODS.get(query, query),
        "planned steps": steps,
        "clip norm": clip_norm if isinstance(clip_norm, int | float) else str(clip_norm),
        "noise multiplier": noise if isinstance(noise, int | float) else "a schedule",
        "sampling": trainer.sampler.words(unit_words(trainer.unit).many),
        "event": describe(trainer.event(0, steps)),
        **_correlation(trainer),
        "unit": trainer.unit,
        "adjacency": account.adjacency,
        "delta": account.delta,
    }


def _correlation(trainer: PrivateTrainer) -> dict[str, str]:
    """Returns the setting of correlated noise, if there is any."""
    noise = trainer.privatizer.noise
    if noise is None:
        return {}
    pattern = "each in one step at most"
    if noise.participations > 1:
        pattern = (
            f"each in {noise.participations} steps at most, {noise.min_separation} or more apart"
        )
    secret = ", by a secret draw that amplifies" if trainer.is_amplified else ""
    return {
        "correlated noise": f"{noise.steps} steps are one release, {pattern}{secret}, sensitivity "
        f"{noise.sensitivity:.6g} clip norms, {noise.buffers} buffers"
    }


def _owners(
    source: Owners, trainer: PrivateTrainer, steps: int, account: Account
) -> dict[str, str]:
    """Returns what a run says of the owners of its records. Who owns what is public."""
    many = unit_words(trainer.unit).many
    settings = {
        "owners": (
            f"{source.owners} {many}, each with at most {source.max_records} records that count, "
            f"{len(source)} of {len(source.source)} in all. Who owns which is public."
        )
    }
    counts = np.sort(source.records_of)
    numbers = np.unique(counts)
    places = np.linspace(0, len(numbers) - 1, min(_LEVELS, len(numbers))).round().astype(int)
    before = 0
    for most in numbers[places].tolist():
        until = int(np.searchsorted(counts, most, side="right"))
        name = f"{many} with up to {most} records that count"
        settings[name] = f"{until - before}, {_cost(trainer, most, steps, account)}"
        before = until
    return settings


def _cost(trainer: PrivateTrainer, records: int, steps: int, account: Account) -> str:
    """Returns the epsilon of a run for an owner with so many records."""
    if not records:
        return "epsilon 0"
    if not account.delta:
        return "no delta is registered"
    assert isinstance(trainer.sampler, PoissonSampler)  # the only one with owners
    sampler = dataclasses.replace(trainer.sampler, records_per_owner=records)
    event = dataclasses.replace(trainer, sampler=sampler).event(0, steps)
    cost = epsilon(event, delta=account.delta, adjacency=account.adjacency)
    return f"epsilon {cost:.4g} at delta {account.delta:g} for each"
