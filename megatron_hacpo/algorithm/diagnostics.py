"""What clipping did to a micro-batch's responses, as (sum, count) pairs to be added up before dividing.

Every function takes ratios s float32 [n] and advantages float64 [n] and returns two float64 scalars.
Responses with A = 0 are never counted: nothing can be clipped there, and they may be left out of the forward
pass, which must not change a metric.
"""

import torch
from torch import Tensor


def own_clip_fraction(s: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Responses or tokens that `clipped_surrogate` cuts off: out of bounds, on the side where min() bites."""
    above, counted = surrogate_clip_high_fraction(s, advantage, high)
    below, _ = surrogate_clip_low_fraction(s, advantage, low)
    return above + below, counted


def surrogate_clip_high_fraction(s: Tensor, advantage: Tensor, high: float) -> tuple[Tensor, Tensor]:
    """Those of `own_clip_fraction` that are above the bounds: wanted, and already more likely."""
    return _share((advantage > 0.0) & (s > 1.0 + high), advantage != 0.0)


def surrogate_clip_low_fraction(s: Tensor, advantage: Tensor, low: float) -> tuple[Tensor, Tensor]:
    """Those of `own_clip_fraction` that are below the bounds: unwanted, and already less likely."""
    return _share((advantage < 0.0) & (s < 1.0 - low), advantage != 0.0)


def cross_clip_low_fraction(s: Tensor, advantage: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """Cross responses below the window: the learner finds them too unlikely to follow."""
    return _share(s < lower_bound, advantage != 0.0)


def cross_clip_high_fraction(s: Tensor, advantage: Tensor, upper_bound: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cross responses above the window: the learner finds them more likely than their source did."""
    return _share(s > upper_bound, advantage != 0.0)


def rewarded_kept_fraction(
    s: Tensor, advantage: Tensor, lower_bound: float, upper_bound: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross responses with A > 0 that lie inside the window and so teach something.

    The figure to watch with short answers: a mean ratio may look fine while the window shuts these out.
    """
    return _share((s >= lower_bound) & (s <= upper_bound), advantage > 0.0)


def _share(hit: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    return (hit & counted).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)
