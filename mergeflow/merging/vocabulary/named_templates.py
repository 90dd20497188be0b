"""Chat templates by name: the formats that many models share, as Jinja."""

_START = "{%- for turn in messages -%}"
_PROMPT = "{%- endfor -%}{%- if add_generation_prompt -%}"
_END = "{%- endif -%}"

CHATML = (
    f"{_START}{{{{- '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' -}}}}"
    f"{_PROMPT}{{{{- '<|im_start|>assistant\\n' -}}}}{_END}"
)
LLAMA3 = (
    f"{{{{- bos_token -}}}}{_START}"
    "{{- '<|start_header_id|>' ~ turn.role ~ '<|end_header_id|>\\n\\n' ~ turn.content | trim ~ '<|eot_id|>' -}}"
    f"{_PROMPT}{{{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}}}{_END}"
)
# A system's words stand before the first question, since the format has no place of their own for them.
MISTRAL = (
    "{{- bos_token -}}{%- set said = namespace(first='') -%}"
    f"{_START}"
    "{%- if turn.role == 'system' -%}{%- set said.first = turn.content ~ '\\n\\n' -%}"
    "{%- elif turn.role == 'user' -%}{{- ' [INST] ' ~ said.first ~ turn.content ~ ' [/INST]' -}}"
    "{%- set said.first = '' -%}"
    "{%- else -%}{{- ' ' ~ turn.content ~ eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
)
ALPACA = (
    "{%- set titles = {'user': '### Instruction:\\n', 'assistant': '### Response:\\n', 'system': ''} -%}"
    f"{_START}{{{{- titles[turn.role] ~ turn.content | trim ~ '\\n\\n' -}}}}"
    f"{_PROMPT}{{{{- '### Response:\\n' -}}}}{_END}"
)
EXAONE = (
    "{%- if messages[0].role != 'system' -%}{{- '[|system|][|endofturn|]\\n' -}}{%- endif -%}"
    f"{_START}"
    "{{- '[|' ~ turn.role ~ '|]' ~ turn.content ~ ('' if turn.role == 'user' else '[|endofturn|]') ~ '\\n' -}}"
    f"{_PROMPT}{{{{- '[|assistant|]' -}}}}{_END}"
)

NAMED = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "alpaca": ALPACA, "exaone": EXAONE}
"""Templates by the names that a recipe may give them."""
