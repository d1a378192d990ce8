"""`RetexModel`: building, saving, sharing and changing a model that `RoutedModel` runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from huggingface_hub import CommitInfo
from torch import Tensor, nn

from ..artifact import hub, reading, writing
from ..artifact.state import RetexParts
from ..backends import parse_dtype, sentence_modules
from ..backends.untrusted_tokenizer import vetted_side_files
from ..build.build import build, build_folder
from ..build.plan import maker_of
from ..config import RetexConfig
from ..data.readout import Readout
from ..errors import ConfigError, RetexError, TaskError, brief
from ..execution import as_active
from ..recovery import TrainingConfig
from ..utils.byte_sizes import parse_size
from ..utils.devices import CPU, META, device_of, enough_memory, parse_device, parse_placement
from ..utils.paths import as_path
from .edit_signatures import sign
from .edit_tasks import AddedTask, add_task, delete_task, delete_tasks, select_tasks
from .export.lora import LoraExport, export_lora, to_peft
from .export.vllm import VllmExport, export_vllm
from .peft_names import LOADING, SAVING, check_options
from .routed_model import RoutedModel

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class RetexModel(RoutedModel):
    """A merged model that recovers the right expert for every row of a batch.

    Build it with [`from_experts`], teach it to identify tasks with [`fit_signatures`], save it with [`save_pretrained`]
    and load it with [`from_pretrained`]. `forward`, `generate`, `encode_image`, `get_image_features` and the like are
    those of the wrapped model, with one more argument: `task`, a task name, one name or id per row, or a (rows, tasks)
    tensor of mixing weights. Without it, each row's task is identified from the row itself. The decision is attached to
    the output as `output.routing`.

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
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
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

        With `output_dir` the result is written straight into that folder, parameter by parameter, so that memory grows
        with the largest tensor of all experts, not with the depth of the model. The folder is what `save_pretrained`
        would write; it appears once complete. An interrupted build is continued when started again.

        Args:
            base: The pre-trained model the experts were fine-tuned from.
            experts: `{task name: expert}`. Base and experts may each be a folder of transformers, OpenCLIP, timm or
                diffusers, a Hub id (`org/name` or `org/name@revision`), `local-dir:PATH`, `hf-hub:org/name`, a weight
                file, a module (of any class) or a state dict. Tensors are read one at a time; files are memory-mapped.
                An expert may also be a PEFT adapter on the base (its folder or its Hub id), which is merged tensor by
                tensor, a `PeftModel` with its own base, a quantised checkpoint, or a GGUF file; see docs/experts.md.
            config: Defaults to `RetexConfig()`.
            solver: `"closed_form"`, the exact optimum, or `"adam"`, the paper's training.
            training: Settings of `"adam"`.
            calibration: `{task: batches}` for merges that learn from data, batches as in [`fit_signatures`]. Labels
                (`"labels"`, one answer per row) are needed if the merge chooses by accuracy (`"consensus"`), and
                ignored otherwise (`"adamerging"`). All experts are held in memory meanwhile. The learned options are
                stored in `retex_config.merge`.
            readout: With `calibration`: how to read the experts' answers. Default: `Classifier()`, the model's own
                `logits`.
            accelerator: An `accelerate.Accelerator`: the work is shared among its processes, which must all make this
                call. The exact result does not depend on their number.
            model_config: For OpenCLIP models given as modules: the architecture's name or configuration dict. For timm
                models created with arguments: `{"architecture": ..., "model_args": {...}}`.
            check_base: Refuse experts that do not descend from the base.
            device: Where to merge and solve, tensor by tensor, and where to put the model: `"cuda"`, `"cuda:1"`, or
                `"auto"`, the machine's accelerator. Default: the device of a base or expert given as a module, else the
                CPU. Where the device has no float64, steps that need it run on the CPU, with a message.
            dtype: Hold and run the merged model in this dtype, such as `"bfloat16"`. The recovery accounts for the
                rounding. Default (and `"auto"`): as the first expert is stored.
            expert_cache: Bytes of recovered experts to keep in memory (`0` keeps none).
            token: Hub token.
            cache_dir: Hub cache.
            execution: How batches of several tasks run, see [`execution`].
            output_dir: Build into this folder, and load the model from there. `solver="adam"` trains in memory and
                saves at the end.
            max_shard_size: With `output_dir`: size above which weights are stored in several files.
            resume: With `output_dir`: continue an interrupted build of the same experts and configuration.
            progress: Show a progress bar.
        """
        config = RetexConfig() if config is None else config
        if not isinstance(config, RetexConfig):
            raise ConfigError(f"config must be a RetexConfig, such as RetexConfig(rank=64), not {brief(config)}.")
        parse_size(expert_cache, "expert_cache")  # before the work
        options: dict[str, Any] = {
            "solver": solver,
            "training": training,
            "calibration": calibration,
            "readout": readout,
            "accelerator": accelerator,
            "model_config": model_config,
            "check_base": check_base,
            "device": device,
            "dtype": dtype,
            "token": token,
            "cache_dir": cache_dir,
            "progress": progress,
        }
        if output_dir is not None:
            options |= {"max_shard_size": max_shard_size, "resume": resume}
            built = build_folder(base, experts, config, output_dir, **options)
            parts = reading.read(built, **maker_of(base, experts))
        else:
            parts = build(base, experts, config, **options)
        device = device_of(base, *experts.values()) if device is None else parse_device(device)
        with enough_memory("hold the model"):
            return cls(parts, expert_cache=expert_cache, execution=execution).to(device)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        max_shard_size: str | int = "5GB",
        is_main_process: bool = True,
        safe_serialization: bool = True,
        selected_adapters: Iterable[str] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push_options: Any,
    ) -> None:
        """Save to a folder that is also a plain checkpoint of the merged model.

        The model is written to a staging folder and moved into place, so that a failure leaves the previous folder
        unchanged. Files in the folder that are not part of the artifact are kept. The model card is written, or
        updated.

        Args:
            save_directory: The folder.
            max_shard_size: Size above which weights are stored in several files.
            is_main_process: Whether this process is the one that saves.
            safe_serialization: As in PEFT. Weights are always safetensors, so False is refused.
            selected_adapters: Save these tasks only. The model itself keeps all of them.
            push_to_hub: Also push the result to the Hub, see [`push_to_hub`].
            repo_id: Repository to push to; default: the folder's name.
            push_options: Options of [`push_to_hub`].
        """
        if not safe_serialization:
            raise ConfigError("Weights are always saved as safetensors: leave out safe_serialization=False.")
        check_options("save_pretrained", push_options, _options_of(type(self).push_to_hub), SAVING)
        if (push_options or repo_id is not None) and not push_to_hub:
            name = "repo_id" if repo_id is not None else sorted(push_options)[0]
            raise ConfigError(f"{name} is for push_to_hub=True.")
        parts = self.parts() if selected_adapters is None else select_tasks(self.parts(), selected_adapters)
        if is_main_process:
            writing.write(parts, save_directory, max_shard_size)
            if push_to_hub:
                name = repo_id or as_path(save_directory).resolve().name
                hub.push(_writer(parts, max_shard_size), name, **push_options)

    def save_description(self, save_directory: str | Path) -> None:
        """Rewrite a saved model's metadata: configuration, signatures, recipe, measurements and card; weights stay.

        Use this after [`fit_signatures`] or an evaluation. The weights must not have changed since they were saved.

        After changing files deliberately, load with `verify=False` and call this: it records them as they are now.
        """
        writing.rewrite_description(self.parts(), save_directory)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *further: Any,
        adapter_name: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        token: str | None = None,
        local_files_only: bool = False,
        subfolder: str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device: str | torch.device | None = None,
        device_map: Any = None,
        is_trainable: bool = False,
        expert_cache: str | int = "2GB",
        execution: str = "auto",
        verify: bool = True,
        check_finite: bool = False,
        **model_options: Any,
    ) -> RetexModel:
        """Load a saved model from a folder or the Hub, in evaluation mode.

        Names, shapes and dtypes of all tensors are compared with the configuration before any is used. Only safetensors
        files and plain text are read; nothing in a folder can run code.

        Args:
            pretrained_model_name_or_path: A folder written by `save_pretrained`, or a Hub id.
            further: Not accepted: an artifact holds the merged model, so PEFT's `(base, folder)` is refused.
            adapter_name: Pin this task, as [`set_adapter`] does.
            revision: Branch, tag or commit on the Hub.
            cache_dir: Hub cache.
            token: Hub token.
            local_files_only: Do not contact the Hub.
            subfolder: Subfolder of the folder or repository that holds the artifact.
            dtype: Cast the merged model (and the experts recovered from it) to this dtype, such as `torch.float16` or
                `"float16"`; `"auto"`, the default, keeps it as stored (OpenCLIP: float32).
            torch_dtype: Alias of `dtype`.
            device: Put the whole model on this device, such as `"cuda"`; `"auto"` is the machine's accelerator.
                Default: the CPU. `model.to(device)` does the same, but loads into the CPU's memory first.
            device_map: Distribute the merged model as transformers does: `"auto"`, or a dict of module names and
                devices. The recovery module follows.
            is_trainable: Let the recovery module require gradients, for training it on data with `model.train()`; it
                must be stored as float32.
            expert_cache: Bytes of recovered experts to keep in memory (`0` keeps none).
            execution: How batches of several tasks run, see [`execution`].
            verify: Compare the content of every file with its recorded checksum. This reads the files once more; set it
                to False for large artifacts on slow disks.
            check_finite: Refuse weights that hold NaN or infinite numbers. This reads every number.
            model_options: Options of transformers' own `from_pretrained` for the merged model: `quantization_config`,
                `attn_implementation`, `offload_folder` and the like. An artifact of modules of your own class needs
                `make_model`, a function that makes one: `make_model=lambda: Net(width=64)`.
        """
        if further or isinstance(pretrained_model_name_or_path, nn.Module):
            raise ConfigError(
                "An artifact holds its own merged model: call RetexModel.from_pretrained(folder) without one."
            )
        placement = parse_placement(device, device_map)
        folder = hub.find_artifact(
            pretrained_model_name_or_path,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        dtype = parse_dtype(dtype, torch_dtype)
        load_options = {"dtype": dtype, "device_map": placement}
        load_options = model_options | {name: value for name, value in load_options.items() if value is not None}
        with enough_memory("hold the model"):
            parts = reading.read(folder, verify=verify, check_finite=check_finite, **load_options)
        if is_trainable and parts.config.storage is not None:
            raise ConfigError(
                f"{folder}: components at a few bits each cannot be trained; build it with rank= instead of storage=."
            )
        if is_trainable and parts.config.recovery_dtype != "float32":
            raise ConfigError(
                f"{folder}: a recovery stored as {parts.config.recovery_dtype} cannot be trained; "
                'build it with recovery_dtype="float32".'
            )
        model = cls(parts, expert_cache=expert_cache, execution=execution)
        model.recovery.requires_grad_(is_trainable)
        model.set_adapter(adapter_name)
        with enough_memory("hold the model"):
            return model._followed()

    def _followed(self) -> RetexModel:
        """Move the recovery to the device of the merged model, or to the first accelerator that `device_map` uses."""
        devices = list(dict.fromkeys(parameter.device for parameter in self.model.parameters()))
        computing = [device for device in devices if device not in (CPU, META)]
        if len(devices) == 1 and computing:
            return self.to(devices[0])
        if computing:  # tensors on other devices are moved when used
            self.recovery.to(computing[0])
            if self.signatures is not None:
                self.signatures = self.signatures.to(computing[0])
        return self

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
        """Upload what `save_pretrained` writes and the figures of the card to the Hub, as one commit.

        An existing card of the repository is updated. Files of an earlier artifact that are not part of this one are
        deleted; all other files of the repository stay.

        Args:
            repo_id: `name` or `owner/name`; created if needed.
            private: Whether a newly created repository is private.
            token: Hub token; default: that of `hf auth login`.
            revision: The branch, created if needed; default: main.
            create_pr: Open a pull request instead of changing the main branch.
            commit_message: First line of the commit.
            max_shard_size: Size above which weights are stored in several files.

        Returns:
            The commit: `oid`, `commit_url`, and `pr_url` of a pull request.
        """

        return hub.push(
            _writer(self.parts(), max_shard_size),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )

    def create_or_update_model_card(self, save_directory: str | Path) -> None:
        """Write or update the model card (`README.md`) of a saved model, with figures.

        Sections and metadata that the library wrote are replaced; what a person wrote, changed or removed stays so.
        `save_pretrained` and `push_to_hub` do the same. (`save_pretrained` redraws only existing figures, because
        drawing takes longer than saving.)
        """
        writing.rewrite_card(self.parts(), save_directory)

    # ---- signatures --------------------------------------------------------------------------------------------------

    def fit_signatures(
        self, references: Mapping[str, Iterable[Any]] | Iterable[Any], *, progress: bool = True
    ) -> dict[str, float]:
        """Learn to identify tasks from a few unlabelled inputs of each.

        With `RetexConfig(signatures="weights")` tasks are identified without any; this call is then optional, and takes
        a pool of inputs of any tasks (batches, all of which are read), whose mean scores are subtracted from then on.

        Args:
            references: `{task: batches}`; a batch is a dict of keyword arguments of `forward` (labels are ignored) or a
                bare tensor, the model's main input. The first `num_reference` rows of each task are used: draw them at
                random, because data sorted by class would show only one class.
            progress: Show a progress bar.

        Returns:
            Held-out identification accuracy on the references, per candidate layer; empty for a pool.
        """
        parts = self.parts()
        signed, accuracies = sign(parts, references, known=self._state.proofs, progress=progress)
        self._exchange(parts, signed)
        return accuracies

    # ---- tasks -------------------------------------------------------------------------------------------------------

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
        device: str | torch.device | None = None,
        progress: bool = True,
    ) -> AddedTask:
        """Recover one more expert, without the others; the model's behaviour on other tasks stays the same.

        The merged model is not changed. In every parameter, the new expert's difference from it is solved for with the
        existing shared factor. If that leaves a larger error than `tolerance`, the rank of the factor is increased, by
        as little as needed. On failure the model stays unchanged; running calls are not disturbed.

        Building again from all experts gives a smaller artifact, because the merge and the shared factors then include
        the new expert.

        Args:
            name: A new name.
            expert: As in [`from_experts`].
            references: Inputs of the new task, batches as in [`fit_signatures`]: needed where the model tells its
                tasks apart by reference inputs. Where scores of `signatures="weights"` are centred on a pool: a pool.
            base: The model that an expert given as adapter was trained on; a `PeftModel` has its own.
            tolerance: The relative error that the new task may have in a parameter: 0 recovers it exactly (in a model
                of a `storage` budget: to 16 bits per number), 1 never adds rank. By default it is that of the other
                tasks in the same parameter (in parameters that the others left as merged: the median over all
                matrices). A model of a `storage` budget spends as many bytes on the new task as on each of the others,
                unless a tolerance is given.
            check_base: Refuse an expert that is not related to the merged model.
            token: Hub token.
            cache_dir: Hub cache.
            device: Where to solve, as in [`from_experts`]. Default: the model's device.
            progress: Show a progress bar.

        Returns:
            The new task's recovery errors and its cost. `recovery_errors` are upper bounds from now on.

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
            device=device,
            progress=progress,
        )
        self._exchange(parts, grown)
        return added

    def delete_task(self, name: str) -> None:
        """Delete a task: its part of the recovery, its head and labels, its signature.

        If the task is pinned, calls are routed again. If it is the first task, the merged model on its own gets the
        head of the next one. Shared factors keep their rank: a build from the other experts would be smaller.
        """
        parts = self.parts()
        self._exchange(parts, delete_task(parts, name))

    def load_adapter(
        self, model_id: Any, adapter_name: str, *, is_trainable: bool = False, **options: Any
    ) -> AddedTask:
        """Add a task under PEFT's name for [`add_task`], which takes the `options`.

        `model_id` is an expert, or an adapter. The new task is not pinned. `is_trainable=True` is refused, because
        tasks share their trained parameters.
        """
        given = {**options, "is_trainable": True} if is_trainable else options
        check_options("load_adapter", given, _options_of(self.add_task), LOADING)
        return self.add_task(adapter_name, model_id, **options)

    def delete_adapter(self, adapter_name: str | list[str]) -> None:
        """Delete one task or several, as PEFT does: all of them or none. See [`delete_task`]."""
        if not isinstance(adapter_name, Iterable):
            raise TaskError(f"Expected a task or a list of tasks, not {adapter_name!r}; the tasks are {self.tasks}.")
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        parts = self.parts()
        if names:
            self._exchange(parts, delete_tasks(parts, names))

    # ---- single experts ----------------------------------------------------------------------------------------------

    def recover(self, task: str) -> dict[str, Tensor]:
        """Return the state dict of a recovered expert, under the wrapped model's names."""
        return {name: tensor.clone() for name, tensor in self._state.expert(task).state_dict().items()}

    def merge_and_unload(
        self,
        task: str | None = None,
        *,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> nn.Module:
        """Return a recovered expert as a plain model of the wrapped class, independent of this one.

        Args:
            task: Name of the task; default: the pinned one.
            progressbar: As in PEFT. An expert is recovered in one step, so True is refused.
            safe_merge: Refuse weights that are not finite.
            adapter_names: PEFT's alias of `task`. Several tasks are mixed in equal parts, as by [`set_adapter`].
        """
        if progressbar:
            raise ConfigError("An expert is recovered at once, without steps to show: leave out progressbar=True.")
        if task is not None and adapter_names is not None:
            raise TaskError("task and adapter_names mean the same: give one of them.")
        state = self._state
        active = as_active(task if adapter_names is None else adapter_names, state.tasks) or state.active
        if active is None:
            raise TaskError(f"merge_and_unload needs a task; the tasks are {state.tasks}.")
        expert = deepcopy(state.expert(active))
        if safe_merge:
            for name, tensor in expert.state_dict().items():
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise RetexError(f"{name!r} of the expert {task or adapter_names} holds NaN or infinite numbers.")
        return expert

    def as_sentence_transformer(self, task: str | None = None) -> Any:
        """Return a SentenceTransformer whose `encode` embeds each sentence with its own expert.

        The model must have been built from SentenceTransformers (objects or folders).

        Args:
            task: Encode everything with this task's expert alone; default: this model runs, and every sentence is
                routed (or goes to the task pinned by [`set_adapter`]).

        Example:
            >>> encoder = model.as_sentence_transformer()  # doctest: +SKIP
            >>> encoder.encode(["a question about tax law", "a film review"]).shape  # doctest: +SKIP
            (2, 384)
        """
        if self.side_folder is None:
            raise ConfigError("The model has no tokenizer, so it cannot encode sentences.")
        files = vetted_side_files(self.side_folder, reading.read_side_files(self.side_folder))
        runs = self if task is None else self.merge_and_unload(task)
        return sentence_modules.sentence_transformer(cast("PreTrainedModel", self.model), runs, files)

    def unload(self) -> nn.Module:
        """Return the merged model as a plain model, independent of this one."""
        return deepcopy(self.model)

    def export_lora(self, task: str, save_directory: str | Path, *, scope: str = "all") -> LoraExport:
        """Write a recovered expert as a PEFT LoRA adapter on the merged model, atomically.

        Any artifact folder is a checkpoint of the merged model, so the adapter is loaded with
        `PeftModel.from_pretrained(AutoModel....from_pretrained(artifact), save_directory)`. Adapters of all tasks can
        be loaded into one `PeftModel`.

        Args:
            task: Name of the task.
            save_directory: A new folder, or that of an earlier adapter.
            scope: Content of the adapter. `"all"`: everything that peft supports; the adapter gives the expert's
                outputs, but norms and the like are stored whole, of which peft runs one adapter at a time. `"batch"`:
                what peft can also run with `adapter_names=[...]`, one task per row; norms, positions and raw parameters
                stay merged. `"linear"`: only the weights of linear layers, at one rank, as most inference servers
                require. `"vllm"`: what vLLM takes of this model's architecture, see [`export_vllm`].

        Returns:
            A printable summary of how each tensor is stored, and of what was left out.
        """
        return export_lora(self.parts(), task, save_directory, scope=scope)

    def export_vllm(self, artifact: str | Path, output: str | Path | None = None) -> VllmExport:
        """Add to the folder of this model what vLLM needs to serve and route it, atomically; see docs/serve-vllm.md.

        That is an adapter per task (`adapters/<task>`, which peft loads too:
        `PeftModel.from_pretrained(merged, artifact, subfolder="adapters/<task>")`), an index of the merged model's
        weights, and `retex_vllm.json`, all recorded in the artifact. The adapters hold factors of linear layers and,
        where vLLM takes them of the architecture, of embeddings and the output layer; a classifier's head is stored
        whole. Norms and biases stay merged, and the summary names them. A save of the model removes the export.

        Args:
            artifact: The folder that this model was saved to, or loaded from.
            output: Write a copy of the artifact with the export there, instead of changing the artifact.

        Returns:
            A printable summary.
        """
        return export_vllm(self.parts(), artifact, output)

    def to_peft(self, tasks: Iterable[str] | None = None, *, scope: str = "all") -> PeftModel:
        """Return a copy of the merged model as a `PeftModel`, with a LoRA adapter per task under the task's name.

        `peft_model.set_adapter(task)` gives the outputs of `model(..., task=task)`. peft does not route: the adapter of
        the first task is active, and `identify` names that of an input. A parameter that peft cannot represent stays
        merged, with a warning that names it. An affine recovery is refused, and so is a task with tokens of its own.

        Args:
            tasks: The tasks; default: all.
            scope: Content of the adapters, as in [`export_lora`]. Only `"batch"` and `"linear"` run in one batch with
                `adapter_names=[...]`.

        Example:
            >>> import torch
            >>> from transformers import BertConfig, BertModel
            >>> from retex_hf import RetexConfig, RetexModel
            >>> config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
            >>> base = BertModel(config).eval()
            >>> experts = {task: BertModel(config).eval() for task in ("one", "two")}
            >>> model = RetexModel.from_experts(
            ...     base, experts, RetexConfig(rank="full"), check_base=False, progress=False
            ... )
            >>> peft_model = model.to_peft()
            >>> peft_model.set_adapter("two")
            >>> ids = torch.randint(32, (3, 5))
            >>> torch.allclose(peft_model(ids)[0], model(ids, task="two")[0], atol=1e-4)
            True
        """
        return to_peft(self.parts(), tasks, scope=scope)

    # ---- trainable parameters ----------------------------------------------------------------------------------------

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the numbers of trainable and of all parameters."""
        counts = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(n for n, trainable in counts if trainable), sum(n for n, _ in counts)

    def print_trainable_parameters(self) -> None:
        """Print how many parameters are trainable, as PEFT does."""
        trainable, total = self.get_nb_trainable_parameters()
        print(
            f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {100 * trainable / total:.4f}"
        )


def _writer(parts: RetexParts, max_shard_size: str | int) -> Callable[[Path, str], None]:
    """Return what writes an artifact for the Hub into a folder, under the name of its repository."""
    return lambda folder, name: writing.write(parts, folder, max_shard_size, name=name, figures=True)


def _options_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's keyword-only parameters."""
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
