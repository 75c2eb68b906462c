"""Machines to compile for that are not there, and what their compilers say about a program.

A TPU's compiler writes the cycles that it expects beside each operation. A Pallas kernel has none.
Its instruction bundles are in the compiler's dump of its schedule, and give an estimate of its own.
A GPU's compiler has no such model. There the bytes and the operations of each kernel count.
"""

import collections
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdp.compilers import hlo

CAVEAT = "the compiler's estimate, not a time"
# In the folder of a process that compiles: what is asked, and what it found.
QUESTION = "question.json"
ANSWER = "answer.json"
TOP = 10  # operations that are listed
PALLAS = "tpu_custom_call"  # the target of a kernel's call
# The compiler of a TPU asks no service for the machine on which it runs.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The module that compiles for a platform.
COMPILERS = {"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}
INSTALL = 'pip install ".[compilers]"'
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to compile for.

    Attributes:
      platform: "tpu" or "cuda".
      options: The options of its topology.
      bandwidth: Bytes per second between its memory and its units. For a TPU, bytes per cycle.
      memory: The bytes of a chip that programs may take.
      clock: Cycles of a TPU per second, 0 for a GPU.
      peaks: Operations per second of products by the type of their operands, and of everything
          else.
    """

    platform: str
    options: Mapping[str, Any]
    bandwidth: float
    memory: int
    clock: float = 0.0
    peaks: Mapping[str, float] = dataclasses.field(default_factory=dict)


def _tpu(
    topology_name: str,
    *,
    clock: float,
    bandwidth: float,
    memory: float,
) -> Target:
    """Returns a TPU with a clock in GHz, a bandwidth in GB/s, and GiB of memory for programs."""
    return Target(
        platform="tpu",
        options={"topology_name": topology_name, "chips_per_host_bounds": (2, 2, 1)},
        bandwidth=bandwidth / clock,  # bytes per cycle
        memory=int(memory * 2**30),
        clock=clock * 1e9,
    )


# The clock of a TPU is that at which its matrix units reach the peak that Google Cloud states in
# bfloat16: 197, 918 and 459 Tflop/s with 131072, 524288 and 262144 operations a cycle.
TARGETS = {
    "v5e": _tpu("v5e:2x2", clock=1.5, bandwidth=819, memory=15.75),
    "v6e": _tpu("v6e:2x2", clock=1.75, bandwidth=1638, memory=31.24),
    "v5p": _tpu("v5p:2x2x1", clock=1.75, bandwidth=2765, memory=95.73),
    "h100": Target(
        "cuda",
        {"target_config": _H100, "topology": "1x1x1"},
        3.352e12,
        # JAX takes three quarters of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says
        # otherwise.
        memory=84929347584 * 3 // 4,
        peaks={"bf16": 989e12, "f16": 989e12, "f32": 495e12, "other": 67e12},
    ),
}


def target(name: str) -> Target:
    """Returns the target of a name.

    Raises:
      ValueError: There is none. The message has the names.
    """
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}.")
    return TARGETS[name]


def require(name: str) -> Target:
    """Returns the target of a name, whose compiler is installed.

    Raises:
      ValueError: There is no such target. The message has the names.
      ImportError: Its compiler is not installed. The message names the extra.
    """
    machine = target(name)
    module = COMPILERS[machine.platform]
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"{module} is not installed, which compiles for {machine.platform}. It comes with the "
            f"extra compilers: {INSTALL}."
        )
    return machine


def environment(name: str) -> dict[str, str]:
    """Returns the variables of a process that compiles for a target.

    Raises:
      ValueError, ImportError: As in `require`.
    """
    machine = require(name)
    variables = dict(os.environ)
    variables["JAX_PLATFORMS"] = "cpu"
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    variables["JAX_TRACEBACK_FILTERING"] = "off"  # the last line of an error is its message
    for of_tests in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):  # for a CPU
        variables.pop(of_tests, None)
    if machine.platform == "tpu":
        return variables | _ALONE
    # No card is there on which kernels could be tried.
    variables["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    nvidia = importlib.util.find_spec("nvidia")
    folders = list(nvidia.submodule_search_locations or ()) if nvidia else []
    assemblers = [os.path.join(folder, "cuda_nvcc", "bin") for folder in folders]
    folders = [*assemblers, os.environ.get("PATH", "")]
    variables["PATH"] = os.pathsep.join(folders)
    return variables


def answered(
    module: str, folder: str, environment: Mapping[str, str], seconds: float | None = None
) -> Mapping[str, Any]:
    """Runs a module in a process of its own on a folder with a question.

    Returns the answer that it leaves in the folder, or {"error": text}.
    """
    command = [sys.executable, "-m", module, folder]
    package = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**environment, "PYTHONPATH": path},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it was not compiled in {seconds:g} s"}
    file = pathlib.Path(folder, ANSWER)
    if process.returncode or not file.exists():
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"its process ended with {process.returncode}"}
    answer: dict[str, Any] = json.loads(file.read_text())
    return answer


def version(target: Target) -> str:
    """Returns the version of the compiler of a target."""
    package = "libtpu" if target.platform == "tpu" else "jax-cuda12-pjrt"
    return f"{package} {importlib.metadata.version(package)}"


@functools.cache
def device_of(name: str) -> Any:
    """Returns a device of a target, for which one can compile."""
    from jax.experimental import topologies

    target = TARGETS[name]
    return topologies.get_topology_desc(platform=target.platform, **target.options).devices[0]


def compile_for(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    donate: Sequence[int] = (),
) -> tuple[Any, float]:
    """Returns the compiled program of a function, and the seconds of the compiler.

    Its arguments are abstract. Call it in a process with `environment`.
    """
    sharding = jax.sharding.SingleDeviceSharding(device_of(name))

    def on_target(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = jax.tree.map(on_target, tuple(args))
    # What a step does not read lies on the chip all the same.
    jitted = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True)
    lowered = jitted.lower(*arguments)
    started = time.perf_counter()
    return lowered.compile(), time.perf_counter() - started


def estimate(
    name: str, compiled: Any, bundles: Mapping[str, float], assumed: hlo.Assumed = hlo.ASSUMED
) -> dict[str, Any]:
    """Returns what the compiler of a target says about a program, as numbers for JSON.

    `bundles` are those of Pallas kernels, as `schedules.of_kernels` returns them. `assumed` is that
    of `hlo.Program.steps`.
    """
    program = hlo.Program.parsed(compiled.as_text())
    memory = compiled.memory_analysis()
    kinds = ("temp", "output", "argument", "alias")
    sizes = {kind: getattr(memory, f"{kind}_size_in_bytes") for kind in kinds}
    machine = TARGETS[name]
    if machine.platform == "tpu":
        numbers = of_tpu(program, machine, bundles, assumed)
    else:
        numbers = of_gpu(program, machine, assumed)
    return numbers | {"memory": sizes}


# --- TPU ---


def of_tpu(
    program: hlo.Program,
    target: Target,
    bundles: Mapping[str, float] | None = None,
    assumed: hlo.Assumed = hlo.ASSUMED,
) -> dict[str, Any]:
    """Returns the estimated cycles of a program, by operation, with those of Pallas kernels apart.

    `bundles` are those of kernels, by `body`. A loop whose turns depend on data counts as often as
    `assumed` says, and is listed.
    """
    steps, loops = program.steps(_cycles, assumed)
    by_source: dict[str, float] = collections.defaultdict(float)
    kernels: dict[str, dict[str, Any]] = {}
    without_estimate = collections.Counter[str]()
    bundles = bundles or {}
    for step in steps:
        instruction = step.instruction
        expected = _cycles(instruction)
        if target_of(instruction) == PALLAS:
            of_kernel = bundles.get(body(instruction))
            kernels[instruction.name] = _kernel(program, step, target, of_kernel)
        elif expected:
            by_source[instruction.source or instruction.opcode] += step.times * expected
        elif instruction.opcode not in hlo.FREE:
            without_estimate[target_of(instruction) or instruction.opcode] += 1
    kernel_cycles = sum(kernel["cycles"] for kernel in kernels.values())
    cycles = float(sum(by_source.values()))
    return {
        "cycles": cycles,
        "kernel_cycles": kernel_cycles,
        "total": cycles + kernel_cycles,
        "pallas": list(kernels.values()),
        "loops": [dataclasses.asdict(loop) for loop in loops.values()],
        "without_estimate": dict(without_estimate),
        "costliest": _costliest(by_source, cycles + kernel_cycles),
    }


def _cycles(instruction: hlo.Instruction) -> float:
    estimated = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
    return float(estimated[1]) if estimated else 0.0


def target_of(instruction: hlo.Instruction) -> str:
    """Returns the target of a custom call, "" for another instruction."""
    if instruction.opcode != "custom-call":
        return ""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return target[1] if target else ""


def _costliest(by_source: Mapping[str, float], total: float) -> list[dict[str, Any]]:
    ordered = sorted(by_source.items(), key=lambda item: item[1], reverse=True)
    return [
        {"source": source, "amount": amount, "share": amount / total if total else 0.0}
        for source, amount in ordered[:TOP]
    ]


def body(instruction: hlo.Instruction) -> str:
    """Returns the program of a Pallas kernel, or the name of another instruction."""
    text = re.search(r'"body":"([^"]*)"', instruction.rest)
    return text[1] if text else instruction.name


def _kernel(
    program: hlo.Program,
    step: hlo.Step,
    target: Target,
    bundles: float | None,
) -> dict[str, Any]:
    """Returns the estimate of a Pallas kernel: its bundles, or its bytes if these take longer."""
    shapes = [step.instruction.shape, *program.operands(step)]
    moved = sum(map(hlo.byte_size, shapes)) / target.bandwidth
    return {
        "source": step.instruction.source,
        "shape": step.instruction.shape,
        "times": step.times,
        "bundles": bundles,
        "cycles_of_bytes": moved,
        "cycles": step.times * max(bundles or 0.0, moved),
    }


# --- GPU ---


def of_gpu(
    program: hlo.Program, target: Target, assumed: hlo.Assumed = hlo.ASSUMED
) -> dict[str, Any]:
    """Returns the bytes, operations and kernels of a program, and its time at the roofline.

    A loop whose turns depend on data counts as often as `assumed` says, and is listed.
    """
    steps, loops = program.steps(lambda step: hlo.byte_size(step.shape), assumed)
    by_source: dict[str, float] = collections.defaultdict(float)
    total: dict[str, float] = collections.defaultdict(float)
    for step in steps:
        instruction = step.instruction
        if instruction.opcode in hlo.FREE or instruction.opcode.endswith("-done"):
            continue
        work = hlo.work(program, step)
        library = target_of(instruction)
        seconds = max(work.bytes / target.bandwidth, _seconds(work.flops, target))
        by_source[instruction.source or instruction.opcode] += step.times * seconds
        total["launched"] += step.times
        total["kernels"] += 1
        total["library_calls"] += library != ""
        total["bytes"] += step.times * work.bytes
        total["flops"] += step.times * sum(work.flops.values())
        total["total"] += step.times * seconds
    names = ("total", "bytes", "flops", "kernels", "launched", "library_calls")
    return {
        **{name: total[name] for name in names},
        "loops": [dataclasses.asdict(loop) for loop in loops.values()],
        "costliest": _costliest(by_source, total["total"]),
    }


def _seconds(flops: Mapping[str, float], target: Target) -> float:
    other = target.peaks["other"]
    return math.fsum(count / target.peaks.get(kind, other) for kind, count in flops.items())
