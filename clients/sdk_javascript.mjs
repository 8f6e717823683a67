// The official JavaScript SDKs of OpenAI and Anthropic against a scripted server: see sdks.py for what it says.
//
//     node sdk_javascript.mjs URL MODEL

import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const TEXT = "Plain wörds: 日本語 <b>&amp;</b> 🙂.";
const REASONING = "First I look\nat it.";
const ZURICH = { days: 3, city: 'Zürich "ZH" <&>' };
const OSLO = { days: 1, city: "Oslo\n(NO)" };
// What a prompt is answered with: reasoning, text, arguments of the calls.
const ASKED = {
  "say a text": ["", TEXT, []],
  "think, then say a text": [REASONING, TEXT, []],
  "call once": ["", "I look.", [ZURICH]],
  "think, then call once": [REASONING, "I look.", [ZURICH]],
  "think, then call twice": [REASONING, "I look.", [ZURICH, OSLO]],
};
const TWICE = "think, then call twice";
const SCHEMA = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city"] };
const FORM = { ...SCHEMA, required: ["city", "days"], additionalProperties: false };
const PLACE = { city: "Oslo", days: 3 };
const PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const LONG = "long ".repeat(40_000);
const CHANGING = new Set([
  "id", "call_id", "item_id", "created", "created_at", "completed_at", "signature", "encrypted_content", "usage",
]);

const [url, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const checks = [];

function check(name, run) {
  checks.push([name, run]);
}

// A check for every kind of answer.
function each(api, run) {
  for (const asked of Object.keys(ASKED)) check(`${api}: ${asked}`, () => run(asked));
}

// An SDK's object as JSON without what changes, what the SDK itself adds, and what is absent.
function plain(value) {
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  const kept = Object.entries(value).filter(
    ([key, one]) => !CHANGING.has(key) && !/^_|^parsed|^output_parsed$/.test(key) && one !== null && one !== undefined,
  );
  return Object.fromEntries(kept.map(([key, one]) => [key, plain(one)]));
}

// The error that a request is refused with: of this class, and mentioning `part`.
async function refused(request, kind, part) {
  try {
    await request();
  } catch (error) {
    assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
    assert.ok(error.message.includes(part), `${part} is not in ${error.message}`);
    return error;
  }
  throw new Error(`no ${kind.name}`);
}

// Chat completions

function chatRequest(asked, ...more) {
  return {
    model,
    messages: [{ role: "system", content: "Be brief." }, { role: "user", content: asked }, ...more],
    tools: [{ type: "function", function: { name: "weather", description: "Tells the weather", parameters: SCHEMA } }],
    thinking: { type: ASKED[asked][0] ? "enabled" : "disabled" },
  };
}

each("chat", async (asked) => {
  const [reasoning, text, calls] = ASKED[asked];
  const whole = await openai.chat.completions.create(chatRequest(asked));
  const { message, finish_reason: reason } = whole.choices[0];
  assert.equal(message.content, text);
  assert.equal(message.reasoning_content ?? "", reasoning);
  assert.deepEqual((message.tool_calls ?? []).map((call) => JSON.parse(call.function.arguments)), calls);
  assert.equal(reason, calls.length ? "tool_calls" : "stop");
  const stream = openai.chat.completions.stream({ ...chatRequest(asked), stream_options: { include_usage: true } });
  let thought = "";
  for await (const chunk of stream) thought += chunk.choices[0]?.delta.reasoning_content ?? "";
  const streamed = await stream.finalChatCompletion();
  assert.equal(thought, reasoning);
  // Of a field it does not know, the SDK keeps the last delta.
  if (thought) streamed.choices[0].message.reasoning_content = thought;
  assert.deepEqual(plain(streamed), plain(whole));
  assert.equal(streamed.usage.prompt_tokens, whole.usage.prompt_tokens);
  assert.equal(streamed.usage.completion_tokens, whole.usage.completion_tokens);
});

check("chat: results of two calls are continued", async () => {
  const first = await openai.chat.completions.create(chatRequest(TWICE));
  const { message } = first.choices[0];
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "sunny" }));
  const second = await openai.chat.completions.create(chatRequest(TWICE, message, ...results));
  assert.equal(second.choices[0].message.content, "It is sunny.");
  assert.ok(second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1);
});

check("chat: an image is refused", async () => {
  const content = [{ type: "image_url", image_url: { url: `data:image/png;base64,${PIXEL}` } }];
  const request = { model, messages: [{ role: "user", content }] };
  await refused(() => openai.chat.completions.create(request), OpenAI.BadRequestError, "image");
  await refused(() => openai.chat.completions.create({ ...request, stream: true }), OpenAI.BadRequestError, "image");
});

check("chat: errors have their classes", async () => {
  const hot = { ...chatRequest("say a text"), temperature: "hot" };
  await refused(() => openai.chat.completions.create(hot), OpenAI.BadRequestError, "temperature");
  const long = { model, messages: [{ role: "user", content: LONG }] };
  const error = await refused(() => openai.chat.completions.create(long), OpenAI.BadRequestError, "context");
  assert.equal(error.code, "context_length_exceeded");
  await refused(() => openai.get("/nowhere"), OpenAI.NotFoundError, "404");
});

check("chat: an answer is held to a schema", async () => {
  const request = {
    model,
    messages: [{ role: "user", content: "as JSON" }],
    response_format: { type: "json_schema", json_schema: { name: "place", schema: FORM, strict: true } },
    thinking: { type: "disabled" },
  };
  const whole = await openai.chat.completions.create(request);
  assert.deepEqual(JSON.parse(whole.choices[0].message.content), PLACE);
  const streamed = await openai.chat.completions.stream(request).finalChatCompletion();
  assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
});

check("completions: whole and streamed agree", async () => {
  const request = { model, prompt: "please say a text", max_tokens: 200 };
  const whole = await openai.completions.create(request);
  let streamed = "";
  for await (const chunk of await openai.completions.create({ ...request, stream: true })) streamed += chunk.choices[0].text;
  assert.deepEqual([whole.choices[0].text, streamed], [TEXT, TEXT]);
});

check("models: the model is listed", async () => {
  const ids = [];
  for await (const one of openai.models.list()) ids.push(one.id);
  assert.ok(ids.includes(model));
});

// Responses

function responseRequest(asked, ...more) {
  return {
    model,
    instructions: "Be brief.",
    input: [{ role: "user", content: asked }, ...more],
    tools: [{ type: "function", name: "weather", parameters: SCHEMA, strict: false }],
    reasoning: ASKED[asked][0] ? { effort: "medium", summary: "auto" } : { effort: "none" },
    include: ["reasoning.encrypted_content"],
    store: false,
  };
}

each("responses", async (asked) => {
  const [reasoning, text, calls] = ASKED[asked];
  const whole = await openai.responses.create(responseRequest(asked));
  assert.equal(whole.output_text, text);
  const made = whole.output.filter((item) => item.type === "function_call");
  assert.deepEqual(made.map((item) => JSON.parse(item.arguments)), calls);
  const thoughts = whole.output.filter((item) => item.type === "reasoning").flatMap((item) => item.summary);
  assert.equal(thoughts.map((part) => part.text).join(""), reasoning);
  const streamed = await openai.responses.stream(responseRequest(asked)).finalResponse();
  assert.deepEqual(plain(streamed), plain(whole));
  assert.equal(streamed.usage.input_tokens, whole.usage.input_tokens);
  assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
});

check("responses: an answer is held to a schema", async () => {
  const text = { format: { type: "json_schema", name: "place", schema: FORM, strict: true } };
  const request = { model, input: "as JSON", text, reasoning: { effort: "none" } };
  const whole = await openai.responses.create(request);
  assert.deepEqual(JSON.parse(whole.output_text), PLACE);
  const streamed = await openai.responses.stream(request).finalResponse();
  assert.equal(streamed.output_text, whole.output_text);
});

check("responses: results of two calls are continued", async () => {
  const first = await openai.responses.create(responseRequest(TWICE));
  const results = first.output
    .filter((item) => item.type === "function_call")
    .map((item) => ({ type: "function_call_output", call_id: item.call_id, output: "sunny" }));
  const second = await openai.responses.create(responseRequest(TWICE, ...first.output, ...results));
  assert.equal(second.output_text, "It is sunny.");
  assert.ok(second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1);
});

check("responses: an image is refused", async () => {
  const content = [{ type: "input_image", image_url: `data:image/png;base64,${PIXEL}` }];
  const request = { model, input: [{ role: "user", content }] };
  await refused(() => openai.responses.create(request), OpenAI.BadRequestError, "image");
});

check("responses: errors have their classes", async () => {
  const hot = { model, input: "x", temperature: "hot" };
  await refused(() => openai.responses.create(hot), OpenAI.BadRequestError, "temperature");
  const error = await refused(() => openai.responses.create({ model, input: LONG }), OpenAI.BadRequestError, "context");
  assert.equal(error.code, "context_length_exceeded");
});

// Messages

function messageRequest(asked, ...more) {
  return {
    model,
    max_tokens: 2048,
    system: "Be brief.",
    messages: [{ role: "user", content: asked }, ...more],
    tools: [{ name: "weather", description: "Tells the weather", input_schema: SCHEMA }],
    thinking: ASKED[asked][0] ? { type: "enabled", budget_tokens: 1024 } : { type: "disabled" },
  };
}

// All tokens of a prompt.
function read(usage) {
  return usage.input_tokens + (usage.cache_read_input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0);
}

function ofType(message, type) {
  return message.content.filter((block) => block.type === type);
}

each("messages", async (asked) => {
  const [reasoning, text, calls] = ASKED[asked];
  const { max_tokens: _, ...counting } = messageRequest(asked);
  const counted = await anthropic.messages.countTokens(counting);
  const whole = await anthropic.messages.create(messageRequest(asked));
  assert.equal(ofType(whole, "text").map((block) => block.text).join(""), text);
  assert.equal(ofType(whole, "thinking").map((block) => block.thinking).join(""), reasoning);
  assert.ok(ofType(whole, "thinking").every((block) => block.signature));
  assert.deepEqual(ofType(whole, "tool_use").map((block) => block.input), calls);
  assert.equal(whole.stop_reason, calls.length ? "tool_use" : "end_turn");
  const streamed = await anthropic.messages.stream(messageRequest(asked)).finalMessage();
  assert.deepEqual(plain(streamed), plain(whole));
  assert.deepEqual([counted.input_tokens, read(streamed.usage)], [read(whole.usage), read(whole.usage)]);
  assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
});

check("messages: an answer is held to a schema", async () => {
  const request = {
    model,
    max_tokens: 500,
    messages: [{ role: "user", content: "as JSON" }],
    thinking: { type: "disabled" },
    output_config: { format: { type: "json_schema", schema: FORM } },
  };
  const whole = await anthropic.messages.create(request);
  assert.deepEqual(JSON.parse(ofType(whole, "text")[0].text), PLACE);
  const streamed = await anthropic.messages.stream(request).finalMessage();
  assert.deepEqual(plain(streamed), plain(whole));
});

check("messages: results of two calls are continued", async () => {
  const first = await anthropic.messages.create(messageRequest(TWICE));
  const content = ofType(first, "tool_use").map((block) => ({ type: "tool_result", tool_use_id: block.id, content: "sunny" }));
  const said = { role: "assistant", content: first.content };
  const second = await anthropic.messages.create(messageRequest(TWICE, said, { role: "user", content }));
  assert.equal(ofType(second, "text")[0].text, "It is sunny.");
  assert.ok(second.usage.cache_read_input_tokens >= read(first.usage) + first.usage.output_tokens - 1);
});

check("messages: an image is refused", async () => {
  const content = [{ type: "image", source: { type: "base64", media_type: "image/png", data: PIXEL } }];
  const request = { model, max_tokens: 64, messages: [{ role: "user", content }] };
  const error = await refused(() => anthropic.messages.create(request), Anthropic.BadRequestError, "image");
  assert.equal(error.error.error.type, "invalid_request_error");
});

check("messages: errors have their classes", async () => {
  const request = { model, max_tokens: 64, messages: [{ role: "user", content: "x" }] };
  await refused(() => anthropic.messages.create({ ...request, max_tokens: 0 }), Anthropic.BadRequestError, "max_tokens");
  const long = { ...request, messages: [{ role: "user", content: LONG }] };
  await refused(() => anthropic.messages.create(long), Anthropic.BadRequestError, "prompt is too long");
  await refused(() => anthropic.get("/v1/nowhere"), Anthropic.NotFoundError, "404");
});

for (const [name, run] of checks) {
  let problem = null;
  try {
    await run();
  } catch (error) {
    problem = `${error.name}: ${error.message.slice(0, 1500)}`;
  }
  console.log(JSON.stringify({ check: name, problem }));
}
