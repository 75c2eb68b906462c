"""The client of Split Adaptation between two processes, started before or after `launch.split_server`:

python -m launch.split_client --config configs/split/two_parties.py --workdir workdir/client --exchange workdir/exchange

Of the config it reads the part `client` only, of the exchange folder what the server puts there. --images names the
client's own images.
"""

from typing import Any

from absl import flags

from . import frame

_EXCHANGE = flags.DEFINE_string(
    "exchange", None, "Folder that both parties reach and nobody else writes to.", required=True
)
_TIMEOUT = flags.DEFINE_float("timeout", 3600.0, "Seconds to wait for the server.", lower_bound=0.0)
_LIMITS = flags.DEFINE_list("limits", [], "NAME=NUMBER of jaxdp.files.Limits, for larger packages of the server.")
_LEDGER = flags.DEFINE_string("ledger", None, "Ledger of the client's images; by default ledger.sqlite in the workdir.")
_QUERIES = flags.DEFINE_bool(
    "queries", None, "Have the test images classified, which no guarantee covers; by default not in the private mode."
)
# Each stands for --config.client.NAME=...
_FIELDS = (
    flags.DEFINE_string(
        "images", None, "An .npz file with image, label and, if there are any, test_image, test_label."
    ),
    flags.DEFINE_enum("mode", None, ["published", "noise_once", "private"], "What is uploaded."),
    flags.DEFINE_float("laplace_scale", None, "Published, noise_once: of the noise on representations."),
    flags.DEFINE_float("epsilon", None, "Private: of the upload."),
    flags.DEFINE_float("delta", None, "Private: of the upload."),
)


def experiment(config: Any, workdir: str) -> None:
    """Plays the client."""
    from . import parties

    given = {flag.name: flag.value for flag in _FIELDS if flag.value is not None}
    config.client.update(given)
    parties.run_client(
        config.client,
        workdir,
        _EXCHANGE.value,
        ledger_path=_LEDGER.value,
        queries=_QUERIES.value,
        timeout=_TIMEOUT.value,
        limits=frame.limits(_LIMITS.value),
    )


if __name__ == "__main__":
    frame.main(experiment)
