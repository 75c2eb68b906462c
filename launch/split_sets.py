"""The images of the server and of the client of a study of Split Adaptation.

They are in the size of the network. `Sets.open` reads them as config.data says.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp.data import Examples
from jaxdp.data import open as open_spec
from jaxdp.data.apart import check_sets_apart
from jaxdp.data.selection import at_most, turned
from jaxdp.models import Pretrained

from . import data, models

_NAMES = ("client", "server", "tuning", "client_test", "auxiliary")


class Task(NamedTuple):
    """What a client wants to classify. Shots are drawn from the pool, and accuracy is measured on
    the test images.
    """

    pool: Examples
    test: Examples


@dataclasses.dataclass(frozen=True)
class Sets:
    """The images of both parties.

    Attributes:
      pretraining: The server's images on which the backbone is trained here. None with a
        checkpoint.
      server: The server's other images.
      client: The client's task.
      tuning: A task of the server, on other images than the client's.
      auxiliary: Public images on which the auxiliary model is trained here. None takes those of the
        backbone.
    """

    pretraining: Examples | None
    server: Examples
    client: Task
    tuning: Task
    auxiliary: Examples | None

    @classmethod
    def open(cls, config: Any, network: Pretrained) -> "Sets":
        """Reads the sets of config.data: client, server, and those of the others that have a
        name.
        """
        sets = config.data
        images = _images(sets, network)
        pretraining, server = _divided(images["server"], config)
        client = _client(images, sets)
        # Another seed than the client's: both may divide one set.
        halves = images.get("tuning", server).split((0.5, 0.5), seed=sets.split_seed + 1)
        tasks = []
        for half in halves:
            some = at_most(half, sets.tuning.images, seed=sets.split_seed)
            tasks.append(turned(some, sets.tuning.rotate))
        few = at_most(server, sets.server_images, seed=sets.split_seed)
        return cls(pretraining, few, client, Task(*tasks), images.get("auxiliary"))


def _images(sets: Any, network: Pretrained) -> dict[str, Examples]:
    """Returns the images of each set that has a name. The client's are apart from all others."""
    prepare = network.preprocessing.prepare
    specs = {}
    for name in _NAMES:
        if sets[name].name:
            specs[name] = data.whole(sets[name], f"config.data.{name}")
    others = [spec for name, spec in specs.items() if name != "client"]
    check_sets_apart(specs["client"], *others)
    images = {}
    for name, spec in specs.items():
        source = open_spec(spec, prepare=prepare)
        images[name] = models.resize(network, source)
    return images


def _client(images: Mapping[str, Examples], sets: Any) -> Task:
    """Returns the task of the client, on a set of test images or on half of its set."""
    seed = sets.split_seed
    pool = images["client"]
    if "client_test" in images:
        test = images["client_test"]
    else:
        pool, test = pool.split((0.5, 0.5), seed=seed)
    classes = pool.num_classes
    if test.num_classes != classes:
        raise ValueError(
            f"config.data.client_test must have {classes} classes, got {test.num_classes}."
        )
    pool = at_most(pool, sets.client.images, seed=seed)
    return Task(pool, at_most(test, sets.client_test.images, seed=seed))


def _divided(server: Examples, config: Any) -> tuple[Examples | None, Examples]:
    """Returns the server's images on which the backbone is trained here, and its others."""
    classes = config.model.num_classes
    if server.num_classes != classes:
        raise ValueError(
            f"config.model.num_classes must be {server.num_classes}, the classes of "
            f"config.data.server, got {classes}."
        )
    if config.model.checkpoint:
        return None, server
    share = config.data.pretrain_fraction
    if not 0 < share < 1:
        raise ValueError(
            f"config.data.pretrain_fraction must be in (0, 1) without a checkpoint, got {share}."
        )
    shares = (share, 1 - share)
    pretraining, others = server.split(shares, seed=config.data.split_seed)
    return pretraining, others
