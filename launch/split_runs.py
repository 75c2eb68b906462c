"""One run of everything that `launch.split` compares: a method, the few images of a client, a
seed.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import split
from jaxdp.data import Examples, read_column
from jaxdp.data import open as open_spec
from jaxdp.data.apart import check_sets_apart
from jaxdp.data.selection import at_most, everything, turned
from jaxdp.models import Pretrained
from jaxdp.privacy import Account
from jaxdp.release import Till, stream
from jaxdp.split import baselines
from jaxdp.split.copies import plan_copies
from jaxdp.transforms import noise

from . import data, frontend_attacks, models
from . import representation_attacks as attacks
from . import split_costs as costs
from .measure import measure
from .split_attackers import GINVER, Knowledge, attackers_of, perturbed, simulated
from .study import Fields

_BATCH = 256  # of representations whose logits are computed together
ServerVariant = Literal["full", "without Hilbert", "amplitude", "F_0 only", "untuned"]


class Variant(NamedTuple):
    """A way to run Split Adaptation. The defaults are the paper's.

    Attributes:
      server: "full", "without Hilbert" augmentation, with "amplitude" exchange instead, the backend
          tuned with "F_0 only", or "untuned".
      order: Noise on every copy ("published"), or once before augmentation ("once").
      laplace: The scale b of the noise in units of the config's.
      alpha: The scale of the noise on the frontend in units of the config's.
      patches: The number of replaced patches in units of the config's.
      copies: The number of augmented copies in units of the config's.
    """

    server: ServerVariant = "full"
    order: Literal["published", "once"] = "published"
    laplace: float = 1.0
    alpha: float = 1.0
    patches: float = 1.0
    copies: float = 1.0


# Names in configs, and names in `launch.split_costs`.
SA = "Split Adaptation"
SA_ONCE = "SA, noise once"
SA_CLEAN = "SA without noise"
PRIVATE = "SA, private"
OT_RANDOM = "Offsite tuning, random layers"
AUXILIARY = "Auxiliary backend"
BASELINES = {
    "Linear probing": "lp",
    "Fine-tuning": "ft",
    "LN-tune": "ln",
    "Split learning": "sl",
    "Offsite tuning": "ot",
    OT_RANDOM: "ot_random",
}
COSTS = {**BASELINES, SA: "sa", SA_ONCE: "sa_noise_once", PRIVATE: "sa_private"}
# Table 3: a client uses the frontend alone. The auxiliary backend comes from another public model.
STOLEN: Mapping[str, Any] = {
    "Quantised frontend": frontend_attacks.probe_quantized_frontend,
    "Original frontend": frontend_attacks.probe_original_frontend,
    "Quantised frontend, all of it tuned": frontend_attacks.tune_quantized_frontend,
    AUXILIARY: None,
}
PUBLISHED = Variant()
ONCE = Variant(order="once")
CLEAN = Variant(laplace=0.0, alpha=0.0)
# Table 4. The paper seems to have swapped the names of its two rows about tuning. The last six
# rows are not in the paper.
ABLATIONS = {
    SA: PUBLISHED,
    "without Hilbert augmentation": Variant(server="without Hilbert"),
    "backend tuned with F_0 only": Variant(server="F_0 only"),
    "backend not tuned": Variant(server="untuned"),
    "one noisy copy (no patch retrieval)": Variant(copies=0.0, patches=0.0),
    "fresh noise on all copies, no retrieval": Variant(patches=0.0),
    "noise once, then retrieval": ONCE,
    "no Laplace noise": Variant(laplace=0.0),
    "no noise": CLEAN,
    "no noise, no retrieval": Variant(laplace=0.0, alpha=0.0, copies=0.0, patches=0.0),
    "amplitude exchange for Hilbert": Variant(server="amplitude"),
}
VARIANTS = {**ABLATIONS, SA_ONCE: ONCE, SA_CLEAN: CLEAN}
# Tables 5 and 6: uploads and attackers.
UPLOADS: Mapping[str, Variant | None] = {
    "Split learning": None,
    SA: PUBLISHED,
    "SA without Laplace noise": Variant(laplace=0.0),
    "SA without model noise": Variant(alpha=0.0),
    SA_ONCE: ONCE,
}


class Task(NamedTuple):
    """What a client wants to classify. Shots are drawn from the pool, and accuracy is measured on
    the test images.
    """

    pool: Examples
    test: Examples


class Stopping(NamedTuple):
    """The most epochs of a training, and the patience of `jaxdp.split.training.Training`."""

    epochs: int
    patience: int


class Client(NamedTuple):
    """The input of a run: a task, a few images of it, the seed of everything that is drawn, and a
    learning rate.
    """

    task: Task
    few: Mapping[str, Any]  # "image" float32 [n, S, S, C] in [0, 1] and "label" int32 [n]
    seed: int
    rate: float = 0.0

    @property
    def secret(self) -> bytes:
        """A replacement for the secret of a client, so that the study can be repeated."""
        return self.seed.to_bytes(16, "little")

    def key(self, name: str) -> jax.Array:
        """Returns the key of a secret stream."""
        return stream(self.secret, name, impl="threefry2x32")


@dataclasses.dataclass(frozen=True)
class _Sets:
    """The images of the server and of the client, in the size of the network.

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
    def open(cls, config: Any, network: Pretrained) -> "_Sets":
        """Reads the sets of config.data: client, server, and those of the others that have a
        name.
        """
        sets, seed = config.data, config.data.split_seed
        specs = {
            name: data.whole(sets[name], f"config.data.{name}")
            for name in ("client", "server", "tuning", "client_test", "auxiliary")
            if sets[name].name
        }
        others = [spec for name, spec in specs.items() if name != "client"]
        check_sets_apart(specs["client"], *others)
        prepare = network.preprocessing.prepare
        images = {
            name: models.resize(network, open_spec(spec, prepare=prepare))
            for name, spec in specs.items()
        }
        pretraining, server = _divided(images["server"], config)
        if "client_test" in images:
            pool, test = images["client"], images["client_test"]
        else:
            pool, test = images["client"].split((0.5, 0.5), seed=seed)
        if test.num_classes != pool.num_classes:
            raise ValueError(
                f"config.data.client_test must have {pool.num_classes} classes, got "
                f"{test.num_classes}."
            )
        client = Task(
            at_most(pool, sets.client.images, seed=seed),
            at_most(test, sets.client_test.images, seed=seed),
        )
        # Another seed than the client's: both may divide one set.
        halves = images.get("tuning", server).split((0.5, 0.5), seed=seed + 1)
        some = [at_most(half, sets.tuning.images, seed=seed) for half in halves]
        tuning = Task(*(turned(half, sets.tuning.rotate) for half in some))
        server = at_most(server, sets.server_images, seed=seed)
        return cls(pretraining, server, client, tuning, images.get("auxiliary"))


def _divided(server: Examples, config: Any) -> tuple[Examples | None, Examples]:
    """Returns the server's images on which the backbone is trained here, and its others."""
    if server.num_classes != config.model.num_classes:
        raise ValueError(
            f"config.model.num_classes must be {server.num_classes}, the classes of "
            f"config.data.server, got {config.model.num_classes}."
        )
    if config.model.checkpoint:
        return None, server
    share = config.data.pretrain_fraction
    if not 0 < share < 1:
        raise ValueError(
            f"config.data.pretrain_fraction must be in (0, 1) without a checkpoint, got {share}."
        )
    pretraining, others = server.split((share, 1 - share), seed=config.data.split_seed)
    return pretraining, others


def _second_network(config: Any, images: Examples | None) -> Pretrained:
    """Returns the model of the auxiliary backend, without parameters if it is trained on images."""
    model = config.auxiliary.model
    if not model.checkpoint and not (images and model.preprocessing):
        raise ValueError(
            "config.auxiliary.model.checkpoint must be given if the backbone is from a checkpoint "
            f"and config.data.auxiliary has no name. Or leave {AUXILIARY!r} out of config.stolen."
        )
    return models.network(model, new_head=True)


class Bench:
    """The server's model and images, the client's task, and everything that can be run on them.

    configs/split/digits.py explains the fields of the config. Models are trained when they are
    first needed.

    Attributes:
      backbone: The server's model and its cut.
      public: D_S, the server's labelled public images.
      client: The client's task, of `num_classes` classes.
      tuning: A task of the server, on which learning rates are chosen.
      server: `server(variant)` returns the shipped frontend and the tuned parameters of the
          backend.
    """

    def __init__(self, config: Any, root: pathlib.Path):
        self.config, self.root = config, root
        self._network = network = models.network(config.model)
        sets = _Sets.open(config, network)
        self._pretraining, self.public = sets.pretraining, everything(sets.server)
        self._auxiliary_images = sets.auxiliary or sets.pretraining
        if AUXILIARY in config.stolen:  # a missing file is noticed before hours of other cells
            self._second = _second_network(config, self._auxiliary_images)
        self.client, self.tuning = sets.client, sets.tuning
        self.num_classes = self.client.pool.num_classes
        cut = config.cut or split.two_thirds(network.model)
        self.backbone = split.Backbone(
            network.model, network.preprocessing, cut, config.head_hidden
        )
        self.server = functools.cache(self._server)
        self._projection = functools.cache(self._public_projection)
        # One extractor of a variant is one object, so that decoders compile once.
        self._extract = functools.cache(self._make_extract)

    # --- The server ------------------------------------------------------------------------------

    @functools.cached_property
    def params(self) -> Any:
        """Parameters of the whole model, with a head for the server's labels."""
        images: Any = self._pretraining  # None with a checkpoint, which needs no images
        return models.source_model(
            self.config, lambda: images, self.root, "backbone", untrained=self._network
        ).params

    def _server(self, variant: ServerVariant) -> tuple[split.QuantizedFrontend, Fields]:
        options = self.config.server
        images, labels = jnp.asarray(self.public["image"]), jnp.asarray(self.public["label"])
        # Half the images twice as often give the same number of steps.
        epochs = options.epochs * (2 if variant == "without Hilbert" else 1)
        key = jax.random.key(options.seed)
        calibration_key, tuning_key = jax.random.split(key)
        if variant == "amplitude":
            donor_key = jax.random.fold_in(key, 2)
            images, labels = split.merge_amplitude_exchange(donor_key, images, labels)
        elif variant != "without Hilbert":
            images, labels = split.merge_hilbert(images, labels)
        frontends = split.calibrate_frontends(
            calibration_key,
            self.backbone,
            self.params,
            images,
            labels,
            frontends=0 if variant in ("F_0 only", "untuned") else options.frontends,
            **{name: options[name] for name in ("samples", "partition", "bits", "metric")},
        )
        if variant == "untuned":
            return frontends[0], self.backbone.divide(self.params)[1]
        back = split.tune_backend(
            tuning_key,
            self.backbone,
            self.params,
            frontends,
            images,
            labels,
            learning_rate=options.learning_rate,
            epochs=epochs,
        )
        return frontends[0], back

    @functools.cached_property
    def _representations(self) -> jax.Array:
        """The representations of the server's images by the shipped frontend."""
        return self._represent(self.public["image"])

    def _represent(
        self, images: Any, variant: Variant = PUBLISHED, params: Any = None
    ) -> jax.Array:
        frontend, _ = self.server(variant.server)
        return split.represent(
            self.backbone, frontend, frontend.params if params is None else params, images
        )

    # --- Accuracy --------------------------------------------------------------------------------

    def accuracy(
        self,
        method: str,
        client: Client,
        *,
        laplace: float = 1.0,
        stopping: Stopping | None = None,
    ) -> dict[str, float]:
        """Returns the test accuracy of a method of `BASELINES`, `STOLEN` or `VARIANTS`, with
        `laplace` times its noise, and the number of epochs that it took.

        A variant also has "noisy", the accuracy with Laplace noise on the test images. `stopping`
        replaces the rule of the config.
        """
        if method in VARIANTS:
            variant = VARIANTS[method]
            variant = variant._replace(laplace=variant.laplace * laplace)
            return self.adapted(variant, client, stopping)
        epochs, patience = stopping or self._stopping(method)
        adapted = baselines.adapt(
            self._baseline(method, client),
            self.backbone,
            self.params if method in (*BASELINES, "Original frontend") else self.server("full")[0],
            client.few["image"],
            client.few["label"],
            num_classes=client.task.pool.num_classes,
            learning_rate=client.rate,
            epochs=epochs,
            patience=patience,
            batch_size=self.config.baselines.batch_size,
            key=jax.random.key(client.seed),
        )
        test: Any = everything(client.task.test)
        accuracy = baselines.accuracy(adapted, test["image"], test["label"])
        return {"accuracy": accuracy, "epochs": adapted.epochs}

    def _baseline(self, method: str, client: Client) -> baselines.Baseline:
        if method == OT_RANDOM:
            # The server draws an emulator for each draw of the client's images. Both seeds are
            # public.
            seed = self.config.baselines.drop_seed + client.seed
            return functools.partial(baselines.offsite_tuning, drop="random", seed=seed)
        if method in BASELINES:
            return baselines.BASELINES[BASELINES[method]]
        return STOLEN[method] or self._auxiliary

    def _stopping(self, method: str) -> Stopping:
        """Returns the rule of a baseline. The paper gives offsite tuning half as many epochs."""
        options = self.config.baselines
        epochs = options.epochs // (2 if method.startswith("Offsite tuning") else 1)
        return Stopping(epochs, options.patience)

    @functools.cached_property
    def _auxiliary(self) -> baselines.Baseline:
        """The last blocks of another public model, trained here on the same images or read from a
        checkpoint.
        """
        config = self.config.auxiliary
        images: Any = self._auxiliary_images
        model = models.source_model(
            config, lambda: images, self.root, "auxiliary", untrained=self._second
        )
        cut = config.cut or split.two_thirds(model.model)
        return frontend_attacks.probe_auxiliary_backend(
            split.Backbone(model.model, model.preprocessing, cut), model.params
        )

    def adapted(
        self, variant: Variant, client: Client, stopping: Stopping | None = None
    ) -> dict[str, float]:
        """Returns accuracies of a variant, on test images without and with noise, and its epochs.

        Without `stopping` all variants take about the same number of steps for any number of
        copies, and at least one epoch.
        """
        labels = client.few["label"]
        x, params = self._noisily(variant, client)
        copies = self._copies(variant, client, x)
        if stopping is None:
            options = self.config.adaptation
            steps = options.epochs * self._batches(labels, self.config.client.copies)
            epochs = self._epochs_of(steps, labels, copies)
            stopping = Stopping(epochs, options.patience)
        adapted = self._adapted(variant, client, copies, labels, stopping)
        accuracy = functools.partial(self._judged, adapted, client)
        test = self._represent(everything(client.task.test)["image"], variant, params)
        key = stream(client.secret, "test images")
        noisy = test + noise.laplace(key, test, self._scale(variant))
        return {
            "accuracy": accuracy(test),
            "noisy": accuracy(noisy),
            "epochs": adapted.epochs,
        }

    def _noisily(self, variant: Variant, client: Client) -> tuple[jax.Array, Any]:
        """Returns representations of a client's images, exact but for its noisy frontend, and its
        parameters.
        """
        params = self.server(variant.server)[0].params
        params = split.perturb_params(client.key("frontend"), params, **self._model_noise(variant))
        return self._represent(client.few["image"], variant, params), params

    def _copies(self, variant: Variant, client: Client, x: jax.Array) -> split.Copies:
        published = variant.order == "published"
        make = split.augment_then_noise if published else split.noise_then_augment
        return make(client.key("copies"), x, **self._copying(variant))

    def _model_noise(self, variant: Variant) -> Fields:
        return {
            "alpha": variant.alpha * self.config.client.alpha,
            "mode": self.config.client.noise_mode,
        }

    def _scale(self, variant: Variant) -> float:
        """Returns the scale of the Laplace noise. Its unit may be the standard deviation of PUBLIC
        representations.
        """
        options = self.config.client
        unit = 1.0
        if options.laplace_unit != "representation":
            unit = float(jnp.std(self._representations))
        return variant.laplace * options.laplace * unit

    def _copying(self, variant: Variant) -> Fields:
        tokens = self.backbone.tokens[0] - self.backbone.prefix_tokens
        return {
            "laplace_scale": self._scale(variant),
            "copies": round(variant.copies * self.config.client.copies),
            "n_patches": round(variant.patches * self.config.client.patch_share * tokens),
            "prefix_tokens": self.backbone.prefix_tokens,
        }

    def _batches(self, labels: Any, number: int) -> int:
        return -(-len(labels) * (1 + number) // self.config.adaptation.batch_size)

    def _adapted(
        self,
        variant: Variant,
        client: Client,
        copies: split.Copies,
        labels: Any,
        stopping: Stopping,
        label_noise: Any = None,
    ) -> split.Adapted:
        """Adapts the backend to copies."""
        return split.adapt(
            jax.random.key(client.seed),
            self.backbone,
            self.server(variant.server)[1],
            copies,
            labels,
            num_classes=client.task.pool.num_classes,
            label_noise=label_noise,
            learning_rate=client.rate,
            epochs=stopping.epochs,
            patience=stopping.patience,
            batch_size=self.config.adaptation.batch_size,
        )

    def _epochs_of(self, steps: int, labels: Any, copies: split.Copies) -> int:
        return max(1, round(steps / self._batches(labels, copies.copies)))

    def _judged(self, adapted: split.Adapted, client: Client, x: jax.Array) -> float:
        """Returns the accuracy on representations of the test images."""
        starts = range(0, len(x), _BATCH)
        logits = [adapted.logits(x[start : start + _BATCH]) for start in starts]
        labels = read_column(client.task.test, "label")
        return float(models.judged(np.concatenate(logits), labels).mean())

    # --- A real epsilon --------------------------------------------------------------------------

    def _public_projection(self, dimensions: int) -> tuple[split.Projection, float]:
        """Returns the public projection of the private mode, and the clip norm: the median norm of
        public images.
        """
        projection = split.public_projection(self._representations, dimensions)
        norms = jnp.linalg.norm(split.project(projection, self._representations), axis=1)
        return projection, float(jnp.median(norms))

    def _private_release(
        self, epsilon: float, dimensions: int
    ) -> tuple[split.Projection, split.PrivateRelease]:
        projection, clip_norm = self._projection(dimensions)
        release = split.PrivateRelease.calibrated(
            epsilon=epsilon,
            delta=self.config.private.delta,
            clip_norm=clip_norm,
            num_classes=self.num_classes,
            label_share=self.config.private.label_share,
        )
        return projection, release

    def private(
        self, account: Account, client: Client, *, epsilon: float, dimensions: int
    ) -> dict[str, float]:
        """Returns the test accuracy of the private mode, and the epsilon of the client's account
        after it.
        """
        options = self.config.private
        projection, release = self._private_release(epsilon, dimensions)
        released = split.release_privately(
            account,
            release=release,
            representations=self._represent(client.few["image"]),
            labels=client.few["label"],
            projection=projection,
            seed=client.secret,
        )
        # The released features have their noise already.
        variant = Variant(laplace=0.0, patches=float(options.copies > 0))
        copying = {**self._copying(variant), "copies": options.copies}
        lifted = split.lift(projection, released.features)
        copies = split.augment_then_noise(jax.random.key(client.seed), lifted, **copying)
        matrix = split.label_noise_matrix(client.task.pool.num_classes, release.label_epsilon)
        labels = released.labels
        stopping = Stopping(self._epochs_of(options.steps, labels, copies), 0)
        adapted = self._adapted(variant, client, copies, labels, stopping, matrix)
        # The backend was adapted in the subspace of the projection only.
        test = self._represent(everything(client.task.test)["image"])
        projected = split.lift(projection, split.project(projection, test))
        accuracy = self._judged(adapted, client, projected)
        return {"accuracy": accuracy, "epsilon": account.epsilon()}

    # --- Attacks ---------------------------------------------------------------------------------

    def reconstruct(
        self,
        client: Client,
        variant: Variant | None,
        names: Sequence[str],
        account: Account | None = None,
    ) -> dict[str, attacks.Reconstruction]:
        """Returns reconstructions by the attackers `names` from a client's uploads. No variant
        means split learning.

        With an account, uploads in the published order are paid for.
        """
        key = jax.random.key(client.seed)
        if variant is None:
            front, _ = self.backbone.divide(self.params)
            uploads = np.asarray(jax.jit(self.backbone.front)(front, client.few["image"]))[None]
            # This upload has no noise, so that those who simulate noise are one attacker.
            knowledge = self._knowledge(self.backbone.front, front)
            noiseless = [name for name in names if name in ("noise-aware", *GINVER)]
            attackers = attackers_of(knowledge, noiseless, uploads, true=front, key=key)
            return self._attack(client, uploads, attackers)
        x, params = self._noisily(variant, client)
        copying, alpha = self._copying(variant), self._model_noise(variant)
        if account is not None:
            what = plan_copies(account, representations=x, **copying, label=SA)
            with Till(seed=client.secret) as till:
                uploads = till.release(what)
        else:
            upload = self._copies(variant, client, x)
            once = variant.order == "once"
            uploads = np.asarray(upload.representations)[None] if once else upload.materialized()
        shipped, _ = self.server(variant.server)
        knowledge = self._knowledge(self._extract(variant.server), shipped.params)._replace(
            model_noise=perturbed(**alpha) if alpha["alpha"] else None,
            release=simulated(variant.order, **copying),
        )
        attackers = attackers_of(knowledge, names, uploads, true=params, key=key)
        return self._attack(client, uploads, attackers)

    def _knowledge(self, extract: attacks.Extract, shipped: Any) -> Knowledge:
        options = self.config.attack
        public = self.public["image"][: options.images]
        return Knowledge(self.backbone, extract, shipped, public, options)

    def reconstruct_private(
        self, client: Client, *, epsilon: float, dimensions: int
    ) -> dict[str, attacks.Reconstruction]:
        """Returns the reconstructions of a noise-aware attacker from a private upload. The attacker
        knows the order.
        """
        projection, release = self._private_release(epsilon, dimensions)

        def simulated(key: jax.Array, x: jax.Array, copy: jax.Array) -> jax.Array:
            clipped = split.clip_representation(split.project(projection, x), release.clip_norm)
            return split.lift(
                projection, clipped + noise.gaussian(key, clipped, release.noise_scale)
            )

        x, key = self._represent(client.few["image"]), stream(client.secret, "private upload")
        simulation = attacks.Simulation(self._extract("full"), release=simulated)
        uploads = np.asarray(simulated(key, x, jnp.array(0)))[None]
        shipped, _ = self.server("full")
        attackers = {"noise-aware": attacks.Attacker(simulation, shipped.params)}
        return self._attack(client, uploads, attackers)

    def _make_extract(self, variant: ServerVariant) -> Callable[[Any, jax.Array], jax.Array]:
        frontend, _ = self.server(variant)
        return lambda params, images: split.quantized_front(
            self.backbone, frontend, images, params=params
        )

    def _attack(
        self, client: Client, uploads: np.ndarray, attackers: Mapping[str, attacks.Learner]
    ) -> dict[str, attacks.Reconstruction]:
        options = self.config.attack
        return attacks.attack(
            jax.random.key(client.seed),
            attackers,
            uploads,
            client.few["image"],
            public=self.public["image"][: options.images],
            prefix_tokens=self.backbone.prefix_tokens,
            epochs=options.epochs,
            batch_size=options.batch_size,
            perceptual=options.lpips,
        )

    # --- Costs -----------------------------------------------------------------------------------

    def cost(self, method: str) -> Fields:
        """Returns the cost of a method for a client (Table 2) with the shots of the ablations, on
        this device.
        """
        config, classes = self.config, self.num_classes
        epochs = config.adaptation.epochs
        if method in BASELINES:
            epochs = self._stopping(method).epochs
        images = config.ablation.shots * classes
        counted = costs.cost(
            COSTS[method],
            self.backbone,
            images=images,
            num_classes=classes,
            epochs=epochs,
            batch_size=config.baselines.batch_size,
            copies=config.client.copies,
            directions=config.private.dimensions[0],
        )
        measured = measure(counted.programs, images, timed=True)
        return {
            "epochs": epochs,
            "parameters": counted.parameters,
            "peak memory, MB": measured.peak_bytes / 1e6,
            "seconds": measured.seconds,
            "GFLOP": counted.total_flops / 1e9,
            "download, MB": counted.download / 1e6,
            "upload, MB": counted.upload / 1e6,
        }
