"""The methods that Split Adaptation is compared with (sections 4.1 and A.2).

    baseline = BASELINES["lp"]
    options = {"num_classes": 5, "learning_rate": 1e-3, "key": key}
    adapted = adapt(baseline, backbone, params, images, labels, **options)
    accuracy(adapted, test_images, test_labels)

A `Baseline` makes a `Recipe`: the blocks that run, and the parameters that are trained. All
baselines draw a new linear head and use Adam at a constant learning rate. Tune that rate per
baseline on another task. None protects images or model. Linear probing, full fine-tuning and
LN-TUNE need both in one place. Split learning uploads exact representations in every step. Offsite
tuning hands out more than half of the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.data import labels as shapes
from jaxdp.data.storage import on_device
from jaxdp.files import check_choice, shows_keywords
from jaxdp.models.training import Loss, fit_until_steady
from jaxdp.split.backbone import Backbone, Params, in_batches
from jaxdp.split.checks import check_labels
from jaxdp.split.training import EpochKeywords, Training
from jaxdp.transforms import losses

# --- Pieces of a network -------------------------------------------------------------------------

# A piece is a hashable function of all parameters and of the result of the piece before it.
Piece = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks start, ..., stop - 1 of a model.

    Block 0 takes images [B, S, S, C] in [0, 1]. With stop=None the last block returns logits.
    """

    backbone: Backbone
    start: int
    stop: int | None

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Runs the blocks."""
        if self.start == 0:
            x = self.backbone.preprocessing.normalise(x)
        y: Any = self.backbone.model.apply({"params": params}, x, self.start, self.stop)
        return y


@dataclasses.dataclass(frozen=True)
class FirstTokens:
    """The tokens that the head of a model reads: the first ones, or all for a `number` of 0."""

    number: int

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T', D]."""
        if not self.number:
            return x
        return x[:, : self.number]


# --- The baselines ------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """The pieces that a baseline runs and trains.

    Hashable, so that equal recipes share compiled programs.

    Attributes:
      features: Pieces before everything that is trained. They run once per image.
      training: Pieces from there to the logits in training.
      evaluation: Pieces from there to the logits in use.
      trained: Paths of the trained parameters, such as "block_0/norm_0/scale".
      client: Paths of the parameters that the client holds.
    """

    features: tuple[Piece, ...]
    training: tuple[Piece, ...]
    evaluation: tuple[Piece, ...]
    trained: frozenset[str]
    client: frozenset[str]


RecipeAndParams = tuple[Recipe, dict[str, Any]]
# `baseline(backbone, params, num_classes=, key=)` returns a recipe and its initial parameters.
Baseline = Callable[..., RecipeAndParams]


def linear_probing(
    backbone: Backbone,
    params: Params,
    *,
    num_classes: int,
    key: jax.Array,
) -> RecipeAndParams:
    """Trains only the head. The frozen transformer sees every image once."""
    backbone, params = backbone.with_head(key, params, num_classes)
    last = backbone.model.num_blocks
    transformer = Blocks(backbone, 0, last)
    first_tokens = FirstTokens(backbone.head_tokens)
    head = Blocks(backbone, last, None)
    return recipe_for(params, (head,), is_head, features=(transformer, first_tokens))


def full_fine_tuning(
    backbone: Backbone,
    params: Params,
    *,
    num_classes: int,
    key: jax.Array,
) -> RecipeAndParams:
    """Trains all parameters."""
    backbone, params = backbone.with_head(key, params, num_classes)
    return recipe_for(params, (Blocks(backbone, 0, None),), lambda path: True)


def layer_norm_tuning(
    backbone: Backbone,
    params: Params,
    *,
    num_classes: int,
    key: jax.Array,
) -> RecipeAndParams:
    """Trains scales and biases of all LayerNorms, and the head: LN-TUNE.

    LN-TUNE is that of Basu et al. (2024, arXiv:2304.01917).
    """
    backbone, params = backbone.with_head(key, params, num_classes)
    # Only LayerNorms have a scale in a transformer.
    scales = [path for path in flatten_dict(params, sep="/") if path.endswith("/scale")]
    norms = {path.removesuffix("/scale") for path in scales}

    def tuned(path: str) -> bool:
        module, _, _ = path.rpartition("/")
        return is_head(path) or module in norms

    return recipe_for(params, (Blocks(backbone, 0, None),), tuned)


def split_learning(
    backbone: Backbone,
    params: Params,
    *,
    num_classes: int,
    key: jax.Array,
) -> RecipeAndParams:
    """Trains frontend and head at the client, through the server's frozen backend (section A.2).

    Vanilla split learning (Vepakomma et al. 2018, arXiv:1812.00564) trains both sides. The exchange
    of the two parties is part of one backward pass, so this may run in one process.
    """
    backbone, params = backbone.with_head(key, params, num_classes)
    front, _ = backbone.divide(params)

    def at_client(path: str) -> bool:
        return is_head(path) or _top(path) in front

    return recipe_for(params, (Blocks(backbone, 0, None),), at_client, client=at_client)


def offsite_tuning(
    backbone: Backbone,
    params: Params,
    *,
    num_classes: int,
    key: jax.Array,
    drop: Literal["uniform", "random"] = "uniform",
    seed: int = 0,
) -> RecipeAndParams:
    """Trains adapters around an emulator of the middle: offsite tuning.

    Offsite tuning is that of Xiao et al. (2023, arXiv:2302.04870).

    The adapters are the first two and the last two blocks, or one and one of fewer than 6 blocks.
    The emulator is the middle without half of its blocks, rounded up. Blocks of a Swin that merge
    patches always stay and do not count. Adapters and head are trained with embedding, emulator and
    last LayerNorm frozen. Then they go back into the full model. The authors first distil the
    emulator on public images. The paper mentions no distillation, and this function does none.

    Args:
      backbone, params, num_classes, key: As in any `Baseline`. The cut has no effect.
      drop: "uniform" keeps evenly spaced blocks, as the authors do. "random" keeps random ones, as
          the paper does.
      seed: Seed of the random choice. The server chooses it and makes one emulator for all clients.

    Raises:
      ValueError: No block between the adapters can be dropped, or `drop` is unknown.
    """
    check_choice("drop", drop, ("uniform", "random"))
    backbone, params = backbone.with_head(key, params, num_classes)
    blocks = _describe_blocks(backbone)
    ends = 1
    if len(blocks) >= 6:
        ends = 2
    middle = range(ends, len(blocks) - ends)
    # A block that changes the shape cannot be left out.
    candidates = [k for k in middle if blocks[k].keeps_shape]
    if not candidates:
        raise ValueError(
            f"offsite tuning needs a block to drop between {ends} first and {ends} last ones. The "
            f"model has only {len(blocks)} blocks."
        )
    remaining = _half(candidates, drop, seed)
    dropped = set(candidates) - set(remaining)
    emulator = [Blocks(backbone, k, k + 1) for k in middle if k not in dropped]
    first = Blocks(backbone, 0, ends)
    last = Blocks(backbone, len(blocks) - ends, None)
    outer = [*blocks[:ends], *blocks[-ends:]]
    adapters = _modules_of(outer)
    dropped_blocks = [blocks[k] for k in dropped]
    absent = _modules_of(dropped_blocks)

    def trained(path: str) -> bool:
        return is_head(path) or _top(path) in adapters

    def client(path: str) -> bool:
        return _top(path) not in absent

    whole = Blocks(backbone, 0, None)
    training = (first, *emulator, last)
    return recipe_for(params, training, trained, client=client, evaluation=(whole,))


BASELINES: Mapping[str, Baseline] = {
    "lp": linear_probing,
    "ft": full_fine_tuning,
    "ln": layer_norm_tuning,
    "sl": split_learning,
    "ot": offsite_tuning,
    "ot_random": functools.partial(offsite_tuning, drop="random"),
}


# --- Adaptation ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Adapted:
    """A model for the client's task.

    Attributes:
      recipe: Its pieces.
      params: All their parameters, trained or not.
      epochs: The number of epochs that trained them.
    """

    recipe: Recipe
    params: dict[str, Any] = dataclasses.field(repr=False)
    epochs: int

    def logits(self, images: jax.Array, *, batch_size: int = 128) -> jax.Array:
        """Maps images [n, S, S, C] in [0, 1] to logits [n, num_classes], batch by batch."""
        pieces = (*self.recipe.features, *self.recipe.evaluation)
        logits_of = functools.partial(_run, pieces, self.params)
        return in_batches(logits_of, images, batch_size)


@shows_keywords(EpochKeywords, vars(Training))
def adapt(
    baseline: Baseline,
    backbone: Backbone,
    params: Any,
    images: jax.Array,
    labels: jax.Array,
    *,
    num_classes: int,
    learning_rate: float,
    key: jax.Array,
    **training: Unpack[EpochKeywords],
) -> Adapted:
    """Adapts a public model to a client's task.

    Calls that differ only in data, learning rate or key compile once.

    Args:
      baseline: An entry of `BASELINES`, or a function like them.
      backbone: The public model.
      params: The initial parameters of the whole model, or a `QuantizedFrontend`.
      images: The client's images, float32 [n, S, S, C] in [0, 1].
      labels: int [n] in [0, num_classes), with num_classes at least 2.
      learning_rate: The constant learning rate of Adam.
      key: Typed PRNG key of the head and the order of the images.
      training: The other attributes of `Training`: epochs, batch_size and patience. The paper has
        100 epochs, and 50 for offsite tuning, "as when the training loss does not decrease".
        Features are computed in batches of this size too.

    Raises:
      ValueError: Images are empty, of another shape or outside [0, 1], labels do not match them or
        [0, num_classes), a number is not positive, or as the baseline.
    """
    options = Training(learning_rate=learning_rate, **training)
    backbone.check_images(images)
    check_labels(labels, len(images), num_classes)
    head_key, key = jax.random.split(key)
    recipe, params = baseline(backbone, params, num_classes=num_classes, key=head_key)
    inputs = on_device(images)
    if recipe.features:
        features = functools.partial(_run, recipe.features, params)
        inputs = in_batches(features, images, options.batch_size)
    trained, frozen = divide_trained(recipe, params)
    loss = training_loss(recipe.training)
    examples = inputs, on_device(labels)
    fitted = fit_until_steady(loss, trained, examples, options, key=key, frozen=frozen)
    tuned_params = unflatten_dict({**frozen, **fitted.params}, sep="/")
    return Adapted(recipe, tuned_params, fitted.epochs)


def accuracy(
    adapted: Adapted,
    images: jax.Array,
    labels: jax.Array,
    *,
    batch_size: int = 128,
) -> float:
    """Returns the share of images [n, S, S, C] whose largest logit belongs to the label, int [n].

    The images and labels are the client's own, and nothing is charged. `jaxdp.data.labels` has the
    rules. An image with a logit that is not finite is wrong. A warning tells how many there are.

    Raises:
      TypeError, ValueError: There are no images, images have another shape, or labels are not one
          class per image.
    """
    truth = np.asarray(labels)
    if not len(images):
        raise ValueError("images must not be empty. Give at least one image.")
    shapes.check_labels(truth, len(images))
    logits = np.asarray(adapted.logits(images, batch_size=batch_size))
    judged = shapes.judge(logits, truth)
    shapes.check_range(truth, shapes.classes_of(logits))
    shapes.warn_if_not_finite(int((~judged.finite).sum()), len(truth))
    return float(judged.correct.mean())


def divide_trained(recipe: Recipe, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides parameters by path into trained ones and others."""
    flat = flatten_dict(params, sep="/")
    trained = {path: leaf for path, leaf in flat.items() if path in recipe.trained}
    frozen = {path: leaf for path, leaf in flat.items() if path not in trained}
    return trained, frozen


# Equal pieces give one function object, and `fit_until_steady` compiles each object once.
@functools.lru_cache
def training_loss(pieces: tuple[Piece, ...]) -> Loss:
    """Returns the cross-entropy of (inputs, labels) behind `pieces`, for `fit_until_steady`.

    Equal pieces give one function, which compiles once.
    """

    def loss(
        trained: Any,
        frozen: Any,
        batch: Any,
        key: jax.Array,
    ) -> jax.Array:
        inputs, labels = batch
        params = unflatten_dict({**frozen, **trained}, sep="/")
        logits = run(pieces, params, inputs)
        return jax.vmap(losses.softmax_cross_entropy)(logits, labels)

    return loss


def run(pieces: Iterable[Piece], params: Params, x: jax.Array) -> jax.Array:
    """Applies the pieces to x, one after the other."""
    for piece in pieces:
        x = piece(params, x)
    return x


_run = jax.jit(run, static_argnums=0)


# --- Parameters ---------------------------------------------------------------------------------


def recipe_for(
    params: Params,
    training: tuple[Piece, ...],
    trained: Callable[[str], bool],
    *,
    features: tuple[Piece, ...] = (),
    evaluation: tuple[Piece, ...] | None = None,
    client: Callable[[str], bool] = lambda path: True,
) -> RecipeAndParams:
    """Returns a recipe and its initial parameters.

    Args:
      params: The initial parameters.
      training, features, evaluation: As in `Recipe`. `evaluation` is `training` by default.
      trained, client: Whether a path is a trained parameter, and whether the client holds it.
    """
    paths = flatten_dict(params, sep="/")
    recipe = Recipe(
        features=features,
        training=training,
        evaluation=evaluation or training,
        trained=frozenset(filter(trained, paths)),
        client=frozenset(filter(client, paths)),
    )
    return recipe, dict(params)


def _top(path: str) -> str:
    return path.partition("/")[0]


def is_head(path: str) -> bool:
    """Returns whether a path is a parameter of the head."""
    return path.startswith("head")


class _Block(NamedTuple):
    """The names of the modules of a block, and whether its output has the shape of its input."""

    modules: frozenset[str]
    keeps_shape: bool


def _modules_of(blocks: Iterable[_Block]) -> frozenset[str]:
    return frozenset[str]().union(*(block.modules for block in blocks))


@functools.lru_cache
def _describe_blocks(backbone: Backbone) -> tuple[_Block, ...]:
    blocks = []

    def describe() -> None:
        key = jax.random.key(0)
        images = jnp.zeros(backbone.images.shape)
        x, embedding = backbone.model.init_with_output(key, images, 0, 0)
        for k in range(backbone.model.num_blocks):
            inputs = x
            if k == 0:
                inputs = images  # the first block embeds the images too
            y, variables = backbone.model.init_with_output(key, inputs, k, k + 1)
            modules = frozenset(variables["params"]) - frozenset(embedding["params"])
            blocks.append(_Block(modules, y.shape == x.shape))
            x = y

    jax.eval_shape(describe)
    return tuple(blocks)


def _half(candidates: list[int], drop: str, seed: int) -> list[int]:
    """Returns half of the candidates, rounded down: random ones, or evenly spaced ones."""
    count = len(candidates) // 2
    if drop == "random":
        # RandomState, because its stream is the same in every version of NumPy.
        permuted = np.random.RandomState(seed).permutation(candidates)
        return sorted(permuted[:count].tolist())
    if count < 2:
        middle = len(candidates) // 2
        return candidates[middle:][:count]
    step = (len(candidates) - 1) / (count - 1)  # both ends stay
    return [candidates[round(i * step)] for i in range(count)]
