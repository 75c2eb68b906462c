"""Jobs that are killed with SIGKILL inside paid work, at every ledger and file operation, and run
again.

    python -m tests.faults.kills --kills=500 --output=kills.json

This process imports everything once and forks one child per run, before JAX has started. Hooks in
the child count the operations and kill it before or after one of them. Each job runs once as a user
runs it, which gives the reference. The state of its workdir at its first reservation is kept, and
every killed run starts from there.

Partial results are written after each kill. The same command continues from them.
"""

import argparse
import builtins
import collections
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import io
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# A fork copies no threads, so nothing may start one. All children share what they compile.
os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "MPLBACKEND": "agg",
}
os.environ |= {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401
import safetensors.numpy  # noqa: F401
import sklearn.datasets  # noqa: F401
from ml_collections import ConfigDict

import launch.adapt
import launch.finetune
import launch.frame
import launch.lifecycle
import launch.predict
import launch.recalibrate
import launch.split
from jaxdp import data, finetune
from jaxdp.files import pack, read_package, unpack, write_json
from jaxdp.privacy import Ledger
from jaxdp.privacy.chain import head_of, head_text
from jaxdp.privacy.events import composition, to_json
from jaxdp.privacy.integrity import COUNTED_TOTALS
from jaxdp.privacy.ledger import Head, LedgerDamaged
from jaxdp.privacy.spends import Spends
from jaxdp.release import notes
from jaxdp.report import MetricsWriter, read_metrics, verdict
from jaxdp.transforms import losses
from launch import frame, lifecycle, parties

_LIMIT = 120.0  # seconds of one run
_SECOND = 0.2  # share of kills after which the second run is killed, too
_Charged = dict[str, dict[str, dict[str, int]]]

# --- Jobs ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """A program that spends.

    Attributes:
        run: The program. It takes its folder and continues from the files in it.
        result: The last file that it leaves.
        claims: The (stated epsilon, epsilon of the ledger) pairs of a finished folder.
    """

    run: Callable[[pathlib.Path], Any]
    result: str
    claims: Callable[[pathlib.Path], list[tuple[float, float]]]


def _config(module: str, changes: dict[str, Any]) -> Any:
    config = importlib.import_module(module).get_config()
    config.update_from_flattened_dict(changes)
    return config


def _spent(path: pathlib.Path, name: str, delta: float | None = None) -> float:
    with Ledger(path, read_only=True) as ledger:
        return ledger.epsilon(name, delta=delta)


def _result(root: pathlib.Path) -> Any:
    return json.loads((root / "result.json").read_text())


def _finetune(root: pathlib.Path) -> None:
    changes = {
        "model.options.widths": (4,),
        "pretrain.steps": 2,
        "no_privacy.steps": 2,
        "private.steps": 4,
        "private.batch_size": 32,
        "private.physical_batch_size": 48,
        "private.checkpoint_every": 2,
        "private.augmult": 0,
    }
    launch.finetune.experiment(_config("configs.digits_dpsgd", changes), os.fspath(root))


def _finetune_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    found = _result(root)
    return [(found["epsilon"], _spent(root / "ledger.sqlite", found["dataset"], found["delta"]))]


def _predict(root: pathlib.Path) -> None:
    changes = {
        "repetitions": 2,
        "data.features.dimensions": 6,
        "certificate.max_distance": 4,
        "prediction.queries": 8,
        "ensemble.members": 2,
        "student.steps": 2,
        "student.repetitions": 1,
        "dp_sgd.steps": 2,
        "dp_sgd.batch_size": 64,
        "dp_sgd.runs": 1,
    }
    frame.run(launch.predict.STUDY, _config("configs.predict.digits", changes), root)


def _predict_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    found, apart = _result(root), root / "references" / "ledger.sqlite"
    return [
        (found["epsilon"], _spent(root / "ledger.sqlite", found["dataset"], found["delta"])),
        (found["references_epsilon"], _spent(apart, found["dataset"], found["delta"])),
    ]


def _recalibrate(root: pathlib.Path) -> None:
    config = _config(
        "configs.recalibration.digits", {"data.corruptions": ("contrast",), "train.steps": 5}
    )
    config.model.options.hidden = (8,)
    config.methods = ("Acc-T", "HB split")
    config.method_options["Acc-T"].iterations = 2
    config.sweep.trials = 2
    for factor, value in (("sources", 3), ("samples", 5), ("epsilon", 1.0)):
        config.sweep[factor] = {"sources": 3, "samples": 5, "epsilon": 1.0, "values": (value,)}
        del config.sweep[factor][factor]
    config.sweep.centre = {"sources": 3, "samples": 5, "epsilon": 1.0}
    config.figures.update({"methods": ("Acc-T",), "reliability_shift": "contrast"})
    config.figures.reliability_methods = ("Acc-T", "HB split")
    frame.run(launch.recalibrate.STUDY, config, root)


def _recalibrate_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    # two methods at epsilon 1
    return [(2.0, _spent(root / "ledger.sqlite", f"source {i}")) for i in range(3)]


def _adapt(root: pathlib.Path) -> None:
    changes = {
        "train.steps": 5,
        "model.options.depth": 1,
        "methods": ("Tent",),
        "privacy.budgets": (5.0,),
        "protocol.seeds": 1,
        "data.images": 64,
        "tuning.images": 32,
        "data.corruptions": ("contrast", "gaussian_noise"),
        "tuning.corruptions": ("speckle_noise",),
        "tuning.learning_rates": (1e-3,),
        "tuning.clipped_steps": (1e-3,),
    }
    frame.run(launch.adapt.STUDY, _config("configs.tta.digits", changes), root)


def _adapt_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    found = _result(root)
    return [
        (
            cell["epsilon_unit"],
            _spent(
                root / "ledger.sqlite",
                f"{cell['method']}, {cell['setting']}, stream 0",
                found["delta"],
            ),
        )
        for cell in found["cells"]
        if "epsilon_unit" in cell
    ]


def _split(root: pathlib.Path) -> None:
    changes: dict[str, Any] = {
        "seeds": (1, 42),
        "shots": (3,),
        "learning_rates": (1e-3,),
        "data.server_images": 40,
        "tuning.seeds": (1,),
        "server.frontends": 1,
        "server.samples": 4,
        "client.copies": 2,
        "adaptation.epochs": 1,
        "baselines.epochs": 1,
        "methods": ("Linear probing", "Split Adaptation"),
        "stolen": (),
        "ablation.shots": 3,
        "ablation.rows": ("Split Adaptation",),
        "attack.uploads": ("Split Adaptation",),
        "attack.attackers": ("noise-aware", "aggregating"),
        "attack.images": 40,
        "attack.epochs": 1,
        "attack.epsilons": (8.0,),
        "noise.scales": (0.8,),
        "noise.seeds": 1,
        "private.epsilons": (8.0,),
        "private.dimensions": (2,),
        "private.shots": (5,),
        "private.steps": 3,
    }
    config = _config("configs.split.digits", changes)
    for part in (config, config.auxiliary):
        part.model.options = {
            "patch_size": 4,
            "width": 8,
            "depth": 2,
            "num_heads": 2,
            "mlp_width": 16,
        }
        part.train.update({"steps": 5, "learning_rate": 1e-2})
    frame.run(launch.split.STUDY, config, root)


def _split_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    (row,) = _result(root)["private"]
    names = [f"client {seed}, 5 shots, 2 dimensions, epsilon 8" for seed in (1, 42)]
    return [(row["epsilon"], _spent(root / "ledger.sqlite", name)) for name in names]


def _split_client(root: pathlib.Path) -> None:
    """Runs the client until it times out, and starts it again. This function plays the slow
    server."""
    both = importlib.import_module("configs.split.two_parties").get_config()
    server = ConfigDict(both.server.to_dict())
    server.model.options = {
        "patch_size": 2,
        "width": 8,
        "depth": 2,
        "num_heads": 2,
        "mlp_width": 16,
    }
    server.update(
        {"train": {"steps": 2}, "calibration": {"frontends": 1, "samples": 4}, "directions": 4}
    )
    server.update({"copies": 2, "tuning": {"epochs": 1}, "adaptation": {"epochs": 1}})
    if not (root / "server" / "frontend").exists():
        with contextlib.suppress(TimeoutError):
            parties.run_server(server, root / "server", _Nobody())
    frontend = read_package(root / "server" / "frontend")

    def serve(answer: Callable[[bytes], bytes], until: Callable[[], bool], stages: int) -> None:
        about = {"upload": hashlib.sha256(answer(frontend)).hexdigest()}
        if stages > 1:
            asked = unpack(answer(pack("adapted", fields=about, arrays={})), "queries").arrays[
                "representations"
            ]
        if stages > 2:
            answer(
                pack(
                    "answers",
                    fields=about,
                    arrays={"logits": np.zeros((len(asked), 5), np.float32)},
                )
            )
        if not until():
            raise TimeoutError

    for stages in (1, 2, 3):
        with contextlib.suppress(TimeoutError):
            parties.run_client(
                both.client, root / "client", functools.partial(serve, stages=stages), queries=True
            )


class _Nobody:
    """A client that never answers."""

    names = ("client-1",)

    def ask(self, questions: Any, *, timeout: float) -> dict[str, bytes]:
        return {}


def _split_client_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    found = _result(root / "client")
    path = root / "client" / "ledger.sqlite"
    return [
        (found["epsilon"], _spent(path, "client/images")),
        (math.inf, _spent(path, "client/queries")),
    ]


def _lifecycle(root: pathlib.Path) -> None:
    changes: dict[str, Any] = {
        **{f"data.parts.{name}": 60 for name in ("public", "private")},
        **{
            "data.parts.sources": 20,
            "data.parts.stream": 16,
            "data.parts.client": 12,
            "data.parts.test": 40,
        },
        **{"data.sources": 2, "model.options.widths": (8,)},
        **{
            "pretrain.steps": 2,
            "pretrain.checkpoint_every": 2,
            "pretrain.perturbation_batch_size": 32,
        },
        **{"finetune.steps": 4, "finetune.checkpoint_every": 2, "finetune.augmult": 0},
        **{"finetune.batch_size": 16, "finetune.physical_batch_size": 24},
        **{
            "adapt.batch_size": 8,
            "adapt.epsilon": 4.0,
            "predict.queries": 4,
            "predict.max_distance": 4,
        },
        **{"split.directions": 2},
    }
    # Audits read no private data, and pay nothing.
    known = lifecycle.life.stages()
    lifecycle.life.stages = lambda: tuple(stage for stage in known if not stage.is_audit)
    lifecycle.run(_config("configs.lifecycle_digits", changes), root)


def _lifecycle_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    """Returns the claims of the report, to its three digits."""
    page = (root / "report.html").read_text()
    with Ledger(root / "ledger.sqlite", read_only=True) as ledger:
        entries = ledger.report()["datasets"]
    rows = [
        re.sub(r"<[^>]*>", "|", row) for row in re.findall(r"<tr .*?</tr>", page, flags=re.DOTALL)
    ]
    stated = [
        any(e["name"] in row and f"|{verdict(e).epsilon}|" in row for row in rows) for e in entries
    ]
    return [(float(said), 1.0) for said in stated]


def _fit(root: pathlib.Path) -> None:
    """Trains by the function that the launchers call."""
    source = data.bundled("digits").take(np.arange(150))

    def loss(params: Any, example: Any) -> Any:
        return losses.softmax_cross_entropy(example["image"].reshape(-1) @ params, example["label"])

    sampler = data.PoissonSampler(len(source), 0.1)
    trainer = finetune.dp_sgd(
        loss,
        optax.sgd(0.2),
        sampler=sampler,
        clip_norm=0.5,
        noise_multiplier=1.0,
        physical_batch_size=32,
        engine="vmap",  # compiles faster
    )
    with Ledger(root / "ledger.sqlite") as ledger:
        ledger.register("digits", adjacency="add_remove", unit="example", epsilon=30.0, delta=1e-5)
        start = np.zeros((64, 10), np.float32)
        account = ledger.account("digits")
        options: dict[str, Any] = {
            "steps": 8,
            "checkpoint_every": 2,
            "workdir": root / "run",
            "progress": False,
        }
        finetune.fit(trainer, start, source, account=account, **options)
        write_json(root / "result.json", {"epsilon": account.epsilon()})


def _fit_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    spent = _spent(root / "ledger.sqlite", "digits")
    return [
        (_result(root)["epsilon"], spent),
        (read_metrics(root / "run" / "metrics.jsonl")[-1]["epsilon"], spent),
    ]


def _accuracy(root: pathlib.Path) -> None:
    """Charges the accuracy of two models on one data set."""
    source, found = data.bundled("digits").take(np.arange(200)), []
    with Ledger(root / "ledger.sqlite") as ledger:
        ledger.register("digits", adjacency="add_remove", unit="example", epsilon=8.0, delta=1e-5)
        for number in range(2):
            params = np.eye(64, 10, dtype=np.float32) * (number + 1)
            accuracy = finetune.charged_accuracy(
                lambda params, images: images.reshape(len(images), -1) @ params,
                params,
                source,
                account=ledger.account("digits"),
                noise_multiplier=4.0,
                workdir=root / f"accuracy_{number}",
            )
            found.append(accuracy)
        write_json(root / "result.json", {"accuracy": found, "epsilon": ledger.epsilon("digits")})


def _accuracy_claims(root: pathlib.Path) -> list[tuple[float, float]]:
    return [(_result(root)["epsilon"], _spent(root / "ledger.sqlite", "digits"))]


JOBS = {
    "fit": Job(_fit, "result.json", _fit_claims),
    "accuracy": Job(_accuracy, "result.json", _accuracy_claims),
    "recalibrate": Job(_recalibrate, "result.json", _recalibrate_claims),
    "split_client": Job(_split_client, "client/result.json", _split_client_claims),
    "predict": Job(_predict, "result.json", _predict_claims),
    "finetune": Job(_finetune, "result.json", _finetune_claims),
    "adapt": Job(_adapt, "result.json", _adapt_claims),
    "split": Job(_split, "result.json", _split_claims),
    "lifecycle": Job(_lifecycle, "report.html", _lifecycle_claims),
}

# --- Hooks ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kill:
    """One instant: before or after the `time`-th operation of a kind at a site.

    Attributes:
        operation: For example "COMMIT" or "replace secret_seed".
        site: The lines of jaxdp that call it, the innermost first. "" is any.
    """

    operation: str
    site: str
    time: int
    when: str


# Files that call the system for others, so that the line that called them says more.
_LOW = (
    "privacy/store.py",
    "privacy/database.py",
    "privacy/schema.py",
    "files/durable.py",
    "report/metrics.py",
    "release/secrets.py",
    "release/workdir.py",
)
_WRITES = (
    "INSERT",
    "UPDATE",
    "DELETE",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "PRAGMA wal",
    "CREATE",
    "ALTER",
)


class Hooks:
    """Counts the operations of this process on files of a folder. The hooks are never removed.

    Args:
        root: The folder.
        kill: The instant at which this process dies. None lists the operations in `seen`.
        at: This is called at `kill` instead of dying.
    """

    def __init__(
        self, root: pathlib.Path, kill: Kill | None = None, at: Callable[[], None] | None = None
    ):
        self.seen: list[tuple[str, str]] = []
        self._root, self._kill, self._at = os.fspath(root), kill, at or _die
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lock = threading.RLock()
        self._install()

    def around(self, operation: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Does `work`, an operation that counts."""
        site = _site()
        with self._lock:
            self._counts[operation, site] += 1
            self.seen.append((operation, site))
            kill = self._kill
            here = kill is not None and kill.operation == operation and kill.site in (site, "")
            here = (
                here
                and kill is not None
                and (self._counts[operation, site] == kill.time or not kill.site)
            )
        if here and kill is not None and kill.when == "before":
            self._reached()
        value = work(*args, **kwargs)
        if here and kill is not None and kill.when == "after":
            self._reached()
        return value

    def _reached(self) -> None:
        self._kill = None
        self._at()

    def _name(self, path: Any) -> str | None:
        """Returns the name of a file of the folder in the list. None for other files."""
        if isinstance(path, int) or hasattr(path, "fileno"):
            path = os.readlink(f"/proc/self/fd/{path if isinstance(path, int) else path.fileno()}")
        text = os.path.abspath(os.fsdecode(path))
        if not text.startswith(self._root):
            return None
        name = re.sub(r"\.[0-9a-f]{8}(?=\.tmp$)|\.[0-9a-f]{16}(?=$|-)", "", os.path.basename(text))
        return re.sub(r"[0-9a-f]{16,}|\d+", "#", name)

    def _patch(self, owner: Any, name: str, path_of: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = path_of(*args, **kwargs)
            called = None if path is None else self._name(path)
            if called is None:
                return original(*args, **kwargs)
            return self.around(f"{name} {called}", original, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _install(self) -> None:
        def first(path: Any, *args: Any, **kwargs: Any) -> Any:
            return path

        def second(path: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
            return other

        def opened(path: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and not set(mode).isdisjoint("wax+")
            return path if writes and not isinstance(path, int) else None

        def opened_low(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            return path if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else None

        for name in ("pwrite", "fsync", "unlink"):
            self._patch(os, name, first)
        for name in ("replace", "rename", "link"):
            self._patch(os, name, second)
        self._patch(os, "open", opened_low)
        self._patch(io, "open", opened)
        builtins.open = io.open
        self._patch(fcntl, "flock", first)
        self._patch(MetricsWriter, "write", lambda writer, *args, **kwargs: writer.path)
        self._install_sqlite()

    def _install_sqlite(self) -> None:
        hooks, connect = self, sqlite3.connect

        class Connection(sqlite3.Connection):
            """Counts what writes."""

            inside = reads = False

            def execute(self, sql: str, *args: Any) -> Any:
                text = " ".join(sql.split())
                if text == "BEGIN DEFERRED":
                    self.reads = True
                counts = self.inside and text.startswith(_WRITES) and not self.reads
                if text in ("COMMIT", "ROLLBACK"):
                    self.reads = False
                if not counts:
                    return super().execute(sql, *args)
                return hooks.around(_statement(text), super().execute, sql, *args)

            def executemany(self, sql: str, *args: Any) -> Any:
                text = " ".join(sql.split())
                if not self.inside or not text.startswith(_WRITES):
                    return super().executemany(sql, *args)
                return hooks.around(_statement(text), super().executemany, sql, *args)

        def counted(path: Any, *args: Any, **kwargs: Any) -> Any:
            db = connect(path, *args, factory=Connection, **kwargs)
            plain = os.fspath(path).removeprefix("file://").partition("?")[0]
            db.inside = plain != ":memory:" and hooks._name(plain) is not None
            return db

        sqlite3.connect = counted


def _statement(text: str) -> str:
    words = text.replace("(", " ").split()
    return " ".join(words[: {"INSERT": 3, "DELETE": 3, "CREATE": 3}.get(words[0], 2)])


def _site() -> str:
    """Returns the innermost running line of jaxdp, and the innermost one outside of shared
    helpers."""
    frame, lines = sys._getframe(2), list[str]()
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/jaxdp/")
        if found:
            low = path in _LOW or frame.f_code.co_name == "settled"
            if not lines or not low:
                lines.append(f"{path}:{frame.f_lineno}")
            if not low:
                return " < ".join(lines)
        frame = frame.f_back
    return " < ".join(lines) or f"thread {threading.current_thread().name.rstrip('0123456789_-')}"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- Broken programs, which the checks must catch -----------------------------------------------


def _unnoted() -> None:
    """Breaks the till: it notes no charge."""
    write = MetricsWriter.write

    def silent(self: Any, step: int, /, **metrics: Any) -> None:
        if self.path.name != "charges.jsonl":
            write(self, step, **metrics)

    MetricsWriter.write = silent


def _rolled_back() -> None:
    """Breaks the ledger: it deletes its last reservation after the body, and updates totals and
    head."""

    def finish(self: Any, spends: Any, status: str) -> None:
        with self._transaction() as db:
            for spend in reversed(spends):
                db.execute(
                    "DELETE FROM spends WHERE id = ? AND id = (SELECT max(id) FROM spends)",
                    (spend.id,),
                )
            db.execute("DELETE FROM totals")
            db.execute(f"INSERT INTO totals {COUNTED_TOTALS}")
            self._spends = self._admission._spends = Spends()
            os.pwrite(self._store._head_file, head_text(self._store.last()), 0)

    Ledger._finish = finish


def _late() -> None:
    """Breaks the ledger: it reserves after the body."""
    reserve = Ledger.spend_all

    @contextlib.contextmanager
    def spend_all(self: Any, requests: Any, **terms: Any) -> Iterator[Any]:
        yield ()
        with reserve(self, requests, **terms):
            pass

    Ledger.spend_all = spend_all


TWINS = {"unnoted": _unnoted, "rolled_back": _rolled_back, "late": _late}

# --- Processes -----------------------------------------------------------------------------------


def forked(work: Callable[[], Any], output: pathlib.Path) -> tuple[int | None, str]:
    """Runs `work()` in a child whose output goes to a file.

    Returns:
        The exit status (negative for a signal, None for a child that took too long), and the last
        line of output.
    """
    pid = os.fork()
    if not pid:
        status = 1
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + _LIMIT
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, f"not finished after {_LIMIT:g} seconds"
        time.sleep(0.01)
    lines = output.read_text(errors="replace").strip().splitlines()
    return os.waitstatus_to_exitcode(status), lines[-1] if lines else ""


# --- Checks -------------------------------------------------------------------------------------


def ledgers(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the ledgers in a folder."""
    return sorted(root.rglob("ledger.sqlite"))


def noted(root: pathlib.Path) -> list[dict[str, Any]]:
    """Returns all notes of charges in a folder."""
    return [row for path in sorted(root.rglob("charges.jsonl")) for row in notes(path.parent)]


@contextlib.contextmanager
def copied(path: pathlib.Path, *suffixes: str) -> Iterator[pathlib.Path]:
    """Yields a copy of a ledger, with the named files of it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / path.name
        for suffix in ("", ".head", *suffixes):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
        yield copy


def charged(root: pathlib.Path) -> _Charged:
    """Returns how often each event was spent, by ledger, data set and part."""
    found: _Charged = {}
    for path in ledgers(root):
        with Ledger(path) as ledger:
            names = dict.fromkeys(row["dataset"] for row in ledger.history())
            found[os.fspath(path.relative_to(root))] = {
                f"{name}, {part}" if part else name: {
                    to_json(leaf): n for leaf, n in composition(event).items()
                }
                for name in names
                for part, event in ledger.events(name).items()
            }
    return found


def compared(found: _Charged, reference: _Charged) -> dict[str, list[str]]:
    """Returns what was charged less often than in the reference, and what more often."""
    wrong: dict[str, list[str]] = {"under": [], "over": []}
    for path in sorted({*found, *reference}):
        one, other = found.get(path, {}), reference.get(path, {})
        for name in sorted({*one, *other}):
            counts, expected = one.get(name, {}), other.get(name, {})
            for event in sorted({*counts, *expected}):
                n, m = counts.get(event, 0), expected.get(event, 0)
                if n != m:
                    wrong["under" if n < m else "over"].append(
                        f"{path}, {name}: {n} times {event}, expected {m}"
                    )
    return wrong


def unpaid(root: pathlib.Path) -> list[str]:
    """Returns the noted charges that no ledger of the folder knows. Raises LedgerDamaged for a
    damaged ledger."""
    paid = set()
    for path in ledgers(root):
        with copied(path, "-wal") as copy, Ledger(copy) as ledger:
            paid |= {(row["dataset"], row["token"]) for row in ledger.history()}
            for row in noted(root):
                if "head" in row and ledger.contains(Head(*row["head"])) is False:
                    return [
                        f"{path.name} does not go through the noted head of spend {row['head'][1]}"
                    ]
    return [
        f"{name}, token {row['token'][:8]}"
        for row in noted(root)
        for name, _ in row["charges"]
        if (name, row["token"]) not in paid
    ]


def without_wal(root: pathlib.Path) -> dict[str, int]:
    """Opens copies of the ledgers without the -wal file.

    Returns:
        The numbers of copies. "same": equal to the ledger with the file. "unacknowledged": only a
            last spend is missing whose body had not begun, as the head shows. "refused". "lost":
            spends are missing that the head has counted.
    """
    found: collections.Counter[str] = collections.Counter()
    for path in ledgers(root):
        with copied(path, "-wal") as copy, Ledger(copy) as ledger:
            whole = ledger.head
        head_path = pathlib.Path(f"{path}.head")
        text = head_path.read_bytes() if head_path.exists() else b""
        seen = head_of(text, os.fspath(path)).spend if text else 0
        with copied(path) as copy:
            try:
                with Ledger(copy) as ledger:
                    head = ledger.head
            except LedgerDamaged:
                found["refused"] += 1
                continue
        kind = "same" if head == whole else "unacknowledged" if seen <= head.spend else "lost"
        found[kind] += 1
    return dict(found)


def secrets(root: pathlib.Path) -> list[str]:
    """Returns the seeds, which a finished job must have deleted."""
    return sorted(os.fspath(path.relative_to(root)) for path in root.rglob("secret_seed"))


def leftovers(root: pathlib.Path) -> list[str]:
    """Returns the temporary files, which a finished job should not leave."""
    names = (os.fspath(path.relative_to(root)) for path in root.rglob("*"))
    return sorted(
        name
        for name in names
        if re.search(r"\.tmp$|orbax-checkpoint-tmp|(^|/)\.[^/]*(?<!\.anchor)$", name)
    )


def held(root: pathlib.Path) -> int:
    """Returns the room that a finished job still holds."""
    count = 0
    for path in ledgers(root):
        with contextlib.closing(sqlite3.connect(path)) as db:
            count += db.execute(
                "SELECT count(*) FROM holds WHERE lapses > ?", (time.time(),)
            ).fetchone()[0]
    return count


# --- The campaign -------------------------------------------------------------------------------


class Target:
    """One job with its reference and its operations, ready to be killed.

    Attributes:
        root: The folder of all runs. It stays the same, since a hold identifies it by its path.
        operations: The operations from the first reservation to the last one on a ledger or a
            secret.
        reference: The charges of a run without a fault.
    """

    def __init__(self, name: str, folder: pathlib.Path, twin: str | None = None):
        self.name, self.job, self._twin = name, JOBS[name], twin
        self.root, self._start = folder / name / "run", folder / name / "start"
        self._folder = folder / name
        self.root.mkdir(parents=True)
        first = Kill("INSERT INTO spends", "", 1, "before")

        def snapshot() -> None:
            if not self._start.exists():
                shutil.copytree(self.root, self._start)

        self._needed(
            lambda: (Hooks(self.root, first, snapshot), self.job.run(self.root)), "the reference"
        )
        self.reference, self.tokens = charged(self.root), _tokens(self.root)
        listing = self._folder / "operations.json"

        def listed() -> None:
            hooks = Hooks(self.root)
            self._run()
            listing.write_text(json.dumps(hooks.seen))

        self.restart()
        self._needed(listed, "the list of operations")
        seen = [(operation, site) for operation, site in json.loads(listing.read_text())]
        begin = next(
            k for k, (operation, _) in enumerate(seen) if operation == "INSERT INTO spends"
        )
        concerns = ("UPDATE spends", "pwrite ledger.sqlite.head", "unlink secret_seed")
        end = max(k for k, (operation, _) in enumerate(seen) if operation in concerns)
        counts: collections.Counter[tuple[str, str]] = collections.Counter(seen[:begin])
        self.operations: dict[tuple[str, str], list[int]] = {}
        for key in seen[begin : end + 1]:
            counts[key] += 1
            self.operations.setdefault(key, []).append(counts[key])

    def restart(self) -> None:
        """Replaces the folder by its state at the first reservation."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self._start, self.root)

    def _run(self) -> None:
        if self._twin:
            TWINS[self._twin]()
        self.job.run(self.root)

    def _needed(self, work: Callable[[], Any], what: str) -> None:
        status, said = self._forked(work)
        if status != 0:
            raise RuntimeError(
                f"{self.name}: {what} failed with {status}: {said}. See "
                f"{self._folder / 'output.txt'}."
            )

    def _forked(self, work: Callable[[], Any]) -> tuple[int | None, str]:
        return forked(work, self._folder / "output.txt")

    def _killed(self, kill: Kill) -> tuple[int | None, str]:
        return self._forked(lambda: (Hooks(self.root, kill), self._run()))

    def draw(self, rng: random.Random, *hits: collections.Counter[tuple[str, str]]) -> Kill:
        """Returns an instant at one of the sites that were hit least, first by the one count, then
        by the other."""
        counts = {key: [count[key] for count in hits] for key in self.operations}
        key = rng.choice(sorted(key for key in counts if counts[key] == min(counts.values())))
        return Kill(*key, rng.choice(self.operations[key]), rng.choice(("before", "after")))

    def all_hit(self, hits: collections.Counter[tuple[str, str]]) -> bool:
        """Returns whether every site was hit."""
        return all(hits[key] for key in self.operations)

    def attempt(self, kill: Kill, second: Kill | None) -> dict[str, Any]:
        """Kills the job, perhaps also its second run, runs it to its end, and checks."""
        self.restart()
        began, row = (
            time.monotonic(),
            {"kill": dataclasses.asdict(kill), "killed": 0, "problems": {}},
        )
        problems: dict[str, Any] = row["problems"]
        for one in (kill, second):
            if one is None:
                continue
            status, _ = self._killed(one)
            if status != -signal.SIGKILL:
                break
            row["killed"] += 1
            self._check_killed(row, problems)
        status, said = self._forked(self._run)
        row["status"] = status
        if status == 0 and (self.root / self.job.result).exists():
            try:
                self._check_finished(problems)
            except LedgerDamaged as error:
                problems["damaged"] = str(error)
        else:
            sentence = (
                re.match(r"[\w.]*(Error|Exceeded|Damaged): .*\S", said)
                and os.fspath(self.root) in said
            )
            problems["refused" if sentence and status else "stuck"] = said
        row["seconds"] = round(time.monotonic() - began, 2)
        return row

    def _check_killed(self, row: dict[str, Any], problems: dict[str, Any]) -> None:
        try:
            if found := unpaid(self.root):
                problems["under"] = found
            row["without_wal"] = without_wal(self.root)
            if row["without_wal"].get("lost"):
                problems["lost_without_wal"] = row["without_wal"]
        except LedgerDamaged as error:
            problems["damaged"] = str(error)

    def _check_finished(self, problems: dict[str, Any]) -> None:
        wrong = compared(charged(self.root), self.reference)
        under = wrong["under"] + [f"noted, not paid: {one}" for one in unpaid(self.root)]
        if (missing := self.tokens - _tokens(self.root)) > 0:
            under.append(f"{missing} charges are not noted")
        if under:
            problems["under"] = problems.get("under", []) + under
        if wrong["over"]:
            problems["over"] = wrong["over"]
        claims = self.job.claims(self.root)
        if not claims or not all(math.isclose(said, spent, rel_tol=1e-9) for said, spent in claims):
            problems["epsilon"] = claims
        if found := secrets(self.root):
            problems["secrets"] = found
        if found := leftovers(self.root):
            problems["temporary"] = found
        if found := held(self.root):
            problems["held"] = found


def _tokens(root: pathlib.Path) -> int:
    return len({row["token"] for row in noted(root)})


def summary(name: str, sites: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of one job."""
    killed = [row for row in rows if row["killed"]]

    without: collections.Counter[str] = collections.Counter()
    for row in killed:
        without.update(row.get("without_wal", {}))

    def having(*problems: str) -> int:
        return sum(not row["problems"].keys().isdisjoint(problems) for row in killed)

    return {
        "launcher": name,
        "kills": sum(row["killed"] for row in killed),
        "jobs killed": len(killed),
        "sites": sites,
        "sites hit": len(_hits(killed)),
        "completed": len(killed) - having("stuck", "refused"),
        "under-counted": having("under"),
        "over-charged": having("over"),
        "damaged": having("damaged"),
        **{
            f"copies without -wal: {kind}": without[kind]
            for kind in ("same", "unacknowledged", "refused", "lost")
        },
        "epsilon differs": having("epsilon"),
        "leftovers": having("secrets", "temporary"),
        "secrets left": having("secrets"),
        "room still held": having("held"),
        "stuck": having("stuck"),
        "refused": having("refused"),
        "seconds": round(sum(row["seconds"] for row in rows)),
    }


def campaign(
    names: list[str],
    kills: int,
    output: pathlib.Path,
    *,
    seed: int = 0,
    minutes: float = math.inf,
    twin: str | None = None,
    until: str | None = None,
) -> dict[str, Any]:
    """Kills jobs in turn until the number of kills or the time is reached. Continues from the
    content of `output`.

    With `until` it also ends at the first job with this problem.

    Returns:
        The content of `output`: {"launchers": figures, "sites": by launcher, "rows": one per killed
        job}.
    """
    deadline = time.monotonic() + 60 * minutes
    known = json.loads(output.read_text()) if output.exists() else {"rows": [], "sites": {}}
    rows: list[dict[str, Any]] = known["rows"]
    sites: dict[str, list[list[str]]] = known["sites"]
    targets: dict[str, Target] = {}
    with tempfile.TemporaryDirectory(prefix="jaxdp-kills-") as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        while sum(row["killed"] for row in rows) < kills and time.monotonic() < deadline:
            if any(until in row["problems"] for row in rows):
                break
            hits = {name: _hits(row for row in rows if row["launcher"] == name) for name in names}
            everywhere = _hits(rows)
            took = {
                name: sum(row["seconds"] for row in rows if row["launcher"] == name)
                for name in names
            }
            # Those with sites that were never hit come first, and of these the one that had the
            # least time.
            name = min(
                names,
                key=lambda one: (one in targets and targets[one].all_hit(hits[one]), took[one]),
            )
            if name not in targets:
                began = time.monotonic()
                targets[name] = Target(name, pathlib.Path(folder), twin)
                sites[name] = sorted(map(list, targets[name].operations))
                seconds = time.monotonic() - began
                print(
                    f"{name}: {len(sites[name])} sites in its paid work, {seconds:.0f} seconds",
                    flush=True,
                )
            target = targets[name]
            rng = random.Random(f"{seed} {name} {hits[name].total()}")
            kill = target.draw(rng, hits[name], everywhere)
            second = target.draw(
                rng, hits[name] + collections.Counter([(kill.operation, kill.site)]), everywhere
            )
            row = target.attempt(kill, second if rng.random() < _SECOND else None)
            rows.append({"launcher": name, **row})
            write_json(output, _summed(sites, rows))
            said = "; ".join(f"{key}: {value}" for key, value in row["problems"].items()) or "right"
            print(
                f"{len(rows)}: {name}, {kill.when} {kill.operation} at {kill.site}: {said[:300]}",
                flush=True,
            )
    return _summed(sites, rows)


def _hits(rows: Iterable[dict[str, Any]]) -> collections.Counter[tuple[str, str]]:
    return collections.Counter((row["kill"]["operation"], row["kill"]["site"]) for row in rows)


def _summed(sites: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    figures = [
        summary(name, len(sites[name]), [row for row in rows if row["launcher"] == name])
        for name in sites
    ]
    return {"launchers": figures, "sites": sites, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--launchers", default=",".join(JOBS))
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--twin",
        choices=sorted(TWINS),
        default=None,
        help="a broken library, which must be noticed",
    )
    given = parser.parse_args()
    warm()
    names = given.launchers.split(",")
    found = campaign(
        names, given.kills, given.output, seed=given.seed, minutes=given.minutes, twin=given.twin
    )
    for figures in found["launchers"]:
        print(", ".join(f"{key} {value}" for key, value in figures.items()))


def warm() -> None:
    """Does the work once that every child would do, except starting JAX."""
    figure, axes = plt.subplots()
    axes.plot([0, 1], label="a")
    axes.legend()
    figure.savefig(io.BytesIO(), format="png")
    plt.close(figure)
    data.bundled("digits")
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "The forking process must run one thread, since the children would lack the others."
        )


if __name__ == "__main__":
    main()
