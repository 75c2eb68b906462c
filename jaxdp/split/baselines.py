"""What else a few labelled images are good for: the methods that Split Adaptation is compared with (sections 4.1 and
A.2), and what a client can make of the frontend that it was given (section 4.3, Table 3).

    adapted = adapt(BASELINES["lp"], backbone, params, images, labels, num_classes=5, learning_rate=1e-3, key=key)
    accuracy(adapted, test_images, test_labels)

A `Baseline` makes a `Recipe`: which blocks are run, and which parameters are trained. All draw a fresh linear head and
take Adam at a constant learning rate, to be tuned per baseline on another task. None has a guarantee, for images or
model: linear probing, full fine-tuning and LN-TUNE need both in one place, split learning uploads exact representations
in every step, offsite tuning hands out more than half of the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.models.training import Loss, fit_in_memory
from jaxdp.split.backbone import Backbone, Params, in_batches
from jaxdp.split.checks import check_labels, one_of
from jaxdp.split.quantization import QuantizedFrontend, quantized_front
from jaxdp.transforms import losses

# --- Pieces of a network: hashable functions of all parameters and what the piece before returned ---------------------

Piece = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks start, ..., stop - 1 of a model; from 0 on images [B, S, S, C] in [0, 1], without stop to the logits."""

    backbone: Backbone
    start: int
    stop: int | None

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Runs them."""
        x = x if self.start else self.backbone.preprocessing.normalise(x)
        y: Any = self.backbone.model.apply({"params": params}, x, self.start, self.stop)
        return y


@dataclasses.dataclass(frozen=True)
class Quantized:
    """The quantised frontend that params["frontend"] holds, activations quantised too: images to [B, T, D]."""

    backbone: Backbone

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Runs it."""
        return quantized_front(self.backbone, params["frontend"], x)


@dataclasses.dataclass(frozen=True)
class FirstTokens:
    """The tokens that the head of a model reads: those in front of the patches, or all if there are none."""

    prefix_tokens: int

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T', D]."""
        return x[:, : self.prefix_tokens] if self.prefix_tokens else x


@dataclasses.dataclass(frozen=True)
class Pool:
    """The first token, or the mean of all, after a LayerNorm without parameters, which a linear head does not miss."""

    prefix_tokens: int

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, D]."""
        tokens = x[:, :1] if self.prefix_tokens else x
        normalised: Any = nn.LayerNorm(use_bias=False, use_scale=False).apply({}, tokens)
        return jnp.mean(normalised, axis=1)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear head for pooled representations."""

    num_classes: int

    def __call__(self, params: Params, x: jax.Array) -> jax.Array:
        """Maps [B, D] to logits [B, num_classes]."""
        logits: Any = nn.Dense(self.num_classes).apply({"params": params["head"]}, x)
        return logits


# --- The baselines ----------------------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """What a baseline runs and trains. Hashable, so that equal recipes share compiled programs.

    Attributes:
      features: pieces in front of everything that is trained: run once per image.
      training: pieces from there to the logits, as they are trained.
      evaluation: pieces from there to the logits, as they are used.
      trained: paths of the parameters that are trained, such as "block_0/norm_0/scale".
      client: paths of the parameters that the client holds.
    """

    features: tuple[Piece, ...]
    training: tuple[Piece, ...]
    evaluation: tuple[Piece, ...]
    trained: frozenset[str]
    client: frozenset[str]


Begun = tuple[Recipe, dict[str, Any]]
# `baseline(backbone, params, num_classes=, key=)`: a recipe, and the parameters that it starts from.
Baseline = Callable[..., Begun]


def linear_probing(backbone: Backbone, params: Params, *, num_classes: int, key: jax.Array) -> Begun:
    """Trains the head alone; the frozen transformer sees every image once."""
    backbone, params = backbone.with_head(key, params, num_classes)
    last = backbone.model.num_blocks
    features = (Blocks(backbone, 0, last), FirstTokens(backbone.prefix_tokens))
    return _begin(params, (Blocks(backbone, last, None),), _is_head, features=features)


def full_fine_tuning(backbone: Backbone, params: Params, *, num_classes: int, key: jax.Array) -> Begun:
    """Trains everything."""
    backbone, params = backbone.with_head(key, params, num_classes)
    return _begin(params, (Blocks(backbone, 0, None),), lambda path: True)


def layer_norm_tuning(backbone: Backbone, params: Params, *, num_classes: int, key: jax.Array) -> Begun:
    """LN-TUNE (Basu et al. 2024, arXiv:2304.01917): trains scales and biases of all LayerNorms, and the head."""
    backbone, params = backbone.with_head(key, params, num_classes)
    # Of the layers of a transformer, LayerNorm alone has a scale.
    norms = {path.removesuffix("/scale") for path in flatten_dict(params, sep="/") if path.endswith("/scale")}
    return _begin(params, (Blocks(backbone, 0, None),), lambda p: _is_head(p) or p.rpartition("/")[0] in norms)


def split_learning(backbone: Backbone, params: Params, *, num_classes: int, key: jax.Array) -> Begun:
    """Trains frontend and head at the client, through the server's frozen backend, as section A.2 has it.

    Vanilla split learning (Vepakomma et al. 2018, arXiv:1812.00564) trains both sides. What the two exchange is cut out
    of one backward pass, so that it may run in one process.
    """
    backbone, params = backbone.with_head(key, params, num_classes)
    front, _ = backbone.divide(params)

    def at_client(path: str) -> bool:
        return _is_head(path) or _top(path) in front

    return _begin(params, (Blocks(backbone, 0, None),), at_client, client=at_client)


def offsite_tuning(
    backbone: Backbone,
    params: Params,
    *,
    num_classes: int,
    key: jax.Array,
    drop: Literal["uniform", "random"] = "uniform",
    seed: int = 0,
) -> Begun:
    """Offsite tuning (Xiao et al. 2023, arXiv:2302.04870): trains adapters around an emulator of the middle.

    The adapters are the first two and the last two blocks, one and one of fewer than 6. The emulator is the middle with
    half of its blocks dropped, one more if they are odd. Blocks of a Swin that merge patches cannot be dropped and do
    not count. Adapters and head are trained with embedding, emulator and last LayerNorm frozen, then plugged into the
    full model. Its authors distil the emulator on public images beforehand; the paper mentions no distillation, and
    there is none here.

    Args:
      backbone, params, num_classes, key: as any `Baseline`; the cut is not used.
      drop: "uniform" keeps evenly spaced blocks, as the authors do, "random" keeps any, as the paper does.
      seed: of the random choice, the server's, who makes one emulator for everybody.

    Raises:
      ValueError: no block between the adapters can be dropped, or `drop` is unknown.
    """
    one_of(("uniform", "random"), drop=drop)
    backbone, params = backbone.with_head(key, params, num_classes)
    blocks = _describe_blocks(backbone)
    ends = 2 if len(blocks) >= 6 else 1
    middle = range(ends, len(blocks) - ends)
    candidates = [k for k in middle if blocks[k][1]]
    if not candidates:
        raise ValueError(
            f"offsite tuning needs a block to drop between {ends} first and {ends} last ones; the model has only "
            f"{len(blocks)} blocks"
        )
    dropped = set(candidates) - set(_half(candidates, drop, seed))
    kept = tuple(Blocks(backbone, k, k + 1) for k in middle if k not in dropped)
    training = (Blocks(backbone, 0, ends), *kept, Blocks(backbone, len(blocks) - ends, None))
    adapters = {name for k, (names, _) in enumerate(blocks) if k not in middle for name in names}
    absent = {name for k in dropped for name in blocks[k][0]}
    return _begin(
        params,
        training,
        lambda path: _is_head(path) or _top(path) in adapters,
        client=lambda path: _top(path) not in absent,
        evaluation=(Blocks(backbone, 0, None),),
    )


BASELINES: Mapping[str, Baseline] = {
    "lp": linear_probing,
    "ft": full_fine_tuning,
    "ln": layer_norm_tuning,
    "sl": split_learning,
    "ot": offsite_tuning,
    "ot_random": functools.partial(offsite_tuning, drop="random"),
}


# --- What a client can make of the frontend alone ---------------------------------------------------------------------


def probe_quantized_frontend(backbone: Backbone, frontend: Any, *, num_classes: int, key: jax.Array) -> Begun:
    """Trains a head on the representations of the quantised frontend: "Quant. Frontend" of Table 3."""
    params = {"frontend": _checked(frontend), "head": _linear_head(backbone, num_classes, key)}
    features = (Quantized(backbone), Pool(backbone.prefix_tokens))
    return _begin(params, (Linear(num_classes),), _is_head, features=features)


def probe_original_frontend(backbone: Backbone, params: Params, *, num_classes: int, key: jax.Array) -> Begun:
    """The same with the frontend of `params`, which no client has: "Original Frontend" of Table 3."""
    params = {**backbone.divide(params)[0], "head": _linear_head(backbone, num_classes, key)}
    features = (Blocks(backbone, 0, backbone.cut), Pool(backbone.prefix_tokens))
    return _begin(params, (Linear(num_classes),), _is_head, features=features)


def tune_quantized_frontend(backbone: Backbone, frontend: Any, *, num_classes: int, key: jax.Array) -> Begun:
    """Trains a head and all weights of the frontend, dequantised: stronger than what the paper tests.

    Rounding of activations protects nothing against a client who need not do it, so there is none.
    """
    params = {**_checked(frontend).params, "head": _linear_head(backbone, num_classes, key)}
    pieces = (Blocks(backbone, 0, backbone.cut), Pool(backbone.prefix_tokens), Linear(num_classes))
    return _begin(params, pieces, lambda path: True)


def probe_auxiliary_backend(auxiliary: Backbone, auxiliary_params: Params) -> Baseline:
    """Trains the head of another public model, whose last blocks go behind the quantised frontend: "Auxiliary Backend".

    The other model is cut where its backend begins; the paper takes the last third of DINOv2-L. Its parameters are of
    the whole model. The baseline raises ValueError if the two models' tokens do not fit together.
    """

    def baseline(backbone: Backbone, frontend: Any, *, num_classes: int, key: jax.Array) -> Begun:
        ours, theirs = ((b.tokens[1], b.prefix_tokens) for b in (backbone, auxiliary))
        if ours != theirs:
            raise ValueError(
                f"auxiliary must take tokens of width {ours[0]} with {ours[1]} in front of the patches, as the "
                f"frontend returns, got width {theirs[0]} with {theirs[1]}; choose another model or another cut"
            )
        other, back = auxiliary.with_head(key, auxiliary.divide(auxiliary_params)[1], num_classes)
        last = other.model.num_blocks
        params = {"frontend": _checked(frontend), **back}
        features = (Quantized(backbone), Blocks(other, other.cut, last), FirstTokens(other.prefix_tokens))
        return _begin(params, (Blocks(other, last, None),), _is_head, features=features)

    return baseline


# --- Adaptation -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Adapted:
    """A model for the client's task: what is run, and the parameters of all of it, trained or not."""

    recipe: Recipe
    params: dict[str, Any] = dataclasses.field(repr=False)

    def logits(self, images: jax.Array, *, batch_size: int = 128) -> jax.Array:
        """Maps images [n, S, S, C] in [0, 1] to logits [n, num_classes], batch by batch."""
        pieces = (*self.recipe.features, *self.recipe.evaluation)
        return in_batches(functools.partial(_run, pieces, self.params), images, batch_size)


def adapt(
    baseline: Baseline,
    backbone: Backbone,
    params: Any,
    images: jax.Array,
    labels: jax.Array,
    *,
    num_classes: int,
    learning_rate: float,
    epochs: int = 100,
    batch_size: int = 32,
    key: jax.Array,
) -> Adapted:
    """Adapts a public model to a client's task.

    Calls that differ in data, learning rate or key only compile once.

    Args:
      baseline: of `BASELINES`, or one of the functions for a frontend.
      backbone: the public model.
      params: what the baseline starts from: the parameters of the whole model, or a `QuantizedFrontend`.
      images: float32 [n, S, S, C] in [0, 1], the client's.
      labels: int [n] in [0, num_classes), num_classes at least 2.
      learning_rate, batch_size: as in `fit_in_memory`.
      epochs: passes over the images; the paper has 100, and 50 for offsite tuning.
      key: typed PRNG key, of the head and the order of the images.

    Raises:
      ValueError: images of another shape, outside [0, 1] or none; labels of another number or type or outside
        [0, num_classes); a number that is not positive; as the baseline.
    """
    backbone.check_images(images)
    check_labels(labels, len(images), num_classes)
    head_key, key = jax.random.split(key)
    recipe, params = baseline(backbone, params, num_classes=num_classes, key=head_key)
    inputs = jnp.asarray(images)
    if recipe.features:
        inputs = in_batches(functools.partial(_run, recipe.features, params), images, batch_size)
    trained, frozen = divide_trained(recipe, params)
    trained = fit_in_memory(
        training_loss(recipe.training),
        trained,
        (inputs, jnp.asarray(labels)),
        key=key,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        frozen=frozen,
    )
    return Adapted(recipe, unflatten_dict({**frozen, **trained}, sep="/"))


def accuracy(adapted: Adapted, images: jax.Array, labels: jax.Array, *, batch_size: int = 128) -> float:
    """The share of images [n, S, S, C] whose largest logit is that of the label, int [n].

    Raises:
      ValueError: no images, images of another shape, or labels of another number.
    """
    if not len(images) or np.shape(labels) != (len(images),):
        raise ValueError(f"labels must be one per image, at least one, got {list(np.shape(labels))} of {len(images)}")
    predicted = np.asarray(adapted.logits(images, batch_size=batch_size)).argmax(1)
    return float(np.mean(predicted == np.asarray(labels)))


def divide_trained(recipe: Recipe, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters by path: those that are trained, and the others."""
    flat = flatten_dict(params, sep="/")
    trained = {path: leaf for path, leaf in flat.items() if path in recipe.trained}
    return trained, {path: leaf for path, leaf in flat.items() if path not in trained}


@functools.lru_cache
def training_loss(pieces: tuple[Piece, ...]) -> Loss:
    """The cross-entropy of (inputs, labels) behind `pieces`, for `fit_in_memory`; one object for equal pieces."""

    def loss(trained: Any, frozen: Any, batch: Any, key: jax.Array) -> jax.Array:
        inputs, labels = batch
        logits = run(pieces, unflatten_dict({**frozen, **trained}, sep="/"), inputs)
        return jax.vmap(losses.softmax_cross_entropy)(logits, labels)

    return loss


def run(pieces: Iterable[Piece], params: Params, x: jax.Array) -> jax.Array:
    """What comes out of the last of the pieces if x goes into the first."""
    for piece in pieces:
        x = piece(params, x)
    return x


_run = jax.jit(run, static_argnums=0)


# --- Parameters -------------------------------------------------------------------------------------------------------


def _begin(
    params: Params,
    training: tuple[Piece, ...],
    trained: Callable[[str], bool],
    *,
    features: tuple[Piece, ...] = (),
    evaluation: tuple[Piece, ...] | None = None,
    client: Callable[[str], bool] = lambda path: True,
) -> Begun:
    """A recipe that is evaluated as it is trained, unless it says how, and the parameters."""
    chosen = (frozenset(filter(choose, flatten_dict(params, sep="/"))) for choose in (trained, client))
    return Recipe(features, training, evaluation or training, *chosen), dict(params)


def _top(path: str) -> str:
    return path.partition("/")[0]


def _is_head(path: str) -> bool:
    return path.startswith("head")


def _linear_head(backbone: Backbone, num_classes: int, key: jax.Array) -> Any:
    return nn.Dense(num_classes).init(key, jnp.zeros((1, backbone.tokens[1])))["params"]


def _checked(frontend: Any) -> QuantizedFrontend:
    if not isinstance(frontend, QuantizedFrontend):
        raise ValueError(f"params must be a QuantizedFrontend, what a client is given, got {type(frontend).__name__}")
    return frontend


@functools.lru_cache
def _describe_blocks(backbone: Backbone) -> tuple[tuple[frozenset[str], bool], ...]:
    """Of every block of a model, the names of its parameters, and whether its output has the shape of its input."""
    found = []

    def describe() -> None:
        key, images = jax.random.key(0), jnp.zeros(backbone.images.shape)
        x, embedding = backbone.model.init_with_output(key, images, 0, 0)
        for k in range(backbone.model.num_blocks):
            y, block = backbone.model.init_with_output(key, x if k else images, k, k + 1)
            found.append((frozenset(block["params"]) - frozenset(embedding["params"]), y.shape == x.shape))
            x = y

    jax.eval_shape(describe)
    return tuple(found)


def _half(candidates: list[int], drop: str, seed: int) -> list[int]:
    """Half of the candidates, rounded down."""
    count = len(candidates) // 2
    if drop == "random":
        # RandomState: its stream is the same in every version of NumPy.
        return sorted(np.random.RandomState(seed).permutation(candidates)[:count].tolist())
    if count < 2:
        return candidates[len(candidates) // 2 :][:count]
    return [candidates[round(i * (len(candidates) - 1) / (count - 1))] for i in range(count)]
