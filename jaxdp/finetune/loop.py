"""The private training loop: ledger, checkpoints, crash recovery, evaluation.

A run is cut into chunks of `checkpoint_every` steps. Before a chunk starts, its event is reserved in the ledger under a
token, a hash of all that determines what the chunk will release: the compiled program, the versions and devices
it runs on, the data, the secret seed of the run, the step numbers, and the state it starts from. The chunk's noise,
batches and augmentation are drawn from streams derived from the seed AND the token. Hence

* a chunk that is run again after a crash with the same token repeats the same computation bit for bit; what it releases
  was released before and paid for, and the ledger does not charge it twice;
* if anything is different, so is the token: noise and batches are fresh, and the ledger charges again.

Noise is never added to two different gradients, and never is less spent than was released. The workdir notes what each
chunk was charged, so that a run that is resumed with another ledger charges that one in full.
"""

import contextlib
import hashlib
import hmac
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
import numpy as np
from tqdm import tqdm

from jaxdp.data import Source
from jaxdp.finetune.trainer import PrivateTrainer, TrainState
from jaxdp.privacy import Ledger
from jaxdp.privacy.events import from_json, to_json
from jaxdp.report import MetricsWriter, read_metrics
from jaxdp.report.workdir import alone
from jaxdp.transforms.noise import PrivatizeState, new_seed, stream
from jaxdp.version import __version__


def fit(
    trainer: PrivateTrainer,
    params: Any,
    source: Source,
    *,
    steps: int,
    ledger: Ledger,
    dataset: str,
    workdir: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 100,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    delta: float | None = None,
    seed: bytes | None = None,
    label: str = "dp-sgd",
    progress: bool = True,
) -> TrainState:
    """Runs `steps` steps of private training, or what is left of them after a crash.

    Args:
      trainer: from `jaxdp.finetune.dp_sgd`, `adp_alloc`, `adp_clip` or `gep`.
      params: parameters to start from; read only when the run starts for the first time.
      source: the private examples; `len(source)` must be the sampler's `num_examples`.
      steps: total number of steps.
      ledger, dataset: the account that pays; `dataset` must be registered.
      workdir: directory of the run: checkpoints, metrics and the secret seed. None keeps nothing and cannot resume.
      checkpoint_every: steps per chunk; also how often `evaluate` runs.
      evaluate: `evaluate(params) -> {name: number}` on public or held-out data, called with the moving average if
        there is one; what it reads must not be the private data (see `charged_accuracy` for that).
      delta: at which the ledger's epsilon is written to the metrics; by default that of the registered budget.
      seed: 16 secret bytes; default OS entropy. Give one only to reproduce a run in a test.
      label: of the ledger entries.
      progress: show a progress bar on stderr.

    Returns:
      The state after the last step.

    Raises:
      BudgetExceeded: before the chunk that would overspend; what was done so far stays in the workdir.
      ValueError: source and sampler differ in size, the workdir holds a run with more steps than asked for or is in
        use by another process, the data set is not registered, or neither it nor the caller has a delta.

    Formal guarantees:
      At any instant, whatever the process has computed on private data was reserved in the ledger before. On one
      device, a run that is killed and resumed ends bit-identical to one that is not.
    """
    if len(source) != trainer.sampler.num_examples:
        raise ValueError(
            f"source has {len(source)} examples but the sampler was made for {trainer.sampler.num_examples}: "
            "the event would not describe what happens. Make the sampler from len(source)."
        )
    if checkpoint_every < 1 or steps < 0:
        raise ValueError(f"need checkpoint_every >= 1 and steps >= 0, got {checkpoint_every} and {steps}.")
    if seed is not None and len(seed) != 16:
        raise ValueError(f"seed must be 16 bytes, got {len(seed)}; leave it out to draw them.")
    ledger.epsilon(dataset, delta=delta)  # raises now rather than after a chunk was paid for
    with contextlib.closing(_Run(pathlib.Path(workdir) if workdir is not None else None, seed)) as run:
        state, first = run.restore(trainer.init(params))
        if first > steps:
            raise ValueError(f"workdir holds a run of {first} steps, more than steps={steps}; use a new workdir.")
        for token, paid in run.charges().items():  # free where they were paid; a ledger that lost them is told again
            with ledger.spend(dataset, from_json(paid), label=f"{label}, charged again on resuming", token=token):
                pass
        identity = _identity(trainer, state, source)
        with tqdm(total=steps, initial=first, desc=label, unit="step", disable=not progress) as bar:
            while first < steps:
                last = min(first + checkpoint_every, steps)
                token, event = run.token(identity, state, first, last), trainer.event(first, last)
                with ledger.spend(dataset, event, label=f"{label} {first}..{last - 1}", token=token):
                    run.charge(first, token, to_json(event))
                    state, rows = _chunk(trainer, state, source, run.secret(token), last - first, bar)
                    rows[-1]["epsilon"] = ledger.epsilon(dataset, delta=delta)
                    if evaluate is not None:
                        rows[-1] |= evaluate(state.params if state.ema is None else state.ema)
                    run.save(first, rows, state)
                bar.set_postfix({key: f"{value:.3f}" for key, value in rows[-1].items()})
                first = last
    return state


def _chunk(
    trainer: PrivateTrainer, state: TrainState, source: Source, secret: bytes, steps: int, bar: Any
) -> tuple[TrainState, list[dict[str, float]]]:
    """Runs one chunk, all of whose randomness comes from `secret`; returns the metrics of each step."""
    state = state._replace(
        noise=PrivatizeState(stream(secret, "gradient noise"), state.step),
        key=stream(secret, "augmentation", impl="threefry2x32"),
    )
    rows = []
    for _ in range(steps):
        state, row = trainer.step(state, source)
        rows.append(row)
        bar.update()
    return state, [{name: float(value) for name, value in row.items()} for row in jax.device_get(rows)]


class _Run:
    """What a run keeps on disk, if it has a workdir: the secret seed, charges, checkpoints, metrics."""

    def __init__(self, workdir: pathlib.Path | None, seed: bytes | None):
        self._manager: Any = None
        self._opened = contextlib.ExitStack()
        if workdir is None:
            self._seed = seed or new_seed()
            return
        import orbax.checkpoint as ocp

        workdir.mkdir(parents=True, exist_ok=True)
        with self._opened as opened:  # closes what is open if the rest fails
            opened.enter_context(alone(workdir))
            self._seed = stored_seed(workdir / "secret_seed", seed)
            self._workdir = workdir
            self._charges = opened.enter_context(MetricsWriter(workdir / "charges.jsonl", fsync=True))
            self._metrics = opened.enter_context(MetricsWriter(workdir / "metrics.jsonl"))
            self._manager = ocp.CheckpointManager(
                (workdir / "checkpoints").absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
            )
            opened.callback(self._manager.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Closes the files."""
        self._opened.close()

    def restore(self, state: TrainState) -> tuple[TrainState, int]:
        """The newest checkpoint, or `state`; and the number of steps done."""
        if self._manager is None:
            return state, 0
        import orbax.checkpoint as ocp

        step = self._manager.latest_step() or 0
        self._metrics.truncate_after(step)  # rows of steps that are about to be repeated
        if step:
            saved = self._manager.restore(step, args=ocp.args.StandardRestore(_resumable(state)))
            # Orbax gives arrays that are bound to a device, which compile to another program than the first ones did.
            state = state._replace(**jax.device_put(jax.device_get(saved)))
        return state, step

    def charges(self) -> dict[str, str]:
        """The event, by token, of every chunk that was ever started here."""
        if self._manager is None:
            return {}
        return {row["token"]: row["event"] for row in read_metrics(self._workdir / "charges.jsonl")}

    def charge(self, first: int, token: str, event: str) -> None:
        """Notes, before a chunk starts, what it was charged."""
        if self._manager is not None:
            self._charges.write(first, token=token, event=event)

    def save(self, first: int, rows: list[dict[str, float]], state: TrainState) -> None:
        """Makes metrics and state after a chunk durable; the keys of a chunk are derived again, never stored."""
        if self._manager is None:
            return
        import orbax.checkpoint as ocp

        for step, row in enumerate(rows, first + 1):
            self._metrics.write(step, **row)
        self._manager.save(first + len(rows), args=ocp.args.StandardSave(_resumable(state)))

    def token(self, identity: bytes, state: TrainState, first: int, last: int) -> str:
        """Names all that determines what a chunk releases; keyed by the seed, so that it tells nothing about it."""
        message = identity + _digest(_resumable(state)) + f"{first}..{last}".encode()
        return hmac.digest(self._seed, b"token" + message, "sha256").hex()

    def secret(self, token: str) -> bytes:
        """The seed of all randomness of a chunk."""
        return _derive(self._seed, b"chunk" + token.encode())


def _resumable(state: TrainState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ("step", "params", "opt_state", "ema", "carried", "released")}


def _derive(seed: bytes, purpose: bytes) -> bytes:
    return hmac.digest(seed, purpose, "sha256")[:16]


def stored_seed(path: pathlib.Path, seed: bytes | None = None) -> bytes:
    """The seed in `path`, which only its owner may read; a new one if there is none yet."""
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write((seed or new_seed()).hex())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    stored = bytes.fromhex(path.read_text())
    if seed is not None and stored != seed:
        raise ValueError(f"seed differs from the one this run started with, in {path}; resume without seed=.")
    return stored


def _digest(tree: Any) -> bytes:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


# Of the environment, what changes how XLA computes.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "PJRT_NPROC", "NPROC")


def processor() -> list[Any]:
    """What XLA compiles for on the host: its instructions, and the cores among which it splits its sums."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    linux = pathlib.Path("/proc/cpuinfo")
    if not linux.exists():
        return [cores, platform.machine(), platform.processor()]
    fields = ("model name", "flags", "Features", "CPU part")
    return [cores, *sorted({line for line in linux.read_text().splitlines() if line.startswith(fields)})]


def _identity(trainer: PrivateTrainer, state: TrainState, source: Source) -> bytes:
    """All that determines a run's arithmetic except its state and its seed."""
    devices = jax.devices()
    sampling = importlib.metadata.version("jax-privacy")  # which examples are drawn depends on it
    facts = {
        "program": hashlib.sha256(trainer.lowered_text(state, source).encode()).hexdigest(),
        "data": source.fingerprint,
        "public": _digest(trainer.query.public).hex(),
        "sampler": repr(trainer.sampler),
        "versions": [__version__, jax.__version__, jaxlib.__version__, np.__version__, sampling],
        "devices": [len(devices), devices[0].device_kind, devices[0].client.platform_version, *processor()],
        "flags": [str(jax.config.values["jax_default_matmul_precision"]), *map(os.environ.get, VARIABLES)],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
