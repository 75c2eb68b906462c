"""The server of Split Adaptation between two processes, started before or after `launch.split_client`.

python -m launch.split_server --config configs/split/two_parties.py --workdir workdir/server --exchange workdir/exchange

It reads only the part `server` of the config, and only the client's packages in the exchange folder.
"""

from typing import Any

from absl import flags

from . import frame, plans

_EXCHANGE = flags.DEFINE_string("exchange", None, "Folder that both parties can write to, and nobody else.")
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds to wait for the client.", lower_bound=0.0)
_LIMITS = flags.DEFINE_list("limits", [], "NAME=NUMBER of jaxdp.files.Limits, for larger packages of the client.")


def experiment(config: Any, workdir: str, *, dry_run: bool = False) -> None:
    """Runs the server. It has public images only and charges nothing."""
    from . import parties, report

    if dry_run:
        return plans.show([], None)
    if _EXCHANGE.value is None:
        raise ValueError("--exchange must be given: a folder that both parties can write to.")
    parties.run_server(
        config.server, workdir, _EXCHANGE.value, timeout=_TIMEOUT.value, limits=frame.limits(_LIMITS.value)
    )
    print(report.write(workdir))


if __name__ == "__main__":
    frame.main(experiment)
