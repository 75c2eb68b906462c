"""The rule of convolutions: factors, and gradients by the kernel in the forms of each platform.

Let x be the padded and dilated data of an example and g its cotangents [positions, features]. The
gradient at the kernel position k is x_k^T g, where x_k are the rows of x that position k meets.
The patches of a position are x_k for all k, one after the other.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.transforms import barriers, forms, shards
from jaxdp.transforms.kernels import cells
from jaxdp.transforms.products import contracted, outer_sum, settled_precision, wide, wide_dtype
from jaxdp.transforms.weight_rules import Factors, Rule, entries_along, transposed_back

# Patches of a convolution of few channels are formed up to this many entries.
_PATCH_ROWS = 64

# Rows of fewer entries than this are copied and multiplied slowly.
_FEW_ENTRIES = 8

# On a CPU, patches of whole examples are formed by parts of about this many bytes, which stay in
# the cache.
_PART = 2**22

# On a GPU one operation joins the slices of windows of up to this many entries.
_MOST_SLICES = 64

# XLA on CPU fills vectors with the last dimension of a product. So many features fill them.
_FULL_VECTORS = 32


def _parts(count: int, size: int) -> tuple[int, int]:
    """Returns (number of parts, length of a part) of `count` things of `size` bytes.

    Parts may overlap: 7 things in 4 parts of 2 are the things 0-1, 2-3, 4-5 and 5-6.
    """
    # At least so many parts, if none is to have more than `_PART` bytes.
    least = math.ceil(count / max(1, _PART // size))
    numbers = range(least, min(2 * least, count) + 1)
    # Of several numbers of parts, that with the fewest things in two parts.
    number = min(numbers, key=lambda n: n * math.ceil(count / n))
    return number, math.ceil(count / number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Rule):
    """The rule for `conv_general_dilated` of data (lhs) with a kernel (rhs).

    It serves every geometry except batch groups.

    Attributes:
      numbers: ConvDimensionNumbers, the layouts of data, kernel and output.
      strides, padding, data_dilation, kernel_dilation: As in `lax.conv_general_dilated`.
      window: The spatial shape of the kernel.
      out_window: The spatial shape of the output.
    """

    numbers: Any
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    data_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    window: tuple[int, ...]
    out_window: tuple[int, ...]

    @classmethod
    def of(cls, eqn: Any) -> "Conv":
        params = eqn.params
        kernel = eqn.invars[1].aval.shape
        out = eqn.outvars[0].aval.shape
        numbers = params["dimension_numbers"]
        groups = params["feature_group_count"]
        out_feature, in_feature, *spatial = numbers.rhs_spec
        batch, _, *out_spatial = numbers.out_spec
        return cls(
            weight_shape=tuple(kernel),
            positions=entries_along(out, (batch, *out_spatial)),
            rows=entries_along(kernel, (*spatial, in_feature)),
            # The kernel has the outputs of all groups, and the channels of one.
            cols=kernel[out_feature] // groups,
            groups=groups,
            numbers=numbers,
            strides=tuple(params["window_strides"]),
            padding=tuple(params["padding"]),
            data_dilation=tuple(params["lhs_dilation"]),
            kernel_dilation=tuple(params["rhs_dilation"]),
            window=tuple(kernel[d] for d in spatial),
            out_window=tuple(out[d] for d in out_spatial),
        )

    @property
    def channels(self) -> int:
        """The number of channels that an entry of the output sees."""
        return self.rows // math.prod(self.window)

    # --- Factors ---

    @property
    def _looped(self) -> int:
        """The number of leading window dimensions whose positions form separate parts of u.

        The positions along later dimensions are in the rows of a part.
        """
        if self.groups == 1 and self.window == self.strides:  # patches do not overlap
            return 0
        # On a GPU each loop or part would read the record and the cotangent again. With loops a
        # clipped WRN-16-4 moved 58.6 GB, and now moves half, by the estimate for an H100.
        if self._one_product:
            return 0
        if self.groups > 1 or self.channels >= _FEW_ENTRIES:
            return len(self.window)
        # As many dimensions as fit become part of the rows, so that few channels fill them.
        for looped in range(len(self.window)):
            if self._part_rows(looped) <= _PATCH_ROWS:
                return looped
        return len(self.window)

    @property
    def _one_product(self) -> bool:
        """Whether each example has one product for all kernel positions."""
        return self.groups == 1 and forms.platform() == "cuda"

    def _part_rows(self, looped: int) -> int:
        """Returns the number of rows of a part of u, where `looped` dimensions are in parts."""
        return self.rows // math.prod(self.window[:looped])

    @property
    def is_dense(self) -> bool:
        return self.groups == 1 and self._looped == 0

    def as_weight(self, grad: jax.Array) -> jax.Array:
        return self._as_weight(grad.reshape(*self.window, -1, self.cols))

    def _as_weight(self, grad: jax.Array) -> jax.Array:
        """Moves the dimensions of dV [*window, in, out] to their places in the weight."""
        out_feature, in_feature, *spatial = self.numbers.rhs_spec
        return transposed_back(grad, (*spatial, in_feature, out_feature))

    def window_first(self, weight: jax.Array) -> jax.Array:
        """Returns a weight as [*window, in, out]."""
        out_feature, in_feature, *spatial = self.numbers.rhs_spec
        return weight.transpose((*spatial, in_feature, out_feature))

    def record(self, operands: Sequence[Any]) -> Any:
        return operands[0]

    def factors(self, record: Any, g: jax.Array) -> Factors:
        x = self._channels_last(record, self._looped)
        patches = tuple(self._patch(x, offset) for offset in self._offsets)
        return patches, self._cotangent(g)

    @property
    def _offsets(self) -> list[tuple[int, ...]]:
        """The kernel positions along the looped dimensions."""
        looped = self.window[: self._looped]
        return list(itertools.product(*map(range, looped)))

    def _channels_last(self, record: jax.Array, joined: int) -> jax.Array:
        """Returns padded and dilated data [M, *spatial, channels].

        From dimension `joined` on, patches along the window are part of the channels.
        """
        batch, feature, *spatial = self.numbers.lhs_spec
        x = record.transpose((batch, *spatial, feature))
        # `lax.pad` counts the zeros between two entries, and a dilation counts steps.
        padding = zip(self.padding, self.data_dilation, strict=True)
        spatial_padding = [(low, high, dilation - 1) for (low, high), dilation in padding]
        none = (0, 0, 0)
        zero = jnp.zeros((), x.dtype)
        # A negative padding cuts entries off, which `lax.pad` does as well.
        x = lax.pad(x, zero, [none, *spatial_padding, none])
        if joined == 0 and self._joins_at_once:
            return self._patches(x)
        # Each dimension goes in front of those before it, so the last one goes first.
        for d in reversed(range(joined, len(self.window))):
            x = self._patches_along(x, d)
        return x

    @property
    def _joins_at_once(self) -> bool:
        """Whether one operation joins the patches of all dimensions, so none is written twice."""
        overlap = self.window != self.strides
        is_small = math.prod(self.window) <= _MOST_SLICES
        return self._one_product and overlap and is_small

    def _patches(self, x: jax.Array) -> jax.Array:
        """Returns all patches of padded data, [M, *positions, window and channels]."""
        slices = []
        for offset in itertools.product(*map(range, self.window)):
            pairs = zip(offset, self.kernel_dilation, strict=True)
            start = [i * dilation for i, dilation in pairs]
            end = [first + self._span(d) for d, first in enumerate(start)]
            limits = (len(x), *end, x.shape[-1])
            steps = (1, *self.strides, 1)
            patch = lax.slice(x, (0, *start, 0), limits, steps)
            slices.append(patch)
        return jnp.concatenate(slices, axis=-1)

    def _patches_along(self, x: jax.Array, d: int) -> jax.Array:
        """Moves the kernel positions of dimension d into the channels, in front of the old ones."""
        stride = self.strides[d]
        positions = self.window[d]
        span = self._span(d)
        if self._folds(d):  # fewer and longer runs are copied in two thirds of the time
            x = self._folded(x, d)
            positions //= stride
            stride = 1
            span = self.out_window[d]
        slices = []
        for i in range(positions):
            start = i * self.kernel_dilation[d]
            entries = lax.slice_in_dim(x, start, start + span, stride, 1 + d)
            slices.append(entries)
        return jnp.concatenate(slices, axis=-1)

    def _folds(self, d: int) -> bool:
        """Returns whether whole strides of dimension d make up the window, without dilation."""
        are_whole = self.window[d] % self.strides[d] == 0
        return are_whole and self.kernel_dilation[d] == 1

    def _folded(self, x: jax.Array, d: int) -> jax.Array:
        """Moves the entries of each stride of dimension d into the channels, in front."""
        axis = 1 + d
        stride = self.strides[d]
        # A multiple of the stride, because the window is one.
        used = self._span(d) + self.window[d] - 1
        x = lax.slice_in_dim(x, 0, used, axis=axis)
        before = x.shape[:axis]
        behind = x.shape[axis + 1 :]
        x = x.reshape(*before, used // stride, stride, *behind)
        x = jnp.moveaxis(x, axis + 1, -2)
        return x.reshape(*x.shape[:-2], -1)

    def _span(self, d: int) -> int:
        """Returns the number of entries from the first to the last that a kernel position meets."""
        return (self.out_window[d] - 1) * self.strides[d] + 1

    def _patch(self, x: jax.Array, offset: Any) -> jax.Array:
        """Slices the data at a kernel position: [groups, T, rows of a part].

        `offset` is the position along the looped dimensions. It may be traced.
        """
        # Convolutions that extract patches are many times slower.
        looped = len(offset)
        rest = x.shape[1 + looped :]
        start = [offset[d] * self.kernel_dilation[d] for d in range(looped)]
        spans = [self._span(d) for d in range(looped)]
        start_of_rest = [0] * len(rest)
        starts = (0, *start, *start_of_rest)
        # `dynamic_slice` knows no strides, so the span is cut out first and thinned afterwards.
        met = lax.dynamic_slice(x, starts, (len(x), *spans, *rest))
        steps_of_rest = [1] * len(rest)
        steps = [1, *self.strides[:looped], *steps_of_rest]
        origin = [0] * x.ndim
        return self._split(lax.slice(met, origin, met.shape, steps))

    def _split(self, x: jax.Array) -> jax.Array:
        # [batch, *spatial, channels] to [T, groups, channels of one group]
        by_position = x.reshape(self.positions, self.groups, -1)
        return by_position.swapaxes(0, 1)

    def _cotangent(self, g: jax.Array) -> jax.Array:
        batch, feature, *spatial = self.numbers.out_spec
        channels_last = g.transpose((batch, *spatial, feature))
        return self._split(channels_last)

    # --- Gradients ---

    def weight_grad(self, record: Any, g: jax.Array) -> jax.Array:
        data_of = functools.partial(self._channels_last, joined=self._looped)
        x = jax.vmap(data_of)(record)
        w = jax.vmap(self._cotangent)(g)
        # Each device adds up its own block of examples. Otherwise they exchange a sum for each
        # kernel position.
        if self._looped:
            # The number of devices need not divide the batch, and their common divisor does.
            blocks = math.gcd(len(w), shards.auto_devices())
        else:
            blocks = 1
        x = x.reshape(blocks, -1, *x.shape[1:])
        w = w.reshape(blocks, -1, *w.shape[1:])

        def at(offset: Any) -> jax.Array:  # [blocks, groups, in, out] or [blocks, groups, out, in]
            patch = functools.partial(self._patch, offset=offset)
            u = jax.vmap(jax.vmap(patch))(x)
            pair = (w, u) if self._wide_part else (u, w)
            return jax.vmap(outer_sum)(*pair)

        if self._looped:
            # The loop over kernel positions takes less memory and time than joining the patches of
            # the whole batch.
            grad = lax.map(at, jnp.asarray(self._offsets)).sum(1)
        else:
            grad = at(())[None].sum(1)
        looped = self.window[: self._looped]
        rest = self.window[self._looped :]
        if self._wide_part:
            grad = grad.reshape(*looped, self.groups, self.cols, *rest, -1)
            axis = len(looped)
            grad = jnp.moveaxis(grad, (axis, axis + 1), (-2, -1))
        else:
            grad = grad.reshape(*looped, self.groups, *rest, -1, self.cols)
            grad = jnp.moveaxis(grad, len(looped), -2)
        outputs = self.groups * self.cols
        grad = grad.reshape(*self.window, -1, outputs)
        return self._as_weight(grad)

    @property
    def _wide_part(self) -> bool:
        """Whether a part of u has more rows than w has.

        XLA on CPU multiplies faster if the longer one comes last.
        """
        if self._one_product:
            return False
        return self._part_rows(self._looped) > self.cols

    def weight_grad_by_primitive(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes `weight_grad` by the transpose of the primitive.

        It is one convolution for the whole batch.
        """
        record = wide(record)
        g = wide(g)

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

        def forward(kernel: jax.Array) -> jax.Array:
            return jax.vmap(apply, (0, None))(record, kernel)

        # `jax.linear_transpose` needs only the type of the kernel, in which the map is linear.
        kernel = jax.ShapeDtypeStruct(self.weight_shape, g.dtype)
        grad: jax.Array = jax.linear_transpose(forward, kernel)(g)[0]
        return grad

    def weight_grads(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of M examples."""
        # `_parts` and `zero_after` need an entry of g.
        if self._has_rows_of_patches and g.size and forms.platform() == "cpu":
            return self._grads_from_rows_of_patches(record, g)
        if self._one_product and self._splits_window:
            return self._grads_by_split_windows(record, g)
        return super().weight_grads(record, g)

    # --- Gradients of examples on a GPU ---

    @property
    def _splits_window(self) -> bool:
        """Whether shifted cotangents take less memory than patches of the first dimension.

        Where gradients are larger than patches, their order matters more. That of patches is the
        order of the weight.
        """
        if len(self.window) == 1 or self.window[0] == 1:
            return False
        # The shift in `_grads_by_split_windows` holds for a stride of 1 only.
        if self.strides[0] != 1 or self.positions == 0:
            return False
        patches = self.positions * self.rows
        rows_per_position = self._part_rows(1) + self.window[0] * self.cols
        positions_of_row = self.positions // self.out_window[0]
        # The entries of both factors of that product.
        split = positions_of_row * self._met_rows * rows_per_position
        grads = self.rows * self.cols
        return split < patches and grads <= patches

    @property
    def _met_rows(self) -> int:
        """The number of entries of the first dimension that some kernel position meets."""
        last = (self.window[0] - 1) * self.kernel_dilation[0]
        return last + self.out_window[0]

    def _grads_by_split_windows(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of M examples by one product of patches along all but the first dimension.

        For two dimensions dV[i, j] = sum_{h,w} x[h + i, w + j] g[h, w], which is the sum of
        x[h, w + j] g[h - i, w]. So j is part of the rows, and i is part of the columns.
        """
        data_of = functools.partial(self._channels_last, joined=1)
        x = jax.vmap(jax.vmap(data_of))(record)
        # Axes of x are M, N, batch, the first dimension, the others and the channels with their
        # window.
        x = lax.slice_in_dim(x, 0, self._met_rows, axis=3)
        cotangents = jax.vmap(jax.vmap(self._shifted_cotangents))(g)
        # A product that joined slices by itself would need more memory than a core has.
        x, cotangents = lax.optimization_barrier((x, cotangents))
        u = x.reshape(len(x), -1, x.shape[-1])
        w = cotangents.reshape(len(cotangents), -1, cotangents.shape[-1])
        # [M, entries that are met, others * channels] and [M, entries that are met, first * cols]
        grads = contracted(u, w, [1], [0])
        first, *others = self.window
        grads = grads.reshape(len(grads), *others, self.channels, first, self.cols)
        grads = jnp.moveaxis(grads, -2, 1)
        return jax.vmap(self._as_weight)(grads)

    def _shifted_cotangents(self, g: jax.Array) -> jax.Array:
        """Returns cotangents [batch, rows that are met, *other dimensions, positions * features].

        Those for the first kernel position i are shifted by i rows.
        """
        batch, feature, *spatial = self.numbers.out_spec
        g = g.transpose((batch, *spatial, feature))
        rows = self._met_rows - self.out_window[0]
        shifted = []
        for i in range(self.window[0]):
            shift = i * self.kernel_dilation[0]
            padding = [(0, 0, 0)] * g.ndim
            # Rows before and behind, so that all shifts have one shape.
            padding[1] = (shift, rows - shift, 0)
            zero = jnp.zeros((), g.dtype)
            shifted.append(lax.pad(g, zero, padding))
        return jnp.concatenate(shifted, axis=-1)

    # --- Gradients of examples on a CPU ---
    #
    # XLA copies whole rows of an array many times faster than it joins slices. So patches are rows
    # of the data, of the channels and of the kernel positions along later dimensions where channels
    # are few. The patches of a few examples at a time stay in the cache.

    @property
    def _joined(self) -> int:
        """The first dimension along which patches are part of a row."""
        return max(1, self._looped)

    @property
    def _fold(self) -> int:
        """The number of entries of the first dimension that are part of a row."""
        if self._joined == 1 and self._folds(0):
            return self.strides[0]
        return 1

    @property
    def _row_entries(self) -> int:
        """The number of entries of a row of patches."""
        return self._fold * self._part_rows(self._joined)

    @property
    def _has_rows_of_patches(self) -> bool:
        """Whether patches overlap and are rows of the data, on one device."""
        overlap = self.window != self.strides
        one_block = self.groups == 1 and shards.auto_devices() == 1
        return overlap and one_block and self._row_entries >= _FEW_ENTRIES

    def _grads_from_rows_of_patches(self, record: Any, g: jax.Array) -> jax.Array:
        """Computes dV of M examples. It forms all patches of a few examples at a time."""
        zero = barriers.zero_after(g)
        x = self._rows_of_data(record, zero)
        lengths = x.shape[1:-1]
        w = jax.vmap(jax.vmap(self._cotangent))(g)
        w = w.reshape(len(x), -1, self.cols)
        examples, positions, _ = w.shape
        bytes_of_patches = positions * self.rows * x.dtype.itemsize
        number, size = _parts(examples, bytes_of_patches)
        rows = self._patch_rows(size, lengths)
        rows_of_one = math.prod(lengths)
        x = x.reshape(-1, self._row_entries)
        # Each index is the number of one row of x [rows, entries], and the row is axis 1 of the
        # result.
        whole_row = lax.GatherDimensionNumbers((1,), (0,), (0,))

        def turn(i: jax.Array, grads: jax.Array) -> jax.Array:
            # The last turns may have examples in common.
            start = jnp.minimum(i * size, examples - size)
            patches = lax.gather(
                # All row numbers follow from shapes (`_patch_rows`), so none needs a check in the
                # gather.
                x,
                start * rows_of_one + rows,
                whole_row,
                (1, self._row_entries),
                mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
            )
            # XLA would fuse the reshape into the gather, and copy entries and not rows.
            u = barriers.materialised(patches, zero)
            u = u.reshape(size, positions, self.rows)
            cotangents = lax.dynamic_slice_in_dim(w, start, size)
            pair = (u, cotangents) if self._cotangent_last else (cotangents, u)
            of_turn = contracted(*pair, [1], [0])
            return lax.dynamic_update_slice_in_dim(grads, of_turn, start, 0)

        if self._cotangent_last:
            shape = (self.rows, self.cols)
        else:
            shape = (self.cols, self.rows)
        # XLA would write constant zeros long before there is a cotangent.
        wide_zero = zero.astype(wide_dtype(x, w))
        zeros = jnp.full((examples, *shape), wide_zero)
        # Under `jax.shard_map` a carry has to vary over the same axes as the result of the body.
        zeros = shards.vary(zeros, shards.varying_axes(x, w))
        grads = lax.fori_loop(0, number, turn, zeros)
        window = (*self.window, self.channels)
        if self._cotangent_last:
            grads = grads.reshape(examples, *window, self.cols)
        else:
            grads = grads.reshape(examples, self.cols, *window)
            grads = jnp.moveaxis(grads, 1, -1)
        return jax.vmap(self._as_weight)(grads)

    def _rows_of_data(self, record: jax.Array, zero: jax.Array) -> jax.Array:
        """Returns the data of M examples [M, repeats, batch, *spatial, entries of a row].

        It is formed after `zero`. XLA would pad long before there is a cotangent, and hold the
        memory.
        """
        data_of = functools.partial(self._channels_last, joined=self._joined)
        record = record + zero.astype(record.dtype)
        x = jax.vmap(jax.vmap(data_of))(record)
        if self._joined < len(self.window):
            x = barriers.materialised(x, zero)
        if self._fold > 1:
            folded = functools.partial(self._folded, d=0)
            x = jax.vmap(jax.vmap(folded))(x)
            x = barriers.materialised(x, zero)
        return x

    @property
    def _cotangent_last(self) -> bool:
        """Whether a product of all patches ends with w."""
        return self.cols >= _FULL_VECTORS

    def _patch_rows(self, size: int, lengths: Sequence[int]) -> jax.Array:
        """Returns the rows of the patches of `size` examples, [rows, 1] int32.

        Rows are numbered in [size, *lengths], where `lengths` are (repeats, batch, *spatial). The
        result is in the order of positions and, within each, of kernel positions along the
        dimensions before `joined`.
        """
        joined = self._joined
        fold = self._fold
        # A fold of more than 1 has joined = 1, so it is that of dimension 0 alone.
        window = [self.window[d] // fold for d in range(joined)]
        positions = [*self.out_window[:joined], *lengths[2 + joined :]]
        counts = [size, *lengths[:2], *positions, *window]
        # How far apart entries are along size, repeats, batch and *spatial.
        pitches = [math.prod(lengths[d:]) for d in range(len(lengths) + 1)]
        spatial = pitches[3:]
        along_positions = [spatial[d] * self.strides[d] // fold for d in range(joined)]
        along_kernel = [spatial[d] * self.kernel_dilation[d] for d in range(joined)]
        steps = [*pitches[:3], *along_positions, *spatial[joined:], *along_kernel]
        rows = jnp.zeros(counts, jnp.int32)
        for d, step in enumerate(steps):
            rows += step * lax.broadcasted_iota(jnp.int32, counts, d)
        return rows.reshape(-1, 1)

    # --- Kernels of a TPU ---

    @property
    def geometry(self) -> cells.Geometry:
        """The arguments of the kernels of convolutions."""
        return cells.Geometry(self.window, self.strides, self.padding, self.kernel_dilation)

    def of_pictures(self, out_shape: Sequence[int]) -> bool:
        """Returns whether each example is one picture, whose channels are one group.

        `out_shape` is the shape of the result of one example.
        """
        if self.groups > 1 or len(self.window) != 2:
            return False
        # The kernels of a TPU have no zeros between entries of the data.
        if set(self.data_dilation) != {1}:
            return False
        # Nor do they cut entries off.
        if min(itertools.chain(*self.padding)) < 0:
            return False
        return bool(out_shape[self.numbers.out_spec[0]] == 1)

    @property
    def has_features_last(self) -> bool:
        """Whether the last axis of the weight is that of the output features."""
        return bool(self.numbers.rhs_spec[0] == len(self.weight_shape) - 1)

    def pictures(
        self,
        record: jax.Array,
        g: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns x [B, H, W, C] and the cotangents [B, OH, OW, K]."""

        def channels_last(x: jax.Array, spec: Sequence[int]) -> jax.Array:
            batch, feature, *spatial = spec
            order = [1 + d for d in (batch, *spatial, feature)]
            x = x.transpose((0, *order))
            # The batch of an example, which is one picture, goes into that of all.
            return x.reshape(len(x), *x.shape[2:])

        x = channels_last(record, self.numbers.lhs_spec)
        cotangents = channels_last(g, self.numbers.out_spec)
        return x, cotangents
