"""The reward functions that come with the package."""

import re
import threading

import pytest

from prl_notebook.tasks.math_rewards import accuracy_reward, last_integer_reward, think_answer_format_reward
from prl_notebook.tasks.reasoning import reasoning_gym_reward
from prl_notebook.tasks.smollm2 import addition_reward
from prl_notebook.tasks.tiny import running_sum_reward


def chat(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


MATHS = [
    (r"So the answer is $\frac{1}{2}$.", "1/2", 1.0),
    (r"Therefore \boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\frac{2}{4}}", r"\boxed{\frac{1}{2}}", 1.0),
    ("The answer is 42.", 42, 1.0),
    ("The answer is 43.", "42", 0.0),
    ("I do not know.", "42", 0.0),
    ("The answer is 42.", "", None),
]


def test_accuracy_is_mathematical_and_abstains_without_a_parsable_answer():
    texts, answers, expected = zip(*MATHS, strict=True)
    assert accuracy_reward(list(texts), answer=list(answers)) == list(expected)
    assert accuracy_reward(chat(*texts), solution=list(answers), answer=["7"] * len(MATHS)) == list(expected)
    with pytest.raises(ValueError, match="needs a dataset column 'solution' or 'answer'"):
        accuracy_reward(["1"])


def test_accuracy_works_outside_the_main_thread_and_logs_what_it_found():
    found, logs = [], {}
    thread = threading.Thread(
        target=lambda: found.extend(accuracy_reward([r"\boxed{2}"], answer=["2"], log_extra=logs.__setitem__))
    )
    thread.start()
    thread.join()
    assert found == [1.0]
    assert logs == {"answer_parsed": ["2"]}


def test_last_integer():
    texts = ["7 + 4 = 11.", "11 or 12", "minus -3", "none", "007", "9" * 5000]
    assert last_integer_reward(texts, [11, 11, "-3", 1, 8, 9]) == [1, 0, 1, 0, 0, 0]
    assert last_integer_reward(chat("7 + 4 = 11."), [11]) == [1]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>1+1\n</think>\n<answer>2</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>2</answer>", 0.0),
        ("<think>1</think>2", 0.0),
        ("<think>1</think><answer>2</answer>!", 0.0),
        ("<think>1</think><think>1</think><answer>2</answer>", 0.0),
        ("<think>1</think><answer>2</answer><answer>3</answer>", 0.0),
    ],
)
def test_format(text, reward):
    assert think_answer_format_reward([text]) == think_answer_format_reward(chat(text)) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>7+4=11,11-2=9</think><answer>9</answer>", 1.0),
        ("<think>nonsense</think><answer>9</answer>", 1.0),  # only the answer counts, as GRPO is to find out itself
        ("<answer>9</answer>", 1.0),
        ("<answer>8</answer>", 0.0),
        ("<answer>9</answer>.", 0.0),
        ("<think>7+4=11<answer>9</answer>", 0.0),
        ("<think>7+4=11</think>9", 0.0),
        ("", 0.0),
    ],
)
def test_running_sum(text, reward):
    assert running_sum_reward(chat(text), [9]) == [reward]


def test_addition_needs_the_right_integer_and_an_end():
    completions = chat("7 + 4 = 11", "7 + 4 = 11", "12")
    assert addition_reward(completions, [[5, 2], [5, 6], [5, 2]], [11] * 3) == [1.0, 0.0, 0.0]


def test_reasoning_gym_scores_with_its_own_function():
    from prl_notebook.tasks.reasoning import reasoning_rows

    rows = reasoning_rows("leg_counting", rows=2)
    assert re.search("how many legs", rows[0]["question"])
    assert rows[0]["prompt"][0]["content"].startswith(rows[0]["question"])
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    right, wrong = f"so <answer> {rows[0]['answer']} </answer>", "<answer>-1</answer>"
    assert reasoning_gym_reward(chat(right, wrong), **columns) == [1.0, 0.0]
    assert reasoning_gym_reward([rows[0]["answer"], rows[1]["answer"]], **columns) == [1.0, 1.0]
