"""Client and server in one process: what is refused, when it costs nothing yet, and what happens
after a crash."""

import contextlib
import hashlib
import json
import signal

import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.split import two_parties
from jaxdp import split
from jaxdp.data import bundled, from_arrays, record_digests
from jaxdp.files import Limits, pack, read_package, unpack, write_package
from jaxdp.models import save_params
from jaxdp.privacy import BudgetExceeded, Ledger, Registry
from jaxdp.release import alone, notes
from jaxdp.split.exchange import Shipment, pack_frontend
from jaxdp.split.noisy_upload import public_projection
from launch import frame, parties
from launch.parties import run_client, run_server
from tests import forked

COUNT = 12
DATASET, QUERIES = "images/images", "images/queries"  # after the file of images


@pytest.fixture(scope="module")
def shipment(vit):
    public = np.random.default_rng(0).normal(size=(12, *vit.backbone.tokens))
    return Shipment(vit.backbone, vit.quantized(), 2, 4, public_projection(public, 4), 2.0)


@pytest.fixture(scope="module")
def batch():
    source = bundled("digits").of_classes([4, 5, 6])
    return source.gather(np.arange(COUNT + 5))


class Client:
    """A client with its images and workdir, and the frontend of a server that asks for the upload
    and is gone then."""

    def __init__(self, folder, shipment, batch):
        self.root, self.file, self.frontend = (
            folder / "client",
            folder / "images.npz",
            pack_frontend(shipment),
        )
        self.config = ConfigDict(two_parties.get_config().client.to_dict())
        self.config.update({"images": str(self.file), "num_classes": 3, "laplace_scale": 0.1})
        self.save(
            **{name: array[:COUNT] for name, array in batch.items()},
            test_image=batch["image"][COUNT:],
        )

    def save(self, **arrays):
        np.savez(self.file, **arrays)

    def run(self, *questions, ledger_path=None, queries=None, **changes):
        """Returns the answers to the frontend and further questions. A question may be a function
        of the upload."""
        config, told = ConfigDict({**self.config.to_dict(), **changes}), []

        def serve(answer, until):
            for question in (self.frontend, *questions):
                told.append(answer(question(told[0]) if callable(question) else question))
            if not until():
                raise TimeoutError

        with contextlib.suppress(TimeoutError):
            choice = frame.Choice(ledger_path)
            run_client(config, self.root, serve, choice=choice, queries=queries)
        return told

    def spends(self, name=DATASET, path="ledger.sqlite"):
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
            entry["name"]: {
                row[key] for row in entry["spends"] for key in ("first_label", "last_label")
            }
            for entry in entries
        }

    @property
    def has_secret(self):
        return (self.root / "secret_seed").exists()

    def untouched(self):
        """Tells whether nothing was spent or kept."""
        kept = {path.name for path in self.root.glob("*") if "ledger.sqlite" not in path.name}
        return kept <= {"lock", "charges.jsonl"} and not notes(self.root) and self.spends() == 0


@pytest.fixture
def client(tmp_path, shipment, batch):
    return Client(tmp_path, shipment, batch)


def about(kind, **arrays):
    """Returns a question that names the upload."""
    return lambda upload: pack(
        kind, fields={"upload": hashlib.sha256(upload).hexdigest()}, arrays=arrays
    )


# --- Before anything is spent -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mode": "raw"}, "mode must be one of published, noise_once, private, got 'raw'"),
        ({"num_classes": 2}, r"labels must be in \[0, 2\)"),
        ({"laplace_scale": -1.0}, "laplace_scale must be at least 0 and at most .*, got -1.0"),
        (
            {"query_laplace_scale": float("inf")},
            "query_laplace_scale must be at least 0 and at most .*, got inf",
        ),
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
        (
            {"image": image[:1], "label": label[:1]},
            "one image has no neighbours, which must give 4 patches",
        ),
        ({"image": image[:0], "label": label[:0]}, r"images must be \[n, 8, 8, 1\] with n >= 1"),
        ({"image": image, "label": label[1:]}, r"labels must be \[n\].* of another n"),
        (
            {"image": image, "label": label, "test_image": image, "test_label": label + 1},
            r"labels must be in \[0, 3\)",
        ),
        ({"image": np.repeat(image, 3, -1), "label": label}, r"every image must be \[H, W, 1\]"),
    ):
        client.save(**arrays)
        with pytest.raises(ValueError, match=match):
            client.run()
        assert client.untouched()


def test_a_wrong_frontend_costs_nothing(client, shipment):
    right = client.frontend
    client.frontend = pack_frontend(shipment._replace(projection=None, clip_norm=None))
    with pytest.raises(ValueError, match="mode='private' needs a frontend with a projection"):
        client.run()
    client.frontend = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(
        ValueError,
        match=r"the server's package does not have the SHA-256 that it states\. .* Send it",
    ):
        client.run()
    client.frontend = pack("adapted", fields={}, arrays={})
    with pytest.raises(FileNotFoundError, match="upload does not exist"):
        client.run()
    assert client.untouched()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["published", "noise_once"])
def test_an_upload_that_could_not_be_sent_costs_nothing(client, monkeypatch, mode):
    monkeypatch.setattr(
        split, "represent", lambda *args: np.full((COUNT, 17, 8), np.nan, np.float32)
    )
    with pytest.raises(ValueError, match="representations must be finite"):
        client.run(mode=mode)
    assert client.spends() == 0 and not notes(client.root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "match"), [("private", "epsilon"), ("published", "allow_unproven=True")]
)
def test_a_budget_is_kept(client, mode, match):
    client.root.mkdir()
    with Ledger(client.root / "ledger.sqlite") as ledger:
        ledger.register(DATASET, adjacency="replace_one", unit="image", epsilon=7.0, delta=1e-5)
    with pytest.raises(BudgetExceeded, match=match):
        client.run(mode=mode)
    assert client.spends() == 0 and not (client.root / "upload").exists()


# --- After a crash ------------------------------------------------------------------------------


def full(*args):
    raise OSError("disk full")


KILLED = """
import os, pathlib, signal, sys
from ml_collections import ConfigDict
from launch import frame, parties

config, root, frontend, place = sys.argv[1:]
write = parties.write_package

def die(path, data):
    if path.name == place:
        write(pathlib.Path(f"{root}-lost"), data)
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)

parties.write_package = die


def serve(answer, until):
    answer(pathlib.Path(frontend).read_bytes())
    sys.exit()

parties.run_client(ConfigDict(eval(config)), root, serve, queries=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "place"), [("private", "upload"), ("published", "upload"), ("private", "queries")]
)
def test_a_client_that_is_killed_pays_once_and_sends_the_same(client, tmp_path, mode, place):
    config = repr(ConfigDict({**client.config.to_dict(), "mode": mode}).to_dict())
    write_package(tmp_path / "frontend", client.frontend)
    given = config, client.root, tmp_path / "frontend"
    killed = forked.run(KILLED, *given, place, modules=forked.PARTIES)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert client.has_secret and not (client.root / place).exists()
    again = forked.run(KILLED, *given, "", modules=forked.PARTIES)
    assert again.returncode == 0, again.stderr
    assert read_package(client.root / place) == read_package(tmp_path / "client-lost")
    assert client.spends() == client.spends(QUERIES) == 1
    assert client.labels() == {
        DATASET: {f"split adaptation, {mode}"},
        QUERIES: {"split adaptation, queries"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["private", "noise_once"])
def test_what_was_paid_for_is_sent_again_and_not_paid_again(client, batch, mode):
    first = client.run(mode=mode)
    for _ in range(2):
        assert client.run(lambda upload: client.frontend, mode=mode) == [*first, *first]
    assert client.spends() == 1
    with pytest.raises(
        ValueError, match="belongs to an experiment with another epsilon\\. Use a new workdir"
    ):
        client.run(mode=mode, epsilon=9.0)
    with pytest.raises(ValueError, match="is about another upload"):
        client.run(lambda upload: pack("adapted", fields={"upload": "0"}, arrays={}), mode=mode)
    client.save(**{name: array[1:COUNT] for name, array in batch.items()})
    with pytest.raises(
        ValueError, match=r"was started with other images or labels\. Use a new workdir"
    ):
        client.run(mode=mode)
    client.frontend = changed_bits(client.frontend)
    with pytest.raises(ValueError, match=r"was started with another frontend\. Use a new workdir"):
        client.run(mode=mode)
    assert client.spends() == 1 and (client.root / "secret_seed").stat().st_mode & 0o777 == 0o600


def changed_bits(frontend):
    kind, fields, arrays = unpack(frontend, "frontend")
    return pack(kind, fields=fields | {"bits": 7}, arrays=arrays)


@pytest.mark.slow
def test_a_private_client_answers_no_question_about_its_loss(client):
    question = about("logits", logits=np.zeros((1, 3), np.float32), images=np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="mode='private' answers no question about the loss"):
        client.run(question)
    assert len(client.run()) == 1


@pytest.mark.slow
def test_other_noise_is_paid_again(client, monkeypatch):
    """Checks a release that was paid and lost on a machine that has changed since."""

    def full(path, data):
        if path.name == "upload":
            raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(parties, "write_package", full)
        with pytest.raises(OSError, match="disk full"):
            client.run(mode="noise_once")
    monkeypatch.setenv("XLA_ANYTHING", "1")
    client.run(mode="noise_once")
    rows = [row for row in notes(client.root) if row["charges"][0][0] == DATASET]
    assert client.spends() == len({row["token"] for row in rows}) == 2


@pytest.mark.slow
def test_a_workdir_keeps_the_ledger_that_paid(client):
    client.run(queries=True)
    with pytest.raises(ValueError, match="pays for this workdir"):
        client.run(ledger_path=client.root / "other.sqlite", queries=True)
    assert client.spends() == client.spends(QUERIES) == 1
    assert not (client.root / "other.sqlite").exists()


@pytest.mark.slow
def test_images_do_not_pay_for_queries_that_are_not_asked_any_more(client):
    for queries in (True, False):
        client.run(queries=queries)
    with Ledger(client.root / "ledger.sqlite") as ledger:
        assert ledger.epsilon(DATASET) <= 8.0
    assert client.spends() == 1


def test_one_client_per_workdir(client):
    with alone(client.root), pytest.raises(ValueError, match="another process is running in"):
        client.run()


@pytest.mark.slow
def test_a_run_that_ended_without_queries_asks_none(client):
    told = client.run(about("adapted"), about("answers", logits=np.zeros((0, 3), np.float32)))
    assert len(unpack(told[1], "queries").arrays["representations"]) == 0 and unpack(told[2], "end")
    assert (
        not client.has_secret
        and json.loads((client.root / "result.json").read_text())["queries"] == 0
    )
    with pytest.raises(
        ValueError, match=r"has ended without queries, and the secret .* is deleted.*new workdir"
    ):
        client.run(queries=True)
    assert client.spends() == 1 and client.spends(QUERIES) == 0 and not client.has_secret


# --- The server ---------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, vit, shipment):
    """Returns config and workdir of a server that is ready for a client."""
    root = tmp_path / "server"
    write_package(root / "frontend", pack_frontend(shipment))
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


class Direct:
    """A client in this process as the one party of a server, which may lose answers."""

    names = ("client-1",)

    def __init__(self, answer=None):
        self.answer, self.asked = answer, []

    def ask(self, questions, timeout):
        self.asked += questions.values()
        return {name: self.answer(question) for name, question in questions.items() if self.answer}


@pytest.mark.slow
def test_noise_once_between_two_parties(client, server, batch, monkeypatch):
    config, root = server
    client.save(
        **{name: array[:COUNT] for name, array in batch.items()},
        test_image=batch["image"][COUNT:],
        test_label=batch["label"][COUNT:],
    )
    found = {}

    kinds = ["frontend", "logits", "adapted", "answers"]

    def serve(answer, until):
        huge = lambda question: unpack(question, kinds).kind == found.get("huge")  # noqa: E731
        direct = found["direct"] = Direct(
            lambda question: bytes(2**20 + 1) if huge(question) else answer(question)
        )
        found["server"] = run_server(config, root, direct, limits=Limits(bytes=2**20))
        assert until()

    def run(**limits):
        config = ConfigDict({**client.config.to_dict(), "mode": "noise_once"})
        return run_client(config, client.root, serve, limits=Limits(**limits))

    def too_large(kind):
        """Answers a kind of question with a package above the server's limit."""
        found["huge"] = kind
        with pytest.raises(
            ValueError, match=r"declares 1048577 bytes, more than the limit of 1048576"
        ):
            run()
        found.pop("huge")

    with pytest.raises(
        ValueError, match=r"the server's package declares \d+ bytes, more than the limit of 100"
    ):
        run(bytes=100)
    too_large("frontend")
    too_large("logits")
    result = run()
    assert found["server"] == {"mode": "noise_once", "bytes": result["bytes"], "queries": 5}
    assert result["epsilon"] is None and 0 <= result["accuracy"] <= 1
    asked = [unpack(question, kinds) for question in found["direct"].asked]
    assert [package.kind for package in asked] == [
        "frontend",
        *["logits"] * (len(asked) - 3),
        "adapted",
        "answers",
    ]
    np.testing.assert_array_equal(
        np.load(client.root / "predictions.npy"), asked[-1].arrays["logits"].argmax(1)
    )
    assert not client.has_secret
    monkeypatch.setattr(
        parties.Till, "stream", lambda *args: pytest.fail("a run that has ended needs no secret")
    )
    monkeypatch.setattr(
        parties.Till, "release", lambda *args: pytest.fail("a run that has ended releases nothing")
    )
    too_large("adapted")
    assert run() == result and len(found["direct"].asked) == 3  # both tell what they have kept
    assert not client.has_secret and client.spends() == client.spends(QUERIES) == 1


@pytest.mark.slow
def test_a_server_refuses_before_it_begins(client, server, tmp_path):
    config, root = server
    config.n_patches = 17
    with pytest.raises(
        ValueError, match="n_patches=17 is more than the 16 patches of a representation"
    ):
        run_server(config, tmp_path / "new", Direct())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["lock"]
    config.n_patches = 4
    with pytest.raises(
        TimeoutError, match=r"client-1 gave no answer within 0.2 seconds, or refused"
    ):
        run_server(config, root, Direct(), timeout=0.2)
    wrong = pack("upload", fields={"mode": "raw", "num_classes": 3, "frontend": ""}, arrays={})
    with pytest.raises(
        ValueError, match=r"'upload' is whole but of no use.*made with another frontend"
    ):
        run_server(config, root, Direct(lambda question: wrong))
    both = Direct()
    both.names = ("a", "b")
    with pytest.raises(ValueError, match="has one client, got a, b"):
        run_server(config, root, both)


@pytest.mark.slow
def test_images_of_another_run_or_stage_are_recognised(client, tmp_path, monkeypatch):
    """A client's images have one ledger. The twin without digests is the ledger of the workdir,
    which all tests above have."""
    monkeypatch.setenv("JAXDP_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JAXDP_RECORD_DIGESTS")
    client.run(mode="private")
    ledger = tmp_path / "home" / "images.sqlite"
    bound = json.loads((client.root / "config.json").read_text())
    assert bound["ledger"] == str(ledger)
    assert not (client.root / "ledger.sqlite").exists()
    with np.load(client.file) as arrays:  # another ledger counts the test images
        stored = from_arrays(image=arrays["test_image"])
    registry = Registry(tmp_path / "home" / "registry.sqlite")
    digests = record_digests(stored, key=registry.key)
    registry.claim(tmp_path / "wards.sqlite", "wards", digests)
    client.root = tmp_path / "again"
    with pytest.raises(ValueError, match="5 of these 5 records are counted"):
        client.run(mode="private", queries=True)
    assert not (client.root / "upload").exists()
    with pytest.raises(BudgetExceeded):
        client.run(mode="private")
    with Ledger(ledger, read_only=True) as opened:
        assert len(opened.history()) == 1
