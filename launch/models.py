"""Which network a study uses. All configs describe it with the same fields.

A *model* has the fields

    name, options  as in `jaxdp.models.create`
    num_classes    only where the data does not say it
    preprocessing  fields of a `Preprocessing`: side of the images, mean and std of each channel;
                   () or {} for tokens, and for the features of tables
    checkpoint     a public file in one of the namings of `jaxdp.models.load_checkpoint`; "" or
                   left out for none
    naming         of the checkpoint, "auto" by default

Studies that fine-tune one model also read

    trainable      "all", "head", "norms", "lora" or a regular expression, see
                   `jaxdp.models.trainable`
    lora           rank, and `layers`, see `jaxdp.models.with_lora`. A rank of 0 adds nothing
    features       of a model of which only the head is trained, see `launch/frozen.py`
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import data
from jaxdp.data import Examples
from jaxdp.data.labels import judge, warn_if_not_finite
from jaxdp.data.protocol import inputs_of
from jaxdp.models import (
    LanguageModel,
    Preprocessing,
    Pretrained,
    create,
    load_checkpoint,
    load_params,
    save_params,
    trainable,
    with_lora,
)
from jaxdp.models.checkpoints import blank_inputs
from jaxdp.models.preprocessing import Vectors
from jaxdp.models.training import fit_public
from jaxdp.report import progress_bar
from jaxdp.transforms import losses

from . import frame, optimizers
from .settings import named

Params = Any
_FIXED = ("scattering",)  # networks whose only parameters are those of the head


def network(
    config: Any,
    num_classes: int | None = None,
    *,
    new_head: bool = False,
    width: int = 0,
) -> Pretrained:
    """Returns the network of a config, on images in [0, 1]. It has no parameters if its backbone is
    untrained.

    Args:
      config: The `model` part of a study's config, see above.
      num_classes: The number of logits. The default is config.num_classes.
      new_head: Whether a checkpoint has other classes, see `jaxdp.models.load_checkpoint`.
      width: The number of features of a table, which takes the place of images. 0 for none.

    Raises:
      ValueError: The parts do not fit each other.
      FileNotFoundError: The checkpoint does not exist.
    """
    classes = config.num_classes if num_classes is None else num_classes
    with named("model", config), named("model.preprocessing", config.preprocessing or ()):
        options = {name: _hashable(value) for name, value in dict(config.options).items()}
        model = create(config.name, num_classes=classes, **options)
        preprocessing: Any = Vectors(width) if width else None
        if config.preprocessing:
            if not hasattr(config.preprocessing, "items"):
                raise ValueError(
                    "config.model.preprocessing must have the fields size, mean and std, got "
                    f"{config.preprocessing!r}. Or leave it empty."
                )
            preprocessing = Preprocessing(**config.preprocessing)
    if config.get("checkpoint", ""):
        return load_checkpoint(
            config.checkpoint,
            model=model,
            naming=config.get("naming", "auto"),
            preprocessing=preprocessing,
            new_head=new_head,
        )
    if preprocessing is None and not isinstance(model, LanguageModel):
        raise ValueError(
            "config.model.preprocessing must be given to train a source model, for example a size "
            "and mean."
        )
    untrained = _untrained(model, preprocessing)
    if config.name in _FIXED:
        return dataclasses.replace(untrained, params=fresh(untrained, 0))
    return untrained


def _hashable(value: Any) -> Any:
    """Returns an option with tuples in place of the lists of a config that was read from JSON."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


# A compiled function of a network is known by the object. So equal networks are one, which the
# cells of a study and the stages of a lifecycle share.
@functools.lru_cache(maxsize=32)
def _untrained(model: nn.Module, preprocessing: Any) -> Pretrained:
    """Returns a network without parameters."""
    return Pretrained(model, {}, preprocessing)


def has_backbone(config: Any) -> bool:
    """Returns whether everything but the head of a config's network is given: by a checkpoint, or
    by its formulas.
    """
    return bool(config.get("checkpoint", "")) or config.name in _FIXED


def adapted(
    network: Pretrained, config: Any, *, seed: int
) -> tuple[Pretrained, Callable[[str, Any], bool] | None]:
    """Returns the network with LoRA factors if the `model` part of a config has a rank, and what is
    trained of it.

    The second is the argument `trainable` of `jaxdp.finetune.dp_sgd`, None for all. The seed is
    that of new parameters.

    Raises:
      ValueError: No layer or no parameter matches, or there is a rank without a checkpoint.
    """
    if config.lora.rank:
        if not network.params:
            raise ValueError(
                "config.model.lora.rank must be 0 without config.model.checkpoint, which LoRA "
                "adapts."
            )
        with named("model.lora", config.lora):
            network = with_lora(
                network, rank=config.lora.rank, layers=config.lora.layers, seed=seed
            )
    with named("model", config):
        chosen = trainable(config.trainable, fresh(network, seed))
    return network, None if config.trainable == "all" else chosen


def resize(network: Pretrained, source: Examples) -> Examples:
    """Returns a source whose images have the side and channels that the network takes. Features of
    tables stay as they are.
    """
    if isinstance(network.preprocessing, Vectors):
        return source
    return data.resize_images(source, network.preprocessing.size, len(network.preprocessing.mean))


def with_classes(network: Pretrained, num_classes: int) -> Pretrained:
    """Returns the network with another number of logits, without parameters."""
    return dataclasses.replace(
        network, model=network.model.clone(num_classes=num_classes), params={}
    )


def fresh(network: Pretrained, seed: int) -> Params:
    """Returns the parameters of the network's checkpoint, or initial ones if it has none."""
    if network.params:
        return network.params
    inputs = blank_inputs(network.preprocessing)
    return _initial(network.model, jax.random.key(seed), inputs)["params"]


# Equal models share one program. A study makes its model for several cells.
_initial = jax.jit(nn.Module.init, static_argnums=0)


def loss(network: Pretrained) -> Callable[[Params, Any], jax.Array]:
    """Returns the cross entropy of one example, {"image" or "features", "label"}, or of the next
    tokens, {"tokens"}.
    """

    def cross_entropy(params: Params, example: Mapping[str, jax.Array]) -> jax.Array:
        if "tokens" in example:
            tokens = example["tokens"]
            return losses.next_token(network.apply_fn(params, tokens[None, :-1])[0], tokens[1:])
        inputs = example["image"] if "image" in example else example["features"]
        logits = network.apply_fn(params, inputs[None])[0]
        if "likelihood" in example:  # of a noisy label (`jaxdp.labels.NoisyLabels.corrected`)
            return losses.corrected_cross_entropy(logits, example["likelihood"])
        return losses.softmax_cross_entropy(logits, example["label"])

    return cross_entropy


def logits(
    network: Pretrained, params: Params, source: Examples, *, batch_size: int = 500
) -> np.ndarray:
    """Returns the logits of all images of a source, float32 [n, C]."""
    of_images = functools.partial(_logits, network, params)
    return outputs(of_images, source, batch_size=batch_size, label="logits")


@functools.partial(jax.jit, static_argnums=0)  # sources of one size share a program
def _logits(network: Pretrained, params: Params, images: jax.Array) -> jax.Array:
    return network.apply_fn(params, images)


def right(network: Pretrained, params: Params, source: Any) -> np.ndarray:
    """Returns whether the largest logit of each record is at its label, bool [n]. Nothing is
    charged.
    """
    return judged(logits(network, params, source), data.read_column(source, "label"))


def judged(logits: np.ndarray, labels: Any) -> np.ndarray:
    """Returns whether each public record is answered rightly, bool [n]. It warns of logits that are
    not finite.
    """
    verdict = judge(logits, np.asarray(labels))
    not_finite = int((~verdict.finite).sum())
    warn_if_not_finite(not_finite, len(verdict.finite), stacklevel=4)
    return np.asarray(verdict.correct)


def outputs(
    function: Callable[[Any], Any], source: Examples, *, batch_size: int, label: str
) -> np.ndarray:
    """Returns what a compiled function, inputs [B, ...] -> [B, ...], makes of all records of a
    source, [n, ...].
    """
    batches, masks = data.pad_to_physical(np.arange(len(source)), min(batch_size, len(source)))
    bar = progress_bar(batches, label=label, unit="batch")
    filled: Any = None  # filled batch by batch, because features of many images take gigabytes
    start = 0
    for rows, mask in zip(bar, masks, strict=True):
        output = np.asarray(function(inputs_of(source.gather(rows))))[mask]
        if filled is None:
            filled = np.empty((len(source), *output.shape[1:]), output.dtype)
        filled[start : start + len(output)] = output
        start += len(output)
    return filled


def train(
    network: Pretrained,
    params: Params,
    source: Examples,
    how: Any,
    *,
    seed: int,
    optimizer: Callable[..., optax.GradientTransformation] = optax.adam,
    augment: Any = None,
    label: str,
) -> Params:
    """Returns parameters trained without privacy, for public images and for references.

    Args:
      network: As in `network`.
      params: The initial parameters.
      source: The images to train on.
      how: Has steps, batch_size and learning_rate, which decays as a cosine.
      seed: The seed of the order of the images and of their augmentation.
      optimizer: Takes the schedule of the learning rate.
      augment, label: As in `jaxdp.models.fit_public`.
    """
    return fit_public(
        loss(network),
        params,
        source,
        optimizer(optax.cosine_decay_schedule(how.learning_rate, how.steps)),
        steps=how.steps,
        batch_size=how.batch_size,
        seed=seed.to_bytes(16, "little"),
        augment=augment,
        label=label,
    )


def adam_on(
    rate: Any, *, chosen: Callable[[str, Any], bool] | None
) -> optax.GradientTransformation:
    """Returns Adam for the chosen parameters (None for all). The others keep their values."""
    if chosen is None:
        return optax.adam(rate)

    def is_chosen(path: Any, leaf: Any) -> bool:
        return chosen(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)

    def labels(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(is_chosen, params)

    return optax.partition({True: optax.adam(rate), False: optax.set_to_zero()}, labels)


def trained(
    network: Pretrained,
    images: Callable[[], Examples],
    how: Any,
    path: pathlib.Path,
    *,
    seed: int,
    label: str = "source model",
    **options: Any,
) -> Pretrained:
    """Returns the network with the parameters of its checkpoint or of `path`. Trains them and
    writes `path` if needed.

    Args:
      network: As in `network`.
      images: Returns PUBLIC images to train on. It is called only if `path` does not exist.
      how, seed, label, **options: As in `train`. The seed also gives the initial parameters.
      path: A .safetensors file.
    """
    if network.params:
        return network

    def write() -> None:
        start = fresh(network, seed)
        params = train(network, start, images(), how, seed=seed, label=label, **options)
        save_params(path, params)

    frame.make_once(path, write)
    return dataclasses.replace(network, params=load_params(path))


def check_recipe(config: Any) -> None:
    """Raises ValueError for an optimizer or a schedule of `config.train` that does not exist."""
    if "optimizer" in config.train:
        optimizers.optimizer(config.train, "train")


def source_model(
    config: Any,
    images: Callable[[], Examples],
    root: pathlib.Path,
    name: str = "source",
    *,
    untrained: Pretrained | None = None,
    number: int = 0,
) -> Pretrained:
    """Returns the model of a config with parts `model` and `train`, trained once in `root` if it
    has no checkpoint.

    config.train has steps, batch_size, learning_rate, crop_padding (of random crops and flips, 0
    for neither) and init_seed, to which `number` is added. It may have the fields of
    `launch/optimizers.py`. The default is AdamW with a cosine schedule. `untrained` is
    `network(config.model)`, if the caller has it.
    """
    padding = config.train.crop_padding

    def augment(key: jax.Array, example: Any) -> Any:
        return {**example, "image": data.augment(key, example["image"], padding=padding)}

    def recipe(_: Any) -> optax.GradientTransformation:
        return optimizers.optimizer(config.train, "train")  # with a schedule of its own

    return trained(
        untrained or network(config.model),
        images,
        config.train,
        root / f"{name}.safetensors",
        seed=config.train.init_seed + number,
        optimizer=recipe if "optimizer" in config.train else optax.adamw,
        augment=augment if padding else None,
    )


@dataclasses.dataclass(frozen=True)
class Dense:
    """Dense layers with ReLU on feature vectors. Two classes have one logit, which gives tighter
    bounds than two.

    Attributes:
      inputs, num_classes: The number of features and classes.
      hidden: The widths of hidden layers. None of them is logistic regression.
      bias: Whether layers have a bias.
      init_seed: The seed of the hidden layers. The last layer starts at zero.
    """

    inputs: int
    num_classes: int
    hidden: Sequence[int]
    bias: bool
    init_seed: int

    def init(self) -> Params:
        """Returns initial parameters."""
        outputs = 1 if self.num_classes == 2 else self.num_classes
        widths = [self.inputs, *self.hidden, outputs]
        key, params = jax.random.key(self.init_seed), {}
        for layer, (rows, columns) in enumerate(itertools.pairwise(widths)):
            scale = 0.0 if layer == len(self.hidden) else math.sqrt(2 / rows)
            normal = jax.random.normal(jax.random.fold_in(key, layer), (rows, columns))
            params[f"dense_{layer}"] = {"kernel": scale * normal}
            if self.bias:
                params[f"dense_{layer}"]["bias"] = jnp.zeros(columns)
        return params

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Returns the logits of one example [d]: [] for two classes, else [C]."""
        for layer in range(len(params)):
            x = x @ params[f"dense_{layer}"]["kernel"]
            if self.bias:
                x = x + params[f"dense_{layer}"]["bias"]
            if layer < len(self.hidden):
                x = jax.nn.relu(x)
        return x[0] if self.num_classes == 2 else x

    def loss(self, params: Params, example: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the cross entropy of one example {"features", "label"}."""
        logits = self.logits(params, example["features"])
        if self.num_classes == 2:
            return losses.sigmoid_cross_entropy(logits, example["label"])
        return losses.softmax_cross_entropy(logits, example["label"])

    @functools.cached_property
    def _batched(self) -> Callable[[Params, Any], jax.Array]:
        return jax.jit(jax.vmap(self.logits, in_axes=(None, 0)))

    def accuracy(self, params: Params, examples: Mapping[str, np.ndarray]) -> float:
        """Returns the accuracy on examples {"features" [n, d], "label" [n]}."""
        logits = np.asarray(self._batched(params, examples["features"]))
        rows = logits[:, None] if self.num_classes == 2 else logits
        return float(judged(rows, examples["label"]).mean())


def dense(inputs: int, num_classes: int, *, hidden: Sequence[int], **settings: Any) -> Dense:
    """Returns a `Dense`, one object for equal settings. What JAX compiled for its methods serves
    every study of a process then.
    """
    return _dense(inputs, num_classes, tuple(hidden), **settings)


_dense = functools.lru_cache(maxsize=16)(Dense)
