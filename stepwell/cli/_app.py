"""The commands and their options. What they need is imported only when they run, so that --help is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import stepwell
from stepwell.cli import _output
from stepwell.cli._output import reported

app = typer.Typer(
    name="stepwell",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def main() -> None:
    """The entry point of the command `stepwell`."""
    app(prog_name="stepwell")


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"stepwell {stepwell.__version__}\n")
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, as a terminal is otherwise.")] = False,
    json: Json = False,
) -> None:
    """Delete checkpoints of a run.

    Ranges mean all checkpoints whose step is in them, abandoned ones too. The newest checkpoint of a run, and the
    newest whole one, stay without --force, and while a writer holds the run. Manifests go first, and the files at
    once after them: whoever reads such a checkpoint on another node may then fail. Folders that stepwell did not
    make are never deleted.

    \b
    Examples:
      stepwell rm ckpts/sft@1200
      stepwell rm 'ckpts/sft@..5000' --dry-run
      stepwell rm ckpts/sft/step-000001300.1-13 --yes
    """
    from stepwell.cli import _change

    _change.rm(refs, json, dry_run=dry_run, force=force, yes=yes)


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
