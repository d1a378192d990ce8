"""The mixed stream: what is asked in each mode, what counts as right, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toys import NAMES, Toy, toy_collate, toy_tasks

from retex_hf import RetexError
from retex_hf.evaluation import Evaluation, Prediction, TaskData, evaluate
from retex_hf.evaluation.run import mixed_batches


def run(method, tasks=None, **options):
    return evaluate(method, tasks or toy_tasks(), toy_collate, **{"batch_size": 4, "progress": False} | options)


def test_scores_are_by_row_of_each_task():
    found = run(Toy(wrong={"red": [2], "blue": [0, 8]}, blind=["green"]))
    assert list(found.scores) == ["known", "unknown", "oracle"] and found.tasks == NAMES
    for mode in found.scores:
        assert found.scores[mode]["red"].correct.tolist() == [row != 2 for row in range(7)]
        assert found.scores[mode]["blue"].correct.tolist() == [row not in (0, 8) for row in range(9)]
    # Right class, wrong head: only where the task is unknown does that count against the method.
    assert found.scores["known"]["green"].correct.all() and found.scores["oracle"]["green"].correct.all()
    assert not found.scores["unknown"]["green"].correct.any()
    assert [found.scores["unknown"][task].identified.mean() for task in NAMES] == [1, 0, 1]
    assert found.scores["known"]["red"].identified is None
    assert (found.method, found.storage_bytes, found.state) == ("toy", 400, {"blind": ["green"]})


def test_true_tasks_are_told_only_where_the_mode_allows_it():
    method = Toy()
    run(method)
    per_mode = len(method.asked) // 3
    known, unknown, oracle = (method.asked[start : start + per_mode] for start in range(0, 3 * per_mode, per_mode))
    assert all(tasks is None and not truth for _, tasks, truth in unknown)
    assert all(tasks is not None and not truth for _, tasks, truth in known)
    assert all(tasks is not None and truth for _, tasks, truth in oracle)
    assert [tasks for _, tasks, _ in known] == [tasks for _, tasks, _ in oracle]  # one stream for all modes
    assert any(len(set(tasks)) > 1 for _, tasks, _ in known)  # and it is mixed


def test_modes_that_a_method_does_not_have_are_left_out():
    method = Toy()
    method.routes = False
    assert list(run(method).scores) == ["known", "unknown"]
    method.modes = ("known",)
    assert list(run(method).scores) == ["known"]
    with pytest.raises(RetexError, match=r"toy can be evaluated in the modes \['known'\], not in \['unknown'\]"):
        run(method, modes=["unknown"])
    with pytest.raises(RetexError, match="There is no mode 'agnostic'"):
        run(method, modes=["agnostic"])


def test_the_seed_orders_the_stream_and_loses_nothing():
    first, second = (mixed_batches([7, 5, 9], 4, seed) for seed in (0, 1))
    assert first == mixed_batches([7, 5, 9], 4, 0) and first != second
    every_row = [(task, row) for task, size in enumerate((7, 5, 9)) for row in range(size)]
    for batches in (first, second):
        assert sorted(place for batch in batches for place in batch) == every_row
    assert [len(batch) for batch in first] == [4, 4, 4, 4, 4, 1]
    with pytest.raises(RetexError, match="batch_size must be at least 1, not 0"):
        run(Toy(), batch_size=0)


def test_a_text_counts_by_itself_whatever_task_it_was_taken_for():
    class Writer(Toy):
        def predict(self, inputs, tasks=None, *, oracle=False):
            answers = [" Yes" if label % 2 == 0 else "maybe" for _, label, _ in inputs["rows"].tolist()]
            return Prediction(answers, ["red"] * len(answers) if self.says else None)

    tasks = [TaskData(task.name, task.inputs, ["yes"] * len(task)) for task in toy_tasks()]
    for says in (True, False):
        method = Writer()
        method.says = says
        found = run(method, tasks, modes=["unknown"]).scores["unknown"]
        assert found["green"].correct.tolist() == [True, False, True, False, True]
        assert (found["green"].identified is None) == (not says)
    assert not run(Toy(), tasks).scores["known"]["red"].correct.any()  # a class number is not a text


def test_an_evaluation_is_written_and_read_back(tmp_path):
    found = replace(run(Toy(wrong={"red": [2]}, blind=["green"]), seed=3), packed_bytes=7)
    found.save(tmp_path / "a" / "toy.json")
    read = Evaluation.load(tmp_path / "a" / "toy.json")
    assert (read.method, read.storage_bytes, read.state, read.seed) == ("toy", 400, {"blind": ["green"]}, 3)
    assert read.packed_bytes == 7
    for mode, scores in found.scores.items():
        for task, score in scores.items():
            np.testing.assert_array_equal(read.scores[mode][task].correct, score.correct)
            if mode == "unknown":
                np.testing.assert_array_equal(read.scores[mode][task].identified, score.identified)
            else:
                assert read.scores[mode][task].identified is None
    (tmp_path / "half.json").write_text('{"method": "toy"}')
    with pytest.raises(RetexError, match=r"half\.json is not an evaluation"):
        Evaluation.load(tmp_path / "half.json")


INPUT = (0, 0, 0)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "There are no tasks to evaluate on"),
        ([TaskData("red", [], [])], "Task 'red' has no rows"),
        ([TaskData("red", [INPUT], [0]), TaskData("red", [INPUT], [0])], "Task 'red' is given twice"),
        ([TaskData("red", [INPUT], [0, 1])], "Task 'red' has 1 inputs but 2 answers"),
        ([TaskData("red", [INPUT], [None])], r"Row 0 of task 'red' has no label \(None\)"),
        ([TaskData("red", [INPUT] * 2, [0, -1])], r"Row 1 of task 'red' has no label \(-1\)"),
        ([TaskData("red", [INPUT], [float("nan")])], r"Row 0 of task 'red' has no label \(nan\)"),
        ([TaskData("red", [INPUT], [-2])], "Row 0 of task 'red' has label -2, which is below 0"),
        ([TaskData("red", [INPUT], [1.5])], "Row 0 of task 'red' has label 1.5, which is not an integer"),
        ([TaskData("red", [INPUT] * 2, [0, "a"])], r"Task 'red' mixes texts and class numbers .*row 1"),
        (
            [TaskData("red", [INPUT] * 2, [1, 2], ["no", "yes"])],
            r"Row 1 .* label 2, which is outside the head's 2 classes",
        ),
    ],
)
def test_wrong_data_is_refused_before_anything_runs(tasks, message):
    method = Toy()
    with pytest.raises(RetexError, match=message) as caught:
        evaluate(method, tasks, toy_collate, progress=False)
    assert not method.asked and "\n" not in str(caught.value)


def test_the_width_of_the_head_may_be_given():
    run(Toy(), num_labels={"red": 4})
    with pytest.raises(RetexError, match=r"Row 3 of task 'red' has label 3, .* head's 3 classes \(0 to 2\)"):
        run(Toy(), num_labels={"red": 3})


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        (lambda n: Prediction([0] * (n + 1), ["red"] * n), r"toy gave 5 answers to a batch of 4 rows of '\w+'"),
        (lambda n: Prediction([0] * n, ["red"]), r"toy named 1 tasks for a batch of 4 rows"),
        (lambda n: Prediction([0] * n, None), r"toy did not give the task of each row"),
        (lambda n: Prediction([0] * n, ["pink"] * n), r"toy assigned a row of task '\w+' to 'pink', .*'blue', 'green'"),
    ],
)
def test_answers_that_do_not_fit_the_batch_are_refused(prediction, message):
    method = Toy()
    method.predict = lambda inputs: prediction(len(inputs["rows"]))
    with pytest.raises(RetexError, match=message):
        run(method, modes=["unknown"])


def test_a_method_may_take_rows_for_tasks_that_are_not_evaluated():
    found = run(Toy(blind=["green"]), toy_tasks()[1:], num_labels={name: 4 for name in NAMES}, modes=["unknown"])
    assert not found.scores["unknown"]["green"].identified.any()
