"""The KL penalty against hand-computed values."""

import math

import torch

from megatron_hacpo.algorithm.kl import low_var_kl, sequence_kl


def test_per_token_values() -> None:
    ref = torch.tensor([-1.0, -1.0, -2.0])
    new = torch.tensor([-1.0, -2.0, -1.0])
    # d = 0, 1, -1: exp(d) - d - 1 = 0, e - 2, 1 / e
    expected = torch.tensor([0.0, math.e - 2.0, 1.0 / math.e])
    torch.testing.assert_close(low_var_kl(new, ref), expected)


def test_small_differences_keep_their_digits() -> None:
    # d^2 / 2 + d^3 / 6 + ... = 5.0017e-7; exp(d) - d - 1 in float32 has steps of 1.2e-7.
    d = 1e-3
    kl = low_var_kl(torch.tensor([-d]), torch.tensor([0.0]))
    torch.testing.assert_close(kl, torch.tensor([d * d / 2 + d**3 / 6]), rtol=1e-3, atol=0.0)


def test_both_clamps() -> None:
    new = torch.tensor([-3.0, -60.0, 0.0, 0.0], requires_grad=True)
    ref = torch.tensor([0.0, 0.0, -9.0, -40.0])
    kl = low_var_kl(new, ref)
    # d = 3: e^3 - 4 = 16.1 -> 10. d = 60 -> 20: e^20 - 21 -> 10. d = -9: e^-9 + 8. d = -40 -> -20: 19 -> 10
    torch.testing.assert_close(kl, torch.tensor([10.0, 10.0, math.exp(-9.0) + 8.0, 10.0]))
    kl.sum().backward()
    assert new.grad is not None
    # d/d new = 1 - exp(d) between the clamps, nothing beyond
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, 1.0 - math.exp(-9.0), 0.0]))


def test_the_log_ratio_clamp_keeps_exp_finite() -> None:
    new = torch.tensor([-200.0], requires_grad=True)
    low_var_kl(new, torch.tensor([0.0])).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0]  # exp(200) overflows: 0 * inf without the first clamp


def test_sequence_mean_over_packed_tokens() -> None:
    ref = torch.tensor([torch.nan, -1.0, -1.0, -2.0], requires_grad=True)
    new = torch.tensor([0.0, -1.0, -2.0, -1.0], requires_grad=True)
    segments = torch.tensor([-1, 0, 0, 1])
    value = sequence_kl(new, ref, segments, 3)
    torch.testing.assert_close(value, torch.tensor([(math.e - 2.0) / 2, 1.0 / math.e, 0.0]))
    halves = sequence_kl(new, ref, segments, 3, lengths=torch.tensor([4, 1, 5]))
    torch.testing.assert_close(halves, torch.tensor([(math.e - 2.0) / 4, 1.0 / math.e, 0.0]))
    value.sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([0.0, 0.0, (1 - math.e) / 2, 1 - 1 / math.e]))
    assert ref.grad is None  # the reference is frozen
