"""The sites where a weight meets data: one rule per primitive, with the gradient with respect to
the weight.

At a site, `out = primitive(record, V) + tap`. Let g be the cotangent of the tap. The gradient of
the loss with respect to V is dV = sum_t u_t w_t^T, a sum of outer products with u from the record
and w from g. The sum is over the positions t at which the weight is applied (tokens, pixels, loop
iterations). So for one example

    ||dV||^2 = sum_{t,t'} <u_t, u_t'> <w_t, w_t'>                                          (Gram form)

without forming dV. Goodfellow (2015, arXiv:1510.01799) has it for one position and Li et al. (2022,
arXiv:2110.05679) for sequences. Bu et al. (2023, arXiv:2210.00038) keep u and w instead of a second
backward pass.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import dense, forms, opaque, rounding, shards
from jaxdp.transforms.kernels import cells, convolution

# Longer inner products are summed in blocks of this many terms, which rounds less.
_BLOCK = 2048

# Gram matrices of more positions are computed by blocks of at most this many rows. A TPU would copy
# the rows of each block.
_GRAM_ROWS, _GRAM_ROWS_TPU = 256, 1024

# Gram matrices of at most this many blocks are computed without a loop on a GPU.
_UNROLLED = 10

# Patches of a convolution of few channels are formed up to this many entries.
_PATCH_ROWS = 64

# On a CPU, patches of whole examples are formed by parts of about this many bytes, which stay in
# the cache.
_PART = 2**22

# Accelerators multiply float32 in TF32 or bfloat16 by default, which changes norms and sums by 1e-3
# and more.
PRECISION = lax.Precision.HIGHEST

# Stored bits of the significands of what the units of accelerators multiply exactly.
_TF32, _BFLOAT16 = 10, 7
# What `jax_default_matmul_precision` may say where a plain step multiplies so few bits.
_FAST = ("bfloat16", "tensorfloat32")
# The compute capability from which on a GPU multiplies TF32 and bfloat16.
_AMPERE = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneHot:
    """Rows of an identity matrix by index, [..., T] int. A negative index is a row of zeros.

    If `distinct`, no two rows of one example and group are equal, except rows of zeros.
    """

    index: jax.Array
    distinct: bool = dataclasses.field(default=False, metadata={"static": True})


Factor = Any  # jax.Array or OneHot
Pair = tuple[tuple[Factor, ...], Factor]  # parts of u, and w


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The geometry of one meeting point, for one example and one iteration of each loop."""

    weight_shape: tuple[int, ...]
    positions: int = 1  # T, at which the weight is applied
    rows: int = 1  # entries of u_t
    cols: int  # entries of w_t
    groups: int = 1  # S independent blocks of the weight, each with separate u and w
    row_dims: tuple[
        int, ...
    ] = ()  # dimensions of the weight that u flattens, () if u is not a plain flattening
    col_dims: tuple[int, ...] = ()  # dimensions of the weight that w flattens

    @property
    def is_dense(self) -> bool:
        """Whether u is one array, and dV is the sum of u_t w_t^T, which `as_weight` reshapes."""
        return False

    @property
    def lanes(self) -> dense.Lanes:
        """Whether XLA lays u, and w, with the positions on the lanes of a TPU. It does next to
        heads of attention.
        """
        return len(self.row_dims) > 1, len(self.col_dims) > 1

    def as_weight(self, grad: jax.Array) -> jax.Array:
        """Reshapes dV [groups, rows, cols] to the shape of the weight."""
        raise NotImplementedError

    def record(self, operands: Sequence[Any]) -> Any:
        """Returns what the backward pass needs of the operands."""
        raise NotImplementedError

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        """Returns (parts of u, w). Parts are [S, T, rows_k] and their inner products add up. w is
        [S, T, cols].
        """
        raise NotImplementedError

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV in float32 or wider, summed over the leading axis [N, ...] of record and
        g.
        """
        raise NotImplementedError

    def weight_grads(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of M examples, [M, *weight_shape], each summed over N, from record and g [M,
        N, ...].
        """
        return jax.vmap(self.weight_grad)(record, g)


def wide_dtype(*xs: Any) -> Any:
    """Returns float64 if one of xs is float64, else float32, under any dtype promotion rules."""
    return jnp.dtype(jnp.float64 if any(x.dtype == jnp.float64 for x in xs) else jnp.float32)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(wide_dtype(x))


def settled(x: jax.Array) -> jax.Array:
    """Rounds `x` to its own dtype if that is bfloat16 or float16.

    XLA may keep more digits of it in one use than in another. Then a norm would not belong to the
    gradient in the sum.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return x
    kind, wide = jnp.finfo(x.dtype), x.astype(jnp.float32)
    rounded = lax.reduce_precision(wide, kind.nexp, kind.nmant)
    if x.dtype == jnp.float16:  # reduce_precision flushes subnormal numbers to zero
        rounded = jnp.where(jnp.abs(wide) < 2.0**-14, jnp.round(wide * 2.0**24) * 2.0**-24, rounded)
    return rounded.astype(x.dtype)


def multiplied_bits() -> int | None:
    """Returns how many stored bits of a significand a plain step multiplies where operands are
    float32.

    They are those of TF32 on a GPU that has it, those of bfloat16 on a TPU, and None where they are
    all bits: on other platforms, and where JAX is told so.
    """
    asked = jax.config.values["jax_default_matmul_precision"]
    if asked not in (None, "default", "fastest", *_FAST):
        return None
    if forms.platform() == "tpu":
        return None if asked == "tensorfloat32" else _BFLOAT16
    in_tf32 = forms.platform() == "cuda" and forms.capability() >= _AMPERE
    return _TF32 if in_tf32 and asked != "bfloat16" else None


def _multiplies_bfloat16() -> bool:
    """Returns whether the platform multiplies bfloat16 many times faster than float32."""
    platform = forms.platform()
    return platform == "tpu" or (platform == "cuda" and forms.capability() >= _AMPERE)


def settled_precision() -> lax.Precision:
    """Returns the precision of a product of what `settled_at` returns. It multiplies that without
    rounding.
    """
    return PRECISION if multiplied_bits() is None else lax.Precision.DEFAULT


def settled_at(rule: "Rule", record: Any, g: Any, *, by_kernels: bool = False) -> Any:
    """Rounds the record and the cotangent of a site to what is multiplied there, and returns both.

    A plain step rounds factors of float32 where the platform multiplies fewer bits. Here they are
    rounded before, so the norm and the sum have the same factors. All products of such factors are
    exact. Where kernels compute the norm and the sum (`by_kernels`), both read bfloat16 in memory,
    which is settled.
    """
    bits = multiplied_bits() if isinstance(rule, (Dot, Conv)) else None

    def at_site(x: jax.Array) -> jax.Array:
        if x.dtype != jnp.float32:
            return x if by_kernels else settled(x)
        if bits is None:
            return x
        x = lax.reduce_precision(x, 8, bits)
        return x.astype(jnp.bfloat16) if bits == _BFLOAT16 else x  # half of the memory

    return jax.tree.map(at_site, (record, g))


def _exact_parts(x: jax.Array, rule: "Rule", record: Any) -> list[jax.Array]:
    """Returns a sum of arrays for `x`, each of which the device multiplies with `record` without
    rounding.

    `x` is a cotangent times a factor in float32. Two parts have 16 of its 24 bits in bfloat16, and
    22 in TF32. `rounding.of_sum` counts what they lack.
    """
    if not isinstance(rule, (Dot, Conv)) or x.dtype != jnp.float32:
        return [x]
    dtype: Any = jnp.float32
    bits = multiplied_bits()
    if isinstance(rule, Dot) and record.dtype == jnp.bfloat16 and _multiplies_bfloat16():
        bits, dtype = _BFLOAT16, jnp.bfloat16
    if bits is None:
        return [x]
    first = lax.reduce_precision(x, 8, bits)
    second = lax.reduce_precision(x - first, 8, bits)
    return [first.astype(dtype), second.astype(dtype)]


def lost_in_parts() -> int:
    """Returns the rounding of `_exact_parts`, as a number of additions of `rounding.of_sum`."""
    return 2**7 if _multiplies_bfloat16() else 0  # 2**-16, in units of 2**-23


def _contracted(
    x: jax.Array,
    y: jax.Array,
    over: Sequence[int],
    batch: Sequence[int] = (),
    precision: lax.Precision | None = None,
) -> jax.Array:
    """Contracts equal dimensions of two arrays of any dtype. It accumulates in float32 or wider.

    `jnp.einsum` gives the same product, but takes twenty times as long to trace. The arrays are
    settled, unless a precision is given.
    """
    kind = wide_dtype(x, y)
    if x.dtype != y.dtype:
        x, y = x.astype(kind), y.astype(kind)
    numbers = ((over, over), (batch, batch))
    return lax.dot_general(
        x, y, numbers, preferred_element_type=kind, precision=precision or settled_precision()
    )


def _outer_sum(u: jax.Array, w: jax.Array) -> jax.Array:
    """Computes sum_{n,t} u_nst w_nst^T, [S, p, q], for u [N, S, T, p] and w [N, S, T, q]."""
    if u.shape[1] == 1:  # a plain matrix product
        return _contracted(u.reshape(-1, u.shape[-1]), w.reshape(-1, w.shape[-1]), [0])[None]
    return _contracted(u, w, [0, 2], [1])


def _prod(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _parts(count: int, size: int) -> tuple[int, int]:
    """Returns (number of parts, length of a part) of `count` things of `size` bytes. Parts of one
    end may overlap.
    """
    least = math.ceil(count / max(1, _PART // size))
    number = min(range(least, min(2 * least, count) + 1), key=lambda n: n * math.ceil(count / n))
    return number, math.ceil(count / number)


def rows_kept(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Sets the rows of examples that are not kept to zero, since 0 * NaN is NaN."""
    return jnp.where(keep.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


def _repeated(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts an array along new last axes."""
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


def _transposed_back(x: jax.Array, order: Sequence[int]) -> jax.Array:
    return x.transpose([order.index(d) for d in range(len(order))])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot(Rule):
    """The rule for `dot_general` of data with a weight on either side. Batch dimensions of the
    weight are groups.
    """

    weight_operand: int
    data_order: tuple[int, ...]  # batch, free and contracted dimensions
    weight_order: tuple[int, ...]  # batch, contracted and free dimensions
    out_order: tuple[int, ...]  # dimensions of batch, data and weight

    @classmethod
    def of(cls, eqn: Any, weight_operand: int) -> "Dot":
        w, x = weight_operand, 1 - weight_operand
        contracted, batch = eqn.params["dimension_numbers"]
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        free = [
            tuple(d for d in range(len(shapes[i])) if d not in (*contracted[i], *batch[i]))
            for i in (0, 1)
        ]
        n_batch, n_left, n_out = (
            len(batch[w]),
            len(batch[w]) + len(free[0]),
            eqn.outvars[0].aval.ndim,
        )
        left, right = range(n_batch, n_left), range(n_left, n_out)
        return cls(
            weight_shape=shapes[w],
            positions=_prod(shapes[x], free[x]),
            rows=_prod(shapes[w], contracted[w]),
            cols=_prod(shapes[w], free[w]),
            groups=_prod(shapes[w], batch[w]),
            row_dims=tuple(contracted[w]),
            col_dims=free[w],
            weight_operand=w,
            data_order=(*batch[x], *free[x], *contracted[x]),
            weight_order=(*batch[w], *contracted[w], *free[w]),
            out_order=(*range(n_batch), *((*right, *left) if w == 0 else (*left, *right))),
        )

    def record(self, operands: Sequence[Any]) -> Any:
        return operands[1 - self.weight_operand]

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        u = record.transpose(self.data_order).reshape(self.groups, self.positions, self.rows)
        return (u,), g.transpose(self.out_order).reshape(self.groups, self.positions, self.cols)

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        (u,), w = jax.vmap(self.factors)(record, g)
        return self.as_weight(_outer_sum(u, w))

    @property
    def is_dense(self) -> bool:
        return True

    def as_weight(self, grad: jax.Array) -> jax.Array:
        grad = grad.reshape([self.weight_shape[d] for d in self.weight_order])
        return _transposed_back(grad, self.weight_order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Rule):
    """The rule for `conv_general_dilated` of data (lhs) with a kernel (rhs), of any geometry except
    batch groups.
    """

    numbers: Any  # ConvDimensionNumbers: lhs, rhs and output layouts
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    data_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    window: tuple[int, ...]  # of the kernel
    out_window: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Any) -> "Conv":
        p, kernel, out = eqn.params, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
        numbers, groups = p["dimension_numbers"], p["feature_group_count"]
        out_feature, in_feature, *spatial = numbers.rhs_spec
        batch, _, *out_spatial = numbers.out_spec
        return cls(
            weight_shape=tuple(kernel),
            positions=_prod(out, (batch, *out_spatial)),
            rows=_prod(kernel, (*spatial, in_feature)),
            cols=kernel[out_feature] // groups,
            groups=groups,
            numbers=numbers,
            strides=tuple(p["window_strides"]),
            padding=tuple(p["padding"]),
            data_dilation=tuple(p["lhs_dilation"]),
            kernel_dilation=tuple(p["rhs_dilation"]),
            window=tuple(kernel[d] for d in spatial),
            out_window=tuple(out[d] for d in out_spatial),
        )

    @property
    def _looped(self) -> int:
        """The number of leading window dimensions whose positions form separate parts of u. Others
        are in its rows.
        """
        if self.groups == 1 and self.window == self.strides:  # patches do not overlap
            return 0
        if self.groups > 1 or self.rows // math.prod(self.window) >= 8:
            return len(self.window)
        # A part of few rows multiplies slowly.
        rows = (self.rows // math.prod(self.window[:d]) for d in range(len(self.window) + 1))
        return next(d for d, n in enumerate(rows) if n <= _PATCH_ROWS)

    @property
    def is_dense(self) -> bool:
        return self.groups == 1 and self._looped == 0

    def as_weight(self, grad: jax.Array) -> jax.Array:
        return self._as_weight(grad.reshape(*self.window, -1, self.cols))

    @property
    def geometry(self) -> cells.Geometry:
        """The arguments of the kernels of convolutions."""
        return cells.Geometry(self.window, self.strides, self.padding, self.kernel_dilation)

    def of_pictures(self, record: Any) -> bool:
        """Returns whether each example is one picture, which `pictures` returns, and all channels
        are one group.
        """
        plain = self.groups == 1 and set(self.data_dilation) == {1} and len(self.window) == 2
        plain = plain and min(itertools.chain(*self.padding)) >= 0
        return plain and record.shape[1 + self.numbers.lhs_spec[0]] == 1

    def pictures(self, record: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x [B, H, W, C] and the cotangents [B, OH, OW, K]."""

        def channels_last(x: jax.Array, spec: Sequence[int]) -> jax.Array:
            batch, feature, *spatial = spec
            x = x.transpose((0, *(1 + d for d in (batch, *spatial, feature))))
            return x.reshape(len(x), *x.shape[2:])

        return channels_last(record, self.numbers.lhs_spec), channels_last(g, self.numbers.out_spec)

    @property
    def _wide_part(self) -> bool:
        """Whether a part of u has more rows than w has. XLA on CPU multiplies faster if the longer
        one comes last.
        """
        return self.rows // math.prod(self.window[: self._looped]) > self.cols

    @property
    def _cotangent_last(self) -> bool:
        """Whether a product of all patches ends with w. XLA on CPU fills vectors with what comes
        last.
        """
        return self.cols >= 32

    @property
    def _offsets(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.window[: self._looped])))

    def record(self, operands: Sequence[Any]) -> Any:
        return operands[0]

    def _channels_last(self, record: jax.Array, joined: int) -> jax.Array:
        """Returns padded and dilated data [M, *spatial, channels], with patches along dimensions
        from `joined` on.
        """
        batch, feature, *spatial = self.numbers.lhs_spec
        x = record.transpose((batch, *spatial, feature))
        interior = [
            (lo, hi, d - 1) for (lo, hi), d in zip(self.padding, self.data_dilation, strict=True)
        ]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *interior, (0, 0, 0)])
        for d in reversed(range(joined, len(self.window))):
            x = self._patches_along(x, d)
        return x

    def _patches_along(self, x: jax.Array, d: int) -> jax.Array:
        """Moves the kernel positions of dimension d into the channels, in front of those that are
        there.
        """
        stride, window, dilation, span = (
            self.strides[d],
            self.window[d],
            self.kernel_dilation[d],
            self._span(d),
        )
        if self._folds(d):  # fewer and longer runs are copied in two thirds of the time
            x, stride, window, span = self._folded(x, d), 1, window // stride, self.out_window[d]
        starts = (i * dilation for i in range(window))
        return jnp.concatenate(
            [lax.slice_in_dim(x, i, i + span, stride, 1 + d) for i in starts], axis=-1
        )

    def _folds(self, d: int) -> bool:
        """Returns whether the window covers a whole number of strides of dimension d, and has no
        dilation there.
        """
        return self.kernel_dilation[d] == 1 and self.window[d] % self.strides[d] == 0

    def _folded(self, x: jax.Array, d: int) -> jax.Array:
        """Moves the entries of each stride of dimension d into the channels, in front of those that
        are there.
        """
        axis, stride, used = 1 + d, self.strides[d], self._span(d) + self.window[d] - 1
        x = lax.slice_in_dim(x, 0, used, axis=axis)
        x = x.reshape(*x.shape[:axis], used // stride, stride, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis + 1, -2)
        return x.reshape(*x.shape[:-2], -1)

    def _span(self, d: int) -> int:
        """Returns the number of entries from the first to the last that a kernel position meets."""
        return (self.out_window[d] - 1) * self.strides[d] + 1

    def _patch(self, x: jax.Array, offset: Any) -> jax.Array:
        """Slices the data at the kernel position `offset` of the looped dimensions: [groups, T,
        rows of a part].
        """
        # Convolutions that extract patches are many times slower.
        looped, rest = range(len(offset)), x.shape[1 + len(offset) :]
        start = [offset[d] * self.kernel_dilation[d] for d in looped]
        seen = lax.dynamic_slice(
            x, (0, *start, *(0 for _ in rest)), (len(x), *(self._span(d) for d in looped), *rest)
        )
        steps = [1, *(self.strides[d] for d in looped), *(1 for _ in rest)]
        return self._split(lax.slice(seen, [0] * x.ndim, seen.shape, steps))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.positions, self.groups, -1).swapaxes(0, 1)

    def _cotangent(self, g: jax.Array) -> jax.Array:
        batch, feature, *spatial = self.numbers.out_spec
        return self._split(g.transpose((batch, *spatial, feature)))

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        x = self._channels_last(record, self._looped)
        return tuple(self._patch(x, offset) for offset in self._offsets), self._cotangent(g)

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        x = jax.vmap(lambda record: self._channels_last(record, self._looped))(record)
        w = jax.vmap(self._cotangent)(g)
        # Each device adds up its own block of examples. Otherwise they exchange a sum for each
        # kernel position.
        parts = math.gcd(len(w), shards.auto_devices()) if self._looped else 1
        x, w = (y.reshape(parts, -1, *y.shape[1:]) for y in (x, w))

        def at(offset: Any) -> jax.Array:  # [parts, groups, in, out] or [parts, groups, out, in]
            u = jax.vmap(jax.vmap(lambda x: self._patch(x, offset)))(x)
            return jax.vmap(_outer_sum)(w, u) if self._wide_part else jax.vmap(_outer_sum)(u, w)

        # The loop over kernel positions takes less memory and time than joining the patches of the
        # whole batch.
        grad = (lax.map(at, jnp.asarray(self._offsets)) if self._looped else at(())[None]).sum(1)
        looped, rest = self.window[: self._looped], self.window[self._looped :]
        if self._wide_part:
            grad = grad.reshape(*looped, self.groups, self.cols, *rest, -1)
            grad = jnp.moveaxis(grad, (len(looped), len(looped) + 1), (-2, -1))
        else:
            grad = jnp.moveaxis(
                grad.reshape(*looped, self.groups, *rest, -1, self.cols), len(looped), -2
            )
        return self._as_weight(grad.reshape(*self.window, -1, self.groups * self.cols))

    def _as_weight(self, grad: jax.Array) -> jax.Array:
        """Moves the dimensions of dV [*window, in, out] to their places in the weight."""
        out_feature, in_feature, *spatial = self.numbers.rhs_spec
        return _transposed_back(grad, (*spatial, in_feature, out_feature))

    def weight_grads(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of M examples. On a CPU it forms all patches of a few examples at a time, in
        the cache.

        XLA copies whole rows of an array many times faster than it joins slices. So patches are
        rows of the data, of the channels and of the kernel positions along later dimensions where
        channels are few.
        """
        joined = max(1, self._looped)  # the first dimension along which patches are part of a row
        fold = self.strides[0] if joined == 1 and self._folds(0) else 1
        entries = fold * self.rows // math.prod(self.window[:joined])  # of a row
        overlap, alone = self.window != self.strides, shards.auto_devices() == 1
        if (
            not (overlap and alone and g.size and self.groups == 1 and entries >= 8)
            or forms.platform() != "cpu"
        ):
            return super().weight_grads(record, g)

        zero = opaque.zero(g)  # else XLA pads and takes memory long before there is a cotangent
        x = jax.vmap(jax.vmap(lambda x: self._channels_last(x, joined)))(
            record + zero.astype(record.dtype)
        )
        if joined < len(self.window):
            x = opaque.formed(x, zero)
        if fold > 1:
            x = opaque.formed(jax.vmap(jax.vmap(lambda x: self._folded(x, 0)))(x), zero)
        w = jax.vmap(jax.vmap(self._cotangent))(g).reshape(len(x), -1, self.cols)
        examples, lengths, positions = len(x), x.shape[1:-1], w.shape[1]
        number, size = _parts(examples, positions * self.rows * x.dtype.itemsize)
        rows, between = self._patch_rows(size, lengths, joined, fold), math.prod(lengths)
        x = x.reshape(-1, entries)
        whole_row = lax.GatherDimensionNumbers((1,), (0,), (0,))
        inside = lax.GatherScatterMode.PROMISE_IN_BOUNDS

        def turn(i: jax.Array, grads: jax.Array) -> jax.Array:
            start = jnp.minimum(
                i * size, examples - size
            )  # the last turns may have examples in common
            patches = lax.gather(x, start * between + rows, whole_row, (1, entries), mode=inside)
            u = opaque.formed(patches, zero).reshape(size, positions, self.rows)
            part = lax.dynamic_slice_in_dim(w, start, size)
            pair = (u, part) if self._cotangent_last else (part, u)
            return lax.dynamic_update_slice_in_dim(grads, _contracted(*pair, [1], [0]), start, 0)

        shape = (self.rows, self.cols) if self._cotangent_last else (self.cols, self.rows)
        zeros = jnp.full((examples, *shape), zero.astype(wide_dtype(x, w)))
        grads = lax.fori_loop(0, number, turn, shards.vary(zeros, shards.varying_axes(x, w)))
        window = (*self.window, self.rows // math.prod(self.window))
        if self._cotangent_last:
            grads = grads.reshape(examples, *window, self.cols)
        else:
            grads = jnp.moveaxis(grads.reshape(examples, self.cols, *window), 1, -1)
        return jax.vmap(self._as_weight)(grads)

    def _patch_rows(self, size: int, lengths: Sequence[int], joined: int, fold: int) -> jax.Array:
        """Returns the rows of the patches of `size` examples, which are numbered in [size,
        *lengths]: [rows, 1] int32.

        They are in the order of positions and, within each, of kernel positions along the
        dimensions before `joined`. `lengths` are (repeats, batch, *spatial), where each row of the
        first spatial dimension has `fold` entries.
        """
        ahead = range(joined)
        window = [self.window[d] // fold for d in ahead]
        counts = [size, *lengths[:2], *self.out_window[:joined], *lengths[2 + joined :], *window]
        pitches = [
            math.prod(lengths[d:]) for d in range(len(lengths) + 1)
        ]  # of size, repeats, batch and *spatial
        steps = [
            *pitches[:3],
            *(pitches[3 + d] * self.strides[d] // fold for d in ahead),
            *pitches[3 + joined :],
        ]
        steps += [pitches[3 + d] * self.kernel_dilation[d] for d in ahead]
        rows = jnp.zeros(counts, jnp.int32)
        for d, step in enumerate(steps):
            rows += step * lax.broadcasted_iota(jnp.int32, counts, d)
        return rows.reshape(-1, 1)

    def weight_grad_by_primitive(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes `weight_grad` by the transpose of the primitive, as one convolution for the
        whole batch.
        """
        record, g = _wide(record), _wide(g)

        def apply(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return lax.conv_general_dilated(
                x,
                kernel,
                self.strides,
                self.padding,
                lhs_dilation=self.data_dilation,
                rhs_dilation=self.kernel_dilation,
                dimension_numbers=self.numbers,
                feature_group_count=self.groups,
                precision=settled_precision(),
            )

        kernel = jax.ShapeDtypeStruct(self.weight_shape, g.dtype)
        grad: jax.Array = jax.linear_transpose(
            lambda k: jax.vmap(apply, (0, None))(record, k), kernel
        )(g)[0]
        return grad


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup(Rule):
    """The rule for a `gather` or `dynamic_slice` of a weight: a lookup of the rows of a table.

    Rows are numbered by the dimensions that a window does not cover. A position is one row of one
    window.
    """

    sizes: tuple[int, ...]  # of a window, for each dimension of the weight
    out_order: tuple[
        int, ...
    ]  # dimensions of the output: of windows, of rows in a window, and others
    clip: bool  # whether out-of-range indices are clipped, otherwise they contribute zero
    numbers: Any  # GatherDimensionNumbers, None for a slice

    @classmethod
    def of(cls, eqn: Any) -> "Lookup | None":
        """Returns the rule, or None if the equation reads a whole weight or more than 2**31
        rows.
        """
        weight, sizes = tuple(eqn.invars[0].aval.shape), tuple(eqn.params["slice_sizes"])
        numbers, out_dims = eqn.params.get("dimension_numbers"), range(eqn.outvars[0].aval.ndim)
        batched, collapsed = (
            (numbers.operand_batching_dims, numbers.collapsed_slice_dims) if numbers else ((), ())
        )
        rows = tuple(d for d, n in enumerate(sizes) if n < weight[d] or d in (*batched, *collapsed))
        columns = tuple(d for d in range(len(weight)) if d not in rows)
        if not rows or _prod(weight, rows) > jnp.iinfo(jnp.int32).max:
            return None
        windows = [d for d in out_dims if d not in numbers.offset_dims] if numbers else []
        kept = [d for d in range(len(weight)) if d not in (*batched, *collapsed)]
        place = dict(zip(kept, numbers.offset_dims if numbers else out_dims, strict=True))
        return cls(
            weight_shape=weight,
            positions=_prod(eqn.outvars[0].aval.shape, windows) * _prod(sizes, rows),
            rows=_prod(weight, rows),
            cols=_prod(weight, columns),
            row_dims=rows,
            col_dims=columns,
            sizes=sizes,
            out_order=(*windows, *(place[d] for d in (*rows, *columns) if d in place)),
            clip=numbers is None or eqn.params["mode"] == lax.GatherScatterMode.CLIP,
            numbers=numbers,
        )

    def _starts(self, operands: Sequence[Any]) -> dict[int, Any]:
        """Returns where windows start, for each dimension of the weight that is indexed."""
        if self.numbers is None:
            return dict(enumerate(operands[1:]))
        return {d: operands[1][..., k] for k, d in enumerate(self.numbers.start_index_map)}

    def record(self, operands: Sequence[Any]) -> Any:
        starts, shape = (
            self._starts(operands),
            () if self.numbers is None else operands[1].shape[:-1],
        )
        inside, places = jnp.ones(shape, bool), dict[int, Any]()
        for d, start in starts.items():
            # The last start, and the -1 below, may not fit the dtype of the index.
            last = min(self.weight_shape[d] - self.sizes[d], int(jnp.iinfo(start.dtype).max))
            place = jnp.clip(start, 0, last)
            inside, places[d] = inside & (start == place), place.astype(jnp.int32)
        if self.numbers is not None:
            for d, axis in zip(
                self.numbers.operand_batching_dims,
                self.numbers.start_indices_batching_dims,
                strict=True,
            ):
                places[d] = lax.broadcasted_iota(jnp.int32, shape, axis)
        # Axes of the shape of a window follow those of its start.
        shape = (*shape, *(self.sizes[d] for d in self.row_dims))
        row, inside = jnp.zeros(shape, jnp.int32), _repeated(inside, shape)
        for axis, d in enumerate(self.row_dims, inside.ndim - len(self.row_dims)):
            row = row * self.weight_shape[d] + lax.broadcasted_iota(jnp.int32, shape, axis)
            row = row + _repeated(places[d], shape) if d in places else row
        return (row if self.clip else jnp.where(inside, row, -1)).reshape(-1)

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        return (OneHot(record.reshape(1, -1)),), g.transpose(self.out_order).reshape(
            1, -1, self.cols
        )

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        return _table(self, record, g)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Rule):
    """The rule for rows of a table that `summed_rows` has added up. The record is an index [T], and
    g is [T, cols].
    """

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        return (OneHot(record[None], distinct=True),), g[None]

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        return _table(self, record, g)


def _table(rule: Rule, record: Any, g: jax.Array) -> jax.Array:
    """Computes dV of a rule whose u are rows of an identity matrix."""
    (u,), w = jax.vmap(rule.factors)(record, _wide(g))
    # A negative index would wrap around, so it moves out of range, where it is dropped.
    index = jnp.where(u.index < 0, rule.rows, u.index).reshape(-1)
    rows = w.reshape(-1, rule.cols)
    grad = jnp.zeros((rule.rows, rule.cols), w.dtype).at[index].add(rows, mode="drop")
    order = (*rule.row_dims, *rule.col_dims)
    return _transposed_back(grad.reshape([rule.weight_shape[d] for d in order]), order)


class OnWeight(Rule):
    """The rule for a tap on the weight itself, whose cotangent is dV: scales, biases, and any
    unknown primitive.
    """

    def record(self, operands: Sequence[Any]) -> Any:
        return ()

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        return (jnp.ones((1, 1, 1), g.dtype),), g.reshape(1, 1, -1)

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        return _wide(g).sum(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """One meeting point of a weight and data."""

    rule: Rule
    leaves: frozenset[int]  # trainable leaves that the weight depends on
    source: tuple[int, ...] | None  # `walker.Value.source` of the weight
    lengths: tuple[int, ...]  # of the enclosing scans, outermost first
    sliced: tuple[bool, ...]  # for each scan, whether the weight changes between iterations
    tap: jax.ShapeDtypeStruct  # with the loop axes in front

    @property
    def empty(self) -> bool:
        """Whether there is no entry of the result or of the weight, so that the gradient is
        zero.
        """
        return 0 in self.tap.shape or 0 in self.rule.weight_shape

    def zero_tap(self) -> jax.Array:
        """Returns a tap of zeros [*loops, 1, ...].

        With another shape than the records, XLA does not share the zeros in which loops collect the
        ones and the other. On a TPU it leaves those of a forward loop out, if nothing else reads
        them.
        """
        loops = len(self.lengths)
        return jnp.zeros((*self.tap.shape[:loops], 1, *self.tap.shape[loops:]), self.tap.dtype)

    @property
    def repeats(self) -> int:
        """The number of loop iterations that apply the same weight."""
        return math.prod(n for n, s in zip(self.lengths, self.sliced, strict=True) if not s)

    @property
    def slices(self) -> int:
        """The number of slices of the weight that loops apply."""
        return math.prod(n for n, s in zip(self.lengths, self.sliced, strict=True) if s)

    def without_cancellation(self, record: Any, g: jax.Array) -> jax.Array:
        """Returns the norms [B] that dV would have if its terms had one direction, M in
        `rounding`.
        """
        parts, w = self.factors(record, g)
        length_u, length_w = _lengths((parts, w), wide_dtype(w))
        return rounding.root(jnp.square((length_u * length_w).sum(2)).sum(1))

    @property
    def terms(self) -> int:
        """The number of terms that are added up in an entry of dV of one example."""
        return 1 if isinstance(self.rule, Rows) else self.rule.positions * self.repeats

    def _by_slice(self, tree: Any) -> Any:
        """Reshapes [B, *loops, ...] to [B, slices, repeats, ...]."""
        order = sorted(range(len(self.sliced)), key=lambda i: not self.sliced[i])

        def arrange(x: jax.Array) -> jax.Array:
            n = 1 + len(order)
            x = x.transpose((0, *(1 + i for i in order), *range(n, x.ndim)))
            return x.reshape(x.shape[0], self.slices, self.repeats, *x.shape[n:])

        return jax.tree.map(arrange, tree)

    def _loops_in_front(self, grad: jax.Array) -> jax.Array:
        """Reshapes [..., slices, *weight] to [..., *sliced loops, *weight]."""
        shape = self.rule.weight_shape
        loops = [n for n, s in zip(self.lengths, self.sliced, strict=True) if s]
        return grad.reshape(*grad.shape[: grad.ndim - len(shape) - 1], *loops, *shape)

    def kernels(self, method: str, record: Any, g: jax.Array) -> tuple[str, str]:
        """Returns which kernels compute the norm and the sum of its own weight on a TPU, by a
        method of `clipping`.

        They are "dense", "convolution", or "" for products of XLA. Kernels of convolutions round by
        themselves.
        """
        rule = self.rule
        multiplied = {jnp.dtype(jnp.bfloat16)}
        if multiplied_bits() == _BFLOAT16:
            multiplied.add(jnp.dtype(jnp.float32))
        if (
            forms.platform() != "tpu"
            or not isinstance(rule, (Dot, Conv))
            or not {record.dtype, g.dtype} <= multiplied
        ):
            return "", ""
        norm = total = ""
        if isinstance(rule, Conv) and not self.lengths and rule.of_pictures(record):
            x, cotangents = jax.eval_shape(rule.pictures, record, g)
            norm = "convolution" if convolution.suits(x, cotangents, rule.geometry) else ""
            total = "convolution" if convolution.sums_suit(x, cotangents, rule.geometry) else ""
        if (
            rule.is_dense and not total
        ):  # where the batch is on the lanes, a dense layer would be copied
            served = dense.costs(rule.positions * self.repeats, rule.rows, rule.cols)
            norm = "dense" if {"factors": "gram", "drop": "formed"}.get(method) in served else norm
            total = "dense" if "weighted" in served else ""
        return (norm if method == "drop" or norm == "dense" else ""), total

    def settled(self, method: str, record: Any, g: jax.Array, *, alone: bool) -> Any:
        """Returns the record and the cotangent as the norm and the sum read them.

        Args:
          method: The method of its component.
          alone: Whether its component has no other site.
        """
        norm, total = self.kernels(method, record, g) if alone else ("", "")
        if norm == total == "convolution":
            return record, g
        return settled_at(self.rule, record, g, by_kernels=bool(norm and total))

    def contract(self, record: Any, g: jax.Array, factors: jax.Array) -> jax.Array:
        """Computes sum_b factors_b dV_b, [*sliced loops, *weight], from record and g [B, *loops,
        ...] and factors [B].

        On a TPU an example with a factor of 0 contributes 0, whatever it holds.
        """
        rule = self.rule
        _, total = self.kernels("", record, g)
        if not total:
            return self._contract(record, g, factors)

        def by_dense(record: Any, g: jax.Array, factors: jax.Array) -> jax.Array:
            (u,), w = self.factors(record, g)
            grads = dense.weighted_sum(u, w, factors, rule.lanes)
            by_slice = grads.reshape(self.slices, rule.groups, *grads.shape[1:])
            return self._loops_in_front(jax.vmap(rule.as_weight)(by_slice))

        def by_convolution(record: Any, g: jax.Array, factors: jax.Array) -> jax.Array:
            assert isinstance(rule, Conv)
            pictures, cotangents = rule.pictures(record, g)
            return rule.as_weight(
                convolution.weighted_sum(pictures, cotangents, factors, rule.geometry)
            )

        def by_xla(record: Any, g: jax.Array, factors: jax.Array) -> jax.Array:
            record, g = settled_at(rule, record, g)
            return self._contract(record, g, factors)

        kernel = by_dense if total == "dense" else by_convolution
        grad: jax.Array = forms.by_platform(
            record, g, factors, default=by_xla, kernels={"tpu": kernel}
        )
        return grad

    def _contract(self, record: Any, g: jax.Array, factors: jax.Array) -> jax.Array:
        if forms.platform() == "tpu":  # XLA computes this where a product reads the rows
            record, g = jax.tree.map(lambda x: rows_kept(x, factors != 0), (record, g))
        kind = wide_dtype(g)
        g = g.astype(kind) * factors.astype(kind).reshape(-1, *(1,) * (g.ndim - 1))
        record, g = self._by_slice((record, g))

        def together(
            x: jax.Array,
        ) -> jax.Array:  # [B, slices, repeats, ...] -> [slices, B * repeats, ...]
            return x.swapaxes(0, 1).reshape(self.slices, -1, *x.shape[3:])

        grad = self.rule.weight_grad
        # In a conditional or a loop, XLA on CPU runs a convolution many times slower than the same
        # dot products.
        if isinstance(self.rule, Conv) and forms.platform() != "cpu":
            grad = self.rule.weight_grad_by_primitive
        form = _vmap_or_squeeze(grad)
        record, parts = jax.tree.map(together, (record, _exact_parts(g, self.rule, record)))
        return self._loops_in_front(
            functools.reduce(jnp.add, [form(record, part) for part in parts])
        )

    def per_example(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of every example, [B, *sliced loops, *weight]."""
        record, g = self._by_slice((record, g))

        def merged(x: jax.Array) -> jax.Array:  # [B, slices, ...] -> [B * slices, ...]
            return x.reshape(-1, *x.shape[2:])

        grads = self.rule.weight_grads(*jax.tree.map(merged, (record, g)))
        return self._loops_in_front(grads.reshape(len(g), self.slices, *grads.shape[1:]))

    def norm_of_formed(self, record: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns ||dV||^2 of every example, which is formed for it, and E and M of `rounding`, [B]
        each.
        """

        def by_xla(record: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            record, g = settled_at(self.rule, record, g)
            grads = self.per_example(record, g)
            squares = jnp.square(grads).sum(tuple(range(1, grads.ndim)))
            return squares, jnp.zeros_like(squares), self.without_cancellation(record, g)

        def by_dense(record: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            (u,), w = self.factors(record, g)
            squares = dense.formed_squares(u, w)
            return squares, jnp.zeros_like(squares), self.without_cancellation(record, g)

        def by_convolution(record: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            assert isinstance(self.rule, Conv)
            pictures = self.rule.pictures(record, g)
            squares, apart, spread = convolution.norms_and_bounds(*pictures, self.rule.geometry)
            return squares, spread, apart

        kernel, _ = self.kernels("drop", record, g)
        if not kernel:
            return by_xla(record, g)
        by_kernel = by_dense if kernel == "dense" else by_convolution
        norm: tuple[jax.Array, jax.Array, jax.Array]
        norm = forms.by_platform(record, g, default=by_xla, kernels={"tpu": by_kernel})
        return norm

    def factors(self, record: Any, g: jax.Array) -> tuple[tuple[Factor, ...], jax.Array]:
        """Returns factors of every example: parts [B, S, T, rows_k] and w [B, S, T, cols], with
        loops in S and T.
        """
        record, g = self._by_slice((record, g))
        parts, w = jax.vmap(jax.vmap(jax.vmap(self.rule.factors)))(record, g)

        def merge(x: jax.Array) -> jax.Array:
            """Reshapes [B, slices, repeats, S, T, ...] to [B, slices * S, repeats * T, ...]."""
            b, slices, repeats, s, t, *rest = x.shape
            return x.swapaxes(2, 3).reshape(b, slices * s, repeats * t, *rest)

        merged: tuple[tuple[Factor, ...], jax.Array] = jax.tree.map(merge, (parts, w))
        return merged


def _vmap_or_squeeze(
    fn: Callable[[Any, jax.Array], jax.Array],
) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns `jax.vmap(fn)`, but without a batched contraction where the mapped axis has length
    one.
    """

    def mapped(record: Any, g: jax.Array) -> jax.Array:
        if len(g) == 1:
            return fn(jax.tree.map(lambda x: x[0], record), g[0])[None]
        return jax.vmap(fn)(record, g)

    return mapped


def inner_products(x: Factor, y: Factor, precision: lax.Precision | None = None) -> jax.Array:
    """Computes the inner products [B, S, T, T'] of all rows. They are settled, unless a precision
    is given.
    """
    if isinstance(x, OneHot) and isinstance(y, OneHot):
        same = (x.index[..., :, None] == y.index[..., None, :]) & (x.index >= 0)[..., :, None]
        return same.astype(jnp.float32)
    if isinstance(x, OneHot):
        return inner_products(y, x).swapaxes(-1, -2)
    if isinstance(y, OneHot):
        columns = jnp.where(y.index < 0, x.shape[-1], y.index)[..., None, :]
        picked = jnp.take_along_axis(x, columns, axis=-1, mode="fill", fill_value=0)
        return _wide(picked)
    n, whole = x.shape[-1], x.shape[-1] // _BLOCK
    if whole < 2:
        return _contracted(x, y, [3], [0, 1], precision)

    def product(start: Any, size: int) -> jax.Array:
        u, w = (lax.dynamic_slice_in_dim(z, start, size, axis=-1) for z in (x, y))
        return _contracted(u, w, [3], [0, 1], precision)

    def add(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        return total + product(start, _BLOCK), None

    first = (
        product(n - n % _BLOCK, n % _BLOCK) if n % _BLOCK else jnp.zeros_like(product(0, _BLOCK))
    )
    return lax.scan(add, first, jnp.arange(whole) * _BLOCK)[0]


def summed_rows(site: Site, record: Any, g: jax.Array) -> tuple[Site, Any, jax.Array]:
    """Adds up equal rows of a lookup, in each example apart.

    Returns a site of the rule `Rows`, its record and its cotangent. They have at most one term for
    each entry of the table, so no sum over the batch rounds the terms of one example one by one.
    """
    rule, loops = site.rule, tuple(n for n, s in zip(site.lengths, site.sliced, strict=True) if s)
    (u,), w = site.factors(record, g)
    index, total = _summed(u.index, _wide(w))
    rows = Rows(
        weight_shape=rule.weight_shape,
        positions=w.shape[2],
        rows=rule.rows,
        cols=rule.cols,
        row_dims=rule.row_dims,
        col_dims=rule.col_dims,
    )
    tap = jax.ShapeDtypeStruct((*loops, *w.shape[2:]), total.dtype)
    summed = dataclasses.replace(
        site, rule=rows, lengths=loops, sliced=(True,) * len(loops), tap=tap
    )
    lead = (len(g), *loops)
    return summed, index.reshape(*lead, *index.shape[2:]), total.reshape(*lead, *total.shape[2:])


def _summed(index: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds up the rows w [B, S, T, cols] of equal index [B, S, T]. Returns distinct indices, and
    -1, and their sums.
    """
    w = jnp.where((index >= 0)[..., None], w, 0)
    if w.shape[2] <= 1:
        return index, w

    def one(index: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(index)
        ranked = index[order]
        new = jnp.concatenate([jnp.zeros(1, bool), ranked[1:] != ranked[:-1]])
        number = jnp.cumsum(new).astype(order.dtype)
        place = jnp.zeros_like(order).at[order].set(number, unique_indices=True)
        distinct = jnp.full_like(index, -1).at[number].set(ranked, indices_are_sorted=True)
        return distinct, jnp.zeros_like(w).at[place].add(w)

    return jax.vmap(jax.vmap(one))(index, w)


def _all_lookups(pairs: Sequence[Pair]) -> bool:
    """Returns whether all sites look up rows."""
    return all(
        len(u) == 1 and isinstance(u[0], OneHot) and not isinstance(w, OneHot) for u, w in pairs
    )


def _merged(pairs: Sequence[Pair]) -> tuple[jax.Array, jax.Array]:
    """Returns all rows (index [B, S, T], w [B, S, T, cols]) of sites that look up rows. Rows of no
    index are zero.
    """
    kind = wide_dtype(*(w for _, w in pairs))
    index = jnp.concatenate([parts[0].index for parts, _ in pairs], 2)
    w = jnp.concatenate([w.astype(kind) for _, w in pairs], 2)
    return index, jnp.where((index >= 0)[..., None], w, 0)


def _squared_norms_of_rows(pairs: Sequence[Pair]) -> jax.Array:
    """Computes the squared norms [B] of tables to which the rows of all pairs are added.

    Equal rows are added in a table of T rows. Its cost is that of the rows, where Gram matrices
    cost T times as much.
    """
    index, w = _merged(pairs)
    flushed = rounding.FLUSHED * w.shape[-1] * (index >= 0).sum((1, 2)).astype(w.dtype)
    if len(pairs) == 1 and (pairs[0][0][0].distinct or w.shape[2] == 1):
        return _square(w).sum((1, 2, 3)) + flushed
    _, total = _summed(index, w)
    apart = rounding.root(_square(w).sum(-1)).sum(2)
    error = rounding.of_sum(_terms(pairs), w.dtype) * rounding.root(jnp.square(apart).sum(1))
    squares = _square(total).sum((1, 2, 3))
    return rounding.covered(squares, jnp.zeros_like(squares), error) + flushed


def _width(x: Factor) -> int:
    return 1 if isinstance(x, OneHot) else x.shape[-1]


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(_wide(x))


def _grams(x: Pair, y: Pair, kind: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the inner products <u_t, u'_t'> and <w_t, w'_t'> [B, S, T, T'] of two pairs of
    factors.
    """
    # The sums of rows of a lookup are not settled.
    lookup = any(isinstance(factor, OneHot) for parts, w in (x, y) for factor in (*parts, w))
    precision = PRECISION if lookup else None
    products = [
        inner_products(p, q, precision).astype(kind) for p, q in zip(x[0], y[0], strict=True)
    ]
    return functools.reduce(jnp.add, products), inner_products(x[1], y[1], precision).astype(kind)


def gram_rows(positions: int) -> int:
    """Returns the number of rows of the blocks of Gram matrices, which divides the number of
    positions.
    """
    most = _GRAM_ROWS_TPU if forms.platform() == "tpu" else _GRAM_ROWS
    return next((size for size in range(most, most // 2, -1) if positions % size == 0), positions)


def _lengths(pair: Pair, kind: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the lengths of u and w, [B, S, T] each."""

    def squares(x: Factor) -> jax.Array:
        return (
            (x.index >= 0).astype(kind)
            if isinstance(x, OneHot)
            else _square(x).sum(-1).astype(kind)
        )

    parts, w = pair
    return rounding.root(functools.reduce(jnp.add, map(squares, parts))), rounding.root(squares(w))


def _positions(pair: Pair) -> int:
    """Returns the number of positions T of a pair."""
    return int(jax.tree.leaves(pair[1])[0].shape[2])


def _terms(pairs: Sequence[Pair]) -> int:
    """Returns how many terms an entry of the gradient may be a sum of, one after the other."""
    ones = [any(isinstance(x, OneHot) and x.distinct for x in (*parts, w)) for parts, w in pairs]
    most = max(1 if one else _positions(pair) for one, pair in zip(ones, pairs, strict=True))
    return most + len(pairs) + lost_in_parts()


def _additions(xs: Sequence[Factor], ys: Sequence[Factor]) -> int:
    """Returns how many additions a term of the inner products of two factors passes. A row of a
    table is picked.
    """
    picked = [isinstance(x, OneHot) or isinstance(y, OneHot) for x, y in zip(xs, ys, strict=True)]
    widths = [0 if one else x.shape[-1] for one, x in zip(picked, xs, strict=True)]
    most = max(n if n < 2 * _BLOCK else _BLOCK + n // _BLOCK + 1 for n in widths)
    return most + len(xs) - 1


def _gram_sums(
    grams: Sequence[jax.Array],
    x: tuple[jax.Array, jax.Array],
    y: tuple[jax.Array, jax.Array],
    counts: Sequence[int],
) -> tuple[jax.Array, jax.Array]:
    """Returns sum_ts U_ts W_ts and a bound on its rounding, E in `rounding`, [B] each.

    Args:
      grams: U and W, [B, S, T, T'].
      x, y: The lengths of u and w, [B, S, T] and [B, S, T'] each.
      counts: r_u, r_w and r_T.
    """
    gram_u, gram_w = grams
    square_u, square_w = (a[..., :, None] * b[..., None, :] for a, b in zip(x, y, strict=True))
    products, abs_u, abs_w = gram_u * gram_w, jnp.abs(gram_u), jnp.abs(gram_w)
    r_u, r_w, r_t = (rounding.eps(gram_u.dtype) * count for count in counts)
    spread = r_u * square_u * abs_w + r_w * square_w * abs_u + r_t * abs_u * abs_w
    return products.sum((1, 2, 3)), spread.sum((1, 2, 3))


def _gram_norm(pair: Pair, kind: Any, lanes: dense.Lanes) -> dense.Norm:
    """Returns ||sum_t u_t w_t^T||^2 and E of it, [B] each, and the lengths of u and w, [B, S, T]
    each.

    Gram matrices are symmetric. Of long ones it computes the blocks of one half, one after the
    other.
    """
    if not dense.has_gram_norm(*pair):
        return _gram_norm_by_xla(pair, kind)

    def by_xla(pair: Pair) -> dense.Norm:
        return _gram_norm_by_xla(jax.tree.map(settled, pair), kind)

    def by_kernel(pair: Pair) -> dense.Norm:
        ((u,), w) = pair
        return dense.gram_norm(u, w, lanes)

    norm: dense.Norm = forms.by_platform(pair, default=by_xla, kernels={"tpu": by_kernel})
    return norm


def _gram_norm_by_xla(pair: Pair, kind: Any) -> dense.Norm:
    positions = _positions(pair)
    size = gram_rows(positions)
    counts = _counts(pair, pair)
    if size == positions:
        grams = _grams(pair, pair, kind)
        squares = (jnp.diagonal(gram, axis1=2, axis2=3) for gram in grams)
        length_u, length_w = map(rounding.root, squares)
        lengths = (length_u, length_w)
        total, error = _gram_sums(grams, lengths, lengths, counts)
        return total, error, lengths

    lengths = _lengths(pair, kind)

    def block(place: Any) -> tuple[jax.Array, jax.Array]:
        def cut(k: Any) -> tuple[Pair, tuple[jax.Array, jax.Array]]:
            rows: tuple[Pair, tuple[jax.Array, jax.Array]] = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, k * size, size, axis=2), (pair, lengths)
            )
            return rows

        (x, lengths_x), (y, lengths_y) = map(cut, place)
        return _gram_sums(_grams(x, y, kind), lengths_x, lengths_y, counts)

    places = list(itertools.combinations_with_replacement(range(positions // size), 2))
    twice = jnp.array([1 if i == j else 2 for i, j in places], kind)[:, None]
    if (
        forms.platform() != "cpu" and len(places) <= _UNROLLED
    ):  # a loop copies what it reads and writes
        sums = [jnp.stack(xs) for xs in zip(*map(block, places), strict=True)]
    else:
        sums = list(lax.map(block, jnp.array(places)))
    total, spread = ((twice * x).sum(0) for x in sums)
    return total, spread, lengths


def _counts(x: Pair, y: Pair) -> tuple[int, int, int]:
    """Returns r_u, r_w and r_T of `rounding` for two pairs."""
    entries = rounding.additions(_positions(x) * _positions(y))
    return _additions(x[0], y[0]), _additions([x[1]], [y[1]]), entries


def squared_norms(pairs: Sequence[Pair], lanes: dense.Lanes = (False, False)) -> jax.Array:
    """Computes ||sum_j sum_t u_jt w_jt^T||^2 [B] of every example, from the factors of the sites of
    one weight.

    Args:
      pairs: The factors of each site, as of `Site.factors`.
      lanes: How XLA lays those of a single site, as in `dense`.

    Formal guarantees:
      The root of the result times 1 + `rounding.SLACK` is at least the norm of the exact gradient,
      and that of the sum of its terms in float32, whatever their order and however they cancel.
      Squares that underflow count at their upper bound, so a tiny u and a huge w cannot hide a
      gradient. A norm of 0 is reported as up to about 1e-16.
    """
    if _all_lookups(pairs):
        return _squared_norms_of_rows(pairs)
    rows = max(sum(map(_width, parts)) for parts, _ in pairs)
    cols = max(_width(w) for _, w in pairs)
    parts, w = pairs[0]
    if len(pairs) == 1 and w.shape[2] == 1:
        square_u = sum(_square(p).sum((2, 3)) for p in parts) + rows * rounding.FLUSHED
        return (square_u * (_square(w).sum((2, 3)) + cols * rounding.FLUSHED)).sum(1)
    kind = wide_dtype(*jax.tree.leaves(pairs))
    total, spread, lengths_u, lengths_w = jnp.zeros((4, 1), kind)
    apart = jnp.zeros((1, 1), kind)
    lengths: list[tuple[jax.Array, jax.Array]] = []
    for pair in pairs:
        square, its_spread, own = _gram_norm(pair, kind, lanes)
        total, spread = total + square, spread + its_spread
        for other, its in zip(pairs, lengths, strict=False):
            product, its_spread = _gram_sums(
                _grams(pair, other, kind), own, its, _counts(pair, other)
            )
            total, spread = total + 2 * product, spread + 2 * its_spread
        lengths.append(own)
        apart = apart + (own[0] * own[1]).sum(2)
        lengths_u, lengths_w = lengths_u + own[0].sum((1, 2)), lengths_w + own[1].sum((1, 2))
    flushed = rounding.FLUSHED * (rows * jnp.square(lengths_w) + cols * jnp.square(lengths_u))
    error = rounding.of_sum(_terms(pairs), kind) * rounding.root(jnp.square(apart).sum(1))
    return rounding.covered(total, spread, error) + flushed
