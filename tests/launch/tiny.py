"""Configs of every launcher, small enough for a test. `a__b` in `changes` is the field a.b."""

import dataclasses
import importlib
from typing import Any

from launch import trainers


def _config(module: str, tiny: dict[str, Any], changes: dict[str, Any], *variant: str) -> Any:
    config = importlib.import_module(f"configs.{module}").get_config(*variant)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict({**tiny, **changes})
    return config


def undrawn(study: Any) -> Any:
    """Returns a study without its figures, for a run that another test has drawn. Each takes a
    tenth of a second."""
    return dataclasses.replace(study, figures=lambda result, work: None)


def opened_once(study: Any) -> Any:
    """Returns a study that opens its config once. A run after a crash then has the programs of the
    first one, and compiles nothing again."""
    opened: list[Any] = []

    def open_once(config: Any, root: Any) -> Any:
        if not opened:
            opened.append(study.open(config, root))
        return opened[0]

    return dataclasses.replace(undrawn(study), open=open_once)


def few_draws(*terms: Any) -> Any:
    """Returns a sampler of balls in bins whose account is simulated by few draws."""
    sampler: Any = trainers._balls_in_bins(*terms)
    return dataclasses.replace(sampler, draws=2**12)


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
    return _config("digits_dpsgd", FINETUNE, changes)


_LM_RUN = {
    "data.length": 12,
    "private.batch_size": 8,
    "private.physical_batch_size": 16,
    "private.steps": 4,
    "private.checkpoint_every": 2,
    "generation.prompts": ("the film",),
    "generation.length": 16,
}


def lm(**changes: Any) -> Any:
    sizes = {"positions": 16, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
    run = {"no_privacy.steps": 4, "no_privacy.batch_size": 16, **_LM_RUN}
    return _config(
        "lm.bytes", run | {f"model.options.{k}": v for k, v in sizes.items()}, changes, "bundled"
    )


def lora(folder: Any, **changes: Any) -> Any:
    """Returns LoRA of the tiny Llama in a folder with model.safetensors, tokenizer.json and files
    of texts."""
    run = {
        "model.num_classes": 31,
        "model.checkpoint": f"{folder}/model.safetensors",
        "data.path": str(folder),
    }
    run |= {"data.tokenizer": f"{folder}/tokenizer.json", "model.lora.rank": 2, **_LM_RUN}
    config = _config("lm.lora", run, changes, "tinyllama_1b")
    sizes = {"positions": 16, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 12}
    config.model.options = {**sizes, "kv_heads": 1, "rotary_base": 500.0, "dtype": "float32"}
    return config


PRETRAIN = {
    "model.options.widths": (8,),
    "train.steps": 6,
    "train.batch_size": 10,
    "train.checkpoint_every": 3,
    "ascent.batch_size": 20,
    "ascent.microbatch_size": 10,
    "data.parts.public": 0.05,
    "data.parts.private": 0.9,
    "data.parts.test": 0.05,
    "robustness.std": (0.1, 1.0),
    "robustness.relative_std": (0.5,),
    "robustness.draws": 2,
    "robustness.inputs": 4,
    "robustness.lengths": (0.5,),
}


def pretrain(method: str = "dpadapter", **changes: Any) -> Any:
    return _config("pretrain.digits", PRETRAIN, changes, method)


ADAPT = {
    "data.images": 32,
    "data.corruptions": ("gaussian_noise", "contrast"),
    "model.options.depth": 1,
    "train.steps": 30,
    "protocol.seeds": 2,
    "methods": ("Tent-COME",),
    "privacy.budgets": (5.0,),
    "privacy.exact": True,
    "tuning.images": 64,
    "tuning.learning_rates": (1e-3, 10.0),
    "tuning.clipped_steps": (1e-3,),
}


def adapt(**changes: Any) -> Any:
    return _config("tta.digits", ADAPT, changes)


_TINY_VIT = {"patch_size": 4, "width": 8, "depth": 2, "num_heads": 2, "mlp_width": 16}
SPLIT = {
    **{
        f"{part}model.options.{name}": value
        for part in ("", "auxiliary.")
        for name, value in _TINY_VIT.items()
    },
    **{
        f"{part}train.{name}": value
        for part in ("", "auxiliary.")
        for name, value in (("steps", 100), ("learning_rate", 1e-2))
    },
    "seeds": (1, 42),
    "shots": (3,),
    "learning_rates": (1e-3, 1e-2),
    "data.server_images": 40,
    "tuning.seeds": (1,),
    "server.frontends": 0,
    "server.samples": 4,
    "client.copies": 2,
    "adaptation.epochs": 2,
    "baselines.epochs": 2,
    # One of each kind, since compilation takes most of the time.
    "methods": ("Linear probing", "Split Adaptation", "SA, noise once"),
    "stolen": ("Quantised frontend",),
    "ablation.shots": 3,
    "ablation.rows": (
        "Split Adaptation",
        "backend not tuned",
        "one noisy copy (no patch retrieval)",
    ),
    "attack.uploads": ("Split learning", "Split Adaptation"),
    "attack.attackers": ("noise-aware", "aggregating"),
    "attack.images": 40,
    "attack.epochs": 1,
    "attack.epsilons": (8.0,),
    "noise.scales": (0.8,),
    "noise.seeds": 1,
    "sweeps.patches": (0.25,),
    "sweeps.copies": (2,),
    "sweeps.seeds": 1,
    "rule.patience": (1,),
    "rule.epochs": 3,
    "rule.seeds": 1,
    "private.epsilons": (1.0, 8.0),
    "private.dimensions": (2,),
    "private.shots": (3,),
    "private.steps": 5,
}


def split(**changes: Any) -> Any:
    return _config("split.digits", SPLIT, changes)


def dpadapter(**grid: Any) -> Any:
    """Returns one grid of the bundled digits."""
    config = _config("dpadapter_table1", {}, {}, "digits")
    config.seeds = (0, 1)
    config.pretrain.model.name = "mlp"
    config.pretrain.model.options = {"hidden": (8,)}
    config.pretrain.train.update({"steps": 6, "checkpoint_every": 6})
    config.private.update(
        {"batch_size": 120, "physical_batch_size": 128, "epochs": 1, "checkpoint_every": 2}
    )
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


LIFECYCLE = {
    "data.parts.public": 60,
    "data.parts.private": 60,
    "data.parts.sources": 20,
    "data.parts.stream": 16,
    "data.parts.client": 12,
    "data.parts.test": 40,
    "data.sources": 2,
    "model.options.widths": (8,),
    "pretrain.steps": 4,
    "pretrain.checkpoint_every": 4,
    "pretrain.perturbation_batch_size": 32,
    "budgets.private.epsilon": 10.0,
    "budgets.stream.epsilon": 8.0,
    "budgets.client.epsilon": 8.0,
    "finetune.epsilon": 4.0,
    "finetune.learning_rate": 0.35,
    "finetune.steps": 4,
    "finetune.checkpoint_every": 2,
    "finetune.batch_size": 16,
    "finetune.physical_batch_size": 24,
    "adapt.batch_size": 8,
    "adapt.epsilon": 4.0,
    "split.epsilon": 8.0,
    "predict.epsilon": 6.0,
    "predict.queries": 4,
    "predict.max_distance": 4,
    "references.steps": 4,
    "audit_finetune.candidates": 2,
    "audit_finetune.trials": 10,
    "audit_recalibrate.trials": 10,
    "audit_predict.images": 8,
    "audit_predict.candidates": 2,
    "audit_predict.trials": 10,
    "split.directions": 2,
    # As many images as an audit of 10 trials releases, so that all share a program.
    "audit_split.candidates": 20,
    "audit_split.trials": 10,
    "audit_adapt.candidates": 2,
    "audit_adapt.trials": 10,
}


def lifecycle(**changes: Any) -> Any:
    return _config("lifecycle_digits", LIFECYCLE, changes)


def lifecycle_own(folder: Any) -> Any:
    others = ("data.", "references.")
    own = {name: value for name, value in LIFECYCLE.items() if not name.startswith(others)}
    classes = tuple(map(str, range(10)))
    own |= {
        "data.path": str(folder),
        "data.class_names": classes,
        "data.unit": "scan",
        "model.preprocessing.size": 8,
    }
    own |= {"model.preprocessing.mean": (0.3,), "model.preprocessing.std": (0.4,)}
    return _config("lifecycle_own", own, {})


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
    return _config("predict.digits", PREDICT, changes)


def recalibrate(**changes: Any) -> Any:
    """Returns the bundled digits under three shifts."""
    config = _config("recalibration.digits", {}, {})
    # Shifts that are computed quickly. Fog takes ten times as long.
    config.data.corruptions = ("clean", "contrast", "pixelate")
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
    config.figures.reliability_shift = "pixelate"
    config.figures.reliability_methods = ("Acc-T", "HB split")
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in changes.items()}
    )
    return config


def recalibrate_sweeps() -> Any:
    """Returns methods without a search under two severities, for a network that SGD trains."""
    config = recalibrate()
    config.data.severity = (1, 5)
    config.data.corruptions = ("clean", "contrast")
    config.train.update(optimizer="sgd", schedule="step", learning_rate=0.05, weight_decay=5e-4)
    config.methods = ("HB split", "isotonic, not private", "Platt, not private", "none")
    config.sweep.options = {"bins": (1, 5)}
    config.sweep.division = {"records": 40, "epsilon": 2.0, "sources": (1, 4)}
    config.figures.methods = ("HB split", "none")
    config.figures.reliability_shift = "contrast_5"
    config.figures.reliability_methods = ("HB split",)
    return config
