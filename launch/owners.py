"""The programs of several owners, as the list of studies has them: each runs a party of a protocol.

`launch.hospitals` and `launch.parties` run them.
"""

from jaxdp.report.exactness import noise_of

from .study import Program, Report

_PARTY_SHAPE = {"mode": str, "bytes": int, "queries": int}

RECALIBRATE_SERVER = Program(
    name="recalibrate server",
)
RECALIBRATE_CLIENT = Program(
    name="recalibrate client",
    report=Report(title="a hospital of private recalibration", noise=lambda config: noise_of(True)),
)
SPLIT_SERVER = Program(
    name="split server",
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
    report=Report(
        title="the client of Split Adaptation",
        page="split_client.html.jinja",
        shape=_PARTY_SHAPE,
        released={"upload/*": "upload", "queries/*": "representations of the queries"},
        noise=lambda config: noise_of(False),
    ),
)
