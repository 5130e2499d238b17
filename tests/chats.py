"""Chat templates of the families that people train, in short, and a tokenizer for them."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

QWEN25 = """
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a default.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3 = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA3 = """{{ bos_token }}
{%- set today = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.role == 'system' %}Today: {{ today }}

{% endif %}{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
REFUSING = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|start|>model
{% endif %}"""
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|end|>")


def tokenizer(template: str | None, bos: str = "<|begin_of_text|>") -> PreTrainedTokenizerFast:
    """Bytes and marks; like that of Llama 3 it writes the start token by itself, unless told not to."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
    made.add_special_tokens([bos, *MARKS])
    made.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token="<|im_end|>")
    wrapped.chat_template = template
    return wrapped
