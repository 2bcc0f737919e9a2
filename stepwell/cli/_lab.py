"""The commands `stepwell lab …` and their options; what they do is in `_simulations`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepwell.cli._output import Json, reported

lab_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Compare configs before they are used, and plan intervals."
)
SpeedsFile = Annotated[Path, typer.Option("--speeds", metavar="FILE", help="How fast the tiers are; see lab probe.")]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="What the job may use of a node's; else of this one's."),
]
Failures = Annotated[
    list[str] | None,
    typer.Option(
        "--failure", metavar="KIND=TIME",
        help="Mean time between failures that a copy must survive: process=2d, reboot=9d, node-loss=30d.",
    ),
]  # fmt: skip


@lab_app.command("simulate")
@reported
def lab_simulate(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG", help="Config files, to be compared.")],
    speeds: SpeedsFile,
    trace: Annotated[
        list[Path] | None, typer.Option("--trace", metavar="FILE", help="A recorded trace; once for each rank.")
    ] = None,
    synthetic: Annotated[
        str | None, typer.Option("--synthetic", metavar="WHAT", help="A made-up workload: training,… or fleet,…")
    ] = None,
    failure: Failures = None,
    memory: Memory = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn at random.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw it, as FILE.svg.")] = None,
    json: Json = False,
) -> None:
    """Play a workload against config files, in virtual time.

    It shows side by side what each config would have done. The real mover, policies, host memory and commits run,
    on simulated tiers that are as fast as --speeds says; no byte moves, and none of the paths in the config is
    touched. Shown are the time that saves block, how long it takes until a checkpoint is on each tier, bytes moved,
    where restores and loads read from, and what a failure costs. --failure weighs that; with --synthetic training
    such failures also happen. A trace is recorded by STEPWELL_TRACE=FILE or trace = "FILE" in the config.

    \b
    Made-up workloads, with what they assume where nothing is said:
      training,state=30GB,every=100,iteration=1s,saves=20,ranks=1,restart=60s
      fleet,models=20,state=14GB,requests=200,gap=30s,skew=1
    \b
    Examples:
      stepwell lab simulate cluster.toml --speeds speeds.toml --trace trace.jsonl
      stepwell lab simulate a.toml b.toml --speeds speeds.toml --synthetic training,state=80GB,every=50
      stepwell lab simulate a.toml b.toml --speeds speeds.toml --synthetic fleet --plot fleet.svg
    """
    from stepwell.cli import _simulations

    _simulations.simulate(
        configs, speeds, trace or [], synthetic, failure or [], memory=memory, seed=seed, plot=plot, as_json=json
    )


@lab_app.command("plan")
@reported
def lab_plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file: its tiers count.")],
    speeds: SpeedsFile,
    state: Annotated[str, typer.Option("--state", metavar="SIZE", help="Of a checkpoint, all ranks of a node.")],
    iteration: Annotated[str, typer.Option("--iteration", metavar="TIME", help="Of one step of training.")],
    failure: Failures = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="On the node; each copies its part.")] = 1,
    memory: Memory = None,
    restart: Annotated[
        str, typer.Option("--restart", metavar="TIME", help="From a failure until training could restore.")
    ] = "1min",
    interference: Annotated[
        str, typer.Option("--interference", metavar="PERCENT", help="What training slows down while a flush runs.")
    ] = "1%",
    json: Json = False,
) -> None:
    """Recommend how often to save and to flush.

    From the size of the state, the tiers' speeds and the rates of failures. A save costs training what it blocks,
    not what it takes to become durable; what flushing takes only bounds how often it can be done. Intervals are
    those of the least expected time: Young and Daly for one tier, in the multi-level form of Moody et al. and Di et
    al. for several. docs/lab.md has the model.

    \b
    Example:
      stepwell lab plan cluster.toml --speeds speeds.toml --state 80GB --iteration 1.2s \\
          --failure process=2d --failure node-loss=20d
    """
    from stepwell.cli import _simulations

    _simulations.plan(
        config, speeds, state, iteration, failure or [], ranks=ranks, memory=memory, restart=restart,
        interference=interference, as_json=json,
    )  # fmt: skip


@lab_app.command("probe")
@reported
def lab_probe(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file whose tiers are measured.")],
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Of the file that is written and read.")] = "1GiB",
    json: Json = False,
) -> None:
    """Measure how fast this machine's tiers are.

    Printed is the file that --speeds takes. In each tier's folder a file is written, read and removed again. Run it
    on a node of the cluster; what others do there meanwhile is part of the answer.

    \b
    Example:
      stepwell lab probe cluster.toml > speeds.toml
    """
    from stepwell.cli import _simulations

    _simulations.probe(config, size, as_json=json)
