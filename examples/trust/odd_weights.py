"""Cases of experts with odd numbers: narrow, denormal, huge, equal, few, many."""

from __future__ import annotations

from copy import deepcopy

import torch

from retex_hf import RetexConfig, RetexModel, TrainingConfig

from .oddities import Subject, case, copies, errors_are_shares, finite_recovery, holds, refused, same
from .subjects import TASKS, moved

MANY = 50


def experts_come_back(subject: Subject, model: RetexModel, tolerance: float = 1e-4) -> None:
    """Check that every task's answers are those of its expert."""
    rows = subject.rows()
    for task in model.tasks:
        expert = subject.experts[task].float()
        same(subject.answer(model, rows, task=task), subject.answer(expert, rows), f"expert {task!r}", tolerance)


@case("experts in float32, float16 and bfloat16, base in float16")
def narrow_experts(subject: Subject) -> None:
    subject.base.half()
    subject.experts["green"].half()
    subject.experts["blue"].bfloat16()
    experts_come_back(subject, subject.build(rank="full"))


@case("the first expert in bfloat16, the others in float32")
def narrow_first(subject: Subject) -> None:
    subject.experts["red"].bfloat16()
    model = subject.build(rank="full")
    name, _ = subject.matrix(subject.base)
    for task in TASKS:
        found = model.recover(task)[name]
        holds(found.dtype == torch.bfloat16, f"{name!r} is {found.dtype}")
        same(found, subject.experts[task].state_dict()[name], f"{name!r} of {task!r}", 2**-8)


@case("weights beyond float16, the dtype of the first expert", "refused")
def beyond_half(subject: Subject) -> None:
    name, weight = subject.matrix(subject.experts["green"])
    subject.experts["red"].half()
    model = subject.build({task: subject.experts[task] for task in ("red", "blue")})
    weight.data[0, 0] = 1e5
    refused(subject.build, "green", name, "1.0e+05", "float16")
    refused(lambda: model.add_task("green", subject.experts["green"], check_base=False, progress=False), "green", name)


@case("differences of 1e-42")
def denormals(subject: Subject) -> None:
    for model in (subject.base, *subject.experts.values()):
        _, weight = subject.matrix(model)
        weight.data = 1e-42 * torch.randn(weight.shape)
    name, _ = subject.matrix(subject.base)
    model = subject.build()
    finite_recovery(model)
    errors_are_shares(model)
    for task in TASKS:
        missed = (model.recover(task)[name].double() - subject.experts[task].state_dict()[name].double()).norm()
        holds(missed <= 1e-40, f"{name!r} of {task!r} is off by {missed:.1e}")
    experts_come_back(subject, subject.build(rank="full"))


@case("weights of 1e30")
def huge(subject: Subject) -> None:
    name, _ = subject.matrix(subject.base)
    for model in (subject.base, *subject.experts.values()):
        subject.matrix(model)[1].data *= 1e30
    model = subject.build()
    finite_recovery(model)
    errors_are_shares(model)
    merged = model.model.state_dict()[name].double()
    energy = missed = 0.0
    for task in TASKS:
        expert = subject.experts[task].state_dict()[name].double()
        energy += (expert - merged).square().sum().item()
        missed += (expert - model.recover(task)[name].double()).square().sum().item()
    share = (missed / energy) ** 0.5
    holds(abs(share - model.recovery_errors[name]) < 1e-3, f"the error is {share}, not {model.recovery_errors[name]}")


@case("an expert of tiny or huge weights descends from its base")
def related_at_any_scale(subject: Subject) -> None:
    for scale in (1e-30, 1e30):
        base = deepcopy(subject.base)
        for parameter in base.parameters():
            parameter.data *= scale
        expert, unrelated = deepcopy(base), deepcopy(base)
        for own, other in zip(expert.parameters(), unrelated.parameters(), strict=True):
            own.data *= 1 + 0.1 * torch.randn(own.shape)
            other.data = scale * torch.randn(other.shape)
        RetexModel.from_experts(base, {"one": expert}, RetexConfig(rank=2), progress=False)
        refused(
            lambda base=base, unrelated=unrelated: RetexModel.from_experts(
                base, {"other": unrelated}, RetexConfig(rank=2), progress=False
            ),
            "other",
            "does not descend",
        )


@case("differences from 1e-20 to 1e3 in one matrix")
def scales_in_one_matrix(subject: Subject) -> None:
    for expert in subject.experts.values():
        _, weight = subject.matrix(expert)
        weight.data += torch.randn(weight.shape) * 10 ** torch.linspace(-20, 3, weight.shape[1])
    model = subject.build()
    finite_recovery(model)
    errors_are_shares(model)
    experts_come_back(subject, subject.build(rank="full"), 1e-3)


@case("all experts are equal")
def equal_experts(subject: Subject) -> None:
    subject.experts = copies(subject.experts["green"])
    for config in (
        {},
        {"rank": None, "storage": 0.1},
        {"recovery": "affine"},
        {"recovery_dtype": "int8"},
        {"rank": "full"},
    ):
        model = subject.signed(**config)
        holds(len(model.recovery) == 0, f"{len(model.recovery)} parameters are recovered under {config}")
        experts_come_back(subject, model)
        routed = subject.output(model, subject.rows()).routing
        holds(routed.tasks == [task for task in TASKS for _ in range(2)], f"routed to {routed.tasks}")


@case("all experts are the base")
def base_experts(subject: Subject) -> None:
    subject.experts = copies(subject.base)
    model = subject.signed()
    holds(len(model.recovery) == 0, "something is recovered")
    experts_come_back(subject, model)


@case("two experts are equal, and so are their references")
def twins(subject: Subject) -> None:
    subject.experts["green"] = deepcopy(subject.experts["red"])
    model = subject.build(rank=8)
    references = {task: subject.texts("red" if task == "green" else task, 24) for task in TASKS}
    model.fit_signatures({task: [rows] for task, rows in references.items()}, progress=False)
    for rows in (1, 2, 7):
        found = model.identify(**subject.texts("red", rows, seed=rows))
        holds(found.tasks == ["red"] * rows, f"a tie went to {found.tasks}")
        holds(torch.equal(found.probabilities[:, 0], found.probabilities[:, 1]), "equal tasks, other probabilities")
    one, other = (model.recover(task) for task in ("red", "green"))
    holds(all(torch.equal(one[name], other[name]) for name in one), "equal experts are recovered differently")


@case("one task")
def one_task(subject: Subject) -> None:
    model = subject.signed({"green": subject.experts["green"]}, routing={"method": "hard", "far": "soft"})
    rows = subject.rows()
    found = model.identify(**rows)
    holds(found.tasks == ["green"] * 6 and found.probabilities.eq(1).all(), f"{found.tasks}, {found.probabilities}")
    expected = subject.answer(subject.experts["green"], rows)
    for routing in ("hard", "soft", model.routing):
        model.routing = routing
        same(subject.answer(model, rows), expected, f"routing {routing!r}")
    refused(lambda: model.delete_task("green"), "only task")
    model.add_task(
        "red",
        subject.experts["red"],
        references=[subject.texts("red", 24)],
        check_base=False,
        progress=False,
        tolerance=0,
    )
    same(subject.answer(model, rows, task="red"), subject.answer(subject.experts["red"], rows), "the added task", 1e-3)
    model.delete_task("green")
    same(subject.answer(model, rows), subject.answer(subject.experts["red"], rows), "the task that is left", 1e-3)


@case("fifty tasks")
def fifty_tasks(subject: Subject) -> None:
    experts = {f"task {number}": moved(subject.experts["red"], number) for number in range(MANY)}
    model = subject.build(experts, rank=1)
    draw = torch.Generator().manual_seed(subject.seed)
    length = len(subject.tokenizer)
    ids = torch.randint(3, length, (MANY, 4, 6), generator=draw)
    model.fit_signatures({task: [{"input_ids": own}] for task, own in zip(experts, ids, strict=True)}, progress=False)
    rows = {"input_ids": ids[:, 0]}
    output = subject.output(model, rows)
    named = subject.answer(model, rows, task=output.routing.tasks)
    same(output.logits, named, "routed against named")
    sums = output.routing.probabilities.sum(1)
    same(sums, torch.ones(MANY), "sums of probabilities", 1e-5)


@case("ranks from 1 to beyond every matrix")
def ranks(subject: Subject) -> None:
    before = None
    for rank in (1, 2, 5, 1000):
        model = subject.build(rank=rank)
        finite_recovery(model)
        errors_are_shares(model)
        errors = model.recovery_errors
        worse = [n for n in errors if before is not None and errors[n] > before.get(n, 1.0) + 1e-4]
        holds(not worse, f"rank {rank} is worse than a smaller one in {worse}")
        before = errors


@case("a budget that is too small for anything")
def no_budget(subject: Subject) -> None:
    model = subject.signed(rank=None, storage=1e-9)
    holds(len(model.recovery) == 0, "something is stored")
    rows = subject.rows()
    with model.disable_adapter():
        merged = subject.answer(model, rows, task="red")
    same(subject.answer(model, rows, task="red"), merged, "the merged model")


@case("an expert with NaN", "refused")
def nan_expert(subject: Subject) -> None:
    name, weight = subject.matrix(subject.experts["blue"])
    for value in (torch.nan, torch.inf, -torch.inf):
        weight.data[1, 1] = value
        refused(subject.build, "blue", name, "NaN or infinite")


@case("a base with infinity", "refused")
def infinite_base(subject: Subject) -> None:
    name, weight = subject.matrix(subject.base)
    weight.data[0, 0] = torch.inf
    refused(subject.build, "base", name, "NaN or infinite")


@case("int8 storage of rows that are zero, denormal and 1e30")
def narrow_storage(subject: Subject) -> None:
    name, weight = subject.matrix(subject.base)
    for expert in subject.experts.values():
        own = subject.matrix(expert)[1]
        own.data = weight.data.clone()
        own.data[1] += 1e-42
        own.data[2] += 1e30 * torch.randn(own.shape[1])
    for dtype in ("int8", "bfloat16"):
        for rank in ("full", 4):
            model = subject.build(rank=rank, recovery_dtype=dtype)
            finite_recovery(model)
            errors_are_shares(model)
            for task in TASKS:
                found, expected = model.recover(task)[name], subject.experts[task].state_dict()[name]
                same(found[2], expected[2], f"{dtype} at rank {rank}", 0.02)
                if rank == "full":
                    same(found[0], expected[0], f"a row that does not change, {dtype}", 1e-6)


@case("float16 storage of factors beyond it", "refused")
def beyond_storage(subject: Subject) -> None:
    for expert in subject.experts.values():
        subject.matrix(expert)[1].data *= 1e6
    refused(lambda: subject.build(recovery_dtype="float16"), "float16")


@case("gradients of equal, duplicate and single experts")
def gradients(subject: Subject) -> None:
    twins = {"red": subject.experts["red"], "green": deepcopy(subject.experts["red"]), "blue": subject.experts["blue"]}
    for experts in (twins, {"red": subject.experts["red"]}):
        model = subject.build(experts)
        model.recovery.requires_grad_(True)
        model.train()
        model.execution = "auto"  # one pass is refused in training mode
        rows = subject.texts("red", 3)
        labels = torch.zeros(3, dtype=torch.long) if subject.family == "bert" else torch.ones(3, 2, dtype=torch.long)
        loss = model(**rows, labels=labels, task="red").loss
        if len(model.recovery):
            loss.backward()
        wrong = [n for n, p in model.recovery.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        holds(not wrong and loss.isfinite(), f"loss {loss}, gradients of {wrong}")


@case("training on weights whose squares overflow", "refused")
def training_overflow(subject: Subject) -> None:
    for expert in subject.experts.values():
        subject.matrix(expert)[1].data *= 1e30
    options = RetexConfig(rank=2)
    refused(
        lambda: RetexModel.from_experts(
            subject.base, subject.experts, options, solver="adam", training=TrainingConfig(steps=2, warmup_steps=0),
            progress=False, check_base=False,
        ),
        "loss",
        "closed_form",
    )  # fmt: skip


@case("training where there is nothing to recover")
def nothing_to_train(subject: Subject) -> None:
    experts = copies(subject.experts["red"])
    model = RetexModel.from_experts(
        subject.base, experts, RetexConfig(rank=2), solver="adam", training=TrainingConfig(steps=2, warmup_steps=0),
        progress=False, check_base=False,
    )  # fmt: skip
    subject.experts = experts
    experts_come_back(subject, model)
    holds(len(model.recovery) == 0, "something is recovered")
