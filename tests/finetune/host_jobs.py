"""Runs jobs in several processes of `jax.distributed`, on four virtual devices in all.

`main(folder, jobs)` takes {group: [[job, number of processes, kill], ...]}. A kill is [i, "compile"
| "batches" | "step" | "save"]: process i kills itself where `fit` gets there, at "step" and "save"
the second time. This module has imported everything, and forks the processes before JAX has
started. It writes what they raised, and what the ledger has charged after each job."""

import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
import warnings

import jax
import jax.numpy as jnp
import matplotlib.figure  # noqa: F401  (imported before the forks)
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401
import sklearn.datasets  # noqa: F401
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from jaxdp import data, finetune, release
from jaxdp.finetune.programs import Programs
from jaxdp.privacy import Ledger, NoOpDpEvent
from jaxdp.privacy.events import composition
from jaxdp.transforms.noise import trees
from launch import finetune as launched  # noqa: F401

DEVICES, SIZE, CHUNK = 4, 40, 2
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(SIZE, 8)).astype(np.float32), RNG.normal(size=SIZE).astype(np.float32)
PARAMS = {"w": RNG.normal(size=(8, 4)).astype(np.float32), "v": np.ones(4, np.float32)}


class Counted:
    """A source that counts what this process reads."""

    def __init__(self, x=X):
        self._source, self.read = data.from_arrays(x=x, y=Y[: len(x)]), 0
        self.fingerprint = self._source.fingerprint

    def __len__(self):
        return len(self._source)

    def gather(self, indices):
        self.read += len(indices)
        return self._source.gather(indices)


def trainer_of(make=finetune.dp_sgd, **options):
    def loss(params, example):
        return jnp.square(jnp.tanh(example["x"] @ params["w"]) @ params["v"] - example["y"])

    def rule(path, leaf):
        return PartitionSpec("data") if path == "w" else PartitionSpec()

    options = {
        "noise_multiplier": 1.0,
        "clip_norm": 1.0,
        "physical_batch_size": 8,
        "engine": "vmap",
    } | options
    options = {
        "mesh": jax.make_mesh((DEVICES,), ("data",)),
        "param_sharding": rule,
        "ema_decay": 0.9,
    } | options
    return make(
        loss, optax.sgd(0.1, momentum=0.9), sampler=data.PoissonSampler(SIZE, 0.4), **options
    )


def whole(tree):
    return jax.tree.map(
        lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree
    )


def fit(
    folder, steps, source=None, trainer=None, params=PARAMS, budget=None, payers=(0,), **options
):
    """Runs `fit` with a ledger that only process 0 opens."""
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as opened:
        account = None
        if jax.process_index() in payers:
            ledger = opened.enter_context(Ledger(folder / "ledger.sqlite"))
            ledger.register("d", adjacency="add_remove", unit="example", delta=1e-5, epsilon=budget)
            account = ledger.account("d")
        options = {
            "account": account,
            "workdir": folder / "run",
            "checkpoint_every": CHUNK,
        } | options
        return finetune.fit(
            trainer or trainer_of(),
            params,
            source or Counted(),
            steps=steps,
            progress=False,
            **options,
        )


# --- Jobs ---------------------------------------------------------------------------------------


def same_steps(folder):
    """Takes two steps of queries under known keys, and one without data, whose result is the
    noise."""
    found = {}
    anchors = {"x": X[:16], "y": Y[:16]}
    # That of DP-SGD is a part of AdpClip's, and the launcher runs it.
    methods = {
        "adp_clip": {},
        "gep": {"residual_clip_norm": 1.0, "anchors": anchors, "basis_size": 4, "groups": 1},
    }
    # Each process compiles all programs, so a query runs in two processes or in four.
    if jax.process_count() == 2:
        del methods["adp_clip"]
    elif jax.process_count() == 4:
        del methods["gep"]
        with contextlib.suppress(ValueError):
            trainer_of(mesh=jax.sharding.Mesh(np.array(jax.devices()[:3]), ("data",)))
            raise AssertionError("a mesh without devices of every process")
    for name, options in methods.items():
        trainer, source = trainer_of(finetune.METHODS[name], **options), Counted()
        state = trainer.init(PARAMS)
        known = state.noise._replace(key=release.stream(bytes(16), "test"))
        state = trainer.placed(
            state._replace(noise=known, key=release.stream(bytes(16), "test", impl="threefry2x32"))
        )
        if name == "adp_clip":
            found["noise"] = whole(
                trainer.update(state, trainer.zeros(state.params, state.layout))[0].opt_state
            )
            source.read = 0
        for _ in range(2):
            state, _ = trainer.step(state, source)
        if name == "adp_clip":
            found["read"] = source.read
        found[name] = whole(state.params)
    if jax.process_index() == 0:
        leaves = jax.tree_util.tree_flatten_with_path(found)[0]
        np.savez(
            folder / "result.npz",
            **{jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves},
        )


def quick_noise():
    """Replaces the noise by one that compiles in no time, where a job says nothing of noise."""

    def constant(key, tree, std, **_):
        return jax.tree.map(lambda x: jnp.full(x.shape, std, jnp.float32), tree)

    trees.gaussian = constant


def four_steps(folder):
    quick_noise()
    fit(folder, 4)


def six_steps(folder):
    quick_noise()
    state = fit(folder, 6)
    assert state.step == 6 and state.params["w"].sharding.spec == PartitionSpec("data")


def refused(folder):
    """Calls that end with one error on all processes, at no cost."""
    quick_noise()
    me, said = jax.process_index(), {}
    trainer = trainer_of()  # which compiles once for all calls that do not change it

    def attempt(name, function=fit, **options):
        try:
            function(folder, **{"steps": 2, "trainer": trainer, **options})
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]

    attempt("steps", steps=2 + me)
    # Process 0 has the trainer of the other calls.
    attempt("noise", trainer=trainer_of(noise_multiplier=2.0) if me else trainer)
    attempt("clip norm", trainer=trainer_of(clip_norm=2.0) if me else trainer)
    attempt("data", source=Counted(X + np.float32(me)))
    attempt("params", params={**PARAMS, "v": PARAMS["v"] + np.float32(me)})
    attempt("workdir", workdir=folder / f"run {me}")
    attempt("size", source=Counted(X[: SIZE - me]))
    attempt("account", account=None)
    attempt(
        "budget", function=lambda folder, **options: fit(folder / "small", budget=1e-3, **options)
    )

    class Unreadable(Counted):
        """A source that process 1 cannot read ahead, which begins when a chunk is paid."""

        def gather(self, indices):
            if me and threading.current_thread() is not threading.main_thread():
                raise OSError("the network drive is gone")
            return super().gather(indices)

    attempt("read", source=Unreadable())

    def evaluate(params):
        return {"accuracy": 1 / (1 - me)}

    attempt("evaluate", evaluate=evaluate, evaluate_every=1)

    def callback(step, metrics, params):
        assert me == 0
        raise OSError("the disk is full")

    attempt("callback", callbacks=[callback])
    # Broken libraries, in which every process draws its own seeds, or pays.
    first, leads = release.Hosts.first, release.Hosts.leads
    release.Hosts.first = lambda self, function: first(self, function) and function()
    attempt("own seeds", workdir=None)
    release.Hosts.first, release.Hosts.leads = first, True
    attempt(
        "each pays",
        lambda folder, **options: fit(folder / "twice", payers=(0, 1), **options),
        workdir=None,
    )
    release.Hosts.leads = leads
    (folder / f"said{me}.json").write_text(json.dumps(said))


def launcher(folder, devices):
    """Runs the launcher with a constant noise, which does not depend on the mesh: `same_steps` has
    that of a key. Notes the files that it opens to write."""
    root, wrote = folder / "run", set()

    def hook(event, arguments):
        path, writes = "", False
        if event == "open":
            path, writes = str(arguments[0]), arguments[2] & (os.O_WRONLY | os.O_RDWR)
        elif event == "sqlite3.connect":
            path, writes = str(arguments[0]), True
        if writes and str(root) in path:
            wrote.add(path.partition(f"{root}/")[2])

    sys.addaudithook(hook)
    quick_noise()
    release.Till.token = lambda self, what: what.label
    fields = {
        "references": False,
        "model.options.widths": (),
        "pretrain.steps": 1,
        "data.crop_padding": 0,
    }
    fields |= {f"private.{name}": 3 for name in ("steps", "checkpoint_every", "evaluate_every")}
    fields |= {"private.augmult": 0, "private.batch_size": 64, "private.physical_batch_size": 80}
    # Each process calibrates, at this epsilon by RDP in a quarter of a second.
    fields |= {"private.accountant": "rdp", "private.epsilon": 0.5}
    sys.argv = [
        "finetune",
        "--config=configs/digits_dpsgd.py",
        f"--workdir={root}",
        f"--devices={devices}",
    ]
    sys.argv += [f"--config.{name}={value}" for name, value in fields.items()]
    warnings.filterwarnings("ignore", "the load_module", DeprecationWarning)
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
    try:
        runpy.run_module("launch.finetune", run_name="__main__", alter_sys=True)
    finally:
        (folder / f"wrote{jax.process_index()}.json").write_text(json.dumps(sorted(wrote)))


JOBS = {job.__name__: job for job in (same_steps, four_steps, six_steps, refused)}


# --- Processes ----------------------------------------------------------------------------------


def arm(at):
    """Makes this process kill itself where `fit` gets to a method."""
    owner, name = {
        "compile": (Programs, "wait"),  # before anything is paid
        "batches": (finetune.PrivateTrainer, "batches"),  # paid, before the first step
        "step": (finetune.PrivateTrainer, "step"),
        "save": (release.Checkpoints, "save"),  # after the last step of a chunk, before its commit
    }[at]
    original, left = getattr(owner, name), [2 if at in ("step", "save") else 1]

    def wrapped(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def work(folder, job, process, processes, port, kill):
    """Runs one process of a job."""
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if kill and kill[0] == process:
        arm(kill[1])
    limits = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
    jax.distributed.initialize = functools.partial(jax.distributed.initialize, **limits)
    if job == "launcher":  # It joins the processes itself.
        devices = "local" if processes == 1 else f"127.0.0.1:{port},{process},{processes}"
        if processes > 1 and not kill:
            slurm = {"JOB_ID": 1, "STEP_NODELIST": "localhost", "NTASKS": processes}
            slurm |= {"PROCID": process, "LOCALID": process}
            os.environ.update(
                {f"SLURM_{name}": str(value) for name, value in slurm.items()},
                JAX_COORDINATOR_PORT=str(port),
            )
            devices = "cluster"
        return launcher(folder, devices)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    JOBS[job](folder)
    if processes > 1:
        jax.distributed.shutdown()


def forked(log, *arguments):
    """Starts a process of a job, which writes what it raises into `log`. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    signal.alarm(240)  # kills a process that waits for ever
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600), stream)
    try:
        work(*arguments)
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # at a normal exit JAX waits for processes that are dead


def run(folder, job, processes, kill=None):
    """Runs a job. Returns the statuses of its processes and what the ledger has charged."""
    seed = folder / "run" / "cells" / "private" / "secret_seed"
    if job == "launcher" and not seed.parent.exists():
        seed.parent.mkdir(parents=True)
        seed.write_text(bytes(range(16)).hex())
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    pids = [
        forked(folder / f"log{i}", folder, job, i, processes, port, kill) for i in range(processes)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = [(folder / f"log{i}").read_text() for i in range(processes)]
    return {"statuses": statuses, "charged": charged(folder), "said": said}


def charged(folder):
    """Returns the number of steps that the ledger of a folder has charged."""
    found = next(iter(folder.rglob("ledger.sqlite")), None)
    if found is None:
        return 0
    with Ledger(found) as ledger:
        [name] = (row["name"] for row in ledger.report()["datasets"])
        return sum(composition(ledger.events(name).get(None, NoOpDpEvent())).values())


def main(root, groups):
    """Runs the launchers' jobs beside the others, because one of them waits for a process that has
    died."""
    beside = os.fork()
    for name, jobs in groups.items():
        if name.startswith("launched") == (beside == 0):
            results = [run(root / name, *job) for job in jobs]
            (root / name / "results.json").write_text(json.dumps(results))
    if beside:
        assert os.waitstatus_to_exitcode(os.waitpid(beside, 0)[1]) == 0
