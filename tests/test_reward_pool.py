"""Worker processes: every way in which a verifier can fail has its outcome, nothing hangs or stays behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.reward.handle import Handle, Job
from megatron_hacpo.reward.pool import RewardPool
from megatron_hacpo.reward.supervisor import SPARES

DEADLINE = 2.0
PIDS = (0.0, 2.0**23)


def prompt(answer: object = "5", name: str = "p") -> Prompt:
    return Prompt(name, ({"role": "user", "content": "?"},), answer)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool("reward_verifiers:obey", workers=2, deadline=DEADLINE, memory_mb=128) as pool:
        yield pool


@pytest.fixture(scope="module")
def pids() -> Iterator[RewardPool]:
    """A pool whose rewards may be process numbers, and nothing hangs."""
    with RewardPool(
        "reward_verifiers:obey", workers=2, deadline=60.0, memory_mb=200, reward_range=PIDS
    ) as pool:
        yield pool


def score(pool: RewardPool, *texts: str) -> list[float | str]:
    """Rewards, and reasons in place of those that failed."""
    result = pool.score([prompt()], texts, ["stop"] * len(texts))
    values: list[float | str] = list(result.rewards.tolist())
    for failure in result.failures:
        assert np.isnan(result.rewards[failure.index])
        values[failure.index] = failure.reason
    return values


FAILURES = {
    "raise why": ("exception", "KeyError('why')"),
    "leave 3": ("exception", "SystemExit(3)"),
    "refuse this": ("ground_truth", "this"),
    "text 1.0": ("wrong_type", "returned '1.0', not a number"),
    "list 1": ("wrong_type", "returned [1.0], not a number"),
    "list 2": ("wrong_type", "returned [1.0, 1.0], not a number"),
    "give nan": ("not_a_number", "returned NaN"),
    "give inf": ("out_of_range", "returned inf, outside reward.range [0.0, 1.0]"),
    "give -0.1": ("out_of_range", "returned -0.1, outside reward.range [0.0, 1.0]"),
    "exit 3": ("crash", "exited with code 3"),
    "exit 0": ("crash", "exited with code 0"),
    "crash": ("crash", "killed by SIGSEGV"),
    "hang": ("timeout", "no verdict in 2 s"),
    "hang_in_c": ("timeout", "no verdict in 2 s"),
    "sleep 100": ("timeout", "no verdict in 2 s"),
    "ask_too_much": ("memory", "no more memory"),
    f"eat_and_hide {200 << 20}": ("memory", "took "),
    "\ud800 \x00": ("exception", "KeyError('\\ud800')"),
}


def test_every_failure_has_its_reason_and_the_rest_its_reward(pool: RewardPool) -> None:
    texts = [text for failing in FAILURES for text in (failing, "give 0.25")]
    result = pool.score([prompt(name="p7")], texts, ["stop"] * len(texts))
    assert result.rewards[1::2].tolist() == [0.25] * len(FAILURES)
    assert np.isnan(result.rewards[::2]).all()
    assert (result.valid, result.invalid) == (len(FAILURES), len(FAILURES))
    for failure, (text, (reason, detail)) in zip(result.failures, FAILURES.items(), strict=True):
        assert texts[failure.index] == text
        assert (failure.prompt, failure.reason) == ("p7", reason), text
        assert failure.detail.startswith(detail), text
    assert sum(result.failed().values()) == len(FAILURES)
    assert result.failed()["timeout"] == 3
    assert "3 timeout (first: prompt p7, no verdict in 2 s)" in str(result.complaint())


def test_a_memory_eater_is_ended_in_time(pool: RewardPool) -> None:
    began = time.monotonic()
    assert score(pool, "eat", "give 1") == ["memory", 1.0]
    assert time.monotonic() - began < 20.0


def test_no_reward_is_no_failure_and_bool_is_a_number(pool: RewardPool) -> None:
    result = pool.score([prompt()], ["none", "true", "give 0"], ["stop"] * 3)
    assert np.isnan(result.rewards[0])
    assert result.rewards[1:].tolist() == [1.0, 0.0]
    assert result.failures == ()
    assert result.complaint() is None


def test_those_that_hang_do_not_delay_the_rest_or_each_other(pool: RewardPool) -> None:
    texts = ["give 0.5"] * 300
    places = range(5, 300, 22)
    for place in places:
        texts[place] = "hang"
    began = time.monotonic()
    values = score(pool, *texts)
    seconds = time.monotonic() - began
    assert values == ["timeout" if place in places else 0.5 for place in range(300)]
    assert seconds < DEADLINE * len(places) / 2  # what two workers would take for them


def test_rewards_come_in_the_order_of_places_whatever_the_order_of_submission(pool: RewardPool) -> None:
    places = list(range(100))
    random.Random(1).shuffle(places)
    for place in places:
        pool.submit(place, prompt(), f"give {place / 100}", "stop")
    assert pool.collect().rewards.tolist() == [place / 100 for place in range(100)]
    assert pool.collect().rewards.shape == (0,)


def test_scoring_goes_on_while_the_trainer_is_busy(pids: RewardPool) -> None:
    for place in range(4):
        pids.submit(place, prompt(), "sleep 0.5", "stop")
    time.sleep(2.5)
    began = time.monotonic()
    assert pids.collect().rewards.tolist() == [1.0] * 4
    assert time.monotonic() - began < 0.5


def test_prompt_major_with_ground_truths_of_every_type() -> None:
    answers = ["5", 5, 2.5, None, ["5"], True, "2.5"]
    with RewardPool("exact", workers=1) as pool:
        result = pool.score(
            [prompt(answer) for answer in answers], ["5", "2.5"] * len(answers), ["stop"] * 14
        )
    assert result.rewards.dtype == np.float64
    assert result.rewards[:6].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert np.isnan(result.rewards[6:12]).all()
    assert result.rewards[12:].tolist() == [0.0, 1.0]
    assert result.failed() == {"ground_truth": 6}
    assert [failure.detail for failure in result.failures[::2]] == [
        f"a ground truth is text or a number, not {answer!r}" for answer in (None, ["5"], True)
    ]


def test_failures_may_score_the_lowest_reward_and_truncated_responses_none() -> None:
    with RewardPool(
        "reward_verifiers:obey",
        workers=1,
        reward_range=(-1.0, 1.0),
        on_failure="zero",
        truncated="mask",
    ) as pool:
        texts = ["raise", "give 0.5", "none", "exit 1", "give 0.5", "raise"]
        result = pool.score([prompt()], texts, [*["stop"] * 4, "length", "length"])
    assert result.rewards[[0, 1, 3]].tolist() == [-1.0, 0.5, -1.0]
    assert np.isnan(result.rewards[[2, 4, 5]]).all()
    assert result.failed() == {"exception": 1, "crash": 1}


def test_coroutines_and_weighted_sums() -> None:
    spec = {"reward_verifiers:obey_later": 0.5, "reward_verifiers:length": 100.0, "exact": -0.25}
    with RewardPool(spec, workers=1, deadline=DEADLINE, reward_range=(-1.0, 2.0)) as pool:
        assert pool.name == "0.5 reward_verifiers:obey_later + 100 reward_verifiers:length + -0.25 exact"
        texts = ["give 0.5", "give 1", "none", "raise", "give nan", "text 1", "list 2", "give 1"]
        result = pool.score([prompt("give 1")], texts, [*["stop"] * 7, "length"])
    assert result.rewards[:2].tolist() == pytest.approx([0.25 + 0.8, 0.5 + 0.6 - 0.25])
    assert np.isnan(result.rewards[2:7]).all()
    assert result.rewards[7] == -1.0  # exact needs the stop
    assert [failure.index for failure in result.failures] == [3, 4, 5, 6]
    assert [f.reason for f in result.failures] == ["exception", "not_a_number", "wrong_type", "wrong_type"]


def test_workers_outlive_batches(pids: RewardPool) -> None:
    seen = {pid for _ in range(5) for pid in score(pids, *["pid"] * 20)}
    assert 1 <= len(seen) <= 4  # two, unless the machine stood still for a moment


def test_one_that_grows_ends_before_others_pay_for_it(pids: RewardPool) -> None:
    values = score(pids, *[f"leak {20 << 20}"] * 30)
    assert all(isinstance(value, float) for value in values)
    assert len(set(values)) > 5


def test_those_that_wait_wait_together(pool: RewardPool) -> None:
    began = time.monotonic()
    assert score(pool, *["sleep 1"] * 12) == [1.0] * 12
    assert time.monotonic() - began < 1 * 12 / 2  # two at a time would take this long


def test_long_ones_wait_for_the_others_and_then_go_on(pids: RewardPool) -> None:
    assert score(pids, *["work 0.3"] * 4, *["work 0.02"] * 40) == [1.0] * 44


def test_the_clock_stands_still_with_the_worker() -> None:
    ours, theirs = Pipe()
    process = subprocess.Popen(["sleep", "100"], process_group=0)
    worker = Handle(process.pid, ours)
    worker.give(Job(b"", b"job"))
    assert theirs.recv_bytes() == b"job"
    start = time.monotonic() - worker.seconds(time.monotonic())
    worker.stand_still(start + 1.0)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert not worker.wants_to_run()
    worker.go_on(start + 6.0)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
    assert worker.seconds(start + 7.0) == pytest.approx(2.0, abs=0.01)
    assert worker.used() < 1.0
    assert worker.bury() == "killed by SIGKILL"


def test_a_busy_machine_decides_no_reward() -> None:
    with RewardPool("reward_verifiers:obey", workers=12, deadline=0.6) as pool:
        assert score(pool, *["work 0.03"] * 60, "hang") == [*[1.0] * 60, "timeout"]


def test_more_that_hang_than_there_are_places_are_all_ended() -> None:
    with RewardPool("reward_verifiers:obey", workers=1, deadline=0.5) as pool:
        assert score(pool, *["sleep 100"] * 30) == ["timeout"] * 30


@pytest.mark.slow
def test_twenty_large_batches_with_those_that_hang_and_those_that_eat() -> None:
    rng = random.Random(1)
    deadline, good, sizes = 5.0, ["work 0.005"] * 1024, []
    with RewardPool("reward_verifiers:obey", workers=2, deadline=deadline, memory_mb=128) as pool:
        for _ in range(20):
            began = time.monotonic()
            assert score(pool, *good) == [1.0] * 1024
            usual = time.monotonic() - began
            places = rng.sample(range(1024), 16)
            texts = [
                "hang" if i in places[:8] else "eat" if i in places[8:] else "work 0.005" for i in range(1024)
            ]
            began = time.monotonic()
            values = score(pool, *texts)
            assert time.monotonic() - began < deadline + 1.2 * usual
            expected = {"hang": "timeout", "eat": "memory", "work 0.005": 1.0}
            assert values == [expected[text] for text in texts]
            processes = [psutil.Process(pid) for pid in (pool.pid, *children(pool.pid))]
            assert 2 <= len(processes) <= 1 + 2 * SPARES  # the supervisor, and idle workers
            sizes.append(sum(process.memory_full_info().pss for process in processes))
    assert max(sizes[1:]) < 1.1 * sizes[0]


def test_math_that_never_ends(capfd: pytest.CaptureFixture[str]) -> None:
    boxes = [r"\frac{4}{2}", "9^{9^{9}}", "(x+1)^{(10^6)}", "3"]
    with RewardPool("math", workers=2, deadline=3.0, memory_mb=192) as pool:
        result = pool.score([prompt("2")], [rf"So $\boxed{{{box}}}$." for box in boxes], ["stop"] * 4)
    assert result.rewards[[0, 3]].tolist() == [1.0, 0.0]
    assert np.isnan(result.rewards[1:3]).all()
    assert result.failures[0].reason == "timeout"
    assert result.failures[1].reason in ("memory", "timeout")
    assert capfd.readouterr() == ("", "")


def test_an_idle_worker_that_was_killed_is_replaced(pids: RewardPool) -> None:
    (pid,) = score(pids, "pid")
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not alive(int(pid)))
    assert score(pids, *["give 1"] * 10) == [1.0] * 10


def test_ctrl_c_is_not_theirs(pids: RewardPool) -> None:
    workers = set(score(pids, *["pid"] * 20))
    for process in (*map(int, workers), pids.pid):
        os.kill(process, signal.SIGINT)
    assert set(score(pids, *["pid"] * 20)) & workers


def test_what_a_verifier_started_ends_with_its_worker(pool: RewardPool, tmp_path: Path) -> None:
    assert score(pool, f"child {tmp_path / 'pids'}") == ["timeout"]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: not alive(pid))


def test_closing_leaves_no_process() -> None:
    with RewardPool("reward_verifiers:obey", workers=2, deadline=60.0, reward_range=PIDS) as pool:
        pool.submit(0, prompt(), "hang", "stop")
        supervisor = pool.pid
        wait_until(lambda: len(children(supervisor)) >= 2)
        workers = children(supervisor)
    assert not alive(supervisor)
    wait_until(lambda: not any(map(alive, workers)))


def test_a_trainer_that_is_killed_leaves_no_process() -> None:
    script = (
        "import time\n"
        "from test_reward_pool import *\n"
        "pool = RewardPool('reward_verifiers:obey', workers=2, deadline=600.0, reward_range=PIDS)\n"
        "pool.submit(0, prompt(), 'hang', 'stop')\n"
        "print(pool.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    assert trainer.stdout is not None
    supervisor = int(trainer.stdout.readline())
    wait_until(lambda: len(children(supervisor)) >= 2)
    processes = [supervisor, *children(supervisor)]
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: not any(map(alive, processes)))


def test_a_killed_supervisor_is_an_error() -> None:
    with RewardPool("exact", workers=1) as pool:
        os.kill(pool.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the reward supervisor ended with code -9"):
            score(pool, "give 1")


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"reward.verifier: 'maths' is unknown; use one of"):
        RewardPool("maths")
    with pytest.raises(
        ValueError, match=r"reward.memory_mb: 32: the verifier exact takes \d+ MiB itself; use at"
    ):
        RewardPool("exact", memory_mb=32)
    (tmp_path / "only_here.py").write_text("def check(text, answer):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool("only_here:check", workers=1) as pool:
        assert score(pool, "a") == [1.0]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children()]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
