"""Further claims of Wicker et al. 2025: how tight certificates are, batches, steps, replaced
records, clients, the published image network, and embeddings of texts.

    python -m benchmarks run agt_claims --update --data_dir DIR --word_vectors FILE.npz
    python -m benchmarks.evidence results/agt.md

Draws, accuracies and the two files are those of `benchmarks.evidence_agt`. Reads private labels
without payment: for public benchmark data only."""

import functools
import importlib
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax
import numpy as np

from benchmarks import evidence_agt, timing
from benchmarks.evidence_agt import ASKED, DATA, WAYS, epsilon_of, rounded, share
from jaxdp import prediction
from jaxdp.data import DataSpec, by_group, from_arrays
from jaxdp.models import Pretrained, create
from jaxdp.prediction.features import FeatureMap
from launch import data, embeddings, frame, models, results
from launch.teachers import Bench, Pool, flip_probability

QUANTILES = (0.1, 0.5, 0.9)
REAL = ("digits", "PneumoniaMNIST", "SST-2")
MOST = 2000  # records, so that few stable distances are cut off
BATCHES, EPOCHS = (1, 2, 4, 8), (2, 4)
CLIENTS = (200, 1000)
REACHED = (1, 5, 10)  # distances of the published network
STEPS = (0, 1, 2, 4)
PHRASES = 20_000  # of SST-2, for the embeddings


def scores(pool: Pool, truth: np.ndarray, *, steps: int = 1) -> dict:
    """Returns what a certified model gives. `steps` certified steps make a neighbour."""
    pool = Pool(pool.label, pool.distance // steps, pool.num_classes)
    row = {
        "distance": float(pool.distance.mean()),
        "without noise": float((pool.label == truth).mean()),
    }
    for way, mechanism in WAYS.items():
        if pool.num_classes == 2 or way != "smooth":
            row[way] = pool.expected_accuracy(mechanism, epsilon_of(ASKED), truth)
    return row


def certified(bench: Bench, **changes) -> Pool:
    """Returns the certified model of all records under other options of the training."""
    before = bench.config
    bench.config = before.copy_and_resolve_references()
    with bench.config.unlocked():
        bench.config.training.update(changes)
    one = Pool(*bench.certified(bench.train, bench.config.training.records)[1:], bench.classes)
    bench.config = before
    return one


def scored(bench: Bench, **changes) -> dict:
    return scores(certified(bench, **changes), bench.test["label"])


def certified_by(bounds, model, features: np.ndarray, classes: int) -> Pool:
    found = prediction.certify(bounds, model.logits, features)
    return Pool(np.asarray(found.label), np.asarray(found.distance), classes)


# --- What is measured ---------------------------------------------------------------------------


def tightness(bench: Bench) -> dict:
    """Returns quantiles of the stable distance, and the share that reaches the largest."""
    bench.config.certificate.max_distance = MOST
    distance = certified(bench).distance
    return {
        "quantiles": [float(q) for q in np.quantile(distance, QUANTILES)],
        "reached": float(np.mean(distance >= MOST)),
    }


def threats(bench: Bench) -> dict:
    """Returns scores of T4 and of Theorem 4.6, each under the relation for which it holds."""
    truth, certificate = bench.test["label"], bench.config.certificate
    replaced = scored(bench, threat="replace_one")
    most = certificate.max_distance
    certificate.max_distance = 2 * most  # a replacement is two steps
    both = certified(bench)
    certificate.max_distance = most
    added = Pool(both.label, np.minimum(both.distance, most), both.num_classes)
    return {
        "T4, added or removed": scores(added, truth),
        "T4, replaced": scores(both, truth, steps=2),
        "Theorem 4.6, replaced": replaced,
    }


def schedules(bench: Bench) -> dict:
    """Returns scores by the number of batches of an epoch and of epochs. All steps together have
    the length of the one step of the config."""
    training = bench.config.training
    records, rate = training.records, training.learning_rate
    rows = {}
    for batches in BATCHES:
        sizes = {"records": records // batches, "learning_rate": rate / batches}
        rows[f"batches: {batches}"] = scored(bench, batches=batches, **sizes)
    for epochs in EPOCHS:
        rows[f"epochs: {epochs}"] = scored(bench, epochs=epochs, learning_rate=rate / epochs)
    return rows


def federated(bench: Bench, draw: int) -> dict:
    """Returns scores by the number of clients. One step of distance is a client with all of its
    records."""
    config, truth = bench.config, bench.test["label"]
    options = dict(config.training) | {"ks": config.certificate.max_distance}
    del options["records"]
    count = len(bench.train["label"])
    rows = {}
    for clients in CLIENTS:
        owner = np.random.default_rng(draw).integers(0, clients, count)
        source = from_arrays(**bench.train, num_classes=bench.classes, name="clients")
        groups = by_group(source, owner.tolist(), max_records=4 * count // clients)
        owned = groups.gather(np.arange(len(groups)))
        bounds = prediction.train_with_bounds(
            bench.model.loss, bench.start, owned, group=True, batch_size=clients, **options
        )
        pool = certified_by(bounds, bench.model, bench.test["features"], bench.classes)
        rows[f"{clients} clients"] = scores(pool, truth)
    rows[f"{count} records"] = scored(bench)
    return rows


def network(options, steps: int, root: pathlib.Path) -> dict:
    """Returns scores of the published image network after so many steps."""
    config = importlib.import_module("configs.predict.pneumonia").get_config("published")
    config.data.data_dir = options.data_dir
    config.certificate.max_distance = REACHED[-1]  # a later step takes seconds for each distance
    bench = Bench(config, root)
    truth = bench.test["label"]
    if steps == 0:
        return {"without noise": bench.model.accuracy(bench.start, bench.test)}
    one = certified(bench, epochs=steps)
    reached = {str(k): float(np.mean(one.distance >= k)) for k in REACHED}
    return scores(one, truth) | {"reached": reached}


def texts(options, pooling: str) -> dict:
    """Returns scores of embeddings by a GPT-2 of random weights. Its vocabulary are the words of
    the public word vectors."""
    words = [word.decode() for word in np.load(options.word_vectors)["words"]]
    index = {word: number for number, word in enumerate(words)}
    sizes = {"width": 128, "depth": 2, "num_heads": 4, "mlp_width": 512, "positions": 60}
    untrained = Pretrained(create("gpt2", num_classes=len(words), **sizes), {}, None)
    gpt2 = Pretrained(untrained.model, models.fresh(untrained, 0), None)
    config = importlib.import_module("configs.predict.embeddings").get_config("sst2")
    config.embedding.pooling = pooling

    def encode(text):
        return [index[word] for word in text.split() if word in index]

    def vectors(part, labelled=True):
        spec = DataSpec(source="tfds", name="glue/sst2", part=part, data_dir=options.data_dir)
        read, label = data.texts(spec, "sentence", labelled=labelled)
        one = embeddings.embed(gpt2, read, encode=encode, vocabulary=len(words), **config.embedding)
        return one, label

    public, _ = vectors("test", labelled=False)
    project = FeatureMap.from_public(public, dimensions=100, whiten=0.5)
    train, label = vectors(f"train[:{PHRASES}]")
    test, truth = vectors("validation")
    model = models.Dense(100, 2, hidden=(), bias=False, init_seed=0)
    how = {"clip": 0.05, "learning_rate": 100.0, "batch_size": PHRASES, "epochs": 1}
    records = {"features": project(train), "label": label}
    bounds = prediction.train_with_bounds(model.loss, model.init(), records, ks=100, **how)
    pool = certified_by(bounds, model, project(test), 2)
    return scores(pool, truth) | {"majority": float(max(truth.mean(), 1 - truth.mean()))}


def parts(options) -> Iterator[tuple[str, Callable]]:
    """Yields each part of the report with what measures it."""

    def of_draws(name, measure, root):
        rows = []
        for draw, bench in enumerate(evidence_agt.draws(name, options, root)):
            rows.append(measure(bench, draw) if measure is federated else measure(bench))
            print(name, draw, flush=True)
        return rows

    for name in DATA:
        yield f"tightness/{name}", functools.partial(of_draws, name, tightness)
    for name in REAL:
        yield f"threats/{name}", functools.partial(of_draws, name, threats)
    yield "schedules/digits", functools.partial(of_draws, "digits", schedules)
    yield "federated/PneumoniaMNIST", functools.partial(of_draws, "PneumoniaMNIST", federated)
    for pooling in ("last", "mean"):
        yield f"texts/{pooling}", lambda root, pooling=pooling: [texts(options, pooling)]
    for steps in STEPS:
        yield f"network/{steps}", lambda root, steps=steps: [network(options, steps, root)]


# --- Tables -------------------------------------------------------------------------------------


COLUMNS = ("distance", "stable", "global", "without noise")


def mean_of(rows: list, name: str) -> str:
    """Returns a mean over draws with its standard error if there are several, "" where a mechanism
    does not apply.
    """
    values = [row.get(name) for row in rows]
    if name == "distance" and values[0] is not None:
        mean, _, error = results.moments(values)
        return results.number(mean, error)
    return share(values)


def tightness_table(report) -> list[dict]:
    """Returns the noise at the stable distance over that of global sensitivity."""
    rows, asked = [], epsilon_of(ASKED)
    for name in DATA:
        draws = report.get(f"tightness/{name}")
        if draws is None:
            continue
        low, middle, high = np.mean([draw["quantiles"] for draw in draws], axis=0)
        row = {"": name, "k' of 10, 50, 90 %": f"{low:.0f}, {middle:.0f}, {high:.0f}"}
        # Theorem 5.1 with the beta of the paper, epsilon / 6, over a global sensitivity of 1.
        for epsilon in (asked, 1.0):
            smooth = math.exp(-epsilon * middle / 6)
            row[f"sensitivity, epsilon {epsilon:.2g}"] = f"{smooth:.2g}"
        row["scale of the noise"] = f"{6 * math.exp(-asked * middle / 6):.2g}"
        classes, distance = 10 if name == "digits" else 2, np.array([round(middle)])
        for way in ("global", "smooth", "stable"):
            row[f"flips, {way}"] = ""
            if classes == 2 or way != "smooth":
                (flip,) = flip_probability(WAYS[way], distance, asked, classes)
                row[f"flips, {way}"] = f"{flip:.2g}"
        rows.append(row)
    return rows


def scores_table(report, part: str) -> list[dict]:
    """Returns a row for each model of a part, with distances and accuracies."""
    lines = []
    for place, draws in report.items():
        name = place.removeprefix(f"{part}/")
        for key in draws[0] if name != place else ():
            cells = {way: mean_of([draw[key] for draw in draws], way) for way in COLUMNS}
            lines.append({"": f"{name}, {key}"} | cells)
    return lines


def tables(report) -> dict:
    by_steps, of_texts = [], []
    for steps in STEPS:
        for row in report.get(f"network/{steps}", ()):
            line = {"": f"steps: {steps}", "distance": mean_of([row], "distance")}
            for k in REACHED:
                line[f"k >= {k}"] = share([row.get("reached", {}).get(str(k))])
            ways = ("stable", "smooth", "global", "without noise")
            by_steps.append(line | {way: mean_of([row], way) for way in ways})
    for place, rows in report.items():
        part, _, pooling = place.partition("/")
        if part == "texts":
            cells = {way: mean_of(rows, way) for way in TEXT_COLUMNS}
            of_texts.append({"": f"pooling {pooling}"} | cells)
    parts = ("threats", "schedules", "federated")
    return {
        "tightness": tightness_table(report),
        **{part: scores_table(report, part) for part in parts},
        "network": by_steps,
        "texts": of_texts,
    }


TEXT_COLUMNS = ("stable", "smooth", "global", "without noise", "majority")
FLAGS = {
    "data_dir": "",
    "word_vectors": "",
    "draws": 2,
    "only": ("", "the beginning of the names of parts"),
}


def measure(flags) -> dict:
    report = dict(timing.earlier(flags.output))
    frame.keep_compiled()
    for name, run in parts(flags):
        if name in report or not name.startswith(flags.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            report[name] = rounded(run(pathlib.Path(folder)))
        timing.write(report, flags.output)
        jax.clear_caches()
    return report
