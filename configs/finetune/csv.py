r"""DP-SGD on a table: a small network on the features of a CSV file.

    python -m launch.finetune --config configs/finetune/csv.py:/my/columns.json \
        --workdir workdir/table --config.data.path=patients.csv --config.data.label=outcome \
        --config.data.class_names="('well', 'ill')"

The file after the colon has further arguments of `jaxdp.data.from_csv`: what the columns
mean, in public numbers and texts. Without it, all other columns are numbers and keep their values:

    {"ranges": {"age": [0, 120]}, "categories": {"sex": ["f", "m"]}, "delimiter": ";"}

A share of the rows is the test set. The accuracy on it is printed and reported, and no ledger
charges it: these rows are declared public. `config.data.group`, `unit` and `max_records` protect a
patient with all rows, and put each patient into one part. docs/howto/your_own_data.md has a whole
run. Ten seconds on two CPU cores for 569 rows.
"""

from ml_collections import ConfigDict

from configs.method_options import METHOD_OPTIONS, TUNING, clipping, optimizer
from configs.people import PEOPLE
from configs.tables import table


def get_config(columns: str = "") -> ConfigDict:
    return ConfigDict(
        {
            "init_seed": 0,
            "watch": "",  # "tensorboard", "wandb" or both with a comma
            "references": False,  # a model without privacy must not be published
            "data": {
                **table(columns),
                # shares of the rows, or with a group of the owners
                "parts": {"public": "", "private": 0.8, "test": 0.2},
                "group": "",  # the column with the patient
                "max_records": 1,
                # between the owners of a row that has several, such as ";"; with it, adjacency
                # must be "zero_out"
                "separator": "",
                "unit": "example",  # of privacy, for the ledger
                **PEOPLE,
                "adjacency": "add_remove",
                "crop_padding": 0,
                "flip": False,
            },
            "model": {
                **TUNING,
                "name": "mlp",
                "options": {"hidden": (32,)},
                "preprocessing": {},  # features have none
            },
            "pretrain": {
                "weights": "",
                "new_head": False,
                "steps": 0,
                "batch_size": 64,
                "learning_rate": 1e-3,
            },
            "no_privacy": {"steps": 300, "batch_size": 64, "learning_rate": 1e-2},
            "private": {
                "method": "dp_sgd",
                "method_options": METHOD_OPTIONS,
                "accountant": "auto",
                "epsilon": 3.0,
                "delta": 1e-4,
                # above 0, epsilon also pays means and deviations of the columns with ranges
                "scaler_noise_multiplier": 0.0,
                "batch_size": 64,  # expected size of a Poisson-sampled batch
                "truncated_batch_size": 0,  # the largest batch; 0 truncates none
                "physical_batch_size": 0,  # the library chooses
                "steps": 60,
                **clipping(1.0),
                "exact": False,  # True sums and draws noise by integers
                "allow_nonfinite": False,  # True starts with many NaN or infinite gradients
                "learning_rate": 0.5,
                **optimizer(momentum=0.9),
                "schedule": "cosine",
                "augmult": 0,
                "ema_decay": 0.0,
                "ascent_radius": 0.0,
                "checkpoint_every": 20,
                "evaluate_every": 0,  # 0 is with every checkpoint
            },
        }
    )
