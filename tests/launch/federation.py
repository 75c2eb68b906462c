"""The processes of the how-to about parties over a network, on free ports of this machine."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from unittest import mock

import numpy as np

from jaxdp.data import bundled
from jaxdp.privacy import Ledger
from launch import certificates
from tests import forked
from tests.faults.wire import HEARTBEAT_SECONDS
from tests.launch.test_hospitals import Direct, alone, paid, seed

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOWTO = ROOT / "docs" / "howto" / "parties_over_a_network.md"
CLINICS = ("clinic-1", "clinic-2")
# The tests' own setting of JAX. Under another one, in the configuration or in a variable, a release
# is another one.
SETTING = ("JAX_NUMPY_RANK_PROMOTION", "raise")
OFFLINE_SECONDS = 2 * HEARTBEAT_SECONDS + 1  # after which the SuperLink knows that a node has gone
ITERATIONS = "--config.method.iterations=2"
_WIRE = "from tests.faults import wire; wire.main()"
# What the processes import, without the launchers themselves, because these define flags of the
# same names.
_MODULES = ("tests.faults.wire", "launch.flower", "launch.hospitals", "launch.parties", "uvicorn")
_MODULES += (
    "flwr.supernode.cli",
    "flwr.superlink.cli",
    "flwr.superlink.grid",
    "flwr.supernode.runtime.run_clientapp",
)
# A small model, which takes seconds.
_MODEL = {"patch_size": 2, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 16}
SPLIT_SERVER = {
    **{f"model.options.{name}": value for name, value in _MODEL.items()},
    **{"train.steps": 2, "calibration.frontends": 0, "calibration.samples": 4, "tuning.epochs": 1},
    **{"directions": 4, "copies": 2, "adaptation.epochs": 1},
}
SPLIT_CLIENT = {"mode": "private", "label_share": 0.1}


def free_ports(count):
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Federation:
    """The processes, in a folder with the keys, the records and the workdirs.

    Attributes:
        clinics: The names of the parties.
        ports: Those of the SuperLink and the SuperNodes.
        running: The processes by name.
        wires: The settings of `tests.faults.wire` by the name of a process.
    """

    def __init__(self, folder, clinics=CLINICS):
        self.folder, self.clinics, self.running, self.wires = folder, clinics, {}, {}
        shared = {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_HOME": str(folder / "flwr"),
            **dict([SETTING]),
        }
        self._interpreter = forked.Interpreter([sys.executable], shared)
        names = ("superlink", *clinics)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        blocks = re.findall(r"```bash\n(.*?)```", HOWTO.read_text(), flags=re.DOTALL)
        lines = [
            line
            for block in blocks
            for line in block.replace("\\\n", " ").splitlines()
            if "export" not in line
        ]
        commands = [line.removeprefix("until ").split(";")[0].removesuffix("&") for line in lines]
        self._commands = list(map(shlex.split, commands))
        certificates.make(folder / "keys", clinics, hosts=["localhost"])
        one = folder / "keys" / "one"  # the server of Split Adaptation knows one client
        shutil.copytree(folder / "keys" / certificates.SUPERLINK, one)
        for other in clinics[1:]:
            (one / certificates.PARTIES / f"{other}.pub").unlink()
        random = np.random.default_rng(0)
        for name in clinics:  # as in the how-to
            logits = random.normal(size=(60, 5)).astype(np.float32)
            labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
            np.savez(folder / f"{name}.npz", logits=4 * logits, labels=labels)
        digits = bundled("digits").of_classes([5, 6, 7, 8, 9]).gather(np.arange(45))
        few, test = (
            {key: array[rows] for key, array in digits.items()}
            for rows in (slice(25), slice(25, None))
        )
        np.savez(self.images, **few, **{f"test_{key}": array for key, array in test.items()})

    @property
    def images(self):
        """The file with the images of the client of Split Adaptation."""
        return self.folder / "images.npz"

    # --- Processes ---

    def command(self, which, name="clinic-1", run=""):
        """Returns a command of the how-to for one clinic, with the ports and the workdirs of this
        test."""
        (words,) = (words for words in self._commands if which in words[:3])
        changed = [
            word.replace("clinic-1", name)
            .replace("9092", str(self.ports["superlink"]))
            .replace("9094", str(self.ports[name]))
            .replace("workdir/split/", "workdir/")
            .replace("workdir/", f"{run}/")
            .replace("configs/", f"{ROOT}/configs/")
            for word in words
        ]
        return changed

    def start(self, key, command):
        """Starts a process whose output goes to a file."""
        program = command[2:] if command[0] == "python" else command
        wire = {"JAXDP_WIRE": json.dumps({"quick": True} | self.wires.get(key, {}))}
        given = {"env": wire, "modules": _MODULES, "files": [str(self.folder / f"{key}.log")] * 2}
        self.running[key] = self._interpreter.start(_WIRE, *program, cwd=self.folder, **given)

    def output(self, key):
        return (self.folder / f"{key}.log").read_text(errors="replace")

    def kill(self, *keys):
        for key in keys:
            self.running.pop(key).kill()

    def wait(self, *keys, timeout=240):
        for key in keys:
            code = self.running.pop(key).wait(timeout)
            assert code == 0, f"{key} ended with {code}: {self.output(key)[-3000:]}"

    def until(self, seen, timeout=240):
        end, expected = time.monotonic() + timeout, (None, 0, -signal.SIGKILL)
        while not seen():
            late = time.monotonic() > end
            ended = [
                key
                for key, process in self.running.items()
                if late or process.poll() not in expected
            ]
            assert not ended, {key: self.output(key)[-1500:] for key in ended}
            time.sleep(0.1)

    def close(self):
        self.kill(*self.running)
        self._interpreter.close()

    def start_superlink(self):
        self.start("superlink", self.command("flower-superlink"))
        self.until(lambda: self._listens(self.ports["superlink"]))

    def start_node(self, name):
        self.start(f"node {name}", self.command("flower-supernode", name))

    def start_program(self, which, name, run):
        """Starts a launcher."""
        command, fields = self.command(f"launch.{which}", name, run), [ITERATIONS]
        if which.startswith("split"):
            party, changes = ("server", SPLIT_SERVER)
            if which == "split_client":
                party, changes = "client", SPLIT_CLIENT | {"images": self.images}
            fields = [f"--config.{party}.{field}={value}" for field, value in changes.items()]
            command = [word.replace("keys/superlink", "keys/one") for word in command]
        self.start(f"{which} {name}", [*command, *fields])

    def registered(self):
        """Tells whether a server's program has registered the clinics, so that their nodes may
        come."""
        return self.output("superlink").count("Created node_id") >= len(self.clinics)

    def _listens(self, port):
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    # --- Secrets and results ---

    def plant(self, run, folder="conversation"):
        """Gives every clinic a secret before it begins, so that its answers can be repeated
        elsewhere."""
        for i, name in enumerate(self.clinics):
            where = self.folder / run / name / folder
            where.mkdir(parents=True)
            (where / "secret_seed").write_text(seed(i).hex())

    def expected(self, run):
        """Returns the temperature that the same hospitals with the same secrets give in one
        process."""
        direct = Direct.__new__(Direct)
        direct.names, direct.root, direct.changes = self.clinics, self.folder / run, {}
        records = {name: self.folder / f"{name}.npz" for name in self.clinics}
        with mock.patch.dict(os.environ, [SETTING]):
            return float(alone(direct, self.folder / f"{run}-alone", records).temperature)

    def result(self, run, party="calibrator"):
        return json.loads((self.folder / run / party / "result.json").read_text())

    def spends(self, run):
        """Returns the number of spends that cost, and of open spends, for every clinic and data
        set."""
        found = {}
        for name in self.clinics:
            with Ledger(self.folder / run / name / "ledger.sqlite") as ledger:
                for entry in ledger.report()["datasets"]:
                    found[name, entry["name"]] = paid(entry), len(entry["open"])
        return found
