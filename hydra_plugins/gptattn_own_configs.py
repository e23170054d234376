"""Lets `attn/mine.yaml` beside where a command is typed be chosen as `attn=mine`."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class OwnConfigs(SearchPathPlugin):
    """Adds the working directory to the end of Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("working directory", f"file://{Path.cwd()}")
