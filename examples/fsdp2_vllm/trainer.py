"""Two ranks of FSDP2 teach a tiny Llama a sentence. Whatever each step makes of it is published at once.

    tensorhub serve --fresh                                                  # in another shell
    torchrun --standalone --nproc-per-node 2 examples/fsdp2_vllm/trainer.py   # needs torch and transformers
    python examples/fsdp2_vllm/engine.py                 # in a third shell: vLLM says what it has learned

The lines about TensorHub are the import, `attach`, the `with` block and `close`; those that wait for an engine are for
show. Where the server is elsewhere, give everybody `TENSORHUB_SERVER=host:port`.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import tensorhub
from tensorhub.integrations import fsdp

SENTENCE = "the new weights are in every engine. "
FOLDER = Path("out/tiny-llama")  # the shape of the model, for vLLM: no weights are written


def tiny_llama() -> LlamaForCausalLM:
    """One token for each ASCII character, 0.4 million random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    if dist.get_rank() == 0:
        config.save_pretrained(FOLDER)
    return LlamaForCausalLM(config)


def main() -> None:
    dist.init_process_group("gloo")
    model = tiny_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    publisher = fsdp.attach(model, "policy", replica="trainer", dtype="bfloat16", retain=2)
    hub = tensorhub.connect()
    while len(hub.replicas("policy")) < 2:  # an engine takes a while to start
        time.sleep(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = torch.tensor([[ord(letter) for letter in SENTENCE * 3]])
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    for _ in range(steps):
        loss = model(input_ids=text, labels=text, use_cache=False).loss
        loss.backward()
        with publisher.step() as version:
            optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and version % 10 == 0:
            print(f"published version {version}, loss {loss.item():.3f}", flush=True)
        time.sleep(0.25)  # where a real one waits for samples
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
