"""Messages on Flower that are lost, late, repeated, too large, or held by a SuperNode that dies.

The SuperNodes are the runtime of flwr in this process. Without a SuperLink, tests bring the
questions."""

import contextlib
import dataclasses
import hashlib
import sys
import threading

import numpy as np
import pytest

from jaxdp.files import Limits, pack, unpack, write_package
from launch import flower, links
from tests.launch.federation import free_ports
from tests.launch.test_hospitals import Direct, question, records

pytest.importorskip("flwr", reason="the dependency group test is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="flwr ends processes by signals"),
]
__all__ = ["records"]  # a fixture

SECRET = b"secret of the SuperNode and its program"


@pytest.fixture(autouse=True)
def identity():
    """What a run of Flower gives to the messages of a server."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1


# --- A SuperNode that dies ----------------------------------------------------------------------


class SuperNode(contextlib.AbstractContextManager):
    """The runtime of a SuperNode that has a question.

    Attributes:
        state: What it knows. A process that dies loses it.
    """

    def __init__(self, port, asked):
        import uvicorn
        from flwr.app import Message
        from flwr.cli.build import build_fab_from_files
        from flwr.supercore.fab import Fab
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
        )
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supercore.run import Run
        from flwr.supernode import start_client_internal as node
        from flwr.supernode.main import create_app
        from flwr.supernode.nodestate import NodeStateFactory

        stores = ObjectStoreFactory()
        states = NodeStateFactory(objectstore_factory=stores)
        self.state = states.state()
        self.state.set_node_id(1)
        message = Message(flower._content(asked), 1, "query", ttl=600.0)
        message.metadata.__dict__["_message_id"] = message.object_id
        content, _ = build_fab_from_files({"pyproject.toml": flower._FAB})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        objects = get_all_nested_objects(message)
        node._pull_and_store_message(
            self.state,
            stores.store(),
            {},
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda k: dataclasses.replace(Run.create_empty(k), fab_hash=fab.hash_str),
            get_fab=lambda *_: fab,
            pull_object=lambda _, name: objects[name].deflate(),
            confirm_message_received=lambda *_: None,
            trusted_entities=None,
        )
        app = create_app(states, SECRET)
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=port, log_level="error", lifespan="off", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run)

    def start(self):
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()

    def __exit__(self, *error):
        """Ends it. Its connections break."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def sent(self):
        """Tells whether it has an answer, which it would send once."""
        return bool(self.state.get_messages_legacy(is_reply=True))


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # flwr uses it
def test_a_question_of_a_dead_supernode_is_answered_to_the_next_one(tmp_path, records):
    """Where the error of the dead task is not caught, or flwr repeats requests, the program
    ends."""
    direct = Direct(tmp_path, {"clinic-1": records["clinic-1"]})
    (tmp_path / "secret").write_bytes(SECRET)
    (port,), answers = free_ports(1), []
    with contextlib.closing(direct.open), contextlib.ExitStack() as alive:
        hospital = direct.hospitals["clinic-1"]
        asked = question(hospital)
        first, second = (SuperNode(port, asked) for _ in range(2))

        def answer(data):
            answers.append(hospital.answer(data))
            if len(answers) == 1:  # it has paid, and the SuperNode dies before the answer
                first.__exit__()
                second.start()
                alive.push(second)
            return answers[-1]

        first.start()
        flower.serve(answer, f"localhost:{port}", tmp_path, until=second.sent, timeout=20)
    assert not first.sent()
    assert answers[0] == answers[1] and unpack(answers[0], "answer").fields == {"round": 0}
    assert direct.spends() == {"clinic-1": (1, 1.0)}


# --- Lost, late and repeated answers ------------------------------------------------------------


class Grid:
    """A network without nodes, with a plan for each party: what becomes of each question to it.

    Attributes:
        asked: The parties in the order of the questions.
    """

    def __init__(self, **plan):
        self.names, self.asked = tuple(plan), []
        self._plan, self._arrived, self._late = plan, [], []

    def ask(self, **options):
        nodes = flower.Nodes(
            self, lambda _: {name: i for i, name in enumerate(self.names, 1)}, self.names
        )
        return nodes.ask(dict.fromkeys(self.names, b"1"), **options)

    def push_messages(self, messages):
        self._arrived, self._late = self._arrived + self._late, []
        for message in messages:
            name, number = self.names[message.metadata.dst_node_id - 1], str(len(self.asked))
            message.metadata.__dict__["_message_id"] = number
            self.asked.append(name)
            what = self._plan[name].pop(0)
            {"late": self._late, "lost": []}.get(what, self._arrived).append(
                self._reply(what, message)
            )
            yield number

    def pull_messages(self, numbers):
        found, self._arrived = self._arrived, []
        assert {reply.metadata.reply_to_message_id for reply in found} <= set(numbers)
        return found

    def _reply(self, what, message):
        from flwr.app import Context, Error, Message, RecordDict

        if what == "no node":
            return Message(Error(code=3, reason=what), reply_to=message)
        app = flower.client_app(
            lambda data, _: 1 / 0 if what == "refused" else b"answer to " + data, lambda error: None
        )
        return app(message, Context(1, 1, {}, RecordDict(), {}))


def test_questions_are_repeated_until_each_has_one_answer():
    grid = Grid(
        a=["no node", "answered"], b=["refused"], c=["lost", "answered"], d=["late", "answered"]
    )
    assert grid.ask(timeout=20, again=0.1) == dict.fromkeys("acd", b"answer to 1")
    assert sorted(grid.asked) == list("aabccdd")
    assert Grid(a=["lost"]).ask(timeout=0.1) == {}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (
            pack("answer", fields={"round": 1}, arrays={"answer": np.zeros(1, np.float32)}),
            "must be .* for round 0",
        ),
        (
            bytes(2**20 + 1),
            "the answer of clinic-1 declares 1048577 bytes, more than the limit of 1048576",
        ),
    ],
)
def test_a_calibrator_takes_no_answer_of_another_round_and_no_large_one(
    tmp_path, records, data, match
):
    direct = Direct(tmp_path, {"clinic-1": records["clinic-1"]})
    direct.ask = lambda questions, timeout: dict.fromkeys(questions, data)
    with contextlib.closing(direct.open), pytest.raises(ValueError, match=match):
        direct.calibrate()


# --- Messages of no use -------------------------------------------------------------------------


def test_a_message_with_more_than_a_package_is_refused():
    from flwr.app import ConfigRecord, Context, Message, RecordDict

    failed, content = [], flower._content(b"1")
    content["other"] = ConfigRecord({"value": 1})
    app = flower.client_app(lambda *_: pytest.fail("it was answered"), failed.append)
    reply = app(Message(content, 1, "query"), Context(1, 1, {}, RecordDict(), {}))
    assert reply.error.reason == flower._REFUSED and "must have one package" in str(*failed)


def test_a_large_question_in_a_folder_is_refused(tmp_path):
    write_package(tmp_path / "1.question", bytes(101))
    how = {"until": lambda: False, "timeout": 5.0, "limits": Limits(bytes=100)}
    with pytest.raises(
        ValueError, match=r"1\.question declares 101 bytes, more than the limit of 100"
    ):
        links.serve_folder(tmp_path, lambda _: pytest.fail("it was read"), **how)
