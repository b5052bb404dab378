"""Which processes a run has on this machine, and what each is told."""

from dataclasses import dataclass

from megatron_hacpo.config import RunConfig


@dataclass(frozen=True)
class Rank:
    """One process: its place in its agent's world, and its device on this machine."""

    agent: str
    rank: int
    world_size: int
    local_rank: int

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
            "HACPO_STORE": store,
        }


def placement(config: RunConfig) -> list[Rank]:
    """All processes of all agents, agent by agent; devices are handed out in that order."""
    ranks: list[Rank] = []
    for name, agent in config.agents.items():
        size = agent.parallel.world_size
        ranks += [Rank(name, rank, size, local_rank=len(ranks) + rank) for rank in range(size)]
    return ranks
