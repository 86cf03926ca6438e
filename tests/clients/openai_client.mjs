// Drives the official OpenAI JavaScript client through the whole life of a batch.
//
// Usage: node openai_client.mjs BASE_URL MODEL [--api-key KEY] [--skip-online]
//
// BASE_URL ends in /v1. The package is taken from target/clients/node_modules.
// No client option is set besides URL and key. The last line on stdout is "ok N checks".

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(new URL("../../target/clients/", import.meta.url));
const { default: OpenAI, toFile } = require("openai");

let checks = 0;
function check(condition, what, ...seen) {
  checks += 1;
  assert.ok(condition, `${what}: ${JSON.stringify(seen)}`);
}

const [baseURL, model, ...flags] = process.argv.slice(2);
const key = flags.indexOf("--api-key");
const client = new OpenAI({ baseURL, apiKey: key >= 0 ? flags[key + 1] : "any" });

function line(customId, text, extra = {}) {
  const body = { model, messages: [{ role: "user", content: text }], max_tokens: 4, ...extra };
  return JSON.stringify({ custom_id: customId, method: "POST", url: "/v1/chat/completions", body });
}

async function upload(text, name = "input.jsonl", extra = {}) {
  return client.files.create({ file: await toFile(Buffer.from(text), name), purpose: "batch", ...extra });
}

async function create(inputFileId, extra = {}, options = {}) {
  const params = { input_file_id: inputFileId, endpoint: "/v1/chat/completions", completion_window: "24h", ...extra };
  return client.batches.create(params, options);
}

async function untilEnd(id) {
  const deadline = Date.now() + 60_000;
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    check(Date.now() < deadline, "the batch ends in time", batch);
    await new Promise((wake) => setTimeout(wake, 50));
  }
}

async function refused(call, status, param) {
  try {
    const result = await call();
    assert.fail(`${status} was expected, got ${JSON.stringify(result)}`);
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    check(error.status === status, "the status", error.status, error.message);
    check(error.requestID, "the answer carries a request id");
    if (param !== undefined) check(error.param === param, "the parameter is named", error.param);
  }
}

async function content(id) {
  return (await client.files.content(id)).text();
}

async function files() {
  const text = `\ufeff${line("a", "one")}\r\n\n${line("b", "two")}`;
  const made = await upload(text, "Eingabe ü日.jsonl", { expires_after: { anchor: "created_at", seconds: 3600 } });
  check(made.object === "file" && made.filename === "Eingabe ü日.jsonl", "a file object", made);
  check(made.expires_at === made.created_at + 3600, "expires_after is kept", made);
  const bytes = Buffer.from(await (await client.files.content(made.id)).arrayBuffer());
  check(bytes.equals(Buffer.from(text)), "content is the stored bytes");
  const more = [];
  for (let n = 0; n < 3; n += 1) more.push((await upload(line(`${n}`, "x"))).id);
  const listed = [];
  for await (const file of client.files.list({ limit: 2, purpose: "batch" })) listed.push(file.id);
  check(listed.slice(0, 3).join() === more.reverse().join(), "list pages by itself, newest first", listed);
  const gone = await client.files.delete(made.id);
  check(gone.deleted === true, "delete says so", gone);
  await refused(() => client.files.retrieve(made.id), 404);
  await refused(() => upload("{}", "input.txt"), 400, "file");
}

async function batches() {
  const input = [line("ä", "one"), "", line("refused", "x", { temperature: -1 }), line("b", "two")].join("\n");
  const made = await create((await upload(input)).id, { metadata: { k: "v" } });
  check(made.object === "batch" && made.metadata.k === "v", "a batch object", made);
  const done = await untilEnd(made.id);
  check(done.status === "completed", "it completes", done);
  check(JSON.stringify(done.request_counts) === '{"total":3,"completed":2,"failed":1}', "counts", done.request_counts);
  const output = (await content(done.output_file_id)).trimEnd().split("\n").map((row) => JSON.parse(row));
  check(output.map((row) => row.custom_id).join() === "ä,b", "output is in input order", output);
  const errors = JSON.parse(await content(done.error_file_id));
  check(errors.response.status_code === 400 && errors.error === null, "the refused one has its answer", errors);

  const faulty = [line("a", "x"), "null", line("a", "x")].join("\n");
  const failed = await untilEnd((await create((await upload(faulty)).id)).id);
  check(failed.status === "failed", "bad lines fail it later", failed);
  const found = failed.errors.data.map((error) => `${error.code}:${error.line}:${error.param}`);
  check(found.join() === "invalid_json_line:2:null,duplicate_custom_id:3:custom_id", "every error is told", found);

  const many = Array.from({ length: 200 }, (_, n) => line(`c${n}`, "x")).join("\n");
  const stopped = await create((await upload(many)).id);
  try {
    const cancelling = await client.batches.cancel(stopped.id);
    check(["cancelling", "cancelled"].includes(cancelling.status), "cancel shows cancelling", cancelling.status);
    check((await untilEnd(stopped.id)).status === "cancelled", "it ends as cancelled");
    check((await client.batches.cancel(stopped.id)).status === "cancelled", "cancel is idempotent");
  } catch (error) {
    if (!(error instanceof OpenAI.ConflictError)) throw error;
    check((await untilEnd(stopped.id)).status === "completed", "it had ended before the cancel");
  }

  const pages = [];
  for await (const batch of client.batches.list({ limit: 1 })) pages.push(batch.id);
  check(pages.length >= 3 && new Set(pages).size === pages.length, "batches page by themselves", pages);

  const unknown = `file-${"0".repeat(32)}`;
  await refused(() => create(unknown), 400, "input_file_id");
  const fresh = (await upload(line("a", "x"))).id;
  await refused(() => create(fresh, { endpoint: "/v1/moderations" }), 400, "endpoint");
  await refused(() => create(fresh, { surprise: 1 }), 400, "surprise");
  await refused(() => client.batches.retrieve(`batch_${"0".repeat(32)}`), 404);
  const headers = { "Idempotency-Key": `js-${Date.now()}` };
  const first = await create(fresh, {}, { headers });
  check((await create(fresh, {}, { headers })).id === first.id, "one key makes one batch");
  await refused(() => create(fresh, { completion_window: "1h" }, { headers }), 409);
}

async function online() {
  const names = [];
  for await (const entry of client.models.list()) names.push(entry.id);
  check(names.includes(model), "the model is listed", names);
  const messages = [{ role: "user", content: "Say something." }];
  const params = { model, messages, max_tokens: 4, temperature: 0 };
  const whole = await client.chat.completions.create(params);
  check(whole.choices[0].message.role === "assistant", "a chat answer", whole);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...params, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  check(text === (whole.choices[0].message.content ?? ""), "the stream says what the whole says", text);
  const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 4 });
  check(completion.choices[0].finish_reason, "a text completion", completion);
  await refused(() => client.chat.completions.create({ ...params, model: "no-such-model" }), 404);
}

const steps = { files, batches };
if (!flags.includes("--skip-online")) steps.online = online;
for (const [name, step] of Object.entries(steps)) {
  console.error(name);
  await step();
}
console.log(`ok ${checks} checks`);
