"""Some hundred saves of the hunter of torn snapshots (`make campaign` does 10,000), in a process of its own."""

from pathlib import Path

import pytest

from tests.store.trials import run_trial


@pytest.mark.slow
def test_no_snapshot_is_torn(tmp_path: Path) -> None:
    """With a gpu tier: without one the tests of guards and of saves from GPUs hunt, too."""
    result = run_trial("torn", tmp_path, "--saves", "60", "--seed", "12", "--tier", "512MiB")
    assert result["wrong"] == 0 and result["checked"] == result["from_memory"] == 60
    assert result["from_gpu"] == 60
    assert result["from_disk"] > 0, "nothing was ever read from the disk"


def test_where_updates_do_not_wait_the_hunter_finds_torn_snapshots(tmp_path: Path) -> None:
    result = run_trial("torn", tmp_path, "--saves", "30", "--seed", "13", "--break", status=1)
    assert result["wrong"] > 3 and result["checked"] == 30
