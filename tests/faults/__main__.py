"""Runs the whole suite of faults and writes its page: `python -m tests.faults --output
docs/design/faults.md`.

It takes hours, since every kill is a program that starts, dies and runs again. `--kills-from` takes
the kills of an earlier `python -m tests.faults.kills`."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.report import format_table
from tests.faults import network

ROOT = pathlib.Path(__file__).resolve().parents[2]
DAMAGED = (
    "tests/faults/test_damaged_ledgers.py",
    "tests/faults/test_hostile_files.py",
    "tests/finetune/test_damaged_checkpoints.py",
)
NAMES = {
    "test_no_damage_under_counts[database]": "ledger: database",
    "test_no_damage_under_counts[head]": "ledger: head",
    "test_no_damage_under_counts[log]": "ledger: log that a killed process left",
    "test_every_damaged_file_is_read_or_named": "packages, images, arrays, weights and JSON of "
    "others",
    "test_a_damaged_checkpoint_is_noticed_or_harmless": "checkpoints of training",
}


def main() -> None:
    """Runs everything and writes the page. The exit status says whether anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--damages", type=int, default=1000, help="of each kind of file")
    parser.add_argument(
        "--kills-from", type=pathlib.Path, help="JSON of an earlier campaign, in place of a new one"
    )
    parser.add_argument(
        "--network-kills", type=int, default=100, help="of the processes of parties on Flower"
    )
    parser.add_argument(
        "--network-from", type=pathlib.Path, help="JSON of an earlier campaign on Flower"
    )
    parser.add_argument("--output", type=pathlib.Path, help="the page; by default it is printed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = given.kills_from or pathlib.Path(folder) / "kills.json"
        if given.kills_from is None:
            command = [
                sys.executable,
                "-m",
                "tests.faults.kills",
                f"--kills={given.kills}",
                f"--output={found}",
            ]
            subprocess.run(command, cwd=ROOT, check=True)
        kills = json.loads(found.read_text())["launchers"]
        known = given.network_from or pathlib.Path(folder) / "network.json"
        if given.network_from is None:
            command = [
                sys.executable,
                "-m",
                "tests.faults.network",
                f"--kills={given.network_kills}",
                f"--output={known}",
            ]
            subprocess.run(command, cwd=ROOT, check=True)
        parties = network.summary(json.loads(known.read_text()))
        damages, passed = damaged(given.damages, pathlib.Path(folder) / "damaged.xml")
    text = page(kills, parties, damages)
    if given.output is None:
        print(text)
    else:
        given.output.write_text(text)
    wrong = any(
        row["paid otherwise"] or row["other results"] or row["completed"] < row["kills"]
        for row in parties
    )
    sys.exit(
        not passed
        or wrong
        or any(row["under-counted"] or row["stuck"] or row["damaged"] for row in kills)
    )


def damaged(count: int, report: pathlib.Path) -> tuple[list[dict[str, Any]], bool]:
    """Runs the tests of damaged files with `count` of each kind. Returns their counts, and whether
    they passed."""
    environment = {**os.environ, "JAXDP_FAULTS": str(count)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        *DAMAGED,
        f"--junitxml={report}",
        "-o",
        "junit_family=legacy",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        properties = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        if "damaged" in properties:
            rows.append(
                {
                    "files": NAMES[str(case.get("name"))],
                    "damaged": int(str(properties["damaged"])),
                    "refused": int(str(properties["refused"])),
                    "harmless": int(str(properties["damaged"])) - int(str(properties["refused"])),
                    "silent": 0 if case.find("failure") is None else "FAILED",
                }
            )
    return rows, done.returncode == 0


def deaths(parties: Sequence[Mapping[str, Any]]) -> str:
    """Returns the section about parties on Flower."""
    columns = [
        "process",
        "kills",
        "kinds of messages",
        "completed",
        "other results",
        "paid otherwise",
        "secrets left",
    ]
    total: dict[str, Any] = {name: sum(row[name] for row in parties) for name in columns[1:]}
    table = format_table([*parties, {"process": "all", **total}], columns, style="markdown")
    return f"""## Parties over a network

`python -m tests.faults.network` runs recalibration and Split Adaptation [over Flower](network.md), with TLS and keys.
In each run the SuperLink, a SuperNode and the programs of both parties are killed with SIGKILL, each before or after
one of its HTTP messages, and started again. The end is compared with a run without a kill. A run that does not end in
400 seconds is not completed for all that were killed in it. Its secrets are still there, and its end is not compared.

{table}
"""  # noqa: E501


def page(
    kills: Sequence[Mapping[str, Any]],
    parties: Sequence[Mapping[str, Any]],
    damages: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the page."""
    columns = [
        "launcher",
        "kills",
        "sites",
        "sites hit",
        "completed",
        "under-counted",
        "over-charged",
        "leftovers",
    ]
    total: dict[str, Any] = {name: sum(row[name] for row in kills) for name in columns[1:]}
    table = format_table([*kills, {"launcher": "all", **total}], columns, style="markdown")
    broken = format_table(
        damages, ["files", "damaged", "refused", "harmless", "silent"], style="markdown"
    )
    return f"""# Faults

`python -m tests.faults --output docs/design/faults.md` writes this page. `make test` runs a small sample of the same.

## Kills

Every launcher that spends is killed with SIGKILL before and after its ledger and file operations: SQL statements,
`fsync`, renames, links, locks, writes. The kills begin with its first reservation. A site is an operation with the line
of jaxdp that calls it. Each site is killed once before any is killed twice. Some runs are killed again while they
continue. Then the job runs to its end, and is compared with a job that was never killed.

{table}

- Under-counted: a noted release is not paid, or less was spent than without the kill.
- Over-charged: more was spent than without the kill. This is allowed if a release cannot be repeated.
- Leftovers: a secret seed or a temporary file remains at the end.

The same checks catch three broken twins: a till that notes nothing, a ledger that deletes a reservation after its body
has run, and a reservation that is made after its body.

`tests/finetune/test_hosts.py` kills one of several processes of `jax.distributed` in the same way: before a payment,
after it, within a step and while a checkpoint is written. The others end, and the charges are those of the notes.

{deaths(parties)}
## Damage

Bits are flipped, blocks zeroed, files cut and deleted at random places. A damaged file is harmless if everything that
is read from it equals what was written.

{broken}

No file was executed, every refusal names the path of the file, and reading was bounded in time and memory.
"""  # noqa: E501


if __name__ == "__main__":
    main()
