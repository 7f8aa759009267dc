"""`python -m bench.demo`: an RL run on this machine, with faults, in the terminal; ends in a report."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tensorhub.cli.output import ErrorsAreLines

app = ErrorsAreLines(add_completion=False, pretty_exceptions_enable=False)
NO_TYPE = ""  # of a switch: "<bool>" behind it in the help looks as if it took a value


@app.command()
def demo(
    updates: Annotated[
        bool,
        typer.Option(
            "--updates/--no-updates",
            metavar=NO_TYPE,
            help="Without: rollouts keep their first version, and learn nothing.",
        ),
    ] = True,
    steps: Annotated[
        int | None, typer.Option(help="Training steps; with much fewer it does not learn enough.", show_default="100")
    ] = None,
    rollouts: Annotated[
        int | None, typer.Option(help="Rollout replicas at the start.", show_default="3; engines: 2; large: 8")
    ] = None,
    engine: Annotated[
        str, typer.Option(help='"vllm": vLLM generates and FSDP2 trains, on the CPU (make demo-vllm).')
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Of the policy and of what it is asked.", show_default="0")] = None,
    large: Annotated[
        bool, typer.Option("--large", help="Instead: a model of 1 GiB, 8 rollouts, and a source that is killed.")
    ] = False,
    size: Annotated[int | None, typer.Option(help="With --large: MiB of the model.", show_default="1024")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report.", show_default="out/demo, out/demo-vllm")
    ] = None,
) -> None:
    """The main job: a real RL run on this machine, with faults; ends in a report as HTML and JSON."""
    from importlib.util import find_spec

    from tensorhub.protocol.errors import TensorHubError

    needs: tuple[str, ...] = ("torch", "matplotlib")
    hint = "pip install 'tensorhub[demo]'"
    if engine == "vllm":
        needs, hint = (*needs, "transformers", "vllm"), "make demo-vllm, which installs vLLM for the CPU in .envs/vllm"
    elif engine:
        raise TensorHubError(f"there is no demo with the engine {engine!r}", hint="--engine vllm, or none")
    missing = [name for name in needs if find_spec(name) is None]
    if missing:
        raise TensorHubError(f"the demo needs {' and '.join(missing)}", hint=hint)
    from .large import LargeOptions, run_large
    from .orchestrate import run_demo, usual

    given = {"steps": steps, "rollouts": rollouts, "seed": seed, "size_mib": size, "out": out}
    chosen = {name: value for name, value in given.items() if value is not None}
    foreign = {"steps", "seed"} if large else {"size_mib"}
    if foreign & chosen.keys() or (large and (engine or not updates)):
        raise TensorHubError("--large goes with --size, --rollouts and --out, and --size with nothing else")
    if large:
        raise typer.Exit(run_large(LargeOptions(**chosen)))  # type: ignore[arg-type]
    raise typer.Exit(run_demo(replace(usual(engine), updates=updates, **chosen)))  # type: ignore[arg-type]


if __name__ == "__main__":
    app()
