"""A server of the run's own: its command line, its process, and whether it answers."""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hacpo.config import AgentConfig
from megatron_hacpo.hf.read import is_checkpoint
from megatron_hacpo.process.child import Child
from megatron_hacpo.process.network import joined
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

GPU_VARIABLE = "HACPO_SERVER_GPU"
"""Environment variable: the first of this machine's GPUs for servers that are started here."""

CONTEXT_MARGIN = 8
"""Tokens that SGLang keeps back of its context length."""

POLL_SECONDS = 0.5
LIBRARIES = "LD_LIBRARY_PATH"
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

    def with_cache(self, tokens: int | None) -> "ServerSpec":
        """The same with another `cache_tokens`; None: itself."""
        return self if tokens is None else replace(self, cache_tokens=tokens)

    def command(self, port: int) -> list[str]:
        """Of the server without its key, which other users of the machine would see here. port: the first of
        two."""
        on_cpu = self.first_gpu is None
        program = ["-P", str(CPU_SERVER)] if on_cpu else ["-m", "sglang.launch_server"]
        values = {
            "--model-path": self.model,
            "--host": self.host,
            "--port": port,
            "--nccl-port": port + 1,
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
            # SGLang's own choice on Hopper, FlashAttention 3, has no float32.
            "--attention-backend": "triton" if self.dtype == "float32" and not on_cpu else None,
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
        if LIBRARIES in kept:  # containers name their own torch there, which the servers' must not find
            kept[LIBRARIES] = ":".join(p for p in kept[LIBRARIES].split(":") if "/torch/lib/" not in f"{p}/")
        return {
            **kept,
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(self.tensor)
            ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **(KEPT_MEMORY if self.first_gpu is None else {}),
        }


def server_spec(
    settings: AgentConfig, *, context: int, host: str, first_gpu: int | None, seed: int, key: str
) -> ServerSpec:
    """A server of an agent; context: tokens of the longest sequence, the others as in `ServerSpec`."""
    sglang = settings.rollout.sglang
    assert sglang.python is not None
    return ServerSpec(
        python=str(Path(sglang.python).absolute()),
        model=Path(settings.model).absolute(),
        dtype=settings.dtype,
        tensor=sglang.tensor,
        host=host,
        context=context + CONTEXT_MARGIN,
        max_concurrent=sglang.max_concurrent,
        cache_tokens=sglang.cache_tokens,
        memory_fraction=sglang.memory_fraction,
        first_gpu=first_gpu,
        seed=seed,
        key=key,
        colocated=settings.placement.colocated,
        arguments=tuple(sglang.arguments),
    )


def server_name(agent: str, number: int) -> str:
    """A server's name in logs and messages."""
    return f"{agent}.server{number}"


def server_log(run_dir: Path, agent: str, number: int, starts: int) -> Path:
    """Of the server in place `number` after so many earlier starts."""
    again = f".{starts}" if starts else ""
    return run_dir / "logs" / f"{server_name(agent, number)}{again}.log"


class ManagedServer:
    """A started server and a client for it."""

    def __init__(self, spec: ServerSpec, log: Path, ports: Ports | None = None) -> None:
        """Start it and return at once; `ready` waits. log: gets all that it prints. ports: two, which stay
        the caller's."""
        self._log = log
        self._ports = ports or Ports(spec.host, 2)
        self._keeps_ports = ports is None
        first = self._ports.first
        self._secret = log.with_suffix(".key.yaml")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._secret.unlink(missing_ok=True)
        descriptor = os.open(self._secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f'api-key: "{spec.key}"\n')
        command = [*spec.command(first), "--config", str(self._secret)]
        self._child = Child(command, spec.environment(), log)
        self.client = ServerClient(f"http://{joined(spec.host, first)}", spec.key)

    @property
    def pid(self) -> int:
        """Of the server's main process."""
        return self._child.pid

    async def ready(self, seconds: float) -> None:
        """Wait until it generates. Raises RuntimeError with the end of its log if it ends or takes longer."""
        deadline = time.monotonic() + seconds
        while not self._child.has_ended():
            if await self.client.unhealthy(max(5.0, POLL_SECONDS)) is None:
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
            if self._keeps_ports:
                self._ports.release()
            self._secret.unlink(missing_ok=True)

    def last_lines(self) -> str:
        return last_lines(self._log)

    def _failure(self, what: str) -> str:
        return failure(self.client, self._log, what)


class LocalPlace:
    """Where a server of this process runs. Calling it starts one, each time with a log of its own.

    cache_tokens: as of `ServerSpec`, if that should be another one.
    """

    def __init__(self, spec: ServerSpec, run_dir: Path, agent: str, number: int) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._agent, self._number = agent, number
        self._starts = 0

    def __call__(self, cache_tokens: int | None = None) -> ManagedServer:
        log = server_log(self._run_dir, self._agent, self._number, self._starts)
        self._starts += 1
        return ManagedServer(self._spec.with_cache(cache_tokens), log)


def last_lines(log: Path) -> str:
    """The end of a server's log, indented, with the log's path above. It goes above what is said about it,
    since a reader sees the end of the trainer's own log first."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return f"the end of {log}:\n" + "\n".join(f"  | {line}" for line in lines[-LOG_LINES:])


def failure(client: ServerClient, log: Path, what: str) -> str:
    """What to say of a server that does not start."""
    return f"{last_lines(log)}\nSGLang server {client.url} {what}; its log is {log}"


def new_key() -> str:
    """An API key that nobody can guess. In hexadecimal: SGLang makes a command line of the file that has it,
    where a key that begins with a hyphen would be an option."""
    return secrets.token_hex(24)
