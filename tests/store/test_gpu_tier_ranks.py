"""A GPU tier in a job of two ranks, each with a GPU of its own, and with another room there."""

from __future__ import annotations

from pathlib import Path

from tests.fakecuda import build
from tests.jobs import ended

TRAIN = """
import pytest
from pathlib import Path
from tests.fakecuda import FakeCuda
from tests.store.gpubench import GPU, HOST, NVME, benches
folder, library = Path(sys.argv[1]), sys.argv[2]
with benches(FakeCuda(library), pytest.MonkeyPatch()) as bench:
    tensors = {f"r{rank}.{at}": bench.on.put(torch.zeros(900_000, dtype=torch.uint8)) for at in range(4)}
    def state():
        return {"model": tensors, "count": step}
    (folder / "nvme").mkdir(exist_ok=True)
    config = folder / f"rank{rank}.toml"
    config.write_text(GPU.format("128MiB" if rank == 0 else "8MiB") + HOST.format("96MiB")
                      + NVME.format(folder / "nvme", "'all'"))
    with stepwell.open(config, run="run") as store:
        store.guard(*tensors.values())
        for step in range(1, 6):
            store.before_update()
            bench.driver.finish(bench.stream)  # what follows comes at once, not in the order of the stream
            for tensor in tensors.values():
                tensor.fill_(10 * step + rank)
            save = store.save(step, state())
        save.wait("nvme")
        there = [found.step for found in store.checkpoints(tier="gpu")]
        assert there == [1, 2, 3, 4, 5] if rank == 0 else 1 not in there, there
        for step in (5, 2, 4, 1):
            target = state()
            target["count"] = -1
            found = store.restore(target, step=step)
            assert found.step == step and target["count"] == step
            assert all(bool((tensor == 10 * step + rank).all()) for tensor in tensors.values()), step
            assert ("gpu" in found.sources) == (step in there), (step, there, found.sources)
        dist.barrier()
dist.barrier()
dist.destroy_process_group()
"""


def test_each_rank_keeps_and_restores_its_own(tmp_path: Path) -> None:
    for one in ended(TRAIN, tmp_path, build(tmp_path)):
        assert one.returncode == 0, one.stderr[-3000:]
