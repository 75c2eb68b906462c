"""What configs of tables share: the arguments of `jaxdp.data.from_csv` from a JSON file."""

import json
import pathlib
from typing import Any


def columns_of(path: str) -> dict[str, Any]:
    """Returns `config.data.options`: what the columns of a table mean, from a JSON file.

    Raises:
      ValueError: There is no such file.
    """
    options: dict[str, Any] = {"delimiter": ",", "encoding": "utf-8", "decimal": "."}
    options["thousands"] = ""
    if not path:
        return options
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(
            f"there is no file {path!r}. Give a config of a table, such as "
            "configs/finetune/csv.py, a JSON file after the colon."
        )
    # Pairs, since names of columns may have dots, which no field of a config has.
    for name, value in json.loads(file.read_text("utf-8")).items():
        options[name] = tuple(value.items()) if isinstance(value, dict) else value
    return options
