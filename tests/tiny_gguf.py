"""A GGUF of a few kilobytes with random weights, in every respect that conversion looks at like the embedded one."""

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep.runtime import embedded

WIDTH, HEADS, KV_HEADS, LAYERS, INNER = 32, 4, 2, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "Ġ t", "h e", "Ġt he"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ALIAS = "smollm2-135m"


def random_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def pairs_from_halves(weight, heads):
    """What a GGUF stores of a rotary projection: the inverse of what the conversion does, written another way."""
    half = weight.shape[0] // heads // 2
    rows = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return weight[rows]


def write_gguf(path, model, quantised=(), architecture="llama", pre="smollm"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {new: old for old, new in embedded.OUTER_NAMES.items()}
    parts = {new: old for old, new in embedded.BLOCK_NAMES.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight, kind = tensor.numpy(), None
        if name not in names:
            block, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            kind = parts[part]
            if kind in ("attn_q", "attn_k"):
                weight = pairs_from_halves(weight, HEADS if kind == "attn_q" else KV_HEADS)
        stored = names.get(name) or f"blk.{block}.{kind}.weight"
        if kind in quantised:
            form = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(stored, gguf.quants.quantize(weight, form), raw_dtype=form)
        else:
            writer.add_tensor(stored, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def left_behind():
    """Everything in the cache that is not a lock."""
    folder = embedded.cache_folder()
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"} if folder.exists() else set()
