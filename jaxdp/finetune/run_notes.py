"""What a workdir says about its run, for the report: the ledger, the method and its settings."""

import importlib.metadata
import os
import pathlib
import platform
from typing import Any

from jaxdp.files import read_json, write_json
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import Account, unit_words
from jaxdp.privacy.events import describe
from jaxdp.report.runs import FILE
from jaxdp.version import __version__

_LIBRARIES = ("jax", "optax", "numpy")
_METHODS = {
    "GradientSum": "DP-SGD",
    "QuantileClipping": "AdpClip",
    "GradientEmbedding": "GEP",
}


def write(workdir: pathlib.Path, trainer: PrivateTrainer, steps: int, account: Account) -> None:
    """Writes run.json. It keeps the words by which ledgers know the earlier calls of the run."""
    path = workdir / FILE
    runs: list[str] = read_json(path)["runs"] if path.exists() else []
    ledger = account.ledger
    runs = list(dict.fromkeys([*runs, ledger.run]))
    is_file = ledger.path != ":memory:"
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    content = {
        "kind": "fit",
        # Relative, so that both may be moved together.
        "ledger": os.path.relpath(ledger.path, workdir) if is_file else None,
        "dataset": account.name,
        "runs": runs,
        "settings": _settings(trainer, steps, account),
        "versions": {"jaxdp": __version__, "python": platform.python_version(), **versions},
    }
    write_json(path, content)


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
        "unit": trainer.unit,
        "adjacency": account.adjacency,
        "delta": account.delta,
    }
