"""The exchange between real processes: two worlds of two ranks and one, then three agents."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.trajectory import Contribution, Trajectory, load

TIMEOUT = timedelta(seconds=60)
CHUNK = 64 * 1024
Report = dict[str, Any]
CHARACTERS = {"A": 300_000, "B": 10, "C": 700_001}  # several chunks, less than one, and a rest


def contribution(agent: str, *, step: int, generation: int = 0, prompts: str = "p") -> Contribution:
    text = agent * CHARACTERS[agent]
    trajectory = Trajectory(
        prompt=0,
        text=text,
        valid_text=True,
        reward=0.5,
        finish_reason="length",
        token_count=len(text),
        mean_log_prob=-0.25,
    )
    return Contribution(
        generation=generation,
        step=step,
        agent=agent,
        tokenizer=f"tokenizer of {agent}",
        prompts=prompts,
        trajectories=[trajectory],
    )


def world_broadcast(leader: bool) -> Callable[[bytes | None], bytes]:
    """Bytes from rank 0 of the default group to all of it."""

    def broadcast(data: bytes | None) -> bytes:
        length = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(length, src=0)
        buffer = bytearray(data if leader and data is not None else int(length))
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0)
        return bytes(buffer)

    return broadcast


def refusal(exchange: Exchange, mine: Contribution | None) -> str:
    try:
        exchange.all_gather(mine)
    except ValueError as error:
        return str(error)
    return "accepted"


def run_two_worlds(rank: int, store: dist.Store, root: Path) -> Report:
    """Ranks 0 and 1 are agent A, rank 2 is agent B."""
    me, leader = ("A", "A", "B")[rank], rank != 1
    broadcast = None
    if me == "A":
        dist.init_process_group("gloo", store=dist.PrefixStore("world A", store), rank=rank, world_size=2)
        broadcast = world_broadcast(leader)
    exchange = Exchange(
        store=store,
        agents=["A", "B"],
        me=me,
        pool_dir=root / "two",
        keep=2,
        timeout=TIMEOUT,
        is_leader=leader,
        broadcast=broadcast,
        chunk_bytes=CHUNK,
    )

    def mine(**options: Any) -> Contribution | None:
        return contribution(me, **options) if leader else None

    pools = [exchange.all_gather(mine(step=step)) for step in (8, 9, 10)]
    report = {
        "equal": pools == [[contribution(a, step=step) for a in "AB"] for step in (8, 9, 10)],
        "step": refusal(exchange, mine(step=11 if me == "A" else 12)),
        "prompts": refusal(exchange, mine(step=13, prompts=f"prompts of {me}")),
        "generation": refusal(exchange, mine(step=14, generation=0 if me == "A" else 3)),
        "again": refusal(exchange, mine(step=15)),
    }
    exchange.close()
    if me == "A":
        dist.barrier()
        dist.destroy_process_group()
    return report


def run_three_agents(rank: int, store: dist.Store, root: Path) -> Report:
    agents = ["C", "A", "B"]  # the order is the caller's, not the alphabet's
    exchange = Exchange(
        store=store,
        agents=agents,
        me=agents[rank],
        pool_dir=root / "three",
        keep=1,
        timeout=TIMEOUT,
        generation=1,
        chunk_bytes=CHUNK,
    )
    pool = exchange.all_gather(contribution(agents[rank], step=0, generation=1))
    waited = exchange.waited_seconds
    exchange.close()
    return {
        "equal": pool == [contribution(agent, step=0, generation=1) for agent in agents],
        "waited": 0.0 < waited < 60.0,
    }


def run(rank: int, port: int, root: Path, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    results.put((rank, run_two_worlds(rank, store, root), run_three_agents(rank, store, root)))


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Path]:
    """What the three processes report, by rank, for both layouts; the store lives here, in the launcher."""
    root = tmp_path_factory.mktemp("run")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # one import for all three
    results = context.SimpleQueue()
    processes = [context.Process(target=run, args=(rank, store.port, root, results)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert exit_codes == [0, 0, 0]
    reports = sorted((results.get() for _ in processes), key=lambda report: report[0])
    return [report[1] for report in reports], [report[2] for report in reports], root


def test_every_rank_of_two_worlds_gets_everything(outcome: Any) -> None:
    assert [report["equal"] for report in outcome[0]] == [True, True, True]


def test_disagreement_is_refused_on_every_rank_and_named(outcome: Any) -> None:
    for rank, report in enumerate(outcome[0]):
        here, there = ("A", "B") if rank < 2 else ("B", "A")
        values = {
            "step": {"A": "11", "B": "12"},
            "prompts": {"A": "prompts of A", "B": "prompts of B"},
            "generation": {"A": "0", "B": "3"},
        }
        for name, value in values.items():
            message = f"agent {there} has {name} {value[there]}, agent {here} has {value[here]}"
            assert message in report[name]
        assert report["again"] == "accepted"


def test_three_agents_keep_the_order_of_the_list(outcome: Any) -> None:
    assert [report["equal"] for report in outcome[1]] == [True, True, True]
    assert [report["waited"] for report in outcome[1]] == [True, True, True]


def test_only_the_last_contributions_stay_on_disk(outcome: Any) -> None:
    root = outcome[2] / "two"
    kept = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    assert kept == ["step_14/pool/A", "step_14/pool/B", "step_15/pool/A", "step_15/pool/B"]
    assert sorted(folder.name for folder in root.iterdir()) == ["step_14", "step_15"]
    assert load(root / "step_15" / "pool" / "B") == contribution("B", step=15)


def test_one_agent_alone_needs_no_store(tmp_path: Path) -> None:
    exchange = Exchange(store=None, agents=["A"], me="A", pool_dir=tmp_path, keep=1, timeout=TIMEOUT)
    mine = contribution("A", step=0)
    assert exchange.all_gather(mine) == [mine]
    assert load(tmp_path / "step_0" / "pool" / "A") == mine
    assert exchange.all_gather(contribution("A", step=1)) == [contribution("A", step=1)]
    assert [folder.name for folder in tmp_path.iterdir()] == ["step_1"]
    exchange.close()


def test_contribution_is_on_disk_before_the_exchange(tmp_path: Path) -> None:
    def fail(_: bytes | None) -> bytes:
        raise RuntimeError("the network is gone")

    exchange = Exchange(
        store=None, agents=["A"], me="A", pool_dir=tmp_path, keep=1, timeout=TIMEOUT, broadcast=fail
    )
    with pytest.raises(RuntimeError, match="network"):
        exchange.all_gather(contribution("A", step=0))
    assert load(tmp_path / "step_0" / "pool" / "A") == contribution("A", step=0)


def test_unreadable_contribution_names_its_agent(tmp_path: Path) -> None:
    exchange = Exchange(
        store=None,
        agents=["A"],
        me="A",
        pool_dir=tmp_path,
        keep=1,
        timeout=TIMEOUT,
        broadcast=lambda data: (data or b"")[:-1],
    )
    with pytest.raises(ValueError, match=r"agent A: contribution of .* bytes cannot be read"):
        exchange.all_gather(contribution("A", step=0))
