"""The directory of an experiment: one config, files that appear whole or not at all."""

import json
import os
import pathlib
from typing import Any


def check_same_config(config: Any, path: pathlib.Path) -> None:
    """Refuses to mix two experiments in one workdir.

    Args:
        config: an `ml_collections.ConfigDict`.
        path: where the config of the workdir's experiment is, if it has one yet.

    Raises:
        ValueError: the two differ; the message names the fields.
    """
    if not path.exists():
        return
    stored, given = _flat(json.loads(path.read_text())), _flat(json.loads(config.to_json()))
    if stored != given:
        names = sorted(name for name in {*stored, *given} if stored.get(name) != given.get(name))
        raise ValueError(f"{path.parent} belongs to an experiment with another {', '.join(names)}; use a new workdir.")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON, making the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}
