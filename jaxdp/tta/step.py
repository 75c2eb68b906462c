"""The compiled step of test-time adaptation: predict a batch, then adapt to it.

`Adapter` compiles it. It has two forms: `_plain_step` is a method as published or clipped, and
`_private_step` is the equations of `jaxdp.tta.private`. In this module the params of a state hold
only the parameters that adapt, with None elsewhere.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.transforms.clipping import clipped_grad
from jaxdp.transforms.grids import Grid
from jaxdp.transforms.meshes import Layout
from jaxdp.transforms.noise import CorrelatedNoise, gaussian, rounded_gaussian
from jaxdp.tta.clipped import Unit
from jaxdp.tta.finite import all_finite, without_bad_rows
from jaxdp.tta.method import Method, Sample
from jaxdp.tta.select import merge

ApplyFn = Callable[[Any, jax.Array], jax.Array]
Predict = Literal["before", "after"]


class NoiseRows(NamedTuple):
    """The place of a state in a period of correlated noise.

    Attributes:
      number: int32 scalar, the row of C^-1 Z that the next update gets. A period begins at 0.
      buffers: What the recurrence keeps of earlier rows, [buffers, ...] for each adapted parameter.
        They are as secret as the key of the noise.
    """

    number: jax.Array
    buffers: Any


class AdaptState(NamedTuple):
    """The state that a step changes.

    Attributes:
      step: int32 scalar, the number of batches seen. A reset does not rewind it, because noise keys
          derive from it.
      params: All parameters. Parameters that do not adapt are the source model's own arrays.
      opt_state: The state of the optimizer.
      memory: A raw function of the images seen, for a method that is not private. () for a private
          method.
      released: The previous private gradient, for methods with an ascent step. None for other
          methods.
      pending: The clipped sum of the batches of an unfinished update, without noise. It is as
        secret as `key`. None unless `accumulate` > 1.
      rows: The place in a period of correlated noise, and its secret buffers. None for independent
        noise. A reset begins a new period.
      key: The key of noise and second views in a custom loop. With it the noise can be subtracted.
        `serve` draws other keys and uses this one only to name the state.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    memory: Any
    released: Any
    pending: Any
    rows: NoiseRows | None
    key: jax.Array

    def __repr__(self) -> str:
        """Returns text without arrays, so that no log shows the key or an unfinished sum."""
        return f"{type(self).__name__}(step={self.step}, ...)"


class StepProgram(NamedTuple):
    """The static part of a step.

    The clip norm, the noise, and learning rates in opt_state are not in it, so that another value
    of them does not recompile it.
    """

    apply_fn: ApplyFn
    method: Method
    update: Callable[..., Any]
    adapted: frozenset[str]
    accumulate: int
    reset_every: int | None
    predict: Predict
    private: bool
    clipped: Unit | None
    layout: Layout | None
    noisy: bool = False
    filters: str = "keep"
    clip_rule: Any = "global"
    grid: Grid | None = None
    noise: CorrelatedNoise | None = None


class StepConstants(NamedTuple):
    """Public numbers and arrays of a step."""

    params: Any  # of the source model
    moving: Any  # the parameters that adapt, None elsewhere
    opt_state: Any
    clip_norm: float = 0.0
    noise_std: float = 0.0
    divisor_scale: float = 1.0


def fresh_state(
    program: StepProgram, constants: StepConstants, step: jax.Array, key: jax.Array
) -> AdaptState:
    """Returns the state of the source model.

    A reset to it clears momentum, previous gradient, unfinished sum and rows of noise, and does not
    rewind `step`.
    """
    zeros = jax.tree.map(jnp.zeros_like, widened(constants.moving))
    no_sum = zeros
    if program.grid is not None:
        no_sum = jax.tree.map(lambda x: x.astype(jnp.int32), zeros)
    return AdaptState(
        step=step,
        params=constants.moving,
        opt_state=constants.opt_state,
        memory=() if program.private else program.method.start(),
        released=zeros if program.private and program.method.radius else None,
        pending=no_sum if program.accumulate > 1 else None,
        rows=_first_row(program, zeros),
        key=key,
    )


def _first_row(program: StepProgram, zeros: Any) -> NoiseRows | None:
    """Returns the place before a period of correlated noise."""
    if program.noise is None:
        return None
    return NoiseRows(jnp.zeros((), jnp.int32), program.noise.zeros(zeros))


# The name is in the text of the program, and the token of every release of a stream hashes that
# text.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(
    program: StepProgram,
    size: int,
    constants: StepConstants,
    state: AdaptState,
    images: jax.Array,
    mask: jax.Array,
    key: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    """Makes one step on a batch of `size` images, whose rows from `size` on are padding."""
    layout = program.layout
    if layout is None:
        return _advanced(program, size, constants, state, images, mask, key)
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        like = (constants.params, constants.moving)
        # Each device computes with whole parameters.
        constants, state = layout.whole().constrained((constants, state), *like)
        state, logits = _advanced(program, size, constants, state, images, mask, key)
        return layout.constrained(state, *like), logits[:size]


compiled_step = _step


def _advanced(
    program: StepProgram,
    size: int,
    constants: StepConstants,
    state: AdaptState,
    images: jax.Array,
    mask: jax.Array,
    key: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    if program.reset_every is not None:
        due = (state.step > 0) & (state.step % program.reset_every == 0)
        state = _reset_where(due, program, constants, state)
    if not program.private:
        # Padding may be NaN, and zero times NaN in a loss has a NaN gradient.
        present = mask.reshape(-1, *[1] * (images.ndim - 1))
        images = jnp.where(present | jnp.isfinite(images), images, 0)
    views = _second_views(program.method, size, state.step, images, key)
    if program.private:
        new, logits = _private_step(program, size, constants, state, (images, views), mask, key)
    else:
        new, logits = _plain_step(program, constants, state, (images, views), mask)
    if program.predict == "after":
        logits = _predict(program, merge(new.params, constants.params), images)
    return new._replace(step=state.step + 1), logits


def _second_views(
    method: Method, size: int, step: jax.Array, images: jax.Array, key: jax.Array
) -> Any:
    """Returns the second view of each image, or None for a method without them."""
    # Keys of this kind stay independent under vmap, and reveal nothing about the noise.
    words = jax.random.bits(jax.random.fold_in(key, step), (2,), jnp.uint32)
    view_key = jax.random.wrap_key_data(words, impl="threefry2x32")
    own_keys = jax.random.split(view_key, size)
    common_key = jax.random.fold_in(view_key, size)
    if size < len(images):
        # Rows of padding take the last key, so that the keys of the images are those without a
        # mesh.
        own_keys = own_keys[np.minimum(np.arange(len(images)), size - 1)]
    return jax.vmap(method.augment, in_axes=(0, None, 0))(own_keys, common_key, images)


# --- The published form, and the clipped one ----------------------------------------------------


class _PerImage(NamedTuple):
    """What a plain step reads of every image, without gradient."""

    logits: jax.Array
    sample: Sample
    finite: jax.Array  # whether logits, loss and weight are numbers
    selected: jax.Array  # whether the image takes part


def _plain_step(
    program: StepProgram,
    constants: StepConstants,
    state: AdaptState,
    examples: tuple[jax.Array, Any],
    mask: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    """Makes one step of the method as published, or of its clipped form."""
    method = program.method
    published = functools.partial(_published_gradient, program, constants, state.memory, examples)
    followed = published
    if program.clipped == "image":
        followed = functools.partial(_clipped_gradient, program, constants, state.memory, examples)
    elif program.clipped == "batch":
        followed = functools.partial(_clipped_mean, constants, published)
    if method.radius:
        # The ascent is that of the unclipped gradient also in the clipped form.
        ascent, first = published(state.params, mask)
        ahead = _add(state.params, _ascent(method.radius, ascent))
        gradient, last = followed(ahead, first.selected)
    else:
        gradient, last = followed(state.params, mask)
        first = last
    new = _update(program, constants, state, gradient)
    if method.skips_empty:
        new = _where(last.selected.any(), new, state)
    memory = method.remember(state.memory, last.sample, last.selected)
    new = _reset_where(method.lost(memory), program, constants, new._replace(memory=memory))
    # A batch without one usable image, or with a gradient that is no number, changes nothing.
    usable = (mask & first.finite).any() | ~mask.any()
    return _where(usable & all_finite(gradient), new, state), first.logits


def _weighted(
    method: Method,
    memory: Any,
    logits: jax.Array,
    view_logits: jax.Array | None,
    candidate: jax.Array,
) -> tuple[jax.Array, _PerImage]:
    """Returns the weighted loss of one image, 0 if it does not take part."""
    sample = method(logits, view_logits)
    fixed = jax.lax.stop_gradient(sample)
    weight = method.weight(fixed)
    finite = _are_numbers(fixed, weight)
    reliable, novel = method.reliable(fixed), method.novel(memory, fixed)
    _check_hooks(method, sample.uncertainty, weight, reliable, novel)
    selected = candidate & finite & reliable & novel
    loss = jnp.where(selected, weight * sample.uncertainty, 0)  # 0 times NaN would be NaN
    return loss, _PerImage(logits, fixed, finite, selected)


def _check_hooks(method: Method, *values: jax.Array) -> None:
    """Checks what the hooks of a method return for one image, while the step is traced.

    A row of numbers in place of one would broadcast, and the sum of the losses would be another.
    """
    hooks = f"the hooks of {type(method).__name__} on one image must return scalars."
    for value in values:
        chex.assert_shape(value, (), custom_message=hooks)


def _are_numbers(sample: Sample, weight: jax.Array) -> jax.Array:
    """Returns whether an image has a loss. A logit of -inf masks a class."""
    known = (sample.logits < jnp.inf).all()  # False for NaN
    return (
        known
        & jnp.isfinite(sample.uncertainty)
        & jnp.isfinite(sample.drop)
        & jnp.isfinite(weight).all()
    )


def _published_gradient(
    program: StepProgram,
    constants: StepConstants,
    memory: Any,
    examples: tuple[jax.Array, Any],
    moving: Any,
    candidates: jax.Array,
) -> tuple[Any, _PerImage]:
    """Returns the gradient of the mean loss of the images that take part."""

    def mean(
        moving: Any, images: jax.Array, views: Any, candidates: jax.Array
    ) -> tuple[jax.Array, _PerImage]:
        params = merge(moving, constants.params)
        logits = program.apply_fn(params, images)
        view_logits = None
        if views is not None:
            view_logits = program.apply_fn(jax.lax.stop_gradient(params), views)
        weighted = functools.partial(_weighted, program.method, memory)
        losses, per_image = jax.vmap(weighted)(logits, view_logits, candidates)
        return losses.sum() / jnp.maximum(per_image.selected.sum(), 1), per_image

    def compute(examples: Any, present: jax.Array) -> tuple[Any, jax.Array]:
        gradient, per_image = jax.grad(mean, has_aux=True)(moving, *examples, present)
        return (gradient, per_image), per_image.finite

    all_rows, finite_rows, finite = without_bad_rows(compute, examples, candidates)
    _, first = all_rows
    gradient, per_image = finite_rows
    # Every image is answered, also one that is left out.
    return gradient, per_image._replace(logits=first.logits, finite=finite)


def _clipped_gradient(
    program: StepProgram,
    constants: StepConstants,
    memory: Any,
    examples: tuple[jax.Array, Any],
    moving: Any,
    candidates: jax.Array,
) -> tuple[Any, _PerImage]:
    """Returns the mean of the clipped gradients of the images that take part."""

    def loss(params: Any, example: Any) -> tuple[jax.Array, _PerImage]:
        image, view, candidate = example
        logits, view_logits = _views_of_one(program, params, image, view)
        return _weighted(program.method, memory, logits, view_logits, candidate)

    params = merge(moving, constants.params)
    clipped = _clipped_sum(program, constants, loss)(params, (*examples, candidates))
    per_image: _PerImage = clipped.aux
    per_image = per_image._replace(selected=per_image.selected & jnp.isfinite(clipped.norms))
    count = jnp.maximum(per_image.selected.sum(), 1)
    return jax.tree.map(lambda x: x / count, clipped.grads), per_image


def _clipped_mean(
    constants: StepConstants,
    published: Callable[[Any, jax.Array], tuple[Any, _PerImage]],
    moving: Any,
    candidates: jax.Array,
) -> tuple[Any, _PerImage]:
    """Returns the gradient of the mean loss, clipped as a whole."""
    gradient, per_image = published(moving, candidates)
    factor = jnp.minimum(1, constants.clip_norm / optax.tree.norm(gradient))  # norm 0: min(1, inf)
    return jax.tree.map(lambda g: factor * g, gradient), per_image


# --- The private form ---------------------------------------------------------------------------


def _private_step(
    program: StepProgram,
    size: int,
    constants: StepConstants,
    state: AdaptState,
    examples: tuple[jax.Array, Any],
    mask: jax.Array,
    key: jax.Array,
) -> tuple[AdaptState, jax.Array]:
    """Makes one step of the private form by the equations in `jaxdp.tta.private`."""
    method = program.method

    def loss(params: Any, example: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
        logits, view_logits = _views_of_one(program, params, *example)
        sample = method(logits, view_logits)
        fixed = jax.lax.stop_gradient(sample)
        weight = method.weight(fixed)
        _check_hooks(method, sample.uncertainty, weight)
        if program.filters == "keep":
            # A factor 0 or 1, inside the clip of its own image.
            weight = jnp.where(method.reliable(fixed), weight, 0)
        return weight * sample.uncertainty, logits

    clipped_sum = _clipped_sum(program, constants, loss)
    params = merge(state.params, constants.params)
    if method.radius:
        # e_t is made of the previous private gradient, so it costs nothing.
        ahead = merge(_add(state.params, _ascent(method.radius, state.released)), constants.params)
        clipped = clipped_sum(ahead, examples, mask)
        images, _ = examples
        logits = _predict(program, params, images)  # of theta_t, not theta_t + e_t
    else:
        clipped = clipped_sum(params, examples, mask)
        logits = clipped.aux
    total = clipped.grads
    if program.accumulate > 1:
        total = _add(state.pending, total)

    # Every update gets its full noise and the public divisor, also if all images are padding.
    def release(total: Any) -> AdaptState:
        noisy_sum = total
        rows = state.rows
        if program.grid is not None:
            noise = rounded_gaussian(key, total, program.grid.bits, number=state.step)
            noisy_sum = jax.tree.map(program.grid.at().read, _add(total, noise))
        elif program.noisy:
            noise = gaussian(key, total, constants.noise_std, number=state.step)
            if program.noise is not None:
                noise, rows = _next_row(program.noise, rows, noise)
            noisy_sum = _add(total, noise)
        divisor = size * program.accumulate * constants.divisor_scale
        gradient = jax.tree.map(lambda x: x / divisor, noisy_sum)
        return _update(program, constants, state, gradient)._replace(
            released=gradient if method.radius else None,
            pending=None if state.pending is None else jax.tree.map(jnp.zeros_like, total),
            rows=rows,
        )

    if program.accumulate == 1:
        return release(total), logits
    due = (state.step + 1) % program.accumulate == 0
    return jax.lax.cond(due, release, lambda total: state._replace(pending=total), total), logits


def _next_row(noise: CorrelatedNoise, rows: Any, fresh: Any) -> tuple[Any, NoiseRows]:
    """Returns a row of C^-1 Z from that of Z, and the place after it."""
    row, buffers = noise.next(rows.number, rows.buffers, fresh)
    number = (rows.number + 1) % noise.steps
    # A period shares no row with the next one, and leaves no secret.
    buffers = jax.tree.map(lambda kept: jnp.where(number == 0, 0, kept), buffers)
    return row, NoiseRows(number, buffers)


# --- Parts of both forms ------------------------------------------------------------------------


def _predict(program: StepProgram, params: Any, images: jax.Array) -> jax.Array:
    """Returns logits [B, C].

    A private method passes each image alone, so that no image affects another's logits.
    """
    if program.private:
        return jax.vmap(functools.partial(_predict_one, program, params))(images)
    return program.apply_fn(params, images)


def _predict_one(program: StepProgram, params: Any, image: jax.Array) -> jax.Array:
    return program.apply_fn(params, image[None])[0]


def _views_of_one(
    program: StepProgram, params: Any, image: jax.Array, view: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits [C] of an image, and without gradient those of its second view, if any."""
    view_logits = None
    if view is not None:
        view_logits = _predict_one(program, jax.lax.stop_gradient(params), view)
    return _predict_one(program, params, image), view_logits


def _clipped_sum(
    program: StepProgram, constants: StepConstants, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the clipped sum of the gradients of a loss of one image with auxiliary results."""
    in_floats = clipped_grad(
        loss,
        trainable=functools.partial(_is_in, program.adapted),
        has_aux=True,
        clip_norm=constants.clip_norm,
        clip_rule=program.clip_rule,
    )
    if program.grid is None:
        return in_floats
    # The clip norm is traced, so that `on_grid` cannot compare it.
    return dataclasses.replace(in_floats, grid=program.grid.at())


def _is_in(paths: frozenset[str], path: str, leaf: Any) -> bool:
    return path in paths


def _update(
    program: StepProgram, constants: StepConstants, state: AdaptState, gradient: Any
) -> AdaptState:
    displacement = jax.tree.map(
        lambda new, old: (new - old).astype(jnp.float32), state.params, constants.moving
    )
    pull = program.method.pull(displacement)
    gradient = widened(gradient)
    if pull is not None:
        gradient = _add(gradient, pull)
    updates, opt_state = program.update(gradient, state.opt_state, state.params)
    return state._replace(params=_add(state.params, updates), opt_state=opt_state)


def _ascent(radius: float, gradient: Any) -> Any:
    scale = radius / (optax.tree.norm(gradient) + 1e-12)
    return jax.tree.map(lambda g: scale * g, gradient)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), a, b)


def widened(tree: Any) -> Any:
    """Converts to float32 or wider.

    With bf16 gradients, momentum would change its type in the first step.
    """
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _where(condition: jax.Array, new: AdaptState, old: AdaptState) -> AdaptState:
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def _reset_where(
    condition: jax.Array, program: StepProgram, constants: StepConstants, state: AdaptState
) -> AdaptState:
    return _where(condition, fresh_state(program, constants, state.step, state.key), state)
