"""The two parties of Split Adaptation, one per process: `launch.split_server` and
`launch.split_client`.

Each party reads its own part of a config such as `configs/split/two_parties.py`, whose comments
explain the fields. It has its own data and workdir. The server asks and the client answers, with
the packages of `jaxdp.split.exchange` and by the means of `launch.links`. A party that starts again
in the same workdir continues. The client answers a repeated question as before, and paid results
are kept and not paid again. Both raise TimeoutError if nothing comes from the other party within
the timeout. Both raise ValueError if the workdir belongs to another run, or if config, data and
packages do not fit. Nothing is spent or sent then.
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
from jaxdp.data import Examples, from_arrays, resize_images
from jaxdp.data import open as open_spec
from jaxdp.data.labels import judge, predicted
from jaxdp.data.selection import everything, few_shots
from jaxdp.files import (
    Limits,
    Package,
    pack,
    read_json,
    read_npz,
    read_package,
    shown,
    unpack,
    write_durably,
    write_json,
    write_package,
)
from jaxdp.models import Preprocessing
from jaxdp.models.pretrained import load_params, save_params
from jaxdp.privacy import Account, Ledger
from jaxdp.release import Release, Till, alone, stream
from jaxdp.split import exchange as messages
from jaxdp.split.backbone import in_batches
from jaxdp.split.checks import check_labels
from jaxdp.split.copies import plan_copies, plan_noisy
from jaxdp.split.noisy_upload import Released, plan_release
from jaxdp.split.server import adapt_by_client

from . import data, frame, links, models, plans
from .settings import check_numbers
from .study import Fields

DATASET = "client"  # the default of config.dataset
_MOST = 1000  # images by which the projection is fitted
_BATCH = 256  # queries that are answered together
_Path = str | os.PathLike[str]
_Images = Fields  # image and label

# --- The server ----------------------------------------------------------------------------------


def run_server(
    config: Any,
    workdir: _Path,
    client: links.Parties,
    *,
    timeout: float = 3600.0,
    limits: Limits | None = None,
) -> Fields:
    """Runs the server: sends a frontend, adapts the backend to a client's upload, answers the
    client's queries.

    The workdir holds the backbone (if it was trained here), the backend and the adapted backend.
    `client` has one party. `limits` bound the declared sizes in its packages.

    Returns:
      The content of result.json: mode and bytes of the upload, and the number of queries.
    """
    root = pathlib.Path(workdir)
    with alone(root), contextlib.ExitStack() as bound:
        check_numbers(config)
        frame.check_same_config("split server", config, root)
        if len(client.names) != 1:
            names = ", ".join(map(shown, client.names)) or "none"
            raise ValueError(
                f"the server of Split Adaptation has one client, got {names}. Give --exchange one "
                "folder, or --keys a folder that was made with one --party."
            )
        model = models.network(config.model)
        cut = config.cut or split.two_thirds(model.model)
        backbone = split.Backbone(model.model, model.preprocessing, cut)
        messages.check_augmentation(backbone, copies=config.copies, n_patches=config.n_patches)
        bound.enter_context(frame.bind("split server", config, root))
        if not (root / "frontend").exists():
            _make_frontend(config, backbone, root)
        conversation = _Conversation(config, root, client, timeout, limits)
        result = conversation.result(backbone)
        write_json(root / "result.json", result)
        private = result["mode"] == "private"
        labels = "" if private else " except the loss gradients, which reveal the labels"
        print(
            f"server: The client uploaded {result['bytes']:,} bytes ({result['mode']}). "
            f"{result['queries']} queries were answered. The server read no other private "
            f"data{labels}."
        )
        return result


@dataclasses.dataclass(frozen=True)
class _Conversation:
    """The server's questions to a client. All that they need is in its workdir.

    Attributes:
      config, root, client, timeout, limits: The arguments of `run_server`.
    """

    config: Any
    root: pathlib.Path
    client: links.Parties
    timeout: float
    limits: Limits | None

    def ask(self, question: bytes) -> bytes:
        """Returns the client's answer. Raises TimeoutError if none comes."""
        (name,) = self.client.names
        answers = self.client.ask({name: question}, timeout=self.timeout)
        if name not in answers:
            raise TimeoutError(
                f"{shown(name)} gave no answer within {self.timeout:g} seconds, or refused, as its "
                "own output says. Start both again as before. They keep what they sent and pay "
                "nothing twice."
            )
        return answers[name]

    def result(self, backbone: split.Backbone) -> Fields:
        """Sends the frontend, adapts the backend to the upload, and answers the queries."""
        frontend = read_package(self.root / "frontend")
        shipment = messages.unpack_frontend(frontend)
        package = self.ask(frontend)
        upload = messages.unpack_upload(package, shipment, limits=self.limits)
        name = hashlib.sha256(package).hexdigest()
        adapted = split.Adapted(
            dataclasses.replace(
                backbone, model=backbone.model.clone(num_classes=upload.num_classes)
            ),
            self._adapted(shipment, upload, name),
        )
        ready = self.ask(pack("adapted", fields={"upload": name}, arrays={}))
        queries = messages.unpack_queries(ready, shipment, limits=self.limits)
        logits: Any = np.zeros((0, upload.num_classes))
        if len(queries):
            logits = in_batches(adapted.logits, queries, _BATCH)
        arrays = {"logits": np.asarray(logits, np.float32)}
        self.ask(pack("answers", fields={"upload": name}, arrays=arrays))
        mode = messages.mode_of(upload)
        return {"mode": mode, "bytes": len(package), "queries": len(queries)}

    def _adapted(self, shipment: messages.Shipment, upload: Any, name: str) -> Any:
        """Returns the backend that was adapted to an upload. It is made once."""
        path = self.root / f"adapted-{name}.safetensors"

        def gradients(logits: np.ndarray, images: np.ndarray) -> np.ndarray:
            question = pack(
                "logits", fields={"upload": name}, arrays={"logits": logits, "images": images}
            )
            answer = unpack(
                self.ask(question),
                "gradients",
                limits=self.limits,
                name="the package 'gradients'",
            )
            messages.check_arrays(answer.arrays, {"gradients": (logits.shape, np.float32)})
            return answer.arrays["gradients"]

        if not path.exists():
            back = load_params(self.root / "backend.safetensors")
            save_params(path, _adapted(self.config, shipment, back, upload, gradients))
        return load_params(path)


def _make_frontend(config: Any, backbone: split.Backbone, root: pathlib.Path) -> None:
    """Makes everything that the server needs before it meets a client, on its own PUBLIC images."""
    images = _read(config.data, backbone.preprocessing)
    if images.num_classes != backbone.num_classes:
        raise ValueError(
            f"config.model.num_classes must be {images.num_classes}, got {backbone.num_classes}."
        )
    if not config.model.checkpoint:
        part = config.data.pretrain_fraction
        pretraining, images = images.split((part, 1 - part), seed=config.seed)
    model = models.source_model(config, lambda: pretraining, root, "backbone")
    key = stream(config.seed.to_bytes(16, "little"), "server", impl="threefry2x32")
    keys = jax.random.split(key, 2)
    batch = images.gather(np.arange(len(images)))
    both = split.merge_hilbert(jnp.asarray(batch["image"]), jnp.asarray(batch["label"]))
    frontends = split.calibrate_frontends(
        keys[0], backbone, model.params, *both, **config.calibration
    )
    back = split.tune_backend(keys[1], backbone, model.params, frontends, *both, **config.tuning)
    save_params(root / "backend.safetensors", back)
    shipment = messages.Shipment(backbone, frontends[0], config.copies, config.n_patches)
    if config.directions:
        x = split.represent(
            backbone, frontends[0], frontends[0].params, jnp.asarray(batch["image"][:_MOST])
        )
        projection = split.public_projection(x, config.directions)
        norms = np.linalg.norm(np.asarray(split.project(projection, x)), axis=1)
        shipment = shipment._replace(projection=projection, clip_norm=float(np.median(norms)))
    write_package(root / "frontend", messages.pack_frontend(shipment))


def _adapted(config: Any, shipment: Any, back: Any, upload: Any, ask: messages.Gradients) -> Fields:
    secret = stream(config.seed.to_bytes(16, "little"), "adapt", impl="threefry2x32")
    copies_key, key = jax.random.split(secret)
    options: Fields = {"num_classes": upload.num_classes, **config.adaptation}
    backbone, copying = shipment.backbone, _copying(shipment)
    if isinstance(upload, messages.Uploaded):
        return adapt_by_client(key, backbone, back, jax.device_put(upload), ask, **options).back
    private = isinstance(upload, messages.Private)
    if private:
        x = split.lift(shipment.projection, upload.released.features)
    else:
        x = jnp.asarray(upload.representations)
    # The upload has its noise already.
    copies = split.augment_then_noise(copies_key, x, laplace_scale=0.0, **copying)
    if not private:
        return adapt_by_client(key, backbone, back, copies, ask, **options).back
    matrix = jnp.asarray(split.label_noise_matrix(upload.num_classes, upload.release.label_epsilon))
    labels = jnp.asarray(upload.released.labels)
    return split.adapt(key, backbone, back, copies, labels, label_noise=matrix, **options).back


def _copying(shipment: messages.Shipment) -> Fields:
    return {
        "copies": shipment.copies,
        "n_patches": shipment.n_patches,
        "prefix_tokens": shipment.backbone.prefix_tokens,
    }


# --- The client ---------------------------------------------------------------------------------


def run_client(
    config: Any,
    workdir: _Path,
    serve: links.Serve,
    *,
    choice: frame.Choice = frame.DEFAULT,
    queries: bool | None = None,
    limits: Limits | None = None,
) -> Fields:
    """Runs the client: uploads representations of its few images, and has its test images
    classified.

    The workdir holds the upload, the queries, the predictions, and the secret seed until the run
    has ended. A client that starts again after the end sends the kept packages. Its secret, which
    perturbed the frontend, is deleted.

    Args:
      config, workdir: As above.
      serve: `serve(answer, until=)` answers the server's questions.
      choice: What the user says about the ledger that pays (`launch.frame.ledgers`). The data set
        is "NAME/images", its adjacency "replace_one", its unit an image with its label. NAME is
        `config.dataset`, or if that is "" the name of the file of images. If it is not registered,
        a private upload registers it with a budget of its epsilon, and the other modes without a
        budget.
      queries: Whether the server classifies the test images. None means yes, except in the private
        mode. Their representations have Laplace noise of `config.query_laplace_scale`. No guarantee
        covers them in any mode: the ledger gets a release without proof on "NAME/queries".
      limits: Limits on the server's packages and on the file of images.

    Returns:
      The content of result.json: mode, bytes of the upload, epsilon (None is infinite), delta, and
        accuracy (None without queries or without their labels).

    Raises:
      BudgetExceeded: The ledger refuses the upload. Nothing is sent.
      ValueError: Another ledger counts the images. Nothing is sent. Or as above.
    """
    root = pathlib.Path(workdir)
    with Till(root, forget="run") as till, contextlib.ExitStack() as bound:
        check_numbers(config)
        frame.check_same_config("split client", config, root)
        frame.chosen(choice, config, root)  # raises before the server is asked for anything
        client = _Client(config, root, choice, queries, limits, till, bound)
        serve(client.answer, until=lambda: client.result is not None)
        assert client.result is not None
        print(_statement(client.result))
        return client.result


@dataclasses.dataclass
class _Client:
    """The answers of a client. All that they need is in its workdir, because it may have been
    started again.

    Attributes:
      config, root, choice, queries, limits: The arguments of `run_client`.
      till, bound: Those of the run.
      result: The result of the run, None until its last question.
    """

    config: Any
    root: pathlib.Path
    choice: frame.Choice
    queries: bool | None
    limits: Limits | None
    till: Till
    bound: contextlib.ExitStack
    result: Fields | None = None

    def answer(self, question: bytes) -> bytes:
        """Answers a question, a repeated one as before."""
        others = {"logits": self._loss, "adapted": self._adapted, "answers": self._answers}
        package = unpack(
            question, ["frontend", *others], limits=self.limits, name="the server's package"
        )
        if package.kind == "frontend":
            return self._frontend(question)
        upload = hashlib.sha256(read_package(self.root / "upload")).hexdigest()
        if package.fields.get("upload") != upload:
            raise ValueError(
                "the server's package is about another upload. Use a new workdir at one of the "
                "parties."
            )
        return others[package.kind](package)

    @functools.cached_property
    def _shipment(self) -> messages.Shipment:
        return messages.unpack_frontend(read_package(self.root / "frontend"), limits=self.limits)

    @functools.cached_property
    def _stored(self) -> tuple[_Images, _Images]:
        # Read once: what the registry notes is what is uploaded.
        return _stored(self.config, self._shipment.backbone.preprocessing, self.limits)

    @functools.cached_property
    def _images(self) -> tuple[_Images, _Images]:
        return _prepared(self.config, self._shipment.backbone.preprocessing, *self._stored)

    @functools.cached_property
    def _ledger(self) -> pathlib.Path:
        """The path of the ledger that pays."""
        private = _private_sets(self.config, *self._stored, queries=self._asks)
        return frame.settled(self.choice, self.config, self.root, private)

    @functools.cached_property
    def _opened(self) -> Ledger:
        """The ledger that pays. The workdir is bound to it first."""
        path = self._ledger
        self.bound.enter_context(frame.bind("split client", self.config, self.root, path))
        return self.bound.enter_context(Ledger(path, run=frame.run_of(self.root)))

    @property
    def _asks(self) -> bool:
        has_queries = self.queries
        if has_queries is None:
            has_queries = self.config.mode != "private"
        return has_queries and len(self._images[1]["image"]) > 0

    def _frontend(self, question: bytes) -> bytes:
        """Pays for the upload and the queries, makes and keeps them, and returns the upload."""
        config, root, kept = self.config, self.root, self.root / "frontend"
        if kept.exists() and read_package(kept) != question:
            raise ValueError(
                f"{shown(root)} was started with another frontend. Use a new workdir at one of "
                "the parties."
            )
        shipment = self._shipment = messages.unpack_frontend(question, limits=self.limits)
        few, test = self._images
        _check_client(config, shipment, few, test)
        named_test = {f"test_{name}": array for name, array in test.items()}
        _check_same_images({**few, **named_test}, root / "images.json")
        packages = ("upload", "queries") if self._asks else ("upload",)
        missing = [name for name in packages if not (root / name).exists()]
        if "queries" in missing and (root / "result.json").exists():
            raise ValueError(
                f"the run in {shown(root)} has ended without queries, and the secret that "
                "perturbed its frontend is deleted. Use a new workdir at both parties, and ask "
                "from the start. The new run pays for its own upload."
            )
        images, queries = self._accounts(len(few["image"]), len(test["image"]))
        self.till.settle([images] if queries is None else [images, queries])
        if missing:
            secret = self.till.stream("frontend")
            noisy = split.perturb_params(secret, shipment.frontend.params, alpha=config.alpha)
            extract = functools.partial(
                split.represent, shipment.backbone, shipment.frontend, noisy
            )
        if "upload" in missing:
            upload = _upload(
                config, shipment, images, extract(few["image"]), few["label"], root / "upload"
            )
            write_package(kept, question)
            self.till.release(upload)
        if "queries" in missing:
            assert queries is not None  # they are missing only where they are sent
            release = plan_noisy(
                queries,
                representations=extract(test["image"]),
                laplace_scale=config.query_laplace_scale,
                label="split adaptation, queries",
            )
            keep = functools.partial(self._keep_queries, shipment)
            self.till.release(dataclasses.replace(release, keep=keep))
        return read_package(root / "upload")

    def _accounts(self, images: int, queries: int) -> tuple[Account, Account | None]:
        """Returns the accounts of the images and of the queries, None if there are none."""
        config = self.config
        common = {"adjacency": "replace_one", "unit": "image", "delta": config.delta}
        common |= frame.people(config, "client")
        unproven: Fields = common | {"allow_unproven": True}
        terms = unproven
        if config.mode == "private":  # the budget of the images is what their upload costs
            terms = common | {"epsilon": config.epsilon}
        name = _images_name(config)
        account = frame.own_account(self._opened, name, records=images, **terms)
        if not self._asks:
            return account, None
        name = _queries_name(config)
        return account, frame.own_account(self._opened, name, records=queries, **unproven)

    def _keep_queries(self, shipment: messages.Shipment, made: Any) -> None:
        write_package(self.root / "queries", messages.pack_queries(made, shipment))

    def _loss(self, package: Package) -> bytes:
        if self.config.mode == "private":
            raise ValueError(
                "mode='private' answers no question about the loss, because gradients reveal "
                "labels."
            )
        gradients = messages.loss_gradients(self._images[0]["label"], self.config.num_classes)
        answer = gradients(package.arrays["logits"], package.arrays["images"])
        return pack("gradients", fields={}, arrays={"gradients": answer})

    def _adapted(self, package: Package) -> bytes:
        if self._asks:
            return read_package(self.root / "queries")
        return messages.pack_queries(
            np.zeros((0, *self._shipment.backbone.tokens), np.float32), self._shipment
        )

    def _answers(self, package: Package) -> bytes:
        """Ends the run."""
        config, root, accuracy = self.config, self.root, None
        _, test = self._images
        queries = len(test["image"]) if self._asks else 0
        logits_shape = (queries, config.num_classes)
        messages.check_arrays(package.arrays, {"logits": (logits_shape, np.float32)})
        if queries:
            logits = package.arrays["logits"]
            write_durably(root / "predictions.npy", lambda file: np.save(file, predicted(logits)))
            if "label" in test:
                accuracy = float(judge(logits, test["label"]).correct.mean())
        account = self._opened.account(_images_name(config))
        epsilon = account.epsilon(delta=config.delta)
        self.result = {
            "mode": config.mode,
            "bytes": len(read_package(root / "upload")),
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": config.delta,
            "queries": queries,
            "accuracy": accuracy,
        }
        write_json(root / "result.json", self.result)
        return pack("end", fields={}, arrays={})


def _check_client(config: Any, shipment: messages.Shipment, few: _Images, test: _Images) -> None:
    """Refuses what would fail later, before anything is spent or sent."""
    if config.mode not in messages.MODES:
        raise ValueError(f"mode must be one of {', '.join(messages.MODES)}, got {config.mode!r}.")
    if config.mode == "private":
        if shipment.projection is None:
            raise ValueError(
                "mode='private' needs a frontend with a projection. The server has "
                "config.directions=0."
            )
        _private_release(config, shipment.clip_norm)
    for images in (few, test) if len(test["image"]) else (few,):
        shipment.backbone.check_images(images["image"])
        if "label" in images:
            check_labels(images["label"], len(images["image"]), config.num_classes)
    shipment.check_count(len(few["image"]))


def _upload(
    config: Any,
    shipment: messages.Shipment,
    account: Account,
    x: jax.Array,
    labels: np.ndarray,
    folder: pathlib.Path,
) -> Release[Any]:
    """Returns the release of the upload in the config's mode. `folder` keeps the upload as it is
    sent.
    """
    label = f"split adaptation, {config.mode}"
    make: Any = messages.MODES[config.mode]

    def send(upload: Any) -> None:
        write_package(folder, messages.pack_upload(upload, shipment))

    if config.mode == "private":
        assert shipment.projection is not None  # `_check_client` has checked
        release, projection = _private_release(config, shipment.clip_norm), shipment.projection
        private = plan_release(
            account,
            release=release,
            representations=x,
            labels=labels,
            projection=projection,
            label=label,
        )
        return dataclasses.replace(private, keep=lambda made: send(make(Released(**made), release)))
    if not np.isfinite(x).all():
        raise ValueError(
            "representations must be finite, but some are NaN or infinite. Leave those images out."
        )
    plan: Any = plan_noisy
    if config.mode != "noise_once":
        plan = functools.partial(plan_copies, **_copying(shipment))
    noisy = plan(account, representations=x, laplace_scale=config.laplace_scale, label=label)
    return dataclasses.replace(noisy, keep=lambda made: send(make(made, config.num_classes)))


def _private_release(config: Any, clip_norm: float | None) -> split.PrivateRelease:
    assert clip_norm is not None  # it comes with the projection
    terms = {name: config[name] for name in ("epsilon", "delta", "num_classes", "label_share")}
    return split.PrivateRelease.calibrated(clip_norm=clip_norm, **terms)


def client_charges(
    config: Any,
    workdir: _Path | None = None,
    *,
    choice: frame.Choice = frame.DEFAULT,
    queries: bool | None,
) -> list[plans.Item]:
    """Returns what `run_client` would charge. The frontend, which it has not received yet, changes
    nothing of it.
    """
    private = config.mode == "private"
    has_queries = not private if queries is None else queries
    path = _asked(config, workdir, choice, has_queries)
    ledger = frame.LEDGER if path is None else os.fspath(path.absolute())
    common = {"adjacency": "replace_one", "unit": "image", "delta": config.delta}
    unproven = common | {"allow_unproven": True}
    if private:
        event, terms = _private_release(config, 1.0).event, common | {"epsilon": config.epsilon}
    else:
        event, terms = split.published_event(config.laplace_scale), unproven
    name = _images_name(config)
    charges = [plans.Item(f"the upload, {config.mode}", name, event, terms, ledger=ledger)]
    if has_queries:
        event, name = split.published_event(config.query_laplace_scale), _queries_name(config)
        charges.append(plans.Item("the queries", name, event, unproven, ledger=ledger))
    return charges


def _statement(result: Fields) -> str:
    lines, epsilon = [f"client: uploaded {result['bytes']:,} bytes"], result["epsilon"]
    if result["accuracy"] is not None:
        lines.append(f"accuracy {result['accuracy']:.4f} on {result['queries']} test images")
    if epsilon is None:
        lines.append(
            "epsilon = inf (empirical only): no proof covers representations, copies and labels"
        )
    else:
        lines.append(
            f"epsilon = {epsilon:.6g} at delta = {result['delta']:g} for replacing one image and "
            "its label"
        )
    if result["queries"]:
        lines.append(
            f"The {result['queries']} queries are representations of other images, with epsilon = "
            "inf on the ledger (--noqueries sends none)"
        )
    return "\n".join(lines)


def _asked(
    config: Any, workdir: _Path | None, choice: frame.Choice, has_queries: bool
) -> pathlib.Path | None:
    """Returns the ledger that would pay, None for a new one in the workdir."""
    root = None if workdir is None else pathlib.Path(workdir)
    if not config.get("images"):  # the frontend says how images in a folder are prepared
        return frame.chosen(choice, config, root)
    stored = _stored(config, None, None)
    private = _private_sets(config, *stored, queries=has_queries)
    return frame.asked(choice, config, root, private)


def _images_name(config: Any) -> str:
    """Returns the name of a client's few images in its ledger."""
    return f"{_dataset(config)}/images"


def _queries_name(config: Any) -> str:
    """Returns the name of a client's test images in its ledger."""
    return f"{_dataset(config)}/queries"


def _dataset(config: Any) -> str:
    # A config of an earlier version has no such field, and its ledger has the default.
    named = config.get("dataset", DATASET)
    return named or pathlib.Path(config.get("images", "")).stem or DATASET


def _private_sets(
    config: Any, few: _Images, test: _Images, *, queries: bool
) -> list[frame.PrivateSet]:
    """Returns the sets of images that leave the client, for the registry."""
    is_public = not config.images and data.whole(config.data).is_public
    images = from_arrays(**few)
    private = [frame.PrivateSet(_images_name(config), images, is_public)]
    if queries and len(test["image"]):
        queried = from_arrays(**test)
        private.append(frame.PrivateSet(_queries_name(config), queried, is_public))
    return private


def _stored(
    config: Any, preprocessing: Preprocessing | None, limits: Limits | None
) -> tuple[_Images, _Images]:
    """Returns the client's few images with labels, and its test images, with labels if they
    exist: as they are stored.

    Args:
      config, limits: As in `run_client`.
      preprocessing: For images of several sizes, which the model's preprocessing cuts.
    """
    if config.images:
        arrays = read_npz(
            config.images,
            ["image", "label"],
            optional=("test_image", "test_label"),
            remedy="Make it again with the arrays 'image' and 'label'.",
            limits=limits,
        )
        few = {"image": arrays["image"], "label": arrays["label"]}
        test = {"image": arrays.get("test_image", few["image"][:0])}
        if "test_label" in arrays:
            test["label"] = arrays["test_label"]
        return few, test
    prepare = None if preprocessing is None else preprocessing.prepare
    images = open_spec(data.whole(config.data), prepare=prepare)
    pool, test_images = images.split((0.5, 0.5), seed=config.data_seed)
    return few_shots(pool, config.shots, seed=None), everything(test_images)


def _prepared(
    config: Any, preprocessing: Preprocessing, few: _Images, test: _Images
) -> tuple[_Images, _Images]:
    """Returns images in the size of the model, float32 in [0, 1]."""
    if config.images:
        return (
            few | {"image": preprocessing.prepare(few["image"])},
            test | {"image": preprocessing.prepare(test["image"])},
        )
    size = (preprocessing.size, len(preprocessing.mean))
    resized = [resize_images(from_arrays(**images), *size) for images in (few, test)]
    few, test = map(everything, resized)
    return few, test


def _check_same_images(arrays: Fields, path: pathlib.Path) -> None:
    """Raises ValueError for images that differ from the images of the workdir's upload."""
    sums = {
        name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        for name, array in arrays.items()
    }
    if path.exists() and read_json(path) != sums:
        raise ValueError(
            f"{shown(path.parent)} was started with other images or labels. Use a new workdir."
        )
    write_json(path, sums)


def _read(config: Any, preprocessing: Preprocessing) -> Examples:
    """Returns the images of the `data` part of a config, in the size of the model."""
    source = open_spec(data.whole(config), prepare=preprocessing.prepare)
    return resize_images(source, preprocessing.size, len(preprocessing.mean))
