"""The two augmentations of Split Adaptation, and one that the paper compares with.

`hilbert_augment` transforms the server's images (section 3.3.1), and `amplitude_exchange` is its
baseline in Fig. 3. `retrieve_neighbors` and `augmented_batch` exchange patches among the client's
representations (section 3.5).

Neither is private. A retrieved patch is a token of another image, so a representation that is
augmented BEFORE noise depends on several images. Augmentation AFTER noise is post-processing.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.files import check_choice
from jaxdp.transforms.exact_scaling import in_units
from jaxdp.transforms.noise import check_key


@functools.partial(jax.jit, static_argnames=("axis", "mode", "output", "clip"))
def hilbert_augment(
    images: jax.Array,
    *,
    axis: int = -3,
    mode: Literal["figure", "eq5"] = "figure",
    output: Literal["abs", "real"] = "abs",
    clip: tuple[float, float] | None = (0.0, 1.0),
) -> jax.Array:
    """Makes images outside the distribution that keep their edges (section 3.3.1).

    A Hilbert transform gives the phases of the result.

    It takes a one-dimensional Hilbert transform of every channel along an axis. The result has the
    two-dimensional phases of the transform and the two-dimensional amplitudes of the original. With
    sgn(0) = sgn(Nyquist) = 0,

    - "eq5" follows Eq. 5 literally. The transform has the amplitudes of the original wherever sgn
      is not 0. So the exchange only adds back the frequencies that the transform removed, with
      phase 0.
    - "figure" takes the magnitude of the positive frequencies, the envelope of the image. The paper
      does not say so, but this reproduces the pictures in its Fig. 3 (along the height).

    A frequency gets phase 0 if its amplitude in the transform may be a rounding error. That is an
    amplitude below 1e-5 of the channel's largest one there (1e-8 in float64), or below 8 units of
    rounding of the original's largest one.

    Args:
      images: Floating point [n, H, W, C] in [0, 1], before any normalisation.
      axis: The axis of the Hilbert transform, -3 (height) or -2 (width).
      mode: The transform, "figure" or "eq5".
      output: "abs" returns the magnitude of the result, "real" its real part.
      clip: The range to which the result is clipped. None does not clip.

    Returns:
      [n, H, W, C] of the same dtype. The computation is in float32, or in float64 for float64.

    Raises:
      TypeError: Images are not floating point.
      ValueError: Images are not [n, H, W, C], the axis is another one, or mode or output is
          unknown.
    """
    _check_images(images)
    if axis not in (-3, -2, 1, 2):
        raise ValueError(f"axis must be -3 (height) or -2 (width), got {axis!r}.")
    check_choice("mode", mode, ("figure", "eq5"))
    check_choice("output", output, ("abs", "real"))
    pixels = images.astype(jnp.promote_types(images.dtype, jnp.float32))
    # The Nyquist frequency is not positive: NumPy counts it as negative.
    positive = np.fft.fftfreq(pixels.shape[axis]) > 0
    positive = np.expand_dims(positive, [k for k in range(4) if k != axis % 4])
    frequencies = jnp.fft.fft(pixels, axis=axis)
    half = jnp.fft.ifft(jnp.where(positive, frequencies, 0), axis=axis)
    # Eq. 5: F^-1{-i sgn(xi) F(I)} = -i (half - its conjugate), since I is real.
    transformed = jnp.abs(half) if mode == "figure" else 2 * half.imag
    amplitude = jnp.abs(_spectrum(pixels))
    spectrum = _spectrum(transformed)
    phase = _phase(spectrum, amplitude)
    exchanged = _from_spectrum(amplitude * phase, pixels)
    if output == "abs":
        exchanged = jnp.abs(exchanged)
    if clip is not None:
        exchanged = jnp.clip(exchanged, *clip)
    return exchanged.astype(images.dtype)


@functools.partial(jax.jit, static_argnames=("share", "clip"))
def amplitude_exchange(
    images: jax.Array,
    donors: jax.Array,
    *,
    share: float = 1.0,
    clip: tuple[float, float] | None = (0.0, 1.0),
) -> jax.Array:
    """Makes images with their own phases and the amplitudes of others: the baseline of Fig. 3.

    Every channel has the two-dimensional phases of the image. Its amplitudes are those of the
    donor, or a mixture (Xu et al. 2021, arXiv:2105.14919, Eq. 5). The paper cites such
    augmentations and states no share. A frequency of the image gets phase 0 as in
    `hilbert_augment`.

    Args:
      images: Floating point [n, H, W, C] in [0, 1], before any normalisation.
      donors: The images that give the amplitudes, of the same shape and dtype.
      share: The share of the donor's amplitudes in [0, 1]. 0 returns the images.
      clip: The range to which the result is clipped. None does not clip.

    Returns:
      [n, H, W, C] of the same dtype. The computation is in float32, or in float64 for float64.

    Raises:
      TypeError: Images are not floating point, or donors have another dtype.
      ValueError: Images are not [n, H, W, C], donors have another shape, or the share is not in
          [0, 1].
    """
    _check_images(images)
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share!r}. 1 exchanges the amplitudes.")
    if donors.shape != images.shape:
        raise ValueError(
            f"donors must have the shape {images.shape} of images, got {donors.shape}. Give one "
            "donor for each image."
        )
    if donors.dtype != images.dtype:
        raise TypeError(f"donors must be {images.dtype} as images are, got {donors.dtype}.")
    spectrum = _spectrum(images)
    amplitude = jnp.abs(spectrum)
    phase = _phase(spectrum, amplitude)
    donated = jnp.abs(_spectrum(donors))
    own_part = (1 - share) * amplitude
    donated_part = share * donated
    mixed = own_part + donated_part
    exchanged = _from_spectrum(mixed * phase, images)
    if clip is not None:
        exchanged = jnp.clip(exchanged, *clip)
    return exchanged.astype(images.dtype)


def _spectrum(images: jax.Array) -> jax.Array:
    """Returns the two-dimensional spectrum of every channel."""
    dtype = jnp.promote_types(images.dtype, jnp.float32)
    pixels = images.astype(dtype)
    return jnp.fft.rfft2(pixels, axes=(1, 2))


def _from_spectrum(spectrum: jax.Array, images: jax.Array) -> jax.Array:
    """Returns the images of a spectrum, with the sides of `images`."""
    sides = images.shape[1:3]
    return jnp.fft.irfft2(spectrum, s=sides, axes=(1, 2))


def _check_images(images: jax.Array) -> None:
    if images.ndim != 4:
        raise ValueError(
            f"images must be [n, H, W, C], got shape {images.shape}. Give one image as "
            "images[None]."
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(
            f"images must be floating point in [0, 1], got {images.dtype}. Divide uint8 by 255."
        )


def _phase(spectrum: jax.Array, amplitude: jax.Array) -> jax.Array:
    """Returns the phases of a transform, and phase 0 where it may be a rounding error.

    `amplitude` belongs to the original image. Its rounding is all that the transform of an image
    without edges shows.
    """
    magnitude = jnp.abs(spectrum)
    largest = functools.partial(jnp.max, axis=(1, 2), keepdims=True)
    rounding = 8 * jnp.finfo(amplitude.dtype).eps * largest(amplitude)
    share = 1e-8 if amplitude.dtype == jnp.float64 else 1e-5
    present = magnitude > jnp.maximum(share * largest(magnitude), rounding)
    return jnp.where(present, spectrum / jnp.where(present, magnitude, 1), 1)


@jax.jit
def retrieve_neighbors(representations: jax.Array) -> jax.Array:
    """Finds the most similar token of another image at the same position, for every token (Eq. 13).

    The representations are real [n, tokens, d]. The cosine measures similarity, so a common factor
    does not matter. The first of equally similar images wins. A token of zeros has similarity 0
    with every other token. The function needs memory for n x n numbers.

    Returns:
      int32 [tokens, n], indices of images. No image is its own neighbour, unless it is the only
      one.

    Raises:
      ValueError: Representations are not [n, tokens, d], or there is no image.
    """
    n, tokens, _ = _shape(representations)
    itself = np.eye(n, dtype=bool)

    def nearest(position: jax.Array) -> jax.Array:
        token = representations[:, position]
        token = token.astype(jnp.promote_types(token.dtype, jnp.float32))
        token, _ = in_units(token, 1)  # squares neither overflow nor vanish
        largest = jnp.abs(token).max(1, keepdims=True, initial=0)
        token = token / jnp.where(largest > 0, largest, 1)
        norm = jnp.linalg.norm(token, axis=1, keepdims=True)
        token = token / jnp.where(norm > 0, norm, 1)
        # Products in TF32 could make another token the largest.
        cosine = jnp.matmul(token, token.T, precision="highest")
        others = jnp.where(itself, -jnp.inf, cosine)
        return jnp.argmax(others, axis=1).astype(jnp.int32)  # Eq. 13

    # Position by position: all cosines at once would be [tokens, n, n].
    return jax.lax.map(nearest, jnp.arange(tokens))


@functools.partial(jax.jit, static_argnames=("n_patches", "prefix_tokens"))
def augmented_batch(
    key: jax.Array,
    representations: jax.Array,
    neighbors: jax.Array,
    rows: jax.Array,
    copies: jax.Array,
    *,
    n_patches: int,
    prefix_tokens: int = 1,
) -> jax.Array:
    """Makes some of the augmented copies of section 3.5. A copy is the same in every batch.

    Copy 0 of an image is its representation. In every other copy, tokens of neighbours replace
    `n_patches` patches. The positions are drawn uniformly without replacement. They depend only on
    the key, the image and the copy, so a sum over all copies (Eq. 14) needs only one batch of
    copies in memory.

    Args:
      key: Typed PRNG key. All batches take the same one.
      representations: [n, tokens, d] of any dtype.
      neighbors: int32 [tokens, n] from `retrieve_neighbors`.
      rows, copies: Integers [B]: images in [0, n), and numbers of copies, at least 0. The values
          are not checked.
      n_patches: N_P. The paper replaces 50 of 196 patches. 0 replaces none.
      prefix_tokens: The number of leading tokens that are no patches (a class token). They are
          never replaced.

    Returns:
      [B, tokens, d] of the same dtype.

    Raises:
      TypeError: The key is of the old style, or neighbours, rows or copies are not integers.
      ValueError: A shape differs, n_patches or prefix_tokens is out of range, or a single image has
          no neighbour.
    """
    check_key(key)
    _check_copies(representations, neighbors, rows, copies)
    _, tokens, _ = representations.shape
    _check_patches(representations, n_patches, prefix_tokens)
    key = batchable(key)

    def replaced(row: jax.Array, copy: jax.Array) -> jax.Array:
        """Returns which tokens of a copy another image gives, [tokens]."""
        copy_key = jax.random.fold_in(jax.random.fold_in(key, row), copy)
        order = jax.random.permutation(copy_key, tokens - prefix_tokens)
        return jnp.pad((order < n_patches) & (copy > 0), (prefix_tokens, 0))  # copy 0 has none

    # The image that gives each token, [B, tokens].
    from_neighbour = jax.vmap(replaced)(rows, copies)
    source = jnp.where(from_neighbour, neighbors[:, rows].T, rows[:, None])
    return representations[source, jnp.arange(tokens)[None]]


def _check_copies(
    representations: jax.Array,
    neighbors: jax.Array,
    rows: jax.Array,
    copies: jax.Array,
) -> None:
    n, tokens, _ = _shape(representations)
    for name, value in (("neighbors", neighbors), ("rows", rows), ("copies", copies)):
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {value.dtype}.")
    if neighbors.shape != (tokens, n):
        raise ValueError(
            f"neighbors has shape {neighbors.shape}, but representations of shape "
            f"{representations.shape} need [tokens, n] = {(tokens, n)}. Use "
            "retrieve_neighbors(representations)."
        )
    if rows.ndim != 1 or copies.shape != rows.shape:
        raise ValueError(
            f"rows and copies must both be [B], got shapes {rows.shape} and {copies.shape}."
        )


def _check_patches(representations: jax.Array, n_patches: int, prefix_tokens: int) -> None:
    n, tokens, _ = representations.shape
    if not 0 <= prefix_tokens <= tokens:
        raise ValueError(
            f"prefix_tokens must be in [0, {tokens}] for {tokens} tokens, got {prefix_tokens!r}."
        )
    patches = tokens - prefix_tokens
    if not isinstance(n_patches, int | np.integer) or n_patches < 0:
        raise ValueError(
            f"n_patches must be an integer of at least 0, got {n_patches!r}. 0 replaces no patch."
        )
    if n_patches > patches:
        raise ValueError(
            f"n_patches={n_patches} is more than the {patches} patch positions of {tokens} tokens "
            f"with prefix_tokens={prefix_tokens}. Use at most {patches}. The paper replaces about "
            "a quarter of the patches."
        )
    if n == 1 and n_patches > 0:
        raise ValueError(
            f"n_patches={n_patches} needs a neighbour, but there is only one image. Use "
            "n_patches=0, or more images."
        )


def patch_augment(
    key: jax.Array,
    representations: jax.Array,
    neighbors: jax.Array,
    n_patches: int,
    *,
    prefix_tokens: int = 1,
) -> jax.Array:
    """Makes one augmented copy of every image: copy 1 of `augmented_batch`.

    Another key makes another copy.
    """
    count, _, _ = _shape(representations)
    rows = jnp.arange(count)
    options = {"n_patches": n_patches, "prefix_tokens": prefix_tokens}
    return augmented_batch(key, representations, neighbors, rows, jnp.ones_like(rows), **options)


def batchable(key: jax.Array) -> jax.Array:
    """Returns a Threefry key drawn from `key`.

    Unlike RBG, its bits under `jax.vmap` do not depend on the batch.
    """
    words = jax.random.bits(key, (2,), jnp.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _shape(representations: jax.Array) -> tuple[int, int, int]:
    if representations.ndim != 3:
        raise ValueError(
            f"representations must be [n, tokens, d], got shape {representations.shape}."
        )
    if len(representations) == 0:
        raise ValueError(
            f"representations of shape {representations.shape} have no image. Give at least one."
        )
    n, tokens, width = representations.shape
    return n, tokens, width
