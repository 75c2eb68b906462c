"""Methods of private training on the features of a public network, each against DP-SGD on the same
private images.

    python -m benchmarks run finetune_methods --update --checkpoint FILE --data_dir DIR

The data and the network are those of `configs/finetune/cifar10_squeezenet.py`. Each of five
disjoint sets of 2000 training images of CIFAR-10 is a private set. Learning rates are chosen on
coarse classes of CIFAR-100."""

import functools
import itertools
import pathlib
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import pages, problems
from jaxdp import data, finetune, models
from jaxdp.data import PoissonSampler, from_arrays
from launch import results

FOLDS, RECORDS, STEPS, CLIP, DELTA = 5, 2000, 30, 0.15, 1e-5
EPSILONS = (1.0, 4.0)
RATES = (16.0, 32.0, 64.0, 128.0)


FLAGS = {
    "checkpoint": ("", "SqueezeNet 1.0, arrays of the Caffe model"),
    "data_dir": ("", "prepared TFDS data of cifar10 and CIFAR-100"),
    "cifar100": ("cifar100", "the name of CIFAR-100 or of a part of it in data_dir"),
    "features": ("features.npz", "a file that keeps the features"),
}


def features(options) -> dict[str, np.ndarray]:
    """Returns features and labels of all parts. They are kept in a file, because a network computes
    them."""
    file_of_features = pathlib.Path(options.features)
    if file_of_features.exists():
        with np.load(file_of_features) as file:
            return dict(file)
    import tensorflow_datasets as tfds

    model = models.create("squeezenet1_0", num_classes=10, pool="features", head_padding=1)
    mean = (123 / 255, 117 / 255, 104 / 255)
    pixels = models.Preprocessing(size=96, mean=mean, std=(1 / 255,) * 3)
    public = models.load_checkpoint(
        options.checkpoint, model=model, preprocessing=pixels, new_head=True
    )
    compute = jax.jit(functools.partial(models.head_inputs, public))
    mirrored = jax.jit(lambda images: models.head_inputs(public, images[:, :, ::-1]))
    arrays, one = {}, {"": compute}
    cifar100, both = options.cifar100, {"": compute, "_mirror": mirrored}
    for role, name, split, count, views in (
        ("public", cifar100, "train", 8000, one),
        ("public_test", cifar100, "test", 2000, one),
        ("private", "cifar10", "train", FOLDS * RECORDS, both),
        ("test", "cifar10", "test", 4000, one),
    ):
        source = data.resize_images(data.from_tfds(name, split, data_dir=options.data_dir), 96, 3)
        batches = [source.gather(np.arange(i, i + 100))["image"] for i in range(0, count, 100)]
        for view, function in views.items():
            arrays[role + view] = np.concatenate([function(jnp.asarray(b)) for b in batches])
        records = tfds.data_source(name, split=split, data_dir=options.data_dir)
        label = "label" if name == "cifar10" else "coarse_label"
        labels = [record[label] for record in records.__getitems__(list(range(count)))]
        arrays[f"{role}_label"] = np.array(labels)
    np.savez(file_of_features, **arrays)
    return arrays


def loss(params, record) -> jax.Array:
    """Returns the mean loss over the views of a record, float32 [V, r]."""
    logits = record["views"] @ params["w"] + params["b"][None]
    return jax.vmap(jaxdp.losses.softmax_cross_entropy, (0, None))(logits, record["label"]).mean()


def trainer(variant: str, epsilon: float, anchors):
    """Returns the trainer of a variant, whose rates share a compiled step."""
    gep = {"anchors": anchors, "basis_size": 60, "groups": 1, "residual_clip_norm": CLIP}
    methods = {
        "EMA": (finetune.dp_sgd, {"ema_decay": 0.9}),
        "DP-SAT": (finetune.dp_sgd, {"ascent_radius": 1.0}),
        "AdpAlloc": (finetune.adp_alloc, {"schedule": finetune.exponential_noise(0.02)}),
        "AdpClip": (finetune.adp_clip, {"quantile": 0.5, "unit_norm": False}),
        "GEP": (finetune.gep, gep),
    }
    method, options = methods.get(variant, (finetune.dp_sgd, {}))
    return method(
        loss,
        optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9),
        sampler=PoissonSampler(RECORDS, 1.0),
        clip_norm=CLIP,
        epsilon=epsilon,
        delta=DELTA,
        steps=STEPS,
        physical_batch_size=RECORDS,
        **options,
    )


def accuracy(training, rate: float, x: np.ndarray, y: np.ndarray, test: tuple) -> float:
    """Trains on private features [n, V, r] and returns the accuracy on test features [m, r] with
    labels. The released parameters are the average of EMA, where there is one."""
    source = from_arrays(views=x, label=y, num_classes=10)
    start = {"w": jnp.zeros((x.shape[-1], 10)), "b": jnp.zeros(10)}
    state = problems.trained(training, start, source, STEPS, rate=rate)
    params = jax.device_get(state.params if state.ema is None else state.ema)
    return float(np.mean((test[0] @ params["w"] + params["b"]).argmax(1) == test[1]))


VARIANTS = ("DP-SGD", "EMA", "two views", "AdpAlloc", "AdpClip", "DP-SAT", "GEP")


def chosen_rates(
    arrays: Mapping[str, np.ndarray], mapping: models.Features, trainers: Mapping
) -> dict[str, dict[str, float]]:
    """Returns accuracies by "variant, epsilon" and learning rate, on ten coarse classes of
    CIFAR-100.

    Each rate has two runs.
    """
    label, held = arrays["public_label"], arrays["public_test_label"]
    x, y = mapping(arrays["public"][label < 10])[:RECORDS, None], label[label < 10][:RECORDS]
    test = mapping(arrays["public_test"][held < 10]), held[held < 10]
    table = {}
    for variant in VARIANTS:
        if variant == "two views":  # the same gradient's length and noise as DP-SGD
            continue
        for epsilon in EPSILONS:
            row = table[f"{variant}, {epsilon:g}"] = {}
            for rate in RATES:
                training = trainers[variant, epsilon]
                runs = [accuracy(training, rate, x, y, test) for _ in range(2)]
                row[f"{rate:g}"] = float(np.mean(runs))
            print(variant, epsilon, row, flush=True)
    return table


def compared(
    arrays: Mapping[str, np.ndarray],
    mapping: models.Features,
    trainers: Mapping,
    tuned: Mapping,
) -> list[dict]:
    """Returns the accuracy of every variant, epsilon and private set."""
    parts = ("private", "private_mirror", "test")
    private, mirror, images = (mapping(arrays[name]) for name in parts)
    test, rows = (images, arrays["test_label"]), []
    for epsilon, variant in itertools.product(EPSILONS, VARIANTS):
        views = [private, mirror] if variant == "two views" else [private]
        rates = tuned[f"{'DP-SGD' if variant == 'two views' else variant}, {epsilon:g}"]
        rate = float(max(rates, key=lambda rate: rates[rate]))
        for fold in range(FOLDS):
            here = slice(fold * RECORDS, (fold + 1) * RECORDS)
            x = np.stack([view[here] for view in views], axis=1)
            y = arrays["private_label"][here]
            row = {"variant": variant, "epsilon": epsilon, "seed": fold, "rate": rate}
            row["accuracy"] = accuracy(trainers[variant, epsilon], rate, x, y, test)
            rows.append(row)
        print(variant, epsilon, rate, [row["accuracy"] for row in rows[-FOLDS:]], flush=True)
    return rows


def tables(report) -> dict:
    """Returns the table of docs/results/public_checkpoint.md: accuracies, and gains over DP-SGD."""
    header = ["method"]
    table = [[variant] for variant in VARIANTS]
    for epsilon in EPSILONS:
        header += [f"epsilon {epsilon:g}", "less DP-SGD"]
        rows = results.select(report["rows"], epsilon=epsilon)
        base = [row["accuracy"] for row in results.select(rows, variant="DP-SGD")]
        for line in table:
            own = [row["accuracy"] for row in results.select(rows, variant=line[0])]
            gains = "" if line[0] == "DP-SGD" else pages.mean(np.subtract(own, base), "+.1f")
            line += [pages.mean(own), gains]
    return {"methods": pages.page_table(header, table)}


def curve(report) -> dict:
    """Returns accuracies over epsilon, a row for each set of private images."""
    points = [point for run in report["runs"].values() for point in run["points"]]
    epsilons = sorted({point["epsilon"] for point in points})
    lines = []
    for name, run in report["runs"].items():
        line = {"private images": f"{run['records']} of {name.removesuffix('_full')}"}
        line |= {"runs": str(run["runs"])} | {f"epsilon {epsilon:g}": "" for epsilon in epsilons}
        for point in run["points"]:
            accuracy = results.percent(point["accuracy"], point["deviation"])
            line[f"epsilon {point['epsilon']:g}"] = accuracy
        plain = run["without_privacy"]
        lines.append(line | {"no privacy": "" if plain is None else results.percent(plain)})
    return {"curve": lines}


def measure(flags) -> dict:
    began = time.process_time()
    arrays = features(flags)
    mapping = models.Features.from_public(arrays["public"], dimensions=256, whiten=0.5)
    anchors = {
        "views": mapping(arrays["public"][:256])[:, None],
        "label": np.random.default_rng(0).integers(10, size=256, dtype=np.int32),
    }
    cells = itertools.product(VARIANTS, EPSILONS)
    trainers = {cell: trainer(*cell, anchors) for cell in cells}
    rates = chosen_rates(arrays, mapping, trainers)
    report = {
        "records": RECORDS,
        "steps": STEPS,
        "clip_norm": CLIP,
        "tuned_on_cifar100": rates,
        "rows": compared(arrays, mapping, trainers, rates),
    }
    print(tables(report)["methods"])
    return {"cpu_seconds": round(time.process_time() - began)} | report
