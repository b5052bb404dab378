"""The section `algorithm`: every method and ablation is configuration alone (docs/methods.md lists them).

A method is a preset (`PRESETS`): it fills the fields that the file leaves open. What the file or a `--set`
writes always wins. Fields that a method does not use (gspo's `delta`) may stand there, without effect.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_hacpo.config.section import Count, NonNegative, Positive, Section

PRESETS: dict[str, dict[str, object]] = {
    "hacpo": {},
    "gspo": {},
    "grpo": {"own_ratio": "token", "clip_low": 0.2, "clip_high": 0.28},
    "naive": {
        "capability_baseline": False,
        "discrepancy_gradient": False,
        "cross_clip": "surrogate",
    },
}
"""What a method changes of `AlgorithmConfig`'s defaults, which are HACPO's."""


class AlgorithmConfig(Section):
    """The objective; docs/methods.md says how each method and ablation is written."""

    name: Literal["hacpo", "gspo", "grpo", "naive"] = "hacpo"
    """The preset for the keys that are not set."""
    alpha: NonNegative = 1.0
    """Exponent of the cross responses' weight (eq. 12-14). Without effect in `cross_clip: surrogate`."""
    delta: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The cross ratio's lower bound is 1 - delta + m * delta_step at the step's update m (eq. 12-14)."""
    delta_step: NonNegative = 0.025
    """How much narrower the window gets with each update of a step."""
    cross_window: Literal["fixed", "per_sequence"] = "fixed"
    """`fixed`: the bound above for all (the paper's). `per_sequence`: exp(-tau / L) for a response of L
    tokens of the learner's; tau shrinks over a step's updates in proportion to the fixed window."""
    tau: Positive = 10.0
    """`per_sequence` lets in what the learner finds at most tau nats less likely than its source did."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """See `clip_high`."""
    clip_high: NonNegative = 4e-4
    """Own ratios are clipped to [1 - clip_low, 1 + clip_high]."""
    capability_window: Count = 5
    """K, in steps."""
    capability_metric: Literal["mean", "positive_share"] = "mean"
    """The mean reward, or the share of rewards above 0."""
    capability_baseline: bool = True
    """Capability-aware baseline (eq. 6, 7); false is the ablation - Adv."""
    discrepancy_gradient: bool = True
    """omega(j,k) as a factor of the cross responses' gradient; false is the ablation - omega."""
    cross_clip: Literal["stepwise", "none", "surrogate"] = "stepwise"
    """`none`: no bounds. `surrogate`: cross responses get the own objective, min() and clip included."""
    own_ratio: Literal["sequence", "token"] = "sequence"
    """Ratio, clip and min() per response (GSPO) or per token (GRPO)."""
    zero_equal_groups: bool = True
    """Advantage 0 on a prompt whose rewards are all equal."""
    baseline_guard: bool = True
    """A baseline above 1 falls back to the learner's own mean; only where `reward.range` is [0, 1]."""
    log_ratio_clamp: Positive | None = 10.0
    """Bound of abs(log s) before exp; null: none."""
    kl_coef: NonNegative = 1e-3
    """Weight of the KL to the starting weights on own responses; 0: no reference is kept."""
    alternate_minibatches: bool = False
    """Own and cross mini-batches take turns instead of own first."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        name = raw.get("name", "hacpo")
        return {**PRESETS.get(name, {}), **raw} if isinstance(name, str) else raw

    @property
    def share(self) -> bool:
        """Whether agents train on each other's responses."""
        return self.name in ("hacpo", "naive")


def method_value(name: str, key: str) -> object:
    """What method `name` has for a key of `algorithm` that nobody sets."""
    return PRESETS[name].get(key, AlgorithmConfig.model_fields[key].default)
