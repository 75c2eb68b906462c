"""The facts that determine the bits of a computation.

They are programs, arrays, versions, flags, devices and the host.

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
    r"|(?:cu|hip)_threefry2x32\w*|__cu(?:dnn|blas)\$\w+|__onednn\$\w+"
    r"|__gpu\$xla\.gpu\.triton|triton_kernel_call|tpu_custom_call|mosaic_gpu\w*"
    r"|Qr|Eigh|LuDecomposition|Cholesky|TriangularSolve|TopK|ApproxTopK"
    r"|ProductOfElementaryHouseholderReflectors|PartialReduce|MoveToHost|MoveToDevice"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|LayoutConstraint"
    r"|annotate_device_placement"
    r"|xla\.sdy\.\w+|shape_assertion|mhlo\.\w+|chlo\.\w+"
)


def digest(tree: Any) -> str:
    """Returns the SHA-256 of a pytree, with its paths, shapes and dtypes.

    Leaves are arrays, numbers, strings and bytes.

    Of an array that several processes share, each hashes the parts that it has.

    Raises:
      TypeError: A leaf has no value to hash, such as a function or a typed key.
    """
    sha256 = hashlib.sha256()
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        sha256.update(_bytes_of(jax.tree_util.keystr(path), leaf))
    return sha256.hexdigest()


def with_words(tree: Any) -> Any:
    """Returns a pytree with the words of typed keys in their place, for `digest`.

    The state of `optax.add_noise` has a key, which is no secret of a release.
    """

    def words(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array)
        is_key = is_array and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(words, tree)


def _bytes_of(name: str, leaf: Any) -> bytes:
    """Returns a line with name, type and shape of a leaf, and its bytes behind the line.

    The line determines the length of the bytes, so different trees never give the same bytes.
    """
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        # By index, so that replicas of a part count once.
        own_parts = {repr(part.index): part.data for part in leaf.addressable_shards}
        return f"{name} {leaf.dtype} {leaf.shape}\n{digest(own_parts)}".encode()
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    if is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        array = np.asarray(jax.device_get(leaf))
        # Their bytes are addresses.
        if array.dtype.hasobject:
            raise TypeError(
                f"a fact at {name!r} is an array of Python objects. Give arrays of numbers."
            )
        return f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes()
    if isinstance(leaf, bool | int | float | complex | str | bytes):
        # `repr` tells any two floats apart, and 0.0 from -0.0.
        text = leaf if isinstance(leaf, bytes) else repr(leaf).encode()
        return f"{name} {type(leaf).__name__} {len(text)}\n".encode() + text
    raise TypeError(
        f"a fact at {name!r} is a {type(leaf).__name__}, which has no bytes to hash. Give "
        "arrays or text."
    )


def program(function: jax.stages.Wrapped, *args: Any, **kwargs: Any) -> str:
    """Returns the program of a `jax.jit` function as text. Equal texts compute the same.

    The arguments are arrays or `jax.ShapeDtypeStruct`s.
    """
    return function.lower(*args, **kwargs).as_text()


_HOISTED = "jax_use_simplified_jaxpr_constants"


def check_constants() -> None:
    """Raises RuntimeError if texts of programs lack the arrays that a function closes over.

    Functions that close over other arrays would then have one token, and share noise.
    """
    if jax.config.values.get(_HOISTED):
        raise RuntimeError(
            f"{_HOISTED} is True. Texts of programs then lack the arrays that a function closes "
            "over, so a release that is repeated could put its old noise on another value. Nothing "
            f'is spent. Begin Python with jax.config.update("{_HOISTED}", False).'
        )


@functools.lru_cache(maxsize=64)
def calls_host(text: str) -> bool:
    """Returns whether a program calls code that no hash of the program covers.

    Such code has a state of its own. An example is a callback to Python.

    A custom call counts as such unless its target is known to be pure. So `jax.ffi.ffi_call` always
    does.
    """
    if _HOST_TRANSFER.search(text) is not None:
        return True
    for groups in _CUSTOM_CALL.findall(text):
        # One of the three groups of the pattern matched.
        target = next(filter(None, groups), "")
        if _PURE_CALL.fullmatch(target) is None:
            return True
    return False


def deterministic() -> bool:
    """Returns whether another process computes the same bits.

    XLA chooses GPU algorithms by their speed.
    """
    on_request = "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "")
    return on_request or not any(device.platform == "gpu" for device in devices())


def devices() -> list[jax.Device]:
    """Returns the devices of all platforms of this process.

    It may compute on others than the default ones.
    """
    every: list[jax.Device] = []
    for backend in backends().values():
        every += backend.devices()
    return every


def environment() -> dict[str, Any]:
    """Returns the facts, other than program and data, that determine the last bits of a result."""
    flags = {}
    for name, value in jax.config.values.items():
        if not name.upper().startswith(_HARMLESS):
            flags[name] = repr(value)
    variables = {}
    for name, text in os.environ.items():
        if name.startswith(PREFIXES) and not name.startswith(_HARMLESS):
            variables[name] = text
    return {
        **versions(),
        "devices": [
            f"{device.device_kind}, {device.client.platform_version}" for device in devices()
        ],
        "flags": flags,
        "variables": variables,
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
    cpu_info = pathlib.Path("/proc/cpuinfo")
    if not cpu_info.exists():  # not Linux
        return [cores, platform.machine(), platform.processor()]
    # The names of x86, and the last two of ARM. Other fields change with time, such as the clock.
    fields = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in cpu_info.read_text().splitlines() if line.startswith(fields)}
    return [cores, *sorted(lines)]


@functools.cache
def _versions(version: Callable[[str], str]) -> dict[str, str]:
    # Kept, because each version reads and parses a file.
    return {name: version(name) for name in PACKAGES}


@functools.cache
def _library() -> str:
    """Returns a hash of the source of jaxdp, because a developer's version stays the same."""
    sha256 = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[1].rglob("*.py")):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()
