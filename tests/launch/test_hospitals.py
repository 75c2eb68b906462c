"""Recalibration between parties in one process: equal results, repeated and late questions,
hospitals that leave.

`Direct` stands for the network. Every message goes through it as bytes, and it can lose, repeat and
reorder them."""

import contextlib
import functools
import pathlib
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs.recalibration import hospitals as configs
from jaxdp import recalibration
from jaxdp.files import Limits, pack, read_json, unpack, write_json
from jaxdp.privacy import BudgetExceeded, Ledger
from launch import hospitals, links
from tests.launch.canaries import leaks

NAMES = ("clinic-1", "clinic-2", "clinic-3")
HOW = {"epsilon": 1.0, "adjacency": "add_remove"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Writes a file of records for each hospital: an over-confident model."""
    folder, random, found = tmp_path_factory.mktemp("records"), np.random.default_rng(0), {}
    for name in NAMES:
        logits = random.normal(size=(60, 5)).astype(np.float32)
        labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
        np.savez(folder / f"{name}.npz", logits=4 * logits, labels=labels)
        found[name] = folder / f"{name}.npz"
    return found


def paid(entry):
    """Returns the number of spends of a data set of a report. A mark of a round costs nothing."""
    rows = [row for row in entry["spends"] if row["description"] != "NoOp()"]
    return sum(row["spends"] for row in rows)


class Direct:
    """Hospitals in this process as the parties of a calibrator.

    Attributes:
        messages: All questions and answers.
        lost: Names of hospitals that do not answer.
    """

    def __init__(self, root, records, **changes):
        self.root, self.records, self.changes = root, records, changes
        self.names, self.messages, self.lost = tuple(records), [], set()
        self.open = contextlib.ExitStack()
        self.start()

    def start(self):
        """Starts all hospitals, again if they ran."""
        self.open.close()
        self.open, self.hospitals = contextlib.ExitStack(), {}
        for name, path in self.records.items():
            config = self.config(**{"client.records": str(path)})
            self.hospitals[name] = self.open.enter_context(
                hospitals.Hospital(config, self.root / name)
            )

    def config(self, **changes):
        config = configs.get_config()
        config.update_from_flattened_dict(
            {"method.iterations": 2, "client.dataset": "records", **self.changes, **changes}
        )
        return config

    def ask(self, questions, *, timeout):
        told = {
            name: self.hospitals[name].answer(data)
            for name, data in questions.items()
            if name not in self.lost
        }
        self.messages += [*questions.values(), *told.values()]
        return told

    def calibrate(self, **changes):
        return hospitals.run_server(
            self.config(**changes), self.root / "calibrator", self, timeout=0.1
        )

    def spends(self):
        found = {}
        for name in self.names:
            with Ledger(self.root / name / "ledger.sqlite") as ledger:
                (entry,) = ledger.report()["datasets"]
                assert not entry["open"]
                found[name] = paid(entry), ledger.epsilon("records")
        return found


@pytest.fixture
def network(tmp_path, records):
    direct = Direct(tmp_path, records)
    with contextlib.closing(direct.open):
        yield direct


def seed(i):
    """Returns the planted secret of a hospital, which no message may hold."""
    return bytes(range(16 * i, 16 * i + 16))


def seeds(network):
    """Gives every hospital a secret before it begins, so that its answers can be repeated
    elsewhere."""
    for i, name in enumerate(network.names):
        folder = network.root / name / "conversation"
        folder.mkdir(parents=True)
        (folder / "secret_seed").write_text(seed(i).hex())


def alone(network, folder, records):
    """Returns what the same hospitals with the same secrets give in one process, without
    packages."""
    config, talks = network.config(), []
    ledgers = contextlib.ExitStack()
    method = recalibration.AccT(bracket=recalibration.Bracket.of((0.5, 20.0)), iterations=2)
    for i, path in enumerate(records.values()):
        (folder / str(i)).mkdir(parents=True)
        (folder / str(i) / "secret_seed").write_text(seed(i).hex())
        ledger = ledgers.enter_context(Ledger(folder / f"{i}.sqlite"))
        with np.load(path) as file:
            ledger.register(
                "records", adjacency="add_remove", unit="record", epsilon=1.0, delta=0.0
            )
            party = recalibration.Party(
                file["logits"], file["labels"], account=ledger.account("records")
            )
            talks.append(party.begin(method, workdir=folder / str(i), **HOW))
    scale = recalibration.noise_scale(method, num_classes=config.num_classes, **HOW)
    total = lambda k, t: jnp.asarray(sum(talk.answer(t, round=k) for talk in talks))  # noqa: E731
    with ledgers:
        return recalibration.play(method, total, scale.variance * len(talks))


def test_the_result_is_that_of_one_process(network, tmp_path, records):
    seeds(network)
    found = network.calibrate()
    assert found.temperature == alone(network, tmp_path / "alone", records).temperature
    assert (
        hospitals.load(network.config(), tmp_path / "calibrator").temperature == found.temperature
    )
    assert network.spends() == dict.fromkeys(NAMES, (1, 1.0))
    assert all(one.done for one in network.hospitals.values())
    assert not list(tmp_path.glob("clinic-*/**/secret_seed"))


def test_a_question_that_is_repeated_or_late_is_answered_once(network):
    network.calibrate()
    asked = [
        m for m in network.messages if unpack(m, ("question", "answer", "end")).kind == "question"
    ]
    hospital = network.hospitals["clinic-1"]
    answers = [hospital.answer(question) for question in (asked[0], asked[6], asked[3], asked[0])]
    assert answers[0] == answers[3] and all(answer in network.messages for answer in answers)
    network.start()  # also after a crash
    assert [network.hospitals["clinic-1"].answer(asked[k]) for k in (0, 6, 3, 0)] == answers
    other = pack(
        "question",
        fields=unpack(asked[0], "question").fields,
        arrays={"temperature": np.float32(1.25)},
    )
    with pytest.raises(ValueError, match="round=0 is answered at temperature"):
        network.hospitals["clinic-1"].answer(other)
    assert network.spends()["clinic-1"] == (1, 1.0)


def test_a_hospital_that_leaves_stops_the_run_or_not_and_pays_once(network, tmp_path):
    ask = network.ask

    def leaves(questions, *, timeout):
        told = ask(questions, timeout=timeout)
        network.lost = {"clinic-2"}
        return told

    network.ask = leaves
    with pytest.raises(
        TimeoutError, match=r"clinic-2 gave no answer to round 1 within 0\.1 seconds, or refused"
    ):
        network.calibrate()
    network.ask, network.lost = ask, set()
    found = network.calibrate()  # it is back, and the answered round is repeated
    assert network.spends() == dict.fromkeys(NAMES, (1, 1.0))
    assert (
        hospitals.load(network.config(), tmp_path / "calibrator").temperature == found.temperature
    )


def test_a_run_goes_on_with_the_hospitals_that_are_left(network, tmp_path):
    network.lost = {"clinic-3"}  # it never came
    ask, sums = network.ask, []

    def leaves(questions, *, timeout):
        told = ask(questions, timeout=timeout)
        network.lost |= {"clinic-2"}
        return told

    def play(method, total, variance):
        return real(
            method, lambda k, t: sums.append((k, t, total(k, t), variance)) or sums[-1][2], variance
        )

    network.ask, real = leaves, recalibration.play
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recalibration, "play", play)
        network.calibrate(**{"server.fewest": 1})
    (_, first, whole, variance), (k, second, doubled, _) = sums[:2]
    answer = functools.partial(network.hospitals["clinic-1"]._talk.answer)
    other = network.hospitals["clinic-2"]._talk.answer(first, round=0)
    np.testing.assert_array_equal(whole, answer(first, round=0) + other)
    # one of two stands for both
    np.testing.assert_array_equal(doubled, 2 * answer(second, round=k))
    method = network.hospitals["clinic-1"]._agreed.method
    scale = recalibration.noise_scale(method, num_classes=5, **HOW)
    assert variance == scale.variance * 2
    assert network.spends() == {"clinic-1": (1, 1.0), "clinic-2": (1, 1.0), "clinic-3": (0, 0.0)}


def test_a_calibrator_that_died_keeps_the_answers_of_hospitals_that_left(tmp_path, records):
    """Those that are left have another sum, and nobody answers the question that follows from it
    in a round that was answered.
    """

    def run(name, *, dies):
        network = Direct(tmp_path / name, records)
        ask, asked = network.ask, []

        def third_round(questions, *, timeout):
            asked.append(sorted(questions))
            if len(asked) == 3:
                network.lost = {"clinic-3"}  # for good
                if dies:
                    raise KeyboardInterrupt
            return ask(questions, timeout=timeout)

        network.ask = third_round
        with contextlib.closing(network.open):
            seeds(network)
            if dies:
                with pytest.raises(KeyboardInterrupt):
                    network.calibrate(**{"server.fewest": 1})
            found = network.calibrate(**{"server.fewest": 1})
            assert network.spends() == dict.fromkeys(NAMES, (1, 1.0))
        return found.temperature, asked

    alive, asked = run("alive", dies=False)
    assert run("dead", dies=True) == (alive, [*asked[:3], *asked[2:]])


def test_kept_answers_to_another_question_are_refused(network, tmp_path):
    network.calibrate()
    path = tmp_path / "calibrator" / "answers.json"
    rounds = read_json(path, kind=list)
    rounds[1]["temperature"] += 1
    write_json(path, rounds)
    with pytest.raises(ValueError, match=r"has answers to the temperature .* in round 1, not to"):
        network.calibrate()


@pytest.mark.parametrize("name", sorted(recalibration.METHODS))
def test_the_first_question_depends_on_no_noise(name):
    method = recalibration.METHODS[name]()
    first, other = (
        np.asarray(method.question(0, method.init(variance))) for variance in (0.0, 12.5)
    )
    assert first.tobytes() == other.tobytes()


# --- What is refused, before anything is spent --------------------------------------------------


def question(hospital, **changes):
    fields = {"round": 0, "terms": hospital._agreed.terms, **changes}
    temperature = fields.pop("temperature", np.float32(1.0))
    return pack(fields.pop("kind", "question"), fields=fields, arrays={"temperature": temperature})


MUST_HAVE = r"must have a round and a temperature, float32 \[\]"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"terms": "AccT(), epsilon=9"},
            r"terms are 'AccT\(\), epsilon=9', not the agreed ones: AccT\(",
        ),
        ({"kind": "upload"}, "is of kind 'upload', not 'end' or 'question'"),
        ({"round": 1}, r"round=1 cannot be answered before round 0\. Ask in order"),
        ({"round": "0"}, MUST_HAVE),
        ({"temperature": np.zeros(2, np.float32)}, MUST_HAVE),
        (
            {"temperature": np.zeros(2**20, np.int8)},
            "declares .* bytes, more than the limit of 1048576",
        ),
    ],
)
def test_wrong_questions_are_refused(network, change, match):
    hospital = network.hospitals["clinic-1"]
    with pytest.raises(ValueError, match=match):
        hospital.answer(question(hospital, **change))
    # a right question at the wrong time has begun the conversation
    if "cannot be answered" not in match:
        assert network.spends()["clinic-1"] == (0, 0.0)


def test_an_empty_account_answers_nothing(network):
    with (
        Ledger(network.root / "clinic-1" / "ledger.sqlite") as ledger,
        ledger.account("records").spend(recalibration.event(0.5)),
    ):
        pass
    hospital = network.hospitals["clinic-1"]
    with pytest.raises(BudgetExceeded):
        hospital.answer(question(hospital))
    assert network.spends()["clinic-1"] == (1, 0.5)


@pytest.mark.parametrize(
    "answer", [np.zeros((1, 1), np.float32), np.zeros(1), np.zeros(2, "f4"), np.zeros(0, "f4")]
)
def test_an_answer_of_no_use_is_refused(network, answer):
    network.ask = lambda questions, timeout: dict.fromkeys(
        questions, pack("answer", fields={"round": 0}, arrays={"answer": answer})
    )
    with pytest.raises(
        ValueError, match="the answer of clinic-1 must be a float32 vector for round 0"
    ):
        network.calibrate()


def test_records_of_another_model_are_refused(tmp_path):
    np.savez(tmp_path / "records.npz", logits=np.zeros((2, 3), np.float32), labels=np.zeros(2, int))
    config = configs.get_config()
    config.client.records = str(tmp_path / "records.npz")
    with pytest.raises(ValueError, match=r"records\.npz must have 5 columns, the agreed classes"):
        hospitals.Hospital(config, tmp_path / "hospital")
    assert not (tmp_path / "hospital").exists()


def test_a_table_of_logits_is_read_as_an_archive_of_numpy(records, tmp_path):
    """The broken twin is a table whose label is no class."""
    arrays = np.load(records[NAMES[0]])
    owners = np.arange(len(arrays["labels"])) // 2
    lines = ["group,label," + ",".join(f"class {k}" for k in range(5))]
    for owner, label, row in zip(owners, arrays["labels"], arrays["logits"], strict=True):
        lines.append(f"P{owner:03},{label}," + ",".join(map(repr, map(float, row))))
    np.savez(tmp_path / "r.npz", **arrays, group=[f"P{owner:03}" for owner in owners])
    (tmp_path / "r.csv").write_text("\n".join(lines))
    parties = []
    for name in ("r.npz", "r.csv"):
        config = configs.get_config()
        config.client.records, config.client.unit = str(tmp_path / name), "patient"
        with hospitals.Hospital(config, tmp_path / f"of {name}") as hospital:
            parties.append(hospital._party)
    for field in ("logits", "labels", "group"):
        np.testing.assert_array_equal(*(getattr(party, field) for party in parties))
    (tmp_path / "r.csv").write_text("\n".join([lines[0], lines[1].replace(",", ",5", 1)]))
    with pytest.raises(ValueError, match=r"must be in \[0, 5\)"):
        hospitals.Hospital(config, tmp_path / "twin")


# --- Canaries -----------------------------------------------------------------------------------


def secrets(network, records):
    found = {"seed": list(map(seed, range(len(NAMES))))}
    for path in records.values():
        with np.load(path) as file:
            found["records"] = [*found.get("records", []), *file["logits"].astype(np.float32)]
    return found


def test_no_message_holds_a_canary(network, records):
    seeds(network)
    network.calibrate()
    assert len(network.messages) > 20 and not leaks(network.messages, secrets(network, records))


def test_a_hospital_that_leaks_is_noticed(network, records, monkeypatch):
    """The broken twin answers with a record of its own."""
    seeds(network)
    with np.load(records["clinic-2"]) as file:
        monkeypatch.setattr(
            recalibration.Conversation,
            "answer",
            lambda self, t, *, round=None: file["logits"][7].astype(np.float32),
        )
        with contextlib.suppress(TypeError, ValueError):
            network.calibrate()
    assert leaks(network.messages, secrets(network, records)) == {"records"}


# --- Folders ------------------------------------------------------------------------------------


def test_folders_carry_questions_and_answers(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    parties = links.Folders(folders, limits=Limits(bytes=1000))
    seen = []

    def answer(data):
        seen.append(data)
        return b"answer to " + data

    threads = [
        threading.Thread(
            target=links.serve_folder,
            args=(folder, answer),
            kwargs={"until": lambda: seen.count(b"end") == 2, "timeout": 20.0},
        )
        for folder in folders
    ]
    for thread in threads:
        thread.start()
    try:
        for text in (b"1", b"2", b"1"):
            asked = dict.fromkeys(parties.names, text)
            assert parties.ask(asked, timeout=20.0) == dict.fromkeys(
                parties.names, b"answer to " + text
            )
        with pytest.raises(
            ValueError, match=r"\.answer declares 1010 bytes, more than the limit of 1000"
        ):
            parties.ask({"a": bytes(1000)}, timeout=20.0)
    finally:
        parties.ask(dict.fromkeys(parties.names, b"end"), timeout=20.0)
        for thread in threads:
            thread.join()
    assert [path.suffix for path in sorted(pathlib.Path(tmp_path / "a").iterdir())] == [
        ".answer",
        ".question",
    ]
    assert list((tmp_path / "b").iterdir()) == []


def test_who_is_gone_is_named(tmp_path):
    assert links.Folders([tmp_path / "a"]).ask({"a": b"1"}, timeout=0.05) == {}
    with pytest.raises(TimeoutError, match=r"no question came through .*b within 0\.05 seconds"):
        links.serve_folder(tmp_path / "b", lambda data: data, until=lambda: False, timeout=0.05)


def test_a_repeated_question_finds_the_answer_that_came_late(tmp_path):
    parties, name = links.Folders([tmp_path / "a"]), {"a": b"1"}
    assert parties.ask(name, timeout=0.0) == {}
    links.serve_folder(
        tmp_path / "a",
        lambda data: b"2",
        until=lambda: bool(list(tmp_path.glob("a/*.answer"))),
        timeout=1,
    )
    assert parties.ask(name, timeout=5.0) == {"a": b"2"} and list((tmp_path / "a").iterdir()) == []


def test_two_folders_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--exchange must name folders with names of their own"):
        links.Folders([tmp_path / "north" / "clinic", tmp_path / "south" / "clinic"])


@pytest.mark.parametrize("fewest", [3, -1])
def test_a_number_of_answers_that_cannot_come_is_refused_before_a_question(tmp_path, fewest):
    config = configs.get_config()
    config.server.fewest = fewest
    parties = links.Folders([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match=rf"config\.server\.fewest must be .*, got {fewest}"):
        hospitals.run_server(config, tmp_path / "run", parties, timeout=0.05)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "flags", [{}, {"EXCHANGE": ["x"], "ADDRESS": "y", "KEYS": "z"}, {"ADDRESS": "y"}]
)
def test_a_link_is_one_of_two(monkeypatch, flags):
    for name in ("EXCHANGE", "ADDRESS", "KEYS"):
        monkeypatch.setattr(links, name, ConfigDict({"value": flags.get(name, "")}))
    with pytest.raises(
        ValueError, match="give either --address and --keys, for a network, or --exchange"
    ):
        links.serve()
