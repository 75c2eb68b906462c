"""DP-SGD (Abadi et al. 2016, Algorithm 1), with the image recipe of De et al. 2022.

One step, in the order of the algorithm. All methods share steps 1, 4 and 5, which
`jaxdp.finetune.trainer` and `jaxdp.finetune.step` take:

    1. L_t: every example joins with probability q, independently           `PoissonSampler`
    2. g_i = grad of the loss of example i (mean over K augmented views)    `clipped_grad`
    3. g_i <- g_i * min(1, C / ||g_i||_2), summed over L_t                  `clipped_grad`
    4. g~ = (sum_i g_i + sigma C N(0, I)) / (q n)                           `privatize`
    5. theta <- optimizer(theta, g~); moving average of theta               post-processing
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

import jax
import optax

from jaxdp.data.physical import Sampler
from jaxdp.files import shows_keywords
from jaxdp.finetune.options import OPTION_DEFAULTS, Options
from jaxdp.finetune.query import Query, QuerySums, moving_params
from jaxdp.finetune.trainer import PrivateTrainer, make_trainer
from jaxdp.transforms.noise import CorrelatedNoise


class GradientSum(Query):
    """The query of DP-SGD, in which each example contributes its clipped gradient."""

    def sensitivity(self, adjacency: Literal["add_remove"], /) -> float:
        """Returns the clip norm."""
        return self.gradient.sensitivity(adjacency)

    def zeros(self, params: Any) -> Any:
        """Returns zeros like the trainable parameters, integers on a grid."""
        return self.as_sums(moving_params(self.gradient, params))

    def sums(
        self,
        params: Any,
        carried: None,
        batch: Any,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> QuerySums:
        """Sums the clipped gradients."""
        gradient = dataclasses.replace(self.gradient, grid=self.grid)
        out = gradient(params, batch, mask, key=key)
        return QuerySums.of(out.grads, out)

    def read(self, params: Any, carried: None, mean: Any) -> tuple[Any, None, dict[str, jax.Array]]:
        """Returns the noisy mean as the gradient."""
        return mean, None, {}


@shows_keywords(Options, OPTION_DEFAULTS)
def dp_sgd(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float | Mapping[str, float],
    noise_multiplier: float | Callable[[Any], Any] | None = None,
    sampler: Sampler,
    noise: CorrelatedNoise | None = None,
    **options: Unpack[Options],
) -> PrivateTrainer:
    """Returns a trainer for DP-SGD with a per-example loss, any optimizer and any sampler.

        sampler = jaxdp.data.PoissonSampler(len(source), 256 / len(source))
        trainer = jaxdp.finetune.dp_sgd(
            loss_fn, optax.sgd(0.5), sampler=sampler, clip_norm=1.0,
            epsilon=4.0, delta=1e-6, steps=100,
        )
        state = trainer.init(params)
        with ledger.spend("my data", trainer.event(0, 100), label="dp-sgd"):
            for _ in range(100):
                state, metrics = trainer.step(state, source)

    `jaxdp.finetune.fit` is this loop with the ledger, checkpoints, crash recovery and evaluation.

    Args:
      loss_fn: `loss_fn(params, example) -> scalar`. It also gets `key=` if `stochastic`.
      optimizer: Any optax optimizer with any schedule. It sees only the noisy mean gradient, so it
        is post-processing. Its state is float32 or wider, for parameters of any dtype.
      clip_norm: C, the L2 norm to which each example's gradient is clipped. A mapping from regular
        expressions of paths to norms C_k, such as {"backbone/.*": 0.1, "head/.*": 1.0}, clips each
        part of the parameters to its own. C is then sqrt(sum_k C_k^2), which
        `trainer.privatizer.clip_norm` holds. `jaxdp.split_clip_norm` divides one C.
      noise_multiplier: sigma, the noise standard deviation over C, or a public schedule step ->
        sigma, as in `jaxdp.privatize`. None, the default, is the smallest sigma with which `steps`
        steps cost at most `epsilon` at `delta`. A schedule is planned for 65,536 steps, or by
        `trainer.planned(steps)`, which `fit` calls.
      epsilon, delta, steps: The target of the noise, all three or none. `trainer.event(0, steps)`
        meets it. More steps cost more. Epsilon above 10 or a delta of 1 / n or more gives a
        `jaxdp.privacy.PrivacyWarning`.
      adjacency, accountant: The neighbouring relation of the target, "add_remove" by default, and
        the `method` of `jaxdp.privacy.calibrate_noise`. The relation must be that of the account.
      besides: The event that the target pays in addition to the steps, such as the
        `GaussianDpEvent` of `charged_scaler`. None, the default, is nothing.
      sampler: The sampler of batches and its event. Its expected batch size q * n is the divisor.
        Its own seed is not used: every run draws its batches from its own secret
        (`PrivateTrainer.drawn`). With `truncated_batch_size`, the event is that of truncated
        Poisson sampling, which needs more noise and has no rule in RDP. A sampler of
        `jaxdp.data.by_owners` has the event of all records of one owner, with the adjacency
        "zero_out". A `jaxdp.data.FixedOrderSampler` needs `noise`. Other patterns with `noise` are
        amplified by the secret of who takes part (`jaxdp.data.participation`).
      noise: `jaxdp.correlated(strategy, steps=...)`, noise whose rows cancel over the steps of a
        run. The whole run is one event, `trainer.event(0, steps)`, which is paid before the first
        step. `noise_multiplier` is then the standard deviation of its independent rows over C. The
        target needs the steps of the noise. None, the default, is independent noise.
      physical_batch_size: The number of examples per compiled call. A sampled batch of any size is
        cut into such calls and the last is padded. No example is left out. None, the default,
        chooses up to three sizes that suit sampler and memory (`PrivateTrainer.physical`). Up to
        three programs compile. Padding then costs about 3 % or less on a CPU, and 3 to 9 % on an
        accelerator, where most batches are one call if memory allows. Give a number if memory is
        short, or to compile once.
      augment: `augment(key, example) -> example`, jittable, for one example. None, the default, is
          no augmentation.
      augmult: K >= 1 (default 1), the augmented views per example (De et al. 2022). Their mean
          gradient is clipped.
      ema_decay: The decay of a moving average of the parameters in `state.ema`. None, the default,
          keeps no average.
      ascent_radius: rho of DP-SAT (Park et al. 2023), which is sharpness-aware at no cost in
        privacy or time. Gradients are taken at params + rho g / ||g||, where g is the gradient
        released one step before. 0, the default, is off.
      stochastic: Whether `loss_fn` takes `key=` (dropout). The default is False.
      group: Whether an example is all records of one user, from `jaxdp.data.by_group`. The gradient
        of a user's mean loss over its records, and over their augmented views, is clipped once. The
        sampler draws users, and `physical_batch_size` counts users. The default is False.
      unit: What one example of the source is, in the words of the ledger. `fit` refuses an account
        with another unit. The default is "example". Without `group`, "patient" says that every
        patient has one record.
      mesh: The `jax.sharding.Mesh` of devices that share the work, of this process or of all. Its
        axes are Auto in the state. All processes of `jax.distributed` make the same calls, and each
        reads its own rows of a batch. None, the default, uses one device. Results are those of one
        device up to rounding, and the noise has the same bits. For `fit` another mesh is another
        program: an interrupted chunk is charged again.
      data_axes: The mesh axes along which batches are divided, ("data",) by default. Physical
        batches are rounded up to a multiple of their devices, and the rest is padding. Sizes that
        are chosen use the memory of each device.
      param_sharding: A rule `(path, leaf) -> PartitionSpec` for the parameters, with paths such as
        "Dense_0/kernel". Sums of gradients, noise and the optimizer's state lie like them. None,
        the default, keeps the shardings that the parameters have, and replicates those without.
      engine, clip_rule, trainable: As in `jaxdp.clipped_grad`, with its defaults.
      exact: Whether gradients are rounded to a public grid and summed as integers, with noise that
        is drawn by integers (`jaxdp.privatize(exact=True)`). The event is the same, and no rounding
        of floats is left out of it. It forms per-example gradients. A schedule of noise has a grid
        for each step of the plan. The default is False.

    Raises:
      ValueError: An argument is out of range or does not fit the mesh. Neither the noise nor its
        whole target is given, or both are, or no noise meets the target. See also `clipped_grad`
        and `privatize`.

    Formal guarantees:
      Step t satisfies `trainer.event(t, t + 1)`, which is PoissonSampled(q, Gaussian(sigma)), with
      respect to the data set of the sampler. This holds for every adjacency for which that event
      has a meaning. The clipped sum moves by at most C when one example joins or leaves the batch.
      Noise of standard deviation sigma * C is added to every batch, also to the empty one. The
      divisor is public. Steps compose adaptively. The whole state except `noise` and `key` is
      post-processing of the released gradients. With `group`, an example is a user with all of its
      records. With `sampler.records_per_owner` the event is `OwnedGaussianDpEvent`, for one owner.
      With `noise`, all steps together satisfy `trainer.event(0, steps)`, and no step has an event
      of its own. In a fixed order that is the Gaussian mechanism of `jaxdp.correlated`. With cyclic
      Poisson, b-min-sep and balls-in-bins sampling it is an event of
      `jaxdp.privacy.participation`.
    """
    return make_trainer(
        lambda gradient: GradientSum(gradient=gradient),
        loss_fn,
        optimizer,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        sampler=sampler,
        noise=noise,
        **options,
    )
