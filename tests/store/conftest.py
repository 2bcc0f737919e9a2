"""What the store's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stepwell import backoff, savework
from tests.store.scripts import Scripts


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """Runs scripts in processes of their own."""
    runner = Scripts(tmp_path_factory.mktemp("scripts"))
    yield runner
    runner.close()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again at once."""
    monkeypatch.setattr(savework, "RETRY_S", (0.001, 0.001, 0.001))
    monkeypatch.setattr(backoff, "FIRST_S", 0.001)
    monkeypatch.setattr(backoff, "LAST_S", 0.01)
