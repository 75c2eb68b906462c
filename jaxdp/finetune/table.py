"""Upstream models x private methods x epsilons x data sets x seeds, cell by cell: Table 1 of Wang et al. 2024 and more.

The config is an `ml_collections.ConfigDict` as in `configs/dpadapter_table1.py`, whose comments say what each field
means. A *cell* is one private model with a ledger of its own, as if it alone were released: releasing all of them would
cost the sum. Several processes may work on one workdir; each takes the cells that no other one holds.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxdp import data, models
from jaxdp.files import read_json, write_json
from jaxdp.finetune.configured import configured_trainer
from jaxdp.finetune.evaluate import accuracy
from jaxdp.finetune.loop import fit
from jaxdp.finetune.summary import write_summary
from jaxdp.finetune.trainer import PrivateTrainer
from jaxdp.models.robustness import robust_accuracy
from jaxdp.privacy import BudgetExceeded, Ledger
from jaxdp.release import bind, check_same_config, locked
from jaxdp.transforms import losses

Pretrain = Callable[[Any, pathlib.Path], Mapping[str, Any]]
SCRATCH = "none"  # the upstream that is none


@dataclasses.dataclass(frozen=True)
class Cell:
    """One private model. `seed` fixes its initial parameters and the upstream model; noise is always fresh."""

    upstream: str
    method: str
    epsilon: float
    dataset: str
    seed: int

    @property
    def folder(self) -> pathlib.Path:
        """Where it is kept, below the workdir."""
        parts = (self.dataset, self.method, f"epsilon_{self.epsilon:g}", self.upstream, str(self.seed))
        return pathlib.Path("cells", *(_file_name(part) for part in parts))


def run(config: Any, workdir: str | os.PathLike[str], *, pretrain: Pretrain) -> list[dict[str, Any]]:
    """Computes all cells of all grids that are not there yet, and writes tables and figures.

    Args:
      config: the experiment.
      workdir: its directory, made if needed. It holds afterwards:
          upstream/NAME/SEED/   the pre-trained models, as `pretrain` leaves them
          cells/.../result.json accuracy, epsilon and noise of a cell, beside its ledger.sqlite
          GRID.md, GRID.json    a table per grid, means and standard deviations over seeds
          *.png                 its figures
      pretrain: `pretrain(config, folder) -> result` trains an upstream model on PUBLIC data, or returns at once if it
        is there, and leaves params.safetensors in the folder: `jaxdp.pretrain.run`. The result has an "accuracy" and a
        "robust_accuracy".

    Returns:
      The results of all cells, those of other processes included.

    Raises:
      ValueError: the workdir belongs to another config (other seeds, grids and data directories are welcome), or the
        config is inconsistent.
      FileNotFoundError: a data set is not there; the message says how to get it.
      BudgetExceeded: a cell was interrupted, and then continued where its steps have other bits.
    """
    root, cell_config = pathlib.Path(workdir), _of_cells(config)
    check_same_config(cell_config, root / "config.json")
    bench = _Bench(config, root, pretrain)
    cells = bench.cells()
    missing = [cell for cell in cells if not bench.finished(cell)]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them are here already.", flush=True)
    with bind(cell_config, root), tqdm(total=len(missing), desc="cells", unit="cell") as bar:
        for wait in (False, True):  # what another process is at comes last: it is there by then
            for cell in [cell for cell in cells if not bench.finished(cell)]:
                with contextlib.suppress(BlockingIOError):
                    bench.compute(cell, wait=wait)
                bar.update(sum(map(bench.finished, missing)) - bar.n)
    results = [dataclasses.asdict(cell) | read_json(root / cell.folder / "result.json") for cell in cells]
    with locked(root / "summary.lock", wait=True):
        print(write_summary(config, root, results, bench.upstream_results()))
    return results


class _Bench:
    """What cells share: data, trainers with their compiled steps, upstream models."""

    def __init__(self, config: Any, root: pathlib.Path, pretrain: Pretrain):
        self._config, self._root, self._pretrain = config, root, pretrain
        model = config.pretrain.model
        self._model = models.create(model.name, num_classes=2, **dict(model.options))
        self.task = functools.cache(self._task)
        self.trainer = functools.cache(self._trainer)
        self.public = functools.cache(self._public)

    def cells(self) -> list[Cell]:
        """All cells of all grids, each once, seeds outermost, so that an unfinished table has whole seeds."""
        config, found = self._config, dict[Cell, None]()
        sweep = "relative_std" if config.robust.relative else "std"
        _check("robust.std", [config.robust.std], config.pretrain.robustness[sweep])
        for names in ([SCRATCH, *config.upstreams], config.methods, config.sets):
            if len({_file_name(name) for name in names}) < len(names):
                raise ValueError(f"config has names that are one as names of folders: {sorted(names)}; change some.")
        for seed in config.seeds:
            for name, grid in config.grids.items():
                _check(f"grids.{name}.upstreams", grid.upstreams, [SCRATCH, *config.upstreams])
                _check(f"grids.{name}.methods", grid.methods, config.methods)
                _check(f"grids.{name}.sets", grid.sets, config.sets)
                for dataset in grid.sets:
                    for method in grid.methods:
                        for epsilon in grid.epsilons:
                            for upstream in grid.upstreams:
                                found[Cell(upstream, method, float(epsilon), dataset, int(seed))] = None
        return list(found)

    def finished(self, cell: Cell) -> bool:
        """Whether a cell's result is there."""
        return (self._root / cell.folder / "result.json").exists()

    def compute(self, cell: Cell, *, wait: bool) -> None:
        """Computes a cell, unless it is there.

        Raises:
          BlockingIOError: another process is at it or at its upstream model, and wait is False.
        """
        folder = self._root / cell.folder
        start = self._start(cell, wait=wait)
        with locked(folder / "lock", wait=wait):
            if not self.finished(cell):
                try:
                    write_json(folder / "result.json", self._result(cell, start, folder))
                except BudgetExceeded as error:
                    error.add_note(
                        f"{folder} was interrupted and cannot go on as it began (another machine or version). Nothing "
                        "of it was released: delete the folder, and the cell starts anew."
                    )
                    raise
            # Checkpoints of a finished cell are of no use.
            shutil.rmtree(folder / "private", ignore_errors=True)

    def upstream_results(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """What `pretrain` reported, by upstream and seed."""
        grids = self._config.grids.values()
        names = dict.fromkeys(name for grid in grids for name in grid.upstreams if name != SCRATCH)
        return {(name, seed): self._upstream(name, seed, wait=True)[1] for name in names for seed in self._config.seeds}

    def _result(self, cell: Cell, start: Any, folder: pathlib.Path) -> dict[str, Any]:
        source, test, predict, _ = self.task(cell.dataset)
        private = self._private(cell.method, cell.epsilon, len(source))
        trainer = self.trainer(cell.method, cell.epsilon, cell.dataset)
        began = time.monotonic()
        with Ledger(folder / "ledger.sqlite") as ledger:
            terms: Any = {"adjacency": "add_remove", "unit": "example", "records": len(source)}
            ledger.register(cell.dataset, **terms, epsilon=cell.epsilon, delta=private.delta)
            state = fit(
                trainer,
                start,
                source,
                steps=private.steps,
                account=ledger.account(cell.dataset, label=cell.method),
                workdir=folder / "private",
                checkpoint_every=private.checkpoint_every,
                progress=False,
            )
            spent = ledger.epsilon(cell.dataset, delta=private.delta)
        params, robust = state.params if state.ema is None else state.ema, self._config.robust
        noisy = robust_accuracy(predict, params, test, std=robust.std, relative=robust.relative, draws=robust.draws)
        return {
            "accuracy": accuracy(predict, params, test),
            "robust_accuracy": float(noisy.mean()),
            "epsilon_spent": spent,
            "delta": private.delta,
            "noise_multiplier": float(trainer.privatizer.event_at(0).noise_multiplier),
            "steps": private.steps,
            "seconds": time.monotonic() - began,
        }

    def _start(self, cell: Cell, *, wait: bool) -> Any:
        """Initial parameters: fresh ones, or the upstream model with a fresh head."""
        source, _, _, model = self.task(cell.dataset)
        fresh = model.init(jax.random.key(cell.seed), jnp.zeros_like(source[0]["image"][None]))["params"]
        if cell.upstream == SCRATCH:
            return fresh
        return models.merge_pretrained(fresh, self._upstream(cell.upstream, cell.seed, wait=wait)[0], exclude=("head",))

    def _upstream(self, name: str, seed: int, *, wait: bool) -> tuple[Any, Mapping[str, Any]]:
        """Parameters of an upstream model and what is known of it."""
        folder = self._root / "upstream" / _file_name(name) / str(seed)
        config = copy.deepcopy(self._config.pretrain)
        config.update(self._config.upstreams[name])
        config.seed = seed
        finished = folder / "result.json"
        if not finished.exists():
            with locked(folder.with_suffix(".lock"), wait=wait):
                self._pretrain(config, folder)
        return models.load_params(folder / "params.safetensors"), read_json(finished)

    def _private(self, method: str, epsilon: float, num_examples: int) -> Any:
        """The `private` part of a fine-tuning experiment's config."""
        private = copy.deepcopy(self._config.private)
        private.update(self._config.methods[method])
        steps = private.epochs * -(-num_examples // private.batch_size)  # epochs of ceil(1 / q) steps
        with private.unlocked():
            private.update(
                {"epsilon": epsilon, "steps": steps, "checkpoint_every": min(private.checkpoint_every, steps)}
            )
        return private

    def _task(self, dataset: str) -> tuple[data.Source, data.Source, Callable[..., Any], Any]:
        """(private examples, test examples, predict, model) of a data set."""
        config = self._config.sets[dataset]
        if self._config.data.source == "tfds":
            name, data_dir = f"config.sets.{dataset}", self._config.data.data_dir or None
            splits = {f"{name}.{part}": config[part] for part in ("private_split", "test_split")}
            data.check_disjoint({part: (config.name, split, data_dir) for part, split in splits.items()})
        source, test = (self._read_images(config.name, split) for split in (config.private_split, config.test_split))
        source = dataclasses.replace(source, name=dataset)
        model = self._model.clone(num_classes=source.num_classes)

        def predict(params: Any, images: jax.Array) -> Any:
            normalised = data.normalise(images, self._config.data.mean, self._config.data.std)
            return model.apply({"params": params}, normalised)

        return source, test, predict, model

    def _trainer(self, method: str, epsilon: float, dataset: str) -> PrivateTrainer:
        source, _, predict, _ = self.task(dataset)
        private = self._private(method, epsilon, len(source))

        def loss(params: Any, example: Mapping[str, jax.Array]) -> jax.Array:
            return losses.softmax_cross_entropy(predict(params, example["image"][None])[0], example["label"])

        return configured_trainer(
            private,
            loss,
            len(source),
            augment=data.augmentation(self._config.sets[dataset]),
            public=self.public() if private.method == "gep" else None,
            num_classes=source.num_classes,
        )

    def _public(self) -> data.Source:
        return self._read_images(self._config.data.public_name, self._config.data.public_split)

    def _read_images(self, name: str, split: str) -> data.Source:
        config = self._config.data
        if config.source == "bundled":
            source = data.bundled_parts(config)[split]
        else:
            source = data.from_tfds(name, split, data_dir=config.data_dir or None)
        return data.resize_images(source, config.size, config.channels)


def _of_cells(config: Any) -> Any:
    """The part of a config that determines cells: more seeds, more grids or moved data make no other experiment."""
    config = copy.deepcopy(config)
    with config.unlocked():
        del config.seeds, config.grids
        config.data.data_dir = config.pretrain.data.data_dir = ""
    return config


def _check(field: str, names: Sequence[Any], known: Any) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"config.{field} has {name!r}, which is not one of {sorted(known)}.")


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
