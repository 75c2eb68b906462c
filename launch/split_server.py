"""The server of Split Adaptation between two processes, started before or after `launch.split_client`:

python -m launch.split_server --config configs/split/two_parties.py --workdir workdir/server --exchange workdir/exchange

Of the config it reads the part `server` only, of the exchange folder what the client puts there.
"""

from typing import Any

from absl import flags

from . import frame

_EXCHANGE = flags.DEFINE_string(
    "exchange", None, "Folder that both parties reach and nobody else writes to.", required=True
)
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds to wait for the client.", lower_bound=0.0)
_LIMITS = flags.DEFINE_list("limits", [], "NAME=NUMBER of jaxdp.files.Limits, for larger packages of the client.")


def experiment(config: Any, workdir: str) -> None:
    """Plays the server."""
    from . import parties

    parties.run_server(
        config.server, workdir, _EXCHANGE.value, timeout=_TIMEOUT.value, limits=frame.limits(_LIMITS.value)
    )


if __name__ == "__main__":
    frame.main(experiment)
