"""The commands on a checkpoint of two ranks, and on one whose ranks lie on two tiers."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from stepwell.format.records import Manifest, decode, encode
from tests.cli.helpers import Cli, flip, folder_of
from tests.jobs import ended

SAVE = """
with stepwell.open(sys.argv[1]) as store:
    store.save(4, {"model": {f"rank{rank}.w": torch.full((400_000,), float(rank))}, "mine": rank}).wait()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "run"
    for done in ended(SAVE, folder):
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def pair(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "near" / "pair"))


@pytest.mark.slow
def test_all_ranks_are_shown_verified_and_copied(cli: Cli, pair: Path, tmp_path: Path) -> None:
    shown = cli("show", pair, "--tensors", "--json").json
    assert shown["world"] == 2 and [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert sorted(tensor["name"] for tensor in shown["tensors"]) == ["model.rank0.w", "model.rank1.w"]
    assert cli("cp", pair, tmp_path / "copy").code == 0
    assert cli("verify", pair, tmp_path / "copy").code == 0
    flip(folder_of(pair, 4) / "model.rank00001-of-00002.safetensors", 1 << 20)
    [one] = cli("verify", pair, "--json").json["refs"][0]["checked"]
    [problem] = one["problems"]
    assert problem["block"] == 1 and problem["tensors"] == ["rank1.w"]
    assert cli("cp", pair, tmp_path / "second").code == 1


@pytest.mark.slow
def test_a_checkpoint_that_is_whole_only_on_two_tiers_together_is_copied_whole(
    cli: Cli, pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Path(shutil.copytree(pair, tmp_path / "far" / "pair"))
    for run, gone in ((pair, 1), (far, 0)):
        for path in folder_of(run, 4).glob(f"*rank*{gone}[.-]*"):
            if path.name.startswith(f"rank-0000{gone}") or f"rank0000{gone}-of" in path.name:
                path.unlink()
        manifest = folder_of(run, 4) / "manifest.json"
        whole = decode(manifest.read_bytes(), Manifest)
        kept = msgspec.structs.replace(whole, covers=[1 - gone], digests=[whole.digests[1 - gone]])
        manifest.write_bytes(encode(kept))
    config = tmp_path / "stepwell.toml"
    config.write_text(
        f'[[tier]]\nname = "near"\ndriver = "file"\npath = "{pair.parent}"\n'
        f'[[tier]]\nname = "far"\ndriver = "file"\npath = "{far.parent}"\n'
    )
    monkeypatch.setenv("STEPWELL_CONFIG", str(config))
    monkeypatch.chdir(tmp_path)
    assert cli("ls", "pair", "--json").json["listed"][0]["checkpoints"][0]["state"] == "partial"
    assert cli("verify", "pair").code == 0
    assert cli("cp", "pair@4", tmp_path / "copy").code == 0
    assert cli("ls", tmp_path / "copy", "--json").json["listed"][0]["checkpoints"][0]["state"] == "complete"
    [one] = cli("verify", tmp_path / "copy", "--json").json["refs"][0]["checked"]
    assert one["problems"] == [] and one["files"] == len(list(folder_of(tmp_path / "copy", 4).iterdir()))
