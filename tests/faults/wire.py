"""A process of Flower, or a party's program, whose HTTP messages are written down and may be the
instant of its death.

    python -m tests.faults.wire flower-supernode --superlink ...
    python -m tests.faults.wire launch.recalibrate_client --config ...

The variable JAXDP_WIRE has the settings as JSON:

    tap      a file that gets the body of every request that this process sends, before TLS
    events   a file that gets a line for every message: "out PATH" where it is sent, "in PATH" where it is served
    kill     [event, time, "before" or "after"]: the process kills itself at this message
    quick    whether Flower looks for messages and notices dead processes soon, which a test can wait for
"""  # noqa: E501

import collections
import functools
import importlib.metadata
import json
import os
import runpy
import signal
import sys
import threading
from typing import Any

HEARTBEAT_SECONDS = (
    3  # With "quick". A SuperNode, or a party's program, that is silent for twice as long has gone.
)
AGAIN_SECONDS = 4.0  # With "quick". After these a question is sent again.
# All other requests look for something to do, or tell that the process lives.
_MESSAGES = (
    "push-",
    "pull-object",
    "pull-task-input",
    "confirm-message",
    "activate-node",
    "start-run",
)


class _Wire:
    def __init__(
        self,
        tap: str = "",
        events: str = "",
        kill: tuple[str, int, str] | None = None,
        quick: bool = False,
    ):
        self._tap, self._events, self._kill, self._seen = (
            tap,
            events,
            kill,
            collections.Counter[str](),
        )
        self._lock = threading.Lock()
        if quick:
            _hasten()
        self._hook_client()
        self._hook_server()

    def _hook_client(self) -> None:
        import httpx

        real = httpx.Client.send

        def send(client: Any, request: Any, **options: Any) -> Any:
            if self._tap:
                with open(self._tap, "ab") as file:
                    file.write(request.read() + b"\n")
            at = self._count("out", request.url.path)
            self._strike(at, "before")
            response = real(client, request, **options)
            self._strike(at, "after")
            return response

        httpx.Client.send = send  # type: ignore[method-assign]

    def _hook_server(self) -> None:
        import uvicorn

        real = uvicorn.Config.load

        def load(config: Any) -> None:
            real(config)
            app = config.loaded_app

            async def counted(scope: Any, receive: Any, send: Any) -> None:
                if scope["type"] != "http":
                    return await app(scope, receive, send)
                at = self._count("in", scope["path"])
                self._strike(at, "before")
                await app(scope, receive, send)
                self._strike(at, "after")

            config.loaded_app = counted

        uvicorn.Config.load = load  # type: ignore[method-assign]

    def _count(self, way: str, path: str) -> tuple[str, int] | None:
        name = path.rsplit("/", 1)[-1]
        if not name.startswith(_MESSAGES) or name == "push-logs":
            return None
        event = f"{way} {path}"
        with self._lock:
            self._seen[event] += 1
            if self._events:
                with open(self._events, "a") as file:
                    file.write(f"{event}\n")
            return event, self._seen[event]

    def _strike(self, at: tuple[str, int] | None, when: str) -> None:
        if at and self._kill and (*at, when) == tuple(self._kill):
            os.kill(os.getpid(), signal.SIGKILL)


def _hasten() -> None:
    """Shortens the times of Flower."""
    import time

    from flwr.supercore import heartbeat
    from flwr.supercore.corestate import in_memory_corestate
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.supernode import fleet_http_client, fleet_http_connection

    from launch import flower

    fleet_handlers.HEARTBEAT_MIN_INTERVAL = 1  # what a SuperLink takes
    for module in (heartbeat, in_memory_corestate, fleet_http_connection):
        module.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT_SECONDS  # type: ignore[attr-defined]
    heartbeat.HEARTBEAT_CALL_TIMEOUT = fleet_http_client.HEARTBEAT_CALL_TIMEOUT = 2
    real = time.sleep
    # How a SuperNode (3 seconds) and a party's program (0.5) wait for messages. Each hop of a
    # message waits for one of them.
    time.sleep = lambda seconds: real(0.2 if seconds in (3, 0.5) else seconds)
    # A party that dies with a question waits for the same question after it has started again.
    ask = functools.partialmethod(flower.Nodes.ask, again=AGAIN_SECONDS)
    flower.Nodes.ask = ask  # type: ignore[assignment, method-assign]


def hook() -> None:
    """Hooks this process by the settings."""
    _Wire(**json.loads(os.environ.get("JAXDP_WIRE", "{}")))


def main() -> None:
    """Runs what the command line names."""
    hook()
    name, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = name
    if name.startswith("launch."):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        (script,) = importlib.metadata.entry_points(group="console_scripts", name=name)
        sys.exit(script.load()())


if __name__ == "__main__":
    main()
