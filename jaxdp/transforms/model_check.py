"""Checks of a loss and its parameters before private training, without private data.

`check` runs what `clipped_grad` runs, on made-up examples, and reports every problem that it finds
with its remedy.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms.clip_arguments import is_array
from jaxdp.transforms.clipping import (
    ClippedGrad,
    Engine,
    LeafPlan,
    check_params,
    clipped_grad,
    paths_of,
)
from jaxdp.transforms.not_finite import (
    LARGEST_SHARE,
    LEAST_EXAMPLES,
    PRIVATE,
    count_not_finite,
)
from jaxdp.transforms.parameters import not_finite

__all__ = ["Finding", "ModelCheck", "check"]

Severity = Literal["error", "warning", "note"]
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
# A leaf without a rule is worth a note if its per-example gradient has at least this many bytes.
_LARGE = 2**20
_ROWS_AT_ONCE = 20  # of a source, whose gradients are computed together


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
        rows: list[tuple[str, ...]]
        rows = [("leaf", "shape", "dtype", "rule", "method", "work", "memory")]
        rows += map(_row, self.leaves)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, _LEGEND])

    def __str__(self) -> str:
        severities = [finding.severity for finding in self.findings]
        counts = [f"{severity}s {severities.count(severity)}" for severity in _SEVERITIES]
        lines = [f"jaxdp.check: {', '.join(counts)}"]
        lines += [f"  {severity}: {message}" for severity, message in self.findings]
        if self.leaves:
            trained = [leaf for leaf in self.leaves if _is_trained(leaf)]
            numbers = sum(math.prod(leaf.shape) for leaf in trained)
            extra = sum(leaf.bytes for leaf in trained)
            lines.append(
                f"  {len(trained)} of {len(self.leaves)} leaves are trained, {numbers:,} numbers. "
                f"Clipping needs {_in_words(extra)} per example "
                f"beyond an ordinary gradient (engine 'vmap': {_in_words(4 * numbers)}). explain() "
                "has a row per leaf."
            )
        lines.append(
            "  Only shapes and dtypes of the example were read. The loss ran on made-up examples, "
            "and on the first of a source if there is one."
        )
        return "\n".join(lines)


def _is_trained(leaf: LeafPlan) -> bool:
    return leaf.method not in ("frozen", "no gradient")


def _row(leaf: LeafPlan) -> tuple[str, ...]:
    """Returns the cells of a leaf in the table of `explain`."""
    work = memory = "-"
    if _is_trained(leaf):
        memory = _in_words(leaf.bytes)
        if not math.isnan(leaf.work):  # engine "vmap" counts no work
            work = f"{leaf.work:.1f}x"
    shape = "x".join(map(str, leaf.shape)) or "scalar"
    rules = ", ".join(leaf.rules) or "-"
    return leaf.path, shape, leaf.dtype, rules, leaf.method, work, memory


_LEGEND = (
    "\n"
    'rule: how the leaf meets data. "direct": scales, biases, and operations without a rule.\n'
    'method: "factors" takes norms from Gram matrices. "keep" and "drop" form per-example '
    "gradients, once or twice.\n"
    "work: norm and clipped sum over an ordinary gradient, by counted operations and bytes.\n"
    "memory: bytes per example beyond an ordinary gradient."
)


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
    source: Any = None,
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
      source: A `jaxdp.data.Source` of examples or groups. NaN and infinity among its first thousand
          are counted by column, as by `jaxdp.data.count_not_finite`. Among its first hundred, those
          whose loss or gradient is not finite are counted, as `jaxdp.finetune.fit` does before it
          spends anything.

    Returns:
      The findings and the plan of every leaf. A problem of the loss is a finding and raises
      nothing.

    Formal guarantees:
      Without `source` the result depends on no private value. With it, counts of private examples
      are in a finding, for the owner of the data. Do not publish them.
      The result does not depend on the values of the example, so a private example may be passed.
      The loss is compiled and runs on made-up examples: zeros, ones, and numbers between 0 and 1.
    """
    try:
        check_params(params)
        # From here on only shapes are used, so no value of `example` can reach a finding.
        shapes, n_records = _one_record(jax.tree.map(_shape, example), group)
    except (TypeError, ValueError) as error:
        return ModelCheck((Finding("error", str(error)),), ())
    findings: list[Finding] = []
    if source is not None:
        counts = count_not_finite(source)
        if counts.examples:
            findings.append(Finding("warning", counts.advice("source")))
    if _requires_key(loss_fn) and not stochastic:
        findings.append(Finding("warning", f"loss_fn takes key=. {_PASS_KEY}"))
        # The checks go on as the calls will, once this is mended.
        stochastic = True
    findings += _check_leaves(params)
    if not any(_is_floating(leaf) for _, leaf in paths_of(params)):
        message = "params has no array of floating dtype, so nothing is trained."
        return ModelCheck((*findings, Finding("error", message)), ())

    def trains(path: str, leaf: Any) -> bool:
        # A complex leaf has its own finding. Here it would end the check.
        return not jnp.iscomplexobj(leaf) and (trainable is None or trainable(path, leaf))

    # Findings do not depend on the clip norm.
    f = clipped_grad(loss_fn, clip_norm=1.0, engine=engine, trainable=trains, has_aux=has_aux)
    key = jax.random.key(0) if stochastic else None
    leaves: list[LeafPlan] = []
    try:
        about_batches = _written_for_batches(f, params, shapes, key)
        findings += about_batches
        if any(finding.severity == "error" for finding in about_batches):
            # The other checks go on with the loss as it will be, once that is mended.
            f = dataclasses.replace(f, loss_fn=_per_example(loss_fn, has_aux))
        batch = _made_up(shapes)
        leaves = _plan(f, params, batch, key, n_records if group else None)
        findings += _check_plan(f, params, batch, key, leaves)
        findings += _check_values(f, params, batch, key)
        if source is not None:
            findings += _check_source(dataclasses.replace(f, group=group), params, source, key)
    except Exception as error:  # the loss is the caller's, and may fail in any way
        findings.append(Finding("error", _explained(error, example)))
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return ModelCheck(tuple(findings), tuple(leaves))


def _plan(
    f: ClippedGrad,
    params: Any,
    batch: Any,
    key: Any,
    group_size: int | None,
) -> list[LeafPlan]:
    """Returns the plan of examples, or of groups of equal examples."""
    if group_size is not None:
        f = dataclasses.replace(f, group=True)
        members = [batch] * group_size
        # [B, k, ...], where every member of a group is the same made-up record.
        batch = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *members)
    return f.plan(params, batch, key=key)


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating)


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
    if hasattr(x, "dtype"):
        dtype = x.dtype
    else:
        dtype = np.asarray(x).dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    if dtype.kind in "OSUM":  # objects, bytes, text, dates
        raise TypeError(
            f"example must be a pytree of numeric arrays, got a leaf of type {type(x).__name__} "
            f"and dtype {dtype}. Encode it as numbers, or leave it out."
        )
    # NumPy's float64 becomes float32 in a call, unless x64 is on.
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(dtype))


def _one_record(shapes: Any, group: bool) -> tuple[Any, int]:
    """Returns the shapes of one record of an example, and the number of its records."""
    if not group:
        return shapes, 1
    lengths = {x.shape[:1] for x in jax.tree.leaves(shapes)}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        raise ValueError(
            "example must have leaves [k, ...] of the k records of ONE group with group=True, got "
            f"the lengths {sorted(lengths)}. Pass the records of one owner, such as "
            "patients[0].records."
        )
    ((n_records,),) = lengths
    return _with_lead(shapes), n_records


def _with_lead(shapes: Any, *lead: int) -> Any:
    """Returns shapes with other axes in place of the leading one."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype)

    return jax.tree.map(shape, shapes)


def _made_up(shapes: Any) -> Any:
    """Returns a batch of three examples: zeros, ones, and uniform numbers (bits for integers)."""
    random = np.random.default_rng(0)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), (3, *x.shape))
        if jnp.issubdtype(x.dtype, jnp.inexact):
            drawn: Any = random.uniform(size=x.shape)
        else:
            # 0 and 1 are classes and tokens of every model.
            drawn = random.integers(0, 2, x.shape)
        examples = np.stack([np.zeros(x.shape), np.ones(x.shape), drawn])
        return jnp.asarray(examples, x.dtype)

    return jax.tree.map(leaf, shapes)


def _requires_key(loss_fn: Callable[..., Any]) -> bool:
    try:
        key = inspect.signature(loss_fn).parameters.get("key")
    except (TypeError, ValueError):  # a builtin has no signature
        return False
    return key is not None and key.default is inspect.Parameter.empty


def _explained(error: Exception, example: Any) -> str:
    text = " ".join(str(error).split())
    # JAX says so where a collective names an axis that no enclosing map has.
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
    kind = type(error).__name__
    sentence = f"loss_fn fails on one example with {kind}: {text[:300]}"
    if isinstance(error, KeyError) and isinstance(example, Mapping):
        names = map(repr, example)
        sentence += ". The example has "
        sentence += ", ".join(names)
    return sentence


def _check_leaves(params: Any) -> list[Finding]:
    """Returns the findings that follow from the leaves of params alone."""
    findings = []
    for path, leaf in paths_of(params):
        if not is_array(leaf):
            findings.append(_about_no_array(path, leaf))
        elif finding := _about_dtype(path, leaf):
            findings.append(finding)
    for path in not_finite(params):
        message = f"params has NaN or infinite values in {path!r}. Initialise it again."
        findings.append(Finding("error", message))
    return findings


_CLOSE = (
    "Let loss_fn close over what is not trained (Equinox: eqx.partition(model, "
    "eqx.is_inexact_array))."
)


def _about_no_array(path: str, leaf: Any) -> Finding:
    message = f"params has {path!r} of type {type(leaf).__name__}, no array. "
    if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool):
        message += "To train it, convert it with jnp.asarray. "
    return Finding("error", message + _CLOSE)


def _about_dtype(path: str, leaf: Any) -> Finding | None:
    """Returns the finding about an array whose dtype is not float32 or wider."""
    if jnp.iscomplexobj(leaf):
        message = (
            f"params has the complex leaf {path!r}, which cannot be trained. Store its real "
            "and imaginary part as two leaves and join them in loss_fn with jax.lax.complex, "
            "or freeze it with `trainable`."
        )
        return Finding("error", message)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        message = (
            f"params has the random key {path!r}, which would be the same in every step. Split "
            "it off (NNX: nnx.split(model, nnx.Param, ...)), and derive randomness from key= "
            "of loss_fn."
        )
        return Finding("error", message)
    if not _is_floating(leaf):
        message = (
            f"params has {path!r} of dtype {leaf.dtype}, which is never trained. Convert it to "
            "train it."
        )
        return Finding("note", message)
    if leaf.dtype.itemsize < 4:
        message = (
            f"params has {path!r} of dtype {leaf.dtype}. Updates far smaller than its values "
            "are rounded away. Keep params in float32 and cast them in loss_fn."
        )
        return Finding("warning", message)
    return None


def _per_example(
    loss_fn: Callable[..., Any],
    has_aux: bool,
) -> Callable[..., Any]:
    """Returns the loss of one example from a loss that is written for batches."""

    def loss(
        params: Any,
        example: Any,
        **keys: Any,
    ) -> Any:
        batch_of_one = jax.tree.map(lambda x: x[None], example)
        result = loss_fn(params, batch_of_one, **keys)
        if has_aux:
            value, aux = result
            return jnp.reshape(value, ()), aux
        return jnp.reshape(result, ())

    return loss


def _returns_scalar(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    params: Any,
    shapes: Any,
    key: Any,
) -> bool:
    """Returns whether a loss takes examples of these shapes, and returns one number."""
    arrays, loss = _of_arrays(loss_fn, params, key)
    try:
        result = jax.eval_shape(loss, arrays, shapes)
    except Exception:  # whatever the caller's loss raises, it does not take these shapes
        return False
    if has_aux and isinstance(result, tuple):
        value = result[0]
    else:
        value = result
    return isinstance(value, jax.ShapeDtypeStruct) and value.shape == ()


def _written_for_batches(
    f: ClippedGrad,
    params: Any,
    shapes: Any,
    key: Any,
) -> list[Finding]:
    """Returns findings if the loss takes a batch and not one example."""

    def accepts(shapes: Any) -> bool:
        return _returns_scalar(f.loss_fn, f.has_aux, params, shapes, key)

    def mixes(shapes: Any) -> bool:
        # A row alone and a row of a batch draw different numbers, so they cannot be compared.
        return key is None and _mixes(f, one, params, _made_up(shapes))

    one = _per_example(f.loss_fn, f.has_aux)
    if accepts(shapes):
        # A batch of many examples passes too, if the loss is its mean.
        return _looks_like_a_batch(shapes, accepts, mixes)
    if not _returns_scalar(one, f.has_aux, params, shapes, key):
        return []
    message = (
        "loss_fn is written for a batch, not for ONE example without a batch axis. Pass a "
        "function that adds the axis: lambda params, example: loss_fn(params, jax.tree.map(lambda "
        "x: x[None], example)), followed by [0] if it returns one loss per example."
    )
    findings = [Finding("error", message)]
    if mixes(shapes):
        findings.append(Finding("error", _MIXED))
    return findings


_MIXED = (
    "loss_fn mixes the examples of a batch: the loss of a batch is not a mean or sum of losses of "
    "single examples. Then no per-example gradient exists, and clipping bounds nothing. Remove "
    "BatchNorm, contrastive terms, and weights or statistics that are computed from the batch."
)


def _looks_like_a_batch(
    shapes: Any,
    accepts: Callable[[Any], bool],
    mixes: Callable[[Any], bool],
) -> list[Finding]:
    """Returns a note if all leaves of an example have a leading axis of any length.

    Args:
      shapes: The shapes of the example.
      accepts: Whether the loss takes an example of other shapes.
      mixes: Whether it then depends on more than the losses along the leading axis.
    """
    leaves = jax.tree.leaves(shapes)
    lengths = {x.shape[:1] for x in leaves}
    # One array may have a leading axis for other reasons, such as the tokens of a text.
    if len(leaves) < 2 or len(lengths) > 1 or lengths == {()}:
        return []
    length = leaves[0].shape[0]
    # A fixed length is that of an example, such as the pixels of an image.
    if not accepts(_with_lead(shapes, length + 1)):
        return []
    message = (
        f"All leaves of example have a leading axis of {length}, and loss_fn accepts any length of "
        "it. If it is the axis of a batch, pass ONE example, and a loss_fn for one example."
    )
    # `mixes` compares a batch of three with its rows, each in a batch of one.
    takes_both = accepts(_with_lead(shapes, 1)) and accepts(_with_lead(shapes, 3))
    if takes_both and mixes(_with_lead(shapes)):
        message += f" In that case, {_MIXED}"
    return [Finding("note", message)]


def _mixes(
    f: ClippedGrad,
    one: Callable[..., Any],
    params: Any,
    batch: Any,
) -> bool:
    """Returns whether the loss of a batch is neither the mean nor the sum of losses of its rows.

    Args:
      f: The clipped gradient, whose loss takes a batch.
      one: The loss of one row.
      params: The parameters.
      batch: A batch of three.
    """
    leaves, structure = jax.tree.flatten(params)
    moved = [_moved(leaf, seed) for seed, leaf in enumerate(leaves)]
    moved_params = jax.tree.unflatten(structure, moved)
    arrays, of_batch = _of_arrays(f.loss_fn, moved_params, None)
    _, of_row = _of_arrays(one, moved_params, None)

    def value(result: Any) -> jax.Array:
        return jnp.asarray(result[0] if f.has_aux else result, jnp.float32)

    @jax.jit
    def losses(
        arrays: list[Any],
        batch: Any,
    ) -> tuple[jax.Array, list[jax.Array]]:
        alone = []
        for row in range(3):
            example = jax.tree.map(lambda x, row=row: x[row], batch)
            alone.append(value(of_row(arrays, example)))
        return value(of_batch(arrays, batch)), alone

    together, alone = jax.tree.map(np.asarray, losses(arrays, batch))
    expected: list[Any] = [np.mean(alone), np.sum(alone)]
    # A loss for each row is neither mean nor sum, and is compared row by row.
    if together.ndim:
        expected = [np.stack(alone)]
    # The order of a float32 sum differs between the two, and so does a product of few bits.
    close = functools.partial(np.allclose, together, rtol=1e-3, atol=1e-5, equal_nan=True)
    return not any(map(close, expected))


def _moved(leaf: Any, seed: int) -> Any:
    """Returns a leaf with noise. Equal or zero weights can hide that a loss mixes examples."""
    if not isinstance(leaf, jax.Array | np.ndarray) or not _is_floating(leaf):
        return leaf
    noise = np.random.default_rng(seed).normal(size=leaf.shape)
    return leaf + 0.1 * noise.astype(leaf.dtype)


def _of_arrays(
    loss_fn: Callable[..., Any],
    params: Any,
    key: Any,
) -> tuple[list[Any], Callable[[list[Any], Any], Any]]:
    """Returns the arrays of params, and the loss as a function of (arrays, example)."""
    leaves, structure = jax.tree.flatten(params)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    keys = {} if key is None else {"key": key}

    def loss(arrays: list[Any], example: Any) -> Any:
        rebuilt = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            rebuilt[place] = array
        return loss_fn(jax.tree.unflatten(structure, rebuilt), example, **keys)

    return [leaves[i] for i in places], loss


def _check_plan(
    f: ClippedGrad,
    params: Any,
    batch: Any,
    key: Any,
    leaves: list[LeafPlan],
) -> list[Finding]:
    """Returns the findings that follow from the program of the loss of one example."""
    arrays, loss = _of_arrays(f.loss_fn, params, key)
    first = jax.eval_shape(lambda batch: jax.tree.map(lambda x: x[0], batch), batch)
    program = jax.make_jaxpr(loss)(arrays, first)
    # Scalars are constants, and no weights.
    closed_over = [x for x in program.consts if jnp.size(x) > 1 and _is_floating(x)]
    findings = []
    for leaf in leaves:
        if leaf.method == "no gradient":
            why = "does not use it, or stops its gradient"
            # A loss of a bound model, such as `lambda params, x: model(x)`, has the weights as
            # constants.
            if any(jnp.shape(x) == leaf.shape for x in closed_over):
                why = "closes over an array of its shape, perhaps in place of the argument params"
            message = (
                f"params has {leaf.path!r}, which gets no gradient but would get noise, because "
                f"loss_fn {why}. Use it, or freeze it with `trainable`."
            )
            findings.append(Finding("warning", message))
        elif leaf.rules == ("direct",) and leaf.bytes >= _LARGE:
            message = (
                f"params has {leaf.path!r}, whose per-example gradients of {_in_words(leaf.bytes)} "
                "are formed, because the loss uses it by an operation without a rule. Use a "
                "matrix product, a convolution or a lookup, or a smaller physical batch."
            )
            findings.append(Finding("note", message))
    if closed_over:
        shapes = sorted({str(jnp.shape(x)) for x in closed_over})
        message = (
            f"loss_fn closes over {len(closed_over)} floating arrays of the shapes "
            f"{', '.join(shapes[:5])}. They are not trained. Move those that are weights into "
            "params."
        )
        findings.append(Finding("note", message))
    return findings


def _check_values(
    f: ClippedGrad,
    params: Any,
    batch: Any,
    key: Any,
) -> list[Finding]:
    """Returns the findings of a run on made-up examples."""
    # The engines agree, and this one compiles fastest.
    by_vmap = dataclasses.replace(f, engine="vmap")
    result = jax.device_get(by_vmap(params, batch, key=key))
    bad_norms = _not_finite_of(result.norms)
    bad_losses = _not_finite_of(result.losses)
    if not bad_norms and not bad_losses:
        return []
    what = "loss" if bad_losses else "gradient"
    message = (
        f"The {what} is NaN or infinite on made-up examples of "
        f"{', '.join(bad_losses or bad_norms)}. Such an "
        "example contributes nothing. Guard logarithms, roots and divisions against 0, also in "
        "branches that are not taken."
    )
    return [Finding("warning", message)]


def _check_source(f: ClippedGrad, params: Any, source: Any, key: Any) -> list[Finding]:
    """Returns the finding about the first examples that a step with `params` would drop."""
    count = min(len(source), LEAST_EXAMPLES)
    gradient = jax.jit(f)
    dropped = 0
    for start in range(0, count, _ROWS_AT_ONCE):
        rows = np.arange(start, start + _ROWS_AT_ONCE)
        mask = rows < count
        # Copies of the first example fill the last batch, and are masked.
        batch = source.gather(np.where(mask, rows, 0))
        if hasattr(batch, "present"):  # `jaxdp.data.Records`
            batch, mask = batch.records, mask[:, None] & batch.present
        out = gradient(params, batch, mask, key=key)
        is_finite = np.isfinite(out.norms) & np.isfinite(out.losses)
        # A masked row has the norm 0 and the loss 0, so it is not counted.
        dropped += int((~is_finite).sum())
    if not dropped:
        return []
    severity: Severity = "warning"
    remedy = "Each of them contributes nothing, and a step costs the same."
    if dropped == count:
        severity = "error"
        remedy = "Nothing can be learned, and jaxdp.finetune.fit starts no run."
    elif dropped > LARGEST_SHARE * count:
        remedy += " jaxdp.finetune.fit starts only with allow_nonfinite=True."
    message = (
        f"The loss or its gradient is NaN or infinite for {dropped} of the first {count} examples "
        f"of source, with these params. {remedy} {PRIVATE}"
    )
    return [Finding(severity, message)]


def _not_finite_of(values: np.ndarray) -> list[str]:
    """Returns the names of the made-up examples whose value is NaN or infinite."""
    names = ("zeros", "ones", "uniform numbers")
    return [name for name, value in zip(names, values, strict=True) if not np.isfinite(value)]
