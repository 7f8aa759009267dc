"""What the policy learns: to put a few different letters in alphabetical order, one letter after the other.

    prompt  "dbf="        answer  "bdf"        reward  1 if every letter is right, else 0

There is no partial credit and no example to imitate: at the beginning a right answer is a lucky hit, once in several
hundred tries. Prompts, answers and rewards are numbers in numpy arrays; a letter is its place in the alphabet.
"""

import numpy as np
from numpy.typing import NDArray

ALPHABET = "abcdef"
LETTERS = 3  # in a prompt, all different
END_OF_PROMPT = len(ALPHABET)  # "="

VOCABULARY = len(ALPHABET) + 1
PROMPT_TOKENS = LETTERS + 1
ANSWER_TOKENS = LETTERS

Tokens = NDArray[np.uint8]
Floats = NDArray[np.float32]


def draw_prompts(count: int, random: np.random.Generator) -> Tokens:
    """Random prompts, one in each row."""
    letters = random.random((count, len(ALPHABET))).argsort(axis=1)[:, :LETTERS]
    return np.column_stack([letters, np.full(count, END_OF_PROMPT)]).astype(np.uint8)


def reward(tokens: Tokens) -> Floats:
    """Exact match: 1 for each row (prompt and answer) whose answer is right, 0 for every other."""
    asked, answered = tokens[:, :LETTERS], tokens[:, PROMPT_TOKENS:]
    right: Floats = (np.sort(asked, axis=1) == answered).all(axis=1).astype(np.float32)
    return right


def as_text(tokens: Tokens) -> str:
    """One row as people read it: "dbf=bdf"."""
    return "".join((ALPHABET + "=")[token] for token in tokens)
