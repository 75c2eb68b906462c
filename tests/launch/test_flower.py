"""The parties of recalibration and of Split Adaptation on Flower: kills, bytes on the wire, and
refused strangers.

One SuperLink with TLS and authentication serves all tests of this file. The commands are those of
the how-to."""

import concurrent.futures
import contextlib
import functools
import http.client
import shutil
import signal
import ssl
import sys
import threading
import time

import numpy as np
import pytest

from configs.split import two_parties
from jaxdp.files import pack, read_package, unpack
from launch import certificates, flower, links, parties
from tests.launch.canaries import leaks
from tests.launch.federation import (
    CLINICS,
    OFFLINE_SECONDS,
    SETTING,
    SPLIT_CLIENT,
    SPLIT_SERVER,
    Federation,
    free_ports,
)
from tests.launch.test_hospitals import seed

pytest.importorskip("flwr", reason="the dependency group test is not installed")
SUPERLINK_FILES = "superlink.sqlite*"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="flwr ends processes by signals"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with contextlib.closing(Federation(tmp_path_factory.mktemp("federation"))) as found:
        for name in CLINICS:
            found.wires[f"node {name}"] = {"tap": str(found.folder / f"{name}.tap")}
        found.start_superlink()
        yield found


def settled(federation, run, name, **spends):
    """Checks that each data set of a clinic paid once, and that no secret is left."""
    paid = {
        dataset: value
        for (party, dataset), value in federation.spends(run).items()
        if party == name
    }
    assert paid == {dataset.replace("_", "/"): (count, 0) for dataset, count in spends.items()}
    assert not list((federation.folder / run / name).rglob("secret_seed"))


@pytest.fixture(scope="module")
def recalibrated(federation):
    """Runs the commands of the how-to. The nodes go on running."""
    federation.plant("howto")
    federation.start_program("recalibrate_server", "clinic-1", "howto")
    federation.until(federation.registered)
    for name in CLINICS:
        federation.start_node(name)
        federation.start_program("recalibrate_client", name, "howto")
    federation.wait(
        "recalibrate_server clinic-1", *(f"recalibrate_client {name}" for name in CLINICS)
    )
    return federation


def test_the_commands_of_the_howto_recalibrate(recalibrated):
    result = recalibrated.result("howto")
    assert result["parameters"]["0"] == recalibrated.expected("howto")
    assert result["ended"] == list(CLINICS)
    said = recalibrated.output("recalibrate_server clinic-1")
    assert "calibrator: 2 hospitals answered 3 rounds" in said
    for name in CLINICS:
        settled(recalibrated, "howto", name, **{name: 1})


def split_alone(federation):
    """Runs both parties of Split Adaptation in this process, with the same backbone and the same
    secret."""
    config, folder = two_parties.get_config(), federation.folder / "split-alone"
    config.update_from_flattened_dict(
        {f"server.{name}": value for name, value in SPLIT_SERVER.items()}
    )
    config.update_from_flattened_dict(
        {f"client.{name}": value for name, value in SPLIT_CLIENT.items()}
    )
    config.client.images = str(federation.images)
    for made in ("frontend", "backend.safetensors"):
        (folder / "server").mkdir(parents=True, exist_ok=True)
        shutil.copy(federation.folder / "split" / "server" / made, folder / "server")
    serve = functools.partial(links.serve_folder, folder / "exchange", timeout=240.0)
    client = links.Folders([folder / "exchange"])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        server = pool.submit(
            parties.run_server, config.server, folder / "server", client, timeout=240.0
        )
        parties.run_client(config.client, folder / "clinic-1", serve, queries=True)
        server.result()
    return folder / "clinic-1"


@pytest.fixture(scope="module")
def survived(recalibrated):
    """Runs Split Adaptation while every process dies once: Flower's while they carry nothing, the
    programs at their first question and answer.

    Returns the federation, the workdir of the client that runs alone, and the bytes until then:
    what each node has sent and what the SuperLink has stored."""
    federation = recalibrated
    server, client, node = "split_server clinic-1", "split_client clinic-1", "node clinic-1"
    for folder in ("split", "split-alone"):
        federation.plant(folder, "")
    federation.kill(node)
    lapses = time.monotonic() + OFFLINE_SECONDS
    # a message is 5 objects
    federation.wires[server] = {"kill": ["out /v1/runtime/push-object", 5, "after"]}
    # it has paid
    federation.wires[client] = {"kill": ["out /v1/runtime/push-messages", 1, "before"]}
    for key in (server, client):
        federation.start_program(key.split()[0], "clinic-1", "split")
    time.sleep(max(0.0, lapses - time.monotonic()))
    federation.start_node("clinic-1")
    federation.until(lambda: federation.running[server].poll() is not None)
    federation.kill("superlink")
    federation.start_superlink()
    with pytest.MonkeyPatch.context() as patch, concurrent.futures.ThreadPoolExecutor() as pool:
        patch.setenv(*SETTING)
        alone = pool.submit(split_alone, federation)  # the server that died has made the backbone
        for key in (server, client):
            federation.until(lambda key=key: federation.running[key].poll() is not None)
            assert federation.running.pop(key).returncode == -signal.SIGKILL
            federation.wires.pop(key)
            federation.start_program(key.split()[0], "clinic-1", "split")
        federation.wait(server, client)
        expected = alone.result()
    written = {name: tapped(federation, name) for name in CLINICS}
    written["superlink"] = [path.read_bytes() for path in federation.folder.glob(SUPERLINK_FILES)]
    return federation, expected, written


def test_split_adaptation_survives_the_death_of_every_process(survived):
    federation, expected, _ = survived
    resumed = federation.folder / "split" / "clinic-1"
    settled(federation, "split", "clinic-1", images_images=1, images_queries=1)
    assert (resumed / "upload").read_bytes() == (expected / "upload").read_bytes()
    np.testing.assert_array_equal(
        np.load(resumed / "predictions.npy"), np.load(expected / "predictions.npy")
    )


# --- Bytes on the wire --------------------------------------------------------------------------


def secrets(federation, name):
    """Returns what a clinic must not send: its secret, its records, its images and their labels."""
    found = {"seed": [seed(CLINICS.index(name))]}
    with np.load(federation.folder / f"{name}.npz") as file:
        found |= {"records": list(file["logits"][6:10]), "labels of records": [file["labels"]]}
    with np.load(federation.images) as file:
        images = [*file["image"][:3], *file["test_image"][:3]]
        found |= {
            "images": [*images, *((image - 0.3) / 0.4 for image in images)],
            "labels": [file["label"]],
        }
    return found


def tapped(federation, name):
    """Returns all that the SuperNode of a clinic has sent to the SuperLink, as it was before
    TLS."""
    return [(federation.folder / f"{name}.tap").read_bytes()]


def test_no_secret_is_in_the_bytes_of_flower(survived):
    """What a clinic does send is there: so the bytes are those of its messages."""
    federation, _, written = survived
    assert sum(map(len, written["superlink"])) > 100_000
    for name in CLINICS:
        assert not leaks([*written[name], *written["superlink"]], secrets(federation, name))
    upload = unpack(
        read_package(federation.folder / "split" / "clinic-1" / "upload"), "upload"
    ).arrays["features"]
    assert leaks(written["clinic-1"], {"upload": list(upload)}) == {"upload"}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # flwr uses it
def test_a_hospital_that_leaks_is_noticed(survived):
    """The broken twin answers with a record and its secret. It is a message of Flower as any
    other."""
    federation, _, _ = survived
    records = np.load(federation.folder / "clinic-2.npz")["logits"]
    leaked, done = [], threading.Event()

    def answer(question):
        leaked.append(pack("answer", fields={"seed": seed(1).hex()}, arrays={"answer": records[7]}))
        return leaked[-1]

    def serve():
        at = f"localhost:{federation.ports['clinic-2']}"
        flower.serve(
            answer, at, federation.folder / "keys" / "clinic-2", until=done.is_set, timeout=60
        )

    with concurrent.futures.ThreadPoolExecutor() as pool:
        served = pool.submit(serve)
        try:
            with flower.running(
                f"localhost:{federation.ports['superlink']}",
                federation.folder / "keys" / "superlink",
            ) as nodes:
                question = pack("question", fields={}, arrays={})
                assert nodes.ask({"clinic-2": question}, timeout=60) == {"clinic-2": leaked[0]}
        finally:
            done.set()
            served.result()
    assert leaks(tapped(federation, "clinic-2"), secrets(federation, "clinic-2")) == {
        "seed",
        "records",
    }


# --- Strangers ----------------------------------------------------------------------------------


def test_a_plaintext_connection_and_another_authority_are_refused(federation, tmp_path):
    port = federation.ports["superlink"]
    with contextlib.closing(http.client.HTTPConnection("localhost", port, timeout=5)) as plain:
        plain.request("GET", "/health")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
    certificates.make(tmp_path, [], hosts=["localhost"])
    for authority, right in (
        (federation.folder / "keys" / "clinic-1", True),
        (tmp_path / "superlink", False),
    ):
        context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
        with contextlib.closing(
            http.client.HTTPSConnection("localhost", port, timeout=5, context=context)
        ) as secure:
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


def test_a_program_without_the_secret_gets_no_task(recalibrated, tmp_path):
    federation = recalibrated
    certificates.make(tmp_path, ["clinic-1"], hosts=["localhost"])
    with pytest.raises(Exception, match=r"401|403"):
        flower.serve(
            bytes,
            f"localhost:{federation.ports['clinic-1']}",
            tmp_path / "clinic-1",
            until=lambda: False,
            timeout=5,
        )
