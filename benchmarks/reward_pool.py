"""What scoring in worker processes costs, and what responses that hang or eat memory do to a batch.

    python benchmarks/reward_pool.py [--rounds 5] [--batches 20]

Overhead: 256 responses of about 2,000 characters, one worker, against the same in one process: math-verify
called directly on response and ground truth, and the verifier `math` itself. Throughput: two workers against
one. All four in turns, every round with responses that none of them has seen; medians of the times, and of
the ratios within a round. Then batches of 1,024 responses, 8 of which hang (9^{9^{9}}) and 8 of which take
memory without end ((x+1)^{10^6}), in random places: their time beyond the deadline against a batch without
such responses, and the memory of all processes.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe

import psutil
from math_verify import parse, verify

from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.reward.math import MATH
from megatron_hacpo.reward.pool import RewardPool

HANGS, EATS = r"9^{9^{9}}", r"(x+1)^{(10^6)}"
DEADLINE = 10.0
SENTENCES = (
    "First we write down what is given and name the unknown x. ",
    "Substituting $x = 3$ into the equation gives $2x + 1 = 7$, as it should. ",
    "Wait, that is not right, since $\\frac{1}{x}$ is not defined at 0. ",
    "By the theorem of Pythagoras the third side has length $\\sqrt{a^2 + b^2}$. ",
)


def answers(rng: random.Random) -> tuple[str, str]:
    """(what the box holds, ground truth) as mathematical prompts have them; every other one is right."""
    a, b, c = (rng.randrange(2, 60) for _ in range(3))
    d = b if rng.random() < 0.5 else b + 1
    return rng.choice(
        [
            (f"{a * 100 + b}", f"{a * 100 + d}"),
            (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * d}}}"),
            (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * d}}}"),
            (rf"\left({a}, {b}\right)", f"({a},{d})"),
            (f"{a}x^2 + {b}x", f"x({a}x + {d})"),
            (rf"[{a}, {a + b})", rf"\left[{a}, {a + d}\right)"),
            (rf"\{{{a}, {b}, {c}\}}", rf"\{{{c}, {d}, {a}\}}"),
            (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a}\pi / {d}"),
        ]
    )


def batch(size: int, seed: int, bad: int = 0) -> tuple[list[Prompt], list[str]]:
    """Prompts and one response each, of about 2,000 characters; `bad` of them hang and as many eat memory."""
    rng = random.Random(seed)
    pairs = [answers(rng) for _ in range(size)]
    for kind, places in zip((HANGS, EATS), _split(rng.sample(range(size), 2 * bad)), strict=True):
        for place in places:
            pairs[place] = (kind, "x^2 + 1")
    texts = [
        "".join(rng.choices(SENTENCES, k=30)) + rf"So the answer is $\boxed{{{box}}}$." for box, _ in pairs
    ]
    prompts = [
        Prompt(str(i), ({"role": "user", "content": "?"},), truth) for i, (_, truth) in enumerate(pairs)
    ]
    return prompts, texts


def _split(places: list[int]) -> tuple[list[int], list[int]]:
    return places[::2], places[1::2]


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_a_child(work: Callable[[], object]) -> float:
    """Wall-clock time of a call in a forked process, which forgets what it has learned."""
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        theirs.send(seconds(work))
        os._exit(0)
    os.waitpid(child, 0)
    return ours.recv()


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def direct(prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
    """math-verify as its own documentation calls it, but without its timeouts."""
    for prompt, text in zip(prompts, texts, strict=True):
        truth = parse(f"${prompt.answer}$", parsing_timeout=None)
        verify(truth, parse(text, parsing_timeout=None), timeout_seconds=None)


def memory(pool: RewardPool) -> float:
    """MiB of the pool's processes, shared pages counted once."""
    supervisor = psutil.Process(pool.pid)
    return sum(p.memory_full_info().pss for p in (supervisor, *supervisor.children())) / 2**20


def indirect(prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
    """The verifier `math` as it is."""
    for prompt, text in zip(prompts, texts, strict=True):
        MATH.check(text, prompt.answer)


def measure_overhead(rounds: int) -> None:
    """Print overhead and throughput."""
    for pair in MATH.warm_up:
        MATH.check(*pair)
    times = []
    stops = ["stop"] * 256
    with RewardPool("math", workers=1) as one, RewardPool("math", workers=2) as two:
        for seed in range(rounds + 1):  # the first round loads what is loaded late
            prompts, texts = batch(256, seed)
            times.append(
                (
                    in_a_child(lambda p=prompts, t=texts: direct(p, t)),
                    in_a_child(lambda p=prompts, t=texts: indirect(p, t)),
                    seconds(lambda p=prompts, t=texts: one.score(p, t, stops)),
                    seconds(lambda p=prompts, t=texts: two.score(p, t, stops)),
                )
            )
    raw, own, single, double = (list(column) for column in zip(*times[1:], strict=True))
    sides = {"math-verify": raw, "verifier here": own, "1 worker": single, "2 workers": double}
    for name, side in sides.items():
        print(f"{name:13} {1e3 * statistics.median(side) / 256:6.2f} ms a response")
    print(f"1 worker / math-verify: {ratio(single, raw):.2f}; / verifier here: {ratio(single, own):.2f}")
    print(f"throughput of 2 workers: {ratio(single, double):.2f} times that of 1", flush=True)


def measure_bad(batches: int) -> None:
    """Print times and memory of batches with responses that hang or eat memory."""
    stops = ["stop"] * 1024
    without, late, sizes = [], [], []
    with RewardPool("math", workers=2, deadline=DEADLINE, memory_mb=256) as pool:
        for seed in range(batches + 1):
            good, bad = batch(1024, seed), batch(1024, seed, bad=8)
            without.append(seconds(lambda good=good: pool.score(*good, stops)))
            began = time.perf_counter()
            result = pool.score(*bad, stops)
            late.append(time.perf_counter() - began - DEADLINE)
            sizes.append(memory(pool))
            print(
                f"batch {seed}: {without[-1]:.2f} s without, with {late[-1]:.2f} s beyond the deadline, "
                f"{sizes[-1]:.0f} MiB, {result.failed()}",
                flush=True,
            )
    print(f"beyond the deadline / without: median {ratio(late, without):.2f}")
    print(f"memory: {sizes[0]:.0f} MiB after the first batch, {sizes[-1]:.0f} after the last")


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.rounds:
        measure_overhead(arguments.rounds)
    if arguments.batches:
        measure_bad(arguments.batches)


if __name__ == "__main__":
    main()
