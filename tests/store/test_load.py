"""`stepwell.load`: every kind of reference, parts, keys, slices, foreign files."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stepwell
from stepwell.errors import CheckpointNotFound, ConfigError, CorruptData, FormatError, KeyMismatch, StepwellError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root") / "run"
    with stepwell.open(folder) as store:
        for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan")), (10, 0.3)):
            state = {
                "model": {"a.weight": torch.full((4, 6), float(step)), "b": torch.arange(5)},
                "optimizer": {0: {"m": torch.ones(3)}},
                "step": step,
            }
            store.save(step, state, metrics={"loss": loss}, tags=["mid"] if step == 2 else []).wait()
    return folder


@pytest.mark.parametrize(
    ("select", "step"),
    [("", 10), ("@latest", 10), ("@2", 2), ("@best:loss", 2), ("@best:max:loss", 1), ("@mid", 2)],
)
def test_references_choose(run: Path, select: str, step: int) -> None:
    assert stepwell.load(f"{run}{select}")["step"] == step


@pytest.mark.parametrize("select", ["@7", "@best:acc", "@nothing"])
def test_references_to_nothing_say_what_there_is(run: Path, select: str) -> None:
    with pytest.raises(CheckpointNotFound, match="10"):
        stepwell.load(f"{run}{select}")


def test_a_whole_state_has_its_types(run: Path) -> None:
    state = stepwell.load(run)
    assert list(state) == ["model", "optimizer", "step"]
    assert torch.equal(state["model"]["a.weight"], torch.full((4, 6), 10.0))
    assert list(state["optimizer"]) == [0]


def test_one_part_comes_without_its_name(run: Path) -> None:
    model = stepwell.load(run, part="model")
    assert list(model) == ["a.weight", "b"]


def test_keys_choose_tensors(run: Path) -> None:
    assert list(stepwell.load(run, part="model", keys="*.weight")) == ["a.weight"]


def test_dtype_changes_floating_point_only(run: Path) -> None:
    model = stepwell.load(run, part="model", dtype=torch.bfloat16)
    assert model["a.weight"].dtype == torch.bfloat16 and model["b"].dtype == torch.int64


def test_a_step_folder_works_wherever_it_was_copied(run: Path, tmp_path: Path) -> None:
    [folder] = run.glob("step-000000002*")
    for name in (folder.name, "my favourite [1]"):
        shutil.copytree(folder, tmp_path / name)
        assert stepwell.load(tmp_path / name)["step"] == 2


def test_a_run_can_be_moved_and_linked_to(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert stepwell.load(tmp_path / "link@2")["step"] == 2


def test_touched_files_change_no_order(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run").glob("step-000000001*/*"):
        os.utime(path, (2e9, 2e9))
    assert stepwell.load(tmp_path / "run")["step"] == 10


def test_slices_are_what_torch_says(tmp_path: Path) -> None:
    rows = torch.arange(8_000_000, dtype=torch.int32).reshape(4000, 2000)
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"model": {"w": rows, "v": torch.arange(10)}}).wait()
    got = stepwell.load(tmp_path / "run", part="model", keys={"w": slice(100, 150), "v": slice(2, 4)})
    assert torch.equal(got["w"], rows[100:150]) and torch.equal(got["v"], torch.arange(2, 4))
    got = stepwell.load(tmp_path / "run", keys={"model.w": (slice(10, 20), slice(5, 9))}, dtype=torch.float32)
    assert torch.equal(got["model.w"], rows[10:20, 5:9])
    with pytest.raises(KeyMismatch, match="nope"):
        stepwell.load(tmp_path / "run", keys={"nope": slice(1)})
    with pytest.raises(ConfigError, match="step 1"):
        stepwell.load(tmp_path / "run", keys={"model.w": slice(0, 10, 2)})


def test_a_plain_folder_of_safetensors_is_a_checkpoint(tmp_path: Path) -> None:
    weights = {"w": torch.randn(50, 40), "b": torch.randn(40).to(torch.bfloat16), "empty": torch.zeros(0, 3)}
    save_file(weights, tmp_path / "model.safetensors")
    before = sorted(tmp_path.rglob("*"))
    for ref in (tmp_path, tmp_path / "model.safetensors"):
        got = stepwell.load(ref)
        assert got.keys() == weights.keys()
        assert all(torch.equal(got[k], weights[k]) and got[k].dtype == weights[k].dtype for k in weights)
    assert torch.equal(stepwell.load(tmp_path, keys={"w": slice(3, 9)})["w"], weights["w"][3:9])
    assert list(stepwell.load(tmp_path, keys=["b"])) == ["b"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_split_model_follows_its_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"other": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert sorted(stepwell.load(tmp_path)) == ["a", "b"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptData, match="model-00002-of-00002"):
        stepwell.load(tmp_path)


def wrong_inputs(folder: Path) -> dict[str, tuple[Path, str]]:
    """Case A23: each is refused with its path and its real reason."""
    cases = {
        "pickle": (folder / "pickle.safetensors", "pickle"),
        "torch.save": (folder / "torch.safetensors", "zip|torch.save"),
        "empty file": (folder / "empty.safetensors", "empty"),
        "text": (folder / "text.safetensors", "text|header"),
        "short": (folder / "short.safetensors", "truncated|short|bytes"),
        "link to nothing": (folder / "dangling", "link to nothing"),
        "no such path": (folder / "nowhere", "no such file"),
        "empty folder": (folder / "void", "neither a run"),
    }
    (folder / "pickle.safetensors").write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a": torch.ones(2)}, folder / "torch.safetensors")
    (folder / "empty.safetensors").touch()
    (folder / "text.safetensors").write_text("these are the weights you are looking for\n" * 3)
    save_file({"a": torch.ones(100)}, folder / "short.safetensors")
    os.truncate(folder / "short.safetensors", 300)
    (folder / "dangling").symlink_to(folder / "gone")
    (folder / "void").mkdir()
    return cases


def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    for name, (path, reason) in wrong_inputs(tmp_path).items():
        with pytest.raises((FormatError, CheckpointNotFound), match=f"(?i){reason}") as caught:
            stepwell.load(path)
        assert str(path) in str(caught.value), name


def test_a_save_that_was_never_committed_is_refused(run: Path, tmp_path: Path) -> None:
    [folder] = run.glob("step-000000002*")
    shutil.copytree(folder, tmp_path / folder.name)
    (tmp_path / folder.name / "manifest.json").unlink()
    with pytest.raises(FormatError, match="never committed"):
        stepwell.load(tmp_path / folder.name)


def test_nothing_in_a_checkpoint_is_ever_executed(tmp_path: Path) -> None:
    """Case D13: a pickle in the place of any file is refused, never run."""
    touched = tmp_path / "touched"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (touched,))

    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"w": torch.ones(3), "odd": Odd(3)}).wait()
    with pytest.raises(stepwell.PickleRefused, match="Odd"):
        stepwell.load(tmp_path / "run")
    assert stepwell.load(tmp_path / "run", allow_pickle=True)["odd"].value == 3
    [folder] = (tmp_path / "run").glob("step-*")
    for file in folder.iterdir():
        kept = file.read_bytes()
        file.write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(StepwellError):
            stepwell.load(tmp_path / "run")
        file.write_bytes(kept)
    assert not touched.exists()


class Odd:
    """A class with no other way to be saved than a pickle."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize("name", ["a b", "a[1]", "lr=1e-3", "模型", "~x"])
def test_paths_that_shells_and_globs_trip_over(tmp_path: Path, name: str) -> None:
    """Case C22."""
    (tmp_path / name).mkdir()
    with stepwell.open(tmp_path / name / "run") as store:
        store.save(1, {"w": torch.ones(3)}).wait()
    assert "w" in stepwell.load(str(tmp_path / name / "run") + "/")
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_a_relative_path_is_fixed_when_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = stepwell.open("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.save(1, {"w": torch.ones(3)}).wait()
    store.close()
    assert stepwell.load(tmp_path / "run")["w"].sum() == 3


def test_a_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with stepwell.open("~/run") as store:
        store.save(1, {"w": torch.ones(3)}).wait()
    assert "w" in stepwell.load("~/run")


def test_a_run_whose_parent_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        stepwell.open(tmp_path / "typo" / "run")


def test_a_read_only_tree_loads_for_anyone(run: Path, tmp_path: Path) -> None:
    """Case C15."""
    shutil.copytree(run, tmp_path / "run")
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert stepwell.load(tmp_path / "run")["step"] == 10
    for path in paths:
        path.chmod(0o755)
