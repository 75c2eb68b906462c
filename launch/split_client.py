r"""The client of Split Adaptation, started before or after `launch.split_server`.

    python -m launch.split_client --config configs/split/two_parties.py --workdir workdir/client \
        --exchange workdir/client-1

It reads only the part `client` of the config, and only the server's packages. --images names the
client's own images. --address and --keys in place of --exchange go over a network
(docs/howto/parties_over_a_network.md).
"""

import pathlib
from typing import Any

from absl import flags

from . import frame, links, plans

_QUERIES = flags.DEFINE_bool(
    "queries",
    None,
    "Classify the test images, which no guarantee covers. The default is yes but in the private "
    "mode.",
)
# Each flag stands for --config.client.NAME=...
_FIELDS = (
    flags.DEFINE_string(
        "images",
        None,
        "An .npz file with image and label, and optionally test_image and test_label.",
    ),
    flags.DEFINE_enum("mode", None, ["published", "noise_once", "private"], "The kind of upload."),
    flags.DEFINE_float(
        "laplace_scale", None, "Scale of the noise in the modes published and noise_once."
    ),
    flags.DEFINE_float("epsilon", None, "Epsilon of a private upload."),
    flags.DEFINE_float("delta", None, "Delta of a private upload."),
)


def experiment(
    config: Any, workdir: str, *, dry_run: bool = False, choice: frame.Choice = frame.DEFAULT
) -> None:
    """Runs the client."""
    from . import parties, report

    fields = {flag.name: flag.value for flag in _FIELDS if flag.value is not None}
    config.client.update(fields)
    if dry_run:
        charges = parties.client_charges(
            config.client, workdir, choice=choice, queries=_QUERIES.value
        )
        return plans.show(charges, None if workdir is None else pathlib.Path(workdir))
    parties.run_client(
        config.client,
        workdir,
        links.serve(),
        choice=choice,
        queries=_QUERIES.value,
        limits=links.limits(),
    )
    print(report.write(workdir))


if __name__ == "__main__":
    frame.main(experiment, pays=True)
