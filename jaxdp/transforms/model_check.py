"""Checks of a loss and its parameters before private training, without private data.

`check` runs what `clipped_grad` runs, on made-up examples, and reports every problem that it finds
with its remedy.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms.clipping import (
    ClippedGrad,
    Engine,
    LeafPlan,
    check_params,
    clipped_grad,
    paths_of,
)
from jaxdp.transforms.parameters import not_finite

__all__ = ["Finding", "ModelCheck", "check"]

Severity = Literal["error", "warning", "note"]
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
# A leaf without a rule is worth a note if its per-example gradient has at least this many bytes.
_LARGE = 2**20


class Finding(NamedTuple):
    """One result of a check.

    Attributes:
      severity: "error" (training fails or is meaningless), "warning" (it runs, but loses accuracy)
          or "note".
      message: The problem and its remedy.
    """

    severity: Severity
    message: str


@dataclasses.dataclass(frozen=True)
class ModelCheck:
    """The result of `check`. `str` lists the findings and the total cost of clipping.

    Attributes:
      findings: The findings, errors first.
      leaves: How every leaf of params is clipped. Empty if the loss of one example cannot be
          traced.
    """

    findings: tuple[Finding, ...]
    leaves: tuple[LeafPlan, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)

    def explain(self) -> str:
        """Returns a table of rule, method and cost of every leaf."""
        header = ("leaf", "shape", "dtype", "rule", "method", "work", "memory")
        rows = [header]
        for leaf in self.leaves:
            trained = leaf.method not in ("frozen", "no gradient")
            work = f"{leaf.work:.1f}x" if trained and not math.isnan(leaf.work) else "-"
            memory = _in_words(leaf.bytes) if trained else "-"
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            rows.append(
                (
                    leaf.path,
                    shape,
                    leaf.dtype,
                    ", ".join(leaf.rules) or "-",
                    leaf.method,
                    work,
                    memory,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, _LEGEND])

    def __str__(self) -> str:
        counts = [f"{s}s {sum(f.severity == s for f in self.findings)}" for s in _SEVERITIES]
        lines = [f"jaxdp.check: {', '.join(counts)}"]
        lines += [f"  {severity}: {message}" for severity, message in self.findings]
        if self.leaves:
            trained = [leaf for leaf in self.leaves if leaf.method not in ("frozen", "no gradient")]
            numbers = sum(math.prod(leaf.shape) for leaf in trained)
            lines.append(
                f"  {len(trained)} of {len(self.leaves)} leaves are trained, {numbers:,} numbers. "
                f"Clipping needs {_in_words(sum(leaf.bytes for leaf in trained))} per example "
                f"beyond an ordinary gradient (engine 'vmap': {_in_words(4 * numbers)}). explain() "
                "has a row per leaf."
            )
        lines.append(
            "  Only shapes and dtypes of the example were read. The loss ran on made-up examples."
        )
        return "\n".join(lines)


_LEGEND = """
rule: how the leaf meets data. "direct": scales, biases, and operations without a rule.
method: "factors" takes norms from Gram matrices. "keep" and "drop" form per-example gradients, once or twice.
work: norm and clipped sum over an ordinary gradient, by counted operations and bytes.
memory: bytes per example beyond an ordinary gradient."""


def check(
    loss_fn: Callable[..., Any],
    params: Any,
    example: Any,
    *,
    engine: Engine = "auto",
    trainable: Callable[[str, Any], bool] | None = None,
    has_aux: bool = False,
    stochastic: bool = False,
    group: bool = False,
) -> ModelCheck:
    """Says what will go wrong in private training, before it starts.

        print(jaxdp.check(loss_fn, params, source[0]))

    It finds BatchNorm in batch mode, losses that are written for batches, losses that mix the
    examples of a batch, a loss that is no scalar, models in place of params, numbers that are no
    arrays, complex, integer and low-precision leaves, leaves without a gradient, arrays that the
    loss closes over, random numbers without a key, and NaN.

    Args:
      loss_fn, engine, trainable, has_aux: As in `clipped_grad`.
      params: Pytree of arrays.
      example: ONE example, without a batch axis: a pytree of arrays or of `jax.ShapeDtypeStruct`.
        Only its shapes and dtypes are read. With `group` the records of ONE group, [k, ...], such
        as `patients[0].records` of `jaxdp.data.by_group`.
      stochastic: Whether `loss_fn` takes `key=`.
      group: As in `clipped_grad`: groups of k records are clipped, and `loss_fn` is the loss of one
          record.

    Returns:
      The findings and the plan of every leaf. A problem of the loss is a finding and raises
      nothing.

    Formal guarantees:
      The result does not depend on the values of the example, so a private example may be passed.
      The loss is compiled and runs on made-up examples: zeros, ones, and numbers between 0 and 1.
    """
    found: list[Finding] = []
    try:
        check_params(params)
        shapes, members = _one_record(jax.tree.map(_shape, example), group)
    except (TypeError, ValueError) as error:
        return ModelCheck((Finding("error", str(error)),), ())
    if _requires_key(loss_fn) and not stochastic:
        found.append(Finding("warning", f"loss_fn takes key=. {_PASS_KEY}"))
        stochastic = True
    key = jax.random.key(0) if stochastic else None
    found += _check_leaves(params)
    if not any(
        jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating) for _, leaf in paths_of(params)
    ):
        return ModelCheck(
            (
                *found,
                Finding("error", "params has no array of floating dtype, so nothing is trained."),
            ),
            (),
        )
    kept = trainable or (lambda path, leaf: True)
    f = clipped_grad(
        loss_fn,
        clip_norm=1.0,
        engine=engine,
        trainable=lambda path, leaf: not jnp.iscomplexobj(leaf) and kept(path, leaf),
        has_aux=has_aux,
    )
    leaves: list[LeafPlan] = []
    try:
        for_batches = _written_for_batches(f, params, shapes, key)
        found += for_batches
        if any(finding.severity == "error" for finding in for_batches):
            f = dataclasses.replace(f, loss_fn=_per_example(loss_fn, has_aux))
        batch = _made_up(shapes)
        whole = dataclasses.replace(f, group=group)
        groups = jax.tree.map(lambda x: jnp.stack([x] * members, axis=1), batch) if group else batch
        leaves = whole.plan(params, groups, key=key)
        found += _check_plan(f, params, batch, key, leaves)
        found += _check_values(f, params, batch, key)
    except Exception as error:  # the loss is the caller's, and may fail in any way
        found.append(Finding("error", _explained(error)))
    found.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return ModelCheck(tuple(found), tuple(leaves))


_PASS_KEY = (
    "Pass stochastic=True to jaxdp.check and jaxdp.finetune, or key= in every call of clipped_grad."
)


def _in_words(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    kind = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if jax.dtypes.issubdtype(kind, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(x.shape, kind)
    if kind.kind in "OSUM":
        raise TypeError(
            f"example must be a pytree of numeric arrays, got a leaf of type {type(x).__name__} "
            f"and dtype {kind}. Encode it as numbers, or leave it out."
        )
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(kind))


def _one_record(shapes: Any, group: bool) -> tuple[Any, int]:
    """Returns the shapes of one record of an example, and the number of its records."""
    if not group:
        return shapes, 1
    counts = {x.shape[:1] for x in jax.tree.leaves(shapes)}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            "example must have leaves [k, ...] of the k records of ONE group with group=True, got "
            f"the lengths {sorted(counts)}. Pass the records of one owner, such as "
            "patients[0].records."
        )
    ((members,),) = counts
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes), members


def _made_up(shapes: Any) -> Any:
    """Returns a batch of three examples: zeros, ones, and uniform numbers in [0, 1) (bits for
    integers).
    """
    random = np.random.default_rng(0)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), (3, *x.shape))
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        last = random.uniform(size=x.shape) if floating else random.integers(0, 2, x.shape)
        return jnp.asarray(np.stack([np.zeros(x.shape), np.ones(x.shape), last]), x.dtype)

    return jax.tree.map(leaf, shapes)


def _requires_key(loss_fn: Callable[..., Any]) -> bool:
    try:
        key = inspect.signature(loss_fn).parameters.get("key")
    except (TypeError, ValueError):  # a builtin has no signature
        return False
    return key is not None and key.default is inspect.Parameter.empty


def _explained(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "unbound axis name" in text:
        return (
            "loss_fn calls a collective such as the mean over the batch in Equinox's BatchNorm, "
            "so the loss of one example depends on others. Use GroupNorm or LayerNorm, or freeze "
            "the statistics."
        )
    if isinstance(error, ValueError | TypeError | NotImplementedError) and text.startswith(
        ("loss_fn", "params")
    ):
        return text  # a sentence of `clipped_grad`, with its remedy
    return f"loss_fn fails on one example with {type(error).__name__}: {text[:300]}"


def _check_leaves(params: Any) -> list[Finding]:
    """Returns the findings that follow from the leaves of params alone."""
    found = []
    for path, leaf in paths_of(params):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
            remedy = f"To train it, convert it with jnp.asarray. {_CLOSE}" if number else _CLOSE
            found.append(
                Finding(
                    "error",
                    f"params has {path!r} of type {type(leaf).__name__}, no array. {remedy}",
                )
            )
        elif jnp.iscomplexobj(leaf):
            message = (
                f"params has the complex leaf {path!r}, which cannot be trained. Store its real "
                "and imaginary part as two leaves and join them in loss_fn with jax.lax.complex, "
                "or freeze it with `trainable`."
            )
            found.append(Finding("error", message))
        elif jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            message = (
                f"params has the random key {path!r}, which would be the same in every step. Split "
                "it off (NNX: nnx.split(model, nnx.Param, ...)), and derive randomness from key= "
                "of loss_fn."
            )
            found.append(Finding("error", message))
        elif not jnp.issubdtype(leaf.dtype, jnp.floating):
            message = f"params has {path!r} of dtype {leaf.dtype}, which is never trained. Convert it to train it."
            found.append(Finding("note", message))
        elif leaf.dtype.itemsize < 4:
            message = (
                f"params has {path!r} of dtype {leaf.dtype}. Updates far smaller than its values "
                "are rounded away. Keep params in float32 and cast them in loss_fn."
            )
            found.append(Finding("warning", message))
    for path in not_finite(params):
        found.append(
            Finding("error", f"params has NaN or infinite values in {path!r}. Initialise it again.")
        )
    return found


_CLOSE = "Let loss_fn close over what is not trained (Equinox: eqx.partition(model, eqx.is_inexact_array))."


def _per_example(loss_fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Returns the loss of one example from a loss that is written for batches."""

    def loss(params: Any, example: Any, **keys: Any) -> Any:
        out = loss_fn(params, jax.tree.map(lambda x: x[None], example), **keys)
        value, aux = out if has_aux else (out, None)
        return (jnp.reshape(value, ()), aux) if has_aux else jnp.reshape(value, ())

    return loss


def _written_for_batches(f: ClippedGrad, params: Any, shapes: Any, key: Any) -> list[Finding]:
    """Returns findings if the loss takes a batch and not one example."""
    keys = {} if key is None else {"key": key}

    def scalar(loss_fn: Callable[..., Any], shapes: Any = shapes) -> bool:
        arrays, rebuild = _split(params)
        try:
            out = jax.eval_shape(lambda a, e: loss_fn(rebuild(a), e, **keys), arrays, shapes)
        except (
            Exception
        ):  # Any error of the caller's loss means that it does not take these shapes.
            return False
        value = out[0] if f.has_aux and isinstance(out, tuple) else out
        return isinstance(value, jax.ShapeDtypeStruct) and value.shape == ()

    one = _per_example(f.loss_fn, f.has_aux)
    if not scalar(f.loss_fn) and not scalar(one):
        return []
    if scalar(f.loss_fn):
        mixes = lambda rows: key is None and _mixes(f, one, params, _made_up(rows))  # noqa: E731
        return _looks_like_a_batch(shapes, lambda shapes: scalar(f.loss_fn, shapes), mixes)
    message = (
        "loss_fn is written for a batch, not for ONE example without a batch axis. Pass a "
        "function that adds the axis: lambda params, example: loss_fn(params, jax.tree.map(lambda "
        "x: x[None], example)), followed by [0] if it returns one loss per example."
    )
    found = [Finding("error", message)]
    if key is None and _mixes(f, one, params, _made_up(shapes)):
        found.append(Finding("error", _MIXED))
    return found


_MIXED = (
    "loss_fn mixes the examples of a batch: the loss of a batch is not a mean or sum of losses of "
    "single examples. Then no per-example gradient exists, and clipping bounds nothing. Remove "
    "BatchNorm, contrastive terms, and weights or statistics that are computed from the batch."
)


def _looks_like_a_batch(
    shapes: Any, accepts: Callable[[Any], bool], mixes: Callable[[Any], bool]
) -> list[Finding]:
    leaves = jax.tree.leaves(shapes)
    sizes = {x.shape[:1] for x in leaves}
    if len(leaves) < 2 or len(sizes) > 1 or sizes == {()}:
        return []
    length = leaves[0].shape[0]

    def of(*rows: int) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*rows, *x.shape[1:]), x.dtype), shapes)

    if not accepts(of(length + 1)):
        return []
    message = (
        f"All leaves of example have a leading axis of {length}, and loss_fn accepts any length of "
        "it. If it is the axis of a batch, pass ONE example, and a loss_fn for one example."
    )
    if accepts(of(1)) and accepts(of(3)) and mixes(of()):
        message += f" In that case, {_MIXED}"
    return [Finding("note", message)]


def _mixes(f: ClippedGrad, one: Callable[..., Any], params: Any, batch: Any) -> bool:
    # Equal or zero weights can hide a dependence.
    def moved(x: Any, seed: int) -> Any:
        floating = isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
        return (
            x + 0.1 * np.random.default_rng(seed).normal(size=x.shape).astype(x.dtype)
            if floating
            else x
        )

    leaves, structure = jax.tree.flatten(params)
    arrays, rebuild = _split(
        jax.tree.unflatten(structure, [moved(x, i) for i, x in enumerate(leaves)])
    )

    def value(loss_fn: Callable[..., Any], arrays: list[Any], examples: Any) -> jax.Array:
        out = loss_fn(rebuild(arrays), examples)
        return jnp.asarray(out[0] if f.has_aux else out, jnp.float32)

    @jax.jit
    def both(arrays: list[Any], batch: Any) -> tuple[jax.Array, list[jax.Array]]:
        examples = [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(3)]
        return value(f.loss_fn, arrays, batch), [
            value(one, arrays, example) for example in examples
        ]

    together, alone = jax.tree.map(np.asarray, both(arrays, batch))
    expected = [np.stack(alone)] if together.ndim else [np.mean(alone), np.sum(alone)]
    return not any(np.allclose(together, e, rtol=1e-3, atol=1e-5, equal_nan=True) for e in expected)


def _split(params: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the arrays of params, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(params)
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray | np.generic)]

    def rebuild(values: list[Any]) -> Any:
        given = dict(zip(arrays, values, strict=True))
        return jax.tree.unflatten(structure, [given.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in arrays], rebuild


def _check_plan(
    f: ClippedGrad, params: Any, batch: Any, key: Any, leaves: list[LeafPlan]
) -> list[Finding]:
    """Returns the findings that follow from the program of the loss of one example."""
    arrays, rebuild = _split(params)
    keys = {} if key is None else {"key": key}
    one = jax.tree.map(lambda x: x[0], batch)
    program = jax.make_jaxpr(lambda a, e: f.loss_fn(rebuild(a), e, **keys))(arrays, one)
    closed = [
        x for x in program.consts if jnp.size(x) > 1 and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    found = []
    for leaf in leaves:
        if leaf.method == "no gradient":
            why = "does not use it, or stops its gradient"
            if any(jnp.shape(x) == leaf.shape for x in closed):
                why = "closes over an array of its shape, perhaps in place of the argument params"
            message = (
                f"params has {leaf.path!r}, which gets no gradient but would get noise, because "
                f"loss_fn {why}. Use it, or freeze it with `trainable`."
            )
            found.append(Finding("warning", message))
        elif leaf.rules == ("direct",) and leaf.bytes >= _LARGE:
            message = (
                f"params has {leaf.path!r}, whose per-example gradients of {_in_words(leaf.bytes)} "
                "are formed, because the loss uses it by an operation without a rule. Use a "
                "matrix product, a convolution or a lookup, or a smaller physical batch."
            )
            found.append(Finding("note", message))
    if closed:
        shapes = sorted({str(jnp.shape(x)) for x in closed})
        message = (
            f"loss_fn closes over {len(closed)} floating arrays of the shapes "
            f"{', '.join(shapes[:5])}. They are not trained. Move those that are weights into "
            "params."
        )
        found.append(Finding("note", message))
    return found


def _check_values(f: ClippedGrad, params: Any, batch: Any, key: Any) -> list[Finding]:
    """Returns the findings of a run on made-up examples."""
    # The engines agree, and this one compiles fastest.
    out = jax.device_get(dataclasses.replace(f, engine="vmap")(params, batch, key=key))
    names = ("zeros", "ones", "uniform numbers")
    bad = [name for name, norm in zip(names, out.norms, strict=True) if not np.isfinite(norm)]
    nan = [name for name, loss in zip(names, out.losses, strict=True) if not np.isfinite(loss)]
    if not bad and not nan:
        return []
    what = "loss" if nan else "gradient"
    message = (
        f"The {what} is NaN or infinite on made-up examples of {', '.join(nan or bad)}. Such an "
        "example contributes nothing. Guard logarithms, roots and divisions against 0, also in "
        "branches that are not taken."
    )
    return [Finding("warning", message)]
