"""The rules of weights that meet data: one rule per primitive, with the gradient by the weight.

At a site, `out = primitive(record, V) + tap`. Let g be the cotangent of the tap. The gradient of
the loss with respect to V is dV = sum_t u_t w_t^T, a sum of outer products with u from the record
and w from g. The sum is over the positions t at which the weight is applied (tokens, pixels).
`jaxdp.transforms.convolutions` has the rule of convolutions.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import dense
from jaxdp.transforms.products import outer_sum, wide


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
Factors = tuple[tuple[Factor, ...], jax.Array]  # the same, where w is an array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The geometry of one meeting point, for one example and one iteration of each loop.

    Attributes:
      weight_shape: The shape of the weight V.
      positions: T, the number of positions at which the weight is applied.
      rows: The number of entries of u_t.
      cols: The number of entries of w_t.
      groups: S, the number of independent blocks of the weight. Each has its own u and w.
      row_dims: The dimensions of the weight that u flattens, or () if u is no plain flattening.
      col_dims: The dimensions of the weight that w flattens.
    """

    weight_shape: tuple[int, ...]
    positions: int = 1
    rows: int = 1
    cols: int
    groups: int = 1
    row_dims: tuple[int, ...] = ()
    col_dims: tuple[int, ...] = ()

    @property
    def is_dense(self) -> bool:
        """Whether u is one array, and dV is the sum of u_t w_t^T, which `as_weight` reshapes."""
        return False

    @property
    def lanes(self) -> dense.Lanes:
        """Whether XLA lays u, and w, with the positions on the lanes of a TPU.

        It does so next to heads of attention, where several dimensions are contracted, and where
        this pads less.
        """
        u_is_transposed = len(self.row_dims) > 1 or dense.pads_less(self.positions, self.rows)
        w_is_transposed = len(self.col_dims) > 1 or dense.pads_less(self.positions, self.cols)
        return u_is_transposed, w_is_transposed

    def as_weight(self, grad: jax.Array) -> jax.Array:
        """Reshapes dV [groups, rows, cols] to the shape of the weight."""
        raise NotImplementedError

    def record(self, operands: Sequence[Any]) -> Any:
        """Returns what the backward pass needs of the operands."""
        raise NotImplementedError

    def factors(self, record: Any, g: jax.Array) -> Factors:
        """Returns (parts of u, w).

        Parts are [S, T, rows_k], and their inner products add up. w is [S, T, cols].
        """
        raise NotImplementedError

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV in float32 or wider, summed over the leading axis N of record and g."""
        raise NotImplementedError

    def weight_grads(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of M examples, [M, *weight_shape].

        Each is summed over N, from record and g [M, N, ...].
        """
        return jax.vmap(self.weight_grad)(record, g)


def entries_along(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Returns the product of some dimensions of a shape: (2, 3, 5) along (0, 2) has 10."""
    return math.prod(shape[d] for d in dims)


def transposed_back(x: jax.Array, order: Sequence[int]) -> jax.Array:
    """Reverts a transpose by `order`."""
    places = [order.index(d) for d in range(len(order))]
    return x.transpose(places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot(Rule):
    """The rule for `dot_general` of data with a weight on either side.

    Batch dimensions of the weight are groups.

    Attributes:
      weight_operand: Which operand the weight is, 0 or 1.
      data_order: The dimensions of the data: batch, free and contracted ones.
      weight_order: The dimensions of the weight: batch, contracted and free ones.
      out_order: The dimensions of the result: of batch, data and weight.
    """

    weight_operand: int
    data_order: tuple[int, ...]
    weight_order: tuple[int, ...]
    out_order: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Any, weight_operand: int) -> "Dot":
        w = weight_operand
        x = 1 - weight_operand
        contracted, batch = eqn.params["dimension_numbers"]
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        free = []
        for operand, shape in enumerate(shapes):
            others = (*contracted[operand], *batch[operand])
            own_free = tuple(d for d in range(len(shape)) if d not in others)
            free.append(own_free)
        # The result has the batch, then the free dimensions of the left and the right operand.
        first_left = len(batch[w])
        first_right = first_left + len(free[0])
        left = range(first_left, first_right)
        right = range(first_right, eqn.outvars[0].aval.ndim)
        # The weight is the left operand, so its dimensions come before those of the data.
        if w == 0:
            of_data_and_weight = (*right, *left)
        else:
            of_data_and_weight = (*left, *right)
        weight_shape = shapes[w]
        data_order = (*batch[x], *free[x], *contracted[x])
        weight_order = (*batch[w], *contracted[w], *free[w])
        out_order = (*range(first_left), *of_data_and_weight)
        return cls(
            weight_shape=weight_shape,
            positions=entries_along(shapes[x], free[x]),
            rows=entries_along(weight_shape, contracted[w]),
            cols=entries_along(weight_shape, free[w]),
            groups=entries_along(weight_shape, batch[w]),
            row_dims=tuple(contracted[w]),
            col_dims=free[w],
            weight_operand=w,
            data_order=data_order,
            weight_order=weight_order,
            out_order=out_order,
        )

    @property
    def is_dense(self) -> bool:
        return True

    def as_weight(self, grad: jax.Array) -> jax.Array:
        # [groups, rows, cols] is flat in the order batch, contracted, free.
        shape = [self.weight_shape[d] for d in self.weight_order]
        return transposed_back(grad.reshape(shape), self.weight_order)

    def record(self, operands: Sequence[Any]) -> Any:
        return operands[1 - self.weight_operand]

    def factors(self, record: Any, g: jax.Array) -> Factors:
        u = record.transpose(self.data_order)
        u = u.reshape(self.groups, self.positions, self.rows)
        w = g.transpose(self.out_order)
        w = w.reshape(self.groups, self.positions, self.cols)
        return (u,), w

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        (u,), w = jax.vmap(self.factors)(record, g)
        return self.as_weight(outer_sum(u, w))


class _TableRule(Rule):
    """A rule whose u are rows of an identity matrix."""

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        # Rows of bfloat16 would be added in bfloat16.
        (u,), w = jax.vmap(self.factors)(record, wide(g))
        # A negative index would wrap around, so it moves out of range, where it is dropped.
        index = jnp.where(u.index < 0, self.rows, u.index)
        index = index.reshape(-1)
        rows = w.reshape(-1, self.cols)
        table = jnp.zeros((self.rows, self.cols), w.dtype)
        grad = table.at[index].add(rows, mode="drop")
        order = (*self.row_dims, *self.col_dims)
        shape = [self.weight_shape[d] for d in order]
        return transposed_back(grad.reshape(shape), order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup(_TableRule):
    """The rule for a `gather` or `dynamic_slice` of a weight: a lookup of the rows of a table.

    Rows are numbered by the dimensions that a window does not cover. A position is one row of one
    window.

    Attributes:
      sizes: Of a window, for each dimension of the weight.
      out_order: The dimensions of the output: of windows, of rows in a window, and others.
      clip: Whether out-of-range indices are clipped. Otherwise they contribute zero.
      numbers: GatherDimensionNumbers, or None for a slice.
    """

    sizes: tuple[int, ...]
    out_order: tuple[int, ...]
    clip: bool
    numbers: Any

    @classmethod
    def of(cls, eqn: Any) -> "Lookup | None":
        """Returns the rule, or None if the equation reads a whole weight or over 2**31 rows."""
        weight = tuple(eqn.invars[0].aval.shape)
        sizes = tuple(eqn.params["slice_sizes"])
        numbers = eqn.params.get("dimension_numbers")
        out_shape = eqn.outvars[0].aval.shape
        out_dims = range(len(out_shape))
        # Dimensions of the weight that the output lacks: their windows have one entry.
        missing: tuple[int, ...] = ()
        windows: list[int] = []
        if numbers:
            missing = (*numbers.operand_batching_dims, *numbers.collapsed_slice_dims)
            windows = [d for d in out_dims if d not in numbers.offset_dims]

        def is_row(d: int) -> bool:  # the windows along it can differ
            return sizes[d] < weight[d] or d in missing

        dims = range(len(weight))
        rows = tuple(filter(is_row, dims))
        columns = tuple(d for d in dims if d not in rows)
        n_rows = entries_along(weight, rows)
        # Rows are numbered in int32.
        if not rows or n_rows > jnp.iinfo(jnp.int32).max:
            return None
        present = [d for d in dims if d not in missing]
        # `dynamic_slice` keeps all dimensions in the result.
        offsets = numbers.offset_dims if numbers else out_dims
        # Where each dimension of the weight is in the output.
        place = dict(zip(present, offsets, strict=True))
        in_window = [place[d] for d in (*rows, *columns) if d in place]
        n_windows = entries_along(out_shape, windows)
        # `dynamic_slice`, which has no dimension numbers, clips its starts.
        clips = numbers is None or eqn.params["mode"] == lax.GatherScatterMode.CLIP
        return cls(
            weight_shape=weight,
            positions=n_windows * entries_along(sizes, rows),
            rows=n_rows,
            cols=entries_along(weight, columns),
            row_dims=rows,
            col_dims=columns,
            sizes=sizes,
            out_order=(*windows, *in_window),
            clip=clips,
            numbers=numbers,
        )

    def _starts(self, operands: Sequence[Any]) -> dict[int, Any]:
        """Returns where windows start, for each dimension of the weight that is indexed."""
        if self.numbers is None:
            # `dynamic_slice` takes a scalar start for each dimension.
            return dict(enumerate(operands[1:]))
        return {d: operands[1][..., k] for k, d in enumerate(self.numbers.start_index_map)}

    def record(self, operands: Sequence[Any]) -> Any:
        """Returns the numbers of the rows that are looked up, [T] int32, or -1 outside."""
        starts = self._starts(operands)
        shape: tuple[int, ...] = ()
        if self.numbers is not None:
            shape = operands[1].shape[:-1]
        inside = jnp.ones(shape, bool)
        places: dict[int, Any] = {}
        for d, start in starts.items():
            # The last start, and the -1 below, may not fit the dtype of the index.
            last = self.weight_shape[d] - self.sizes[d]
            most = int(jnp.iinfo(start.dtype).max)
            place = jnp.clip(start, 0, min(last, most))
            # A start outside of the table has been moved by the clip.
            inside &= start == place
            places[d] = place.astype(jnp.int32)
        if self.numbers is not None:
            batching = zip(
                self.numbers.operand_batching_dims,
                self.numbers.start_indices_batching_dims,
                strict=True,
            )
            for d, axis in batching:
                # A batching dimension of the weight is indexed by its own number.
                places[d] = lax.broadcasted_iota(jnp.int32, shape, axis)
        # Axes of the shape of a window follow those of its start.
        shape = (*shape, *(self.sizes[d] for d in self.row_dims))
        row = jnp.zeros(shape, jnp.int32)
        inside = _repeated(inside, shape)
        first_axis = inside.ndim - len(self.row_dims)
        for axis, d in enumerate(self.row_dims, first_axis):
            # Rows are numbered with the last dimension running fastest.
            row = row * self.weight_shape[d]
            row = row + lax.broadcasted_iota(jnp.int32, shape, axis)
            if d in places:
                row = row + _repeated(places[d], shape)
        if not self.clip:
            row = jnp.where(inside, row, -1)
        return row.reshape(-1)

    def factors(self, record: Any, g: jax.Array) -> Factors:
        # One group, S = 1.
        u = OneHot(record.reshape(1, -1))
        w = g.transpose(self.out_order)
        return (u,), w.reshape(1, -1, self.cols)


def _repeated(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts an array along new last axes."""
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(_TableRule):
    """The rule for rows of a table of which each example has at most one of an index.

    The record is an index [T], and g is [T, cols].
    """

    def factors(self, record: Any, g: jax.Array) -> Factors:
        u = OneHot(record[None], distinct=True)
        return (u,), g[None]


class OnWeight(Rule):
    """The rule for a tap on the weight itself, whose cotangent is dV.

    It serves scales, biases, and every primitive without a rule of its own.
    """

    def record(self, operands: Sequence[Any]) -> Any:
        return ()

    def factors(self, record: Any, g: jax.Array) -> Factors:
        # dV as an outer product, whose other factor is 1.
        one = jnp.ones((1, 1, 1), g.dtype)
        return (one,), g.reshape(1, 1, -1)

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        return wide(g).sum(0)
