"""Verifiable rewards."""

from megatron_hacpo.reward.base import BadGroundTruth, RewardResult, Verifier
from megatron_hacpo.reward.registry import get_verifier

__all__ = ["BadGroundTruth", "RewardResult", "Verifier", "get_verifier"]
