"""Runs programs that may be killed, each in a process of its own, without importing everything for
each of them.

    forked.run("print(sys.argv[1])", "hello", modules=("sys",)).stdout

Two interpreters import modules once, and two more do without JAX. Of two, each forks a process for
every second program, before JAX has started. So two programs in succession, such as one that is
killed and the one that goes on, share neither memory nor a hash seed."""

import atexit
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import small_programs

ROOT = Path(__file__).resolve().parent.parent
# Warnings are errors. Of an entry of the cache that another process is writing, JAX says so and
# compiles again.
PYTHON = [
    sys.executable,
    "-W",
    "error",
    "-W",
    "ignore:Error reading persistent compilation cache entry",
]
STAGES = ("jaxdp.prediction", "jaxdp.recalibration", "jaxdp.tta")
LEDGERS = ("jaxdp.privacy", "jaxdp.command")  # Without JAX.
PARTIES = ("configs.split.two_parties", "launch.parties", "jaxdp.split.noisy_upload")


class Interpreter:
    """An interpreter that imports modules once and forks processes.

    Args:
        python: The command of the interpreter.
        env: Its variables beside those of this process.
    """

    def __init__(
        self, python: Sequence[str] = PYTHON, env: Mapping[str, str] = MappingProxyType({})
    ):
        self._env = {"PYTHONPATH": str(ROOT), **env}
        # A fork copies no threads, so nothing may start one.
        alone = {
            name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        }
        self._process = subprocess.Popen(
            [*python, "-m", "tests.forked"],
            env={**os.environ, **self._env, **alone},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(
        self, code: str, *arguments: str, modules: tuple[str, ...], env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            files = [os.path.join(folder, name) for name in ("stdout", "stderr")]
            process = self.start(code, *arguments, modules=modules, env=env, files=files)
            status = self.ask(pid=process.pid, wait=True)
            return subprocess.CompletedProcess(
                [*arguments], status, *(Path(file).read_text() for file in files)
            )

    def start(
        self,
        code: str,
        *arguments: str,
        modules: tuple[str, ...],
        env: Mapping[str, str],
        files: Sequence[str],
        cwd: str | Path = ROOT,
    ) -> "Process":
        """Starts a process that appends its standard output and error to two files."""
        given = {
            "arguments": arguments,
            "files": files,
            "cwd": str(cwd),
            "env": {**os.environ, **self._env, **env},
        }
        return Process(self, self.ask(code=code, modules=modules, **given))

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Process:
    """A process that an interpreter has forked, with a part of the interface of
    `subprocess.Popen`."""

    def __init__(self, interpreter: Interpreter, pid: int):
        self._interpreter, self.pid = interpreter, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._interpreter.ask(pid=self.pid, wait=False)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait(60)


@functools.cache
def _interpreters(alone: tuple[str, ...]) -> itertools.cycle:
    return itertools.cycle([Interpreter() for _ in range(2)])


def _next(modules: tuple[str, ...]) -> Interpreter:
    return next(_interpreters(modules if modules == LEDGERS else ()))


def run(
    code: str,
    *arguments: object,
    modules: tuple[str, ...],
    env: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a new process, with `sys.argv[1:]` the arguments and `modules` imported.

    XLA reads its part of `env` when it starts. What a module reads when it is imported stays as it
    is."""
    return _next(modules).run(code, *map(str, arguments), modules=modules, env=env)


def start(
    code: str, *arguments: object, modules: tuple[str, ...], files: Sequence[Path]
) -> Process:
    """Starts such a process, whose standard output and error go to two files."""
    return _next(modules).start(
        code, *map(str, arguments), modules=modules, env={}, files=list(map(str, files))
    )


def _serve() -> None:
    small_programs.collect_rarely()
    contexts_are_shared = False
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            pid, status = os.waitpid(asked["pid"], 0 if asked["wait"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            for name in asked["modules"]:
                importlib.import_module(name)
            if "jax" in sys.modules and not contexts_are_shared:
                small_programs.share_contexts()
                contexts_are_shared = True
            gc.freeze()
            answer = os.fork()
            if answer == 0:
                os.environ.clear()
                os.environ.update(asked["env"])
                os.chdir(asked["cwd"])
                _work(asked["code"], asked["arguments"], asked["files"])
        print(json.dumps(answer), flush=True)


def _work(code: str, arguments: list[str], files: list[str]) -> None:
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
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
