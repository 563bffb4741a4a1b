"""Chat rendering on token ids: a sampled token is never re-tokenised (DESIGN "The one data path").

A conversation is template text around message contents. The template is rendered with a slot in
place of every content; template text is encoded with the real tokenizer, and contents with a copy
of it that knows no added tokens, so that "<|im_end|>" inside an observation stays eleven harmless
characters. A new observation is rendered as the template's suffix only, and appended.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

Message = dict[str, str]  # "role" and "content"
Role = Literal["user", "tool"]

_SLOT = re.compile("\ue000(\\d+)\ue001")
_PROBE_TURN = (
    "<think>\nfirst thoughts\n</think>\n\n"
    '<tool_call>\n{"name": "look", "arguments": {"place": "north"}}\n</tool_call>'
)


class ChatTemplateError(ValueError):
    """The chat template or tokenizer cannot carry a token-in, token-out conversation."""


class _Span(NamedTuple):
    """A piece of a rendered conversation; `role` is None for the template's own text."""

    text: str
    role: str | None


class _Suffix(NamedTuple):
    """Template text around the observation that answers an assistant turn.

    close: from the end-of-turn token up to the guidance, or up to the observation without one.
    between: from the guidance to the observation; None where there is no guidance message.
    open: from the observation to the next assistant content.
    """

    close: str
    between: str | None
    open: str


class ChatFormat:
    """Renders prompts, observations and transcripts for one tokenizer and its chat template.

    Attributes:
      end_of_turn: id of the token that ends an assistant turn, e.g. that of "<|im_end|>".
      stop_ids: ids that end a completion: the end of turn, and the tokenizer's eos if different.

    Raises:
      ChatTemplateError: the template is missing or not append-only, or the tokenizer turns plain
        text into added tokens; the message says which and what to do.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        observation_roles: Sequence[Role] = ("user", "tool"),
    ):
        if not tokenizer.chat_template:
            raise ChatTemplateError(
                "the tokenizer has no chat template; put a chat_template in tokenizer_config.json"
            )
        self._hf = tokenizer
        self._full: Tokenizer = tokenizer.backend_tokenizer
        self._plain = _without_added_tokens(self._full)
        self._added = {id: t.content for id, t in self._full.get_added_tokens_decoder().items()}
        self._template_ids: dict[str, list[int]] = {}
        self._spelled = {id for id in self._added if self._plain.id_to_token(id) is not None}
        for content in self._added.values():
            self.encode_text(f"a {content} b{content}")  # fails early where it would fail later

        self.end_of_turn = self._find_end_of_turn()
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = (self.end_of_turn,)
        if eos is not None and eos != self.end_of_turn:
            self.stop_ids += (eos,)
        self._stripped = {self.end_of_turn, eos, tokenizer.pad_token_id}
        self._suffixes: dict[tuple[str, bool], _Suffix] = {}
        for role in observation_roles:
            self._suffixes[role, False] = self._derive_suffix(role)
            self._suffixes[role, True] = self._derive_guided_suffix(role)
            self._prove_append_only(role)

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike, observation_roles: Sequence[Role] = ("user", "tool")
    ) -> ChatFormat:
        """Reads tokenizer.json, tokenizer_config.json and the chat template of an HF directory.

        Raises:
          ChatTemplateError: a file is absent or damaged, and whatever the constructor refuses.
        """
        if not Path(directory, "tokenizer.json").is_file():
            raise ChatTemplateError(f"{directory} holds no tokenizer.json; give an HF directory")
        # Not AutoTokenizer: it imports torch where that is installed.
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(os.fspath(directory))
        except (KeyError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"tokenizer.json or tokenizer_config.json in {directory} is damaged: {error!r}"
            ) from error
        return cls(tokenizer, observation_roles)

    # Text to ids.

    def encode_text(self, text: str) -> list[int]:
        """Ids of outside text; nothing in it becomes an added token, lone surrogates become U+FFFD.

        Raises:
          ChatTemplateError: the tokenizer's own vocabulary spells an added token in this text.
        """
        ids = self._plain.encode(_well_formed(text), add_special_tokens=False).ids
        if self._spelled and not self._spelled.isdisjoint(ids):
            names = [self._added[id] for id in self._spelled.intersection(ids)]
            raise ChatTemplateError(
                f"plain text encodes to the added tokens {names}, which the tokenizer also has in "
                "its model vocabulary; remove them from there"
            )
        return ids

    def encode_assistant(self, text: str) -> list[int]:
        """Ids of a demonstrated assistant turn: "<tool_call>" and the like are tokens in it."""
        return self._full.encode(_well_formed(text), add_special_tokens=False).ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Ids of a conversation up to the first sampled token, generation header included."""
        spans = self._spans(self._fold_guidance(messages), tools, generation=True)
        return [id for span in spans for id in self._encode(span)]

    def suffix(
        self,
        completion: Sequence[int],
        observation: str,
        role: Role,
        guidance: str | None = None,
    ) -> list[int]:
        """Ids between a sampled turn and the next one, none of them sampled.

        Args:
          completion: ids of the turn, [n]; an end of turn it lacks is inserted.
          observation: text that answers it, with chat role `role`.
          guidance: placed just before the observation, as a system message or, where the template
            has none in mid-conversation, inside the observation's own turn.
        """
        try:
            pieces = self._suffixes[role, guidance is not None]
        except KeyError:
            raise ValueError(
                f"observation role {role!r} was not proven; pass it in observation_roles"
            ) from None
        ids = list(self._encode_template(pieces.close))
        if len(completion) and completion[-1] == self.end_of_turn:
            ids = ids[1:]
        if guidance is not None:
            if pieces.between is None:
                observation = f"{guidance}\n\n{observation}"
            else:
                ids += self.encode_text(guidance) + self._encode_template(pieces.between)
        return ids + self.encode_text(observation) + self._encode_template(pieces.open)

    def transcript(
        self, messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """A demonstration: ids [T] int32, and the loss mask [T] bool.

        The mask holds the assistant contents and their end-of-turn tokens. Tool calls are text
        inside the contents. What follows the last end of turn is left out.

        Raises:
          ValueError: no assistant message, or a message with other fields than role and content.
        """
        ids: list[int] = []
        mask: list[bool] = []
        end = 0
        answered = False  # the span before was an assistant content
        for span in self._spans(self._fold_guidance(messages), tools, generation=False):
            encoded = self._encode(span)
            learned = len(encoded) if span.role == "assistant" else int(answered)
            if answered:
                end = len(ids) + 1
            ids += encoded
            mask += [i < learned for i in range(len(encoded))]
            answered = span.role == "assistant"
        if not end:
            raise ValueError("a transcript needs an assistant message; this one has none")
        return np.array(ids[:end], np.int32), np.array(mask[:end], bool)

    # Ids to text.

    def decode(self, ids: Iterable[int]) -> str:
        """Text for parsing: end-of-turn, eos and pad are dropped, every other token is kept.

        All ids are decoded at once, so a character split over tokens comes out whole; a half
        character becomes U+FFFD. Ids past the tokenizer's vocabulary decode to nothing.
        """
        kept = [int(id) for id in ids if int(id) not in self._stripped]
        return self._full.decode(kept, skip_special_tokens=False)

    def truncate(self, text: str, max_tokens: int) -> str:
        """The longest prefix of outside text that takes at most about `max_tokens` tokens."""
        ids = self.encode_text(text)
        if len(ids) <= max_tokens:
            return text
        return self._plain.decode(ids[:max_tokens], skip_special_tokens=False).rstrip("\ufffd")

    # The template.

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], generation: bool) -> str:
        try:
            rendered = self._hf.apply_chat_template(
                [dict(m) for m in messages],
                tools=list(tools) or None,
                add_generation_prompt=generation,
                tokenize=False,
            )
        except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError) as error:
            roles = [m["role"] for m in messages]
            raise ChatTemplateError(
                f"the chat template refuses a conversation of {roles}: {error}"
            ) from error
        assert isinstance(rendered, str)
        return rendered

    def _spans(
        self, messages: Sequence[Message], tools: Sequence[Any], generation: bool
    ) -> list[_Span]:
        """The conversation in order: template text, content, template text, ..., template text."""
        for i, message in enumerate(messages):
            if set(message) != {"role", "content"}:
                raise ValueError(
                    f"message {i} has fields {sorted(message)}; only role and content are read "
                    "(write tool calls as text inside the content)"
                )
        probe = [{"role": m["role"], "content": f"\ue000{i}\ue001"} for i, m in enumerate(messages)]
        pieces = _SLOT.split(self._render(probe, tools, generation))
        slots = [int(slot) for slot in pieces[1::2]]
        if slots != list(range(len(messages))):
            raise ChatTemplateError(
                "the chat template does not render each message of "
                f"{[m['role'] for m in messages]} once and in order; use a template that prints "
                "message contents as they are"
            )
        spans = [_Span(pieces[0], None)]
        for message, piece in zip(messages, pieces[2::2], strict=True):
            spans += [_Span(message["content"], message["role"]), _Span(piece, None)]
        return spans

    def _encode(self, span: _Span) -> list[int]:
        if span.role is None:
            return self._encode_template(span.text)
        if span.role == "assistant":
            return self.encode_assistant(span.text)
        return self.encode_text(span.text)

    def _encode_template(self, text: str) -> list[int]:
        if text not in self._template_ids:
            self._template_ids[text] = self._full.encode(text, add_special_tokens=False).ids
        return self._template_ids[text]

    def _find_end_of_turn(self) -> int:
        """The added token that starts the template text after an assistant content."""
        conversation = _conversation("answer")
        after = self._spans(conversation, (), generation=False)[-1].text
        ids = self._encode_template(after)
        if not ids or ids[0] not in self._added:
            raise ChatTemplateError(
                f"an assistant turn is followed by {after[:40]!r}, which does not start with an "
                "added token; the template must end a turn with one, such as <|im_end|>"
            )
        return ids[0]

    def _derive_suffix(self, role: Role) -> _Suffix:
        messages = [*_conversation("answer"), {"role": role, "content": "seen"}]
        spans = self._spans(messages, (), generation=True)
        return _Suffix(close=spans[-3].text, between=None, open=spans[-1].text)

    def _derive_guided_suffix(self, role: Role) -> _Suffix:
        """The suffix with a system message in it, or the plain one if the template refuses it."""
        plain = self._suffixes[role, False]
        messages = [
            *_conversation("answer"),
            {"role": "system", "content": "advice"},
            {"role": role, "content": "seen"},
        ]
        try:
            spans = self._spans(messages, (), generation=True)
        except ChatTemplateError:
            return plain
        close, between, open_ = spans[-5].text, spans[-3].text, spans[-1].text
        first = self._encode_template(close)[:1]
        if first != [self.end_of_turn] or open_ != plain.open:
            return plain
        return _Suffix(close, between, open_)

    def _fold_guidance(self, messages: Sequence[Message]) -> list[Message]:
        """Puts mid-conversation system messages where `suffix` puts guidance."""
        folded: list[Message] = []
        for message in messages:
            guided = self._suffixes.get((message["role"], True))
            follows_guidance = len(folded) > 1 and folded[-1]["role"] == "system"
            if follows_guidance and guided is not None and guided.between is None:
                content = f"{folded.pop()['content']}\n\n{message['content']}"
                message = {"role": message["role"], "content": content}
            folded.append(message)
        return folded

    # Start-up proofs.

    def _prove_append_only(self, role: Role) -> None:
        """Renders a conversation piece by piece and whole, at each length, and compares."""
        whole = [
            *_conversation(_PROBE_TURN),
            {"role": role, "content": "first\nobservation"},
            {"role": "assistant", "content": "<think>\nmore\n</think>\n\nsecond turn"},
            {"role": role, "content": "last observation"},
        ]
        suffix = self._suffixes[role, False]
        pieces = self._render(whole[:2], (), generation=True)
        for turn in (2, 4):
            answer, observation = whole[turn]["content"], whole[turn + 1]["content"]
            pieces += answer + suffix.close + observation + suffix.open
            _compare(pieces, self._render(whole[: turn + 2], (), generation=True), role)
        after = suffix.close.removeprefix(self._added[self.end_of_turn])
        split = [self.end_of_turn, *self._encode_template(after)]
        if self._encode_template(suffix.close) != split:
            raise ChatTemplateError(
                f"the tokenizer merges {suffix.close!r} across the end of turn; its end-of-turn "
                "token must not strip the text around it"
            )


def _conversation(answer: str) -> list[Message]:
    return [
        {"role": "system", "content": "rules of the game"},
        {"role": "user", "content": "the question"},
        {"role": "assistant", "content": answer},
    ]


def _well_formed(text: str) -> str:
    """The text with surrogates joined where they pair and replaced where they do not."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    # encode_special_tokens=True is not enough: added tokens with special=False would still match.
    state = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**state, "added_tokens": []}))


def _compare(pieces: str, whole: str, role: str) -> None:
    if pieces == whole:
        return
    same = (a == b for a, b in zip(pieces, whole, strict=False))
    at = sum(1 for _ in itertools.takewhile(bool, same))
    cause = "the whole conversation renders differently from its appended pieces"
    if "first thoughts" in pieces and "first thoughts" not in whole:
        cause = "it strips the think blocks of earlier turns"
    elif pieces.count("<think>") > whole.count("<think>"):
        cause = "its generation header opens a think block that history does not keep"
    raise ChatTemplateError(
        f"the chat template is not append-only with {role!r} observations: {cause}; at character "
        f"{at} appending gives {pieces[at : at + 40]!r}, the template {whole[at : at + 40]!r}. "
        "Use a template that renders past messages unchanged"
    )
