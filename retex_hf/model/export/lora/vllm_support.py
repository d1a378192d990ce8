"""What vLLM takes of an adapter, by architecture. Printed by examples/serving/vllm_architectures.py on vLLM 0.32."""

from __future__ import annotations

from ....errors import ConfigError

VERSION = "0.32"
# Allowed values of `--max-lora-rank`.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Modules that may be saved whole: the output layer of a classifier.
HEADS = ("classifier", "score")
INPUT, OUTPUT = "embed_tokens", "lm_head"
# Architectures whose adapters may have factors of both embeddings, of input embeddings only, and of linear layers only.
BOTH_EMBEDDINGS = (
    "Apertus", "DeciLM", "Ernie4_5", "Exaone4", "FalconH1", "Granite", "HyperCLOVAX", "InternLM3", "Jamba", "Lfm2",
    "Llama", "Llama4", "MiniCPM", "MiniCPM3", "Nemotron", "Phi3", "Qwen3", "Solar",
)  # fmt: skip
INPUT_EMBEDDINGS = (
    "Arcee", "Cohere", "Cohere2", "GPTBigCode", "GPTNeoX", "Glm", "HunYuanDenseV1", "Olmo", "Olmo2", "Olmo3", "Phi",
    "SeedOss", "SmolLM3", "Starcoder2", "VaultGemma",
)  # fmt: skip
LINEAR_ONLY = (
    "Gemma", "Gemma2", "Gemma3", "Glm4", "InternLM2", "MiMo", "Ministral3", "Mistral", "OPT", "OlmoHybrid", "Qwen2",
)  # fmt: skip
# Encoders without a head, which vLLM serves for their embeddings.
ENCODERS = ("BertModel", "ModernBertModel", "RobertaModel", "XLMRobertaModel")
LLAMA_LIKE = ("ForCausalLM", "ForSequenceClassification", "Model")


def embeddings_of(architecture: str) -> tuple[str, ...]:
    """Return the embedding modules that vLLM takes factors of; refuse an architecture whose adapters it does not take.

    >>> embeddings_of("LlamaForCausalLM"), embeddings_of("Qwen2ForCausalLM")
    (('embed_tokens', 'lm_head'), ())
    """
    stem = next((architecture.removesuffix(end) for end in LLAMA_LIKE if architecture.endswith(end)), architecture)
    if stem in BOTH_EMBEDDINGS:
        return INPUT, OUTPUT
    if stem in INPUT_EMBEDDINGS:
        return (INPUT,)
    if stem in LINEAR_ONLY or architecture in ENCODERS:
        return ()
    raise ConfigError(
        f"vLLM {VERSION} takes no LoRA adapters of {architecture}: serve the artifact with the embedded engine "
        "(`retex serve`), or export whole experts."
    )


def served_rank(rank: int) -> int:
    """Return the smallest value of `--max-lora-rank` that admits a rank.

    >>> served_rank(12)
    16
    """
    fitting = [allowed for allowed in RANKS if allowed >= rank]
    if not fitting:
        raise ConfigError(
            f"The adapters have rank {rank}, and vLLM takes at most {RANKS[-1]}: build with a smaller rank or storage "
            "budget."
        )
    return fitting[0]
