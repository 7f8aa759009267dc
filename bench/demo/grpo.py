"""Group-relative policy optimisation: how rewards become a gradient.

Each prompt is answered several times; an answer is as good as its reward is above the mean of its group, so no value
model is needed. The ratio between the policy that learns and the one that sampled, a few versions older, is clipped,
so that old samples cannot pull far. Pure functions of tensors.
"""

import torch
from torch import Tensor

from . import task

GROUP = 16  # answers to each prompt
CLIP_BELOW, CLIP_ABOVE = 0.2, 0.28  # wider above: what is rare and right may grow (DAPO)
LEARNING_RATE = 7e-4
WARM_UP_STEPS = 10
STEADY = 0.5  # of all steps; then the learning rate falls
MIN_RATE = 0.1  # of LEARNING_RATE


def advantages(rewards: Tensor) -> Tensor:
    """How much better than its group each answer is, in the group's standard deviations. Rewards of (prompts, GROUP).

    A group whose answers are all right, or all wrong, teaches nothing.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of the answer's tokens, given logits for each of `tokens`."""
    of_answer = logits[:, task.PROMPT_TOKENS - 1 : -1].log_softmax(dim=-1)
    return of_answer.gather(2, tokens[:, task.PROMPT_TOKENS :, None]).squeeze(2)


def loss(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """The clipped surrogate: log-probabilities of (answers, tokens) now and when sampled, advantage of each answer."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP_BELOW, 1 + CLIP_ABOVE)
    gain = advantage[:, None]
    return -torch.minimum(ratio * gain, clipped * gain).mean()


def learning_rate(step: int, steps: int) -> float:
    """Rises for the first steps, holds, and falls in a straight line over the rest."""
    warm_up = (step + 1) / WARM_UP_STEPS
    fall = (steps - step) / (steps * (1 - STEADY))
    return LEARNING_RATE * min(1.0, warm_up, max(MIN_RATE, fall))
