"""Tables of cells: what is computed, by whom, once; and the means, deviations and differences that are written."""

import contextlib
import json
import math
import threading

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import dpadapter_table1
from jaxdp import models
from jaxdp.finetune import summary, table
from jaxdp.privacy import Ledger
from jaxdp.release.workdir import locked

pytestmark = pytest.mark.usefixtures("quick_compilation")


def small_config(**grid):
    config = dpadapter_table1.get_config("digits")
    config.seeds = (0, 1)
    config.pretrain.model = {"name": "mlp", "options": {"hidden": (8,)}}
    config.private.update({"batch_size": 120, "physical_batch_size": 128, "epochs": 1, "checkpoint_every": 2})
    config.private.method_options.gep.update({"anchors": 40, "basis_size": 6, "groups": 1})
    config.grids = {
        "small": {
            **{
                "upstreams": ("none", "standard"),
                "methods": ("DP-SGD", "GEP"),
                "epsilons": (2.0,),
                "sets": ("digits",),
            },
            **{"figures": True, "comparisons": (), **grid},
        }
    }
    config.upstreams = {"standard": config.upstreams.standard}
    return config


class Upstream:
    """Stands for pre-training: random parameters that depend on the seed, and the result that it would report."""

    def __init__(self):
        self.calls = []

    def __call__(self, config, folder):
        self.calls.append((config.method.name, config.seed))
        model = models.create(config.model.name, num_classes=10, **dict(config.model.options))
        params = model.init(jax.random.key(100 + config.seed), np.zeros((1, 8, 8, 1), np.float32))["params"]
        folder.mkdir(parents=True)
        models.save_params(folder / "params.safetensors", params)
        sweep = {"std": [0.2], "draws": [[0.5, 0.7]]}
        result = {
            "method": config.method.name,
            "accuracy": 0.8,
            "robust_accuracy": {"absolute": sweep, "relative": sweep},
            "rho": {"local": 3.0, "random": 0.1},
            "perturbation_norm": {"first": 0.0, "last": 0.0},
            "provenance": {"config": json.loads(config.to_json())},
        }
        (folder / "result.json").write_text(json.dumps(result))
        return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    config, root, upstream = small_config(), tmp_path_factory.mktemp("table"), Upstream()
    return config, root, upstream, table.run(config, root, pretrain=upstream)


def test_every_cell_is_computed_once_and_pays_what_it_says(finished):
    _, root, upstream, results = finished
    places = {(r["upstream"], r["method"], r["seed"]) for r in results}
    assert places == {(u, m, s) for u in ("none", "standard") for m in ("DP-SGD", "GEP") for s in (0, 1)}
    assert sorted(upstream.calls) == [("standard", 0), ("standard", 1)]
    for result in results:
        cell = table.Cell(*(result[name] for name in ("upstream", "method", "epsilon", "dataset", "seed")))
        with Ledger(root / cell.folder / "ledger.sqlite") as ledger:
            assert ledger.epsilon("digits", delta=1e-5) == result["epsilon_spent"]
        # Calibrated by RDP, as the paper does: the ledger's tighter account stays below the target.
        assert 0.7 * 2.0 < result["epsilon_spent"] < 2.0
        assert 0 <= result["accuracy"] <= 1 and result["steps"] == math.ceil(359 / 120)
    assert not list(root.rglob("secret_seed"))
    for name in ("small.md", "small.json", "upstreams.json", "small_robustness.png", "small_transfer.png"):
        assert (root / name).stat().st_size > 0


def test_a_finished_table_is_only_written_again(finished):
    config, root, upstream, results = finished
    calls, before = len(upstream.calls), {p: p.stat().st_mtime_ns for p in root.rglob("cells/**/result.json")}
    assert table.run(config, root, pretrain=upstream) == results
    assert len(upstream.calls) == calls
    assert before == {p: p.stat().st_mtime_ns for p in root.rglob("cells/**/result.json")}


def test_another_config_is_refused(finished):
    config, root, upstream, _ = finished
    other = ConfigDict(json.loads(config.to_json()))
    other.private.learning_rate = 1.0
    with pytest.raises(ValueError, match=r"another private\.learning_rate"):
        table.run(other, root, pretrain=upstream)


def test_a_cell_that_another_process_is_at_is_left_to_it_and_waited_for(tmp_path, monkeypatch):
    config, order = small_config(methods=("DP-SGD",), upstreams=("none",)), []
    cells = table._Bench(config, tmp_path, Upstream()).cells()
    held, released = tmp_path / cells[0].folder / "lock", threading.Event()
    result = table._Bench._result

    def recorded(self, cell, start, folder):
        order.append(cell.seed)
        released.set()  # the other process dies once the free cell is taken
        return result(self, cell, start, folder)

    monkeypatch.setattr(table._Bench, "_result", recorded)
    opened = contextlib.ExitStack()
    opened.enter_context(locked(held))
    other = threading.Thread(target=lambda: (released.wait(60), opened.close()))
    other.start()
    table.run(config, tmp_path, pretrain=Upstream())
    other.join()
    assert order == [1, 0]


def test_an_interrupted_cell_resumes_and_pays_once(tmp_path, monkeypatch):
    config = small_config(methods=("DP-SGD",), upstreams=("none",), figures=False)
    config.seeds = (0,)
    bench = table._Bench(config, tmp_path, Upstream())
    (cell,) = bench.cells()
    accuracy = table.accuracy
    monkeypatch.setattr(table, "accuracy", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        table.run(config, tmp_path, pretrain=Upstream())
    with Ledger(tmp_path / cell.folder / "ledger.sqlite") as ledger:
        paid = ledger.epsilon("digits", delta=1e-5)
    monkeypatch.setattr(table, "accuracy", accuracy)
    (result,) = table.run(config, tmp_path, pretrain=Upstream())
    assert result["epsilon_spent"] == paid > 0


@pytest.mark.parametrize(
    ("field", "value"), [("upstreams", ("nothing",)), ("methods", ("SGD",)), ("sets", ("digits", "letters"))]
)
def test_a_name_that_the_config_does_not_define_is_refused_before_anything_runs(tmp_path, field, value):
    with pytest.raises(ValueError, match=rf"config\.grids\.small\.{field} has '{value[-1]}', which is not one of"):
        table.run(small_config(**{field: value}), tmp_path, pretrain=Upstream())
    assert not list(tmp_path.iterdir())


def row(upstream, dataset, seed, accuracy, method="DP-SGD"):
    return {
        **{"upstream": upstream, "method": method, "epsilon": 1.0, "dataset": dataset},
        **{"seed": seed, "accuracy": accuracy},
    }


ROWS = [
    *(row("a", "x", 0, 0.5), row("a", "x", 1, 0.7), row("a", "y", 0, 0.2), row("a", "y", 1, 0.4)),
    *(row("b", "x", 0, 0.6), row("b", "x", 1, 0.6), row("b", "y", 0, 0.5), row("b", "y", 1, 0.6)),
]


def test_paired_differences_average_within_a_seed_first():
    # Seed 0: (0.1 + 0.3) / 2 = 0.2; seed 1: (-0.1 + 0.2) / 2 = 0.05. Their standard error is half of their distance.
    mean, error, higher, pairs = summary.paired_difference(ROWS, "upstream", "a", "b")
    assert (mean, error) == (pytest.approx(0.125), pytest.approx(0.075))
    assert (higher, pairs) == (3, 4)
    assert math.isnan(summary.paired_difference(ROWS[::2], "upstream", "a", "b")[1])  # one seed has no error
    with pytest.raises(ValueError, match="no cell has a partner in which method is 'GEP'"):
        summary.paired_difference(ROWS, "method", "DP-SGD", "GEP")


def test_the_layout_is_that_of_table_1():
    grid = ConfigDict({"upstreams": ("a", "b"), "methods": ("DP-SGD",), "epsilons": (1,), "sets": ("x", "y")})
    lines = summary.layout(ROWS, grid)
    assert [list(line) for line in lines] == [["method", "upstream", "x ε=1", "y ε=1", "average ε=1"]] * 2
    deviation = np.std([0.5, 0.7], ddof=1)
    assert lines[0]["x ε=1"] == f"0.600 ± {deviation:.3f}"
    assert lines[0]["average ε=1"] == f"0.450 ± {np.std([0.35, 0.55], ddof=1):.3f}"
