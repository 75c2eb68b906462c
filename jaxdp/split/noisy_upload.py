"""Split Adaptation with a guarantee: one noisy release per image, and noisy labels.

The published method has no guarantee. Nothing bounds the representations, so Laplace noise on them
is not differential privacy. Labels leave the client unchanged, and 65 noisy copies of an image
average out (`published_event`). Here the client

    projects    z_i = P^T (x_i - m), onto k directions from public data (`public_projection`)
    clips       ||z_i|| <= C, in L2 norm for Gaussian, in L1 norm for Laplace noise
    adds noise  z_i + noise of scale sigma C, once
    randomises  y_i by K-ary randomised response, once

and sends only the results. All further work of the server is post-processing: `lift`, patch
retrieval, augmentation, and training, which corrects for noisy labels by `label_noise_matrix`. The
adversary is the server. The unit of privacy is one image with its label. Neighbours differ by
replacing one image. The number of images is public.

    release = PrivateRelease.calibrated(epsilon=8.0, delta=1e-5, clip_norm=4.0, num_classes=10)
    account = ledger.account("scans")
    data = {"representations": x, "labels": y, "projection": projection}
    released = release_privately(account, release=release, **data)
"""

import dataclasses
import functools
import math
import os
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from jaxdp import privacy
from jaxdp.data.labels import check_labels, check_range
from jaxdp.data.storage import on_device, own_copy
from jaxdp.files import check_choice, check_numbers
from jaxdp.release import Release, Till, program, stream
from jaxdp.report import counting
from jaxdp.split.checks import not_negative
from jaxdp.transforms import exact_scaling, noise
from jaxdp.transforms.compiler import check_options
from jaxdp.transforms.responses import BITS, flipped, numbers, of_words, response_threshold

Mechanism = Literal["gaussian", "laplace"]

_PRECISION = jax.lax.Precision.HIGHEST
# Singular values below this share of the largest are rounding of float32 data, not directions.
_SMALLEST_DIRECTION = 1e-5
# Between these norms clipping neither overflows nor underflows.
_SMALLEST_NORM = 1e-30
_LARGEST_NORM = 1e30
_WIDEST = 2**20  # numbers of a row. Wider rows would leave no room for rounding.


# --- Public directions --------------------------------------------------------------------------


class Projection(NamedTuple):
    """The directions in which public representations vary most.

    They are a float32 mean [T, D] and orthonormal directions [T D, k].
    """

    mean: jax.Array
    directions: jax.Array


def public_projection(representations: Any, k: int) -> Projection:
    """Computes the k principal components of representations of PUBLIC images, by falling variance.

    It decomposes the smaller of the two Gram matrices, [N, N] or [T D, T D], in float64 on the
    host. Give it about a thousand representations, real [N, T, D], not a hundred thousand. The
    noise of a release grows with sqrt(k).

    Raises:
      ValueError: The shape differs, a value is NaN or infinite, or k is out of range or above the
          rank.
    """
    x = np.asarray(representations, np.float64)
    if x.ndim != 3:
        raise ValueError(f"representations must be [N, T, D], got shape {x.shape}.")
    if not np.isfinite(x).all():
        raise ValueError(
            "representations must be finite. Leave out the images with NaN or infinite values."
        )
    count = len(x)
    size = x[:1].size
    if not 1 <= k <= min(count - 1, size):
        raise ValueError(
            f"k={k} must be in [1, {min(count - 1, size)}]: {count} centred representations of "
            f"{size} numbers have no more directions. Take a smaller k or more public images."
        )
    mean = x.mean(0)
    x = (x - mean).reshape(count, size)
    # Both Gram matrices have the same eigenvalues. The smaller one is cheaper.
    if count < size:
        gram = x @ x.T
    else:
        gram = x.T @ x
    largest = [len(gram) - k, len(gram) - 1]  # eigh sorts by rising eigenvalue
    values, vectors = scipy.linalg.eigh(gram, subset_by_index=largest)
    if not values[0] > _SMALLEST_DIRECTION**2 * values[-1]:
        raise ValueError(
            f"k={k}: public representations vary in fewer directions. Take a smaller k or more "
            "images."
        )
    values = values[::-1]
    directions = vectors[:, ::-1]
    if count < size:
        # The eigenvalues are the squared lengths of these columns.
        directions = x.T @ directions / np.sqrt(values)
    return Projection(*jax.device_put((np.float32(mean), np.float32(directions))))


@jax.jit
def project(projection: Projection, x: Any) -> jax.Array:
    """Computes coordinates P^T (x - mean), float32 [n, k], of representations [n, T, D]."""
    centred = jnp.asarray(x, jnp.float32) - projection.mean[None]
    rows = centred.reshape(len(centred), -1)
    return jnp.dot(rows, projection.directions, precision=_PRECISION)


@jax.jit
def lift(projection: Projection, z: Any) -> jax.Array:
    """Computes representations float32 [n, T, D] from coordinates [n, k]: mean + P z."""
    z = jnp.asarray(z, jnp.float32)
    offsets = jnp.dot(z, projection.directions.T, precision=_PRECISION)
    return projection.mean[None] + offsets.reshape(-1, *projection.mean.shape)


# --- Bounded rows and noisy labels --------------------------------------------------------------


def clip_representation(x: Any, clip_norm: float, *, order: Literal[1, 2] = 2) -> jax.Array:
    """Scales each row of x to an L1 or L2 norm of at most C = clip_norm in [1e-30, 1e30].

    x is real [n, k], with k at most 2**20.

    Returns:
      float32 [n, k]. The function also scales down rows whose norm is within a relative (k + 8)
      2**-23 of C.

    Formal guarantees:
      The norm of every row of float32 values is at most C in real arithmetic, whatever their size.
      A row with a NaN or an infinity becomes zero. Squares neither overflow nor vanish, because a
      row is first divided by a power of two (`jaxdp.transforms.exact_scaling`). In any order of
      summation a sum of k numbers has a relative error of at most k 2**-24. The other operations
      add a few 2**-24. The margin is twice the error of the sum. The rest of it exceeds the
      rounding of the scale of later noise.

    Raises:
      ValueError: An argument is out of range or has another shape.
      RuntimeError: `XLA_FLAGS` has options that `jaxdp.transforms.compiler` refuses.
    """
    check_options()
    clip_norm = _check_norm(clip_norm)
    check_choice("order", order, (1, 2))
    x = _float32(x)
    if x.ndim != 2 or not 1 <= x.shape[1] <= _WIDEST:
        raise ValueError(f"x must be [n, k] with k in [1, {_WIDEST}], got shape {x.shape}.")
    return _clip(x, _below(clip_norm, x.shape[1]), order)


def _below(clip_norm: float, k: int) -> float:
    """Returns the norm to which rows of k numbers are scaled.

    It is so far below clip_norm that rounding cannot bring a row above that.
    """
    return clip_norm * (1 - (k + 8) * 2.0**-23)


@functools.partial(jax.jit, static_argnums=2)
def _clip(x: jax.Array, bound: Any, order: int) -> jax.Array:
    finite = exact_scaling.finite(x).all(1, keepdims=True)
    x = jnp.where(finite, x, 0)
    units, powers = exact_scaling.in_units(x, 1)
    # In units of the largest entry, squares cannot overflow. That entry is now in [1, 2), so
    # dividing by it is safe.
    largest = jnp.maximum(jnp.abs(units).max(1, keepdims=True), 1)
    unit = units / largest
    if order == 2:
        norm = jnp.sqrt(jnp.square(unit).sum(1, keepdims=True))
    else:
        norm = jnp.abs(unit).sum(1, keepdims=True)
    length = exact_scaling.times_power(norm * largest, powers)
    # Rows that are too long have norm >= 0.8. In the others the floor avoids 0 / 0.
    return jnp.where(length > bound, unit * (bound / jnp.maximum(norm, 0.5)), x)


def randomized_response(
    key: jax.Array,
    labels: Any,
    *,
    num_classes: int,
    epsilon: float,
) -> np.ndarray:
    """Applies K-ary randomised response: each label stays or becomes one of the others, uniformly.

        P(observed = true) = e^eps / (e^eps + K - 1)

    Args:
      key: Typed noise key, used for this call only.
      labels: Integers [n] in [0, K).
      num_classes: K in [2, 2**16], a public declaration.
      epsilon: > 0. inf keeps every label and gives no privacy.

    Formal guarantees:
      The release of each label, as int32, is (epsilon, 0)-DP for its replacement by any other
      label. That holds for the sampled distribution: the code compares 64 random bits with an
      integer threshold, and the threshold satisfies the inequality exactly (`response_threshold`).
      Only the generator of the bits must be trusted.

    Raises:
      TypeError: The key is of the old style, or labels are not integers.
      ValueError: Labels are outside [0, num_classes), or another argument is out of range. Nothing
          is drawn.
    """
    noise.check_key(key)
    threshold = response_threshold(num_classes, epsilon)
    labels = _check_labels(labels, num_classes)
    drawn = numbers(key, len(labels))
    return flipped(drawn, labels, np.uint64(threshold), num_classes)


def label_noise_matrix(num_classes: int, epsilon: float) -> np.ndarray:
    """Computes P(observed | true) of `randomized_response`, float32 [K, K]. Rows are true labels.

    Forward correction (Patrini et al. 2017, arXiv:1609.03683, Theorem 2) is the cross-entropy of
    p(x) @ matrix with the observed label. p(x) are the predicted probabilities of the true label.
    Errors are as in `randomized_response`.
    """
    other = response_threshold(num_classes, epsilon) * 2.0**-BITS
    matrix = np.full((num_classes, num_classes), other)
    np.fill_diagonal(matrix, 1 - (num_classes - 1) * other)
    return matrix.astype(np.float32)


# --- The release --------------------------------------------------------------------------------


class Released(NamedTuple):
    """The server's input: clipped noisy coordinates and noisy labels.

    Coordinates are float32 [n, k], for `lift`. Labels are int32 [n].
    """

    features: jax.Array
    labels: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateRelease:
    """The settings of a release of images and labels. All of them are public.

    Attributes:
      clip_norm: C in [1e-30, 1e30], such as the median norm of coordinates of public images.
      noise_multiplier: sigma, the standard deviation (gaussian) or scale (laplace) of noise over C.
          0 gives no privacy.
      label_epsilon: epsilon of the labels. inf leaves them unchanged and gives no privacy.
      num_classes: K, a public declaration.
      mechanism: "gaussian" clips L2 norms, "laplace" L1 norms.
    """

    clip_norm: float
    noise_multiplier: float
    label_epsilon: float
    num_classes: int
    mechanism: Mechanism = "gaussian"

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, Mechanism)
        check_numbers(clip_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        check_numbers(label_epsilon=self.label_epsilon)
        # A product with a scalar of NumPy or JAX would be rounded to its type.
        for name in ("clip_norm", "noise_multiplier", "label_epsilon"):
            object.__setattr__(self, name, float(getattr(self, name)))
        _check_norm(self.clip_norm)
        low, high = noise.range_of(np.float32)
        if self.noise_multiplier != 0 and not low <= self.noise_scale <= high:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r} times clip_norm={self.clip_norm!r} "
                f"must be 0 or in the normal range of float32 noise, from {low:.2g} to {high:.2g}. "
                "Otherwise the noise vanishes or overflows. Change the multiplier, or scale "
                "representations and clip_norm."
            )
        response_threshold(self.num_classes, self.label_epsilon)

    @classmethod
    def calibrated(
        cls,
        *,
        epsilon: float,
        delta: float,
        clip_norm: float,
        num_classes: int,
        label_share: float = 0.5,
        mechanism: Mechanism = "gaussian",
    ) -> "PrivateRelease":
        """Returns the release with the least noise that is (epsilon, delta)-DP with its labels.

        An infinite epsilon adds no noise. delta may be 0 for "laplace". Labels get `label_share *
        epsilon`, with the share in (0, 1). Features get the least noise with which both parts
        together cost (epsilon, delta). That is never more noise than `(1 - label_share) * epsilon`
        on its own would need, because a composition never costs more than the sum of its epsilons.

        Raises:
          ValueError: An argument is out of range.
        """
        check_choice("mechanism", mechanism, Mechanism)
        if not 0 < label_share < 1:
            raise ValueError(f"label_share must be in (0, 1), got {label_share!r}.")
        label_epsilon = label_share * epsilon
        noise_multiplier = 0.0
        if epsilon != math.inf:
            if mechanism == "gaussian" and delta == 0:
                raise ValueError(
                    "delta=0 needs mechanism='laplace'. Gaussian noise needs a positive delta."
                )
            make_event = functools.partial(event, label_epsilon=label_epsilon, mechanism=mechanism)
            with counting(make_event, label="noise", unit="trial") as counted:
                noise_multiplier = privacy.calibrate_noise(
                    counted, epsilon=epsilon, delta=delta, adjacency="replace_one"
                )
        return cls(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            label_epsilon=label_epsilon,
            num_classes=num_classes,
            mechanism=mechanism,
        )

    @property
    def noise_scale(self) -> float:
        """The standard deviation (gaussian) or scale (laplace) of the noise: sigma C."""
        return self.noise_multiplier * self.clip_norm

    @property
    def event(self) -> privacy.DpEvent:
        """The privacy event of one release: `event` of these settings."""
        return event(self.noise_multiplier, self.label_epsilon, mechanism=self.mechanism)

    def check(self, representations: Any, *, labels: Any, projection: Projection) -> None:
        """Raises the errors of `release` for these arguments, before anything is spent."""
        shape = np.shape(representations)
        dtype = jnp.result_type(representations)
        if len(shape) != 3 or shape[0] == 0:
            raise ValueError(
                f"representations must be [n, T, D] with n >= 1 images, got shape {shape}."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"representations must be floating point, got {dtype}. Dequantise them first."
            )
        _check_projection(projection, shape)
        if np.shape(labels) != shape[:1]:
            raise ValueError(
                f"labels must be [n] for the {shape[0]} images, got shape {np.shape(labels)}."
            )
        _check_labels(labels, self.num_classes)

    def release(
        self,
        key: jax.Array,
        representations: Any,
        *,
        labels: Any,
        projection: Projection,
    ) -> Released:
        """Projects and clips rows, then adds noise, once.

        It charges nothing: `release_privately` charges.

        Args:
          key: Typed noise key, used for this call only.
          representations: Floating point [n, T, D]. Row i must depend on image i only. So the
            frontend must not use batch statistics, and no patch retrieval may precede. The order of
            the images must not depend on them either: an order by class tells every label.
            `release_privately` shuffles.
          labels: Integers [n] in [0, num_classes).
          projection: A projection that was chosen without these images.

        Formal guarantees:
          The result satisfies `event` for the replacement of one image and its label. Row i is a
          function of image i alone. So a replacement changes one clipped row, by at most 2 C in the
          norm of the mechanism (triangle inequality), and one label. Rows get independent noise, so
          all others cancel from the ratio of densities. Gaussian: the noise is N(0, sigma^2 C^2 I)
          and the L2 sensitivity 2 C. Under "replace_one", `GaussianDpEvent(sigma)` means exactly
          that (Dwork and Roth 2014, appendix A). Laplace: exp(||z - z'||_1 / (sigma C)) <= exp(2 /
          sigma) (Dwork et al. 2006). Randomised response with its own random bits releases the
          label, and the two mechanisms compose. The guarantee rests on clipping, not on the
          projection, which the server may choose freely. A row with NaN counts as zero. Noise is
          floating point: `jaxdp.transforms.noise` states the limits of that.

        Raises:
          TypeError: The key is of the old style, representations are not floating point, or labels
              are not integers.
          ValueError: A shape differs, there are no images, labels are out of range, or the
            projection does not fit or is not finite.
        """
        noise.check_key(key)
        self.check(representations, labels=labels, projection=projection)
        return self._draw(key, representations, labels, projection, shuffle=False)

    def _draw(
        self,
        key: jax.Array,
        x: Any,
        labels: Any,
        projection: Projection,
        *,
        shuffle: bool,
    ) -> Released:
        features, order, words = _release(
            key, *self._arguments(x, projection), self.mechanism, shuffle
        )
        shuffled = _check_labels(labels, self.num_classes)[np.asarray(order)]
        threshold = response_threshold(self.num_classes, self.label_epsilon)
        noisy = flipped(of_words(words), shuffled, np.uint64(threshold), self.num_classes)
        return Released(features, noisy)

    def _arguments(self, x: Any, projection: Projection) -> tuple[Any, ...]:
        """Returns the arguments of `_release` after the key."""
        bound = _below(self.clip_norm, np.shape(projection.directions)[1])
        return _float32(x), projection, bound, self.noise_scale


def _check_projection(projection: Projection, shape: tuple[int, ...]) -> None:
    """Raises unless a projection is real, finite, and for representations of a shape [n, T, D]."""
    mean = np.asarray(projection.mean)
    directions = np.asarray(projection.directions)
    matrix = directions.ndim == 2 and directions.shape[1] > 0
    if mean.shape != shape[1:] or not matrix or len(directions) != mean.size:
        raise ValueError(
            f"projection with mean {mean.shape} and directions {directions.shape} does not fit "
            f"representations {shape}. Fit it on representations of the same frontend."
        )
    if directions.shape[1] > _WIDEST:
        raise ValueError(
            f"projection must have at most {_WIDEST} directions, got {directions.shape[1]}."
        )
    if np.iscomplexobj(mean) or np.iscomplexobj(directions):
        raise TypeError(
            f"projection must be real, got a complex array of dtype {directions.dtype}. Fit it "
            "again."
        )
    finite = np.isfinite(mean).all() and np.isfinite(directions).all()
    if not finite:
        raise ValueError("projection has NaN or infinite entries. Fit it again.")


@functools.partial(jax.jit, static_argnums=(5, 6))
def _release(
    key: jax.Array,
    x: jax.Array,
    projection: Projection,
    bound: Any,
    scale: Any,
    mechanism: Mechanism,
    shuffle: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the floating-point results of a release.

    They are coordinates [n, k], the order of the images [n], and random words [2, n] for their
    labels.
    """
    # One program draws everything, the words of the labels too. So the token hashes all that runs.
    order_key, feature_key, label_key = jax.random.split(key, 3)
    count = len(x)
    if shuffle:
        order = jax.random.permutation(order_key, count)
        x = x[order]
    else:
        order = jnp.arange(count)
    # The barrier keeps the scaled coordinates identical to those whose norm was taken. XLA must not
    # recompute them.
    coordinates = jax.lax.optimization_barrier(project(projection, x))
    norm_order = 2 if mechanism == "gaussian" else 1
    draw = noise.gaussian if mechanism == "gaussian" else noise.laplace
    clipped = _clip(coordinates, bound, norm_order)
    words = jax.random.bits(label_key, (2, count), jnp.uint32)
    return clipped + draw(feature_key, clipped, scale), order, words


def release_privately(
    account: privacy.Account,
    *,
    release: PrivateRelease,
    representations: Any,
    labels: Any,
    projection: Projection,
    workdir: str | os.PathLike[str] | None = None,
    seed: bytes | None = None,
) -> Released:
    """Pays for a release of images and labels, and makes it.

    Args:
      account: `ledger.account(name)` of the client's data set, registered with the adjacency
          "replace_one".
      release, representations, labels, projection: As in `PrivateRelease.release`.
      workdir: A folder for this release only. It keeps the released values, which are then not made
        or paid for again.
      seed: 16 secret bytes, to reproduce a release in a test. By default the operating system draws
        them. The same release of the same data by the same programs under the same seed is paid
        once. Any other release gets other noise.

    Returns:
      The release. Its rows are in a random secret order, since the order of a client's files may
      tell labels.

    Formal guarantees:
      As `PrivateRelease.release`, for any order of the images. `release.event` is spent before
      anything is released. A refused call releases nothing. A call that fails later has paid. A
      call with a workdir that is interrupted and made again gives the same values and pays once, if
      data, settings, programs and machine are the same. Otherwise it draws fresh noise and pays
      again (`jaxdp.release`).

    Raises:
      BudgetExceeded: Nothing is spent, nothing is released.
      TypeError, ValueError: As `PrivateRelease.release`. Also for another adjacency, a seed that is
        not 16 bytes, or a workdir that keeps another release. Nothing is spent.
    """
    what = plan_release(
        account,
        release=release,
        representations=representations,
        labels=labels,
        projection=projection,
    )
    with Till(workdir, seed=seed) as till:
        released = till.once(what)
    features = on_device(released["features"])
    return Released(features, released["labels"])


def plan_release(
    account: privacy.Account,
    *,
    release: PrivateRelease,
    representations: Any,
    labels: Any,
    projection: Projection,
    label: str = "split adaptation",
) -> Release[dict[str, Any]]:
    """Returns the release of `release_privately`, with the fields of `Released`, for a till.

    It spends nothing.

    It copies its arrays, so a later change of the given ones does not reach the release. Arguments
    and errors are as in `release_privately`. The ledger shows `label` to people: never put data in
    it.
    """
    if account.adjacency != "replace_one":
        raise ValueError(
            f"dataset {account.name!r} is registered with {account.adjacency!r}. The release shows "
            "the number of images and hides each image. Register the dataset with "
            "adjacency='replace_one'."
        )
    release.check(representations, labels=labels, projection=projection)
    # Copies, because the till reads them when it releases, which may be long after this call.
    representations = own_copy(representations)
    projection = jax.tree.map(own_copy, projection)
    labels = np.array(labels)
    arguments = release._arguments(representations, projection)
    # Tracing comes before the payment, so that a program that cannot run costs nothing.
    text = program(_release, stream(bytes(16), "images"), *arguments, release.mechanism, True)

    def compute(secret: bytes) -> dict[str, Any]:
        key = stream(secret, "images")
        released = release._draw(key, representations, labels, projection, shuffle=True)
        return released._asdict()

    settings = dataclasses.asdict(release)

    return Release(
        label=label,
        charges=[(account, release.event)],
        facts=lambda: [settings, representations, labels, *projection],
        programs=lambda: [text],
        compute=compute,
    )


def event(
    noise_multiplier: float, label_epsilon: float, *, mechanism: Mechanism = "gaussian"
) -> privacy.DpEvent:
    """Returns the privacy event of one release under "replace_one".

    Arguments are as in `PrivateRelease`.
    """
    labels: privacy.DpEvent = privacy.NonPrivateDpEvent()
    if not math.isinf(label_epsilon):
        labels = privacy.PureDpEvent(label_epsilon)
    features: privacy.DpEvent
    if noise_multiplier == 0:
        features = privacy.NonPrivateDpEvent()
    elif mechanism == "gaussian":
        features = privacy.GaussianDpEvent(noise_multiplier)
    else:
        # The privacy loss of a vector differs from the loss of one Laplace number. Its pure epsilon
        # for 2 C is a bound.
        features = privacy.PureDpEvent(2 / float(noise_multiplier))
    return privacy.ComposedDpEvent([features, labels])


def published_event(laplace_scale: float) -> privacy.UnprovenDpEvent:
    """Returns the event of the published mode with Laplace(0, b) noise.

    Its epsilon is infinite ("empirical only").

    Raises:
      ValueError: b is negative or not finite.
    """
    not_negative(laplace_scale=laplace_scale)
    if laplace_scale == 0:
        plain = "representations have no noise"
    else:
        plain = (
            f"one plain copy with Laplace({laplace_scale:g}) noise is metric-DP at "
            f"{1 / laplace_scale:.4g} per unit of L1 distance between representations, which "
            "nothing bounds"
        )
    return privacy.unproven(
        f"Split Adaptation as published: {plain}; augmented copies and labels have no guarantee"
    )


def _float32(x: Any) -> jax.Array:
    with np.errstate(over="ignore"):  # infinite beyond float32: clipping makes the row zero
        return on_device(x, jnp.float32)


def _check_norm(clip_norm: Any) -> float:
    """Returns a clip norm as a float, since a scalar of 16 bits has no room for rounding."""
    check_numbers(clip_norm=clip_norm)
    norm = float(clip_norm)
    low, high = _SMALLEST_NORM, _LARGEST_NORM
    if not low <= norm <= high:
        raise ValueError(f"clip_norm must be in [{low:g}, {high:g}], got {clip_norm!r}.")
    return norm


def _check_labels(labels: Any, num_classes: int) -> np.ndarray:
    """Returns labels as int32 [n]. Errors show no label."""
    array = np.asarray(labels)
    check_labels(array, array.size)
    check_range(array, num_classes)
    return array.astype(np.int32)
