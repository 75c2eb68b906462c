"""The client's uploads: representations, and copies with patches of other images.

The paper's sections are 3.4 and 3.5.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.storage import own_copy
from jaxdp.privacy import Account
from jaxdp.release import Release, program, stream
from jaxdp.split.augment import augmented_batch, batchable, retrieve_neighbors
from jaxdp.split.checks import at_least, not_negative
from jaxdp.split.noisy_upload import published_event
from jaxdp.transforms import noise


@dataclasses.dataclass(frozen=True)
class Copies:
    """Augmented copies of n representations.

    A batch of copies is made on demand, so memory never holds all of them.

    An object is the client's secret: `representations` are exact before `augment_then_noise`. The
    client sends `batch`.

    Attributes:
      representations: float32 [n, T, D].
      neighbors: int32 [T, n] of `retrieve_neighbors`.
      key: The key of the choice of patches and of the Laplace noise.
      laplace_scale: b of the noise on every entry of every copy, float32 []. 0 adds no noise.
      copies: N_Aug, the number of copies besides the original.
      n_patches: The number of patches replaced in each copy. With 0 the copies differ only by their
          noise.
      prefix_tokens: The number of leading tokens that are never replaced.
    """

    representations: jax.Array
    neighbors: jax.Array
    key: jax.Array
    laplace_scale: jax.Array
    copies: int
    n_patches: int
    prefix_tokens: int

    def index(self) -> tuple[jax.Array, jax.Array]:
        """Returns image and number of every copy, int32 [n (1 + copies)] each."""
        return index_of_copies(len(self.representations), 1 + self.copies)

    def batch(self, images: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns copies [B, T, D]: copy `numbers[b]` of image `images[b]`.

        Every call gives the same values.
        """
        patch_key, noise_key = jax.random.split(self.key)
        noise_key = batchable(noise_key)
        options = {"n_patches": self.n_patches, "prefix_tokens": self.prefix_tokens}
        x = augmented_batch(
            patch_key, self.representations, self.neighbors, images, numbers, **options
        )

        def unit_noise(image: jax.Array, number: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(noise_key, image), number)
            return noise.laplace(key, x[0], 1.0)

        def with_noise() -> jax.Array:
            return x + self.laplace_scale * jax.vmap(unit_noise)(images, numbers)

        # No draw of T D numbers for each copy where the noise is 0.
        return jax.lax.cond(self.laplace_scale > 0, with_noise, lambda: x)

    def materialized(self) -> np.ndarray:
        """Returns all copies [1 + copies, n, T, D] in host memory.

        It makes one number of all images at a time.
        """
        images = np.arange(len(self.representations), dtype=np.int32)
        copies = []
        for number in range(1 + self.copies):
            numbers = np.full_like(images, number)
            # The copies of one number at a time are on the device.
            copies.append(np.asarray(_batch(self, images, numbers)))
        return np.stack(copies)


jax.tree_util.register_dataclass(
    Copies,
    data_fields=["representations", "neighbors", "key", "laplace_scale"],
    meta_fields=["copies", "n_patches", "prefix_tokens"],
)
_batch = jax.jit(Copies.batch)


def index_of_copies(images: int, each: int) -> tuple[jax.Array, jax.Array]:
    """Returns image and number of every copy, int32 [images * each] both."""
    copy = np.arange(images * each, dtype=np.int32)
    image, number = jax.device_put(np.divmod(copy, np.int32(each)))
    return image, number


def augment_then_noise(
    key: jax.Array,
    representations: jax.Array,
    *,
    laplace_scale: float,
    copies: int = 64,
    n_patches: int,
    prefix_tokens: int,
) -> Copies:
    """Makes copies in the published order: retrieval first, then noise on every copy.

    Retrieval reads exact representations. The noise is Laplace(0, b).

    The original counts as a copy. Each image is sent 1 + copies times with fresh noise, so the
    median of its copies removes most of the noise.

    Args:
      key: Typed PRNG key of shape (), from the client's secret seed.
      representations: float32 [n, T, D] of `represent`.
      laplace_scale, copies, n_patches, prefix_tokens: As in `Copies`. b is in units of the
        representation.

    Raises:
      ValueError: A scale or number is negative, n_patches exceeds the patches, or a single image
          has no neighbour.
    """
    not_negative(laplace_scale=laplace_scale)
    at_least(0, copies=copies)
    neighbors = retrieve_neighbors(representations)  # Eq. 13
    augmented = Copies(
        representations,
        neighbors,
        key,
        jnp.float32(laplace_scale),
        copies,
        n_patches,
        prefix_tokens,
    )
    first = jax.ShapeDtypeStruct((1,), jnp.int32)
    _batch.eval_shape(augmented, first, first)  # raises errors of arguments now, traces once
    return augmented


def noise_then_augment(
    key: jax.Array,
    representations: jax.Array,
    *,
    laplace_scale: float,
    copies: int = 64,
    n_patches: int,
    prefix_tokens: int,
) -> Copies:
    """Makes one noisy representation of every image, then retrieves and augments.

    The upload is 65 times smaller, and averaging cannot remove the noise. The effect of an image on
    copies of other images is post-processing. Arguments and errors are as in `augment_then_noise`.
    """
    not_negative(laplace_scale=laplace_scale)
    noise_key, patch_key = jax.random.split(key)
    # The server could augment this by itself, so what follows is post-processing.
    noisy = representations + noise.laplace(noise_key, representations, laplace_scale)
    return augment_then_noise(
        patch_key,
        noisy,
        laplace_scale=0.0,
        copies=copies,
        n_patches=n_patches,
        prefix_tokens=prefix_tokens,
    )


# --- For a till ---------------------------------------------------------------------------------


def plan_copies(
    account: Account,
    *,
    representations: jax.Array,
    laplace_scale: float,
    copies: int = 64,
    n_patches: int,
    prefix_tokens: int,
    label: str,
) -> Release[np.ndarray]:
    """Returns all copies of `augment_then_noise`, float32 [1 + copies, n, T, D], for a till.

    It spends nothing, and copies the representations. The account pays `published_event`: nothing
    about this upload is proven. The ledger shows `label` to people, so it must not hold data. Other
    arguments and errors are as in `augment_then_noise`.
    """
    not_negative(laplace_scale=laplace_scale)
    at_least(0, copies=copies)
    x = own_copy(representations)
    images = jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    # Tracing comes before the payment, so that a program that cannot run costs nothing.
    neighbors = jax.eval_shape(retrieve_neighbors, x)
    key = stream(bytes(16), "copies", impl="threefry2x32")
    traced = Copies(x, neighbors, key, jnp.float32(laplace_scale), copies, n_patches, prefix_tokens)
    texts = [program(retrieve_neighbors, x), program(_batch, traced, images, images)]

    def compute(secret: bytes) -> np.ndarray:
        key = stream(secret, "copies", impl="threefry2x32")
        drawn = dataclasses.replace(traced, neighbors=retrieve_neighbors(x), key=key)
        return drawn.materialized()

    event = published_event(laplace_scale)
    return Release(
        label=label,
        charges=[(account, event)],
        facts=lambda: [x, laplace_scale, copies, n_patches, prefix_tokens],
        programs=lambda: texts,
        compute=compute,
    )


def plan_noisy(
    account: Account,
    *,
    representations: jax.Array,
    laplace_scale: float,
    label: str,
) -> Release[jax.Array]:
    """Returns one noisy copy of every representation, float32 [n, T, D], for a till.

    The call spends nothing.

    Arguments and errors are as in `plan_copies`.
    """
    x = own_copy(representations)
    event = published_event(laplace_scale)
    text = program(_noisy, stream(bytes(16), "noise"), x, laplace_scale)

    return Release(
        label=label,
        charges=[(account, event)],
        facts=lambda: [x, laplace_scale],
        programs=lambda: [text],
        compute=lambda secret: _noisy(stream(secret, "noise"), x, laplace_scale),
    )


@jax.jit
def _noisy(key: jax.Array, x: jax.Array, scale: float) -> jax.Array:
    return x + noise.laplace(key, x, scale)
