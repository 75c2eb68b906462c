"""The claims of Wicker et al. 2025 on small data: certificates, mechanisms, students, DP-SGD, PATE,
ensembles.

    python -m benchmarks run evidence_agt --update --data_dir DIR --word_vectors FILE.npz
    python -m benchmarks.evidence results/agt.md

A draw is a set of private records: new points for Blobs, a new division of the digits, and a random
80 % of the records of PneumoniaMNIST and SST-2. The accuracy of an answer is an expectation over
the noise, computed from the certified labels and distances of all test inputs. So it has no error
but that of the draws. DIR holds prepared TFDS data, FILE is that of configs/predict/sst2.py. Reads
private labels without payment: for public benchmark data only."""

import functools
import importlib
import itertools
import math
import operator
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import pages, timing
from jaxdp import finetune, prediction
from jaxdp.data import from_arrays
from jaxdp.data.selection import choose
from jaxdp.report import plot_panels
from launch import frame, results
from launch.predict import dp_sgd
from launch.teachers import GLOBAL, OURS, SMOOTH, Bench, Pool

DATA = {"Blobs": "blobs", "digits": "digits", "PneumoniaMNIST": "pneumonia", "SST-2": "sst2"}
SIZES = (1, 2, 5, 10, 20, 25)
QUERIES = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
CLASSES = (2, 3, 5, 10)
BUDGET = {"epsilon": 10.0, "delta": 1e-5}
WAYS = {"stable": OURS, "smooth": SMOOTH, "global": GLOBAL}
ASKED = 100
LOSS = 0.05  # of accuracy to the noise, at which numbers of answers are compared


@functools.cache
def epsilon_of(queries: int) -> float:
    """Returns the epsilon of each of a number of answers within the budget."""
    return prediction.query_epsilon(**BUDGET, queries=queries)


def config_of(name: str, options, draw: int):
    """Returns the config of a data set and draw."""
    config = importlib.import_module(f"configs.predict.{DATA[name]}").get_config()
    for field in ("data_dir", "word_vectors"):
        if field in config.data:
            config.data[field] = getattr(options, field)
    for field in ("seed", "split_seed"):
        if field in config.data:
            config.data[field] = draw
    config.ensemble.salt += f" {draw}"
    return config


def draws(name: str, options, root: pathlib.Path) -> Iterator[Bench]:
    """Yields the draws. A draw that is a share of the records computes no features."""
    bench, whole = None, None
    is_share = name not in ("Blobs", "digits")
    for draw in range(options.draws):
        config = config_of(name, options, draw)
        if bench is None or not is_share:
            bench = Bench(config, root)
            whole = bench.train
        if is_share:
            rows = choose(len(whole["label"]), len(whole["label"]) * 4 // 5, seed=draw)
            bench.train = {key: array[rows] for key, array in whole.items()}
        config.training.records = len(bench.train["label"])
        bench.config, bench.plan = config, config.prediction
        yield bench


def pool(bench: Bench, size: int) -> Pool:
    """Returns a certified ensemble of a size, or a certified model."""
    records = bench.config.training.records
    if size == 1:
        return Pool(*bench.certified(bench.train, records)[1:], bench.classes)
    part = prediction.partition_by_hash(bench.train, size, salt=bench.config.ensemble.salt.encode())
    members = []
    for k in range(size):
        mine = {key: array[part == k] for key, array in bench.train.items()}
        members.append(bench.certified(mine, records // size)[1:])
    votes, distances = map(np.stack, zip(*members, strict=True))
    return Pool(*prediction.vote(votes, distances, num_classes=bench.classes), bench.classes, votes)


def draw_row(bench: Bench, draw: int, trainer, pate) -> dict:
    """Returns the scores of one draw."""
    truth = bench.test["label"]
    mechanisms = {w: m for w, m in WAYS.items() if bench.classes == 2 or w != "smooth"}
    needed = prediction.needed_distance(epsilon_of(ASKED))
    row = {"accuracy": {}, "distance": {}, "certified": {}, "student": {}}
    pools = {size: pool(bench, size) for size in SIZES}
    for size, certified in pools.items():
        row["distance"][size] = float(certified.distance.mean())
        row["certified"][size] = float(np.mean(certified.distance >= needed))
        row["accuracy"][size] = {}
        for way, mechanism in mechanisms.items():
            accuracies = {}
            for queries in QUERIES:
                epsilon = epsilon_of(queries)
                accuracies[queries] = certified.expected_accuracy(mechanism, epsilon, truth)
            row["accuracy"][size][way] = accuracies
    row["without noise"] = float(np.mean(pools[1].label == truth))
    rows = bench.asked(draw)
    key = jax.random.key(draw, impl="threefry2x32")
    for way, mechanism in mechanisms.items():
        way_key = jax.random.fold_in(key, len(way))
        answers = pools[1].answer(mechanism, epsilon_of(ASKED), way_key, rows)
        row["student"][way] = bench.student(rows, answers)[1]
    votes = pools[25].votes[:, rows]
    answers = pate.answer(key, votes, num_classes=bench.classes, max_answers=ASKED)
    answered = answers >= 0
    right = answers[answered] == truth[rows[answered]]
    row["PATE"] = float(np.mean(right)) if answered.any() else None
    row["PATE answered"] = float(answered.mean())
    row["DP-SGD"] = private_training(bench, trainer)
    return row


def private_training(bench: Bench, trainer) -> float:
    """Returns the accuracy of the same model after DP-SGD."""
    steps, records = bench.config.dp_sgd.steps, len(bench.train["label"])
    source = from_arrays(**bench.train, num_classes=bench.classes, name="draw")
    delta = BUDGET["delta"]
    terms = {"adjacency": "add_remove", "unit": "example", "records": records, "delta": delta}
    with (
        tempfile.TemporaryDirectory() as folder,
        frame.account(pathlib.Path(folder) / "ledger.sqlite", "draw", **terms) as account,
    ):
        state = finetune.fit(
            trainer,
            bench.model.init(),
            source,
            account=account,
            steps=steps,
            checkpoint_every=steps,
            delta=delta,
            progress=False,
        )
    return bench.model.accuracy(state.params, bench.test)


def classes(options, root: pathlib.Path) -> list[dict]:
    """Returns certificates of digits by the number of classes."""
    rows = []
    for count in CLASSES:
        found = []
        for draw in range(options.draws):
            config = config_of("digits", options, draw)
            config.data.classes = tuple(range(count)) if count < 10 else ()
            config.training.records = 1
            config.prediction.queries, config.references = 1, False
            bench = Bench(config, root)
            config.training.records = len(bench.train["label"])
            found.append(certificate(pool(bench, 1), bench.test["label"]))
        rows.append({"classes": count, **{key: [row[key] for row in found] for key in found[0]}})
    return rows


def certificate(one: Pool, truth: np.ndarray) -> dict[str, float]:
    epsilon = epsilon_of(ASKED)
    return {
        "distance": float(one.distance.mean()),
        "stable": one.expected_accuracy(OURS, epsilon, truth),
        "global": one.expected_accuracy(GLOBAL, epsilon, truth),
        "without noise": float(np.mean(one.label == truth)),
    }


rounded = functools.partial(timing.rounded, rule=functools.partial(round, ndigits=5))


def of_paper(paper) -> dict:
    return {"paper": paper["table"]}


def tables(report) -> dict:
    """Returns the tables of docs/results/agt.md: percent, with standard errors over draws in
    parentheses."""
    draws_of = {name: data["draws"] for name, data in report["data"].items()}

    def table(scores):
        """Returns a line for each score of a draw."""
        lines = []
        for title, score in scores.items():
            cells = {data: share(map(score, draws)) for data, draws in draws_of.items()}
            lines.append({"": title} | cells)
        return lines

    of = functools.partial
    mechanisms = {way: of(_accuracy, way) for way in WAYS}
    for way in WAYS:
        mechanisms[f"student of {way} answers"] = lambda draw, way=way: draw["student"].get(way)
    for name in ("PATE", "PATE answered", "DP-SGD", "without noise"):
        mechanisms[name] = operator.itemgetter(name)
    sizes = {}
    for way, size in itertools.product(WAYS, SIZES):
        sizes[f"{way}, T = {size}"] = of(_accuracy, way, size=size)
    for size in SIZES:
        sizes[f"certified, T = {size}"] = lambda draw, size=size: draw["certified"][str(size)]
    sweep = {}
    for way, queries in itertools.product(WAYS, (1, 10, 100, 1000, 10_000, 100_000)):
        sweep[f"{way}, Q = {queries}"] = of(_over_dp_sgd, way, queries=queries)
    by_classes = []
    for scores in report["classes"]:
        mean, _, error = results.moments(scores["distance"])
        cells = {"classes": str(scores["classes"]), "mean distance": results.number(mean, error)}
        cells |= {name: share(scores[name]) for name in ("stable", "global", "without noise")}
        by_classes.append(cells)
    return {
        "mechanisms": table(mechanisms),
        "sizes": table(sizes),
        "queries": table(sweep),
        "more queries": queries_table(draws_of),
        "classes": by_classes,
    }


def most_queries(way: str, draw) -> float | None:
    """Returns the number of answers at which the noise costs `LOSS` of accuracy, by interpolation
    over the logarithm of the number. It is the largest number asked about where it costs less.
    """
    curve = draw["accuracy"]["1"].get(way)
    if curve is None:
        return None
    losses = [draw["without noise"] - curve[str(queries)] for queries in QUERIES]
    # Losses grow with the number of answers.
    return math.exp(np.interp(LOSS, losses, np.log(QUERIES)))


def queries_table(draws_of: dict) -> list[dict]:
    """Returns the numbers of answers at equal accuracy, geometric means over draws."""
    rows = []
    for name, draws in draws_of.items():
        row = {"": name}
        means = {}
        for way in ("global", "smooth", "stable"):
            counts = [most_queries(way, draw) for draw in draws]
            if counts[0] is not None:
                means[way] = math.exp(np.mean(np.log(counts)))
            row[way] = _count(means.get(way, 0), means.get(way, 0))
        for way in ("smooth", "stable"):
            most = means.get(way, 0)
            row[f"{way} over global"] = _count(most / means["global"], most)
        rows.append(row)
    return rows


def _count(value: float, queries: float) -> str:
    """Returns a value of two digits, with a mark if the number of queries is the largest."""
    mark = "over " if queries > 0.99 * QUERIES[-1] else ""
    return f"{mark}{float(f'{value:.2g}'):,g}" if value else ""


def _accuracy(way: str, draw, *, size: int = 1, queries: int = ASKED) -> float | None:
    """Returns the accuracy of a mechanism in a draw, None if it does not apply."""
    return draw["accuracy"][str(size)].get(way, {}).get(str(queries))


def _over_dp_sgd(way: str, draw, *, queries: int) -> float | None:
    accuracy = _accuracy(way, draw, queries=queries)
    return None if accuracy is None else accuracy - draw["DP-SGD"]


share = functools.partial(pages.mean, form="z.1f")  # no -0.0


def draw(report, path: pathlib.Path):
    """Draws the picture of docs/results/agt.md."""
    panels = {}
    for name, data in report["data"].items():
        rows = data["draws"]
        private = float(np.mean([row["DP-SGD"] for row in rows]))
        curves = {}
        for way in WAYS:
            if way in rows[0]["accuracy"]["1"]:
                curves[way] = [(math.log10(q), _mean_accuracy(rows, way, q)) for q in QUERIES]
        curves["DP-SGD"] = [(math.log10(q), private) for q in QUERIES]
        panels[name] = ("queries, power of ten", curves)
    plot_panels(
        path,
        panels,
        title="Private prediction: accuracy of an answer over the number of answers",
        subtitle="One certified model, (10, 1e-5) for all answers together. Means of ten draws.",
        ylabel="Accuracy",
        percent=True,
    )


def _mean_accuracy(rows: list, way: str, queries: int) -> float:
    return float(np.mean([row["accuracy"]["1"][way][str(queries)] for row in rows]))


def one(name: str, options, root: pathlib.Path) -> dict:
    """Returns the scores of all draws of a data set."""
    trainer, rows = None, []
    for draw, bench in enumerate(draws(name, options, root)):
        if trainer is None:
            trainer = dp_sgd(bench.config, bench.model, len(bench.train["label"]))
            how = dict(bench.config.pate)
            how["threshold"] *= SIZES[-1]
            pate = prediction.ConfidentGNMax.calibrated(
                **how, **BUDGET, queries=ASKED, max_answers=ASKED
            )
        rows.append(draw_row(bench, draw, trainer, pate))
        print(name, draw, flush=True)
    tested = len(bench.test["label"])
    return {"records": bench.config.training.records, "tested": tested, "draws": rows}


FLAGS = {
    "data_dir": "",
    "word_vectors": "",
    "draws": 10,
    "only": ("", f"parts of names, separated by semicolons, of {'; '.join(DATA)}"),
}


def measure(flags) -> dict:
    report = {"data": {}} | timing.earlier(flags.output)
    frame.keep_compiled()
    for name in timing.chosen((*DATA, "classes"), flags.only):
        with tempfile.TemporaryDirectory() as folder:
            if name == "classes":
                report["classes"] = classes(flags, pathlib.Path(folder))
            else:
                report["data"][name] = one(name, flags, pathlib.Path(folder))
        timing.write(rounded(report), flags.output)  # a later data set may fail
    return rounded(report)
