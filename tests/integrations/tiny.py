"""Language models with random weights, small enough to be made on the spot and trained on a CPU, and a tokenizer."""

from pathlib import Path

WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789 "]


def tiny(kind, **config):
    """Two layers of what transformers calls that; the same one every time."""
    import torch
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
