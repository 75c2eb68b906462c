"""Runs that are resumed from damaged checkpoints end as if nothing had happened, or say what is
damaged."""

import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import data, finetune
from jaxdp.files import write_json
from jaxdp.privacy import Ledger
from jaxdp.release import Checkpoints

BLOBS = data.bundled("blobs").take(np.arange(100))
DAMAGED = 48


@pytest.fixture(scope="module")
def trainer():
    return finetune.dp_sgd(
        lambda params, example: jnp.sum((params["w"] @ example["features"] + params["b"]) ** 2),
        optax.sgd(0.1, momentum=0.9),
        sampler=data.PoissonSampler(len(BLOBS), 0.2),
        clip_norm=1.0,
        noise_multiplier=1.0,
        physical_batch_size=32,
        ema_decay=0.9,
        engine="vmap",
    )


def fit(trainer, folder, steps):
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.register("blobs", adjacency="add_remove", unit="example", delta=1e-5)
        params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(3, np.float32)}
        state = finetune.fit(
            trainer,
            params,
            BLOBS,
            steps=steps,
            account=ledger.account("blobs"),
            workdir=folder / "run",
            checkpoint_every=2,
            seed=bytes(16),
            progress=False,
        )
    return jax.tree.leaves(jax.device_get((state.step, state.params, state.opt_state, state.ema)))


def damage(path, rng):
    """Damages a file at a random place in one of four ways; returns which."""
    content = path.read_bytes()
    kind = ["flip", "truncate", "delete", "empty"][rng.integers(4)] if content else "delete"
    if kind == "flip":
        place = int(rng.integers(len(content)))
        content = (
            content[:place]
            + bytes([content[place] ^ 1 << int(rng.integers(8))])
            + content[place + 1 :]
        )
    if kind == "delete":
        path.unlink()
    else:
        keep = {"flip": len(content), "truncate": int(rng.integers(len(content) or 1)), "empty": 0}[
            kind
        ]
        path.write_bytes(content[:keep])
    return kind


@pytest.mark.slow
def test_a_damaged_checkpoint_is_noticed_or_harmless(trainer, tmp_path, record_property):
    whole = tmp_path / "whole"
    whole.mkdir()
    fit(trainer, whole, 4)
    shutil.copytree(whole, tmp_path / "ended")
    expected = fit(trainer, tmp_path / "ended", 6)
    rng, refused = np.random.default_rng(0), 0
    for number in range(DAMAGED):
        folder = shutil.copytree(whole, tmp_path / str(number))
        files = [path for path in sorted(folder.rglob("run/checkpoints*/**/*")) if path.is_file()]
        path = [*files, folder / "run" / "checkpoints.json"][rng.integers(len(files) + 1)]
        kind = damage(path, rng)
        try:
            found = fit(trainer, folder, 6)
        except ValueError as error:
            refused += 1
            assert str(folder / "run" / "checkpoints") in str(error), (kind, path)
            assert "Restore the workdir from a copy" in str(error)
        else:
            assert all(map(np.array_equal, found, expected)), (kind, path)
        shutil.rmtree(folder)
    record_property("damaged", DAMAGED)
    record_property("refused", refused)
    assert 0 < refused < DAMAGED


def test_without_digests_a_wrong_state_goes_unnoticed(tmp_path):
    """The check can fail: what is in the place of a state is restored where no digest is known."""
    state = {"w": np.arange(4.0)}

    def saved(folder, state=state):
        folder.mkdir()
        kept = Checkpoints(folder, keep=2)
        kept.save(1, state)
        kept.close()
        return folder

    folder = saved(tmp_path / "run")
    path = folder / "checkpoints.json"
    listed = json.loads(path.read_text())
    other = saved(tmp_path / "other", {"w": np.arange(4.0) + 1})
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(other / "checkpoints", folder / "checkpoints")
    with pytest.raises(
        ValueError, match=r"run/checkpoints/1 is damaged: its files differ from the written ones"
    ):
        Checkpoints(folder, keep=2)
    # With the digest of these files and that of the state before, it is the state that differs.
    files = json.loads((other / path.name).read_text())["digests"]["1"][0]
    write_json(path, {"digests": {"1": [files, listed["digests"]["1"][1]]}, "sum": listed["sum"]})
    with pytest.raises(
        ValueError, match=r"run/checkpoints.json is damaged: its content differs from its sum"
    ):
        Checkpoints(folder, keep=2)
    digests = {"1": [files, listed["digests"]["1"][1]]}
    total = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    write_json(path, {"digests": digests, "sum": total})
    kept = Checkpoints(folder, keep=2)
    with pytest.raises(
        ValueError, match=r"run/checkpoints/1 is damaged: its state differs from the saved one"
    ):
        kept.restore(state)
    kept.close()
    (folder / "checkpoints.json").unlink()
    kept = Checkpoints(folder, keep=2)  # as a run of an earlier release
    assert kept.restore(state)[0]["w"].tolist() == [1, 2, 3, 4]
    kept.close()


def test_a_state_of_another_kind_is_named_as_such(tmp_path):
    kept = Checkpoints(tmp_path, keep=2)
    kept.save(1, {"w": np.zeros(2), "carried": None})
    with pytest.raises(
        ValueError, match=r"cannot be restored: .* the method, optimizer, moving av"
    ):
        kept.restore({"w": np.zeros(2), "carried": np.float32(1)})
    kept.close()


@pytest.mark.slow
def test_a_checkpoint_that_a_crash_left_unnamed_is_made_again(tmp_path):
    kept = Checkpoints(tmp_path, keep=2)
    kept.save(1, {"w": np.zeros(2)})
    named = (tmp_path / "checkpoints.json").read_bytes()
    kept.save(2, {"w": np.ones(2)})
    kept.close()
    (tmp_path / "checkpoints.json").write_bytes(named)
    kept = Checkpoints(tmp_path, keep=2)
    state, step = kept.restore({"w": np.zeros(2)})
    assert step == 1 and state["w"].tolist() == [0, 0]
    kept.save(2, {"w": np.ones(2)})
    kept.close()
    kept = Checkpoints(tmp_path, keep=2)
    assert kept.restore({"w": np.zeros(2)})[1] == 2
    kept.close()
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    with pytest.raises(
        ValueError, match=r"checkpoints/2 is missing, but checkpoints.json names it as the newest"
    ):
        Checkpoints(tmp_path, keep=2)
