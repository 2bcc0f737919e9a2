"""Guards and saves to memory alone in a job of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import ended

TRAIN = """
from torch.nn.parallel import DistributedDataParallel
root, kind = sys.argv[1:3]
torch.manual_seed(0)
def build():
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256))
    if kind == "ddp":
        net = DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)
def live(net, optimizer):
    found = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return {str(i): getattr(t, "_local_tensor", t).detach() for i, t in enumerate(found)}
net, optimizer = build()
with stepwell.open(f"{root}/run") as store:
    store.guard(optimizer)
    expected = {}
    for step in range(1, 7):
        net(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = live(net, optimizer)
        expected[step] = {name: tensor.clone() for name, tensor in state.items()}
        save = store.save(step, {"state": state, "model": net} if kind == "ddp" else {"state": state})
    assert store._guards._known[-1].layout.counts
    save.wait()
    for step, then in expected.items():
        now = {name: torch.zeros_like(tensor) for name, tensor in then.items()}
        store.restore({"state": now}, step=step)
        assert all(torch.equal(now[name], then[name]) for name in then), step
dist.barrier()
dist.destroy_process_group()
"""

MEMORY = """
root = sys.argv[1]
def state(step):
    return {"model": {f"rank{rank}.w": torch.full((500_000,), float(step * 10 + rank))}}
def check(store, step):
    target = state(0)
    found = store.restore(target)
    assert found.step == step and torch.equal(target["model"][f"rank{rank}.w"], state(step)["model"][f"rank{rank}.w"])
with stepwell.open(f"{root}/cluster.toml", run="run") as store:
    for step in range(1, 9):
        save = store.save(step, state(step)).wait("host")
        if step in (1, 4, 8):
            save.wait("nvme")
        else:
            try:
                save.wait("nvme")
                raise AssertionError(step)
            except stepwell.NotPlanned:
                pass
        dist.barrier()
    store.save(9, state(9)).wait("host")
    check(store, 9)
with stepwell.open(f"{root}/cluster.toml", run="run", mode="r") as store:
    assert [c.step for c in store.checkpoints(tier="nvme")] == [1, 4, 8, 9], store.checkpoints()
    assert 9 in [c.step for c in store.checkpoints(tier="pfs")]
    check(store, 9)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2)])
def test_sharded_and_replicated_models_come_back_as_they_were(tmp_path: Path, kind: str, world: int) -> None:
    for done in ended(TRAIN, tmp_path, kind, world=world):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_ranks_keep_in_memory_what_the_leader_does_not_send_down(tmp_path: Path) -> None:
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir()
    (tmp_path / "cluster.toml").write_text(
        f'[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "256MiB"\n'
        f'[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{tmp_path}/nvme"\nflush = {{ every_steps = 4 }}\n'
        f'[[tier]]\nname = "pfs"\ndriver = "pfs"\npath = "{tmp_path}/pfs"\nflush = "at-close"\n'
    )
    for done in ended(MEMORY, tmp_path):
        assert done.returncode == 0, done.stderr[-3000:]
