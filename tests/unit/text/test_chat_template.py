"""Chat templates: whitespace, patches, continuation, sources, and templates that mean harm."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.text.chat_template import ChatTemplate, TemplateError, load_chat_template, read_template_files

HELLO = [{"role": "user", "content": "hello"}]


def rendered(source: str, messages: list[dict[str, Any]] | None = None, **how: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(HELLO if messages is None else messages, **how)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # Blocks are neither trimmed nor stripped; one newline at the template's end is dropped, no second one.
        ("a\n{% if true %}\nb\n{% endif %}\nc\n\n", "a\n\nb\n\nc\n"),
        ("  {% if true %}x{% endif %}", "  x"),
        ("{%- if true -%}  x  {%- endif -%}", "x"),
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ messages[0]['content'][0]['text'] }}", "hello"),
        ("{% for m in messages[::-1] %}{{ m.role }}{% endfor %}", "user"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{%- generation -%} x {%- endgeneration -%} y", "xy"),
        ("[{{ nothing }}{% for x in nothing %}x{% endfor %}]", "[]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("{{ ' a-b '.strip().split('-')[-1].upper() }}", "B"),
        ("{{ {'a': 1}.get('b', 2) }}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "2a1"),
        ("{% set ns = namespace(n=1) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "4"),
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
        ("{{ 'x' ~ 1 ~ none }}", "x1None"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is none or not tools %}plain{% endif %}", "plain"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", "<a>"),
        ("{{ 'é' * 3 }}{{ 7 % 4 }}{{ '%s!' % 'a' }}", "ééé3a!"),
        ("{{ messages|map(attribute='content')|join('-') }}{{ [1, 'b']|join(', ') }}{{ messages|join('', 'role') }}",
         "hello1, buser"),
        ("{% set a, b = 1, (2, [3]) %}{{ a in [1] }}{{ b }}{{ '%s%s' % (a, a) }}{{ ','.join(['x', 'y']) }}",
         "True(2, [3])11x,y"),
    ],
)  # fmt: skip
def test_rendering(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_a_real_template_shape() -> None:
    source = (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}"
        "{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{'<｜Assistant｜>' + content + '<｜end｜>'}}{%- endif %}{%- endfor -%}"
        "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>easy</think>2"},
        {"role": "user", "content": "2+2?"},
    ]
    expected = "<s>Be brief.<｜User｜>1+1?<｜Assistant｜>2<｜end｜><｜User｜>2+2?<｜Assistant｜><think>\n"
    assert rendered(source, messages) == expected


def test_the_last_assistant_message_is_continued_at_its_last_occurrence() -> None:
    source = "{% for m in messages %}[{{ m.content }}] {% endfor %}!"
    said = [{"role": "user", "content": "yes "}, {"role": "assistant", "content": "yes "}]
    assert rendered(source, said) == "[yes ] [yes"
    assert rendered(source, [*said, HELLO[0]]).endswith("!")
    assert rendered("nothing", said) == "nothing"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{% if %}", "syntax error"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.nope() }}", "nope"),
        ("{% include 'x' %}", ""),
        ("{% set x = messages.append(1) %}", "unsafe|not safely|not allowed|SecurityError"),
    ],
)
def test_errors_are_the_templates_own_words(source: str, text: str) -> None:
    with pytest.raises(TemplateError, match=r"^Template error: ") as error:
        rendered(source)
    assert error.value.error_type == "template_error"
    assert any(word in str(error.value) for word in text.split("|")), str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__self__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ environment.charge_step }}{{ self.__class__ }}",
    ],
)
def test_templates_cannot_reach_python(source: str) -> None:
    try:
        text = rendered(source)
    except TemplateError:
        return
    assert "class" not in text
    assert "module" not in text
    assert "method" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a'|center(10000000000) }}",
        "{{ 'a'|indent(10000000000, true) }}",
        "{{ '{:>10000000000}'.format('a') }}",
        "{{ '%10000000000s'|format('a') }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s|replace('a', ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s.join([ns.s, ns.s]) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ [1]|slice(100000000)|list|length }}",
        "{{ [1]|batch(100000000, 0)|list|length }}",
        "{{ range(99999)|join('x'*30000) }}",
        "{{ ('x'*16000000).join('y'*100) }}",
        "{{ ''.join(range(99999)|map('string')|map('center', 10000)) }}",
        "{{ range(99999)|map('center', 100000)|list|length }}",
        "{% set n = namespace(l=[]) %}{% for i in range(400) %}{% set n.l = n.l + ['x' * 8000000 ~ ''] %}{% endfor %}",
        "{{ ('a'*16000000).translate({97: 'b'*1000})|length }}",
        "{{ (1).to_bytes(3000000000, 'big')|length }}",
        "{{ 'a'.encode().ljust(1000000000)|length }}",
        "{{ ('x'*1000000).splitlines() * 16000000 }}",
        "{{ ('\\t'*8000000).expandtabs(15000000)|length }}",
        "{% set ns = namespace(l=['x']) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=('x',)) %}{% for i in range(40) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l }}",
        "{% set n = namespace(d={}) %}{% for i in range(40) %}{% set n.d = {1: n.d, 2: n.d} %}{% endfor %}{{ n.d }}",
    ],
)
def test_templates_cannot_run_or_grow_for_ever(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError):
        rendered(source)
    assert time.monotonic() - started < 20, "bounded, on a busy machine too"


def test_a_template_is_used_by_several_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    texts = [f"message {i}" * 50 for i in range(50)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: template.render([{"role": "user", "content": text}]), texts))
    assert found == texts


def test_knows_whether_it_shows_tools() -> None:
    assert ChatTemplate("{% if tools %}{{ tools }}{% endif %}").uses_tools
    assert not ChatTemplate("{{ 'tools' }}{{ messages.tools }}").uses_tools


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_sources_in_their_order(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    write(tmp_path, "processor_config.json", {"chat_template": "processor"})
    assert read_template_files(tmp_path).source == "processor"
    write(tmp_path, "chat_template.jinja", "jinja")
    assert read_template_files(tmp_path).source == "jinja"
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config", "bos_token": {"content": "<b>"}})
    assert read_template_files(tmp_path).source == "config"
    write(tmp_path, "chat_template.json", {"chat_template": "own file"})
    files = read_template_files(tmp_path)
    assert (files.source, files.bos_token, files.eos_token) == ("own file", "<b>", None)
    write(tmp_path, "other.json", {"chat_template": "override", "eos_token": "</e>"})
    files = read_template_files(tmp_path, tmp_path / "other.json")
    assert (files.source, files.eos_token) == ("override", "</e>")


def test_a_list_of_templates_gives_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert read_template_files(tmp_path).source == "d"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", "{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not JSON"):
        load_chat_template(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        load_chat_template(tmp_path, tmp_path / "absent.json")
    write(tmp_path, "tokenizer_config.json", "[]")
    with pytest.raises(CheckpointError, match="got list, expected a JSON object"):
        load_chat_template(tmp_path)
