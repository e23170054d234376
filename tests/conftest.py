"""What pytest reads before it starts its workers; the fixtures are in shared_fixtures.py."""

import gc
import os

import pytest

# Tests that leave the device open take the CPU, also where there is a GPU. Torch reads this when it
# is imported, in this process and in those that tests start; to test on a GPU, name it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures where tests run: what they import would delay the workers by 8 seconds."""
    has_workers = config.getoption("numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput") or not has_workers:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_finish() -> None:
    """Let garbage collection pass over all that is imported: that takes a seventh of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
