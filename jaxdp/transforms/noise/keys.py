"""Seeds from the operating system, one key per purpose, and the numbers of the draws of a key."""

import hmac
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.transforms import chacha

# 128 bits: nobody can try them all, and HMAC stretches them to the 256 bits of a key.
_SEED_BYTES = 16
# The generator and the number of uint32 words of its keys, by `impl`.
_GENERATORS: dict[str, tuple[Any, int]] = {
    "chacha12": (chacha.CHACHA12, 8),
    "threefry2x32": ("threefry2x32", 2),
}


def new_seed() -> bytes:
    """Returns 16 bytes (128 bits) from the operating system's entropy pool.

    Anyone who learns the seed can subtract the noise. Protect the seed at least as well as the
    private data.
    """
    return secrets.token_bytes(_SEED_BYTES)


def stream(
    seed: bytes,
    purpose: str,
    *,
    impl: str = "chacha12",
) -> jax.Array:
    """Derives the typed key [] of one purpose from a seed.

    The key words are the first bytes of HMAC-SHA256(seed, domain || impl || purpose). That is one
    block of HKDF-Expand (RFC 5869) with the seed as its pseudo-random key. If the seed is from
    `new_seed` and HMAC-SHA256 is pseudo-random, streams of different purposes are independent, and
    a key reveals neither another key nor the seed.

    Args:
        seed: At least 16 bytes of full entropy, such as `new_seed()`.
        purpose: The use of the stream, e.g. "gradient noise". Choose a different purpose for each
            use.
        impl: "chacha12" (256 bits, for noise) or "threefry2x32" (64 bits, cheaper for many keys of
            few bits each, for augmentation and dropout).

    Raises:
        TypeError: `seed` is not bytes or `purpose` is not a string.
        ValueError: `seed` is too short, `purpose` is empty, or `impl` is unknown.
    """
    if not isinstance(seed, bytes):
        raise TypeError(
            f"seed must be bytes, got {type(seed).__name__}. Use jaxdp.transforms.noise.new_seed()."
        )
    if len(seed) < _SEED_BYTES:
        raise ValueError(
            f"seed must have at least {_SEED_BYTES} bytes, got {len(seed)}. Use new_seed()."
        )
    if not isinstance(purpose, str):
        raise TypeError(f"purpose must be a string, got {type(purpose).__name__}.")
    if not purpose:
        raise ValueError("purpose is empty. Name the use of the stream, e.g. 'gradient noise'.")
    if impl not in _GENERATORS:
        raise ValueError(f"impl must be one of {sorted(_GENERATORS)}, got {impl!r}.")

    generator, word_count = _GENERATORS[impl]
    # Only the last part may contain a zero byte, so different uses have different messages.
    message = b"\0".join([b"jaxdp stream v1", impl.encode(), purpose.encode()])
    digest = hmac.digest(seed, message, "sha256")
    # The words are little-endian on every host, so a seed gives the same key everywhere.
    words = np.frombuffer(digest, dtype="<u4")[:word_count].astype(np.uint32)
    # An explicit transfer, because training runs under jax_transfer_guard="disallow".
    key: jax.Array = jax.random.wrap_key_data(jax.device_put(words), impl=generator)
    return key


def is_traced(params: Any) -> bool:
    """Returns whether a key that is drawn here would be a constant of a program.

    All runs of the program would share it.
    """
    # Parameters that a program closes over are not traced, and an array that it makes is. Under
    # `jax.vmap` it is the other way round.
    values = [jnp.zeros((), jnp.int32), *jax.tree.leaves(params)]
    return any(isinstance(value, jax.core.Tracer) for value in values)


def check_key(key: Any) -> None:
    """Raises TypeError if `key` is not a typed key, and ValueError if its shape is not ()."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(
            "key must be a typed key, because an old-style uint32 key does not record its "
            "generator. Use stream(seed, purpose), jax.random.key, or jax.random.wrap_key_data."
        )
    if key.shape != ():
        raise ValueError(
            f"key must have shape (), got {key.shape}. Use jax.random.fold_in to derive one key "
            "per use."
        )


def number_of_draw(number: Any) -> jax.Array:
    """Returns the number of a draw as a uint32 scalar. Raises the errors of `gaussian` for it."""
    if jnp.ndim(number) != 0:
        raise ValueError(
            f"number must be one scalar for the whole tree, got shape {jnp.shape(number)}."
        )
    dtype = jnp.result_type(number)
    # Two fractions may be cut to one integer, which would repeat noise.
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"number must be an integer, got dtype {dtype}. Count the draws of the key."
        )
    if not isinstance(number, jax.core.Tracer):
        number = int(jax.device_get(number))
        if not 0 <= number < 2**32:
            raise ValueError(f"number must be from 0 to 2**32 - 1, got {number!r}.")
    elif number.dtype.itemsize > 4:
        # In a program 2**32 would wrap around and repeat the noise of 0.
        raise TypeError(
            f"number must have at most 32 bits where it is traced, got dtype {number.dtype}, "
            "because a program cannot refuse a larger one. Count in int32 or uint32, such as "
            "jnp.uint32(0)."
        )
    return jnp.asarray(number, jnp.uint32)
