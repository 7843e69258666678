"""From a chosen token to what the router is told."""

from __future__ import annotations

from deepseek_tgi.core import FinishReason, GeneratedText, Generation, Tokens
from deepseek_tgi.engine.sequence import Sequence
from deepseek_tgi.text.tokenizer import TextTokenizer

NO_LOGPROB = float("nan")
"""Our router makes an error of it; TGI's shows `null` on the HTTP side."""


def take_token(
    tokenizer: TextTokenizer,
    sequence: Sequence,
    token_id: int,
    logprob: float,
    top: tuple[list[int], list[float]] | None,
) -> Generation:
    """Append the token to `sequence`, move its text and state on, and report it."""
    sequence.ids.append(token_id)
    sequence.sampling.accept(token_id)
    piece = sequence.detokenizer.advance()
    reason = sequence.stopping.advance(token_id, piece)
    sequence.next_tokens = 1
    tokens = Tokens([token_id], [logprob], [piece], [tokenizer.is_special(token_id)])
    return Generation(
        request_id=sequence.request.id,
        tokens=tokens,
        prefill_tokens=_prompt_tokens(tokenizer, sequence),
        top_tokens=None if top is None else [_alternatives(tokenizer, *top)],
        generated_text=None if reason is None else _final(sequence, reason),
    )


def ended_early(request_id: int, end_id: int, text: str, count: int) -> Generation:
    """The report of a request that cannot go on: an end token without a logprob, and the `count` tokens' text."""
    return Generation(
        request_id,
        Tokens([end_id], [NO_LOGPROB], [""], [True]),
        generated_text=GeneratedText(text, count + 1, FinishReason.EOS_TOKEN),
    )


def _final(sequence: Sequence, reason: FinishReason) -> GeneratedText:
    params = sequence.sampling.params
    seed = params.seed if params.samples else None
    return GeneratedText(sequence.detokenizer.final_text(), sequence.stopping.count, reason, seed)


def _prompt_tokens(tokenizer: TextTokenizer, sequence: Sequence) -> Tokens | None:
    """Ids, texts and logprobs of the prompt, once, with the first token."""
    logprobs = sequence.prompt_logprobs
    if logprobs is None or sequence.prompt_reported:
        return None
    sequence.prompt_reported = True
    ids = sequence.ids[: sequence.prompt_length]
    return Tokens(ids, logprobs, [tokenizer.token_text(i) for i in ids], [])


def _alternatives(tokenizer: TextTokenizer, ids: list[int], logprobs: list[float]) -> Tokens:
    texts = [tokenizer.token_text(i) for i in ids]
    return Tokens(ids, logprobs, texts, [tokenizer.is_special(i) for i in ids])
