"""What is set on a store: by a file, by the keywords of open(), by neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.errors import ConfigError
from stepwell.policies.flush import DropBacklog
from stepwell.settings import ON_PRESSURE, Settings, TierOptions

FILE = """\
on_pressure = "skip"
block_timeout = "3min"
max_unsaved = "2h"

[[tier]]
name = "m"
driver = "memory"

[[tier]]
name = "n"
driver = "memory"
verify_after_flush = "digest"
delete_grace = "5 min"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "c.toml"
    made.write_text(FILE)
    return made


def test_keywords_count_before_the_file_and_the_file_before_defaults(file: Path) -> None:
    with stepwell.open(file, run="r", block_timeout="1min 30s", exit_timeout=7, on_pressure="newest-wins") as store:
        settings = store._settings
        assert (settings.on_pressure, settings.block_timeout, settings.exit_timeout) == ("newest-wins", 90.0, 7)
        assert any(isinstance(policy, DropBacklog) for policy in store._writer.steering._policies)
        assert (settings.max_unsaved, settings.rank_timeout_seconds) == (7200.0, Settings().rank_timeout_seconds)


def test_the_options_of_the_tiers_reach_the_chain(file: Path) -> None:
    with stepwell.open(file, run="r") as store:
        assert store._settings.on_pressure == "skip"
        assert not any(isinstance(policy, DropBacklog) for policy in store._writer.steering._policies)
        m, n = store.tiers
        assert store._chain.option(m) == TierOptions()
        assert store._chain.option(n) == TierOptions(delete_grace_s=300.0, verify_after_flush="digest")


def test_without_a_file_one_line_is_enough(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run", on_pressure="skip", max_unsaved="20 min") as store:
        assert (store._settings.on_pressure, store._settings.max_unsaved) == ("skip", 1200.0)
    with stepwell.open(tmp_path / "run") as store:
        assert store._settings.on_pressure == "block"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"on_pressure": "drop"}, "on_pressure='drop'.*'block', 'skip', 'newest-wins'"),
        ({"on_pressure": None}, "on_pressure=None.*Choose one of"),
        ({"on_presure": "skip"}, "no setting 'on_presure'.*Did you mean 'on_pressure'"),
        ({"block_timeout": "2 parsecs"}, "block_timeout='2 parsecs': .*unknown unit 'parsecs'.*'90s'"),
        ({"exit_timeout": "0s"}, "exit_timeout='0s': .*out of range"),
        ({"max_unsaved": float("nan")}, "max_unsaved=nan.*above 0"),
        ({"max_unsaved": True}, "max_unsaved=True.*above 0"),
        ({"block_timeout": [1]}, "block_timeout=.1.*above 0"),
        ({"trace": ""}, "trace=''.*Name a file"),
        ({"trace": 5}, "trace=5.*Name a file"),
    ],
)
def test_what_cannot_be_set(wrong: dict[str, Any], says: str, file: Path, tmp_path: Path) -> None:
    for target, run in ((file, "r"), (tmp_path / "run", None)):
        with pytest.raises(ConfigError, match=says):
            stepwell.open(target, run=run, **wrong)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("word", ON_PRESSURE)
def test_every_word_for_pressure(word: str, file: Path) -> None:
    assert Settings(on_pressure=word).override({}).on_pressure == word
    file.write_text(FILE.replace('"skip"', f'"{word}"'))
    with stepwell.open(file, run="r") as store:
        assert store._settings.on_pressure == word
