"""Guards in a job of two ranks with a GPU each: sharded and replicated models, from GPU memory and from the host's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.jobs import ended

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TRAIN = """
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
root, kind = sys.argv[1:3]
torch.cuda.set_device(rank)
group = dist.new_group(backend="nccl")
torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).cuda()
if kind == "ddp":
    net = DistributedDataParallel(net, device_ids=[rank], process_group=group)
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh, policy = DeviceMesh.from_group(group, "cuda"), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in net:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, fused=True)
def live():
    found = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return {str(i): getattr(t, "_local_tensor", t).detach() for i, t in enumerate(found)}
def differ(step, now):
    then = expected[step]
    assert all(tensor.isfinite().all() for tensor in then.values()), "a test of NaNs is none"
    return [name for name in then if not torch.equal(now[name], then[name])]
expected = {}
with stepwell.open(f"{root}/tiers.toml", run="run") as store:
    store.guard(optimizer)
    for step in range(1, 31):
        net(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = live()
        expected[step] = {name: tensor.clone() for name, tensor in state.items()}
        save = store.save(step, {"state": state, "model": net} if kind == "ddp" else {"state": state})
        if step % 5 == 0:
            save.wait()
            now = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            found = store.restore({"state": now}, step=step, strict=False)
            assert found.step == step and not differ(step, now), (found, step, differ(step, now))
    assert store._guards._known[-1].layout.counts
with stepwell.open(f"{root}/tiers.toml", run="run", mode="r") as store:
    for step in (c.step for c in store.checkpoints(tier="disk")):
        now = {name: torch.zeros_like(tensor) for name, tensor in live().items()}
        store.restore({"state": now}, step=step, strict=False)
        assert not differ(step, now), (step, differ(step, now))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("tier", ["host", "gpu"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_sharded_and_replicated_models_come_back_as_they_were(tmp_path: Path, kind: str, tier: str) -> None:
    gpu = '[[tier]]\nname = "gpu"\ndriver = "gpu"\ncapacity = "2GiB"\n' if tier == "gpu" else ""
    (tmp_path / "disk").mkdir()
    (tmp_path / "tiers.toml").write_text(
        f'{gpu}[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "4GiB"\n'
        f'[[tier]]\nname = "disk"\ndriver = "file"\npath = "{tmp_path}/disk"\n'
    )
    for done in ended(TRAIN, tmp_path, kind):
        assert done.returncode == 0, done.stderr[-3000:]
