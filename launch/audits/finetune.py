"""Audits of private training: the Gaussian of a step of every algorithm, and the sampling of
batches.

The loss is linear, so the gradient of an example is the example. An example has two tensors of
random entries. Its norm is a hundred times the clip norm.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import finetune
from jaxdp.audit import Audit
from jaxdp.audit.finetune import audit_sampling, audit_step
from jaxdp.data import (
    Examples,
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
from jaxdp.privacy import DpEvent, GaussianDpEvent
from jaxdp.privacy.accounting import Adjacency
from jaxdp.release import claim
from jaxdp.transforms.noise import Privatizer, PrivatizeState

from . import case, inputs
from .case import Audits, Case, Run, standard_twins, under

DELTA = 1e-5
CLIP = 0.5
SIGMA = 1.0
SAMPLER = PoissonSampler(100, 0.2)
FAR = 1e4  # times the clip norm: what a forgotten clip lets through

_random = np.random.default_rng(0)


def _twelve(length: float) -> Examples:
    """Returns twelve random examples of about this many clip norms."""
    gradients = length * CLIP * _random.normal(size=(12, 12))
    return from_arrays(features=gradients, label=np.zeros(12, int), num_classes=2)


EXAMPLES = _twelve(100)
# Gradients far below the clip norm.
SHORT = _twelve(1e-3)
# Each of the twelve is a patient with four records, three of them in its own direction. The
# identifiers are those that numbers would merge, such as "007" and "7", in all their spellings.
RECORDS = 4
_people: list[Any] = []
_rows: list[int] = []
for _patient, _spellings in enumerate(inputs.PEOPLE[:12]):
    _spelled = itertools.cycle(_spellings)
    _people += itertools.islice(_spelled, RECORDS)
    _rows += [0] + [_patient] * (RECORDS - 1)
PATIENTS = by_group(take(EXAMPLES, np.array(_rows)), _people, max_records=RECORDS)
# Each of the twelve is eight messages to one receiver, each of its own sender. The receiver is
# named second, and four of the messages count.
MESSAGES = 2 * RECORDS
_messages = take(EXAMPLES, np.repeat(np.arange(12), MESSAGES))
SENDERS: list[list[str]] = []
PAIRS: list[list[str]] = []
for _row in range(len(_messages)):
    _sender = f"sender {_row}"
    SENDERS.append([_sender])
    PAIRS.append([_sender, f"receiver {_row // MESSAGES}"])
OF_OWNERS = by_owners(_messages, PAIRS, max_records=RECORDS)
PARAMS = {"first": jnp.zeros(4), "second": jnp.zeros(8)}
COMMON: dict[str, Any] = {"sampler": SAMPLER, "clip_norm": CLIP, "physical_batch_size": 4}

# Two equal norms, whose total is CLIP. The noise for the larger one alone would be too small.
_PART = CLIP / 2**0.5
PARTS = {"first": _PART, "second": _PART}

Make = Callable[[float], PrivateTrainer]


def loss(params: Mapping[str, jax.Array], example: Mapping[str, jax.Array]) -> jax.Array:
    """Returns a loss whose gradient is the example."""
    weights = jnp.concatenate([params["first"], params["second"]])
    return jnp.vdot(weights, example["features"])


# --- The trainers, by their noise multiplier ----------------------------------------------------


def _made_by(method: Callable[..., PrivateTrainer], sigma: float, **own: Any) -> PrivateTrainer:
    """Returns a trainer of a method, with its own options and the common ones."""
    options = COMMON | own
    return method(loss, optax.sgd(0.1), noise_multiplier=sigma, **options)


def dp_sgd(sigma: float, **own: Any) -> PrivateTrainer:
    return _made_by(finetune.dp_sgd, sigma, **own)


def dp_sgd_of_owners(sigma: float) -> PrivateTrainer:
    return dp_sgd(RECORDS * sigma, unit="person", sampler=OF_OWNERS.sampler(0.2))


def adp_alloc(sigma: float, **changes: Any) -> PrivateTrainer:
    schedule = finetune.exponential_noise(0.1)
    return _made_by(finetune.adp_alloc, sigma, schedule=schedule, **changes)


def adp_alloc_exact(sigma: float) -> PrivateTrainer:
    return adp_alloc(sigma, exact=True).planned(8)


def adp_clip(sigma: float, **changes: Any) -> PrivateTrainer:
    return _made_by(finetune.adp_clip, sigma, count_noise=2.0, **changes)


def sla_clip(sigma: float, **changes: Any) -> PrivateTrainer:
    return _made_by(finetune.sla_clip, sigma, slots=4, **changes)


def gep(sigma: float, **changes: Any) -> PrivateTrainer:
    return _made_by(
        finetune.gep,
        sigma,
        anchors=EXAMPLES.gather(np.arange(6, 12)),
        basis_size=4,
        groups=1,
        residual_clip_norm=CLIP,
        **changes,
    )


# --- Their broken twins -------------------------------------------------------------------------


class UnclippedSum(GradientSum):
    """DP-SGD that sums raw gradients."""

    def sums(self, params: Any, carried: Any, batch: Any, mask: Any, key: Any) -> QuerySums:
        of_examples = self.gradient.per_example(params, batch, mask)
        total = jax.tree.map(lambda g: g.sum(0), of_examples.grads)
        if self.grid is not None:
            length = self.grid.step
            steps = jax.tree.map(lambda g: g / length, total)
            total = jax.tree.map(lambda g: g.astype(jnp.int32), steps)
        return QuerySums(total, of_examples.nonfinite)


def _out_of_reach(kind: type) -> type:
    """Returns AdpClip's or SlaClip's query with a clip norm that no gradient reaches.

    It still divides by the honest clip norm.
    """

    class Unclipped(kind):
        def sums(self, params: Any, carried: Any, *batch: Any) -> QuerySums:
            total, dropped = super().sums(params, FAR * carried, *batch)
            total = total._replace(grads=_times(FAR, total.grads))
            return QuerySums(total, dropped)

    return Unclipped


class LargeSlots(SlackClipping):
    """SlaClip whose slots have the capacity of the clip norm, not its K-th root of squares."""

    def filled(self, norms: jax.Array, clip_norm: jax.Array) -> jax.Array:
        return super().filled(norms, clip_norm) * self.slots**0.5


class UnclippedEmbedding(GradientEmbedding):
    """GEP with clip norms that no gradient reaches. It still divides by the honest clip norms."""

    def sums(self, *batch: Any) -> QuerySums:
        fields = _fields(self)
        clip_norm = FAR * self.gradient.clip_norm
        fields["gradient"] = dataclasses.replace(self.gradient, clip_norm=clip_norm)
        fields["residual_clip_norm"] = FAR * self.residual_clip_norm
        sums = GradientEmbedding(**fields).sums(*batch)
        return sums._replace(total=_times(FAR, sums.total))


def _times(factor: float, tree: Any) -> Any:
    """Returns numbers times a factor, integers as integers."""
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), tree)


UNCLIPPED: Mapping[type, type] = {
    GradientSum: UnclippedSum,
    QuantileClipping: _out_of_reach(QuantileClipping),
    SlackClipping: _out_of_reach(SlackClipping),
    GradientEmbedding: UnclippedEmbedding,
}


class ClippedPerRecord(GradientSum):
    """DP-SGD that clips each record of a patient and sums them, sold as protection of patients."""

    def sums(self, params: Any, carried: Any, batch: Any, mask: Any, key: Any) -> QuerySums:
        records = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        by_record = dataclasses.replace(self.gradient, group=False)
        out = by_record(params, records, mask.reshape(-1), key=key)
        return QuerySums.of(out.grads, out)


def unclipped(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns the trainer without its clip but with the same noise."""
    honest = trainer.query
    query = UNCLIPPED[type(honest)](**_fields(honest))
    return dataclasses.replace(trainer, query=query)


def doubled(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns a trainer each of whose examples contributes twice the sensitivity that the noise is
    made for.
    """

    def part_sum(*args: Any) -> QuerySums:
        sums = trainer.part_sum(*args)
        return sums._replace(total=_times(2, sums.total))

    return _with_sums_of(trainer, dataclasses.replace(trainer), part_sum=part_sum)


def _with_sums_of(honest: PrivateTrainer, twin: PrivateTrainer, **functions: Any) -> PrivateTrainer:
    """Returns a twin that shares the compiled sums of the honest trainer, but for some functions.

    A trainer compiles its own sums. Those of a twin with other noise are the same.
    """
    shared = {name: getattr(honest, name) for name in ("zeros", "part_sum", "add")}
    for name, function in (shared | functions).items():
        object.__setattr__(twin, name, function)
    return twin


def with_one_key(trainer: PrivateTrainer) -> PrivateTrainer:
    """Returns a trainer that draws the noise of every run from one key."""
    return _with_noise(trainer, lambda state: state._replace(key=case.one_key(state.key)))


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
    return _with_sums_of(trainer, dataclasses.replace(trainer, privatizer=broken))


class TwiceAsOften(PoissonSampler):
    """A sampler that draws every example with twice the declared probability."""

    def batch(self, step: int) -> np.ndarray:
        often = 2 * self.sampling_probability
        sampler = PoissonSampler(self.num_examples, often, seed=self.seed)
        return sampler.batch(step)


class OneBatch(PoissonSampler):
    """A sampler that draws the batch of every step from one key."""

    def batch(self, step: int) -> np.ndarray:
        return super().batch(0)


def _fields(query: Any) -> dict[str, Any]:
    return {field.name: getattr(query, field.name) for field in dataclasses.fields(query)}


# --- The cases ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The audit of a step of a trainer. It is a `case.Run`.

    Attributes:
      source, rows: The examples, and those of them that may be the canary.
      step: Its number.
      adjacency: The relation of the two data sets.
      claimed: The claim of the honest trainer, for a twin. None means the trainer's own.
    """

    trainer: PrivateTrainer
    source: Any = EXAMPLES
    rows: Any = range(6)
    step: int = 1
    adjacency: Adjacency = "add_remove"
    claimed: float | None = None

    def __call__(self, trials: int, seed: bytes) -> Audit:
        audit = audit_step(
            self.trainer,
            PARAMS,
            self.source,
            rows=self.rows,
            step=self.step,
            adjacency=self.adjacency,
            trials=trials,
            delta=DELTA,
            confidence=case.CONFIDENCE,
            seed=seed,
        )
        if self.claimed is None:
            return audit
        return under(audit, self.claimed)

    def broken(self, event: DpEvent) -> Callable[..., "Step"]:
        """Returns `twin(**changes) -> Step` under the claim of an event, add/remove."""
        claimed = claim(event, adjacency="add_remove", delta=DELTA)
        return functools.partial(dataclasses.replace, self, claimed=claimed)


def _standard(twin: Callable[..., Step], honest: PrivateTrainer, half: PrivateTrainer) -> Any:
    """Returns the standard twins of a trainer. `half` has half of its noise."""
    return standard_twins(
        half_the_noise=twin(trainer=half),
        no_clipping=twin(trainer=unclipped(honest)),
        sensitivity_off_by_two=twin(trainer=doubled(honest)),
        reused_key=twin(trainer=with_one_key(honest)),
        add_remove_for_replace_one=twin(adjacency="replace_one"),
    )


def steps(make: Make, *, step: int = 1, source: Source = EXAMPLES) -> Audits:
    """Returns the audit of a step of a trainer, and of its twins."""
    honest = make(SIGMA)
    run = Step(trainer=honest, source=source, step=step)
    twin = run.broken(honest.privatizer.event_at(step))
    twins = _standard(twin, honest, make(SIGMA / 2))
    twins["the noise of the step before"] = twin(trainer=with_noise_used_twice(honest))
    gradient = honest.query.gradient
    if gradient.patterns is not None:
        least = max(gradient.clip_norms) / gradient.sensitivity()
        twins["noise for the largest part"] = twin(trainer=make(SIGMA * least))
    if isinstance(honest.query, SlackClipping):
        large = dataclasses.replace(honest, query=LargeSlots(**_fields(honest.query)))
        twins["slots of the clip norm each"] = twin(trainer=large, source=SHORT)
        if honest.query.grids is not None:
            twins["slots of the clip norm each"] = (
                "an example that is too long counts as zero, by a check of integers"
            )
    if honest.group:
        per_record = dataclasses.replace(honest, query=ClippedPerRecord(gradient=gradient))
        twins["a clip per record, sold as per patient"] = twin(trainer=per_record)
    return run, twins


def of_owners() -> Audits:
    """Returns the audit of a step with all records of an owner, and of its twins."""

    def of_receivers(source: Owners) -> dict[str, Any]:
        """Returns a source with the messages of each receiver that may be the canary."""
        receivers = source.rows // MESSAGES
        rows = [np.flatnonzero(receivers == receiver) for receiver in range(6)]
        return {"source": source, "rows": rows}

    honest = dp_sgd_of_owners(SIGMA)
    run = Step(trainer=honest, **of_receivers(OF_OWNERS))
    twin = run.broken(GaussianDpEvent(SIGMA))
    twins = _standard(twin, honest, dp_sgd_of_owners(SIGMA / 2))
    of_one_record = dp_sgd_of_owners(SIGMA / RECORDS)
    twins["noise for one record, sold as for four"] = twin(trainer=of_one_record)
    # The receiver owns nothing here, so that all eight messages count.
    first_only = by_owners(_messages, SENDERS, max_records=RECORDS)
    twins["a bound for the first owner only"] = twin(**of_receivers(first_only))
    return run, twins


def sampling() -> Audits:
    """Returns the audit of the sampling of a trainer's batches, and of its twins."""

    def audit(sampler: PoissonSampler) -> Run:
        trainer = dataclasses.replace(dp_sgd(SIGMA), sampler=sampler)
        return case.run_of(audit_sampling, trainer)

    public = SAMPLER.num_examples, SAMPLER.sampling_probability
    twins = standard_twins(
        half_the_noise="no noise is added to a batch",
        no_clipping="who is in a batch has no norm",
        sensitivity_off_by_two=audit(TwiceAsOften(*public)),
        reused_key=audit(OneBatch(*public)),
        add_remove_for_replace_one="an example and its replacement are sampled alike: the "
        "distance is q as well",
    )
    return audit(SAMPLER), twins


class _Method(NamedTuple):
    """A trainer by its noise multiplier, the step that is audited, and the proof."""

    make: Make
    proof: str
    step: int = 1


METHODS: Mapping[str, _Method] = {
    "DP-SGD": _Method(
        dp_sgd, "Abadi et al. 2016, Algorithm 1; Balle and Wang 2018; `jaxdp.finetune.dp_sgd`"
    ),
    "DP-SGD, exact noise": _Method(
        functools.partial(dp_sgd, exact=True),
        "integers of norm at most 2^bits / sigma, and a Gaussian that is rounded: "
        "post-processing; `jaxdp.transforms.grids`, `jaxdp.transforms.noise.rounded`",
    ),
    "DP-SAT": _Method(
        functools.partial(dp_sgd, ascent_radius=0.05),
        "the ascent follows the gradient released before (Park et al. 2023): post-processing; "
        "`jaxdp.finetune.dp_sgd`",
    ),
    "AdpAlloc": _Method(
        adp_alloc,
        "the schedule of the noise is public (Yu et al. 2019, section V); "
        "`jaxdp.finetune.adp_alloc`",
        step=7,
    ),
    "DP-SGD by parts": _Method(
        functools.partial(dp_sgd, clip_norm=PARTS),
        "a term has norm at most sqrt(sum_k C_k^2) (McMahan et al. 2018, section 3.1); "
        "`jaxdp.transforms.clip_parts`",
    ),
    "AdpClip by parts": _Method(
        functools.partial(adp_clip, clip_norm=PARTS),
        "gradient and all counts are one Gaussian (Andrew et al. 2021, Theorem 1); "
        "`jaxdp.finetune.adp_clip`",
    ),
    "AdpClip": _Method(
        adp_clip,
        "gradient and count are one Gaussian (Andrew et al. 2021, Theorem 1); "
        "`jaxdp.finetune.adp_clip`",
    ),
    "SlaClip": _Method(
        sla_clip,
        "a clipped gradient and its slots have norm at most C_t (Zou et al. 2026); "
        "`jaxdp.finetune.sla_clip`",
    ),
    "GEP": _Method(
        gep,
        "embedding and residual are one Gaussian on one sample (Yu et al. 2021, Algorithm 1); "
        "`jaxdp.finetune.gep`",
    ),
    "AdpAlloc, exact noise": _Method(
        adp_alloc_exact,
        "as DP-SGD with exact noise, on a public grid for each step; `jaxdp.transforms.grids`",
        step=7,
    ),
    "AdpClip, exact noise": _Method(
        functools.partial(adp_clip, exact=True),
        "gradient and count are one vector of integers; `jaxdp.transforms.grids`",
    ),
    "SlaClip, exact noise": _Method(
        functools.partial(sla_clip, exact=True),
        "gradient and slots are one vector of integers; `jaxdp.transforms.grids`",
    ),
    "GEP, exact noise": _Method(
        functools.partial(gep, exact=True),
        "embedding and residual are one vector of integers; `jaxdp.transforms.grids`",
    ),
}


def _cases() -> Iterator[Case]:
    gaussian = "a Gaussian of multiplier {:.4g}, add/remove, given that the example is in the batch"
    for mechanism, (make, proof, step) in METHODS.items():
        event = make(SIGMA).privatizer.event_at(step)
        claimed = f"step {step}: {gaussian.format(event.noise_multiplier)}"
        run, twins = steps(make, step=step)
        yield Case(mechanism, claimed, proof, run, twins)
    of_patients = functools.partial(dp_sgd, group=True, unit="patient")
    run, twins = steps(of_patients, source=PATIENTS)
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
