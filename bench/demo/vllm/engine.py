"""A rollout process with a vLLM engine in it: the same work as a plain rollout, and the same events.

It may join at any time and be killed at any time. When the trainer goes, it waits until there is one again.
"""

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import tensorhub
from tensorhub import VersionUnavailable
from tensorhub.integrations import vllm as tensorhub_vllm

from .. import grpo, task
from ..events import Sampled
from ..logs import EventLog, now
from ..parent import Parent
from ..rollout import RETRY_S, RETRYABLE, Rollout, received_by, rollout_arguments, work
from ..samples import Batch, PatientOutbox
from ..sharded import MODEL
from .model import fingerprint, unfused

if TYPE_CHECKING:
    from vllm import LLM

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, the least there is
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    "VLLM_CPU_CI_ENV": "1",  # compiles less
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process, and goes with it
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
MAX_TOKENS = 16
MAX_AT_ONCE = 256  # answers
LOOKED_AT = 4  # answers of a batch that the judge sees
PATIENCE_S = 180.0  # for a trainer: it starts as slowly as the machine is busy


def start(path: str, seed: int) -> "LLM":
    """An engine without weights: what it has is replaced before it is asked anything.

    vLLM's kernels for CPUs compute with packed copies of the parameters. They are turned off, so that the parameters
    which are hashed are those that it computes with, as on GPUs.
    """
    import vllm
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    torch.set_num_threads(1)
    return vllm.LLM(
        model=path,
        load_format="dummy",
        weight_transfer_config={"backend": "tensorhub"},
        dtype="float32",
        seed=seed,
        enforce_eager=True,
        max_model_len=MAX_TOKENS,
        max_num_seqs=MAX_AT_ONCE,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )


class Engine:
    """vLLM as what a rollout computes with."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    @property
    def version(self) -> str:
        """The version that vLLM itself says it has."""
        return str(self._llm.get_weight_version())

    def answer(self, prompts: task.Tokens) -> tuple[task.Tokens, task.Floats]:
        """vLLM is asked in text, and says what it drew in tokens and their log-probabilities."""
        from vllm import SamplingParams

        drawing = SamplingParams(
            n=grpo.GROUP, temperature=1.0, max_tokens=task.ANSWER_TOKENS, logprobs=0, ignore_eos=True, detokenize=False
        )
        asked = [task.as_text(prompt) for prompt in prompts]
        rows, drawn_with = [], []
        for given in self._llm.generate(asked, drawing, use_tqdm=False):
            for answer in given.outputs:
                rows.append([*given.prompt_token_ids, *answer.token_ids])
                likelihood = zip(answer.token_ids, answer.logprobs, strict=True)
                drawn_with.append([place[token].logprob for token, place in likelihood])
        return np.array(rows, np.uint8), np.array(drawn_with, np.float32)

    def fingerprint(self) -> str:
        """Of the parameters of vLLM's model, where they lie."""
        return str(self._llm.apply_model(_fingerprint)[0])


def _fingerprint(module: torch.nn.Module) -> str:
    found = dict(module.named_parameters())
    packed = [name for name, parameter in found.items() if not parameter.numel()]
    if packed:
        raise VersionUnavailable(f"vLLM computes with a packed copy of {packed[0]}: nobody can hash that")
    return fingerprint(unfused(found))


class EngineWeights:
    """How an engine gets its weights, as a rollout wants it: each call says how long it took."""

    def __init__(self, llm: "LLM", *, replica: str, server: str) -> None:
        self.stall_s = 0.0
        self._replica = replica
        self._view = tensorhub.connect(server)
        self._received: dict[str, int] = {}
        self._updater = tensorhub_vllm.attach(llm, MODEL, replica=replica, server=server, timeout=PATIENCE_S)

    @property
    def version(self) -> int | None:
        """What the engine computes with; None: nothing that may be used."""
        return self._updater.version

    def replicate(self, spec: int | str, *, timeout_s: float) -> int:
        """The first version came with `attach`."""
        assert self._updater.version is not None
        return self._updater.version

    def update(self, spec: int | str = "latest", *, timeout_s: float) -> int:
        """Load the newest version, if it is newer. Where the engine has none that may be used, try again meanwhile."""
        began = time.monotonic()
        while True:
            try:
                return self._updater.update(timeout=timeout_s)
            except RETRYABLE:
                if self.version is not None or time.monotonic() > began + timeout_s:
                    raise
                time.sleep(RETRY_S)
            finally:
                self.stall_s = time.monotonic() - began

    def bytes_by_source(self) -> dict[str, int]:
        """What this replica has received, from whom, as the reference server last said."""
        try:
            replicas = self._view.replicas(MODEL)
        except RETRYABLE:
            return self._received
        self._received = received_by(self._replica, replicas) or self._received
        return self._received


class EngineRollout(Rollout):
    """Shows the judge some of what it drew."""

    policy: Engine

    def generate(self) -> Batch:
        """As a plain rollout."""
        batch = super().generate()
        tokens, drawn_with, _ = batch.arrays()
        rows = slice(None, None, max(1, len(tokens) // LOOKED_AT))
        self.log.write(
            Sampled(
                time=now(),
                process=self.replica,
                version=batch.version,
                told=self.policy.version,
                tokens=tokens[rows].tolist(),
                log_probabilities=drawn_with[rows].tolist(),
            )
        )
        return batch


def main() -> None:
    """`python -m bench.demo.vllm.engine`"""
    parser = rollout_arguments(__doc__)
    parser.add_argument("--policy", required=True, help="folder of the model's shape and tokenizer")
    given = parser.parse_args()
    Parent()
    os.environ.update(SETTINGS)  # before vLLM is imported
    engine: Any = start(given.policy, given.seed)
    with EventLog(given.events, given.replica) as log, PatientOutbox(given.samples, timeout_s=PATIENCE_S) as outbox:
        weights = EngineWeights(engine, replica=given.replica, server=given.server)
        rollout = EngineRollout(given.replica, weights, Engine(engine), log, given.seed)
        rollout.join(lambda: "latest")
        work(rollout, outbox, updates=not given.no_updates)


if __name__ == "__main__":
    main()
