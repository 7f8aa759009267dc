"""The task, the policy and the gradient: what is right, what is equal, and that a step goes the right way."""

import numpy as np
import pytest
import torch

from bench.demo import grpo, task
from bench.demo.policy import SHARDS, Policy, answer, fingerprint, split
from bench.demo.samples import Batch
from bench.demo.trainer import loss_of


def tokens_of(text: str) -> list[int]:
    return [(task.ALPHABET + "=").index(letter) for letter in text]


def test_prompts_are_different_letters_and_an_end() -> None:
    prompts = task.draw_prompts(200, np.random.default_rng(1))
    assert prompts.shape == (200, task.PROMPT_TOKENS)
    assert all(len(set(row[: task.LETTERS])) == task.LETTERS for row in prompts.tolist())
    assert set(prompts[:, -1].tolist()) == {task.END_OF_PROMPT}
    assert set(prompts[:, : task.LETTERS].ravel().tolist()) == set(range(len(task.ALPHABET)))


@pytest.mark.parametrize(
    ("text", "reward"), [("dbf=bdf", 1), ("abc=abc", 1), ("dbf=dbf", 0), ("dbf=bd=", 0), ("dbf=bbb", 0), ("dbf=bde", 0)]
)
def test_only_the_right_answer_is_rewarded(text: str, reward: float) -> None:
    row = np.array([tokens_of(text)], np.uint8)
    assert task.reward(row).tolist() == [reward]
    assert task.as_text(row[0]) == text


def test_an_untrained_policy_is_right_about_as_often_as_chance() -> None:
    random = torch.Generator().manual_seed(1)
    prompts = task.draw_prompts(500, np.random.default_rng(1))
    tokens, _ = answer(Policy(1), prompts, 8, random)
    assert task.reward(tokens).mean() < 10 * task.CHANCE


def test_answers_keep_their_prompts_together_and_know_their_probability() -> None:
    policy = Policy(2)
    prompts = task.draw_prompts(5, np.random.default_rng(2))
    tokens, old = answer(policy, prompts, 3, torch.Generator().manual_seed(2))
    assert np.array_equal(tokens[:, : task.PROMPT_TOKENS], prompts.repeat(3, axis=0))
    again = torch.from_numpy(tokens).long()
    new = grpo.log_probabilities(policy(again), again)
    torch.testing.assert_close(new, torch.from_numpy(old), rtol=1e-4, atol=1e-5)


def test_shards_are_the_policys_own_tensors_each_once() -> None:
    policy = Policy(3)
    shards = split(policy)
    state = policy.state_dict()
    assert len(shards) == SHARDS
    assert sorted(name for shard in shards for name in shard) == sorted(state)
    assert all(shard[name].data_ptr() == state[name].data_ptr() for shard in shards for name in shard)
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert min(sizes) > 1 << 20, "each shard is large enough for its transfer to be seen"


def test_a_fingerprint_covers_every_parameter() -> None:
    policy, same = Policy(4), Policy(4)
    assert fingerprint(policy) == fingerprint(same) != fingerprint(Policy(5))
    for name, tensor in policy.state_dict().items():
        before = tensor.flatten()[-1].clone()
        tensor.view(-1)[-1] += 1.0
        assert fingerprint(policy) != fingerprint(same), name
        tensor.view(-1)[-1] = before
    assert fingerprint(policy) == fingerprint(same)


def test_advantages_compare_within_a_group() -> None:
    found = grpo.advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    assert found[0, 0] > 0 > found[0, 1]
    torch.testing.assert_close(found[0].sum(), torch.tensor(0.0))
    assert found[1:].abs().max() == 0, "a group of equals teaches nothing"


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 1.5), (-1.0, 0.5)])
def test_beyond_the_clip_there_is_no_gradient(advantage: float, ratio: float) -> None:
    new = torch.full((1, 1), ratio).log().requires_grad_()
    torch.autograd.backward(grpo.loss(new, torch.zeros(1, 1), torch.tensor([advantage])))
    assert new.grad is not None
    assert new.grad.item() == 0


@pytest.mark.parametrize(("advantage", "ratio"), [(1.0, 0.5), (-1.0, 1.5), (1.0, 1.0), (-1.0, 1.0)])
def test_what_was_pushed_the_wrong_way_is_pulled_back(advantage: float, ratio: float) -> None:
    new = torch.full((1, 1), ratio).log().requires_grad_()
    torch.autograd.backward(grpo.loss(new, torch.zeros(1, 1), torch.tensor([advantage])))
    assert new.grad is not None
    assert new.grad.item() * advantage < 0, "gradient descent raises what was good and lowers what was bad"


def test_the_learning_rate_rises_holds_and_falls() -> None:
    rates = [grpo.learning_rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(grpo.LEARNING_RATE / grpo.WARM_UP_STEPS)
    assert rates[grpo.WARM_UP_STEPS : 50] == [grpo.LEARNING_RATE] * 40
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(grpo.LEARNING_RATE * grpo.LEAST_RATE)


def test_steps_make_the_rewarded_answer_likelier() -> None:
    """One prompt, one of whose answers is right: a few steps and it is drawn most of the time."""
    torch.set_num_threads(1)
    policy = Policy(6)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    right, wrong = tokens_of("dbf=bdf"), tokens_of("dbf=fed")
    tokens = np.array([right] + [wrong] * (grpo.GROUP - 1), np.uint8)
    as_long = torch.from_numpy(tokens).long()

    def log_probabilities() -> torch.Tensor:
        return grpo.log_probabilities(policy(as_long), as_long)

    first = log_probabilities()[0].sum().item()
    for _ in range(10):
        old = log_probabilities().detach().numpy()
        batch = Batch("rollout-0", 0, tokens.tobytes(), old.tobytes(), task.reward(tokens).tobytes())
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(policy, [batch]))
        optimizer.step()
    assert log_probabilities()[0].sum().item() > first + 1
