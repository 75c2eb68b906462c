"""Runs the demo several times, and keeps the range of each result. The noise of every run is new.

    python -m benchmarks.demo_ranges [--runs 5]

The documentation states these ranges, and `tests/test_demo_ranges.py` compares them. `python -m
benchmarks.evidence howto/whole_life.md` writes the table."""

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
    write_json(pathlib.Path(options.output), found)
    print(table(found))


def span(ends: list[float], percent: bool) -> str:
    """Returns a range as the documentation states it."""
    low, high = (f"{100 * end:.1f}" if percent else f"{end:.3f}" for end in ends)
    return (low if low == high else f"{low} to {high}") + (" %" if percent else "")


def table(found: Any) -> str:
    """Returns the table of docs/howto/whole_life.md."""
    rows = [
        f"| {name} | {span(ends, not name.endswith('ECE'))} |"
        for name, ends in found["ranges"].items()
    ]
    head = f"| result | range over {found['runs']} runs |"
    return "\n".join([head, "|---|---|", *rows])


def one() -> dict[str, float]:
    """Returns the results of one run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        states = life.run(get_config(), folder)

        def result(stage: str) -> Any:
            path = pathlib.Path(folder, states[stage]["folder"], "row.json")
            return json.loads(path.read_text(encoding="utf-8"))["result"]

        tuned, ((_, models),) = result("finetune"), result("deploy")["models"].items()
        return {
            "accuracy after public pre-training": result("pretrain")["accuracy"],
            "accuracy after private fine-tuning": tuned["after"],
            "certified answers that are right": result("predict")["accuracy"],
            **{
                f"brightened images, {name}: {what}": row[key]
                for name, row in models.items()
                for key, what in (("accuracy", "accuracy"), ("ece", "ECE"))
            },
        }


if __name__ == "__main__":
    main()
