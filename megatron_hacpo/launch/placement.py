"""Which devices of which node each process of a run has."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_hacpo.config import AgentConfig, ConfigError, RunConfig


@dataclass(frozen=True)
class Node:
    """A machine of the run. devices: its GPUs that the run may use; without GPUs, how many processes.
    component: which part of a heterogeneous job it belongs to. has_gpus: whether Slurm gives it as GPUs."""

    name: str
    devices: int
    component: int = 0
    has_gpus: bool = False


@dataclass(frozen=True)
class Block:
    """Neighbouring devices of a node, numbered from `first` on."""

    node: Node
    first: int
    count: int

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"{self.node.name}:{self.first}" + (f"-{last}" if last > self.first else "")


@dataclass(frozen=True)
class Placement:
    """One agent's devices.

    ranks: of its processes in order, a block a node, all of one size and with the same first device.
    servers: a block for each rollout server that the run starts.
    """

    agent: str
    ranks: tuple[Block, ...]
    servers: tuple[Block, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(block.count for block in self.ranks)


def rank_name(agent: str, rank: int) -> str:
    """A process's name in logs and messages."""
    return f"{agent}.rank{rank}"


class DoesNotFit(ConfigError):  # noqa: N818 - reads as what is wrong
    """The nodes are too few or too small for the run."""


def place(config: RunConfig, nodes: Sequence[Node]) -> list[Placement]:
    """All agents of a run, in its order.

    An agent that fits one node is put on one, the emptiest; a larger one gets whole nodes in equal parts, so
    that tensor-parallel groups stay within a node. Servers come after all processes, on their agent's nodes
    where there is room; colocated ones share the devices of their agent's processes. In a heterogeneous job
    component k is agent k's.
    Raises DoesNotFit, with the numbers.
    """
    components = {node.component for node in nodes}
    if len(components) not in (1, len(config.agents)):
        raise ConfigError(
            [
                f"agents: {len(config.agents)} agents, but the job has {len(components)} components; a "
                "heterogeneous job has one for each agent, in the order of the configuration"
            ]
        )
    try:
        placements = _Packing(config, nodes, _emptiest).result()
    except DoesNotFit:
        placements = _Packing(config, nodes, _first).result()
    for placement in placements:
        _check_transport(config.agents[placement.agent], placement)
    return placements


def nodes_needed(config: RunConfig, devices: int, most: int = 4096) -> int:
    """The fewest nodes of so many devices that the run fits; raises DoesNotFit."""
    counts = range(1, most)
    for count in counts:
        try:
            place(config, [Node(f"node{i}", devices) for i in range(count)])
        except DoesNotFit:
            if count == counts[-1] or count * devices > 2 * devices_needed(config) + devices:
                raise
        else:
            return count
    raise AssertionError


def devices_needed(config: RunConfig) -> int:
    """Of all processes and all servers that do not share theirs."""
    return sum(
        agent.parallel.world_size + (0 if agent.placement.colocated else _servers(agent) * _tensor(agent))
        for agent in config.agents.values()
    )


def this_machine() -> list[Node]:
    """The node of a run that is launched here: its GPUs, or room for any number of processes."""
    import torch

    return [Node("this machine", torch.cuda.device_count() or sys.maxsize)]


def _servers(agent: AgentConfig) -> int:
    """How many servers the run starts for an agent."""
    rollout = agent.rollout
    return 0 if rollout.engine != "sglang" or rollout.sglang.addresses else rollout.sglang.servers


def _tensor(agent: AgentConfig) -> int:
    return agent.rollout.sglang.tensor


def _check_transport(agent: AgentConfig, placement: Placement) -> None:
    """DoesNotFit for weights that would be handed over as GPU memory between nodes."""
    transport = agent.rollout.sglang.transport
    if transport != "tensor" and not (transport == "auto" and agent.placement.colocated):
        return
    nodes = {block.node.name for block in (*placement.ranks, *placement.servers)}
    if placement.servers and len(nodes) > 1:
        raise DoesNotFit(
            [
                f"agents.{placement.agent}.rollout.sglang.transport: {transport}: handles of GPU memory stay "
                f"on one node, but processes and servers are on {', '.join(sorted(nodes))}; use disk"
            ]
        )


Choice = Callable[[Iterable[tuple[Node, int]]], Node]
"""Of nodes with room, each with the number of its free devices."""


def _emptiest(rooms: Iterable[tuple[Node, int]]) -> Node:
    return max(rooms, key=lambda room: room[1])[0]


def _first(rooms: Iterable[tuple[Node, int]]) -> Node:
    return next(iter(rooms))[0]


class _Packing:
    """Devices handed out so far. Large agents come first, as they are the hardest to place."""

    def __init__(self, config: RunConfig, nodes: Sequence[Node], choose: Choice) -> None:
        self._config = config
        self._nodes = nodes
        self._choose = choose
        self._used = {node.name: 0 for node in nodes}

    def result(self) -> list[Placement]:
        agents = self._config.agents
        by_size = sorted(agents, key=lambda name: -agents[name].parallel.world_size)
        ranks = {name: self._ranks(name) for name in by_size}
        return [Placement(name, ranks[name], self._servers(name, ranks[name])) for name in agents]

    def _of(self, name: str) -> list[Node]:
        """The nodes that an agent may have."""
        if len({node.component for node in self._nodes}) == 1:
            return list(self._nodes)
        return [node for node in self._nodes if node.component == self._config.names.index(name)]

    def _free(self, node: Node) -> int:
        return node.devices - self._used[node.name]

    def _take(self, node: Node, count: int) -> Block:
        block = Block(node, self._used[node.name], count)
        self._used[node.name] += count
        return block

    def _ranks(self, name: str) -> tuple[Block, ...]:
        parallel = self._config.agents[name].parallel
        size, nodes = parallel.world_size, self._of(name)
        if rooms := [(node, self._free(node)) for node in nodes if self._free(node) >= size]:
            return (self._take(self._choose(rooms), size),)
        unused = [node for node in nodes if self._used[node.name] == 0]
        for count in range(2, len(unused) + 1):
            each = size // count
            wide = [node for node in unused if node.devices >= each]
            if size % count == 0 and each % parallel.tensor == 0 and len(wide) >= count:
                return tuple(self._take(node, each) for node in wide[:count])
        key = f"agents.{name}.parallel"
        if parallel.tensor > max(node.devices for node in nodes):
            raise DoesNotFit(
                [f"{key}.tensor: {parallel.tensor} processes that belong on one node; {_rooms(nodes)}"]
            )
        raise DoesNotFit(
            [
                f"{key}: its {size} processes fit neither one node nor whole nodes in equal parts, each with "
                f"whole tensor-parallel groups; {self._situation(nodes)}"
            ]
        )

    def _servers(self, name: str, ranks: Sequence[Block]) -> tuple[Block, ...]:
        agent = self._config.agents[name]
        count, tensor = _servers(agent), _tensor(agent)
        key = f"agents.{name}.rollout.sglang"
        if agent.placement.colocated:
            each, size = ranks[0].count, agent.parallel.world_size
            if count * tensor > size:
                wrong = f"{count} of {tensor} GPUs, and the agent's processes have {size}; lower one"
                raise DoesNotFit([f"{key}.servers: {wrong}"])
            if count and tensor > 1 and each % tensor != 0 and count * tensor > each:
                raise DoesNotFit(
                    [f"{key}.tensor: {tensor} does not divide the agent's {each} devices of a node"]
                )
            places = [divmod(number * tensor, each) for number in range(count)]
            return tuple(Block(ranks[i].node, ranks[i].first + j, tensor) for i, j in places)
        blocks = []
        own = {block.node.name for block in ranks}
        for number in range(count):
            rooms = [(node, self._free(node)) for node in self._of(name) if self._free(node) >= tensor]
            if not rooms:
                raise DoesNotFit(
                    [
                        f"{key}.servers: no room for server {number} of {count}: it needs {tensor} devices "
                        f"of one node; {self._situation(self._of(name))}"
                    ]
                )
            at_home = [room for room in rooms if room[0].name in own]
            blocks.append(self._take(self._choose(at_home or rooms), tensor))
        return tuple(blocks)

    def _situation(self, nodes: Sequence[Node]) -> str:
        """The numbers, for people."""
        agents = self._config.agents.items()
        needs = [f"{name} {agent.parallel.world_size}" for name, agent in agents]
        needs += [
            f"servers of {name} {_servers(agent) * _tensor(agent)}"
            for name, agent in agents
            if _servers(agent) and not agent.placement.colocated
        ]
        return f"the run needs {devices_needed(self._config)} devices ({', '.join(needs)}); {_rooms(nodes)}"


def _rooms(nodes: Sequence[Node]) -> str:
    total = sum(node.devices for node in nodes)
    sizes = ", ".join(f"{node.name} {node.devices}" for node in nodes[:8])
    return f"there are {total} ({sizes}{', ...' if len(nodes) > 8 else ''})"
