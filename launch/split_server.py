"""The server of Split Adaptation between two processes, started before or after `launch.split_client`.

python -m launch.split_server --config configs/split/two_parties.py --workdir workdir/server --exchange workdir/exchange

It reads only the part `server` of the config, and only the client's packages in the exchange folder.
"""

from typing import Any

from absl import flags

from . import frame

_EXCHANGE = flags.DEFINE_string(
    "exchange", None, "Folder that both parties can write to, and nobody else.", required=True
)
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds to wait for the client.", lower_bound=0.0)
_LIMITS = flags.DEFINE_list("limits", [], "NAME=NUMBER of jaxdp.files.Limits, for larger packages of the client.")


def experiment(config: Any, workdir: str) -> None:
    """Runs the server."""
    from . import parties

    parties.run_server(
        config.server, workdir, _EXCHANGE.value, timeout=_TIMEOUT.value, limits=frame.limits(_LIMITS.value)
    )


if __name__ == "__main__":
    frame.main(experiment)
