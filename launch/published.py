"""What is published of a finished run: its network with the preprocessing, and who paid for it.

Each function makes it for one study. A study that saves no network has none, and `REFUSED` says
why. Only the test part of the data is opened, for its classes and its columns, unless a function
says otherwise.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data import Examples
from jaxdp.data.spec import open_parts
from jaxdp.finetune import Scaler
from jaxdp.models import Pretrained, load_params
from jaxdp.models.checkpoints import blank_inputs
from jaxdp.models.preprocessing import Vectors
from jaxdp.report.books import Books

from . import data, features, frame, models, run_report
from .finetune import SCALER, Model
from .frame.workdir import released_file
from .lifecycle import document, parts
from .lifecycle.recalibrate import restored
from .lifecycle.stages import known as stages
from .study import Fields, Result, Row
from .tasks import network_of, scaled

_IMAGE = "an image in [0, 1], of this size; the normalisation is in the program"
_PROBES = 4  # public inputs of a release


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its workdir, and what config.json and result.json hold."""

    root: pathlib.Path
    config: Any
    result: Result

    def file(self, name: str) -> pathlib.Path:
        """Returns the path of a file that the run wrote. Raises as `released_file`."""
        return released_file(self.root, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A network to publish.

    Attributes:
      name: The name of the model.
      predict: As in `jaxdp.models.write_release`.
      params: Its parameters.
      probe: Inputs that are nobody's.
      inputs: What one input is, so that its user can make one.
      accounts: The workdir of `fit` or the accounts that paid. None if all data is public.
      classes: The names of the outputs, if they are classes.
      metrics: As in `jaxdp.models.write_release`.
    """

    name: str
    predict: Callable[[Any, jax.Array], jax.Array]
    params: Any
    probe: np.ndarray
    inputs: str
    accounts: pathlib.Path | Books | None
    classes: Sequence[str] = ()
    metrics: Row = dataclasses.field(default_factory=dict)


def _network(
    run: Run, network: Pretrained, file: str = "params.safetensors", *, probe: Any = None
) -> Fields:
    """Returns the fields of a network and of its file in the workdir. By default `probe` is random
    images or features.
    """
    if probe is None:
        probe = _probe(network)

    def predict(params: Any, batch: jax.Array) -> jax.Array:
        logits = network.apply_fn(params, batch)
        return jax.nn.softmax(logits)

    params = load_params(run.file(file))
    return {"predict": predict, "params": params, "probe": probe}


def _probe(network: Pretrained) -> np.ndarray:
    """Returns random inputs of a network."""
    _, *shape = blank_inputs(network.preprocessing).shape
    return _random(shape)


def _classes(config: Any, count: int) -> tuple[str, ...]:
    """Returns the names of the classes, which are the labels themselves if they are numbers.

    `config.data.classes` are labels that were renumbered in their order.
    """
    names = tuple(config.data.get("class_names", ()))
    if not names and "server" not in config.data:  # A server has labels of its own.
        names = tuple(map(str, range(count)))
    labels = config.data.get("classes", ())
    if not labels:
        return names
    numbered = dict(enumerate(names))
    return tuple(numbered.get(label, str(label)) for label in labels)


def _random(shape: Sequence[int]) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.random((_PROBES, *shape), np.float32)


def _share(run: Run, name: str) -> Fields:
    return {"test accuracy": (run.result[name], run.result["tested"])}


def _finetune(run: Run) -> Published:
    config, result = run.config, run.result
    specs = data.specs(
        config.data, "test", needs=("test",), grouped=True, several=True, tables=True
    )
    sources = open_parts(specs, images=bool(config.model.preprocessing))
    test = sources["test"]
    network = network_of(config, sources, test.num_classes)
    scaler_file = run.file(SCALER)
    if scaler_file.exists():
        scaler = Scaler.load(scaler_file)
        network = scaled(network, scaler)
    accounts: pathlib.Path | Books
    if "private" in result:
        accounts = frame.cell_folder(run.root, Model("private"))
        metrics = _share(run, "private")
    else:  # What has paid is a search, or the release of noisy labels.
        accounts = run_report.books(run.root)
        metrics = _share(run, "accuracy")
    return Published(
        name=f"{result['dataset']}, {config.model.name}",
        inputs=_meaning(network, config, test),
        classes=_classes(config, test.num_classes),
        metrics=metrics,
        accounts=accounts,
        **_network(run, network),
    )


def _meaning(network: Pretrained, config: Any, test: Examples) -> str:
    """Returns what one input is."""
    if not isinstance(network.preprocessing, Vectors):
        return _IMAGE
    return features.rows_of(config.data, test)


def _pretrain(run: Run) -> Published:
    config = run.config
    specs = data.specs(config.data, "public", "test", needs=("public", "test"))
    public, test = open_parts(specs, images=True).values()
    count = public.num_classes
    network = models.network(config.model, count)
    share = run.result["accuracy"], len(test)
    return Published(
        name=f"{public.name}, {config.model.name}",
        inputs=_IMAGE,
        classes=_classes(config, count),
        metrics={"test accuracy": share},
        accounts=None,
        **_network(run, network),
    )


def _source(file: str) -> Callable[[Run], Published]:
    """Returns the function for a public network that a study trains for its own measurements."""

    def published(run: Run) -> Published:
        if not run.file(file).exists():
            raise FileNotFoundError(
                f"{file} is not in the workdir, so nothing is released. The run had a checkpoint, "
                "which its publisher has released."
            )
        model = run.config.model
        network = models.network(model)
        return Published(
            name=f"public network, {model.name}",
            inputs=_IMAGE,
            classes=_classes(run.config, model.num_classes),
            accounts=None,
            **_network(run, network, file),
        )

    return published


def _lm(run: Run) -> Published:
    config, result = run.config, run.result
    network = models.network(config.model)
    length = config.data.length - 1
    draw = np.random.default_rng(0)
    shape = (_PROBES, length)
    tokens = draw.integers(config.model.num_classes, size=shape, dtype=np.int32)
    tokenizer = pathlib.Path(config.data.tokenizer)
    return Published(
        name=f"{result['dataset']}, {config.model.name}",
        inputs=(
            f"{length} tokens of the tokenizer {tokenizer.name!r}, with "
            "-1 after the end of a shorter text; the outputs are the probabilities of the token "
            "after each"
        ),
        accounts=frame.cell_folder(run.root, Model("private")),
        metrics={"bits per token of held-out texts": result["bits"]},
        **_network(run, network, probe=tokens),
    )


def _student(run: Run) -> Published:
    """Computes the features again, for which all parts of the data are opened."""
    config, result = run.config, run.result
    task = features.read(config.data).compute(run.file("network.safetensors"))
    mapping = task.mapping
    count = task.test.num_classes
    one_input = task.test.gather(np.arange(1))
    _, width = one_input["features"].shape
    model = models.dense(width, count, **config.model)

    def predict(params: Any, batch: jax.Array) -> jax.Array:
        vectors = mapping(params["features"], batch)
        logits = jax.vmap(model.logits, (None, 0))(params["student"], vectors)
        if count > 2:
            return jax.nn.softmax(logits)
        return jnp.stack([jax.nn.sigmoid(-logits), jax.nn.sigmoid(logits)], axis=1)

    student = load_params(run.file("student.safetensors"))
    others = result["tested"] - config.prediction.queries
    accuracy = result["released"]["student"], others
    return Published(
        name=f"{result['dataset']}, a student of private answers",
        predict=predict,
        params={"student": student, "features": mapping.params},
        probe=_random(mapping.shape),
        inputs=mapping.inputs,
        classes=_classes(config, count),
        accounts=run_report.books(run.root),
        metrics={"accuracy on the other test inputs": accuracy},
    )


def _deployed(run: Run) -> Published:
    """Returns the model in use, whose output at the predicted class is its confidence."""
    life = document.Life(run.root)
    if not life.is_done("deploy"):
        raise ValueError("the stage 'deploy' is not done. Run the same command of lifecycle again.")
    config, result = run.config, life.result("deploy")
    assert result is not None
    specs = data.specs(config.data, *parts.ROLES, grouped=True, unit="image")
    sources = open_parts({"private": specs["private"]})
    count = sources["private"].num_classes
    network = models.network(config.model, count)

    def predict(params: Any, batch: jax.Array) -> jax.Array:
        logits = network.apply_fn(params["params"], batch)
        recalibrated = restored(params["confidence"])
        confidence = recalibrated.method.confidence(recalibrated.parameters, logits)
        # A confidence of 0 would leave the class unknown.
        least = jnp.maximum(confidence, jnp.finfo(jnp.float32).tiny)
        predicted = jax.nn.one_hot(logits.argmax(axis=1), count)
        return least[:, None] * predicted

    metrics: Fields = {}
    for shift, versions in result["models"].items():
        deployed = versions["deployed"]
        tested = result["tested"][shift]
        metrics[f"accuracy, {shift}"] = (deployed["accuracy"], tested)
        metrics[f"calibration error, {shift}"] = deployed["ece"]
    path = life.folder("deploy") / "deployed.safetensors"
    return Published(
        name=f"{config.data.name}, {config.model.name} in use",
        predict=predict,
        params=load_params(path),
        probe=_probe(network),
        inputs=(
            f"{_IMAGE}; the output of the predicted class is its confidence, and the others are 0"
        ),
        classes=_classes(config, count),
        accounts=_paid(run, life),
        metrics=metrics,
    )


def _paid(run: Run, life: document.Life) -> Books:
    """Returns the accounts behind the model in use. Answers and uploads are other releases."""
    names: list[str] = []
    for stage in stages():
        if stage.name in ("finetune", "recalibrate", "adapt") and stage.accounts is not None:
            names += stage.accounts(run.config)
    return life.books.only(names)


MAKERS: Mapping[str, Callable[[Run], Published]] = {
    "finetune": _finetune,
    "label_dp": _finetune,
    "tune": _finetune,
    "lm": _lm,
    "pretrain": _pretrain,
    "recalibrate": _source("source.safetensors"),
    "split": _source("backbone.safetensors"),
    "predict": _student,
    "lifecycle": _deployed,
}
_A_MODEL_EACH = (
    "It has a model for each of its cells. Run one of them by `jaxdp finetune` in a workdir of its "
    "own"
)
_SERVES = "It adapts copies of a public network for measurements, and saves none of them"
REFUSED = {
    "table": _A_MODEL_EACH,
    "curve": _A_MODEL_EACH,
    "adapt": f"{_SERVES}. Adapt in `jaxdp lifecycle`, whose model in use is released",
    "poisoning": "It certifies models that it does not save",
    "embeddings": "It writes embeddings of texts by a public network",
    "recalibrate server": "It writes a calibrator, and the network is the caller's",
    "recalibrate client": "It answers a calibrator, and has no network to publish",
    "split server": "Its adapted backends answer features of a client's own frontend",
    "split client": "It has a client's frontend, which serves this client only",
}
