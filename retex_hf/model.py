"""`RetexModel`: the merged model, its recovery and its signatures behind one model's interface."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_file_size_to_int
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers.utils import ModelOutput

from . import artifact, hub
from .build import build, build_folder
from .card import write_card
from .config import RetexConfig
from .errors import ConfigError, InputError, RetexError, TaskError
from .execution import (
    Assignment,
    ExpertCache,
    ExpertRunner,
    Group,
    TrunkRecord,
    attach_routing,
    call_method,
    check_execution,
    copy_with,
    parse_task,
    task_index,
    trunk_cost,
)
from .folders import check_target
from .labels import best_label
from .libraries import as_inputs, library_of, parse_dtype
from .lora import LoraExport, export_lora
from .parts import RetexParts
from .readout import Readout
from .recipe import signed_in_memory
from .recovery import TrainingConfig
from .routing import (
    FeatureExtractor,
    Routing,
    Signatures,
    WeightScorer,
    WeightSignatures,
    as_batches,
    decide,
    describe_trunk,
    feature_blocks,
    fit_signatures,
    keeps_cache,
    noted,
    resolve_feature_layers,
    trunk_parameters,
)
from .tasks import AddedTask, Turn, add_task, delete_task
from .tensor_bank import TensorBank
from .wrapped import shows_wrapped, without_shared_memory

# Methods of wrapped models that run on inputs; all others (`num_parameters`, `get_input_embeddings`) pass through.
ENTRY_POINT = re.compile(r"^(generate|encode_\w+|get_\w+_features|get_logits|forward_intermediates)$")
TEXT_ENTRY_POINT = re.compile(r"^(encode_text|get_text_features)$")

# Models whose recovery is switched off in the current context. Not an attribute of the model: one thread's
# `disable_adapter()` must not reach into another's call.
_disabled: ContextVar[frozenset[int]] = ContextVar("retex_disabled", default=frozenset())


class RetexModel(nn.Module):
    """One merged model that recovers the right expert for every row of a batch.

    Build it with [`from_experts`], teach it to tell tasks apart with [`fit_signatures`], keep it with
    [`save_pretrained`]; [`from_pretrained`] brings it back. `forward`, `generate`, `encode_image`, `get_image_features`
    and the like are those of the wrapped model, with one more argument: `task`, a task name, one name or id per row,
    or a (rows, tasks) tensor of mixing weights. Without it, each row's task is identified from the row itself. What was
    decided travels on the output as `output.routing`.

    As in PEFT, `model.config` is the wrapped model's configuration; ours is `model.retex_config`.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from retex_hf import RetexConfig, RetexModel
        >>> config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> base = BertModel(config)
        >>> experts = {}
        >>> for task in ("a", "b"):
        ...     noise = {name: 0.01 * torch.randn(weight.shape) for name, weight in base.state_dict().items()}
        ...     experts[task] = {name: weight + noise[name] for name, weight in base.state_dict().items()}
        >>> model = RetexModel.from_experts(base, experts, RetexConfig(rank="full"), progress=False)
        >>> ids = torch.randint(32, (3, 5))
        >>> model(input_ids=ids, task=["a", "b", "a"]).routing.tasks
        ['a', 'b', 'a']
    """

    def __init__(self, parts: RetexParts, *, expert_cache: str | int = "2GB", execution: str = "auto") -> None:
        super().__init__()
        self._turn = Turn()
        self._active_task: str | None = None
        self._cache = ExpertCache(_parse_size(expert_cache))
        self.execution = execution
        self._adopt(parts)
        _register_pipelines()
        self.eval()

    def _adopt(self, parts: RetexParts) -> None:
        self.retex_config = parts.config
        self.model = parts.model
        self.recovery = parts.recovery
        self.heads = TensorBank(parts.heads)
        self.pretrained = TensorBank({"base": parts.pretrained})
        self.signatures = parts.signatures
        self.recovery_errors = parts.errors
        self.training_history = parts.history
        self.recipe = parts.recipe
        self.evaluation = parts.evaluation
        self._side_folder = parts.side_folder

    def _frozen(self) -> RetexModel:
        """The model as it is at this moment, for one call: tasks that come or go meanwhile do not reach into it."""
        frozen = object.__new__(type(self))
        with self._turn:
            frozen.__dict__.update(self.__dict__, _modules=dict(self._modules))
        return frozen

    def _exchange(self, old: RetexParts, new: RetexParts) -> None:
        """Take new parts in the place of old ones, all at once."""
        with self._turn:
            current = (self.retex_config, self.recovery, self.signatures)
            if any(a is not b for a, b in zip(current, (old.config, old.recovery, old.signatures), strict=True)):
                raise RetexError("The model was changed by another thread meanwhile, so nothing was done: try again.")
            self._adopt(new)
            # Calls that are running go on with the cache they know, and leave nothing in this one.
            self._cache = self._cache.emptied()
            if self._active_task not in self.tasks:
                self._active_task = None

    # ---- build, save, load -------------------------------------------------------------------------------------------

    @classmethod
    def from_experts(
        cls,
        base: Any,
        experts: Mapping[str, Any],
        config: RetexConfig | None = None,
        *,
        solver: str = "closed_form",
        training: TrainingConfig | None = None,
        calibration: Mapping[str, Iterable[Any]] | None = None,
        readout: Readout | None = None,
        accelerator: Accelerator | None = None,
        model_config: str | dict[str, Any] | None = None,
        check_base: bool = True,
        expert_cache: str | int = "2GB",
        token: str | None = None,
        cache_dir: str | None = None,
        execution: str = "auto",
        output_dir: str | Path | None = None,
        max_shard_size: str | int = "5GB",
        resume: bool = True,
        progress: bool = True,
    ) -> RetexModel:
        """Merge experts and solve for the recovery of each.

        With `output_dir` the result goes straight into that folder, parameter by parameter: building takes memory for
        the largest tensor of all experts, whatever the depth of the model. The folder is what `save_pretrained` would
        write; it appears when it is complete. Killed and started again, the build continues where it was.

        Args:
            base: The pre-trained model the experts were fine-tuned from.
            experts: `{task name: expert}`. Base and experts may each be a transformers or OpenCLIP folder, a Hub id
                (`org/name` or `org/name@revision`), `local-dir:PATH`, `hf-hub:org/name`, a weight file, a module or a
                state dict. Tensors are read one at a time; files are memory-mapped. An expert may also be a PEFT LoRA
                adapter on the base: its folder, its Hub id or a `PeftModel`. It is merged tensor by tensor.
            config: Defaults to `RetexConfig()`.
            solver: `"closed_form"`, the exact optimum, or `"adam"`, the paper's training.
            training: Settings of `"adam"`.
            calibration: `{task: batches}` for merges that learn from data, batches as in [`fit_signatures`]. Labels
                (`"labels"`, one answer per row) are needed where the merge chooses by accuracy (`"consensus"`), and not
                looked at otherwise (`"adamerging"`). All experts are held in memory meanwhile. What was found is in
                `retex_config.merge`.
            readout: With `calibration`: how the experts answer. Default: `Classifier()`, the model's own `logits`.
            accelerator: An `accelerate.Accelerator`: the work is shared among its processes, which must all make this
                call. The exact result does not depend on their number.
            model_config: For OpenCLIP models given as modules: the architecture's name or configuration dict.
            check_base: Refuse experts that do not descend from the base.
            expert_cache: Bytes of recovered experts to keep at hand (`0` keeps none).
            token: Hub token.
            cache_dir: Hub cache.
            execution: How batches of several tasks run, see [`execution`].
            output_dir: Build into this folder, and load the model from there. `solver="adam"` trains in memory and
                saves at the end.
            max_shard_size: With `output_dir`: size above which weights are stored in several files.
            resume: With `output_dir`: continue an interrupted build of the same experts and configuration.
            progress: Show a progress bar.
        """
        config = config or RetexConfig()
        options = {
            "solver": solver,
            "training": training,
            "calibration": calibration,
            "readout": readout,
            "accelerator": accelerator,
            "model_config": model_config,
            "check_base": check_base,
            "token": token,
            "cache_dir": cache_dir,
            "progress": progress,
        }
        if output_dir is not None:
            build_folder(base, experts, config, output_dir, max_shard_size=max_shard_size, resume=resume, **options)
            parts = artifact.read(Path(output_dir))
        else:
            parts = build(base, experts, config, **options)
        return cls(parts, expert_cache=expert_cache, execution=execution)

    def save_pretrained(
        self, save_directory: str | Path, *, max_shard_size: str | int = "5GB", is_main_process: bool = True
    ) -> None:
        """Save to a folder that is also a plain checkpoint of the merged model.

        Written beside the target and moved into place: a failure leaves the previous folder as it was. Files in the
        folder that are not part of the artifact are kept. The model card is written, or brought up to date.
        """
        if is_main_process:
            artifact.write(self.parts(), Path(save_directory), max_shard_size)

    def create_or_update_model_card(self, save_directory: str | Path) -> None:
        """Write the model card (`README.md`) of a saved model, with figures, or bring it up to date.

        Sections and metadata that the library wrote are replaced; what a person wrote, changed or took out stays so.
        `save_pretrained` and `push_to_hub` do the same. (`save_pretrained` draws only the figures that are there
        already: drawing takes longer than saving.)
        """
        write_card(self.parts(), check_target(Path(save_directory)), figures=True)

    def parts(self) -> RetexParts:
        frozen = self._frozen()
        return RetexParts(
            config=frozen.retex_config,
            model=frozen.model,
            recovery=frozen.recovery,
            heads=frozen.heads.as_dict(frozen.tasks),
            errors=frozen.recovery_errors,
            signatures=frozen.signatures,
            pretrained=frozen.pretrained.as_dict(["base"])["base"],
            side_folder=frozen._side_folder,
            history=frozen.training_history,
            recipe=frozen.recipe,
            evaluation=frozen.evaluation,
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        is_trainable: bool = False,
        expert_cache: str | int = "2GB",
        execution: str = "auto",
        **model_options: Any,
    ) -> RetexModel:
        """Load a saved model from a folder or the Hub, in evaluation mode.

        Args:
            pretrained_model_name_or_path: A folder written by `save_pretrained`, or a Hub id.
            revision: Branch, tag or commit on the Hub.
            cache_dir: Hub cache.
            token: Hub token.
            local_files_only: Do not contact the Hub.
            dtype: Cast the merged model (and the experts recovered from it) to this dtype, such as `torch.float16` or
                `"float16"`; `"auto"` takes it as it is stored, which is also the default.
            torch_dtype: Another name of `dtype`.
            is_trainable: Let the recovery module require gradients, for training it on data with `model.train()`; it
                must be stored as float32.
            expert_cache: Bytes of recovered experts to keep at hand (`0` keeps none).
            execution: How batches of several tasks run, see [`execution`].
            model_options: Go to transformers' own `from_pretrained` for the merged model: `device_map`,
                `quantization_config`, `attn_implementation` and the like.
        """
        folder = hub.find_artifact(
            pretrained_model_name_or_path,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
        )
        dtype = parse_dtype(dtype, torch_dtype)
        load_options = model_options if dtype is None else {**model_options, "dtype": dtype}
        parts = artifact.read(folder, **load_options)
        if is_trainable and parts.config.recovery_dtype != "float32":
            raise ConfigError(
                f"{folder}: a recovery stored as {parts.config.recovery_dtype} cannot be trained; "
                'build it with recovery_dtype="float32".'
            )
        model = cls(parts, expert_cache=expert_cache, execution=execution)
        model.recovery.requires_grad_(is_trainable)
        devices = {parameter.device for parameter in model.model.parameters()}
        if len(devices) == 1 and not devices <= {torch.device("cpu"), torch.device("meta")}:
            model.to(devices.pop())  # recovery and heads follow where `device_map` has put the merged model
        return model

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str = "Upload ReTeX model",
        max_shard_size: str | int = "5GB",
    ) -> CommitInfo:
        """Upload to the Hub what `save_pretrained` writes and the figures of the card, as one commit.

        A card that the repository has already is brought up to date. Files of an earlier artifact that are not part of
        this one are deleted; all other files of the repository stay.

        Args:
            repo_id: `name` or `owner/name`; created if need be.
            private: Whether a repository that is created is private.
            token: Hub token; default: the one of `hf auth login`.
            revision: The branch, created if need be; default: main.
            create_pr: Open a pull request instead of changing the main branch.
            commit_message: First line of the commit.
            max_shard_size: Size above which weights are stored in several files.

        Returns:
            The commit: `oid`, `commit_url`, and `pr_url` of a pull request.
        """

        def write(folder: Path, name: str) -> None:
            artifact.write(self.parts(), folder, max_shard_size, name=name, figures=True)

        return hub.push(
            write,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )

    # ---- identification ----------------------------------------------------------------------------------------------

    def fit_signatures(
        self, references: Mapping[str, Iterable[Any]] | Iterable[Any], *, progress: bool = True
    ) -> dict[str, float]:
        """Learn to tell tasks apart from a few unlabelled inputs of each.

        With `RetexConfig(signatures="weights")` tasks are told apart without any; then this is optional, and takes a
        pool of inputs of any tasks (batches, all of which are read), whose mean scores are subtracted from then on.

        Args:
            references: `{task: batches}`; a batch is a dict of keyword arguments of `forward` (labels are ignored) or
                a bare tensor, the model's main input. The first `num_reference` rows of each task are used: draw them
                at random, because data sorted by class would show one class only.
            progress: Show a progress bar.

        Returns:
            Held-out identification accuracy on the references, per candidate layer; of a pool, nothing is known.
        """
        if self.retex_config.signatures == "weights":
            self._sign(WeightSignatures.fit(self._scorer(), self._as_pool(references)))
            return {}
        for task in references:
            task_index(task, self.tasks)
        missing = [task for task in self.tasks if task not in references]
        if missing:
            raise TaskError(f"fit_signatures needs reference inputs for every task; {missing} have none.")
        layers = resolve_feature_layers(self.model, self.retex_config)
        batches = {task: map(partial(as_inputs, self.model), as_batches(references[task])) for task in self.tasks}
        seen: dict[str, list[dict[str, Any]]] = {task: [] for task in self.tasks}
        signatures, accuracies = fit_signatures(
            self._extractor(layers),
            {task: noted(batches[task], seen[task]) for task in self.tasks},
            self.retex_config.num_reference,
            self.retex_config.signature_rank,
            progress,
        )
        self._sign(signatures)
        if self.retex_config.shared_trunk:
            self._share_trunk(seen, progress)
            self._cache.clear()
        return accuracies

    def _sign(self, signatures: Signatures | WeightSignatures) -> None:
        # What was measured and written down was of other signatures.
        self.signatures, self.evaluation, self.recipe = signatures, None, signed_in_memory(self.recipe)
        self._cache.clear()

    def _share_trunk(self, references: dict[str, list[dict[str, Any]]], progress: bool) -> None:
        """Leave what runs up to the feature layer merged for every task, and say what that costs."""
        extractor = self._extractor([self.signatures.feature_layer])
        sample = references[self.tasks[0]][0]
        names = trunk_parameters(extractor, sample, self.model)
        full = self._runner(cache=ExpertCache(0))
        self.recovery = self.recovery.without(names)
        self.recovery_errors = {name: error for name, error in self.recovery_errors.items() if name in self.recovery}
        self.retex_config.trunk = {
            "replayed": not keeps_cache(extractor, sample, library_of(self.model).feature_root(self.model)),
            "cost": trunk_cost(full, self._runner(cache=ExpertCache(0)), references, extractor),
        }
        if progress:
            print(describe_trunk(self.retex_config.trunk, self.signatures.feature_layer))

    def _trunk_blocks(self) -> list[str]:
        """Blocks whose outputs a feature pass hands on to the experts."""
        trunk, layer = self.retex_config.trunk, getattr(self.signatures, "feature_layer", None)
        if trunk is None or not trunk["replayed"] or layer is None:
            return []
        blocks = self._cache.get("blocks", lambda: feature_blocks(self.model))
        return blocks[: blocks.index(layer) + 1] if layer in blocks else [layer]

    def _as_pool(self, batches: Any) -> Iterator[dict[str, Any]]:
        if isinstance(batches, Mapping) and any(name in self.tasks for name in batches):
            raise InputError('With signatures="weights" fit_signatures takes one pool of batches, not one per task.')
        return map(partial(as_inputs, self.model), as_batches(batches))

    def _extractor(self, layers: list[str]) -> FeatureExtractor:
        pretrained = self.pretrained.as_dict(["base"])["base"]
        model = copy_with(self.model, pretrained).eval()
        return FeatureExtractor(model, layers, self.retex_config.feature_pooling, self._trunk_blocks())

    def _scorer(self) -> WeightScorer:
        last = resolve_feature_layers(self.model, self.retex_config)[-1]
        return WeightScorer(self._extractor([last]), self.recovery)

    def identify(self, *args: Any, **inputs: Any) -> Routing:
        """Which task each row belongs to: `task_ids`, `tasks`, `residuals` and `probabilities`."""
        if len(args) == 1 and not inputs:  # a bare tensor is the main input, as in fit_signatures
            return self._frozen()._identify(as_inputs(self.model, args[0]))[0]
        return self._frozen()._identify(self._bind("forward", args, inputs))[0]

    def _identify(self, inputs: Mapping[str, Any]) -> tuple[Routing, TrunkRecord | None]:
        """The routing of a batch, and what a shared trunk computed on the way."""
        signatures, record = self.signatures, None
        if self.retex_config.signatures == "weights":
            scores = self._cache.get("features", self._scorer)(inputs)
            residuals = -scores if signatures is None else signatures.to(scores.device).centre - scores
        elif signatures is None:
            raise RetexError("The model has no task signatures yet: call fit_signatures, or name the task with task=.")
        else:
            layer = signatures.feature_layer
            extractor = self._cache.get("features", lambda: self._extractor([layer]))
            features, outputs = extractor.record(inputs)
            residuals = signatures.to(features[layer].device).residuals(features[layer])
            if self._trunk_blocks():
                record = TrunkRecord(outputs, len(residuals))
        return decide(residuals, self.tasks, self.retex_config.routing, self.retex_config.temperature), record

    # ---- use ---------------------------------------------------------------------------------------------------------

    @shows_wrapped
    def forward(self, *args: Any, task: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """The wrapped model's `forward`, every row on its own expert."""
        if labels is not None:  # an argument of its own, because `Trainer` looks for its name in the class
            kwargs["labels"] = labels
            if self.training and torch.is_grad_enabled() and not self.get_nb_trainable_parameters()[0]:
                raise RetexError(
                    "No parameter of this model can be trained: load it with from_pretrained(..., is_trainable=True)."
                )
        return self._frozen()._routed("forward", args, kwargs, task)

    def predict(self, *args: Any, task: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """For classifiers: the task, the label and its score, for every row."""
        frozen = self._frozen()
        output = frozen.forward(*args, task=task, **kwargs)
        labels = frozen.retex_config.labels
        logits = output.get("logits") if isinstance(output, ModelOutput) else None
        if not labels or logits is None or logits.ndim != 2:
            raise RetexError(f"predict needs one classification per row; {type(self.model).__name__} gives none.")
        if output.routing is None:
            raise TaskError("Without recovery nothing says which head to use: name the task with task=.")
        read = [best_label(row, labels[name]) for name, row in zip(output.routing.tasks, logits, strict=True)]
        rows = zip(output.routing.tasks, read, strict=True)
        return [{"task": name, "label": label, "score": score} for name, (label, score) in rows]

    def _routed(self, method: str, args: tuple, kwargs: dict[str, Any], task: Any) -> Any:
        kwargs = self._bind(method, args, kwargs)
        recovered = id(self._turn) not in _disabled.get()
        task = self._active_task if task is None and recovered else task
        if task is None and not recovered:
            return attach_routing(call_method(self.model, method, kwargs), None)
        runner = self._runner()
        if task is None and TEXT_ENTRY_POINT.match(method) and runner.library.is_dual_encoder(self.model):
            self._require_shared_text_tower(method)
            return attach_routing(call_method(self.model, method, kwargs), None)
        if method == "generate" and isinstance(task, str) and not any(isinstance(v, Tensor) for v in kwargs.values()):
            rows = 1  # transformers starts one row from the BOS token
        else:
            rows = runner.count_rows(kwargs)
        if rows == 0:
            raise InputError("The batch has no rows.")
        record = None
        if task is None:
            routing, record = self._identify(kwargs)
            assignment = Assignment(routing.task_ids.cpu(), None if routing.weights is None else routing.weights.cpu())
        else:
            assignment = parse_task(task, self.tasks, rows)
            names = [self.tasks[index] for index in assignment.task_ids.tolist()]
            routing = Routing(assignment.task_ids, names, assignment.weights)
        if self.retex_config.labels:
            routing.num_labels = [runner.num_labels(index) for index in assignment.task_ids.tolist()]
        # One named task is that expert's own output; a routed batch has the same width whatever tasks it holds.
        widen = not isinstance(task, str)
        output = runner.run(method, kwargs, assignment, recovered=recovered, widen=widen, record=record)
        return attach_routing(output, routing)

    def _require_shared_text_tower(self, method: str) -> None:
        own = [name for name in self.recovery if library_of(self.model).is_text_parameter(name)]
        if own:
            raise TaskError(
                f"{method} cannot tell the task from a text, and the experts differ in their text tower ({own[0]!r}): "
                "name the task with task=."
            )

    def _bind(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Positional arguments under their names."""
        if not args:
            return kwargs
        names = list(inspect.signature(getattr(self.model, method)).parameters)
        if len(args) > len(names):
            raise InputError(f"{method} takes at most {len(names)} positional arguments, not {len(args)}.")
        for name in names[: len(args)]:
            if name in kwargs:
                raise InputError(f"{method} got {name!r} twice.")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _runner(self, cache: ExpertCache | None = None) -> ExpertRunner:
        return ExpertRunner(
            model=self.model,
            library=library_of(self.model),
            recovery=self.recovery,
            tasks=self.tasks,
            heads=self.heads.as_dict(self.tasks),
            labels=self.retex_config.labels,
            cache=self._cache if cache is None else cache,
            execution=self.execution,
            trunk=self._trunk_blocks(),
        )

    # ---- tasks come and go -------------------------------------------------------------------------------------------

    def add_task(
        self,
        name: str,
        expert: Any,
        *,
        references: Iterable[Any] | None = None,
        base: Any = None,
        tolerance: float | None = None,
        check_base: bool = True,
        token: str | None = None,
        cache_dir: str | None = None,
        progress: bool = True,
    ) -> AddedTask:
        """Recover one more expert, without the others at hand; what the model does for other tasks stays the same.

        The merged model is not changed. In every parameter the new expert's difference from it is solved for against
        the shared factor that is there. Where that leaves a larger error than `tolerance`, the factor gets more rank,
        as little as will do. If it fails, the model is as before; calls that are running are not disturbed.

        Building from all experts again gives a smaller artifact, because the merge and the shared factors then know
        of the new expert.

        Args:
            name: A new name.
            expert: As in [`from_experts`].
            references: Inputs of the new task, batches as in [`fit_signatures`]: needed where the model tells its
                tasks apart by reference inputs. Where scores of `signatures="weights"` are centred on a pool: a pool.
            base: The model that an expert given as adapter was trained on.
            tolerance: The relative error that the new task may have in a parameter: 0 recovers it exactly, 1 never
                adds rank. By default it is that of the other tasks in the same parameter (in parameters that the
                others left as merged: the median over all matrices). A model of a `rank_budget` leaves such
                parameters merged, unless a tolerance is given.
            check_base: Refuse an expert that is not related to the merged model.
            token: Hub token.
            cache_dir: Hub cache.
            progress: Show a progress bar.

        Returns:
            How well the new task is recovered, and what that cost. `recovery_errors` are upper bounds from now on.

        Example:
            >>> import torch
            >>> from transformers import BertConfig, BertModel
            >>> from retex_hf import RetexConfig, RetexModel
            >>> config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
            >>> base, expert = BertModel(config), BertModel(config)
            >>> expert.load_state_dict({k: v + 0.01 * torch.randn(v.shape) for k, v in base.state_dict().items()})
            <All keys matched successfully>
            >>> model = RetexModel.from_experts(base, {"a": base}, RetexConfig(rank="full"), progress=False)
            >>> added = model.add_task("b", expert, progress=False)
            >>> model.tasks
            ['a', 'b']
        """
        parts = self.parts()
        grown, added = add_task(
            parts,
            name,
            expert,
            references=references,
            base=base,
            tolerance=tolerance,
            check_base=check_base,
            token=token,
            cache_dir=cache_dir,
            progress=progress,
        )
        self._exchange(parts, grown)
        return added

    def delete_task(self, name: str) -> None:
        """Forget a task: its part of the recovery, its head and labels, its signature.

        If it is pinned, calls are routed again. If it is the first task, the merged model alone has the head of the
        next one from now on. Shared factors keep their rank: a build from the other experts would be smaller.
        """
        parts = self.parts()
        self._exchange(parts, delete_task(parts, name))

    # ---- PEFT's verbs ------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in the order of their ids."""
        return self.retex_config.tasks

    @property
    def side_folder(self) -> Path | None:
        """Where tokenizer and processor files lie that are saved with the model: the folder it was loaded from, or
        that of its base."""
        return self._side_folder

    @property
    def execution(self) -> str:
        """How a batch of several tasks runs: `"grouped"` (one recovered expert after the other), `"mixed"` (all rows in
        one pass of the merged model, each with its own offsets beside it), or `"auto"` (what a cost model says is
        cheaper; both give the same outputs). Weights that are quantised or offloaded always run mixed."""
        return self._execution

    @execution.setter
    def execution(self, value: str) -> None:
        self._execution = check_execution(value)

    @property
    def expert_cache(self) -> ExpertCache:
        """The recovered experts at hand, and how well that works.

        >>> model.expert_cache  # doctest: +SKIP
        ExpertCache(2 experts, 703463424 of 2000000000 bytes, hits=61, misses=2, evictions=0)
        """
        return self._cache

    @property
    def active_adapter(self) -> str | None:
        """The task that calls without `task=` use, or None while they are routed."""
        return self._active_task

    def set_adapter(self, task: str | None) -> None:
        """Pin one task for all calls that do not name one; None goes back to routing."""
        if task is not None:
            task_index(task, self.tasks)
        self._active_task = task

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within this context the model is the plain merged model; `task=` still selects the head of a task."""
        token = _disabled.set(_disabled.get() | {id(self._turn)})
        try:
            yield
        finally:
            _disabled.reset(token)

    def get_base_model(self) -> nn.Module:
        """The wrapped (merged) model. Hooks registered on it act on the experts that are recovered afterwards."""
        return self.model

    def recover(self, task: str) -> dict[str, Tensor]:
        """The state dict of a recovered expert, under the wrapped model's names."""
        return {name: tensor.clone() for name, tensor in self._expert(task).state_dict().items()}

    def merge_and_unload(self, task: str | None = None) -> nn.Module:
        """A recovered expert as a plain model of the wrapped class, independent of this one."""
        task = task or self._active_task
        if task is None:
            raise TaskError(f"merge_and_unload needs a task; the tasks are {self.tasks}.")
        return deepcopy(self._expert(task))

    def export_lora(self, task: str, save_directory: str | Path, *, scope: str = "all") -> LoraExport:
        """Write a recovered expert as a PEFT LoRA adapter on the merged model, which any artifact folder is:
        `PeftModel.from_pretrained(AutoModel....from_pretrained(artifact), save_directory)`.

        The folder appears complete or not at all. Adapters of all tasks can be loaded into one `PeftModel`.

        Args:
            task: A task's name.
            save_directory: A new folder, or that of an earlier adapter.
            scope: What to carry. `"all"`: all that peft has means for; the adapter gives the expert's outputs, but of
                norms and the like, which are stored whole, peft runs one adapter at a time. `"batch"`: what peft can
                also run with `adapter_names=[...]`, one task per row; norms, positions and raw parameters stay merged.
                `"linear"`: the weights of linear layers alone, at one rank, as inference servers ask for.

        Returns:
            What went which way, and what was left out; it prints well.
        """
        return export_lora(self.parts(), task, save_directory, scope=scope)

    def _expert(self, task: str) -> nn.Module:
        """An expert to look at or to copy: one that stays at hand, unless it is tied to a shared trunk."""
        runner = self._frozen()._runner()
        cache = ExpertCache(0) if runner.trunk else runner.cache
        runner = dataclasses.replace(runner, trunk=[], cache=cache)
        return runner.expert(Group(task_index(task, runner.tasks), torch.arange(0)))

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Numbers of trainable and of all parameters."""
        counts = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(n for n, trainable in counts if trainable), sum(n for n, _ in counts)

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trainable, as PEFT does."""
        trainable, total = self.get_nb_trainable_parameters()
        print(
            f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}"
        )

    @property
    def generation_config(self) -> Any:
        """The wrapped model's generation settings; assigning new ones reaches every expert."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.model.generation_config = value

    # ---- nn.Module ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RetexModel:
        """As `nn.Module.train`. In training mode gradients reach the recovery module through the experts."""
        if mode != self.training:
            self._cache.clear()  # experts were recovered from what training is about to change, or has changed
        return super().train(mode)

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> dict[str, Any]:
        """As `nn.Module.state_dict`; without `keep_vars`, tied tensors are equal, but do not share memory."""
        tensors = super().state_dict(*args, keep_vars=keep_vars, **kwargs)
        return tensors if keep_vars else without_shared_memory(tensors)

    def _apply(self, fn, recurse: bool = True):
        self._cache.clear()
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # not set yet: looking further would recurse
                raise
        value = getattr(self.model, name)
        if ENTRY_POINT.match(name) and callable(value):
            return partial(self._entry_point, name)
        return value

    def _entry_point(self, method: str, *args: Any, task: Any = None, **kwargs: Any) -> Any:
        return self._frozen()._routed(method, args, kwargs, task)


def _register_pipelines() -> None:
    """Once there is a model, `transformers.pipeline` takes it."""
    from .pipelines import register_pipelines  # which knows this class

    register_pipelines()


def _parse_size(size: str | int) -> int:
    try:
        return convert_file_size_to_int(size)
    except ValueError:
        raise ConfigError(f'expert_cache must be a number of bytes or a size such as "2GB", not {size!r}.') from None
