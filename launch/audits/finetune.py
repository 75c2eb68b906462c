"""Audits of private training: the Gaussian of a step of every algorithm, and the sampling of
batches.

The loss is linear, so the gradient of an example is the example. An example has two tensors of
random entries. Its norm is a hundred times the clip norm.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import finetune
from jaxdp.audit.finetune import audit_sampling, audit_step
from jaxdp.data import (
    Owners,
    PoissonSampler,
    Source,
    by_group,
    by_owners,
    from_arrays,
    take,
)
from jaxdp.finetune.adp_clip import QuantileClipping
from jaxdp.finetune.dp_sgd import GradientSum
from jaxdp.finetune.gep import GradientEmbedding
from jaxdp.finetune.query import QuerySums
from jaxdp.finetune.sla_clip import SlackClipping
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.privacy import GaussianDpEvent
from jaxdp.release import claim, stream
from jaxdp.transforms.noise import Privatizer, PrivatizeState

from . import case, inputs
from .case import Case, Run, under

DELTA = 1e-5
CLIP = 0.5
SIGMA = 1.0
SAMPLER = PoissonSampler(100, 0.2)
FAR = 1e4  # times the clip norm: what a forgotten clip lets through

_random = np.random.default_rng(0)
EXAMPLES = from_arrays(
    features=100 * CLIP * _random.normal(size=(12, 12)), label=np.zeros(12, int), num_classes=2
)
# Gradients far below the clip norm.
SHORT = from_arrays(
    features=1e-3 * CLIP * _random.normal(size=(12, 12)), label=np.zeros(12, int), num_classes=2
)
# Each of the twelve is a patient with four records, three of them in its own direction. The
# identifiers are those that numbers would merge, such as "007" and "7", in all their spellings.
RECORDS = 4
_rows = np.repeat(np.arange(12), RECORDS)
_owners: list[Any] = []
for _spellings in inputs.PEOPLE[:12]:
    _owners += [_spellings[n % len(_spellings)] for n in range(RECORDS)]
PATIENTS = by_group(
    take(EXAMPLES, np.where(np.arange(48) % RECORDS, _rows, 0)), _owners, max_records=RECORDS
)
# Each of the twelve is eight messages to one receiver, each of its own sender. The receiver is
# named second, and four of the messages count.
_messages = take(EXAMPLES, np.repeat(np.arange(12), 2 * RECORDS))
SENDERS = [[f"sender {row}"] for row in range(len(_messages))]
PAIRS = [[f"sender {row}", f"receiver {row // (2 * RECORDS)}"] for row in range(len(_messages))]
OF_OWNERS = by_owners(_messages, PAIRS, max_records=RECORDS)
PARAMS = {"first": jnp.zeros(4), "second": jnp.zeros(8)}
COMMON: dict[str, Any] = {"sampler": SAMPLER, "clip_norm": CLIP, "physical_batch_size": 4}

# Two equal norms, whose total is CLIP. The noise for the larger one alone would be too small.
PARTS = {"first": CLIP / 2**0.5, "second": CLIP / 2**0.5}

Make = Callable[[float], PrivateTrainer]


def loss(params: Mapping[str, jax.Array], example: Mapping[str, jax.Array]) -> jax.Array:
    """Returns a loss whose gradient is the example."""
    return jnp.vdot(jnp.concatenate([params["first"], params["second"]]), example["features"])


# --- The trainers, by their noise multiplier ----------------------------------------------------


def dp_sgd(sigma: float, **options: Any) -> PrivateTrainer:
    return finetune.dp_sgd(loss, optax.sgd(0.1), noise_multiplier=sigma, **COMMON, **options)


def dp_sgd_by_parts(sigma: float) -> PrivateTrainer:
    return finetune.dp_sgd(
        loss, optax.sgd(0.1), noise_multiplier=sigma, **COMMON | {"clip_norm": PARTS}
    )


def adp_clip_by_parts(sigma: float) -> PrivateTrainer:
    options: dict[str, Any] = COMMON | {"clip_norm": PARTS, "count_noise": 2.0}
    return finetune.adp_clip(loss, optax.sgd(0.1), noise_multiplier=sigma, **options)


def dp_sgd_exact(sigma: float) -> PrivateTrainer:
    return dp_sgd(sigma, exact=True)


def dp_sgd_of_patients(sigma: float) -> PrivateTrainer:
    return dp_sgd(sigma, group=True, unit="patient")


def dp_sgd_of_owners(sigma: float) -> PrivateTrainer:
    options = COMMON | {"sampler": OF_OWNERS.sampler(0.2)}
    return finetune.dp_sgd(
        loss, optax.sgd(0.1), noise_multiplier=RECORDS * sigma, unit="person", **options
    )


def dp_sat(sigma: float) -> PrivateTrainer:
    return dp_sgd(sigma, ascent_radius=0.05)


def adp_alloc(sigma: float, **changes: Any) -> PrivateTrainer:
    schedule = finetune.exponential_noise(0.1)
    options = COMMON | changes
    return finetune.adp_alloc(
        loss, optax.sgd(0.1), noise_multiplier=sigma, schedule=schedule, **options
    )


def adp_alloc_exact(sigma: float) -> PrivateTrainer:
    return adp_alloc(sigma, exact=True).planned(8)


def adp_clip(sigma: float, **changes: Any) -> PrivateTrainer:
    options = COMMON | changes
    return finetune.adp_clip(
        loss, optax.sgd(0.1), noise_multiplier=sigma, count_noise=2.0, **options
    )


def sla_clip(sigma: float, **changes: Any) -> PrivateTrainer:
    options = COMMON | changes
    return finetune.sla_clip(loss, optax.sgd(0.1), noise_multiplier=sigma, slots=4, **options)


def gep(sigma: float, **changes: Any) -> PrivateTrainer:
    anchors = EXAMPLES.gather(np.arange(6, 12))
    options: dict[str, Any] = {
        "anchors": anchors,
        "basis_size": 4,
        "groups": 1,
        "residual_clip_norm": CLIP,
        **COMMON,
        **changes,
    }
    return finetune.gep(loss, optax.sgd(0.1), noise_multiplier=sigma, **options)


# --- Their broken twins -------------------------------------------------------------------------


def _times_far(sums: Any) -> Any:
    """Returns sums times `FAR`, integers as integers."""
    return jax.tree.map(lambda x: (FAR * x).astype(x.dtype), sums)


class UnclippedSum(GradientSum):
    """DP-SGD that sums raw gradients."""

    def sums(
        self, params: Any, carried: Any, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> QuerySums:
        of_examples = self.gradient.per_example(params, batch, mask)
        total = jax.tree.map(lambda g: g.sum(0), of_examples.grads)
        if self.grid is not None:
            length = self.grid.step
            steps = jax.tree.map(lambda g: g / length, total)
            total = jax.tree.map(lambda g: g.astype(jnp.int32), steps)
        return QuerySums(total, of_examples.nonfinite)


class UnclippedQuantile(QuantileClipping):
    """AdpClip with a clip norm that no gradient reaches. It still divides by the honest clip
    norm.
    """

    def sums(
        self, params: Any, carried: Any, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> QuerySums:
        total, dropped = super().sums(params, FAR * carried, batch, mask, key)
        return QuerySums(total._replace(grads=_times_far(total.grads)), dropped)


class UnclippedSlack(SlackClipping):
    """SlaClip with a clip norm that no gradient reaches. It still divides by the honest one."""

    def sums(
        self, params: Any, carried: Any, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> QuerySums:
        total, dropped = super().sums(params, FAR * carried, batch, mask, key)
        return QuerySums(total._replace(grads=_times_far(total.grads)), dropped)


class LargeSlots(SlackClipping):
    """SlaClip whose slots have the capacity of the clip norm, not its K-th root of squares."""

    def filled(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        return super().filled(norms, clip_norm) * self.slots**0.5


class UnclippedEmbedding(GradientEmbedding):
    """GEP with clip norms that no gradient reaches. It still divides by the honest clip norms."""

    def sums(
        self, params: Any, carried: Any, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> QuerySums:
        gradient = dataclasses.replace(self.gradient, clip_norm=FAR * self.gradient.clip_norm)
        fields = _fields(self) | {
            "gradient": gradient,
            "residual_clip_norm": FAR * self.residual_clip_norm,
        }
        sums = GradientEmbedding(**fields).sums(params, carried, batch, mask, key)
        return sums._replace(total=_times_far(sums.total))


UNCLIPPED: Mapping[type, type] = {
    GradientSum: UnclippedSum,
    QuantileClipping: UnclippedQuantile,
    SlackClipping: UnclippedSlack,
    GradientEmbedding: UnclippedEmbedding,
}


class ClippedPerRecord(GradientSum):
    """DP-SGD that clips each record of a patient and sums them, sold as protection of patients."""

    def sums(
        self, params: Any, carried: Any, batch: Any, mask: jax.Array, key: jax.Array | None
    ) -> QuerySums:
        records = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        by_record = dataclasses.replace(self.gradient, group=False)
        out = by_record(params, records, mask.reshape(-1), key=key)
        return QuerySums.of(out.grads, out)


def unclipped(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns the trainer without its clip but with the same noise."""
    query = UNCLIPPED[type(trainer.query)](**_fields(trainer.query))
    return dataclasses.replace(trainer, query=query)


def doubled(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns a trainer each of whose examples contributes twice the sensitivity that the noise is
    made for.
    """

    class Doubled(type(trainer.query)):  # type: ignore[misc]
        def sums(self, *args: Any) -> Any:
            sums = super().sums(*args)
            return sums._replace(total=jax.tree.map(lambda x: 2 * x, sums.total))

    return dataclasses.replace(trainer, query=Doubled(**_fields(trainer.query)))


def with_one_key(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns a trainer that draws the noise of every run from one key."""
    one = stream(bytes(16), "the only key")
    return _with_noise(trainer, lambda state: state._replace(key=one))


def with_noise_used_twice(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns a trainer that adds the noise of the step before in every odd step."""
    return _with_noise(trainer, lambda state: state._replace(step=state.step - state.step % 2))


def _with_noise(
    trainer: PrivateTrainer, broken_state: Callable[[PrivatizeState], PrivatizeState]
) -> PrivateTrainer:
    """Returns a trainer that draws its noise from another state than its own."""
    honest = trainer.privatizer

    def update(
        sums: Any, state: PrivatizeState, params: Any = None, **extra: Any
    ) -> tuple[Any, PrivatizeState]:
        noisy, new = honest.update(sums, broken_state(state))
        return noisy, new._replace(step=state.step + 1)

    broken = Privatizer(honest.init, update)
    broken.__dict__.update(honest.__dict__)
    return dataclasses.replace(trainer, privatizer=broken)


class TwiceAsOften(PoissonSampler):
    """A sampler that draws every example with twice the declared probability."""

    def batch(self, step: int) -> np.ndarray:
        return PoissonSampler(
            self.num_examples, 2 * self.sampling_probability, seed=self.seed
        ).batch(step)


class OneBatch(PoissonSampler):
    """A sampler that draws the batch of every step from one key."""

    def batch(self, step: int) -> np.ndarray:
        return super().batch(0)


def _fields(query: Any) -> dict[str, Any]:
    return {field.name: getattr(query, field.name) for field in dataclasses.fields(query)}


# --- The cases ----------------------------------------------------------------------------------


def steps(
    make: Make, *, step: int = 1, source: Source = EXAMPLES
) -> tuple[Run, dict[str, Run | str]]:
    """Returns the audit of a step of a trainer, and of its twins."""

    def audit(trainer: PrivateTrainer, of: Source = source, **options: Any) -> Run:
        terms: dict[str, Any] = {
            "delta": DELTA,
            "step": step,
            "rows": range(6),
            "confidence": case.CONFIDENCE,
        }
        return lambda trials, seed: audit_step(
            trainer, PARAMS, of, trials=trials, seed=seed, **terms, **options
        )

    honest = make(SIGMA)
    claimed = claim(honest.privatizer.event_at(step), adjacency="add_remove", delta=DELTA)

    def held(run: Run) -> Run:
        """Returns the run under the claim of the honest trainer."""
        return lambda trials, seed: under(run(trials, seed), claimed)

    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: held(audit(make(SIGMA / 2))),
        case.NO_CLIPPING: held(audit(unclipped(honest))),
        case.SENSITIVITY_OFF_BY_TWO: held(audit(doubled(honest))),
        case.REUSED_KEY: held(audit(with_one_key(honest))),
        case.ADD_REMOVE_FOR_REPLACE_ONE: held(audit(honest, adjacency="replace_one")),
        "the noise of the step before": held(audit(with_noise_used_twice(honest))),
    }
    if honest.query.gradient.patterns is not None:
        least = max(honest.query.gradient.clip_norms) / honest.query.gradient.sensitivity()
        twins["noise for the largest part"] = held(audit(make(SIGMA * least)))
    if isinstance(honest.query, SlackClipping):
        large = dataclasses.replace(honest, query=LargeSlots(**_fields(honest.query)))
        twins["slots of the clip norm each"] = held(audit(large, of=SHORT))
        if honest.query.grids is not None:
            twins["slots of the clip norm each"] = (
                "an example that is too long counts as zero, by a check of integers"
            )
    if honest.group:
        broken = dataclasses.replace(honest, query=ClippedPerRecord(gradient=honest.query.gradient))
        twins["a clip per record, sold as per patient"] = held(audit(broken))
    return audit(honest), twins


def of_owners() -> tuple[Run, dict[str, Run | str]]:
    """Returns the audit of a step with all records of an owner, and of its twins."""

    def audit(trainer: PrivateTrainer, source: Owners, **options: Any) -> Run:
        receivers = source.rows // (2 * RECORDS)
        rows = [np.flatnonzero(receivers == receiver) for receiver in range(6)]
        terms: dict[str, Any] = {"delta": DELTA, "rows": rows, "confidence": case.CONFIDENCE}
        return lambda trials, seed: audit_step(
            trainer, PARAMS, source, trials=trials, seed=seed, **terms, **options
        )

    honest = dp_sgd_of_owners(SIGMA)
    claimed = claim(GaussianDpEvent(SIGMA), adjacency="add_remove", delta=DELTA)

    def held(run: Run) -> Run:
        """Returns the run under the claim of the honest trainer."""
        return lambda trials, seed: under(run(trials, seed), claimed)

    # The receiver owns nothing here, so that all eight messages count.
    first_only = by_owners(_messages, SENDERS, max_records=RECORDS)
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: held(audit(dp_sgd_of_owners(SIGMA / 2), OF_OWNERS)),
        case.NO_CLIPPING: held(audit(unclipped(honest), OF_OWNERS)),
        case.SENSITIVITY_OFF_BY_TWO: held(audit(doubled(honest), OF_OWNERS)),
        case.REUSED_KEY: held(audit(with_one_key(honest), OF_OWNERS)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: held(audit(honest, OF_OWNERS, adjacency="replace_one")),
        "noise for one record, sold as for four": held(
            audit(dp_sgd_of_owners(SIGMA / RECORDS), OF_OWNERS)
        ),
        "a bound for the first owner only": held(audit(honest, first_only)),
    }
    return audit(honest, OF_OWNERS), twins


def sampling() -> tuple[Run, dict[str, Run | str]]:
    """Returns the audit of the sampling of a trainer's batches, and of its twins."""

    def audit(sampler: PoissonSampler) -> Run:
        trainer = dataclasses.replace(dp_sgd(SIGMA), sampler=sampler)
        return lambda trials, seed: audit_sampling(
            trainer, trials=trials, confidence=case.CONFIDENCE, seed=seed
        )

    public = SAMPLER.num_examples, SAMPLER.sampling_probability
    twins: dict[str, Run | str] = {
        case.HALF_THE_NOISE: "no noise is added to a batch",
        case.NO_CLIPPING: "who is in a batch has no norm",
        case.SENSITIVITY_OFF_BY_TWO: audit(TwiceAsOften(*public)),
        case.REUSED_KEY: audit(OneBatch(*public)),
        case.ADD_REMOVE_FOR_REPLACE_ONE: "an example and its replacement are sampled alike: the "
        "distance is q as well",
    }
    return audit(SAMPLER), twins


def _cases() -> Iterator[Case]:
    gaussian = "a Gaussian of multiplier {}, add/remove, given that the example is in the batch"
    proofs: dict[str, tuple[Callable[[float], PrivateTrainer], int, str]] = {
        "DP-SGD": (
            dp_sgd,
            1,
            "Abadi et al. 2016, Algorithm 1; Balle and Wang 2018; `jaxdp.finetune.dp_sgd`",
        ),
        "DP-SGD, exact noise": (
            dp_sgd_exact,
            1,
            "integers of norm at most 2^bits / sigma, and a Gaussian that is rounded: "
            "post-processing; `jaxdp.transforms.grids`, `jaxdp.transforms.noise.rounded`",
        ),
        "DP-SAT": (
            dp_sat,
            1,
            "the ascent follows the gradient released before (Park et al. 2023): post-processing; "
            "`jaxdp.finetune.dp_sgd`",
        ),
        "AdpAlloc": (
            adp_alloc,
            7,
            "the schedule of the noise is public (Yu et al. 2019, section V); "
            "`jaxdp.finetune.adp_alloc`",
        ),
        "DP-SGD by parts": (
            dp_sgd_by_parts,
            1,
            "a term has norm at most sqrt(sum_k C_k^2) (McMahan et al. 2018, section 3.1); "
            "`jaxdp.transforms.clip_parts`",
        ),
        "AdpClip by parts": (
            adp_clip_by_parts,
            1,
            "gradient and all counts are one Gaussian (Andrew et al. 2021, Theorem 1); "
            "`jaxdp.finetune.adp_clip`",
        ),
        "AdpAlloc, exact noise": (
            adp_alloc_exact,
            7,
            "as DP-SGD with exact noise, on a public grid for each step; `jaxdp.transforms.grids`",
        ),
        "AdpClip, exact noise": (
            functools.partial(adp_clip, exact=True),
            1,
            "gradient and count are one vector of integers; `jaxdp.transforms.grids`",
        ),
        "SlaClip, exact noise": (
            functools.partial(sla_clip, exact=True),
            1,
            "gradient and slots are one vector of integers; `jaxdp.transforms.grids`",
        ),
        "GEP, exact noise": (
            functools.partial(gep, exact=True),
            1,
            "embedding and residual are one vector of integers; `jaxdp.transforms.grids`",
        ),
        "AdpClip": (
            adp_clip,
            1,
            "gradient and count are one Gaussian (Andrew et al. 2021, Theorem 1); "
            "`jaxdp.finetune.adp_clip`",
        ),
        "SlaClip": (
            sla_clip,
            1,
            "a clipped gradient and its slots have norm at most C_t (Zou et al. 2026); "
            "`jaxdp.finetune.sla_clip`",
        ),
        "GEP": (
            gep,
            1,
            "embedding and residual are one Gaussian on one sample (Yu et al. 2021, Algorithm 1); "
            "`jaxdp.finetune.gep`",
        ),
    }
    for mechanism, (make, step, proof) in proofs.items():
        multiplier = make(SIGMA).privatizer.event_at(step).noise_multiplier
        run, twins = steps(make, step=step)
        yield Case(
            mechanism, f"step {step}: {gaussian.format(f'{multiplier:.4g}')}", proof, run, twins
        )
    run, twins = steps(dp_sgd_of_patients, source=PATIENTS)
    yield Case(
        "DP-SGD of patients",
        "step 1: a Gaussian of multiplier 1, add/remove of a patient with 4 records in the batch",
        "the gradient of a patient's mean loss is clipped once; `jaxdp.data.groups`, "
        "`jaxdp.finetune.dp_sgd`",
        run,
        twins,
    )
    run, twins = of_owners()
    yield Case(
        "DP-SGD of owners",
        "step 1: a Gaussian of multiplier 1, zero-out of a receiver with 4 messages in the batch",
        "four clipped gradients move the sum by at most 4 C (Ganesh et al. 2025); "
        "`jaxdp.data.owners`, `jaxdp.privacy.OwnedGaussianDpEvent`",
        run,
        twins,
    )
    run, twins = sampling()
    q = SAMPLER.sampling_probability
    yield Case(
        "Poisson sampling",
        f"a batch shown in the clear is (0, {q:g})-DP, add/remove",
        "the total variation distance of the batches is q; `jaxdp.audit.finetune.audit_sampling`",
        run,
        twins,
    )


CASES = tuple(_cases())
