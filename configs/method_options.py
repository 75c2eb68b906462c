"""The options of each private method beyond DP-SGD, in every fine-tuning config. The values are the papers'."""

METHOD_OPTIONS = {
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
    "adp_clip": {"quantile": 0.5, "clip_learning_rate": 0.2, "unit_norm": True},  # Andrew et al. 2021
    "gep": {  # Yu et al. 2021 take 2000 anchors, 1000 directions and C_0, C_1 = 5, 2
        "anchors": 256,
        "basis_size": 60,
        "groups": 3,
        "residual_clip_norm": 0.4,
        "basis_every": 10,
    },
}
