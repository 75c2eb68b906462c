"""The number of rounds of random-round DP-SGD (Wang et al. 2024, Algorithm 2; Zhang et al. 2017).

    1.   R is uniform in 1..n^2                                     `random_round`
    2-3. in each of R rounds, one example is drawn from n           `PoissonSampler(n, 1 / n)`
    4-5. theta <- theta - eta (its gradient + noise)                `dp_sgd` with `optax.sgd(eta)`

Algorithm 2 is thus `dp_sgd` with another number of steps. Poisson sampling draws its example, with
batches of one example on average. R depends on no record, so it may be published. A run of R rounds
has the guarantee of R steps, and the ledger charges R. docs/design/finetune.md has the proof.

Eq. 9 of the paper is not used for the noise. As printed it does not depend on epsilon.
"""

import numpy as np

from jaxdp.release import derive, generator


def random_round(most: int, *, seed: bytes) -> int:
    """Returns R, uniform in 1..most.

        n = len(source)
        steps = jaxdp.finetune.random_round(n**2, seed=seed)
        trainer = jaxdp.finetune.dp_sgd(
            loss_fn, optax.sgd(0.01), sampler=jaxdp.data.PoissonSampler(n, 1 / n), clip_norm=1.0,
            epsilon=4.0, delta=1e-6, steps=steps,
        )
        jaxdp.finetune.fit(trainer, params, source, steps=steps, account=account)

    The noise may be that of R steps instead of n^2, because R is public.

    Args:
      most: The largest number of rounds, n^2 in the paper.
      seed: 16 bytes, which are public and must not depend on the data.

    Raises:
      ValueError: most is below 1 or above 2^63, or seed is not 16 bytes.
    """
    if not 1 <= most <= 2**63:
        raise ValueError(f"most must be an integer in 1..2^63, got {most}.")
    if not isinstance(seed, bytes) or len(seed) != 16:
        raise ValueError(f"seed must be 16 bytes such as (0).to_bytes(16, 'little'), got {seed!r}.")
    rng = generator(derive(seed, "rounds"))
    return int(rng.integers(1, most, endpoint=True, dtype=np.uint64))
