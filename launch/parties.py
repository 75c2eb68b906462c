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
import numpy as np

from jaxdp import split
from jaxdp.data import Examples, resize_images
from jaxdp.data import open as open_spec
from jaxdp.data.labels import judge, predicted
from jaxdp.files import (
    Limits,
    Package,
    pack,
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

from . import client_images, data, frame, links, models, plans
from .client_images import Images
from .settings import check_values
from .study import Fields

_MOST = 1000  # images by which the projection is fitted
_BATCH = 256  # queries that are answered together
_Path = str | os.PathLike[str]

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
        check_values(config)
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
        mode = result["mode"]
        labels = " except the loss gradients, which reveal the labels"
        if mode == "private":
            labels = ""
        print(
            f"server: The client uploaded {result['bytes']:,} bytes ({mode}). "
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
        fields = {"upload": name}
        classes = upload.num_classes
        model = backbone.model.clone(num_classes=classes)
        whole = dataclasses.replace(backbone, model=model)
        adapted = split.Adapted(whole, self._adapted(shipment, upload, name))
        ready = self.ask(pack("adapted", fields=fields, arrays={}))
        queries = messages.unpack_queries(ready, shipment, limits=self.limits)
        logits: Any = np.zeros((0, classes))
        if len(queries):
            logits = in_batches(adapted.logits, queries, _BATCH)
        arrays = {"logits": np.asarray(logits, np.float32)}
        self.ask(pack("answers", fields=fields, arrays=arrays))
        mode = messages.mode_of(upload)
        return {"mode": mode, "bytes": len(package), "queries": len(queries)}

    def _adapted(self, shipment: messages.Shipment, upload: Any, name: str) -> Any:
        """Returns the backend that was adapted to an upload. It is made once."""
        path = self.root / f"adapted-{name}.safetensors"

        def gradients(logits: np.ndarray, images: np.ndarray) -> np.ndarray:
            arrays = {"logits": logits, "images": images}
            question = pack("logits", fields={"upload": name}, arrays=arrays)
            package = self.ask(question)
            answer = unpack(
                package, "gradients", limits=self.limits, name="the package 'gradients'"
            )
            messages.check_arrays(answer.arrays, {"gradients": (logits.shape, np.float32)})
            return answer.arrays["gradients"]

        if not path.exists():
            back = load_params(self.root / "backend.safetensors")
            adapted = _adapted(self.config, shipment, back, upload, gradients)
            save_params(path, adapted)
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
    calibration_key, tuning_key = jax.random.split(_key(config, "server"))
    batch = images.gather(np.arange(len(images)))
    pixels, labels = jax.device_put((batch["image"], batch["label"]))
    both = split.merge_hilbert(pixels, labels)
    params = model.params
    frontends = split.calibrate_frontends(
        calibration_key, backbone, params, *both, **config.calibration
    )
    back = split.tune_backend(tuning_key, backbone, params, frontends, *both, **config.tuning)
    save_params(root / "backend.safetensors", back)
    shipped = frontends[0]
    shipment = messages.Shipment(backbone, shipped, config.copies, config.n_patches)
    if config.directions:
        x = split.represent(backbone, shipped, shipped.params, pixels[:_MOST])
        projection = split.public_projection(x, config.directions)
        projected = split.project(projection, x)
        norms = np.linalg.norm(np.asarray(projected), axis=1)
        clip_norm = float(np.median(norms))
        shipment = shipment._replace(projection=projection, clip_norm=clip_norm)
    write_package(root / "frontend", messages.pack_frontend(shipment))


def _key(config: Any, name: str) -> jax.Array:
    """Returns the key of a stream of the server, whose seed is its own choice."""
    seed = config.seed.to_bytes(16, "little")
    return stream(seed, name, impl="threefry2x32")


def _adapted(config: Any, shipment: Any, back: Any, upload: Any, ask: messages.Gradients) -> Fields:
    copies_key, key = jax.random.split(_key(config, "adapt"))
    options: Fields = {"num_classes": upload.num_classes, **config.adaptation}
    backbone = shipment.backbone
    if isinstance(upload, messages.Uploaded):
        return adapt_by_client(key, backbone, back, jax.device_put(upload), ask, **options).back
    private = isinstance(upload, messages.Private)
    if private:
        x = split.lift(shipment.projection, upload.released.features)
    else:
        x = jax.device_put(upload.representations)
    copying = _copying(shipment)
    # The upload has its noise already.
    copies = split.augment_then_noise(copies_key, x, laplace_scale=0.0, **copying)
    if not private:
        return adapt_by_client(key, backbone, back, copies, ask, **options).back
    matrix = split.label_noise_matrix(upload.num_classes, upload.release.label_epsilon)
    options["label_noise"], labels = jax.device_put((matrix, upload.released.labels))
    return split.adapt(key, backbone, back, copies, labels, **options).back


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
        check_values({"client": config})
        is_new = not (root / "upload").exists()  # kept packages need no images
        if is_new and config.images and not pathlib.Path(config.images).is_file():
            raise FileNotFoundError(
                "config.client.images, or --images, must be an .npz file of the client's images, "
                f"got {config.images!r}."
            )
        frame.check_same_config("split client", config, root)
        frame.chosen(choice, config, root)  # raises before the server is asked for anything
        client = _Client(config, root, choice, queries, limits, till, bound)
        # The server of a finished run asks nothing that would settle it. Without a frontend the
        # images are not known yet, and the server asks again.
        if till.notes() and (root / "frontend").exists():
            client.accounts()
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
    def _stored(self) -> tuple[Images, Images]:
        # Read once: what the registry notes is what is uploaded.
        return client_images.stored(self.config, self._shipment.backbone.preprocessing, self.limits)

    @functools.cached_property
    def _images(self) -> tuple[Images, Images]:
        few, test = self._stored
        return client_images.prepared(self.config, self._shipment.backbone.preprocessing, few, test)

    @functools.cached_property
    def _ledger(self) -> pathlib.Path:
        """The path of the ledger that pays."""
        private = client_images.private_sets(self.config, *self._stored, queries=self._asks)
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
        _, test = self._images
        return has_queries and len(test["image"]) > 0

    def _frontend(self, question: bytes) -> bytes:
        """Pays for the upload and the queries, makes and keeps them, and returns the upload."""
        config, root = self.config, self.root
        path, upload_path = root / "frontend", root / "upload"
        if path.exists() and read_package(path) != question:
            raise ValueError(
                f"{shown(root)} was started with another frontend. Use a new workdir at one of "
                "the parties."
            )
        shipment = messages.unpack_frontend(question, limits=self.limits)
        self._shipment = shipment
        few, test = self._images
        _check_client(config, shipment, few, test)
        named_test = {f"test_{name}": array for name, array in test.items()}
        client_images.check_same(few | named_test, root / "images.json")
        missing = self._missing()
        images, queries = self.accounts()
        if missing:
            secret = self.till.stream("frontend")
            frontend = shipment.frontend
            noisy = split.perturb_params(secret, frontend.params, alpha=config.alpha)
            extract = functools.partial(split.represent, shipment.backbone, frontend, noisy)
        if "upload" in missing:
            x = extract(few["image"])
            upload = _upload(config, shipment, images, x, few["label"], upload_path)
            write_package(path, question)
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
        return read_package(upload_path)

    def _missing(self) -> list[str]:
        """Returns the packages that have to be made."""
        root = self.root
        packages = ("upload", "queries") if self._asks else ("upload",)
        missing = [name for name in packages if not (root / name).exists()]
        if "queries" in missing and (root / "result.json").exists():
            raise ValueError(
                f"the run in {shown(root)} has ended without queries, and the secret that "
                "perturbed its frontend is deleted. Use a new workdir at both parties, and ask "
                "from the start. The new run pays for its own upload."
            )
        return missing

    def accounts(self) -> tuple[Account, Account | None]:
        """Returns the accounts of the images and of the queries, None if there are none.

        They are charged for what the workdir notes.
        """
        few, test = self._images
        images, queries = self._accounts(len(few["image"]), len(test["image"]))
        self.till.settle([images] if queries is None else [images, queries])
        return images, queries

    def _accounts(self, images: int, queries: int) -> tuple[Account, Account | None]:
        config = self.config
        people = frame.people(config, "client")
        terms, unproven = _terms(config)
        name = client_images.images_name(config)
        account = frame.own_account(self._opened, name, records=images, **terms, **people)
        if not self._asks:
            return account, None
        name = client_images.queries_name(config)
        other = frame.own_account(self._opened, name, records=queries, **unproven, **people)
        return account, other

    def _keep_queries(self, shipment: messages.Shipment, made: Any) -> None:
        write_package(self.root / "queries", messages.pack_queries(made, shipment))

    def _loss(self, package: Package) -> bytes:
        if self.config.mode == "private":
            raise ValueError(
                "mode='private' answers no question about the loss, because gradients reveal "
                "labels."
            )
        few, _ = self._images
        gradients = messages.loss_gradients(few["label"], self.config.num_classes)
        answer = gradients(package.arrays["logits"], package.arrays["images"])
        return pack("gradients", fields={}, arrays={"gradients": answer})

    def _adapted(self, package: Package) -> bytes:
        if self._asks:
            return read_package(self.root / "queries")
        shipment = self._shipment
        no_queries = np.zeros((0, *shipment.backbone.tokens), np.float32)
        return messages.pack_queries(no_queries, shipment)

    def _answers(self, package: Package) -> bytes:
        """Ends the run."""
        config, root = self.config, self.root
        _, test = self._images
        queries = len(test["image"]) if self._asks else 0
        logits_shape = (queries, config.num_classes)
        messages.check_arrays(package.arrays, {"logits": (logits_shape, np.float32)})
        accuracy = None
        if queries:
            logits = package.arrays["logits"]
            classes = predicted(logits)
            write_durably(root / "predictions.npy", lambda file: np.save(file, classes))
            if "label" in test:
                judgement = judge(logits, test["label"])
                accuracy = float(judgement.correct.mean())
        account = self._opened.account(client_images.images_name(config))
        epsilon = account.epsilon(delta=config.delta)
        upload = read_package(root / "upload")
        self.result = {
            "mode": config.mode,
            "bytes": len(upload),
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": config.delta,
            "queries": queries,
            "accuracy": accuracy,
        }
        write_json(root / "result.json", self.result)
        return pack("end", fields={}, arrays={})


def _terms(config: Any) -> tuple[Fields, Fields]:
    """Returns the terms of a client's images and of its queries in its ledger."""
    common = {"adjacency": "replace_one", "unit": "image", "delta": config.delta}
    unproven = common | {"allow_unproven": True}
    if config.mode != "private":
        return unproven, unproven
    # The budget of the images is what their upload costs.
    return common | {"epsilon": config.epsilon}, unproven


def _check_client(config: Any, shipment: messages.Shipment, few: Images, test: Images) -> None:
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
        package = messages.pack_upload(upload, shipment)
        write_package(folder, package)

    if config.mode == "private":
        assert shipment.projection is not None  # `_check_client` has checked
        release = _private_release(config, shipment.clip_norm)
        private = plan_release(
            account,
            release=release,
            representations=x,
            labels=labels,
            projection=shipment.projection,
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
    terms, unproven = _terms(config)
    if private:
        event = _private_release(config, 1.0).event
    else:
        event = split.published_event(config.laplace_scale)
    name = client_images.images_name(config)
    charges = [plans.Item(f"the upload, {config.mode}", name, event, terms, ledger=ledger)]
    if has_queries:
        name = client_images.queries_name(config)
        event = split.published_event(config.query_laplace_scale)
        charges.append(plans.Item("the queries", name, event, unproven, ledger=ledger))
    return charges


def _statement(result: Fields) -> str:
    epsilon, accuracy = result["epsilon"], result["accuracy"]
    lines = [f"client: uploaded {result['bytes']:,} bytes"]
    if accuracy is not None:
        lines.append(f"accuracy {accuracy:.4f} on {result['queries']} test images")
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
    stored = client_images.stored(config, None, None)
    private = client_images.private_sets(config, *stored, queries=has_queries)
    return frame.asked(choice, config, root, private)


def _read(config: Any, preprocessing: Preprocessing) -> Examples:
    """Returns the images of the `data` part of a config, in the size of the model."""
    source = open_spec(data.whole(config), prepare=preprocessing.prepare)
    return resize_images(source, preprocessing.size, len(preprocessing.mean))
