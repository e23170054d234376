"""Lets you choose `attn/mine.yaml` in the working directory as `attn=mine`."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

GROUPS = ("attn", "part", "position", "block", "model", "data", "tokenizer", "optim")
GROUPS += ("recipe", "experiment")


class OwnConfigs(SearchPathPlugin):
    """Adds the working directory to Hydra's search path if it has YAML files of a config group."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        here = Path.cwd()
        # Only then: for --help, Hydra walks through all folders below, such as those of runs.
        if any(True for group in GROUPS for _ in here.glob(f"{group}/*.yaml")):
            search_path.append("working directory", f"file://{here}")
