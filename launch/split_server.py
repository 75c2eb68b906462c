r"""The server of Split Adaptation, started before or after `launch.split_client`.

    python -m launch.split_server --config configs/split/two_parties.py --workdir workdir/server \
        --exchange workdir/client-1

It reads only the part `server` of the config, and only the client's packages. --address and --keys
in place of --exchange go over a network (docs/howto/parties_over_a_network.md).
"""

from typing import Any

from . import frame, links, plans


def experiment(config: Any, workdir: str, *, dry_run: bool = False) -> None:
    """Runs the server. It has public images only and charges nothing."""
    from . import parties, report

    if dry_run:
        return plans.show([], None)
    with links.parties() as client:
        parties.run_server(
            config.server, workdir, client, timeout=links.TIMEOUT.value, limits=links.limits()
        )
    print(report.write(workdir))


if __name__ == "__main__":
    frame.main(experiment)
