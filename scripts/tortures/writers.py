"""Many starts at one moment."""

import re

from gptattn.runs.folder import RunFolder
from tortures.bench import SETTINGS, VARIANTS, Bench, Result

IN_ONE_FOLDER = 5  # starts into a folder that each of them names
SHORT = ("budget.steps=4", "validation.count=1")


def writers(bench: Bench, count: int, result: Result) -> None:
    """`count` starts, `count` folders; then five into one folder, `count // 10` times."""
    variant = VARIANTS[0]
    begun = [
        bench.start(f"writer_{i}", f"attn={variant}", *SETTINGS, *SHORT, "experiment_name=many")
        for i in range(count)
    ]
    result.tried = count
    codes = [process.wait() for process in begun]
    folders = list((bench.folder / "outputs" / "many").iterdir())
    whole = sum(RunFolder(folder).finished() is not None for folder in folders)
    result.facts |= {"folders": len(folders), "finished": whole}
    result.check(codes == [0] * count, f"exit codes {set(codes)}")
    result.check(
        len(folders) == whole == count, f"{len(folders)} folders, {whole} of them complete"
    )
    for i in range(max(1, count // 10)):
        _into_one(bench, f"one_{i}", result)


def _into_one(bench: Bench, name: str, result: Result) -> None:
    own = (*SETTINGS, *SHORT, f"hydra.run.dir={name}")
    begun = [
        bench.start(f"{name}_{i}", f"attn={VARIANTS[i % len(VARIANTS)]}", *own)
        for i in range(IN_ONE_FOLDER)
    ]
    codes = [process.wait() for process in begun]
    result.check(sorted(codes) == [0] + [6] * (IN_ONE_FOLDER - 1), f"into one folder: {codes}")
    owner = next((p.pid for p, code in zip(begun, codes, strict=True) if code == 0), None)
    for process, code in zip(begun, codes, strict=True):
        if code == 6:
            line = process.complaint()
            busy = re.match(r"error: hydra\.run\.dir: (?:process (\d+)|another process) is", line)
            right = busy is not None and busy.group(1) in (None, str(owner))
            late = "already holds a run" in line
            result.count("refused, naming the process", int(busy is not None and right))
            result.count("refused, the other done already", int(late))
            result.check(right or late, f"into one folder: {line!r}")
    result.check(
        RunFolder(bench.folder / name).finished() is not None,
        "the run that got the folder did not finish",
    )
