"""Fields of other servers' APIs that this one does not serve, in one place.

    harmless    accepted and without effect: they change no result (docs/clients.md lists them)
    refused     400 with what to do instead, unless the value is the one that asks for nothing

A field that is in neither, and not declared by a route's body, is unknown: 400 as well. To serve
one of them, declare it in a body and take it out here.
"""

from collections.abc import Mapping
from typing import Any

NOT_HERE = "is not available in this server; leave the field out"
TEXT_ONLY = "this server reads text only; leave the field out"
# Values that ask for nothing, beside null, false, 0 and what is empty.
NEUTRAL: Mapping[str, Any] = {
    "add_special_tokens": True,
    "beam_width": 1,
    "include_reasoning": True,
    "length_penalty": 1,
    "modalities": ["text"],
    "stream_reasoning": True,
    "typical_p": 1,
}
MISPLACED = "belongs in sampling_params"


def neutral(name: str, remedy: str) -> tuple[Any, ...]:
    """The values of a refused field that are let through. What stands in the wrong place would
    have asked for something, whatever it is."""
    return (None,) if remedy == MISPLACED else (None, [], {}, "", 0, NEUTRAL.get(name))


# ── of all routes ────────────────────────────────────────────────────────────────────────────

# Names and accounts, hints for caches, queues and logs, and places in a cluster of one server.
HARMLESS = frozenset(
    "user metadata user_id request_id conversation_id service_tier safety_identifier "
    "prompt_cache_key prompt_cache_options prompt_cache_retention data_parallel_rank "
    "routed_dp_rank routing_key custom_labels external_trace_header kv_hints log_metrics no_logs "
    "received_time stream_interval".split()
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("lora_path", "lora_id"), "send the name of a loaded adapter as model"),
    **dict.fromkeys(
        "audio_data encoder_urls image_data images_config input_embeds max_dynamic_patch "
        "media_io_kwargs min_dynamic_patch mm_hashes mm_processor_kwargs modalities prompt_embeds "
        "use_audio_in_video video_config video_data".split(),
        TEXT_ONLY,
    ),
    **dict.fromkeys(
        "bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room "
        "disagg_prefill_dp_rank ec_transfer_params kv_transfer_params".split(),
        "prompts and outputs are computed by one server here; leave the field out",
    ),
    "extra_key": "send it as cache_salt",
    "session_params": "send the whole prompt, whose beginning is cached, and its session_id",
}

# ── of routes that sample ────────────────────────────────────────────────────────────────────

SAMPLING: Mapping[str, str] = {
    **dict.fromkeys(
        "custom_logit_processor custom_params logits_processors vllm_xargs watermark watermarking "
        "repetition_detection length_penalty typical_p".split(),
        NOT_HERE,
    ),
    **dict.fromkeys(("use_beam_search", "beam_width"), "beams are not searched: use n samples"),
    **dict.fromkeys(
        "return_routed_experts return_sampling_mask return_indexer_topk return_entropy".split(),
        "only tokens and their logprobs are returned here; leave the field out",
    ),
    "return_hidden_states": "send it to /generate",
    "logprob_token_ids": "send token_ids_logprob to /generate",
    "token_ids_logprob": "send it to /generate",
    "stop_regex": NOT_HERE,
    "include_stop_str_in_output": "send no_stop_trim",
    "grammar": "send it as ebnf",
    "whitespace_pattern": "send it as guided_whitespace_pattern",
    "disable_any_whitespace": 'send "" as guided_whitespace_pattern',
}
STRUCTURED: Mapping[str, str] = {
    "disable_additional_properties": "is not available: write additionalProperties: false in the "
    "schema"
}
GUIDED_HARMLESS = frozenset(("guided_decoding_backend",))

# ── of one route ─────────────────────────────────────────────────────────────────────────────

COMPLETIONS = {"add_special_tokens": "special tokens are added: send token ids without them"}
RENDERED = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "chat_template": "requests bring no template: start the server with --chat-template",
}
CHAT = {
    "audio": TEXT_ONLY,
    "echo": NOT_HERE,
    "include_reasoning": "send separate_reasoning and leave the reasoning out yourself",
    "moderation": NOT_HERE,
    "stream_reasoning": "reasoning is streamed as it comes; leave the field out",
    "web_search_options": NOT_HERE,
}
# Wishes that only models trained for them follow; outputs that are predicted come no faster here.
CHAT_HARMLESS = frozenset("prediction store verbosity".split())
RESPONSES = {
    "conversation": "this server keeps responses, and no conversations: send previous_response_id, "
    "or the whole conversation as input",
    "prompt": "this server keeps no prompts: send instructions and input",
    "background": "a response ends when its client leaves: leave it out",
    "top_logprobs": "logprobs are not available here: use /v1/chat/completions",
    "image": TEXT_ONLY,
    "moderation": NOT_HERE,
}
# max_tool_calls counts tools that OpenAI runs; what is too long is refused, never compacted.
RESPONSES_HARMLESS = frozenset(
    "background_options client_metadata context_management max_tool_calls stream_options".split()
)
MESSAGES = {"mcp_servers": NOT_HERE, "container": NOT_HERE, "inference_geo": NOT_HERE}
# Prefixes are cached without being marked.
MESSAGES_HARMLESS = frozenset(
    "cache_control context_management diagnostics speed user_profile_id workspace_id".split()
)
SCORE = dict.fromkeys(  # they need a model that was trained to compare or classify
    "text_1 text_2 queries documents query_embed_overrides item_embed_overrides "
    "embed_override_token_id score_extraction_token return_pooled_hidden_states".split(),
    NOT_HERE,
)
PROFILE = {"output_dir": "the server chooses a folder (TMPDIR says where): leave it out"}
