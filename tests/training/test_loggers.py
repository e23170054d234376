"""Trackers are Lightning loggers that the settings name."""

from typing import Any

from lightning.pytorch.loggers import Logger
from support import command, rows, tiny, train

LOGGED: list[tuple[int | None, dict[str, Any]]] = []


class Kept(Logger):
    """A tracker that keeps its rows, or refuses to open."""

    def __init__(self, name: str, opens: bool = True, tags: Any = None) -> None:
        super().__init__()
        self.given, self.opens, self.tags = name, opens, tags

    @property
    def name(self) -> str:
        return self.given

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if not self.opens:
            raise ConnectionError("no route to the server\nhost is down")
        LOGGED.append((None, {"name": self.given, "tags": self.tags, **params}))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        LOGGED.append((step, metrics))


PROBE = (f"+logger.kept._target_={__name__}.Kept", f"allow_targets=[{__name__}]")


def test_a_users_own_logger_gets_the_settings_and_all_rows_like_lightnings(tmp_path):
    LOGGED.clear()
    own = ("+logger.kept.name='{variant} of {experiment}'", "+logger.kept.tags.seed='{seed}'")
    run = train(tmp_path, "logger=[csv]", *PROBE, *own)
    (table,) = (run / "trackers").rglob("metrics.csv")
    assert "val/loss" in table.read_text().splitlines()[0].split(",")
    (_, settings), *logged = LOGGED
    assert (settings["name"], settings["tags"]) == ("mha of scratch", {"seed": "1"})
    assert settings["d_model"] == 16
    numbers = [
        (row.pop("step"), {name: value for name, value in row.items() if name != "time"})
        for row in rows(run)
        if "sample/text" not in row
    ]
    assert logged == numbers


def test_a_tracker_that_cannot_be_opened_ends_the_run_in_one_line(tmp_path, capfd):
    broken = (*PROBE, "+logger.kept.name=x", "+logger.kept.opens=false")
    assert command(tmp_path, *tiny(tmp_path, *broken)) == 2
    assert capfd.readouterr().err.splitlines() == [
        "error: logger: kept cannot be opened (no route to the server); leave it out"
    ]
