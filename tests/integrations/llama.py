"""A language model of transformers, random and small: the trainer of these tests, and the judge of what engines say."""

import copy
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file

from tensorhub.integrations import fsdp

LONG = [7 * place % 120 + 3 for place in range(140)]  # more than a block, so that its beginning is cached
PROMPTS = [[5, 9, 2, 40, 17, 3], [90, 91, 92], LONG]
VOCABULARY = 126  # which vLLM fills up to 128
# How far vLLM may be from float32, in units of how far transformers' own bfloat16 is, on the average. It was 1.1 to 1.5
# away on one processor; with its packing off on one that multiplies bfloat16 itself (AMD, avx512_bf16) 2.1, as what it
# loads from a file by itself is (`check_exactly`).
ROUNDED = 3.0
FAR = 20.0  # in the same units: how far two versions are apart, at least
ALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {  # by what transformers calls them; what they have beside that
    "llama": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
}

FAMILIES = {  # the same, of those that only some tests have
    **KINDS,
    "qwen2": {},  # with biases of q, k and v
    "gemma3_text": {
        "head_dim": 32,
        "tie_word_embeddings": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # fused in memory, one by one in files
    "gpt_neox": {"num_key_value_heads": 4},  # q, k and v are one tensor, with a bias
}

WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789 "]


def tiny(kind, **config):
    """Two layers of what transformers calls that; the same one every time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=2, **config))


def save_tiny_llama(folder: Path) -> str:
    """64 wide, one token for each letter. Returns the path that `from_pretrained` takes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", "<pad>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = tiny(
        "llama",
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Judge:
    """A model of transformers: what answers have to be."""

    def __init__(self, folder, kind="llama", **config):
        module = tiny(kind, **{**ALL, **FAMILIES[kind], **config})
        self.module = module.to(torch.bfloat16).eval()
        self.kind, self.path = kind, str(folder / kind)
        config = self.module.config
        config.architectures = [type(self.module).__name__]
        config.torch_dtype = "bfloat16"
        config.save_pretrained(self.path)
        self.before = None

    def change(self):
        self.before = copy.deepcopy(self.module)
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(0.3).add_(torch.randn_like(parameter) * 0.14)

    def follow(self, job, version):
        """Become what the ranks of that job say that they are, rounded."""
        path = f"{self.path}-{version}.safetensors"
        job.call("save", path=path)
        if version:
            self.before = copy.deepcopy(self.module)
        self.module.load_state_dict(load_file(path))

    def check_exactly(self, engine):
        """What vLLM reads from a file of the same weights by itself answers the same, to the bit.

        One prompt at a time: vLLM batches what has come by then, and other batches round in other ways.
        """
        found = [engine.call("answer", prompts=[prompt]) for prompt in PROMPTS]
        self.module.save_pretrained(self.path)
        engine.call("load_file", path=self.path)
        assert [engine.call("answer", prompts=[prompt]) for prompt in PROMPTS] == found

    def logprobs(self, module, sequences):
        """Of every token, at every place."""
        with torch.no_grad():
            return [module(torch.tensor([each])).logits[0].float().log_softmax(-1) for each in sequences]

    def check(self, engine, *, is_behind=False):
        """The engine computes with the newest version (or the one before) alone. Returns how far it is from float32.

        Teacher-forced: for each token that it chose, its five log-probabilities beside those of transformers in
        float32, and the same of transformers in bfloat16.
        """
        answered = engine.call("answer", prompts=PROMPTS)
        sequences = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, answered, strict=True)]
        wanted, other = (self.before, self.module) if is_behind else (self.module, self.before)
        exact = self.logprobs(copy.deepcopy(wanted).float(), sequences)
        rounded = self.logprobs(wanted, sequences)
        before = self.logprobs(other, sequences) if other is not None else None
        theirs, ours, moved = [], [], []
        for row, (prompt, (_, said)) in enumerate(zip(PROMPTS, answered, strict=True)):
            for at, likeliest in enumerate(said, len(prompt) - 1):
                for token, logprob in likeliest.items():
                    truth = exact[row][at, int(token)].item()
                    theirs.append(abs(rounded[row][at, int(token)].item() - truth))
                    ours.append(abs(logprob - truth))
                    if before is not None:
                        moved.append(abs(before[row][at, int(token)].item() - truth))
        assert len(ours) >= 5 * 8 * len(PROMPTS)
        found = statistics.mean(ours) / statistics.mean(theirs)
        assert found < ROUNDED, f"{engine.name}: {found:.2f} times what rounding does"
        if before is not None:
            assert statistics.mean(moved) > FAR * statistics.mean(theirs), "the versions are too near to be told apart"
        return found


class Trainer(Judge):
    """The same, and it publishes what it is."""

    def __init__(self, folder, server, kind="llama", **config):
        super().__init__(folder, kind, **config)
        self.publisher = fsdp.attach(self.module, "policy", replica="trainer", server=server)

    def step(self, version):
        """Another random model, far from the one before."""
        with self.publisher.step(version):
            self.change()
