"""One run of everything that an experiment on Split Adaptation compares: a method, a client's few images, a seed.

A `Study` holds what does not depend on the client (the setting, the server's part of Split Adaptation in its variants)
and makes it when it is first needed.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.audit import representations as attacks
from jaxdp.models.public import public_model, trained
from jaxdp.privacy import Account
from jaxdp.release import Till, stream
from jaxdp.split import baselines
from jaxdp.split.backbone import Backbone, two_thirds
from jaxdp.split.client import perturb_params, represent
from jaxdp.split.copies import Copies, augment_then_noise, noise_then_augment, plan_copies
from jaxdp.split.costs import cost
from jaxdp.split.noisy_upload import (
    PrivateRelease,
    Projection,
    clip_representation,
    label_noise_matrix,
    lift,
    project,
    public_projection,
    release_privately,
)
from jaxdp.split.quantization import QuantizedFrontend, quantized_front
from jaxdp.split.server import Adapted, adapt, calibrate_frontends, merge_hilbert, tune_backend
from jaxdp.split.tasks import Labelled, Setting, Task, as_arrays, load
from jaxdp.transforms import noise

ServerVariant = Literal["full", "without Hilbert", "F_0 only", "untuned"]


class Variant(NamedTuple):
    """A way to run Split Adaptation; the defaults are the paper's.

    Attributes:
      server: "full"; "without Hilbert" augmentation; the backend tuned with "F_0 only"; or "untuned".
      order: noise on every copy ("published"), or once before augmentation ("once").
      laplace: scale b of the noise in units of the config's.
      alpha: of the noise on the frontend, in units of the config's.
      patches: whether patches are replaced.
      copies: how many augmented copies there are in units of the config's.
    """

    server: ServerVariant = "full"
    order: Literal["published", "once"] = "published"
    laplace: float = 1.0
    alpha: float = 1.0
    patches: bool = True
    copies: float = 1.0


# Rows of Table 2.
COSTS = {
    "Linear probing": "lp",
    "Fine-tuning": "ft",
    "LN-tune": "ln",
    "Split learning": "sl",
    "Offsite tuning": "ot",
    "Split Adaptation": "sa",
    "SA, noise once": "sa_noise_once",
    "SA, private": "sa_private",
}
PUBLISHED, ONCE = Variant(), Variant(order="once")


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """What an experiment's config describes.

    Attributes:
      config: an `ml_collections.ConfigDict`, as in `configs/split/digits.py`.
      root: where trained backbones are kept.
    """

    config: Any
    root: pathlib.Path

    @functools.cached_property
    def setting(self) -> Setting:
        """The server's model and images, the client's task, and the one to tune on."""
        return load(self.config, self.root)

    @functools.cached_property
    def patches(self) -> int:
        """How many patches of an image are replaced in a copy."""
        backbone = self.setting.backbone
        return round(self.config.client.patch_share * (backbone.tokens[0] - backbone.prefix_tokens))

    @functools.cached_property
    def unit(self) -> float:
        """What noise scales of the config are multiples of: 1, or the standard deviation of PUBLIC representations."""
        if self.config.client.laplace_unit == "representation":
            return 1.0
        return float(jnp.std(self.public_representations))

    @functools.cached_property
    def public_representations(self) -> jax.Array:
        """Those of the server's images under the frontend that it ships."""
        frontend, _ = self.server("full")
        return represent(self.setting.backbone, frontend, frontend.params, self.setting.server.images)

    @functools.lru_cache  # noqa: B019 - one study per process
    def server(self, variant: ServerVariant) -> tuple[QuantizedFrontend, dict[str, Any]]:
        """The frontend that is shipped, and the tuned parameters of the backend."""
        setting, options = self.setting, self.config.server
        images, labels = as_arrays(setting.server)
        if variant != "without Hilbert":
            images, labels = merge_hilbert(images, labels)
        calibration_key, tuning_key = jax.random.split(jax.random.key(options.seed))
        frontends = calibrate_frontends(
            calibration_key,
            setting.backbone,
            setting.params,
            images,
            labels,
            frontends=options.frontends if variant in ("full", "without Hilbert") else 0,
            samples=options.samples,
            partition=options.partition,
            bits=options.bits,
            metric=options.metric,
        )
        if variant == "untuned":
            return frontends[0], setting.backbone.divide(setting.params)[1]
        back = tune_backend(
            tuning_key,
            setting.backbone,
            setting.params,
            frontends,
            images,
            labels,
            learning_rate=options.learning_rate,
            # Half the images, twice as often: as many steps.
            epochs=options.epochs * (2 if variant == "without Hilbert" else 1),
        )
        return frontends[0], back

    # --- Methods ------------------------------------------------------------------------------------------------

    def baseline(self, name: str, task: Task, few: Labelled, *, learning_rate: float, seed: int) -> dict[str, float]:
        """Test accuracy of one of `baselines.BASELINES` or of a stolen model (Table 3)."""
        setting, options = self.setting, self.config.baselines
        stolen: dict[str, tuple[Any, Any]] = {
            "quantised frontend": (baselines.probe_quantized_frontend, lambda: self.server("full")[0]),
            "original frontend": (baselines.probe_original_frontend, lambda: setting.params),
            "tuned frontend": (baselines.tune_quantized_frontend, lambda: self.server("full")[0]),
        }
        if name == "auxiliary backend":
            stolen[name] = (self._auxiliary(), lambda: self.server("full")[0])
        method, params = stolen[name] if name in stolen else (baselines.BASELINES[name], lambda: setting.params)
        adapted = baselines.adapt(
            method,
            setting.backbone,
            params(),
            *few,
            num_classes=task.num_classes,
            learning_rate=learning_rate,
            epochs=self._epochs(name),
            batch_size=options.batch_size,
            key=jax.random.key(seed),
        )
        return {"accuracy": baselines.accuracy(adapted, *task.test)}

    def _epochs(self, baseline: str) -> int:
        """The paper gives offsite tuning half as many."""
        return self.config.baselines.epochs // (2 if baseline.startswith("ot") else 1)

    def represent_noisily(self, few: Labelled, variant: Variant, seed: int) -> tuple[jax.Array, Any]:
        """Representations of a client's images, exact but for its noisy frontend, and the parameters of that."""
        frontend, _ = self.server(variant.server)
        options = self.config.client
        key = stream(_secret(seed), "frontend", impl="threefry2x32")
        params = perturb_params(key, frontend.params, alpha=variant.alpha * options.alpha, mode=options.noise_mode)
        return represent(self.setting.backbone, frontend, params, few.images), params

    def upload(self, few: Labelled, variant: Variant, seed: int) -> tuple[Copies, Any]:
        """What a client sends, and the parameters of its noisy frontend."""
        representations, params = self.represent_noisily(few, variant, seed)
        make = augment_then_noise if variant.order == "published" else noise_then_augment
        key = stream(_secret(seed), "copies", impl="threefry2x32")
        return make(key, representations, **self._copying(variant)), params

    def _copying(self, variant: Variant) -> dict[str, Any]:
        """How copies are made of representations."""
        options = self.config.client
        return {
            "laplace_scale": variant.laplace * options.laplace * self.unit,
            "copies": round(variant.copies * options.copies),
            "n_patches": self.patches if variant.patches else 0,
            "prefix_tokens": self.setting.backbone.prefix_tokens,
        }

    def split_adaptation(
        self, variant: Variant, task: Task, few: Labelled, *, learning_rate: float, seed: int
    ) -> dict[str, float]:
        """Test accuracy of Split Adaptation, and that with Laplace noise on the test images too.

        All variants take the same number of steps, whatever the number of copies.
        """
        frontend, back = self.server(variant.server)
        copies, params = self.upload(few, variant, seed)
        steps = self.config.adaptation.epochs * self._batches(few, self.config.client.copies)
        epochs = steps / self._batches(few, copies.copies)
        adapted = self._adapt(back, copies, few.labels, task, learning_rate, seed, epochs=epochs)
        test = represent(self.setting.backbone, frontend, params, task.test.images)
        key = stream(_secret(seed), "test images")
        noisy = test + noise.laplace(key, test, variant.laplace * self.config.client.laplace * self.unit)
        return {"accuracy": _accuracy(adapted, test, task), "noisy": _accuracy(adapted, noisy, task)}

    @functools.lru_cache  # noqa: B019 - one study per process
    def projection(self, dimensions: int) -> tuple[Projection, float]:
        """The public projection of the private mode, and the clip norm: the median norm of public images."""
        projection = public_projection(self.public_representations, dimensions)
        norms = jnp.linalg.norm(project(projection, self.public_representations), axis=1)
        return projection, float(jnp.median(norms))

    def private(
        self,
        account: Account,
        task: Task,
        few: Labelled,
        *,
        epsilon: float,
        dimensions: int,
        learning_rate: float,
        seed: int,
    ) -> dict[str, float]:
        """Test accuracy of the private mode, and the epsilon that the client's account shows then."""
        options = self.config.private
        frontend, back = self.server("full")
        projection, release = self._private_release(epsilon, dimensions)
        released = release_privately(
            account,
            release=release,
            representations=represent(self.setting.backbone, frontend, frontend.params, few.images),
            labels=few.labels,
            projection=projection,
            seed=_secret(seed),
        )
        copies = augment_then_noise(
            jax.random.key(seed),
            lift(projection, released.features),
            laplace_scale=0.0,
            copies=options.copies,
            n_patches=self.patches if options.copies else 0,
            prefix_tokens=self.setting.backbone.prefix_tokens,
        )
        label_noise = label_noise_matrix(task.num_classes, release.label_epsilon)
        epochs = options.steps / self._batches(few, options.copies)
        adapted = self._adapt(
            back, copies, released.labels, task, learning_rate, seed, epochs=epochs, label_noise=label_noise
        )
        test = represent(self.setting.backbone, frontend, frontend.params, task.test.images)
        # The backend has seen the subspace of the projection only.
        test = lift(projection, project(projection, test))
        return {"accuracy": _accuracy(adapted, test, task), "epsilon": account.epsilon()}

    def _private_release(self, epsilon: float, dimensions: int) -> tuple[Projection, PrivateRelease]:
        projection, clip_norm = self.projection(dimensions)
        release = PrivateRelease.calibrated(
            epsilon=epsilon,
            delta=self.config.private.delta,
            clip_norm=clip_norm,
            num_classes=self.setting.client.num_classes,
            label_share=self.config.private.label_share,
        )
        return projection, release

    def _batches(self, few: Labelled, copies: int) -> int:
        """Steps of one epoch."""
        return -(-len(few.labels) * (1 + copies) // self.config.adaptation.batch_size)

    def _adapt(
        self,
        back: Any,
        copies: Copies,
        labels: Any,
        task: Task,
        learning_rate: float,
        seed: int,
        *,
        epochs: float,
        label_noise: Any = None,
    ) -> Adapted:
        options = self.config.adaptation
        return adapt(
            jax.random.key(seed),
            self.setting.backbone,
            back,
            copies,
            labels,
            num_classes=task.num_classes,
            label_noise=label_noise,
            learning_rate=learning_rate,
            epochs=max(1, round(epochs)),
            batch_size=options.batch_size,
        )

    # --- Attacks ------------------------------------------------------------------------------------------------

    def reconstruct(
        self,
        few: Labelled,
        variant: Variant | None,
        *,
        names: tuple[str, ...],
        seed: int,
        account: Account | None = None,
    ) -> dict[str, attacks.Reconstruction]:
        """What the attackers `names` make of a client's uploads; of those of split learning for no variant.

        With an account, uploads in the published order are paid for.
        """
        backbone, options = self.setting.backbone, self.config.attack
        if variant is None:
            front, _ = backbone.divide(self.setting.params)
            uploads = np.asarray(_front(backbone, front, few.images))[None]
            # There is no noise to know of.
            attackers = {"noise-aware": attacks.Attacker(_plain(backbone), front)}
        else:
            frontend, _ = self.server(variant.server)
            if account is None:
                copies, params = self.upload(few, variant, seed)
                uploads = _uploads(copies, variant)
            else:
                x, params = self.represent_noisily(few, variant, seed)
                what = plan_copies(account, representations=x, **self._copying(variant), label="Split Adaptation")
                with Till(seed=_secret(seed)) as till:
                    uploads = till.release(what)
            attackers = attacks.standard_attackers(
                self._extract(variant.server),
                shipped=frontend.params,
                true=params,
                model_noise=self._model_noise(variant),
                release=self._release(variant),
                copies=len(uploads),
            )
            if len(uploads) == 1:  # it has no median
                del attackers["aggregating"]
        return attacks.attack(
            jax.random.key(seed),
            {name: attackers[name] for name in names if name in attackers},
            uploads,
            few.images,
            public=self.setting.server.images[: options.images],
            prefix_tokens=backbone.prefix_tokens,
            epochs=options.epochs,
            batch_size=options.batch_size,
        )

    def reconstruct_private(
        self, few: Labelled, *, epsilon: float, dimensions: int, seed: int
    ) -> dict[str, attacks.Reconstruction]:
        """What a noise-aware attacker makes of a private upload of which he even knows the order."""
        options, prefix = self.config.attack, self.setting.backbone.prefix_tokens
        frontend, _ = self.server("full")
        projection, release = self._private_release(epsilon, dimensions)

        def simulated(key: jax.Array, x: jax.Array, copy: jax.Array) -> jax.Array:
            clipped = clip_representation(project(projection, x), release.clip_norm)
            return lift(projection, clipped + noise.gaussian(key, clipped, release.noise_scale))

        x = represent(self.setting.backbone, frontend, frontend.params, few.images)
        uploads = simulated(stream(_secret(seed), "private upload"), x, jnp.array(0))
        simulation = attacks.Simulation(self._extract("full"), release=simulated)
        return attacks.attack(
            jax.random.key(seed),
            {"noise-aware": attacks.Attacker(simulation, frontend.params)},
            np.asarray(uploads)[None],
            few.images,
            public=self.setting.server.images[: options.images],
            prefix_tokens=prefix,
            epochs=options.epochs,
            batch_size=options.batch_size,
        )

    @functools.lru_cache  # noqa: B019 - one object per variant, so that decoders compile once
    def _extract(self, server: ServerVariant) -> Callable[[Any, jax.Array], jax.Array]:
        frontend, _ = self.server(server)
        return lambda params, images: quantized_front(self.setting.backbone, frontend, images, params=params)

    @functools.lru_cache  # noqa: B019
    def _model_noise(self, variant: Variant) -> Callable[[jax.Array, Any], Any] | None:
        options = self.config.client
        if not variant.alpha * options.alpha:
            return None
        alpha = variant.alpha * options.alpha
        return lambda key, params: perturb_params(key, params, alpha=alpha, mode=options.noise_mode)

    def costs(self) -> list[dict[str, Any]]:
        """What each method costs one client with the shots of the ablations (Table 2), measured on this device."""
        from launch.measure import measure

        config, classes = self.config, self.setting.client.num_classes
        rows = []
        methods = {k: v for k, v in COSTS.items() if k in config.methods or v == "sa_private"}
        for label, method in methods.items():
            epochs = config.adaptation.epochs if method.startswith("sa") else self._epochs(method)
            found = cost(
                method,
                self.setting.backbone,
                images=config.ablation.shots * classes,
                num_classes=classes,
                epochs=epochs,
                batch_size=config.baselines.batch_size,
                copies=config.client.copies,
                directions=config.private.dimensions[0],
            )
            measured: Any = measure(found.programs, config.ablation.shots * classes, timed=True)
            rows.append(
                {
                    "Method": label,
                    "epochs": epochs,
                    "parameters": found.parameters,
                    "peak memory, MB": measured.peak_bytes / 1e6,
                    "seconds": measured.seconds,
                    "GFLOP": found.total_flops / 1e9,
                    "download, MB": found.download / 1e6,
                    "upload, MB": found.upload / 1e6,
                }
            )
        return rows

    @functools.lru_cache  # noqa: B019
    def _release(self, variant: Variant) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        """What a client uploads as copy number `copy` of a batch of images, for attackers to simulate."""
        scale = variant.laplace * self.config.client.laplace * self.unit
        prefix, patches = self.setting.backbone.prefix_tokens, self.patches if variant.patches else 0

        def release(key: jax.Array, x: jax.Array, copy: jax.Array) -> jax.Array:
            if variant.order == "once":
                return x + noise.laplace(key, x, scale)
            copies = augment_then_noise(key, x, laplace_scale=scale, copies=1, n_patches=patches, prefix_tokens=prefix)
            images = jnp.arange(len(x), dtype=jnp.int32)
            return copies.batch(images, jnp.full_like(images, copy))

        return release

    @functools.lru_cache  # noqa: B019 - one study per process
    def _auxiliary(self) -> baselines.Baseline:
        """The last blocks of another public model, trained here on the same images or read from a checkpoint."""
        config = self.config.auxiliary
        model = public_model(config.model)
        if not config.model.checkpoint:
            if self.setting.pretraining is None:
                raise ValueError("config.auxiliary.model.checkpoint must be given if the backbone is from a checkpoint")
            model = trained(model, self.setting.pretraining, config.train, self.root / "auxiliary.safetensors")
        cut = config.cut or two_thirds(model.model)
        return baselines.probe_auxiliary_backend(Backbone(model.model, model.preprocessing, cut), model.params)


def _uploads(copies: Copies, variant: Variant) -> np.ndarray:
    """All that leaves the client, [c, n, T, D]."""
    return np.asarray(copies.representations)[None] if variant.order == "once" else copies.materialized()


def _secret(seed: int) -> bytes:
    """What stands for the secret of a client in an experiment that can be repeated."""
    return seed.to_bytes(16, "little")


@functools.partial(jax.jit, static_argnums=0)
def _front(backbone: Backbone, params: Any, images: jax.Array) -> jax.Array:
    return backbone.front(params, images)


@functools.lru_cache
def _plain(backbone: Backbone) -> attacks.Simulation:
    return attacks.Simulation(backbone.front)


def _accuracy(adapted: Adapted, representations: jax.Array, task: Task) -> float:
    size = 256
    parts = [adapted.logits(representations[i : i + size]) for i in range(0, len(representations), size)]
    return float(np.mean(np.concatenate(parts).argmax(1) == task.test.labels))
