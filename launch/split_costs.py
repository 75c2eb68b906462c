"""The cost of an adaptation for one client: Table 2, and uploads and downloads.

    cost("sa", backbone, images=500, num_classes=100).upload

All numbers are counted from shapes, so a ViT-L takes seconds and no memory. The server's work is
not counted.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.models.training import adam_step
from jaxdp.split.augment import retrieve_neighbors
from jaxdp.split.backbone import Backbone
from jaxdp.split.baselines import (
    BASELINES,
    Blocks,
    FirstTokens,
    Piece,
    Recipe,
    divide_trained,
    run,
    training_loss,
)
from jaxdp.split.checks import at_least
from jaxdp.split.methods import METHODS
from jaxdp.split.noisy_upload import Projection, project
from jaxdp.split.quantization import describe_frontend

_BODIES: Any = (jex.Jaxpr, jex.ClosedJaxpr)
_FLOAT = 4  # bytes, as of the int32 labels
Shapes = Mapping[str, Any]  # of parameters, by their paths


class Program(NamedTuple):
    """A program of the client, as its cost counts it.

    `images` pass in each call, and each image passes `passes` times.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    images: int
    passes: int

    @property
    def flops(self) -> int:
        """FLOPs per image."""
        return 2 * count_macs(self.run, *self.args) // self.images


class Cost(NamedTuple):
    """The cost of an adaptation for one client.

    FLOPs count matrix products and convolutions, two per multiplication.

    Attributes:
      parameters: The number of parameters that the client holds.
      parameter_bytes: Their bytes: float32, or int8 codes without scales in Split Adaptation.
      forward_flops: FLOPs per image of one forward pass through the parameters that the client
          holds.
      training_flops: FLOPs per image of one training step, forward and backward. 0 if the client
          trains nothing.
      total_flops: FLOPs of the whole adaptation.
      upload, download: Bytes of the whole adaptation.
      programs: The client's programs by name, to measure on a device. The frontend of Split
        Adaptation has no noise there and does not round activations.
    """

    parameters: int
    parameter_bytes: int
    forward_flops: int
    training_flops: int
    total_flops: int
    upload: int
    download: int
    programs: Mapping[str, Program]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a client adapts to, and how.

    Attributes:
      images, num_classes: n and K of the client.
      epochs, batch_size: Passes over the images by the training party, and images per step or call.
      copies: N_Aug of Split Adaptation, besides the original.
      directions: k, the numbers per image in "sa_private".

    Raises:
      ValueError: A number is not positive (copies: negative).
    """

    images: int
    num_classes: int
    epochs: int = 100
    batch_size: int = 32
    copies: int = 64
    directions: int = 32

    def __post_init__(self) -> None:
        at_least(1, images=self.images, epochs=self.epochs)
        at_least(1, batch_size=self.batch_size, directions=self.directions)
        at_least(2, num_classes=self.num_classes)
        at_least(0, copies=self.copies)

    @property
    def batch(self) -> int:
        """The number of images in a step or call."""
        return min(self.batch_size, self.images)


def cost(method: str, backbone: Backbone, **job: Any) -> Cost:
    """Counts the cost of a method for a client.

    - "lp", "ft", "ln": The client downloads the model and uploads nothing. With "lp" it computes
      its features once.
    - "sl" (split learning): Representations and, for the head, their gradients cross in every step.
    - "ot" (offsite tuning): The client downloads the emulator, and uploads adapters and head.
    - "sa...": The client downloads the frontend and uploads representations. "sa" (published)
      uploads and retrieves all copies of every image, "sa_noise_once" one copy. In both the client
      keeps the labels. So in every epoch it downloads logits of all copies and uploads their
      gradients. "sa_private" uploads a few coordinates and a label.

    Args:
      method: One of `jaxdp.split.METHODS`.
      backbone: The model and its cut, without parameters.
      job: The attributes of `Job`, such as images=500, num_classes=100.

    Raises:
      ValueError: The method is unknown, a number is not positive (copies: negative), or as the
          baseline.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    counted_job = Job(**job)
    quantised = method.startswith("sa")
    if quantised:
        client = _split_adaptation(method, backbone, counted_job)
    elif method == "sl":
        client = _split_learning(method, backbone, counted_job)
    else:
        client = _whole_model(method, backbone, counted_job)
    programs = client.programs
    flops = {name: program.flops for name, program in programs.items()}
    of_image = sum(flops[name] * program.passes for name, program in programs.items())
    parameters = _size(client.params)
    bytes_each = 1 if quantised else _FLOAT
    return Cost(
        parameters=parameters,
        parameter_bytes=parameters * bytes_each,
        forward_flops=flops["forward"],
        training_flops=flops.get("training", 0),
        total_flops=of_image * counted_job.images,
        upload=client.upload,
        download=client.download,
        programs=programs,
    )


def count_macs(fn: Callable[..., Any], *args: Any) -> int:
    """Counts the multiply-adds in all products and convolutions of a function.

    Of branches the costliest counts. A `while_loop` with a product raises ValueError.
    """
    return _macs(jax.make_jaxpr(fn)(*args).jaxpr)


def _macs(jaxpr: Any) -> int:
    return sum(map(_macs_of_equation, jaxpr.eqns))


def _macs_of_equation(eqn: Any) -> int:
    name = eqn.primitive.name
    outputs = 0
    if eqn.outvars:
        output = eqn.outvars[-1].aval
        outputs = math.prod(output.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval
        return outputs * math.prod(left.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        numbers = eqn.params["dimension_numbers"]
        features = kernel[numbers.rhs_spec[0]]
        return outputs * math.prod(kernel) // features
    leaves = jax.tree.leaves(list(eqn.params.values()))
    bodies = [leaf for leaf in leaves if isinstance(leaf, _BODIES)]
    inner = [_macs(getattr(body, "jaxpr", body)) for body in bodies]
    if name == "while" and any(inner):
        raise ValueError(
            "a while_loop has an unknown number of steps, so its products are not counted. Use "
            "scan."
        )
    if name == "cond":
        return max(inner)
    return sum(inner) * (eqn.params["length"] if name == "scan" else 1)


# --- The clients of the methods -----------------------------------------------------------------


class _Client(NamedTuple):
    """What a client holds, computes and exchanges. `params` and `programs` are by path and name."""

    params: Shapes
    programs: Mapping[str, Program]
    upload: int
    download: int


def _whole_model(method: str, backbone: Backbone, job: Job) -> _Client:
    recipe, _, held = _begin(method, backbone, job)
    trained, frozen = divide_trained(recipe, unflatten_dict(held, sep="/"))
    images, labels = _batch(backbone, job)
    forward = _forward((*recipe.features, *recipe.training))
    features = _forward(recipe.features)
    loss = training_loss(recipe.training)

    def step(trained: Any, state: Any, frozen: Any, batch: Any) -> Any:
        def mean_loss(trained: Any) -> jax.Array:
            losses = loss(trained, frozen, batch, jax.random.key(0))
            return losses.mean()

        gradient = jax.grad(mean_loss)(trained)
        return _adam_step(trained, state, gradient)

    state = jax.eval_shape(optax.scale_by_adam().init, trained)
    batch = (jax.eval_shape(features, held, images), labels)
    args = (trained, state, frozen, batch)
    programs = {
        "forward": Program(forward, (held, images), job.batch, 0),
        "training": Program(step, args, job.batch, job.epochs),
    }
    if recipe.features:
        programs["features"] = Program(features, (held, images), job.batch, 1)
    upload = 0
    if method.startswith("ot"):
        upload = _FLOAT * _size(trained)
    download = _FLOAT * _size(_without_head(held))
    return _Client(held, programs, upload, download)


def _adam_step(params: Any, state: Any, gradient: Any) -> Any:
    """Returns what `adam_step` does. No cost depends on the learning rate."""
    return adam_step(params, state, gradient, jnp.float32(1e-3))


def _split_learning(method: str, backbone: Backbone, job: Job) -> _Client:
    recipe, params, held = _begin(method, backbone, job)
    whole: Any = recipe.training[0]
    model, last = whole.backbone, backbone.model.num_blocks
    images, labels = _batch(backbone, job)
    forward = _forward([Blocks(model, 0, backbone.cut)])
    first_tokens = FirstTokens(backbone.head_tokens)
    to_head = _forward([Blocks(model, 0, last), first_tokens])
    cut = jax.eval_shape(forward, held, images)
    tokens = jax.eval_shape(to_head, params, images)
    # The last LayerNorm belongs to the server. It may stay here, since it has no product.
    norm = {path: leaf for path, leaf in params.items() if path.startswith("norm/")}
    loss = training_loss((Blocks(model, last, None),))

    def step(
        held: Any, state: Any, norm: Any, images: Any, received: Any, tokens: Any, labels: Any
    ) -> Any:
        def surrogate(held: Any, tokens: Any) -> tuple[jax.Array, jax.Array]:
            """Has the same gradients as the loss.

            The server sends the gradients with respect to representations.
            """
            sent = forward(held, images)
            head_losses = loss(held, norm, (tokens, labels), jax.random.key(0))
            product = (sent * received).sum()
            return product + head_losses.mean(), sent

        gradient = jax.grad(surrogate, argnums=(0, 1), has_aux=True)
        (held_gradient, token_gradient), sent = gradient(held, tokens)
        update = _adam_step(held, state, held_gradient)
        return update, sent, token_gradient

    state = jax.eval_shape(optax.scale_by_adam().init, held)
    args = (held, state, norm, images, cut, tokens, labels)
    front = _without_head(held)
    programs = {
        "forward": Program(forward, (front, images), job.batch, 0),
        "training": Program(step, args, job.batch, job.epochs),
    }
    # The head's inputs and the representations cross once in each direction, as values or as
    # gradients.
    of_cut = math.prod(cut.shape[1:])
    of_head = (backbone.prefix_tokens or 1) * tokens.shape[2]
    numbers = of_cut + of_head
    exchanged = _FLOAT * job.epochs * job.images * numbers
    return _Client(held, programs, exchanged, _FLOAT * _size(front) + exchanged)


def _split_adaptation(method: str, backbone: Backbone, job: Job) -> _Client:
    (tokens, width), shapes, _ = describe_frontend(backbone)
    held = {path: _floats(*shape) for path, shape in shapes.items()}
    forward = _forward([Blocks(backbone, 0, backbone.cut)])
    images, _ = _batch(backbone, job)
    programs = {"forward": Program(forward, (held, images), job.batch, 1)}
    package = _size(held)  # int8 codes
    if method == "sa_private":
        matrix = _floats(tokens * width, job.directions)
        projection = Projection(_floats(tokens, width), matrix)
        args = (projection, _floats(job.batch, tokens, width))
        programs["projection"] = Program(project, args, job.batch, 1)
        upload = _FLOAT * job.images * (job.directions + 1)  # k numbers and an int32 label
        download = package + _FLOAT * _size(projection)
        return _Client(held, programs, upload, download)
    upload = _FLOAT * job.images * tokens * width
    if method == "sa":
        representations = _floats(job.images, tokens, width)
        programs["retrieval"] = Program(retrieve_neighbors, (representations,), job.images, 1)
        upload *= 1 + job.copies
    # The client downloads logits and uploads gradients of the loss (section 3.5, Eq. 14).
    exchanged = _FLOAT * job.epochs * job.images * (1 + job.copies) * job.num_classes
    return _Client(held, programs, upload + exchanged, package + exchanged)


def _begin(method: str, backbone: Backbone, job: Job) -> tuple[Recipe, Shapes, Shapes]:
    """Returns the recipe of a baseline, and the shapes of all parameters and of the client's."""
    key = jax.random.key(0)
    variables = jax.eval_shape(backbone.model.init, key, backbone.images)
    baseline = BASELINES[method]
    recipe, params = baseline(backbone, variables["params"], num_classes=job.num_classes, key=key)
    leaves = flatten_dict(params, sep="/")
    flat = {path: _floats(*leaf.shape) for path, leaf in leaves.items()}
    held = {path: leaf for path, leaf in flat.items() if path in recipe.client}
    return recipe, flat, held


def _forward(pieces: Sequence[Piece]) -> Callable[..., Any]:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        return run(pieces, unflatten_dict(params, sep="/"), x)

    return forward


def _batch(backbone: Backbone, job: Job) -> tuple[Any, Any]:
    _, *image_shape = backbone.images.shape
    images = _floats(job.batch, *image_shape)
    labels = jax.ShapeDtypeStruct((job.batch,), jnp.int32)
    return images, labels


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _without_head(params: Shapes) -> Shapes:
    return {path: leaf for path, leaf in params.items() if not path.startswith("head")}


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
