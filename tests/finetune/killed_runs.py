"""Runs `fit` in processes that are killed with SIGKILL at chosen instants, and resumed until they
finish.

`main(folder, scenarios)` takes a list of {"name": ..., "kills": [kill, ...]}: attempt i of the run
in folder/name dies by kills[i], which is {"at": "reserved" | "step" | "kept" | "checkpoint" |
"saved", "time": k}, the k-th time it gets there.

This module has imported everything, and forks the runs before JAX has started. Every released step
is appended to folder/name/released.jsonl, with digests of what determines its noise, of the clipped
sum, and of the result."""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import signal
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401  (imported before the forks)

import jaxdp
from jaxdp import data, finetune
from jaxdp.finetune import loop
from jaxdp.privacy import Ledger, NoOpDpEvent
from jaxdp.privacy.events import composition
from jaxdp.transforms import losses

STEPS, CHUNK, SEED = 12, 3, bytes(range(16))


def digest(tree):
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in tree
    ]
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()[:16]


class Recorded:
    """The trainer's compiled update, which also writes down what it released."""

    def __init__(self, update):
        self._update, self.lower, self.file = update, update.lower, None

    def __call__(self, large, rest, sums):
        record = {
            "step": int(rest.step),
            "noise": digest([rest.noise.key]),
            "sum": digest(jax.tree.leaves(sums)),
        }
        after, metrics = self._update(large, rest, sums)
        record |= {
            "result": digest(jax.tree.leaves((after.params, after.opt_state))),
        }
        os.write(self.file, json.dumps(record).encode() + b"\n")
        return after, metrics


@functools.cache
def trainer_of(num_examples, clip_norm=0.5, correlated=False):
    def loss(params, example):
        logits = example["image"].reshape(-1) @ params["head"]
        return losses.softmax_cross_entropy(logits, example["label"])

    def shift(key, example):
        return {**example, "image": data.random_crop(key, example["image"], padding=1)}

    sampler, noise = data.PoissonSampler(num_examples, 0.1), None
    if correlated:
        sampler = data.CyclicPoissonSampler(num_examples, 0.4, cycle_length=4)
        noise = jaxdp.correlated([1.0, 0.5, 0.25], steps=STEPS, participations=3, min_separation=4)
    trainer = finetune.dp_sgd(
        loss,
        optax.sgd(0.2, momentum=0.9),
        sampler=sampler,
        noise=noise,
        clip_norm=clip_norm,
        noise_multiplier=1.0,
        physical_batch_size=16,
        augment=shift,
        augmult=2,
        engine="vmap",  # compiles faster
        ema_decay=0.9,
    )
    object.__setattr__(trainer, "update_in_place", Recorded(trainer.update_in_place))
    return trainer


def run(folder, source, seed=SEED, steps=STEPS, start=0, **kwargs):
    """Runs or resumes the run in `folder`, and writes down its final state."""
    folder.mkdir(parents=True, exist_ok=True)
    released = os.open(folder / "released.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trainer = trainer_of(len(source), **kwargs)
    trainer.update_in_place.file = released
    rng = np.random.default_rng(start)
    params = {"head": rng.normal(size=(64, 10)).astype(np.float32) / 8}
    with contextlib.closing(os.fdopen(released)), Ledger(folder / "ledger.sqlite") as ledger:
        ledger.register("digits", adjacency="add_remove", unit="example", delta=1e-5)
        state = finetune.fit(
            trainer,
            params,
            source,
            steps=steps,
            account=ledger.account("digits"),
            workdir=folder,
            checkpoint_every=CHUNK,
            evaluate=lambda params: {"size": float(jnp.abs(params["head"]).sum())},
            seed=seed,
            progress=False,
        )
    leaves = jax.tree.leaves((state.step, state.params, state.opt_state, state.ema))
    np.savez(folder / "final.npz", *[np.asarray(x) for x in leaves])


def arm(kill):
    """Makes this process kill itself at the instant that `kill` names."""
    left = kill["time"]

    def reached():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name):
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            reached()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    if kill["at"] == "reserved":
        before(loop._Run, "_steps")
    elif kill["at"] == "step":
        before(finetune.PrivateTrainer, "step")
    elif kill["at"] == "kept":
        before(loop._Files, "save")
    elif kill["at"] == "saved":
        before(Ledger, "_finish")
    else:
        # Orbax writes into a temporary folder and renames it at the end: die with everything
        # written but the rename.
        before(os, "rename")
        before(os, "replace")
        before(pathlib.Path, "rename")


def forked(work):
    """Starts `work()` in a child; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def attempt(folder, source, kill, **options):
    """Runs until the end or until killed; returns whether it reached the end."""

    def work():
        if kill:
            arm(kill)
        run(folder, source, **options)

    status = os.waitpid(forked(work), 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    assert os.waitstatus_to_exitcode(status) == 0, f"{folder.name} failed"
    return True


def main(folder, scenarios):
    source = data.bundled("digits").take(np.arange(150))
    source.fingerprint  # noqa: B018
    for scenario in scenarios:
        place, log = folder / scenario["name"], []
        for kill in [*scenario["kills"], None]:
            finished = attempt(place, source, kill, **scenario.get("options", {}))
            log.append({"finished": finished, **accounts(place)})
        (place / "attempts.json").write_text(json.dumps(log))


def accounts(place):
    """What the ledger has charged and what was released, after an attempt."""
    with Ledger(place / "ledger.sqlite") as ledger:
        charged = composition(ledger.events("digits").get(None, NoOpDpEvent()))
    released = place / "released.jsonl"
    lines = released.read_bytes().splitlines() if released.exists() else []
    return {
        "charged": sum(charged.values()),
        "released": len({json.loads(line)["step"] for line in lines}),
        "checkpoints": sorted(path.name for path in place.glob("checkpoints/*")),
    }
