"""Who has the GPUs, where servers and trainer share them: one state for both sides."""

from collections.abc import Callable
from typing import Literal, Protocol

from megatron_hacpo.rollout.sglang.members import Memory

State = Literal["training", "sending", "generating"]
"""training: the trainer has everything, servers have given back weights and cache. sending: both have the
weights, the trainer neither gradients nor states. generating: servers have everything, and the trainer no
weights either. (What the trainer moves is `placement.offload`'s to say.)"""


class Trainer(Protocol):
    """What a rank can free while servers generate."""

    def offload_states(self) -> None: ...
    def offload_weights(self) -> None: ...
    def reload_weights(self) -> None: ...
    def reload(self) -> None: ...


class Turns:
    """Every rank has one and goes through the same states. Each change waits for all ranks in between, so
    that memory is free before somebody takes it; asked for the state that it is in, it does nothing."""

    def __init__(
        self, trainer: Trainer, *, barrier: Callable[[], None], hold: Callable[[Memory, bool], None]
    ) -> None:
        """hold: have all servers take or give back memory; nothing on ranks that do not talk to them. The
        first state is "sending": there is room now for servers to start in, which have everything then.
        """
        self.state: State = "sending"
        self._trainer = trainer
        self._barrier = barrier
        self._hold = hold
        self._trainer.offload_states()
        self._barrier()

    def send(self) -> None:
        """Weights can be sent, and must be: what the servers had is gone."""
        if self.state == "training":
            self._trainer.offload_states()
            self._barrier()
            self._hold("weights", True)
        elif self.state == "generating":
            self._trainer.reload_weights()
        self.state = "sending"

    def generate(self) -> None:
        """The servers can generate."""
        if self.state == "generating":
            return
        assert self.state == "sending", "servers get weights before they generate"
        self._trainer.offload_weights()
        self._barrier()
        self._hold("kv_cache", True)
        self.state = "generating"

    def train(self) -> None:
        """The trainer can compute."""
        if self.state == "training":
            return
        self._hold("kv_cache", False)
        self._hold("weights", False)
        self._barrier()
        self._trainer.reload()
        self.state = "training"
