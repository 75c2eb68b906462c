"""Numbered states of a run on disk, each with digests that show damage.

`checkpoints.json` beside the folder has two digests of each checkpoint. The digest of its files is
compared before Orbax reads them, and the digest of the state is compared after. The file is written
after the checkpoint. A checkpoint that it does not name was interrupted by a crash, and its steps
are repeated. A checkpoint that it names and that is missing or differs is damaged. The run does not
continue from an older one. The secrets of the later steps are deleted, so these steps would be
computed and charged once more.

Several processes write one checkpoint together, each its own parts of the arrays, into a folder
that they share. Process 0 has the digests. A state of which no process has the whole has no digest.
Its files have one.
"""

import hashlib
import json
import pathlib
from typing import Any

import jax

from jaxdp.files import (
    explained_if_full,
    happened,
    read_json,
    sha256_of,
    shown,
    sync_tree,
    write_json,
)
from jaxdp.release.hosts import Hosts
from jaxdp.release.identity import digest, with_words

_REMEDY = (
    "Restore the workdir from a copy, or begin again in a new one. Charges stay charged. A run "
    "that is one release pays again where a copy repeats steps, or is refused if its steps share a "
    "secret draw."
)


class Checkpoints:
    """The newest `keep` checkpoints of one run, by Orbax, in its workdir.

    Args:
      workdir: The run's folder. Several processes share it.
      keep: The number of checkpoints.
      hosts: The processes that write them together, by default this one alone.

    Raises:
      ValueError: The newest checkpoint is damaged or missing, or the folder is not shared. The
          message has its path.
    """

    def __init__(self, workdir: pathlib.Path, *, keep: int, hosts: Hosts | None = None):
        import orbax.checkpoint as ocp

        self._folder = (workdir / "checkpoints").absolute()
        self._list = workdir / "checkpoints.json"
        self._hosts = hosts or Hosts()
        # By step, the digests of its files and of its state.
        self._digests: dict[int, tuple[str, str]] = {}
        for step, digests in self._hosts.first(self._checked_digests):
            self._digests[int(step)] = tuple(digests)
        # After process 0 has made the list if there was none.
        self._hosts.each(self._check_shared)
        # Not in the background, because the list names a checkpoint that is whole.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._args = ocp.args

    def close(self) -> None:
        """Closes the files."""
        self._manager.close()

    def restore(self, like: Any) -> tuple[Any, int]:
        """Returns the newest state and its number, or `like` (a similar pytree) and 0 without any.

        The state is on the host. Arrays that several processes share lie like those of `like`.

        Raises:
          ValueError: The newest checkpoint is damaged or has another structure. The message has its
              path.
        """
        step = max(self._digests, default=0)
        # A crash came before the list named these. Their steps are repeated.
        unlisted = [other for other in self._manager.all_steps() if other > step]
        for unfinished in unlisted:
            self._manager.delete(unfinished)
        if not step:
            return like, 0
        path = self._folder / str(step)
        try:
            # With the shardings of `like`, so that each process reads its own parts.
            saved = self._manager.restore(step, args=self._args.StandardRestore(_nonempty(like)))
            restored = _with_empty(saved, like)
            state = jax.tree.map(_fetched, restored)
        except Exception as error:  # Orbax raises many kinds
            what = shown(" ".join(str(error).split())[:200]).removesuffix(".")
            # The digest of the files agrees, so damage is unlikely.
            raise ValueError(
                f"{shown(path)} cannot be restored: {type(error).__name__}, {what}. Give the run "
                "the method, optimizer, moving average and noise that it began with, which decide "
                f"what its state has. {_REMEDY}"
            ) from error
        _, saved_digest = self._digests[step]
        digest_of_restored = _digest_of_state(state)
        # "" is a state of which no process has the whole, or one of an earlier release of jaxdp.
        both_known = saved_digest and digest_of_restored
        if both_known and saved_digest != digest_of_restored:
            raise ValueError(
                f"{shown(path)} is damaged: its state differs from the saved one. {_REMEDY}"
            )
        return state, step

    def save(self, step: int, state: Any) -> None:
        """Saves a state durably.

        Raises:
          DiskFull: There is no room for it. The earlier checkpoints stay.
        """
        with explained_if_full(self._folder / str(step)):
            self._manager.save(step, args=self._args.StandardSave(_nonempty(state)))
        # The list names the checkpoint when all processes have written their parts.
        self._hosts.first(lambda: self._name(step, state))

    def delete_older(self) -> None:
        """Deletes all checkpoints but the newest, durably."""
        newest = max(self._digests, default=0)
        for step in self._manager.all_steps():
            if step < newest:
                self._manager.delete(step)
        self._hosts.first(lambda: self._keep_only(newest))

    def _keep_only(self, step: int) -> None:
        # The list must not name what a crash could still bring back, or lose.
        sync_tree(self._folder)
        self._digests = {number: both for number, both in self._digests.items() if number >= step}
        self._write(self._digests)

    def _name(self, step: int, state: Any) -> None:
        # The files are on the disk before the list names them.
        sync_tree(self._folder)
        digest_of_files = _digest_of_files(self._folder / str(step))
        self._digests[step] = digest_of_files, _digest_of_state(state)
        # Orbax has deleted what exceeds `keep`.
        steps = sorted(self._manager.all_steps())
        self._write({number: self._digests[number] for number in steps})
        # Without the folder, whose name may be a hash of what a stage reads.
        happened("checkpoint", lambda: {"step": step})

    def _checked_digests(self) -> list[tuple[int, tuple[str, str]]]:
        """Returns the listed digests after a check of the newest files."""
        if not self._list.exists():
            # A new run, or one of an earlier release of jaxdp, which is accepted without digests.
            digests = self._digests_without_list()
            self._write(digests)
            return list(digests.items())
        digests = self._listed()
        if not digests:
            return []
        newest = max(digests)
        path = self._folder / str(newest)
        if not path.is_dir():
            raise ValueError(
                f"{shown(path)} is missing, but {self._list.name} names it as the newest one. "
                f"{_REMEDY}"
            )
        digest_of_files, _ = digests[newest]
        if digest_of_files != _digest_of_files(path):
            raise ValueError(
                f"{shown(path)} is damaged: its files differ from the written ones. {_REMEDY}"
            )
        return list(digests.items())

    def _digests_without_list(self) -> dict[int, tuple[str, str]]:
        steps = [int(path.name) for path in self._folder.glob("*") if path.name.isdecimal()]
        if not steps:
            return {}
        # Only the newest one is restored.
        newest = max(steps)
        return {newest: (_digest_of_files(self._folder / str(newest)), "")}

    def _check_shared(self) -> None:
        if not self._list.exists():
            raise ValueError(
                f"workdir has no {shown(self._list)} here, which process 0 has. Use a folder that "
                "all share."
            )

    def _listed(self) -> dict[int, tuple[str, str]]:
        content = read_json(self._list, remedy=_REMEDY, keys=["digests", "sum"])
        if content["sum"] != _sum(content["digests"]):
            raise ValueError(
                f"{shown(self._list)} is damaged: its content differs from its sum. {_REMEDY}"
            )
        return {int(step): tuple(digests) for step, digests in content["digests"].items()}

    def _write(self, digests: dict[int, tuple[str, str]]) -> None:
        # JSON has no integers as keys, and no tuples.
        as_json = {str(step): list(both) for step, both in digests.items()}
        write_json(self._list, {"digests": as_json, "sum": _sum(as_json)})


def _sum(digests: Any) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _is_empty(x: Any) -> bool:
    return getattr(x, "size", 1) == 0


def _nonempty(state: Any) -> Any:
    """Returns a state with None in the place of arrays without entries, which Orbax refuses."""
    return jax.tree.map(lambda x: None if _is_empty(x) else x, state)


def _with_empty(saved: Any, like: Any) -> Any:
    """Returns a saved state with the arrays of `like` that have no entries."""
    leaves, structure = jax.tree.flatten(like)
    others = iter(jax.tree.leaves(saved))
    filled = [leaf if _is_empty(leaf) else next(others) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _fetched(x: Any) -> Any:
    """Returns an array on the host, unless several processes share it."""
    return jax.device_get(x) if getattr(x, "is_fully_addressable", True) else x


def _digest_of_state(state: Any) -> str:
    """Returns a hash of a state, or "" if this process does not have the whole."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable or x.is_fully_replicated for x in arrays):
        return digest(with_words(state))
    return ""


def _digest_of_files(folder: pathlib.Path) -> str:
    """Returns a hash of the names and contents of all files in and below a folder."""
    sha256 = hashlib.sha256()
    # By sorted and relative names, so that a workdir may be moved or copied.
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256.update(f"{path.relative_to(folder)} {sha256_of(path)}\n".encode())
    return sha256.hexdigest()
