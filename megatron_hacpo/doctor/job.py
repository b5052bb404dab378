"""The examination at the start of a job: a process on each node looks around and calls all the others."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from megatron_hacpo.config import ConfigError, RunConfig, dump
from megatron_hacpo.config.load import resolve
from megatron_hacpo.config.yaml12 import parse
from megatron_hacpo.doctor.examine import examine_job
from megatron_hacpo.doctor.node import NodeReport, look, shared_folders
from megatron_hacpo.doctor.reach import meet
from megatron_hacpo.launch.run import serve_store
from megatron_hacpo.launch.slurm import SlurmJob
from megatron_hacpo.launch.supervise import WorkerFailed, supervise
from megatron_hacpo.process.network import joined, own_address
from megatron_hacpo.process.store import connect, store_address

MEET_SECONDS = 300.0
"""Nodes may start their processes so far apart."""

PROBE_SECONDS = 900.0
LOG_LINES = 20


class Answer(msgspec.Struct, frozen=True):
    """What a node's process says. met: as `meet` returns it."""

    report: NodeReport
    met: dict[str, str]


def examine_nodes(config: RunConfig, file: Path, machines: SlurmJob, console: Console) -> bool:
    """Print what there is to say about a job's nodes and the run; True without an error.

    Raises ConfigError for a run folder that cannot be written, and where a node gives no answer.
    """
    names = [node.name for node in machines.nodes]
    store = serve_store(machines.host)
    store.set("doctor/config", dump(config))
    with _tokens(config) as tokens, tempfile.TemporaryDirectory() as logs:
        store.set("doctor/tokens", msgspec.json.encode(tokens).decode())
        command = ["-m", "megatron_hacpo", "probe", str(file), "--nodes", ",".join(names)]
        workers = machines.probes(command, joined(machines.host, store.port), Path(logs))
        began = time.monotonic()

        def on_tick() -> None:
            if time.monotonic() - began > PROBE_SECONDS:
                silent = [name for name in names if not store.check([_key(name)])]
                raise ConfigError(
                    [f"nodes {', '.join(silent)}: no answer after {PROBE_SECONDS:.0f} s; leave them out"]
                )

        try:
            supervise(workers, on_tick=on_tick, read_end=machines.failures)
        except WorkerFailed as failed:
            lines = failed.worker.log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise ConfigError(
                [
                    f"nodes: {failed}, which looks at them; its Python is HACPO_PYTHON of slurm/env.sh, and "
                    "every node must see it; the end of its log:",
                    *(f"  | {line}" for line in lines[-LOG_LINES:]),
                ]
            ) from None
    assert store.check([_key(name) for name in names]), "every process that ended well has answered"
    answers = {name: msgspec.json.decode(store.get(_key(name)), type=Answer) for name in names}
    return examine_job(
        config,
        [answer.report for answer in answers.values()],
        console,
        nodes=machines.nodes,
        met={name: answer.met for name, answer in answers.items()},
    )


def probe(file: Path, nodes: list[str], node: str) -> None:
    """Be `examine_nodes`' process on `node`. The configuration comes from the store: no file is sure to be
    seen from here."""
    address = store_address()
    assert address is not None, "the launcher has a store"
    store = connect(address)
    config = resolve(parse(store.get("doctor/config").decode()))
    met = meet(store, node, nodes, own_address(address[0]), MEET_SECONDS)
    tokens = msgspec.json.decode(store.get("doctor/tokens"), type=dict[str, str])
    report = msgspec.structs.replace(look(config, tokens, file), host=node)
    store.set(_key(node), msgspec.json.encode(Answer(report, met)).decode())


@contextmanager
def _tokens(config: RunConfig) -> Iterator[dict[str, str]]:
    """A file in each folder that nodes share, by the folder's key."""
    with ExitStack() as files:
        tokens = {}
        for key, folder in shared_folders(config).items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = tempfile.NamedTemporaryFile(prefix=".seen-by-all-", dir=folder)  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    [f"{key}: {folder}: cannot write there ({error.strerror}); choose another"]
                ) from None
            tokens[key] = str(Path(files.enter_context(file).name).absolute())
        yield tokens


def _key(node: str) -> str:
    return f"doctor/answers/{node}"
