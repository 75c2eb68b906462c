"""Parties over a network, on Flower: a server asks and parties answer, in packages
(`jaxdp.files.pack`).

A run of Flower brings code, which a SuperNode usually executes where the private data is. Here
nobody runs code of another party: SuperLink and SuperNodes are started with `--isolation process`,
so they only carry messages, and the programs beside them run what is installed there.

    with running(address, keys) as nodes:              # the server, beside the SuperLink
        answers = nodes.ask({"clinic-1": question}, timeout=60)
    serve(answer, address, keys, until=..., timeout=60)    # a party, beside its SuperNode

`launch.certificates` makes the folders of keys. The interface of flwr to the processes of apps is
not public. So pyproject.toml holds flwr to one release line.
"""

import contextlib
import pathlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxdp.files import optional

from .certificates import PARTIES

# The text of an error could depend on private data, so it is not sent.
_REFUSED = "the party refused, and its own output says why"
_UNAUTHORIZED = 401
_POLL_SECONDS = 0.5
_AGAIN_SECONDS = 10.0  # A SuperNode looks for messages every 3 seconds.
_FAB = b"""[project]
name = "parties"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "jaxdp"
[tool.flwr.app.components]
serverapp = "none:app"
clientapp = "none:app"
"""


def _flwr(module: str) -> Any:
    return optional(f"flwr.{module}", "flower")


# --- Messages -----------------------------------------------------------------------------------


def _content(data: bytes) -> Any:
    """Returns a package as the content of a message: one array of bytes, which Flower divides if it
    is large.
    """
    app = _flwr("app")
    array = app.Array(dtype="uint8", shape=(len(data),), stype="jaxdp.package", data=data)
    return app.RecordDict({"package": app.ArrayRecord({"package": array})})


def _data(message: Any) -> bytes:
    """Returns the package of a message as it came. Nothing of it is decoded."""
    records = message.content.array_records
    if set(message.content) != {"package"} or set(records.get("package", ())) != {"package"}:
        raise ValueError(
            "a message must have one package. Use the same release of jaxdp at both ends."
        )
    data: bytes = records["package"]["package"].data
    return data


def client_app(
    answer: Callable[[bytes, Mapping[str, Any]], bytes],
    failed: Callable[[Exception], Any] = traceback.print_exception,  # Ray cannot send `print`
) -> Any:
    """Returns a ClientApp that answers every message by a function. It tells the server of an
    error, but not its text.

    Args:
      answer: `answer(question, node_config)`. The configuration tells the parties of a simulation
          apart.
      failed: A function that is called with an error.
    """
    app = _flwr("clientapp").ClientApp()
    common = _flwr("app")

    @app.query()  # type: ignore[untyped-decorator, unused-ignore]
    def reply(message: Any, context: Any) -> Any:
        try:
            content = _content(answer(_data(message), context.node_config))
        except Exception as error:
            failed(error)
            content = common.Error(code=0, reason=_REFUSED)
        return common.Message(content, reply_to=message)

    return app


class Nodes:
    """The nodes of a run as parties.

    Attributes:
      names: The names of the parties.
    """

    def __init__(self, grid: Any, find: Callable[[Any], Mapping[str, int]], names: Sequence[str]):
        self._grid = grid
        self._find = find
        self.names = tuple(names)

    def ask(
        self, questions: Mapping[str, bytes], *, timeout: float, again: float = _AGAIN_SECONDS
    ) -> dict[str, bytes]:
        """Asks parties at the same time. Returns the answers by name, without parties that refused
        or were too late.

        A question is sent again when the node reports an error, and after `again` seconds, then
        twice as many, and so on, because a node may have lost it. So a party must answer a repeated
        question as before.
        """
        message = _flwr("app").Message
        kind = _flwr("app").MessageType.QUERY
        pending = dict(questions)
        due = dict.fromkeys(questions, 0.0)  # when a question is sent next
        wait = dict.fromkeys(questions, again)
        party_of: dict[str, str] = {}  # by the id of a message
        answers: dict[str, bytes] = {}
        end = time.monotonic() + timeout
        while pending and (now := time.monotonic()) < end:
            nodes = self._find(self._grid)
            names = [name for name in pending if name in nodes and due[name] <= now]
            messages = []
            for name in names:
                content = _content(pending[name])
                messages.append(message(content, nodes[name], kind, ttl=timeout))
                due[name] = now + wait[name]
                wait[name] *= 2
            if messages:
                party_of |= zip(self._grid.push_messages(messages), names, strict=True)
            for reply in self._grid.pull_messages(list(party_of)):
                name = party_of.pop(reply.metadata.reply_to_message_id)
                if reply.has_error() and reply.error.reason != _REFUSED:
                    due[name] = now + 1.0
                elif pending.pop(name, None) is not None and not reply.has_error():
                    answers[name] = _data(reply)
            time.sleep(_POLL_SECONDS)
        return answers


# --- The processes beside a SuperLink and a SuperNode -------------------------------------------


def serve(
    answer: Callable[[bytes], bytes],
    address: str,
    keys: pathlib.Path,
    *,
    until: Callable[[], bool],
    timeout: float,
) -> None:
    """Answers the messages that come through a SuperNode on this machine, whose runtime has
    `address`.

    An error of `answer` is raised here after the server knows that there was one.

    Raises:
      TimeoutError: `until()` is false `timeout` seconds after the last message.
    """
    errors: list[Exception] = []
    app = client_app(lambda question, _: answer(question), errors.append)
    last = time.monotonic()
    with contextlib.closing(_executor(address, keys, None)) as executor:
        while not until():
            if token := _acquire(executor, "CLIENT_APP"):
                _answer_one(app, address, token)
                last = time.monotonic()
                if errors:
                    raise errors[0]
            elif time.monotonic() > last + timeout:
                raise TimeoutError(
                    f"no message came through the SuperNode at {address} within {timeout:g} "
                    "seconds. Is the server running? Start again as before. What was paid is kept "
                    "and not paid twice."
                )
            else:
                time.sleep(_POLL_SECONDS)


def _answer_one(app: Any, address: str, token: str) -> None:
    """Answers the message of a task."""
    run = _flwr("supernode.runtime.run_clientapp")
    try:
        with contextlib.closing(_runtime(address, None, token)) as client:
            with _heartbeat(client):
                message, context, _, _ = run.pull_task_input(client)
                run.push_message(client, app(message, context), context)
            run.push_task_output(client, context, "completed", "")
    # The SuperNode has died, or it was started again and knows nothing of the task.
    except optional("httpx", "flower").HTTPError as error:
        print(
            f"party: a question was lost with its SuperNode ({type(error).__name__}). It comes "
            "again."
        )


@contextlib.contextmanager
def running(address: str, keys: pathlib.Path) -> Iterator[Nodes]:
    """Registers the parties at a SuperLink, begins a run there, and yields its nodes.

    Only nodes that proved to have the private key of a known party are asked. The SuperLink itself
    lets everybody who can reach it register a key.

    Raises:
      ConnectionError: The SuperLink has given up the run.
    """
    authority = (keys / "ca.crt").read_bytes()
    read = _flwr("cli.supernode.register").try_load_public_key
    names = {read(path): path.stem for path in sorted((keys / PARTIES).glob("*.pub"))}
    run = _begin(address, authority, names)

    def find(grid: Any) -> dict[str, int]:
        return {
            names[node.public_key]: node.node_id
            for node in grid.get_nodes()
            if node.public_key in names
        }

    # These imports take time, and a token soon lapses.
    grids = _flwr("superlink.grid")
    _flwr("supercore.task_identity")
    with contextlib.closing(_executor(address, keys, authority)) as executor:
        while not (token := _acquire(executor, "SERVER_APP", run)):
            time.sleep(_POLL_SECONDS)
    grid = grids.HttpGrid(address, root_certificates=authority, token=token)
    try:
        with (
            contextlib.closing(_runtime(address, authority, token)) as client,
            _task(client),
            contextlib.closing(grid),
        ):
            _take_run(client, grid)
            yield Nodes(grid, find, list(names.values()))
    except optional("httpx", "flower").HTTPStatusError as error:
        if error.response.status_code != _UNAUTHORIZED:
            raise
        raise ConnectionError(
            f"the SuperLink at {address} has given up this run, because one of the two was away "
            "for a minute. Start again as before. Answered questions are repeated, and nothing is "
            "paid twice."
        ) from error


@contextlib.contextmanager
def _task(client: Any) -> Iterator[None]:
    """Tells that the task is alive for the time of the body, and how it ended."""
    runtime = _flwr("proto.runtime_pb2")
    status = "failed"
    try:
        with _heartbeat(client):
            yield
        status = "completed"
    finally:
        client.PushTaskOutput(runtime.PushTaskOutputRequest(sub_status=status, details=""))


def _take_run(client: Any, grid: Any) -> None:
    """Gives a grid the run of the task. flwr puts its ids into all messages from here."""
    runtime = _flwr("proto.runtime_pb2")
    identity = _flwr("supercore.task_identity").TaskIdentity
    task = client.PullTaskInput(runtime.PullTaskInputRequest())
    identity.task_id = task.task_id
    identity.run_id = task.run.run_id
    identity.node_id = task.context.node_id
    grid.set_run(_flwr("common.serde").run_from_proto(task.run))


def _begin(address: str, authority: bytes, public_keys: Iterable[bytes]) -> int:
    """Registers the public keys and begins a run, whose code is empty. Returns its id."""
    control = _flwr("proto.control_pb2")
    fabs = _flwr("supercore.fab")
    content, _ = _flwr("cli.build").build_fab_from_files({"pyproject.toml": _FAB})
    fab = fabs.Fab(_flwr("cli.utils").get_sha256_hash(content), content, {})
    kind = _flwr("supercore.control").ControlHttpClient
    with contextlib.closing(_client(kind, address, authority, "flwr CLI")) as client:
        known = {
            node.public_key for node in client.ListNodes(control.ListNodesRequest()).nodes_info
        }
        for key in public_keys:
            if key not in known:
                client.RegisterNode(control.RegisterNodeRequest(public_key=key))
        began = client.StartRun(
            control.StartRunRequest(fab=_flwr("common.serde").fab_to_proto(fab))
        )
    return int(began.run_id)


def _acquire(executor: Any, kind: str, run: int | None = None) -> str:
    """Returns the token of a waiting task, or "". A run of somebody else is left to end without an
    answer.
    """
    runtime = _flwr("proto.runtime_pb2")
    types = _flwr("supercore.constant").TaskType
    try:
        task = executor.AcquireTask(runtime.AcquireTaskRequest(supported_task_types=[types[kind]]))
    except optional("httpx", "flower").TransportError:  # nobody listens there yet, or not any more
        return ""
    return task.token if run in (None, task.task.run_id) else ""


def _executor(address: str, keys: pathlib.Path, authority: bytes | None) -> Any:
    """Returns a client that may take tasks, because it knows the secret in the folder of keys."""
    auth = _flwr("supercore.interceptors").SuperExecAuthHttpInterceptor
    method = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    secret = auth(master_secret=(keys / "secret").read_bytes(), protected_methods=method)
    kind = _flwr("supercore.runtime").RuntimeHttpClient
    return _client(kind, address, authority, "SuperExec", secret, patient=False)


def _runtime(address: str, authority: bytes | None, token: str) -> Any:
    own = _flwr("supercore.interceptors").RuntimeTokenHttpInterceptor(token)
    kind = _flwr("supercore.runtime").RuntimeHttpClient
    # The retries of flwr wait for a dead SuperNode and then end the program, because its tasks died
    # with it.
    return _client(kind, address, authority, "flwr-clientapp", own, patient=authority is not None)


def _client(
    kind: Any,
    address: str,
    authority: bytes | None,
    name: str,
    *interceptors: Any,
    patient: bool = True,
) -> Any:
    """Returns a client of an API of flwr, without TLS if there is no authority: only to a SuperNode
    on this machine.
    """
    version = _flwr("supercore.interceptors").RuntimeVersionHttpInterceptor(component_name=name)
    retry = _flwr("supercore.retry").make_simple_http_retry_invoker() if patient else None
    return kind.from_server_address(
        address,
        authority is None,
        authority,
        interceptors=[version, *interceptors],
        retry_invoker=retry,
    )


@contextlib.contextmanager
def _heartbeat(client: Any) -> Iterator[None]:
    """Tells for the time of the body that the task is alive.

    The body must not end the task. flwr interrupts the program whose heartbeat comes after the end
    of its task.
    """
    module = _flwr("supercore.heartbeat")
    sender = module.HeartbeatSender(module.make_task_heartbeat_fn_http(client))
    sender.start()
    try:
        yield
    finally:
        if sender.is_running:
            sender.stop()
