"""Prompts for the demo model, made of templates, topics and styles: the same for the same seed, thousands of them, no two alike.

Owns the grammar and the split. One template in five and one topic in five are held out; held-out prompts use these alone, all others
never do. Knows no tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ds4batch.chat.conversation import Conversation, Message, Tool


class Prompt(NamedTuple):
    """A conversation that waits for an answer."""

    kind: str
    held: bool  # out of what is trained on
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def conversation(self) -> Conversation:
        """As the dialects take it."""
        return Conversation(self.messages, self.tools)


def _split(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("|")]


TOPICS = _split("""
    the water cycle | photosynthesis | volcanoes | the moon | black holes | tides | earthquakes | glaciers | coral reefs | rainforests |
    bees | whales | wolves | owls | octopuses | dinosaurs | bacteria | vaccines | the human heart | sleep | memory | stress | meditation |
    yoga | running | swimming | chess | football | cycling | hiking | camping | gardening | composting | cooking rice | baking bread |
    coffee | tea | chocolate | cheese | olive oil | honey | vegetarian food | healthy breakfasts | meal planning | budgeting |
    saving money | credit cards | inflation | taxes | insurance | investing | small businesses | marketing | job interviews |
    writing a resume | public speaking | teamwork | leadership | remote work | time management | procrastination | learning a language |
    reading books | poetry | short stories | mystery novels | fairy tales | Greek mythology | ancient Egypt | the Roman Empire |
    the Renaissance | the Industrial Revolution | the French Revolution | the Silk Road | Vikings | samurai | castles | pyramids |
    cathedrals | bridges | lighthouses | trains | airplanes | electric cars | bicycles | rockets | satellites | telescopes | robots |
    artificial intelligence | machine learning | neural networks | databases | computer networks | the internet | passwords | encryption |
    open source software | video games | smartphones | 3D printing | solar power | wind energy | nuclear energy | batteries | recycling |
    plastic pollution | climate change | biodiversity | deserts | oceans | rivers | mountains | islands | storms | clouds | rainbows |
    light | sound | gravity | magnetism | electricity | atoms | water | salt | gold | diamonds | music theory | jazz | the piano |
    the guitar | painting | photography | sculpture | theatre | film | dance | fashion | architecture | friendship | honesty | courage |
    kindness | patience | family traditions | birthdays | weddings | travel | Japan | Italy | Brazil | India | Kenya | Iceland | Paris |
    New York | museums | libraries | schools | teachers | children and screens | pets | cats | dogs | horses | houseplants | trees |
    farming | fishing | markets | democracy | human rights | newspapers | social media | online shopping | first aid | allergies |
    vitamins | exercise at home | posture | eyesight | dental care | the immune system | DNA | evolution | fossils | probability |
    prime numbers | geometry | algebra | statistics | logic puzzles | calendars | clocks | maps | weather forecasts | languages""")
TASKS = _split("""
    reverses a string | checks whether a word is a palindrome | computes the factorial of a number | returns the n-th Fibonacci number |
    finds the largest number in a list | removes duplicates from a list | counts the words in a text | sorts a list of numbers |
    merges two sorted lists | checks whether a number is prime | computes the greatest common divisor | converts Celsius to Fahrenheit |
    reads a file line by line | writes a list to a CSV file | parses a JSON string | counts the vowels in a string |
    finds the second largest number | flattens a nested list | groups words by their first letter | transposes a matrix |
    multiplies two matrices | searches a sorted list | implements a stack | implements a queue | implements a linked list |
    inserts into a binary search tree | validates an email address | generates a random password | computes the average of a list |
    finds the longest word | rotates a list | checks whether two strings are anagrams | converts a number to binary |
    sums the digits of a number | finds common elements of two lists | capitalizes every word | removes spaces from a string |
    counts how often each letter occurs | computes the area of a circle | simulates rolling a die | prints a multiplication table |
    calculates compound interest | formats a date | downloads a web page | retries a failing call | caches results in a dictionary |
    measures the time of a call | splits a list into chunks | replaces words in a text | draws a triangle of stars""")
THINGS = _split("""
    apples | books | pencils | tickets | coins | marbles | cookies | stamps | bottles | chairs | flowers | boxes | eggs | cards | candles |
    shirts | oranges | toys | bricks | letters | photos | plates | shells | balloons | keys | lamps | pages | stickers | bags | cups""")
NAMES = _split(
    "Anna|Ben|Carla|David|Elena|Farid|Grace|Hugo|Ines|Jamal|Kenji|Lucia|Maria|Noah|Olga|Priya|Quentin|Rosa|Sam|Tara|Umar|Vera"
)
PLACES = _split(
    "London|Madrid|Tokyo|Cairo|Lima|Oslo|Sydney|Toronto|Mumbai|Nairobi|Berlin|Rome|Seoul|Boston|Dublin|Vienna|Lagos|Porto"
)
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "TypeScript", "Ruby", "Bash", "SQL")
STYLES = _split("""
    in simple words | for a ten year old | in detail | in one paragraph | in two sentences | with an example | step by step | briefly |
    in a friendly tone | in a formal tone | like a teacher | as a short story | with three examples | for a beginner | for an expert |
    in plain English | with a comparison from daily life | with pros and cons | in a humorous way | in your own words""")
SYSTEMS = (
    "You are a helpful assistant.", "You are a concise assistant. Answer in as few words as possible.",
    "You are a patient teacher who explains things step by step.", "You are an expert programmer. Write clean code.",
    "You are a careful editor.", "Answer truthfully. If you do not know, say so.", "You are a friendly travel guide.",
    "You always answer with a numbered list.", "You write in a warm and lively style.",
)  # fmt: skip

# {topic}, {task} and {thing} are split, the rest is drawn freely; {passage} is about the topic.
TEMPLATES: Mapping[str, Sequence[str]] = {
    "chat": _split("""
        What is {topic}? | Tell me something interesting about {topic}. | Why does {topic} matter? | Can you help me with {topic}? |
        I want to learn about {topic}. Where should I start? | What do people get wrong about {topic}? | Hi! My name is {name}. What do
        you know about {topic}? | What is the history of {topic}? | Do you think {topic} will change in the next {n} years? | What should
        I know about {topic} before I visit {place}? | Who would be interested in {topic}, and why? | I have {n} minutes. Teach me about
        {topic}. | What is the difference between {topic} and {other}? | How is {topic} related to {other}? | Is {topic} a good subject
        for a talk in {place}? | Give me some advice about {topic}."""),
    "explain": _split("""
        Explain {topic} {style}. | Describe {topic} {style}. | How does {topic} work? Answer {style}. | Please explain to {name} why {topic}
        is important, {style}. | Compare {topic} with {other}, {style}. | What are the main ideas behind {topic}? Explain {style}. |
        Give an overview of {topic} {style}. | Explain the connection between {topic} and {other} {style}. | Introduce {topic} {style}. |
        What causes problems with {topic}? Explain {style}. | Teach me the basics of {topic} {style}. | Explain {topic} as if we were
        walking through {place}, {style}."""),
    "writing": _split("""
        Write a short story about {topic} and a person called {name}. | Write a poem about {topic}. | Write an email to {name} about
        {topic}. | Write a blog post about {topic}. | Write a product description for something that has to do with {topic}. | Write a
        letter from {name} in {place} about {topic}. | Write a dialogue between {name} and {friend} about {topic}. | Write an
        introduction for an essay about {topic}. | Write a diary entry of {name}, who loves {topic}. | Write a speech about {topic} for an
        audience in {place}. | Write {n} sentences about {topic}. | Write a haiku about {topic}. | Write a news report about {topic} in
        {place}. | Write a review of a book about {topic}. | Write a tweet about {topic}. | Write an essay about {topic} {style}."""),
    "code": _split("""
        Write a {language} function that {task}. | Write a {language} program that {task}. | How do I write code that {task} in
        {language}? | Show me {language} code that {task} and explain it. | Write a {language} function that {task}, with comments. |
        Write a {language} class that {task}. | Write a unit test for a {language} function that {task}. | Give me a short {language}
        script that {task}. | What is the simplest {language} code that {task}? | Explain how a {language} function that {task} works. |
        Write {language} code that {task} and handles errors. | Name the function {word} and let it be one that {task} in {language}."""),
    "lists": _split("""
        List {n} facts about {topic}. | Give me {n} tips about {topic}. | Make a list of {n} ideas for {topic}. | What are the {n} most
        important things about {topic}? | List {n} questions that one could ask about {topic}. | Name {n} words related to {topic}. |
        List the advantages and disadvantages of {topic}. | Write a checklist for {topic}. | Give {n} reasons to care about {topic}. |
        List {n} books about {topic} with one sentence each. | Make a table with {n} rows about {topic}. | Write a step by step plan for
        {n} days about {topic}. | List {n} differences between {topic} and {other}. | Suggest {n} titles for an article about
        {topic}."""),
    "rewriting": _split("""
        Rewrite this text {style}: {passage} | Make this text shorter: {passage} | Correct the grammar of this text: {passage} | Rewrite
        the following in a formal tone: {passage} | Turn this text into bullet points: {passage} | Paraphrase: {passage} | Rewrite this in
        the past tense: {passage} | Make this friendlier: {passage} | Write this again as a question and an answer: {passage} | Continue
        this text: {passage}"""),
    "summary": _split("""
        Summarize this text: {passage} | Summarize in one sentence: {passage} | What is the main idea of this text? {passage} | Give a
        title to this text: {passage} | Which words are the most important ones here? {passage} | What does this text say about {name}?
        {passage} | Read this and tell me what happened: {passage} | Answer from the text alone: where was {name}? {passage}"""),
    "json": _split("""
        Write a JSON object that describes {topic} with the keys name, description and tags. | Extract the names and places from this text
        as JSON: {passage} | Give me {n} facts about {topic} as a JSON array of strings. | Return JSON with the fields title and summary
        for this text: {passage} | Make a JSON list of {n} people with name, age and city; the first is {name} from {place}. | Convert this
        to JSON: name {name}, city {place}, interest {topic}, age {a}. | Write a YAML file with settings for a program about {topic}. |
        Write a JSON schema for a record about {topic}. | Classify this text as positive, negative or neutral and answer in JSON:
        {passage} | Write an HTML page about {topic}."""),
    "maths": _split("""
        {name} has {a} {thing} and gives {b} to {friend}. How many are left? | What is {a} plus {b}? | What is {a} times {b}? | A box holds
        {b} {thing}. How many boxes are needed for {a} {thing}? | If one of the {thing} costs {b} dollars, what do {n} cost? | {name} buys
        {n} {thing} for {a} dollars. What does one cost? | Solve for x: {n}x + {b} = {a}. | What is {b} percent of {a}? | Share {a} {thing}
        among {n} friends. Show every step. | Count from {b} to {a} in steps of {n}. | A train goes {a} kilometres in {n} hours. How fast
        is it? | {name} is {b} years old and {friend} is {n} years older. How old are they together?"""),
    "tools": _split("""
        What is the weather in {place}? | Search for news about {topic}. | Remind me in {n} minutes to read about {topic}. | Calculate {a}
        times {b}. | Find a book about {topic} and tell me its author. | Send {name} a message about {topic}. | Translate "{topic}" to
        Spanish. | Which files are about {topic}? | Look up {topic} and summarize what you find. | Is it warmer in {place} than {n}
        degrees?"""),
    "follow-up": _split("""
        Can you give an example? | Say that again {style}. | Why? | Tell me more about that. | How is that related to {other}? | Make it
        shorter. | And what about {place}? | Write that as a list with {n} points. | Are you sure? | Explain the last part {style}."""),
}  # fmt: skip
KINDS = tuple(TEMPLATES)
_WEIGHTS = {"chat": 15, "explain": 14, "writing": 14, "code": 14, "lists": 10}
_OTHER_WEIGHT = 6

_SENTENCES = _split("""
    {Name} first heard about {topic} in {place}. | In {place}, {topic} is part of daily life. | Last year {n} people from {place} wrote
    about {topic}. | {Name} says that {topic} is harder than it looks. | The report about {topic} has {a} pages and nobody has read all of
    them. | There is a small museum in {place} that shows the history of {topic}. | {Name} and {friend} do not agree about {topic}. | Many
    people think that {topic} is boring, but {name} was never bored for a minute. | It costs about {a} dollars a year. | The weather was
    bad and the train to {place} was {n} hours late. | {Name} took notes, drew a map and asked {n} questions. | After {n} weeks the group
    met again in {place}. | Nobody knew who had written the first letter about {topic}. | The best part, said {friend}, was the end. | On
    Monday {name} bought {a} {thing} for the school in {place}. | Experts in {place} warn that {topic} needs more attention. | Everything
    changed when {friend} lost the key. | A teacher from {place} explained {topic} with {b} {thing}. | The city of {place} plans to spend
    more on {topic}. | {Name} wants to write a book about it.""")

_SCHEMAS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("get_weather", "The weather of a city today.", {"city": "string"}),
    ("search", "Search the web.", {"query": "string", "limit": "integer"}),
    ("calculate", "Evaluate an arithmetic expression.", {"expression": "string"}),
    ("send_message", "Send a message to a person.", {"to": "string", "text": "string"}),
    ("set_timer", "Start a timer.", {"minutes": "integer", "label": "string"}),
    ("translate", "Translate a text.", {"text": "string", "language": "string"}),
    ("read_file", "The contents of a file.", {"path": "string"}),
)


def _tool(name: str, description: str, fields: Mapping[str, str]) -> Tool:
    parameters = {"type": "object", "properties": {k: {"type": v} for k, v in fields.items()}, "required": list(fields)}
    function = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, json.dumps(function), parameters, wire_name=name)


_TOOLS = [_tool(*schema) for schema in _SCHEMAS]
_TOOL_SETS = [tuple(_TOOLS[i:j]) for i, j in ((0, 2), (1, 3), (0, 3), (2, 5), (3, 6), (4, 7))]


class Grammar:
    """Draws prompts of one side of the split."""

    def __init__(self, seed: int, held: bool) -> None:
        sides = random.Random(f"split {seed}")
        self._held = held
        self._pools = {name: _side(sides, pool, held) for name, pool in (("topic", TOPICS), ("task", TASKS), ("thing", THINGS))}
        self._templates = {kind: _side(sides, templates, held) for kind, templates in TEMPLATES.items()}
        self._draw = random.Random(f"prompts {seed} {held}")
        self._seen: set[tuple[Message, ...]] = set()

    def prompts(self, count: int) -> list[Prompt]:
        """`count` more; fewer where the grammar hardly finds new ones. Kinds come in turn where prompts are held out."""
        weights = [_WEIGHTS.get(kind, _OTHER_WEIGHT) for kind in KINDS]
        found: list[Prompt] = []
        for attempt in range(20 * count):
            if len(found) == count:
                break
            kind = KINDS[attempt % len(KINDS)] if self._held else self._draw.choices(KINDS, weights)[0]
            prompt = self._prompt(kind)
            if prompt.messages not in self._seen:
                self._seen.add(prompt.messages)
                found.append(prompt)
        return found

    def _prompt(self, kind: str) -> Prompt:
        draw = self._draw
        asked = draw.choice(self._templates[kind])
        words = self._words()
        messages = [Message("user", asked.format(**words))]
        if kind == "follow-up":
            first = draw.choice(self._templates[draw.choice(("chat", "explain"))])
            messages = [Message("user", first.format(**words)), Message("assistant", self._passage(words)), *messages]
        if draw.random() < 0.2:
            messages.insert(0, Message("system", draw.choice(SYSTEMS)))
        return Prompt(kind, self._held, tuple(messages), draw.choice(_TOOL_SETS) if kind == "tools" else ())

    def _words(self) -> dict[str, str]:
        draw, pools = self._draw, self._pools
        topic, other = draw.sample(pools["topic"], 2)
        name, friend = draw.sample(NAMES, 2)
        small, large = draw.randint(2, 60), draw.randint(61, 990)
        task = draw.choice(pools["task"])
        words = {
            "topic": topic, "other": other, "name": name, "Name": name, "friend": friend, "place": draw.choice(PLACES),
            "style": draw.choice(STYLES), "language": draw.choice(LANGUAGES), "n": str(draw.randint(3, 12)), "a": str(large),
            "b": str(small), "task": task, "thing": draw.choice(pools["thing"]), "word": "_".join(task.split()[:2]),
        }  # fmt: skip
        return words | {"passage": self._passage(words)}

    def _passage(self, words: Mapping[str, str]) -> str:
        return " ".join(part.format(**words) for part in self._draw.sample(_SENTENCES, self._draw.randint(2, 5)))


def _side(sides: random.Random, pool: Sequence[str], held: bool) -> list[str]:
    """The fifth of the pool that is held out, or the rest."""
    shuffled = sides.sample(pool, len(pool))
    cut = max(2, len(pool) // 5)
    return shuffled[:cut] if held else shuffled[cut:]
