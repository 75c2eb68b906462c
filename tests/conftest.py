"""Settings and helpers shared by all tests."""

import gc
import hashlib
import importlib.metadata
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / ".jax_cache"
PROCESS = Path("/proc/self")

# Workers keep to cores of their own. XLA would start threads for all cores in each of them, which
# takes 5 % longer.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    worker, workers = (
        int(os.environ["PYTEST_XDIST_WORKER"][2:]),
        int(os.environ["PYTEST_XDIST_WORKER_COUNT"]),
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[worker::workers] or cores)

# XLA reads flags when JAX starts. Eight devices cost nothing measurable. Its older code for fusions
# compiles a third faster, and a program in one part a sixth faster than in several. Later releases
# stop at a flag that they do not know.
FLAGS = ["--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
for flag in FLAGS:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# The compiler's expensive passes take longer than the tests' programs. Public CI also runs the
# tests with them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# Tracing, lowering and compiling take 5 % longer where each operation names its lines of Python.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# A ledger waits for the disk at every payment, 5 ms each. The files of tests are in memory where it
# has room.
SHARED_MEMORY = Path("/dev/shm")
if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > 6e9:
    for name in ("TMPDIR", "PYTEST_DEBUG_TEMPROOT"):
        os.environ.setdefault(name, str(SHARED_MEMORY))
    tempfile.tempdir = os.environ["TMPDIR"]
# All workers, the programs that they start, and the next run share what was compiled. A program of
# 20 ms compiles as quickly as it is read.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")
# Tests have no home. Those of the registry give themselves one.
os.environ["JAXDP_RECORD_DIGESTS"] = "0"
os.environ.pop("JAXDP_LEDGER", None)
# Several workers, and the programs that they start, share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

from jaxdp.memory import forget_programs, mappings
from tests import small_programs
from tests.forked import PYTHON

# flax and optax respect rank promotion; optax.adam does not respect strict dtypes (see
# `strict_dtypes`).
jax.config.update("jax_numpy_rank_promotion", "raise")
# As the launchers do, see jaxdp.memory. A test may run one in this process, which must not change
# the settings.
jax.config.update("jax_cpu_enable_async_dispatch", False)

small_programs.share_contexts()
small_programs.collect_rarely()

hypothesis.settings.register_profile("jaxdp", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("jaxdp")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `make parity` runs. Skips what this machine cannot run, and says why."""
    if "parity" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("parity")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("parity")]
    skip_download = pytest.mark.skip(reason="set JAXDP_DATA_DIR to a TFDS directory")
    skip_gpu = pytest.mark.skip(reason="JAX finds no GPU")
    for item in items:
        if item.get_closest_marker("download") and "JAXDP_DATA_DIR" not in os.environ:
            item.add_marker(skip_download)
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            item.add_marker(skip_gpu)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Modules and tests stay until the end. Nobody has to look for garbage in them.
    gc.freeze()


# --- Entropy ------------------------------------------------------------------------------------

# Noise and samples of jaxdp come from the operating system. A test of an accuracy would fail by
# chance then, once in many runs. Each test has a stream of bytes of its own, the same in each run.
# A program that a test starts draws from the system. A release with a workdir derives its noise
# from its token too, which names the host and the source of jaxdp. So its noise differs between
# machines and commits, and an assertion on what it trained needs a margin of five standard
# deviations.


@contextmanager
def entropy_of(name: str) -> Iterator[None]:
    """Lets `secrets.token_bytes` return the bytes of the stream with this name."""
    blocks = itertools.count()

    def token_bytes(size: int | None = None) -> bytes:
        block = f"{name}:{next(blocks)}".encode()
        return hashlib.shake_256(block).digest(32 if size is None else size)

    outer = secrets.token_bytes
    secrets.token_bytes = token_bytes
    try:
        yield
    finally:
        secrets.token_bytes = outer


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with entropy_of(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    # Which test sets up a shared fixture depends on the order of tests.
    name = f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"
    shared = fixturedef.scope != "function"
    with entropy_of(name) if shared else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def strict_dtypes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Refuse implicit dtype promotion in tests/transforms.

    A test that calls a library with looser habits (optax.adam) opens
    `jax.numpy_dtype_promotion("standard")`."""
    strict = request.path.is_relative_to(ROOT / "tests" / "transforms")
    with jax.numpy_dtype_promotion("strict") if strict else nullcontext():
        yield


# A worker forgets compiled programs at its share of the memory. Forgetting takes two seconds, and
# the next test traces and compiles again. With two workers on a machine of 24 GB it happened ninety
# times at a limit of 1.9 GB, and took a tenth of all time.
def memory_of_a_worker() -> float:
    """Returns the bytes that a worker may take. All workers take two fifths of the machine or of
    its container."""
    total = PAGE * os.sysconf("SC_PHYS_PAGES")
    container = Path("/sys/fs/cgroup/memory.max")
    if container.exists() and (limit := container.read_text().strip()).isdigit():
        total = min(total, int(limit))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return min(max(0.4 * total / workers, 1.9e9), 4e9)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Forgets compiled programs before a worker exceeds its share, though a module's tests may
    share them."""
    yield
    if resident() > MEMORY:
        forget_programs()


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Forgets compiled programs after a module, before they fill the 65,530 mappings that Linux
    allows a process."""
    yield
    if resident() > 0.9 * MEMORY or mappings() > 25_000:
        forget_programs()


def resident() -> int:
    """Returns the memory of this process in bytes, 0 if it is not known."""
    pages = int((PROCESS / "statm").read_text().split()[1]) if PROCESS.exists() else 0
    return pages * PAGE


PAGE = os.sysconf("SC_PAGE_SIZE")
MEMORY = memory_of_a_worker()


@pytest.fixture(scope="session")
def run_in_subprocess() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return `run(code, env={}, timeout=120)`: run Python code in a fresh interpreter at the
    repository root.

    Warnings are errors there too; `env` adds to (or, with value None, removes from) the
    environment. Fails the test with the program's stderr if it exits non-zero."""

    def run(
        code: str, env: Mapping[str, str | None] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        merged = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        result = subprocess.run(
            [*PYTHON, "-c", code],
            cwd=ROOT,
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert result.returncode == 0, (
            f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
        )
        return result

    return run
