"""GEP, gradient embedding perturbation (Yu, Zhang, Chen, Liu 2021, Algorithm 1).

The noise goes where public gradients point.

Before a step, from public data only:

    A = gradients of the anchors, one row per example       m x p, never formed whole
    L ~ N(0, I)                                             p x k
    L <- orthonormal(A^T (A L)), `power_iterations` times   p x k, the anchor subspace B

One step, where g_i is the gradient of private example i:

    w_i = B^T g_i                           its embedding, in k dimensions
    r_i = g_i - B w_i                       the residual
    w~ = (sum_i clip(w_i, C_0) + sigma C_0 N(0, I)) / (q n)
    r~ = (sum_i clip(r_i, C_1) + sigma C_1 N(0, I)) / (q n)
    g~ = B w~ + r~

Embedding and residual come from the SAME sampled batch. An example contributes (w / C_0, r / C_1),
of norm at most sqrt(2). A step is therefore one Gaussian of multiplier z = sigma / sqrt(2) on one
Poisson sample. The published code adds the Renyi divergences of two separately sampled Gaussians,
which under-counts.

The trainable parameters are cut into groups of whole modules, each with a basis of k_g ~ sqrt(p_g)
directions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data.physical import Sampler
from jaxdp.data.storage import on_device
from jaxdp.files import shows_keywords
from jaxdp.finetune.options import OPTION_DEFAULTS, Options, check_clip_norm
from jaxdp.finetune.query import Query, QuerySums, moving_params, wide
from jaxdp.finetune.step import repeatable
from jaxdp.finetune.trainer import PrivateTrainer, make_trainer
from jaxdp.transforms import forms
from jaxdp.transforms.clip_rules import clip_factors
from jaxdp.transforms.clipping import ClippedGrad, paths_of
from jaxdp.transforms.exact_scaling import in_units

_PUBLIC_KEY = 0  # The random start of the power iteration is public.
_ANCHORS_AT_ONCE = 256  # in a physical batch, where the caller gives no physical batch size
_PRECISION = jax.lax.Precision.HIGHEST
_LEAST_SHARE = 1e-6  # of a column that is left after projection, or the column is dependent


class _Contribution(NamedTuple):
    embeddings: list[jax.Array]  # [k_g] per group
    residual: Any  # like the trainable parameters, or None if it is dropped


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Layout:
    """The division of the trainable leaves into groups.

    Attributes:
      structure: The tree of the trainable leaves.
      shapes: The shape of each leaf.
      owner: The group of each leaf.
      widths: k_g of each group.
      paths: The path of each leaf, for messages.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    owner: tuple[int, ...]
    widths: tuple[int, ...]
    paths: tuple[str, ...]

    def together(self, leaves: Sequence[Any], group: int) -> list[Any]:
        """Returns the values of one group, from one value per leaf."""
        return [leaf for leaf, g in zip(leaves, self.owner, strict=True) if g == group]

    def name(self, group: int) -> str:
        """Returns the name of a group in messages."""
        first, *others = self.together(self.paths, group)
        return f"the leaves {first!r} to {others[-1]!r}" if others else repr(first)

    def embed(self, rows: list[jax.Array], basis: list[jax.Array]) -> list[jax.Array]:
        """Returns B^T g, [B, k_g] per group, for rows of g [B, p_leaf] per leaf."""
        products = [_dot(x, b) for x, b in zip(rows, basis, strict=True)]
        groups = range(len(self.widths))
        return [sum(self.together(products, group)) for group in groups]

    def lift(self, embeddings: list[jax.Array], basis: list[jax.Array]) -> list[jax.Array]:
        """Returns B w, [..., p_leaf] per leaf, for w [..., k_g] per group."""
        return [_dot(embeddings[group], b.T) for group, b in zip(self.owner, basis, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GradientEmbedding(Query):
    """The query of GEP.

    It carries the basis, a list of [p_leaf, k_g] arrays, one per trainable leaf. `public` is a list
    of physical batches of anchors.

    An example contributes (a clip(w_i, C_0) / C_0, b clip(r_i, C_1) / C_1) with a^2 + b^2 = 1, of
    norm at most 1.
    """

    basis_size: int
    residual_clip_norm: float
    residual_share: float
    groups: int | Callable[[str], Hashable]
    power_iterations: int
    stochastic: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "_add_power", _Part(self._add_power))

    @property
    def weights(self) -> tuple[float, float]:
        """The weights (a, b) of embedding and residual in the contribution."""
        return math.sqrt(1 - self.residual_share), math.sqrt(self.residual_share)  # a^2 + b^2 = 1

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns 1, by the choice of the weights."""
        return 1.0

    def init(self, params: Any) -> list[jax.Array] | None:
        """Returns a basis of zeros if later steps reuse the basis, otherwise None.

        Step 0 makes the first basis.

        Raises:
          ValueError: The anchors' gradients at `params` span fewer dimensions than the basis.
        """
        layout = self._layout(params)
        random = _random(self._trainable(params), layout, jnp.int32(0))
        zeros = _zeros(random)
        # The program of the first step, of which only the products count here.
        images = [self._add_power(params, random, zeros, anchors)[1] for anchors in self.public]
        for group, width in enumerate(layout.widths):
            image = np.concatenate([of_groups[group] for of_groups in images])
            # Random columns keep the rank of A, and A L is much smaller than A.
            rank = _rank(image)
            if rank < width:
                name = layout.name(group)
                raise ValueError(
                    f"basis_size={self.basis_size} gives {width} directions to {name}, but the "
                    f"anchors' gradients there span only {rank} at these parameters. Choose a "
                    "smaller basis_size, more or other anchors, or other groups."
                )
        return zeros if self.refresh_every > 1 else None

    def refresh(
        self,
        params: Any,
        carried: Any,
        step: Any,
        public: Any,
    ) -> list[jax.Array]:
        """Returns an orthonormal basis of the subspace of the anchors' gradients."""
        return self._refreshed(params, step, public, lambda part, *args: part(*args))

    def refresh_programs(
        self, params: Any, carried: Any, step: Any, public: Any
    ) -> list[jax.stages.Lowered]:
        """Returns the programs of its parts, in the order of the calls."""
        programs = []

        def lower(part: _Part, *args: Any) -> Any:
            programs.append(part.lower(*args))
            return part.shapes(*args)

        self._refreshed(params, step, public, lower)
        return programs

    def _refreshed(self, params: Any, step: Any, public: Any, call: Callable[..., Any]) -> Any:
        """Returns a basis, with each part called by `call(part, *args)`."""
        layout = self._layout(params)
        basis = call(_random, self._trainable(params), layout, step)
        for _ in range(self.power_iterations):
            image = call(_zeros, basis)
            for anchors in public:
                image, _ = call(self._add_power, params, basis, image, anchors)
            basis = call(_orthonormal, image, layout)
        return basis

    def _trainable(self, params: Any) -> list[jax.Array]:
        """Returns the trainable leaves, in the order of the layout."""
        leaves: list[jax.Array] = jax.tree.leaves(self.gradient.trainable_params(params))
        return leaves

    def zeros(self, params: Any) -> _Contribution:
        """Returns the sum over no examples."""
        moving = jax.tree.map(jnp.zeros_like, moving_params(self.gradient, params))
        dtype = jnp.result_type(*jax.tree.leaves(moving))
        embeddings = [jnp.zeros(width, dtype) for width in self._layout(params).widths]
        residual = moving if self.residual_share else None
        return self.as_sums(_Contribution(embeddings, residual))

    def sums(
        self,
        params: Any,
        carried: Any,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Sums the weighted clipped embeddings and residuals."""
        layout = self._layout(params)
        a, b = self.weights
        of_examples = self.gradient.per_example(params, batch, mask, key=key)
        g = _rows(of_examples.grads)
        w = layout.embed(g, carried)  # w_i = B^T g_i
        factors = a * self._shares(w, self.gradient.clip_norm)
        rows = _Contribution(w, None)
        of_leaves = _Contribution([factors] * len(w), None)
        if not self.residual_share:
            return QuerySums(self._total(rows, of_leaves), of_examples.nonfinite)
        # The norm of r is taken of r itself. ||g||^2 - ||w||^2 is no substitute: its rounding error
        # can let a large residual pass unclipped.
        bw = layout.lift(w, carried)
        r = [g_leaf - bw_leaf for g_leaf, bw_leaf in zip(g, bw, strict=True)]  # r_i = g_i - B w_i
        factors = b * self._shares(r, self.residual_clip_norm)
        rows = rows._replace(residual=r)
        total = self._total(rows, of_leaves._replace(residual=[factors] * len(r)))
        total = total._replace(residual=_unflatten(layout, total.residual))
        return QuerySums(total, of_examples.nonfinite)

    def _total(self, rows: _Contribution, factors: _Contribution) -> _Contribution:
        """Sums rows times their factors, on the grid if there is one."""
        if self.grid is not None:
            return self.rounded(rows, factors)
        total: _Contribution = jax.tree.map(_weighted, factors, rows)
        return total

    def read(
        self, params: Any, carried: Any, mean: _Contribution
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Returns g~ = B w~ + r~."""
        layout = self._layout(params)
        a, b = self.weights
        bound = self.gradient.clip_rule.bound
        scale = bound(self.gradient.clip_norm) / a  # undoes a / C_0 of `sums`
        embeddings = [w * scale for w in mean.embeddings]
        gradient = _unflatten(layout, layout.lift(embeddings, carried))
        if self.residual_share:
            residual_scale = bound(self.residual_clip_norm) / b  # undoes b / C_1
            gradient = jax.tree.map(lambda bw, r: bw + residual_scale * r, gradient, mean.residual)
        # A basis of one step is made anew, and need not be in every checkpoint.
        basis = carried if self.refresh_every > 1 else None
        return gradient, basis, {}

    def _shares(self, rows: list[jax.Array], clip_norm: float) -> jax.Array:
        """Returns factors [B] that clip vectors and divide them by the bound of the clipping rule.

        A vector is the concatenation of its rows in [B, n] arrays.
        """
        rule = self.gradient.clip_rule
        squares = sum(jnp.square(part).sum(1) for part in rows)
        norms = jnp.sqrt(squares)
        bound = rule.bound(clip_norm)
        return clip_factors(rule, norms, clip_norm, bound) / bound

    def _layout(self, params: Any) -> _Layout:
        """Returns the groups of the trainable leaves and the widths of their bases."""
        moving = self.gradient.trainable_params(params)
        leaves, structure = jax.tree.flatten(moving)
        paths = [path for path, _ in paths_of(moving)]
        sizes = [leaf.size for leaf in leaves]
        if not any(sizes):
            raise ValueError(
                "params must have a trainable leaf with entries, so that there is a gradient to "
                f"embed. Got {len(sizes)} trainable leaves without any."
            )
        keys: Sequence[Hashable]
        if callable(self.groups):
            keys = [self.groups(path) for path in paths]
        else:
            keys = _module_groups(paths, sizes, self.groups)
        # No direction is spent on leaves without entries. They may be in any group.
        first = keys[np.flatnonzero(sizes)[0]]
        keys = [key if size else first for key, size in zip(keys, sizes, strict=True)]
        # Groups in the order of their first leaves.
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        owner = [numbers[key] for key in keys]
        entries = np.bincount(owner, sizes).astype(int).tolist()
        roots = np.sqrt(entries)
        # k_g = floor(k sqrt(p_g) / sum_h sqrt(p_h)). 1e-9 keeps rounding errors from lowering a
        # whole number.
        widths = self.basis_size * roots / roots.sum() + 1e-9
        layout = _Layout(
            structure=structure,
            shapes=tuple(leaf.shape for leaf in leaves),
            owner=tuple(owner),
            widths=tuple(widths.astype(int).tolist()),
            paths=tuple(paths),
        )
        self._check_widths(layout, entries)
        return layout

    def _check_widths(self, layout: _Layout, entries: list[int]) -> None:
        """Raises ValueError if anchors or entries of a group cannot span its basis."""
        anchors = 0
        for batch in self.public:
            first, *_ = jax.tree.leaves(batch)
            anchors += len(first)
        for group, (width, total) in enumerate(zip(layout.widths, entries, strict=True)):
            most = min(anchors, total)
            if not 1 <= width <= most:
                raise ValueError(
                    f"basis_size={self.basis_size} over {len(layout.widths)} groups gives {width} "
                    f"directions to {layout.name(group)}, which needs 1 to {most}. A gradient "
                    f"there has {total} entries, and there are {anchors} anchors. Change "
                    "basis_size, the number of anchors, or groups."
                )

    def _anchor_gradients(self, params: Any, anchors: Any) -> list[jax.Array]:
        """Returns the rows of A for a physical batch of anchors, [m, p_leaf] per leaf."""
        if self.gradient.group:  # an anchor is a group of one view
            anchors = jax.tree.map(lambda x: x[:, None], anchors)
        key = jax.random.key(_PUBLIC_KEY) if self.stochastic else None
        return _rows(self.gradient.per_example(params, anchors, key=key).grads)

    def _add_power(
        self,
        params: Any,
        basis: list[jax.Array],
        image: list[jax.Array],
        anchors: Any,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns image + A^T (A L), with the rows of A of some anchors, and A L.

        A L is [m, k_g] per group.
        """
        layout = self._layout(params)
        a = self._anchor_gradients(params, anchors)
        al = layout.embed(a, basis)
        total = []
        for x, rows, group in zip(image, a, layout.owner, strict=True):
            total.append(x + _dot(rows.T, al[group]))
        return total, al


def _module_groups(paths: list[str], sizes: list[int], count: int) -> list[int]:
    """Returns the group of each leaf: at most `count` groups of whole modules, of like sizes.

    Modules are in the order of their leaves. A group ends where the middle of a module passes an
    equal share of all entries.
    """
    modules = [path.rpartition("/")[0] or path for path in paths]
    ends: dict[str, int] = {}  # the entries up to the last leaf of a module
    totals: dict[str, int] = {}
    entries = 0
    for module, size in zip(modules, sizes, strict=True):
        entries += size
        ends[module] = entries
        totals[module] = totals.get(module, 0) + size
    groups = {}
    # Whole modules stay together: the group of a module is that of its middle entry.
    for module, end in ends.items():
        middle = end - totals[module] / 2
        groups[module] = int(middle * count / entries)
    return [groups[module] for module in modules]


def _rank(matrix: np.ndarray) -> int:
    """Returns the number of singular values that float32 tells from zero."""
    values = np.linalg.svd(matrix, compute_uv=False)
    least = values.max() * max(matrix.shape) * np.finfo(np.float32).eps
    return int((values > least).sum())


class _Part:
    """A part of the making of a basis, which is one program.

    Programs that `repeatable` has compiled cannot be nested, so another program calls the function
    directly.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._jitted = functools.cache(functools.partial(repeatable, function))

    @property
    def _program(self) -> Any:
        return self._jitted(platform=forms.platform())

    def __call__(self, *args: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        return self._function(*args) if traced else self._program(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        lowered: jax.stages.Lowered = self._program.lower(*args)
        return lowered

    def shapes(self, *args: Any) -> Any:
        return self._program.eval_shape(*args)


# Trainers with leaves of equal shapes share these programs.


@_Part
def _random(trainable: list[jax.Array], layout: _Layout, step: Any) -> list[jax.Array]:
    """Returns L before the first power iteration."""
    # The step is folded in, so that a direction that one start misses is not missed by all.
    key = jax.random.fold_in(jax.random.key(_PUBLIC_KEY), step)
    basis = []
    for i, (leaf, group) in enumerate(zip(trainable, layout.owner, strict=True)):
        shape = (leaf.size, layout.widths[group])
        basis.append(jax.random.normal(jax.random.fold_in(key, i), shape, wide(leaf).dtype))
    return basis


@_Part
def _zeros(basis: list[jax.Array]) -> list[jax.Array]:
    return [jnp.zeros_like(leaf) for leaf in basis]


@_Part
def _orthonormal(image: list[jax.Array], layout: _Layout) -> list[jax.Array]:
    """Makes the columns of every group orthonormal."""
    basis = list(image)
    for group in range(len(layout.widths)):
        members = layout.together(range(len(image)), group)
        columns = layout.together(image, group)
        q = _gram_schmidt(jnp.concatenate(columns))
        *cuts, _ = np.cumsum([len(rows) for rows in columns])  # the last sum is the end of all
        for leaf, rows in zip(members, jnp.split(q, cuts), strict=True):
            basis[leaf] = rows
    return basis


def _gram_schmidt(columns: jax.Array) -> jax.Array:
    """Returns orthonormal columns [p, k] with the span of the given ones.

    A dependent column becomes zero. Projecting out twice is enough for float32 (Giraud et al.
    2005). `jnp.linalg.qr` does not fit: on CPU its bits depend on the number of LAPACK threads, and
    a replayed step must see the same basis. A column that is not finite counts as dependent,
    because NaN in the basis shows which batches are empty.
    """
    rows = columns.T  # contiguous, which takes a third of the time
    rows, _ = in_units(rows, 1)  # In other units squares of high powers overflow.
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    rows = rows / jnp.where(scale > 0, scale, 1)

    def add(j: jax.Array, q: jax.Array) -> jax.Array:
        v = rows[j]
        before = jnp.linalg.norm(v)
        # Twice: in float32 one pass leaves a part of the earlier columns in a nearly dependent one.
        for _ in range(2):
            v = v - _dot(_dot(q, v), q)
        after = jnp.linalg.norm(v)
        is_independent = after > _LEAST_SHARE * before
        unit = v / jnp.where(after > 0, after, 1)
        v = jnp.where(is_independent, unit, 0)  # a dependent column is no direction
        return q.at[j].set(jnp.where(jnp.isfinite(v), v, 0))  # public gradients may overflow

    return jax.lax.fori_loop(0, len(rows), add, jnp.zeros_like(rows)).T


def _rows(grads: Any) -> list[jax.Array]:
    """Returns [B, p_leaf] per trainable leaf."""
    return [g.reshape(len(g), -1) for g in jax.tree.leaves(grads)]


def _unflatten(layout: _Layout, leaves: list[jax.Array]) -> Any:
    shaped = [leaf.reshape(shape) for leaf, shape in zip(leaves, layout.shapes, strict=True)]
    return jax.tree.unflatten(layout.structure, shaped)


def _weighted(factors: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.einsum("b,bp->p", factors, rows, precision=_PRECISION)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=_PRECISION)


@shows_keywords(Options, OPTION_DEFAULTS)
def gep(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float,
    residual_clip_norm: float,
    noise_multiplier: float | Callable[[Any], Any] | None = None,
    anchors: Any,
    basis_size: int,
    groups: int | Callable[[str], Hashable] = 3,
    power_iterations: int = 1,
    basis_every: int = 1,
    residual_share: float = 0.5,
    sampler: Sampler,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for GEP (Yu et al. 2021).

    Embeddings of gradients in a public subspace get one noise, their residuals another. Each
    argument is one of the paper's, or of `dp_sgd`.

    Args:
      loss_fn, optimizer, sampler, options: As in `dp_sgd`. `engine` has no effect. `clip_rule`
        applies to embedding and residual. A physical batch needs twice the memory of its
        per-example gradients.
      clip_norm: C_0, the clip norm of the embedding. Yu et al. use 5, and 2 for C_1.
      residual_clip_norm: C_1, the clip norm of the residual.
      noise_multiplier: z, for the whole step, or a public schedule. Yu et al.'s sigma is z sqrt(2)
          with equal shares.
      anchors: PUBLIC examples, a pytree with leading axis [m] of examples for `loss_fn`. They must
        share no record with private or test data. Labels may be random, as in Yu et al.
      basis_size: k, the total number of directions. Group g gets floor(k sqrt(p_g) / sum_h
          sqrt(p_h)) of them.
      groups: The maximal number of groups, or a function from a leaf's path to its group. Modules
        of a group are neighbours in the order of their paths, which in Flax is alphabetical and not
        the order of the network.
      power_iterations: The number of passes over the anchors per basis.
      basis_every: The number of steps between new bases, 1 as published. A basis that is kept is in
          every checkpoint.
      residual_share: b^2, the share of the step's privacy that the residual gets. 0.5 gives both
        parts the same multiplier. 0 drops the residual (B-GEP).

    Raises:
      ValueError: An argument is out of range or there are no anchors. In `init`, the anchors do not
          span the basis.

    Formal guarantees:
      As `dp_sgd`: every step is PoissonSampled(q, Gaussian(z)), on one sample for embedding and
      residual together. The basis is a function of the anchors, public randomness and the
      parameters, so it is post-processing. The guarantee does not need an orthonormal B. Only
      utility does.
    """
    count = _check_anchors(anchors)
    for name, norm in {"clip_norm": clip_norm, "residual_clip_norm": residual_clip_norm}.items():
        if isinstance(norm, Mapping):
            raise TypeError(
                f"{name} must be one number for GEP, whose directions mix all parameters of a "
                f"group, got {norm!r}. dp_sgd, adp_alloc and adp_clip take norms of parts."
            )
        check_clip_norm(name, norm)
    counts = {
        "basis_size": basis_size,
        "power_iterations": power_iterations,
        "basis_every": basis_every,
    }
    if not callable(groups):
        counts["groups"] = groups
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if not 0 <= residual_share < 1:
        raise ValueError(
            f"residual_share must be in [0, 1), got {residual_share}. 0 drops the residual."
        )

    def make_query(gradient: ClippedGrad) -> GradientEmbedding:
        return GradientEmbedding(
            gradient=gradient,
            public=_cut(anchors, count, options.get("physical_batch_size") or _ANCHORS_AT_ONCE),
            refresh_every=basis_every,
            copies=2,  # embedding residuals beside gradients, per example
            basis_size=basis_size,
            # Weights and norms of 16 bits would let contributions exceed 1.
            residual_clip_norm=float(residual_clip_norm),
            residual_share=float(residual_share),
            groups=groups,
            power_iterations=power_iterations,
            stochastic=options.get("stochastic", False),
        )

    return make_trainer(
        make_query,
        loss_fn,
        optimizer,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampler=sampler,
        **options,
    )


def _check_anchors(anchors: Any) -> int:
    """Returns the number of anchors. Raises ValueError if the leaves do not have one number."""
    leaves = jax.tree.leaves(anchors)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    lengths = {shape[:1] for shape in shapes}  # A scalar has the length ().
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            "anchors must be public examples with one leading axis [m], m >= 1, for all leaves, "
            f"got shapes {shapes}. Without public data use dp_sgd."
        )
    ((count,),) = lengths
    return count


def _cut(anchors: Any, count: int, size: int) -> list[Any]:
    """Returns physical batches of anchors on the device.

    The last may be smaller: it is not padded.
    """

    def rows(start: int) -> Any:
        return jax.tree.map(lambda x: on_device(x[start : start + size]), anchors)

    return [rows(start) for start in range(0, count, size)]
