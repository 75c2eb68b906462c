"""The programs of several owners, as the list of studies has them: each runs a party of a protocol.

`launch.hospitals` and `launch.parties` run them.
"""

from .study import Program, Report

_RECALIBRATION = ("method", "server", "client")
_SPLIT = ("server", "client")
_PARTY_SHAPE = {"mode": str, "bytes": int, "queries": int}

RECALIBRATE_SERVER = Program(
    name="recalibrate server",
    launcher="recalibrate_server",
    about="a calibrator that asks hospitals over a network",
    needs=_RECALIBRATION,
)
RECALIBRATE_CLIENT = Program(
    name="recalibrate client",
    launcher="recalibrate_client",
    about="a hospital that answers it",
    needs=_RECALIBRATION,
)
SPLIT_SERVER = Program(
    name="split server",
    launcher="split_server",
    about="the server of Split Adaptation between two processes",
    needs=_SPLIT,
    report=Report(
        title="the server of Split Adaptation",
        page="split_server.html.jinja",
        shape=_PARTY_SHAPE,
        released={
            "backbone.safetensors": "public model",
            "adapted-*.safetensors": "adapted backend",
        },
        no_account=(
            "This party has no private record. The client's ledger has what its upload cost."
        ),
    ),
)
SPLIT_CLIENT = Program(
    name="split client",
    launcher="split_client",
    about="its client",
    needs=_SPLIT,
    report=Report(
        title="the client of Split Adaptation",
        page="split_client.html.jinja",
        shape=_PARTY_SHAPE,
        released={"upload/*": "upload", "queries/*": "representations of the queries"},
    ),
)
