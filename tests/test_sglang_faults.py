"""Servers that die and hang amid a batch: it is completed all the same, by the current weights."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_steps import make_policy, pair_config
from sglang_servers import change_weights, sglang_python

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.data import rule_task
from megatron_hacpo.megatron.packing import TokenSequence
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.rollout.base import Response, Sampling
from megatron_hacpo.rollout.sglang.rollout import SGLangRollout
from megatron_hacpo.rollout.sglang.setup import open_rollout

pytestmark = pytest.mark.sglang
SAMPLING = Sampling(responses_per_prompt=8, max_tokens=24)
HANG_SECONDS = 6.0


class Served:
    """An agent with two real servers."""

    def __init__(self, world: World, folder: Path) -> None:
        config = pair_config(
            "rollout.engine=sglang",
            f"rollout.sglang.python={sglang_python()}",
            "rollout.sglang.servers=2",
            f"rollout.sglang.hang_seconds={HANG_SECONDS}",
            "rollout.sglang.max_concurrent=16",
        )
        agent = config.agents["A"]
        tokenizer = AgentTokenizer.load(agent.model)
        self.warnings: list[str] = []
        self.policy: Policy = make_policy(config, "A", world)
        self.prompts = [tokenizer.render_prompt(p.messages) for p in rule_task.batch(1, 1, 32)]
        self.rollout: SGLangRollout = open_rollout(
            "A",
            agent,
            ranks=world,
            device=world.device,
            weights=self.policy.stage_tensors,
            hf_config=self.policy.hf_config,
            stop_ids=tokenizer.stop_ids,
            context=agent.rollout.max_tokens,
            run_dir=folder,
            seed=1,
            warn=self.warnings.append,
            trainer=self.policy.memory,
        )
        self.members = self.rollout._members
        self.loop = self.rollout._loop
        self.version = 0

    def new_weights(self) -> None:
        self.version += 1
        change_weights(self.policy)
        self.rollout.sync_weights(self.version)

    def wait_until_both_serve(self) -> None:
        """Until a server that is being started is back and has weights."""
        while self.members.of("starting"):
            time.sleep(0.2)
        self.new_weights()
        assert len(self.members.of("serving")) == 2

    def slow_down(self, seconds: float | None) -> None:
        """Have every forward pass of the servers take longer: there is time to hit them."""
        for member in self.members.of("serving"):
            self.loop.run(member.client.post("/slow_down", {"forward_sleep_time": seconds}))

    def generate_while(self, signum: signal.Signals, numbers: Sequence[int]) -> list[Response]:
        """A batch, amid which servers get a signal. Each response is reported once, to this thread."""
        self.slow_down(0.1)
        victims = [self.members.all[number].server.pid for number in numbers]
        done = threading.Event()
        reported: dict[int, Response] = {}
        caller = threading.get_ident()

        def report(index: int, response: Response) -> None:
            assert threading.get_ident() == caller
            assert index not in reported
            reported[index] = response

        def strike() -> None:
            time.sleep(2.0)
            assert not done.is_set(), "the batch was over too soon"
            for pid in victims:
                (os.killpg if signum == signal.SIGSTOP else os.kill)(pid, signum)

        striker = threading.Thread(target=strike)
        striker.start()
        responses = self.rollout.generate(self.prompts, SAMPLING, on_response=report)
        done.set()
        striker.join()
        assert responses is not None
        assert len(reported) == len(responses)
        assert all(reported[index] is response for index, response in enumerate(responses))
        return responses

    def check(self, responses: list[Response]) -> None:
        """As many as asked for, each by the current weights from its first token to its last."""
        assert len(responses) == len(self.prompts) * SAMPLING.responses_per_prompt
        sequences = [
            TokenSequence(np.array(self.prompts[i // SAMPLING.responses_per_prompt], np.int32), r.token_ids)
            for i, r in enumerate(responses)
        ]
        plan = self.policy.plan(sequences)
        trainer = self.policy.log_probs(sequences, plan)
        for rows, tokens in zip(self.policy.local_rows(plan), trainer.tokens, strict=True):
            engine = torch.from_numpy(np.concatenate([responses[row].log_probs for row in rows]))
            torch.testing.assert_close(engine, tokens, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(world, tmp_path_factory.mktemp("faults"))
    yield served
    served.rollout.close()


def test_batch_by_two_servers_is_that_of_the_trainers_weights(served: Served) -> None:
    served.new_weights()
    responses = served.rollout.generate(served.prompts, SAMPLING)
    served.check(responses)
    assert {r.finish_reason for r in responses} <= {"stop", "length"}
    assert len({tuple(r.token_ids) for r in responses}) > 32  # sampled, and not one for all


def test_a_killed_servers_requests_go_to_the_other(served: Served) -> None:
    served.new_weights()
    served.check(served.generate_while(signal.SIGKILL, [0]))
    assert served.members.all[0].incarnation == 1
    assert served.members.all[1].incarnation == 0
    assert any("server 0" in warning and "started again" in warning for warning in served.warnings)


def test_without_any_server_left_the_batch_waits_for_a_new_one(served: Served) -> None:
    """Which gets the current weights amid the batch."""
    served.wait_until_both_serve()
    served.new_weights()
    before = [member.incarnation for member in served.members.all]
    served.check(served.generate_while(signal.SIGKILL, [0, 1]))
    assert [member.incarnation for member in served.members.all] == [count + 1 for count in before]


def test_a_hung_server_is_replaced(served: Served) -> None:
    served.wait_until_both_serve()
    served.new_weights()
    member = served.members.all[1]
    assert served.loop.run(member.client.info()).cache_tokens == member.cache_tokens
    member.cache_tokens = 8192  # as if its first process had found as little memory
    before = member.incarnation
    start = time.monotonic()
    served.check(served.generate_while(signal.SIGSTOP, [1]))
    assert member.incarnation == before + 1
    assert time.monotonic() - start > HANG_SECONDS
    served.new_weights()
    served.check(served.rollout.generate(served.prompts, SAMPLING))
    served.wait_until_both_serve()
    assert served.loop.run(member.client.info()).cache_tokens == 8192


def test_all_servers_lost_is_one_error_with_their_logs(served: Served) -> None:
    served.wait_until_both_serve()
    for member in served.members.all:
        member.restarts_left = 0
    with pytest.raises(
        RuntimeError, match=r"(?s)the end of .*A\.server0.*server 0 .*all SGLang servers are lost$"
    ):
        served.generate_while(signal.SIGKILL, [0, 1])
