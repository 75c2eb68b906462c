"""The facts that determine the bits of a computation: programs, arrays, versions, flags, devices
and the host.

A release that is repeated under the same secret must repeat the same bits. Otherwise the difference
of the two values would have no noise. So the token of a release is a hash of all these facts. A
false difference costs a charge, but a false agreement would break the guarantee. Facts that seldom
matter are therefore included.
"""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.backend import backends

from jaxdp.version import __version__

# Packages whose version can change the last bits of a result or the drawn examples.
PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "flax", "optax", "jax-privacy")
# Environment variables that change how XLA, its runtimes and BLAS libraries compute.
PREFIXES = (
    *("XLA_", "JAX_", "LIBTPU_", "PJRT_", "TF_", "NPROC"),
    *("NVIDIA_", "CUDA_", "CUBLAS_", "CUDNN_", "ROCM_", "OMP_", "MKL_", "OPENBLAS_"),
)
# These set where compiled programs are kept and how memory is reserved. They change no bit.
_HARMLESS = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_",
    "XLA_PYTHON_CLIENT_",
    "JAX_TRACEBACK_",
    "JAX_LOG_",
)
# A transfer to the host, which is how a TPU calls back to Python.
_HOST_TRANSFER = re.compile(r"is_host_transfer\s*=\s*true")
# The targets of custom calls, in the text of a program and as an attribute.
_CUSTOM_CALL = re.compile(
    r"custom_call\s*@(?:\"([^\"]+)\"|([\w.$]+))|call_target_name\s*=\s*\"([^\"]*)\""
)
# Custom calls of JAX and XLA that are functions of their operands: linear algebra, sorting, random
# bits, products, Pallas kernels, and notes for the compiler. Any other target is code that no hash
# of the program covers.
_PURE_CALL = re.compile(
    r"lapack_\w+|(?:cu|hip)(?:solver|blas|dnn|sparse|fft)\w+|(?:cu|hip)_lu_pivots_to_permutation"
    r"|(?:cu|hip)_threefry2x32\w*|__cu(?:dnn|blas)\$\w+|__onednn\$\w+|__gpu\$xla\.gpu\.triton|triton_kernel_call"
    r"|tpu_custom_call|mosaic_gpu\w*|Qr|Eigh|LuDecomposition|Cholesky|TriangularSolve|TopK|ApproxTopK"
    r"|ProductOfElementaryHouseholderReflectors|PartialReduce|MoveToHost|MoveToDevice"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|LayoutConstraint|annotate_device_placement"
    r"|xla\.sdy\.\w+|shape_assertion|mhlo\.\w+|chlo\.\w+"
)


def digest(tree: Any) -> str:
    """Returns the SHA-256 of a pytree of arrays, numbers, strings and bytes, with its paths, shapes
    and dtypes.

    Of an array that several processes share, each hashes the parts that it has.

    Raises:
      TypeError: A leaf has no value to hash, such as a function or a typed key.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            found.update(f"{name} {leaf.dtype} {leaf.shape}\n{digest(_own_parts(leaf))}".encode())
        elif is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = np.asarray(jax.device_get(leaf))
            if array.dtype.hasobject:
                raise TypeError(
                    f"a fact at {name!r} is an array of Python objects. Give arrays of numbers."
                )
            found.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
        elif isinstance(leaf, bool | int | float | complex | str | bytes):
            text = leaf if isinstance(leaf, bytes) else repr(leaf).encode()
            found.update(f"{name} {type(leaf).__name__} {len(text)}\n".encode() + text)
        else:
            raise TypeError(
                f"a fact at {name!r} is a {type(leaf).__name__}, which has no bytes to hash. Give "
                "arrays or text."
            )
    return found.hexdigest()


def _own_parts(array: jax.Array) -> dict[str, Any]:
    return {repr(part.index): part.data for part in array.addressable_shards}


def program(function: jax.stages.Wrapped, *args: Any, **kwargs: Any) -> str:
    """Returns the text of a `jax.jit` function for arrays or `jax.ShapeDtypeStruct`s. Equal texts
    compute the same.
    """
    return function.lower(*args, **kwargs).as_text()


@functools.lru_cache(maxsize=64)
def calls_host(text: str) -> bool:
    """Returns whether a program calls code with a state of its own, such as Python, that no hash of
    the program covers.

    A custom call counts as such unless its target is known to be pure. So `jax.ffi.ffi_call` always
    does.
    """
    targets = {next(filter(None, groups), "") for groups in _CUSTOM_CALL.findall(text)}
    unknown = any(_PURE_CALL.fullmatch(target) is None for target in targets)
    return unknown or _HOST_TRANSFER.search(text) is not None


def deterministic() -> bool:
    """Returns whether another process computes the same bits. XLA chooses GPU algorithms by their
    speed.
    """
    on_request = "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "")
    return on_request or not any(device.platform == "gpu" for device in devices())


def devices() -> list[jax.Device]:
    """Returns the devices of all platforms of this process. It may compute on others than the
    default ones.
    """
    return [device for backend in backends().values() for device in backend.devices()]


def environment() -> dict[str, Any]:
    """Returns the facts, other than program and data, that determine the last bits of a result."""
    return {
        **versions(),
        "devices": [
            f"{device.device_kind}, {device.client.platform_version}" for device in devices()
        ],
        "flags": {
            n: repr(v) for n, v in jax.config.values.items() if not n.upper().startswith(_HARMLESS)
        },
        "variables": {
            n: v
            for n, v in os.environ.items()
            if n.startswith(PREFIXES) and not n.startswith(_HARMLESS)
        },
        "host": [platform.node(), *processor()],
    }


def versions() -> dict[str, Any]:
    """Returns the source of jaxdp and the versions of the packages that determine results."""
    return {
        "library": [__version__, _library()],
        "versions": _versions(importlib.metadata.version) | {"python": platform.python_version()},
    }


def processor() -> list[Any]:
    """Returns the host's instructions and cores, for which XLA compiles."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not (linux := pathlib.Path("/proc/cpuinfo")).exists():
        return [cores, platform.machine(), platform.processor()]
    fields = ("model name", "flags", "Features", "CPU part")
    return [
        cores,
        *sorted({line for line in linux.read_text().splitlines() if line.startswith(fields)}),
    ]


@functools.cache
def _versions(version: Callable[[str], str]) -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}  # each reads and parses a file


@functools.cache
def _library() -> str:
    found = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()
