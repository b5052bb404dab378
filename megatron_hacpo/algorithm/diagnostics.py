"""What clipping did to a micro-batch's responses, as (sum, count) pairs to be added up before dividing.

Every function takes ratios s float32 [n] and advantages float64 [n] and returns two float64 scalars. Bounds
are numbers or float32 [n]. Responses with A = 0 are never counted: nothing can be clipped there, and they may
be left out of the forward pass, which must not change a metric.
"""

import torch
from torch import Tensor

Bound = float | Tensor


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


def cross_clip_low_fraction(s: Tensor, advantage: Tensor, lower_bound: Bound) -> tuple[Tensor, Tensor]:
    """Cross responses below the window: the learner finds them too unlikely to follow."""
    return _share(s < lower_bound, advantage != 0.0)


def cross_clip_high_fraction(s: Tensor, advantage: Tensor, upper_bound: Bound = 1.0) -> tuple[Tensor, Tensor]:
    """Cross responses above the window: the learner finds them more likely than their source did."""
    return _share(s > upper_bound, advantage != 0.0)


def rewarded_kept_fraction(
    s: Tensor, advantage: Tensor, lower_bound: Bound, upper_bound: Bound = 1.0
) -> tuple[Tensor, Tensor]:
    """Cross responses with A > 0 that lie inside the window and so teach something.

    The figure to watch with short answers: a mean ratio may look fine while the window shuts these out.
    """
    return _share((s >= lower_bound) & (s <= upper_bound), advantage > 0.0)


def mean_ratio(s: Tensor, advantage: Tensor, *, rewarded: bool) -> tuple[Tensor, Tensor]:
    """s of the responses with A > 0, or of those with A < 0."""
    chosen = advantage > 0.0 if rewarded else advantage < 0.0
    return s.double()[chosen].sum(), chosen.sum(dtype=torch.float64)


def gradient_weight(s: Tensor, alpha: float, lower_bound: Bound, upper_bound: Bound) -> Tensor:
    """What multiplies A * grad log pi of each cross response, float64 [n]: s * min(s, 1)^alpha in the window,
    0 outside."""
    weight = s.double() * s.double().clamp(max=1.0) ** alpha
    return weight.masked_fill((s < lower_bound) | (s > upper_bound), 0.0)


def weight_moments(weight: Tensor, advantage: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Mean weight and mean squared weight of the responses with a signal; see `effective_share`."""
    counted = advantage != 0.0
    count = counted.sum(dtype=torch.float64)
    return (weight[counted].sum(), count), (weight[counted].square().sum(), count)


def effective_share(mean_weight: float, mean_square: float) -> float:
    """Kish's effective sample size (sum w)^2 / sum w^2 as a share of the sample; 0 if all weights are 0."""
    return mean_weight**2 / mean_square if mean_square > 0.0 else 0.0


def _share(hit: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    return (hit & counted).sum(dtype=torch.float64), counted.sum(dtype=torch.float64)
