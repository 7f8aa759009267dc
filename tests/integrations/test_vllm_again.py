"""An engine of vLLM that has left, and comes back: to the same version, or to another job with the same number."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM, in an environment of its own: make test-engines")

import tensorhub

from .engine import UNPACKED
from .engines import started
from .kit import free_port
from .llama import Trainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_number_that_is_used_again_is_loaded_again(tmp_path, in_place):
    port = free_port()
    with started(tmp_path) as start:
        with tensorhub.serve(port=port, lease_s=5.0, report_s=0.25) as hub:
            trainer = Trainer(tmp_path, hub.address)
            engine = start("rollout-0", **({UNPACKED: "all"} if in_place else {}))
            engine.call("start", path=trainer.path, replica="rollout-0", server=hub.address, in_place=in_place)
            assert engine.call("attach") == 0
            trainer.check(engine)
            engine.call("leave")
            assert engine.call("attach") == 0, "the same version once more"
            trainer.check(engine)
            engine.call("leave")
            trainer.publisher.close(timeout=10)
        with tensorhub.serve(port=port, lease_s=5.0, report_s=0.25) as hub:
            trainer.publish_anew(hub.address)
            assert engine.call("update") == 0
            trainer.check(engine)
            trainer.step(1)
            assert engine.call("update") == 1
            trainer.check(engine)
            trainer.publisher.close(timeout=10)
