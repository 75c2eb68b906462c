"""What a fine-tuning config trains: its data, its network, and the part of it that moves."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxdp import finetune
from jaxdp.data import DataSpec, Examples, Groups, Owners, augmentation, by_group, from_arrays
from jaxdp.data.protocol import check_source
from jaxdp.data.selection import units
from jaxdp.data.spec import open_parts
from jaxdp.finetune.scaler import columns_of
from jaxdp.models import Pretrained, load_params, merge_lora, merge_pretrained

from . import data, frozen, models, plans, results, trainers
from .study import PrivateSet

Params = Any


@dataclasses.dataclass(frozen=True)
class Task:
    """What a config trains: on images, or on the features of a frozen network (`head`).

    Attributes:
      spec: What the private records are: their terms in the ledger and their augmentation.
      records: The private images.
      public, private, test: The images, or their features. Public ones may be missing.
      units: What is protected and trained on: the private records, or their owners.
      network: The trained network.
      chosen: The choice of trained parameters, as in `jaxdp.clipped_grad`, or None for all.
      head: The frozen network, of which only the head is trained, or None.
    """

    spec: DataSpec
    records: Examples
    public: Examples | None
    private: Any
    units: Any
    test: Any
    network: Pretrained
    chosen: Callable[[str, Any], bool] | None
    head: frozen.Frozen | None

    def trainer(self, private: Any, mesh: Any = None) -> Any:
        """Returns the trainer of the `private` part of a config, on one device or a mesh with the
        axis "data".
        """
        public: Any = self.public
        if self.head and self.public:
            public = self.head.source("public", self.public)
        return trainers.make(
            private,
            self.network,
            self.units,
            public,
            self.spec,
            unit=self.spec.unit,
            trainable=self.chosen,
            mesh=mesh,
        )

    @property
    def private_set(self) -> PrivateSet:
        """The private images, for which a ledger counts."""
        return PrivateSet(self.private.name, self.records, self.spec.is_public)

    def terms(self, private: Any) -> dict[str, Any]:
        """Returns the terms of the private records in a ledger, with the budget of the `private`
        part of a config.
        """
        budget = results.only(private, "epsilon", "delta")
        records = len(self.units)
        if isinstance(self.units, Owners):
            records = self.units.owners
        return self.spec.terms | {"records": records} | budget

    def scaled(self, scaler: Any) -> "Task":
        """Returns the task with a network that scales its features."""
        return dataclasses.replace(self, network=scaled(self.network, scaler))

    def blank(self) -> tuple[Any, Any]:
        """Returns records and units with the shapes of the private ones, for a plan.

        It computes no feature.
        """
        if self.head is None:
            return self.private, self.units
        width = self.network.params["head"]["kernel"].shape[0]
        label = np.zeros(1, int)
        records = from_arrays(
            features=np.zeros((1, width)),
            label=label,
            num_classes=self.private.num_classes,
            name=self.private.name,
        )
        if isinstance(self.units, Owners):
            blank = np.zeros(len(self.units), np.int64)
            return records, dataclasses.replace(self.units, source=records, rows=blank, without="")
        if not isinstance(self.units, Groups):
            return records, records
        return records, by_group(records, label, max_records=self.units.rows.shape[1])

    def serving(self, params: Params) -> Params:
        """Returns parameters of the plain network for images."""
        return self.head.whole(params) if self.head else merge_lora(params)


def open_task(config: Any, root: pathlib.Path) -> Task:
    """Reads the data and the network of a config, and refuses what cannot work."""
    images = bool(config.model.preprocessing)
    roles = ("public", "private", "test")
    specs = data.specs(
        config.data, *roles, needs=roles[1:], grouped=True, several=True, tables=not images
    )
    sources = open_parts(specs, images=images)
    spec = specs["private"]
    frozen.check(config.model, config.private, spec)
    network = network_of(config, sources, sources["private"].num_classes)
    if trainers.scaler_event(config.private):
        if spec.separator:
            raise ValueError(
                "config.private.scaler_noise_multiplier must be 0 with config.data.separator, got "
                f"{config.private.scaler_noise_multiplier}: the scaler's proof is for rows of one "
                "owner each."
            )
        columns_of(sources["private"], scaler_ranges(spec))
    sources = {role: models.resize(network, source) for role, source in sources.items()}
    _check_start(config, sources)
    sizes = [f"{len(source)} {role} ({source.name})" for role, source in sources.items()]
    print(f"{', '.join(sizes)}.", flush=True)

    public, private, test = sources.get("public"), sources["private"], sources["test"]
    if models.has_backbone(config.model) and config.model.features.keep:
        head = frozen.Frozen(network, public, config.model.features, root)
        features = head.source("private", private)
        return Task(
            spec=spec,
            records=private,
            public=public,
            private=features,
            # Features have no column of owners. The images say whose they are.
            units=_units(private, spec, computed=features),
            test=head.source("test", test),
            network=head.head(),
            chosen=None,
            head=head,
        )
    network, chosen = models.adapted(network, config.model, seed=config.init_seed)
    return Task(
        spec=spec,
        records=private,
        public=public,
        private=private,
        units=_units(private, spec),
        test=test,
        network=network,
        chosen=chosen,
        head=None,
    )


def _units(private: Examples, spec: DataSpec, computed: Any = None) -> Any:
    """Returns the private records by unit of privacy."""
    return units(
        private,
        spec.group,
        max_records=spec.max_records,
        separator=spec.separator,
        computed=computed,
    )


def network_of(config: Any, sources: Mapping[str, Examples], num_classes: int) -> Pretrained:
    """Returns the network of a config for its images, or for the features of its tables.

    Raises:
      ValueError: The network and the sources do not fit each other.
    """
    width = 0
    if not config.model.preprocessing:
        width = _width(sources, num_classes)
    return models.network(config.model, num_classes, new_head=config.pretrain.new_head, width=width)


def _width(sources: Mapping[str, Examples], num_classes: int) -> int:
    """Returns the number of features of tables, which all parts share.

    Raises:
      ValueError: The parts differ, have no features, or declare no classes.
    """
    widths = set()
    for source in sources.values():
        example = check_source(source, "features", "label", argument=f"config.data: {source.name}")
        widths.add(example["features"].shape)
    if len(widths) > 1:
        raise ValueError(
            f"config.data.parts must have the same features, got {sorted(widths)} in shapes. "
            "Give all files the same columns."
        )
    if not num_classes:
        raise ValueError(
            "config.data.num_classes must be the number of classes of the label, or "
            "config.data.class_names their texts, got none."
        )
    return int(*widths.pop())


def scaled(network: Pretrained, scaler: Any) -> Pretrained:
    """Returns a network of tables that scales its features."""
    preprocessing = network.preprocessing._replace(scaler=scaler)
    return dataclasses.replace(network, preprocessing=preprocessing)


def scaler_ranges(spec: DataSpec) -> dict[str, tuple[float, float]]:
    """Returns the columns of a table with public ranges, which a charged scaler measures.

    Raises:
      ValueError: The records are no table, or no column has a range.
    """
    ranges = dict(spec.options.get("ranges", {}))
    if spec.source != "csv" or not ranges:
        raise ValueError(
            "config.private.scaler_noise_multiplier must be 0 without columns of a table that have "
            "public ranges. Set config.data.source='csv', and ranges among config.data.options."
        )
    ranges.pop(spec.label, None)
    # `from_csv` makes 0 and 1 of the ends of a range.
    return dict.fromkeys(ranges, (0.0, 1.0))


def _check_start(config: Any, sources: Mapping[str, Examples]) -> None:
    """Raises ValueError if a config gives two starts of training, or a public set without steps."""
    loaded = models.has_backbone(config.model)
    if loaded and config.pretrain.weights:
        raise ValueError(
            "config.model.checkpoint and config.pretrain.weights both give a start. Empty one of "
            "them."
        )
    if config.pretrain.weights:
        load_params(config.pretrain.weights)  # raises before the workdir is bound
    elif "public" in sources and not loaded and not config.pretrain.steps:
        raise ValueError(
            "config.pretrain.steps must be at least 1 with public examples, got 0. Or name no "
            "public examples."
        )


def plan_of_start(config: Any, task: Task) -> Iterator[plans.Item]:
    """Yields the public training of `backbone`, if it trains here."""
    is_given = config.pretrain.weights or models.has_backbone(config.model)
    if task.public is not None and not is_given:
        loss = models.loss(task.network)
        fresh = models.fresh(task.network, config.init_seed)
        yield plans.public_training(
            "public pre-training", loss, fresh, task.public, config.pretrain
        )


def without_privacy(config: Any, task: Task, start: Params, *, augment: Any = None) -> float:
    """Returns the test accuracy of a training without clipping and noise."""
    params = models.train(
        task.network,
        start,
        task.private,
        config.no_privacy,
        seed=config.init_seed,
        augment=augment,
        optimizer=functools.partial(models.adam_on, chosen=task.chosen),
        label="no privacy",
    )
    return finetune.accuracy(task.network.apply_fn, params, task.test)


def start(config: Any, task: Task, work: Any) -> Params:
    """Returns the parameters from which private training starts: fresh ones, with the backbone."""
    fresh = models.fresh(task.network, config.init_seed)
    pretrained = backbone(config, task, work)
    if pretrained is None:
        return fresh
    exclude = ("head",) if config.pretrain.new_head else ()
    return merge_pretrained(fresh, pretrained, exclude=exclude)


def backbone(config: Any, task: Task, work: Any) -> Params | None:
    """Returns the parameters of a file of public weights, or trains them here on the public
    examples.
    """
    if config.pretrain.weights:
        return load_params(config.pretrain.weights)
    if task.public is None or models.has_backbone(config.model):
        return None
    public = task.public

    def trained() -> Params:
        return models.trained(
            models.with_classes(task.network, public.num_classes),
            lambda: public,
            config.pretrain,
            work.root / "pretrained.safetensors",
            seed=config.init_seed,
            augment=augmentation(task.spec),
            label="public pre-training",
        ).params

    work.hosts.first(lambda: bool(trained()))  # The others read its file.
    return work.hosts.together(trained)
