"""Scoring in worker processes: nothing that a verifier does with a response can hang or end the trainer."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Literal, Self

import msgspec
import numpy as np

from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.reward.base import Failure, Outcome, RewardResult
from megatron_hacpo.reward.length import Truncated, of_truncated
from megatron_hacpo.reward.registry import Spec
from megatron_hacpo.reward.supervisor import Settings, Started
from megatron_hacpo.reward.worker import encode_job

OnFailure = Literal["mask", "zero"]


class RewardPool:
    """A verifier behind worker processes. To be made and used by the main thread.

    Submit responses as they are completed, in any order; the workers score meanwhile, and `collect` waits for
    the rest and gives all rewards in the batch's order. One batch is open at a time.
    """

    def __init__(
        self,
        verifier: Spec,
        *,
        reward_range: tuple[float, float] = (0.0, 1.0),
        workers: int = 2,
        deadline: float = 10.0,
        memory_mb: int = 512,
        on_failure: OnFailure = "mask",
        truncated: Truncated = "keep",
    ) -> None:
        """Starts the processes and waits until they can score.

        verifier: see `registry.get_verifier`. reward_range: (lowest, highest) valid reward. workers: how many
        responses are scored at the same time. deadline: seconds for one response, by the clock. memory_mb:
        MiB of resident memory of one worker. on_failure: what a response gets that the verifier failed on, no
        valid reward ("mask") or the lowest one ("zero"). truncated: see `length.of_truncated`.
        Raises ValueError for a verifier that cannot be loaded and for too little memory.
        """
        # The kernel ends a child whose parent *thread* ends, so the thread has to live as long as the pool.
        assert threading.current_thread() is threading.main_thread()
        self._lowest = reward_range[0]
        self._on_failure = on_failure
        self._open: dict[int, tuple[Prompt, Outcome | None]] = {}
        settings = Settings(
            verifier=verifier,
            reward_range=reward_range,
            workers=workers,
            deadline=deadline,
            memory=memory_mb << 20,
            parent=os.getpid(),
        )
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "megatron_hacpo.reward.supervisor"),
                    *(msgspec.json.encode(settings).decode(), str(theirs.fileno())),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "PYTHONHASHSEED": "0",  # the order of sympy's sets must not decide a reward
                    "OMP_NUM_THREADS": "1",
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        started = msgspec.json.decode(self._receive(), type=Started)
        if started.error is not None:
            self.close()
            raise ValueError(started.error)
        self.name = started.name
        self.finds_answers = started.finds_answers
        self._of_truncated = of_truncated(truncated, needs_stop=started.needs_stop, lowest=reward_range[0])

    def submit(self, index: int, prompt: Prompt, text: str, finish_reason: str) -> None:
        """Have a response scored. index: its place in the batch. finish_reason: "stop" or "length"."""
        assert index not in self._open
        outcome = None if finish_reason == "stop" else self._of_truncated
        self._open[index] = (prompt, outcome)
        if outcome is None:
            self._send(index.to_bytes(8, "little") + encode_job(text, prompt.answer))

    def collect(self) -> RewardResult:
        """The rewards of all submitted responses, whose places must be 0, 1, 2, ... without a gap."""
        assert sorted(self._open) == list(range(len(self._open)))
        self._send(b"")
        outcomes = {index: outcome for index, (_, outcome) in self._open.items() if outcome is not None}
        while reply := self._receive():
            outcomes[int.from_bytes(reply[:8], "little")] = msgspec.json.decode(reply[8:], type=Outcome)
        failures = []
        rewards = np.full(len(self._open), np.nan)
        for index in range(len(rewards)):
            outcome = outcomes[index]
            if outcome.failure is not None:
                failures.append(Failure(index, self._open[index][0].id, outcome.failure, outcome.detail))
                if self._on_failure == "zero":
                    rewards[index] = self._lowest
            elif outcome.reward is not None:
                rewards[index] = outcome.reward
        self._open.clear()
        return RewardResult(rewards, tuple(failures), tuple(outcomes[i].answer for i in range(len(rewards))))

    def score(
        self, prompts: Sequence[Prompt], texts: Sequence[str], finish_reasons: Sequence[str]
    ) -> RewardResult:
        """Rewards of a whole batch, prompt-major: as many texts for each prompt, prompt 0's first."""
        assert len(texts) == len(finish_reasons)
        assert len(texts) % len(prompts) == 0 if prompts else not texts
        group = len(texts) // max(1, len(prompts))
        for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True)):
            self.submit(index, prompts[index // group], text, reason)
        return self.collect()

    def close(self) -> None:
        """End the processes."""
        self._connection.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def _died(self) -> RuntimeError:
        return RuntimeError(f"the reward supervisor ended with code {self._process.wait()}")
