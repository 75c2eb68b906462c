r"""Private predictions about the rows of a table, with a certificate of each answer.

    python -m launch.predict --config configs/predict/csv.py:/my/columns.json \
        --workdir workdir/predict_table --config.data.path=patients.csv \
        --config.data.label=outcome --config.data.class_names="('well', 'ill')" \
        --config.training.records=340

The file after the colon has further arguments of `jaxdp.data.from_csv`, as for
configs/finetune/csv.py. `config.training.records` is the public number of private rows. A share of
the rows is declared public: features are centred and scaled on them, without their labels. With
`config.data.features=()` and no public part, they are used as the ranges of `from_csv` make them.
The bounds protect one row: drop further rows of a patient before. Half a minute on two CPU cores
for 569 rows."""

from ml_collections import ConfigDict

from configs.people import PEOPLE
from configs.predict import digits
from configs.tables import table


def get_config(columns: str = "") -> ConfigDict:
    config = digits.get_config()
    config.references = False  # comparisons read the private rows without noise
    config.data = {
        "kind": "table",
        "unit": "example",  # of privacy, for the ledger
        **PEOPLE,
        **table(columns),
        "parts": {"public": 0.1, "private": 0.6, "test": 0.3},  # shares of the rows
        "features": {"dimensions": 0, "whiten": 0.5, "radius": 1.0},
    }
    config.training.records = 1000  # change: the declared, public number of private rows
    config.dp_sgd.batch_size = 64
    return config
