"""Runs programs that may be killed, each in a process of its own, without importing everything for each of them.

    forked.run("print(sys.argv[1])", "hello", modules=("sys",)).stdout

Two interpreters import modules once, two more do without JAX, and two without jaxdp. Each forks a process for every
second program, before JAX has started. So two programs in succession, such as one that is killed and the one that goes
on, share neither memory nor a hash seed.
"""

import atexit
import functools
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
# Warnings are errors. Of an entry of the cache that another process is writing, JAX says so and compiles again.
PYTHON = [sys.executable, "-W", "error", "-W", "ignore:Error reading persistent compilation cache entry"]
STAGES = ("jaxdp.prediction", "jaxdp.recalibration", "jaxdp.tta")
LEDGERS = ("jaxdp.privacy", "jaxdp.command")  # Without JAX.
DEPENDENCIES = ("jax", "flax.linen", "optax", "orbax.checkpoint", "ml_collections", "dp_accounting")  # Without jaxdp.
PARTIES = ("configs.split.two_parties", "launch.parties", "jaxdp.split.noisy_upload")


class _Interpreter:
    def __init__(self) -> None:
        # A fork copies no threads, so nothing may start one.
        alone = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [*PYTHON, "-m", "tests.forked"],
            env={**os.environ, **alone, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(
        self, code: str, *arguments: str, modules: tuple[str, ...], env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("stdout", "stderr")]
            self._process.stdin.write(json.dumps([modules, code, arguments, files, dict(env)]) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess([*arguments], status, *(Path(file).read_text() for file in files))

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def _interpreters(alone: tuple[str, ...]) -> itertools.cycle:
    return itertools.cycle([_Interpreter() for _ in range(2)])


def run(
    code: str, *arguments: object, modules: tuple[str, ...], env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a new process, with `sys.argv[1:]` the arguments and `modules` imported.

    XLA reads its part of `env` when it starts. What a module reads when it is imported stays as it is.
    """
    alone = modules if modules in (LEDGERS, DEPENDENCIES) else ()
    return next(_interpreters(alone)).run(code, *map(str, arguments), modules=modules, env=env)


def _serve() -> None:
    for line in sys.stdin:
        modules, code, arguments, files, env = json.loads(line)
        for name in modules:
            importlib.import_module(name)
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            os.environ.update(env)
            _work(code, arguments, files)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _work(code: str, arguments: list[str], files: list[str]) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
