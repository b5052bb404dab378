"""Which processes a run has on this machine, and what each is told."""

from dataclasses import dataclass

from megatron_hacpo.config import RunConfig


@dataclass(frozen=True)
class Rank:
    """One process: its place in its agent's world, and its device on this machine. server_gpu: the first
    device of the agent's rollout servers."""

    agent: str
    rank: int
    world_size: int
    local_rank: int
    server_gpu: int

    @property
    def name(self) -> str:
        """The process's name in logs and messages."""
        return f"{self.agent}.rank{self.rank}"

    def environment(self, store: str) -> dict[str, str]:
        """What the process finds in its environment; `store` is the HOST:PORT where all processes meet."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "HACPO_SERVER_GPU": str(self.server_gpu),
            "HACPO_STORE": store,
        }


def placement(config: RunConfig) -> list[Rank]:
    """All processes of all agents, agent by agent; devices are handed out in that order, first to all
    processes, then to all servers that the run starts."""
    ranks: list[Rank] = []
    server_gpu = sum(agent.parallel.world_size for agent in config.agents.values())
    for name, agent in config.agents.items():
        size, first = agent.parallel.world_size, len(ranks)
        shared = agent.placement.colocated
        servers = first if shared else server_gpu
        ranks += [Rank(name, rank, size, first + rank, servers) for rank in range(size)]
        server_gpu += 0 if shared else agent.rollout.sglang.servers * agent.rollout.sglang.tensor
    return ranks
