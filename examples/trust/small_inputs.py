"""Inputs for any model of transformers, from the signature of its `forward` and the numbers of its configuration.

The inputs of a model are documented nowhere in a machine-readable form: recipes are tried one after the other, the
richer first, until one runs. The number of placeholder tokens of an image is read from the model's error message.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from retex_hf.backends import hf_transformers
from trust.small_rows import LENGTH, TASKS, Draw, Maker, Recipe, collate

TRIES = 48
MISMATCH = re.compile(r"tokens:? (\d+).*?features:? (\d+)", re.DOTALL)
IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_token_index_id", "img_context_token_id", "image_patch_id")
VIDEO_TOKENS = ("video_token_id", "video_token_index")
AUDIO_TOKENS = ("audio_token_id", "audio_token_index", "audio_token_idx", "speech_token_id")
IMAGES = ("pixel_values", "pixel_values_images", "image_pixel_values")
MELS = (
    "num_mel_bins", "n_mels", "num_mel_channels", "input_feat_size", "feature_size", "input_feat_per_channel",
    "feat_in", "input_dim", "mel_bins",
)  # fmt: skip
MOST_PLACES = 300
BESIDE_TEXT = frozenset(
    {"visual_feats", "visual_pos", "visual_embeds", "qformer_input_ids", "flattened_patches", "image", "task_inputs",
     "actions", "states"}
)  # fmt: skip
BESIDE_OTHERS = frozenset(
    {"future_values", "future_time_features", "input_points", "actions", "rewards", "returns_to_go", "timesteps",
     "visual_pos", "visual_feats"}
)  # fmt: skip
SOUND_MASKS = ("feature_attention_mask", "input_features_mask", "audio_attention_mask", "padding_mask")


def numbers(config: Any, *names: str) -> Iterator[Any]:
    """Yield values of a configuration under one of these names, those of the outermost first."""
    level, seen = [config], set()
    while level:
        inner = []
        for part in level:
            if id(part) in seen:
                continue
            seen.add(id(part))
            for name in names:
                value = part.__dict__.get(name)
                if value is None:
                    mapped = getattr(type(part), "attribute_map", {}).get(name)
                    value = part.__dict__.get(mapped) if mapped else None
                if value is not None:
                    yield value
            inner += [
                value for value in part.__dict__.values() if hasattr(value, "to_dict") and hasattr(value, "model_type")
            ]
        level = inner


def number(config: Any, *names: str, default: Any = None) -> Any:
    return next(numbers(config, *names), default)


def _pair(value: Any) -> tuple[int, int]:
    """Return height and width, in whatever form a configuration holds them."""
    if isinstance(value, dict):
        value = [value.get("height", 32), value.get("width", 32)]
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return int(values[0]), int(values[-1])


class Kitchen:
    """Recipes for one model, those with more inputs first."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config, self.cls = model, model.config, type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        self.accepted = [name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.required = [name for name in self.accepted if parameters[name].default is inspect.Parameter.empty]
        main = getattr(model, "main_input_name", self.accepted[0])
        self.main = list(main) if isinstance(main, (list, tuple)) else [main]
        self._read_text()
        self._read_vision()
        self._read_sound()

    def _read_text(self) -> None:
        config = self.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocab = getattr(text, "vocab_size", None) or number(config, "vocab_size", default=64)
        self.vocab = vocab if isinstance(vocab, int) else 64
        self.text_width = int(getattr(text, "hidden_size", None) or number(text, "d_model", default=1))
        decodes = getattr(config, "is_encoder_decoder", False)
        # Encoder-decoders that classify do so at the end of the text, which they decode again.
        self.reads_last = decodes and "SequenceClassification" in self.cls and isinstance(config.eos_token_id, int)
        self.choices = (2,) if "MultipleChoice" in self.cls else ()

    def _read_vision(self) -> None:
        config = self.config
        inner = number(config, "vision_config", "image_config", "vq_config", "backbone_config", "vision_encoder_config")
        self.vision = inner if hasattr(inner, "to_dict") else config
        size = number(self.vision, "image_size", "img_size", "input_size", "crop_size") or number(config, "image_size")
        self.height, self.width = _pair(size or 32)
        channels = number(self.vision, "num_channels", "in_channels", "in_chans") or number(config, "num_channels")
        self.channels = channels if isinstance(channels, int) and channels <= 4 else 3
        self.frames = int(number(config, "num_frames", "frames", "frames_per_clip", default=2))
        patch = number(self.vision, "patch_size", default=8)
        self.patch = patch if isinstance(patch, int) else 8

    def _read_sound(self) -> None:
        config = self.config
        inner = number(config, "audio_config", "speech_config", "encoder_config", "audio_encoder_config")
        sound = inner if hasattr(inner, "to_dict") else config
        mels = number(sound, *MELS) or number(config, *MELS)
        self.mels = mels if isinstance(mels, int) else 80
        positions = number(sound, "max_source_positions", "n_ctx")
        self.sound = 2 * positions if isinstance(positions, int) and positions <= 200 else 64

    # ---- makers ------------------------------------------------------------------------------------------------------

    def words(self, length: int = LENGTH) -> Maker:
        if self.reads_last:

            def ended(draw: Draw) -> Tensor:
                ids = draw.words(length, vocab=self.vocab)
                ids[:, -1] = self.config.eos_token_id
                return ids

            return ended
        return lambda draw: draw.words(*self.choices, length, vocab=self.vocab)

    def ones(self, length: int = LENGTH) -> Maker:
        return lambda draw: torch.ones(1, *self.choices, length, dtype=torch.long)

    def noise(self, *shape: int) -> Maker:
        return lambda draw: draw.noise(*shape)

    def pixels(self) -> list[Maker]:
        c, h, w, f = self.channels, self.height, self.width, self.frames
        flat, one, video = [(c, h, w)], [(1, c, h, w)], [(f, c, h, w), (2, c, h, w), (c, f, h, w)]
        pairs = [(2, c, 64, 64), (2, 1, 64, 64)]
        patches = [(16, c * self.patch * self.patch)]
        big = [(c, 2 * h, 2 * w), (c, 64, 64), (c, 128, 128)]
        first = [*video[:1], *flat, *video[1:]] if re.search("Video|VivitM", self.cls) else [*flat, *one, *video]
        return [self.noise(*shape) for shape in (*first, *pairs, *patches, *big)]

    def features(self) -> list[Maker]:
        found = numbers(self.config, *MELS, "input_size", "hidden_size")
        widths = dict.fromkeys([self.mels, 128, 160, 80, *(width for width in found if isinstance(width, int))])
        shapes = [shape for width in widths for shape in ((width, self.sound), (self.sound, width))]
        return [self.noise(*shape) for shape in (*shapes[:2], (100, self.mels), (1, 64, 64), (1, 64, 16), *shapes[2:])]

    def values(self) -> list[Maker]:
        length = number(self.config, "max_length", default=64)
        spectrum = (length if isinstance(length, int) and length <= 1100 else 64, self.mels)
        return [self.noise(*shape) for shape in ((1200,), (1, 1200), spectrum, (4800,), (1, 4800), (16000,))]

    # ---- recipes -----------------------------------------------------------------------------------------------------

    def recipes(self) -> Iterator[Recipe]:
        if "grid_thw" in self.required:
            yield from _patches(self)
        if re.match("Idefics[MF]", self.cls):
            yield _idefics(self)
        if re.match("Kosmos2[MF]", self.cls):
            yield _kosmos(self)
        if {"input_ids", "aspect_ratio_ids"} <= set(self.accepted):
            yield _mllama(self)
        yield from self._texts() if "input_ids" in self.accepted else self._alone()

    def _recipe(self, makers: Mapping[str, Maker], **more: Any) -> Recipe:
        return Recipe({**makers, **self._extras(makers)}, self.vocab, **more)

    def _extras(self, makers: Mapping[str, Maker]) -> dict[str, Maker]:
        """Return further inputs to pass wherever they are accepted."""
        extras: dict[str, Maker] = {}
        is_text = "input_ids" in makers
        decodes = getattr(self.config, "is_encoder_decoder", False) or self.cls.startswith("Blip")
        if "decoder_input_ids" in self.accepted and decodes and not self.reads_last:
            extras["decoder_input_ids"] = lambda draw: draw.words(4, vocab=self._decoder_vocab())
        if is_text and "qformer_input_ids" in self.accepted:
            vocab = int(getattr(number(self.config, "qformer_config"), "vocab_size", 64))
            extras["qformer_input_ids"] = lambda draw: draw.words(LENGTH, vocab=vocab)
        if is_text and "bbox" in self.accepted:
            extras["bbox"] = lambda draw: draw.count(0, 60, LENGTH, 1).repeat(1, 1, 4) + torch.tensor([0, 0, 30, 30])
        for name in ("mm_token_type_ids", "moe_mm_token_type_ids"):
            if is_text and name in self.accepted:
                extras[name] = lambda draw: torch.zeros(1, LENGTH, dtype=torch.long)
        return extras

    def _decoder_vocab(self) -> int:
        decoder = number(self.config, "decoder", "text_config", "decoder_config")
        vocab = getattr(decoder, "vocab_size", None) or number(self.config, "decoder_vocab_size", "vocab_size")
        return vocab if isinstance(vocab, int) else 64

    def _texts(self) -> Iterator[Recipe]:
        text: dict[str, Maker] = {"input_ids": self.words()}
        if "attention_mask" in self.accepted:
            text["attention_mask"] = self.ones()
        if (image := next((name for name in IMAGES if name in self.accepted), None)) is not None:
            yield from self._with_images(text, image)
        for name in ("input_features", "input_values", "audio_input_features"):
            if name in self.accepted:
                yield from self._with_sounds(text, name)
        if "pixel_values_videos" in self.accepted:
            yield from self._with_videos(text)
        yield self._recipe(text)
        yield self._recipe({"input_ids": text["input_ids"]})
        yield from self._codebooks(text)
        yield from self._alone(text, [name for name in self.accepted if name in BESIDE_TEXT])

    def _codebooks(self, text: Mapping[str, Maker]) -> Iterator[Recipe]:
        """Yield recipes with several tokens per time step of a sound."""
        found = numbers(self.config, "num_channels", "num_codebooks", "num_audio_codebooks")
        for count in dict.fromkeys(count + more for count in found if isinstance(count, int) for more in (0, 1)):

            def moments(draw: Draw, count: int = count) -> Tensor:
                return draw.words(LENGTH, count, vocab=self.vocab)

            def sequences(draw: Draw, count: int = count) -> Tensor:
                return draw.words(count, LENGTH, vocab=self.vocab)[0]

            yield Recipe({"input_ids": moments}, self.vocab)
            yield Recipe({**text, "decoder_input_ids": moments}, self.vocab)
            if "Musicgen" in self.cls:  # a row is one sequence per codebook
                yield Recipe({**text, "decoder_input_ids": sequences}, self.vocab)
                yield Recipe({"input_ids": sequences}, self.vocab)

    def _is_dual(self) -> bool:
        """Return whether texts are prompts for all rows."""
        return hf_transformers.is_dual_encoder(self.model)

    def _with_prompts(self, text: Mapping[str, Maker], makers: Mapping[str, Maker]) -> Recipe:
        draws = [Draw(task, torch.Generator().manual_seed(90 + task), self.vocab) for task in (0, 1)]
        prompts = {name: torch.cat([make(draw) for draw in draws]) for name, make in text.items()}
        return Recipe(makers, self.vocab, shared=prompts)

    def _token(self, names: tuple[str, ...]) -> int | None:
        value = number(self.config, *names)
        return value if isinstance(value, int) else None

    def _with_images(self, text: Mapping[str, Maker], name: str) -> Iterator[Recipe]:
        token = self._token(IMAGE_TOKENS)
        makers, beside = self.pixels(), [{}]
        if {"pixel_attention_mask", "spatial_shapes"} <= set(self.accepted):
            makers = [self.noise(16, self.channels * self.patch * self.patch)]
            beside = [{key: self.alternatives(key)[0] for key in ("pixel_attention_mask", "spatial_shapes")}]
        if "image_sizes" in self.accepted:
            beside.append({"image_sizes": lambda draw: torch.tensor([[self.height, self.width]])})
        if self._is_dual():
            yield from (self._with_prompts(text, {name: maker, **beside[0]}) for maker in makers)
        if "image_grid_thw" in self.accepted and token is not None:
            yield from self._packed(text, name, token)
        for maker, more in itertools.product(makers, beside):
            given, items = {**text, name: maker, **more}, frozenset({name, *more})
            if token is None:
                yield self._recipe(given)
                continue
            # Query-based models do not report how many tokens are missing.
            queries = number(self.config, "num_query_tokens", default=1)
            frames = maker(Draw(0, torch.Generator())).shape[1] if queries > 1 else 1
            for places in dict.fromkeys((queries, queries * frames)):
                yield self._recipe(given, placeholder=token, places=places, per_item=items)

    def _packed(self, text: Mapping[str, Maker], name: str, token: int) -> Iterator[Recipe]:
        """Yield recipes with the patches of all images packed into one tensor, with their grids."""
        merge = number(self.vision, "spatial_merge_size", "merge_size") or number(self.config, "spatial_merge_size")
        merge = merge if isinstance(merge, int) else 2
        for flat in self.patches(2 * merge):
            makers = {**text, name: flat, "image_grid_thw": lambda draw: torch.tensor([[1, 2 * merge, 2 * merge]])}
            yield self._recipe(makers, placeholder=token, places=4, per_item=frozenset({name, "image_grid_thw"}))

    def patches(self, side: int) -> list[Maker]:
        """Return makers of the patches of a square image."""
        c, patch = self.channels, self.patch
        temporal = number(self.vision, "temporal_patch_size", default=1)
        shapes = dict.fromkeys([(c * temporal * patch * patch,), (c * patch * patch,), (c, patch, patch)])
        return [lambda draw, shape=shape: draw.noise(side * side, *shape, axis=False) for shape in shapes]

    def _with_sounds(self, text: Mapping[str, Maker], name: str) -> Iterator[Recipe]:
        token = self._token(AUDIO_TOKENS)
        mask = next((mask for mask in SOUND_MASKS if mask in self.accepted), None)
        for maker in self.features() if "features" in name else self.values():
            if self._is_dual():
                yield self._with_prompts(text, {name: maker})
                continue
            for more in [{}] if mask is None else [{mask: self._sound_mask(mask, maker)}, {}]:
                given, items = {**text, name: maker, **more}, frozenset({name, *more})
                if token is None:
                    yield self._recipe(given)
                else:
                    yield self._recipe(given, placeholder=token, places=1, per_item=items)

    def _sound_mask(self, name: str, maker: Maker) -> Maker:
        *_, first, last = maker(Draw(0, torch.Generator())).shape
        length = first if last == self.mels and first > 1 else last
        return lambda draw: torch.ones(1, length, dtype=torch.bool if "input_features" in name else torch.long)

    def _with_videos(self, text: Mapping[str, Maker]) -> Iterator[Recipe]:
        name, token = "pixel_values_videos", self._token(VIDEO_TOKENS)
        for maker in self.alternatives(name):
            if self._is_dual():
                yield self._with_prompts(text, {name: maker})
            if token is not None:
                yield self._recipe({**text, name: maker}, placeholder=token, places=1, per_item=frozenset({name}))

    def _alone(self, text: Mapping[str, Maker] | None = None, others: Iterable[str] = ()) -> Iterator[Recipe]:
        """Yield recipes without texts, or with further inputs: all required ones, and the model's main input."""
        wanted = dict.fromkeys([*self.required, *(name for name in self.main if name in self.accepted)])
        beside = BESIDE_OTHERS if "past_time_features" in self.accepted else BESIDE_OTHERS - {"future_values"}
        wanted |= dict.fromkeys([name for name in self.accepted if name in beside])
        made = {name: self.alternatives(name) for name in (*wanted, *others)}
        choices = [[(name, maker) for maker in makers] for name, makers in made.items() if makers]
        for chosen in itertools.islice(itertools.product(*choices), TRIES):
            yield self._recipe({**(text or {}), **dict(chosen)})

    def alternatives(self, name: str) -> list[Maker]:
        """Return makers of one input, the likelier first."""
        config, c = self.config, self.channels
        context = int(number(config, "context_length", "seq_length", default=32) or 32)
        series = int(number(config, "num_input_channels", "input_size", default=1) or 1)
        match name:
            case "pixel_values" | "pixel_values_images" | "image" | "prompt_pixel_values":
                return self.pixels()
            case "pixel_values_videos":
                return [
                    self.noise(self.frames, c, self.height, self.width),
                    self.noise(c, self.frames, self.height, self.width),
                ]
            case "input_features" | "audio_mel":
                return self.features()
            case "input_values":
                return self.values()
            case "spectrogram":
                return [self.noise(64, self.mels)]
            case "past_values":
                lags = number(config, "lags_sequence", default=[0])
                total = context + (max(lags) if isinstance(lags, list) and lags else 0)
                return [self.noise(total, series), self.noise(total), self.noise(context, series)]
            case "past_time_features" | "future_time_features":
                lags = number(config, "lags_sequence", default=[0])
                total = (
                    context + max(lags)
                    if name.startswith("past")
                    else int(number(config, "prediction_length", default=4))
                )
                return [self.noise(total, int(number(config, "num_time_features", default=1) or 1))]
            case "past_observed_mask":
                lags = number(config, "lags_sequence", default=[0])
                total = context + (max(lags) if isinstance(lags, list) and lags and "PatchTS" not in self.cls else 0)
                return [lambda draw: torch.ones(1, total, *((series,) if series > 1 or "PatchTS" in self.cls else ()))]
            case "future_values":
                return [self.noise(int(number(config, "prediction_length", default=4)))]
            case "task_inputs":
                return [lambda draw: draw.count(0, 20, int(number(config, "task_seq_len", default=77)))]
            case "input_ids" | "qformer_input_ids" | "classes_input_ids" | "tasks_input_ids":
                return [self.words()]
            case "inputs":
                return [
                    self.words(),
                    self.noise(1200),
                    self.noise(c, self.height, self.width),
                    self.noise(32, int(number(config, "d_model", default=32))),
                ]
            case "input_points":
                return [lambda draw: draw.count(1, 20, 1, 2, 2).float()]
            case "visual_feats":
                return [self.noise(3, int(number(config, "visual_feat_dim", default=16)))]
            case "visual_pos":
                return [self.noise(3, 4)]
            case "visual_embeds":
                return [self.noise(3, int(number(config, "visual_embedding_dim", default=16)))]
            case "flattened_patches":
                width = 2 + c * int(number(config, "patch_size", default=8)) ** 2
                return [
                    lambda draw: torch.cat(
                        [torch.arange(1, 10).reshape(1, 9, 1).repeat(1, 1, 2).float(), draw.noise(9, width - 2)], -1
                    )
                ]
            case "states":
                return [self.noise(LENGTH, int(number(config, "state_dim", default=4)))]
            case "actions":
                return [self.noise(LENGTH, int(number(config, "act_dim", default=4)))]
            case "rewards" | "returns_to_go":
                return [self.noise(LENGTH, 1)]
            case "timesteps":
                return [lambda draw: torch.arange(LENGTH).reshape(1, -1)]
            case "attention_mask" if "states" in self.accepted:
                return [self.ones()]
            case "prompt_masks":
                return [self.noise(c, self.height, self.width)]
            case "inputs_embeds" | "query_embeds":
                return [self.noise(LENGTH, int(number(config, "hidden_size", "d_model", default=32)))]
            case "pixel_attention_mask":
                return [lambda draw: torch.ones(1, 16, dtype=torch.long)]
            case "spatial_shapes":
                return [lambda draw: torch.tensor([[4, 4]])]
            case "input_features_mask" | "audio_mel_mask" | "padding_mask":
                return [lambda draw: torch.ones(1, self.sound, dtype=torch.bool)]
            case "past_values_padding":
                return [lambda draw: torch.zeros(1, context, dtype=torch.long)]
            case "freq":
                return [lambda draw: torch.zeros(1, 1, dtype=torch.long)]
            case "latents":
                return [
                    self.noise(int(number(config, "hidden_size", default=32)), 12),
                    self.noise(12, int(number(config, "hidden_size", default=32))),
                ]
            case "bool_masked_pos":
                side = self.height // int(_pair(number(config, "patch_size", default=8))[0])
                return [lambda draw: (torch.arange(side * side) % 2 == 0).reshape(1, -1)]
        return []


def _patches(kitchen: Kitchen) -> Iterator[Recipe]:
    """Yield recipes for vision towers of packed patches: a row is an image and its grid."""
    side = 2 * number(kitchen.config, "spatial_merge_size", default=2)
    main = next(name for name in ("hidden_states", "pixel_values", "inputs") if name in kitchen.accepted)
    merges: dict[str, Maker] = {}
    if "merge_sizes" in kitchen.accepted:
        merges["merge_sizes"] = lambda draw: torch.tensor([1])
    for flat in kitchen.patches(side):
        grid: dict[str, Maker] = {"grid_thw": lambda draw: torch.tensor([[1, side, side]])}
        yield Recipe({main: flat, **grid, **merges}, kitchen.vocab)


def _idefics(kitchen: Kitchen) -> Recipe:
    makers: dict[str, Maker] = {
        "input_ids": kitchen.words(),
        "attention_mask": kitchen.ones(),
        "pixel_values": kitchen.noise(1, kitchen.channels, kitchen.height, kitchen.width),
        "image_attention_mask": lambda draw: torch.ones(1, LENGTH, 1, dtype=torch.long),
    }
    return Recipe(makers, kitchen.vocab)


def _kosmos(kitchen: Kitchen) -> Recipe:
    places = int(number(kitchen.config, "latent_query_num", default=4))
    makers: dict[str, Maker] = {
        "pixel_values": kitchen.noise(kitchen.channels, kitchen.height, kitchen.width),
        "input_ids": kitchen.words(places + LENGTH),
        "attention_mask": kitchen.ones(places + LENGTH),
        "image_embeds_position_mask": lambda draw: (torch.arange(places + LENGTH) < places).long().reshape(1, -1),
    }
    return Recipe(makers, kitchen.vocab)


def _mllama(kitchen: Kitchen) -> Recipe:
    tiles = int(number(kitchen.config, "max_num_tiles", default=4))
    makers: dict[str, Maker] = {
        "input_ids": kitchen.words(),
        "attention_mask": kitchen.ones(),
        "pixel_values": kitchen.noise(1, tiles, kitchen.channels, kitchen.height, kitchen.width),
        "aspect_ratio_ids": lambda draw: torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": lambda draw: torch.ones(1, 1, tiles, dtype=torch.long),
        "cross_attention_mask": lambda draw: torch.ones(1, LENGTH, 1, tiles, dtype=torch.long),
    }
    return Recipe(makers, kitchen.vocab)


@torch.no_grad()
def find_recipe(model: nn.Module, call: Callable[[nn.Module, dict[str, Any]], Any]) -> Recipe:
    """Return the first recipe whose rows a model takes, one by one and together."""
    kitchen, problems = Kitchen(model), []
    for recipe in itertools.islice(kitchen.recipes(), 2 * TRIES):
        for _ in range(4):
            try:
                for rows in (2, 1, 3):
                    call(model, collate([recipe.row(row % TASKS, row) for row in range(rows)], recipe.shared))
                return recipe
            except Exception as error:  # unsuitable inputs raise any kind of error
                wanted = _with_enough_places(recipe, error, rows, kitchen.text_width)
                if wanted is None:
                    problems.append(f"{sorted(recipe.makers)}: {type(error).__name__}: {str(error)[:120]}")
                    break
                recipe = wanted
    raise ValueError(" | ".join(dict.fromkeys([*problems[:3], *problems[-1:]])) or "no inputs")


def _with_enough_places(recipe: Recipe, error: Exception, rows: int, width: int) -> Recipe | None:
    """Return the recipe with as many placeholders as the model reports features; None if it reports none."""
    found = MISMATCH.search(str(error))
    if not found or recipe.placeholder is None:
        return None
    features = int(found[2]) // rows
    if features > MOST_PLACES:
        features //= width  # some count numbers, not vectors
    if not 0 < features <= MOST_PLACES or features == recipe.places:
        return None
    return replace(recipe, places=features)
