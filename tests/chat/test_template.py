"""Chat templates: what they render, what they may not do, and what they may not cost."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ds4batch.chat.template import CHATML, TRANSCRIPT, ChatTemplate, TemplateError, template_for
from ds4batch.engine.weights.gguf_file import open_gguf
from ds4batch.tokenizer import ModelTokenizer

DEMO = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&amp; {{ 7 * 7 }}</b>"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "漢字 😀"}, {"role": "user", "content": " \n"}],
]
# Pieces that templates in the wild are made of: filters, tests, namespaces, macros, loop controls, generation blocks, tools.
PATTERNS = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{%- if tools %}{{ '# Tools' }}{% for t in tools %}\n{{ t | tojson }}{% endfor %}{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index0 * 2 %}{% endfor %}{{ ns.n }}",
    "{% macro show(x) %}<{{ x ~ '|' ~ 1 ~ none }}>{% endmacro %}{% for m in messages[::-1] %}{{ show(m.role) }}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | map(attribute='role') | join(', ') }} {{ 'x-y' | replace('-', ' + ') }} {{ '%s=%d' | format('a', 5) }}",
    "{{ messages[0].content.split('i')[0] ~ messages | length }} {{ 'é<>' | tojson }} {{ [1, 2] | tojson(indent=2) }}",
    "{% for k, v in (tools or [{}])[0].items() %}{{ k ~ '=' ~ v }};{% endfor %}{{ undefined_name }}",
    "   {% if true %}\n   kept\n   {% endif %}\n{{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 'n=%03d' % 7 }}",
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "café <b>", "parameters": {"a": [1, 2.5, None]}}}]


@pytest.fixture(scope="module")
def demo_source() -> str:
    if not DEMO.exists():
        pytest.fail(f"{DEMO} is missing: run `make setup`")
    return str(open_gguf(str(DEMO)).metadata["tokenizer.chat_template"])


def reference(source: str, messages: list[dict[str, Any]], tools: Any, prompt: bool, **names: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **names)
    return str(rendered[0])


@pytest.mark.parametrize("prompt", [True, False])
def test_demo_template_renders_as_transformers_does(demo_source: str, prompt: bool) -> None:
    for chat in CHATS:
        ours = ChatTemplate(demo_source, "<|im_start|>", "<|im_end|>").render(chat, add_generation_prompt=prompt)
        assert ours == reference(demo_source, chat, None, prompt, bos_token="<|im_start|>", eos_token="<|im_end|>")


@pytest.mark.parametrize("source", PATTERNS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_common_template_idioms_render_as_transformers_does(source: str, tools: Any) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    for chat in CHATS:
        assert template.render(chat, tools=tools) == reference(source, chat, tools, True, bos_token="<s>", eos_token="</s>")


def test_content_parts_are_joined_and_missing_content_is_empty() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", "", "")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert template.render(messages) == "[ab][][]"
    assert messages[0]["content"] == parts
    assert "content" not in messages[2]


def test_part_without_text_is_refused_by_its_type() -> None:
    with pytest.raises(TemplateError, match="'image_url'"):
        ChatTemplate(CHATML, "", "").render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_tojson_keeps_letters_and_pythons_separators() -> None:
    value = {"b": "é<&>'", "a": [1, {"x": None}]}
    assert ChatTemplate("{{ v | tojson }}", "", "").render([], v=value) == json.dumps(value, ensure_ascii=False)


def test_strftime_now_reads_the_injected_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "", "", clock=lambda: datetime(2024, 7, 26))
    assert template.render([]) == "26 Jul 2024"


def test_extra_names_reach_the_template_but_cannot_replace_the_models_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}{{ messages | length }}", "<s>", "")
    assert template.render([], enable_thinking=False, bos_token="evil") == "<s>False0"


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ x | no_such_filter }}", "{% endif %}", "{{ 'a }}", "{% x %}"])
def test_broken_template_is_refused_when_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(source, "", "")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ none + 1 }}",
        "{{ missing.attribute.of }}",
        "{{ messages[0]['x'].y }}",
        "{{ 'a' | int('z', 99) + messages }}",
        "{{ {}['a']['b'] }}",
    ],
)
def test_failing_template_gives_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match="cannot render these messages"):
        ChatTemplate(source, "", "").render([{"role": "user", "content": "x"}])


def test_raise_exception_gives_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match=r"^Roles must alternate!$"):
        ChatTemplate("{{ raise_exception('Roles must alternate!') }}", "", "").render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ ''['__class__'] }}{{ ().__class__.__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ messages | map(attribute='__class__') | map(attribute='__mro__') | list }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ environment.globals }}",
    ],
)
def test_template_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source, "", "").render([{"role": "user", "content": "x"}])
    except TemplateError:
        return
    for leak in ("class", "builtin", "function", "uid=", "root:"):
        assert leak not in text


def test_template_cannot_change_what_it_is_given() -> None:
    messages = [{"role": "user", "content": "x", "list": [1]}]
    for source in ("{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ messages[0]['list'].clear() }}"):
        with pytest.raises(TemplateError):
            ChatTemplate(source, "", "").render(messages)
    assert messages == [{"role": "user", "content": "x", "list": [1]}]


GROW = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = GROWN %}{% endfor %}{{ ns.s | length }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 9999999999) }}",
        "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
        "{{ '{a:>{w}}'.format_map({'a': 1, 'w': 9999999999}) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a\nb' | indent(9999999999) }}",
        "{{ [1] | tojson(indent=9999999999) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ lipsum(999999) }}",
        GROW.replace("GROWN", "ns.s + ns.s"),
        GROW.replace("GROWN", "ns.s ~ ns.s"),
        GROW.replace("GROWN", "ns.s | replace('a', ns.s)"),
        GROW.replace("GROWN", "ns.s.replace('a', ns.s)"),
        GROW.replace("GROWN", "[ns.s, ns.s] | join(ns.s)"),
        GROW.replace("GROWN", "ns.s.join([ns.s, ns.s])"),
        GROW.replace("GROWN", "'%s%s' | format(ns.s, ns.s)"),
        GROW.replace("GROWN", "'%s%s' % (ns.s, ns.s)"),
        "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='a') %}"
        "{% for i in range(99) %}{% set ns.s = d(ns.s) %}{% endfor %}",
    ],
)
def test_costly_template_is_stopped(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, "", "").render([])


def test_long_ordinary_conversation_is_within_the_budget(demo_source: str) -> None:
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(8192)]
    assert len(ChatTemplate(demo_source, "", "").render(chat)) > 8192 * 1000


def test_budget_is_full_again_for_the_next_rendering() -> None:
    template = ChatTemplate("{% for i in range(9000) %}{% for j in range(n) %}{% endfor %}{% endfor %}ok", "", "")
    for _ in range(2):
        with pytest.raises(TemplateError, match="loop turns"):
            template.render([], n=90)
        assert template.render([], n=1) == "ok"


def tokenizer_without_template(vocabulary: dict[str, int]) -> ModelTokenizer:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    return ModelTokenizer(
        tokenizer=Tokenizer(BPE(vocab=vocabulary, merges=[])),
        bytes_by_id=[t.encode() for t in vocabulary],
        bos_id=0,
        eos_id=0,
        add_bos=False,
        stop_ids=frozenset(),
        special_ids=frozenset(),
        chat_template=None,
        model_name="m",
        context=64,
    )


def test_model_without_template_gets_chatml_if_its_vocabulary_has_the_markers() -> None:
    chatml = template_for(tokenizer_without_template({"<s>": 0, "<|im_start|>": 1}))
    assert chatml.source == CHATML
    assert chatml.render(CHATS[0]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    plain = template_for(tokenizer_without_template({"<s>": 0}))
    assert plain.source == TRANSCRIPT
    assert plain.render(CHATS[0]) == "<s>User: Hi\n\nAssistant:"
