"""What a fine-tuning config trains: its data, its network, and the part of it that moves."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp.data import Examples, Groups, by_group, from_arrays
from jaxdp.models import Pretrained, load_params, merge_lora

from . import data, frozen, models, trainers

Params = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """What a config trains: on images, or on the features of a frozen network (`head`).

    Attributes:
      units: What is protected and trained on: the private records, or their owners.
      unit: The name of one of them in the ledger.
      chosen: The choice of trained parameters, as in `jaxdp.clipped_grad`, or None for all.
    """

    public: Examples | None
    private: Any
    units: Any
    unit: str
    test: Any
    network: Pretrained
    chosen: Callable[[str, Any], bool] | None
    head: frozen.Frozen | None

    def trainer(self, private: Any, images: Any, mesh: Any = None) -> Any:
        """Returns the trainer of the `private` part of a config, on one device or a mesh with the
        axis "data".
        """
        public: Any = (
            self.head.source("public", self.public) if self.head and self.public else self.public
        )
        given = private, self.network, self.units, public, images
        return trainers.make(*given, unit=self.unit, trainable=self.chosen, mesh=mesh)

    def terms(self, private: Any, images: Any) -> dict[str, Any]:
        """Returns the terms of the private records in a ledger, with the budget of the `private`
        part of a config.
        """
        budget = {"epsilon": private.epsilon, "delta": private.delta}
        return data.terms(images) | {"records": len(self.units)} | budget

    def blank(self) -> tuple[Any, Any]:
        """Returns records and units with the shapes of the private ones, for a plan. It computes no
        feature.
        """
        if self.head is None:
            return self.private, self.units
        features, label = (
            np.zeros((1, self.network.params["head"]["kernel"].shape[0])),
            np.zeros(1, int),
        )
        classes, name = self.private.num_classes, self.private.name
        records = from_arrays(features=features, label=label, num_classes=classes, name=name)
        if not isinstance(self.units, Groups):
            return records, records
        return records, by_group(records, label, max_records=self.units.rows.shape[1])

    def serving(self, params: Params) -> Params:
        """Returns parameters of the plain network for images."""
        return self.head.whole(params) if self.head else merge_lora(params)


def open_task(config: Any, root: pathlib.Path) -> Task:
    """Reads the data and the network of a config, and refuses what cannot work."""
    found = data.parts(config.data, "public", "private", "test", grouped=True)
    data.require_images(found)
    model, loaded = config.model, models.has_backbone(config.model)
    frozen.check(config)
    network = models.network(model, found["private"].num_classes, new_head=config.pretrain.new_head)
    found = {role: models.resize(network, source) for role, source in found.items()}
    public = found.get("public")
    if loaded and config.pretrain.weights:
        raise ValueError(
            "config.model.checkpoint and config.pretrain.weights both give a start. Empty one of "
            "them."
        )
    if config.pretrain.weights:
        load_params(config.pretrain.weights)  # raises before the workdir is bound
    elif public is not None and not loaded and not config.pretrain.steps:
        raise ValueError(
            "config.pretrain.steps must be at least 1 with public examples, got 0. Or name no "
            "public examples."
        )
    unit = data.terms(config.data)["unit"]
    sizes = [f"{len(source)} {role} ({source.name})" for role, source in found.items()]
    print(f"{', '.join(sizes)}.", flush=True)
    if loaded and model.features.keep:
        head = frozen.Frozen(network, public, model.features, root)
        private, test = (head.source(role, found[role]) for role in ("private", "test"))
        units = data.units(config.data, found["private"], private)
        return Task(public, private, units, unit, test, head.head(), None, head)
    network, chosen = models.adapted(network, model, seed=config.init_seed)
    units = data.units(config.data, found["private"])
    return Task(public, found["private"], units, unit, found["test"], network, chosen, None)
