"""Drives the official OpenAI Python client through the whole life of a batch.

Usage: openai_client.py BASE_URL MODEL [--api-key KEY] [--timeout SECONDS]

BASE_URL ends in /v1. No client option is set besides URL and key. Every check is an
assertion; the last line on stdout is "ok N checks". Exit status 0 means that all held.
"""

import argparse
import io
import json
import sys
import time

import openai
from openai import OpenAI

checks = 0


def check(condition, what, *seen):
    global checks
    checks += 1
    if not condition:
        raise AssertionError(f"{what}: {seen!r}")


def line(custom_id, model, text, **body):
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **body},
        },
        ensure_ascii=False,
    )


def wait_for_end(client, batch_id, limit):
    deadline = time.monotonic() + limit
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        check(time.monotonic() < deadline, "the batch ends in time", batch)
        time.sleep(0.05)


def upload(client, text, name="input.jsonl", **extra):
    return client.files.create(file=(name, text.encode()), purpose="batch", **extra)


def files(client, model):
    text = "\ufeff" + line("a", model, "one") + "\r\n\n" + line("b", model, "two")
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = upload(client, text, "Eingabe ü日.jsonl", expires_after=expiry)
    check(made.object == "file" and made.purpose == "batch", "a file object comes back", made)
    check(made.filename == "Eingabe ü日.jsonl", "the file name may be any Unicode", made.filename)
    check(made.bytes == len(text.encode()), "bytes is the exact size", made.bytes)
    check(made.expires_at == made.created_at + 3600, "expires_after is kept", made)
    check(client.files.content(made.id).read() == text.encode(), "content is the stored bytes, BOM included")
    check(client.files.retrieve(made.id) == made, "retrieve equals create")

    more = [upload(client, line(str(n), model, "x")).id for n in range(4)]
    listed = [file.id for file in client.files.list(limit=2, purpose="batch")]
    check(listed[:4] == more[::-1], "list pages by itself, newest first", listed)
    check(len(set(listed)) == len(listed), "no file is listed twice", listed)
    oldest = [file.id for file in client.files.list(limit=3, order="asc")]
    check(oldest.index(made.id) < oldest.index(more[0]), "order=asc is oldest first")

    gone = client.files.delete(made.id)
    check(gone.deleted is True and gone.id == made.id, "delete says so", gone)
    raises(openai.NotFoundError, lambda: client.files.retrieve(made.id))
    raises(openai.NotFoundError, lambda: client.files.content(made.id))
    raises(openai.BadRequestError, lambda: client.files.create(file=("x.jsonl", b"{}"), purpose="batch_output"), "purpose")
    raises(openai.BadRequestError, lambda: upload(client, "{}", "input.txt"), "file")


def raises(kind, call, param=None):
    try:
        result = call()
    except kind as error:
        body = error.body
        check(isinstance(body, dict), "the error body is an object", body)
        check(set(body) == {"message", "type", "param", "code"}, "all four keys are there", body)
        check(error.request_id, "the answer carries a request id")
        if param is not None:
            check(error.param == param, "the parameter is named", error.param)
        return error
    raise AssertionError(f"{kind.__name__} was expected, got {result!r}")


def batch_to_the_end(client, model, limit):
    refused = line("refused ✗", model, "x", temperature=-1)
    text = "\n".join([line("id-ä", model, "one"), "", refused, line("b", model, "two")]) + "\n"
    made = client.batches.create(
        input_file_id=upload(client, text).id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"purpose": "client test"},
    )
    check(made.object == "batch" and made.id.startswith("batch_"), "a batch object comes back", made)
    check(made.metadata == {"purpose": "client test"}, "metadata is kept", made.metadata)
    check(made.status in ("validating", "in_progress", "finalizing", "completed"), "create does not wait", made.status)

    done = wait_for_end(client, made.id, limit)
    check(done.status == "completed", "the batch completes", done)
    counts = done.request_counts
    check((counts.total, counts.completed, counts.failed) == (3, 2, 1), "counts are those of the files", counts)
    check(done.completed_at >= done.finalizing_at >= done.in_progress_at >= done.created_at, "timestamps rise", done)
    check(done.model == model, "the model is shown", done.model)
    check(done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens, "usage adds up", done.usage)

    output = [json.loads(row) for row in client.files.content(done.output_file_id).text.splitlines()]
    check([row["custom_id"] for row in output] == ["id-ä", "b"], "output is in input order", output)
    for row in output:
        check(set(row) == {"id", "custom_id", "response", "error"}, "exactly four keys", row)
        check(row["response"]["status_code"] == 200 and row["error"] is None, "a good line", row)
        check(row["response"]["body"]["choices"][0]["message"]["role"] == "assistant", "the body is an answer", row)
    errors = [json.loads(row) for row in client.files.content(done.error_file_id).text.splitlines()]
    check([row["custom_id"] for row in errors] == ["refused ✗"], "the refused line is in the error file", errors)
    check(errors[0]["response"]["status_code"] == 400 and errors[0]["error"] is None, "with its HTTP answer", errors)
    check(set(errors[0]["response"]["body"]["error"]) >= {"message", "type", "param", "code"}, "and the reason", errors)
    outputs = [file.id for file in client.files.list(purpose="batch_output")]
    check(done.output_file_id in outputs and done.error_file_id in outputs, "published files are listed", outputs)
    raises(openai.ConflictError, lambda: client.batches.cancel(done.id))
    client.files.delete(done.output_file_id)
    check(client.batches.retrieve(done.id).output_file_id == done.output_file_id, "deleting a file keeps the batch")
    return done


def batch_that_fails_validation(client, model, limit):
    text = "\n".join([line("a", model, "x"), "[1,2]", line("a", model, "x"), line("s", model, "x", stream=True)])
    made = client.batches.create(
        input_file_id=upload(client, text).id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    failed = wait_for_end(client, made.id, limit)
    check(failed.status == "failed" and failed.failed_at, "bad lines fail the batch later, not the create", failed)
    found = [(error.code, error.line, error.param) for error in failed.errors.data]
    wanted = [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 3, "custom_id"),
        ("invalid_request", 4, "body.stream"),
    ]
    check(found == wanted, "every error has code, physical line and param", found)
    check(failed.output_file_id is None and failed.error_file_id is None, "nothing is published", failed)


def batch_that_is_cancelled(client, model, limit):
    text = "\n".join(line(f"c{n}", model, "x") for n in range(200))
    made = client.batches.create(
        input_file_id=upload(client, text).id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    try:
        cancelling = client.batches.cancel(made.id)
    except openai.ConflictError:
        # A very fast server may have finished it; then there is nothing to cancel.
        check(wait_for_end(client, made.id, limit).status == "completed", "it had ended")
        return
    check(cancelling.status in ("cancelling", "cancelled"), "cancel shows cancelling", cancelling.status)
    ended = wait_for_end(client, made.id, limit)
    check(ended.status == "cancelled" and ended.cancelled_at, "it ends as cancelled", ended)
    check(client.batches.cancel(made.id).status == "cancelled", "cancel is idempotent")
    lines = 0
    for file_id in (ended.output_file_id, ended.error_file_id):
        if file_id is not None:
            lines += len(client.files.content(file_id).text.splitlines())
    check(lines == ended.request_counts.total, "one line per request", lines, ended.request_counts)


def listing(client):
    pages = [batch.id for batch in client.batches.list(limit=1)]
    check(len(pages) >= 3 and len(set(pages)) == len(pages), "batches page by themselves", pages)
    newest_first = [batch.created_at for batch in client.batches.list(limit=100)]
    check(newest_first == sorted(newest_first, reverse=True), "newest first", newest_first)


def refusals(client, model):
    create = lambda **changed: client.batches.create(
        **{"input_file_id": upload(client, line("a", model, "x")).id, "endpoint": "/v1/chat/completions",
           "completion_window": "24h", **changed}
    )
    unknown = "file-" + "0" * 32
    raises(openai.BadRequestError, lambda: create(input_file_id=unknown), "input_file_id")
    raises(openai.BadRequestError, lambda: create(endpoint="/v1/moderations"), "endpoint")
    raises(openai.BadRequestError, lambda: create(completion_window="4m"), "completion_window")
    raises(openai.BadRequestError, lambda: create(metadata={"k" * 65: "v"}))
    raises(openai.BadRequestError, lambda: create(extra_body={"surprise": 1}), "surprise")
    raises(openai.NotFoundError, lambda: client.batches.retrieve("batch_" + "0" * 32))
    raises(openai.NotFoundError, lambda: client.batches.cancel("batch_nonsense"))
    raises(openai.BadRequestError, lambda: client.batches.list(limit=101), "limit")
    raises(openai.BadRequestError, lambda: client.batches.list(after="batch_" + "0" * 32), "after")
    other = client.files.create(file=("notes.txt", io.BytesIO(b"hello")), purpose="user_data")
    raises(openai.BadRequestError, lambda: create(input_file_id=other.id), "input_file_id")
    key = {"Idempotency-Key": f"client-test-{time.time_ns()}"}
    file_id = upload(client, line("a", model, "x")).id
    first = create(input_file_id=file_id, extra_headers=key)
    check(create(input_file_id=file_id, extra_headers=key).id == first.id, "one key makes one batch")
    raises(openai.ConflictError, lambda: create(input_file_id=file_id, completion_window="1h", extra_headers=key))


def online(client, model):
    check(model in [entry.id for entry in client.models.list()], "the model is listed")
    check(client.models.retrieve(model).id == model, "the model is found by name")
    messages = [{"role": "user", "content": "Say something."}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0)
    check(whole.object == "chat.completion" and whole.choices[0].message.role == "assistant", "a chat answer", whole)
    check(whole.usage.completion_tokens <= 4, "max_tokens holds", whole.usage)
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0, stream=True)
    chunks = list(stream)
    check(chunks and all(chunk.object == "chat.completion.chunk" for chunk in chunks), "chunks come", len(chunks))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == (whole.choices[0].message.content or ""), "the stream says what the whole says", text)
    check(chunks[-1].choices[0].finish_reason is not None, "the last chunk has its reason", chunks[-1])
    text = client.completions.create(model=model, prompt="Once", max_tokens=4)
    check(text.object == "text_completion" and text.choices[0].finish_reason, "a text completion", text)
    missing = lambda: client.chat.completions.create(model="no-such-model", messages=messages)
    raises(openai.NotFoundError, missing)
    raises(openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=messages, max_tokens=0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("model")
    parser.add_argument("--api-key", default="any")
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--skip-online", action="store_true")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    steps = [
        ("files", lambda: files(client, options.model)),
        ("batch to the end", lambda: batch_to_the_end(client, options.model, options.timeout)),
        ("failed validation", lambda: batch_that_fails_validation(client, options.model, options.timeout)),
        ("cancel", lambda: batch_that_is_cancelled(client, options.model, options.timeout)),
        ("listing", lambda: listing(client)),
        ("refusals", lambda: refusals(client, options.model)),
    ]
    if not options.skip_online:
        steps.append(("online", lambda: online(client, options.model)))
    for name, step in steps:
        print(name, file=sys.stderr)
        step()
    print(f"ok {checks} checks")


if __name__ == "__main__":
    main()
