"""The client's costs of Table 2 of Split Adaptation, counted from shapes: ViT-L/16, CIFAR-100, five
images per class.

python -m benchmarks run split_costs
"""

from benchmarks import pages, timing
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


def tables(report) -> dict:
    rows = []
    for method, row in report["methods"].items():
        paper = "{}, {}".format(*PAPER[method]) if method in PAPER else ""
        sizes = {name: row[name] / 1e6 for name in ("parameter_bytes", "upload", "download")}
        named = {"name": NAMES[method], "paper": paper, "peta": row["total_flops"] / 1e15}
        rows.append(named | sizes)
    columns = {
        "method": "{name}",
        "paper: MB, minutes": "{paper}",
        "client's parameters, MB": "{parameter_bytes:,.0f}",
        "PFLOP": "{peta:.2g}",
        "upload, MB": "{upload:,.1f}",
        "download, MB": "{download:,.1f}",
    }
    return {"costs": pages.lines(rows, columns)}


def measure(flags) -> dict:
    model = create("vit_l16", num_classes=1000)
    preprocessing = Preprocessing(size=224, mean=(0.5,) * 3, std=(0.5,) * 3)
    backbone = Backbone(model, preprocessing, 16)
    fields = ("parameters", "parameter_bytes", "total_flops", "upload", "download")
    methods = {}
    for method in NAMES:
        epochs = 50 if method == "ot" else 100
        counted = cost(method, backbone, images=500, num_classes=100, epochs=epochs)
        methods[method] = {field: getattr(counted, field) for field in fields}
    report = {"images": 500, "num_classes": 100, "methods": methods}
    timing.show("costs", tables(report)["costs"])
    return report
