"""Fields that configs of private prediction share. configs/predict/digits.py has them all in one
place."""

QUESTIONS = {
    "query_seed": 0,  # of the public choice of test inputs to ask about
    "references": True,  # also the comparison and the figures
    "repetitions": 20,  # of each row of the table
    "mechanisms": ("global", "smooth", "ours"),
}

# One step of gradient descent in a full batch, see `jaxdp.prediction.Training`.
ONE_STEP = {
    "epochs": 1,
    "momentum": 0.0,
    "nesterov": False,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "lr_decay": 0.0,
    "lr_min": 0.0,
    "threat": "add_remove",  # or "replace_one", Theorem 4.6
}
