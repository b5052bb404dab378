"""The command line. It imports nothing heavy before a command needs it."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megatron_hacpo.convert import to_hf, to_megatron

if TYPE_CHECKING:
    from megatron_hacpo.config import RunConfig
    from megatron_hacpo.launch.folder import Resume

_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a file system says that is full or not to be written."""

EPILOG = """
[dim]To begin:[/dim]  hacpo launch examples/tiny/pair.yaml

[dim]With other settings:[/dim]  hacpo launch CONFIG --set run.name=alone --set algorithm.name=gspo
"""

app = typer.Typer(
    name="hacpo",
    help="Train different language models side by side: each learns from everybody's rollouts (HACPO).",
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

convert = typer.Typer(help="Turn Hugging Face folders into Megatron checkpoints and back.")
convert.command()(to_megatron)
convert.command()(to_hf)
app.add_typer(convert, name="convert", no_args_is_help=True)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a key of the file; may be repeated."),
]


@app.command()
def launch(
    config: Config,
    settings: Settings = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an earlier run of this name.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of this name after its newest checkpoint.")
    ] = False,
    from_step: Annotated[
        int | None, typer.Option(metavar="N", help="Go on after this step's checkpoint instead.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY.PATH",
            help="The resumed run may differ in this key; may be repeated.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address on which the processes meet; 127.0.0.1 by default.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="On all nodes of the Slurm job whose batch script this is.")
    ] = False,
) -> None:
    """Run all agents, here or on the nodes of a Slurm job, watch them, and stop all when one fails."""
    from rich.console import Console

    from megatron_hacpo.config import ConfigError
    from megatron_hacpo.launch import run as launcher
    from megatron_hacpo.launch.folder import Resume
    from megatron_hacpo.launch.local import ThisMachine
    from megatron_hacpo.launch.supervise import Interrupted, WorkerFailed

    wanted = Resume(from_step, allow or []) if resume or from_step is not None else None
    if wanted is not None and overwrite:
        raise ConfigError(["--overwrite: deletes what --resume would go on with; keep one of them"])
    if allow and wanted is None:
        raise ConfigError([f"--allow: {allow[0]}: there is nothing to allow without --resume; add it"])
    if slurm and host is not None:
        raise ConfigError([f"--host: {host}: a job's nodes meet on HACPO_INTERFACE; leave it out"])
    try:
        with launcher.stop_noted() as asked:
            if slurm:
                _launch_in_job(config, settings or [], asked, overwrite, wanted)
            else:
                run, machines = _checked(config, settings), ThisMachine(host or "127.0.0.1")
                launcher.launch(run, Console(), machines, asked=asked, overwrite=overwrite, resume=wanted)
    except WorkerFailed as failure:
        print("\n".join(launcher.describe_failure(failure)), file=sys.stderr)
        raise typer.Exit(launcher.USER_ERROR if failure.code == launcher.USER_ERROR else 1) from None
    except Interrupted as stop:
        print(f"error: {stop}; all processes have ended", file=sys.stderr)
        raise typer.Exit(128 + stop.signum) from None


@app.command()
def submit(
    config: Config,
    settings: Settings = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="An option of sbatch's; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="As of [bold]launch[/bold].")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="As of [bold]launch[/bold].")] = False,
    gpus_per_node: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of a node; by default what sinfo says.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The job's script; by default slurm/hacpo_multinode.sh."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be submitted.")] = False,
) -> None:
    """Ask Slurm for as many nodes and GPUs as the run needs."""
    from rich.console import Console

    from megatron_hacpo.config import ConfigError
    from megatron_hacpo.launch import submit as slurm
    from megatron_hacpo.launch.view import placement_table

    run = _checked(config, settings, servers_here=False)
    script = script or slurm.SCRIPT
    if not script.is_file():
        raise ConfigError([f"--script: {script}: no such file; start this in the folder of the repository"])
    kind = slurm.NodeKind(gpus_per_node, 0) if gpus_per_node else slurm.usual_nodes(options or [], script)
    request = slurm.request(run, kind)
    flags = [*(["--resume"] if resume else []), *(["--overwrite"] if overwrite else [])]
    command = request.command(script, [str(config), *_set(settings or []), *flags], options or [])
    console = Console()
    console.print(placement_table(run, request.placements))
    console.print(slurm.shown(command), highlight=False, markup=False, soft_wrap=True)
    if not dry_run:
        done = slurm.submit(command, script)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        raise typer.Exit(done.returncode)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML file.", show_default=False)
    ] = None,
    settings: Settings = None,
) -> None:
    """Say what is installed here, and whether a run fits: devices, memory, time, disk, files."""
    from rich.console import Console

    from megatron_hacpo.config import load
    from megatron_hacpo.doctor.examine import examine

    run = None if config is None else load(config, settings or [])
    if not examine(run, Console(), file=config):
        raise typer.Exit(1)


@app.command(hidden=True)
def probe(
    config: Config,
    nodes: Annotated[str, typer.Option(metavar="NAME,NAME", help="All nodes of the job.")],
) -> None:
    """Look at one node of a Slurm job; [bold]launch --slurm[/bold] starts this on each."""
    from megatron_hacpo.doctor.job import probe as look_around

    look_around(config, nodes.split(","), os.environ["SLURMD_NODENAME"])


@app.command(hidden=True)
def serve(
    config: Config,
    agent: Annotated[str, typer.Option(metavar="NAME", help="The agent that the server is of.")],
    server: Annotated[int, typer.Option(metavar="N", help="Which one of its servers.")],
) -> None:
    """Run a rollout server on this node; [bold]launch --slurm[/bold] starts this."""
    run = _checked(config, None)
    _check_agent(run, agent)
    from megatron_hacpo.rollout.sglang.remote import serve as serve_agent

    serve_agent(run, agent, server)


@app.command()
def train(
    config: Config,
    agent: Annotated[str, typer.Option(metavar="NAME", help="The agent that this process belongs to.")],
    from_step: Annotated[
        int, typer.Option(metavar="N", help="Go on after this step's checkpoint; 0: from the start.")
    ] = 0,
    settings: Settings = None,
) -> None:
    """Be one process of one agent; [bold]launch[/bold], torchrun or srun start it."""
    run = _checked(config, settings)
    _check_agent(run, agent)
    from megatron_hacpo.train import train as train_agent

    train_agent(run, agent, from_step)


@app.command(name="eval")
def evaluate(
    config: Config,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Only this agent.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR", help="Another folder than the agent's own; several are compared with each other."
        ),
    ] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Only these; sampled, greedy: the held-out prompts."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write metrics and every problem's rewards there.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Measure agents on held-out prompts and benchmarks, side by side."""
    from megatron_hacpo.config import ConfigError, load

    run = load(config, settings or [])
    if agent is not None:
        _check_agent(run, agent)
    names = [agent] if agent is not None else run.names
    if model:
        if len(names) > 1:
            raise ConfigError(
                [f"--model: {model[0]}: which agent is it? add --agent, one of {', '.join(names)}"]
            )
        run, names = run.with_models(names[0], model)
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError([f"--out: {out}: there is something already; choose another folder"])
    _warn(run, training=False)
    from megatron_hacpo.evaluation.standalone import main as measure

    chosen = None if benchmarks is None else [name.strip() for name in benchmarks.split(",")]
    measure(run, names, chosen, out)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")],
) -> None:
    """Rebuild summary.json, curves.png and the final table of a run, finished or not."""
    from rich.console import Console

    from megatron_hacpo.config import ConfigError
    from megatron_hacpo.report import draw_curves, table, write_summary

    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            [f"RUN_DIR: {run_dir}: no run there (no config.yaml); give a folder such as runs/NAME"]
        )
    Console().print(table(write_summary(run_dir)))
    draw_curves(run_dir)


def _launch_in_job(
    config: Path, settings: list[str], asked: "Sequence[int]", overwrite: bool, resume: "Resume | None"
) -> None:
    """`launch` on the nodes of the Slurm job that this process is the batch script of."""
    from rich.console import Console

    from megatron_hacpo.config import ConfigError
    from megatron_hacpo.doctor.job import examine_nodes
    from megatron_hacpo.launch import run as launcher
    from megatron_hacpo.launch import slurm
    from megatron_hacpo.launch.folder import Resume
    from megatron_hacpo.launch.view import placement_table

    job = slurm.current_job()
    if not config.is_file():
        raise ConfigError(
            [f"config: {config}: {job.nodes[0].name} does not see it; all nodes must, put it where they do"]
        )
    console = Console(width=120)  # of a file
    run = _checked(config, settings, servers_here=not slurm.in_container())
    if job.restarts and launcher.launched_by(run, {"job": job.id}):
        overwrite, resume = False, Resume(None, resume.allow if resume else [])
        console.print(f"requeued ({job.restarts}): the run goes on", highlight=False)
    console.print(placement_table(run, slurm.place_in(job, run, sys.argv[sys.argv.index("--slurm") + 1 :])))
    machines = slurm.SlurmJob(job)
    if not examine_nodes(run, config, machines, console):
        raise typer.Exit(launcher.USER_ERROR)
    outcome = launcher.launch(run, console, machines, asked=asked, overwrite=overwrite, resume=resume)
    if outcome.complete:
        return
    if not outcome.progressed:
        print("error: asked to stop, and no checkpoint was made to go on from", file=sys.stderr)
        raise typer.Exit(1)
    slurm.requeue(job)


def _set(settings: list[str]) -> list[str]:
    """As options of a command line."""
    return [part for setting in settings for part in ("--set", setting)]


def _checked(config: Path, settings: list[str] | None, *, servers_here: bool = True) -> "RunConfig":
    """The configuration, looked over; warnings go to stderr."""
    from megatron_hacpo.config import load

    run = load(config, settings or [])
    _warn(run, training=True, servers_here=servers_here)
    return run


def _warn(run: "RunConfig", *, training: bool, servers_here: bool = True) -> None:
    from megatron_hacpo.config import check

    for warning in check(run, training=training, servers_here=servers_here):
        print(f"warning: {warning}", file=sys.stderr)


def _check_agent(run: "RunConfig", agent: str) -> None:
    from megatron_hacpo.config import ConfigError

    if agent not in run.agents:
        raise ConfigError([f"--agent: {agent}: no such agent; the agents are {', '.join(run.names)}"])


def main(command: Callable[[], None] = app) -> None:
    """Entry point. A ValueError is a mistake of the user's: its lines, exit code 2. What a disk refuses is a
    line, too, with exit code 1. A traceback is there only if the environment has HACPO_TRACEBACK=1."""
    try:
        command()
    except ValueError as error:
        _tell(str(error).splitlines() or [repr(error)], code=2)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        _tell([f"{error.filename or 'a file'}: {error.strerror}"], code=1)


def _tell(lines: Sequence[str], *, code: int) -> NoReturn:
    """Of the error that is being handled."""
    if os.environ.get("HACPO_TRACEBACK") == "1":
        traceback.print_exc()
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
