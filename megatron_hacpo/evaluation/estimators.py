"""What n responses to each of P problems say. Rewards are float64 [P, n]."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np


def pass_at_k(correct: np.ndarray, k: int) -> np.ndarray:
    """Chance that at least one of k responses, drawn without replacement, is correct; float64 [P].

    correct: bool [P, n], k <= n. The unbiased estimate of Chen et al. (2021), 1 - C(n - c, k) / C(n, k).
    """
    n = correct.shape[1]
    assert 1 <= k <= n
    wrong = n - correct.sum(axis=1)
    return np.array([1.0 - math.comb(w, k) / math.comb(n, k) for w in wrong.tolist()])


def best_at_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """Mean of the largest of k rewards, drawn with replacement; float64 [P].

    The paper's best@k: verl estimates it with a thousand draws, here it is what those draws tend to. The
    largest is at most the i-th smallest of n with probability (i / n)^k.
    """
    n = rewards.shape[1]
    at_most = (np.arange(n + 1) / n) ** k
    return np.sort(rewards, axis=1) @ np.diff(at_most)


def majority(rewards: Sequence[float], answers: Sequence[str | None]) -> float:
    """Reward of the answer that most of a problem's responses give (maj@n).

    Responses without an answer do not vote; without any vote it is the smallest reward. Of answers with as
    many votes each is as likely; an answer's reward is the mean over the responses that give it.
    """
    votes = defaultdict(list)
    for reward, answer in zip(rewards, answers, strict=True):
        if answer is not None:
            votes[answer].append(reward)
    if not votes:
        return float(min(rewards))
    most = max(map(len, votes.values()))
    return float(np.mean([np.mean(given) for given in votes.values() if len(given) == most]))


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % confidence interval of the mean over problems: 1.96 standard errors.

    values: float64 [P], one for each problem, whatever was made of its responses; they are independent
    between problems and not within one. NaN for a single problem.
    """
    return float(1.96 * values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
