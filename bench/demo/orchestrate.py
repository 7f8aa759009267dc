"""The whole demo: run it, judge it, report it. What the command `python -m bench.demo` calls."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tensorhub.protocol.errors import UsageError

from .checks import judge
from .director import Director
from .events import DIRECTOR, EventReader
from .live import Display
from .logs import EventLog, now
from .parent import ended_in_order
from .processes import Processes, ProcessFailed
from .progress import Progress
from .report import show, write_report
from .summary import summarise

LOOK_S = 0.1
MAX_S = 540.0  # of the whole run; a minute or two are usual
MAX_WITH_ENGINES_S = 900.0  # three minutes are usual
MIN_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user can choose."""

    steps: int = 100
    seed: int = 0
    rollouts: int = 3
    engine: str = ""  # "vllm": that generates, and FSDP2 trains; "": the demo's own code
    updates: bool = True  # False: rollouts keep their first version for ever
    out: Path = Path("out/demo")


def usual(engine: str) -> Options:
    """What it is where the user chooses nothing but the engine."""
    return Options(engine=engine, rollouts=2, out=Path("out/demo-vllm")) if engine else Options()


def run_demo(options: Options) -> int:
    """Run it, write the report, print a table. Returns the exit status: 0 if every check holds."""
    if options.steps < MIN_STEPS or options.rollouts < 2:
        raise UsageError(f"the demo needs at least {MIN_STEPS} steps, and 2 rollouts, of which one is killed")
    console = Console()
    console.print(_introduction(options), highlight=False, soft_wrap=True)
    events = _empty_folder(options.out / "events")
    logs = _empty_folder(options.out / "logs")
    try:
        with ended_in_order():
            seconds = _run(options, console, events, logs)
    except ProcessFailed as error:
        console.print("[red]the demo failed:[/]", escape(str(error)), highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process of the demo was ended")
        return 130
    happened = EventReader(events).new()
    found = None
    if options.engine:
        from .vllm.judge import likelihoods

        console.print("transformers is asked what the engines should have answered")
        found = likelihoods(happened, options.out / "policy", options.out / "versions")
    summary = summarise(
        happened,
        steps=options.steps,
        seed=options.seed,
        updates=options.updates,
        seconds=seconds,
        engine=options.engine,
        likelihoods=found,
    )
    checks = judge(summary)
    page = write_report(options.out, summary, checks, happened)
    show(console, summary, checks, page)
    return 0 if all(check.holds for check in checks) else 1


def _run(options: Options, console: Console, events: Path, logs: Path) -> float:
    began, most_s = now(), MAX_WITH_ENGINES_S if options.engine else MAX_S
    reader, progress = EventReader(events), Progress(options.steps)
    with EventLog(events, DIRECTOR) as log, Processes(logs) as processes, Display(progress, console) as display:
        director = _director(options, processes, progress, events, log)
        director.start(seed=options.seed, rollouts=options.rollouts, updates=options.updates)
        while not director.is_over:
            if now() > began + most_s:
                raise ProcessFailed(f"it did not end within {most_s:.0f} s; what happened is in {events}")
            time.sleep(LOOK_S)
            progress.take(reader.new())
            director.direct()
            display.draw()
    return now() - began


def _director(options: Options, processes: Processes, progress: Progress, events: Path, log: EventLog) -> Director:
    if not options.engine:
        return Director(processes, progress, events, log)
    from .vllm.director import EngineDirector
    from .vllm.model import make

    policy, versions = _empty_folder(options.out / "policy"), _empty_folder(options.out / "versions")
    make(policy)
    return EngineDirector(processes, progress, events, log, policy=policy, versions=versions)


def _introduction(options: Options) -> str:
    updates = "" if options.updates else ", [bold]without weight updates[/]: their reward must stay where it is"
    if options.engine:
        return (
            f"two ranks of FSDP2 and {options.rollouts} vLLM engines, each a process on the CPU, learn in "
            f"{options.steps} steps to put letters in order, with a small Llama of random weights{updates}\n"
            "meanwhile an engine is killed, one joins late, both ranks of the trainer are killed and filled "
            "again from the engines, and the reference server is killed and restarted\n"
            "this takes a few minutes on two cores, the first half of one until vLLM has started"
        )
    return (
        f"a reference server, a trainer and {options.rollouts} rollouts, each a process, learn in "
        f"{options.steps} steps to put letters in order{updates}\n"
        "meanwhile one rollout is killed, one joins late, and the reference server is killed and restarted"
    )


def _empty_folder(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
