"""The exchange between real processes: worlds of one rank and of two, and agents that are lost."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hacpo.bridge import members
from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.members import announce
from megatron_hacpo.bridge.trajectory import Contribution, Trajectory, decode, save_atomically

TIMEOUT = timedelta(seconds=60)
CHUNK = 64 * 1024
Report = dict[str, Any]
CHARACTERS = {"A": 300_000, "B": 10, "C": 700_001, "D": 1}  # several chunks, less than one, and a rest


class Pool:
    """Contributions as files."""

    def __init__(self, folder: Path, me: str) -> None:
        self._folder = folder
        self._me = me

    def save(self, step: int, data: bytes) -> None:
        save_atomically(self._folder / f"{step}" / self._me, data)

    def load(self, step: int, agent: str) -> bytes | None:
        file = self._folder / f"{step}" / agent
        return file.read_bytes() if file.is_file() else None


def open_exchange(store: dist.Store | None, agents: str, me: str, folder: Path, **options: Any) -> Exchange:
    pool = Pool(folder, me)
    defaults = {"timeout": TIMEOUT, "save": pool.save, "load": pool.load, "chunk_bytes": CHUNK}
    return Exchange(store=store, agents=list(agents), me=me, **{**defaults, **options})


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
    exchange = open_exchange(
        dist.PrefixStore("two", store), "AB", me, root / "two", is_leader=leader, broadcast=broadcast
    )

    def mine(**options: Any) -> Contribution | None:
        return contribution(me, **options) if leader else None

    pools = [exchange.all_gather(mine(step=step)) for step in (8, 9, 10)]
    report = {
        "equal": pools == [[contribution(a, step=step) for a in "AB"] for step in (8, 9, 10)],
        "step": refusal(exchange, mine(step=11 if me == "A" else 12)),
        "prompts": refusal(exchange, mine(step=13, prompts=f"prompts of {me}")),
        "again": refusal(exchange, mine(step=14)),
    }
    exchange.close()
    if me == "A":
        dist.barrier()
        dist.destroy_process_group()
    return report


def run_three_agents(rank: int, store: dist.Store, root: Path) -> Report:
    agents = ["C", "A", "B"]  # the order is the caller's, not the alphabet's
    exchange = open_exchange(dist.PrefixStore("three", store), "CAB", agents[rank], root / "three")
    pool = exchange.all_gather(contribution(agents[rank], step=0, generation=7))  # it is filled in
    waited = exchange.waited_seconds
    exchange.close()
    return {
        "equal": pool == [contribution(agent, step=0) for agent in agents],
        "waited": 0.0 < waited < 60.0,
    }


def run(rank: int, port: int, root: Path, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    results.put((rank, run_two_worlds(rank, store, root), run_three_agents(rank, store, root)))


class Processes:
    """As many as there are arguments; the store lives here, in the launcher."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[object], root: Path) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])  # one import for all
        self._results = context.SimpleQueue()
        self._processes = [
            context.Process(target=target, args=(argument, self.store.port, root, self._results))
            for argument in arguments
        ]
        for process in self._processes:
            process.start()

    def await_end(self, index: int) -> int | None:
        """Exit code of one of them."""
        self._processes[index].join(timeout=120)
        code = self._processes[index].exitcode
        self._processes[index].kill()
        return code

    def reports(self, count: int) -> list[Any]:
        """What `count` of them have reported, sorted, after all have ended well or by SIGKILL."""
        codes = [self.await_end(index) for index in range(len(self._processes))]
        assert sorted(codes, key=str) == [-9] * (len(codes) - count) + [0] * count
        return sorted((self._results.get() for _ in range(count)), key=lambda report: report[0])


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the three processes report, by rank, for both layouts."""
    reports = Processes(run, range(3), tmp_path_factory.mktemp("run")).reports(3)
    return [report[1] for report in reports], [report[2] for report in reports]


def test_every_rank_of_two_worlds_gets_everything(outcome: Any) -> None:
    assert [report["equal"] for report in outcome[0]] == [True, True, True]


def test_disagreement_is_refused_on_every_rank_and_named(outcome: Any) -> None:
    for rank, report in enumerate(outcome[0]):
        here, there = ("A", "B") if rank < 2 else ("B", "A")
        values = {
            "step": {"A": "11", "B": "12"},
            "prompts": {"A": "prompts of A", "B": "prompts of B"},
        }
        for name, value in values.items():
            message = f"agent {there} has {name} {value[there]}, agent {here} has {value[here]}"
            assert message in report[name]
        assert report["again"] == "accepted"


def test_three_agents_keep_the_order_of_the_list(outcome: Any) -> None:
    assert [report["equal"] for report in outcome[1]] == [True, True, True]
    assert [report["waited"] for report in outcome[1]] == [True, True, True]


def test_one_agent_alone_needs_no_store(tmp_path: Path) -> None:
    exchange = open_exchange(None, "A", "A", tmp_path)
    for step in range(2):
        mine = contribution("A", step=step)
        assert exchange.all_gather(mine) == [mine]
        assert decode((tmp_path / f"{step}" / "A").read_bytes()) == mine
    exchange.close()


def test_contribution_is_on_disk_before_the_exchange(tmp_path: Path) -> None:
    def fail(_: bytes | None) -> bytes:
        raise RuntimeError("the network is gone")

    exchange = open_exchange(None, "A", "A", tmp_path, broadcast=fail)
    with pytest.raises(RuntimeError, match="network"):
        exchange.all_gather(contribution("A", step=0))
    assert decode((tmp_path / "0" / "A").read_bytes()) == contribution("A", step=0)


def test_unreadable_contribution_names_its_agent(tmp_path: Path) -> None:
    def cut(data: bytes | None) -> bytes:
        assert data is not None
        return data[:1000]

    exchange = open_exchange(None, "A", "A", tmp_path, broadcast=cut)
    with pytest.raises(ValueError, match=r"agent A: contribution of 1000 bytes cannot be read"):
        exchange.all_gather(contribution("A", step=0))


def test_what_an_agent_behind_needs_must_be_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_hacpo.bridge.members.Members.meet", lambda self, step: step == 4)
    store = dist.HashStore()
    exchange = open_exchange(store, "AB", "A", tmp_path, survives=True)
    with pytest.raises(RuntimeError, match=r"step 4: .* what agent B contributed is not on disk"):
        exchange.all_gather(contribution("A", step=4))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exchange_steps(exchange: Exchange, me: str, steps: Sequence[int], leader: bool = True) -> list[Report]:
    """Who took part in each step and in which generation, and who is left."""
    rows = []
    for step in steps:
        pool = exchange.all_gather(contribution(me, step=step) if leader else None)
        [generation] = {c.generation for c in pool}
        names = "".join(c.agent for c in pool)
        assert pool == [contribution(a, step=step, generation=generation) for a in names]
        rows.append({"pool": names, "generation": generation, "agents": "".join(exchange.agents)})
    return rows


def open_store(port: int) -> dist.Store:
    torch.set_num_threads(1)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)


def lose_one_of_four(name: str, port: int, root: Path, results: Any) -> None:
    """A has two ranks, A and a; D dies when it is to send its contribution to step 2."""
    store, me, leader = open_store(port), name.upper(), name != "a"
    options: dict[str, Any] = {}
    if me == "A":
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("A", store), rank=int(not leader), world_size=2
        )
        options = {"is_leader": leader, "broadcast": world_broadcast(leader)}
    if me == "D":
        options = {"save": lambda step, data: die() if step == 2 else None}
    exchange = open_exchange(store, "ABCD", me, root, survives=True, **options)
    report = exchange_steps(exchange, me, (1, 2, 3), leader)
    exchange.close()
    results.put((name, report))


def test_the_others_go_on_when_an_agent_is_lost(tmp_path: Path) -> None:
    processes = Processes(lose_one_of_four, "AaBCD", tmp_path)
    assert processes.await_end(4) == -9
    announce(processes.store, 1, ["A", "B", "C"])
    three = {"pool": "ABC", "generation": 1, "agents": "ABC"}
    rows = [{"pool": "ABCD", "generation": 0, "agents": "ABCD"}, three, three]
    assert processes.reports(4) == [(name, rows) for name in ("A", "B", "C", "a")]
    for agent in "ABC":  # the step was exchanged a second time
        assert decode((tmp_path / "2" / agent).read_bytes()).generation == 1


def lose_two_of_four(case: tuple[str, str], port: int, root: Path, results: Any) -> None:
    """D dies in step 2, and C when it hears of it, before or after the others count on it."""
    me, method = case
    members.CONNECT = timedelta(seconds=2)
    options = {"save": lambda step, data: die() if step == 2 else None} if me == "D" else {}
    exchange = open_exchange(open_store(port), "ABCD", me, root, survives=True, **options)
    if me == "C":
        setattr(exchange._members, method, lambda *_: die())
    results.put((me, exchange_steps(exchange, me, (1, 2))))
    exchange.close()


@pytest.mark.parametrize("method", ["advance", "_connect"])
def test_a_second_loss_while_the_others_meet_again(tmp_path: Path, method: str) -> None:
    processes = Processes(lose_two_of_four, [(me, method) for me in "ABCD"], tmp_path)
    assert processes.await_end(3) == -9
    announce(processes.store, 1, ["A", "B", "C"])
    assert processes.await_end(2) == -9
    announce(processes.store, 2, ["A", "B"])
    rows = [
        {"pool": "ABCD", "generation": 0, "agents": "ABCD"},
        {"pool": "AB", "generation": 2, "agents": "AB"},
    ]
    assert processes.reports(2) == [("A", rows), ("B", rows)]


def fail_after_others_completed(case: tuple[str, int], port: int, root: Path, results: Any) -> None:
    """C dies after step 1, of which B has received nothing; A has all of it and goes on."""
    me, steps = case
    store = open_store(port)
    exchange = open_exchange(store, "ABC", me, root, survives=True)
    if me == "B":
        gather = exchange._gather_bytes

        def fail(members: Any, data: bytes, step: int, start: float) -> list[bytes]:
            received = gather(members, data, step, start)
            if step == 1:
                raise RuntimeError("Connection closed by peer")
            return received

        exchange._gather_bytes = fail  # type: ignore[method-assign]
    report = exchange_steps(exchange, me, [1])
    if me == "A":
        store.set("A has completed step 1", "")
    if me == "C":
        store.wait(["A has completed step 1"])
        die()
    report += exchange_steps(exchange, me, range(2, steps + 1))
    exchange.close()
    results.put((me, report))


@pytest.mark.parametrize("steps", [1, 3])
def test_who_failed_where_others_did_not_catches_up_from_disk(tmp_path: Path, steps: int) -> None:
    processes = Processes(fail_after_others_completed, [(me, steps) for me in "ABC"], tmp_path)
    assert processes.await_end(2) == -9
    announce(processes.store, 1, ["A", "B"])
    (a, rows_a), (b, rows_b) = processes.reports(2)
    assert (a, b) == ("A", "B")
    assert [row["pool"] for row in rows_a] == [row["pool"] for row in rows_b] == ["ABC", "AB", "AB"][:steps]
    assert [row["generation"] for row in rows_a] == [row["generation"] for row in rows_b] == [0, 1, 1][:steps]
    assert rows_a[0]["agents"] == "ABC", "A has not heard of the loss yet"
    assert rows_b[0]["agents"] == "AB"


def be_left_alone(case: tuple[str, bool], port: int, root: Path, results: Any) -> None:
    me, survives = case
    options = {"save": lambda step, data: die() if step == 2 else None} if me == "B" else {}
    exchange = open_exchange(open_store(port), "AB", me, root, survives=survives, loss_seconds=0.5, **options)
    exchange.all_gather(contribution(me, step=1))
    with pytest.raises(RuntimeError) as caught:
        exchange.all_gather(contribution(me, step=2))
    results.put((me, str(caught.value)))


@pytest.mark.parametrize("survives", [True, False])
def test_without_news_of_who_is_left_the_error_stands(tmp_path: Path, survives: bool) -> None:
    processes = Processes(be_left_alone, [("A", survives), ("B", survives)], tmp_path)
    assert processes.await_end(1) == -9
    if not survives:
        announce(processes.store, 1, ["A"])
    [(_, message)] = processes.reports(1)
    assert message.startswith("step 2: agents B did not come to the exchange, which ended after ")


def start_without_c(me: str, port: int, root: Path, results: Any) -> None:
    if me == "C":
        die()
    exchange = open_exchange(open_store(port), "ABC", me, root, survives=True)
    results.put((me, exchange_steps(exchange, me, (1, 2))))
    exchange.close()


def test_an_agent_may_be_lost_before_it_comes(tmp_path: Path) -> None:
    processes = Processes(start_without_c, "ABC", tmp_path)
    assert processes.await_end(2) == -9
    announce(processes.store, 1, ["A", "B"])
    rows = [{"pool": "AB", "generation": 1, "agents": "AB"}] * 2
    assert processes.reports(2) == [("A", rows), ("B", rows)]
