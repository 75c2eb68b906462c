"""The private form of a method (arXiv:2606.01908).

The paper is "Private and Stable Test-Time Adaptation with Differential Privacy".

The paper derives it from the method's operators. Operators that break privacy are removed.
Operators that are post-processing move outside. The others are absorbed into the clipped per-sample
loss.

    G_t = (1/B) ( sum_i clip_C( grad [w_i u_i](theta_t + e_t) ) + sigma C Z_t ),  Z_t ~ N(0, I)
    e_t = rho G_{t-1} / (||G_{t-1}|| + 1e-12),  e_0 = 0
    theta_{t+1} = optimizer(theta_t, G_t + pull(theta_t - theta_0))

e_t is for methods that have rho. The optimizer and the pull are post-processing of G_t.

With correlated noise Z_t is row t of C^-1 Z, and the updates of a period of C are one release
(`jaxdp.transforms.noise.correlation`). A record is in one update, so the period is a single epoch:
record i moves C G by at most the largest norm of a column of C, in clip norms.
"""

import dataclasses
import math
import numbers
from typing import Any, Literal

from jaxdp.files import check_choice
from jaxdp.privacy import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.transforms.clipping import clipped_grad
from jaxdp.transforms.grids import Grid
from jaxdp.transforms.noise import CorrelatedNoise, check_product
from jaxdp.tta.accounts import check_adjacency, epsilons
from jaxdp.tta.method import Method

Filters = Literal["remove", "keep"]
_LARGEST = 1e38  # about float32's
_MOST_IMAGES = 2**16  # of an update, without an overflow of its sum in integers

# How `private` treats each operator.
_ABSORBED = "absorbed: inside the clipped loss of its own image"
RULES = {
    "uncertainty": _ABSORBED,
    "weight": _ABSORBED,
    "augment": (
        "absorbed: a forward pass on the same image at the same parameters, without gradient"
    ),
    "reliable": "removed: the step would depend on how many images pass",
    "radius": "moved outside: e is made of the previous private gradient",
    "pull": "moved outside: added after the noise, it reads parameters only",
    "remember": "removed: a memory of raw images would survive the step",
    "novel": "removed: it compares with a memory of raw images",
    "lost": "removed: the time of a reset would depend on images (use reset_every)",
}
_KEPT_FILTER = "absorbed: a factor 0 or 1 inside the clip, which does not change the divisor"


@dataclasses.dataclass(frozen=True, eq=False)
class Private:
    """A private method. `private` makes and documents it."""

    method: Method
    clip_norm: float
    noise_multiplier: float
    filters: Filters
    kept_fraction: float
    clip_rule: Any
    exact: bool = False
    noise: CorrelatedNoise | None = None

    @property
    def updates(self) -> int:
        """The number of updates that are one release: 1, or the steps of correlated noise."""
        return 1 if self.noise is None else self.noise.steps

    @property
    def grid(self) -> Grid | None:
        """The grid of sums in integers with exact noise, or None.

        It is one grid for batches of all sizes, with room for updates of 65,536 images.
        """
        if not self.exact:
            return None
        return Grid.of(self.sensitivity("zero_out"), self.noise_multiplier, _MOST_IMAGES)

    @property
    def event(self) -> DpEvent:
        """The event of one batch for the records in it.

        With correlated noise it is that of a period for a record in one of its updates.
        `jaxdp.tta.StreamAccount` composes it over a stream.
        """
        if self.noise_multiplier == 0:
            return NonPrivateDpEvent()
        if self.noise is not None:
            return self.noise.event(self.noise_multiplier)
        return GaussianDpEvent(self.noise_multiplier)

    def sensitivity(self, adjacency: Adjacency = "replace_one") -> float:
        """Returns the L2 sensitivity of the clipped sum of a batch: 2 C, or C under "zero_out"."""
        check_adjacency(adjacency)
        gradient = clipped_grad(
            self.method.uncertainty, clip_norm=self.clip_norm, clip_rule=self.clip_rule
        )
        return gradient.sensitivity("zero_out" if adjacency == "zero_out" else "replace_one")

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise.

        It is sigma times the largest norm that a record contributes.
        """
        return self.noise_multiplier * self.sensitivity("zero_out")

    def epsilon(
        self, *, delta: float, adjacency: Adjacency = "replace_one", visits: int = 1
    ) -> float:
        """Returns the epsilon of the whole transcript for a unit in `visits` batches, once in each.

        The transcript is mu-GDP with mu = 2 sqrt(visits) / sigma under "replace_one", half of it
        under "zero_out". With correlated noise mu is multiplied by the sensitivity of C, and visits
        are in different periods. Without noise epsilon is inf.
        """
        if visits < 1:
            raise ValueError(f"visits must be at least 1, got {visits}.")
        return epsilons(self.event, visits=visits, delta=delta, adjacency=adjacency).unit

    def describe(self) -> str:
        """Returns text with one line for each operator of the method and its treatment."""
        method = self.method
        rule = "" if self.clip_rule == "global" else f" by the rule {self.clip_rule!r}"
        noise = "clipped only, no noise: epsilon = inf"
        if self.noise_multiplier:
            noise = f"noise {self.noise_multiplier:g} x clip norm"
        if self.exact:
            noise += ", exact: in integers on a grid"
        if self.noise is not None:
            noise += f", correlated over periods of {self.updates} updates"
        lines = [f"private {type(method).__name__}, clip norm {self.clip_norm:g}{rule}, {noise}"]
        treatments = dict(RULES)
        if self.filters == "keep":
            treatments["reliable"] = _KEPT_FILTER
        for hook, treatment in treatments.items():
            if hook == "uncertainty" or method.overrides(hook):
                lines.append(f"  {method.explain(hook)}: {treatment}")
        divisor = "B" if self.kept_fraction == 1 else f"{self.kept_fraction:g} B"
        lines.append(
            f"  mean over the images that take part: replaced, the divisor is {divisor} whatever "
            "they hold"
        )
        if method.skips_empty:
            lines.append(
                "  no step when no image takes part: removed, every step is made and gets its "
                "full noise"
            )
        return "\n".join(lines)


def private(
    method: Method,
    *,
    clip_norm: float,
    noise_multiplier: float,
    filters: Filters = "remove",
    kept_fraction: float = 1.0,
    clip_rule: Any = "global",
    exact: bool = False,
    noise: CorrelatedNoise | None = None,
) -> Private:
    """Returns the private form of a test-time adaptation method.

    `Adapter` accepts it in place of a method.

    Args:
      method: One of `jaxdp.tta.METHODS`, or your `Method`.
      clip_norm: C > 0, the L2 norm to which each image's gradient over all adapted parameters is
          clipped.
      noise_multiplier: sigma >= 0, the standard deviation of the noise divided by C. 0 clips only:
        epsilon is inf. The noise sigma C is from 2**-100 to 2**100, which float32 carries.
      filters: "remove" removes filters on single images, as in the paper. "keep" makes them factors
        0 or 1 inside the clip. That costs nothing, because a filter is a function of one image and
        of released parameters. It keeps `reliable` only: `novel` (EATA's diversity), which reads a
        memory of raw images, and `lost` (SAR's recovery) are removed in any case. `clipped` keeps
        all of them, without a guarantee.
      kept_fraction: With "keep", the fraction kappa in (0, 1] of images expected to pass, a public
        guess. The divisor is then kappa B, which keeps the length of steps.
      clip_rule: The rule that scales a gradient, as in `jaxdp.clipped_grad`.
      exact: Whether gradients are summed as integers and the noise is drawn by integers, as in
        `jaxdp.privatize(exact=True)`. The guarantee is the same, and no rounding of floats is left
        out of it. It needs noise. The default is False.
      noise: `jaxdp.correlated(strategy, steps=...)`, noise whose rows cancel over the updates of a
        period of `steps` updates. sigma C is then the standard deviation of its independent rows,
        and `calibrate_noise(noise.event, ...)` chooses sigma. A period is one release. After
        `steps` updates, and after a reset, a new period begins with fresh noise. A record that
        comes once is charged for one period, however long the stream. None, the default, is
        independent noise.

    Raises:
      TypeError: method is not a `Method`, or is private already. noise is not correlated noise.
      ValueError: An argument is out of range. Correlated noise is for several participations, or
        exact, or has the size 0.

    Formal guarantees:
      Condition: a rule that does not read contents cuts the stream into batches, and a record is in
      one batch. Then the sequence of all parameters, momenta and released gradients is 2/sigma-GDP
      for replacing the record by another ("replace_one"). It is 1/sigma-GDP for replacing it by one
      that contributes nothing ("zero_out"). Proof: the clipped sum of its batch moves by at most 2
      C ("zero_out": C), and the noise has standard deviation sigma C. Earlier steps do not depend
      on the record, and later steps depend on it through G only. No step depends on a record in any
      other way. Weights and filters act inside the clip. The divisor is public. Every batch gets
      noise, whatever its contents. A record whose gradient is NaN or infinite counts as zero. The
      constants of the program are assumed public: the source model, the optimizer, the fields of
      the method and everything that its hooks close over (EATA's Fisher information). The logits of
      a record are NOT protected: give them to its owner only. With correlated noise the guarantee
      is that of `event`: mu is multiplied by the sensitivity of C, because the updates of the
      record's period are C G + Z up to C^-1. Other periods have independent noise. They depend on
      the record through released values only, and so does the end of a period.
    """
    if isinstance(method, Private):
        raise TypeError("method is private already. Give the method inside it, method.method.")
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be a jaxdp.tta.Method such as Tent(), got {type(method).__name__}."
        )
    if not isinstance(clip_norm, numbers.Real) or not 0 < clip_norm < _LARGEST:
        raise ValueError(
            f"clip_norm must be positive and finite, got {clip_norm!r}. It is one number here."
        )
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be finite and not negative, got {noise_multiplier}."
        )
    check_product("noise_multiplier", noise_multiplier, clip_norm)
    check_choice("filters", filters, Filters)
    if not 0 < kept_fraction <= 1 or (filters == "remove" and kept_fraction != 1):
        raise ValueError(
            f"kept_fraction must be in (0, 1], and 1 unless filters='keep', got {kept_fraction}."
        )
    _check_correlation(noise, noise_multiplier, exact)
    form = Private(
        method=method,
        clip_norm=float(clip_norm),
        noise_multiplier=float(noise_multiplier),
        filters=filters,
        kept_fraction=float(kept_fraction),
        clip_rule=clip_rule,
        exact=exact,
        noise=noise,
    )
    form.sensitivity()  # refuses an unknown clip_rule
    form.grid  # noqa: B018  refuses exact noise of size 0
    return form


def _check_correlation(noise: Any, noise_multiplier: float, exact: bool) -> None:
    """Raises TypeError or ValueError for noise that does not fit a stream."""
    if noise is None:
        return
    if not isinstance(noise, CorrelatedNoise):
        raise TypeError(
            f"noise must be jaxdp.correlated(strategy, steps=...), got {type(noise).__name__}."
        )
    if noise.participations != 1:
        raise ValueError(
            "noise must be that of a single epoch, participations=1, got "
            f"{noise.participations}. An account of a stream charges a unit that comes m times in "
            "a period for m^2 visits."
        )
    if not noise_multiplier:
        raise ValueError(
            "noise_multiplier must be positive with correlated noise, got 0. Leave noise out to "
            "clip only."
        )
    if exact:
        raise ValueError(
            "exact must be False with correlated noise, whose rows are sums of floats. Got True."
        )
