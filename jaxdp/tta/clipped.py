"""A published method with clipped gradients: the clip-only ablations of arXiv:2606.01908.

    unit "image":  G_t = (1/|S|) sum_{i in S} clip_C( grad [w_i u_i](theta_t + e_t) )
    unit "batch":  G_t = clip_C( (1/|S|) sum_{i in S} grad [w_i u_i](theta_t + e_t) )

The method chooses S, w_i and e_t as published: filters, memory, second pass and recovery stay.
"""

import dataclasses
import math
import numbers
from typing import Literal

from jaxdp.files import check_choice
from jaxdp.tta.method import Method

Unit = Literal["image", "batch"]


@dataclasses.dataclass(frozen=True, eq=False)
class Clipped:
    """A published method whose gradients are clipped, by image or by batch.

    `clipped` makes and documents it.
    """

    method: Method
    clip_norm: float
    unit: Unit


def clipped(method: Method, clip_norm: float, *, unit: Unit = "image") -> Clipped:
    """Returns a published method that clips the gradient of each image, or of each batch.

    `Adapter` accepts it in place of a method.

    It keeps all operators of the method: filters, memory, ascent, regulariser, skipped steps and
    recovery. The only change is the gradient that the parameters follow: the mean over the selected
    images of their clipped gradients, or with `unit="batch"` their mean gradient, clipped as a
    whole. The ascent of SAR stays that of the unclipped gradient, and the Fisher anchor of EATA is
    not clipped. A gradient of an image that is NaN or infinite counts as zero. If the gradient of a
    batch is, the batch makes no step.

    It has NO privacy guarantee, even with noise added by the optimizer. The number of selected
    images, the memory and the time of a reset depend on the images. A clipped batch does not even
    bound what one image contributes: it may turn the whole gradient around. An account charges both
    units as an event without privacy. `private` is the private form.

    Args:
      method: One of `jaxdp.tta.METHODS`, or your `Method`.
      clip_norm: C > 0, the L2 norm to which a gradient over all adapted parameters is clipped.
      unit: Whose gradient is clipped: "image" as in the paper's method, or "batch" as in the
        earlier work with which the paper compares.

    Raises:
      TypeError: method is not a `Method`.
      ValueError: clip_norm is not positive and finite, or the unit is unknown.
    """
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be a jaxdp.tta.Method such as Tent(), got {type(method).__name__}."
        )
    if not isinstance(clip_norm, numbers.Real) or not 0 < clip_norm < math.inf:
        raise ValueError(
            f"clip_norm must be positive and finite, got {clip_norm!r}. It is one number here."
        )
    check_choice("unit", unit, Unit)
    return Clipped(method, float(clip_norm), unit)
