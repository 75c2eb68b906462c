"""The two parties of Split Adaptation, one per process: `launch.split_server` and `launch.split_client`.

Each party reads its own part of a config such as `configs/split/two_parties.py`, whose comments explain the fields. It
has its own data and workdir. From the other party it reads only the packages of `jaxdp.split.exchange` in a folder. A
party that starts again in the same workdir continues. Sent packages stay sent, and paid results are kept and not paid
again. Both raise TimeoutError if the other party does not answer within `timeout` seconds. Both raise ValueError if the
workdir or the exchange folder belongs to another run, or if config, data and packages do not fit. Nothing is spent or
sent then.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import split
from jaxdp.data import Examples, resize_images
from jaxdp.files import Limits, read_json, read_npz, write_durably, write_json
from jaxdp.models import Preprocessing
from jaxdp.models.pretrained import load_params, save_params
from jaxdp.privacy import Account, Ledger
from jaxdp.release import Release, Till, alone, stream
from jaxdp.split import exchange as messages
from jaxdp.split.backbone import in_batches
from jaxdp.split.checks import check_labels
from jaxdp.split.copies import plan_copies, plan_noisy
from jaxdp.split.noisy_upload import Released, plan_release
from jaxdp.split.package import package_bytes, read_package, write_package
from jaxdp.split.server import adapt_by_client

from . import data, frame, models, plans
from .settings import check_numbers

DATASET, QUERIES = "client/images", "client/queries"
_MOST = 1000  # images by which the projection is fitted
_Path = str | os.PathLike[str]
_Images = dict[str, Any]  # image and label

# --- The server -------------------------------------------------------------------------------------------------------


def run_server(
    config: Any, workdir: _Path, exchange: _Path, *, timeout: float = 3600.0, limits: Limits | None = None
) -> dict[str, Any]:
    """Runs the server: sends a frontend, adapts the backend to a client's upload, answers the client's queries.

    The workdir holds the backbone (if it was trained here), the backend and the adapted backend. The exchange folder is
    for one client. `limits` bound the declared sizes in the client's packages.

    Returns:
      The content of result.json: mode and bytes of the upload, and the number of queries.
    """
    root, shared = pathlib.Path(workdir), pathlib.Path(exchange)
    with alone(root), contextlib.ExitStack() as bound:
        check_numbers(config)
        frame.check_same_config("split server", config, root)
        model = models.network(config.model)
        backbone = split.Backbone(model.model, model.preprocessing, config.cut or split.two_thirds(model.model))
        messages.check_augmentation(backbone, copies=config.copies, n_patches=config.n_patches)
        bound.enter_context(frame.bind("split server", config, root))
        if not (root / "frontend").exists():
            _make_frontend(config, backbone, root)
        shipment = messages.receive_frontend(root / "frontend")
        messages.share(root / "frontend", shared / "frontend", "frontend")
        messages.wait_for(shared / "upload", timeout=timeout, sender="the client")
        upload = messages.receive_upload(shared / "upload", shipment, limits=limits)
        name = messages.manifest_sum(shared / "upload")
        kept, done = root / f"adapted-{name}.safetensors", shared / "adapted"
        if done.exists() and (not kept.exists() or read_package(done, "adapted").fields != {"upload": name}):
            raise ValueError(
                f"{done} is of another server or another upload. Delete {shared} with all its files, or exchange "
                "through another folder."
            )
        if not kept.exists():
            ask = messages.file_gradients(shared / "loss", timeout=timeout)
            back = load_params(root / "backend.safetensors")
            save_params(kept, _adapted(config, shipment, back, upload, ask))
        if not done.exists():
            write_package(done, "adapted", fields={"upload": name}, arrays={})
        backbone = dataclasses.replace(backbone, model=backbone.model.clone(num_classes=upload.num_classes))
        asked = _answer(split.Adapted(backbone, load_params(kept)), shipment, shared, limits)
        mode = messages.mode_of(upload)
        result = {"mode": mode, "bytes": package_bytes(shared / "upload"), "queries": asked}
        write_json(root / "result.json", result)
        labels = "" if mode == "private" else " except the loss gradients, which reveal the labels"
        print(
            f"server: The client uploaded {result['bytes']:,} bytes ({mode}). {asked} queries were answered. The "
            f"server read no other private data{labels}."
        )
        return result


def _make_frontend(config: Any, backbone: split.Backbone, root: pathlib.Path) -> None:
    """Makes everything that the server needs before it meets a client, on its own PUBLIC images."""
    images = _read(config.data, backbone.preprocessing)
    if images.num_classes != backbone.num_classes:
        raise ValueError(f"config.model.num_classes must be {images.num_classes}, got {backbone.num_classes}.")
    if not config.model.checkpoint:
        part = config.data.pretrain_fraction
        pretraining, images = images.split((part, 1 - part), seed=config.seed)
    model = models.source_model(config, lambda: pretraining, root, "backbone")
    key = stream(config.seed.to_bytes(16, "little"), "server", impl="threefry2x32")
    keys = jax.random.split(key, 2)
    batch = images.gather(np.arange(len(images)))
    both = split.merge_hilbert(jnp.asarray(batch["image"]), jnp.asarray(batch["label"]))
    frontends = split.calibrate_frontends(keys[0], backbone, model.params, *both, **config.calibration)
    back = split.tune_backend(keys[1], backbone, model.params, frontends, *both, **config.tuning)
    save_params(root / "backend.safetensors", back)
    shipment = messages.Shipment(backbone, frontends[0], config.copies, config.n_patches)
    if config.directions:
        x = split.represent(backbone, frontends[0], frontends[0].params, jnp.asarray(batch["image"][:_MOST]))
        projection = split.public_projection(x, config.directions)
        norms = np.linalg.norm(np.asarray(split.project(projection, x)), axis=1)
        shipment = shipment._replace(projection=projection, clip_norm=float(np.median(norms)))
    messages.send_frontend(root / "frontend", shipment)


def _adapted(config: Any, shipment: Any, back: Any, upload: Any, ask: messages.Gradients) -> dict[str, Any]:
    copies_key, key = jax.random.split(stream(config.seed.to_bytes(16, "little"), "adapt", impl="threefry2x32"))
    options: dict[str, Any] = {"num_classes": upload.num_classes, **config.adaptation}
    backbone, copying = shipment.backbone, _copying(shipment)
    if isinstance(upload, messages.Uploaded):
        return adapt_by_client(key, backbone, back, jax.device_put(upload), ask, **options).back
    private = isinstance(upload, messages.Private)
    x = split.lift(shipment.projection, upload.released.features) if private else jnp.asarray(upload.representations)
    copies = split.augment_then_noise(copies_key, x, laplace_scale=0.0, **copying)  # the noise is there already
    if not private:
        return adapt_by_client(key, backbone, back, copies, ask, **options).back
    matrix = jnp.asarray(split.label_noise_matrix(upload.num_classes, upload.release.label_epsilon))
    labels = jnp.asarray(upload.released.labels)
    return split.adapt(key, backbone, back, copies, labels, label_noise=matrix, **options).back


def _copying(shipment: messages.Shipment) -> dict[str, Any]:
    prefix_tokens = shipment.backbone.prefix_tokens
    return {"copies": shipment.copies, "n_patches": shipment.n_patches, "prefix_tokens": prefix_tokens}


def _answer(adapted: split.Adapted, shipment: messages.Shipment, shared: pathlib.Path, limits: Limits | None) -> int:
    """Answers the queries if they have no answers yet. Returns the number of queries."""
    asked, path = shared / "queries", shared / "answers"
    if not asked.exists():
        return 0
    queries = messages.receive_queries(asked, shipment, limits=limits)
    if path.exists():
        messages.receive_answers(path, queries=asked, num_classes=adapted.backbone.num_classes)
    else:
        messages.send_answers(path, in_batches(adapted.logits, queries, 256), queries=asked)
    return len(queries)


# --- The client -------------------------------------------------------------------------------------------------------


def run_client(
    config: Any,
    workdir: _Path,
    exchange: _Path,
    *,
    ledger_path: _Path | None = None,
    queries: bool | None = None,
    timeout: float = 3600.0,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Runs the client: uploads representations of its few images, and has its test images classified.

    The workdir holds the upload, the predictions, and the secret seed until the run has ended. A client that starts
    again after the end sends the kept packages. Its secret, which perturbed the frontend, is deleted.

    Args:
      config, workdir, exchange, timeout, limits: As above. The limits also bound the file of images.
      ledger_path: The ledger that pays, by default ledger.sqlite in the workdir. The data set is "client/images", its
        adjacency "replace_one", its unit an image with its label. If it is not registered, a private upload registers
        it with a budget of its epsilon, and the other modes without a budget.
      queries: Whether the server classifies the test images. None means yes, except in the private mode. Their
        representations have Laplace noise of `config.query_laplace_scale`. No guarantee covers them in any mode: the
        ledger gets a release without proof on "client/queries".

    Returns:
      The content of result.json: mode, bytes of the upload, epsilon (None is infinite), delta, and accuracy (None
        without queries or without their labels).

    Raises:
      BudgetExceeded: The ledger refuses the upload. Nothing is sent.
    """
    root, shared = pathlib.Path(workdir), pathlib.Path(exchange)
    ledger_path = ledger_path or root / "ledger.sqlite"
    with Till(root, forget="run") as till, Ledger(ledger_path) as ledger, contextlib.ExitStack() as bound:
        check_numbers(config)
        frame.check_same_config("split client", config, root)
        messages.wait_for(shared / "frontend", timeout=timeout, sender="the server")
        shipment = messages.receive_frontend(shared / "frontend", limits=limits)
        few, test = _client_images(config, shipment.backbone.preprocessing, limits)
        _check_client(config, shipment, few, test)
        _check_same_images({**few, **{f"test_{name}": array for name, array in test.items()}}, root / "images.json")
        for name in ("upload", "queries"):
            if (shared / name).exists() and not (root / name).exists():
                raise ValueError(
                    f"{shared / name} is of another client, or this client's workdir was lost. Nothing was spent now. "
                    "If it was this client's, restore the ledger that paid or register its cost before any other "
                    f"release. To start again, delete {shared} with all its files, or exchange through another folder."
                )
        private, count = config.mode == "private", len(test["image"])
        asks = (not private if queries is None else queries) and count > 0
        missing = [name for name in ("upload", "queries")[: 1 + asks] if not (root / name).exists()]
        if "queries" in missing and (root / "result.json").exists():
            raise ValueError(
                f"the run in {root} has ended without queries, and the secret that perturbed its frontend is deleted. "
                "Use a new workdir and another exchange folder, and ask from the start. The new run pays for its own "
                "upload."
            )
        bound.enter_context(frame.bind("split client", config, root))
        # What a private upload costs is the budget of the images.
        terms = {"epsilon": config.epsilon} if private else {"allow_unproven": True}
        images = _account(ledger, DATASET, records=len(few["image"]), delta=config.delta, **terms)
        unproven = {"records": count, "delta": config.delta, "allow_unproven": True}
        others = [_account(ledger, QUERIES, **unproven)] if asks else []
        till.settle([images, *others])
        if missing:
            front = split.perturb_params(till.stream("frontend"), shipment.frontend.params, alpha=config.alpha)
            extract = functools.partial(split.represent, shipment.backbone, shipment.frontend, front)
        if "upload" in missing:
            till.release(_upload(config, shipment, images, extract(few["image"]), few["label"], root / "upload"))
        if "queries" in missing:
            x, scale = extract(test["image"]), config.query_laplace_scale
            what = plan_noisy(*others, representations=x, laplace_scale=scale, label="split adaptation, queries")
            keep = functools.partial(messages.send_queries, root / "queries", shipment=shipment)
            till.release(dataclasses.replace(what, keep=keep))
        if asks:
            messages.share(root / "queries", shared / "queries", "queries")
        messages.share(root / "upload", shared / "upload", "upload")
        gradients = messages.loss_gradients(few["label"], config.num_classes)
        answers = None if private else functools.partial(messages.answer, shared / "loss", gradients)
        messages.wait_for(shared / "adapted", timeout=timeout, sender="the server", meanwhile=answers)
        if read_package(shared / "adapted", "adapted").fields != {"upload": messages.manifest_sum(root / "upload")}:
            raise ValueError(f"{shared / 'adapted'} is about another upload. Delete {shared} with all its files.")
        accuracy = None
        if asks:
            messages.wait_for(shared / "answers", timeout=timeout, sender="the server")
            classes, asked = config.num_classes, root / "queries"
            found = messages.receive_answers(shared / "answers", queries=asked, num_classes=classes).argmax(1)
            write_durably(root / "predictions.npy", lambda file: np.save(file, found))
            accuracy = float(np.mean(found == test["label"])) if "label" in test else None
        epsilon = images.epsilon(delta=config.delta)
        result = {
            "mode": config.mode,
            "bytes": package_bytes(root / "upload"),
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": config.delta,
            "queries": count if asks else 0,
            "accuracy": accuracy,
        }
        write_json(root / "result.json", result)
        print(_statement(result))
        return result


def _check_client(config: Any, shipment: messages.Shipment, few: _Images, test: _Images) -> None:
    """Refuses what would fail later, before anything is spent or sent."""
    if config.mode not in messages.MODES:
        raise ValueError(f"mode must be one of {', '.join(messages.MODES)}, got {config.mode!r}.")
    if config.mode == "private":
        if shipment.projection is None:
            raise ValueError("mode='private' needs a frontend with a projection. The server has config.directions=0.")
        _private_release(config, shipment.clip_norm)
    for images in (few, test) if len(test["image"]) else (few,):
        shipment.backbone.check_images(images["image"])
        if "label" in images:
            check_labels(images["label"], len(images["image"]), config.num_classes)
    shipment.check_count(len(few["image"]))


def _upload(
    config: Any, shipment: messages.Shipment, account: Account, x: jax.Array, labels: np.ndarray, folder: pathlib.Path
) -> Release[Any]:
    """Returns the release of the upload in the config's mode. `folder` keeps the upload as it is sent."""
    given: dict[str, Any] = {"representations": x, "label": f"split adaptation, {config.mode}"}
    make: Any = messages.MODES[config.mode]

    def send(upload: Any) -> None:
        messages.send_upload(folder, upload, shipment)

    if config.mode == "private":
        assert shipment.projection is not None  # `_check_client` has checked
        release, projection = _private_release(config, shipment.clip_norm), shipment.projection
        private = plan_release(account, release=release, labels=labels, projection=projection, **given)
        return dataclasses.replace(private, keep=lambda made: send(make(Released(**made), release)))
    if not np.isfinite(x).all():
        raise ValueError("representations must be finite, but some are NaN or infinite. Leave those images out.")
    given["laplace_scale"] = config.laplace_scale
    if config.mode == "noise_once":
        what: Any = plan_noisy(account, **given)
    else:
        what = plan_copies(account, **given, **_copying(shipment))
    return dataclasses.replace(what, keep=lambda made: send(make(made, config.num_classes)))


def _private_release(config: Any, clip_norm: float | None) -> split.PrivateRelease:
    assert clip_norm is not None  # it comes with the projection
    terms = {name: config[name] for name in ("epsilon", "delta", "num_classes", "label_share")}
    return split.PrivateRelease.calibrated(clip_norm=clip_norm, **terms)


def client_charges(config: Any, *, ledger_path: _Path | None, queries: bool | None) -> list[plans.Item]:
    """Returns what `run_client` would charge. The frontend, which it has not received yet, changes nothing of it."""
    private, ledger = config.mode == "private", os.fspath(ledger_path or "ledger.sqlite")
    terms = {"adjacency": "replace_one", "unit": "image", "delta": config.delta}
    unproven = terms | {"allow_unproven": True}
    event = _private_release(config, 1.0).event if private else split.published_event(config.laplace_scale)
    mine = terms | {"epsilon": config.epsilon} if private else unproven
    charges = [plans.Item(f"the upload, {config.mode}", DATASET, event, mine, ledger=ledger)]
    if not private if queries is None else queries:
        event = split.published_event(config.query_laplace_scale)
        charges.append(plans.Item("the queries", QUERIES, event, unproven, ledger=ledger))
    return charges


def _account(ledger: Ledger, dataset: str, **terms: Any) -> Account:
    """Returns the account of a client's data set. Registers it unless its owner has registered it."""
    try:
        return ledger.account(dataset)
    except ValueError:
        ledger.register(dataset, adjacency="replace_one", unit="image", **terms)
        return ledger.account(dataset)


def _statement(result: dict[str, Any]) -> str:
    lines, epsilon = [f"client: uploaded {result['bytes']:,} bytes"], result["epsilon"]
    if result["accuracy"] is not None:
        lines.append(f"accuracy {result['accuracy']:.4f} on {result['queries']} test images")
    if epsilon is None:
        lines.append("epsilon = inf (empirical only): no proof covers representations, copies and labels")
    else:
        lines.append(f"epsilon = {epsilon:.6g} at delta = {result['delta']:g} for replacing one image and its label")
    if result["queries"]:
        lines.append(
            f"The {result['queries']} queries are representations of other images, with epsilon = inf on the ledger "
            "(--noqueries sends none)"
        )
    return "\n".join(lines)


def _client_images(config: Any, preprocessing: Preprocessing, limits: Limits | None) -> tuple[_Images, _Images]:
    """Returns the client's few images with labels, and its test images, with labels if they exist."""
    if config.images:
        optional, remedy = ("test_image", "test_label"), "Make it again with the arrays 'image' and 'label'."
        arrays = read_npz(config.images, ["image", "label"], optional=optional, remedy=remedy, limits=limits)
        few = {"image": preprocessing.prepare(arrays["image"]), "label": arrays["label"]}
        test = {"image": preprocessing.prepare(arrays.get("test_image", few["image"][:0]))}
        return few, test | ({"label": arrays["test_label"]} if "test_label" in arrays else {})
    halves = _read(config.data, preprocessing).split((0.5, 0.5), seed=config.data_seed)
    pool, test = (half.gather(np.arange(len(half))) for half in halves)
    found = [np.flatnonzero(pool["label"] == k)[: config.shots] for k in range(halves[0].num_classes)]
    if (fewest := min(map(len, found))) < config.shots:
        raise ValueError(f"shots must be at most {fewest}, the size of the smallest class, got {config.shots}.")
    rows = np.concatenate(found)
    return {name: array[rows] for name, array in pool.items()}, test


def _check_same_images(arrays: dict[str, Any], path: pathlib.Path) -> None:
    """Raises ValueError for images that differ from the images of the workdir's upload."""
    sums = {name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() for name, array in arrays.items()}
    if path.exists() and read_json(path) != sums:
        raise ValueError(
            f"{path.parent} was started with other images or labels. Use a new workdir and another exchange folder."
        )
    write_json(path, sums)


def _read(spec: Any, preprocessing: Preprocessing) -> Examples:
    """Returns the images that a config names, in the size of the model."""
    source = data.read(spec, preprocessing.prepare)
    return resize_images(source, preprocessing.size, len(preprocessing.mean))
