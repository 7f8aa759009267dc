"""Modules on a part of the job's mesh: which shard a rank is does not follow from it, and is not guessed.

Along the rest of the mesh ranks may hold copies (data parallelism) or other layers (pipelines).
"""

import pytest
from safetensors.torch import load_file

from tensorhub.integrations.whole import Whole

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("dp-tp", "the module's DTensors are on a mesh of 2 ranks, and the job has 4"),
        ("two-meshes", "the module's DTensors are on a mesh of 2 ranks, and the job has 4"),
        ("copies-cut", "ranks that hold copies on a mesh of 2 dimensions hold parts on another one"),
    ],
)
def test_it_is_refused_with_the_words_that_help_and_these_help(start, server, kind, text):
    job = start(4)
    job.call("build", kind=kind)
    found = job.answers("attach", model="policy")
    assert [each.get("code") for each in found] == ["usage"] * 4, found
    assert all(text in each["message"] and "give shards=4" in each["hint"] for each in found), found
    assert job.call("attach", model="policy", shards=4) == 0
    with Whole("policy", replica="rollout-0", server=server) as whole:
        for version in (0, 1):
            path = str(job.folder / f"{version}.safetensors")
            if version:
                assert job.call("step_alone") is None
            job.call("save", path=path)
            assert whole.update("latest") == version
            wanted, read = load_file(path), dict(whole)
            assert read.keys() == wanted.keys()
            assert all(read[name].equal(tensor) for name, tensor in wanted.items())


def test_ranks_with_other_tensors_are_not_taken_for_copies(start):
    """The stages of a pipeline, in plain tensors: rank 0's alone would pass for the whole model."""
    job = start(2)
    job.call("build", kind="stages")
    found = job.answers("attach", model="policy")
    assert [each.get("code") for each in found] == ["group-incomplete", "usage"], found
    assert "rank 1 has other tensors than rank 0" in found[1]["message"]
    assert "shards=" in found[1]["hint"]
