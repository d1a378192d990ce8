"""While a library reads an untrusted file, it asks nothing, fetches nothing, starts nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

import pytest

from retex_hf import CheckpointError
from retex_hf.backends.containment import contained


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        (lambda: input("Run the code? "), "ask a question on the terminal"),
        (lambda: socket.create_connection(("127.0.0.1", 9), timeout=1), "contact another machine"),
        (lambda: socket.getaddrinfo("localhost", 80), "contact another machine"),
        (lambda: subprocess.run(["true"]), "start a program"),
        (lambda: os.system("true"), "start a program"),
        (lambda: __import__("transformers_modules.evil"), "run code that comes with it"),
    ],
)
@pytest.mark.parametrize("swallowed", [False, True])
def test_what_a_library_may_not_do(tmp_path, deed, says, swallowed):
    def library() -> None:
        try:
            deed()
        except Exception:
            if not swallowed:
                raise

    refusal = pytest.raises(CheckpointError, match=f"config.json is refused: to load it, a library would {says}")
    with refusal, contained(tmp_path / "config.json"):
        library()


def test_containment_ends_and_holds_for_one_thread(tmp_path):
    reached = []

    def other() -> None:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        except OSError:
            reached.append("the network")

    with contained(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    other()
    assert reached == ["the network"] * 2
    with contained(tmp_path, network=True):
        other()
    assert len(reached) == 3
