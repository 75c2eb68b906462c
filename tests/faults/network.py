"""Parties on Flower whose processes are killed with SIGKILL at any message, and started again.

    python -m tests.faults.network --kills=40 --output=network.json

The processes are those of the how-to: a SuperLink, a SuperNode and the programs of two parties,
with TLS and keys. One run without a fault lists the messages of each process. In every other run
each process is killed once, before or after one of its messages (`tests.faults.wire`). What has
ended is started again, as an operator does. If the party's program has sent nothing for two
minutes, the SuperNode is ended and started again ("freed" counts it): flwr 1.41 waits for ever for
an answer of which only a part came. The end is compared with that of the first run.

Results are written after each run. The same command continues from them.
"""

import argparse
import collections
import contextlib
import json
import math
import pathlib
import random
import signal
import tempfile
import time
from typing import Any

import numpy as np

from jaxdp.files import write_json
from tests.launch.federation import Federation

CLINIC = "clinic-1"
JOBS = {"recalibrate": "calibrator", "split": "server"}  # the folder of the server
# at the processes of one run, ten a second: a campaign that was stopped for a while goes on
_LOOKS = 4000
_IDLE = (
    20.0  # seconds after which a party that has ended is started again, because the other one waits
)
_QUIET = 120.0  # seconds without a message of the party after which its SuperNode is ended
_Row = dict[str, Any]
_Kill = tuple[str, int, str]  # a message, which of them, "before" or "after"


class Job:
    """A job with its reference.

    Attributes:
        messages: The messages of every process, with their number.
    """

    def __init__(self, name: str, folder: pathlib.Path):
        self._name, self._folder = name, folder
        self._programs = [f"{name}_server {CLINIC}", f"{name}_client {CLINIC}"]
        self.names = ["superlink", f"node {CLINIC}", *self._programs]
        self.messages = dict[str, collections.Counter[str]]()
        row = self.attempt({})
        assert not row["problems"], row
        for key in self.names:
            events = (self._root / f"{key}.events").read_text().splitlines()
            self.messages[key] = collections.Counter(events)
        self.reference = self._found()

    def attempt(self, kills: dict[str, _Kill]) -> _Row:
        """Runs the job and kills processes by name."""
        self._root = pathlib.Path(tempfile.mkdtemp(dir=self._folder))
        row: _Row = {"kills": kills, "killed": [], "ended": [], "starts": 0, "freed": 0}
        began, problems = time.monotonic(), dict[str, Any]()
        with contextlib.closing(Federation(self._root, [CLINIC])) as federation:
            self._federation = federation
            federation.plant("run", "conversation" if self._name == "recalibrate" else "")
            for key in self.names:
                federation.wires[key] = {"events": str(self._root / f"{key}.events")}
            for key, kill in kills.items():
                federation.wires[key]["kill"] = kill
            self._until_the_end(row, problems)
        if not problems and kills:
            problems |= {
                name: value
                for name, value in self._found().items()
                if value != self.reference[name]
            }
        if any(self._root.glob("run/**/secret_seed")):
            problems["secrets"] = True
        return {**row, "problems": problems, "seconds": round(time.monotonic() - began, 1)}

    def _start(self, key: str) -> None:
        which, _, name = key.partition(" ")
        if key == "superlink":
            self._federation.start_superlink()
        elif which == "node":
            self._federation.start_node(name)
        else:
            self._federation.start_program(which, name, "run")

    def _until_the_end(self, row: _Row, problems: dict[str, Any]) -> None:
        federation, ended, due = (
            self._federation,
            dict[str, float](),
            dict.fromkeys(self.names, 0.0),
        )
        node, told, last = (
            f"node {CLINIC}",
            self._root / f"{self._programs[1]}.events",
            (0, time.monotonic()),
        )
        for _ in range(_LOOKS):
            if ended.keys() >= set(self._programs):
                return
            now = time.monotonic()
            for key in [
                key for key, process in federation.running.items() if process.poll() is not None
            ]:
                code = federation.running.pop(key).returncode
                row["starts"] += 1
                if code == -signal.SIGKILL:
                    row["killed"].append(key)
                    federation.wires[key].pop("kill", None)
                elif code != 0:  # because of the death of another one
                    row["ended"].append([key, federation.output(key).strip().rpartition("\n")[2]])
                if key in self._programs and code == 0:
                    ended[key] = now
                else:
                    due[key] = now + 1.0
            for key in [key for key, then in due.items() if then <= now]:
                if key == node and not federation.registered():
                    continue  # the SuperLink refuses it until the server's program has come
                due.pop(key)
                self._start(key)
            # the other party waits for it
            for key in [key for key, then in ended.items() if now > then + _IDLE]:
                ended.pop(key)
                due[key] = now
            if (count := told.stat().st_size if told.exists() else 0) != last[
                0
            ] or node not in federation.running:
                last = count, now
            elif now > last[1] + _QUIET:
                federation.kill(node)
                row["freed"] += 1
                due[node] = now + 1.0
            time.sleep(0.1)
        problems["stuck"] = {key: federation.output(key)[-400:] for key in self.names}

    def _found(self) -> dict[str, Any]:
        """Returns the result, and what was paid."""
        run = self._root / "run"
        if self._name == "recalibrate":
            result: Any = self._federation.result("run")["parameters"]
        else:
            predictions = np.load(run / CLINIC / "predictions.npy").tolist()
            result = [(run / CLINIC / "upload").read_bytes().hex(), predictions]
        server = {
            key: value for key, value in self._federation.result("run", JOBS[self._name]).items()
        }
        paid = {" ".join(key): value for key, value in self._federation.spends("run").items()}
        return {"result": result, "server": server, "paid": paid}


def draw(
    job: Job, hits: collections.Counter[tuple[str, str]], rng: random.Random
) -> dict[str, _Kill]:
    """Returns a message of each process that was hit least."""
    found = {}
    for key, events in job.messages.items():
        least = min(hits[key, event] for event in events)
        event = rng.choice(sorted(event for event in events if hits[key, event] == least))
        found[key] = event, rng.randint(1, events[event]), rng.choice(("before", "after"))
    return found


def campaign(
    kills: int, output: pathlib.Path, *, minutes: float = math.inf, seed: int = 0
) -> list[_Row]:
    """Kills until the number of kills or the time is reached. Returns a row per run, also of
    earlier campaigns."""
    end = time.monotonic() + 60 * minutes
    rows: list[_Row] = json.loads(output.read_text()) if output.exists() else []
    with tempfile.TemporaryDirectory(prefix="jaxdp-network-") as folder:
        jobs = {name: Job(name, pathlib.Path(folder)) for name in JOBS}
        while sum(len(row["killed"]) for row in rows) < kills and time.monotonic() < end:
            name = list(JOBS)[len(rows) % len(JOBS)]
            mine = [row for row in rows if row["job"] == name]
            hits = collections.Counter(
                (key, row["kills"][key][0]) for row in mine for key in row["killed"]
            )
            drawn = draw(jobs[name], hits, random.Random(f"{seed} {len(rows)}"))
            row = {"job": name, **jobs[name].attempt(drawn)}
            rows.append(row)
            write_json(output, rows)
            print(
                f"{len(rows)}: {name}, {row['kills']}, killed {row['killed']}, {row['starts']} "
                "starts, ",
                end="",
            )
            print(f"{row['seconds']} s: {row['problems'] or 'right'}", flush=True)
    return rows


KINDS = {
    "superlink": "SuperLink",
    "node": "SuperNode",
    "server": "server program",
    "client": "party's program",
}


def summary(rows: list[_Row]) -> list[dict[str, Any]]:
    """Returns the figures of every kind of process. A run with a problem counts for all that were
    killed in it."""
    found = []
    for kind, title in KINDS.items():
        killed = [(row, key) for row in rows for key in row["killed"] if kind in key.split()[0]]
        problems = collections.Counter(name for row, _ in killed for name in row["problems"])
        found.append(
            {
                "process": title,
                "kills": len(killed),
                "kinds of messages": len(
                    {(row["job"], row["kills"][key][0]) for row, key in killed}
                ),
                "completed": len(killed) - problems["stuck"],
                "other results": sum(
                    "result" in row["problems"] or "server" in row["problems"] for row, _ in killed
                ),
                "paid otherwise": problems["paid"],
                "secrets left": problems["secrets"],
            }
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    given = parser.parse_args()
    for figures in summary(campaign(given.kills, given.output, minutes=given.minutes)):
        print(", ".join(f"{key} {value}" for key, value in figures.items()))
