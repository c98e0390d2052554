"""The YAML file as typed, validated, immutable values: one pydantic model per section."""

from rollmill.config.data import DatasetConfig
from rollmill.config.engine import EmbeddedEngineConfig, EngineConfig
from rollmill.config.evaluation import EvalConfig, EvalDatasetConfig
from rollmill.config.faults import FaultKind, FaultsConfig
from rollmill.config.model import ModelConfig
from rollmill.config.opd import OpdConfig, PrepareConfig, TeacherConfig
from rollmill.config.reward import RewardConfig
from rollmill.config.rollout import FilterConfig, RolloutConfig, RolloutHooks
from rollmill.config.root import Config
from rollmill.config.run import RunConfig, TelemetryConfig
from rollmill.config.sampling import SamplingConfig
from rollmill.config.sft import SftConfig
from rollmill.config.trainer import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    TrainerConfig,
)
from rollmill.config.weights import WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "Config",
    "CriticConfig",
    "DatasetConfig",
    "EmbeddedEngineConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalDatasetConfig",
    "FaultKind",
    "FaultsConfig",
    "FilterConfig",
    "LoraConfig",
    "ModelConfig",
    "OpdConfig",
    "OptimizerConfig",
    "PrepareConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutHooks",
    "RunConfig",
    "SamplingConfig",
    "SftConfig",
    "TeacherConfig",
    "TelemetryConfig",
    "TrainerConfig",
    "WeightsConfig",
]
