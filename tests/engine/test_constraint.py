"""Answers held to a form: whatever a model would rather say, what comes out fits, and the reasoning before it is its own."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4batch.messages as m
from ds4batch.engine.constraint import Constraints
from ds4batch.engine.device_sampler import mask_rows, pack_masks
from ds4batch.engine.sampler import Draw, draw
from ds4batch.engine.service import Service
from ds4batch.engine.vocabulary import TokenizerVocabulary
from ds4batch.messages import Constraint, Sampling
from ds4batch.scripted.backend import ScriptedBackend
from ds4batch.scripted.script import Answer as ScriptedAnswer
from ds4batch.scripted.script import Script
from ds4batch.server.apis.call_grammar import json_grammar
from scheduler import Options
from tests.forced import CONSTRAINTS, WORDS, Babbler, Reader, fits

PLAIN = Reader("")


def held(schema: dict[str, Any]) -> Constraint:
    return Constraint(grammar=json_grammar(schema), calls=False)


def admitted(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 5, "minLength": 2},
        {"type": "string", "pattern": "^[a-c]+$"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "number"},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"enum": ["red", 7, None, "<tool_call>", "<|im_end|>"]},
        {"const": {"fixed": [1, 2]}},
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    ]
)


def _object(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    members = st.dictionaries(st.sampled_from(["a", "b", 'with "quotes"', "ü\n", ""]), inner, min_size=1, max_size=4)
    return st.builds(
        lambda properties, some, closed: {
            "type": "object",
            "properties": properties,
            "required": [key for i, key in enumerate(properties) if some >> i & 1],
            "additionalProperties": not closed,
        },
        members,
        st.integers(0, 15),
        st.booleans(),
    )


schemas = st.recursive(
    leaves,
    lambda inner: _object(inner) | st.builds(lambda items, n: {"type": "array", "items": items, "minItems": n}, inner, st.integers(0, 2)),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(schemas, st.integers(0, 10**6))
def test_whatever_is_sampled_fits_the_schema(schema: dict[str, Any], seed: int) -> None:
    answer = Babbler(held(schema), PLAIN, seed=seed).run()
    assert answer.reason == "stop"
    assert fits(schema, json.loads(answer.text)), answer.text
    assert answer.turn.content == answer.text


def test_a_schema_that_refers_to_itself_ends() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}, "additionalProperties": False}
    schema = {"$ref": "#/$defs/t", "$defs": {"t": tree}}
    for seed in range(10):
        assert fits(schema, json.loads(Babbler(held(schema), PLAIN, seed=seed).run().text))


def test_an_answer_may_end_only_where_the_form_does_and_by_every_stop_token() -> None:
    matching = CONSTRAINTS.matching(held({"enum": [[], [1]]}), thinking=False)
    for byte in b"[1]":
        assert not admitted(matching.mask()) & WORDS.stop_ids
        matching.take(WORDS.bytes_by_id.index(bytes([byte])), reasoned=False)
    assert admitted(matching.mask()) == WORDS.stop_ids


def test_white_space_between_the_parts_is_bounded() -> None:
    space, line = WORDS.encode(" ")[0], WORDS.encode("\n")[0]
    matching = CONSTRAINTS.matching(held({"type": "array"}), thinking=False)
    matching.take(WORDS.encode("[")[0], reasoned=False)
    spaces = 0
    while {space, line} & (allowed := admitted(matching.mask())) and spaces < 100:
        matching.take(line if line in allowed else space, reasoned=False)
        spaces += 1
    assert 1 < spaces < 60


def test_nothing_is_masked_before_the_reasoning_is_over() -> None:
    thinking = Reader("", thinking=True)
    script = 'Hm, {"no": JSON}, <tool_call>, 4 < 5.</think>'
    babbler = Babbler(held({"type": "object"}), thinking, free=60)
    answer = babbler.run(script)
    length = len(WORDS.encode(script))
    assert answer.text.startswith(script)
    assert answer.masks == [False] * length + [True] * (len(answer.masks) - length)
    assert answer.turn.reasoning == [script.removesuffix("</think>")]
    assert isinstance(json.loads(answer.turn.content), dict)


def test_the_end_of_the_reasoning_counts_however_it_is_cut_and_held_back() -> None:
    # A stop text holds back what is shown; what is masked goes by what was drawn.
    babbler = Babbler(held({"type": "object"}), Reader("", thinking=True), stop=["a very long text that never comes"])
    for byte in b"so </think>":
        assert babbler.draw.mask is None
        babbler.push(WORDS.bytes_by_id.index(bytes([byte])))
    assert WORDS.encode("{")[0] in admitted(babbler.draw.mask)
    assert babbler.output.turn.reasoning == []


def test_without_reasoning_the_first_token_is_masked() -> None:
    babbler = Babbler(held({"type": "object"}), PLAIN)
    assert admitted(babbler.draw.mask) == {WORDS.encode("{")[0], WORDS.encode("\n")[0]}


def test_markers_are_not_data_where_other_tokens_can_say_the_same() -> None:
    marker = WORDS.encode("<tool_call>")[0]
    matching = CONSTRAINTS.matching(held({"type": "string"}), thinking=False)
    matching.take(WORDS.encode('"')[0], reasoned=False)
    allowed = admitted(matching.mask())
    assert WORDS.encode("<")[0] in allowed
    assert not allowed & {marker, *WORDS.stop_ids, WORDS.encode("<think>")[0]}


def test_an_answer_cut_at_its_limit_is_of_that_length_and_whole_so_far() -> None:
    answer = Babbler(held({"type": "array", "items": {"type": "string"}, "minItems": 200}), PLAIN).run(limit=50)
    assert answer.reason == "length"
    assert len(answer.text) <= 50
    assert answer.text.lstrip().startswith("[")


def test_a_stop_text_ends_what_is_held_to_a_form() -> None:
    answer = Babbler(held({"const": "one two three"}), PLAIN, stop=["two"]).run()
    assert (answer.reason, answer.turn.content.lstrip()) == ("stop", '"one ')


def test_a_grammar_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        CONSTRAINTS.matching(Constraint(grammar="start: nothing", calls=False), thinking=False)


def test_a_vocabulary_that_cannot_spell_the_form_says_so() -> None:
    lacking = [b"" if text == b"{" else text for text in WORDS.bytes_by_id]
    matching = Constraints(replace(WORDS, bytes_by_id=lacking)).matching(held({"type": "object", "minProperties": 1}), False)
    for _ in range(2):
        assert admitted(matching.mask()) == set(WORDS.encode("\n"))
        matching.take(WORDS.encode("\n")[0], reasoned=False)
    token = min(admitted(matching.mask()))
    with pytest.raises(ValueError, match=f"token {token} does not fit it: [^\n]*$"):
        matching.take(token, reasoned=False)


@pytest.mark.parametrize("size", range(286, 291))
def test_the_size_of_the_vocabulary_does_not_matter(size: int) -> None:
    more = [*WORDS.bytes_by_id, *(f"word{i}".encode() for i in range(size - WORDS.vocab_size))]
    mask = Constraints(replace(WORDS, bytes_by_id=more)).matching(held({"type": "string"}), False).mask()
    assert admitted(mask) == {WORDS.encode('"')[0], WORDS.encode("\n")[0]}
    assert mask is not None
    assert len(mask) == -(-size // 32)


def test_a_forced_text_is_written_as_the_tokenizer_would() -> None:
    constraint = Constraint(grammar='start: "<tool_call>" /[ab]/', calls=True)
    assert admitted(CONSTRAINTS.matching(constraint, False).mask()) == {WORDS.encode("<tool_call>")[0]}


def test_a_tokenizer_that_changes_the_text_does_not_break_forced_text() -> None:
    class Spaced:
        """Puts a space in front, as some do."""

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
            return WORDS.tokenizer.encode_batch_fast([" " + text for text in texts], add_special_tokens=add_special_tokens)

    matching = Constraints(replace(WORDS, tokenizer=Spaced())).matching(held({"const": "abc"}), False)
    for byte in b'"abc"':
        token = WORDS.bytes_by_id.index(bytes([byte]))
        assert token in admitted(matching.mask())
        matching.take(token, reasoned=False)
    assert admitted(matching.mask()) == WORDS.stop_ids


# The draw.


def masked(sampling: Sampling, allowed: list[int], size: int = 96) -> Draw:
    state = Draw(sampling, [0], ())
    flags = np.zeros(size, np.uint8)
    flags[allowed] = 1
    state.mask = np.packbits(flags, bitorder="little").view(np.int32)
    return state


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sets(st.integers(0, 95), min_size=1, max_size=6), st.sampled_from([0.0, 0.7, 2.0]), st.integers(0, 4))
def test_a_masked_draw_is_one_of_the_admitted_tokens(seed: int, allowed: set[int], temperature: float, top_k: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, 100).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=0.9, seed=seed, logit_bias={3: -100.0, 97: 100.0})
    assert draw(logits, masked(sampling, sorted(allowed)), 5).token in allowed


def test_logprobs_are_the_models_own_under_a_mask() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 100).astype(np.float32)
    free = draw(logits, Draw(Sampling(temperature=0.0, logprobs=3), [0], ()), 5)
    bound = draw(logits, masked(Sampling(temperature=0.0, logprobs=3), [7]), 5)
    assert bound.token == 7
    assert bound.top == free.top
    assert bound.logprob == pytest.approx(logits[7] - np.log(np.exp(logits.astype(np.float64)).sum()))


@settings(deadline=None)
@given(st.lists(st.none() | st.sets(st.integers(0, 95), min_size=1), min_size=2, max_size=4), st.integers(0, 2**32))
def test_rows_with_different_masks_are_masked_as_each_alone(sets: list[set[int] | None], seed: int) -> None:
    vocab = 100
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (len(sets), vocab)).astype(np.float32))
    states = [Draw(Sampling(seed=seed), [0], ()) if one is None else masked(Sampling(seed=seed), sorted(one)) for one in sets]
    buffer = torch.full((len(sets), 4), -1, dtype=torch.int32)  # what an earlier batch left
    together = logits.clone()
    if rows := [row for row, state in enumerate(states) if state.mask is not None]:
        pack_masks([mask for state in states if (mask := state.mask) is not None], buffer)
        mask_rows(together, rows, buffer[: len(rows)])
    for row, state in enumerate(states):
        expected = state.adjust(logits[row].numpy())
        assert together[row].numpy().tobytes() == expected.tobytes()
        if state.mask is not None:
            alone, one = logits[row : row + 1].clone(), torch.zeros(1, 4, dtype=torch.int32)
            pack_masks([state.mask], one)
            assert torch.equal(mask_rows(alone, [0], one)[0], together[row])


def test_answers_side_by_side_are_those_of_each_alone() -> None:
    forms = [held({"type": "object"}), held({"type": "array", "items": {"type": "integer"}})]
    alone = [Babbler(form, PLAIN, seed=seed).run().text for seed, form in enumerate(forms)]
    together = [Babbler(form, PLAIN, seed=seed) for seed, form in enumerate(forms)]
    running = list(together)
    while running:
        rows = torch.from_numpy(np.stack([one.logits() for one in running]))
        masks = [one.draw.mask for one in running if one.draw.mask is not None]
        assert len(masks) == len(running)
        buffer = torch.zeros(len(running), -(-rows.shape[1] // 32), dtype=torch.int32)
        pack_masks(masks, buffer)
        mask_rows(rows, range(len(running)), buffer)
        drawn = [draw(rows[i].numpy(), Draw(one.sampling, [0], ()), one.position).token for i, one in enumerate(running)]
        running = [one for one, token in zip(running, drawn, strict=True) if one.push(token) is None]
    assert [one.raw.decode() for one in together] == alone


# Through the service and the scheduler.

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
LISTS = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 9}


def ask(forms: list[Constraint | None], *, constraints: Constraints | None = CONSTRAINTS, **rest: Any) -> list[m.Finished | m.Failed]:
    """The ends of requests that run at once, with the text of each in place of `raw`."""
    script = Script((ScriptedAnswer("", b"I will not.", margin=8.0),))
    options = Options(mixed_prefill_quantum=512, idle_prefill_quantum=512, itl_budget=1.0, max_queue=64)
    backend = ScriptedBackend(script, WORDS, len(forms), 4096)
    service = Service(backend, TokenizerVocabulary(WORDS), time.monotonic, len(forms), options, constraints=constraints)
    for i, form in enumerate(forms):
        rest = {"max_tokens": 900, "sampling": Sampling(seed=3), "reading": m.Reading(grammar="", thinking=False), **rest}
        service.handle(m.Submit(id=i, tokens=WORDS.encode("hi"), text="hi", arrival=0.0, constraint=form, **rest))
    texts: dict[int, str] = dict.fromkeys(range(len(forms)), "")
    ends: dict[int, m.Finished | m.Failed] = {}
    while service.busy:
        for event in service.step().events:
            if isinstance(event, m.Delta):
                texts[event.id] += event.text
            elif isinstance(event, m.Finished):
                ends[event.id] = msgspec.structs.replace(event, raw=texts[event.id])
            elif isinstance(event, m.Failed):
                ends[event.id] = event
    return [ends[i] for i in range(len(forms))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_in_a_batch_are_each_held_to_their_own_form_as_they_would_be_alone(temperature: float) -> None:
    forms = [held(NUMBER), None, held(LISTS), held({"type": "boolean"}), held(LISTS)]
    sampling = Sampling(seed=3, temperature=temperature)
    texts = [end.raw for end in ask(forms, sampling=sampling) if isinstance(end, m.Finished)]
    assert texts == [end.raw for form in forms for end in ask([form], sampling=sampling) if isinstance(end, m.Finished)]
    assert fits(NUMBER, json.loads(texts[0] or ""))
    assert (texts[1] or "").startswith("I will") or temperature
    assert fits(LISTS, json.loads(texts[2] or ""))
    assert texts[3] in ("true", "false", "\ntrue", "\nfalse", "\n\ntrue", "\n\nfalse")


def test_what_is_cut_at_max_tokens_ends_for_its_length() -> None:
    (end,) = ask([held(LISTS)], max_tokens=3)
    assert isinstance(end, m.Finished)
    assert (end.reason, end.completion_tokens) == ("length", 3)


def test_a_grammar_that_does_not_compile_is_a_bad_request() -> None:
    (end,) = ask([Constraint(grammar="start: nothing", calls=False)])
    assert isinstance(end, m.Failed)
    assert end.status == 400
    assert "nothing" in end.message


def test_a_service_that_cannot_mask_refuses_instead_of_answering_freely() -> None:
    (end,) = ask([held(NUMBER)], constraints=None)
    assert isinstance(end, m.Failed)
    assert end.status == 400


def test_a_form_that_turns_out_to_have_no_words_is_a_bad_request_that_names_its_field() -> None:
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    wide = {"anyOf": [{"type": "object", "properties": {f"r{i}": {}}, "required": [f"r{i}"]} for i in range(2500)]}
    for schema in (circle, wide):
        (end,) = ask([msgspec.structs.replace(held(schema), field="text.format")])
        assert isinstance(end, m.Failed)
        assert end.status == 400
        assert end.message.startswith("text.format: the form of the answer cannot be followed further: ")


def test_compiled_grammars_are_kept_by_their_length() -> None:
    constraints = Constraints(WORDS)
    for i in range(60):
        constraints.matching(held({"const": f"{i}" + "x" * 100_000}), thinking=False)
    assert constraints.kept_chars <= 2 << 20
