"""The commands and their options. What they need is imported only when they run, so that --help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import stepwell
from stepwell.cli import _output
from stepwell.cli._host import host_app
from stepwell.cli._lab import lab_app
from stepwell.cli._output import Json, reported
from stepwell.errors import ConfigError

app = typer.Typer(
    name="stepwell",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main() -> None:
    """The entry point of the command `stepwell`."""
    try:
        app(prog_name="stepwell")
    except OSError as error:  # of --help and --version: commands tell theirs
        _output.tell(error)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepwell {stepwell.__version__}")
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; so does STEPWELL_DEBUG=1.")] = False,
) -> None:
    """Look at model checkpoints, check, copy and delete them.

    A checkpoint is named by its run and what is wanted of it, or by a plain path:

    \b
      ckpts/sft@1200             the checkpoint of step 1200
      ckpts/sft@latest           the newest one
      ckpts/sft@best:loss        the one with the smallest loss; @best:max:acc: the largest acc
      ckpts/sft@release          the newest one with this tag
      ckpts/sft@..5000           a range of steps, where several may be meant; @100..200, @100..
      ckpts/sft/step-000001200.1-12, models/bert        a step folder; a folder of safetensors files

    A name that is no path is a run on the tiers of the config file (STEPWELL_CONFIG or /etc/stepwell.toml).
    """
    if debug:
        _output.set_debug()


@app.command()
@reported
def ls(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="Folders or runs; without one, this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """List the runs under a folder, or the checkpoints of a run.

    Without a PATH: what is on the tiers of the config file if there is one, else what is in this folder. Of a run,
    each checkpoint is partial where some of its parts or ranks are not there, and abandoned where training went
    back to an older step; what is left of saves that were never committed is listed apart.

    \b
    Examples:
      stepwell ls
      stepwell ls ckpts/sft
      stepwell ls 'ckpts/sft@1000..' --json
    """
    from stepwell.cli import _ls

    _ls.run(paths or [], json)


@app.command()
@reported
def show(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint; of a run without @, the newest.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint is: parts, ranks, files, metrics, timings, and where it lies.

    \b
    Examples:
      stepwell show ckpts/sft
      stepwell show ckpts/sft@best:loss --tensors
      stepwell show models/bert --json
    """
    from stepwell.cli import _show

    _show.run(ref, tensors, json)


@app.command()
@reported
def verify(
    refs: Annotated[list[str], typer.Argument(metavar="REF", help="Checkpoints, ranges, or whole runs.")],
    json: Json = False,
) -> None:
    """Read every byte and check it against its checksums.

    A run without @ is verified whole, its own records too. What is bad is listed with its file, block and tensors, and
    the exit code is then 1. Of safetensors files that stepwell did not write only the structure can be checked.
    Nothing is changed.

    \b
    Examples:
      stepwell verify ckpts/sft@latest
      stepwell verify ckpts/sft
      stepwell verify 'ckpts/sft@..5000' models/bert --json
    """
    from stepwell.cli import _verify

    _verify.run(refs, json)


@app.command()
@reported
def cp(
    ref: Annotated[str, typer.Argument(metavar="REF", help="What to copy; of a run without @, the newest checkpoint.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder that it goes into; made if need be.")],
    json: Json = False,
) -> None:
    """Copy a checkpoint into another folder or run, verified on the way.

    It goes into DEST under its own name and is committed last, so that a copy that was cut short is never taken for
    a checkpoint. Nothing that is there is replaced. In a run that has had a writer the copy becomes a checkpoint of
    that run. Folders of safetensors files are copied as they are.

    \b
    Examples:
      stepwell cp ckpts/sft@1200 /archive/sft
      stepwell cp 'ckpts/sft@..5000' /archive/sft
      stepwell cp models/bert /local/models
    """
    from stepwell.cli import _change

    _change.cp(ref, dest, json)


@app.command()
@reported
def rm(
    refs: Annotated[list[str], typer.Argument(metavar="REF", help="Checkpoints or ranges of a run; step folders.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be deleted.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also the newest checkpoint of a run.")] = False,
    abandoned: Annotated[bool, typer.Option("--abandoned", help="Only those that a rewind left behind.")] = False,
    by_policy: Annotated[
        bool, typer.Option("--by-policy", help="Only what the config's retain rules let go, and why.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, as a terminal is otherwise.")] = False,
    json: Json = False,
) -> None:
    """Delete checkpoints of a run.

    Ranges mean all checkpoints whose step is in them, abandoned ones too. The newest checkpoint of a run, and the
    newest whole one, stay without --force, and while a writer holds the run. Manifests go first, and the files at
    once after them: whoever reads such a checkpoint on another node may then fail. Folders that stepwell did not
    make are never deleted. With --abandoned a REF may be a whole run: what counts in it stays. So it may with
    --by-policy, which asks the retain rules of the config file, tier by tier; nobody may write the run meanwhile.

    \b
    Examples:
      stepwell rm ckpts/sft@1200
      stepwell rm 'ckpts/sft@..5000' --dry-run
      stepwell rm ckpts/sft/step-000001300.1-13 --yes
      stepwell rm ckpts/sft --abandoned
      stepwell rm sft --by-policy --dry-run
    """
    from stepwell.cli import _change

    if abandoned and by_policy:
        raise ConfigError("--abandoned and --by-policy at once", todo="Give one of them")
    which: Literal["all", "abandoned", "by-policy"] = "by-policy" if by_policy else "abandoned" if abandoned else "all"
    _change.rm(refs, json, dry_run=dry_run, force=force, which=which, yes=yes)


@app.command()
@reported
def rewind(
    ref: Annotated[str, typer.Argument(metavar="REF", help="The checkpoint that the run goes on from.")],
    json: Json = False,
) -> None:
    """Let a run go on from an older checkpoint.

    From then on it is the newest one: it is restored, and saves go on above its step. Later ones are abandoned: they
    are listed, and can be shown, loaded and deleted by their number, but are never chosen, and retention does not
    count them. It holds whether or not anything is saved after it, and is refused while a writer holds the run.

    \b
    Examples:
      stepwell rewind ckpts/sft@1500
      stepwell rewind ckpts/sft@best:loss
    """
    from stepwell.cli import _change

    _change.rewind(ref, json)


@app.command()
@reported
def doctor(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="Folders for checkpoints; without one, this folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what this machine offers, what stepwell makes of it, and why.

    In each PATH a small file is written, read and removed again.

    \b
    Examples:
      stepwell doctor
      stepwell doctor /local/ckpts /lustre/ckpts
    """
    from stepwell.cli import _doctor

    _doctor.run(paths or ["."], json)


@app.command()
@reported
def keep(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint or a range; of a run without @, the newest.")],
    undo: Annotated[bool, typer.Option("--undo", help="Keep it no longer.")] = False,
    json: Json = False,
) -> None:
    """Keep a checkpoint from being deleted by retention.

    Works while training writes, on any node; it needs permission to write in RUN/notes. What forks keep stays kept.

    \b
    Examples:
      stepwell keep ckpts/sft@1200
      stepwell keep ckpts/sft@1200 --undo
    """
    from stepwell.cli import _notes

    _notes.keep(ref, undo, json)


@app.command()
@reported
def tag(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint or a range; of a run without @, the newest.")],
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Tags: words to find it by.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take these tags away.")] = False,
    json: Json = False,
) -> None:
    """Give a checkpoint tags, by which it can then be named.

    \b
    Examples:
      stepwell tag ckpts/sft@1200 release
      stepwell show ckpts/sft@release
      stepwell tag ckpts/sft@1200 release --remove
    """
    from stepwell.cli import _notes

    _notes.tag(ref, names, remove, json)


@app.command()
@reported
def annotate(
    ref: Annotated[str, typer.Argument(metavar="REF", help="A checkpoint or a range; of a run without @, the newest.")],
    values: Annotated[list[str], typer.Argument(metavar="NAME=NUMBER", help="Metrics, such as eval/acc=0.71.")],
    json: Json = False,
) -> None:
    """Add metrics to a checkpoint, such as results of an evaluation.

    \b
    Examples:
      stepwell annotate ckpts/sft@1200 eval/acc=0.71 eval/loss=1.9
      stepwell show ckpts/sft@best:max:eval/acc
    """
    from stepwell.cli import _notes

    _notes.annotate(ref, values, json)


@app.command()
@reported
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run.")],
    tier: Annotated[str | None, typer.Option("--tier", help="Where it must be committed; the last one.")] = None,
    after: Annotated[int | None, typer.Option("--after", help="Leave out steps up to this one.")] = None,
    poll: Annotated[str, typer.Option("--poll", help="Time between two looks, such as 30s.")] = "10s",
    timeout: Annotated[str | None, typer.Option("--timeout", help="End after this time without news.")] = None,
    json: Json = False,
) -> None:
    """Print each checkpoint as it becomes committed, one line each; first those that are there.

    \b
    Examples:
      stepwell watch ckpts/sft --after 1200
      stepwell watch ckpts/sft --timeout 2h --json
    """
    from stepwell.cli import _notes

    _notes.follow(run, tier, after, poll, timeout, json)


config_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Check config files, and describe them to editors."
)
app.add_typer(config_app, name="config")


@config_app.command("check")
@reported
def config_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config file.")],
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Only validate it; leave the machine alone.")] = False,
    json: Json = False,
) -> None:
    """Validate a config file, show each value and where it comes from, and try what it names on this machine.

    In each tier's folder a small file is written, read and removed again. The exit code is 1 if the file has a
    mistake, or names what does not work here.

    \b
    Examples:
      stepwell config check cluster.toml
      stepwell config check /etc/stepwell.toml --no-probe --json
    """
    from stepwell.cli import _config

    _config.check(file, json, probe=not no_probe)


@config_app.command("schema")
@reported
def config_schema() -> None:
    """Print the JSON Schema of config files, for editors.

    \b
    Example:
      stepwell config schema > stepwell.schema.json
    """
    from stepwell.cli import _config

    _config.schema()


app.add_typer(host_app, name="host")
app.add_typer(lab_app, name="lab")
