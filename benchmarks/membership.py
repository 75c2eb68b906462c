"""The utility of every private stage beside the success of attacks on membership, on the digits of
scikit-learn.

    python -m benchmarks run membership --update

Fine-tuning is attacked through its final model only, by LiRA (Carlini et al. 2022,
arXiv:2112.03570) with shadow models and with wrongly labelled records as canaries. The other stages
are attacked by their canary audits."""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special, stats
from sklearn import metrics

import jaxdp
from benchmarks import pages, problems, timing
from jaxdp import audit, finetune, prediction, recalibration, split, tta
from jaxdp.audit.prediction import audit_answers
from jaxdp.audit.recalibration import audit_source
from jaxdp.audit.split import audit_upload
from jaxdp.audit.tta import audit_stream
from jaxdp.data import PoissonSampler, from_arrays
from jaxdp.privacy import GaussianDpEvent, calibrate_noise
from jaxdp.report import plot_curves

EPSILONS = (math.inf, 4.0, 1.0)  # the first is without privacy
DELTA = 1e-5
CONFIDENCE = 0.95
RECORDS = 400
CANARIES = 20
STEPS = 10
CLIP = 0.1
FAR = 1e4  # times the clip norm: what a forgotten clip lets through


def digits() -> tuple:
    """Returns the images [n, 64] and labels of all digits in a random order."""
    whole = jaxdp.data.bundled("digits")
    order = np.random.default_rng(0).permutation(len(whole))
    rows = whole.gather(order)
    return rows["image"].reshape(len(whole), -1), rows["label"]


def worth(stage: str, epsilon: float, utility: float, metric: str = "accuracy") -> dict:
    """Returns the first columns of a row of the table: a claim, and what it is worth."""
    return {"stage": stage, "epsilon": epsilon, "metric": metric, "utility": utility}


def proof(result) -> dict:
    """Returns the columns of what an attack proves about a claim."""
    names = ("lower", "ceiling", "verdict", "trials", "upper")
    return {name: getattr(result, name) for name in names}


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
        directions = random.normal(size=(64, 256))
        features = np.maximum(images @ directions / 4, 0)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        features = features.astype(np.float32)
        label = labels[:RECORDS].copy()
        wrong = random.integers(1, 10, CANARIES)
        label[:CANARIES] = (label[:CANARIES] + wrong) % 10
        return cls(features[:RECORDS], label, features[-800:], labels[-800:])

    def logits(self, params) -> np.ndarray:
        """Returns log p / (1 - p) of the label of each record, the statistic of LiRA."""
        logits = self.features @ np.asarray(params["w"])
        own = np.eye(10, dtype=bool)[self.label]
        others = np.where(own, -np.inf, logits)
        return logits[own] - special.logsumexp(others, axis=1)

    def accuracy(self, params) -> float:
        logits = self.test @ np.asarray(params["w"])
        return float(np.mean(logits.argmax(1) == self.test_label))

    def without(self, present: np.ndarray):
        """Returns the records. An absent one has no features, and so no gradient."""
        features = self.features * present[:, None]
        return from_arrays(features=features, label=self.label, num_classes=10)


def loss(params, record) -> jax.Array:
    logits = record["features"] @ params["w"]
    return jaxdp.losses.softmax_cross_entropy(logits, record["label"])


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
            state = problems.trained(trainer, start, task.without(here), STEPS)
            trained.append(jax.device_get(state.params))
    scores = np.stack([task.logits(params) for params in trained])
    accuracy = np.mean([task.accuracy(params) for params in trained])
    return present, scores, float(accuracy)


@functools.partial(jax.jit, static_argnums=0)
def memorised(task: Task, present: jax.Array) -> jax.Array:
    """Returns the weights [models, d, 10] after 500 steps of gradient descent without privacy."""
    optimizer = optax.sgd(20.0, momentum=0.9)

    def one(here):
        def mean_loss(w):
            logits = jnp.asarray(task.features) @ w
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, task.label)
            return jnp.mean(losses, where=here)

        start = jnp.zeros((task.features.shape[1], 10))
        return descended(mean_loss, start, optimizer, steps=500)

    return jax.lax.map(one, present)


def descended(mean_loss, start, optimizer: optax.GradientTransformation, *, steps: int):
    """Returns the parameters after some steps on the whole data."""

    def step(_, carried):
        params, state = carried
        return problems.updated(optimizer, jax.grad(mean_loss)(params), state, params)

    params, _ = jax.lax.fori_loop(0, steps, step, (start, optimizer.init(start)))
    return params


def lira(present: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Returns the log likelihood ratio of presence [models, n]. The other models are the shadows of
    each model."""
    ratio = np.zeros_like(scores)
    for kind, sign in ((present, 1), (~present, -1)):
        own = kind * scores
        own_square = kind * scores**2
        # Moments without the attacked model.
        count = kind.sum(0) - kind
        mean = (own.sum(0) - own) / count
        square = (own_square.sum(0) - own_square) / count
        deviation = np.sqrt(np.maximum(square - mean**2, 1e-6))
        ratio += sign * stats.norm.logpdf(scores, mean, deviation)
    return ratio


def success(present: np.ndarray, ratio: np.ndarray) -> dict[str, float]:
    """Returns the AUC, and the share of members that are found at 1 % false positives."""
    inside = ratio[present]
    is_found = inside > np.quantile(ratio[~present], 0.99)
    auc = metrics.roc_auc_score(present.ravel(), ratio.ravel())
    return {"auc": float(auc), "tpr_at_1": float(is_found.mean())}


def proved(present: np.ndarray, scores: np.ndarray, upper: float):
    """Audits the most exposed canary of the first half of the models on the second half."""
    half = len(scores) // 2
    exposures = []
    for canary in range(CANARIES):
        here, seen = present[:half, canary], scores[:half, canary]
        gap = seen[here].mean() - seen[~here].mean()
        exposures.append(gap / seen.std())
    exposed = int(np.argmax(exposures))
    here, seen = present[half:, exposed], scores[half:, exposed]
    return audit.multi_run(
        seen[here],
        seen[~here],
        upper=upper,
        delta=DELTA,
        confidence=CONFIDENCE,
        claim="gaussian",
    )


def fine_tuning(models: int) -> list[dict]:
    """Returns the rows of DP-SGD, without privacy first."""
    task = Task.make()

    def attacked(claimed, sigma, clip):
        present, scores, accuracy = shadows(task, models, sigma, clip=clip)
        ratio = lira(present, scores)
        measured = {}
        for name, part in (("all", slice(CANARIES, None)), ("canaries", slice(CANARIES))):
            measured[name] = success(present[:, part], ratio[:, part])
        return proved(present, scores, claimed), measured, accuracy

    def run(sigma):
        return jaxdp.privacy.SelfComposedDpEvent(GaussianDpEvent(sigma), STEPS)

    rows = []
    for epsilon in EPSILONS:
        sigma, clip = 0.0, FAR
        if epsilon < math.inf:
            sigma, clip = calibrate_noise(run, epsilon=epsilon, delta=DELTA), CLIP
        result, measured, accuracy = attacked(epsilon, sigma, clip)
        row = worth("fine-tuning, DP-SGD", epsilon, accuracy) | proof(result) | {"lira": measured}
        if sigma:
            broken, seen, _ = attacked(epsilon, sigma, FAR * CLIP)
            row |= twin("no clipping", broken, epsilon) | {"twin_lira": seen}
        rows.append(row)
    return rows


# --- The other stages ---------------------------------------------------------------------------


def twin(name: str, result, upper: float) -> dict:
    """Returns the columns of a broken twin, under the claim of the honest mechanism."""
    broken = dataclasses.replace(result, upper=upper)
    return {"twin": name, "twin_lower": broken.lower, "twin_verdict": broken.verdict}


def attacked(name: str, attack: Callable, honest, broken) -> dict:
    """Returns the columns of an attack on a mechanism, and of that on its broken twin."""
    result = attack(honest)
    return proof(result) | twin(name, attack(broken), result.upper)


def calibration(trials: int) -> list[dict]:
    """Returns the rows of Acc-T: the calibration error on records that nobody asked, and the attack
    on an answer."""
    rows = []
    random = np.random.default_rng(0)
    logits = random.normal(size=(4000, 10)).astype(np.float32)
    labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
    shown = 3 * logits  # over-confident
    mine, test = slice(0, 2000), slice(2000, None)
    right = labels[test] == logits[test].argmax(1)
    terms = {"trials": trials, "confidence": CONFIDENCE, "adjacency": "add_remove"}

    def attack(epsilon):
        method = recalibration.AccT()
        return audit_source(method, shown[:50], labels[:50], epsilon=epsilon, **terms)

    for epsilon in EPSILONS:
        errors = []
        for _ in range(5):
            ledger = jaxdp.Ledger.in_memory()
            ledger.register("site", adjacency="add_remove", unit="record")
            party = recalibration.Party(shown[mine], labels[mine], account=ledger.account("site"))
            recalibrated = recalibration.acc_t(
                [party], epsilon=epsilon, search="bisection", bracket=(0.5, 16.0)
            )
            confidence = recalibrated.apply(shown[test])
            errors.append(float(recalibration.ece(confidence, right)))
        row = worth("recalibration, Acc-T", epsilon, float(np.mean(errors)), "ECE")
        if epsilon < math.inf:
            row |= attacked("a quarter of the noise", attack, epsilon, 4 * epsilon)
        rows.append(row)
    return rows


def answers(trials: int) -> list[dict]:
    """Returns the rows of private prediction: accuracy of answers at an epsilon each, and the
    attack on one answer."""
    images, labels = digits()
    binary = (labels >= 5).astype(np.int32)
    public = images[:800]
    mean = public.mean(0)
    _, _, axes = np.linalg.svd(public - mean, full_matrices=False)
    x = ((images - mean) @ axes[:16].T).astype(np.float32)
    x /= np.abs(x).max()
    private, test = slice(800, 1300), slice(1300, None)

    def logit(params, query):
        return params @ query

    def loss_fn(params, record):
        return jaxdp.losses.sigmoid_cross_entropy(logit(params, record["x"]), record["y"])

    def trained(records):
        how = {"clip": 0.1, "learning_rate": 30.0, "batch_size": 500, "epochs": 4}
        return prediction.train_with_bounds(loss_fn, jnp.zeros(16), records, ks=10, **how)

    records = {"x": x[private], "y": binary[private].astype(np.float32)}
    model = trained(records)
    outputs = x[test] @ np.asarray(model.params)
    plain = float(np.mean((outputs > 0) == binary[test]))
    rows = [worth("private prediction", math.inf, plain)]
    # The query is where the model is least sure, so that a record can move its answer.
    query = x[test][np.argmin(np.abs(outputs))]
    candidates = {"x": np.stack([4 * query, -4 * query]), "y": np.ones(2, np.float32)}

    def attack(epsilon):
        """Returns the audit of an answer at its epsilon."""

        def ask(data, queries, **terms):
            return prediction.private_predict(
                trained(data), logit, queries, epsilon=epsilon, **terms
            )

        event = prediction.event(1, epsilon=epsilon)
        return audit_answers(
            ask, event, query, records, candidates, trials=trials, confidence=CONFIDENCE
        )

    for epsilon in EPSILONS[1:]:
        each = epsilon / 8
        ledger = jaxdp.Ledger.in_memory()
        ledger.register("digits", adjacency="add_remove", unit="record")
        predicted = prediction.private_predict(
            model, logit, x[test], epsilon=each, account=ledger.account("digits")
        )
        row = worth("private prediction", each, float(np.mean(predicted == binary[test])))
        rows.append(row | attacked("a quarter of the noise", attack, each, 4 * each))
    return rows


def uploads(trials: int) -> list[dict]:
    """Returns the rows of the private upload of Split Adaptation: a nearest class mean, and the
    attack on features."""
    images, labels = digits()
    x = images.reshape(-1, 8, 8).astype(np.float32)
    public, private, test = slice(0, 400), slice(400, 1300), slice(1300, None)
    projection = split.public_projection(x[public], 8)
    exact = split.PrivateRelease(
        clip_norm=1e3, noise_multiplier=0.0, label_epsilon=math.inf, num_classes=10
    )
    noiseless = exact.release(_key(0), x, labels=labels, projection=projection)
    coordinates = np.asarray(noiseless.features)
    norms = np.linalg.norm(coordinates[public], axis=1)
    clip = float(np.median(norms))
    attack = functools.partial(
        audit_upload,
        representations=x[public],
        labels=labels[public],
        trials=trials,
        projection=projection,
        part="features",
        delta=DELTA,
        confidence=CONFIDENCE,
    )
    rows = []
    for epsilon in EPSILONS:
        release = split.PrivateRelease.calibrated(
            epsilon=epsilon, delta=DELTA, clip_norm=clip, num_classes=10
        )
        sent = release.release(_key(1), x[private], labels=labels[private], projection=projection)
        features = np.asarray(sent.features)
        released_labels = np.asarray(sent.labels)
        means = np.stack([features[released_labels == c].mean(0) for c in range(10)])
        distances = np.square(coordinates[test][:, None] - means).sum(-1)
        utility = float(np.mean(distances.argmin(1) == labels[test]))
        row = worth("split, private upload", epsilon, utility)
        if epsilon < math.inf:
            half = dataclasses.replace(release, noise_multiplier=release.noise_multiplier / 2)
            row |= {"part": "features"} | attacked("half the noise", attack, release, half)
        rows.append(row)
    return rows


def _key(number: int) -> jax.Array:
    return jax.random.key(number, impl="threefry2x32")


def net_init() -> dict:
    """Returns the parameters of two blocks of a dense layer and a LayerNorm, and a head."""
    random = np.random.default_rng(0)

    def make(*shape):
        values = random.normal(size=shape) / math.sqrt(shape[0])
        return jnp.asarray(values, jnp.float32)

    norm = {"scale": jnp.ones(48), "bias": jnp.zeros(48)}
    return {
        "first": make(64, 48),
        "second": make(48, 48),
        "head": make(48, 10),
        "block_0": {"norm": norm},
        "block_1": {"norm": norm},
    }


def net(params: Mapping, images: jax.Array) -> jax.Array:
    """Returns the logits of images."""
    h = images.reshape(len(images), -1)
    for block, layer in (("block_0", "first"), ("block_1", "second")):
        norm = params[block]["norm"]
        h = h @ params[layer]
        variance = h.var(-1, keepdims=True)
        h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-5)
        h = jax.nn.relu(h * norm["scale"][None] + norm["bias"][None])
    return h @ params["head"]


def adaptation(trials: int) -> list[dict]:
    """Returns the rows of private Tent on digits with noise and less contrast, and the attack on
    one update."""
    images, labels = digits()
    images = images.astype(np.float32)
    source = slice(0, 800)
    stream = slice(800, 1760)
    labels_of_stream = labels[stream]

    def mean_loss(params):
        logits = net(params, jnp.asarray(images[source]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[source]).mean()

    train = functools.partial(descended, mean_loss, optimizer=optax.adam(1e-2), steps=150)
    params = jax.jit(train)(net_init())
    noise = np.random.default_rng(1).normal(0, 0.12, images[stream].shape)
    shifted = np.clip(0.35 * images[stream] + noise, 0, 1).astype(np.float32)
    logits = np.asarray(net(params, jnp.asarray(shifted)))
    before = float(np.mean(logits.argmax(1) == labels_of_stream))

    def private(sigma):
        return tta.private(tta.Tent(), clip_norm=0.5, noise_multiplier=sigma)

    def accuracy(method, order, key):
        """Returns the accuracy over the stream in a random order."""
        rows = np.random.default_rng(order).permutation(len(shifted))
        adapter = tta.Adapter(net, params, method, optax.sgd(0.3))
        state = adapter.init(key)
        right = []
        for batch in rows.reshape(-1, 96):
            state, logits = adapter.step(state, jnp.asarray(shifted[batch]))
            right.append(np.mean(np.asarray(logits).argmax(1) == labels_of_stream[batch]))
        return float(np.mean(right))

    def attack(sigma):
        adapter = tta.Adapter(net, params, private(sigma), optax.sgd(1.0))
        return audit_stream(
            adapter, shifted[:8], shifted[8:40], trials=trials, delta=DELTA, confidence=CONFIDENCE
        )

    rows = []
    for epsilon in EPSILONS:
        method, keys = tta.Tent(), [None] * 5
        if epsilon < math.inf:
            target = {"epsilon": epsilon, "delta": DELTA, "adjacency": "replace_one"}
            sigma = calibrate_noise(GaussianDpEvent, **target)
            method, keys = private(sigma), list(map(_key, range(5)))
        orders = [accuracy(method, order, key) for order, key in enumerate(keys)]
        row = worth("test-time adaptation, Tent", epsilon, float(np.mean(orders)))
        if epsilon < math.inf:
            rows.append(row | attacked("half the noise", attack, sigma, sigma / 2))
        else:
            rows.append(row | {"before": before})
    return rows


# --- The tables of the page ---------------------------------------------------------------------


def _number(value) -> str:
    if value is None:
        return ""
    return "none" if value == math.inf else f"{value:.3g}"


def tables(report) -> dict:
    """Returns the tables of docs/results/membership.md: a row per stage and epsilon, and LiRA."""
    attacks = []
    for row in report["rows"]:
        if "lira" in row:
            accuracy = f"{100 * row['utility']:.1f} %"
            attacks.append({"at": _number(row["epsilon"]), "accuracy": accuracy} | row["lira"])
        if "twin_lira" in row:
            sold = {"at": f"{row['epsilon']:g} sold, no clipping", "accuracy": ""}
            attacks.append(sold | row["twin_lira"])
    lira = {"epsilon": "{at}", "accuracy": "{accuracy}"}
    for title, records in (("", "all"), (", canaries", "canaries")):
        lira[f"AUC{title}"] = f"{{{records}[auc]:.3f}}"
        lira[f"found at 1 %{title}"] = f"{{{records}[tpr_at_1]:.3f}}"
    return {
        "membership": pages.lines(report["rows"], COLUMNS),
        "lira": pages.lines(attacks, lira),
    }


def _utility(row) -> str:
    if row["metric"] == "accuracy":
        return f"{100 * row['utility']:.1f} %"
    return f"ECE {row['utility']:.3f}"


COLUMNS = {
    "stage": "{stage}",
    "epsilon": lambda row: _number(row["epsilon"]),
    "utility": _utility,
    "proved": lambda row: _number(row.get("lower")),
    "ceiling": lambda row: _number(row.get("ceiling")),
    "verdict": lambda row: row.get("verdict", "") if row["epsilon"] < math.inf else "",
    "broken twin, proved": "{twin}: {twin_lower:.3g}, {twin_verdict}",
}


def draw(report: Mapping, path: pathlib.Path):
    """Draws which share of the claim of the attacked release each attack proves."""
    curves = {}
    for row in report["rows"]:
        if row["epsilon"] < math.inf:
            point = (row["upper"], row["lower"] / row["upper"])
            curves.setdefault(row["stage"], []).append(point)
    plot_curves(
        path,
        {stage: sorted(points) for stage, points in curves.items()},
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


FLAGS = {
    "models": (256, "shadow models per setting"),
    "trials": (1000, "trials of either kind of an audit, more for cheap ones"),
    "only": {"choices": STAGES, "action": "append", "help": "stages, by default all"},
}


def measure(flags) -> dict:
    rows, seconds = [], {}
    for name in flags.only or STAGES:
        began = time.process_time()
        rows += STAGES[name](flags)
        seconds[name] = round(time.process_time() - began)
        timing.show(f"{name}, {seconds[name]} s", pages.lines(rows, COLUMNS))
    return {"models": flags.models, "trials": flags.trials, "cpu_seconds": seconds, "rows": rows}
