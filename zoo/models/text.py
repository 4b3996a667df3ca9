"""Text encoders, decoders and encoder-decoders of keras_hub, two layers each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from zoo.subject import Draw, Function, ints, of_keras, ones

_WORDS = 50
_LAYERS: dict[str, Any] = {
    "vocabulary_size": _WORDS,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
_ENCODER: dict[str, Any] = {**_LAYERS, "num_heads": 2, "dropout": 0.1}
_POSITIONS = {"max_sequence_length": 16}
_GROUPED: dict[str, Any] = {
    **_LAYERS,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
}
_GEMMA: dict[str, Any] = {**_GROUPED, "head_dim": 8}
_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts": 4, "top_k": 2}


def text_draws(network: Any) -> dict[str, Draw]:
    """Draw tokens; masks are ones."""
    draws = {}
    for tensor in network.inputs:
        name = tensor.name.split(":")[0]
        if "token" in name:
            draws[name] = ints(1, _WORDS)
        elif "mask" in name:
            draws[name] = ones
    return draws


def _of(name: str, **config: Any) -> Function:
    import keras_hub

    network = getattr(keras_hub.models, name)(**config)
    return of_keras(network, text_draws(network))


def _sized(**config: Any) -> dict[str, Any]:
    """Return a config in which the vocabulary goes by another name."""
    config["vocab_size"] = config.pop("vocabulary_size")
    return config


_T5_GEMMA: dict[str, Any] = {
    "vocabulary_size": _WORDS,
    **{
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in {
            "hidden_dim": 16,
            "intermediate_dim": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
        }.items()
    },
}
_SMOL: dict[str, Any] = {
    **_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True, False],
    "layer_types": ["attention"] * 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}
_RWKV: dict[str, Any] = {
    "hidden_size": 16,
    "head_size": 8,
    "num_layers": 2,
    "vocabulary_size": _WORDS,
    "intermediate_dim": 32,
    "gate_lora": 8,
    "mv_lora": 8,
    "aaa_lora": 8,
    "decay_lora": 8,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertBackbone", {**_ENCODER, **_POSITIONS}),
    "ALBERT": ("AlbertBackbone", {**_ENCODER, **_POSITIONS, "embedding_dim": 8}),
    "RoBERTa": ("RobertaBackbone", {**_ENCODER, **_POSITIONS}),
    "XLM-RoBERTa": ("XLMRobertaBackbone", {**_ENCODER, **_POSITIONS}),
    "DistilBERT": ("DistilBertBackbone", {**_ENCODER, **_POSITIONS}),
    "DeBERTaV3": ("DebertaV3Backbone", {**_ENCODER, **_POSITIONS, "bucket_size": 4}),
    "ELECTRA": (
        "ElectraBackbone",
        _sized(**_ENCODER, **_POSITIONS, embedding_dim=8),
    ),
    "FNet": (
        "FNetBackbone",
        {**_LAYERS, **_POSITIONS, "dropout": 0.1},
    ),
    "RoFormerV2": ("RoformerV2Backbone", {**_ENCODER, "head_size": 8}),
    "ESM2": ("ESM2Backbone", dict(_ENCODER)),
    "XLNet": ("XLNetBackbone", dict(_ENCODER)),
    "GPT2": ("GPT2Backbone", {**_ENCODER, **_POSITIONS}),
    "GPTNeoX": ("GPTNeoXBackbone", {**_ENCODER, **_POSITIONS}),
    "OPT": ("OPTBackbone", {**_ENCODER, **_POSITIONS}),
    "BLOOM": ("BloomBackbone", dict(_ENCODER)),
    "Falcon": ("FalconBackbone", {**_LAYERS, "num_attention_heads": 2}),
    "Gemma": ("GemmaBackbone", dict(_GEMMA)),
    "Gemma3": (
        "Gemma3Backbone",
        {**_GEMMA, "image_size": 16, "use_sliding_window_attention": True},
    ),
    "Llama": ("LlamaBackbone", dict(_GROUPED)),
    "Llama3": ("Llama3Backbone", dict(_GROUPED)),
    "Mistral": ("MistralBackbone", {**_GROUPED, "sliding_window": 8}),
    "Mixtral": ("MixtralBackbone", {**_EXPERTS, "sliding_window": 8}),
    "GptOss": ("GptOssBackbone", {**_EXPERTS, "sliding_window": 8}),
    "Phi3": ("Phi3Backbone", dict(_GROUPED)),
    "Qwen": ("QwenBackbone", dict(_GROUPED)),
    "Qwen3": ("Qwen3Backbone", dict(_GEMMA)),
    "Qwen3Moe": ("Qwen3MoeBackbone", {**_EXPERTS, "moe_intermediate_dim": 16}),
    "SmolLM3": ("SmolLM3Backbone", _SMOL),
    "RWKV7": ("RWKV7Backbone", _RWKV),
    "BART": ("BartBackbone", {**_ENCODER, **_POSITIONS}),
    "T5": ("T5Backbone", dict(_ENCODER)),
    "T5Gemma": ("T5GemmaBackbone", _T5_GEMMA),
    "EdRec": (
        "EdRecBackbone",
        {
            "vocab_size": _WORDS,
            "num_layers_enc": 1,
            "num_layers_dec": 1,
            "hidden_dim": 16,
            "intermediate_dim": 32,
            "num_heads": 2,
        },
    ),
}

BUILDERS: dict[str, Callable[[], Function]] = {
    name: partial(_of, backbone, **config)
    for name, (backbone, config) in _CONFIGS.items()
}
