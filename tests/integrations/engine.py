"""A vLLM engine in a process of its own: commands are JSON lines on stdin, answers JSON lines on stdout.

    {"do": "start", "path": "…", "replica": "rollout-0"}    {"do": "update"}    {"do": "answer", "prompts": [[1, 2]]}

The model is random and small, and has no tokenizer: prompts and answers are numbers.
"""

import json
import os
import sys

import torch

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
os.environ.update(SETTINGS)  # before vLLM is imported, here and by its ranks
UNPACKED = "ENGINE_UNPACKED"  # "all" parameters, or "linear" ones, stay what vLLM computes with, as on GPUs


def unpack():
    """In every process of vLLM, before it loads the model."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    if os.environ[UNPACKED] == "all":
        unpack_experts()


def unpack_experts():
    """They are computed by torch, one after the other."""
    from torch.nn.functional import silu
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def fused(output, x, w13, w2, _bias, _bias2, weights, chosen, *_):
        found = torch.zeros(output.shape)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[rows] @ w13[expert].t()).chunk(2, dim=-1)
            part = (silu(gate) * up) @ w2[expert].t()
            found.index_add_(0, rows, part.float() * weights[rows, places, None].float())
        output.copy_(found)

    cpu_moe.cpu_fused_moe = fused
    cpu_moe.CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None


class Engine:
    """Carries out commands. A method is a command."""

    def start(self, path, replica, early=False, ranks=1, in_place=False, **options):
        """`early`: the first version is loaded before vLLM would serve, instead of by `attach`."""
        import vllm

        joined = {"model": "policy", "replica": replica, "in_place": in_place, "options": options}
        self.llm = vllm.LLM(
            model=path,
            load_format="dummy",
            weight_transfer_config={"backend": "tensorhub"},
            additional_config={"tensorhub": joined} if early else {},
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            tensor_parallel_size=ranks,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            enable_prefix_caching=True,
            worker_extension_cls="tests.integrations.engine.Spoiled",
        )
        self.replica, self.options = replica, {"in_place": in_place, **options}

    def attach(self, timeout=60, **other):
        from tensorhub.integrations import vllm

        options = {**self.options, **other}
        self.weights = vllm.attach(self.llm, "policy", replica=self.replica, timeout=timeout, **options)
        return self.weights.version

    def leave(self):
        self.weights.close()

    def update(self, version=None, timeout=60):
        return self.weights.update(version, timeout=timeout)

    def held(self):
        return [self.weights.version, self.llm.get_weight_version()]

    def answer(self, prompts, tokens=8):
        """For each prompt: the tokens, and for each of them the log-probabilities of the likeliest five."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=5, detokenize=False, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [each.outputs[0] for each in self.llm.generate(asked, params, use_tqdm=False)]
        return [
            [list(each.token_ids), [{str(k): v.logprob for k, v in at.items()} for at in each.logprobs]]
            for each in found
        ]

    def load_file(self, path):
        """vLLM reads weights from there by itself."""
        self.llm.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "auto"}}})
        self.llm.collective_rpc("unmake_experts")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self.llm.reset_prefix_cache(reset_running_requests=True)

    def spoil(self, after):
        """Let the next load fail after so many tensors."""
        self.llm.collective_rpc("spoil", args=(after,))

    def sources(self):
        """Where the weights of all ranks came from."""
        return sorted({name for found in self.llm.collective_rpc("sources") for name in found})

    def padding(self):
        """Of all ranks."""
        return self.llm.collective_rpc("padding")

    def spoil_fetch(self, rank):
        """Let the next fetch fail, on one rank only."""
        self.llm.collective_rpc("spoil_fetch", args=(rank,))


if os.environ.get(UNPACKED):
    unpack()


class Spoiled:
    """What a test adds to vLLM's ranks."""

    def sources(self):
        """Replicas."""
        return sorted(self.weight_transfer_engine._way.weights.statistics()["bytes_by_source"])

    def unmake_experts(self):
        """vLLM 0.32 packs experts for CPUs only when it makes kernels, and answers nonsense after its own reload."""
        for module in self.model_runner.get_model().modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None

    def padding(self):
        """What lies in rows of this rank's vocabulary that are no word."""
        found = []
        for module in self.model_runner.get_model().modules():
            if type(module).__name__ in ("VocabParallelEmbedding", "ParallelLMHead"):
                indices = module.shard_indices
                words = indices.org_vocab_end_index - indices.org_vocab_start_index
                found.append(module.weight[words:].float().flatten().tolist())
        return found

    def spoil(self, after):
        model = self.model_runner.get_model()
        load = model.load_weights

        def load_weights(weights):
            del model.load_weights

            def some():
                for count, each in enumerate(weights):
                    if count == after:
                        raise ValueError("a load that fails")
                    yield each

            return load(some())

        model.load_weights = load_weights

    def spoil_fetch(self, rank):
        way = self.weight_transfer_engine._way

        def fetch(*_, **__):
            del way.fetch
            raise ValueError("a fetch that fails")

        if self.rank == rank:
            way.fetch = fetch


def main():
    """Until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    engine = Engine()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"value": getattr(engine, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - the test judges it
            answer = {"kind": type(error).__name__, "message": str(error), "hint": getattr(error, "hint", "")}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
