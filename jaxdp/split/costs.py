"""What an adaptation costs one client: Table 2, and what is uploaded and downloaded, which the paper leaves out.

    cost("sa", backbone, images=500, num_classes=100)
    cost("ft", backbone, images=500, num_classes=100, measure="run").measured.seconds

The numbers are counted, from shapes alone, so that a ViT-L takes seconds and no memory; on request they are measured
too, on the device at hand. The server's work is not in them.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxdp.split.augment import retrieve_neighbors
from jaxdp.split.backbone import Backbone
from jaxdp.split.baselines import BASELINES, Blocks, FirstTokens, Piece, Plan, divide_trained, run, training_loss
from jaxdp.split.private import Projection, project
from jaxdp.split.training import adam_step

METHODS = (*BASELINES, "sa", "sa_noise_once", "sa_private")
_FLOAT = 4  # bytes, as of the int32 labels
_RATE = 1e-3  # of Adam; any will do
_REPEATS = 3


class Measured(NamedTuple):
    """What XLA says of the compiled programs on this device, for comparison with what was counted.

    Attributes:
      forward_flops: per image, with what is no product: softmax, GELU, LayerNorm.
      training_flops: per image, the same.
      peak_bytes: arguments, results and temporary memory of the largest program, with Adam's state and one batch.
      seconds: of the whole adaptation: those of one call times the number of calls. None unless it was run.
    """

    forward_flops: float
    training_flops: float
    peak_bytes: int
    seconds: float | None


class Cost(NamedTuple):
    """What an adaptation costs one client. FLOPs are those of matrix products and convolutions, two for a
    multiplication with its addition.

    Attributes:
      parameters: how many the client holds.
      parameter_bytes: as it holds them: float32, or the int8 codes of Split Adaptation, whose scales, one or a few per
        layer, are left out; they are made float32 when they are used.
      forward_flops: per image, of one forward pass through what the client holds.
      training_flops: per image, of one step of training, forward and backward; 0 if the client trains nothing.
      total_flops: of the whole adaptation.
      upload, download: bytes, of the whole adaptation.
      measured: None unless asked for.
    """

    parameters: int
    parameter_bytes: int
    forward_flops: int
    training_flops: int
    total_flops: int
    upload: int
    download: int
    measured: Measured | None = None


def cost(
    method: str,
    backbone: Backbone,
    *,
    images: int,
    num_classes: int,
    epochs: int = 100,
    batch_size: int = 32,
    copies: int = 64,
    directions: int = 32,
    measure: Literal["compile", "run"] | None = None,
) -> Cost:
    """Counts what a method costs a client, and measures it if asked to.

    Where the work is done: the client of "lp", "ft" and "ln" downloads the model and uploads nothing; that of linear
    probing computes its features once. In split learning ("sl") representations and, for the head, their gradients
    cross in every step. In offsite tuning ("ot") the emulator comes down, adapters and head go up. In Split Adaptation
    the frontend comes down and representations go up: all copies of every image ("sa", as published, with their
    retrieval), one of every image ("sa_noise_once"), or a few coordinates and a label ("sa_private"). With the labels
    at the client, as in the first two, logits of all copies come down in every epoch and their gradients go up.

    Args:
      method: one of `METHODS`.
      backbone: the model and where it is cut; its parameters are not needed.
      images: n of the client.
      num_classes: K of its task.
      epochs: passes over the images, of whoever trains.
      batch_size: images per step or call.
      copies: N_Aug of Split Adaptation, besides the original representation.
      directions: k numbers per image in "sa_private".
      measure: "compile" compiles the client's programs and reads XLA's accounts, "run" times them too. The frontend of
        Split Adaptation is then measured without noise and without rounding of activations.

    Raises:
      ValueError: an unknown method or `measure`, a number that is not positive (copies: negative), or as the baseline.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if measure not in (None, "compile", "run"):
        raise ValueError(f"measure must be 'compile', 'run' or None, got {measure!r}")
    numbers = {"images": images, "epochs": epochs, "batch_size": batch_size, "directions": directions}
    for name, value in numbers.items():
        if not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes!r}")
    if copies < 0:
        raise ValueError(f"copies must be at least 0, got {copies!r}")
    job = _Job(images, num_classes, epochs, min(batch_size, images), copies, directions)
    if method.startswith("sa"):
        client = _split_adaptation(method, backbone, job)
    elif method == "sl":
        client = _split_learning(backbone, job)
    else:
        client = _whole_model(method, backbone, job)
    counted = {name: 2 * count_macs(p.run, *p.args) // p.images for name, p in client.programs.items()}
    return Cost(
        parameters=_size(client.params),
        parameter_bytes=client.parameter_bytes,
        forward_flops=counted["forward"],
        training_flops=counted.get("training", 0),
        total_flops=sum(flops * images * client.programs[name].passes for name, flops in counted.items()),
        upload=client.upload,
        download=client.download,
        measured=None if measure is None else _measure(client, job, timed=measure == "run"),
    )


def count_macs(fn: Callable[..., Any], *args: Any) -> int:
    """Multiplications with an addition in all matrix products and convolutions of a function.

    Args:
      fn: a JAX function; a loop of unknown length is refused, of branches the costliest counts.
      *args: its arguments; `jax.ShapeDtypeStruct` will do.

    Raises:
      ValueError: for a `while_loop` with a product in it.
    """
    return _macs(jax.make_jaxpr(fn)(*args).jaxpr)


def _macs(jaxpr: jex.Jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        shapes: list[Any] = [variable.aval for variable in (*eqn.invars, *eqn.outvars)]
        params, first, out = eqn.params, shapes[0], shapes[-1]
        inner = [_macs(body) for value in params.values() for body in _jaxprs(value)]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            total += math.prod(out.shape) * math.prod(first.shape[axis] for axis in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = shapes[1].shape
            total += math.prod(out.shape) * math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
        elif eqn.primitive.name == "scan":
            total += params["length"] * sum(inner)
        elif eqn.primitive.name == "cond":
            total += max(inner)
        elif eqn.primitive.name == "while" and any(inner):
            raise ValueError("the products in a while_loop cannot be counted: nobody knows how often it runs; use scan")
        else:
            total += sum(inner)
    return total


def _jaxprs(value: Any) -> list[jex.Jaxpr]:
    """The programs in a parameter of an equation."""
    if isinstance(value, jex.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, jex.Jaxpr):
        return [value]
    return [body for item in value for body in _jaxprs(item)] if isinstance(value, tuple) else []


# --- What the clients of the methods do -------------------------------------------------------------------------------


class _Job(NamedTuple):
    images: int
    num_classes: int
    epochs: int
    batch: int
    copies: int
    directions: int


class _Program(NamedTuple):
    """A program of the client, the shapes of its arguments, images per call, and how often each image goes through."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    images: int
    passes: int


class _Client(NamedTuple):
    params: Mapping[str, Any]
    parameter_bytes: int
    programs: Mapping[str, _Program]
    upload: int
    download: int


def _whole_model(method: str, backbone: Backbone, job: _Job) -> _Client:
    plan, params = _begin(method, backbone, job.num_classes)
    held = {path: leaf for path, leaf in params.items() if path in plan.client}
    trained, frozen = divide_trained(plan, unflatten_dict(held, sep="/"))
    images, labels = _batch(backbone, job.batch)
    forward, features = _forward((*plan.features, *plan.training)), _forward(plan.features)
    loss = training_loss(plan.training)

    def step(trained: Any, state: Any, frozen: Any, batch: Any) -> Any:
        def mean_loss(trained: Any) -> jax.Array:
            return loss(trained, frozen, batch, jax.random.key(0)).mean()

        return adam_step(trained, state, jax.grad(mean_loss)(trained), jnp.float32(_RATE))

    batch = (jax.eval_shape(features, held, images), labels)
    programs = {
        "forward": _Program(forward, (held, images), job.batch, 0),
        "training": _Program(step, (trained, _state(trained), frozen, batch), job.batch, job.epochs),
    }
    if plan.features:
        programs["features"] = _Program(features, (held, images), job.batch, 1)
    upload = _bytes(trained) if method.startswith("ot") else 0
    return _Client(held, _bytes(held), programs, upload, _bytes(_without_head(held)))


def _split_learning(backbone: Backbone, job: _Job) -> _Client:
    plan, params = _begin("sl", backbone, job.num_classes)
    held = {path: leaf for path, leaf in params.items() if path in plan.client}
    front = _without_head(held)
    whole: Any = plan.training[0]
    model, last = whole.backbone, backbone.model.num_blocks
    images, labels = _batch(backbone, job.batch)
    forward = _forward((Blocks(model, 0, backbone.cut),))
    read = _forward((Blocks(model, 0, last), FirstTokens(backbone.prefix_tokens)))
    cut, tokens = jax.eval_shape(forward, front, images), jax.eval_shape(read, params, images)
    # The last LayerNorm, the server's, is left in: it has no product.
    norm = {path: leaf for path, leaf in params.items() if path.startswith("norm/")}
    loss = training_loss((Blocks(model, last, None),))

    def step(held: Any, state: Any, norm: Any, images: Any, received: Any, tokens: Any, labels: Any) -> Any:
        def mean_loss(heads: Any, tokens: Any) -> jax.Array:
            return loss(heads, norm, (tokens, labels), jax.random.key(0)).mean()

        front = _without_head(held)
        representations, pull_back = jax.vjp(lambda front: forward(front, images), front)
        heads = {path: leaf for path, leaf in held.items() if path not in front}
        of_heads, of_tokens = jax.grad(mean_loss, argnums=(0, 1))(heads, tokens)
        gradients = {**pull_back(received)[0], **of_heads}
        return adam_step(held, state, gradients, jnp.float32(_RATE)), representations, of_tokens

    args = (held, _state(held), norm, images, cut, tokens, labels)
    programs = {
        "forward": _Program(forward, (front, images), job.batch, 0),
        "training": _Program(step, args, job.batch, job.epochs),
    }
    # Up go representations and gradients by what the head reads; down come gradients by representations, and what it
    # reads.
    numbers = math.prod(cut.shape[1:]) + (backbone.prefix_tokens or 1) * tokens.shape[2]
    exchanged = _FLOAT * job.epochs * job.images * numbers
    return _Client(held, _bytes(held), programs, exchanged, _bytes(front) + exchanged)


def _split_adaptation(method: str, backbone: Backbone, job: _Job) -> _Client:
    images, _ = _batch(backbone, job.batch)
    held = flatten_dict(jax.eval_shape(lambda: _init(backbone, 0, backbone.cut)), sep="/")
    forward = _forward((Blocks(backbone, 0, backbone.cut),))
    _, tokens, width = jax.eval_shape(forward, held, images).shape
    programs = {"forward": _Program(forward, (held, images), job.batch, 1)}
    package = _size(held)  # int8 codes
    upload = _FLOAT * job.images * tokens * width
    if method == "sa_private":
        projection = Projection(_floats(tokens, width), _floats(tokens * width, job.directions))
        programs["projection"] = _Program(project, (projection, _floats(job.batch, tokens, width)), job.batch, 1)
        upload = _FLOAT * job.images * (job.directions + 1)  # k numbers and an int32 label
        return _Client(held, package, programs, upload, package + _bytes(projection))
    if method == "sa":
        whole = _floats(job.images, tokens, width)
        programs["retrieval"] = _Program(retrieve_neighbors, (whole,), job.images, 1)
        upload *= 1 + job.copies
    # Logits come down, and gradients of the loss by them go up (section 3.5, Eq. 14).
    exchanged = _FLOAT * job.epochs * job.images * (1 + job.copies) * job.num_classes
    return _Client(held, package, programs, upload + exchanged, package + exchanged)


# --- Shapes -----------------------------------------------------------------------------------------------------------


def _begin(method: str, backbone: Backbone, num_classes: int) -> tuple[Plan, dict[str, Any]]:
    """The plan of a baseline, and the shapes of what it starts from, by path."""
    found: list[Plan] = []

    def start() -> Any:
        plan, params = BASELINES[method](backbone, _init(backbone), num_classes=num_classes, key=jax.random.key(0))
        found.append(plan)
        return params

    shapes = flatten_dict(jax.eval_shape(start), sep="/")
    return found[0], shapes


def _init(backbone: Backbone, *blocks: int) -> Any:
    return backbone.model.init(jax.random.key(0), jnp.zeros(backbone.images.shape), *blocks)["params"]


def _forward(pieces: tuple[Piece, ...]) -> Callable[..., Any]:
    return lambda params, x: run(pieces, unflatten_dict(params, sep="/"), x)


def _state(params: Any) -> Any:
    return jax.eval_shape(optax.scale_by_adam().init, params)


def _batch(backbone: Backbone, size: int) -> tuple[Any, Any]:
    return _floats(size, *backbone.images.shape[1:]), jax.ShapeDtypeStruct((size,), jnp.int32)


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _without_head(params: Mapping[str, Any]) -> dict[str, Any]:
    return {path: leaf for path, leaf in params.items() if not path.startswith("head")}


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return _FLOAT * _size(tree)


# --- Measurement ------------------------------------------------------------------------------------------------------


def _measure(client: _Client, job: _Job, *, timed: bool) -> Measured:
    flops, peak, seconds = {"training": 0.0}, 0, 0.0
    for name, program in client.programs.items():
        compiled: Any = jax.jit(program.run).lower(*program.args).compile()
        flops[name] = compiled.cost_analysis()["flops"] / program.images
        if not program.passes:
            continue
        memory = compiled.memory_analysis()
        parts = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
        peak = max(peak, sum(parts) - memory.alias_size_in_bytes)
        if timed:
            seconds += _seconds(compiled, program.args) * program.passes * -(-job.images // program.images)
    return Measured(flops["forward"], flops["training"], peak, seconds if timed else None)


def _seconds(compiled: Callable[..., Any], shapes: tuple[Any, ...]) -> float:
    """The median of some calls, after a first one."""
    args = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    taken = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
