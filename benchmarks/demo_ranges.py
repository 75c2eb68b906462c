"""Runs the demo several times, and keeps the range of each result. The noise of every run is new.

    python -m benchmarks.demo_ranges [--runs 5]

The documentation states these ranges. `tests/test_demo_ranges.py` compares them.
"""

import contextlib
import io
import json
import pathlib
import tempfile
from typing import Any

from benchmarks import timing
from configs.lifecycle_digits import get_config
from jaxdp.files import write_json
from launch.lifecycle import life


def main() -> None:
    parser = timing.arguments(__doc__, output="benchmarks/results/demo_ranges.json")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    runs = [one() for _ in range(options.runs)]
    ranges = {name: [f(run[name] for run in runs) for f in (min, max)] for name in runs[0]}
    found = {"runs": options.runs, "test_images": get_config().data.parts.test, "ranges": ranges}
    print(json.dumps(found, indent=1))
    write_json(pathlib.Path(options.output), found)


def one() -> dict[str, float]:
    """Returns the results of one run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        states = life.run(get_config(), folder)

        def result(stage: str) -> Any:
            path = pathlib.Path(folder, states[stage]["folder"], "stage.json")
            return json.loads(path.read_text(encoding="utf-8"))["result"]

        tuned, ((_, models),) = result("finetune"), result("deploy")["models"].items()
        return {
            "public accuracy": result("pretrain")["accuracy"],
            "private accuracy": tuned["after"],
            "certified answers right": result("predict")["accuracy"],
            **{
                f"{name}, brightened: {measure}": row[measure]
                for name, row in models.items()
                for measure in ("accuracy", "ece")
            },
        }


if __name__ == "__main__":
    main()
