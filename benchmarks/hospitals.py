"""Times private recalibration with many hospitals, in Flower's simulation engine, which needs Ray.

    pip install "flwr[simulation]>=1.41,<1.42"
    RAY_worker_niceness=0 python -m benchmarks run hospitals --hospitals 50 --cores 2

Without the variable, Ray gives its workers a low priority, and other work on the machine holds them
up. Every hospital is the `launch.hospitals.Hospital` of a real run, with its own records, workdir
and ledger. It is opened anew for every question, because the engine has one process per core for
all of them. `--in_process` does without Flower and Ray. The output has the seconds, the CPU-seconds
of all processes together (on Linux), which a busy machine distorts less, and the bytes of packages
per party."""

import contextlib
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.recalibration.hospitals import get_config
from jaxdp.files import optional
from jaxdp.privacy import Ledger
from launch import flower, hospitals, links

# These records are made up. Each hospital has its ledger in its workdir.
os.environ.setdefault("JAXDP_RECORD_DIGESTS", "0")
RECORDS, CLASSES, TIMEOUT = 200, 5, 600.0


def write_records(folder: pathlib.Path, count: int):
    """Writes the records of every hospital: logits of an over-confident model, and labels."""
    random = np.random.default_rng(0)
    for i in range(count):
        logits = random.normal(size=(RECORDS, CLASSES)).astype(np.float32)
        labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
        (folder / f"hospital-{i}").mkdir(parents=True)
        np.savez(folder / f"hospital-{i}" / "records.npz", logits=4 * logits, labels=labels)


def hospital(folder: pathlib.Path, number: int) -> hospitals.Hospital:
    config, root = get_config(), folder / f"hospital-{number}"
    config.client.records = str(root / "records.npz")
    return hospitals.Hospital(config, root)


def answer(folder: pathlib.Path, number: int, question: bytes) -> bytes:
    """Opens a hospital and answers a question. A file gets the CPU-seconds that this took."""
    began = time.process_time()
    with hospital(folder, number) as one:
        sent = one.answer(question)
    with open(folder / f"hospital-{number}" / "seconds", "a") as file:
        file.write(f"{time.process_time() - began}\n")
    return sent


def cpu_seconds() -> float:
    """Returns the CPU-seconds of this process and of all processes below it, also of those that
    were waited for."""
    ticks = {}
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = path.read_text().rpartition(")")[2].split()  # man 5 proc, from the third field
            process = path.parent.name
            parents[process] = fields[1]
            ticks[process] = sum(map(int, fields[11:15]))
    mine = {str(os.getpid())}
    while children := {name for name, parent in parents.items() if parent in mine} - mine:
        mine |= children
    return sum(ticks[name] for name in mine) / os.sysconf("SC_CLK_TCK")


class InProcess:
    """The hospitals of a folder as parties."""

    def __init__(self, folder: pathlib.Path, count: int, opened: contextlib.ExitStack):
        opened_hospitals = {
            f"hospital-{i}": opened.enter_context(hospital(folder, i)) for i in range(count)
        }
        self._hospitals, self.names = opened_hospitals, tuple(opened_hospitals)

    def ask(self, questions: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes]:
        return {name: self._hospitals[name].answer(asked) for name, asked in questions.items()}


class Counted:
    """Other parties, with their bytes and the seconds of every question."""

    def __init__(self, parties: links.Parties):
        self._parties, self.names = parties, parties.names
        self.seconds, self.sent, self.received = list[float](), 0, 0

    def ask(self, questions: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes]:
        began = time.monotonic()
        answers = self._parties.ask(questions, timeout=timeout)
        self.seconds.append(time.monotonic() - began)
        self.sent += sum(map(len, questions.values()))
        self.received += sum(map(len, answers.values()))
        return answers


def calibrate(parties: links.Parties, folder: pathlib.Path) -> dict:
    """Returns the figures of one recalibration with these parties."""
    counted = Counted(parties)
    began = time.monotonic()
    cpu_began = cpu_seconds()
    config = get_config()
    with contextlib.redirect_stdout(sys.stderr):
        result = hospitals.run_server(config, folder / "calibrator", counted, timeout=TIMEOUT)
    count = len(parties.names)
    epsilons = []
    for number in range(count):
        with Ledger(folder / f"hospital-{number}" / "ledger.sqlite", read_only=True) as ledger:
            epsilons.append(ledger.epsilon("records"))
    return {
        "hospitals": count,
        "questions": len(counted.seconds),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu_seconds() - cpu_began, 1),
        "seconds_per_question": [round(seconds, 2) for seconds in counted.seconds],
        "bytes_to_a_hospital": round(counted.sent / count),
        "bytes_from_a_hospital": round(counted.received / count),
        "epsilon": sorted(set(epsilons)),
        "temperature": round(float(result.temperature), 4),
    }


def simulated(folder: pathlib.Path, count: int, cores: int) -> dict:
    """Returns the figures of a recalibration in the engine. Its processes have `cores` cores
    together."""
    optional("ray", "simulation of flwr")
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    # for the processes of Ray
    os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).resolve().parents[1])
    server, report = ServerApp(), dict[str, Any]()

    def find(grid):
        return {f"hospital-{i}": node for i, node in enumerate(sorted(grid.get_node_ids()))}

    @server.main()
    def main(grid, context):
        while len(names := tuple(find(grid))) < count:
            time.sleep(0.1)
        report.update(calibrate(flower.Nodes(grid, find, names), folder))

    client = flower.client_app(
        lambda question, node: answer(folder, int(node["partition-id"]), question)
    )
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores},
    }
    run_simulation(server, client, count, backend_config=resources)
    return report


FLAGS = {
    "hospitals": 50,
    "cores": (2, "of the simulation engine"),
    "in_process": (False, "without Flower and Ray"),
}


def measure(flags) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_records(folder, flags.hospitals)
        if flags.in_process:
            with contextlib.ExitStack() as opened:
                report = calibrate(InProcess(folder, flags.hospitals, opened), folder)
        else:
            report = simulated(folder, flags.hospitals, flags.cores)
            report |= {"cores": flags.cores, "cpu_seconds_per_answer": answer_seconds(folder)}
    print(report)
    return report


def answer_seconds(folder: pathlib.Path) -> dict[str, float]:
    """Returns the CPU-seconds of an answer in the median, and of all answers."""
    seconds = []
    for path in folder.glob("*/seconds"):
        seconds += [float(line) for line in path.read_text().split()]
    return {"median": round(float(np.median(seconds)), 3), "all": round(sum(seconds), 1)}
