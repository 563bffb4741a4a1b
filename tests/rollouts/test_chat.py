"""Token in, token out: template pieces, outside text, and the templates that are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_doubles import CHATML, NOT_SPECIAL, SPECIAL, build_tokenizer

from rlds_jax.rollouts.chat import ChatFormat, ChatTemplateError

CHAT = ChatFormat(build_tokenizer())
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def text(ids, chat=CHAT):
    return chat._full.decode(list(ids), skip_special_tokens=False)


def message(role, content):
    return {"role": role, "content": content}


def conversation(*contents):
    roles = ["system", "user"] + ["assistant", "user"] * len(contents)
    return [message(role, content) for role, content in zip(roles, contents, strict=False)]


@pytest.fixture(params=["tokenizer", "qwen_tokenizer"], scope="module")
def chat(request):
    return ChatFormat(request.getfixturevalue(request.param))


def added_ids(chat):
    return set(chat._added)


def test_prompt_is_the_template_with_contents_in_it(chat):
    ids = chat.prompt(conversation("be brief", "hello"), TOOLS)
    whole = chat._hf.apply_chat_template(
        conversation("be brief", "hello"), tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert text(ids, chat) == whole
    assert "look" in whole
    assert whole.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("added", SPECIAL + NOT_SPECIAL)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_added_token_in_outside_text_is_plain_text(chat, added, role):
    outside = f"before {added} after{added}"
    clean = len([i for i in chat.suffix([], "x", role, "g") if i in added_ids(chat)])
    suffix = chat.suffix([], outside, role, outside)
    assert len([i for i in suffix if i in added_ids(chat)]) == clean
    assert text(suffix, chat).count(outside) == 2  # nothing lost either
    prompt = chat.prompt(conversation(outside, outside))
    assert [i for i in prompt if i in added_ids(chat)] == [
        i for i in chat.prompt(conversation("x", "y")) if i in added_ids(chat)
    ]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("guidance", [None, "go right"])
def test_appending_equals_rendering_whole(chat, role, guidance):
    turn = "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    messages = [*conversation("s", "u"), message("assistant", turn)]
    if guidance:
        messages.append(message("system", guidance))
    messages.append(message(role, "seen\nthis"))
    completion = [*chat.encode_assistant(turn), chat.end_of_turn]
    appended = chat.prompt(messages[:2]) + completion
    appended += chat.suffix(completion, "seen\nthis", role, guidance)
    assert appended == chat.prompt(messages)


def test_missing_end_of_turn_is_inserted(chat):
    cut = chat.encode_assistant("cut off")
    suffix = chat.suffix(cut, "seen", "user")
    assert suffix[0] == chat.end_of_turn
    assert suffix[1:] == chat.suffix([*cut, chat.end_of_turn], "seen", "user")
    assert chat.suffix([], "seen", "user") == suffix  # an empty completion


def test_transcript_masks_assistant_contents_and_their_ends(chat):
    turns = conversation("s", "u", "<tool_call>first</tool_call>", "o", "second")
    ids, mask = chat.transcript(turns, TOOLS)
    assert ids.dtype == np.int32
    assert mask.dtype == bool
    assert ids.shape == mask.shape
    assert text(ids[mask], chat) == "<tool_call>first</tool_call><|im_end|>second<|im_end|>"
    assert mask[-1]
    assert ids[-1] == chat.end_of_turn
    call = chat._full.token_to_id("<tool_call>")
    assert call in ids[mask]


def test_transcript_equals_what_a_rollout_would_hold(chat):
    first, second = (chat.encode_assistant(t) + [chat.end_of_turn] for t in ("one", "two"))
    rollout = chat.prompt(conversation("s", "u")) + first
    rollout += chat.suffix(first, "seen", "user", "advice") + second
    messages = [*conversation("s", "u", "one"), message("system", "advice")]
    messages += [message("user", "seen"), message("assistant", "two")]
    assert chat.transcript(messages)[0].tolist() == rollout


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        (conversation("s", "u"), "needs an assistant"),
        ([{"role": "user", "content": "u", "name": "bob"}], "only role and content"),
        ([{"role": "assistant", "tool_calls": []}], "only role and content"),
    ],
)
def test_transcript_refuses(messages, match):
    with pytest.raises(ValueError, match=match):
        CHAT.transcript(messages)


def test_decode_strips_only_end_of_turn_eos_and_pad(chat):
    shown = "<think>a</think><tool_call>b</tool_call><|vision_pad|>"
    ids = [*chat.encode_assistant(shown + "<|endoftext|>"), chat.end_of_turn]
    assert chat.decode(ids) == shown
    assert chat.decode([]) == chat.decode([chat.end_of_turn]) == ""


def test_decode_ignores_ids_past_the_tokenizer(chat):
    padding = max(chat._full.get_vocab().values()) + 5
    assert chat.decode([*chat.encode_text("ok"), padding]) == "ok"


@settings(deadline=None)
@given(st.text(max_size=60))
def test_outside_text_survives_encoding(outside):
    assert CHAT.decode(CHAT.encode_text(outside)) == outside
    assert not added_ids(CHAT) & set(CHAT.encode_text(outside))


def test_character_split_over_two_tokens():
    ids = CHAT.encode_text("é")
    assert len(ids) == 2
    assert CHAT.decode(np.array(ids)) == "é"
    assert CHAT.decode(ids[:1]) == "\ufffd"


def test_truncate_cuts_to_tokens_and_whole_characters():
    assert CHAT.truncate("short", 100) == "short"
    cut = CHAT.truncate("ééé", 3)
    assert cut == "é"
    assert len(CHAT.encode_text(CHAT.truncate("the agent moves " * 50, 16))) <= 16


def test_eos_other_than_end_of_turn_also_stops():
    chat = ChatFormat(build_tokenizer(eos_token="<|endoftext|>"))
    assert chat.stop_ids == (chat.end_of_turn, chat._hf.eos_token_id)
    assert CHAT.stop_ids == (CHAT.end_of_turn,)


STRIPS_THINK = CHATML.replace(
    "m.content + '<|im_end|>",
    "(m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>",
)
OPENS_THINK = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
NO_TOKEN_END = CHATML.replace("<|im_end|>", "[end]")
REPEATS = CHATML.replace("+ m.content +", "+ m.content + m.content +")
NO_SYSTEM_LATER = CHATML.replace(
    "{%- else %}{{- '<|im_start|>' + m.role",
    "{%- elif m.role == 'system' %}{{ raise_exception('system comes first') }}"
    "{%- else %}{{- '<|im_start|>' + m.role",
)
DEFAULT_SYSTEM = CHATML.replace(
    "{%- set first = messages[0].content if messages[0].role == 'system' else none -%}",
    "{%- set first = messages[0].content if messages[0].role == 'system' else 'Help.' -%}",
).replace("if first is not none else messages", "if messages[0].role == 'system' else messages")


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (STRIPS_THINK, "strips the think blocks"),
        (OPENS_THINK, "generation header opens a think block"),
        (NO_TOKEN_END, "does not start with an added token"),
        (REPEATS, "once and in order"),
        ("", "no chat template"),
    ],
)
def test_template_refused(template, match):
    assert template != CHATML
    with pytest.raises(ChatTemplateError, match=match):
        ChatFormat(build_tokenizer(template))


def test_default_system_message_stays_in_the_prompt():
    assert DEFAULT_SYSTEM.count("Help.") == 1
    chat = ChatFormat(build_tokenizer(DEFAULT_SYSTEM))
    assert "Help." in text(chat.prompt([message("user", "u")]), chat)
    assert "Help." not in text(chat.suffix([], "seen", "user", "advice"), chat)


def test_guidance_goes_into_the_user_turn_where_no_system_message_may():
    assert NO_SYSTEM_LATER != CHATML
    chat = ChatFormat(build_tokenizer(NO_SYSTEM_LATER))
    for role in ("user", "tool"):
        suffix = text(chat.suffix([chat.end_of_turn], "seen", role, "advice"), chat)
        assert "advice\n\nseen" in suffix
        assert "system" not in suffix
    messages = [*conversation("s", "u", "a"), message("system", "advice"), message("user", "seen")]
    assert text(chat.prompt(messages), chat).endswith(
        "user\nadvice\n\nseen<|im_end|>\n<|im_start|>assistant\n"
    )


def test_role_that_was_not_proven_is_refused():
    chat = ChatFormat(build_tokenizer(), observation_roles=("user",))
    with pytest.raises(ValueError, match="'tool' was not proven"):
        chat.suffix([], "seen", "tool")


def test_from_directory(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    chat = ChatFormat.from_directory(tmp_path)
    messages = conversation("s", "u <|im_end|>")
    assert chat.prompt(messages, TOOLS) == CHAT.prompt(messages, TOOLS)


def test_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ChatTemplateError, match=r"absent holds no tokenizer.json"):
        ChatFormat.from_directory(tmp_path / "absent")


def test_template_that_refuses_a_system_message_is_named():
    template = CHATML.replace("{%- set rest", "{{ raise_exception('no system here') }}{%- set rest")
    with pytest.raises(ChatTemplateError, match=r"refuses a conversation of \['system'.*no system"):
        ChatFormat(build_tokenizer(template))


def test_tokenizer_whose_merges_spell_an_added_token_is_refused():
    tokenizer = build_tokenizer(corpus=["<|im_end|>"] * 50, use_regex=False)
    with pytest.raises(ChatTemplateError, match=r"im_end.*in its model vocabulary"):
        ChatFormat(tokenizer)


@pytest.mark.parametrize("encode", [CHAT.encode_text, CHAT.encode_assistant])
def test_lone_surrogates_are_replaced_and_pairs_joined(encode):
    assert encode("a\ud800b") == encode("a\ufffdb")
    assert encode("\ud83d\ude00") == encode("\U0001f600")


@pytest.mark.parametrize(
    "template", ["{{ messages + 1 }}", "{{ 1 / 0 }}", '{{ "%d" % "a" }}', '{% include "x" %}']
)
def test_a_template_that_fails_in_any_way_is_refused(template):
    with pytest.raises(ChatTemplateError, match="refuses a conversation"):
        ChatFormat(build_tokenizer(template))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"["),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_a_damaged_tokenizer_directory_is_named(tmp_path, name, content):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ChatTemplateError, match="is damaged"):
        ChatFormat.from_directory(tmp_path)
