"""The launchers in separate processes, as users run them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# ml_collections loads config files by a deprecated function. All other warnings are errors.
PYTHON = [sys.executable, "-W", "error", "-W", "ignore:the load_module:DeprecationWarning"]


def command(module, config, workdir, overrides):
    """Returns the command of a launcher. `overrides` maps fields of the config to values."""
    flags = [f"--config.{name}={value}" for name, value in overrides.items()]
    return [*PYTHON, "-m", f"launch.{module}", "--config", config, "--workdir", str(workdir), *flags]


def environment(**additions):
    """Returns the environment of a launcher."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", **additions}


def run(arguments, **additions):
    """Runs a command at the root of the repository, with additions to the environment."""
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=environment(**additions),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
