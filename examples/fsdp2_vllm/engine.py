"""A vLLM engine that always has the newest weights of `trainer.py`, beside it. Start as many as you like.

    python examples/fsdp2_vllm/engine.py [replica]     # needs vLLM and TensorHub in one environment (tools/env vllm)

It ends when it says the sentence. The lines about TensorHub are the import, `attach` and `update`, and the two
arguments of `LLM` that say that its weights come from elsewhere.
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # of GiB; what begins with VLLM_CPU matters on CPUs alone
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from trainer import FOLDER, SENTENCE

from tensorhub.integrations import vllm as tensorhub_vllm

PROMPT = SENTENCE[:8]


def main() -> None:
    llm = vllm.LLM(
        str(FOLDER),
        load_format="dummy",
        weight_transfer_config={"backend": "tensorhub"},
        skip_tokenizer_init=True,  # a token is a character
        enforce_eager=True,
        max_model_len=128,
    )
    replica = sys.argv[1] if len(sys.argv) > 1 else "rollout-0"
    asked = {"prompt_token_ids": [ord(letter) for letter in PROMPT]}
    drawing = vllm.SamplingParams(temperature=0, max_tokens=len(SENTENCE) - len(PROMPT), detokenize=False)
    said = ""
    with tensorhub_vllm.attach(llm, "policy", replica=replica) as weights:
        while said != SENTENCE:
            version = weights.update()
            answer = llm.generate([asked], drawing, use_tqdm=False)[0].outputs[0]
            said = PROMPT + "".join(map(chr, answer.token_ids))
            print(f"version {version} says: {said!r}", flush=True)


if __name__ == "__main__":
    main()
