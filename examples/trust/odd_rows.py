"""Cases of odd inputs: none, one, too long, not finite, equal, out-of-distribution."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import torch

from retex_hf import InputError, RetexError, RetexModel, TaskError
from retex_hf.model.components import extractor_of

from .oddities import FAR, Subject, case, holds, refused, same
from .subjects import TASKS, batch, texts

THRESHOLD = (0.97, 1.0)


def broken(subject: Subject, value: float) -> dict[str, torch.Tensor]:
    """Return two rows of every task, the fourth of which holds a value that is not finite."""
    rows = subject.embedded(subject.rows())
    rows["inputs_embeds"][3] = value
    return rows


@case("one, two, three references")
def few_references(subject: Subject) -> None:
    for count in (1, 2, 3):
        model = subject.build(signature_rank=6)
        model.fit_signatures({task: [subject.texts(task, count)] for task in TASKS}, progress=False)
        holds(model.signatures.thresholds(*THRESHOLD).isinf().all(), "a threshold from too few references")
        model.routing = FAR
        found = model.identify(**subject.rows())
        holds(not found.abstained.any() and found.residuals.isfinite().all(), f"{count} references: {found}")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = RetexModel.from_pretrained(folder)
        same(again.identify(**subject.rows()).residuals, found.residuals, "residuals after loading", 1e-5)


@case("fewer references than dimensions of the signature")
def fewer_than_rank(subject: Subject) -> None:
    model = subject.build(signature_rank=40)
    model.fit_signatures({task: [subject.texts(task, 6)] for task in TASKS}, progress=False)
    holds(model.signatures.basis.shape[1] == 5, f"{model.signatures.basis.shape[1]} dimensions of 6 references")
    # References lie in their own subspace; held-out inputs do not.
    own = torch.stack([model.identify(**subject.texts(task, 6)).residuals[:, i] for i, task in enumerate(TASKS)])
    thresholds = model.signatures.thresholds(1.0, 1.0)
    holds((own.amax(1) < thresholds).all(), f"{own.amax(1)} and {thresholds}")


@case("references that are all the same")
def equal_references(subject: Subject) -> None:
    model = subject.build(routing=FAR)
    one = {task: {k: v[:1].expand(24, -1) for k, v in subject.texts(task, 1).items()} for task in TASKS}
    model.fit_signatures({task: [rows] for task, rows in one.items()}, progress=False)
    # Beside a longer text they are padded: the same numbers, up to rounding.
    longer = batch(subject.tokenizer, [texts(task, 1)[0] for task in TASKS] + [" ".join(texts("blue", 5))])
    found = model.identify(**longer)
    holds(found.tasks[:3] == list(TASKS) and not found.abstained[:3].any(), f"the same again: {found}")
    holds((found.residuals[:3].amin(1) > 0).any(), "padding changes nothing: the case tries nothing")
    other = model.identify(**subject.texts("blue", 4, seed=9))
    holds(other.abstained.any() and other.residuals.isfinite().all(), f"others: {other}")


@case("features that are constant")
def constant_features(subject: Subject) -> None:
    for model in (subject.base, *subject.experts.values()):
        model.get_input_embeddings().weight.data.zero_()
    model = subject.signed(routing=FAR)
    rows = subject.rows()
    found = model.identify(**rows)
    # Nothing separates the tasks: all rows go to one task, none is out-of-distribution, and nothing is NaN.
    holds(len(set(found.tasks)) == 1 and not found.abstained.any(), f"{found}")
    same(found.probabilities, torch.full((6, 3), 1 / 3), "probabilities", 1e-3)


@case("references with rows of NaN", "refused")
def nan_references(subject: Subject) -> None:
    model = subject.build()
    rows = subject.embedded(subject.texts("green", 8))
    rows["inputs_embeds"][5] = torch.nan
    references = {task: [rows if task == "green" else subject.texts(task, 8)] for task in TASKS}
    refused(lambda: model.fit_signatures(references, progress=False), "5", "green", "NaN or infinite")
    refused(lambda: model.fit_signatures({**references, "green": []}, progress=False), "green", "no reference inputs")


@case("an empty batch", "refused")
def empty_batch(subject: Subject) -> None:
    model = subject.signed()
    rows = {name: value[:0] for name, value in subject.rows().items()}
    for call in (model.identify, model.predict, model.generate if subject.family == "t5" else model.forward):
        refused(lambda call=call: call(**rows), "no rows", by=InputError)
    refused(lambda: model(**rows, task="red"), "no rows", by=InputError)
    refused(lambda: model(**rows, task=[]), "no rows", by=InputError)


@case("a batch of one")
def batch_of_one(subject: Subject) -> None:
    model = subject.signed(routing=FAR)
    rows = subject.rows()
    together = subject.answer(model, rows)
    for row in range(6):
        alone = subject.answer(model, {name: value[row : row + 1] for name, value in rows.items()})
        same(alone[0], together[row], f"row {row}")


@case("a text longer than the model's positions")
def too_long(subject: Subject) -> None:
    model = subject.signed()
    rows, before = subject.rows(), subject.answer(model, subject.rows())
    long = {name: value.repeat(1, 20) for name, value in rows.items()}
    if subject.family == "bert":  # the wrapped model's own error (in one pass, ours quotes it), without side effects
        own = (IndexError, RuntimeError, RetexError)
        refused(lambda: subject.answer(model, long), by=own)
        refused(lambda: subject.answer(model, long, task="red"), by=own)
    else:
        own = subject.answer(model.merge_and_unload("red"), long)
        same(subject.answer(model, long, task="red"), own, "a long text")
    same(subject.answer(model, rows), before, "the next call")


@case("features that are NaN or infinite", "refused")
def no_numbers(subject: Subject) -> None:
    model = subject.signed()
    for routing in ("hard", "soft", {"method": "hard", "far": "soft"}):
        model.routing = routing
        for value in (torch.nan, torch.inf, 3e38):
            rows = broken(subject, value)
            refused(lambda rows=rows: model.identify(**rows), "row 3", by=InputError)
            refused(lambda rows=rows: subject.output(model, rows), "row 3", by=InputError)


@case("features that are NaN, of rows that may be far")
def far_no_numbers(subject: Subject) -> None:
    model = subject.signed(routing=FAR)
    near = subject.embedded(subject.rows())
    expected = model.identify(**near)
    for value in (torch.nan, torch.inf):
        output = subject.output(model, broken(subject, value))
        found = output.routing
        holds(found.abstained[3] and found.weights[3].eq(0).all(), f"row 3 is not far: {found}")
        others = [0, 1, 2, 4, 5]
        holds(torch.equal(found.abstained[others], expected.abstained[others]), "other rows are far because of it")
        same(found.probabilities.sum(1), torch.ones(6), "sums of probabilities", 1e-5)
        found = output.logits[others].masked_fill(output.logits[others] == -torch.inf, 0)
        same(found, subject.answer(model, near)[others], "the other rows")


@case("a float16 model whose features overflow", "refused")
def half_overflow(subject: Subject) -> None:
    model = subject.signed()
    model.half()
    rows = subject.embedded(subject.rows())
    rows["inputs_embeds"] = rows["inputs_embeds"].half()
    rows["inputs_embeds"][2] = 6e4
    rows["inputs_embeds"][2, :, ::2] = -6e4
    features = extractor_of(model.parts(), [model.signatures.feature_layer])(rows)[model.signatures.feature_layer]
    if features.isfinite().all():  # normalisation in float32 may keep it finite; then it must be answered
        model.identify(**rows)
        rows["inputs_embeds"][2] = torch.inf
    refused(lambda: model.identify(**rows), "row 2", by=InputError)


@case("temperatures from 1e-300 to 1e300")
def temperatures(subject: Subject) -> None:
    rows = subject.rows()
    model = subject.signed(routing="soft")
    for temperature in (1e-300, 1e-30, 1e30, 1e300):
        model.retex_config = replace(model.retex_config, temperature=temperature)
        found = subject.output(model, rows).routing
        same(found.probabilities.sum(1), torch.ones(6), "sums of probabilities", 1e-5)
        largest = found.probabilities.amax(1)
        same(largest, torch.full((6,), 1.0 if temperature < 1 else 1 / 3), f"temperature {temperature}", 1e-4)
        holds(torch.equal(found.task_ids, found.residuals.argmin(1)), "the task is not the nearest")
        if temperature < 1:
            own = subject.answer(model, rows, task=found.tasks)
            same(subject.answer(model, rows), own, "next to no temperature is hard routing")


@case("mixing weights that are no weights", "refused")
def wrong_weights(subject: Subject) -> None:
    model = subject.signed()
    rows = subject.texts("red", 2)
    good = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    same(subject.answer(model, rows, task=good)[1], subject.answer(model, rows, task=["red", "green"])[1], "weights")
    for bad in ([-0.5, 1.0, 0.5], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [torch.nan, 0.5, 0.5], [torch.inf, 0.0, 0.0]):
        wrong = good.clone()
        wrong[1] = torch.tensor(bad)
        refused(lambda wrong=wrong: subject.answer(model, rows, task=wrong), "row 1", by=TaskError)


@case("rows that are far among rows that are near")
def far_rows(subject: Subject) -> None:
    for config in ({"recovery_dtype": "int8"}, {"recovery": "affine", "shared_trunk": True}):
        model, whole = subject.signed(**config), "shared_trunk" not in config
        rows = subject.rows()
        draw = torch.Generator().manual_seed(subject.seed)
        stray = torch.randint(3, len(subject.tokenizer), (4, rows["input_ids"].shape[1]), generator=draw)
        ids = torch.cat([rows["input_ids"], stray])
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        model.routing = {**FAR, "slack": 2.0}
        nobody = model.identify(**rows).abstained
        for routing in (FAR, {"method": "hard", "far": "soft"}, {"method": "soft", "far": "merged"}):
            model.routing = routing
            output = subject.output(model, rows)
            found = output.routing
            holds((found.abstained | ~nobody).all() and found.abstained[6:].any(), f"{found.abstained.tolist()}")
            answers = output.logits.masked_fill(output.logits == -torch.inf, 0)
            far = found.abstained.nonzero().flatten()
            part = {name: value[far] for name, value in rows.items()}
            names = [found.tasks[row] for row in far.tolist()]
            if routing["far"] == "merged":
                holds(found.weights[far].eq(0).all(), "far rows have weights")
                with model.disable_adapter():
                    expected = subject.answer(model, part, task=names)
            else:
                holds(torch.equal(found.weights[far], found.probabilities[far]), "far rows are not mixed")
                expected = subject.answer(model, part, task=found.probabilities[far] if whole else None)
            same(answers[far], expected, f"far rows under {routing}, {config}")
            near = (~found.abstained).nonzero().flatten()
            part = {name: value[near] for name, value in rows.items()}
            given = (
                found.probabilities[near] if routing["method"] == "soft" else [found.tasks[r] for r in near.tolist()]
            )
            # Named rows run on whole experts. Behind a shared trunk, rows must be what they are without the far ones.
            expected = subject.answer(model, part, task=given if whole else None)
            same(answers[near], expected, f"near rows under {routing}, {config}")


@case("far rows after tasks came and went")
def thresholds_follow(subject: Subject) -> None:
    model = subject.signed({task: subject.experts[task] for task in ("red", "green")}, routing=FAR)
    before = model.signatures.thresholds(*THRESHOLD)
    model.add_task(
        "blue", subject.experts["blue"], references=[subject.texts("blue", 24)], check_base=False, progress=False
    )
    after = model.signatures.thresholds(*THRESHOLD)
    holds(torch.equal(after[:2], before) and after[2].isfinite(), f"{before}, then {after}")
    holds(model.routing == FAR, f"routing is {model.routing}")
    model.delete_task("red")
    holds(torch.equal(model.signatures.thresholds(*THRESHOLD), after[1:]), "thresholds of other tasks")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = RetexModel.from_pretrained(folder)
        holds(torch.equal(again.signatures.held_out, model.signatures.held_out), "held-out residuals")
        holds(again.routing == FAR, f"routing is {again.routing} after loading")


@case("far rows without references", "refused")
def weights_have_no_far(subject: Subject) -> None:
    refused(lambda: subject.build(signatures="weights", routing=FAR), "routing", "signatures")
    model = subject.build(signatures="weights")
    refused(lambda: setattr(model, "routing", FAR), "routing", "signatures")
    holds(model.routing == "hard", "a refused routing was taken")


@case("texts that are no texts", "refused", families=("bert",))
def wrong_task(subject: Subject) -> None:
    model = subject.signed()
    refused(lambda: model(**subject.rows(), task="purple"), "purple", by=TaskError)
    refused(lambda: model(attention_mask=torch.ones(2, 3)), by=InputError)
