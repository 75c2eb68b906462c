"""Fields of every fine-tuning config: options of the private methods, clip norms, which part of a
model is trained, optimizers."""

METHOD_OPTIONS = {  # beyond DP-SGD. The values are the papers'.
    "adp_alloc": {
        "schedule": {  # over epochs
            "kind": "exponential",  # best in Yu et al. 2019, or another of these
            "constant": {},
            "time_based": {"rate": 0.0285},
            "step": {"factor": 0.891, "period": 10},
            "exponential": {"rate": 0.01},
            "polynomial": {"end": 2.0, "power": 3.0, "period": 100},
        }
    },
    # Andrew et al. 2021
    "adp_clip": {
        "quantile": 0.5,
        "clip_learning_rate": 0.2,
        "unit_norm": True,
    },
    # Zou et al. 2026
    "sla_clip": {
        "clip_learning_rate": 0.5,
        "clip_range": (0.1, 50.0),
        "unit_norm": True,
    },
    "gep": {  # Yu et al. 2021 take 2000 anchors, 1000 directions and C_0, C_1 = 5, 2
        "anchors": 256,
        "basis_size": 60,
        "groups": 3,
        "residual_clip_norm": 0.4,
        "basis_every": 10,
    },
}

TUNING = {  # of a model, see launch/models.py
    "checkpoint": "",  # a public .safetensors or .npz file; "" for none
    "naming": "auto",
    "trainable": "all",  # or "head", "norms", "lora", or a regular expression over paths
    "lora": {"rank": 0, "layers": ".*attention/(query|value)"},
    # "memory" or "workdir", see launch/frozen.py
    "features": {
        "keep": "",
        "dimensions": 0,
        "whiten": 0.5,
    },
}


def clipping(clip_norm: float) -> dict[str, object]:
    """Returns the clip norm of a config, and no division of it among parts."""
    # Or "uniform", "dimension", or norms by paths, see launch/trainers.py. GEP has no parts.
    return {"clip_norm": clip_norm, "clip_parts": ""}


def optimizer(momentum: float) -> dict[str, object]:
    """Returns the optimizer of a config, see `optimizer` in launch/trainers.py."""
    options = {
        "sgd": {"momentum": momentum},
        "adam": {"b1": 0.9, "b2": 0.999},
        "adamw": {"b1": 0.9, "b2": 0.999},
    }
    return {"optimizer": "sgd", "optimizer_options": options, "weight_decay": 0.0}
