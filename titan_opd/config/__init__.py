"""The configuration of a run: the TOML schema, loading, command-line overrides, checks."""

from titan_opd.config.load import changed_options, dump_toml, load_config
from titan_opd.config.objective import Objective
from titan_opd.config.schema import Config, SamplingConfig

__all__ = ["Config", "Objective", "SamplingConfig", "changed_options", "dump_toml", "load_config"]
