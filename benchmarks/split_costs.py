"""The client's costs of Table 2 of Split Adaptation, counted from shapes: ViT-L/16, CIFAR-100, five
images per class.

python -m benchmarks run split_costs
"""

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks import timing
from jaxdp.models import Preprocessing, create
from jaxdp.split.backbone import Backbone
from launch.split_costs import cost

# The paper's peak memory in MB and minutes. Its hardware, data and number of images are not stated.
PAPER = {
    "lp": (6979, 66),
    "ft": (10302, 34),
    "ln": (5968, 25),
    "sl": (8932, 15),
    "ot": (4896, 23),
    "sa": (2233, 2.5),
}
NAMES = {
    "lp": "linear probing",
    "ft": "fine-tuning",
    "ln": "LN-tune",
    "sl": "split learning",
    "ot": "offsite tuning",
    "sa": "Split Adaptation",
    "sa_noise_once": "the same, noise once",
    "sa_private": "private mode",
}


def table(report: Mapping[str, Any]) -> str:
    """Returns the table of docs/results/split_adaptation.md."""
    header = ["method", "paper: MB, minutes", "client's parameters, MB", "PFLOP"]
    header += ["upload, MB", "download, MB"]
    lines = []
    for method, row in report["methods"].items():
        paper = "{}, {}".format(*PAPER[method]) if method in PAPER else ""
        lines.append(
            [
                NAMES[method],
                paper,
                f"{row['parameter_bytes'] / 1e6:,.0f}",
                f"{row['total_flops'] / 1e15:.2g}",
                f"{row['upload'] / 1e6:,.1f}",
                f"{row['download'] / 1e6:,.1f}",
            ]
        )
    return timing.page_table(header, lines)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    model = create("vit_l16", num_classes=1000)
    preprocessing = Preprocessing(size=224, mean=(0.5,) * 3, std=(0.5,) * 3)
    backbone = Backbone(model, preprocessing, 16)
    fields = ("parameters", "parameter_bytes", "total_flops", "upload", "download")
    methods = {}
    for method in NAMES:
        epochs = 50 if method == "ot" else 100
        counted = cost(method, backbone, images=500, num_classes=100, epochs=epochs)
        methods[method] = {field: getattr(counted, field) for field in fields}
    print(table({"methods": methods}))
    return {"images": 500, "num_classes": 100, "methods": methods}
