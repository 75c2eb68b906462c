"""A published method with clipped gradients: the clip-only ablation of arXiv:2606.01908.

    G_t = (1/|S|) sum_{i in S} clip_C( grad [w_i u_i](theta_t + e_t) )

The method chooses S, w_i and e_t as published: filters, memory, second pass and recovery stay.
"""

import dataclasses
import math

from jaxdp.tta.method import Method


@dataclasses.dataclass(frozen=True, eq=False)
class Clipped:
    """A published method whose gradients are clipped image by image.

    `clipped` makes and documents it.
    """

    method: Method
    clip_norm: float


def clipped(method: Method, clip_norm: float) -> Clipped:
    """Returns a published method that clips the gradient of each image.

    `Adapter` accepts it in place of a method.

    It keeps all operators of the method: filters, memory, ascent, regulariser, skipped steps and
    recovery. The only change is the gradient that the parameters follow: the mean over the selected
    images of their clipped gradients. The ascent of SAR stays that of the unclipped gradient, and
    the Fisher anchor of EATA is not clipped. A gradient that is NaN or infinite counts as zero.

    It has NO privacy guarantee, even with noise added by the optimizer. The number of selected
    images, the memory and the time of a reset depend on the images. An account charges it as an
    event without privacy. `private` is the private form.

    Args:
      method: One of `jaxdp.tta.METHODS`, or your `Method`.
      clip_norm: C > 0, the L2 norm to which each image's gradient over all adapted parameters is
          clipped.

    Raises:
      TypeError: method is not a `Method`.
      ValueError: clip_norm is not positive and finite.
    """
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be a jaxdp.tta.Method such as Tent(), got {type(method).__name__}."
        )
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm must be positive and finite, got {clip_norm}.")
    return Clipped(method, float(clip_norm))
