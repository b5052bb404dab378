"""Verifiable rewards."""

from megatron_hacpo.reward.base import RewardResult, Verifier, score
from megatron_hacpo.reward.registry import get_verifier

__all__ = ["RewardResult", "Verifier", "get_verifier", "score"]
