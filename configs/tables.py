"""What configs of tables share: fields of `config.data`, and the arguments of `jaxdp.data.from_csv`
from a JSON file."""

import json
import pathlib
from typing import Any


def table(columns: str) -> dict[str, Any]:
    """Returns the fields of `config.data` that name a table and say what it holds.

    `columns` is the path of a JSON file, or "", as `columns_of` takes it.
    """
    return {
        "source": "csv",
        "name": "table",  # in the ledger
        "path": "",  # the file, or a folder with a file for each part
        "label": "",
        "class_names": (),  # texts of the label, or
        "num_classes": 0,  # the number of classes, if the label has numbers
        "options": columns_of(columns),
        "split_seed": 0,
    }


def columns_of(path: str) -> dict[str, Any]:
    """Returns `config.data.options`: what the columns of a table mean, from a JSON file.

    Raises:
      ValueError: There is no such file, or it is no object of JSON.
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
    try:
        columns = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        # The class of the error is not for the reader of flags, which builds it again from a text.
        raise ValueError(f"{path} must be JSON in UTF-8: {error}.") from error
    if not isinstance(columns, dict):
        raise ValueError(f'{path} must be an object of JSON, {{"delimiter": ";"}}.')
    # Pairs, since names of columns may have dots, which no field of a config has.
    for name, value in columns.items():
        options[name] = tuple(value.items()) if isinstance(value, dict) else value
    return options
