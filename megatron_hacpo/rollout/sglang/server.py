"""A server of the run's own: its command line, its process, and whether it answers."""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hacpo.hf.read import is_checkpoint
from megatron_hacpo.process.child import Child
from megatron_hacpo.rollout.sglang.client import ServerClient
from megatron_hacpo.rollout.sglang.ports import Ports

CPU_SERVER = Path(__file__).with_name("cpu_server.py")
CPU_CACHE_TOKENS = 65_536
"""Without a limit the CPU engine fills all memory with its cache."""

KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""For glibc: the memory that weights were received in is used again by the next bucket. New memory from the
kernel takes nearly as long as the transfer."""

LOG_LINES = 8
"""Of a server's log that are shown; the launcher shows the last 20 of the trainer's."""

PORT_ATTEMPTS = 3
POLL_SECONDS = 0.5
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True)
class ServerSpec:
    """What a server is started with. context: tokens of the longest sequence. first_gpu: of the machine's
    GPUs, of which the server takes `tensor`; None: there is none. key: of the HTTP interface."""

    python: str
    model: Path
    dtype: str
    tensor: int
    host: str
    context: int
    max_concurrent: int
    cache_tokens: int | None
    memory_fraction: float | None
    first_gpu: int | None
    seed: int
    key: str
    colocated: bool = False
    arguments: Sequence[str] = ()

    def command(self, ports: Ports) -> list[str]:
        """Of the server without its key, which other users of the machine would see here."""
        on_cpu = self.first_gpu is None
        program = ["-P", str(CPU_SERVER)] if on_cpu else ["-m", "sglang.launch_server"]
        values = {
            "--model-path": self.model,
            "--host": self.host,
            "--port": ports.first,
            "--nccl-port": ports.first + 1,
            "--dtype": self.dtype,
            "--load-format": "dummy" if is_checkpoint(self.model) else None,  # its weights come from us
            "--tp-size": self.tensor,
            "--context-length": self.context,
            "--max-running-requests": self.max_concurrent,
            "--random-seed": self.seed,
            "--max-total-tokens": self.cache_tokens or (CPU_CACHE_TOKENS if on_cpu else None),
            "--mem-fraction-static": self.memory_fraction,
            "--device": "cpu" if on_cpu else "cuda",
            "--base-gpu-id": self.first_gpu,
            "--log-level": "warning",
        }
        given = [str(part) for key, value in values.items() if value is not None for part in (key, value)]
        flags = ["--skip-tokenizer-init", "--skip-server-warmup"]
        flags += ["--enable-memory-saver"] if self.colocated else []
        return [self.python, *program, *given, *flags, *self.arguments]

    def environment(self) -> dict[str, str]:
        """The trainer's, without what is not meant for another Python or would send local requests away."""
        kept = {
            k: v for k, v in os.environ.items() if k.lower() not in (*_PROXIES, "pythonpath", "pythonhome")
        }
        return {
            **kept,
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(self.tensor)
            ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(KEPT_MEMORY if self.first_gpu is None else {}),
        }


class ManagedServer:
    """A started server and a client for it."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        """Start it and return at once; `ready` waits. log: gets all that it prints."""
        self._log = log
        self._ports = Ports(spec.host, 2)
        self._secret = log.with_suffix(".key.yaml")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._secret.unlink(missing_ok=True)
        descriptor = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f'api-key: "{spec.key}"\n')
        command = [*spec.command(self._ports), "--config", str(self._secret)]
        self._child = Child(command, spec.environment(), log)
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        self.client = ServerClient(f"http://{host}:{self._ports.first}", spec.key)

    @property
    def pid(self) -> int:
        """Of the server's main process."""
        return self._child.pid

    async def ready(self, seconds: float) -> None:
        """Wait until it generates. Raises RuntimeError with the end of its log if it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while not self._child.has_ended():
            if await self.client.healthy(seconds=max(5.0, POLL_SECONDS)):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(self._failure(f"does not answer after {seconds:g} s"))
            await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(self._failure("ended while it was starting"))

    def alive(self) -> bool:
        return not self._child.has_ended()

    def kill(self) -> None:
        """End it and its descendants at once, whatever they are doing."""
        if not self._child.buried:
            self._child.bury()
            self._ports.release()
            self._secret.unlink(missing_ok=True)

    def last_lines(self) -> str:
        """The end of its log, indented, with the log's path above. It goes above what is said about it, since
        a reader sees the end of the trainer's own log first."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return f"the end of {self._log}:\n" + "\n".join(f"  | {line}" for line in lines)

    def _failure(self, what: str) -> str:
        return f"{self.last_lines()}\nSGLang server {self.client.url} {what}; its log is {self._log}"


def new_key() -> str:
    """An API key that nobody can guess. In hexadecimal: SGLang makes a command line of the file that has it,
    where a key that begins with a hyphen would be an option."""
    return secrets.token_hex(24)
