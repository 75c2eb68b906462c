"""Hospitals and a calibrator on Flower: the commands of the how-to, and refused strangers.

One SuperLink with TLS and authentication serves all tests of this file. Its processes are those of the how-to.
"""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxdp.privacy import Ledger
from launch import certificates, flower
from tests.launch import program
from tests.launch.test_hospitals import Direct, alone

pytest.importorskip("flwr", reason="the dependency group test is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="flwr ends processes by signals")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOWTO = ROOT / "docs" / "howto" / "parties_over_a_network.md"
CLINICS = ("clinic-1", "clinic-2")
ENVIRONMENT = {"FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(ROOT)}


def free_ports(count):
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Federation:
    """The processes of the how-to, in a folder with the keys and the records.

    Attributes:
        ports: Those of the SuperLink and the SuperNodes.
        running: The processes by name.
    """

    def __init__(self, folder):
        self.folder, self.running = folder, {}
        self.ports = dict(zip(("superlink", *CLINICS), free_ports(3), strict=True))
        blocks = re.findall(r"```bash\n(.*?)```", HOWTO.read_text(), flags=re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if "export" not in line]
        self.commands = [shlex.split(line.removesuffix("&")) for line in lines]
        random = np.random.default_rng(0)
        for name in CLINICS:  # as in the how-to
            logits = random.normal(size=(60, 5)).astype(np.float32)
            labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
            np.savez(folder / f"{name}.npz", logits=4 * logits, labels=labels)

    def command(self, which, name="clinic-1", run=""):
        """Returns a command of the how-to for one clinic, with the ports and the workdirs of this test."""
        (words,) = (words for words in self.commands if which in (words[0], words[2]))
        changed = [
            word.replace("clinic-1", name)
            .replace("9092", str(self.ports["superlink"]))
            .replace("9094", str(self.ports[name]))
            .replace("workdir/", f"{run}/")
            .replace("configs/", f"{ROOT}/configs/")
            for word in words
        ]
        if changed[0] == "python":
            return [sys.executable, *changed[1:]]  # flwr warns of its own dependencies
        return [str(pathlib.Path(sys.executable).parent / changed[0]), *changed[1:]]

    def start(self, key, command):
        """Starts a process whose output goes to a file."""
        environment = {**os.environ, **ENVIRONMENT, "FLWR_HOME": str(self.folder / "flwr")}
        with open(self.folder / f"{key}.log", "ab") as log:
            self.running[key] = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def output(self, key):
        return (self.folder / f"{key}.log").read_text(errors="replace")

    def kill(self, *keys):
        for key in keys:
            process = self.running.pop(key)
            process.send_signal(signal.SIGKILL)
            process.wait()

    def wait(self, *keys, timeout=240):
        for key in keys:
            code = self.running.pop(key).wait(timeout)
            assert code == 0, f"{key} ended with {code}: {self.output(key)[-3000:]}"

    def until(self, seen, timeout=120):
        end = time.monotonic() + timeout
        while not seen():
            late = time.monotonic() > end
            ended = [key for key, process in self.running.items() if late or process.poll() is not None]
            assert not ended, {key: self.output(key)[-1500:] for key in ended}
            time.sleep(0.1)

    def start_superlink(self):
        self.start("superlink", self.command("flower-superlink"))
        self.until(lambda: self._listens(self.ports["superlink"]))

    def start_node(self, name):
        self.start(f"node {name}", self.command("flower-supernode", name))

    def start_program(self, which, name, run, *flags, first=""):
        """Starts a launcher. The code `first` runs before it."""
        command = [*self.command(f"launch.{which}", name, run), *flags]
        command = [sys.executable, "-c", first + program.FORKED, *command[2:]] if first else command
        self.start(f"{which} {name}", command)

    def registered(self):
        """Tells whether the calibrator's program has registered the clinics, so that their nodes may come."""
        return self.output("superlink").count("Created node_id") >= len(CLINICS)

    def _listens(self, port):
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    def keys(self, name):
        return self.folder / "keys" / name

    def address(self):
        return f"localhost:{self.ports['superlink']}"


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    found = Federation(tmp_path_factory.mktemp("federation"))
    certificates.make(found.folder / "keys", CLINICS, hosts=["localhost"])
    found.start_superlink()
    yield found
    for process in found.running.values():
        process.kill()
    for process in found.running.values():
        process.wait()


def expected(federation, run):
    """Returns the temperature that the same hospitals with the same secrets give in one process."""
    direct = Direct.__new__(Direct)
    direct.names, direct.root, direct.changes = CLINICS, federation.folder / run, {}
    found = alone(
        direct, federation.folder / f"{run}-alone", {name: federation.folder / f"{name}.npz" for name in CLINICS}
    )
    return float(found.temperature)


def plant(federation, run):
    """Gives every clinic a secret before it begins."""
    for i, name in enumerate(CLINICS):
        folder = federation.folder / run / name / "conversation"
        folder.mkdir(parents=True)
        (folder / "secret_seed").write_text(bytes([i] * 16).hex())


def spends(federation, run):
    found = {}
    for name in CLINICS:
        with Ledger(federation.folder / run / name / "ledger.sqlite") as ledger:
            (entry,) = ledger.report()["datasets"]
            found[name] = sum(row["spends"] for row in entry["spends"]), len(entry["open"]), ledger.epsilon("records")
    return found


def result(federation, run):
    return json.loads((federation.folder / run / "calibrator" / "result.json").read_text())


ITERATIONS = "--config.method.iterations=2"


SERVER, CLIENT = "recalibrate_server clinic-1", "recalibrate_client {}"


def test_the_commands_of_the_howto_recalibrate(federation):
    plant(federation, "howto")
    federation.start_program("recalibrate_server", "clinic-1", "howto", ITERATIONS)
    federation.until(federation.registered)
    for name in CLINICS:
        federation.start_node(name)
        federation.start_program("recalibrate_client", name, "howto", ITERATIONS)
    federation.wait(SERVER, *map(CLIENT.format, CLINICS))
    assert result(federation, "howto")["parameters"]["0"] == expected(federation, "howto")
    assert result(federation, "howto")["ended"] == list(CLINICS)
    assert spends(federation, "howto") == dict.fromkeys(CLINICS, (1, 0, 1.0))
    assert not list(federation.folder.glob("howto/**/secret_seed"))
    assert "calibrator: 2 hospitals answered 3 rounds" in federation.output(SERVER)


# --- Strangers --------------------------------------------------------------------------------------------------------


def test_a_plaintext_connection_and_another_authority_are_refused(federation, tmp_path):
    port = federation.ports["superlink"]
    with contextlib.closing(http.client.HTTPConnection("localhost", port, timeout=5)) as plain:
        plain.request("GET", "/health")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
    certificates.make(tmp_path, [], hosts=["localhost"])
    for authority, right in ((federation.keys("clinic-1"), True), (tmp_path / "superlink", False)):
        context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
        with contextlib.closing(http.client.HTTPSConnection("localhost", port, timeout=5, context=context)) as secure:
            if right:
                secure.connect()
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    secure.connect()


def test_a_node_without_a_known_key_is_refused(federation, tmp_path):
    certificates.make(tmp_path, ["clinic-1"], hosts=["localhost"])
    command = federation.command("flower-supernode", "clinic-1")
    command[command.index("--auth-supernode-private-key") + 1] = str(tmp_path / "clinic-1" / "key")
    command[command.index("--port") + 1] = str(*free_ports(1))
    federation.start("stranger", command)
    assert federation.running.pop("stranger").wait(60) != 0
    assert "Failed to activate SuperNode" in federation.output("stranger")


def test_a_program_without_the_secret_gets_no_task(federation, tmp_path):
    certificates.make(tmp_path, ["clinic-1"], hosts=["localhost"])
    with pytest.raises(Exception, match=r"401|403"):
        flower.serve(
            bytes, f"localhost:{federation.ports['clinic-1']}", tmp_path / "clinic-1", until=lambda: False, timeout=5
        )
