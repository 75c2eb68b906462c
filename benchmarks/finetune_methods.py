"""Methods of private training on the features of a public network, each against DP-SGD on the same
private images.

    python -m benchmarks run finetune_methods --update --checkpoint FILE --data_dir DIR

The data and the network are those of `configs/finetune/cifar10_squeezenet.py`. Each of five
disjoint sets of 2000 training images of CIFAR-10 is a private set. Learning rates are chosen on
coarse classes of CIFAR-100. `python -m benchmarks.evidence results/public_checkpoint.md` writes the
table into the page."""

import argparse
import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from benchmarks import timing
from jaxdp import data, finetune, models
from jaxdp.data import PoissonSampler, from_arrays
from launch import results

FOLDS, RECORDS, STEPS, CLIP, DELTA = 5, 2000, 30, 0.15, 1e-5
EPSILONS = (1.0, 4.0)
RATES = (16.0, 32.0, 64.0, 128.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `features` reads."""
    parser.add_argument("--checkpoint", help="SqueezeNet 1.0, arrays of the Caffe model")
    parser.add_argument("--data_dir", help="prepared TFDS data of cifar10 and CIFAR-100")
    parser.add_argument(
        "--cifar100",
        default="cifar100",
        help="the name of CIFAR-100 or of a part of it in data_dir",
    )
    parser.add_argument("--features", default="features.npz", help="a file that keeps the features")


def features(options: Any) -> dict[str, np.ndarray]:
    """Returns features and labels of all parts. They are kept in a file, because a network computes
    them."""
    file_of_features = pathlib.Path(options.features)
    if file_of_features.exists():
        with np.load(file_of_features) as file:
            return dict(file)
    import tensorflow_datasets as tfds

    model = models.create("squeezenet1_0", num_classes=10, pool="features", head_padding=1)
    pixels = models.Preprocessing(
        size=96, mean=(123 / 255, 117 / 255, 104 / 255), std=(1 / 255,) * 3
    )
    public = models.load_checkpoint(
        options.checkpoint, model=model, preprocessing=pixels, new_head=True
    )
    compute = jax.jit(functools.partial(models.head_inputs, public))
    mirrored = jax.jit(lambda images: models.head_inputs(public, images[:, :, ::-1]))
    arrays = {}
    for role, name, split, count, views in (
        ("public", options.cifar100, "train", 8000, {"": compute}),
        ("public_test", options.cifar100, "test", 2000, {"": compute}),
        ("private", "cifar10", "train", FOLDS * RECORDS, {"": compute, "_mirror": mirrored}),
        ("test", "cifar10", "test", 4000, {"": compute}),
    ):
        source = data.resize_images(data.from_tfds(name, split, data_dir=options.data_dir), 96, 3)
        batches = [source.gather(np.arange(i, i + 100)) for i in range(0, count, 100)]
        for view, function in views.items():
            arrays[role + view] = np.concatenate(
                [np.asarray(function(jnp.asarray(b["image"]))) for b in batches]
            )
        label = "label" if name == "cifar10" else "coarse_label"
        records = tfds.data_source(name, split=split, data_dir=options.data_dir).__getitems__(
            list(range(count))
        )
        arrays[f"{role}_label"] = np.array([record[label] for record in records])
    np.savez(file_of_features, **arrays)
    return arrays


def loss(params: Any, record: Any) -> jax.Array:
    """Returns the mean loss over the views of a record, float32 [V, r]."""
    logits = record["views"] @ params["w"] + params["b"][None]
    return jnp.mean(
        jax.vmap(jaxdp.losses.softmax_cross_entropy, (0, None))(logits, record["label"])
    )


def trainer(variant: str, epsilon: float, anchors: Any) -> tuple[Any, Any]:
    """Returns the trainer of a variant and the function that reads the released parameters from its
    state.

    The learning rate is in its state, so that all rates share a compiled step.
    """
    method: Any = finetune.dp_sgd
    more: dict[str, Any] = {}
    if variant == "EMA":
        more = {"ema_decay": 0.9}
    elif variant == "DP-SAT":
        more = {"ascent_radius": 1.0}
    elif variant == "AdpAlloc":
        method, more = finetune.adp_alloc, {"schedule": finetune.exponential_noise(0.02)}
    elif variant == "AdpClip":
        method, more = finetune.adp_clip, {"quantile": 0.5, "unit_norm": False}
    elif variant == "GEP":
        method, more = (
            finetune.gep,
            {"anchors": anchors, "basis_size": 60, "groups": 1, "residual_clip_norm": CLIP},
        )
    made = method(
        loss,
        optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9),
        sampler=PoissonSampler(RECORDS, 1.0),
        clip_norm=CLIP,
        epsilon=epsilon,
        delta=DELTA,
        steps=STEPS,
        physical_batch_size=RECORDS,
        **more,
    )
    return made, (lambda state: state.ema) if variant == "EMA" else (lambda state: state.params)


def accuracy(
    made: tuple[Any, Any], rate: float, x: np.ndarray, y: np.ndarray, test: tuple[Any, Any]
) -> float:
    """Trains on private features [n, V, r] and returns the accuracy on test features [m, r] with
    labels."""
    training, read = made
    source = from_arrays(views=x, label=y, num_classes=10)
    state = training.init({"w": jnp.zeros((x.shape[-1], 10)), "b": jnp.zeros(10)})
    rates = {**state.opt_state.hyperparams, "learning_rate": jnp.float32(rate)}
    state = state._replace(opt_state=state.opt_state._replace(hyperparams=rates))
    for _ in range(STEPS):
        state, _ = training.step(state, source)
    params = jax.device_get(read(state))
    return float(np.mean((test[0] @ params["w"] + params["b"]).argmax(1) == test[1]))


VARIANTS = ("DP-SGD", "EMA", "two views", "AdpAlloc", "AdpClip", "DP-SAT", "GEP")


def chosen_rates(
    arrays: Mapping[str, np.ndarray], mapping: models.Features, trainers: Mapping[Any, Any]
) -> dict[str, dict[str, float]]:
    """Returns accuracies by "variant, epsilon" and learning rate, on ten coarse classes of
    CIFAR-100.

    Each rate has two runs.
    """
    label, held = arrays["public_label"], arrays["public_test_label"]
    x, y = mapping(arrays["public"][label < 10])[:RECORDS, None], label[label < 10][:RECORDS]
    test = mapping(arrays["public_test"][held < 10]), held[held < 10]
    table: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        if variant == "two views":  # the same gradient's length and noise as DP-SGD
            continue
        for epsilon in EPSILONS:
            row = table[f"{variant}, {epsilon:g}"] = {}
            for rate in RATES:
                row[f"{rate:g}"] = float(
                    np.mean(
                        [accuracy(trainers[variant, epsilon], rate, x, y, test) for _ in range(2)]
                    )
                )
            print(variant, epsilon, row, flush=True)
    return table


def compared(
    arrays: Mapping[str, np.ndarray],
    mapping: models.Features,
    trainers: Mapping[Any, Any],
    tuned: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns the accuracy of every variant, epsilon and private set."""
    private, mirror, images = (
        mapping(arrays[name]) for name in ("private", "private_mirror", "test")
    )
    test, rows = (images, arrays["test_label"]), []
    for epsilon in EPSILONS:
        for variant in VARIANTS:
            rates = tuned[f"{'DP-SGD' if variant == 'two views' else variant}, {epsilon:g}"]
            rate = float(max(rates, key=lambda rate: rates[rate]))
            for fold in range(FOLDS):
                here = slice(fold * RECORDS, (fold + 1) * RECORDS)
                views = [private[here], mirror[here]] if variant == "two views" else [private[here]]
                x, y = np.stack(views, axis=1), arrays["private_label"][here]
                right = accuracy(trainers[variant, epsilon], rate, x, y, test)
                rows.append(
                    {
                        "variant": variant,
                        "epsilon": epsilon,
                        "seed": fold,
                        "rate": rate,
                        "accuracy": right,
                    }
                )
            print(variant, epsilon, rate, [row["accuracy"] for row in rows[-FOLDS:]], flush=True)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of docs/results/public_checkpoint.md."""
    header = ["method"]
    for epsilon in EPSILONS:
        header += [f"epsilon {epsilon:g}", "less DP-SGD"]
    lines = []
    for variant in VARIANTS:
        cells = [variant]
        for epsilon in EPSILONS:
            cells += _cells(results.select(rows, epsilon=epsilon), variant)
        lines.append(cells)
    return timing.page_table(header, lines)


def _cells(rows: Sequence[Mapping[str, Any]], variant: str) -> tuple[str, str]:
    """Returns the accuracy of a variant, and its gain over DP-SGD on the same images."""
    accuracies = [row["accuracy"] for row in results.select(rows, variant=variant)]
    mean, _, error = results.moments(accuracies)
    accuracy = f"{100 * mean:.1f} ({100 * error:.1f})"
    if variant == "DP-SGD":
        return accuracy, ""
    coordinates = ("variant", "epsilon", "seed")
    gap = results.paired_difference(rows, "variant", "DP-SGD", variant, coordinates=coordinates)
    return accuracy, f"{100 * gap.mean:+.1f} ({100 * gap.error:.1f})"


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    began = time.process_time()
    arrays = features(flags)
    mapping = models.Features.from_public(arrays["public"], dimensions=256, whiten=0.5)
    anchors = {
        "views": mapping(arrays["public"][:256])[:, None],
        "label": np.random.default_rng(0).integers(10, size=256, dtype=np.int32),
    }
    trainers = {}
    for variant in VARIANTS:
        for epsilon in EPSILONS:
            trainers[variant, epsilon] = trainer(variant, epsilon, anchors)
    rates = chosen_rates(arrays, mapping, trainers)
    rows = compared(arrays, mapping, trainers, rates)
    print(table(rows))
    return {
        "cpu_seconds": round(time.process_time() - began),
        "records": RECORDS,
        "steps": STEPS,
        "clip_norm": CLIP,
        "tuned_on_cifar100": rates,
        "rows": rows,
    }
