"""Client and server in one process: what is refused, when it costs nothing yet, and what happens after a crash."""

import json
import shutil
import signal
import threading

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.split import two_parties
from jaxdp import split
from jaxdp.data import bundled
from jaxdp.models import save_params
from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.release import alone, notes
from jaxdp.split import exchange
from jaxdp.split.exchange import Shipment, send_frontend
from jaxdp.split.noisy_upload import public_projection
from jaxdp.split.package import read_package, write_package
from launch import parties
from launch.parties import run_client, run_server
from tests import forked

COUNT = 12


@pytest.fixture(scope="module")
def shipment(vit):
    public = np.random.default_rng(0).normal(size=(12, *vit.backbone.tokens))
    return Shipment(vit.backbone, vit.quantized(), 2, 4, public_projection(public, 4), 2.0)


@pytest.fixture(scope="module")
def batch():
    source = bundled("digits").of_classes([4, 5, 6])
    return source.gather(np.arange(COUNT + 5))


class Client:
    """A client with its files: images, workdir, and a folder in which it meets a server that has sent its frontend."""

    def __init__(self, folder, shipment, batch):
        self.root, self.shared, self.file = folder / "client", folder / "exchange", folder / "images.npz"
        self.config = ConfigDict(two_parties.get_config().client.to_dict())
        self.config.update({"images": str(self.file), "num_classes": 3, "laplace_scale": 0.1})
        self.save(**{name: array[:COUNT] for name, array in batch.items()}, test_image=batch["image"][COUNT:])
        send_frontend(self.shared / "frontend", shipment)

    def save(self, **arrays):
        np.savez(self.file, **arrays)

    def run(self, timeout=0.2, ledger_path=None, queries=None, **changes):
        config = ConfigDict({**self.config.to_dict(), **changes})
        return run_client(config, self.root, self.shared, timeout=timeout, ledger_path=ledger_path, queries=queries)

    def spends(self, name=parties.DATASET, path="ledger.sqlite"):
        """Counts the charges of the ledger, by default for the images to adapt to."""
        with Ledger(self.root / path) as ledger:
            entries = [entry for entry in ledger.report()["datasets"] if entry["name"] == name]
            return sum(row["spends"] for entry in entries for row in entry["spends"])

    def labels(self):
        """Labels of all spends by dataset, all of which must be committed."""
        with Ledger(self.root / "ledger.sqlite") as ledger:
            entries = ledger.report()["datasets"]
        assert all(not entry["open"] for entry in entries)
        return {
            entry["name"]: {row[key] for row in entry["spends"] for key in ("first_label", "last_label")}
            for entry in entries
        }

    @property
    def has_secret(self):
        return (self.root / "secret_seed").exists()

    def untouched(self):
        """Tells whether nothing was spent, sent or kept."""
        kept = {path.name for path in self.root.glob("*") if not path.name.startswith("ledger.sqlite")}
        kept -= {"lock", "charges.jsonl"}
        return (
            not kept
            and not notes(self.root)
            and [path.name for path in self.shared.iterdir()] == ["frontend"]
            and self.spends() == 0
        )


@pytest.fixture
def client(tmp_path, shipment, batch):
    return Client(tmp_path, shipment, batch)


# --- Before anything is spent -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mode": "raw"}, "mode must be one of published, noise_once, private, got 'raw'"),
        ({"num_classes": 2}, r"labels must be in \[0, 2\)"),
        ({"laplace_scale": -1.0}, "laplace_scale must be at least 0 and at most .*, got -1.0"),
        ({"query_laplace_scale": float("inf")}, "query_laplace_scale must be at least 0 and at most .*, got inf"),
    ],
)
def test_a_wrong_config_costs_nothing(client, changes, match):
    with pytest.raises(ValueError, match=match):
        client.run(**changes)
    assert client.untouched()


@pytest.mark.slow
def test_wrong_images_cost_nothing(client, batch):
    image, label = batch["image"], batch["label"]
    for arrays, match in (
        ({"image": image}, r"images.npz has no array label. It has image\. Make it again"),
        ({"image": image[:1], "label": label[:1]}, "one image has no neighbours, which must give 4 patches"),
        ({"image": image[:0], "label": label[:0]}, r"images must be \[n, 8, 8, 1\] with n >= 1"),
        ({"image": image, "label": label[1:]}, "labels must be 17 integers, one per image"),
        ({"image": image, "label": label, "test_image": image, "test_label": label + 1}, r"labels must be in \[0, 3\)"),
        ({"image": np.repeat(image, 3, -1), "label": label}, r"every image must be \[H, W, 1\]"),
    ):
        client.save(**arrays)
        with pytest.raises(ValueError, match=match):
            client.run()
        assert client.untouched()


def test_a_wrong_frontend_costs_nothing(client, shipment):
    def replaced(sent):
        shutil.rmtree(client.shared / "frontend")
        if sent is not None:
            send_frontend(client.shared / "frontend", sent)

    replaced(shipment._replace(projection=None, clip_norm=None))
    with pytest.raises(ValueError, match="mode='private' needs a frontend with a projection"):
        client.run()
    manifest = client.shared / "frontend" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"cut": 2', '"cut": 1'))
    with pytest.raises(ValueError, match=r"manifest.json does not have the SHA-256 that it states. .* Send it again"):
        client.run()
    assert client.untouched()
    replaced(None)
    with pytest.raises(TimeoutError, match=r"frontend did not come from the server within 0.2 seconds"):
        client.run()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["published", "noise_once"])
def test_an_upload_that_could_not_be_sent_costs_nothing(client, monkeypatch, mode):
    monkeypatch.setattr(split, "represent", lambda *args: np.full((COUNT, 17, 8), np.nan, np.float32))
    with pytest.raises(ValueError, match="representations must be finite"):
        client.run(mode=mode)
    assert client.spends() == 0 and not notes(client.root)


def test_an_upload_of_another_client_costs_nothing(client):
    write_package(client.shared / "upload", "upload", fields={}, arrays={})
    with pytest.raises(
        ValueError,
        match=r"upload is of another client, .* Nothing was spent now\. .* restore the ledger .* delete .*exchange",
    ):
        client.run()
    assert client.spends() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "match"), [("private", "epsilon"), ("published", "allow_unproven=True")])
def test_a_budget_is_kept(client, mode, match):
    client.root.mkdir()
    with Ledger(client.root / "ledger.sqlite") as ledger:
        ledger.register(parties.DATASET, adjacency="replace_one", unit="image", epsilon=7.0, delta=1e-5)
    with pytest.raises(BudgetExceeded, match=match):
        client.run(mode=mode)
    assert client.spends() == 0 and [path.name for path in client.shared.iterdir()] == ["frontend"]


# --- After a crash ----------------------------------------------------------------------------------------------------


def full(*args):
    raise OSError("disk full")


KILLED = """
import os, signal, sys
from ml_collections import ConfigDict
from jaxdp.split import exchange
from launch import parties

config, root, shared, place = sys.argv[1:]

send = getattr(exchange, place or "send_upload")

def die(folder, made, shipment):
    send(f"{root}-lost", made, shipment)
    os.kill(os.getpid(), signal.SIGKILL)

if place:
    setattr(exchange, place, die)
try:
    parties.run_client(ConfigDict(eval(config)), root, shared, queries=True, timeout=0.2)
except TimeoutError as error:
    assert "adapted did not come" in str(error), error
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "place"), [("private", "send_upload"), ("published", "send_upload"), ("private", "send_queries")]
)
def test_a_client_that_is_killed_pays_once_and_sends_the_same(client, mode, place):
    config = repr(ConfigDict({**client.config.to_dict(), "mode": mode}).to_dict())
    name = place.removeprefix("send_")
    killed = forked.run(KILLED, config, client.root, client.shared, place, modules=forked.PARTIES)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    lost = read_package(f"{client.root}-lost", name)
    assert client.has_secret and not (client.shared / name).exists()
    again = forked.run(KILLED, config, client.root, client.shared, "", modules=forked.PARTIES)
    assert again.returncode == 0, again.stderr
    sent = read_package(client.shared / name, name)
    assert sent.fields == lost.fields and set(sent.arrays) == set(lost.arrays)
    for key, array in lost.arrays.items():
        np.testing.assert_array_equal(sent.arrays[key], array)
    assert client.spends() == client.spends(parties.QUERIES) == 1
    assert client.labels() == {
        parties.DATASET: {f"split adaptation, {mode}"},
        parties.QUERIES: {"split adaptation, queries"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["private", "noise_once"])
def test_what_was_paid_for_and_lost_is_made_again_as_it_was(client, monkeypatch, mode):
    lost = []
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "send_upload", lambda path, upload, shipment: lost.append(upload) or full())
        with pytest.raises(OSError, match="disk full"):
            client.run(mode=mode)
    assert client.spends() == 1 and not (client.root / "upload").exists()
    with pytest.raises(TimeoutError, match="adapted did not come from the server"):
        client.run(mode=mode)
    assert client.spends() == 1
    sent = read_package(client.shared / "upload", "upload").arrays
    made = lost[0].released._asdict() if mode == "private" else {"representations": lost[0].representations}
    assert set(sent) == set(made)
    for name, array in made.items():
        np.testing.assert_array_equal(sent[name], array)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["private", "noise_once"])
def test_what_was_paid_for_is_sent_later_and_not_paid_again(client, batch, monkeypatch, mode):
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "share", full)
        with pytest.raises(OSError, match="disk full"):
            client.run(mode=mode)
    assert client.spends() == 1 and [path.name for path in client.shared.iterdir()] == ["frontend"]
    kept = read_package(client.root / "upload", "upload")
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"adapted did not come from the server within 0.2 seconds"):
            client.run(mode=mode)
    assert client.spends() == 1
    sent = read_package(client.shared / "upload", "upload")
    assert sent.fields == kept.fields
    for name, array in kept.arrays.items():
        np.testing.assert_array_equal(sent.arrays[name], array)
    with pytest.raises(ValueError, match="belongs to an experiment with another epsilon\\. Use a new workdir"):
        client.run(mode=mode, epsilon=9.0)
    client.save(**{name: array[1:COUNT] for name, array in batch.items()})
    with pytest.raises(ValueError, match=r"was started with other images or labels\. Use a new workdir"):
        client.run(mode=mode)
    assert (client.root / "secret_seed").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_other_noise_is_paid_again(client, monkeypatch):
    """Checks a release that was paid and lost on a machine that has changed since."""
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "send_upload", full)
        with pytest.raises(OSError, match="disk full"):
            client.run(mode="noise_once")
    monkeypatch.setenv("XLA_ANYTHING", "1")
    with pytest.raises(TimeoutError):
        client.run(mode="noise_once")
    rows = [row for row in notes(client.root) if row["charges"][0][0] == parties.DATASET]
    assert client.spends() == len({row["token"] for row in rows}) == 2


@pytest.mark.slow
def test_another_ledger_is_charged_for_what_was_uploaded(client):
    for _ in range(2):
        for path in ("ledger.sqlite", "other.sqlite"):
            with pytest.raises(TimeoutError):
                client.run(ledger_path=client.root / path, queries=True)
    for path in ("ledger.sqlite", "other.sqlite"):
        assert client.spends(path=path) == client.spends(parties.QUERIES, path=path) == 1


@pytest.mark.slow
def test_images_do_not_pay_for_queries_that_are_not_asked_any_more(client):
    for queries in (True, False):
        with pytest.raises(TimeoutError):
            client.run(queries=queries)
    with Ledger(client.root / "ledger.sqlite") as ledger:
        assert ledger.epsilon(parties.DATASET) <= 8.0
    assert client.spends() == 1


def test_one_client_per_workdir(client):
    with alone(client.root), pytest.raises(ValueError, match="another process is running in"):
        client.run()


# --- The server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, vit, shipment):
    """Returns config and workdir of a server that is ready for a client."""
    root = tmp_path / "server"
    send_frontend(root / "frontend", shipment)
    save_params(root / "backend.safetensors", vit.back)
    config = ConfigDict(two_parties.get_config().server.to_dict())
    attributes = ("patch_size", "width", "depth", "num_heads", "mlp_width")
    config.model.options = {name: getattr(vit.backbone.model, name) for name in attributes}
    config.model.num_classes = 3
    config.model.preprocessing = {
        "size": 8,
        "mean": vit.backbone.preprocessing.mean,
        "std": vit.backbone.preprocessing.std,
    }
    config.adaptation.epochs = 2
    return config, root


@pytest.mark.slow
def test_a_run_that_ended_without_queries_asks_none(client):
    with pytest.raises(TimeoutError):
        client.run()
    (client.root / "secret_seed").unlink()
    (client.root / "result.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"has ended without queries, and the secret .* is deleted.*new workdir"):
        client.run(queries=True)
    assert client.spends() == 1 and client.spends(parties.QUERIES) == 0 and not client.has_secret


@pytest.mark.slow
def test_noise_once_between_two_parties(client, server, batch, monkeypatch):
    config, root = server
    client.save(
        **{name: array[:COUNT] for name, array in batch.items()},
        test_image=batch["image"][COUNT:],
        test_label=batch["label"][COUNT:],
    )
    results = {}

    def serve():
        results["server"] = run_server(config, root, client.shared, timeout=120)

    thread = threading.Thread(target=serve)
    thread.start()
    result = client.run(mode="noise_once", timeout=120)
    thread.join()
    assert results["server"] == {"mode": "noise_once", "bytes": result["bytes"], "queries": 5}
    assert result["epsilon"] is None and 0 <= result["accuracy"] <= 1
    logits = read_package(client.shared / "answers", "answers").arrays["logits"]
    np.testing.assert_array_equal(np.load(client.root / "predictions.npy"), logits.argmax(1))
    assert run_server(config, root, client.shared, timeout=0.2) == results["server"]  # nothing is left to do
    assert not client.has_secret
    monkeypatch.setattr(parties.Till, "stream", lambda *args: pytest.fail("a run that has ended needs no secret"))
    monkeypatch.setattr(parties.Till, "release", lambda *args: pytest.fail("a run that has ended releases nothing"))
    (client.shared / "upload" / "manifest.json").unlink()
    shutil.rmtree(client.shared / "upload")
    assert client.run(mode="noise_once") == result  # sends what it has kept
    assert not client.has_secret and client.spends() == client.spends(parties.QUERIES) == 1
    kept = [path for path in (client.root / "upload", client.shared / "upload")]
    assert kept[0].joinpath("manifest.json").read_bytes() == kept[1].joinpath("manifest.json").read_bytes()
    for path in root.glob("adapted-*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"adapted is of another server or another upload\. Delete .*exchange with"):
        run_server(config, root, client.shared, timeout=0.2)


@pytest.mark.slow
def test_a_server_refuses_before_it_begins(client, server, tmp_path):
    config, root = server
    config.n_patches = 17
    with pytest.raises(ValueError, match="n_patches=17 is more than the 16 patches of a representation"):
        run_server(config, tmp_path / "new", client.shared, timeout=0.2)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["lock"]
    config.n_patches = 4
    with pytest.raises(TimeoutError, match=r"upload did not come from the client within 0.2 seconds"):
        run_server(config, root, client.shared, timeout=0.2)
    write_package(
        client.shared / "upload", "upload", fields={"mode": "raw", "num_classes": 3, "frontend": ""}, arrays={}
    )
    with pytest.raises(ValueError, match=r"upload is whole but of no use.*made with another frontend"):
        run_server(config, root, client.shared, timeout=0.2)
