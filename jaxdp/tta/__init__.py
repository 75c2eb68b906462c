"""Test-time adaptation of a model to a private stream, and the private form of each method.

The methods are Tent, EATA, SAR, DeYO and COME.
"""

from collections.abc import Callable

from jaxdp.tta.accounts import Epsilons, StreamAccount, Visits, epsilons, event
from jaxdp.tta.adapter import Adapter, AdaptState
from jaxdp.tta.clipped import Clipped, clipped
from jaxdp.tta.come import COME
from jaxdp.tta.deyo import DeYO
from jaxdp.tta.eata import EATA, fisher
from jaxdp.tta.method import Method, Sample
from jaxdp.tta.monitor import CollapseMonitor, CollapseReport
from jaxdp.tta.private import Private, private
from jaxdp.tta.sar import SAR
from jaxdp.tta.select import lower_blocks, normalisation
from jaxdp.tta.serving import Served, serve
from jaxdp.tta.streams import Batch, Stream
from jaxdp.tta.tent import Tent

METHODS: dict[str, Callable[..., Method]] = {
    "Tent": Tent,
    "EATA": EATA,
    "SAR": SAR,
    "DeYO": DeYO,
    "COME": COME,
}

__all__ = [
    "COME",
    "EATA",
    "METHODS",
    "SAR",
    "AdaptState",
    "Adapter",
    "Batch",
    "Clipped",
    "CollapseMonitor",
    "CollapseReport",
    "DeYO",
    "Epsilons",
    "Method",
    "Private",
    "Sample",
    "Served",
    "Stream",
    "StreamAccount",
    "Tent",
    "Visits",
    "clipped",
    "epsilons",
    "event",
    "fisher",
    "lower_blocks",
    "normalisation",
    "private",
    "serve",
]
