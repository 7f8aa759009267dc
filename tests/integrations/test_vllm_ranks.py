"""What vLLM's ranks say to each other, with two processes of gloo in place of its group."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import torch.distributed as dist
import torch.multiprocessing as processes

import tensorhub
from tensorhub.integrations import vllm_worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def ask(rank, path, finds, said):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    group = SimpleNamespace(rank_in_group=rank, world_size=2, ranks=[0, 1], cpu_group=dist.group.WORLD)
    vllm_worker.get_world_group = lambda: group

    def find():
        assert rank == 0, "only rank 0 asks"
        if finds is None:
            raise tensorhub.ServerUnreachable("nobody is there")
        return finds

    engine = object.__new__(vllm_worker.TensorHubWeightTransferEngine)
    try:
        said.put((rank, engine._told(find)))
    except tensorhub.TensorHubError as error:
        said.put((rank, str(error)))


@pytest.mark.parametrize(
    ("finds", "told"),
    [(7, {0: 7, 1: 7}), (None, {0: "nobody is there", 1: "rank 0 has found no version; its log says why"})],
)
def test_what_rank_0_finds_or_does_not_find_all_hear(tmp_path, finds, told):
    context = processes.get_context("spawn")
    said = context.Queue()
    processes.spawn(ask, (tmp_path / "meeting", finds, said), nprocs=2)
    assert dict(said.get(timeout=10) for _ in range(2)) == told
