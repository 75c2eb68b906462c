"""Keys, noise on pytrees, and `privatize`, the Gaussian mechanism as an optax transformation.

**Keys.** All randomness behind a guarantee starts from 128 bits of operating-system entropy
(`new_seed`). `stream` derives one key per purpose from them. Noise keys are "chacha12" keys of 256
bits (`jaxdp.transforms.chacha`), so `jax.random` and this module draw from ChaCha12 under them.
They are independent under `jax.vmap`. A key is for the calls of one function of this module, each
with a `number` of its own, and for nothing else. The number is part of the cipher's nonce. Keys of
JAX's own generators are accepted. The noise is then as strong as their generator and has its traps:
under `jax.vmap`, the bits of "rbg" keys depend on the first key only. "threefry2x32" keys, of 64
bits, are for augmentation and dropout.

**Threat model.** Noise is pseudo-random if ChaCha12 and HMAC-SHA256 are pseudo-random functions.
ChaCha12 is the cipher of RFC 8439 with 12 rounds instead of 20. The best published attacks reach 7
rounds and a little more, and are far from practical (Aumasson, "Too much crypto", 2019). Rust's
standard generator has 12 rounds too. They cost two thirds of 20. The seed has 128 bits, so a search
for it takes about 2**127 trials. Noise is computed in floating point, which the (epsilon, delta) of
the ledger does not cover:

* *Sampling.* A float32 normal from one uniform takes at most 2**23 values and stops at 5.4 standard
  deviations. So an output can be impossible under one data set and possible under its neighbour
  (Mironov, "On significance of the least significant bits", CCS 2012). Noise is safer if each value
  combines several draws of high resolution (Holohan and Braghin, "Secure random sampling in
  differential privacy", ESORICS 2021). Here a pair of normals is (r cos t, r sin t) with a radius
  of 64 bits and an angle of 67 (Box and Muller, 1958). Both are computed to the relative precision
  of a float near zero, and so are the normals. Rounded to float32, radius and angle still have more
  than 2**46 combinations for the 2**32 floats. Normals end at 9.49 standard deviations. The delta
  of the ledger does not count the tail beyond, at most 2**-65 per value. Laplace noise ends at 5678
  scales. A claim of delta = 0 omits the mass beyond, at most 2**-8190 per value. Cauchy noise ends
  at the largest float.
* *Addition.* `value + noise` is rounded to a float whose last bits depend on `value` (Mironov 2012;
  Haney et al., "Precision-based attacks and interval refining", 2022; Jin et al., "Are we there
  yet? Timing and floating-point attacks", 2022). `privatize(exact=True)` mitigates it: values,
  sums and noise are integers, and `rounded_gaussian` is drawn by integers. Without it, publish at
  reduced precision if the adversary reads raw bits. `discrete_laplace` is drawn by integers too,
  and is added to integers.
* *Summation.* When one example changes, a float32 sum of clipped gradients can move by a rounding
  error more than the clip norm (Casacuberta et al., "Widespread underestimation of sensitivity",
  CCS 2022). Integers have one sum in every order, and `jaxdp.transforms.grids` bounds it exactly.
* *Time.* Noise takes the same operations for every key, except one more draw when 32 bits of a
  Laplace or Cauchy value are all zero. Nothing else about timing is promised.

**Cost.** All leaves of a dtype are slices of one vector, so a tree compiles one program. The
normals of a vector are functions of the key and their index only. A block of the cipher gives two
pairs of float32 normals, or one of float64. On a CPU, XLA fuses the cipher with them. What a block
gives is one complex number there, because XLA would compute the cipher once for each vector.
`CPU_OPTIONS` makes it quicker.

**Several values, one key.** Equal noise on two values reveals their difference. So noise is refused
where the values differ and neither key nor number does: along an axis of `jax.vmap`, and between
devices inside `jax.shard_map`. Equal noise is right for a sum that devices share, such as the
result of `jax.lax.psum`. Inside `jax.shard_map` with `check_vma=False` and inside `jax.pmap`, JAX
does not record what differs, so noise is refused there. A loop repeats what its body says: give
each turn a number of its own.

**Compiler.** The options of XLA that flush subnormal numbers, reorder sums or approximate functions
change the last digits of noise. They do not make it smaller. `jaxdp.transforms.compiler` names the
options that are refused.

**Modules.** `keys` has seeds and keys, `words` the cipher's words for one draw. `normal`,
`normal_on_mesh`, `rounded`, `laplace`, `geometric` and `cauchy` draw vectors of each law. `trees`
cuts them into the leaves of a pytree. `reuse` and `scales` check arguments. `schedule` and
`privatizer` are `privatize`. `correlation` is the noise of matrix factorisation.
"""

from jaxdp.transforms.noise.correlation import CorrelatedNoise, correlated
from jaxdp.transforms.noise.geometric import upward
from jaxdp.transforms.noise.keys import check_key, new_seed, stream
from jaxdp.transforms.noise.privatizer import (
    CPU_OPTIONS,
    HasSensitivity,
    Privatizer,
    PrivatizeState,
    privatize,
)
from jaxdp.transforms.noise.scales import check_product, range_of
from jaxdp.transforms.noise.schedule import NoiseSchedule
from jaxdp.transforms.noise.trees import (
    LARGEST_DISCRETE_SCALE,
    cauchy,
    discrete_laplace,
    gaussian,
    laplace,
    rounded_gaussian,
)

__all__ = [
    "CPU_OPTIONS",
    "LARGEST_DISCRETE_SCALE",
    "CorrelatedNoise",
    "HasSensitivity",
    "NoiseSchedule",
    "PrivatizeState",
    "Privatizer",
    "cauchy",
    "check_key",
    "check_product",
    "correlated",
    "discrete_laplace",
    "gaussian",
    "laplace",
    "new_seed",
    "privatize",
    "range_of",
    "rounded_gaussian",
    "stream",
    "upward",
]
