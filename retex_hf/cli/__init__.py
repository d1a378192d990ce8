"""The command line: `retex COMMAND`.

Exit codes: 0 success, 2 invalid input (one line on standard error), 130 interrupted, 1 a bug in this library, with a
traceback.
"""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

from . import streams

# Command -> (module, options class, summary). Modules are imported when their command is called, so that `retex --help`
# does not wait for torch.
COMMANDS = {
    "build": ("build", "BuildOptions", "merge experts and solve for the recovery of each, from a recipe or flags"),
    "sign": ("sign", "SignOptions", "fit the signatures that tell tasks apart, from data files or datasets"),
    "eval": ("evaluate", "EvalOptions", "measure accuracy and identification on a mixed stream of all tasks"),
    "predict": ("predict", "PredictOptions", "answer texts or images, each by its own expert"),
    "serve": ("serve", "ServeOptions", "serve an artifact over HTTP: one OpenAI-compatible endpoint that routes"),
    "inspect": ("inspect", "InspectOptions", "tasks, ranks, storage, spectra and provenance of an artifact"),
    "verify": ("verify", "VerifyOptions", "check every file and tensor of an artifact, without loading it"),
    "export": ("export", "ExportOptions", "write one task as a plain checkpoint or as a LoRA adapter"),
    "add-task": ("tasks", "AddTaskOptions", "add an expert to an artifact, without the others at hand"),
    "remove-task": ("tasks", "RemoveTaskOptions", "remove a task from an artifact"),
    "push": ("push", "PushOptions", "upload an artifact and its card to the Hub"),
    "demo": ("demo", "DemoOptions", "open a page in the browser to try an artifact"),
}
OVERVIEW = """usage: retex COMMAND [options]

Merge fine-tuned experts into one model that recovers the right expert for every input.

commands:
{commands}

  retex COMMAND --help      options and examples of a command
  retex --version           the version

Example, from experts to answers:
  retex build --base org/base --expert a=org/expert-a --expert b=org/expert-b --storage 2% --output-dir my-retex
  retex sign my-retex --data a=a.txt --data b=b.txt
  retex predict my-retex inputs.txt
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = f"retex {arguments[0]}" if arguments and arguments[0] in COMMANDS else "retex"
    closed = sys.stdout is None
    streams.prepare()
    if closed:
        streams.complain(f"{name}: standard output is closed: there is nowhere to put results.")
        return 2
    code, leaving = 0, None
    try:
        try:
            code = _dispatch(arguments)
        except SystemExit as error:  # argparse has printed its help or its error
            leaving = error
        sys.stdout.flush()  # flush here: at interpreter exit, a full disk would print a traceback
    except BrokenPipeError:  # the reader has closed the pipe, as in `retex predict ... | head`
        streams.abandon()
        return code
    except OSError as error:
        streams.abandon()
        if code == 0:  # otherwise the error has been reported already
            streams.complain(f"{name}: standard output: {error.strerror}.")
        return 2
    if leaving is not None:
        raise leaving
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {text}" for name, (_, _, text) in COMMANDS.items()]
        print(OVERVIEW.format(commands="\n".join(lines)), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"retex {version('retex-hf')}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}."
        streams.complain(f"retex: there is no command {name!r}; {hint}")
        return 2
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    from ..errors import RetexError, first_line
    from ..utils.terminal import visible

    module_name, class_name, _ = COMMANDS[name]
    try:
        options = getattr(import_module(f".{module_name}", __name__), class_name)
        parsed = options.parse(f"retex {name}", arguments)
        _be_quiet()
        _run_within_memory(name, parsed)
    except RetexError as error:
        streams.complain(visible(f"retex {name}: {error}", keep="\n\t"))
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, or a folder without write permission
        where = f"{error.filename}: " if error.filename else ""
        streams.complain(visible(f"retex {name}: {where}{error.strerror or first_line(error)}."))
        return 2
    except KeyboardInterrupt:
        streams.complain(f"retex {name}: interrupted.")
        return 130
    return 0


def _run_within_memory(name: str, options: Any) -> None:
    from ..utils.devices import enough_memory

    with enough_memory(f"finish retex {name}"):
        options.run()


def _be_quiet() -> None:
    """Silence progress bars and advice of other libraries, which would hide the command's own output."""
    import datasets
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if not sys.stderr.isatty():
        disable_progress_bars()
