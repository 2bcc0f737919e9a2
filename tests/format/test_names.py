import pytest

from stepwell.errors import ConfigError
from stepwell.format.names import Attempt, check_run_name, epoch_file, epoch_of, rank_file, rank_of


def test_a_folder_name_says_step_epoch_and_call() -> None:
    attempt = Attempt(epoch=7, call=31, step=1200)
    assert attempt.folder == "step-000001200.7-31"
    assert Attempt.parse(attempt.folder) == attempt


def test_steps_beyond_nine_digits_keep_their_number() -> None:
    attempt = Attempt(epoch=1, call=1, step=12_345_678_901)
    assert Attempt.parse(attempt.folder) == attempt


@pytest.mark.parametrize(
    "name", ["step-12.1-1", "step-000000001", "step-000000001.1-1.tmp", "epochs", "checkpoint-100"]
)
def test_other_folders_are_no_attempts(name: str) -> None:
    assert Attempt.parse(name) is None


def test_attempts_are_ordered_by_when_they_began() -> None:
    first, second = Attempt(epoch=1, call=9, step=900), Attempt(epoch=2, call=1, step=100)
    assert sorted([second, first]) == [first, second]


def test_rank_and_epoch_files_are_read_back() -> None:
    assert rank_of(rank_file(31)) == 31
    assert rank_of("manifest.json") is None
    assert epoch_of(epoch_file(7).split("/")[1]) == (7, "json")
    assert epoch_of(epoch_file(7, "seen.json").split("/")[1]) == (7, "seen.json")
    assert epoch_of("7.json") is None


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "a\0b", "x" * 300, "é" * 100])
def test_names_that_cannot_be_a_folder_are_refused_with_a_reason(run: str) -> None:
    with pytest.raises(ConfigError):
        check_run_name(run)


@pytest.mark.parametrize("run", ["llama-sft", "lr=1e-3", "a[1]", "a b", "~", "模型"])
def test_ordinary_names_pass(run: str) -> None:
    assert check_run_name(run) == run
