"""What determines the bits of a computation: programs, arrays, versions, flags, devices and the host.

A release that is repeated under the same secret must repeat the same bits, or the difference of the two values would
have no noise in it. So the token of a release is a hash of everything here. A false difference costs a charge, a false
agreement would cost the guarantee: facts that seldom matter are included.
"""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any

import jax
import numpy as np

from jaxdp.version import __version__

# Packages whose version can move the last bits of a result, or decide which examples are drawn.
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "flax", "optax", "jax-privacy")
# Environment variables by which XLA, its runtimes and BLAS libraries compute in another way.
PREFIXES = (
    *("XLA_", "JAX_", "LIBTPU_", "PJRT_", "TF_", "NPROC"),
    *("NVIDIA_", "CUDA_", "CUBLAS_", "CUDNN_", "ROCM_", "OMP_", "MKL_", "OPENBLAS_"),
)
# Where compiled programs are kept, and how memory is reserved: nothing that moves a bit.
_HARMLESS = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_", "XLA_PYTHON_CLIENT_", "JAX_TRACEBACK_", "JAX_LOG_")
# How calls back to Python appear in StableHLO: a custom call on CPU and GPU, a transfer to the host on TPU.
_HOST_CALL = re.compile(r"custom_call\s*@\w*callback|is_host_transfer\s*=\s*true")


def digest(tree: Any) -> str:
    """Returns the SHA-256 of a pytree of arrays, numbers, strings and bytes, with its paths, shapes and dtypes.

    Raises:
      TypeError: a leaf has no value that a hash could stand for, such as a function or a typed key.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if is_array and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = np.asarray(jax.device_get(leaf))
            if array.dtype.hasobject:
                raise TypeError(f"a fact at {name!r} is an array of Python objects; give arrays of numbers.")
            found.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
        elif isinstance(leaf, bool | int | float | complex | str | bytes):
            text = leaf if isinstance(leaf, bytes) else repr(leaf).encode()
            found.update(f"{name} {type(leaf).__name__} {len(text)}\n".encode() + text)
        else:
            raise TypeError(
                f"a fact at {name!r} is a {type(leaf).__name__}, which has no bytes to hash; give arrays or text."
            )
    return found.hexdigest()


def program(function: Any, *args: Any, **kwargs: Any) -> str:
    """Returns the text of a `jax.jit` function compiled for arrays or `jax.ShapeDtypeStruct`s; static arguments as is.

    Equal texts compute the same.
    """
    return function.lower(*args, **kwargs).as_text()


@functools.lru_cache(maxsize=64)
def calls_host(text: str) -> bool:
    """Returns whether a program calls back to Python, where there is state that no hash of the program sees."""
    return _HOST_CALL.search(text) is not None


def deterministic() -> bool:
    """Returns whether another process computes the same bits: XLA chooses the algorithms of a GPU by their speed."""
    return jax.default_backend() != "gpu" or "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "")


def environment() -> dict[str, Any]:
    """Returns everything but program and data that decides on the last bits of a result."""
    devices = jax.devices()
    return {
        "library": [__version__, _library()],
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "devices": [f"{device.device_kind}, {device.client.platform_version}" for device in devices],
        "flags": {n: repr(v) for n, v in jax.config.values.items() if not n.upper().startswith(_HARMLESS)},
        "variables": {n: v for n, v in os.environ.items() if n.startswith(PREFIXES) and not n.startswith(_HARMLESS)},
        "host": [platform.node(), *processor()],
    }


def processor() -> list[Any]:
    """Returns what XLA compiles for on the host: instructions, and the cores that share its sums."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not (linux := pathlib.Path("/proc/cpuinfo")).exists():
        return [cores, platform.machine(), platform.processor()]
    fields = ("model name", "flags", "Features", "CPU part")
    return [cores, *sorted({line for line in linux.read_text().splitlines() if line.startswith(fields)})]


@functools.cache
def _library() -> str:
    """A hash of the source text of this library."""
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
