"""What a run is: YAML in, one frozen `RunConfig` out, every mistake one line. Importable without torch."""

from megatron_hacpo.config.check import check
from megatron_hacpo.config.load import ConfigError, dump, load, resolve
from megatron_hacpo.config.method import AlgorithmConfig
from megatron_hacpo.config.schema import (
    AgentConfig,
    BatchConfig,
    CheckpointConfig,
    ChecksConfig,
    DataConfig,
    EvaluationConfig,
    ExchangeConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "ChecksConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "ExchangeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "check",
    "dump",
    "load",
    "resolve",
]
