"""After the run: did engines compute with the version that they named? Transformers is asked, with what was published.

For some answers of each batch the engine's log-probabilities are compared with those that transformers computes from
the trainer's own file of that version, and from those of its neighbours: a version is told apart from the next one.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from .. import grpo
from ..events import AnyEvent, Sampled
from ..summary import Likelihoods
from .model import build

FAR = 1e-3  # nats: rounding in float32 makes a hundredth of that


def likelihoods(events: Sequence[AnyEvent], policy: Path, versions: Path) -> Likelihoods:
    """Look at everything that was sampled."""
    sampled = [event for event in events if isinstance(event, Sampled)]
    known = sorted(int(path.stem) for path in versions.glob("*.safetensors"))
    torch.set_num_threads(1)  # more would wait for each other, over so little
    module = build(policy, 0).eval()
    own, other = [], []
    wrong = [f"{e.process}, version {e.version}: vLLM says {e.told}" for e in sampled if e.told != str(e.version)]
    for version in sorted({event.version for event in sampled}):
        batches = [event for event in sampled if event.version == version]
        if version not in known:
            wrong += [f"{event.process}, version {version}: nobody has made that" for event in batches]
            continue
        near = known[max(0, known.index(version) - 1) : known.index(version) + 2]
        found = {each: _off(module, versions / f"{each}.safetensors", batches) for each in near}
        own += found[version]
        other += [min(each) for each in zip(*(found[each] for each in near if each != version), strict=True)]
        wrong += [
            f"{event.process}, version {version}: off by {off:.2g}"
            for event, off in zip(batches, found[version], strict=True)
            if not off < FAR
        ]
    return Likelihoods(
        batches=len(own),
        versions=len({event.version for event in sampled}),
        most_off=max(own, default=0.0),
        next_off=median(other or [0.0]),
        wrong=wrong,
    )


@torch.no_grad()
def _off(module: LlamaForCausalLM, path: Path, batches: Sequence[Sampled]) -> list[float]:
    """How far the worst token of each batch is from what these weights give."""
    module.load_state_dict(load_file(path))  # which are rounded; it computes in float32, as the engines do
    tokens = torch.tensor([row for batch in batches for row in batch.tokens])
    given = torch.tensor([row for batch in batches for row in batch.log_probabilities])
    off = (grpo.log_probabilities(module(input_ids=tokens).logits, tokens) - given).abs().amax(dim=1)
    return [float(each.max()) for each in torch.split(off, [len(batch.tokens) for batch in batches])]
