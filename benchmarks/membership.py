"""The utility of every private stage beside the success of attacks on membership, on the digits of
scikit-learn.

    python -m benchmarks run membership --update

Fine-tuning is attacked through its final model only, by LiRA (Carlini et al. 2022,
arXiv:2112.03570) with shadow models and with wrongly labelled records as canaries. The other stages
are attacked by their canary audits. `python -m benchmarks.evidence results/membership.md` writes
the tables and the picture of the page."""

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special, stats

import jaxdp
from benchmarks import timing
from jaxdp import audit, finetune, prediction, recalibration, split, tta
from jaxdp.audit.prediction import audit_answers
from jaxdp.audit.recalibration import audit_source
from jaxdp.audit.split import audit_upload
from jaxdp.audit.tta import audit_stream
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.privacy import GaussianDpEvent, calibrate_noise
from jaxdp.report import plot_curves

EPSILONS = (1.0, 4.0)
DELTA, CONFIDENCE = 1e-5, 0.95
RECORDS, CANARIES, STEPS, CLIP, FAR = 400, 20, 10, 0.1, 1e4


def digits() -> tuple[Any, Any]:
    """Returns the images [n, 64] and labels of all digits in a random order."""
    whole = jaxdp.data.bundled("digits")
    rows = whole.gather(np.random.default_rng(0).permutation(len(whole)))
    return rows["image"].reshape(len(whole), -1), rows["label"]


def row(
    stage: str, epsilon: float, metric: str, utility: float, result: Any, **more: Any
) -> dict[str, Any]:
    """Returns a row of the table: a claim, what it is worth, and what an attack proves about it."""
    return {
        "stage": stage,
        "epsilon": epsilon,
        "metric": metric,
        "utility": utility,
        **{
            name: getattr(result, name)
            for name in ("lower", "ceiling", "verdict", "trials", "upper")
        },
        **more,
    }


# --- Fine-tuning --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A linear head on random features, with some labels that are wrong. Records [n, d], test
    records and labels."""

    features: np.ndarray
    label: np.ndarray
    test: np.ndarray
    test_label: np.ndarray

    @classmethod
    def make(cls) -> "Task":
        images, labels = digits()
        random = np.random.default_rng(1)
        features = np.maximum(images @ random.normal(size=(64, 256)) / 4, 0)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        label = labels[:RECORDS].copy()
        label[:CANARIES] = (label[:CANARIES] + random.integers(1, 10, CANARIES)) % 10
        return cls(
            features[:RECORDS].astype(np.float32),
            label,
            features[-800:].astype(np.float32),
            labels[-800:],
        )

    def logits(self, params: Any) -> np.ndarray:
        """Returns log p / (1 - p) of the label of each record, the statistic of LiRA."""
        logits = self.features @ np.asarray(params["w"])
        own = np.eye(10, dtype=bool)[self.label]
        return logits[own] - special.logsumexp(np.where(own, -np.inf, logits), axis=1)

    def accuracy(self, params: Any) -> float:
        return float(np.mean((self.test @ np.asarray(params["w"])).argmax(1) == self.test_label))

    def without(self, present: np.ndarray) -> Any:
        """Returns the records. An absent one has no features, and so no gradient."""
        return from_arrays(
            features=self.features * present[:, None], label=self.label, num_classes=10
        )


def loss(params: Any, record: Any) -> jax.Array:
    return jaxdp.losses.softmax_cross_entropy(record["features"] @ params["w"], record["label"])


def shadows(
    task: Task, models: int, sigma: float, *, clip: float = CLIP
) -> tuple[np.ndarray, np.ndarray, float]:
    """Trains a model on each of many random halves. Returns presence and LiRA's statistics [models,
    n], and accuracy.

    The noise has the standard deviation sigma CLIP, whatever the clip norm. A sigma of 0 trains to
    convergence."""
    present = np.random.default_rng(2).random((models, RECORDS)) < 0.5
    start = {"w": jnp.zeros((task.features.shape[1], 10))}
    if sigma == 0:
        trained = [{"w": w} for w in np.asarray(memorised(task, present))]
    else:
        trainer = finetune.dp_sgd(
            loss,
            optax.sgd(40.0, momentum=0.9),
            sampler=PoissonSampler(RECORDS, 1.0),
            clip_norm=clip,
            noise_multiplier=sigma * CLIP / clip,
            physical_batch_size=RECORDS,
        )
        trained = []
        for here in present:
            state, source = trainer.init(start), task.without(here)
            for _ in range(STEPS):
                state, _ = trainer.step(state, source)
            trained.append(jax.device_get(state.params))
    scores = np.stack([task.logits(params) for params in trained])
    return present, scores, float(np.mean([task.accuracy(params) for params in trained]))


@functools.partial(jax.jit, static_argnums=0)
def memorised(task: Task, present: jax.Array) -> jax.Array:
    """Returns the weights [models, d, 10] after 500 steps of gradient descent without privacy."""
    optimizer = optax.sgd(20.0, momentum=0.9)

    def one(here: jax.Array) -> jax.Array:
        def mean_loss(w: jax.Array) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                jnp.asarray(task.features) @ w, task.label
            )
            return jnp.mean(losses, where=here)

        def step(_: int, carried: Any) -> Any:
            updates, state = optimizer.update(jax.grad(mean_loss)(carried[0]), carried[1])
            return optax.apply_updates(carried[0], updates), state

        start = jnp.zeros((task.features.shape[1], 10))
        return jax.lax.fori_loop(0, 500, step, (start, optimizer.init(start)))[0]

    return jax.lax.map(one, present)


def lira(present: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Returns the log likelihood ratio of presence [models, n]. The other models are the shadows of
    each model."""
    ratio = np.zeros_like(scores)
    for kind, sign in ((present, 1), (~present, -1)):
        count = kind.sum(0) - kind  # without the attacked model
        mean = ((kind * scores).sum(0) - kind * scores) / count
        square = ((kind * scores**2).sum(0) - kind * scores**2) / count
        ratio += sign * stats.norm.logpdf(scores, mean, np.sqrt(np.maximum(square - mean**2, 1e-6)))
    return ratio


def success(present: np.ndarray, ratio: np.ndarray) -> dict[str, float]:
    """Returns the AUC, and the share of members that are found at 1 % false positives."""
    inside, outside = ratio[present], np.sort(ratio[~present])
    ranks = np.searchsorted(outside, inside, "left") + np.searchsorted(outside, inside, "right")
    share_found = float(np.mean(inside > np.quantile(outside, 0.99)))
    return {"auc": float(ranks.mean() / 2 / len(outside)), "tpr_at_1": share_found}


def proved(present: np.ndarray, scores: np.ndarray, upper: float) -> Any:
    """Audits the most exposed canary of the first half of the models on the second half."""
    half = len(scores) // 2
    here, seen = present[:half, :CANARIES], scores[:half, :CANARIES]
    gaps = [np.mean(s[h]) - np.mean(s[~h]) for h, s in zip(here.T, seen.T, strict=True)]
    exposed = int(np.argmax(np.array(gaps) / seen.std(0)))
    here, seen = present[half:, exposed], scores[half:, exposed]
    how: dict[str, Any] = {"delta": DELTA, "confidence": CONFIDENCE, "claim": "gaussian"}
    return audit.multi_run(seen[here], seen[~here], upper=upper, **how)


def fine_tuning(models: int) -> list[dict[str, Any]]:
    """Returns the rows of DP-SGD, without privacy first."""
    task, rows = Task.make(), []

    def attacked(
        epsilon: float, claimed: float, sigma: float, clip: float = CLIP
    ) -> tuple[Any, Any, float]:
        present, scores, accuracy = shadows(task, models, sigma, clip=clip)
        ratio = lira(present, scores)
        measured = {
            "all": success(present[:, CANARIES:], ratio[:, CANARIES:]),
            "canaries": success(present[:, :CANARIES], ratio[:, :CANARIES]),
        }
        return proved(present, scores, claimed), measured, accuracy

    for epsilon in (math.inf, *reversed(EPSILONS)):
        sigma = 0.0
        if epsilon < math.inf:
            sigma = calibrate_noise(
                lambda s: jaxdp.privacy.SelfComposedDpEvent(GaussianDpEvent(s), STEPS),
                epsilon=epsilon,
                delta=DELTA,
            )
        result, measured, accuracy = attacked(epsilon, epsilon, sigma, CLIP if sigma else FAR)
        twin: dict[str, Any] = {}
        if sigma:
            broken, seen, _ = attacked(epsilon, epsilon, sigma, FAR * CLIP)
            twin = {
                "twin": "no clipping",
                "twin_lower": broken.lower,
                "twin_verdict": broken.verdict,
                "twin_lira": seen,
            }
        rows.append(
            row("fine-tuning, DP-SGD", epsilon, "accuracy", accuracy, result, lira=measured, **twin)
        )
    return rows


# --- The other stages ---------------------------------------------------------------------------


def twin(name: str, result: Any, upper: float) -> dict[str, Any]:
    """Returns the columns of a broken twin, under the claim of the honest mechanism."""
    broken = dataclasses.replace(result, upper=upper)
    return {"twin": name, "twin_lower": broken.lower, "twin_verdict": broken.verdict}


def calibration(trials: int) -> list[dict[str, Any]]:
    """Returns the rows of Acc-T: the calibration error on records that nobody asked, and the attack
    on an answer."""
    random, rows = np.random.default_rng(0), []
    logits = random.normal(size=(4000, 10)).astype(np.float32)
    labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
    shown = 3 * logits  # over-confident
    mine, test = slice(0, 2000), slice(2000, None)
    right = labels[test] == logits[test].argmax(1)
    for epsilon in (math.inf, *reversed(EPSILONS)):
        errors = []
        for _ in range(5):
            ledger = jaxdp.Ledger.in_memory()
            ledger.register("site", adjacency="add_remove", unit="record")
            party = recalibration.Party(shown[mine], labels[mine], account=ledger.account("site"))
            recalibrated = recalibration.acc_t(
                [party], epsilon=epsilon, search="bisection", bracket=(0.5, 16.0)
            )
            errors.append(float(recalibration.ece(recalibrated.apply(shown[test]), right)))
        if epsilon == math.inf:
            rows.append({"stage": "recalibration, Acc-T", "epsilon": epsilon, "metric": "ECE"})
            rows[-1] |= {"utility": float(np.mean(errors))}
            continue
        how: dict[str, Any] = {
            "trials": trials,
            "confidence": CONFIDENCE,
            "adjacency": "add_remove",
        }
        attack = functools.partial(
            audit_source, recalibration.AccT(), shown[:50], labels[:50], **how
        )
        honest = attack(epsilon=epsilon)
        rows.append(
            row(
                "recalibration, Acc-T",
                epsilon,
                "ECE",
                float(np.mean(errors)),
                honest,
                **twin("a quarter of the noise", attack(epsilon=4 * epsilon), honest.upper),
            )
        )
    return rows


def answers(trials: int) -> list[dict[str, Any]]:
    """Returns the rows of private prediction: accuracy of answers at an epsilon each, and the
    attack on one answer."""
    images, labels = digits()
    binary = (labels >= 5).astype(np.int32)
    mean = images[:800].mean(0)
    _, _, axes = np.linalg.svd(images[:800] - mean, full_matrices=False)
    x = ((images - mean) @ axes[:16].T).astype(np.float32)
    x /= np.abs(x).max()
    private, test = slice(800, 1300), slice(1300, None)
    rows = []

    def loss_fn(params: Any, record: Any) -> jax.Array:
        return jaxdp.losses.sigmoid_cross_entropy(params @ record["x"], record["y"])

    def trained(records: Any, clip: float = 0.1) -> Any:
        start, how = jnp.zeros(16), {"learning_rate": 30.0, "batch_size": 500, "epochs": 4}
        return prediction.train_with_bounds(loss_fn, start, records, ks=10, clip=clip, **how)

    records = {"x": x[private], "y": binary[private].astype(np.float32)}
    apply_fn = lambda params, query: params @ query  # noqa: E731
    model = trained(records)
    plain = float(np.mean((x[test] @ np.asarray(model.params) > 0) == binary[test]))
    rows.append(
        {"stage": "private prediction", "epsilon": math.inf, "metric": "accuracy", "utility": plain}
    )
    # The query is where the model is least sure, so that a record can move its answer.
    margin = np.abs(x[test] @ np.asarray(model.params))
    query = x[test][np.argmin(margin)]
    candidates = {"x": np.stack([4 * query, -4 * query]), "y": np.ones(2, np.float32)}
    for epsilon in reversed(EPSILONS):
        each = epsilon / 8

        def ask(data: Any, queries: Any, spent: float = each, **terms: Any) -> np.ndarray:
            return prediction.private_predict(
                trained(data), apply_fn, queries, epsilon=spent, **terms
            )

        ledger = jaxdp.Ledger.in_memory()
        ledger.register("digits", adjacency="add_remove", unit="record")
        predicted = prediction.private_predict(
            model, apply_fn, x[test], epsilon=each, account=ledger.account("digits")
        )
        how: dict[str, Any] = {"trials": trials, "confidence": CONFIDENCE}
        attack = functools.partial(
            audit_answers, query=query, data=records, candidates=candidates, **how
        )
        honest = attack(ask, prediction.event(1, epsilon=each))
        broken = attack(
            functools.partial(ask, spent=4 * each), prediction.event(1, epsilon=4 * each)
        )
        utility = float(np.mean(predicted == binary[test]))
        more = twin("a quarter of the noise", broken, honest.upper)
        rows.append(row("private prediction", each, "accuracy", utility, honest, **more))
    return rows


def uploads(trials: int) -> list[dict[str, Any]]:
    """Returns the rows of the private upload of Split Adaptation: a nearest class mean, and the
    attack on features."""
    images, labels = digits()
    x = images.reshape(-1, 8, 8).astype(np.float32)
    public, private, test = slice(0, 400), slice(400, 1300), slice(1300, None)
    projection = split.public_projection(x[public], 8)
    exact = split.PrivateRelease(
        clip_norm=1e3, noise_multiplier=0.0, label_epsilon=math.inf, num_classes=10
    )
    coordinates = np.asarray(
        exact.release(_key(0), x, labels=labels, projection=projection).features
    )
    clip = float(np.median(np.linalg.norm(coordinates[public], axis=1)))
    rows = []
    for epsilon in (math.inf, *reversed(EPSILONS)):
        release = split.PrivateRelease.calibrated(
            epsilon=epsilon, delta=DELTA, clip_norm=clip, num_classes=10
        )
        sent = release.release(_key(1), x[private], labels=labels[private], projection=projection)
        sent_features, released_labels = np.asarray(sent.features), np.asarray(sent.labels)
        means = np.stack([sent_features[released_labels == c].mean(0) for c in range(10)])
        near = np.square(coordinates[test][:, None] - means).sum(-1).argmin(1)
        utility = float(np.mean(near == labels[test]))
        if epsilon == math.inf:
            rows.append(
                {
                    "stage": "split, private upload",
                    "epsilon": epsilon,
                    "metric": "accuracy",
                    "utility": utility,
                }
            )
            continue
        terms: dict[str, Any] = {
            "projection": projection,
            "part": "features",
            "delta": DELTA,
            "confidence": CONFIDENCE,
        }
        attack = functools.partial(
            audit_upload, representations=x[public], labels=labels[public], trials=trials, **terms
        )
        honest = attack(release)
        half = dataclasses.replace(release, noise_multiplier=release.noise_multiplier / 2)
        more = twin("half the noise", attack(half), honest.upper)
        rows.append(
            row(
                "split, private upload",
                epsilon,
                "accuracy",
                utility,
                honest,
                part="features",
                **more,
            )
        )
    return rows


def _key(number: int) -> jax.Array:
    return jax.random.key(number, impl="threefry2x32")


class Net:
    """Two blocks of a dense layer and a LayerNorm."""

    @staticmethod
    def init() -> dict[str, Any]:
        random = np.random.default_rng(0)

        def make(*shape: int) -> jax.Array:
            values = random.normal(size=shape) / math.sqrt(shape[0])
            return jnp.asarray(values, jnp.float32)

        norms = {
            f"block_{i}": {"norm": {"scale": jnp.ones(48), "bias": jnp.zeros(48)}} for i in range(2)
        }
        return {"first": make(64, 48), "second": make(48, 48), "head": make(48, 10), **norms}

    @staticmethod
    def apply(params: Mapping[str, Any], images: jax.Array) -> jax.Array:
        h = images.reshape(len(images), -1)
        for block, layer in (("block_0", "first"), ("block_1", "second")):
            h = h @ params[layer]
            h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
            h = jax.nn.relu(
                h * params[block]["norm"]["scale"][None] + params[block]["norm"]["bias"][None]
            )
        return h @ params["head"]


def adaptation(trials: int) -> list[dict[str, Any]]:
    """Returns the rows of private Tent on digits with noise and less contrast, and the attack on
    one update."""
    images, labels = digits()
    images = images.astype(np.float32)
    source, stream = slice(0, 800), slice(800, 1760)

    def mean_loss(params: Any) -> jax.Array:
        logits = Net.apply(params, jnp.asarray(images[source]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[source]).mean()

    optimizer = optax.adam(1e-2)

    def step(_: int, carried: Any) -> Any:
        updates, state = optimizer.update(jax.grad(mean_loss)(carried[0]), carried[1])
        return optax.apply_updates(carried[0], updates), state

    start = Net.init()
    params, _ = jax.jit(lambda p: jax.lax.fori_loop(0, 150, step, (p, optimizer.init(p))))(start)
    shifted = np.clip(
        0.35 * images[stream] + np.random.default_rng(1).normal(0, 0.12, images[stream].shape), 0, 1
    )
    shifted, rows = shifted.astype(np.float32), []
    before = np.asarray(Net.apply(params, jnp.asarray(shifted))).argmax(1) == labels[stream]
    for epsilon in (math.inf, *reversed(EPSILONS)):
        method: Any = tta.Tent()
        if epsilon < math.inf:
            sigma = calibrate_noise(
                GaussianDpEvent, epsilon=epsilon, delta=DELTA, adjacency="replace_one"
            )
            method = tta.private(tta.Tent(), clip_norm=0.5, noise_multiplier=sigma)
        right = []
        for order in range(5):
            rows_ = np.random.default_rng(order).permutation(len(shifted))
            adapter = tta.Adapter(Net.apply, params, method, optax.sgd(0.3))
            state = adapter.init(_key(order)) if epsilon < math.inf else adapter.init()
            for part in rows_.reshape(-1, 96):
                state, logits = adapter.step(state, jnp.asarray(shifted[part]))
                right.append(np.mean(np.asarray(logits).argmax(1) == labels[stream][part]))
        utility = float(np.mean(right))
        if epsilon == math.inf:
            rows.append(
                {"stage": "test-time adaptation, Tent", "epsilon": epsilon, "metric": "accuracy"}
            )
            rows[-1] |= {"utility": utility, "before": float(before.mean())}
            continue

        def attack(noise: float) -> Any:
            private = tta.private(tta.Tent(), clip_norm=0.5, noise_multiplier=noise)
            adapter = tta.Adapter(Net.apply, params, private, optax.sgd(1.0))
            how: dict[str, Any] = {"trials": trials, "delta": DELTA, "confidence": CONFIDENCE}
            return audit_stream(adapter, shifted[:8], shifted[8:40], **how)

        honest = attack(sigma)
        more = twin("half the noise", attack(sigma / 2), honest.upper)
        rows.append(row("test-time adaptation, Tent", epsilon, "accuracy", utility, honest, **more))
    return rows


# --- The tables of the page ---------------------------------------------------------------------


def _number(value: Any) -> str:
    if value is None:
        return ""
    return "none" if value == math.inf else f"{value:.3g}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of docs/results/membership.md with a row per stage and epsilon."""
    header = ["stage", "epsilon", "utility", "proved", "ceiling", "verdict", "broken twin, proved"]
    lines = []
    for row in rows:
        utility = f"ECE {row['utility']:.3f}"
        if row["metric"] == "accuracy":
            utility = f"{100 * row['utility']:.1f} %"
        verdict = row.get("verdict", "") if row["epsilon"] < math.inf else ""
        twin = ""
        if "twin" in row:
            twin = f"{row['twin']}: {row['twin_lower']:.3g}, {row['twin_verdict']}"
        bounds = [_number(row.get("lower")), _number(row.get("ceiling"))]
        lines.append([row["stage"], _number(row["epsilon"]), utility, *bounds, verdict, twin])
    return timing.page_table(header, lines)


def lira_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of LiRA of docs/results/membership.md."""
    header = ["epsilon", "accuracy", "AUC", "found at 1 %"]
    header += ["AUC, canaries", "found at 1 %, canaries"]
    lines = []
    for row in rows:
        if "lira" in row:
            accuracy = f"{100 * row['utility']:.1f} %"
            lines.append([_number(row["epsilon"]), accuracy, *_success_cells(row["lira"])])
        if "twin_lira" in row:
            title = f"{row['epsilon']:g} sold, no clipping"
            lines.append([title, "", *_success_cells(row["twin_lira"])])
    return timing.page_table(header, lines)


def _success_cells(attack: Mapping[str, Any]) -> list[str]:
    pairs = itertools.product(("all", "canaries"), ("auc", "tpr_at_1"))
    return [f"{attack[records][measure]:.3f}" for records, measure in pairs]


def draw(report: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws which share of the claim of the attacked release each attack proves."""
    attacked = [row for row in report["rows"] if row["epsilon"] < math.inf]
    curves = {
        stage: sorted(
            (row["upper"], row["lower"] / row["upper"]) for row in attacked if row["stage"] == stage
        )
        for stage in dict.fromkeys(row["stage"] for row in attacked)
    }
    plot_curves(
        path,
        curves,
        title="What attacks prove about claims of epsilon",
        subtitle="digits; bounds with confidence 95 %",
        xlabel="claimed epsilon of the attacked release",
        ylabel="proved share of the claim",
        xscale="log",
        references={"the claim": 1.0},
    )


STAGES = {
    "fine-tuning": lambda options: fine_tuning(options.models),
    "adaptation": lambda options: adaptation(options.trials),
    "prediction": lambda options: answers(10 * options.trials),
    "recalibration": lambda options: calibration(4 * options.trials),
    "split": lambda options: uploads(20 * options.trials),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=int, default=256, help="shadow models per setting")
    parser.add_argument(
        "--trials",
        type=int,
        default=1000,
        help="trials of either kind of an audit, more for cheap ones",
    )
    parser.add_argument("--only", choices=STAGES, action="append", help="stages, by default all")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    rows, seconds = [], {}
    for name in flags.only or STAGES:
        began = time.process_time()
        rows += STAGES[name](flags)
        seconds[name] = round(time.process_time() - began)
        print(table(rows), seconds, sep="\n", flush=True)
    return {"models": flags.models, "trials": flags.trials, "cpu_seconds": seconds, "rows": rows}
