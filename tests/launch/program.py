"""The launchers as users run them: in a process of their own, or in this one, where JAX is started
already."""

import contextlib
import io
import logging
import pathlib
import runpy
import subprocess
import sys
import traceback
import warnings
from unittest import mock

import absl.logging
import jax
from absl import flags
from absl.testing import flagsaver

from launch.frame import running
from tests import forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What the launchers import, some of it when they run.
MODULES = (
    "launch.lifecycle",
    "launch.parties",
    "matplotlib.figure",
    "orbax.checkpoint",
    "sklearn.datasets",
)
# ml_collections loads config files by a deprecated function. All other warnings are errors.
PYTHON = [*forked.PYTHON, "-W", "ignore:the load_module:DeprecationWarning"]


def command(module, config, workdir, overrides):
    """Returns the command of a launcher. `overrides` maps fields of the config to values."""
    fields = [f"--config.{name}={value}" for name, value in overrides.items()]
    return [
        *PYTHON,
        "-m",
        f"launch.{module}",
        "--config",
        config,
        "--workdir",
        str(workdir),
        *fields,
    ]


# These warnings are no errors: that of `PYTHON`, and one of runpy about modules that the
# interpreter has imported.
FORKED = """
import runpy, sys, warnings
warnings.filterwarnings("ignore", "the load_module", DeprecationWarning)
warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run(arguments, first=""):
    """Runs a command in a process of its own. The code `first` runs before the launcher."""
    return forked.run(first + FORKED, *arguments[len(PYTHON) + 1 :], modules=MODULES)


# Under other settings of JAX than those of this process, a release would be another one. A process
# in the background of a shell would ignore Ctrl-C.
ALIKE = f"""
import signal
import jax
jax.config.update("jax_numpy_rank_promotion", "raise")
signal.signal(signal.SIGINT, signal.default_int_handler)
{FORKED}"""


def start(arguments, folder):
    """Starts a command in a process whose releases this process can continue.

    Returns the process, and the files with what it prints and with its errors.
    """
    files = [folder / name for name in ("stdout", "stderr")]
    return forked.start(ALIKE, *arguments[len(PYTHON) + 1 :], modules=MODULES, files=files), *files


def call(arguments):
    """Runs a command in this process, as `python -m` does."""
    module, *flags_of_it = arguments[len(PYTHON) + 1 :]
    out, err, code = io.StringIO(), io.StringIO(), 0
    logger, verbosity, parsed = (
        logging.getLogger(),
        absl.logging.get_verbosity(),
        flags.FLAGS.is_parsed(),
    )
    handlers, level = logger.handlers[:], logger.level
    # which a plan for another machine sets, and a token names
    platforms = jax.config.values["jax_platforms"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(flagsaver.flagsaver())
        stack.enter_context(mock.patch.object(sys, "argv", [module, *flags_of_it]))
        stack.enter_context(contextlib.chdir(ROOT))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "the load_module", DeprecationWarning)
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            err.write("" if isinstance(stopped.code, int) else str(stopped.code or ""))
        except Exception:
            code = 1
            traceback.print_exc(file=err)
        finally:
            logger.handlers[:] = handlers
            absl.logging.set_verbosity(verbosity)
            logger.setLevel(level)
            jax.config.update("jax_platforms", platforms)
            if not parsed:
                flags.FLAGS.unparse_flags()
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def study(module, config, workdir, overrides):
    """Runs a study by its launcher in this process. Returns its result and what was printed."""
    found, compute = [], running.compute

    def recorded(*arguments, **options):
        found.append(compute(*arguments, **options))
        return found[-1]

    with mock.patch.object(running, "compute", recorded):
        process = call(command(module, config, workdir, overrides))
    assert process.returncode == 0, process.stderr
    return found[-1], process.stdout
