"""The configuration's shape: a frozen model per section of the file, with the paper's numbers as defaults."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_hacpo.config.method import AlgorithmConfig
from megatron_hacpo.config.section import (
    Beta,
    Count,
    CountOrZero,
    KeyName,
    Name,
    NonNegative,
    Positive,
    Section,
)
from megatron_hacpo.data.prompts import PLACEHOLDER, Columns

MAX_LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 0.05}
"""Default of `rollout.max_logprob_gap` by the agent's dtype."""


def _with_place(template: str | None) -> str | None:
    if template is not None and template.count(PLACEHOLDER) != 1:
        raise ValueError(f"needs {PLACEHOLDER} once; put it where the prompt goes")
    return template


class RunSection(Section):
    """Which run this is. Everything it leaves stands in `dir`/`name`."""

    name: Name
    """Also the folder's name."""
    dir: str = "runs"
    """Folder of all runs."""
    seed: CountOrZero = 1
    """Of prompts and sampling; the same seed on the same machine gives the same run."""
    steps: Count
    """RL steps: rollouts, exchange, and all updates on them."""


class ParallelConfig(Section):
    """Sizes of one agent's parallel dimensions. Its number of processes is tensor x pipeline x context x
    data; experts are divided over the processes of a pipeline stage.
    """

    tensor: Count = 1
    """Divides heads, key-value heads and feed-forward width."""
    pipeline: Count = 1
    """Divides the layers."""
    virtual_pipeline: Count = 1
    """Parts of the model per pipeline stage (an interleaved schedule); pipeline x virtual_pipeline divides
    the layers."""
    context: Count = 1
    """Processes that share every sequence. Sequences are padded to a multiple of 2 x context tokens."""
    data: Count = 1
    """Copies of the model, each with a part of every mini-batch."""
    expert: Count = 1
    """Divides the experts of a mixture-of-experts model, and tensor x context x data."""
    sequence: bool = True
    """With tensor above 1, also divide the activations between the matrices, over the sequence."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


class OptimizerConfig(Section):
    """AdamW. Weight decay is decoupled and, as in Megatron, spares vectors (norms and biases). Warm-up and
    schedule count RL steps, not updates.
    """

    lr: Annotated[float, Field(gt=0, le=1e30)] = 1e-6
    """Highest learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    eps: Annotated[float, Field(ge=1e-20)] = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: NonNegative = 0.01
    """Of matrices and embeddings."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 does not clip."""
    warmup_steps: CountOrZero = 0
    """Steps of linear rise to `lr`."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """From `lr` after the warm-up to `min_lr` at the last step."""
    min_lr: NonNegative = 0.0
    """Where a schedule ends."""
    distributed: bool = False
    """Divide optimizer states and gradients over the data-parallel processes."""
    cpu_offload: bool = False
    """Keep float32 weights and optimizer states in host memory and update there; needs `distributed` and a
    model in bfloat16. Without a GPU they are there anyway."""


class SGLangConfig(Section):
    """SGLang servers of one agent, in a Python environment of their own."""

    python: str | None = None
    """Interpreter of that environment; the run then starts the servers itself."""
    servers: Count = 1
    """How many the run starts."""
    tensor: Count = 1
    """Tensor-parallel size of each."""
    addresses: list[str] = []
    """Servers that run already, as http://HOST:PORT, instead of `python` and `servers`."""
    key_variable: str = "HACPO_SGLANG_KEY"
    """Environment variable with the API key of `addresses`; servers that the run starts get a random one."""
    host: str = "127.0.0.1"
    """Address on which servers of the run listen."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of the GPU's memory that is free when a server starts, for weights and cache; null: SGLang's choice."""
    cache_tokens: Count | None = None
    """Tokens in a server's cache; null: what the memory holds, without a GPU 65,536."""
    max_concurrent: Count = 256
    """Requests in flight per server; the others wait here."""
    arguments: list[str] = []
    """Further arguments of `sglang.launch_server`."""
    start_minutes: Positive = 20.0
    """Until a started server must answer."""
    hang_seconds: Annotated[float, Field(ge=5)] = 120.0
    """A server that answers no health check for so long is taken for dead."""
    restarts: CountOrZero = 3
    """How often a server of the run is started again."""
    transport: Literal["auto", "distributed", "tensor", "disk"] = "auto"
    """How weights travel: broadcast over a process group, in requests (one node alone), or through files.
    `auto`: `tensor` for colocated servers, else `distributed`; `disk` if the servers have another torch."""
    bucket_mb: Count = 512
    """Megabytes of weights that are sent together."""
    weights_dir: str | None = None
    """For `disk`: a folder that servers and trainer share; null: the agent's in the run's folder."""
    verify_sync: bool = False
    """Compare the servers' weights after each sync with a copy written to disk, tensor by tensor. Slow."""

    @field_validator("addresses")
    @classmethod
    def _are_addresses(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            if not re.fullmatch(r"https?://([^/:]+|\[[0-9A-Fa-f:]+\]):\d{1,5}", address):
                raise ValueError(f"{address} is not http://HOST:PORT; write it so")
        if len(set(addresses)) < len(addresses):
            raise ValueError("has an address twice; keep one")
        return addresses

    @model_validator(mode="after")
    def _one_kind(self) -> "SGLangConfig":
        if self.python is not None and self.addresses:
            raise ValueError("python and addresses are both set; keep one")
        return self


class RolloutConfig(Section):
    """How responses are drawn. Lengths are tokens of the agent's own tokenizer."""

    engine: Literal["local", "sglang"] = "local"
    """`local`: a transformers model in the trainer's leader process. `sglang`: servers."""
    responses_per_prompt: Count = 8
    """G."""
    max_prompt_tokens: Count = 1024
    """A prompt that is longer for any agent is left out for all."""
    max_response_tokens: Count = 4096
    """Also the longest view of another agent's response."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Of the engine and of all log-probs."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: no limit."""
    top_k: CountOrZero = 0
    """0: no limit."""
    sglang: SGLangConfig = SGLangConfig()
    max_logprob_gap: Positive | None = None
    """Mean |engine - trainer| log-prob that stops the run when it lasts; null: by the agent's dtype."""

    @property
    def max_tokens(self) -> int:
        """The longest possible sequence."""
        return self.max_prompt_tokens + self.max_response_tokens


class PlacementConfig(Section):
    """Where an agent's rollout servers compute."""

    colocated: bool = False
    """On the GPUs of the agent's own processes, taking turns with them."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What a colocated trainer moves to host memory while servers generate: nothing, optimizer states and
    gradients, or these and the weights."""


class AgentConfig(Section):
    """One agent. `optimizer` and `rollout` may override single keys of the run's sections of that name."""

    model: str
    """A local Hugging Face folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; in bfloat16 the optimizer and gradients stay float32."""
    chat_template: str | None = None
    """A Jinja file used instead of the tokenizer's own chat template."""
    plain_template: str | None = None
    """For base models: text in which `{prompt}` stands for the prompt."""
    stop_token: str | None = None
    """null: the tokenizer's eos_token."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it in memory: attention, or whole layers."""
    router_aux_loss_coef: NonNegative = 0.0
    """Of a mixture of experts: weight of the loss that balances them (Switch Transformer); 0: none."""
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()
    optimizer: OptimizerConfig
    rollout: RolloutConfig

    @field_validator("plain_template")
    @classmethod
    def _has_place(cls, template: str | None) -> str | None:
        return _with_place(template)

    @model_validator(mode="after")
    def _one_template(self) -> "AgentConfig":
        if self.chat_template is not None and self.plain_template is not None:
            raise ValueError("chat_template and plain_template are both set; keep one")
        return self

    @property
    def max_logprob_gap(self) -> float:
        """Bound on the mean |engine - trainer| log-prob, nats per token."""
        gap = self.rollout.max_logprob_gap
        return MAX_LOGPROB_GAP[self.dtype] if gap is None else gap


class PromptFileConfig(Section):
    """A file of prompts with answers, or a folder with a data set, and the names of its columns."""

    path: str | None = None
    """`.jsonl`, `.json`, `.parquet`, or a folder as Hugging Face's datasets library has it."""
    split: str | None = None
    """Of a folder with several."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of messages with role and content. `a.b` is b inside a."""
    answer_key: str = "answer"
    """Column that the verifier compares with: text or a number."""
    id_key: str = "id"
    """Column that names a prompt; without one it is FILE:NUMBER."""
    group_key: str = "group"
    """Column by which accuracy is broken down."""
    template: str | None = None
    """Text around prompts that are one user message; `{prompt}` stands for it."""
    system: str | None = None
    """System message before prompts that are one user message."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """`skip` leaves out rows that are no prompt, and counts them."""

    @field_validator("template")
    @classmethod
    def _has_place(cls, template: str | None) -> str | None:
        return _with_place(template)

    @property
    def columns(self) -> Columns:
        """The names of the columns, as the reader takes them."""
        return Columns(
            prompt=self.prompt_key,
            answer=self.answer_key,
            id=self.id_key,
            group=self.group_key,
            template=self.template,
            system=self.system,
        )


class DataConfig(PromptFileConfig):
    """Training prompts: a generated task, or a file or folder."""

    duplicates: Literal["drop", "keep"] = "drop"
    """What becomes of a prompt that occurs again, word for word."""
    task: Literal["rule_arithmetic"] | None = None
    """The demo's generated prompts."""
    digits: Count = 5
    """Digits of an operand of `rule_arithmetic`."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        if (self.task is None) == (self.path is None):
            raise ValueError("exactly one of task and path is needed; set the other one to null")
        return self


class RewardConfig(Section):
    """How a response is scored, by worker processes of each agent's leader. Without a valid score it is left
    out of every mean and earns no advantage."""

    verifier: str | dict[str, float] = "exact"
    """One of docs/rewards.md, a function of your own as `package.module:function`, or the weights of several
    as `{NAME: WEIGHT}`."""
    range: Annotated[tuple[float, float], Field(strict=False)] = (0.0, 1.0)
    """Smallest and largest score that the verifier gives."""
    workers: Count = 2
    """Responses that are scored at the same time."""
    deadline_seconds: Positive = 10.0
    """Of one response; what takes longer is a failure of the verifier."""
    memory_mb: Annotated[int, Field(ge=128)] = 512
    """Of one worker; what takes more is a failure of the verifier."""
    on_failure: Literal["mask", "zero"] = "mask"
    """What a response gets that the verifier failed on: no valid score, or the smallest one."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """What a response gets that was cut at its token limit: the verifier's score, the smallest, or none."""
    overlong_buffer: CountOrZero = 0
    """Over so many tokens before the limit, rewards of training responses fall by `overlong_penalty`; 0: none
    do."""
    overlong_penalty: Positive = 1.0
    """What a response at the limit loses; no reward falls below the smallest."""

    @field_validator("range")
    @classmethod
    def _ordered(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if bounds[0] >= bounds[1]:
            raise ValueError("does not rise; write it as [smallest, largest]")
        return bounds


class BatchConfig(Section):
    """A step's prompts, and how they are cut."""

    prompts: Count = 128
    """Prompts of a step; every agent answers all of them."""
    minibatch_prompts: Count = 64
    """Prompts per optimizer update (P)."""
    microbatch_tokens: Count = 8192
    """Tokens of one forward pass on one process; a longer sequence is alone."""

    @property
    def minibatches(self) -> int:
        """Optimizer updates per source of responses in a step."""
        return self.prompts // self.minibatch_prompts


class ExchangeConfig(Section):
    """How trajectories travel between agents."""

    ids: Literal["auto", "never"] = "auto"
    """`auto`: agents of one tokenizer exchange the sampled ids; `never`: always text."""
    over_long: Literal["drop", "truncate"] = "drop"
    """A response that is longer than the learner's limit in the learner's tokens."""
    keep_stop: bool = True
    """False leaves the stop token out of every view, as the authors' code does."""
    keep_steps: Count = 3
    """Steps whose pool files stay on disk; those since the newest checkpoint stay in any case."""
    timeout_minutes: Annotated[float, Field(ge=0.1, le=100_000)] = 60.0
    """Longest wait for the slowest agent, and longest stay of a process in one phase of a step."""


class BenchmarkConfig(PromptFileConfig):
    """Problems that every agent is measured on, and how. null: as in training."""

    path: str
    """As `data.path`."""
    prompts: Count | None = None
    """At most so many, the first ones."""
    samples: Count = 1
    """Responses to each prompt (n)."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """1: no limit."""
    top_k: CountOrZero | None = None
    """0: no limit."""
    max_prompt_tokens: Count | None = None
    """A prompt that is longer for any agent is left out for all."""
    max_response_tokens: Count | None = None
    """Of a response."""
    pass_at: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """The k for which pass@k is estimated."""
    verifier: str | dict[str, float] | None = None
    """As `reward.verifier`; its rewards go from 0 to 1."""


HELD_OUT = ("sampled", "greedy")
"""How held-out prompts are measured: at the rollout's settings, and greedily."""


class EvaluationConfig(Section):
    """Accuracy during training and by `hacpo eval`, on held-out prompts and benchmarks."""

    every: CountOrZero = 0
    """Steps between evaluations; start and end are always evaluated."""
    prompts: CountOrZero = 1024
    """Held-out prompts of a task, or at most so many of `path`; 0: none."""
    path: str | None = None
    """Held-out prompts for `data.path`, in columns of the same names. They are measured as `sampled` (one
    response at the rollout's settings) and `greedy`."""
    split: str | None = None
    """Of `path`, as `data.split`."""
    benchmarks: dict[KeyName, BenchmarkConfig] = {}
    """Further measurements by name; docs/evaluation.md."""
    keep_responses: bool = False
    """Also write the text of every response to the files of single problems."""


class CheckpointConfig(Section):
    """What is saved, so that a run can go on: `hacpo launch --resume`."""

    every: CountOrZero = 50
    """Steps between checkpoints of all agents; the last step is saved too. 0: none."""
    keep_last: Count = 2
    """How many stay."""
    keep_every: CountOrZero = 0
    """Those of every so many steps stay as well; 0: none."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory."""
    on_error: Literal["stop", "continue"] = "stop"
    """What the run does when one cannot be written, as on a full disk. Earlier ones stay."""


class DebugConfig(Section):
    """Parts of a run alone."""

    rollout_only: bool = False
    """Sample and score with the models as they are; nothing is trained."""
    replay: str | None = None
    """Folder of another run whose responses are trained on instead of new ones."""


class ChecksConfig(Section):
    """When a run stops by itself."""

    on_agent_loss: Literal["stop", "continue"] = "stop"
    """What becomes of the others when an agent's process dies or hangs: `continue` trains on without it."""
    silent_seconds: Annotated[float, Field(ge=15)] = 60.0
    """A process that gives no sign of life for so long is taken for dead; they give one every 5 seconds."""

    max_nonfinite_updates: Count = 3
    """Updates in a row with a non-finite loss or gradient norm; each is skipped."""
    max_logprob_gap_steps: Count = 3
    """Steps in a row above `rollout.max_logprob_gap`."""


class ReportConfig(Section):
    """What is written beside metrics.jsonl."""

    rollout_samples: CountOrZero = 4
    """Responses written to samples.jsonl per step."""
    tensorboard: bool = True
    """Event files in AGENT/tensorboard/."""
    wandb: bool = False
    """Weights & Biases; needs the extra `wandb`."""
    entropy: bool = False
    """Also the model's entropy on its own responses; computed with the old log-probs."""
    gradient_cosine_every: CountOrZero = 0
    """Steps between measurements of the angle between own and cross gradients, which keep a float32 gradient
    per source in memory; 0: never."""


class RunConfig(Section):
    """A whole run: n agents that train each other. The order of `agents` numbers them."""

    run: RunSection
    agents: dict[KeyName, AgentConfig] = Field(min_length=1)
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    checks: ChecksConfig = ChecksConfig()
    debug: DebugConfig = DebugConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, raw: Any) -> Any:
        """Complete each agent's `optimizer` and `rollout` from the run's sections."""
        if not isinstance(raw, dict) or not isinstance(raw.get("agents"), dict):
            return raw
        agents = {name: _inherited(agent, raw) for name, agent in raw["agents"].items()}
        return {**raw, "agents": agents}

    @property
    def path(self) -> Path:
        """The run's folder."""
        return Path(self.run.dir) / self.run.name

    def with_models(self, agent: str, folders: Sequence[str]) -> tuple["RunConfig", list[str]]:
        """The run with an agent for each of `folders` in place of `agent`, like it but for the model; and
        their names, numbered if there are several (no agent's own name has a dot)."""
        names = [f"{agent}.{i}" for i in range(1, len(folders) + 1)] if len(folders) > 1 else [agent]
        settings = self.agents[agent]
        new = {name: settings.model_copy(update={"model": f}) for name, f in zip(names, folders, strict=True)}
        others = {name: other for name, other in self.agents.items() if name != agent}
        return self.model_copy(update={"agents": {**new, **others}}), names

    def longest(self, agent: str) -> int:
        """Tokens of the longest sequence that an agent's engine may have to generate."""
        benchmarks = (self.benchmark_tokens(name, agent) for name in self.evaluation.benchmarks)
        return max(self.agents[agent].rollout.max_tokens, *benchmarks, 0)

    def benchmark_tokens(self, name: str, agent: str) -> int:
        """Tokens of the longest sequence of a benchmark."""
        benchmark, rollout = self.evaluation.benchmarks[name], self.agents[agent].rollout
        prompt = benchmark.max_prompt_tokens or rollout.max_prompt_tokens
        return prompt + (benchmark.max_response_tokens or rollout.max_response_tokens)

    def server_seed(self, agent: str) -> int:
        """Of an agent's first rollout server; the others count on."""
        return self.run.seed + 1000 * self.names.index(agent)

    @property
    def names(self) -> list[str]:
        """The agents' names in order; an agent's place is its number as learner k and source j."""
        return list(self.agents)


INHERITED = ("optimizer", "rollout")
"""Sections of which an agent may override single keys."""


def _inherited(agent: Any, raw: dict[str, Any]) -> Any:
    if not isinstance(agent, dict):
        return agent
    completed = dict(agent)
    for section in INHERITED:
        shared, own = raw.get(section, {}), agent.get(section, {})
        completed[section] = _merged(shared, own)
    return completed


def _merged(shared: Any, own: Any) -> Any:
    """`own` keys over `shared` ones, section by section."""
    if not isinstance(shared, dict) or not isinstance(own, dict):
        return own
    return {**shared, **{key: _merged(shared.get(key), value) for key, value in own.items()}}
