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

from jaxdp.files import read_json, shown, sync_tree, write_json
from jaxdp.release.hosts import Hosts
from jaxdp.release.identity import digest

_REMEDY = "Restore the workdir from a copy, or begin again in a new one. Charges stay charged."


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

        self._folder, self._list = (
            (workdir / "checkpoints").absolute(),
            workdir / "checkpoints.json",
        )
        self._hosts = hosts or Hosts()
        self._digests = {int(step): tuple(both) for step, both in self._hosts.first(self._found)}
        self._hosts.each(self._check_shared)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager, self._args = ocp.CheckpointManager(self._folder, options=options), ocp.args

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
        for unfinished in [other for other in self._manager.all_steps() if other > step]:
            self._manager.delete(unfinished)
        if not step:
            return like, 0
        path = self._folder / str(step)
        try:
            state = jax.tree.map(
                _fetched, self._manager.restore(step, args=self._args.StandardRestore(like))
            )
        except Exception as error:  # Orbax raises many kinds
            what = shown(" ".join(str(error).split())[:200]).removesuffix(".")
            raise ValueError(
                f"{shown(path)} cannot be restored: {type(error).__name__}, {what}. {_REMEDY}"
            ) from error
        if (
            "" not in (saved := self._digests[step][1], found := _digest_of_state(state))
            and saved != found
        ):
            raise ValueError(
                f"{shown(path)} is damaged: its state differs from the saved one. {_REMEDY}"
            )
        return state, step

    def save(self, step: int, state: Any) -> None:
        """Saves a state durably."""
        self._manager.save(step, args=self._args.StandardSave(state))
        self._hosts.first(lambda: self._name(step, state))

    def _name(self, step: int, state: Any) -> None:
        sync_tree(self._folder)
        self._digests[step] = _digest_of_files(self._folder / str(step)), _digest_of_state(state)
        self._write({number: self._digests[number] for number in sorted(self._manager.all_steps())})

    def _found(self) -> list[tuple[int, tuple[str, str]]]:
        """Returns the listed digests after a check of the newest files."""
        if (
            not self._list.exists()
        ):  # a new run, or one of an earlier release, which is accepted without digests
            kept = [int(path.name) for path in self._folder.glob("*") if path.name.isdecimal()]
            digests = {
                step: (_digest_of_files(self._folder / str(step)), "") for step in sorted(kept)[-1:]
            }
            self._write(digests)
            return list(digests.items())
        digests = self._listed()
        for newest in sorted(digests)[-1:]:
            path = self._folder / str(newest)
            if not path.is_dir():
                raise ValueError(
                    f"{shown(path)} is missing, but {self._list.name} names it as the newest one. "
                    f"{_REMEDY}"
                )
            if digests[newest][0] != _digest_of_files(path):
                raise ValueError(
                    f"{shown(path)} is damaged: its files differ from the written ones. {_REMEDY}"
                )
        return list(digests.items())

    def _check_shared(self) -> None:
        if not self._list.exists():
            raise ValueError(
                f"workdir has no {shown(self._list)} here, which process 0 has. Use a folder that "
                "all share."
            )

    def _listed(self) -> dict[int, tuple[str, str]]:
        found = read_json(self._list, remedy=_REMEDY, keys=["digests", "sum"])
        if found["sum"] != _sum(found["digests"]):
            raise ValueError(
                f"{shown(self._list)} is damaged: its content differs from its sum. {_REMEDY}"
            )
        return {int(step): tuple(both) for step, both in found["digests"].items()}

    def _write(self, digests: dict[int, tuple[str, str]]) -> None:
        named = {str(step): list(both) for step, both in digests.items()}
        write_json(self._list, {"digests": named, "sum": _sum(named)})


def _sum(digests: Any) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _fetched(x: Any) -> Any:
    return jax.device_get(x) if getattr(x, "is_fully_addressable", True) else x


def _digest_of_state(state: Any) -> str:
    leaves = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    return (
        digest(state)
        if all(x.is_fully_addressable or x.is_fully_replicated for x in leaves)
        else ""
    )


def _digest_of_files(folder: pathlib.Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            found.update(
                f"{path.relative_to(folder)} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return found.hexdigest()
