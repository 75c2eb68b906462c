"""The server's side of Split Adaptation (Wang et al. 2025), in the paper's order.

    # section 3.3.1: D_u = D_S + HT(D_S)
    images, labels = merge_hilbert(images, labels)
    # 3.3.1 and 3.3.2: F_0 is shipped
    frontends = calibrate_frontends(key, backbone, params, images, labels)
    # 3.3.2: Eq. 10, 11
    back = tune_backend(key, backbone, params, frontends, images, labels)
    # 3.5: Eq. 14
    backbone, back = adapt(key, backbone, back, copies, labels, num_classes=...)

All images here are the server's own. A client's representations come from `jaxdp.split.client`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.storage import on_device
from jaxdp.files import check_choice, shows_keywords
from jaxdp.models.training import (
    Loss,
    adam_state,
    adam_step,
    check_positive,
    epoch_batches,
    fit_until_steady,
)
from jaxdp.report import progress_bar
from jaxdp.split.augment import amplitude_exchange, hilbert_augment
from jaxdp.split.backbone import Backbone, Params
from jaxdp.split.checks import at_least, check_labels
from jaxdp.split.quantization import (
    QuantizedFrontend,
    ScaleKeywords,
    ScaleSearch,
    quantize_frontend,
    quantized_front,
    search_scales,
)
from jaxdp.split.training import RateKeywords, Training, TrainingKeywords
from jaxdp.transforms import losses

Partition = Literal["random", "domain", "class"]


def merge_hilbert(images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Appends Hilbert transforms to the server's images, and repeats their labels.

    Images are float32 [n, S, S, C] in [0, 1], and labels [n].
    """
    return _merge(hilbert_augment, labels, images)


def merge_amplitude_exchange(
    key: jax.Array, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Appends images with the amplitudes of others to the server's images, and repeats the labels.

    This is the augmentation that the paper compares with (Fig. 3). The key draws a permutation,
    which says whose amplitudes an image takes. Arguments are otherwise those of `merge_hilbert`.
    """
    donors = jax.random.permutation(key, images)
    return _merge(amplitude_exchange, labels, images, donors)


def _merge(
    augment: Callable[..., jax.Array],
    labels: jax.Array,
    images: jax.Array,
    *donors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Appends `augment(images, *donors)` of all rows, and repeats the labels."""
    augmented = []
    for start in range(0, len(images), 256):  # batches bound the memory of the spectra
        rows = slice(start, start + 256)
        augmented.append(augment(images[rows], *(x[rows] for x in donors)))
    merged_images = jnp.concatenate([images, *augmented])
    merged_labels = jnp.concatenate([labels, labels])
    return merged_images, merged_labels


@shows_keywords(ScaleKeywords, vars(ScaleSearch))
def calibrate_frontends(
    key: jax.Array,
    backbone: Backbone,
    params: Params,
    images: jax.Array,
    labels: jax.Array,
    *,
    frontends: int = 3,
    samples: int = 32,
    partition: Partition = "random",
    **search: Unpack[ScaleKeywords],
) -> tuple[QuantizedFrontend, ...]:
    """Quantises the frontend once for all data and once for each of M parts of the data.

    Args:
      key: Typed PRNG key of the partition and the samples.
      backbone, params: The whole model, with a head for `labels`.
      images, labels: float32 [n, S, S, C] in [0, 1] and int [n], of `merge_hilbert`.
      frontends: M. 0 quantises for all data only.
      samples: Images per scale search, drawn without replacement. A smaller part is used whole.
      partition: How images are divided into parts of equal size. The paper does not say. "random"
        draws the parts, but independent draws of 32 images give frontends that hardly differ.
        "domain" follows the order of `images`: originals, then transformed ones. With an odd number
        of parts the middle one has both. "class" sorts by label.
      search: The attributes of `ScaleSearch`, such as bits and metric.

    Returns:
      F_0, which the client gets, and F_1, ..., F_M.

    Raises:
      ValueError: The partition is unknown, there are fewer images than parts, samples is less than
        1, or as `search_scales`.
    """
    check_choice("partition", partition, Partition)
    if not 0 <= frontends <= len(images):
        raise ValueError(
            f"frontends must be in [0, {len(images)}], the number of images, got {frontends}."
        )
    at_least(1, samples=samples)
    options = ScaleSearch(**search)
    check_labels(labels, len(images), backbone.num_classes)
    order_key, *keys = jax.random.split(key, 2 + frontends)  # one for all rows, one for each part
    order = np.arange(len(images))
    if partition == "random":
        order = np.asarray(jax.random.permutation(order_key, len(images)))
    elif partition == "class":
        order = np.argsort(np.asarray(labels), kind="stable")
    rows_of_frontends = [order]
    if frontends:
        rows_of_frontends += np.array_split(order, frontends)
    front, _ = backbone.divide(params)
    quantized = []
    searches = list(zip(rows_of_frontends, keys, strict=True))
    for part, part_key in progress_bar(searches, label="scales of the frontend", unit="search"):
        shuffled = np.asarray(jax.random.permutation(part_key, len(part)))
        rows = part[shuffled[:samples]]
        scales = search_scales(backbone, params, images[rows], labels[rows], **search)
        quantized.append(quantize_frontend(front, scales, bits=options.bits))
    return tuple(quantized)


def mixup_representations(
    key: jax.Array,
    quantized: jax.Array,
    exact: jax.Array,
    *,
    beta: float = 0.75,
) -> jax.Array:
    """Computes lambda Xhat + (1 - lambda) X with one lambda ~ Beta(beta, beta) per image (Eq. 10).

    Xhat comes from the quantised frontend (dequantised), X from the original one. Both are float32
    [B, T, D]. beta is positive.
    """
    check_positive(beta=beta)
    share = jax.random.beta(key, beta, beta, (len(exact), 1, 1))
    return share * quantized + (1 - share) * exact


@shows_keywords(RateKeywords, vars(Training))
def tune_backend(
    key: jax.Array,
    backbone: Backbone,
    params: Params,
    frontends: Sequence[QuantizedFrontend],
    images: jax.Array,
    labels: jax.Array,
    *,
    epochs: int = 1,
    beta: float = 0.75,
    **training: Unpack[RateKeywords],
) -> dict[str, Any]:
    """Tunes backend and head on representations of the original and quantised frontends (Eq. 11).

    The frontends do not change. The loss is the mean over them, where the paper has a sum. The
    function returns the parameters of the backend, with the head.

    Args:
      key: Typed PRNG key of the order and the mixing.
      backbone, params, images, labels: As in `calibrate_frontends`, which made the frontends.
      beta: As in `mixup_representations`.
      epochs, training: The attributes of `Training`.

    Raises:
      ValueError: Labels do not match images or [0, num_classes), images or frontends are empty, or
        a learning rate, number of epochs, batch size or beta is not positive.
    """
    if not frontends:
        raise ValueError("frontends must not be empty. Make them with calibrate_frontends.")
    check_labels(labels, len(images), backbone.num_classes)
    options = Training(epochs=epochs, **training)
    front, back = backbone.divide(params)
    loss = mixup_loss(backbone, beta)
    examples = on_device(images), on_device(labels)
    frozen = front, tuple(frontends)
    fitted = fit_until_steady(loss, back, examples, options, key=key, frozen=frozen)
    tuned: dict[str, Any] = fitted.params
    return tuned


# One function object for equal arguments, since `fit_until_steady` compiles each object once.
@functools.lru_cache
def mixup_loss(backbone: Backbone, beta: float) -> Loss:
    """Returns the loss of Eq. 11 per image, for `fit_until_steady`."""

    def loss(
        back: Any,
        frozen: Any,
        batch: Any,
        key: jax.Array,
    ) -> jax.Array:
        front, frontends = frozen
        images, labels = batch
        exact = backbone.front(front, images)
        keys = jax.random.split(key, len(frontends))
        mixed = []
        for mixing_key, frontend in zip(keys, frontends, strict=True):
            quantized = quantized_front(backbone, frontend, images)
            mixed.append(mixup_representations(mixing_key, quantized, exact, beta=beta))  # Eq. 10
        cross_entropy = jax.vmap(losses.softmax_cross_entropy)
        by_frontend = [cross_entropy(backbone.back(back, x), labels) for x in mixed]
        return jnp.mean(jnp.stack(by_frontend), axis=0)  # Eq. 11

    return loss


class Uploads(Protocol):
    """Representations and their copies, a pytree: `Copies`, or `jaxdp.split.exchange.Uploaded`."""

    @property
    def representations(self) -> jax.Array:
        """Representations, float32 [n, T, D]."""

    def index(self) -> tuple[jax.Array, jax.Array]:
        """Returns image and number of every copy, int32 [N] each."""

    def batch(self, images: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns copies [B, T, D]: copy `numbers[b]` of image `images[b]`."""


class Adapted(NamedTuple):
    """A backend for the client's task.

    Attributes:
      backbone: The model with the client's classes.
      back: The parameters of the backend.
      epochs: The number of epochs that tuned them, 0 if they were read from a file.
    """

    backbone: Backbone
    back: dict[str, Any]
    epochs: int = 0

    def logits(self, representations: jax.Array) -> jax.Array:
        """Maps representations [B, T, D] to logits [B, num_classes]."""
        return _logits(self.backbone, self.back, representations)


_logits = jax.jit(Backbone.back, static_argnums=0)


@shows_keywords(TrainingKeywords, vars(Training))
def adapt(
    key: jax.Array,
    backbone: Backbone,
    back: Params,
    copies: Uploads,
    labels: jax.Array,
    *,
    num_classes: int,
    label_noise: jax.Array | None = None,
    **training: Unpack[TrainingKeywords],
) -> Adapted:
    """Tunes the backend and a new head on all copies of the client's representations (Eq. 14).

    The server has the labels here. In `adapt_by_client` they stay with the client.

    Args:
      key: Typed PRNG key of the head and the order.
      backbone, back: The model, and the parameters of the backend from `tune_backend`.
      copies: The client's upload of n images.
      labels: int [n] in [0, num_classes), exact or from `randomized_response`.
      num_classes: K of the client's task.
      label_noise: [K, K] of `label_noise_matrix`: probabilities of an observed label (column) given
        the true one (row). The loss is then the loss of the observed labels (Patrini et al. 2017,
        arXiv:1609.03683).
      training: The attributes of `Training`, over all copies.

    Raises:
      ValueError: Labels are outside [0, num_classes) or do not match the images, there are fewer
        than 2 classes, or label_noise has another shape.
    """
    options = Training(**training)
    check_labels(labels, len(copies.representations), num_classes)
    if label_noise is not None and jnp.shape(label_noise) != (num_classes, num_classes):
        raise ValueError(
            f"label_noise must be {[num_classes, num_classes]}, got "
            f"{list(jnp.shape(label_noise))}. Make it with label_noise_matrix for these classes."
        )
    head_key, key = jax.random.split(key)
    backbone, back = backbone.with_head(head_key, back, num_classes)
    if label_noise is None:
        label_noise = jax.device_put(np.eye(num_classes, dtype=np.float32))
    loss = copies_loss(backbone)
    frozen = copies, on_device(labels), label_noise
    fitted = fit_until_steady(loss, back, copies.index(), options, key=key, frozen=frozen)
    return Adapted(backbone, fitted.params, fitted.epochs)


@functools.lru_cache  # one object, as `mixup_loss`
def copies_loss(backbone: Backbone) -> Loss:
    """Returns the loss of Eq. 14 per copy, corrected for label noise, for `fit_until_steady`."""

    def loss(
        back: Any,
        frozen: Any,
        batch: Any,
        key: jax.Array,
    ) -> jax.Array:
        copies, labels, label_noise = frozen
        images, numbers = batch
        representations = copies.batch(images, numbers)
        logits = backbone.back(back, representations)
        log_p = jax.nn.log_softmax(logits)
        # Without label noise this is 0 for the own label and -inf for the others.
        observed = jnp.log(label_noise.T[labels[images]])  # [B, K]: log P(observed label | class)
        return -jax.nn.logsumexp(log_p + observed, axis=-1)

    return loss


# `gradients(logits [B, K], images [B])` returns d loss / d logits of each row, float32 [B, K].
Gradients = Callable[[np.ndarray, np.ndarray], np.ndarray]


@shows_keywords(TrainingKeywords, vars(Training))
def adapt_by_client(
    key: jax.Array,
    backbone: Backbone,
    back: Params,
    copies: Uploads,
    gradients: Gradients,
    *,
    num_classes: int,
    **training: Unpack[TrainingKeywords],
) -> Adapted:
    """Adapts as `adapt` does, but asks the client for the gradients of every step (Eq. 14).

    The labels stay with the client.

    With the same key, head, batches and steps are the same as in `adapt`. It protects no label: a
    gradient shows it.

    Args:
      key, backbone, back, copies, num_classes, training: As in `adapt`.
      gradients: `gradients(logits, images)` asks the client. It takes logits float32 [B, K], and
      int32 [B], the image of each row. It returns the gradients of all rows' losses with respect to
      their logits, float32 [B, K]. Use `jaxdp.split.exchange.loss_gradients`, or a function that
      asks the client for the same.

    Raises:
      ValueError: There are fewer than 2 classes, or a learning rate, number of epochs or batch size
        is not positive. Or patience is not 0, since the server sees no loss. Or an answer has
        another shape, or NaN or infinite entries.
    """
    options = Training(**training)
    if options.patience:
        raise ValueError(
            f"patience must be 0, got {options.patience}: the loss stays with the client. Use a "
            "fixed number of epochs."
        )
    head_key, key = jax.random.split(key)
    backbone, tuned = backbone.with_head(head_key, back, num_classes)
    state = adam_state(tuned)
    images, numbers = map(np.asarray, copies.index())
    size = min(options.batch_size, len(images))
    epoch_keys = jax.random.split(key, options.epochs)
    for epoch_key in progress_bar(epoch_keys, label="training", unit="epoch"):
        rows_of_batches, weights_of_batches, *_ = epoch_batches(epoch_key, len(images), size)
        batches = zip(np.asarray(rows_of_batches), np.asarray(weights_of_batches), strict=True)
        for rows, weights in batches:
            batch = (copies, images[rows], numbers[rows])
            logits = np.asarray(_copies_logits(backbone, tuned, *batch))
            answer = np.asarray(gradients(logits, images[rows]))
            if answer.shape != logits.shape or not np.isfinite(answer).all():
                raise ValueError(
                    f"gradients must be finite and {list(logits.shape)}, one row per row of "
                    f"logits. The client's answer has shape {list(answer.shape)}, or NaN or "
                    "infinite entries."
                )
            # Rows that fill up the last batch weigh 0.
            shares = weights / weights.sum()
            cotangent = answer.astype(np.float32) * shares[:, None]
            rate = options.learning_rate
            tuned, state = _pull_back(backbone, tuned, state, batch, cotangent, rate)
    return Adapted(backbone, tuned, options.epochs)


@functools.partial(jax.jit, static_argnums=0)
def _copies_logits(
    backbone: Backbone,
    back: Params,
    copies: Uploads,
    images: Any,
    numbers: Any,
) -> jax.Array:
    return backbone.back(back, copies.batch(images, numbers))


@functools.partial(jax.jit, static_argnums=0)
def _pull_back(
    backbone: Backbone,
    back: Any,
    state: Any,
    batch: tuple[Uploads, Any, Any],
    cotangent: Any,
    rate: Any,
) -> tuple[Any, Any]:
    """Takes one step of Adam along the gradient that the cotangent of the logits gives."""

    def logits_of(back: Any) -> jax.Array:
        return _copies_logits(backbone, back, *batch)

    _, vjp = jax.vjp(logits_of, back)
    (gradient,) = vjp(cotangent)
    return adam_step(back, state, gradient, rate)
