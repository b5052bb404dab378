"""Weights into a real SGLang server: afterwards it computes what the trainer computes."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from learner_steps import make_policy, pair_config
from sglang_servers import (
    KEY,
    change_weights,
    policy_log_probs,
    server_log_probs,
    spec_of,
    started,
)

from megatron_hacpo.hf.families import tensor_shapes
from megatron_hacpo.megatron.packing import TokenSequence
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.rollout.sglang.client import ServerClient
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.sync import ExpectedWeights, SyncFailed, WeightSync
from megatron_hacpo.rollout.sglang.transports import (
    DiskTransport,
    DistributedTransport,
    TensorTransport,
    Transport,
)

pytestmark = pytest.mark.sglang
SEQUENCE = TokenSequence(np.array([2, 3, 4, 7], np.int32), np.array([5, 6, 3, 9, 1], np.int32))
TRANSPORTS = ("distributed", "tensor", "disk")


class Served:
    """A tiny agent's policy and a real server of the same model."""

    def __init__(self, world: World, folder: Path) -> None:
        config = pair_config()
        self.world = world
        self.folder = folder
        self.loop = LoopThread()
        self.policy: Policy = make_policy(config, "A", world)
        self.server = started(spec_of(config.agents["A"]), folder / "server.log", self.loop)
        self.client = self.server.client
        self.version = 0

    def transport(self, kind: str) -> Callable[[LoopThread], Transport]:
        cpu, timeout = torch.device("cpu"), timedelta(seconds=30)
        return {
            "distributed": lambda loop: DistributedTransport(loop, f"t{os.urandom(4).hex()}", cpu, timeout),
            "tensor": TensorTransport,
            "disk": lambda loop: DiskTransport(loop, self.folder / "weights", 0, 60.0),
        }[kind]

    def sync_of(
        self, kind: str, bucket_bytes: int = 2**20, *, check: bool = False, weights: object = None
    ) -> WeightSync:
        expected = ExpectedWeights(tensor_shapes(self.policy.hf_config), torch.float32)
        return WeightSync(
            self.world,
            weights or self.policy.stage_tensors,
            expected,
            self.transport(kind),
            bucket_bytes=bucket_bytes,
            checking_transport=(lambda loop: DiskTransport(loop, self.folder / "check", 0, 60.0))
            if check
            else None,
        )

    def give(self, sync: WeightSync) -> None:
        self.version += 1
        sync.update([(0, 0, 1, self.client.url, KEY)], self.version)

    def log_probs(self) -> torch.Tensor:
        return server_log_probs(self.loop, self.client, SEQUENCE)


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(world, tmp_path_factory.mktemp("served"))
    yield served
    served.server.kill()


def biggest(policy: Policy) -> int:
    return max(tensor.nbytes for _, tensor in policy.stage_tensors())


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("buckets", ["one", "two", "many", "each tensor alone", "the largest tensor exactly"])
def test_server_computes_what_the_trainer_computes(kind: str, buckets: str, served: Served) -> None:
    total = sum(tensor.nbytes for _, tensor in served.policy.stage_tensors())
    sizes = {
        "one": total,
        "two": total - 1,
        "many": total // 7,
        "each tensor alone": 1,
        "the largest tensor exactly": biggest(served.policy),
    }
    before = served.log_probs()
    change_weights(served.policy)
    sync = served.sync_of(kind, sizes[buckets])
    served.give(sync)
    sync.close()
    got, expected = served.log_probs(), policy_log_probs(served.policy, SEQUENCE)
    assert float((got - before).abs().max()) > 1e-3
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert served.loop.run(served.client.weight_version()) == str(served.version)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_views_and_transposed_tensors_arrive_as_what_they_show(kind: str, served: Served) -> None:
    def spread() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in served.policy.stage_tensors():
            if tensor.dim() == 2:
                wide = torch.full((tensor.shape[1], 2 * tensor.shape[0]), torch.nan)
                wide[:, ::2] = tensor.t()
                yield name, wide[:, ::2].t()
            else:
                yield name, torch.cat([tensor, torch.full_like(tensor, torch.nan)])[: len(tensor)]

    change_weights(served.policy)
    sync = served.sync_of(kind, weights=spread)
    served.give(sync)
    sync.close()
    torch.testing.assert_close(
        served.log_probs(), policy_log_probs(served.policy, SEQUENCE), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", ["distributed", "tensor"])
def test_verified_sync_finds_a_damaged_tensor(kind: str, served: Served) -> None:
    damaged = "model.layers.1.mlp.down_proj.weight"
    passes = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal passes
        passes += 1
        for name, tensor in served.policy.stage_tensors():
            yield name, tensor + 1e-3 if name == damaged and passes == 2 else tensor

    whole = served.sync_of(kind, check=True)
    served.give(whole)
    whole.close()
    sync = served.sync_of(kind, check=True, weights=stream)
    with pytest.raises(
        RuntimeError, match=rf"arrived damaged: 1 tensors .* {damaged.replace('.', chr(92) + '.')}"
    ):
        served.give(sync)
    sync.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[1:], r"model.embed_tokens.weight is absent in the policy"),
        (lambda pairs: [*pairs, ("model.extra", pairs[0][1])], r"model.extra is .* and absent in the model"),
        (
            lambda pairs: [(pairs[0][0], pairs[0][1][:-1]), *pairs[1:]],
            r"embed_tokens.weight is \(\d+, 48\) in",
        ),
        (
            lambda pairs: [(pairs[0][0], pairs[0][1].half()), *pairs[1:]],
            r"is torch.float16, the model is torch.float32",
        ),
        (
            lambda pairs: [(pairs[0][0], pairs[0][1] * torch.nan), *pairs[1:]],
            r"embed_tokens.weight is not finite",
        ),
    ],
)
def test_what_is_not_the_model_is_refused_before_anything_is_sent(
    change: Callable[[list[tuple[str, torch.Tensor]]], list[tuple[str, torch.Tensor]]],
    message: str,
    served: Served,
) -> None:
    before = served.log_probs()
    sync = served.sync_of("distributed", weights=lambda: iter(change(list(served.policy.stage_tensors()))))
    with pytest.raises(RuntimeError, match=message):
        served.give(sync)
    sync.close()
    assert torch.equal(served.log_probs(), before)


def test_a_server_that_is_not_there_is_named_and_the_others_go_on(served: Served) -> None:
    sync = served.sync_of("distributed")
    targets = [(0, 0, 1, served.client.url, KEY), (1, 0, 1, "http://127.0.0.1:1", KEY)]
    with pytest.raises(SyncFailed) as failed:
        sync.update(targets, 99)
    assert list(failed.value.reasons) == [1]
    change_weights(served.policy)
    served.give(sync)
    sync.close()
    torch.testing.assert_close(
        served.log_probs(), policy_log_probs(served.policy, SEQUENCE), atol=1e-4, rtol=0
    )


def test_fifty_syncs_leave_memory_flat(served: Served) -> None:
    """Resident memory of trainer and server, counted from the tenth sync on."""
    sync = served.sync_of("distributed")
    sizes = []
    for count in range(50):
        change_weights(served.policy, scale=1e-4)
        served.give(sync)
        if count in (9, 49):
            sizes.append((psutil.Process().memory_info().rss, tree_bytes(served.server.pid)))
    sync.close()
    for early, late in zip(*sizes, strict=True):
        assert late <= 1.05 * early
    torch.testing.assert_close(
        served.log_probs(), policy_log_probs(served.policy, SEQUENCE), atol=1e-4, rtol=0
    )


def tree_bytes(pid: int) -> int:
    main = psutil.Process(pid)
    return sum(process.memory_info().rss for process in [main, *main.children(recursive=True)])


def test_wrong_key_is_told_in_one_line(served: Served) -> None:
    client = ServerClient(served.client.url, "another key")
    with pytest.raises(RuntimeError, match=r"/server_info: wrong API key; give the server's own$"):
        served.loop.run(client.info())
    served.loop.run(client.close())
