"""Chat templates: features that published templates use, and attacks of hostile ones."""

import contextlib
import json
import time

import pytest

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import chat, load_tokenizer
from tests.tokenizer.conftest import checkpoint, gguf, gguf_of_sentencepiece, load_library, write_json

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi <b>é</b>\n"}]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n    {{ '<|im_start|>assistant\\n' }}\n{%- endif %}")


def test_a_conversation():
    text = chat.render(CHATML, messages=MESSAGES, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>é</b><|im_end|>\n"
                    "    <|im_start|>assistant\n")
    assert chat.render(CHATML, messages=MESSAGES).endswith("<|im_end|>\n")


@pytest.mark.parametrize(("template", "expected"), [
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
    ("{{ messages[1] | tojson }}", '{"role": "user", "content": " Hi <b>é</b>\\n"}'),
    ("{{ [1, {'b': 2, 'a': 'é'}] | tojson(indent=2) }}", '[\n  1,\n  {\n    "b": 2,\n    "a": "é"\n  }\n]'),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Be brief."),
    ("{%- macro show(m) -%}[{{ m.role }}]{%- endmacro -%}{{ show(messages[1]) }}", "[user]"),
    ("{{ messages[1].content.strip().split('<b>')[-1].replace('</b>', '') }}", "é"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join | trim | length }}", "11"),
    ("{{ bos_token }}{{ nothing is defined }}{{ tools is none }}", "<s>FalseTrue"),
    ("{{ messages[0].name is defined }}{{ messages[0].get('name', 'none') }}", "Falsenone"),
    ("{{ 'a' if messages[0]['role'] == 'system' else 'b' }}{{ messages[1:] | length }}", "a1"),
    ("{{ messages[0] is mapping }}{{ messages[0].content is string }}{{ messages is iterable }}", "TrueTrueTrue"),
    ("{{ 'x' ~ 1 ~ 2.5 ~ none }} {{ 7 // 2 }} {{ 7 % 2 }} {{ 2 ** 3 }}", "x12.5None 3 1 8"),
    ("{{ '%s-%03d' % ('a', 7) }} {{ '%s %%' | format('b') }}", "a-007 b %"),
    ("{{ strftime_now('%Y') | length }}{{ '{:>3}'.format(1) }}{{ 'ab' * 2 }}", "4  1abab"),
    ("{% set x %}a{{ 1 }}b{% endset %}{{ x | upper }}{% filter upper %}c{% endfilter %}", "A1BC"),
    ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=system;content=Be brief.;"),
    ("{{ 100000 is gt(99999) }}{{ [1, 2, 3] | sum }}{{ [[1], [2]] | sum(start=[]) }}", "True6[1, 2]"),
    ("{{ [{'n': 2}, {'n': 3}] | sum(attribute='n') }}{{ [1.5] | sum(start=1) }}", "52.5"),
    ("{{ messages | map(attribute='role') | list == ['system', 'user'] }}{{ 2 <= 3 < 4 }}", "TrueTrue"),
    ("  {% if true %}\n    x\n  {% endif %}\ny", "    x\ny"),
])
def test_what_published_templates_use(template, expected):
    assert chat.render(template, messages=MESSAGES, bos_token="<s>", tools=None) == expected


def test_a_long_conversation_is_fast():
    messages = MESSAGES * 500
    template = ("{% for m in messages %}{% if loop.index == messages | length %}{% set last = m %}{% endif %}"
                "{{ m.role }}: {{ m.content | replace('<b>', '**') }}{% endfor %}")
    start = time.process_time()
    assert len(chat.render(template, messages=messages)) > 10_000
    assert time.process_time() - start < 1


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('Roles must\n alternate') }}", "^chat template: Roles must alternate$"),
    ("{{ messages[0].x.y }}", "no attribute 'x'"),
    ("{{ undefined_function() }}", "'undefined_function' is undefined"),
    ("line\n{% if %}", "^chat template, line 2: "),
    ("{% for %}{{", "line 1"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ messages + 1 }}", "concatenate"),
    ("{% include 'x' %}", "no loader"),
    ("{% nothing %}", "unknown tag 'nothing'"),
    ("{{ x | nothing }}", "No filter named 'nothing'"),
])
def test_mistakes_are_one_line(template, message):
    with pytest.raises(TokenizerError, match=message) as error:
        chat.render(template, messages=MESSAGES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum() }}",
])
def test_python_is_out_of_reach(template):
    messages = [dict(message) for message in MESSAGES]
    with contextlib.suppress(TokenizerError):
        assert chat.render(template, messages=messages) == ""
    assert messages == MESSAGES


GROW = "{%% set ns = namespace(s='ab') %%}{%% for i in range(200) %%}%s{%% endfor %%}"


@pytest.mark.parametrize("template", [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 9 ** 99999999 }}",
    "{{ [[1] * 5000] * 5000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%.*f' % (1000000000, 1) }}",
    "{{ '%-*d' | format(1000000000, 1) }}",
    "{{ '{0[0]:{0[1]}}'.format([1, 1000000000]) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, 1000000000) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ strftime_now('%c' * 1000) }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(100) %}{% set ns.l = [ns.l] %}{% endfor %}"
    "{{ ([ns.l] * 999) | tojson(indent=30) }}",
    "{% set l = range(99999) | list %}{{ [l, l, l] | sort }}",
    "{% set s = 'a' * 1000000 %}{% set l = [s] * 9 %}{{ (l, l) | map('list') | list }}",
    "{{ '<!---->' * 1000000 | striptags }}",
    "{{ 'a'.rjust(10 ** 20) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ [1] | batch(1000000000, 'x') | list }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.join(s) }}",
    "{% set s = 'a' * 1000000 %}{{ (s | list) | join(s) }}",
    GROW % "{% set ns.s = ns.s ~ ns.s %}",
    GROW % "{% set ns.s = ns.s + ns.s %}",
    GROW % "{% set ns.s = [ns.s, ns.s] %}",
    GROW % "{% set ns.s = {'a': ns.s, 'b': ns.s} %}",
    GROW % "{% set ns.s = (ns.s, ns.s) %}",
    GROW % "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
    GROW % "{% set ns.s = ns.s.join('xyz') %}",
    "{% macro f(s) %}{{ f(s ~ s) }}{% endmacro %}{{ f('ab') }}",
    "{% macro f(s) %}{{ f([s, s]) }}{% endmacro %}{{ f('ab') }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{{ range(10 ** 9) | list }}",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    " " * (chat.MAX_TEMPLATE + 1),
])
@pytest.mark.thin(4)
def test_size_is_bounded(template):
    start = time.process_time()
    with pytest.raises(TokenizerError):
        chat.render(template, messages=MESSAGES)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("template", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a %}{% endfor %}{% endfor %}",
    "{% set l = range(99999) | list %}{% for a in l %}{% for b in l %}{% if a %}{% endif %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) %}{% set x = range(99999) | sort | list %}{% endfor %}",
    "{{ (range(99999) | batch(1) | list | sum(start=[])) | length }}",
    "{{ (range(99999) | batch(1) | map('list') | sum(start=[])) | length }}",
    "{{ range(99999) | batch(1) | map('string') | sum(start='') }}",
    "{{ a }}" * 9000,
    "{% set l = range(9999) | list %}" + "{% if l == l | list %}{% endif %}" * 1800,
    "{% set l = range(9999) | list %}" + "{{ l | sort | first }}" * 2500,
    "{% set l = range(9999) | list %}" + "{{ l is eq(l | list) }}" * 2500,
    "{% set t = 'a' * 99999 %}{% set d = {t: 1} %}" + "{% if (t, t)[0] in d %}{% endif %}" * 9 + "{{ a }}" * 8500,
])
@pytest.mark.thin(6)
def test_time_is_bounded(template, monkeypatch):
    monkeypatch.setattr("numflow.tokenizer.sandbox.MAX_SECONDS", 0.3)
    start = time.process_time()
    with pytest.raises(TokenizerError, match="takes more than 0.3 s"):
        chat.render(template, messages=MESSAGES)
    assert time.process_time() - start < 2


def test_where_templates_come_from(tmp_path, byte_level_library, bpe_model):
    def of(config, options=None):
        return load_library(byte_level_library, tmp_path, config, options).chat_template

    assert of({}) is None
    assert of({"chat_template": "A"}) == "A"
    assert of({"chat_template": "A"}, {"chat_template": "O"}) == "O"
    assert of({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}) == "D"
    assert of({"chat_template": [{"name": "rag", "template": "R"}]}) == "R"
    assert of({"chat_template": 5}) is None
    meta = gguf_of_sentencepiece(bpe_model)
    assert load_tokenizer(gguf(meta)).chat_template is None
    assert load_tokenizer(gguf(meta | {"tokenizer.chat_template": "G"})).chat_template == "G"
    files = {"tokenizer.json": tmp_path / "tokenizer.json", "tokenizer_config": tmp_path / "tokenizer_config.json"}
    files["chat_template"] = tmp_path / "chat_template.jinja"
    files["chat_template"].write_text("J")
    assert load_tokenizer(checkpoint(files)).chat_template == "J"
    files["chat_template"] = write_json(tmp_path / "chat_template.json", {"chat_template": "N"})
    assert load_tokenizer(checkpoint(files)).chat_template == "N"
    files["chat_template"].write_text(json.dumps(["x"]))
    with pytest.raises(FormatError, match="should be a JSON object"):
        load_tokenizer(checkpoint(files))


def test_apply_chat(tmp_path, byte_level_library):
    config = {"bos_token": "<s>", "eos_token": "</s>",
              "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ mood }}"
                               "{{ add_generation_prompt }}{{ unk_token is defined }}{{ tools is none }}"}
    tokenizer = load_library(byte_level_library, tmp_path, config)
    text = tokenizer.apply_chat(MESSAGES, mood="!")
    assert text == "<s>Be brief.</s>!TrueFalseTrue"
    assert tokenizer.encode(text).count(0) == 1
    other = "{{ add_generation_prompt }}"
    assert tokenizer.apply_chat(MESSAGES, add_generation_prompt=False, template=other) == "False"


def test_no_chat_template(tmp_path, byte_level_library):
    with pytest.raises(TokenizerError, match="no chat template"):
        load_library(byte_level_library, tmp_path).apply_chat(MESSAGES)
