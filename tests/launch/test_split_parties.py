"""The two parties of Split Adaptation as their users run them: two processes that cannot read each
other's files."""

import concurrent.futures
import json
import math
import shutil

import numpy as np
import pytest

from jaxdp.data import bundled
from jaxdp.files import read_package, unpack
from jaxdp.privacy import Ledger
from tests import forked
from tests.launch import program
from tests.launch.federation import SPLIT_SERVER  # the programs of a network, compiled once

pytestmark = pytest.mark.slow

# For a process, the folders of the other party are as if they were on another machine.
JAIL = """
import os, sys
forbidden = tuple(os.path.realpath(path) for path in {!r})
def hook(event, args):
    events = ("open", "os.listdir", "os.scandir", "sqlite3.connect")
    if event in events and isinstance(args[0], (str, bytes)):
        if os.path.realpath(os.fsdecode(args[0])).startswith(forbidden):
            raise PermissionError(f"{{event}} of {{args[0]!r}}")
sys.addaudithook(hook)
"""
# Each party must never read these fields of the other.
POISON = {"server": {"client.data.name": "nowhere"}, "client": {"server.data.name": "nowhere"}}


def arguments(party, root, *flags, **overrides):
    """Returns the flags of a party with the workdir root / party and the exchange folder root /
    "exchange"."""
    config = {
        f"{party}.{name}": value
        for name, value in {**(SPLIT_SERVER if party == "server" else {}), **overrides}.items()
    }
    config |= POISON[party]
    places = [
        "--workdir",
        str(root / party),
        "--exchange",
        str(root / "exchange"),
        "--timeout",
        "200",
    ]
    fields = [f"--config.{name}={value}" for name, value in config.items()]
    return ["--config", "configs/split/two_parties.py", *places, *flags, *fields]


def start(party, root, *flags, forbidden):
    """Returns a function that runs a party in a process for which some folders do not exist."""
    command = [*program.PYTHON, "-m", f"launch.split_{party}", *arguments(party, root, *flags)]
    return lambda: program.run(command, JAIL.format(list(map(str, forbidden))))


def finish(*parties):
    """Runs parties at the same time. Returns the standard output of each."""
    # starts the interpreters, before two threads ask for them
    forked.run("", modules=program.MODULES)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ended = [run.result() for run in list(map(pool.submit, parties))]
    assert [process.returncode for process in ended] == [0] * len(parties), [
        process.stderr for process in ended
    ]
    return [process.stdout for process in ended]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Writes the client's own file: five images each of 5 to 9 with their labels, and some to
    classify."""
    source = bundled("digits").of_classes([5, 6, 7, 8, 9])
    batch = source.gather(np.arange(len(source)))
    few = np.concatenate([np.flatnonzero(batch["label"] == k)[:5] for k in range(5)])
    rest = np.setdiff1d(np.arange(len(source)), few)[:20]
    path = tmp_path_factory.mktemp("client") / "images.npz"
    np.savez(
        path,
        image=batch["image"][few],
        label=batch["label"][few],
        test_image=batch["image"][rest],
        test_label=batch["label"][rest],
    )
    return path


@pytest.fixture(scope="module")
def private(images, tmp_path_factory):
    """Runs both parties in the private mode. Each folder holds only its own party's secrets."""
    root = tmp_path_factory.mktemp("private")
    server = start("server", root, forbidden=[root / "client", images.parent])
    client = start(
        "client",
        root,
        "--mode",
        "private",
        "--queries",
        "--images",
        str(images),
        forbidden=[root / "server"],
    )
    return root, *finish(server, client)


def test_two_processes_adapt_privately(private, images):
    root, server, client = private
    result = json.loads((root / "client" / "result.json").read_text())
    assert 7.5 < result["epsilon"] <= 8.0 and result["delta"] == 1e-5
    assert (
        f"epsilon = {result['epsilon']:.6g} at delta = 1e-05 for replacing one image and its label"
        in client
    )
    assert f"accuracy {result['accuracy']:.4f} on 20 test images" in client
    assert (
        "The 20 queries are representations of other images, with epsilon = inf on the ledger"
        in client
    )
    assert f"uploaded {result['bytes']:,} bytes (private). 20 queries were answered" in server
    with Ledger(root / "client" / "ledger.sqlite") as ledger:
        assert ledger.epsilon("images/images") == result["epsilon"]
    assert not (root / "client" / "secret_seed").exists()
    with np.load(images) as file:
        predicted = np.load(root / "client" / "predictions.npy")
        assert result["accuracy"] == (predicted == file["test_label"]).mean()
    _, fields, arrays = unpack(read_package(root / "client" / "upload"), "upload")
    assert {name: x.shape for name, x in arrays.items()} == {"features": (25, 4), "labels": (25,)}
    assert fields["label_epsilon"] == 4.0 and set(arrays["labels"]) <= set(range(5))
    assert list((root / "exchange").iterdir()) == []


def test_parties_that_start_again_pay_and_send_nothing_twice(private, images):
    root, _, client = private
    kept = {
        path: path.read_bytes()
        for path in (root / "client" / "upload", root / "client" / "queries")
    }
    flags = ("--mode", "private", "--queries", "--images", str(images))
    again = finish(
        start("server", root, forbidden=[root / "client"]),
        start("client", root, *flags, forbidden=[root / "server"]),
    )
    assert again[1] == client and "20 queries were answered" in again[0]
    assert not (root / "client" / "secret_seed").exists()
    assert {path: path.read_bytes() for path in kept} == kept
    with Ledger(root / "client" / "ledger.sqlite") as ledger:
        entries = ledger.report()["datasets"]
    assert sorted(entry["name"] for entry in entries) == ["images/images", "images/queries"]
    assert all(sum(row["spends"] for row in entry["spends"]) == 1 for entry in entries), entries


def test_two_processes_adapt_as_published(private, images, tmp_path):
    # the same server meets another client
    shutil.copytree(private[0] / "server", tmp_path / "server")
    ledger = tmp_path / "own.sqlite"
    flags = [
        "--mode",
        "published",
        "--laplace_scale",
        "0.1",
        "--ledger",
        str(ledger),
        "--images",
        str(images),
    ]
    server = start("server", tmp_path, forbidden=[tmp_path / "client", images.parent])
    client = start("client", tmp_path, *flags, forbidden=[tmp_path / "server"])
    server, client = finish(server, client)
    assert "epsilon = inf (empirical only)" in client and "accuracy" in client
    assert "(published). 20 queries were answered" in server
    arrays = unpack(read_package(tmp_path / "client" / "upload"), "upload").arrays
    assert {name: x.shape for name, x in arrays.items()} == {"copies": (3, 25, 17, 8)}
    assert list((tmp_path / "exchange").iterdir()) == []
    with Ledger(ledger) as opened:
        assert opened.epsilon("images/images", delta=1e-5) == math.inf
    assert not (tmp_path / "client" / "ledger.sqlite").exists()


def test_the_jail_is_one(tmp_path):
    Ledger(tmp_path / "ledger.sqlite").close()
    command = [*program.PYTHON, "-m", "launch.ledger", str(tmp_path / "ledger.sqlite")]
    process = program.run(command, JAIL.format([str(tmp_path)]))
    assert process.returncode == 2 and "open of " in process.stderr, process.stderr


def test_limits_come_from_the_command_line():
    from jaxdp.files import Limits
    from launch import links

    assert links.parsed_limits([]) == Limits() and links.parsed_limits(
        ["bytes=5", "copies=7"]
    ) == Limits(bytes=5, copies=7)
    for wrong in ("bytes", "bytes=x", "byts=5", "bytes=0"):
        with pytest.raises(
            ValueError, match="--limits must be NAME=NUMBER pairs, for example bytes=17179869184"
        ):
            links.parsed_limits([wrong])
