"""What several benchmarks train: networks, losses, a peer's clipped gradient, and steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import finetune, models
from jaxdp.data import from_arrays

RECORDS, CLASSES = 1024, 10
VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS = 4096, 128, 256, 4, 4
# A small ViT of images of 32 x 32.
_SIZES = {"width": 192, "depth": 6, "num_heads": 3, "mlp_width": 768}
VIT = {"patch_size": 4, "pool": "mean", **_SIZES}
# Shapes that only check programs.
TINY_VIT = {"width": 16, "depth": 2, "num_heads": 2, "mlp_width": 32}
TINY_TEXT = {"num_classes": 61, "positions": 16, **TINY_VIT}
BF16 = {"dtype": jnp.bfloat16}


class Digits(nn.Module):
    """The network of the MNIST examples of Opacus and TensorFlow Privacy."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        pool = functools.partial(models.max_pool, size=2, stride=1)
        x = pool(nn.relu(nn.Conv(16, (8, 8), 2, padding=((2, 3), (2, 3)))(x)))
        x = pool(nn.relu(nn.Conv(32, (4, 4), 2, padding="VALID")(x)))
        x = nn.relu(nn.Dense(32)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(CLASSES)(x)


class Language(nn.Module):
    """A causal transformer whose input and output embeddings are one array."""

    vocabulary: int = VOCABULARY
    length: int = LENGTH
    width: int = WIDTH
    depth: int = DEPTH
    heads: int = HEADS

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width, normal = self.width, nn.initializers.normal(0.02)
        embedding = nn.Embed(self.vocabulary, width)
        places = self.param("places", normal, (self.length, width))
        x, mask = embedding(tokens) + places, nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x += nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))
        return embedding.attend(nn.LayerNorm()(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, the shape of its inputs, and the expected batch size."""

    network: Any
    shape: tuple[int, ...]
    batch_size: int
    tokens: bool = False

    def source(self):
        generator = np.random.default_rng(0)
        if self.tokens:
            size = (RECORDS, *self.shape)
            return from_arrays(tokens=generator.integers(VOCABULARY, size=size, dtype=np.int32))
        images = generator.random((RECORDS, *self.shape), np.float32)
        return from_arrays(x=images, label=np.arange(len(images)) % CLASSES)

    def inputs(self, batch):
        return batch["tokens"][..., :-1] if self.tokens else batch["x"]

    def images(self, number: int) -> tuple[jax.Array, jax.Array]:
        """Returns random images and labels."""
        images = jax.random.uniform(jax.random.key(0), (number, *self.shape))
        return images, jnp.arange(number) % CLASSES

    def init(self):
        """Returns the first parameters."""
        example = self.source().gather(np.arange(1))
        return jax.jit(self.network.init)(jax.random.key(0), self.inputs(example))

    def losses(self, params, batch) -> jax.Array:
        """Returns the losses of a batch in their usual form."""
        logits = self.network.apply(params, self.inputs(batch))
        loss = optax.softmax_cross_entropy_with_integer_labels
        if self.tokens:
            return loss(logits, batch["tokens"][..., 1:]).mean(-1)
        return loss(logits, batch["label"])

    def loss(self, params, example) -> jax.Array:
        return self.losses(params, jax.tree.map(lambda x: x[None], example))[0]

    def mean_loss(self, params, batch) -> jax.Array:
        return self.losses(params, batch).mean()


def cases() -> dict[str, Case]:
    """Returns the networks whose whole steps are timed."""
    classifier = functools.partial(models.create, num_classes=CLASSES)
    return {
        "mlp": Case(classifier("mlp", hidden=(512, 512)), (28, 28, 1), 256),
        "cnn": Case(Digits(), (28, 28, 1), 256),
        "resnet20": Case(classifier("resnet20"), (32, 32, 3), 64),
        "vit": Case(classifier("vit_tiny", **VIT), (32, 32, 3), 32),
        "lm": Case(Language(), (LENGTH + 1,), 16, tokens=True),
    }


def image_problem(case: Case) -> tuple:
    """Returns the parameters of a classifier, and its losses: of an example, and of a batch [B]."""
    model = case.network
    params = jax.jit(model.init)(jax.random.key(1), case.images(1)[0])["params"]

    def losses(params, batch):
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    return params, classifier_loss(model), losses


def updated(optimizer, grads, state, params) -> tuple:
    """Returns parameters and state of the optimizer after an update."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def classifier_loss(model) -> Callable:
    """Returns the loss of one example, a pair of image and label."""

    def loss(params, example):
        image, label = example
        logits = model.apply({"params": params}, image[None])[0]
        return jaxdp.losses.softmax_cross_entropy(logits, label)

    return loss


def jax_privacy_grad(
    loss: Callable,
    clip_norm: float,
    batch_argnums: tuple[int, ...],
    microbatch_size: int | None = None,
) -> Callable:
    """Returns the clipped gradient of the peer jax_privacy."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        loss,
        l2_clip_norm=clip_norm,
        batch_argnums=batch_argnums,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """What a step trains.

    Attributes:
      loss: `loss(params, example)`, one example of `batch`.
      params, batch: The parameters, dicts by name, and a physical batch. They may be abstract.
      moving: The names of the parameters that are trained, () for all.
      microbatch: The number of examples whose gradients jax_privacy holds at once.
    """

    loss: Callable
    params: Any
    batch: Any
    moving: tuple[str, ...] = ()
    microbatch: int | None = None

    @property
    def examples(self) -> int:
        return jax.tree.leaves(self.batch)[0].shape[0]

    def trained(self, params):
        return {name: params[name] for name in self.moving or params}

    def whole_loss(self, moved, params, example) -> jax.Array:
        return self.loss({**params, **moved}, example)

    def plain(self, params, batch):
        """Returns the sum of the gradients of a batch."""

        def total(moved):
            return jax.vmap(lambda example: self.whole_loss(moved, params, example))(batch).sum()

        return jax.grad(total)(self.trained(params))

    @functools.cached_property
    def clipped_grad(self):
        trainable = models.trainable("lora", self.params) if self.moving else None
        return jaxdp.clipped_grad(self.loss, clip_norm=1.0, trainable=trainable)

    def clipped(self, params, batch):
        return self.trained(self.clipped_grad(params, batch).grads)

    def jax_privacy(self) -> Callable:
        grad = jax_privacy_grad(self.whole_loss, 1.0, (2,), self.microbatch)
        return lambda params, batch: grad(self.trained(params), params, batch)


def image_training(model, batch: int, shape: tuple[int, ...], microbatch: int) -> Training:
    """Returns the abstract training of a classifier of images."""
    images = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    loss = classifier_loss(model)
    return Training(
        lambda params, example: loss(params, (example["x"], example["label"])),
        params,
        {"x": images, "label": labels},
        microbatch=microbatch,
    )


def concrete(case: Training, classes: int) -> Training:
    """Returns an abstract training with random arrays, labels or tokens below `classes`.

    To compile the initialization of a large model takes as long as one of its steps.
    """
    generator = np.random.default_rng(0)

    def array(x):
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(generator.integers(classes, size=x.shape, dtype=np.int32))
        return jnp.asarray(0.02 * generator.standard_normal(x.shape, np.float32))

    params, batch = jax.tree.map(array, (case.params, case.batch))
    return dataclasses.replace(case, params=params, batch=batch)


def stateful(update: Callable, *state) -> Callable:
    """Returns a call that replaces its own state by the results of `update`."""
    current = list(state)

    def step():
        current[:] = update(*current)
        return current

    return step


def trained(trainer, params, source, steps: int, *, rate: float | None = None, key=None):
    """Returns the state after private steps, which no ledger counts.

    Args:
      trainer, params, source, steps: The training.
      rate: The learning rate, where the optimizer has one in its state. All share a compiled step.
      key: The key of the noise, by default a fresh one.
    """
    if rate is not None:
        trainer = finetune.with_hyperparams(trainer, {"learning_rate": rate})
    state = trainer.init(params)
    if key is not None:
        state = state._replace(noise=state.noise._replace(key=key))
    for _ in range(steps):
        state, _ = trainer.step(state, source)
    return state


def noise_error(sigma: float, noise, steps: int) -> float:
    """Returns the root mean squared error of the sum of noise until a step, in clip norms.

    Args:
      sigma: The noise multiplier of independent noise, or of one use of correlated noise.
      noise: The correlated noise, or None.
      steps: The number of steps.
    """
    if noise is None:
        return float(sigma * np.sqrt((steps + 1) / 2))
    return float(sigma / noise.sensitivity * np.sqrt(noise.error().mean()))
