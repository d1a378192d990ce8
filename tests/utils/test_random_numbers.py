import threading

import pytest
import torch
from trust import subjects

from retex_hf.utils.random_numbers import repeatable


def test_numbers_are_the_same_and_those_of_the_caller_go_on():
    torch.manual_seed(7)
    expected = [torch.rand(3) for _ in range(2)]
    torch.manual_seed(7)
    found, inside = [torch.rand(3)], []
    for _ in range(2):
        with repeatable(torch.device("cpu")):
            inside.append(torch.rand(3))
    found.append(torch.rand(3))
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert torch.equal(inside[0], inside[1]) and not torch.equal(inside[0], expected[0])


@pytest.mark.parametrize("execution", ["grouped", "mixed"])
def test_a_first_call_on_a_cpu_takes_no_lock_of_other_devices(execution):
    """A process that is forked while another thread holds one waits for it forever."""
    model, batch = subjects.make_model(), subjects.mixed_batch(subjects.make_tokenizer())
    model.execution = execution

    def call() -> None:
        with torch.no_grad():
            model(**batch)

    with torch.cuda._initialization_lock:
        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        calling.join(60)
        assert not calling.is_alive()
