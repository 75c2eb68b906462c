"""Configs of every launcher at a size that a test can pay for; `a__b` in `changes` is the field a.b."""

import importlib
from typing import Any


def _config(module: str, tiny: dict[str, Any], changes: dict[str, Any], *variant: str) -> Any:
    config = importlib.import_module(f"configs.{module}").get_config(*variant)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict({**tiny, **changes})
    return config


FINETUNE = {
    "model.options.widths": (4,),
    "pretrain.steps": 3,
    "no_privacy.steps": 3,
    "private.steps": 6,
    "private.batch_size": 64,
    "private.physical_batch_size": 64,
    "private.checkpoint_every": 6,
    "private.augmult": 2,
    "references": False,
}


def finetune(**changes: Any) -> Any:
    """The bundled digits."""
    return _config("digits_dpsgd", FINETUNE, changes)


PRETRAIN = {
    "model.options.widths": (8,),
    "train.steps": 6,
    "train.batch_size": 10,
    "train.checkpoint_every": 3,
    "ascent.batch_size": 20,
    "ascent.microbatch_size": 10,
    "data.parts": {"public": 0.05, "private": 0.9, "test": 0.05},
    "robustness.std": (0.1, 1.0),
    "robustness.relative_std": (0.5,),
    "robustness.draws": 2,
    "robustness.inputs": 4,
}


def pretrain(method: str = "dpadapter", **changes: Any) -> Any:
    """The bundled digits."""
    return _config("pretrain.digits", PRETRAIN, changes, method)


def dpadapter(**grid: Any) -> Any:
    """One grid of the bundled digits."""
    config = _config("dpadapter_table1", {}, {}, "digits")
    config.seeds = (0, 1)
    config.pretrain.model.name = "mlp"
    config.pretrain.model.options = {"hidden": (8,)}
    config.pretrain.train.update({"steps": 6, "checkpoint_every": 6})
    config.private.update({"batch_size": 120, "physical_batch_size": 128, "epochs": 1, "checkpoint_every": 2})
    config.private.method_options.gep.update({"anchors": 40, "basis_size": 6, "groups": 1})
    config.grids = {
        "small": {
            "upstreams": ("none", "standard"),
            "methods": ("DP-SGD", "GEP"),
            "epsilons": (2.0,),
            "sets": ("digits",),
            "figures": True,
            "comparisons": (),
            **grid,
        }
    }
    config.upstreams = {"standard": config.upstreams.standard}
    return config


PREDICT = {
    "repetitions": 3,
    "data.features.dimensions": 6,
    "certificate.max_distance": 12,
    "prediction.queries": 30,
    "ensemble.members": 2,
    "student.steps": 3,
    "student.repetitions": 2,
    "dp_sgd.steps": 3,
    "dp_sgd.batch_size": 64,
    "dp_sgd.runs": 2,
}


def predict(**changes: Any) -> Any:
    """The bundled digits."""
    return _config("predict.digits", PREDICT, changes)


def recalibrate(**changes: Any) -> Any:
    """The bundled digits under three shifts."""
    config = _config("recalibration.digits", {}, {})
    config.data.corruptions = ("clean", "contrast", "fog")
    config.model.options.hidden = (16,)
    config.train.steps = 20
    config.methods = ("Acc-T", "HB split", "one source", "none")
    config.method_options["Acc-T"].iterations = 2
    config.method_options["one source"].iterations = 2
    config.sweep.trials = 5
    config.sweep.sources = {"values": (4, 8), "samples": 5, "epsilon": 1.0}
    config.sweep.samples = {"values": (5, 10), "sources": 4, "epsilon": 1.0}
    config.sweep.epsilon = {"values": (0.5, 2.0), "sources": 4, "samples": 10}
    config.sweep.centre = {"sources": 4, "samples": 10, "epsilon": 2.0}
    config.figures.methods = ("Acc-T", "none")
    config.figures.reliability_shift = "fog"
    config.figures.reliability_methods = ("Acc-T", "HB split")
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config
