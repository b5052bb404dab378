"""Optimizer states in host memory: Megatron's offloading optimizer, told that bfloat16 lies on a GPU."""

import sys
from collections.abc import Iterator

import pytest
import torch
from learner_steps import make_policy, pair_config, run_steps
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer, hybrid_optimizer

from megatron_hacpo.megatron import optimizer as optimizer_module
from megatron_hacpo.megatron.cpu import _Stream
from megatron_hacpo.megatron.offload import HostCopies, HostMemory
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World


def trained(world: World) -> tuple[Policy, list[float]]:
    """A policy after three HACPO steps, and the gradient norms of its updates."""
    config = pair_config("agents.B.dtype=bfloat16", "optimizer.distributed=true", "optimizer.eps=1.0e-4")
    policy = make_policy(config, "B", world)
    return policy, [record.grad_norm for record in run_steps(config, "B", policy, 3)]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the offloading optimizer alone the model's weights are on a GPU, their float32 copies are not."""

    def is_cuda(tensor: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals["__name__"]
        return tensor.dtype is torch.bfloat16 and caller == hybrid_optimizer.__name__

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(is_cuda))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(_Stream, "wait", lambda event, stream: None, raising=False)
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda version: True)
    monkeypatch.setattr(optimizer_module, "_offloads", lambda optimizer, device: True)


def test_offloaded_optimizer_gives_the_same_updates(world: World, request: pytest.FixtureRequest) -> None:
    usual, norms = trained(world)
    request.getfixturevalue("pretended_gpu")
    offloaded, other_norms = trained(world)
    (optimizer,) = optimizer_module.single_optimizers(offloaded._optimizer)
    assert isinstance(optimizer.optimizer, HybridDeviceOptimizer)
    assert other_norms == norms
    assert len(norms) == 12
    for weight, other in zip(usual.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(weight, other)


def memory_of(policy: Policy) -> dict[str, int]:
    """Bytes that are allocated, by kind; in float32 the optimizer's weights are the model's."""

    def storages(tensors: Iterator[torch.Tensor]) -> dict[int, int]:
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}

    weights = storages(policy.parameters())
    states = {key: size for key, size in storages(policy.memory.states()).items() if key not in weights}
    return {
        "weights": sum(weights.values()),
        "gradients": sum(storages(policy.memory.gradients()).values()),
        "states": sum(states.values()),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", ["true", "false"])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_a_trainer_that_left_its_memory_to_others_goes_on_as_if_nothing_was(
    offload: str, distributed: str, dtype: str, world: World
) -> None:
    settings = [f"agents.B.dtype={dtype}", f"optimizer.distributed={distributed}"]
    config = pair_config(*settings, f"agents.B.placement={{colocated: true, offload: {offload}}}")
    plain, moved = make_policy(pair_config(*settings), "B", world), make_policy(config, "B", world)
    for _ in range(2):
        before = memory_of(moved)
        moved.memory.offload_states()
        assert memory_of(moved) == {**before, "gradients": 0, "states": 0}
        sent = {name: weight.clone() for name, weight in moved.export()}
        assert all(torch.equal(sent[name], weight) for name, weight in plain.export())
        moved.memory.offload_weights()
        left = 0 if offload == "all" else before["weights"]
        assert memory_of(moved) == {"weights": left, "gradients": 0, "states": 0}
        moved.memory.reload_weights()
        assert memory_of(moved)["weights"] == before["weights"]
        assert memory_of(moved)["gradients"] == 0
        moved.memory.reload()
        assert memory_of(moved) == before
        norms = [[r.grad_norm for r in run_steps(config, "B", policy, 1)] for policy in (plain, moved)]
        assert norms[0] == norms[1]
    assert memory_of(moved)["states"] > 0
    for weight, other in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_host_memory_is_one_piece_that_is_used_again() -> None:
    memory = HostMemory()
    first = memory.take([3, 0, 1000])
    assert [buffer.numel() for buffer in first] == [3, 0, 1000]
    first[0].fill_(1)
    first[2].fill_(2)
    assert first[0].tolist() == [1, 1, 1]
    assert all(buffer.data_ptr() % 64 == 0 for buffer in first)
    again = memory.take([500])
    assert again[0].data_ptr() == first[0].data_ptr()
    assert memory.take([]) == []
    assert memory.take([5000])[0].numel() == 5000


def test_copies_that_are_still_needed_are_not_overwritten() -> None:
    copies, kept, other = HostCopies(), torch.arange(5), torch.ones(5)
    copies.offload([kept])
    copies.offload([kept])  # it is away already
    copies.offload([other], keep=False)
    with pytest.raises(AssertionError):
        copies.offload([torch.ones(3)])
    copies.reload()
    assert kept.tolist() == [0, 1, 2, 3, 4]
    assert other.tolist() == [0.0] * 5
