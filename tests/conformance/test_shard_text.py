"""Pieces, final texts, stops, grammars and wishes: lines 46 to 49, 54 and 55 of the contract's checklist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from oracles.greedy import GreedyOracle
from router_model import Ask, Outcome
from scripted_texts import MANY_BYTES, say
from shard_bench import Bench
from shard_client import attempt
from tiny_tokenizer import EOS_ID, IM_END_ID

from deepseek_tgi.pb import generate_pb2 as pb


def shown(outcome: Outcome) -> str:
    """What a client that joins the streamed pieces has seen, special tokens left out."""
    return "".join(text for text, special in zip(outcome.texts, outcome.special, strict=True) if not special)


def test_line_46_characters_split_over_tokens_come_whole(scripted: Bench) -> None:
    (outcome,) = scripted.router().run(Ask("bytes of many", 80, ignore_eos=False))
    assert shown(outcome) == MANY_BYTES
    assert not [t for t in outcome.texts if "\ufffd" in t]
    assert outcome.text == MANY_BYTES
    assert len(outcome.texts) == len(MANY_BYTES.encode()) + 1
    assert outcome.texts.count("") > 15, "ids flow while a character is not complete"


def test_line_46_byte_fallback_characters_come_whole_and_words_keep_their_spaces(plain: Bench) -> None:
    (outcome,) = plain.router().run(Ask("bytes of many", 80, ignore_eos=False))
    assert shown(outcome) == " the world日🙂 one"
    assert outcome.text == " the world日🙂 one"
    assert not [t for t in outcome.texts if "\ufffd" in t]


def test_line_46_a_trailing_half_character_does_not_empty_the_text(scripted: Bench) -> None:
    (outcome,) = scripted.router().run(Ask("cut character", 4))
    assert outcome.reason == "LENGTH"
    assert outcome.text.startswith("ab")
    assert shown(outcome).startswith("ab")


def test_line_47_final_text_has_no_prompt_and_no_specials_but_the_stop_text(scripted: Bench) -> None:
    special, stopped = scripted.router().run(
        Ask("special inside", 20, ignore_eos=False), Ask("three letters", 20, stops=["yz"], ignore_eos=False)
    )
    assert special.text == "ab"
    assert special.texts == ["a", "<|im_start|>", "b", "</s>"]
    assert special.special == [False, True, False, True]
    assert stopped.text == "xyz"
    assert stopped.reason == "STOP_SEQUENCE"


def test_line_48_length_wins_over_eos_on_the_last_token(scripted: Bench) -> None:
    on_time, late = scripted.router().run(Ask("end text", 3, ignore_eos=False), Ask("end text", 4, ignore_eos=False))
    assert (on_time.reason, len(on_time.ids)) == ("LENGTH", 3)
    assert (late.reason, len(late.ids)) == ("EOS_TOKEN", 3)
    assert on_time.text == late.text == "ab"


def test_line_48_eos_wins_over_a_stop_that_is_its_text(scripted: Bench) -> None:
    (outcome,) = scripted.router().run(Ask("end text", 9, stops=["</s>"], ignore_eos=False))
    assert outcome.reason == "EOS_TOKEN"


def test_line_48_every_eos_of_the_generation_config_ends(scripted: Bench) -> None:
    first, second = scripted.router().run(Ask("other end", 9, ignore_eos=False), Ask("end text", 9, ignore_eos=False))
    assert (first.reason, first.ids[-1], first.text) == ("EOS_TOKEN", IM_END_ID, "hi")
    assert (second.reason, second.ids[-1]) == ("EOS_TOKEN", EOS_ID)


def test_line_48_ignore_eos_goes_on(scripted: Bench) -> None:
    (outcome,) = scripted.router().run(Ask("end text", 5, ignore_eos=True))
    assert outcome.ids == [*b"ab", EOS_ID, *b"cd"]
    assert outcome.reason == "LENGTH"


@pytest.mark.parametrize(
    ("prompt", "stops", "text"),
    [
        ("three letters", ["xyz"], "xyz"),
        ("three letters", ["q", "yz "], "xyz "),
        ("two stops", ["three", "two"], "one two"),
        ("newline", ["\n\n"], "line\n\n"),
        ("bytes of many", ["日本"], "naïve 日本"),
        ("three letters", ["z", "xyz"], "xyz"),
    ],
)
def test_line_48_a_stop_spread_over_tokens_is_found(scripted: Bench, prompt: str, stops: list[str], text: str) -> None:
    (outcome,) = scripted.router().run(Ask(prompt, 80, stops=stops, ignore_eos=False))
    assert outcome.reason == "STOP_SEQUENCE"
    assert outcome.text == text
    assert "".join(outcome.texts) == text
    assert outcome.final is not None
    assert outcome.final.generated_tokens == len(text.encode())


def test_line_48_a_stop_that_ends_inside_a_token_is_found(scripted: Bench) -> None:
    (outcome,) = scripted.router().run(Ask("merged word", 80, stops=["say hel"], ignore_eos=False))
    assert outcome.reason == "STOP_SEQUENCE"
    assert outcome.text.startswith("say hel")
    assert len(outcome.ids) < len(say()["merged word"])


def test_line_48_stop_text_of_the_prompt_does_not_stop(scripted: Bench) -> None:
    (outcome,) = scripted.router().run(Ask("two stops", 12, stops=["two stops", "two"], ignore_eos=False))
    assert outcome.text == "one two"


@pytest.mark.parametrize("prompt", ["a", "ab", "abc", "é", "\ufffd", "abc\ufffd", "x🙂🙂", "🙂", "日本"])
@pytest.mark.parametrize("special", [True, False])
def test_line_49_short_and_odd_prompts_stream_right(scripted: Bench, prompt: str, special: bool) -> None:
    ids = scripted.encode(prompt, special)
    wanted = scripted.script.greedy(ids, 12)
    (outcome,) = scripted.router().run(Ask(prompt, 12, add_special=special))
    assert outcome.ids == wanted
    whole = scripted.tokenizer.decode(wanted, skip_special_tokens=False)
    joined = "".join(outcome.texts)
    assert whole.startswith(joined)
    assert set(whole[len(joined) :]) <= {"\ufffd"}, "only an unfinished character may be missing"


REGEXES = [
    r"(cat|dog) [0-9]{2,4}",
    r"[a-f]{3}(-[a-f]{3}){1,2}",
    r'\{"name":"[a-z]{1,5}","n":(0|[1-9][0-9]{0,2})\}',
    r"(日本|🙂){1,3}",
]


def _regex(pattern: str, **more: Any) -> dict[str, Any]:
    return {"grammar": pattern, "grammar_type": pb.GRAMMAR_TYPE_REGEX, **more}


@pytest.mark.parametrize("pattern", REGEXES)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_line_54_a_grammar_yields_matching_text_and_ends_with_eos(
    scripted: Bench, pattern: str, seed: int | None
) -> None:
    sampling = {} if seed is None else {"do_sample": True, "seed": seed, "temperature": 1.5}
    (outcome,) = scripted.router().run(
        Ask("write " + pattern[:3], 60, parameters=_regex(pattern, **sampling), ignore_eos=False)
    )
    assert outcome.reason == "EOS_TOKEN"
    assert re.fullmatch(pattern, outcome.text), outcome.text
    assert outcome.ids[-1] in (EOS_ID, IM_END_ID)


def test_line_54_a_grammar_survives_company_filtering_and_joining(scripted: Bench) -> None:
    alone = [scripted.router().run(Ask("w", 60, parameters=_regex(p), ignore_eos=False))[0].ids for p in REGEXES]
    router = scripted.router()
    router.admit(Ask("free", 50), *[Ask("w", 60, parameters=_regex(p), ignore_eos=False) for p in REGEXES[:2]])
    router.step()
    router.admit(*[Ask("w", 60, parameters=_regex(p), ignore_eos=False) for p in REGEXES[2:]])
    router.step()
    router.cancel(0)
    router.finish()
    assert [router.outcomes[i].ids for i in range(1, 5)] == alone


@pytest.mark.parametrize("pattern", ["(unclosed", "[z-a]", "a{5,2}", "(?<=x)y"])
def test_line_54_an_invalid_grammar_fails_with_a_message_and_harms_nobody(scripted: Bench, pattern: str) -> None:
    _, error = attempt(lambda: scripted.router().admit(Ask("w", 9, parameters=_regex(pattern))))
    assert error is not None
    assert "grammar" in (error.details() or "").lower() or "regex" in (error.details() or "").lower()
    scripted.router().run(Ask("end text", 9, ignore_eos=False))


def test_line_54_grammar_type_none_ignores_the_pattern(scripted: Bench) -> None:
    neutral = {"grammar": "", "grammar_type": pb.GRAMMAR_TYPE_REGEX}
    (outcome,) = scripted.router().run(Ask("end text", 9, parameters=neutral, ignore_eos=False))
    assert outcome.text == "ab"


@pytest.mark.parametrize("adapter", ["", "gpt-4o", "deepseek-chat", "../../etc/passwd"])
def test_line_55_an_unknown_adapter_is_the_base_model(shard: Bench, adapter: str) -> None:
    plain, adapted = shard.router().run(Ask("same words", 8), Ask("same words", 8, adapter_id=adapter))
    assert adapted.ids == plain.ids


def test_line_55_prompt_logprobs_are_ignored_where_not_enabled(plain: Bench) -> None:
    response = plain.router().admit(Ask("plain words", 2, prefill_logprobs=True))
    assert not response.generations[0].prefill_tokens.ids


def test_line_55_prompt_logprobs_are_those_of_the_model(shard: Bench, oracle: GreedyOracle) -> None:
    text = "a prompt whose every token is weighed"
    ids = shard.encode(text)
    router = shard.router()
    router.admit(Ask("somebody else", 12))
    router.admit(Ask(text, 3, prefill_logprobs=True), Ask(text, 3))
    router.finish()
    asked, silent = router.outcomes[1], router.outcomes[2]
    assert silent.prefill is None
    assert asked.prefill is not None
    assert list(asked.prefill.ids) == ids
    assert len(asked.prefill.texts) == len(asked.prefill.logprobs) == len(ids)
    assert list(asked.prefill.texts) == [shard.tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    assert asked.prefill.logprobs[0] != asked.prefill.logprobs[0], "the first is NaN"
    wanted = oracle.logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(list(asked.prefill.logprobs)[1:]), wanted, rtol=0, atol=1e-3)


def test_line_55_prompt_logprobs_of_a_chunked_prompt_are_complete(shard: Bench) -> None:
    text = "a longer prompt, cut into pieces, whose logprobs must come back in one piece. " * 2
    whole, cut = (
        shard.router().run(Ask(text, 2, prefill_logprobs=True, chunk_len=chunk))[0].prefill for chunk in (None, 11)
    )
    assert whole is not None
    assert cut is not None
    assert list(cut.ids) == list(whole.ids) == shard.encode(text)
    assert list(cut.logprobs)[1:] == pytest.approx(list(whole.logprobs)[1:], abs=1e-4)


def test_truncation_keeps_the_last_tokens_and_the_bos(shard: Bench, oracle: GreedyOracle) -> None:
    text = "drop this beginning, please; keep only the end"
    ids = shard.encode(text)
    (outcome,) = shard.router().run(Ask(text, 6, truncate=12))
    assert outcome.ids == oracle.greedy([ids[0], *ids[-11:]], 6)
    assert json.dumps(outcome.texts)
