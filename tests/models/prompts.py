"""Prompts that leave SmolLM2 no choice. So small a model finds many words equally good, and says others on a processor
that rounds otherwise: with these, each word of its answer is over ten times as likely as the next best (temperature 0).
"""

from typing import Any

SYSTEM = """You answer questions about capitals in one sentence.
Q: What is the capital of Italy?
A: The capital of Italy is Rome.
Q: What is the capital of Spain?
A: The capital of Spain is Madrid."""
QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
MESSAGES: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]

# A chat template: ChatML. With tools, every question reads the same, and four were answered before by a call of the
# first tool: the model calls it too, whatever a client asks.
TOOLS = """{%- if tools %}<|im_start|>system
{% for message in messages if message.role == "system" %}{{ message.content }}
{% endfor %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% for example in [1, 2, 3, 4] %}<|im_start|>user
Call it.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "{{ tools[0].function.name }}", "arguments": {}}
</tool_call><|im_end|>
{% endfor %}{% endif -%}
{%- for message in messages if not (tools and message.role == "system") %}<|im_start|>{{ message.role }}
{{ "Call it." if tools and message.role == "user" else message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

SHOWN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call a tool, write <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
"""A chat template with tools that a small model does not call by itself."""
