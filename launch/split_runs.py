"""One run of everything that `launch.split` compares: a method, the few images of a client, a
seed.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import split
from jaxdp.data import Examples, read_column
from jaxdp.data.selection import everything
from jaxdp.models import Pretrained
from jaxdp.privacy import Account
from jaxdp.release import Till, stream
from jaxdp.split import baselines
from jaxdp.split.copies import plan_copies
from jaxdp.transforms import noise

from . import frontend_attacks, models, results
from . import representation_attacks as attacks
from . import split_costs as costs
from .measure import measure
from .split_attackers import GINVER, Knowledge, attackers_of, perturbed, simulated
from .split_sets import Sets, Task
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


def _second_network(config: Any, images: Examples | None) -> Pretrained:
    """Returns the model of the auxiliary backend, without parameters if it is trained on images."""
    model = config.auxiliary.model
    can_train = images and model.preprocessing
    if not model.checkpoint and not can_train:
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
        models.check_recipe(config)
        self._network = models.network(config.model)
        model, preprocessing = self._network.model, self._network.preprocessing
        sets = Sets.open(config, self._network)
        self._pretraining = sets.pretraining
        self.public = everything(sets.server)
        self._auxiliary_images = sets.auxiliary or sets.pretraining
        if AUXILIARY in config.stolen:  # a missing file is noticed before hours of other cells
            self._second = _second_network(config, self._auxiliary_images)
        self.client = sets.client
        self.tuning = sets.tuning
        self.num_classes = self.client.pool.num_classes
        cut = config.cut or split.two_thirds(model)
        self.backbone = split.Backbone(model, preprocessing, cut, config.head_hidden)
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
        whole = self.backbone, self.params
        images, labels = jax.device_put((self.public["image"], self.public["label"]))
        epochs = options.epochs
        key = jax.random.key(options.seed)
        calibration_key, tuning_key = jax.random.split(key)
        if variant == "without Hilbert":
            epochs *= 2  # half the images twice as often give the same number of steps
        elif variant == "amplitude":
            donor_key = jax.random.fold_in(key, 2)
            images, labels = split.merge_amplitude_exchange(donor_key, images, labels)
        else:
            images, labels = split.merge_hilbert(images, labels)
        names = ("samples", "partition", "bits", "metric", "frontends")
        calibration = results.only(options, *names)
        if variant in ("F_0 only", "untuned"):
            calibration["frontends"] = 0
        frontends = split.calibrate_frontends(
            calibration_key, *whole, images, labels, **calibration
        )
        shipped = frontends[0]
        if variant == "untuned":
            _, back = self.backbone.divide(self.params)
            return shipped, back
        tuning = {"learning_rate": options.learning_rate, "epochs": epochs}
        return shipped, split.tune_backend(tuning_key, *whole, frontends, images, labels, **tuning)

    @functools.cached_property
    def _representations(self) -> jax.Array:
        """The representations of the server's images by the shipped frontend."""
        return self._represent(self.public["image"])

    def _represent(
        self, images: Any, variant: Variant = PUBLISHED, params: Any = None
    ) -> jax.Array:
        frontend, _ = self.server(variant.server)
        if params is None:
            params = frontend.params
        return split.represent(self.backbone, frontend, params, images)

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
        if method in (*BASELINES, "Original frontend"):
            params = self.params
        else:
            params, _ = self.server("full")
        training = self._training(client, stopping or self._stopping(method))
        adapted = baselines.adapt(
            self._baseline(method, client),
            self.backbone,
            params,
            client.few["image"],
            client.few["label"],
            batch_size=self.config.baselines.batch_size,
            key=jax.random.key(client.seed),
            **training,
        )
        test: Any = everything(client.task.test)
        accuracy = baselines.accuracy(adapted, test["image"], test["label"])
        return {"accuracy": accuracy, "epochs": adapted.epochs}

    def _training(self, client: Client, stopping: Stopping) -> Any:
        """Returns the options of a training on a client's images."""
        options = {"num_classes": client.task.pool.num_classes, "learning_rate": client.rate}
        return options | stopping._asdict()

    def _baseline(self, method: str, client: Client) -> baselines.Baseline:
        if method == OT_RANDOM:
            # The server draws an emulator for each draw of the client's images. Both seeds are
            # public.
            seed = self.config.baselines.drop_seed + client.seed
            return functools.partial(baselines.offsite_tuning, drop="random", seed=seed)
        if method in BASELINES:
            name = BASELINES[method]
            return baselines.BASELINES[name]
        return STOLEN[method] or self._auxiliary

    def _stopping(self, method: str) -> Stopping:
        """Returns the rule of a baseline. The paper gives offsite tuning half as many epochs."""
        options = self.config.baselines
        epochs = options.epochs
        if method.startswith("Offsite tuning"):
            epochs //= 2
        return Stopping(epochs, options.patience)

    @functools.cached_property
    def _auxiliary(self) -> baselines.Baseline:
        """The last blocks of another public model, trained here on the same images or read from a
        checkpoint.
        """
        config = self.config.auxiliary
        images: Any = self._auxiliary_images
        second = models.source_model(
            config, lambda: images, self.root, "auxiliary", untrained=self._second
        )
        cut = config.cut or split.two_thirds(second.model)
        backbone = split.Backbone(second.model, second.preprocessing, cut)
        return frontend_attacks.probe_auxiliary_backend(backbone, second.params)

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
        images = everything(client.task.test)["image"]
        test = self._represent(images, variant, params)
        key = stream(client.secret, "test images")
        noisy = test + noise.laplace(key, test, self._scale(variant))
        return {
            "accuracy": self._judged(adapted, client, test),
            "noisy": self._judged(adapted, client, noisy),
            "epochs": adapted.epochs,
        }

    def _noisily(self, variant: Variant, client: Client) -> tuple[jax.Array, Any]:
        """Returns representations of a client's images, exact but for its noisy frontend, and its
        parameters.
        """
        frontend, _ = self.server(variant.server)
        key = client.key("frontend")
        params = split.perturb_params(key, frontend.params, **self._model_noise(variant))
        return self._represent(client.few["image"], variant, params), params

    def _copies(self, variant: Variant, client: Client, x: jax.Array) -> split.Copies:
        key = client.key("copies")
        options = self._copying(variant)
        if variant.order == "published":
            return split.augment_then_noise(key, x, **options)
        return split.noise_then_augment(key, x, **options)

    def _model_noise(self, variant: Variant) -> Fields:
        options = self.config.client
        return {"alpha": variant.alpha * options.alpha, "mode": options.noise_mode}

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
        options = self.config.client
        prefix_tokens = self.backbone.prefix_tokens
        tokens, _ = self.backbone.tokens
        patches = variant.patches * options.patch_share * (tokens - prefix_tokens)
        return {
            "laplace_scale": self._scale(variant),
            "copies": round(variant.copies * options.copies),
            "n_patches": round(patches),
            "prefix_tokens": prefix_tokens,
        }

    def _batches(self, labels: Any, copies: int) -> int:
        images = len(labels) * (1 + copies)
        return -(-images // self.config.adaptation.batch_size)

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
        key = jax.random.key(client.seed)
        _, back = self.server(variant.server)
        return split.adapt(
            key,
            self.backbone,
            back,
            copies,
            labels,
            label_noise=label_noise,
            batch_size=self.config.adaptation.batch_size,
            **self._training(client, stopping),
        )

    def _epochs_of(self, steps: int, labels: Any, copies: split.Copies) -> int:
        return max(1, round(steps / self._batches(labels, copies.copies)))

    def _judged(self, adapted: split.Adapted, client: Client, x: jax.Array) -> float:
        """Returns the accuracy on representations of the test images."""
        batches = []
        for start in range(0, len(x), _BATCH):
            logits = adapted.logits(x[start : start + _BATCH])
            batches.append(logits)
        labels = read_column(client.task.test, "label")
        correct = models.judged(np.concatenate(batches), labels)
        return float(correct.mean())

    # --- A real epsilon --------------------------------------------------------------------------

    def _public_projection(self, dimensions: int) -> tuple[split.Projection, float]:
        """Returns the public projection of the private mode, and the clip norm: the median norm of
        public images.
        """
        projection = split.public_projection(self._representations, dimensions)
        projected = split.project(projection, self._representations)
        norms = jnp.linalg.norm(projected, axis=1)
        return projection, float(jnp.median(norms))

    def _private_release(
        self, epsilon: float, dimensions: int
    ) -> tuple[split.Projection, split.PrivateRelease]:
        options = self.config.private
        projection, clip_norm = self._projection(dimensions)
        release = split.PrivateRelease.calibrated(
            epsilon=epsilon,
            delta=options.delta,
            clip_norm=clip_norm,
            num_classes=self.num_classes,
            label_share=options.label_share,
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
        copying = self._copying(variant) | {"copies": options.copies}
        lifted = split.lift(projection, released.features)
        key = jax.random.key(client.seed)
        copies = split.augment_then_noise(key, lifted, **copying)
        matrix = split.label_noise_matrix(client.task.pool.num_classes, release.label_epsilon)
        labels = released.labels
        epochs = self._epochs_of(options.steps, labels, copies)
        adapted = self._adapted(variant, client, copies, labels, Stopping(epochs, 0), matrix)
        # The backend was adapted in the subspace of the projection only.
        images = everything(client.task.test)["image"]
        projected = split.project(projection, self._represent(images))
        test = split.lift(projection, projected)
        accuracy = self._judged(adapted, client, test)
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
        if variant is None:
            return self._reconstruct_noiseless(client, names)
        x, params = self._noisily(variant, client)
        copying = self._copying(variant)
        model_noise = self._model_noise(variant)
        if account is not None:
            what = plan_copies(account, representations=x, **copying, label=SA)
            with Till(seed=client.secret) as till:
                uploads = till.release(what)
        else:
            upload = self._copies(variant, client, x)
            if variant.order == "once":
                uploads = np.asarray(upload.representations)[None]
            else:
                uploads = upload.materialized()
        shipped, _ = self.server(variant.server)
        knowledge = self._knowledge(self._extract(variant.server), shipped.params)
        knowledge = knowledge._replace(release=simulated(variant.order, **copying))
        if model_noise["alpha"]:
            knowledge = knowledge._replace(model_noise=perturbed(**model_noise))
        key = jax.random.key(client.seed)
        attackers = attackers_of(knowledge, names, uploads, true=params, key=key)
        return self._attack(client, uploads, attackers)

    def _reconstruct_noiseless(
        self, client: Client, names: Sequence[str]
    ) -> dict[str, attacks.Reconstruction]:
        """Returns reconstructions from the upload of split learning."""
        front, _ = self.backbone.divide(self.params)
        representations = jax.jit(self.backbone.front)(front, client.few["image"])
        uploads = np.asarray(representations)[None]
        # This upload has no noise, so that those who simulate noise are one attacker.
        noiseless = [name for name in names if name in ("noise-aware", *GINVER)]
        knowledge = self._knowledge(self.backbone.front, front)
        key = jax.random.key(client.seed)
        attackers = attackers_of(knowledge, noiseless, uploads, true=front, key=key)
        return self._attack(client, uploads, attackers)

    @property
    def _attackers_images(self) -> np.ndarray:
        images: np.ndarray = self.public["image"][: self.config.attack.images]
        return images

    def _knowledge(self, extract: attacks.Extract, shipped: Any) -> Knowledge:
        return Knowledge(
            self.backbone, extract, shipped, self._attackers_images, self.config.attack
        )

    def reconstruct_private(
        self, client: Client, *, epsilon: float, dimensions: int
    ) -> dict[str, attacks.Reconstruction]:
        """Returns the reconstructions of a noise-aware attacker from a private upload. The attacker
        knows the order.
        """
        projection, release = self._private_release(epsilon, dimensions)

        def simulated(key: jax.Array, x: jax.Array, copy: jax.Array) -> jax.Array:
            projected = split.project(projection, x)
            clipped = split.clip_representation(projected, release.clip_norm)
            noisy = clipped + noise.gaussian(key, clipped, release.noise_scale)
            return split.lift(projection, noisy)

        x = self._represent(client.few["image"])
        key = stream(client.secret, "private upload")
        simulation = attacks.Simulation(self._extract("full"), release=simulated)
        upload = simulated(key, x, jnp.array(0))
        uploads = np.asarray(upload)[None]
        shipped, _ = self.server("full")
        attackers = {"noise-aware": attacks.Attacker(simulation, shipped.params)}
        return self._attack(client, uploads, attackers)

    def _make_extract(self, variant: ServerVariant) -> Callable[[Any, jax.Array], jax.Array]:
        frontend, _ = self.server(variant)

        def extract(params: Any, images: jax.Array) -> jax.Array:
            return split.quantized_front(self.backbone, frontend, images, params=params)

        return extract

    def _attack(
        self, client: Client, uploads: np.ndarray, attackers: Mapping[str, attacks.Learner]
    ) -> dict[str, attacks.Reconstruction]:
        options = self.config.attack
        return attacks.attack(
            jax.random.key(client.seed),
            attackers,
            uploads,
            client.few["image"],
            public=self._attackers_images,
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
        job = {
            "images": images,
            "num_classes": classes,
            "epochs": epochs,
            "batch_size": config.baselines.batch_size,
            "copies": config.client.copies,
            "directions": config.private.dimensions[0],
        }
        counted = costs.cost(COSTS[method], self.backbone, **job)
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
